"""The longest cached prefix from which a sequence can continue.

Full attention needs every page. A sliding window needs the pages that the next token attends to; earlier entries of its
table may be the null page. Recurrent layers also need a checkpoint of the state after the last page.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from engine.core.kv.pages import NULL_PAGE, PagePool
from engine.core.kv.spec import CacheMemory


@dataclass(frozen=True, slots=True)
class Prefix:
    """The cached beginning of a sequence: in each group the pages of its first `num_tokens` tokens."""

    num_tokens: int = 0
    tables: list[list[int]] = field(default_factory=list)
    checkpoint: int | None = None   # slot of the recurrent state after these tokens
    branch: int = 0                 # tokens that have cached pages, with or without a cached state


class PrefixSearch:
    """Looks pages and states up by the names of pages (prefix.py). Changes nothing."""

    def __init__(self, memory: CacheMemory, pools: Items[PagePool], slots: PagePool | None) -> None:
        self.memory, self.pools, self.slots = memory, pools, slots
        self._windows = memory.window_groups

    def longest(self, digests: list[bytes]) -> Prefix:
        """For a sequence whose full pages have these names."""
        size = self.memory.page_size
        found = [
            _cached_pages(pool, digests, window)
            for pool, window in zip(self.pools, self.memory.windows, strict=True)
        ]
        branch = count = min(len(pages) for pages in found)
        checkpoint = None
        if self._windows or self.slots is not None:
            branch, count = self._resumable(found, digests, count)
        if self.slots is not None and count:
            checkpoint = self.slots.find(digests[count - 1])
        tables = [pages[:count] for pages in found]
        for group in self._windows:
            passed = min(self.memory.pages_out_of_window(group, count * size), count)
            tables[group][:passed] = [NULL_PAGE] * passed
        return Prefix(count * size, tables, checkpoint, branch * size)

    def _resumable(self, found: list[list[int]], digests: list[bytes], most: int) -> tuple[int, int]:
        """(pages, pages) up to `most`: the longest prefix whose windows are all cached, and the longest that has a
        state as well."""
        gap = [0] * len(self._windows)       # for each window group: pages up to and including its last gap
        longest = with_state = 0
        for n in range(1, most + 1):
            whole = True
            for i, group in enumerate(self._windows):
                if found[group][n - 1] == NULL_PAGE:
                    gap[i] = n
                whole &= gap[i] <= self.memory.pages_out_of_window(group, n * self.memory.page_size)
            if whole:
                longest = n
                if self.slots is None or self.slots.find(digests[n - 1]) is not None:
                    with_state = n
        return longest, with_state


def _cached_pages(pool: PagePool, digests: list[bytes], window: int | None) -> list[int]:
    """Pages by name. Full attention stops at the first missing page; a window continues after it."""
    pages = []
    for digest in digests:
        page = pool.find(digest)
        if page is None:
            if window is None:
                break
            page = NULL_PAGE
        pages.append(page)
    return pages
