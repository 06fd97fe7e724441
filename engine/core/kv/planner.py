"""The memory plan: from bytes to pages, sequences and context, before anything large is allocated.

    total
      |- not ours        (1 - utilization) and what other processes hold
      |- weights
      |- activations     the largest step: tokens of one step, logits of its sequences
      |- request table   token ids and block tables
      '- KV pages        the rest

What does not fit is fitted where the user left it open (context, sequences), else refused with the numbers and the flag
to change: never an out-of-memory error minutes later.
"""

from collections.abc import Callable
from dataclasses import dataclass

from engine.core.kv.spec import AttentionSpec, pages_for
from engine.errors import OutOfMemoryPlanError

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Bytes on the device. `usable` is what the process may take in all, `kv_limit` caps the pages' share."""

    total: int
    usable: int
    weights: int
    activations: int
    kv_limit: int | None = None
    graphs: int = 0


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    device: str
    budget: MemoryBudget
    table_bytes: int
    page_size: int             # tokens
    page_bytes: int
    num_pages: int             # including the trash page
    max_model_len: int
    max_num_seqs: int
    notes: tuple[str, ...] = ()

    @property
    def kv_tokens(self) -> int:
        return (self.num_pages - 1) * self.page_size

    def table(self) -> str:
        """The plan as text, for the log and the terminal."""
        rows = [
            ("usable memory", _gib(self.budget.usable), f"of {_gib(self.budget.total).strip()} on {self.device}"),
            ("weights", _gib(self.budget.weights), ""),
            ("activations", _gib(self.budget.activations), "the largest step"),
            *([("graphs", _gib(self.budget.graphs), "recorded decode steps")] if self.budget.graphs else []),
            ("request table", _gib(self.table_bytes), f"{self.max_num_seqs:,} sequences at once"),
            ("KV pages", _gib(self.num_pages * self.page_bytes),
             f"{self.num_pages - 1:,} pages of {self.page_size} tokens = {self.kv_tokens:,} tokens"),
        ]
        lines = ["Memory plan"] + [f"  {name:<15}{size:>12}   {text}".rstrip() for name, size, text in rows]
        full = self.kv_tokens // self.max_model_len
        lines.append(f"  context {self.max_model_len:,} tokens; {full:,} requests of that length fit at the same time")
        return "\n".join(lines + [f"  note: {note}" for note in self.notes])


def plan_memory(
    budget: MemoryBudget,
    spec: AttentionSpec,
    *,
    device: str,
    max_model_len: int | None,
    model_max_len: int,
    max_num_seqs: int | None,
    default_num_seqs: int,
    extra_bytes_per_row_token: int = 4,
) -> MemoryPlan:
    """Turn a budget into a plan.

    `max_model_len`: a number is honoured or refused; None takes the largest that fits, at most `model_max_len`.
    `max_num_seqs`: a number is honoured; None takes `default_num_seqs`, less if pages for one each do not fit.
    Raises OutOfMemoryPlanError with the numbers.
    """
    notes: list[str] = []
    free = budget.usable - budget.weights - budget.activations - budget.graphs
    seqs = max_num_seqs or default_num_seqs

    def table_bytes(length: int) -> int:
        return (seqs + 1) * (length * extra_bytes_per_row_token + pages_for(length, spec.page_size) * 4)

    def pages_with(length: int) -> int:
        room = free - table_bytes(length)
        if budget.kv_limit is not None:
            room = min(room, budget.kv_limit)
        return max(room, 0) // spec.page_bytes

    def fits(length: int) -> bool:
        return pages_with(length) - 1 >= pages_for(length, spec.page_size)

    wanted = max_model_len or model_max_len
    if not fits(wanted):
        largest = _largest(fits, wanted, spec.page_size)
        if largest < spec.page_size:
            if budget.kv_limit is not None and budget.kv_limit < min(free, 2 * spec.page_bytes):
                raise OutOfMemoryPlanError(
                    f"--kv-cache-memory-bytes {budget.kv_limit} holds not even two KV pages of "
                    f"{spec.page_bytes} bytes.",
                    "--kv-cache-memory-bytes",
                    "Raise it, or leave it out.",
                )
            raise OutOfMemoryPlanError(
                f"The model does not fit: weights {_gib(budget.weights).strip()} + activations "
                f"{_gib(budget.activations).strip()} leave {_gib(max(free, 0)).strip()} of "
                f"{_gib(budget.usable).strip()} usable memory for KV pages.",
                "--gpu-memory-utilization",
                "Free memory on the device, raise --gpu-memory-utilization, or lower --max-num-batched-tokens.",
            )
        if max_model_len is not None:
            need = (pages_for(wanted, spec.page_size) + 1) * spec.page_bytes
            raise OutOfMemoryPlanError(
                f"--max-model-len {wanted} needs {_gib(need).strip()} of KV pages for one request; "
                f"{_gib(pages_with(wanted) * spec.page_bytes).strip()} are available.",
                "--max-model-len",
                f"The largest that fits is --max-model-len {largest}; or raise {_limiting_flag(budget, free)}.",
            )
        notes.append(f"context fitted to memory: {largest:,} of the model's {model_max_len:,} tokens")
        wanted = largest
    num_pages = pages_with(wanted)
    # More pages than every sequence at full length can ever hold would only be cache; keep those, but not without end.
    if max_num_seqs is None and num_pages - 1 < seqs:
        seqs = max(1, num_pages - 1)
        notes.append(f"sequences at once fitted to memory: {seqs:,}")
    return MemoryPlan(
        device, budget, table_bytes(wanted), spec.page_size, spec.page_bytes, num_pages, wanted, seqs, tuple(notes))


def _limiting_flag(budget: MemoryBudget, free: int) -> str:
    limited = budget.kv_limit is not None and budget.kv_limit < free
    return "--kv-cache-memory-bytes" if limited else "--gpu-memory-utilization"


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


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB // 10 else f"{num_bytes / (1 << 20):.1f} MiB"
