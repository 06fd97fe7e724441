"""The lines of a self-test, one JSON object each, and the texts of the last one. Needs no torch, because the parent
process uses it, too.

    {"kind": "fact",  "name": "GPU", "value": "NVIDIA H100 80GB HBM3"}
    {"kind": "fact",  "name": "time", "value": "Python 0.2 s, …", "parts": {"python": 0.21, …}}     adds up to the whole
    {"kind": "begin", "name": "decode d128"}
    {"kind": "check", "name": "decode d128", "passed": true, "error": 0.004, "bound": 0.01, "ms": 0.21}
    {"kind": "check", "name": …, "passed": false, "error": null, "bound": null, "ms": 12, "fault": "error", "reason": …}
    {"kind": "end",   "exit_code": 0, "passed": 41, "failed": [], "skipped": 0, "seconds": 7.1, "message": …, "next": …}
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from engine.message import msg, with_ids
from engine.selftest.stopwatch import Stopwatch

OK, FAILED, NO_GPU = 0, 1, 2  # exit codes

# Why a check failed: a result differs from the reference's; the kernel could not be compiled or run; no memory; the GPU
# lost its state and refuses every later call; no answer in time, or the process died.
Fault = Literal["wrong", "error", "memory", "lost", "silent"]

_RANK: list[Fault] = ["lost", "silent", "memory", "error", "wrong"]  # the first of these is what to say
_NEXT: dict[Fault, str] = {
    "wrong": msg(
        "Do not serve with this GPU. Run it again: if the same checks fail, update the NVIDIA driver, and report the "
        "output of 'atoll doctor --json'; if others fail each time, suspect the GPU's memory."
    ),
    "error": msg(
        "Read the reasons above. Kernels are compiled into $TRITON_CACHE_DIR (~/.cache/atoll/triton) by way of "
        "$TMPDIR: both must be writable. If they are, report the output of 'atoll doctor --json'."
    ),
    "memory": msg(
        "Stop other programs that use the GPU (nvidia-smi lists them; 'atoll stop' stops an installed service), then "
        "run the test again."
    ),
    "lost": msg(
        "Run it again. If it happens again, look for 'Xid' in the kernel's log (dmesg), and restart the machine or "
        "reset the GPU."
    ),
    "silent": msg(
        "See whether nvidia-smi answers, and look for 'Xid' in the kernel's log (dmesg); restart the machine if it "
        "does not. A very slow disk can be the cause too: --time-limit gives more time."
    ),
}


def _failures(worst: Fault, **counts: Any) -> str:
    match worst:
        case "wrong":
            return msg(
                "{failed} of {total} checks failed: {names} computed wrong results.",
                **counts,
            )
        case "error":
            return msg("{failed} of {total} checks failed: {names} could not be compiled or run.", **counts)
        case "memory":
            return msg("{failed} of {total} checks failed: {names} found too little free GPU memory.", **counts)
        case "lost":
            return msg("{failed} of {total} checks failed: {names} made the GPU refuse every later call.", **counts)
        case "silent":
            return msg("{failed} of {total} checks failed: {names} gave no answer.", **counts)


def print_line(line: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(with_ids(line), ensure_ascii=False) + "\n")
    sys.stdout.flush()


@dataclass
class Tally:
    """Passes every line on, and knows the outcome in the end."""

    emit: Callable[[dict[str, Any]], None]
    passed: int = 0
    skipped: int = 0
    running: str = ""                                              # the check that has begun and not ended
    faults: dict[str, Fault] = field(default_factory=dict)         # of failed checks
    ended: bool = False
    watch: Stopwatch = field(default_factory=Stopwatch)

    def see(self, line: dict[str, Any]) -> None:
        if line["kind"] == "begin":
            self.running = line["name"]
        elif line["kind"] == "check":
            self.running = ""
            if line.get("skipped"):
                self.skipped += 1
            elif line["passed"]:
                self.passed += 1
            else:
                self.faults[line["name"]] = line.get("fault", "wrong")
        elif line["kind"] == "end":
            self.ended = True
        self.emit(line)

    def fact(self, name: str, value: str, number: float | None = None) -> None:
        self.see({"kind": "fact", "name": name, "value": value} | ({} if number is None else {"number": number}))

    def compiled(self, work: dict[str, Any] | None) -> None:
        """Report how long the test waited for kernels. `work`: compile_ahead.Work, if anything was compiled."""
        seconds = self.watch.parts["waiting"]
        line = {
            "kind": "fact", "name": msg("compilation"), "number": round(seconds, 2),
            "value": msg("{seconds} s of waiting (none if all kernels are cached)", seconds=f"{seconds:.1f}"),
        }  # fmt: skip
        if work is not None:
            since = {when: round(work[when] - self.watch.began, 2) for when in ("ready", "done")}
            line["work"] = work | since
        self.see(line)

    def times(self) -> None:
        """Report where the time went."""
        parts = {part: round(seconds, 2) for part, seconds in self.watch.parts.items()}
        self.see({"kind": "fact", "name": msg("time"), "value": self.watch.text(), "parts": parts})

    def no_gpu(self, message: str, next_step: str) -> int:
        self._end(NO_GPU, message, next_step)
        return NO_GPU

    def end(self) -> int:
        """The last line of a test that ran, and its exit code."""
        seconds = time.monotonic() - self.watch.began
        total = self.passed + len(self.faults)
        if not self.faults:
            message = msg("All {total} kernel checks passed in {seconds} s: this GPU is fit to serve.", total=total,
                          seconds=f"{seconds:.1f}")
            if self.skipped:
                message = msg(
                    "All {total} kernel checks passed in {seconds} s ({skipped} need a newer GPU): this GPU is fit to "
                    "serve.", total=total, seconds=f"{seconds:.1f}", skipped=self.skipped,
                )  # fmt: skip
            self._end(OK, message, "")
            return OK
        worst = min(self.faults.values(), key=_RANK.index)
        names = [name for name, fault in self.faults.items() if fault == worst]
        shown = ", ".join(names[:4])
        if len(names) > 4:
            shown = msg("{names} and {count} more", names=shown, count=len(names) - 4)
        message = _failures(worst, failed=len(self.faults), total=total, names=shown)
        self._end(FAILED, message, _NEXT[worst])
        return FAILED

    def _end(self, code: int, message: str, next_step: str) -> None:
        seconds = time.monotonic() - self.watch.began
        self.see({
            "kind": "end", "exit_code": code, "passed": self.passed, "failed": list(self.faults),
            "skipped": self.skipped, "seconds": round(seconds, 2), "message": message, "next": next_step,
        })  # fmt: skip


def as_text(line: dict[str, Any]) -> str | None:
    """A line as text for people, without colours; None if they need not see it."""
    if line["kind"] == "fact":
        return f"      {line['name']:28} {line['value']}"
    if line["kind"] == "end":
        return "\n" + line["message"] + (f"\nNext: {line['next']}" if line["next"] else "")
    if line["kind"] != "check":
        return None
    if line.get("skipped"):
        return f"  --  {line['name']:28} {line['reason']}"
    mark = "  ok" if line["passed"] else "FAIL"
    numbers = "" if line["error"] is None else f"error {line['error']:.1e} of {line['bound']:.0e}"
    return f"{mark}  {line['name']:28} {numbers:24} {line['ms']:8.2f} ms  {line.get('reason', '')}".rstrip()
