"""The rows of the worker's request table: each running sequence has one."""


class RequestRows:
    """Rows 1 to `count`; row 0 is the padding row. A row is reused only after the steps that touch it."""

    def __init__(self, count: int) -> None:
        self.free = list(range(count, 0, -1))
        self.in_flight: list[tuple[int, int]] = []  # (step, row): free once the step has completed
        self.completed_step = -1

    def take(self) -> int:
        return self.free.pop()

    def give_back(self, row: int, last_step: int) -> None:
        """`last_step`: the newest step that touches the row."""
        if last_step > self.completed_step:
            self.in_flight.append((last_step, row))
        else:
            self.free.append(row)

    def complete(self, step: int) -> None:
        """Steps complete in order: the rows that no later step touches are free."""
        self.completed_step = max(self.completed_step, step)
        if self.in_flight:
            self.free += [row for last, row in self.in_flight if last <= step]
            self.in_flight = [(last, row) for last, row in self.in_flight if last > step]

    def check(self, taken: list[int]) -> None:
        """Invariant: every row is free, in flight or one of `taken`."""
        rows = [*taken, *self.free, *(row for _, row in self.in_flight)]
        assert sorted(rows) == list(range(1, len(rows) + 1)), "a row is lost or owned twice"
