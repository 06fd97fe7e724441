"""A runner without a model: it keeps *tokens* in the pages where K and V would be, and answers with a hash of the
history it can read through the block tables. If paging, prefix hits, preemption or flight order are wrong anywhere, the
history is wrong, and so is every token after it. Runs thousands of steps a second.

Groups of pages and state slots lie in one arena, as on a device: who writes to a page or slot claims its cells, and
whatever else had claimed one of them has lost its content. Until a step has been collected, nobody but the sequences
that it computes may write to the pages and slots that it reads or writes.
"""

import hashlib
import math
from collections import defaultdict

from engine.core.batch import PooledChunk, ScheduledSeq, SeqResult, StepPlan, StepResult
from engine.core.kv.spec import CacheMemory
from engine.core.params import SamplingParams
from engine.core.request import TokenLogprobs

VOCAB = 97
PAGE_SIZE = 16
Unit = tuple[int, int]  # kind, page or slot
NAN = -3  # where a page or state should have content: whoever reads it answers with an error


def next_token(history: list[int], windows: tuple[int | None, ...] = (None,), has_state: bool = False) -> int:
    """Of what each group sees, and of a state that has absorbed every token."""
    seen = [history if window is None else history[-window:] for window in windows]
    state = absorb(0, history) if has_state else 0
    return int.from_bytes(hashlib.blake2b(repr((seen, state)).encode(), digest_size=4).digest()) % VOCAB


def absorb(state: int, tokens: list[int]) -> int:
    for token in tokens:
        state = (state * 1_000_003 + token + 1) % 2**61
    return state


def expected_tokens(
    prompt: list[int], params: SamplingParams, eos: frozenset[int], max_model_len: int,
    windows: tuple[int | None, ...] = (None,), has_state: bool = False,
) -> list[int]:  # fmt: skip
    """What one request alone must produce."""
    tokens = list(prompt)
    while True:
        token = next_token(tokens, windows, has_state)
        tokens.append(token)
        count = len(tokens) - len(prompt)
        stops = set(params.stop_token_ids) | (set() if params.ignore_eos else eos)
        stopped = token in stops and count >= params.min_tokens
        if stopped or count == params.max_tokens or len(tokens) == max_model_len:
            return tokens[len(prompt):]


