"""A medium carries compiled GPU kernels: built by its own packages, signed, laid out read-only, found by the engine.

The real compiler runs, for sm_90, without a GPU; PyTorch and Triton come from this environment.
"""

import importlib.util
import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from runtime_kit import FEW, ROOT, SMALL, bare_path, copy, flip, install, sign_again, trees, wheelhouse
from typer.testing import CliRunner

from appliance.cli.app import app
from appliance.cli.view.step_lines import StepLines
from installer.release.code_tree import verify_code
from offline_bundle.errors import BundleError
from offline_bundle.runtime import kernels as runtime_kernels
from offline_bundle.runtime.build import BuiltRuntime, build_runtime
from offline_bundle.runtime.kernels import Wish
from offline_bundle.runtime.verify import verify_runtime
from offline_bundle.signing.keys import KeyPair, load_trusted

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")

TINY = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 128, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "torch_dtype": "bfloat16",
    "tie_word_embeddings": True, "eos_token_id": 0,
}  # fmt: skip
FLAGS = ("--max-num-seqs", "4")
# What a start on an H100 would find: the kernels that it needs, those that it would have to compile, and whether the
# model is known before anything is loaded.
FOUND = """
import json, os, sys
from pathlib import Path
from engine.kernels.runtime import compile_ahead, prebuilt
from engine.models.config.model import ModelConfig
from engine.prebuild.gpus import GPUS
from engine.prebuild.listing import kernels_for
from engine.prebuild.wishes import Wish
config = Wish(sys.argv[1], "h100", tuple(sys.argv[2:])).config()
compilation = compile_ahead.Compilation((9, 0))
compilation.add(kernels_for(config, *GPUS["h100"]))
raw = ModelConfig.load(config.model).raw | {"transformers_version": "99", "bos_token_id": 7}
print(json.dumps([len(compilation._jobs), len(compilation._missing()), prebuilt.of_model(raw, (9, 0))]))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("model")
    (place / "config.json").write_text(json.dumps(TINY))
    return place


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Triton's, of the user who builds."""
    return tmp_path_factory.mktemp("triton")


