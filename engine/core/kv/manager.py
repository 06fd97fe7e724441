"""Who owns which page: admission by prefix hit, growth, release after flight.

Free after flight: a page may be read or written by every step that was scheduled before its owner let go of it. It
returns to the pool only when the newest of those steps has completed (`on_step_complete`).
"""

from collections import deque
from collections.abc import Iterable

from engine.core.kv.pages import PagePool
from engine.core.kv.prefix import PageHasher
from engine.core.kv.spec import pages_for
from engine.core.sequence import Sequence


class KVManager:
    def __init__(self, num_pages: int, page_size: int, *, enable_prefix_caching: bool = True) -> None:
        self.pool = PagePool(num_pages)
        self.page_size = page_size
        self.enable_prefix_caching = enable_prefix_caching
        self._hasher = PageHasher(page_size)
        self._deferred: deque[tuple[int, list[int]]] = deque()  # (step, pages to release once it has completed)
        self._completed_step = -1
        self.prefix_queries = 0
        self.prefix_hits = 0

    def pages_for(self, num_tokens: int) -> int:
        return pages_for(num_tokens, self.page_size)

    @property
    def num_deferred(self) -> int:
        """Pages that wait for a step in flight before they are free (shared ones may stay in use even then)."""
        return sum(len(pages) for _, pages in self._deferred)

    def find_prefix(self, seq: Sequence) -> list[int]:
        """Cached pages that hold the beginning of `seq`; no state changes.

        At most all pages but the one of the last known token: that token is computed anew, its logits are needed.
        Requests for prompt logprobs compute their whole prompt.
        """
        if not self.enable_prefix_caching or (seq.params.prompt_logprobs is not None and seq.num_output_tokens == 0):
            return []
        self._hasher.extend(seq)
        pages = []
        for digest in seq.page_hashes[: (len(seq.token_ids) - 1) // self.page_size]:
            page = self.pool.find(digest)
            if page is None:
                break
            pages.append(page)
        return pages

    def can_admit(self, seq: Sequence, hit: list[int], num_tokens: int, *, reserve: int = 0) -> bool:
        """Whether `hit` + pages for `num_tokens` more tokens fit while `reserve` pages stay free."""
        woken = sum(self.pool.is_free(p) for p in hit)
        needed = self.pages_for(len(hit) * self.page_size + num_tokens) - len(hit)
        return needed + woken + reserve <= self.pool.num_free

    def admit(self, seq: Sequence, hit: list[int]) -> None:
        """Give a waiting sequence the cached pages of its prefix."""
        assert not seq.pages, "a waiting sequence owns no pages"
        self.pool.share(hit)
        seq.pages = list(hit)
        seq.num_registered_pages = len(hit)
        seq.num_computed_tokens = len(hit) * self.page_size
        if self.enable_prefix_caching:
            self.prefix_queries += len(seq.token_ids)
            self.prefix_hits += seq.num_computed_tokens

    def grow(self, seq: Sequence, num_tokens: int) -> bool:
        """Make room for `num_tokens` after the computed ones. False (and no change) if pages are short."""
        missing = self.pages_for(seq.num_computed_tokens + num_tokens) - len(seq.pages)
        if missing <= 0:
            return True
        pages = self.pool.take(missing)
        if pages is None:
            return False
        seq.pages.extend(pages)
        return True

    def register_full_pages(self, seq: Sequence) -> None:
        """Publish pages whose tokens are known and computed (or will be, by a step already scheduled)."""
        if not self.enable_prefix_caching:
            return
        full = min(seq.num_computed_tokens, len(seq.token_ids)) // self.page_size
        if full > seq.num_registered_pages:
            self._hasher.extend(seq)
            for i in range(seq.num_registered_pages, full):
                self.pool.register(seq.pages[i], seq.page_hashes[i])
            seq.num_registered_pages = full

    def release(self, seq: Sequence, *, forget: bool = False) -> None:
        """Let go of all pages of `seq`, after flight; with `forget`, none of them may be found again."""
        if forget:
            self.pool.forget(seq.pages)
        pages = seq.pages[::-1]
        seq.pages = []
        seq.num_registered_pages = 0
        seq.num_pages_sent = 0
        if seq.last_step > self._completed_step:
            self._deferred.append((seq.last_step, pages))
        else:
            self.pool.release(pages)

    def on_step_complete(self, step_id: int) -> None:
        self._completed_step = step_id
        waiting: deque[tuple[int, list[int]]] = deque()
        for step, pages in self._deferred:
            if step <= step_id:
                self.pool.release(pages)
            else:
                waiting.append((step, pages))
        self._deferred = waiting

    def reset_prefix_cache(self) -> None:
        self.pool.forget_all()

    def waste(self, seqs: Iterable[Sequence]) -> tuple[int, int]:
        """(slots allocated, slots that hold a token) over the running sequences; shared pages count once an owner."""
        allocated = written = 0
        for seq in seqs:
            allocated += len(seq.pages) * self.page_size
            written += min(seq.num_computed_tokens, len(seq.pages) * self.page_size)
        return allocated, written

    def check(self, seqs: Iterable[Sequence]) -> None:
        """Raise AssertionError unless reference counts equal owners, deferred owners included."""
        self.pool.check()
        owners = [0] * self.pool.num_pages
        for seq in seqs:
            assert len(set(seq.pages)) == len(seq.pages), f"{seq.request_id} owns a page twice"
            room = len(seq.pages) * self.page_size
            assert seq.num_computed_tokens <= room or not seq.pages, f"{seq.request_id} overruns its pages"
            for page in seq.pages:
                owners[page] += 1
        for _, pages in self._deferred:
            for page in pages:
                owners[page] += 1
        assert owners == self.pool.refs, "reference counts differ from owners"
