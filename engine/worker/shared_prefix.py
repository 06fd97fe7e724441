"""Finds the prefix that a step's decoding sequences share: equal pages at the beginning of their block tables.

Only prefix hits put a page into two tables, and a page's name covers all tokens before it (engine/core/kv/prefix.py).
So sequences with the same n-th page begin with the same n pages of tokens. One column of the tables decides, and the
run's end is found by bisection.
"""

import numpy as np

from engine.core.batch import StepPlan
from engine.core.kv.pages import NULL_PAGE
from engine.kernels.attention.shared_prefix import LEAST_SEQUENCES, least_tokens, pays


class SharedPrefixes:
    """A copy of the block tables on the host, and what was found for the last step: most steps have the same sequences
    as the one before."""

    def __init__(self, num_rows: int, width: int, page_size: int, group: int) -> None:
        """`group`: the group of pages whose layers can share prefixes; it has no window."""
        self._tables = np.zeros((num_rows, width), dtype=np.int32)
        self._page_size = page_size
        self._group = group
        self._rows = np.zeros(0, dtype=np.int64)
        self._found: np.ndarray | None = None

    def note(self, plan: StepPlan) -> None:
        """Apply a step's changes. Call it for every step."""
        for update in plan.page_updates:
            if update.group == self._group:
                self._tables[update.row, update.start : update.start + len(update.pages)] = update.pages
        if plan.row_inits:  # a row has a new owner
            self._rows = self._rows[:0]

    def find(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray | None:
        """[B] int32: how many tokens each of these sequences shares, 0 or the same number; None if it does not pay.

        `positions`: of the one token that each sequence has in this step, which is never shared."""
        if len(rows) < LEAST_SEQUENCES:
            return None
        if not np.array_equal(rows, self._rows):
            self._rows, self._found = rows, self._search(rows, positions)
        return self._found

    def _search(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray | None:
        whole = positions // self._page_size  # pages that a sequence may share
        members, depth = self._largest_group(rows, whole)
        if not depth:
            return None
        end = int(whole[members].min()) + 1
        while end - depth > 1:
            middle = (depth + end) // 2
            column = self._tables[rows[members], middle - 1]
            if (column == column[0]).all():
                depth = middle
            else:
                end = middle
        shared = np.zeros(len(rows), dtype=np.int32)
        shared[members] = depth * self._page_size
        return shared

    def _largest_group(self, rows: np.ndarray, whole: np.ndarray) -> tuple[np.ndarray, int]:
        """The sequences whose sharing saves the most pages, and how many pages they share at least; 0 if sharing does
        not pay. Several depths are tried: a template that all requests begin with must not hide a long document that
        only some of them share."""
        depth = -(-least_tokens(len(rows)) // self._page_size)
        best, most = (np.zeros(0, dtype=np.int64), 0), 0
        while depth <= self._tables.shape[1]:
            long = np.flatnonzero(whole >= depth)
            long = long[self._tables[rows[long], depth - 1] != NULL_PAGE]  # unset entries are equal, but not shared
            if len(long) < LEAST_SEQUENCES:
                return best
            last = self._tables[rows[long], depth - 1]
            pages, counts = np.unique(last, return_counts=True)
            count = int(counts.max())
            if count < LEAST_SEQUENCES:
                return best
            if pays(count, depth * self._page_size) and (count - 1) * depth > most:
                best, most = (long[last == pages[counts.argmax()]], depth), (count - 1) * depth
            depth *= 2
        return best
