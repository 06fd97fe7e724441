"""``schedule``: the scheduler alone, on a device that answers at once: its own time, and its decisions.

    host      microseconds per step of schedule() and update(), with many decoding sequences
    blocked   the same, while a request is waiting whose long prompt is cached but which does not fit
    short     many requests with too few pages: tokens per step, tokens computed twice, the longest pause of a stream
    prompts   streams that decode while prompts of 32k and short ones arrive: the longest pause of a stream

Pauses are counted in steps. Every workload is the same in each run.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.bench import report
from engine.config import EngineConfig
from engine.core.batch import SeqResult, StepPlan, StepResult
from engine.core.kv.spec import CacheMemory
from engine.core.loop import EngineCore
from engine.core.params import SamplingParams
from engine.core.request import EngineRequest
from engine.core.sequence import Status
from engine.errors import ConfigError

NEEDS_MODEL = False
_PAGE_SIZE = 16
_VOCAB = 50_000
_KINDS = {  # windows, recurrent states, units per slab
    "full attention": ((None,), False, (1,)),
    "sliding windows": ((None, 1024), False, (5, 1)),
    "recurrent states": ((None,), True, (16, 1)),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(_PARTS)} (default: all of them)")


def run(args: argparse.Namespace) -> Iterator[report.Row]:
    unknown = [name for name in args.parts if name not in _PARTS]
    if unknown:
        raise ConfigError(f"There is no part {unknown[0]!r}: choose from {', '.join(_PARTS)}.", "PART")
    for name in args.parts or _PARTS:
        for row in _PARTS[name]():
            yield {"bench": "schedule", "part": name, **row}


@dataclass
class Machine:
    """A device that answers at once, always with the same token."""

    plans: list[StepPlan] = field(default_factory=list)

    def forward(self, plan: StepPlan) -> StepPlan:
        self.plans.append(plan)
        return plan

    def sample(self, plan: StepPlan, masks: object = None) -> StepResult:
        return StepResult(plan.step_id, [SeqResult(token_id=7 if seq.samples else None) for seq in plan.seqs])

    def collect(self, handle: StepResult) -> StepResult:
        return handle


class Watch:
    """Steps an engine and notes when each stream got its tokens."""

    def __init__(self, core: EngineCore) -> None:
        self.core, self.plans = core, _plans(core)
        self.steps = self.idle = 0
        self.last: dict[str, tuple[int, int]] = {}  # stream -> step of its newest token, preemptions until then
        self.pauses: list[int] = []
        self.kept: list[int] = []                   # pauses of streams that were not preempted meanwhile
        self.highest: dict[int, int] = {}           # uid -> tokens computed at some time
        self.twice = 0

    def step(self) -> None:
        planned = len(self.plans)
        outputs = self.core.step()
        self.steps += 1
        self.idle += len(self.plans) == planned
        for output in outputs:
            name = output.request_id
            if output.finish_reason:
                self.last.pop(name, None)
                continue
            seq = self.core.scheduler.seqs[name]
            preemptions = seq.num_preemptions - (seq.status is Status.WAITING)  # the token was still in flight
            if name in self.last:
                step, before = self.last[name]
                self.pauses.append(self.steps - step)
                if preemptions == before:
                    self.kept.append(self.steps - step)
            self.last[name] = self.steps, preemptions
        for plan in self.plans[planned:]:
            for seq in plan.seqs:
                highest = self.highest.get(seq.uid, 0)
                self.twice += min(max(0, highest - seq.start), seq.num_tokens)
                self.highest[seq.uid] = max(highest, seq.start + seq.num_tokens)

    def row(self) -> report.Row:
        pauses = sorted(self.pauses)
        sampled = sum(seq.samples for plan in self.plans for seq in plan.seqs)
        return {
            "steps": self.steps, "without_work": self.idle, "sampled_a_step": round(sampled / self.steps, 2),
            "computed_twice": self.twice, "preemptions": self.core.stats().num_preemptions,
            "pause_mean": round(statistics.mean(pauses), 3), "pause_p99": pauses[len(pauses) * 99 // 100],
            "pause_worst": pauses[-1], "not_preempted_worst": max(self.kept),
        }  # fmt: skip


def _core(kind: str, units: int, *, seqs: int, budget: int, length: int) -> EngineCore:
    windows, has_state, per_slab = _KINDS[kind]
    if len(per_slab) == 1:
        memory = CacheMemory(_PAGE_SIZE, windows, has_state, (units,), 1)
    else:
        memory = CacheMemory(_PAGE_SIZE, windows, has_state, per_slab, units)
    return EngineCore(
        EngineConfig(Path("none")), Machine(), memory=memory, max_model_len=length, max_num_seqs=seqs,
        max_num_batched_tokens=budget, vocab_size=_VOCAB, depth=2,
    )  # fmt: skip


def _add(core: EngineCore, name: str, prompt: list[int], max_tokens: int) -> None:
    core.add_request(EngineRequest(name, prompt, SamplingParams(max_tokens=max_tokens)))


def _rng(seed: int) -> random.Random:
    return random.Random(seed)  # noqa: S311


def _answer(rng: random.Random) -> int:
    return int(rng.lognormvariate(5.5, 0.7)) % 1000 + 20


def _words(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(_VOCAB) for _ in range(count)]


def _host() -> Iterator[report.Row]:
    rng = _rng(1)
    for kind in _KINDS:
        core = _core(kind, 20_000, seqs=256, budget=8192, length=4096)
        for i in range(256):
            _add(core, f"r{i}", _words(rng, 30 + i), 2000)
        while core.scheduler.waiting or any(s.num_output_tokens < 40 for s in core.scheduler.running):
            core.step()
        yield {"kind": kind, "sequences": 256, **_host_time(core, 320)}


def _blocked() -> Iterator[report.Row]:
    rng = _rng(2)
    long = _words(rng, 120_000)
    for kind in ("full attention", "recurrent states"):
        per = 1 if kind == "full attention" else 16
        core = _core(kind, (10_800 + 64 * (per > 1) * per) // per, seqs=256, budget=8192, length=160_000)
        _add(core, "cached", long, 1)
        while core.has_work():
            core.step()
        for i in range(64):
            _add(core, f"r{i}", _words(rng, 250), 2000)
        for _ in range(40):
            core.step()
        _add(core, "head", long + _words(rng, 39_000), 100)
        core.step()
        assert core.scheduler.waiting, "it does not fit"
        yield {"kind": kind, "sequences": 64, "cached_tokens": len(long), **_host_time(core, 320)}
        assert core.scheduler.waiting


def _host_time(core: EngineCore, steps: int) -> report.Row:
    scheduler = core.scheduler
    spent: dict[str, list[float]] = {"schedule": [], "update": []}

    def timed(name: str) -> Callable[..., Any]:
        call, times = getattr(scheduler, name), spent[name]

        def measured(*args: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*args)
            finally:
                times.append(time.perf_counter() - start)

        return measured

    for name in spent:
        setattr(scheduler, name, timed(name))
    for _ in range(steps):
        core.step()
    middle = {name: 1e6 * statistics.median(times) for name, times in spent.items()}
    return {
        "us_schedule": round(middle["schedule"], 1), "us_update": round(middle["update"], 1),
        "us_best": round(1e6 * sum(map(min, spent.values())), 1),
    }  # fmt: skip


def _short() -> Iterator[report.Row]:
    units = {"full attention": 1500, "sliding windows": 420, "recurrent states": 200}
    for kind in _KINDS:
        for long_prompts in (False, True):
            rng = _rng(3)
            core = _core(kind, units[kind], seqs=128, budget=2048, length=8192)
            for i in range(300):
                if long_prompts and i % 10 == 0:
                    _add(core, f"r{i}", _words(rng, rng.randrange(2000, 7000)), rng.randrange(50, 300))
                else:
                    _add(core, f"r{i}", _words(rng, rng.randrange(50, 400)), _answer(rng))
            watch = Watch(core)
            while core.has_work():
                watch.step()
            yield {"kind": kind, "prompts": "some long" if long_prompts else "short", **watch.row()}


def _prompts() -> Iterator[report.Row]:
    for kind in _KINDS:
        for budget in (2048, 8192):
            rng = _rng(4)
            core = _core(kind, 40_000, seqs=256, budget=budget, length=40_000)
            watch = Watch(core)
            for i in range(32):
                _add(core, f"stream{i}", _words(rng, 100), 600)
            for step in range(500):
                if step % 50 == 20:
                    _add(core, f"long{step}", _words(rng, 32_000 + rng.randrange(700)), 50)
                if step % 5 == 0:
                    _add(core, f"short{step}", _words(rng, rng.randrange(30, 300)), 60)
                watch.step()
            plans = _plans(core)
            mixed = [plan for plan in plans if plan.num_tokens > len(plan.seqs)]
            ordered = sum(_singles_first(plan) for plan in mixed)
            yield {"kind": kind, "budget": budget, **watch.row(), "mixed": len(mixed), "singles_first": ordered}


def _plans(core: EngineCore) -> list[StepPlan]:
    assert isinstance(core.runner, Machine)
    return core.runner.plans


def _singles_first(plan: StepPlan) -> bool:
    chunks = [seq.num_tokens > 1 for seq in plan.seqs]
    return chunks == sorted(chunks)


_PARTS = {"host": _host, "blocked": _blocked, "short": _short, "prompts": _prompts}
