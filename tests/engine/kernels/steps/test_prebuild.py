"""What is compiled for a medium is what a start launches on its GPU. Neither needs the GPU."""

import json
import os
import time
from pathlib import Path

import pytest

from engine.kernels.runtime.prebuilt import Entry

pytest.importorskip("triton")

from engine.plan import SHAPES
from engine.prebuild import listers
from engine.prebuild.wishes import Wish

HERE = Path(__file__).parent


@pytest.fixture
def run(compiling):
    return compiling.run


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Triton's: what one test has compiled, the next need not compile again."""
    return {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("cache"))}


@pytest.mark.parametrize(
    "arguments",
    [
        ["qwen3"], ["qwen3", "quantization=fp8", "kv_cache_dtype=fp8"],
        ["gemma4-26b"], ["gemma4-e2b", "quantization=fp8"], ["qwen3.5-moe", "quantization=fp8"],
        ["qwen3", "quantization=int4", "kv_cache_dtype=int8"], ["gemma4-e2b", "kv_cache_dtype=int8"],
        ["qwen3-moe", "quantization=int8"], ["gemma4-26b", "quantization=int4"],
    ],
)  # fmt: skip
def test_what_a_start_launches_was_listed(run, arguments):
    done = run(HERE / "list_steps.py", *arguments)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)
    assert report["launched"] > 20
    assert report["not listed"] == []
    assert report["of some layers only"] == []


@pytest.mark.parametrize(("arguments", "kernel"), [
    (["qwen3-moe", "stored=w8a8"], "_quantize_rows_to_int8_kernel"),
    (["qwen3-moe", "stored=w8a16"], "_packed_pairs_kernel"), (["gemma4-26b", "stored=nvfp4"], "_grouped_packed_kernel"),
    (["qwen3", "stored=nvfp4"], "_packed_kernel"), (["qwen3", "stored=w4a16"], "_int4_gemv_kernel"),
])  # fmt: skip
def test_kernels_of_quantised_checkpoints_are_listed(run, arguments, kernel):
    done = run(HERE / "list_steps.py", *arguments)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)
    assert kernel in report["kernels"]
    assert report["not listed"] == report["of some layers only"] == []


PRODUCTS = """
import sys
from pathlib import Path
from engine.config import EngineConfig
from engine.prebuild.gpus import GPUS
from engine.prebuild.listing import kernels_for
jobs = kernels_for(EngineConfig(Path(sys.argv[1]), load_format="dummy"), *GPUS["h100"])
for job in jobs:
    constants = dict(job.constants)
    if job.kernel.name == "_block_wgmma_kernel":
        print(constants["N"], constants["K"], constants["GATE"], constants["ONTO"])
"""


def test_products_of_whole_prompts_with_what_follows_are_listed(run, tmp_path):
    config = json.loads((SHAPES / "qwen3-8b/config.json").read_text())
    blocks = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": blocks}))
    done = run("-c", PRODUCTS, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    found = set(done.stdout.splitlines())
    assert {"6144 4096 None False", "24576 4096 silu False", "4096 4096 None True", "4096 12288 None True"} <= found


TINY = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 128, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "torch_dtype": "bfloat16",
    "tie_word_embeddings": True, "eos_token_id": 0,
}  # fmt: skip