def build(
    out: Path, vendor: KeyPair, own_wheel: Path, cache: Path, wishes: list[Wish], told: list, packages: list[str] = FEW
) -> BuiltRuntime:
    """With few packages it is built sooner and compiles as well. A medium that is installed needs all of `SMALL`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(cache))
        patch.setenv("TRITON_DEFAULT_FP_FUSION", "0")  # must not reach the compiler
        return build_runtime(
            out, private_key=vendor.private_path, sequence=5, packages=packages, own_wheel=own_wheel,
            wheels=wheelhouse(packages), kernels=wishes, progress=lambda *step: told.append(step),
        )  # fmt: skip


def verify(medium: Path, vendor: KeyPair) -> None:
    verify_runtime(medium / "runtime", load_trusted([vendor.public_path], medium))


@pytest.fixture(scope="module")
def built(tmp_path_factory, vendor, own_wheel, cache, model) -> tuple[BuiltRuntime, list]:
    told: list[tuple[str, int, int]] = []
    wishes = [Wish(model, "h100", FLAGS), Wish(model, "h200", FLAGS)]
    return build(tmp_path_factory.mktemp("medium") / "medium", vendor, own_wheel, cache, wishes, told, SMALL), told


def test_the_medium_has_them_signed(built, vendor):
    made, told = built
    (capability, (kernels, size)), = made.kernels.made.items()
    assert capability == "9.0"
    assert made.kernels.problems == []
    entries = {f.path: f for f in made.manifest.files if f.role == "kernels"}
    assert set(entries) == {"kernels/9.0/index.json", "kernels/9.0/kernels.bin"}
    assert sum(entry.size for entry in entries.values()) == size
    index = json.loads((made.medium / "runtime/kernels/9.0/index.json").read_bytes())
    assert len(index["kernels"]) == kernels > 20
    assert made.manifest.requires.disk_bytes > made.manifest.total_bytes
    assert ("unpack", 1, 1) in told
    assert ("list", 2, 2) in told
    assert ("compile", kernels, kernels) in told
    verify(made.medium, vendor)


def test_the_commands_show_them(built, vendor):
    made, runtime = built[0], built[0].medium / "runtime"
    for command in (["inspect", runtime], ["verify", runtime, "--key", vendor.public_path]):
        shown = CliRunner().invoke(app, ["bundle", *map(str, command)])
        assert shown.exit_code == 0, shown.output
        size = sum(size for _, size in made.kernels.made.values()) / 1024
        assert f"kernels    for compute capability 9.0, {size:.1f} KiB" in shown.output
        told = CliRunner().invoke(app, ["bundle", *map(str, command), "--json"])
        assert json.loads(told.output)["kernels"] == ["9.0"]


def test_progress_is_shown_in_steps(capsys):
    lines = StepLines()
    for done in range(4):
        lines.report("Compiling kernels", done, 3)
    lines.report("Listing", 0, 3)
    assert capsys.readouterr().err.splitlines() == [
        "Compiling kernels: 0 of 3", "Compiling kernels: 3 of 3", "Listing: 0 of 3"
    ]  # fmt: skip


def test_the_next_medium_compiles_nothing_twice_and_reports_a_model_that_cannot_be_listed(
    built, tmp_path, vendor, own_wheel, cache, model
):
    odd = tmp_path / "odd"
    odd.mkdir()
    (odd / "config.json").write_text(json.dumps(TINY | {"architectures": ["Nobody"]}))
    before = {path: path.stat().st_mtime_ns for path in cache.rglob("*.cubin")}
    wishes = [Wish(odd, "h100", FLAGS), Wish(model, "h100", FLAGS)]
    made = build(tmp_path / "medium", vendor, own_wheel, cache, wishes, [])
    problem, = made.kernels.problems
    assert "Nobody" in problem
    assert made.kernels.made == built[0].kernels.made, "the others are compiled"
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*.cubin")} == before
    for name in ("index.json", "kernels.bin"):
        first, second = (m.medium / "runtime/kernels/9.0" / name for m in (built[0], made))
        assert first.read_bytes() == second.read_bytes(), "the same kernels make the same bytes"


def test_a_gpu_that_the_packages_do_not_know_ends_the_build(tmp_path, vendor, own_wheel, cache, model):
    with pytest.raises(BundleError, match=r"kernels could not be compiled.*h1000") as caught:
        build(tmp_path / "medium", vendor, own_wheel, cache, [Wish(model, "h1000", FLAGS)], [])
    assert "--gpu none" in caught.value.hint
    assert not (tmp_path / "medium/runtime").exists()


def test_a_disk_without_room_to_unpack_is_named(tmp_path, vendor, own_wheel, cache, model, monkeypatch):
    monkeypatch.setattr(runtime_kernels, "_SLACK", 1 << 60)
    with pytest.raises(BundleError, match="unpacking the packages to compile kernels takes") as caught:
        build(tmp_path / "medium", vendor, own_wheel, cache, [Wish(model, "h100", FLAGS)], [])
    assert "TMPDIR" in caught.value.hint
    assert caught.value.exit_code == 30


@pytest.mark.parametrize("name", ["kernels.bin", "index.json"])
def test_changed_kernels_are_refused(built, tmp_path, vendor, name):
    medium = copy(built[0].medium, tmp_path / "medium")
    flip(medium / "runtime/kernels/9.0" / name)
    with pytest.raises(BundleError, match=f"kernels/9.0/{name}") as caught:
        verify(medium, vendor)
    assert caught.value.exit_code == 11


def test_only_data_may_lie_among_them(built, tmp_path, vendor):
    """Even if a trusted key signed something else."""
    medium = copy(built[0].medium, tmp_path / "medium")
    (medium / "runtime/kernels/9.0/evil.so").write_bytes(b"\x7fELF")

    def add(manifest):
        manifest["files"] = sorted(
            [*manifest["files"], {"path": "kernels/9.0/evil.so", "role": "kernels", "size": 4, "sha256": "0" * 64}],
            key=lambda entry: entry["path"],
        )

    sign_again(medium, vendor, add)
    with pytest.raises(BundleError, match="does not belong there"):
        verify(medium, vendor)


needs_unshare = pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare(1) of util-linux")


@pytest.fixture(scope="module")
def tree(tmp_path_factory, built, vendor) -> Path:
    base = tmp_path_factory.mktemp("installed")
    done = install(
        built[0].medium, bare_path(base / "path"), "--prefix", base / "p", "--trust-key", vendor.public_path
    )
    assert done.returncode == 13, done.stderr  # there is no model on the medium
    (name,) = trees(base / "p")
    return base / "p/opt/atoll/code" / name


@needs_unshare
def test_an_install_lays_them_out_read_only_and_a_check_covers_them(tree):
    place = tree / "share/kernels/9.0"
    assert sorted(path.name for path in place.iterdir()) == ["index.json", "kernels.bin"]
    for path in place.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o444
    assert verify_code(tree) == []
    path = place / "kernels.bin"
    whole = path.read_bytes()
    path.chmod(0o644)
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    (place / "more").write_bytes(b"")
    assert verify_code(tree) == ["share/kernels/9.0/kernels.bin", "share/kernels/9.0/more"]
    path.write_bytes(whole)
    (place / "more").unlink()
    path.chmod(0o444)


@needs_unshare
def test_the_installed_code_finds_all_of_them(tree, model, tmp_path):
    """start.py names their directory; what the engine of this checkout needs is in it, for it is the same code."""
    start = (tree / "start.py").read_text().replace("from appliance.cli import main", "main = lambda: None")
    (tmp_path / "start.py").write_text(start.replace("os.path.realpath(__file__)", repr(str(tree / "start.py"))))
    show = "import os, runpy; runpy.run_path('start.py'); print(os.environ['ATOLL_PREBUILT_KERNELS'])"
    clean = {"PATH": os.environ["PATH"], "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    run = {"capture_output": True, "text": True, "cwd": tmp_path}
    named = subprocess.run([sys.executable, "-c", show], env=clean, check=True, **run).stdout.strip()
    assert named == str(tree / "share/kernels")
    kept = subprocess.run([sys.executable, "-c", show], env=clean | {"ATOLL_PREBUILT_KERNELS": ""}, check=True, **run)
    assert kept.stdout.strip() == "", "an operator can switch them off"

    variables = clean | {"ATOLL_PREBUILT_KERNELS": named, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", FOUND, model, *FLAGS], env=variables, check=False, **run)
    assert done.returncode == 0, done.stderr
    jobs, missing, known = json.loads(done.stdout)
    assert jobs > 20
    assert missing == 0
    assert known, "another version of transformers, or other token ids, are the same model"
    assert done.stderr == ""
    other = subprocess.run(
        [sys.executable, "-c", FOUND, model, *FLAGS, "--kv-cache-dtype", "fp8"], env=variables, check=True, **run
    )
    jobs, missing, known = json.loads(other.stdout)
    assert 0 < missing < jobs, "flags that nobody foresaw need some more"
