"""The tuner from its command line down: what it keeps, how it continues, what it refuses. Only times are made up."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("triton")

from engine.errors import ConfigError
from engine.kernels.gemm import tiles as gemm_tiles
from engine.kernels.moe import tiles as moe_tiles
from engine.kernels.runtime import tuned_tables
from engine.kernels.runtime.gpu_target import Target
from engine.kernels.tuning import __main__ as tuner
from engine.kernels.tuning.results import OwnTable, only_tuner

ROOT = Path(__file__).parents[4]
L40S = Target((8, 9), 101_376, 142, "NVIDIA L40S")

# Two models with a GEMM in common. Their steps are gone through on tensors without memory; times follow from the tiles.
# In a process of its own: the tests of kernels have Triton's interpreter run all of them.
PROGRAM = """
import sys, time
from contextlib import contextmanager
import torch
from engine.kernels.gemm.tiles import GemmShape, VectorTiles
from engine.kernels.moe.tiles import DecodeTiles
from engine.kernels.runtime.gpu_target import Target
from engine.kernels.tuning import __main__ as tuner
from engine.kernels.tuning import decode_step, experts_layer, experts_search, search, step_gemms, step_search
from engine.layers.moe import SparseMLP
from engine.models.config.model import read_json
from engine.models.registry import empty_model
from engine.kernels.moe.tiles import Shape

gpu, pause = Target((8, 9), 101_376, 142, "NVIDIA L40S"), float(sys.argv[1])
best = {GemmShape(2048, 4096, 1): VectorTiles(16, 1024, 4)}

@contextmanager
def start(config, form):
    with decode_step.few_layers(config) as directory:
        model = empty_model(directory)
    step_gemms.of_step(model, form, config.name)
    with torch.inference_mode(), step_gemms._AsOnGpu():
        yield decode_step.DecodeStep(lambda: step_gemms._hidden(model), model.logits)

@contextmanager
def step_on_gpu(step, plan, device):
    def ms(chosen, head):
        time.sleep(pause)
        blocks = [tiles for part, tiles in chosen.items() if isinstance(part, step_search.Block)]
        faster = sum(chosen[part] == tiles for part, tiles in best.items() if part in chosen)
        return 3.0 - faster - any(tiles.gate_up == (8, 256, 3, 1) for tiles in blocks)
    yield step_search.Ready(ms, lambda *_: True, lambda *_: True)

def make_subject(config, device, form):
    with torch.device("meta"):
        layer = SparseMLP(64, 32, 8, 2)
    raw = read_json(config / "config.json")
    return experts_layer.Subject(config.name, form, layer, experts_layer.read_shape(raw, 1)[0], None, 0)

@contextmanager
def experts_on_gpu(cells, device):
    yield experts_search.Ready(lambda *_: 1e-3, lambda *_: True)

