"""Which kernels a medium carries by default: those of every preset, on every GPU that presets know."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from appliance.cli import app as tree
from appliance.cli.operate.status import rows
from appliance.engines import _plan_in
from appliance.service.presets.catalogue import catalogue
from appliance.service.presets.kernels import wishes
from appliance.service.presets.resolve import find, names
from engine.prebuild.wishes import Wish
from installer.base.errors import ExitCode, InstallError

ROOT = Path(__file__).parents[3]
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")


@needs_triton
def test_every_card_of_the_presets_is_a_gpu_that_kernels_are_compiled_for():
    from engine.prebuild.gpus import GPUS

    for name, card in catalogue().cards.items():
        target, total = GPUS[name]
        assert ".".join(map(str, target.capability)) == card.capability, name
        assert target.multiprocessors == card.sms, name
        assert abs(total / 2**30 - card.memory_gib) < 1, name


def test_all_models_that_fit_a_card_are_wished_for_once_in_each_format():
    card = catalogue().cards["h100"]
    found = wishes(["h100"], [])
    fit = set()
    for name in names():
        try:
            preset = find(name, card)
        except InstallError:
            continue
        fit.add((preset.model.directory, preset.planned.knobs.quantization, preset.planned.knobs.kv_cache_dtype))
    assert len(found) == len(fit) == 10
    assert {wish.model for wish in found} == {directory for directory, *_ in fit}
    for wish in found:
        Wish(str(wish.model), wish.gpu, wish.flags).config()  # the engine takes these flags
    assert {wish.gpu for wish in found} == {"h100"}


# In a process of its own: others of this one run Triton's interpreter.
LIST = """
import json, sys
from engine.prebuild.listers import list_one
from engine.prebuild.wishes import Wish
print(json.dumps([list_one(Wish(*wish)).lines for wish in json.loads(sys.argv[1])]))
"""


@needs_triton
def test_the_preset_with_most_sequences_needs_every_kernel_of_the_others():
    """So the others need no list of their own."""
    (wish,), card = wishes(["l4"], ["gemma4-e2b"]), catalogue().cards["l4"]
    others = [find(f"gemma4-e2b/{name}", card) for name in ("chat", "single")]
    assert wish.flags not in [tuple(preset.argv) for preset in others]
    asked = [[str(wish.model), "l4", flags] for flags in (wish.flags, *(preset.argv for preset in others))]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", LIST, json.dumps(asked)], env=environment, cwd=ROOT, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    most, *few = map(set, json.loads(done.stdout))
    for lines in few:
        assert len(lines) > 20
        assert lines <= most


@pytest.mark.parametrize(
    ("gpus", "models", "why"),
    [(["none", "h100"], [], "excludes"), (["h1000"], [], "No GPU called"), (["h100"], ["gpt-9"], "No model called"),
     (["l4"], ["gemma4-31b"], "None of these models fits")],
)  # fmt: skip
def test_what_cannot_be_compiled_for_is_refused(gpus, models, why):
    with pytest.raises(InstallError, match=why) as caught:
        wishes(gpus, models)
    assert caught.value.exit_code == ExitCode.USAGE


def test_none_and_directories(tmp_path):
    assert wishes(["none"], []) == []
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "awq"}}))
    assert [wish.flags for wish in wishes(["h100"], [str(tmp_path)])] == [()]
    own = wishes(["h100", "80GB", "l40s"], ["qwen3-8b"])
    assert [(wish.gpu, wish.flags) for wish in own if wish.gpu == "h100"] == [
        ("h100", ()), ("h100", ("--quantization", "fp8"))
    ]  # fmt: skip
    assert len(own) == 2 * len({wish.gpu for wish in own})


@pytest.mark.parametrize(
    ("options", "why"),
    [(["--torch", "cpu", "--gpu", "h100"], "the CPU build has no kernels"), (["--gpu", "h1000"], "No GPU called")],
)
def test_the_command_refuses_before_it_fetches_anything(tmp_path, options, why):
    done = CliRunner().invoke(tree.app, ["bundle", "build", "--runtime", str(tmp_path / "medium"), "--key",
                                         str(tmp_path / "key"), "--sequence", "1", *options])  # fmt: skip
    assert done.exit_code == 2
    assert why in " ".join(done.output.split())
    assert not (tmp_path / "medium").exists()


def test_status_says_where_the_kernels_came_from():
    line = json.dumps({"message": "Kernels: 43 came with the release, 2 were in the cache, 1 were compiled here."})
    counts = _plan_in(["no json: Kernels: x", line, json.dumps({"message": "ready"})])["kernels"]
    assert counts == {"release": 43, "cached": 2, "compiled": 1}
    facts = {
        "state": "serving", "healthy": True, "busy": None, "endpoint": None, "endpoints": [], "gpu": None,
        "service": {"uptime_s": None, "pid": 1, "phase": "running", "restarts": 0}, "units": [], "problems": [],
        "release": {"committed": None}, "replicas": {}, "health": {"ok": True, "said": "ok"}, "smoke": None,
        "models": [{"name": "m", "instance": "m", "version": "1.0.0", "sequence": 1, "digest": "d" * 64,
                    "key_fingerprint": "f" * 64}], "engines": {"m": {"kernels": counts}},
        "last_verify": None, "licences": [], "certificate": None, "keys": [], "disk": None, "unseen": [],
    }  # fmt: skip
    shown = dict(rows(facts))
    assert shown["kernels"] == "43 came with the release, 2 were in the cache, 1 were compiled at the last start"
    facts["engines"]["m"]["kernels"] = {}  # a CPU
    assert "kernels" not in dict(rows(facts))
