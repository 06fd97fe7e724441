"""A table in host memory on a real GPU: its rows' bits, alone, in a graph and in a model; whose memory it takes; and
the speed of the bus, which is printed and not judged, as it is the machine's.
"""

import gc
import json
import logging
import os
import statistics
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from engine.kernels.pointwise.host_rows import gather_rows
from engine.kernels.pointwise.norm import rms_norm
from engine.kernels.runtime import host_memory
from engine.kernels.runtime.host_memory import HostMemoryError

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("no CUDA GPU", allow_module_level=True)

GIB = 1 << 30
ROWS, WIDTH = 131_072, 8_960  # half of Gemma 4 E2B's: 2.3 GB
SCALE = 16.0
DEVICE = torch.device("cuda")


def resident() -> int:
    """Bytes of this process that lie in memory and belong to no file, as far as the system tells them apart; else 0."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon")), 0)


def gpu_of_this_process() -> int | None:
    """Bytes of GPU memory that the driver counts as this process's, whole MiB; None where nvidia-smi does not say: it
    may not see into a container, or know its processes by other numbers."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    command = ["nvidia-smi", "--query-compute-apps=pid,used_gpu_memory", "--format=csv,noheader,nounits"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    for line in listed.splitlines():
        pid, _, used = line.partition(",")
        if pid.strip() == str(os.getpid()) and used.strip().isdigit():
            return int(used) << 20
    return None


def fill(table: torch.Tensor) -> None:
    """Random numbers, the same again and again, but no two rows alike."""
    flat = table.view(-1)
    block = torch.randn((8 << 20) + 1, generator=torch.Generator().manual_seed(0)).to(table.dtype)
    for at in range(0, flat.numel(), block.numel()):
        part = flat[at : at + block.numel()]
        part.copy_(block[: part.numel()])


@pytest.fixture(scope="module")
def state() -> Iterator[SimpleNamespace]:
    """The table, locked, and what memory was in use before and after."""
    torch.zeros(1, device=DEVICE)
    gpu, host, reserved = gpu_of_this_process(), resident(), torch.cuda.memory_reserved()
    table = host_memory.empty((ROWS, WIDTH), torch.bfloat16)
    fill(table)
    host_memory.lock(table)
    grown, afterwards = resident() - host, gpu_of_this_process()
    found = SimpleNamespace(
        table=table, host=grown, reserved=torch.cuda.memory_reserved() - reserved,
        gpu=None if gpu is None or afterwards is None else afterwards - gpu,
    )
    del table
    yield found
    found.table = None


def some_ids(count: int, seed: int = 0) -> torch.Tensor:
    """The first row and the last one are among them, and one is there twice."""
    ids = torch.randint(0, ROWS, (count,), generator=torch.Generator().manual_seed(seed))
    for at, row in zip(range(count), (ROWS - 1, 0, 5, 5), strict=False):
        ids[at] = row
    return ids.to(DEVICE)


def expected(state: SimpleNamespace, ids: torch.Tensor, scale: float = SCALE) -> torch.Tensor:
    """What the embedding gives of a table in GPU memory: only the rows in question are there."""
    rows = state.table[ids.cpu()].to(DEVICE)
    at = torch.arange(len(ids), device=DEVICE)
    return F.embedding(at, rows).mul_(scale)