class PagedMachine:
    """`depth` 2 delays answers by a step, as a device with overlap does; pages are written at launch, in order."""

    def __init__(self, memory: CacheMemory, num_rows: int, max_model_len: int) -> None:
        self.memory = memory
        ones = (1,) * len(memory.per_slab)
        self._runs, self._first_ids = memory.runs or ones, memory.first_ids or ones
        self.slab_cells = math.lcm(*memory.per_slab) * PAGE_SIZE
        self.cells: list[tuple[int, int]] = [(-1, -1)] * (memory.num_slabs * self.slab_cells)  # (kind, unit)
        self.content: list[int] = [-1] * len(self.cells)
        self.token_ids = [[-1] * (max_model_len + 1) for _ in range(num_rows)]
        self.block_tables: list[list[list[int]]] = [[[] for _ in range(num_rows)] for _ in memory.windows]
        self.slot = [-1] * num_rows
        self.in_flight: dict[int, dict[Unit, set[int]]] = {}  # step -> who reads or writes a page or slot
        self.launched = 0
        self.fail_steps: set[int] = set()
        self.nan: set[tuple[int, str]] = set()  # (step, request): an error, and useless K and V
        self.written: dict[int, dict[int, list[int]]] = {}  # step in flight -> uid -> cells
        self.prompt_len = [0] * num_rows
        self.summed: dict[int, list[int]] = {}  # row -> the tokens that a mean has counted so far

    def forward(self, plan: StepPlan) -> StepResult:
        self.launched += 1
        if plan.step_id in self.fail_steps:
            raise RuntimeError("injected fault")
        for slab in plan.moved_slabs:
            start = slab * self.slab_cells
            self.content[start : start + self.slab_cells] = [-1] * self.slab_cells
        uids = {seq.row: seq.uid for seq in plan.seqs}
        touched: dict[Unit, set[int]] = defaultdict(set)
        written = self.written[plan.step_id] = defaultdict(list)
        for init in plan.row_inits:
            self.token_ids[init.row][: len(init.token_ids)] = init.token_ids
            self.slot[init.row] = init.slot
            self.prompt_len[init.row] = init.prompt_len
            if init.state_from is not None:
                touched[len(self.memory.windows), init.state_from].add(uids[init.row])
                self._copy_state(init.state_from, init.slot)
            for tables in self.block_tables:
                tables[init.row] = []
        for update in plan.page_updates:
            table = self.block_tables[update.group][update.row]
            assert update.start <= len(table), "the block table has a gap"
            table[update.start : update.start + len(update.pages)] = update.pages
        for seq in plan.seqs:
            self._touch(seq, touched)
        uid_of_slot = {self.slot[seq.row]: seq.uid for seq in plan.seqs}
        for source, target in plan.state_saves:
            self._write((len(self.memory.windows), target), uid_of_slot[source], touched)
        self.in_flight[plan.step_id] = touched
        for seq in plan.seqs:  # all writes before all reads, as in a layer
            for group, tables in enumerate(self.block_tables):
                for position in range(seq.start, seq.start + seq.num_tokens):
                    page = tables[seq.row][position // PAGE_SIZE]
                    if page == 0:
                        self._assert_passed(group, position, seq)
                        continue
                    at = self._claim(group, page) + position % PAGE_SIZE
                    self.content[at] = self.token_ids[seq.row][position]
                    written[seq.uid].append(at)
        result = StepResult(plan.step_id, [self._answer(seq, plan.pooled.get(seq.row)) for seq in plan.seqs])
        for source, target in plan.state_saves:
            self._copy_state(source, target)
            written[uid_of_slot[source]].append(self._cells_of(len(self.memory.windows), target).start)
        for i, seq in enumerate(plan.seqs):
            if (plan.step_id, seq.request_id) in self.nan:
                self.spoil(written[seq.uid], NAN)
                result.seqs[i] = SeqResult(error="NaN")
        return result

    def sample(self, forwarded: StepResult) -> StepResult:
        return forwarded

    def collect(self, handle: StepResult) -> StepResult:
        del self.in_flight[handle.step_id]
        del self.written[handle.step_id]
        return handle

    def spoil(self, cells: list[int], value: int) -> None:
        for cell in cells:
            self.content[cell] = value

    def _touch(self, seq: ScheduledSeq, touched: dict[Unit, set[int]]) -> None:
        """Note what a sequence reads in this step, and check what it writes."""
        end = seq.start + seq.num_tokens
        for group, window in enumerate(self.memory.windows):
            first = 0 if window is None else max(0, seq.start - window + 1)
            table = self.block_tables[group][seq.row]
            for i in range(first // PAGE_SIZE, seq.start // PAGE_SIZE):
                touched[group, table[i]].add(seq.uid)
            for i in range(seq.start // PAGE_SIZE, -(-end // PAGE_SIZE)):
                if table[i] != 0:
                    self._write((group, table[i]), seq.uid, touched)
        if self.memory.has_state:
            self._write((len(self.memory.windows), self.slot[seq.row]), seq.uid, touched)

    def _assert_passed(self, group: int, position: int, seq: ScheduledSeq) -> None:
        """A token may go to the null page if no token after the step sees it, nor a sequence's only token itself."""
        window, end = self.memory.windows[group], seq.start + seq.num_tokens
        assert window is not None, "a real token was sent to the null page"
        first_seen = end - window + 1
        assert (position // PAGE_SIZE + 1) * PAGE_SIZE <= first_seen, "a token that will be seen has no page"
        assert seq.num_tokens > 1, "its attention reads the page"

    def _write(self, unit: Unit, uid: int, touched: dict[Unit, set[int]]) -> None:
        touched[unit].add(uid)
        for step in self.in_flight.values():
            assert step.get(unit, {uid}) == {uid}, "a step in flight uses what another sequence writes to"

    def _answer(self, seq: ScheduledSeq, pooled: PooledChunk | None = None) -> SeqResult:
        end = seq.start + seq.num_tokens
        seen = []
        for group, window in enumerate(self.memory.windows):
            first = 0 if window is None else max(0, seq.start - window + 1)  # what its first query sees
            table = self.block_tables[group][seq.row]
            history = [
                self.token_ids[seq.row][i] if i >= seq.start and table[i // PAGE_SIZE] == 0  # from the projections
                else self._read(group, table[i // PAGE_SIZE], i % PAGE_SIZE)
                for i in range(first, end)
            ]
            if NAN in history:
                return SeqResult(error="NaN")
            seen.append(history if window is None else history[-window:])
            assert history == self.token_ids[seq.row][first:end], "a page holds another history"
        state = 0
        if self.memory.has_state:
            kind, slot = len(self.memory.windows), self.slot[seq.row]
            state = self._read(kind, slot, 0) if seq.start else 0
            if state == NAN:
                return SeqResult(error="NaN")
            state = absorb(state, self.token_ids[seq.row][seq.start : end])
            self.content[self._claim(kind, slot)] = state
        prompt_logprobs = None
        if seq.prompt_logprobs is not None:
            scored = range(seq.start + 1, min(end + 1, self.prompt_len[seq.row]))
            prompt_logprobs = [TokenLogprobs(self.token_ids[seq.row][i], -float(i), 1) for i in scored]
        if pooled is not None:
            assert not seq.samples
            last = repr((seen, state)).encode()
            return SeqResult(embedding=self._pool(seq, pooled, last if pooled.ends else None))
        if not seq.samples:
            return SeqResult(prompt_logprobs=prompt_logprobs)
        token = int.from_bytes(hashlib.blake2b(repr((seen, state)).encode(), digest_size=4).digest()) % VOCAB
        self.token_ids[seq.row][end] = token
        return SeqResult(token_id=token, prompt_logprobs=prompt_logprobs)

    def _pool(self, seq: ScheduledSeq, pooled: PooledChunk, last: bytes | None) -> bytes | None:
        """What the last token sees, or with a mean all tokens that were counted."""
        if pooled.pooling == "last":
            return last
        known = self.summed.pop(seq.row, []) if seq.start else []
        assert len(known) == seq.start, "a mean lacks tokens, or counts some twice"
        known = known + self.token_ids[seq.row][seq.start : seq.start + seq.num_tokens]
        if last is None:
            self.summed[seq.row] = known
            return None
        return repr(known).encode()

    def _copy_state(self, source: int, target: int) -> None:
        kind = len(self.memory.windows)
        state = self._read(kind, source, 0)
        self.content[self._claim(kind, target)] = state

    def _cells_of(self, kind: int, unit: int) -> range:
        per, run = self.memory.per_slab[kind], self._runs[kind]
        first, length = self._first_ids[kind], per // run
        n, at = divmod(unit, first + self.memory.num_slabs * length)  # which run
        slab, i = divmod(at - first, length)
        assert slab >= 0, "padding's page or slot"
        size = self.slab_cells // per
        start = slab * self.slab_cells + (n * length + i) * size
        assert 0 <= start < len(self.cells)
        return range(start, start + size)

    def _claim(self, kind: int, unit: int) -> int:
        cells = self._cells_of(kind, unit)
        if any(self.cells[i] != (kind, unit) for i in cells):
            for i in cells:
                self.cells[i], self.content[i] = (kind, unit), -1
        return cells.start

    def _read(self, kind: int, unit: int, offset: int) -> int:
        cells = self._cells_of(kind, unit)
        assert self.cells[cells[offset]] == (kind, unit), "somebody else has written here"
        return self.content[cells[offset]]
