"""A CPU's step on the whole team of threads, which spins from one operator to the next.

    team     every operator on all threads; none of them sleeps during a step
    parts    two halves of the step, each on half of the threads (parts.py)
    alone    one thread

The team is fastest as long as the cores are its own. Another process that computes on one of them makes each of a
step's hundreds of operators wait for a time slice, while the other threads spin. Then the team's CPU time is far less
than its wall time would allow, and steps run in the other ways for a while. (Measurements:
docs/performance/cpu-threads.md.)
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from engine.kernels.runtime.cpu_threads import team_spins
from engine.worker.pause import Pause, Timing

_LEAST_SHARE = 0.8   # of the cores' time: two threads beside a process that wants one core get half to three quarters
_TRIAL = 3           # steps: beside such a process each takes up to ten times as long


class Team:
    def __init__(self) -> None:
        threads = torch.get_num_threads()
        self.exists = threads > 1 and team_spins()
        self._pause = Pause(_LEAST_SHARE * threads, _TRIAL)

    def allows_step(self) -> bool:
        """Whether the next step that may run on the team should."""
        return self.exists and self._pause.allows()

    @contextmanager
    def observed(self) -> Iterator[None]:
        """Run a step on the team."""
        cpu, wall = time.process_time(), time.perf_counter()
        yield
        self._pause.observe(Timing(time.process_time() - cpu, time.perf_counter() - wall))
