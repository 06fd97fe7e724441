"""`atoll plan`: what fits, what each knob does, what would fit instead."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from appliance.cli import app as tree
from appliance.service.planning.planner import Knobs, fitting, plan, what_if
from appliance.service.presets.catalogue import catalogue
from engine.config import EngineConfig
from engine.plan import plan_engine

SIZING = Path(__file__).resolve().parents[4] / "docs/en/sizing.md"
CARDS, MODELS = catalogue().cards, catalogue().models
GEMMA, QWEN = MODELS["gemma4-12b"].directory, MODELS["qwen3.6-27b"].directory


def run(*arguments: str):
    return CliRunner().invoke(tree.app, ["plan", *arguments])


def test_shapes_that_we_wrote_have_the_published_sizes() -> None:
    """Bytes of KV a token and billions of parameters, from the model cards."""
    published = {"gemma4-12b": (16_384, 327_680, 11.9), "gemma4-e4b": (16_384, 40_960, 7.46),
                 "qwen3.6-122b-a10b": (24_576, None, 122.5), "qwen3.6-397b-a17b": (30_720, None, 397)}  # fmt: skip
    huge = CARDS["b200"].model_copy(update={"memory_gib": 2000.0})
    for name, (full, window, billions) in published.items():
        found = plan(MODELS[name].directory, huge, Knobs())
        assert found is not None
        groups = {group["window"] is None: group["bytes_per_token"] for group in found.numbers["kv_groups"]}
        assert groups == {True: full} | ({False: window} if window else {})
        weights = found.numbers["parts"]["weights"] + found.numbers["in_host_memory"]
        assert weights / 2e9 == pytest.approx(billions, rel=0.025), name


def test_the_knobs_share_one_budget() -> None:
    base = plan(QWEN, CARDS["h100"], Knobs(context=32_768))
    assert base is not None
    then = {text: found for _, text, found in what_if(QWEN, CARDS["h100"], base)}
    assert then["context 16,384"].users > base.users > then["context 65,536"].users
    assert then["KV cache in fp8"].users > base.users
    assert then["GPU memory share 0.95"].users > base.users > then["GPU memory share 0.85"].users
    doubled = then[f"{base.users * 2:,} at once"]
    assert doubled.context < base.context
    for found in filter(None, then.values()):  # each is a plan of the engine's, not a rule of thumb
        k = found.knobs
        config = EngineConfig(
            QWEN, max_model_len=found.context, max_num_seqs=k.sequences, quantization=k.quantization,
            kv_cache_dtype=k.kv_cache_dtype, gpu_memory_utilization=k.gpu_memory_utilization,
        )
        assert plan_engine(config, CARDS["h100"].planned).full_length_requests >= found.users


def test_what_would_fit_instead_does_fit() -> None:
    asked = Knobs(context=131_072, users=8)
    assert plan(QWEN, CARDS["h100"], asked) is None
    ways = {kind: found for kind, _, _, found in fitting(QWEN, CARDS["h100"], asked)}
    assert ways.keys() == {"users", "context", "gpu"} | (ways.keys() & {"precision"})
    assert ways["users"].context == 131_072
    assert ways["users"].users < 8
    assert ways["context"].users >= 8
    assert ways["context"].context < 131_072
    assert ways["gpu"].context == 131_072
    assert ways["gpu"].users >= 8


def test_the_command_says_what_fits_and_what_would() -> None:
    found = json.loads(run("gemma4-12b", "--gpu", "l40s", "--json").stdout)
    assert found["fits"]
    taken = sum(found["plan"]["parts"].values()) + found["plan"]["request_table"] + found["plan"]["kv_cache"]
    assert taken <= found["plan"]["usable"]
    refused = run("qwen3.6-27b", "--gpu", "l40s", "--context", "131072", "--users", "8")
    assert refused.exit_code == 3
    assert "What would fit instead" in refused.stderr
    assert "a shorter context" in refused.stderr


def test_a_preset_can_be_planned_with_one_value_changed() -> None:
    found = json.loads(run("gemma4-31b/chat", "--gpu", "h100", "--context", "16384", "--json").stdout)
    assert found["context"] == 16_384
    assert found["asked"]["quantization"] == "fp8"


def test_a_directory_with_a_config_is_enough(tmp_path: Path) -> None:
    shutil.copy(GEMMA / "config.json", tmp_path)
    own = json.loads(run(str(tmp_path), "--gpu", "h100", "--json").stdout)
    known = json.loads(run("gemma4-12b", "--gpu", "h100", "--json").stdout)
    assert own["plan"] == known["plan"]


@pytest.mark.parametrize(("arguments", "says"), [
    (["--gpu", "h100"], "No model is named"),
    (["gemma4-12b", "--gpu", "h1000"], "No GPU called 'h1000'"),
    (["gemma4-12b", "--gpu", "h100", "--context", "0"], "out of range"),
    (["gemma4-12b", "--gpu", "h100", "--context", "-5"], "out of range"),
    (["gemma4-12b", "--gpu", "h100", "--context", "300000"], "longer than the model's 262,144"),
    (["gemma4-12b", "--gpu", "h100", "--users", "99999999999999999999"], "out of range"),
    (["gemma4-12b", "--gpu", "h100", "--gpu-memory-utilization", "nan"], "out of range"),
    (["gemma4-12b", "--gpu", "h100", "--gpu-memory-utilization", "1.5"], "out of range"),
    (["gemma4-12b", "--gpu", "h100", "--quantization", "int3"], "--quantization int3 is not available"),
    (["gemma4-12b", "--gpu", "h100", "--kv-cache-dtype", "q4"], "--kv-cache-dtype q4 is not available"),
    (["no-such-model", "--gpu", "h100"], "No model called 'no-such-model'"),
])  # fmt: skip
def test_nonsense_is_refused_in_a_sentence(arguments: list[str], says: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert says in result.stderr


def test_a_damaged_config_is_refused(tmp_path: Path) -> None:
    for text in ("{", "[]", '{"architectures": ["Nobody"]}', '{"architectures": ["Qwen3ForCausalLM"]}'):
        (tmp_path / "config.json").write_text(text)
        result = run(str(tmp_path), "--gpu", "h100")
        assert result.exit_code == 2, text
        assert "error" in result.stderr
        assert result.exception is None or isinstance(result.exception, SystemExit)


def test_the_table_has_every_model_that_one_gpu_serves() -> None:
    """As the page shows it, which is what the planner says (tests/appliance/test_docs.py)."""
    lines = SIZING.read_text("utf-8").splitlines()
    for model in MODELS.values():
        assert any(line.startswith(f"| {model.title} bf16") for line in lines) is not model.needs_several_gpus


def test_listing_help_needs_no_torch() -> None:
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom appliance.cli.app import app\n"
        "for words in (['plan', '--help'], ['presets', '--help']):\n"
        "    assert CliRunner().invoke(app, words).exit_code == 0\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
