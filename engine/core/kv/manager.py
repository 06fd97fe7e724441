"""Decides which sequence owns which pages and state slots: prefix hits, growth, windows, release after flight.

A sequence has one block table for each group of layers (spec.py), all of the same length. Entries out of its window are
the null page. When memory is tight, pages that no later token will attend to are not allocated at all: within a step,
attention reads fresh keys straight from the projection, so only the prefix cache would need them. The pages that the
step's last token attends to are always allocated, because layers without keys of their own read them for it.

Free after flight: every step that was scheduled before a page was released may still read or write it. The page returns
to its pool when the newest of those steps has completed (`on_step_complete`).
"""

import math
from collections import deque
from collections.abc import Iterable

from engine.core.batch import PageUpdate
from engine.core.kv.pages import NULL_PAGE, Arena, PagePool
from engine.core.kv.prefix import PageHasher
from engine.core.kv.prefix_search import Prefix, PrefixSearch
from engine.core.kv.spec import CacheMemory, pages_for
from engine.core.sequence import NO_SLOT, Sequence

_CHECKPOINT_EVERY = 2048  # tokens between checkpoints of a long prompt's state; more for the longest prompts,
_MOST_CHECKPOINTS = 8     # so that a prompt has at most this many
WORTH_A_STEP = 512        # tokens; below this, recomputing them is as cheap as the extra step that a checkpoint costs
_WATERMARK = 0.01         # share of the pages kept free at admission, so that running sequences have room to grow