def test_the_command_fills_a_directory_and_continues(run, cache, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    command = ["-m", "engine.prebuild", tmp_path, "--out", tmp_path / "out", "--gpu", "h100", "--max-num-seqs", "4"]
    first = run(*command, **cache)
    assert first.returncode == 0, first.stderr[-3000:]
    index = json.loads((tmp_path / "out/9.0/index.json").read_bytes())
    assert len(index["kernels"]) > 20
    sizes = [Entry(*entry).size for entry in index["kernels"].values()]
    assert (tmp_path / "out/9.0/kernels.bin").stat().st_size == sum(sizes)
    again = run(*command, TRITON_CACHE_DIR=str(tmp_path / "another cache"))
    assert again.returncode == 0
    assert list((tmp_path / "another cache").rglob("*.cubin")) == [], "nothing is compiled twice"


def wishes(path, *found):
    path.write_text(json.dumps([{"model": str(model), "gpu": gpu, "flags": flags} for model, gpu, flags in found]))
    return path


def test_wishes_for_several_gpus_fill_a_folder_each_and_nothing_else_stays(run, cache, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad/config.json").write_text(json.dumps(TINY | {"architectures": ["Nobody"]}))
    few, most = ["--max-num-seqs", "4"], ["--max-num-seqs", "64"]
    command = ["-m", "engine.prebuild", "--out", tmp_path / "out", "--json", "--wishes"]
    first = run(*command, wishes(tmp_path / "1", (tmp_path, "h100", few), (tmp_path, "a100", few),
                                 (tmp_path, "h100", [*most, "--kv-cache-dtype", "fp8"])), **cache)  # fmt: skip
    assert first.returncode == 0, first.stderr[-3000:]
    told = [json.loads(line) for line in first.stdout.splitlines()]
    steps = {stage: [(line["done"], line["total"]) for line in told if line.get("stage") == stage]
             for stage in ("list", "compile")}  # fmt: skip
    assert steps["list"] == [(0, 3), (1, 3), (2, 3), (3, 3)]
    assert steps["compile"] == sorted(steps["compile"])
    assert steps["compile"][-1][0] == steps["compile"][-1][1] > 60
    assert sorted(line["capability"] for line in told if "capability" in line) == ["8.0", "9.0"]

    second = run(*command, wishes(tmp_path / "2", (tmp_path, "h100", few), (tmp_path / "bad", "h100", few)), **cache)
    assert second.returncode == 1
    problem, = (line["problem"] for line in map(json.loads, second.stdout.splitlines()) if "problem" in line)
    assert "cannot be listed" in problem
    assert "Nobody" in problem
    counts = [json.loads((tmp_path / f"out/{name}/index.json").read_bytes())["kernels"] for name in ("9.0", "8.0")]
    total = next(line["kernels"] for line in told if line.get("capability") == "9.0")
    assert len(counts[0]) < total, "kernels that are no longer wanted are gone"


def test_progress_of_lists_made_side_by_side_counts_each_once(monkeypatch):
    def answering(_, numbers):
        reading, writing = os.pipe()
        if not (pid := os.fork()):
            os._exit(0)
        with os.fdopen(writing, "w") as answers:
            answers.writelines(json.dumps([number, "model", [], ""]) + "\n" for number in numbers)
        return pid, reading

    def told_slowly(done, total):
        time.sleep(0.001)
        told.append((done, total))

    told = []
    monkeypatch.setattr(listers, "_fork", answering)
    monkeypatch.setattr(listers.torch, "set_num_threads", lambda _: None)
    monkeypatch.setattr(listers.os, "sched_getaffinity", lambda _: range(8))
    listed = listers.list_all([Wish("qwen3-8b", "h100")] * 200, told_slowly)
    assert told == [(done, 200) for done in range(201)]
    assert {each.model for each in listed} == {"model"}


@pytest.mark.parametrize(
    ("text", "why"),
    [("[{}]", "not a list of wishes"), ("{", "not a list of wishes"),
     ('[{"model": "qwen3-8b", "gpu": "h1000", "flags": []}]', "No GPU called h1000"), (None, "not a list of wishes")],
)  # fmt: skip
def test_a_wrong_file_of_wishes_is_refused(run, tmp_path, text, why):
    if text is not None:
        (tmp_path / "wishes").write_text(text)
    done = run("-m", "engine.prebuild", "--wishes", tmp_path / "wishes", "--out", tmp_path / "out")
    assert done.returncode == 2
    assert why in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("flags", "why"),
    [(["no-such-model", "--gpu", "h100"], "no-such-model"), (["qwen3-8b", "--gpu", "h100", "--no-such-flag"], "--no")],
)
def test_wrong_arguments_are_refused(run, tmp_path, flags, why):
    done = run("-m", "engine.prebuild", *flags, "--out", tmp_path)
    assert done.returncode == 2
    assert why in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []
