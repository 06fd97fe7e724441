"""A CPU's step on the whole team of threads, which spins from one operator to the next.

    team     every operator on both threads; none of them sleeps during a step
    parts    two halves of the step, each on one thread (parts.py)
    alone    one thread

The team is fastest as long as the cores are its own. Another process that computes on one of them makes each of a
step's hundreds of operators wait for a time slice, while the other thread spins: a step of 30 ms takes 300, one with
prompts seconds. Then the team gets less CPU time than its cores have, and steps run in the other ways for a while.
Before it is used again, and at first, it proves itself with a short piece of work that nobody waits for.
(Measurements: docs/performance/cpu-threads.md.)
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from engine.kernels.runtime.cpu_threads import num_threads, team_spins
from engine.worker.pause import Pause, Timing

_LEAST_SHARE = 0.8        # of the cores' time: beside a process that wants one core, two threads get at most 0.75
_SECONDS = 0.2            # of steps by which the team is judged, if they are fewer than usual
_FIRST_PAUSE = 8          # steps: trying again costs no more than a proof
_PROOF_SECONDS = 0.02     # several time slices
_PROOF_NUMBERS = 1 << 16  # enough for an operator to use both threads


class Team:
    def __init__(self) -> None:
        self._threads = torch.get_num_threads()
        self.exists = self._threads > 1 and team_spins()
        self._pause = Pause(_LEAST_SHARE * self._threads, seconds=_SECONDS, first=_FIRST_PAUSE)
        self._has_proved = False

    def allows_step(self) -> bool:
        """Whether the next step that may run on the team should."""
        if not self.exists or not self._pause.allows():
            return False
        if not self._has_proved:
            proof = self._proof()
            self._has_proved = proof.cpu >= self._pause.least_overlap * proof.wall
            if not self._has_proved:
                self._pause.begin()
        return self._has_proved

    @contextmanager
    def observed(self) -> Iterator[None]:
        """Run a step on the team."""
        cpu, wall = time.process_time(), time.perf_counter()
        yield
        self._has_proved = self._pause.observe(_since(cpu, wall))

    def _proof(self) -> Timing:
        numbers = torch.zeros(_PROOF_NUMBERS)
        with num_threads(self._threads):
            numbers.add_(1)  # wakes the threads
            cpu, wall = time.process_time(), time.perf_counter()
            while time.perf_counter() - wall < _PROOF_SECONDS:
                numbers.add_(1)
            return _since(cpu, wall)


def _since(cpu: float, wall: float) -> Timing:
    return Timing(time.process_time() - cpu, time.perf_counter() - wall)
