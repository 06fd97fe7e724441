"""The memory plan: from bytes to pages, sequences and context, before anything large is allocated.

    total
      |- not ours        (1 - utilization) and what other processes hold
      |- weights
      |- overhead        CUDA context, kernels' code, library workspaces, unused ends of allocations
      |- activations     the largest step: tokens of one step, logits of its sequences, sampling with every option
      |- graphs          recorded steps
      |- step buffers    what the host sends each step, and the sampler's scratch
      |- request table   token ids and block tables
      '- KV cache        the rest: slabs of pages, and of states if the model has recurrent layers (spec.py)

Tables that the GPU reads out of host memory are listed below it: they take none of this.

What the user left open (context, sequences) is reduced until it fits. Anything else is refused, with the numbers and
the flag to change: better now than an out-of-memory error minutes later.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from engine.core.kv.spec import CacheSpec, table_widths
from engine.errors import OutOfMemoryPlanError
from engine.message import joined, msg

GIB = 1 << 30
_FEWEST_SEQS = 8   # the request table never reduces the number of sequences below this
_TABLE_SHARE = 8   # if the number of sequences is open, their table takes at most an eighth of the memory left
_MUCH_MEMORY = 70 * GIB  # H100, A100 of 80 GB, H200, B200, RTX PRO 6000; not L4, A10, RTX 4090, L40S, parts of a GPU
_FEWEST_TOKENS = 512     # of a step; fewer make prompts slow
_STEP_SHARE = 8          # a step's activations take at most an eighth of the memory that the weights leave
_SHORT_CONTEXT = 256  # if the number of sequences is open: tokens that each should have room for


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Bytes on the device. `usable` is what the process may take in all, `kv_limit` caps the pages' share."""

    total: int
    usable: int
    weights: int
    activations: int
    kv_limit: int | None = None
    graphs: int = 0
    overhead: int = 0
    buffers: int = 0
    on_host: int = 0  # weights that the GPU reads from host memory; not part of `usable`
    weights_text: str = ""  # how weights are stored and which GEMM reads them

    @property
    def parts(self) -> list[tuple[str, int, str]]:
        """(name, bytes, what it is) of all that does not depend on context and sequences."""
        every = [
            (msg("weights"), self.weights, self.weights_text),
            (msg("overhead"), self.overhead, "CUDA context, kernels, library workspaces"),
            (msg("activations"), self.activations, "the largest step"),
            (msg("graphs"), self.graphs, "recorded steps"),
            (msg("step buffers"), self.buffers, "inputs of a step, sampler"),
        ]
        return [part for part in every if part[1]]

    @property
    def left(self) -> int:
        """For the request table and the pages; below zero if the model does not fit."""
        return self.usable - sum(size for _, size, _ in self.parts)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    device: str
    budget: MemoryBudget
    table_bytes: int
    spec: CacheSpec
    num_slabs: int
    max_model_len: int
    max_num_seqs: int
    step_tokens: int           # the most that a step adds to a sequence
    notes: tuple[str, ...] = ()

    @property
    def num_pages(self) -> int:
        """Pages of the first group if it owned all slabs, plus the null page."""
        return self.num_slabs * self.spec.per_slab[0] + 1

    @property
    def kv_tokens(self) -> int:
        return (self.num_pages - 1) * self.spec.page_size

    @property
    def kv_bytes(self) -> int:
        return self.num_slabs * self.spec.slab_bytes + self.spec.fixed_bytes

    @property
    def resident_bytes(self) -> int:
        """Taken for good once the engine has started: all but the activations, which come and go."""
        parts = sum(size for name, size, _ in self.budget.parts if name != "activations")
        return parts + self.table_bytes + self.kv_bytes

    def numbers(self) -> dict[str, Any]:
        """The plan as JSON values, in bytes and tokens."""
        spec, budget = self.spec, self.budget
        groups = [
            {"window": group.window, "layers": len(group.layers), "bytes_per_token": group.page_bytes // spec.page_size}
            for group in spec.groups
        ]
        return {
            "total": budget.total,
            "usable": budget.usable,
            "parts": {name.replace(" ", "_"): size for name, size, _ in budget.parts},
            "request_table": self.table_bytes,
            "kv_cache": self.kv_bytes,
            "in_host_memory": budget.on_host,
            "page_size": spec.page_size,
            "kv_groups": groups,
            "state_bytes_per_sequence": spec.slot_bytes,
            "slabs": self.num_slabs,
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.step_tokens,
            "full_length_requests": self.full_length_requests,
            "notes": list(self.notes),
        }

    @property
    def full_length_requests(self) -> int:
        """Requests of the longest context that fit at the same time."""
        return _largest(lambda n: self._slabs_for(n) <= self.num_slabs, self.num_slabs, 1)

    def table(self) -> str:
        """The plan as text, for the log and the terminal."""
        rows = [
            ("usable memory", self.budget.usable, f"of {gib(self.budget.total)} on {self.device}"),
            *self.budget.parts,
            ("request table", self.table_bytes, f"{self.max_num_seqs:,} sequences at once"),
            ("KV pages" if self._uniform else "KV cache", self.kv_bytes, self._slabs()),
        ]
        lines = ["Memory plan"] + [f"  {name:<15}{gib(size):>12}   {text}".rstrip() for name, size, text in rows]
        if not self._uniform:
            lines += [f"  {'':<15}{gib(size):>12}   {text}" for size, text in self._kinds()]
        if self.budget.on_host:
            lines.append(f"  {'in host memory':<15}{gib(self.budget.on_host):>12}   per-layer embeddings: as much GPU "
                         "memory is saved; each token's row comes over the bus")
        full = self.full_length_requests
        lines.append(f"  context {self.max_model_len:,} tokens; {full:,} requests of that length fit at the same time")
        return "\n".join(lines + [f"  note: {note}" for note in self.notes])

    @property
    def _uniform(self) -> bool:
        return len(self.spec.per_slab) == 1

    def _slabs_for(self, seqs: int) -> int:
        return self.spec.slabs_for(self.max_model_len, self.step_tokens, seqs)

    def _slabs(self) -> str:
        if self._uniform:
            return f"{self.num_pages - 1:,} pages of {self.spec.page_size} tokens = {self.kv_tokens:,} tokens"
        return f"{self.num_slabs:,} slabs of {gib(self.spec.slab_bytes)}, each of which holds"

    def _kinds(self) -> list[tuple[int, str]]:
        """(bytes, what it is) of a page of each group, and of a sequence's state."""
        spec, kinds = self.spec, []
        for group, per in zip(spec.groups, spec.per_slab, strict=False):
            sees = "full attention" if group.window is None else f"a window of {group.window:,} tokens"
            text = f"x {per:,}: {spec.page_size} tokens in {len(group.layers)} layers of {sees}"
            kinds.append((group.page_bytes, text))
        if spec.slot_bytes:
            text = f"x {spec.per_slab[-1]:,}: a sequence's state in the recurrent layers, in {spec.state_dtypes}"
            kinds.append((spec.slot_bytes, text))
        return kinds


def plan_memory(
    budget: MemoryBudget,
    spec: CacheSpec,
    *,
    device: str,
    max_model_len: int | None,
    model_max_len: int,
    max_num_seqs: int | None,
    default_num_seqs: int,
    usual_num_seqs: int = 0,
    step_tokens: int = 8192,
) -> MemoryPlan:
    """Turn a budget into a plan. `step_tokens`: the most that a step adds to a sequence.

    `max_model_len`: a number is honoured or refused; None takes the largest that fits, at most `model_max_len`.
    `max_num_seqs`: a number is honoured; None takes `default_num_seqs`, or less so that the context fits, that their
    table stays small compared with the pages, and that each can have a page; it says so if that is less than
    `usual_num_seqs`.
    Raises OutOfMemoryPlanError with the numbers.
    """
    free = budget.left

    def room(length: int, seqs: int) -> int:
        """Bytes for the cache."""
        left = max(0, free - request_table_bytes(length, seqs, spec))
        return left if budget.kv_limit is None else min(left, budget.kv_limit)

    def slabs(length: int, seqs: int) -> int:
        return (room(length, seqs) - spec.fixed_bytes) // spec.slab_bytes

    def fits(length: int, seqs: int) -> bool:
        return slabs(length, seqs) >= spec.slabs_for(length, step_tokens)

    def largest(seqs: int) -> int:
        return _largest(lambda length: fits(length, seqs), wanted, spec.page_size)

    def small_table(length: int, seqs: int) -> bool:
        return request_table_bytes(length, seqs, spec) * _TABLE_SHARE <= free

    notes: list[str] = []
    wanted = max_model_len or model_max_len
    choices = [max_num_seqs] if max_num_seqs else _halves(default_num_seqs)
    fewest = choices[-1]
    if fits(wanted, fewest):
        seqs = next((n for n in choices if fits(wanted, n) and small_table(wanted, n)), fewest)
    else:
        limit = largest(fewest)
        if limit < spec.page_size:
            raise _nothing_fits(budget, spec, fewest)
        if max_model_len is not None:
            need = spec.slabs_for(wanted, step_tokens) * spec.slab_bytes + spec.fixed_bytes
            raise _too_long(budget, need, wanted, room(wanted, fewest), limit)
        seqs = next((n for n in choices if (length := largest(n)) and small_table(length, n)), fewest)
        wanted = largest(seqs)
        notes.append(f"context fitted to memory: {wanted:,} of the model's {model_max_len:,} tokens")
    num_slabs = slabs(wanted, seqs)
    if max_num_seqs is None:
        seqs = max(1, _largest(lambda n: spec.slabs_for(1, 1, n) <= num_slabs, seqs, 1))
        if seqs < max(default_num_seqs, usual_num_seqs):
            notes.append(f"sequences at once fitted to memory: {seqs:,}")
    table = request_table_bytes(wanted, seqs, spec)
    return MemoryPlan(device, budget, table, spec, num_slabs, wanted, seqs, step_tokens, tuple(notes))


def sensible_seqs(spec: CacheSpec, most: int, free: int) -> int:
    """Default number of sequences: `most`, or fewer if `free` bytes cannot give each a short context. Memory for larger
    steps (logits, sampling, graphs) is then better spent on pages."""
    choices = _halves(most)
    slabs = max(0, free - spec.fixed_bytes) // spec.slab_bytes
    return next((n for n in choices if spec.slabs_for(_SHORT_CONTEXT, 1, n) <= slabs), choices[-1])


def sensible_batched_tokens(most: int, total: int, free: int, step_bytes: Callable[[int], int]) -> int:
    """Default tokens per step: `most` on a GPU with much memory, a quarter of it on others.

    GPUs with less memory are also slower: 2,048 tokens keep them busy, and a longer step would stall running streams
    for seconds. Fewer still if a step's activations, `step_bytes(tokens)`, would take much of the `free` bytes beside
    the weights: pages are worth more.
    """
    tokens = most if total >= _MUCH_MEMORY else most // 4
    while tokens > _FEWEST_TOKENS and step_bytes(tokens) * _STEP_SHARE > free:
        tokens //= 2
    return tokens


def request_table_bytes(max_model_len: int, max_num_seqs: int, spec: CacheSpec) -> int:
    """int32 token ids and page ids of every row that a sequence can have, and of the padding row."""
    tokens, pages = table_widths(max_model_len, spec.page_size)
    return (max_num_seqs + 1) * (tokens + pages * len(spec.groups)) * 4


def gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB // 10 else f"{num_bytes / (1 << 20):.1f} MiB"


def _nothing_fits(budget: MemoryBudget, spec: CacheSpec, seqs: int) -> OutOfMemoryPlanError:
    least = spec.slabs_for(1, 1) * spec.slab_bytes + spec.fixed_bytes
    if budget.kv_limit is not None and budget.kv_limit < min(budget.left, least):
        return OutOfMemoryPlanError(
            msg("--kv-cache-memory-bytes {kv_limit} is too small for a single token: at least {least} are needed.",
                kv_limit=budget.kv_limit, least=least),
            "--kv-cache-memory-bytes",
            msg("Raise it, or leave it out."),
        )
    table = request_table_bytes(spec.page_size, seqs, spec)
    return OutOfMemoryPlanError(
        msg("The model does not fit: {budget} leave {left} of {usable} usable "
            "memory for the request table (at least {table}) and the KV cache (at least {least}).",
            budget=_sum(budget), left=gib(max(budget.left, 0)), usable=gib(budget.usable), table=gib(table),
            least=gib(least)),
        "--gpu-memory-utilization",
        msg("Free memory on the device, raise --gpu-memory-utilization, or lower --max-num-batched-tokens."),
    )


def _too_long(budget: MemoryBudget, need: int, wanted: int, room: int, limit: int) -> OutOfMemoryPlanError:
    by_flag = budget.kv_limit is not None and budget.kv_limit < budget.left
    flag = "--kv-cache-memory-bytes" if by_flag else "--gpu-memory-utilization"
    return OutOfMemoryPlanError(
        msg("--max-model-len {wanted} needs {need} of KV cache for one request; {room} are available "
            "({usable} usable memory; taken: {budget}, and the request table).", wanted=wanted, need=gib(need),
            room=gib(room), usable=gib(budget.usable), budget=_sum(budget)),
        "--max-model-len",
        msg("The largest that fits is --max-model-len {limit}; or raise {flag}.", limit=limit, flag=flag),
    )


def _sum(budget: MemoryBudget) -> str:
    return joined((msg("{name} {size}", name=name, size=gib(size)) for name, size, _ in budget.parts), " + ")


def _halves(default: int) -> list[int]:
    """Numbers of sequences to try, from `default` down."""
    found = [default]
    while found[-1] > _FEWEST_SEQS:
        found.append(max(_FEWEST_SEQS, found[-1] // 2))
    return found


def _largest(fits: Callable[[int], bool], upper: int, step: int) -> int:
    """The largest multiple of `step` up to `upper` for which `fits` holds (it is monotone); 0 if none."""
    low, high = 0, upper // step
    while low < high:
        mid = (low + high + 1) // 2
        if fits(mid * step):
            low = mid
        else:
            high = mid - 1
    return low * step
