"""Lists the kernels of many wishes side by side: a list takes seconds of one core, all of it Python.

    this process ─► a fork for each core, with its share of the wishes ─(a line of JSON for each)─► this process
"""

import json
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch

from engine.errors import AtollError
from engine.kernels.runtime import prebuilt
from engine.kernels.runtime.compile_ahead import line_of
from engine.models.config.model import ModelConfig
from engine.prebuild.gpus import GPUS
from engine.prebuild.listing import kernels_for
from engine.prebuild.wishes import Wish

_MOST_FORKS = 16  # each takes half a gigabyte


class Listed(NamedTuple):
    """The kernels that a wish needs, as compile_ahead.line_of writes them, or why they could not be listed."""

    wish: Wish
    model: str = ""  # prebuilt.model_key
    lines: tuple[str, ...] = ()
    error: str = ""


def list_one(wish: Wish) -> Listed:
    """Raises ModelError or ConfigError."""
    target, total = GPUS[wish.gpu]
    config = wish.config()
    model = prebuilt.model_key(ModelConfig.load(config.model).raw)
    jobs = kernels_for(config, target, total)
    return Listed(wish, model, tuple(sorted(line_of(job, target.capability) for job in jobs)))


def list_all(wishes: Sequence[Wish], progress: Callable[[int, int], None]) -> list[Listed]:
    """In the order of `wishes`. What cannot be listed has an `error`."""
    torch.set_num_threads(1)  # forks must not wait for threads that only this process has
    forks = min(_MOST_FORKS, len(wishes), len(os.sched_getaffinity(0)))
    children = [_fork(wishes, range(first, len(wishes), forks)) for first in range(forks)]
    found: dict[int, Listed] = {}
    one_at_a_time = threading.Lock()  # two threads must not report the same count, or print into one line
    progress(0, len(wishes))

    def read(reading: int) -> None:
        with os.fdopen(reading, encoding="utf-8") as answers:
            for line in answers:
                number, model, lines, error = json.loads(line)
                with one_at_a_time:
                    found[number] = Listed(wishes[number], model, tuple(lines), error)
                    progress(len(found), len(wishes))

    with ThreadPoolExecutor(max(1, forks)) as threads:  # only now: a process is forked before it has threads
        list(threads.map(read, [reading for _, reading in children]))
    for pid, _ in children:
        os.waitpid(pid, 0)
    return [found.get(n, Listed(wish, error="its process ended")) for n, wish in enumerate(wishes)]


def _fork(wishes: Sequence[Wish], numbers: Sequence[int]) -> tuple[int, int]:
    """A process that lists these wishes, and the end of a pipe to read its answers from."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return pid, reading
    code = 1
    try:
        os.close(reading)
        with os.fdopen(writing, "w", encoding="utf-8") as answers:
            for number in numbers:
                answers.write(json.dumps(_answer(wishes, number)) + "\n")
                answers.flush()
        code = 0
    finally:
        os._exit(code)


def _answer(wishes: Sequence[Wish], number: int) -> tuple[int, str, tuple[str, ...], str]:
    try:
        listed = list_one(wishes[number])
    except AtollError as error:
        return number, "", (), str(error)
    except Exception as error:  # one model's defect must not end the others
        return number, "", (), f"{type(error).__name__}: {error}"
    return number, listed.model, listed.lines, ""
