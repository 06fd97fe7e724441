"""A stored list of the self-test's kernels, so that compilers can start while PyTorch is still loading.

    python -m engine.selftest.jobs [--write]        check whether jobs.json is up to date, or update it

For a few kinds of GPU, jobs.json lists the kernels of the checks, as `recording` records them: one variant per line,
slowest to compile first. The list is only a guess: the test waits for what its checks need on the present GPU (run.py).
A variant that is missing here is compiled a little later, and a superfluous one is wasted work.
"""

import argparse
import json
import sys
import threading
from pathlib import Path
from typing import Any

from engine.capabilities import FP8_COMPUTE_CAPABILITY
from engine.kernels.runtime import compile_pool
from engine.selftest.nvml import compute_capability

# Compute capability -> shared memory of a program, multiprocessors: A100, H100 and H200, RTX PRO 6000 and RTX 5090.
GPUS = {(8, 0): (166_912, 108), (9, 0): (232_448, 132), (12, 0): (101_376, 188)}
_FILE = Path(__file__).with_name("jobs.json")
_PACKAGE = "engine.kernels."
_NONE = "-"  # an argument that is None, among the types
_PATIENCE = 0.2  # seconds

Row = tuple[str, str, str, dict[str, Any], int, int]  # capabilities, kernel, types, constants, warps, stages


def give_early() -> None:
    """Let the pool that was started early compile what this machine's GPU will probably need.

    Runs in the background, because a driver may be slow to answer. Usually it is done before PyTorch starts to load;
    threads that load libraries would wait for each other.
    """
    if compile_pool.is_under_way():
        thread = threading.Thread(target=_give_early, daemon=True)
        thread.start()
        thread.join(_PATIENCE)


def _give_early() -> None:
    capability = compute_capability()
    if capability is not None:
        compile_pool.give_early(lines_for(capability))


def lines_for(capability: tuple[int, int]) -> list[str]:
    """Compile jobs for such a GPU; none if its kind is not listed."""
    name, lines = _name(capability), []
    for capabilities, kernel, types, constants, num_warps, num_stages in json.loads(_FILE.read_text("utf-8")):
        if name in capabilities.split():
            module, _, function = kernel.rpartition(".")
            given = [None if kind == _NONE else kind for kind in types.split()]
            lines.append(
                compile_pool.job_line(_PACKAGE + module, function, given, constants, num_warps, num_stages, capability)
            )
    return lines


def _name(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m engine.selftest.jobs")
    parser.add_argument("--write", action="store_true", help="bring the list up to date")
    options = parser.parse_args()
    text = _as_text(_rows())
    if options.write:
        _FILE.write_text(text, "utf-8")
    elif not _FILE.exists() or _FILE.read_text("utf-8") != text:
        sys.stdout.write(f"{_FILE} is not what the checks need now: python -m engine.selftest.jobs --write\n")
        return 1
    return 0


def _rows() -> list[Row]:
    """The kernels that the checks need on each listed GPU. None of these GPUs has to be present."""
    from engine.kernels.runtime.compile_ahead import line_of, longest_first

    first = next(iter(GPUS))
    on: dict[str, list[str]] = {}  # a variant, as a job for the first GPU -> the GPUs that need it
    for capability in GPUS:
        for job in _needed(capability):
            on.setdefault(line_of(job, first), []).append(_name(capability))
    rows = []
    for line in longest_first(on):
        job = json.loads(line)
        kernel = f"{job['module'].removeprefix(_PACKAGE)}.{job['name']}"
        types = " ".join(kind or _NONE for kind in job["types"])
        rows.append((" ".join(on[line]), kernel, types, job["constants"], job["num_warps"], job["num_stages"]))
    return rows


def _needed(capability: tuple[int, int]) -> set:
    import torch

    from engine.kernels.runtime.launcher import Target, recording
    from engine.selftest.checks.check import kernel_side
    from engine.selftest.run import EVERY

    with recording(Target(capability, *GPUS[capability])) as jobs:
        for check in EVERY:
            if not check.needs_fp8 or capability >= FP8_COMPUTE_CAPABILITY:
                check.compute(kernel_side(torch.device("cpu"), torch.bfloat16, dry=True))
    return jobs


def _as_text(rows: list[Row]) -> str:
    return "[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n"


if __name__ == "__main__":
    sys.exit(main())
