"""The pool of KV pages: reference counts, the free list, and which page holds which hash.

    page 0          trash: padding writes land here; never given out
    in use          refs > 0
    free, cached    refs == 0 but still addressable by hash; reused last, oldest first (LRU)
    free, empty     refs == 0 and without a hash

A page is always in exactly one of these states; `check` verifies it.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable

TRASH_PAGE = 0


class PagePool:
    """Hands out page ids 1 .. num_pages-1. All operations are O(1) a page."""

    def __init__(self, num_pages: int) -> None:
        if num_pages < 2:
            raise ValueError(f"a pool needs at least 2 pages (one is the trash page), got {num_pages}")
        self.num_pages = num_pages
        self.refs = [0] * num_pages
        self._empty: deque[int] = deque(range(1, num_pages))
        self._cached: OrderedDict[int, None] = OrderedDict()  # refs == 0, hash known; oldest first
        self._hash_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}

    @property
    def capacity(self) -> int:
        return self.num_pages - 1

    @property
    def num_free(self) -> int:
        return len(self._empty) + len(self._cached)

    @property
    def num_in_use(self) -> int:
        return self.capacity - self.num_free

    def take(self, count: int) -> list[int] | None:
        """`count` pages with one reference each, or None (and no change) when fewer are free."""
        if count > self.num_free:
            return None
        pages = []
        for _ in range(count):
            if self._empty:
                page = self._empty.popleft()
            else:
                page, _ = self._cached.popitem(last=False)
                self._drop_hash(page)
            self.refs[page] = 1
            pages.append(page)
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """One more reference to each page (a prefix hit); wakes free cached pages."""
        for page in pages:
            if self.refs[page] == 0:
                del self._cached[page]
            self.refs[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """One reference less to each page. Give the last page of a sequence first: a chain is evicted from its end."""
        for page in pages:
            refs = self.refs[page] - 1
            if refs < 0:
                raise RuntimeError(f"page {page} released more often than taken")
            self.refs[page] = refs
            if refs == 0:
                if page in self._hash_of:
                    self._cached[page] = None
                else:
                    self._empty.append(page)

    def register(self, page: int, digest: bytes) -> None:
        """Make a full page findable by its hash. A hash that another page already answers to keeps that page."""
        if digest not in self._page_of:
            self._page_of[digest] = page
            self._hash_of[page] = digest

    def forget(self, pages: Iterable[int]) -> None:
        """Make pages unfindable (their content is not trusted, e.g. after a failed step)."""
        for page in pages:
            if page in self._hash_of:
                self._drop_hash(page)
                if self.refs[page] == 0:
                    del self._cached[page]
                    self._empty.append(page)

    def forget_all(self) -> None:
        """Empty the prefix cache; pages in use stay in use."""
        self.forget(list(self._hash_of))

    def find(self, digest: bytes) -> int | None:
        return self._page_of.get(digest)

    def is_free(self, page: int) -> bool:
        return self.refs[page] == 0

    def _drop_hash(self, page: int) -> None:
        del self._page_of[self._hash_of.pop(page)]

    def check(self) -> None:
        """Raise AssertionError unless every page is in exactly one state and the hash maps mirror each other."""
        empty, cached = set(self._empty), set(self._cached)
        assert len(empty) == len(self._empty), "a page is twice in the free list"
        assert not empty & cached, "a page is both empty and cached"
        assert TRASH_PAGE not in empty | cached, "the trash page was freed"
        assert self.refs[TRASH_PAGE] == 0, "the trash page was given out"
        for page in range(1, self.num_pages):
            free = page in empty or page in cached
            assert free == (self.refs[page] == 0), f"page {page}: refs {self.refs[page]}, free {free}"
            assert (page in cached) <= (page in self._hash_of), f"page {page} is cached without a hash"
            assert not (page in empty and page in self._hash_of), f"page {page} is empty but has a hash"
        assert {p: d for d, p in self._page_of.items()} == self._hash_of, "hash maps disagree"
