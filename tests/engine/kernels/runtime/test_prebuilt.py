"""Kernels that came with the release: written without a GPU, found again, and never trusted when they are damaged."""

import json
import os
import subprocess

import pytest

pytest.importorskip("triton")

# In a process of its own: the tests beside this one run Triton's interpreter, which compiles nothing.
PREPARED = """
import json, logging, os, sys
from pathlib import Path
import torch
logging.basicConfig(format="%(message)s", level="WARNING")
from engine.kernels.pointwise import fused, norm
from engine.kernels.runtime import compile_ahead, launcher, prebuilt
from engine.prebuild import store

def meta(*shape):
    return torch.empty(*shape, dtype=torch.bfloat16, device="meta")

with launcher.recording() as found:
    for size in (256, 512, 1024, 2048):
        norm.rms_norm(meta(3, size), meta(size), 1e-6)
    fused.gate_mul(meta(3, 1536), meta(3, 1536), "silu")
jobs = sorted(found, key=lambda job: (job.kernel.name != "_rms_norm_kernel", launcher.variant_key(job, (9, 0))))
lines = [compile_ahead.line_of(job, (9, 0)) for job in jobs]
place = Path(sys.argv[1])
os.environ[prebuilt.VARIABLE] = str(place)
code_of = lambda job: next(launcher._machine_codes(job, (9, 0)))
"""
WRITE = """
steps = []
errors = store.compile_into(place, lines[:3], (9, 0), ["one"], lambda done, total: steps.append((done, total)))
again = store.compile_into(place, lines, (9, 0), ["two"])
bad = launcher.Job(jobs[0].kernel, jobs[0].types[:-1], *jobs[0][2:])
refused = store.compile_into(place, [compile_ahead.line_of(bad, (9, 0))], (9, 0))
only = place / "only"
store.compile_into(only, lines[:4], (9, 0), ["old"])
store.compile_into(only, lines[2:], (9, 0), ["new"], add=False)
left = prebuilt.read_index(only / "9.0/index.json")
index = prebuilt.read_index(place / "9.0/index.json")
print(json.dumps({
    "steps": steps, "errors": [errors, again], "refused": list(refused), "models": sorted(index.models),
    "kernels": len(index.kernels), "files": sorted(path.name for path in (place / "9.0").iterdir()),
    "left": [len(left.kernels), sorted(left.models), left.size == (only / "9.0/kernels.bin").stat().st_size],
    "same": [code_of(job) == ("as it came with the release", launcher.machine_code(job, (9, 0))) for job in jobs],
    "for a model": prebuilt.of_model({}, (9, 0)), "for another GPU": prebuilt.for_capability((8, 0)) is None,
}))
"""
READ = """
missing = compile_ahead.Compilation((9, 0))
missing.add(jobs)
print(json.dumps({
    "missing": len(missing._missing()),
    "from": [code_of(job)[0] for job in jobs],
    "same": all(code_of(job)[1] == launcher.machine_code(job, (9, 0)) for job in jobs),
}))
"""


@pytest.fixture(scope="module")
def run(compiling):
    def run_script(script, place, cache, **variables):
        done = compiling.run("-c", PREPARED + script, place, TRITON_CACHE_DIR=str(cache), **variables)
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout), done.stderr.splitlines()

    return run_script


@pytest.fixture(scope="module")
def written(tmp_path_factory, run):
    place, cache = tmp_path_factory.mktemp("prebuilt"), tmp_path_factory.mktemp("cache")
    return place, cache, run(WRITE, place, cache)[0]


@pytest.fixture
def cache(written):
    """Triton's, with the same kernels: what is compiled in a test comes from there."""
    return written[1]


@pytest.fixture
def place(written, tmp_path):
    """A copy of what was written, to be damaged."""
    copy = tmp_path / "kernels"
    subprocess.run(["cp", "-a", written[0], copy], check=True)
    return copy