tuner._gpu = lambda: (torch.device("cpu"), gpu)
decode_step.start, decode_step.OnGpu = start, step_on_gpu
experts_layer.make_subject, experts_search.OnGpu = make_subject, experts_on_gpu
import engine.kernels.runtime.launcher as launcher
launcher.target_of = lambda _: gpu
sys.exit(tuner.main(sys.argv[2:]))
"""
CONFIGS = ROOT / "engine/bench/configs"
MODELS = [str(CONFIGS / name) for name in ("qwen3.6-35b-a3b", "qwen3-30b-a3b")]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir(mode=0o700)
    return tmp_path / "cache"


def start(*arguments, pause=0.0):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", PROGRAM, str(pause), *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=ROOT, env=environment, **pipes)


def run(*arguments):
    process = start(*arguments)
    output, said = process.communicate(timeout=240)
    assert process.returncode == 0, said
    return [json.loads(line) for line in output.splitlines()], said


def table():
    """What an engine on this GPU would take."""
    path = tuned_tables.path_for(L40S)
    found = tuned_tables.load(path, L40S)
    gemm = dict(tuned_tables.parsed(found.gemm, L40S, gemm_tiles.parse))
    return gemm, tuned_tables.parsed(found.moe, L40S, moe_tiles.parse), found.done


def test_two_models_are_searched_and_a_second_run_finds_nothing_left():
    rows, said = run("--model", *MODELS, "--quantization", "fp8", "--json")
    common = [row for row in rows if row.get("product") == "2048x4096 fp8"]
    assert [row["model"] for row in common] == ["qwen3.6-35b-a3b", "qwen3-30b-a3b"]
    assert [row["tiles"] for row in common] == [[16, 1024, 4]] * 2
    assert [(row["ms_before"], row["ms"]) for row in common] == [(3.0, 2.0), (2.0, 2.0)], "it starts with the first's"
    *_, last = rows
    assert last["table"] == str(tuned_tables.path_for(L40S))
    assert (last["searched"], last["found_before"], last["left"]) == (len(rows) - 1, 0, 0)
    assert "3.0 → 2.0 ms a step (+50.0%)" in said
    gemm, moe, done = table()
    assert gemm[gemm_tiles.GemmShape(2048, 4096, 1)] == (16, 1024, 4)
    few = [(entry.shape.num_experts, entry.dense_width, entry.tiles.gate_up) for entry in moe if entry.tokens == 1]
    assert few == [(128, 0, (8, 256, 3, 1)), (256, 512, (8, 256, 3, 1))]
    assert {entry.tokens for entry in moe} == {1, 2, 4, 16, 64, 256, 1024, 4096}
    assert len(done) == len(rows) - 1
    again, said = run("--model", *MODELS, "--quantization", "fp8", "--json")
    assert [(row["searched"], row["found_before"]) for row in again] == [(0, len(done))]
    assert "found by an earlier run" in said
    (shown, *_), _ = run("--show", "--json")
    assert (shown["gemm"], shown["moe"]) == (len(gemm), len(moe))


def test_a_search_that_is_killed_continues_where_it_was():
    process = start("--model", MODELS[1], "--quantization", "fp8", "--parts", "step", pause=0.02)
    path, deadline = tuned_tables.path_for(L40S), time.monotonic() + 200
    while time.monotonic() < deadline and (not path.exists() or len(table()[2]) < 2):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    *_, before = table()
    rows, _ = run("--model", MODELS[1], "--quantization", "fp8", "--parts", "step", "--json")
    assert rows[-1]["found_before"] == len(before) >= 2
    assert rows[-1]["searched"] == len(rows) - 1 >= 1
    *_, after = table()
    assert after[: len(before)] == before
    assert len(after) == len(before) + rows[-1]["searched"]


def test_without_time_nothing_is_started_and_the_rest_is_named():
    rows, said = run("--model", *MODELS, "--quantization", "fp8", "--budget", "-1", "--json")
    assert [row["left"] for row in rows] == [4]
    assert "qwen3-30b-a3b fp8: experts left for the next run" in said
    assert not tuned_tables.path_for(L40S).exists()


def test_a_search_by_another_version_begins_again_with_what_was_found(cache):
    path = tuned_tables.path_for(L40S)
    entry = json.loads(gemm_tiles.line_of(gemm_tiles.GemmShape(8, 8, 1), gemm_tiles.VectorTiles(1, 16, 1)))
    tuned_tables.save(path, L40S, tuned_tables.Table([entry], [], ["a"], "another"))
    own = OwnTable(path, L40S)
    assert (len(own), own.is_done("a")) == (1, False)


def test_tiles_that_a_start_would_refuse_do_not_spoil_the_table(cache, capsys):
    own = OwnTable(tuned_tables.path_for(L40S), L40S)
    tiles = moe_tiles.Tiles(16, moe_tiles.MatrixTiles(64, 128, 4, 3), moe_tiles.MatrixTiles(64, 128, 4, 3))
    shape = moe_tiles.Shape(8, 2, 64, 64, 1)
    own.keep_measured("good", moe_tiles.Measured(shape, None, 16, tiles))
    large = tiles._replace(down=moe_tiles.MatrixTiles(256, 1024, 8, 4))
    own.keep_measured("bad", moe_tiles.Measured(shape, None, 64, large))
    assert "bad: not kept, because entry 1 needs" in capsys.readouterr().err
    _, moe, done = table()
    assert ([entry.tokens for entry in moe], done) == ([16], ["good", "bad"])


def test_a_broken_table_is_kept_aside(cache, capsys):
    path = tuned_tables.path_for(L40S)
    path.parent.mkdir()
    path.write_text("{")
    assert len(OwnTable(path, L40S)) == 0
    assert path.with_suffix(".unusable").read_text() == "{"
    assert "it is not valid JSON. It is kept as" in capsys.readouterr().err


def test_two_searches_at_once_are_refused(cache):
    refused = pytest.raises(ConfigError, match="Another search is running")
    with only_tuner(cache / "tuned"), refused, only_tuner(cache / "tuned"):
        pass
    with only_tuner(cache / "tuned"):
        pass


def test_it_needs_a_gpu(capsys):
    assert tuner.main(["--model", MODELS[0]]) == 1
    assert "error: No CUDA GPU is usable" in capsys.readouterr().err


def test_a_model_without_a_configuration_is_refused_before_anything_starts(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tuner, "_gpu", lambda: (None, L40S))
    assert tuner.main(["--model", str(tmp_path)]) == 1
    assert f"error: {tmp_path} has no config.json." in capsys.readouterr().err


def test_a_cache_that_the_engine_would_not_trust_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tuner, "_gpu", lambda: (None, L40S))
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    (open_to_all / "triton").mkdir()
    (open_to_all / "triton").chmod(0o777)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert tuner.main(["--model", MODELS[0], "--cache", str(open_to_all)]) == 1
    assert f"error: {open_to_all} is not a directory that only this user can write to." in capsys.readouterr().err


def test_help_has_examples(capsys):
    with pytest.raises(SystemExit):
        tuner.main(["--help"])
    assert "--cache /var/cache/atoll/engine/NAME" in capsys.readouterr().out
