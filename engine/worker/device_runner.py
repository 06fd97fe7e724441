"""Runs steps on a GPU. The host never waits in `forward` and `sample`; `collect` waits for one event.

    forward  pack ─► one copy ─► table updates ─► the model (a CUDA graph for most steps)
    sample   logits ─► sample ─► copy tokens back
    collect  wait for that copy's event, unpack

The request table (tokens, pages) is on the device, and the sampler writes each token into it, so step N + 1 can start
before the host has seen the tokens of step N.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from engine.core.batch import StepPlan, StepResult
from engine.core.grammar import TokenMasks
from engine.core.kv.spec import CacheSpec, table_widths
from engine.kernels.gemm.small_batch import PRODUCT_ROWS
from engine.kernels.pointwise import inputs
from engine.layers.attention import Attention, tile_tokens
from engine.layers.context import DeviceBatch, ForwardContext, StateBatch, forward_context
from engine.models.base import CausalLM
from engine.worker.cache import Cache
from engine.worker.cuda_graphs import DecodeGraphs, MixedGraphs, graph_sizes, shared_prefix_sizes
from engine.worker.mixed_step import MOST_CHUNKS, MixedForm, MixedShape, MixedStep, form_of, shapes_within
from engine.worker.pooling import Pooler, needs_all_states
from engine.worker.sample.device import NUM_COLUMNS, DeviceSampler
from engine.worker.sample.step import ForwardedStep, SampledStep, StepSampler
from engine.worker.shared_prefix import SharedPrefixes
from engine.worker.staging import ROOM_FOR_CHANGES, Staging, aligned, check_addressable, head_words
from engine.worker.table_updates import send_updates


class DeviceRunner:
    """One GPU, one model, on the current stream."""

    def __init__(
        self,
        model: CausalLM,
        spec: CacheSpec,
        *,
        num_rows: int,
        max_model_len: int,
        max_num_tokens: int,
        device: torch.device,
        share_prefixes: bool = True,
    ) -> None:
        """`share_prefixes`: decode attention reads a prefix once for the sequences that share it, where that is faster.
        """
        self.model = model
        self.device = device
        self.dtype = next(p.dtype for p in model.parameters() if p.dtype.itemsize > 1)  # fp8 weights aside
        self.page_size = spec.page_size
        self.max_model_len = max_model_len
        num_groups = len(spec.groups)
        length, width = table_widths(max_model_len, self.page_size)
        self.token_ids = torch.zeros(num_rows, length, dtype=torch.int32, device=device)
        self.block_tables = torch.zeros(num_groups, num_rows, width, dtype=torch.int32, device=device)
        self.state_slots = torch.zeros(num_rows, dtype=torch.int32, device=device) if spec.slot_bytes else None
        self.sampler = DeviceSampler(num_rows, model.config.vocab_size, max_model_len, device)
        self.pooler = Pooler()
        self.prompt_len = [0] * num_rows
        self.attention_layers = [m for m in model.modules() if isinstance(m, Attention)]
        self.tile_tokens = [0] * num_groups  # for each group, the smallest value of its layers
        self.tile_sizes: list[int] = []
        self.batch_invariant = any(layer.batch_invariant for layer in self.attention_layers)
        self.multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        check_addressable(self.token_ids, self.block_tables)
        # The scheduler plans at most `max_num_tokens` tokens, and one sequence for each row except the padding row. A
        # graph's padding keeps the tokens within `size` (`mixed_shapes`), and adds up to MOST_CHUNKS sequences, each of
        # which may add a tile. So `size` bounds everything that has one entry per token, and `num_rows` everything that
        # is sampled.
        size = max(max_num_tokens, num_rows)
        sequences = min(num_rows, size) + MOST_CHUNKS
        head = head_words(size, sequences, [size + MOST_CHUNKS] * num_groups, NUM_COLUMNS)
        self.staging = Staging(head + ROOM_FOR_CHANGES, device)
        self._results = StepSampler(model, self.sampler, self.token_ids, self.prompt_len)
        ints = {"dtype": torch.int64, "device": device}
        self._ids, self._positions = (torch.zeros(size, **ints) for _ in range(2))
        self._slots = torch.zeros(num_groups, size, **ints)
        self._seq_lens = torch.zeros(size, dtype=torch.int32, device=device)
        self._numbers = torch.arange(size, dtype=torch.int32, device=device)
        self._states = None if self.state_slots is None else torch.zeros(size, **ints)
        self._share_prefixes = share_prefixes
        self.prefixes: SharedPrefixes | None = None  # None: no layer can read a prefix once for several sequences
        self.graphs: DecodeGraphs | None = None
        self.shared_graphs: DecodeGraphs | None = None  # of sequences that share a prefix
        self.mixed_graphs: MixedGraphs | None = None

    def bind_cache(self, cache: Cache) -> None:
        """Give the layers their memory."""
        self.cache = cache
        cache.bind(self.model.cache_modules())
        for group in range(len(self.tile_tokens)):
            self.tile_tokens[group] = min(
                tile_tokens(
                    layer.num_heads, layer.num_kv_heads, layer.head_dim, self.device,
                    batch_invariant=self.batch_invariant,
                )
                for layer in self.attention_layers if layer.group == group
            )  # fmt: skip
        self.tile_sizes = sorted(set(self.tile_tokens))
        groups = {layer.group for layer in self.attention_layers if layer.can_share}
        if groups and self._share_prefixes:
            (group,) = groups  # that of the layers without a window
            rows, width = self.block_tables.shape[1:]
            self.prefixes = SharedPrefixes(rows, width, self.page_size, group)

    @torch.inference_mode()
    def capture_graphs(self, max_batch: int) -> None:
        """Record decode steps of the usual sizes, and small mixed steps. Call it after `bind_cache`."""
        self.mixed_graphs = MixedGraphs(self.mixed_of, self.fill_mixed, self.mixed_shapes())
        self.staging.device_words.zero_()
        self.graphs = DecodeGraphs(self._decode, graph_sizes(max_batch), self.mixed_graphs.pool)
        if sizes := self.shared_prefix_sizes(max_batch):
            self.shared_graphs = DecodeGraphs(self._decode_shared, sizes, self.graphs.pool)

    @property
    def num_graphs(self) -> int:
        """How many steps are recorded."""
        return sum(len(graphs) for graphs in (self.graphs, self.shared_graphs, self.mixed_graphs) if graphs is not None)

    def shared_prefix_sizes(self, max_batch: int) -> list[int]:
        """The sizes of decode steps with a shared prefix that have graphs."""
        return [] if self.prefixes is None else shared_prefix_sizes(max_batch)

    def mixed_shapes(self) -> list[MixedShape]:
        """The shapes of mixed steps that have graphs. (Padding tokens have positions, too.)"""
        if self.batch_invariant:
            return []
        return shapes_within(min(len(self._ids), self.max_model_len), len(self.token_ids) - 1)

    def fill_mixed(self, shape: MixedShape) -> None:
        """Send a step of this shape that consists of padding, so it changes nothing."""
        self.staging.begin()
        self._put_step(MixedStep.of_padding(shape, self.tile_sizes))
        self.staging.send()

    def mixed_of(self, shape: MixedShape) -> torch.Tensor:
        """Forward of a step that was padded to this shape."""
        return self._mixed(form_of(shape, self.tile_sizes))

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Compile and load the kernels that a request may need and no step has used yet."""
        columns = self.staging.device_words[: NUM_COLUMNS * aligned(1)].view(NUM_COLUMNS, aligned(1))
        hidden = torch.zeros(max(PRODUCT_ROWS), self.model.config.hidden_size, dtype=self.dtype, device=self.device)
        for rows in PRODUCT_ROWS:
            logits = self.model.logits(hidden[:rows])
        self.sampler.warm_up(logits.dtype, columns, self.token_ids)
        self.staging.device_words.zero_()  # graphs are recorded with these inputs: row 0, position 0

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> ForwardedStep:
        for init in plan.row_inits:
            self.sampler.add(init.row, init.params, init.seed, init.prompt_len, init.stop_ids)
            self.prompt_len[init.row] = init.prompt_len
            if init.state_from is not None:
                self.cache.copy_state(init.state_from, init.slot)
        rows = np.array([s.row for s in plan.seqs])
        starts = np.array([s.start for s in plan.seqs])
        if self.prefixes is not None:
            self.prefixes.note(plan)
        if plan.num_tokens == len(plan.seqs):
            hidden, columns, sampling, whole, pooled = self._decode_step(plan, rows, starts)
        else:
            hidden, columns, sampling, whole, pooled = self._mixed_step(plan, rows, starts)
        for source, target in plan.state_saves:
            self.cache.copy_state(source, target)
        counts = np.array([plan.seqs[i].num_tokens for i in sampling], dtype=np.int64)
        return ForwardedStep(plan, rows[sampling], starts[sampling] + counts, hidden, columns, sampling, whole, pooled)

    @torch.inference_mode()
    def sample(self, forwarded: ForwardedStep, masks: TokenMasks | None = None) -> SampledStep:
        """Sample, and start copying the results to the host."""
        return self._results.sample(forwarded, masks)

    def collect(self, handle: SampledStep) -> StepResult:
        return self._results.collect(handle)

    # -- packing ------------------------------------------------------------------------------------------------------

    def _decode_step(
        self, plan: StepPlan, rows: np.ndarray, starts: np.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor, np.ndarray, torch.Tensor | None, torch.Tensor | None]:
        """A step in which every sequence has one token.

        Returns the hidden states [B, H] of the sequences that sample, their columns, their indices, all hidden states
        if prompt log-probabilities are wanted, and the embeddings of prompts that end.
        """
        batch = len(rows)
        shared = None if self.prefixes is None else self.prefixes.find(rows, starts)
        graphs, step = (self.graphs, self._decode) if shared is None else (self.shared_graphs, self._decode_shared)
        size = batch if graphs is None else graphs.size_for(batch)
        stage = self.staging
        stage.begin()
        width = aligned(size)
        stage.take((2 + NUM_COLUMNS) * width)
        words = stage.words[: (2 + NUM_COLUMNS) * width].reshape(2 + NUM_COLUMNS, width)
        words[:2, batch:size] = 0
        words[0, :batch], words[1, :batch] = rows, starts
        self.sampler.fill(words[2:], rows, starts + 1)
        if shared is not None:
            stage.put(_padded(shared, size))
        send_updates(plan, self.staging, self.token_ids, self.block_tables, self.state_slots)
        device = stage.device_words
        hidden = graphs.replay(size) if graphs is not None and graphs.has(size) else step(size)
        whole = hidden if any(s.prompt_logprobs is not None for s in plan.seqs) else None
        sampling = np.arange(batch)
        if not all(s.samples for s in plan.seqs):  # a last chunk of one token
            sampling = np.flatnonzero([s.samples for s in plan.seqs])
        column = device[2 * width : (2 + NUM_COLUMNS) * width].view(NUM_COLUMNS, width)
        if len(sampling) < batch:  # rare: refill for the sampling ones, by a second copy
            pooled = None
            if plan.pooled:
                pooled = self.pooler.pool(plan, hidden.index_select(0, self._to_device(plan.pooled_ends)), hidden)
            index = self._to_device(sampling)
            return hidden.index_select(0, index), column.index_select(1, index).contiguous(), sampling, whole, pooled
        return hidden[:batch], column, sampling, whole, None

    def _to_device(self, indices: np.ndarray | list[int]) -> torch.Tensor:
        return torch.as_tensor(indices, dtype=torch.int64).pin_memory().to(self.device, non_blocking=True)

    def _decode_shared(self, size: int) -> torch.Tensor:
        """`_decode` where some sequences share a prefix; after the columns comes how many tokens each one shares."""
        at = (2 + NUM_COLUMNS) * aligned(size)
        return self._decode(size, self.staging.device_words[at : at + size])

    def _decode(self, size: int, shared: torch.Tensor | None = None) -> torch.Tensor:
        """Forward of `size` sequences with one token each, whose rows and positions head the device's words."""
        words = self.staging.device_words
        rows, positions = words[:size], words[aligned(size) : aligned(size) + size]
        states = self._gather(rows, positions, size)
        batches = [
            DeviceBatch(rows, self._seq_lens[:size], table, self.multiprocessors, shared=shared)
            for table in self.block_tables
        ]
        if self.batch_invariant:
            batches = [
                replace(self._alone(batch, positions), tile_tokens=tokens)
                for batch, tokens in zip(batches, self.tile_tokens, strict=True)
            ]
        state = None
        if states is not None:
            state = StateBatch(states, rows, rows, rows)  # in a decode step the kernels only read the slots
        return self._forward(size, batches, state)

    def _mixed_step(
        self, plan: StepPlan, rows: np.ndarray, starts: np.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor, np.ndarray, torch.Tensor | None, torch.Tensor | None]:
        """Like `_decode_step`, for steps in which some sequences have several tokens."""
        counts = np.array([s.num_tokens for s in plan.seqs])
        step = MixedStep.of(rows, starts, counts, self.tile_sizes, all_tiled=self.batch_invariant)
        shared = None
        places = np.arange(len(counts))
        wants_all = any(s.prompt_logprobs is not None for s in plan.seqs) or needs_all_states(plan)
        shape = None if self.mixed_graphs is None or wants_all else self.mixed_graphs.shape_for(step)
        if shape is not None:
            places[step.singles :] += shape.singles - step.singles
            step = step.padded(shape, self.tile_sizes)
        elif self.prefixes is not None:  # small steps have graphs, without sharing: there is little to save
            shared = self.prefixes.find(rows[: step.singles], starts[: step.singles])
        sampling = np.flatnonzero([s.samples for s in plan.seqs])

        stage = self.staging
        stage.begin()
        self._put_step(step)
        shared_at = 0 if shared is None else stage.put(shared)
        width = aligned(max(1, len(sampling)))
        columns_at = stage.take(NUM_COLUMNS * width)
        columns = stage.words[columns_at : columns_at + NUM_COLUMNS * width].reshape(NUM_COLUMNS, width)
        if len(sampling):
            self.sampler.fill(columns, rows[sampling], (starts + counts)[sampling])
        last = sampling
        if plan.pooled:
            ends = [s.row in plan.pooled and plan.pooled[s.row].ends for s in plan.seqs]
            last = np.concatenate((sampling, np.flatnonzero(ends)))
        at = places[last]  # of hidden states there is one for each sequence, or for each token
        hidden_at = stage.put((step.q_starts + step.counts - 1)[at] if wants_all else at)
        send_updates(plan, self.staging, self.token_ids, self.block_tables, self.state_slots)

        words = stage.device_words
        if shape is not None and self.mixed_graphs is not None:
            hidden = self.mixed_graphs.replay(shape)
        else:
            of_singles = None if shared is None else words[shared_at : shared_at + step.singles]
            hidden = self._mixed(step.form, whole=wants_all, shared=of_singles)
        column = words[columns_at : columns_at + NUM_COLUMNS * width].view(NUM_COLUMNS, width)
        states = hidden.index_select(0, words[hidden_at : hidden_at + len(last)])
        count, whole = len(sampling), hidden if wants_all else None
        pooled = self.pooler.pool(plan, states[count:], whole) if plan.pooled else None
        return states[:count], column, sampling, whole, pooled

    def _put_step(self, step: MixedStep) -> None:
        """Pack what `_mixed` reads from the head of the device's words."""
        stage, q_starts = self.staging, step.q_starts
        stage.put(np.repeat(step.rows, step.counts))
        stage.put(np.arange(step.form.tokens) + np.repeat(step.starts - q_starts, step.counts))
        for each in (step.rows, step.starts, q_starts, step.counts, *(tiles.reshape(-1) for tiles in step.tiles)):
            stage.put(each)

    def _mixed(
        self, form: MixedForm, *, whole: bool = False, shared: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Forward of a mixed step of this form, whose arrays head the device's words: the hidden state of the last
        token of each sequence, or of all tokens. `shared`: how many tokens each single sequence shares."""
        words, at = self.staging.device_words, 0

        def take(count: int) -> torch.Tensor:
            nonlocal at
            at += aligned(count)
            return words[at - aligned(count) :][:count]

        rows, positions = take(form.tokens), take(form.tokens)
        self._gather(rows, positions, form.tokens)
        seq_rows, starts, q_starts, counts = (take(form.sequences) for _ in range(4))
        tiles = {size: take(2 * n).view(n, 2) for size, n in zip(self.tile_sizes, form.tiles, strict=True)}
        batches = [
            DeviceBatch(
                seq_rows, self._seq_lens[: form.sequences], table, self.multiprocessors, tiles[size], size, starts,
                q_starts, counts, num_single=form.singles, shared=shared,
            )
            for table, size in zip(self.block_tables, self.tile_tokens, strict=True)
        ]  # fmt: skip
        state = None
        if self.state_slots is not None:
            slots = self.state_slots.index_select(0, seq_rows).long()
            state = StateBatch(slots, starts == 0, q_starts, counts, form.chunks)
        # While kernels are only recorded, these words may hold anything; but PyTorch's own kernels run even then.
        last = None if whole else (q_starts + counts - 1).clamp_(0, form.tokens - 1).long()

        def last_only() -> ForwardContext:
            """Like a decode step: each sequence has one token, its last."""
            lengths = (starts + counts).clamp_(min=1)  # padding may be a sequence without tokens
            alone = [replace(b, seq_lens=lengths, tiles=None, num_single=0, shared=None) for b in batches]
            if self.batch_invariant:
                alone = [replace(self._alone(b, lengths - 1), has_own_keys=False) for b in alone]
            return self._context((lengths - 1).long(), alone, None)

        return self._forward(form.tokens, batches, state, last, None if whole else last_only)

    def _alone(self, batch: DeviceBatch, positions: torch.Tensor) -> DeviceBatch:
        """`batch` with a tile for each of its one-token sequences, for attention that only takes tiles."""
        numbers = self._numbers[: len(positions)]
        tiles = torch.stack((numbers, torch.zeros_like(numbers)), 1)
        return replace(batch, tiles=tiles, starts=positions, q_starts=numbers, counts=torch.ones_like(numbers))

    # -- on the device ------------------------------------------------------------------------------------------------

    def _gather(self, rows: torch.Tensor, positions: torch.Tensor, count: int) -> torch.Tensor | None:
        """Fill the inputs of `count` tokens. Returns the slots of their states [count], if the model has states."""
        states = None if self._states is None else self._states[:count]
        inputs.gather_inputs(
            rows, positions, self.token_ids, self.block_tables, self.page_size,
            self._ids[:count], self._positions[:count], self._slots[:, :count], self._seq_lens[:count],
            self.state_slots, states,
        )  # fmt: skip
        return states

    def _forward(
        self,
        count: int,
        batches: list[DeviceBatch],
        state: StateBatch | None,
        last: torch.Tensor | None = None,
        last_only: Callable[[], ForwardContext] | None = None,
    ) -> torch.Tensor:
        context = self._context(self._positions[:count], batches, state)
        context.last, context.last_only = last, last_only
        with forward_context(context):
            return self.model(self._ids[:count])

    def _context(
        self, positions: torch.Tensor, batches: list[DeviceBatch], state: StateBatch | None
    ) -> ForwardContext:
        first, *more = zip(self._slots[:, : len(positions)].unbind(0), batches, strict=True)
        return ForwardContext(positions, *first, more, state)


def _padded(values: np.ndarray, size: int) -> np.ndarray:
    """`values`, with zeros up to `size`."""
    return np.pad(values, (0, size - len(values)))
