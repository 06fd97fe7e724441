"""The self-test's own process: facts of the machine, then check after check.

Compiling takes longest, so other processes do it; for known GPUs they start before this module is loaded (jobs.py).
This process lists what is to be compiled, slowest first. While they compile, it measures the machine and computes the
references of the checks; then it runs the kernels as they become ready.
"""

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from engine.kernels.runtime import compile_pool, warm_cache_hint
from engine.message import msg
from engine.selftest import early
from engine.selftest.checks import attention, delta, experts, fused, gemm, host, packed, pointwise, sampling
from engine.selftest.checks.check import Check, Side, kernel_side
from engine.selftest.compare import Difference, Result, difference
from engine.selftest.machine import examine, measure
from engine.selftest.report import Fault, Tally

if TYPE_CHECKING:
    from engine.kernels.runtime.compile_ahead import Work  # imported where there is a GPU: CPU builds have no Triton

# Checks whose kernels take longest to compile come last: those kernels are compiled first and run last.
EVERY = [
    *fused.CHECKS, *host.CHECKS, *gemm.CHECKS, *experts.CHECKS, *pointwise.CHECKS, *attention.CHECKS, *packed.CHECKS,
    *sampling.CHECKS, *delta.CHECKS,
]  # fmt: skip
_REASON = 400  # characters of an error that are shown


def run(tally: Tally, *, with_rates: bool = True) -> int:
    """The whole self-test on this machine's GPU. Returns the exit code."""
    opening = early.open_gpu()
    if opening is not None:
        with suppress(ImportError):  # the first check will report it
            kernel_side(torch.device("cpu"), torch.bfloat16)
            compile_pool.load_here()
        tally.watch.lap("triton")
        opening.join()
    found = examine(tally)
    tally.watch.lap("gpu")
    if isinstance(found, int):
        return found
    meanwhile = (lambda: measure(tally, found)) if with_rates else None
    return run_checks(tally, found.device, torch.bfloat16, with_fp8=found.fp8, meanwhile=meanwhile)


def run_checks(
    tally: Tally,
    device: torch.device,
    dtype: torch.dtype,
    *,
    with_fp8: bool,
    only: list[Check] | None = None,
    meanwhile: Callable[[], None] | None = None,
) -> int:
    """Compare every kernel with its reference on `device`, in `dtype`. On a CPU: in Triton's interpreter.

    `meanwhile` is called when other processes have started compiling."""
    every = EVERY if only is None else only
    possible = [check for check in every if with_fp8 or not check.needs_fp8]
    kernels = None
    if device.type == "cuda":
        tally.see({"kind": "begin", "name": "compilation"})
        kernels = _Kernels(possible, device, dtype)
        tally.watch.lap("jobs")
    if meanwhile is not None:
        meanwhile()
        tally.watch.lap("rates")
    tally.see({"kind": "begin", "name": "plain arithmetic"})
    references = {check.name: Reference.of(check, device, dtype) for check in possible}
    tally.watch.lap("twins")
    for check in every:
        reference = references.pop(check.name, None)
        if reference is None:
            skipped = {"skipped": True, "reason": msg("needs fp8")}
            tally.see({"kind": "check", "name": check.name, "passed": True} | skipped)
            continue
        if kernels is not None:
            kernels.wait(check)
            tally.watch.lap("waiting")
        tally.see({"kind": "begin", "name": check.name})
        fault = _judge(tally, check, reference, kernel_side(device, dtype))
        tally.watch.lap("kernels")
        if fault == "lost":
            break  # every later check would fail for the same reason
    if kernels is not None:
        work = kernels.finish()
        tally.watch.lap("waiting")
        tally.compiled(work and work._asdict())
    tally.times()
    return tally.end()


@dataclass
class Reference:
    """The results of a check's reference, or its error; and the numbers that it was given."""

    numbers: list[torch.Tensor]
    results: list[Result]
    error: Exception | None = None

    @classmethod
    def of(cls, check: Check, device: torch.device, dtype: torch.dtype) -> "Reference":
        side = Side(device, dtype)
        try:
            return cls(side.numbers, check.compute(side))
        except Exception as error:
            return cls(side.numbers, [], error)


def _judge(tally: Tally, check: Check, reference: Reference, side: Side) -> Fault | None:
    """Run one check and report it. Returns what was wrong with it."""
    fault: Fault | None = None
    worst, reason = None, ""
    try:
        worst = compare(check, reference, side)
        if not worst.passed:
            fault = "wrong"
    except Exception as error:
        fault, reason = _fault(error, side.device), _reason(error)
    error = worst.error if worst and math.isfinite(worst.error) else None
    if worst and error is None:
        reason = msg("the result holds NaN, infinity or another shape")
    line = {
        "kind": "check", "name": check.name, "passed": fault is None, "error": error,
        "bound": worst.bound if worst else None, "ms": round(side.ms, 3),
    }  # fmt: skip
    tally.see(line | ({"fault": fault, "reason": reason} if fault else {}))
    return fault


def compare(check: Check, reference: Reference, side: Side) -> Difference:
    """The worst difference between the kernels' results on `side` and the reference's, from the same inputs."""
    if reference.error is not None:
        raise reference.error
    side.numbers = reference.numbers
    ours = check.compute(side)
    found = [difference(a, b) for a, b in zip(ours, reference.results, strict=True)]
    return max(found, key=lambda d: d.share)


class _Kernels:
    """The kernels that the checks need, compiled in parallel while the first checks run. A kernel's error is raised
    when its check runs."""

    def __init__(self, every: list[Check], device: torch.device, dtype: torch.dtype) -> None:
        from engine.kernels.runtime.compile_ahead import Compilation
        from engine.kernels.runtime.launcher import Job, recording

        self._of: dict[str, set[Job]] = {}
        self._all = Compilation(torch.cuda.get_device_capability(device))
        for check in reversed(every):
            with recording() as jobs, suppress(Exception):
                check.compute(kernel_side(device, dtype, dry=True))
            self._of[check.name] = jobs
            self._all.add(jobs)
        self._all.seal()

    def wait(self, check: Check) -> None:
        self._all.wait(self._of[check.name])

    def finish(self) -> "Work | None":
        self._all.finish()
        warm_cache_hint.write("self-test")
        return self._all.work


def _fault(error: Exception, device: torch.device) -> Fault:
    if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error):
        return "memory"
    if device.type == "cuda":
        try:
            torch.cuda.synchronize(device)
        except RuntimeError:
            return "lost"
    return "error"


def _reason(error: Exception) -> str:
    """An error as one line. Triton's errors quote a page of source before they say what is wrong."""
    text = getattr(error, "error_message", None) or str(error)
    return f"{type(error).__name__}: {' '.join(str(text).split())}"[:_REASON]
