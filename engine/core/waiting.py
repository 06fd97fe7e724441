"""The queue of waiting requests, ordered by one of two policies: fcfs or priority.

fcfs ignores the request's priority. Within a priority, owners (API keys) take turns, and the requests of one owner
keep their order: an owner with 500 requests does not delay another owner's first. This is start-time fair queueing: an
owner's turn is the number of tokens that it was served since it began to wait, so nobody saves up turns by being idle.
Preempted sequences go before all others of their priority.
"""

import heapq
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from engine.core.kv.manager import KVManager
from engine.core.sequence import Sequence, Status

_USUAL_ANSWER = 256      # tokens charged for an answer unless fewer are allowed: its length is not known beforehand
_MOST_REMEMBERED = 4096  # owners without a waiting request whose turns are remembered

_Line = tuple[int, str]  # priority, owner


class WaitingQueue:
    """The waiting sequences. An aborted one stays inside until it reaches the front."""

    def __init__(self, policy: str) -> None:
        self._by_priority = policy == "priority"
        self._size = 0
        self._returned: list[tuple[int, int, Sequence]] = []    # a heap: priority, arrival order
        self._lines: dict[_Line, deque[Sequence]] = {}          # only lines that are not empty
        self._heads: list[tuple[int, int, int, str]] = []       # a heap of lines: priority, turn, arrival order, owner
        self._turns: dict[_Line, int] = {}
        self._served: dict[int, int] = {}                       # priority -> the turn that was served last

    def __len__(self) -> int:
        return self._size

    def push(self, seq: Sequence) -> None:
        priority, owner = line = self._priority(seq), seq.owner
        self._size += 1
        if waiting := self._lines.get(line):
            waiting.append(seq)
            return
        if len(self._turns) >= _MOST_REMEMBERED:
            self._forget()
        self._lines[line] = deque([seq])
        turn = self._turns[line] = max(self._turns.get(line, 0), self._served.get(priority, 0))
        heapq.heappush(self._heads, (priority, turn, seq.arrival_order, owner))

    def put_back(self, seq: Sequence) -> None:
        """Queue a preempted sequence again."""
        heapq.heappush(self._returned, (self._priority(seq), seq.arrival_order, seq))
        self._size += 1

    def peek(self) -> Sequence | None:
        while self._returned and self._returned[0][2].status is not Status.WAITING:
            heapq.heappop(self._returned)
        while self._heads:
            priority, _, _, owner = self._heads[0]
            waiting = self._lines[priority, owner]
            while waiting and waiting[0].status is not Status.WAITING:
                waiting.popleft()
            if waiting:
                break
            heapq.heappop(self._heads)
            del self._lines[priority, owner]
        if self._returned and (not self._heads or self._returned[0][0] <= self._heads[0][0]):
            return self._returned[0][2]
        return self._lines[self._heads[0][0], self._heads[0][3]][0] if self._heads else None

    def pop(self) -> Sequence:
        seq = self.peek()
        assert seq is not None
        self._size -= 1
        if self._returned and self._returned[0][2] is seq:
            heapq.heappop(self._returned)
        else:
            self._serve(seq)
        if not self._size:
            self._forget()
        return seq

    def forget_one(self) -> None:
        """A waiting sequence was aborted: stop counting it; `peek` skips it."""
        self._size -= 1

    def __iter__(self) -> Iterator[Sequence]:
        for seq in (*(seq for _, _, seq in self._returned), *(seq for line in self._lines.values() for seq in line)):
            if seq.status is Status.WAITING:
                yield seq

    def _priority(self, seq: Sequence) -> int:
        return seq.priority if self._by_priority else 0

    def _serve(self, seq: Sequence) -> None:
        """Take the first of the first line, and charge its owner."""
        priority, turn, _, owner = self._heads[0]
        waiting = self._lines[priority, owner]
        waiting.popleft()
        self._served[priority] = turn
        turn += seq.prompt_len + min(_USUAL_ANSWER, seq.max_len - seq.prompt_len)
        self._turns[priority, owner] = turn
        if waiting:
            heapq.heapreplace(self._heads, (priority, turn, waiting[0].arrival_order, owner))
        else:
            heapq.heappop(self._heads)
            del self._lines[priority, owner]

    def _forget(self) -> None:
        """Drop the turns of owners that have no waiting request."""
        self._turns = {line: turn for line, turn in self._turns.items() if line in self._lines}
        waiting = {priority for priority, _ in self._lines}
        self._served = {priority: turn for priority, turn in self._served.items() if priority in waiting}


@dataclass(frozen=True, slots=True)
class Blocked:
    """Why the first waiting sequence was not admitted. It holds no pages, so every attempt searches for its prefix
    again. This tells when an attempt is pointless, so that not every step makes one."""

    seq: Sequence
    length: int        # known tokens
    num_tokens: int    # how many of these are not cached
    lacking: int       # at least this many pages must become available first (0: pages are not the reason)
    promised: int      # pages that running prompts still needed
    num_released: int  # the arena's counter at that time

    def still_lacks_pages(self, kv: KVManager, promised: int) -> bool:
        """Whether it certainly does not fit. `promised`: pages that running prompts still need now."""
        no_longer_promised = max(0, self.promised - promised) * kv.num_full_groups
        return kv.arena.num_released - self.num_released + no_longer_promised < self.lacking
