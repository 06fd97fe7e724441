"""A CPU's step in two parts that run side by side.

    whole     one thread runs the small operators; large GEMMs wake the team and let it sleep again, dozens of times
    parts     sequences 0 .. k-1 on the calling thread, the rest on a second one, each with half the team: one fork

PyTorch releases the GIL while an operator runs, so the Python of one part runs beside the operators of the other. A
part is a plan of its own: it reads and writes rows and pages that the other part does not write.

Another process that computes on the second core takes the gain away: then each step waits for the part that shares its
core. `Pause` (pause.py) notices it and lets steps run whole for a while. On cores that nobody else uses, the whole step
on all threads is faster than either (team.py). (Measurements: docs/performance/cpu-threads.md.)
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import TypeVar

import numpy as np
import torch
from torch import nn

from engine.core.batch import ScheduledSeq, StepPlan
from engine.core.kv.pages import NULL_PAGE
from engine.core.kv.spec import CacheSpec
from engine.kernels.runtime.cpu_threads import at_most
from engine.layers.attention import Attention
from engine.layers.linear import Linear
from engine.layers.moe import RoutedExperts
from engine.worker.pause import Timing
from engine.worker.state import RequestTable

Part = TypeVar("Part")
Result = TypeVar("Result")

_FEWEST_SEQS = 8          # fewer cannot be cut into equal work
_FEWEST_TOKENS = 24       # fewer share one reading of the weights: two parts would each read them
_FEWEST_OF_LARGE = 64     # where reading takes most of a step
_LARGE = 4_000_000        # elements of a model's average weight
_MOST_WORK = 0.6          # of a step, in one part: otherwise the other waits for too long
_CONTEXT_OF_A_TOKEN = 1000  # attending to so many tokens takes as long as the rest of a token's work

LEAST_OVERLAP = 1.25      # CPU time of the parts over wall time; 2 is ideal, at about 1.15 the whole step is as fast


def supports(model: nn.Module, spec: CacheSpec) -> bool:
    """Whether two parts of a step can run through this model at once: no layer may keep anything during a step.

    Layers that lend their keys do. Recurrent states and experts could run in parts; whether they gain was not measured.
    """
    if spec.slot_bytes:
        return False
    return not any(
        isinstance(module, RoutedExperts) or (isinstance(module, Attention) and module.lends)
        for module in model.modules()
    )


def fewest_tokens(model: nn.Module) -> int:
    """The tokens from which on a step runs faster in two parts."""
    sizes = [m.in_features * m.out_features for m in model.modules() if isinstance(m, Linear) and m.quantizable]
    return _FEWEST_OF_LARGE if sum(sizes) > _LARGE * len(sizes) else _FEWEST_TOKENS


def cut(plan: StepPlan, table: RequestTable, fewest: int) -> list[StepPlan]:
    """The step's two parts of about equal work, in the order of its sequences; or the step, if it should stay whole:
    for one, because it has fewer than `fewest` tokens.

    Call it after the request table has the step's changes, which the parts do not repeat.
    """
    if len(plan.seqs) < _FEWEST_SEQS or sum(seq.num_tokens for seq in plan.seqs) < fewest:
        return [plan]
    if plan.pooled or plan.state_saves:
        return [plan]
    if any(seq.prompt_logprobs is not None for seq in plan.seqs):
        return [plan]
    work = np.cumsum([_work(seq) for seq in plan.seqs])
    first = int(np.abs(work[:-1] - work[-1] / 2).argmin()) + 1
    share = work[first - 1] / work[-1]
    if max(share, 1 - share) > _MOST_WORK or reads_fresh_pages(plan, table):
        return [plan]
    return [
        replace(plan, seqs=seqs, row_inits=[], page_updates=[], moved_slabs=[])
        for seqs in (plan.seqs[:first], plan.seqs[first:])
    ]


def _work(seq: ScheduledSeq) -> float:
    """About proportional to the time that a sequence takes."""
    context = seq.start + seq.num_tokens / 2
    return seq.num_tokens * (1 + context / _CONTEXT_OF_A_TOKEN)


def reads_fresh_pages(plan: StepPlan, table: RequestTable) -> bool:
    """Whether a sequence reads pages that another one fills in this step. Only one that is admitted can: pages enter
    the prefix cache when the step that fills them is planned."""
    admitted = {init.row for init in plan.row_inits}
    readers = [seq for seq in plan.seqs if seq.start and seq.row in admitted]
    if not readers:
        return False
    size = table.page_size
    for block_table in table.block_tables:
        filled: set[int] = set()
        for seq in plan.seqs:
            filled.update(block_table[seq.row, seq.start // size : -(-(seq.start + seq.num_tokens) // size)].tolist())
        filled.discard(NULL_PAGE)
        for seq in readers:
            if not filled.isdisjoint(block_table[seq.row, : seq.start // size].tolist()):
                return True
    return False


class SideBySide:
    """Runs two parts at once, the first on the calling thread. Its own thread ends with this object."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "step-part")

    def run(self, work: Callable[[Part], Result], parts: Sequence[Part]) -> tuple[list[Result], Timing]:
        """The results of two parts, in their order. If one raises, so does this, after both have ended."""
        first, second = parts
        threads = max(1, torch.get_num_threads() // 2)
        started = time.perf_counter()
        other = self._thread.submit(_timed, work, second, threads)
        try:
            mine, cpu = _timed(work, first, threads)
        finally:
            _wait(other)
        result, its_cpu = other.result()
        return [mine, result], Timing(cpu + its_cpu, time.perf_counter() - started)


def _timed(work: Callable[[Part], Result], part: Part, threads: int) -> tuple[Result, float]:
    """The result, and the seconds of CPU that this thread took for it."""
    started = time.thread_time()
    with torch.inference_mode(), at_most(threads):  # both belong to a thread
        result = work(part)
    return result, time.thread_time() - started


def _wait(future: Future) -> None:
    """Wait for a part even if Ctrl-C comes: it writes to pages that the caller is about to free."""
    try:
        wait([future])
    except BaseException:
        wait([future])
        raise
