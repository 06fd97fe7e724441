"""The self-test's own process: facts of the machine, all variants compiled, then check after check."""

import math
import time
from collections.abc import Callable
from contextlib import suppress

import torch

from engine.selftest import checks, delta, few, host, sampling
from engine.selftest.checks import Check, Side, kernel_side
from engine.selftest.compare import Difference, difference
from engine.selftest.machine import examine, measure
from engine.selftest.report import Fault, Tally

EVERY = [*few.CHECKS, *host.CHECKS, *checks.CHECKS, *sampling.CHECKS, *delta.CHECKS]
_REASON = 400  # characters of an error that are shown


def run(tally: Tally) -> int:
    """The whole self-test on this machine's GPU. Returns the exit code."""
    found = examine(tally)
    if isinstance(found, int):
        return found
    return run_checks(
        tally, found.device, torch.bfloat16, with_fp8=found.fp8, meanwhile=lambda: measure(tally, found)
    )


def run_checks(
    tally: Tally,
    device: torch.device,
    dtype: torch.dtype,
    *,
    with_fp8: bool,
    only: list[Check] | None = None,
    meanwhile: Callable[[], None] | None = None,
) -> int:
    """Compare every kernel with its twin on `device`, in `dtype`. On a CPU: in Triton's interpreter.

    `meanwhile` is called once other processes compile."""
    every = EVERY if only is None else only
    possible = [check for check in every if with_fp8 or not check.needs_fp8]
    kernels = None
    if device.type == "cuda":
        tally.see({"kind": "begin", "name": "compilation"})
        kernels = _Kernels(possible, device, dtype)
    if meanwhile is not None:
        meanwhile()
    for check in every:
        if check not in possible:
            tally.see({"kind": "check", "name": check.name, "passed": True, "skipped": True, "reason": "needs fp8"})
            continue
        if kernels is not None:
            kernels.wait(check)
        tally.see({"kind": "begin", "name": check.name})
        if _judge(tally, check, device, dtype) == "lost":
            break  # every later check would fail for this one's reason
    if kernels is not None:
        seconds = kernels.finish()
        tally.fact("compilation", f"{seconds:.1f} s of waiting (none when kernels are at hand)", round(seconds, 2))
    return tally.end()


def _judge(tally: Tally, check: Check, device: torch.device, dtype: torch.dtype) -> Fault | None:
    """Run one check and report it. Returns what was wrong with it."""
    side = kernel_side(device, dtype)
    fault: Fault | None = None
    worst, reason = None, ""
    try:
        worst = compare(check, side)
        if not worst.passed:
            fault = "wrong"
    except Exception as error:
        fault, reason = _fault(error, device), _reason(error)
    error = worst.error if worst and math.isfinite(worst.error) else None
    if worst and error is None:
        reason = "the result holds NaN, infinity or another shape"
    line = {
        "kind": "check", "name": check.name, "passed": fault is None, "error": error,
        "bound": worst.bound if worst else None, "ms": round(side.ms, 3),
    }  # fmt: skip
    tally.see(line | ({"fault": fault, "reason": reason} if fault else {}))
    return fault


def compare(check: Check, side: Side) -> Difference:
    """The worst difference between what `side`'s kernels compute and what their twins do."""
    ours = check.compute(side)
    twin = check.compute(Side(side.device, side.dtype))
    found = [difference(a, b) for a, b in zip(ours, twin, strict=True)]
    return max(found, key=lambda d: d.share)


class _Kernels:
    """What the checks will need, compiled side by side while the first of them run. A kernel's error comes back when
    its check runs."""

    def __init__(self, every: list[Check], device: torch.device, dtype: torch.dtype) -> None:
        from engine.kernels.compile_ahead import Compilation
        from engine.kernels.launch import Job, recording

        self._of: dict[str, set[Job]] = {}
        self._waited = 0.0
        for check in every:
            with recording() as jobs, suppress(Exception):
                check.compute(kernel_side(device, dtype, dry=True))
            self._of[check.name] = jobs
        self._all = Compilation(set().union(*self._of.values()), torch.cuda.get_device_capability(device))

    def wait(self, check: Check) -> None:
        began = time.perf_counter()
        self._all.wait(self._of[check.name])
        self._waited += time.perf_counter() - began

    def finish(self) -> float:
        """Seconds that were waited for."""
        self._all.finish()
        return self._waited


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
    """One line. Triton's own errors quote a page of source before they say what is wrong."""
    text = getattr(error, "error_message", None) or str(error)
    return f"{type(error).__name__}: {' '.join(str(text).split())}"[:_REASON]
