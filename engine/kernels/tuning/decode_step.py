"""The decode step that the tile search times, as a CUDA graph: one sequence, random weights, a few of the model's
layers."""

import gc
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from engine.kernels.gemm.tiles import GemmShape, VectorTiles, by_rule, vector_tiles
from engine.kernels.moe.tiles import DecodeTiles, Shape, decode_tiles
from engine.kernels.runtime.gpu_target import Target
from engine.kernels.tuning.experts_search import decode_stages
from engine.kernels.tuning.gemm_operands import Operands
from engine.kernels.tuning.rows import say
from engine.kernels.tuning.step_gemms import Subject, head_has_copy, subjects_of
from engine.kernels.tuning.step_search import Block, Change, Chosen, Part, Ready, Stage, Tiles, candidates
from engine.layers.quant.head import drop_copy
from engine.models.config.model import read_json

if TYPE_CHECKING:
    from engine.kernels.runtime.launcher import Job

_LAYERS = 8  # enough layers that one step's weights have left the caches before the next step
_POSITION = 200
_MAX_MODEL_LEN = 2048
_KV_BYTES = 2 << 30
_SMALLEST = 100_000  # bytes of a weight: smaller ones finish before their tiles matter
_WRONG = 0.02  # error relative to a result's norm: more than rounding explains
_TURNS, _STEPS = 6, 16  # the fastest of 6 turns counts; a turn is 16 steps
_KERNELS = ("experts' first products", "experts' second products", "router and dense branch")


class DecodeStep(NamedTuple):
    """The two parts of a step: up to the last norm, which the engine captures as a graph, and the logits."""

    forward: Callable[[], torch.Tensor]
    head: Callable[[torch.Tensor], torch.Tensor]

    def run(self, *, head: bool) -> torch.Tensor:
        hidden = self.forward()
        return self.head(hidden) if head else hidden


# -- a model with a few layers ----------------------------------------------------------------------------------------


