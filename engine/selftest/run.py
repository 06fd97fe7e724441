"""The self-test's own process: facts of the machine, all variants compiled, then check after check."""

import math
import time
from contextlib import suppress

import torch

from engine.selftest import checks, sampling
from engine.selftest.checks import Check, Side, kernel_side
from engine.selftest.compare import Difference, difference
from engine.selftest.machine import examine
from engine.selftest.report import Fault, Tally

_REASON = 400  # characters of an error that are shown


def run(tally: Tally) -> int:
    """The whole self-test on this machine's GPU. Returns the exit code."""
    found = examine(tally)
    if isinstance(found, int):
        return found
    return run_checks(tally, found.device, torch.bfloat16, with_fp8=found.fp8)


def run_checks(
    tally: Tally, device: torch.device, dtype: torch.dtype, *, with_fp8: bool, only: list[Check] | None = None
) -> int:
    """Compare every kernel with its twin on `device`, in `dtype`. On a CPU: in Triton's interpreter."""
    every = [*checks.CHECKS, *sampling.CHECKS] if only is None else only
    possible = [check for check in every if with_fp8 or not check.needs_fp8]
    if device.type == "cuda":
        tally.see({"kind": "begin", "name": "compilation"})
        began = time.perf_counter()
        _compile(possible, device, dtype)
        seconds = time.perf_counter() - began
        tally.fact("compilation", f"{seconds:.1f} s (less when kernels are at hand)", round(seconds, 2))
    for check in every:
        tally.see({"kind": "begin", "name": check.name})
        if check not in possible:
            tally.see({"kind": "check", "name": check.name, "passed": True, "skipped": True, "reason": "needs fp8"})
        elif _judge(tally, check, device, dtype) == "lost":
            break  # every later check would fail for this one's reason
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


def _compile(every: list[Check], device: torch.device, dtype: torch.dtype) -> None:
    """Compile what the checks will need, side by side. Errors come back when the check itself runs."""
    from engine.kernels.compile_ahead import compile_ahead
    from engine.kernels.launch import recording

    with recording() as jobs:
        for check in every:
            with suppress(Exception):
                check.compute(kernel_side(device, dtype, dry=True))
    compile_ahead(jobs, torch.cuda.get_device_capability(device))


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