def assert_same_bits(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert found.dtype == wanted.dtype
    assert torch.equal(found.view(torch.int16), wanted.view(torch.int16))


def test_neither_gpu_memory_nor_a_second_copy_is_taken(state: SimpleNamespace) -> None:
    size = state.table.nbytes
    assert host_memory.is_locked(state.table)
    assert state.reserved <= 0, "PyTorch took GPU memory"
    if resident():
        assert 0.99 * size <= state.host <= 1.02 * size + (256 << 20), f"{state.host / size:.2f} times the table"


def test_the_driver_takes_no_gpu_memory_but_tables_of_addresses(state: SimpleNamespace) -> None:
    before = gpu_of_this_process()
    taken = torch.empty(256 << 20, dtype=torch.uint8, device=DEVICE)
    after = gpu_of_this_process()
    del taken
    if state.gpu is None or before is None or after is None or not 256 << 20 <= after - before <= 260 << 20:
        pytest.skip("nvidia-smi does not say what this process has on the GPU (in a container it may not)")
    assert state.gpu <= state.table.nbytes // 50 + (64 << 20), f"{state.gpu >> 20} MiB of the GPU"


@pytest.mark.parametrize("count", [1, 3, 256, 8192])
def test_the_bits_of_a_table_in_gpu_memory(state: SimpleNamespace, count: int) -> None:
    ids = some_ids(count)
    for scale in (SCALE, 1.0, 39.25):
        assert_same_bits(gather_rows(state.table, ids, scale), expected(state, ids, scale))
    assert_same_bits(gather_rows(state.table, ids, SCALE, programs=7), expected(state, ids))


def test_the_whole_of_its_end_is_in_reach(state: SimpleNamespace) -> None:
    ids = torch.arange(ROWS - 300, ROWS, device=DEVICE)
    assert_same_bits(gather_rows(state.table, ids, SCALE), expected(state, ids))


@pytest.mark.parametrize("count", [1, 256])
def test_in_a_graph_with_other_ids_each_time(state: SimpleNamespace, count: int) -> None:
    """Kernels that start early stand before and behind it: it must wait for its ids, and others for its rows."""
    source, shift = some_ids(count), torch.zeros(1, dtype=torch.int64, device=DEVICE)
    weight = torch.ones(WIDTH, dtype=torch.bfloat16, device=DEVICE)
    before = torch.randn(count, WIDTH, device=DEVICE).bfloat16()

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        rms_norm(before, weight, 1e-6)
        ids = (source + shift) % ROWS  # made on the device, right before they are needed
        rows = gather_rows(state.table, ids, SCALE)
        return rows, rms_norm(rows, weight, 1e-6)

    with torch.inference_mode():
        for _ in range(2):
            step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            rows, normed = step()
        for turn in range(20):
            source.copy_(some_ids(count, seed=turn))
            shift.fill_(turn * 7)
            graph.replay()
            wanted = expected(state, (source + shift) % ROWS)
            assert_same_bits(rows, wanted)
            assert_same_bits(normed, rms_norm(wanted, weight, 1e-6))


def seconds(work: Callable[[], object], repeats: int = 9, inner: int = 1) -> float:
    """Median of `repeats` times, each of `inner` calls, of one call."""
    times = []
    for _ in range(repeats + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(inner):
            work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1000 / inner)
    return statistics.median(times[2:])


@pytest.mark.alone
def test_speed_of_the_bus(state: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    """Printed as JSON rows: GB/s of rows for steps of several sizes and numbers of programs, and of a plain copy."""
    out = torch.empty(8192, WIDTH, dtype=torch.bfloat16, device=DEVICE)
    copy = seconds(lambda: out.copy_(state.table[:8192], non_blocking=True), 5)
    rows: list[dict[str, object]] = [{"bench": "host_rows", "copy_gb_s": round(out.nbytes / copy / 1e9, 1)}]
    for count in (1, 16, 256, 2048, 8192):
        ids = some_ids(count)
        for programs in (32, 64, 128, 256, 512, 1024, 4096, 1 << 20):
            if programs > 1024 and count < 256:
                continue
            inner = 1 if count >= 2048 else 10
            took = seconds(lambda ids=ids, n=programs: gather_rows(state.table, ids, SCALE, programs=n), 9, inner)
            rows.append({"bench": "host_rows", "rows": count, "programs": programs, "us": round(took * 1e6, 1),
                         "gb_s": round(count * WIDTH * 2 / took / 1e9, 2)})  # fmt: skip
    with capsys.disabled():
        print()
        for row in rows:
            print(json.dumps(row))
    assert all(row.get("us", 1) for row in rows)


def test_what_is_dropped_is_given_back_and_can_be_had_again() -> None:
    """Three times more than is ever held: pages that the driver kept would add up, or could not be locked again."""
    ids = torch.tensor([0, 999], device=DEVICE)
    before = resident()
    size = 0
    for turn in range(3):
        table = host_memory.empty((1000, 256 << 10), torch.bfloat16)  # 0.5 GB
        table[0], table[-1] = turn + 1, -turn - 1
        table[500:600] = 1
        host_memory.lock(table)
        size = table.nbytes
        found = gather_rows(table, ids)
        del table  # the kernel may still be reading: who unlocks waits for it
        assert found[0].eq(turn + 1).all()
        assert found[1].eq(-turn - 1).all()
    gc.collect()
    assert resident() - before <= size // 2, "of the last one nothing is left"


def test_a_refused_lock_is_an_error_and_not_a_crash() -> None:
    """Page 0 can never be locked: what the driver says about it arrives as text."""
    driver = host_memory._driver()
    with pytest.raises(HostMemoryError, match="the CUDA driver says"):
        host_memory._check(driver, driver.cuMemHostRegister_v2(0, 4096, 3))
    torch.cuda.synchronize()


# In a model.


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("safetensors")
    import gpu_kit

    return gpu_kit.checkpoint(tmp_path_factory.mktemp("host-table"), "gemma4-e2b")


def answers(directory: Path, **options: object) -> tuple[list[list[int]], str]:
    """Greedy tokens of prompts of many lengths, and the memory plan."""
    import gpu_kit

    from engine import SamplingParams

    llm = gpu_kit.on_gpu(directory, **options)
    asked = gpu_kit.prompts(12)
    tokens = gpu_kit.generated(llm, asked, SamplingParams(max_tokens=24, temperature=0, ignore_eos=True))
    return tokens, llm.engine.info()["memory_plan"]


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_a_model_says_the_same_with_its_table_on_either_side(model: Path, *, enforce_eager: bool) -> None:
    on_gpu, usual = answers(model, per_layer_embeddings="gpu", enforce_eager=enforce_eager)
    on_host, saving = answers(model, per_layer_embeddings="host", enforce_eager=enforce_eager)
    assert on_host == on_gpu
    assert "in host memory" in saving
    assert "in host memory" not in usual


def test_a_table_that_cannot_be_locked_goes_to_the_gpu(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from engine.errors import ConfigError
    from engine.worker.startup import embedding_offload

    wanted, _ = answers(model, per_layer_embeddings="gpu")

    def refuse(_: torch.Tensor) -> None:
        raise HostMemoryError("the driver does not want to")

    monkeypatch.setattr(embedding_offload, "lock", refuse)
    with caplog.at_level(logging.WARNING):
        found, plan = answers(model)
    assert found == wanted
    assert "does not want to" in caplog.text
    assert "in host memory" not in plan
    with pytest.raises(ConfigError, match="does not want to"):
        answers(model, per_layer_embeddings="host")


def test_the_real_shape_of_e2b_starts_and_saves_what_the_plan_says() -> None:
    """Random weights: 4.7 GB of table on the host, as much less on the GPU."""
    pytest.importorskip("safetensors")
    from engine import LLM, SamplingParams

    config = Path(__file__).parents[2] / "engine" / "bench" / "configs" / "gemma4-e2b"
    options = {
        "model": config, "load_format": "dummy", "skip_tokenizer_init": True, "device": "cuda", "max_num_seqs": 64,
        "max_num_batched_tokens": 2048, "gpu_memory_utilization": 0.5, "kv_cache_memory_bytes": GIB,
    }  # fmt: skip
    used = {}
    for place in ("host", "gpu", "host"):  # the first one loads what stays: kernels, libraries
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        llm = LLM(per_layer_embeddings=place, **options)
        [output] = llm.generate(
            [{"prompt_token_ids": list(range(7, 3007))}], SamplingParams(max_tokens=8, ignore_eos=True), use_tqdm=False
        )
        assert len(output.outputs[0].token_ids) == 8
        used[place] = torch.cuda.memory_allocated() - before
        del llm, output
        gc.collect()
        gc.unfreeze()  # what the engine froze when it was ready
        gc.collect()
    saved = used["gpu"] - used["host"]
    table = 262_144 * 35 * 256 * 2
    assert 0.99 * table <= saved <= 1.01 * table, f"{saved / 1e9:.2f} GB less of the GPU, {table / 1e9:.2f} expected"