def cut(raw: dict[str, Any]) -> dict[str, Any]:
    """A config.json with the fewest layers that include every kind: at least two periods of the pattern."""
    raw = deepcopy(raw)
    text = raw.get("text_config") or raw
    most = text["num_hidden_layers"]
    kinds = (text.get("layer_types") or [""] * most)[:-1]
    period = next(p for p in range(1, most + 1) if kinds[p:] == kinds[: max(0, len(kinds) - p)])
    layers = min(most, period * max(2, -(-_LAYERS // period)))
    for name, value in text.items():
        if isinstance(value, list) and len(value) == most:
            text[name] = value[:layers]
    text["num_hidden_layers"] = layers
    if text.get("num_kv_shared_layers"):  # the last layers, which have other sizes: half of those kept
        text["num_kv_shared_layers"] = min(text["num_kv_shared_layers"], layers // 2)
    return raw


@contextmanager
def few_layers(config: Path) -> Iterator[Path]:
    """A temporary directory with the `cut` config.json."""
    with tempfile.TemporaryDirectory(prefix="atoll-gemv-") as directory:
        raw = cut(read_json(config / "config.json"))
        (Path(directory) / "config.json").write_text(json.dumps(raw), encoding="utf-8")
        yield Path(directory)


@contextmanager
def start(config: Path, quantization: str) -> Iterator[DecodeStep]:
    """Start the cut model on the GPU. `quantization`: "fp8" or "none"."""
    from engine.llm import LLM
    from engine.worker.device_runner import DeviceRunner
    from engine.worker.staging import aligned

    gc.unfreeze()  # start-up froze its objects: the previous model must be collected first
    gc.collect()
    with few_layers(config) as directory:
        runner = LLM(
            model=directory, device="cuda", load_format="dummy", skip_tokenizer_init=True, max_num_seqs=4,
            max_model_len=_MAX_MODEL_LEN, quantization=None if quantization == "none" else quantization,
            kv_cache_memory_bytes=_KV_BYTES,
        ).engine.runner  # fmt: skip
    assert isinstance(runner, DeviceRunner)
    runner.graphs = None
    with torch.inference_mode():
        if not head_has_copy(config, quantization):  # of a few layers every head is a large part
            drop_copy(runner.model)
        words, pages = runner.staging.device_words, _POSITION // runner.page_size + 1
        words.zero_()
        words[0], words[aligned(1)] = 1, _POSITION  # row 0 is for padding
        runner.block_tables[:, 1, :pages] = torch.arange(1, pages + 1, dtype=torch.int32, device=runner.device)
        yield DecodeStep(lambda: runner._decode(1), runner.model.logits)


# -- what a step consists of ------------------------------------------------------------------------------------------


@contextmanager
def using(chosen: Chosen) -> Iterator[Chosen]:
    """Inside this context kernels use these tiles, or their usual ones where none are given. Yields the tiles that are
    used, as they are looked up."""
    from engine.kernels.gemm import small_batch
    from engine.kernels.moe import decode as moe_decode

    taken: Chosen = {}

    def vector(gemm: GemmShape, rows: int = 1, gpu: Target | None = None) -> Tiles:
        assert rows == 1, "a step of one sequence"
        return taken.setdefault(gemm, chosen.get(gemm) or vector_tiles(gemm, rows, gpu))

    def few(shape: Shape, tokens: int, dense_width: int = 0, gpu: Target | None = None) -> Tiles:
        block = Block(shape, dense_width)
        return taken.setdefault(block, chosen.get(block) or decode_tiles(shape, tokens, dense_width, gpu))

    small_batch.vector_tiles, moe_decode.decode_tiles = vector, few
    try:
        yield taken
    finally:
        small_batch.vector_tiles, moe_decode.decode_tiles = vector_tiles, decode_tiles


def record(step: DecodeStep, chosen: Chosen, *, head: bool) -> tuple["set[Job]", Chosen]:
    """The kernels that a step would launch with the `chosen` tiles, and all tiles that it uses. Needs no GPU."""
    from engine.kernels.runtime.launcher import recording

    with using(chosen) as taken, recording() as jobs:
        step.run(head=head)
    return jobs, taken


class Plan(NamedTuple):
    """What is to be searched."""

    stages: list[Stage]  # the largest weights first, then sparse blocks
    start: Chosen
    subjects: dict[GemmShape, Subject]


def plan(step: DecodeStep, name: str, known: Chosen) -> Plan:
    """`name`: the model's; `known`: tiles that a search has found already. A weight whose size depends on the number of
    layers is searched with the size that it has here."""
    _, inside = record(step, known, head=False)
    jobs, start = record(step, known, head=True)
    subjects = {subject.gemm: subject for subject in subjects_of(jobs, name)}
    large = sorted((s for s in subjects.values() if s.num_bytes >= _SMALLEST), key=lambda s: -s.num_bytes)
    stages = [
        Stage(str(s), s.gemm, [tiles._asdict() for tiles in candidates(s.gemm)], s.gemm not in inside)
        for s in large if s.gemm in start
    ]  # fmt: skip
    for block, tiles in start.items():
        if isinstance(block, Block) and isinstance(tiles, DecodeTiles):
            changes = decode_stages(tiles, block.shape, block.width)
            stages += [Stage(kernel, block, some) for kernel, some in zip(_KERNELS, changes, strict=True)]
    return Plan(stages, start, subjects)


def lines_of(step: DecodeStep, todo: Plan, capability: tuple[int, int]) -> dict[tuple[int, int], set[str]]:
    """The compile jobs of each change, by (index of the stage, index of the change), in the order of the search.

    A block's kernel is compiled only with the initial tiles of the block's other kernels, because its code does not
    depend on theirs.
    """
    from engine.kernels.runtime.compile_ahead import line_of

    found = {}
    for at, stage in enumerate(todo.stages):
        for number, change in enumerate(stage.changes):
            tiles = todo.start[stage.part]._replace(**change)
            jobs, _ = record(step, {**todo.start, stage.part: tiles}, head=stage.head)
            found[at, number] = {line_of(job, capability) for job in jobs}
    return found


# -- on a GPU ---------------------------------------------------------------------------------------------------------


class OnGpu:
    """A search's `Ready` on this machine's GPU, as a context: compilation in the background ends with it."""

    def __init__(self, step: DecodeStep, todo: Plan, device: torch.device) -> None:
        from engine.kernels.runtime import compile_pool

        self._step, self._todo, self._device = step, todo, device
        self._lines = lines_of(step, todo, torch.cuda.get_device_capability(device))
        order = list(dict.fromkeys(line for lines in self._lines.values() for line in sorted(lines)))
        say(f"{len(todo.stages)} stages, {len(self._lines)} candidates, {len(order)} kernels")
        self._pool = compile_pool.take()
        self._pool.submit(order)

    def __enter__(self) -> Ready:
        return Ready(self._ms, self._compiled, self._right)

    def __exit__(self, *_: object) -> None:
        self._pool.close()

    def _compiled(self, stage: Stage, change: Change) -> bool:
        key = self._todo.stages.index(stage), stage.changes.index(change)
        return not self._pool.wait(self._lines[key])

    def _ms(self, chosen: Chosen, head: bool) -> float:
        from engine.kernels.runtime.driver import KernelError

        try:
            with using(chosen):
                return step_ms(lambda: self._step.run(head=head))
        except KernelError as error:
            say(f"A step failed: {error}")
            return float("inf")

    def _right(self, part: Part, tiles: Tiles) -> bool:
        """Whether a GEMM gives the same result as with the tiles by rule, which the self-test compares with plain
        torch."""
        if not isinstance(part, GemmShape) or not isinstance(tiles, VectorTiles):
            return True
        operands = Operands(self._todo.subjects[part], self._device)
        expected = operands.result(by_rule(part))
        wrong = float((operands.result(tiles) - expected).norm() / expected.norm())
        if not wrong <= _WRONG:
            say(f"{self._todo.subjects[part]}, {tiles}: the result is wrong by {wrong:.2g}")
        return wrong <= _WRONG


def step_ms(decode: Callable[[], torch.Tensor]) -> float:
    """Milliseconds of a step captured as the engine captures it: the best mean of some consecutive steps."""
    from engine.worker.cuda_graphs import DecodeGraphs

    graphs = DecodeGraphs(lambda _: decode(), [1])
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times = []
    for _ in range(_TURNS):
        begin.record()
        for _ in range(_STEPS):
            graphs.replay(1)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / _STEPS)
    return min(times)
