"""The pools of pages and state slots, with reference counts, free lists and hashes; and the arena of slabs that they
share.

    page 0          null page: padding writes go here, and table entries out of a window point here; never allocated
    in use          refs > 0
    free, cached    refs == 0 but still addressable by hash; reused last, oldest first (LRU)
    free, empty     refs == 0 and without a hash

A page is always in exactly one of these states, or its slab belongs to another pool; `check` verifies it.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence
from itertools import chain, compress, islice

NULL_PAGE = 0


class Arena:
    """Equal pieces of memory (slabs), each free or owned by one pool.

    `moved` lists slabs that changed owner and still hold the old pool's data; whoever clears them empties the list.
    """

    def __init__(
        self, num_slabs: int, per_slab: Sequence[int], first_ids: Sequence[int] = (), runs: Sequence[int] = ()
    ) -> None:
        self.num_slabs = num_slabs
        self.free = deque(range(num_slabs))
        ones = [1] * len(per_slab)
        self.pools = [
            PagePool(self, per, first, run)
            for per, first, run in zip(per_slab, first_ids or ones, runs or ones, strict=True)
        ]
        self.moved: list[int] = []
        self.num_released = 0              # pages and slots released by their last owner, so far
        self.named_watched = False         # a page was given a watched name
        self._watched: set[bytes] = set()
        self._last_owner: list[PagePool | None] = [None] * num_slabs
        self._clock = 0
        if len(self.pools) == 1:  # no other pool
            self.pools[0].adopt_all()

    def tick(self) -> int:
        self._clock += 1
        return self._clock

    def fits(self, needs: Sequence[int], woken: Sequence[Iterable[int]] = ()) -> bool:
        """Whether all pools together can provide these pages, once the idle cached pages `woken` are in use again."""
        return self._slack(needs, woken) >= 0

    def lacking(self, needs: Sequence[int], woken: Sequence[Iterable[int]] = ()) -> int:
        """0 if they fit, else the fewest pages that must be released first."""
        slack = self._slack(needs, woken)
        if slack >= 0:
            return 0
        if len(self.pools) > 1:
            return -slack  # the release of a page can free a slab
        [pool], [need], [wake] = self.pools, needs, woken or [()]
        return need + sum(map(pool.is_free, wake)) - pool.num_free

    def watch(self, names: Iterable[bytes]) -> None:
        """From now on, set `named_watched` when a page gets one of these names. Replaces the names watched before."""
        self._watched, self.named_watched = set(names), False

    def note_name(self, name: bytes) -> None:
        if name in self._watched:
            self.named_watched = True

    def take(self, needs: Sequence[int]) -> list[list[int]] | None:
        """That many pages of each pool, or None (and no change) when they do not all fit."""
        slack = self._slack(needs)
        if slack < 0:
            return None
        # A pool may take a whole slab for a new page although evicting a cached page would do. It must not take a slab
        # that another pool needs.
        careful = slack < sum(needs)
        taken = []
        for pool, need in zip(self.pools, needs, strict=True):
            pages = pool.take_carefully(need) if careful else pool.take(need)
            assert pages is not None, "known to fit"
            taken.append(pages)
        return taken

    def _slack(self, needs: Sequence[int], woken: Sequence[Iterable[int]] = ()) -> int:
        """Unused slabs minus the fewest that `needs` takes; negative if they do not fit."""
        spare, missing = len(self.free), 0
        for pool, need, wake in zip(self.pools, needs, woken or [()] * len(needs), strict=True):
            asleep = [page for page in wake if pool.is_free(page)]
            idle = len(pool.idle) - len({e for page in asleep if (e := pool.slab_of(page)) in pool.idle})
            spare += idle
            short = need + len(asleep) - (pool.num_free - idle * pool.per_slab)
            if short > 0:
                missing += -(-short // pool.per_slab)
        return spare - missing

    def find_slab(self, taker: "PagePool", before: int | None = None) -> int | None:
        """A slab for `taker`: a free one, else the slab of another pool that has been idle the longest. `before`: only
        a slab that has been idle since before that time."""
        if self.free:
            slab = self.free.popleft()
        else:
            idle = [(next(iter(pool.idle.values())), pool) for pool in self.pools if pool is not taker and pool.idle]
            since, pool = min(idle, key=lambda entry: entry[0], default=(0, None))
            if pool is None or (before is not None and since >= before):
                return None
            slab = pool.give_up_idle()
        if self._last_owner[slab] not in (None, taker):
            self.moved.append(slab)
        self._last_owner[slab] = taker
        return slab

    def check(self) -> None:
        """Raise AssertionError unless every slab has one owner and every pool is sound."""
        slabs = list(chain(self.free, *(pool.used for pool in self.pools)))
        assert len(slabs) == self.num_slabs, "a slab is lost or owned twice"
        assert set(slabs) == set(range(self.num_slabs)), "a slab is lost or owned twice"
        for pool in self.pools:
            pool.check()


class PagePool:
    """Hands out the pages of its slabs. All operations are O(1) per page.

    The pages of a slab are `runs` runs of consecutive numbers. Each run of slab 0 follows `first_id` numbers that are
    never handed out:

        number    0 .. first_id - 1 | run 0 of slab 0 | run 0 of slab 1 | ... | first_id numbers | run 1 of slab 0 | ...
    """

    def __init__(self, arena: Arena, per_slab: int, first_id: int, runs: int = 1) -> None:
        self.per_slab = per_slab
        self._run = per_slab // runs
        self._between_runs = first_id + arena.num_slabs * self._run
        self.num_pages = runs * self._between_runs
        self.refs = [0] * self.num_pages
        self.used: dict[int, int] = {}                          # pages in use of each slab that is ours
        self.idle: OrderedDict[int, int] = OrderedDict()        # our slabs without a page in use; since when
        self.num_in_use = 0
        self._arena = arena
        self._first_id = first_id
        self._empty: OrderedDict[int, deque[int]] = OrderedDict()  # empty pages by slab; emptied slabs come last
        self._num_empty = 0
        self._cached: OrderedDict[int, int] = OrderedDict()     # refs == 0, hash known; since when; oldest first
        self._hash_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}

    @property
    def capacity(self) -> int:
        """How many pages there would be if this pool owned all slabs."""
        return self._arena.num_slabs * self.per_slab

    @property
    def num_free(self) -> int:
        """Free pages in the slabs of this pool."""
        return self._num_empty + len(self._cached)

    @property
    def num_available(self) -> int:
        """Free pages, including those of slabs that this pool could acquire."""
        others = sum(len(pool.idle) for pool in self._arena.pools if pool is not self)
        return self.num_free + (len(self._arena.free) + others) * self.per_slab

    def take(self, count: int) -> list[int] | None:
        """`count` pages with one reference each, or None (and no change) when fewer are available."""
        if count > self.num_free and count > self.num_available:
            return None
        if self._num_empty < count and len(self._arena.pools) > 1:
            self._find_slabs(count)
        pages = []
        for _ in range(count):
            if self._num_empty:
                page = self._pop_empty(next(iter(self._empty)))
            else:
                page = self._evict(next(iter(self._cached)))
            pages.append(self._give(page))
        return pages

    def take_carefully(self, count: int) -> list[int]:
        """Pages that are known to fit, taking as few unused slabs as possible."""
        pages: list[int] = []
        for slab in [e for e in self._empty if e not in self.idle]:
            while len(pages) < count and slab in self._empty:
                pages.append(self._give(self._pop_empty(slab)))
        busy = (page for page in self._cached if self.slab_of(page) not in self.idle)
        pages += [self._give(self._evict(page)) for page in list(islice(busy, count - len(pages)))]
        while len(pages) < count:
            if not self.idle or self._arena.free:
                slab = self._arena.find_slab(self)
                assert slab is not None, "known to fit"
                self._adopt(slab)
            else:
                slab = next(iter(self.idle))
            for page in [p for p in self._pages_of(slab) if p in self._cached]:
                self._add_empty(self._evict(page))
            while len(pages) < count and slab in self._empty:
                pages.append(self._give(self._pop_empty(slab)))
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """One more reference to each page (a prefix hit); wakes free cached pages."""
        for page in pages:
            if self.refs[page] == 0:
                del self._cached[page]
                self._wake(page)
            self.refs[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Drop one reference to each page. List the last page of a sequence first, so that a chain is evicted from its
        end."""
        for page in pages:
            refs = self.refs[page] - 1
            if refs < 0:
                raise RuntimeError(f"page {page} released more often than taken")
            self.refs[page] = refs
            if refs == 0:
                slab = self.slab_of(page)
                self._arena.num_released += 1
                self.num_in_use -= 1
                self.used[slab] -= 1
                if page in self._hash_of:
                    self._cached[page] = self._arena.tick()
                else:
                    self._add_empty(page)
                if self.used[slab] == 0:
                    self.idle[slab] = self._arena.tick()
                    self._return_if_empty(slab)

    def register(self, page: int, digest: bytes) -> None:
        """Make a full page findable by its hash. If another page already has this hash, that page keeps it."""
        if digest not in self._page_of:
            self._page_of[digest] = page
            self._hash_of[page] = digest
            self._arena.note_name(digest)

    def forget(self, pages: Iterable[int]) -> None:
        """Make pages unfindable (their content is not trusted, e.g. after a failed step)."""
        for page in pages:
            if page in self._hash_of:
                self._drop_hash(page)
                if self.refs[page] == 0:
                    del self._cached[page]
                    self._add_empty(page)
                    self._return_if_empty(self.slab_of(page))

    def forget_all(self) -> bool:
        """Empty the prefix cache; pages in use stay in use. Returns whether it held any."""
        known = list(self._hash_of)
        self.forget(known)
        return bool(known)

    def find(self, digest: bytes) -> int | None:
        return self._page_of.get(digest)

    def is_free(self, page: int) -> bool:
        return self.refs[page] == 0

    def slab_of(self, page: int) -> int:
        return (page % self._between_runs - self._first_id) // self._run

    def give_up_idle(self) -> int:
        """Give up the slab that has been idle the longest, with what it caches."""
        slab = next(iter(self.idle))
        for page in self._pages_of(slab):
            if page in self._cached:
                self._drop_hash(page)
                del self._cached[page]
        self._part_with(slab)
        return slab

    def adopt_all(self) -> None:
        while self._arena.free:
            self._adopt(self._arena.free.popleft())

    # -- inside ---------------------------------------------------------------------------------------------------

    def _pages_of(self, slab: int) -> list[int]:
        first = self._first_id + slab * self._run
        return [page for start in range(first, self.num_pages, self._between_runs)
                for page in range(start, start + self._run)]  # fmt: skip

    def _find_slabs(self, count: int) -> None:
        """Acquire slabs until `count` pages are free. Never evicts a page that is younger than another pool's cached
        pages."""
        while self._num_empty < count:
            oldest = next(iter(self._cached.values())) if self.num_free >= count else None
            slab = self._arena.find_slab(self, oldest)
            if slab is None:
                return
            self._adopt(slab)

    def _adopt(self, slab: int) -> None:
        self.used[slab] = 0
        self.idle[slab] = self._arena.tick()
        self._empty[slab] = deque(self._pages_of(slab))
        self._num_empty += self.per_slab

    def _part_with(self, slab: int) -> None:
        del self.used[slab], self.idle[slab]
        self._num_empty -= len(self._empty.pop(slab, ()))

    def _return_if_empty(self, slab: int) -> None:
        """Return an empty slab (nothing in use, nothing cached) to the arena. The only pool of an arena keeps its
        slabs."""
        empty = self._empty.get(slab, ())
        if slab in self.idle and len(empty) == self.per_slab and len(self._arena.pools) > 1:
            self._part_with(slab)
            self._arena.free.append(slab)

    def _wake(self, page: int) -> None:
        """Count a page as in use."""
        slab = self.slab_of(page)
        self.num_in_use += 1
        self.used[slab] += 1
        self.idle.pop(slab, None)

    def _give(self, page: int) -> int:
        self.refs[page] = 1
        self._wake(page)
        return page

    def _pop_empty(self, slab: int) -> int:
        pages = self._empty[slab]
        page = pages.popleft()
        self._num_empty -= 1
        if not pages:
            del self._empty[slab]
        return page

    def _add_empty(self, page: int) -> None:
        self._empty.setdefault(self.slab_of(page), deque()).append(page)
        self._num_empty += 1

    def _evict(self, page: int) -> int:
        del self._cached[page]
        self._drop_hash(page)
        return page

    def _drop_hash(self, page: int) -> None:
        del self._page_of[self._hash_of.pop(page)]

    def check(self) -> None:
        """Raise AssertionError unless every page of our slabs is in one state and the hash maps mirror each other."""
        empty = set(chain.from_iterable(self._empty.values()))
        assert len(empty) == sum(map(len, self._empty.values())) == self._num_empty, "a page is twice in the free list"
        assert empty.isdisjoint(self._cached), "a page is both empty and cached"
        ours = set(chain.from_iterable(map(self._pages_of, self.used)))
        assert empty <= ours, "a page of another pool is free here"
        assert self._cached.keys() <= ours, "a page of another pool is free here"
        in_use = set(compress(range(self.num_pages), self.refs))
        assert in_use <= ours, f"page {min(in_use - ours)} is not ours"
        assert self._hash_of.keys() <= ours, f"page {min(self._hash_of.keys() - ours)} is not ours"
        free = len(empty) + len(self._cached)
        assert in_use.isdisjoint(empty), f"page {min(in_use & empty)}: in use and free"
        assert in_use.isdisjoint(self._cached), f"page {min(in_use & self._cached.keys())}: in use and free"
        assert free + len(in_use) == len(ours), f"page {min(ours - empty - in_use - self._cached.keys())}: 0 refs"
        assert self._cached.keys() <= self._hash_of.keys(), "a page is cached without a hash"
        assert empty.isdisjoint(self._hash_of), "an empty page has a hash"
        assert all(self._empty.values()), "a slab is listed without an empty page"
        assert {p: d for d, p in self._page_of.items()} == self._hash_of, "hash maps disagree"
        counted = Counter(map(self.slab_of, in_use))
        for slab, used in self.used.items():
            assert used == counted[slab], f"slab {slab} lost count"
            assert (slab in self.idle) == (used == 0), f"slab {slab}: {used} pages in use"
        assert self.num_in_use == sum(self.used.values()), "lost count of the pages in use"