def test_what_is_written_is_what_would_be_compiled(written):
    report = written[2]
    assert report == {
        "steps": [[0, 3], [1, 3], [2, 3], [3, 3]], "errors": [{}, {}], "refused": ["_rms_norm_kernel"],
        "models": ["one", "two"], "kernels": 5, "files": ["index.json", "kernels.bin"],
        "left": [3, ["new"], True], "same": [True] * 5, "for a model": False,
        "for another GPU": True,
    }  # fmt: skip


def test_a_start_finds_them_elsewhere_and_compiles_nothing(run, place, cache):
    report, log = run(READ, place, cache)
    assert report == {"missing": 0, "from": ["as it came with the release"] * 5, "same": True}
    assert log == []


def change_a_kernel(place):
    path = place / "9.0/kernels.bin"
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)


def name_another_place(place):
    index = json.loads((place / "9.0/index.json").read_bytes())
    first = min(index["kernels"].values(), key=lambda entry: entry[4])
    first[4] += 16
    first[5] -= 16
    (place / "9.0/index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("damage", [change_a_kernel, name_another_place])
def test_a_damaged_kernel_is_compiled_here_and_the_others_are_used(run, place, cache, damage):
    damage(place)
    report, log = run(READ, place, cache)
    assert report["missing"] == 1
    assert sorted(report["from"]) == ["as it came with the release"] * 4 + ["from the cache"]
    assert report["same"]
    assert len(log) == 1
    assert "is ignored and compiled here" in log[0]


def cut_the_index(place):
    path = place / "9.0/index.json"
    path.write_bytes(path.read_bytes()[:-100])


def change_the_index(place, **values):
    path = place / "9.0/index.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | values))


WHOLE = [
    (cut_the_index, "its index is not valid JSON"),
    (lambda place: (place / "9.0/index.json").unlink(), "No such file"),
    (lambda place: (place / "9.0/kernels.bin").unlink(), "No such file"),
    (lambda place: os.truncate(place / "9.0/kernels.bin", 1000), "kernels.bin has 1000 bytes instead of"),
    (lambda place: change_the_index(place, format=1), "not of format 3"),
    (lambda place: change_the_index(place, kernels={"a": ["name", 4, -1, 0, 9, "0"]}), "its index is malformed"),
    (lambda place: change_the_index(place, kernels={"a": ["name", 4, 0, 0, 0, "0"]}), "its index is malformed"),
    (lambda place: change_the_index(place, kernels={"a": ["name", 4, 0]}), "its index is malformed"),
    (lambda place: change_the_index(place, kernels=[1]), "its index is malformed"),
    (lambda place: change_the_index(place, toolchain="0"), "another version of Triton"),
    (lambda place: (place / "9.0").chmod(0o777), "others can write to that directory"),
    (lambda place: (place / "9.0/index.json").chmod(0o666), "others can write to index.json"),
    (lambda place: (place / "9.0/kernels.bin").chmod(0o666), "others can write to kernels.bin"),
]


@pytest.mark.parametrize(("damage", "why"), WHOLE)
def test_kernels_that_cannot_be_believed_are_all_compiled_here(run, place, cache, damage, why):
    damage(place)
    report, log = run(READ, place, cache)
    assert report == {"missing": 5, "from": ["from the cache"] * 5, "same": True}
    assert len(log) == 1
    assert why in log[0]


# The driver's answers on a machine that has none: it refuses the first image, or every one, as a driver does that is
# older than the assembler.
REFUSED = """
import ctypes
from engine.kernels.runtime import driver as cuda_driver
class Driver:
    def __init__(self):
        self.seen = []
    def cuModuleLoadData(self, module, image):
        self.seen.append(len(image))
        return 222 if ALL or len(self.seen) == 2 else 0
    def cuModuleGetFunction(self, function, module, name):
        return 0
    def cuFuncSetAttribute(self, *_):
        return 0
    def cuThreadExchangeStreamCaptureMode(self, mode):
        return 0
    def cuGetErrorString(self, result, text):
        text._obj.value = b"the provided PTX was compiled with an unsupported toolchain"
driver = Driver()
driver.cuLaunchKernelEx = None
cuda_driver.driver = lambda: driver
torch.cuda.is_available = lambda: True
torch.cuda.get_device_capability = lambda *_: (9, 0)
torch.cuda.current_device = lambda: 0
compilation = compile_ahead.Compilation((9, 0))
compilation.add(jobs)
missing = len(compilation._missing())
loaded = 0
for job in jobs:
    try:
        job.kernel._compile(job.types, dict(job.constants), job.num_warps, job.num_stages)
        loaded += 1
    except cuda_driver.KernelError:
        pass
from engine.kernels.runtime import origins
print(json.dumps({"missing": missing, "loaded": loaded, "counts": origins.counts(), "line": origins.line()}))
"""


def test_a_driver_that_takes_none_of_them_is_noticed_before_a_start_decides_what_to_compile(run, place, cache):
    report, log = run("ALL = True\n" + REFUSED, place, cache)
    assert report["missing"] == 5, "so they are compiled side by side"
    assert [line for line in log if "The prebuilt kernels in" in line and "unsupported toolchain" in line] == log[:1]
    assert report["counts"]["release"] == 0


def test_one_kernel_that_the_driver_refuses_is_taken_from_the_cache(run, place, cache):
    report, log = run("ALL = False\n" + REFUSED, place, cache)
    assert (report["missing"], report["loaded"]) == (0, 5)
    assert report["counts"] == {"release": 4, "cached": 1, "compiled": 0}
    assert report["line"] == "Kernels: 4 came with the release, 1 were in the cache, 0 were compiled here."
    assert len(log) == 1
    assert "cannot be loaded as it came with the release; it is compiled again" in log[0]


COUNTED = """
from engine.kernels.runtime import origins
compilation = compile_ahead.Compilation((9, 0))
compilation.seal(jobs)
compilation.finish()
first = origins.counts()["compiled"]
use = compile_ahead.use_cache_dir()
for path in use.glob("*.done"):
    path.unlink()
again = compile_ahead.Compilation((9, 0))
again.seal(jobs)
again.finish()
print(json.dumps([first, origins.counts()["compiled"]]))
"""


def test_what_other_processes_compile_is_counted_once(run, tmp_path):
    counts, _ = run(COUNTED, tmp_path / "nothing", tmp_path / "cache")
    assert counts == [5, 5], "the second time they are in the cache"


def test_a_cache_that_cannot_be_written_to_does_not_keep_them_from_being_used(run, place, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    choose = "from engine.kernels.runtime.cache_dir import use_cache_dir\nuse_cache_dir()\n"
    report, log = run(choose + READ, place, tmp_path / "file/cache", XDG_CACHE_HOME=str(tmp_path / "other"))
    assert report == {"missing": 0, "from": ["as it came with the release"] * 5, "same": True}
    assert len(log) == 1
    assert "cannot be written to" in log[0]


def test_other_settings_of_triton_mean_other_kernels(run, place, tmp_path):
    script = "print(json.dumps(code_of(jobs[0])[0]))"
    origin, log = run(script, place, tmp_path / "cache", TRITON_DEFAULT_FP_FUSION="0")
    assert origin == "from the cache"
    assert "another version of Triton, or one with other settings" in log[0]


SPOILED = """
from engine.kernels.runtime.cache_dir import use_cache_dir
before = launcher.machine_code(jobs[0], (9, 0))
for path in use_cache_dir().rglob("_rms*.json"):
    if not path.name.startswith("__grp__"):
        path.write_text(path.read_text()[:50])
print(json.dumps(before == launcher.machine_code(jobs[0], (9, 0))))
"""


def test_a_truncated_file_of_tritons_cache_is_compiled_again(run, place, tmp_path):
    same, log = run(SPOILED, place, tmp_path / "cache")
    assert same
    assert ["the cache cannot be used" in line for line in log].count(True) == 1
