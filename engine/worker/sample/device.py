"""The sampler of an asynchronous device: the CPU sampler's contract, and the host never waits.

    host      add/remove ─► ParamTable        plan: what does this step need?      fill: one column a request
                                                    │                                    │ (the step's one copy)
    device    logits ─► race ─► merge ─► out, token table            ◄───────────────────┘
                         └► filter            rows with min-p, top-k, top-p
                         └► copy, edit, again: rows with bias, bans, penalties or a grammar, whose result this replaces
                         └► log-probabilities of the unedited logits

A row's result is the same bits in any step, whatever the other rows need.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.core.grammar import TokenMasks
from engine.core.params import SamplingParams
from engine.core.request import TokenLogprobs
from engine.worker.sample.params import ParamTable

ROW, POSITION, TEMPERATURE, SEED_LO, SEED_HI, TOP_K, TOP_P, LOG_MIN_P = range(8)
NUM_COLUMNS = 8

_FILTERED, _EDITED, _PENALISED, _HELD, _LOGPROBS = (1 << n for n in range(5))
_CHUNK_BYTES = 64 << 20  # of edited rows at a time: bounds the float32 copy, and as much again for counts of tokens
_ENTRY_BYTES = 16 << 20  # of what is added to logits, on the device at a time; one group of _ALIGN rows may need more
_ALIGN = 16              # entries of an upload start at multiples of this, as the kernels were compiled for

Ints = NDArray[np.int64]
Words = NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class Edits:
    """Changes to logits, on the host. E rows of the batch have some."""

    batch: Ints        # [E] which rows
    penalties: Words   # [4, E] prompt length, bits of repetition, frequency, presence penalty
    entries: Words     # [3, M] index into `batch` (ascending), token, bits of what to add
    longest: int       # most known tokens of a row with penalties; 0: no penalties
    mask_of: Words     # [E] index into `masks`, -1 without one
    masks: Words       # [M, ceil(V / 32)] of grammars: bit i of word w is token 32 w + i


@dataclass(frozen=True, slots=True, eq=False)
class SamplePlan:
    """What a step needs besides temperature and noise.

    Without `edits` and `logprobs` the step needs no upload of its own and has the same launches for any parameters
    that agree in `filtered`: it fits a CUDA graph."""

    filtered: bool = False
    edits: Edits | None = None
    logprobs: Ints | None = None   # rows of the batch that want log-probabilities
    num_top: Ints | None = None    # and how many alternatives each

    @property
    def plain(self) -> bool:
        return not self.filtered and self.edits is None and self.logprobs is None


_PLAIN = SamplePlan()


@dataclass(slots=True)
class HostLogprobs:
    """Log-probabilities on their way to the host: `begin_copy`, wait for an event recorded after it, `unpack`."""

    rows: list[int]       # which rows of the logits these are
    num_top: list[int]    # alternatives of each
    packed: Tensor        # int32 [N, 3 + 2K] as engine.kernels.sampling.logprobs writes it
    host: Tensor | None = None

    def begin_copy(self) -> None:
        """Queue the copy into pinned memory."""
        self.host = torch.empty(self.packed.shape, dtype=torch.int32, pin_memory=self.packed.is_cuda)
        self.host.copy_(self.packed, non_blocking=True)

    def unpack(self) -> list[TokenLogprobs]:
        """One entry a row, in the order of `rows`. That of a bad row has token -1, NaN and rank 0."""
        assert self.host is not None, "begin_copy comes first"
        k = (self.host.shape[1] - 3) // 2
        words = self.host.numpy()
        floats = words.view(np.float32)
        columns = zip(
            words[:, 0].tolist(), floats[:, 1].tolist(), words[:, 2].tolist(), self.num_top,
            words[:, 3 : 3 + k].tolist(), floats[:, 3 + k :].tolist(), strict=True,
        )  # fmt: skip
        return [
            TokenLogprobs(token, logprob, rank, list(zip(ids[:n], values[:n], strict=True)))
            for token, logprob, rank, n, ids, values in columns
        ]


class DeviceSampler:
    """Samples a token for each row of a step, on `device`. Row 0 is for padding: greedy and plain."""

    def __init__(
        self, num_rows: int, vocab_size: int, max_model_len: int, device: torch.device, *, block: int | None = None
    ) -> None:
        """`block` is for tests: how many tokens of the vocabulary a program takes."""
        # Not before a device needs them: CPU builds have no Triton.
        from engine.kernels.sampling import columns, edits, logprobs, sampler

        self._drawing, self._editing, self._listing = sampler, edits, logprobs
        self._block = block or columns.BLOCK
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.device = device
        self.params = ParamTable(num_rows, vocab_size)
        self._flags = np.zeros(num_rows, dtype=np.uint8)
        self._columns = np.zeros((num_rows, NUM_COLUMNS), dtype=np.int32)
        self._columns[:, ROW] = np.arange(num_rows)
        for row in range(num_rows):
            self._write(row)
        self.max_batch = max(64, 1 << (num_rows - 1).bit_length())  # batches may be padded with row 0
        parts = -(-vocab_size // self._block)
        self._scores = torch.empty(self.max_batch * parts, dtype=torch.float32, device=device)
        self._ids = torch.empty(self.max_batch * parts, dtype=torch.int32, device=device)

    def add(self, row: int, params: SamplingParams, seed: int, prompt_len: int, stop_ids: Sequence[int]) -> None:
        """Write a request's parameters into its state `row`; as `Sampler.add`."""
        self.params.set(row, params, seed, prompt_len, stop_ids)
        self._write(row)

    def remove(self, row: int) -> None:
        """Free `row`."""
        self.params.clear(row)
        self._write(row)

    def fill(self, out: Words, rows: Sequence[int] | Ints, positions: Sequence[int] | Ints) -> None:
        """Write the parameters of a step's B requests into the first B columns of `out` int32 [NUM_COLUMNS, ≥ B].

        `positions` are the indices at which the sampled tokens will stand. Columns past B stay as they are."""
        count = len(rows)
        out[:, :count] = self._columns.take(rows, axis=0).T
        out[POSITION, :count] = positions

    def plan(
        self, rows: Sequence[int] | Ints, positions: Sequence[int] | Ints, masks: TokenMasks | None = None
    ) -> SamplePlan:
        """What this step needs; looks at the host's tables only."""
        row = np.asarray(rows, dtype=np.int64)
        flags = self._flags[row]
        some = int(np.bitwise_or.reduce(flags)) if len(row) else 0
        if not some and masks is None:
            return _PLAIN
        edits = None
        if some & (_EDITED | _PENALISED | _HELD) or masks is not None:
            edits = self._edits(row, np.asarray(positions, dtype=np.int64), flags, masks)
        asked = num_top = None
        if some & _LOGPROBS:
            asked = np.flatnonzero(flags & _LOGPROBS)
            num_top = np.minimum(self.params.num_logprobs[row[asked]], self.vocab_size)
        return SamplePlan(bool(some & _FILTERED), edits, asked, num_top)

    @torch.inference_mode()
    def sample(
        self, logits: Tensor, columns: Tensor, token_ids: Tensor, out: Tensor, plan: SamplePlan
    ) -> HostLogprobs | None:
        """Queue the sampling of logits [B, V] (bf16, fp16 or float32; they stay as they are).

        `columns` int32 [NUM_COLUMNS, S], S ≥ B, is what `fill` wrote. `out` int32 [B] gets the tokens, -1 for a row
        without a usable distribution (NaN, +inf, or nothing but -inf); other tokens also go to their places in
        `token_ids` int32 [num_rows, max_len]. `out` may be pinned host memory unless the plan has log-probabilities,
        whose kernel reads it. Returns the log-probabilities if some were asked for."""
        assert len(logits) <= self.max_batch, f"{len(logits)} rows, at most {self.max_batch} are possible"
        assert logits.shape[1] == self.vocab_size
        assert logits.stride(1) == 1, "rows must be contiguous"
        scratch = self._scores, self._ids
        self._drawing.sample_rows(
            logits, None, columns, token_ids, out, *scratch, filtered=plan.filtered, block=self._block
        )
        if plan.edits is not None:
            self._sample_edited(logits, columns, token_ids, out, plan.edits, plan.filtered)
        if plan.logprobs is None or plan.num_top is None:
            return None
        index = self._upload([plan.logprobs.astype(np.int32)])[0]
        return self._logprobs(logits, index, out, plan.logprobs.tolist(), plan.num_top.tolist())

    @torch.inference_mode()
    def prompt_logprobs(self, logits: Tensor, target_ids: Tensor, k: int) -> HostLogprobs:
        """Log-probabilities of a prompt, k alternatives each: row i of `logits` [T, V] predicts `target_ids[i]`."""
        rows = list(range(len(logits)))
        tokens = target_ids.to(torch.int32, copy=True)  # at an aligned address
        return self._logprobs(logits, None, tokens, rows, [min(k, self.vocab_size)] * len(rows))

    def warm_up(self, dtype: torch.dtype, columns: Tensor, token_ids: Tensor) -> None:
        """Compile and load every kernel for logits of `dtype`, with the `columns` and `token_ids` that steps will use.

        Before the first request. Writes to the first columns, and to no token."""
        logits = torch.zeros(1, self.vocab_size, dtype=dtype, device=self.device)
        out = torch.zeros(1, dtype=torch.int32, device=self.device)
        words = np.zeros((NUM_COLUMNS, 1), dtype=np.int32)
        everything = SamplingParams(
            top_k=2, top_p=0.5, logit_bias={0: 1.0}, presence_penalty=1.0, logprobs=1, max_tokens=None
        )
        try:
            self.add(0, everything, 0, 0, ())
            self.fill(words, [0], [self.max_model_len])
            columns[:, :1].copy_(torch.from_numpy(words))
            free = TokenMasks([0], np.full((1, -(-self.vocab_size // 32)), -1, dtype=np.int32))
            self.sample(logits, columns, token_ids, out, self.plan([0], [self.max_model_len], free))
            self.prompt_logprobs(logits, out, 1)
        finally:
            self.remove(0)

    def _logprobs(
        self, logits: Tensor, index: Tensor | None, tokens: Tensor, rows: list[int], num_top: list[int]
    ) -> HostLogprobs:
        k = max(num_top, default=0)
        packed = torch.empty(len(rows), 3 + 2 * k, dtype=torch.int32, device=self.device)
        if rows:
            self._listing.logprobs(logits, index, tokens, packed)
        return HostLogprobs(rows, num_top, packed)

    def _write(self, row: int) -> None:
        """Bring the columns and flags of `row` up to date."""
        p, column = self.params, self._columns[row]
        floats = column.view(np.float32)
        floats[TEMPERATURE], floats[TOP_P], floats[LOG_MIN_P] = p.temperature[row], p.top_p[row], p.log_min_p[row]
        column[SEED_LO : SEED_HI + 1] = p.seed[row : row + 1].view(np.int32)  # little-endian, as all of our targets
        column[TOP_K] = p.top_k[row]
        flags = 0
        if p.top_k[row] > 0 or p.top_p[row] < 1 or p.log_min_p[row] > -np.inf:
            flags |= _FILTERED
        if p.edited[row]:
            flags |= _EDITED
        if p.repetition[row] != 1 or p.frequency[row] != 0 or p.presence[row] != 0:
            flags |= _PENALISED
        if p.min_tokens[row] > 0:
            flags |= _HELD
        if p.num_logprobs[row] >= 0:
            flags |= _LOGPROBS
        self._flags[row] = flags

    def _edits(
        self, row: Ints, position: Ints, flags: NDArray[np.uint8], masks: TokenMasks | None
    ) -> Edits | None:
        p = self.params
        early = ((flags & _HELD) != 0) & (position - p.prompt_len[row] < p.min_tokens[row])
        penalised = (flags & _PENALISED) != 0
        mask_of = np.full(len(row), -1, dtype=np.int32)
        if masks is not None:
            mask_of[masks.places] = np.arange(len(masks.places))
        batch = np.flatnonzero(((flags & _EDITED) != 0) | penalised | early | (mask_of >= 0))
        if not len(batch):
            return None
        owners, tokens, values = [], [], []

        def add(owner: int, ids: Ints, value: NDArray[np.float32]) -> None:
            owners.append(np.full(len(ids), owner, dtype=np.int32))
            tokens.append(ids.astype(np.int32))
            values.append(value.view(np.int32))

        for e, i in enumerate(batch):
            of = int(row[i])
            if of in p.bias:
                add(e, *p.bias[of])
            banned = [p.banned[of]] if of in p.banned else []
            if early[i]:
                banned.append(p.stops[of])
            for ids in banned:
                # Adding -inf bans a token, and leaves NaN and +inf visible as what they are.
                add(e, ids, np.full(len(ids), -np.inf, dtype=np.float32))
        none = [np.zeros(0, dtype=np.int32)]
        some = row[batch]
        return Edits(
            batch,
            np.stack([
                p.prompt_len[some].astype(np.int32), p.repetition[some].view(np.int32),
                p.frequency[some].view(np.int32), p.presence[some].view(np.int32),
            ]),
            np.stack([np.concatenate(part or none) for part in (owners, tokens, values)]),
            int(position[penalised].max()) if penalised.any() else 0,
            mask_of[batch],
            np.zeros((0, 0), dtype=np.int32) if masks is None else masks.words,
        )  # fmt: skip

    def _sample_edited(
        self, logits: Tensor, columns: Tensor, token_ids: Tensor, out: Tensor, edits: Edits, filtered: bool
    ) -> None:
        """Sample the rows with edits once more, from an edited copy; the new results replace the first ones.

        If only a row's edits make it bad, its first result stays in the token table. Nobody reads it there, because the
        request fails."""
        count = len(edits.batch)
        index, mask_of, penalties, masks = self._upload(
            [edits.batch.astype(np.int32), edits.mask_of, edits.penalties, edits.masks])
        chunk = max(_ALIGN, _CHUNK_BYTES // (4 * self.vocab_size) // _ALIGN * _ALIGN)
        shape = min(chunk, count), self.vocab_size
        copy = torch.empty(shape, dtype=torch.float32, device=self.device)
        counts = torch.empty(shape, dtype=torch.int32, device=self.device) if edits.longest else None
        for start, stop, entries in _chunks(edits, chunk):
            z, part = copy[: stop - start], index[start:stop]
            self._editing.copy_rows(logits, part, z)
            if entries.shape[1]:
                self._editing.add_values(z, self._upload([entries])[0], start, stop - start)
            if counts is not None:
                self._editing.penalise(
                    z, counts[: stop - start], part, penalties[:, start:], columns, token_ids, edits.longest
                )
            if len(edits.masks):
                self._editing.mask_tokens(z, mask_of[start:stop], masks)
            self._drawing.sample_rows(
                z, part, columns, token_ids, out, self._scores, self._ids, filtered=filtered, block=self._block
            )

    def _upload(self, arrays: list[Words]) -> list[Tensor]:
        """The arrays ([N] or [R, N]) on the device, by one pinned copy; rows are padded with -1 to an aligned length:
        kernels are compiled for aligned addresses and strides, and must not be compiled again in the middle of work."""
        widths = [-(-a.shape[-1] // _ALIGN) * _ALIGN for a in arrays]
        sizes = [a.size // max(a.shape[-1], 1) * w if a.ndim > 1 else w for a, w in zip(arrays, widths, strict=True)]
        host = torch.empty(sum(sizes), dtype=torch.int32, pin_memory=self.device.type == "cuda")
        flat, views, at = host.numpy(), [], 0
        flat[:] = -1
        for array, width, size in zip(arrays, widths, sizes, strict=True):
            shape = (*array.shape[:-1], width)
            flat[at : at + size].reshape(shape)[..., : array.shape[-1]] = array
            views.append((at, size, shape))
            at += size
        device = host.to(self.device, non_blocking=True)
        return [device[at : at + size].view(shape) for at, size, shape in views]


def _chunks(edits: Edits, most: int) -> Iterator[tuple[int, int, Words]]:
    """The E rows in chunks: (first row, the one after the last, their entries). A chunk has at most `most` rows, and
    fewer if they have many entries: a request may name every token of the vocabulary, more than once."""
    count, owners = len(edits.batch), edits.entries[0]
    ends = np.searchsorted(owners, np.arange(count + 1))  # of row i the entries from ends[i] to ends[i + 1]
    start = 0
    while start < count:
        last = ends[start] + _ENTRY_BYTES // (3 * owners.itemsize)
        fits = int(np.searchsorted(ends, last, side="right")) - 1 - start
        stop = min(count, start + max(_ALIGN, min(most, fits) // _ALIGN * _ALIGN))
        yield start, stop, edits.entries[:, ends[start] : ends[stop]]
        start = stop
