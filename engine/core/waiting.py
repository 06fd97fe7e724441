"""The queue of waiting requests, ordered by one of two policies: fcfs or priority.

Both order by a key, smallest first. fcfs ignores the request's priority. A preempted sequence keeps its arrival number
and so returns to the front.
"""

import heapq
from collections.abc import Iterator

from engine.core.sequence import Sequence, Status

Key = tuple[int, float, int]


def order_of(seq: Sequence, policy: str) -> Key:
    return seq.order if policy == "priority" else (0, 0.0, seq.arrival_order)


class WaitingQueue:
    """A heap with lazy deletion: an aborted sequence stays inside until it surfaces."""

    def __init__(self, policy: str) -> None:
        self._policy = policy
        self._heap: list[tuple[Key, Sequence]] = []
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def push(self, seq: Sequence) -> None:
        heapq.heappush(self._heap, (order_of(seq, self._policy), seq))
        self._size += 1

    def peek(self) -> Sequence | None:
        while self._heap and self._heap[0][1].status is not Status.WAITING:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def pop(self) -> Sequence:
        seq = self.peek()
        assert seq is not None
        heapq.heappop(self._heap)
        self._size -= 1
        return seq

    def forget_one(self) -> None:
        """A waiting sequence was aborted: stop counting it; `peek` skips it."""
        self._size -= 1

    def __iter__(self) -> Iterator[Sequence]:
        return (seq for _, seq in self._heap if seq.status is Status.WAITING)