class KVManager:
    def __init__(self, memory: CacheMemory, *, step_tokens: int, enable_prefix_caching: bool = True) -> None:
        """`step_tokens`: the most tokens that a step adds to a sequence."""
        self.memory = memory
        self.page_size = memory.page_size
        self.step_tokens = step_tokens
        self.enable_prefix_caching = enable_prefix_caching
        groups = range(len(memory.windows))
        self.arena = Arena(memory.num_slabs, memory.per_slab, memory.first_ids, memory.runs)
        self.pools: list[PagePool] = self.arena.pools[: len(groups)]
        self.slots: PagePool | None = self.arena.pools[-1] if memory.has_state else None
        self._windows = memory.window_groups
        self.num_full_groups = memory.windows.count(None)  # without a window
        self._search = PrefixSearch(memory, self.pools, self.slots)
        self._watermarks = [max(1, int(_WATERMARK * pool.capacity)) for pool in self.pools]
        self._grid = math.lcm(memory.state_grid, memory.page_size)
        self._saves: list[tuple[int, int, bytes]] = []  # (slot, slot it is copied to, name) of the step being planned
        self._hasher = PageHasher(memory.page_size)
        self._deferred: deque[tuple[int, PagePool, list[int]]] = deque()  # to release once the step has completed
        self._completed_step = -1
        self.prefix_queries = 0
        self.prefix_hits = 0

    @property
    def pool(self) -> PagePool:
        """The pages of the first group: the only ones, in most models."""
        return self.pools[0]

    @property
    def usage(self) -> float:
        """Share of the memory that is in use."""
        slabs = sum(pool.num_in_use / pool.per_slab for pool in self.arena.pools)
        return slabs / self.arena.num_slabs

    @property
    def num_deferred(self) -> int:
        """Pages that wait for a step in flight before they are free (shared ones may stay in use even then)."""
        return sum(len(pages) for _, _, pages in self._deferred)

    # -- admission ------------------------------------------------------------------------------------------------

    def find_prefix(self, seq: Sequence) -> Prefix:
        """The longest cached prefix of `seq`; changes nothing.

        It never includes the page of the last known token: that token is recomputed, because its logits are needed.
        Requests for prompt logprobs or for a mean of hidden states compute their whole prompt.
        """
        needs_all = (seq.params.prompt_logprobs is not None and seq.num_output_tokens == 0) or seq.pooling == "mean"
        if needs_all or not self.enable_prefix_caching:
            return Prefix(0, [[] for _ in self.pools])
        self._hasher.extend(seq)
        return self._search.longest(seq.page_hashes[: (len(seq.token_ids) - 1) // self.page_size])

    def missing_pages(self, seq: Sequence) -> int:
        """Pages that the known tokens of `seq` still need, in a group without a window."""
        return max(0, pages_for(len(seq.token_ids), self.page_size) - len(seq.pages)) if seq.pages else 0

    def lacking(self, seq: Sequence, hit: Prefix, *, promised: int, reserve: bool) -> int:
        """0 if the whole sequence fits in addition to `hit`, else the fewest pages that must be released first.
        `promised` pages are kept for others and, with `reserve`, a watermark as well."""
        woken: list[list[int]] = [[p for p in table if p != NULL_PAGE] for table in hit.tables]
        if self.slots is not None:
            woken.append([] if hit.checkpoint is None else [hit.checkpoint])
        return self.arena.lacking(self._admission_needs(seq, hit, promised, reserve), woken)

    def surely_lacking(self, seq: Sequence, hit: Prefix, *, promised: int, reserve: bool) -> int:
        """At least so many pages must be released before the sequence fits, even if pages of `hit` are lost.

        With one group and no window, a lost page of the hit is one more that the sequence needs. With a window it may
        need no more without the hit, and the cached pages that would have been in use again are free."""
        if len(self.arena.pools) == 1 and not self._windows:
            return self.lacking(seq, hit, promised=promised, reserve=reserve)
        return self.arena.lacking(self._admission_needs(seq, hit, promised, reserve), [()] * len(self.arena.pools))

    def _admission_needs(self, seq: Sequence, hit: Prefix, promised: int, reserve: bool) -> list[int]:
        """Pages of each kind, and a slot, that the sequence needs in addition to `hit`."""
        length, held = len(seq.token_ids), pages_for(hit.num_tokens, self.page_size)
        needs = []
        for group in range(len(self.pools)):
            need = pages_for(length, self.page_size) - held
            if self.memory.windows[group] is not None:
                most = self.memory.most_pages(group, length, self.step_tokens)
                need = min(need, most)
            else:
                need += promised
            needs.append(need + (self._watermarks[group] if reserve else 0))
        if self.slots is not None:
            needs.append(1)
        return needs

    def watch(self, seq: Sequence, hit: Prefix) -> None:
        """Have the arena record when a page or state gets a hash that would extend `hit`."""
        first = hit.num_tokens // self.page_size
        names = seq.page_hashes[first : (len(seq.token_ids) - 1) // self.page_size]
        if len(self.arena.pools) == 1 and not self._windows:
            names = names[:1]  # later pages are useless without this one
        self.arena.watch(names)

    def admit(self, seq: Sequence, hit: Prefix, step_id: int) -> None:
        """Give a waiting sequence the cached pages of its prefix and a slot for its state, for the next step."""
        assert not seq.pages, "a waiting sequence owns no pages"
        for pool, table in zip(self.pools, hit.tables, strict=True):
            pool.share(page for page in table if page != NULL_PAGE)
        seq.tables = [list(table) for table in hit.tables]
        seq.num_out_of_window = seq.num_out_of_window_sent = [0] * len(self.pools)
        if self._windows:
            seq.num_out_of_window = [next((i for i, p in enumerate(t) if p != NULL_PAGE), len(t)) for t in seq.tables]
            seq.num_out_of_window_sent = list(seq.num_out_of_window)
        seq.num_registered_pages = len(seq.pages)
        seq.num_computed_tokens = hit.num_tokens
        if self.slots is not None:
            if hit.checkpoint is not None:  # the step copies it
                self.slots.share([hit.checkpoint])
                self._deferred.append((step_id, self.slots, [hit.checkpoint]))
            seq.slot = self.slots.take_carefully(1)[0]
            seq.checkpoints = self._checkpoints(seq, hit)
        if self.enable_prefix_caching:
            self.prefix_queries += len(seq.token_ids)
            self.prefix_hits += seq.num_computed_tokens

    # -- steps ----------------------------------------------------------------------------------------------------

    def grow(self, seq: Sequence, num_tokens: int) -> bool:
        """Allocate pages for the next `num_tokens` tokens, which the next step computes. Returns False and allocates
        nothing if there are not enough."""
        end, pages = seq.num_computed_tokens + num_tokens, len(seq.tables[0])
        if end <= pages * self.page_size:
            return True
        missing = pages_for(end, self.page_size) - pages
        if len(self.arena.pools) == 1 and not self._windows:
            new = self.pools[0].take(missing)
            seq.tables[0].extend(new or ())
            return new is not None
        self._free_out_of_window(seq)
        taken = self.arena.take(self._needs(pages, missing, end))
        if taken is None:
            return False
        for table, new in zip(seq.tables, taken, strict=False):
            table += [NULL_PAGE] * (missing - len(new)) + new
        return True

    def register_full_pages(self, seq: Sequence) -> None:
        """Publish pages whose tokens are known and computed (or will be, by a step already scheduled)."""
        if not self.enable_prefix_caching:
            return
        full = min(seq.num_computed_tokens, len(seq.token_ids)) // self.page_size
        if full > seq.num_registered_pages:
            self._hasher.extend(seq)
            for pool, table in zip(self.pools, seq.tables, strict=True):
                for i in range(seq.num_registered_pages, full):
                    if table[i] != NULL_PAGE:
                        pool.register(table[i], seq.page_hashes[i])
            seq.num_registered_pages = full

    def save_state(self, seq: Sequence) -> None:
        """Keep the state of `seq` after the step being planned, if a slot can be spared for it."""
        assert self.slots is not None
        position = seq.checkpoints.pop(0)
        digest = seq.page_hashes[position // self.page_size - 1]
        if self.slots.find(digest) is not None or not self.arena.fits([*self._watermarks, 1]):
            return
        taken = self.slots.take(1)
        assert taken, "known to fit"
        self._saves.append((seq.slot, taken[0], digest))
        self._release(seq, self.slots, taken)

    def take_state_saves(self) -> list[tuple[int, int]]:
        """(slot of a sequence, slot its state is saved to) for the step just planned. Only later steps may find these
        states, so they are published here."""
        if self.slots is None or not self._saves:
            return []
        for _, slot, digest in self._saves:
            self.slots.register(slot, digest)
        saves = [(source, target) for source, target, _ in self._saves]
        self._saves.clear()
        return saves

    def release(self, seq: Sequence) -> None:
        """Release everything that `seq` owns, after flight."""
        for group, (pool, table) in enumerate(zip(self.pools, seq.tables, strict=True)):
            self._release(seq, pool, _owned(table[seq.num_out_of_window[group] :])[::-1])
        if self.slots is not None:
            self._release(seq, self.slots, [seq.slot])
            seq.slot = NO_SLOT
            seq.checkpoints = []
        seq.tables = [[] for _ in self.pools]
        seq.num_registered_pages = 0
        seq.num_pages_sent = 0

    def forget(self, seq: Sequence) -> None:
        """Remove every page and state of `seq` from the prefix cache, even if others own them now."""
        for pool in self.arena.pools:
            pool.forget([page for name in seq.page_hashes if (page := pool.find(name)) is not None])

    def holders(self, names: list[bytes], seqs: Iterable[Sequence]) -> list[Sequence]:
        """The sequences that use a page with one of these hashes."""
        found = [{page for name in names if (page := pool.find(name)) is not None} for pool in self.pools]
        if not any(found):
            return []
        return [s for s in seqs if any(not p.isdisjoint(t) for p, t in zip(found, s.tables, strict=True))]

    def on_step_complete(self, step_id: int) -> None:
        self._completed_step = step_id
        waiting: deque[tuple[int, PagePool, list[int]]] = deque()
        for step, pool, pages in self._deferred:
            if step <= step_id:
                pool.release(pages)
            else:
                waiting.append((step, pool, pages))
        self._deferred = waiting

    def describe_changes(self, seq: Sequence, updates: list[PageUpdate]) -> None:
        """List what has changed in the block tables of `seq` since the last call."""
        for group, table in enumerate(seq.tables):
            sent, passed = seq.num_out_of_window_sent[group], seq.num_out_of_window[group]
            if passed > sent:
                updates.append(PageUpdate(seq.row, sent, table[sent:passed], group))
                seq.num_out_of_window_sent[group] = passed
            updates.append(PageUpdate(seq.row, seq.num_pages_sent, table[seq.num_pages_sent :], group))
        seq.num_pages_sent = len(seq.pages)

    def take_moved_slabs(self) -> list[int]:
        """Slabs that changed owner since the last call."""
        moved, self.arena.moved = self.arena.moved, []
        return moved

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache. Returns whether it held any page."""
        forgotten = [pool.forget_all() for pool in self.arena.pools]
        return any(forgotten)

    # -- statistics and checks ------------------------------------------------------------------------------------

    def waste(self, seqs: Iterable[Sequence]) -> tuple[int, int]:
        """(token slots allocated, token slots written) in the first group of the running sequences; a shared page
        counts once per owner."""
        allocated = written = 0
        for seq in seqs:
            passed = seq.num_out_of_window[0] * self.page_size
            room = len(seq.pages) * self.page_size
            allocated += room - passed
            written += min(seq.num_computed_tokens, room) - passed
        return allocated, written

    def check(self, seqs: Iterable[Sequence]) -> None:
        """Raise AssertionError unless reference counts equal owners, deferred owners included."""
        self.arena.check()
        owners = {pool: [0] * pool.num_pages for pool in self.arena.pools}
        for seq in seqs:
            assert len(seq.tables) == len(self.pools)
            room = len(seq.pages) * self.page_size
            assert seq.num_computed_tokens <= room or not seq.pages, f"{seq.request_id} overruns its pages"
            for group, (pool, table) in enumerate(zip(self.pools, seq.tables, strict=True)):
                assert len(table) == len(seq.pages), "block tables of different lengths"
                assert set(table[: seq.num_out_of_window[group]]) <= {NULL_PAGE}
                seen = self.memory.pages_out_of_window(group, seq.num_computed_tokens)
                assert NULL_PAGE not in table[seen:], f"{seq.request_id} lacks a page that it will read"
                own = _owned(table)
                assert len(set(own)) == len(own), f"{seq.request_id} owns a page twice"
                for page in own:
                    owners[pool][page] += 1
            if self.slots is not None:
                owners[self.slots][seq.slot] += 1
        for _, pool, pages in self._deferred:
            for page in pages:
                owners[pool][page] += 1
        for pool, counts in owners.items():
            assert counts == pool.refs, "reference counts differ from owners"

    # -- inside ---------------------------------------------------------------------------------------------------

    def _needs(self, pages: int, missing: int, end: int) -> list[int]:
        """How many units of each kind a sequence needs if it has `pages` in each group, lacks `missing`, and reaches
        `end` in this step. When memory is tight, tokens that the step's last token does not attend to get no page."""
        no_slot = [0] * (self.slots is not None)
        gone = [self.memory.pages_out_of_window(group, end - 1) for group in range(len(self.pools))]
        passed = [min(missing, max(0, count - pages)) for count in gone]
        if any(passed) and not self.arena.fits([missing + spare for spare in self._watermarks] + no_slot):
            return [missing - skip for skip in passed] + no_slot
        return [missing] * len(self.pools) + no_slot

    def _release(self, seq: Sequence, pool: PagePool, pages: list[int]) -> None:
        if seq.last_step > self._completed_step:
            self._deferred.append((seq.last_step, pool, pages))
        else:
            pool.release(pages)

    def _free_out_of_window(self, seq: Sequence) -> None:
        """Release pages that are out of their group's window."""
        for group in self._windows:
            done, passed = seq.num_out_of_window[group], self.memory.pages_out_of_window(group, seq.num_computed_tokens)
            passed = min(passed, len(seq.pages))
            if passed > done:
                table = seq.tables[group]
                self._release(seq, self.pools[group], _owned(table[done:passed]))
                table[done:passed] = [NULL_PAGE] * (passed - done)
                seq.num_out_of_window[group] = passed

    def _checkpoints(self, seq: Sequence, hit: Prefix) -> list[int]:
        """Positions after `hit` whose state is worth keeping: where another prompt with the same prefix diverged, the
        end of the prompt if that is far from `hit`, and some in between for long prompts."""
        assert self.slots is not None
        if not self.enable_prefix_caching:
            return []
        self._hasher.extend(seq)
        grid, last = self._grid, len(seq.token_ids) - 1
        every = max(_CHECKPOINT_EVERY, last // _MOST_CHECKPOINTS) // grid * grid
        wanted = {hit.branch // grid * grid, *range(every, last, every)}
        if last // grid * grid - hit.num_tokens >= WORTH_A_STEP:
            wanted.add(last // grid * grid)
        pages = [(position, position // self.page_size) for position in sorted(wanted) if position > hit.num_tokens]
        return [position for position, n in pages if self.slots.find(seq.page_hashes[n - 1]) is None]


def _owned(table: list[int]) -> list[int]:
    return [page for page in table if page != NULL_PAGE]
