"""Steps whose first recording fails, in the ways in which libraries make it fail, run and are recorded again."""

import ctypes
import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from gpu_kit import checkpoint, generated, on_gpu, prompts

from engine import SamplingParams
from engine.kernels.pointwise.quantize import quantize_rows
from engine.worker import cuda_graphs
from engine.worker.cuda_graphs import DecodeGraphs
from engine.worker.device_runner import DeviceRunner

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("no CUDA GPU", allow_module_level=True)

WIDTH, SIZES = 1024, [8, 64, 512]
_kept: list[torch.cuda.CUDAGraph] = []  # allocators may still ask a graph whose recording failed


@pytest.fixture(autouse=True)
def nothing_failed_yet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    failed: list[torch.cuda.CUDAGraph] = []
    monkeypatch.setattr(cuda_graphs, "_failed", failed)
    yield
    _kept.extend(failed)


def waits() -> None:
    torch.ones(1, device="cuda").item()


def allocates() -> None:
    address = ctypes.c_uint64()
    status = ctypes.CDLL("libcuda.so.1").cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(1 << 20))
    if status:
        raise RuntimeError(f"cuMemAlloc: {status}")


def raises() -> None:
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("refused, but the recording goes on")


class Steps:
    """Products of the library and a kernel of ours. One size does at its first call what a recording forbids."""

    def __init__(self, at_first: Callable[[], None] | None, size: int = 64) -> None:
        torch.manual_seed(0)
        self.x = torch.randn(SIZES[-1], WIDTH, device="cuda", dtype=torch.bfloat16)
        self.weights = torch.randn(4, WIDTH, WIDTH, device="cuda", dtype=torch.bfloat16) / 32
        self.at_first, self.size = at_first, size

    def __call__(self, size: int) -> torch.Tensor:
        x = self.x[:size]
        for number, weight in enumerate(self.weights):
            x = torch.nn.functional.linear(x, weight)
            if number == 2 and size == self.size and self.at_first is not None:
                at_first, self.at_first = self.at_first, None
                at_first()
        values, scale = quantize_rows(x)
        return values.float() * scale[:, None]


def assert_replayed(graphs: DecodeGraphs, steps: Steps) -> None:
    for turn in range(3):
        steps.x.normal_(generator=torch.Generator("cuda").manual_seed(turn))
        for size in SIZES:
            found = graphs.replay(size).clone()
            assert torch.equal(found, steps(size)), f"{size} rows, turn {turn}"


@pytest.mark.parametrize("at_first", [waits, allocates, raises])
@pytest.mark.parametrize("size", SIZES[:2])
def test_a_recording_that_failed_is_made_again(at_first: Callable[[], None], size: int) -> None:
    stream, usual = torch.cuda.current_stream(), Steps(None)
    graphs = DecodeGraphs(usual, SIZES)
    assert not cuda_graphs._failed
    assert_replayed(graphs, usual)
    del graphs
    DecodeGraphs(Steps(at_first, size), SIZES)  # what libraries allocate once in such a case
    _kept.extend(cuda_graphs._failed)
    cuda_graphs._failed.clear()
    gc.collect()
    torch.cuda.empty_cache()
    steps = Steps(at_first, size)
    before = torch.cuda.memory_reserved()

    graphs = DecodeGraphs(steps, SIZES)
    assert len(cuda_graphs._failed) == 1, "the step did not fail"
    assert torch.cuda.current_stream() == stream
    assert not torch.cuda.is_current_stream_capturing()
    assert_replayed(graphs, steps)
    torch.randn(4, device="cuda")  # the generator is not left in a recording
    taken = [torch.full((1 << 22,), float("nan"), device="cuda") for _ in range(16)]
    assert_replayed(graphs, steps)  # nothing of what the graphs use was free to be taken
    more = DecodeGraphs(steps, SIZES, graphs.pool)
    assert_replayed(more, steps)
    assert_replayed(graphs, steps)

    del graphs, more, taken
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before, "memory of the failed recording is never given back"


def test_a_step_that_can_never_be_recorded_raises() -> None:
    def step(size: int) -> torch.Tensor:
        waits()
        return torch.ones(size, device="cuda")

    stream = torch.cuda.current_stream()
    with pytest.raises(RuntimeError):
        DecodeGraphs(step, [1])
    assert torch.cuda.current_stream() == stream
    assert float(torch.ones(4, device="cuda").sum()) == 4
    DecodeGraphs(lambda size: torch.ones(size, device="cuda"), [1])
    torch.randn(4, device="cuda")  # the generator, too, has left the recording that failed: it does with the next one


def test_an_engine_answers_the_same_after_a_recording_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, asked = checkpoint(tmp_path / "qwen3", "qwen3"), prompts(24, longest=60)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    usual = generated(on_gpu(model, max_num_seqs=24), asked, params)
    assert not cuda_graphs._failed
    decode, failed = DeviceRunner._decode, []

    def waits_once(self: DeviceRunner, size: int, *shared: torch.Tensor) -> torch.Tensor:
        hidden = decode(self, size, *shared)
        if torch.cuda.is_current_stream_capturing() and size == 8 and not failed:
            failed.append(size)
            hidden.sum().item()
        return hidden

    monkeypatch.setattr(DeviceRunner, "_decode", waits_once)
    again = on_gpu(model, max_num_seqs=24)
    assert failed
    assert len(cuda_graphs._failed) == 1
    assert generated(again, asked, params) == usual
