"""The benchmark's own arithmetic: workloads that never change, waste and floor. (No benchmark runs here.)"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.bench import floor, latency, report, workloads
from engine.bench.kv_meter import KVMeter


@pytest.mark.parametrize("name, requests, total_in, total_out, start, first_out", [
    ("mixed", 256, 133538, 144961, [50504, 99356, 55135, 5316], 742),
    ("single", 1, 128, 256, [99356, 55135, 5316, 33946], 256),
])  # fmt: skip
def test_workloads_never_change(name, requests, total_in, total_out, start, first_out):
    """Published numbers name these workloads: a change would make them incomparable."""
    load = workloads.make(name, 151936)
    assert (len(load.prompts), load.total_in, load.total_out) == (requests, total_in, total_out)
    assert load.prompts[0][:4] == start
    assert load.tokens_out[0] == first_out
    assert workloads.make(name, 200_000) == load, "the same prompts for every large vocabulary"
    small = workloads.make(name, 300)
    assert max(map(max, small.prompts)) < 300


def test_waste_counts_each_page_once():
    seqs = [
        SimpleNamespace(num_computed_tokens=37, pages=[1, 2, 3]),   # 32 + 5 of 48 slots
        SimpleNamespace(num_computed_tokens=33, pages=[1, 2, 4]),   # shares 1 and 2: 1 of 16 more
        SimpleNamespace(num_computed_tokens=0, pages=[5, 6]),       # nothing yet: 0 of 32
    ]
    meter = KVMeter(SimpleNamespace(kv=SimpleNamespace(page_size=16), scheduler=SimpleNamespace(running=seqs)))  # type: ignore[arg-type]
    assert meter.waste == 0
    meter.sample()
    assert meter.waste == pytest.approx(1 - (32 + 5 + 1) / (6 * 16))
    seqs.clear()
    meter.sample()
    assert meter.waste == pytest.approx(1 - 38 / 96), "an idle engine wastes nothing and changes nothing"
    assert meter.mean_batch == 1.5


def test_bytes_per_token_with_and_without_weights(tiny_llama_dir: Callable[..., Path], tmp_path: Path):
    """The estimate from config.json alone (bf16) is the checkpoint's (fp32) size, norms and biases aside."""
    for tied in (True, False):
        real = tiny_llama_dir("gqa", tie_word_embeddings=tied)
        (tmp_path / "config.json").write_bytes((real / "config.json").read_bytes())
        assert floor.bytes_per_token(tmp_path) == pytest.approx(floor.bytes_per_token(real) / 2, rel=0.02)


def test_timing_takes_the_median():
    load = workloads.Workload("x", [[1, 2, 3]], [10])
    row = report.timing(load, [4.0, 1.0, 2.0])
    assert (row["secs"], row["out_tok_s"], row["total_tok_s"]) == (2.0, 5.0, 6.5)


def test_latency_counts_waits_of_streams_and_first_tokens(tiny_llama_dir: Callable[..., Path]):
    """A small run of the real engine: every token is counted, and a quiet run has no prompts' figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path)
    latency.add_arguments(parser)
    args = ["--model", str(tiny_llama_dir("gqa")), "--device", "cpu", "--dtype", "float32", "--streams", "3"]
    args += ["--stream-tokens", "8", "40", "--prompts", "2", "--prompt-tokens", "60"]
    args += ["--short", "2", "--short-tokens", "4", "4"]
    quiet, load = latency.run(parser.parse_args(args))
    assert (quiet["bench"], load["bench"]) == ("latency-quiet", "latency-load")
    assert "ttft_long_p50_ms" not in quiet
    assert load["ttft_long_p50_ms"] > 0
    assert load["itl_p50_ms"] <= load["itl_p99_ms"] <= load["itl_max_ms"]
    assert load["out_tok_s"] * load["secs"] == pytest.approx(3 * (40 - 32) + 2 + 2 * 4, rel=0.1)


def test_help_names_every_command():
    done = subprocess.run([sys.executable, "-m", "engine.bench", "--help"], capture_output=True, text=True, check=True)
    words = ("cpu", "workload", "latency", "profile", "load", "schedule", "examples:")
    assert all(command in done.stdout for command in words)


def test_the_schedule_benchmark_runs_without_a_model():
    command = [sys.executable, "-m", "engine.bench", "schedule", "prompts", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert {row["kind"] for row in rows} == {"full attention", "sliding windows", "recurrent states"}
    assert all(row["pause_worst"] == 1 and row["singles_first"] == row["mixed"] > 0 for row in rows), rows
