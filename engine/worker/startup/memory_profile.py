"""Measures the GPU memory that steps need, before the pages are allocated.

    a runner with the real number of rows, and one page that all of them share
      |- every kernel compiled (warmup.py)
      |- the largest step, then the largest decode step, sampled with every option;
      |    then small ones of a prompt                                                  -> peak
      |- some graphs, the largest among them                                           -> pool, bytes a record
      '- freed again

The kernels that are compiled and loaded here are needed later anyway, so measuring adds little start-up time.
"""

from collections.abc import Callable, Iterable

import torch

from engine.core.batch import RowInit, ScheduledSeq, StepPlan
from engine.core.kv.spec import CacheSpec
from engine.core.params import MAX_LOGPROBS, SamplingParams
from engine.kernels.runtime.launcher import Job
from engine.models.base import CausalLM
from engine.worker.cache import Cache
from engine.worker.cuda_graphs import DecodeGraphs, Graphs, Key, MixedGraphs, graph_sizes
from engine.worker.device_runner import DeviceRunner
from engine.worker.startup.memory import StepNeeds
from engine.worker.startup.start_clock import StartClock
from engine.worker.startup.warmup import compile_steps, needed_kernels

_PROMPT_LOGPROBS = 512  # prompt positions with logprobs: more than are computed at a time
_GRANULE = 2 << 20      # the driver's allocation unit: part of a measured need may fit into a unit allocated earlier
# Prompts that end in a full step: the last layer goes on with as many rows, whose kernels no other step has.
_FEW_PROMPTS = (1, 2, 4, 16)
_PROBES = 8             # graphs of batch sizes up to this (1, 2, 4, 8) are measured for all; the last for the largest


@torch.inference_mode()
def measure_steps(
    model: CausalLM,
    spec: CacheSpec,
    kv_dtype: torch.dtype,
    max_num_tokens: int,
    max_num_seqs: int,
    device: torch.device,
    clock: StartClock | None = None,
    *,
    graphs: bool,
    share_prefixes: bool = True,
) -> StepNeeds:
    """`model` has its weights, and no pages are allocated yet. Gives all of the measurement's own memory back.

    Raises torch.OutOfMemoryError if a step does not fit beside the weights.
    """
    clock = clock or StartClock()
    count = min(max_num_seqs, max_num_tokens)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    runner, cache, steps = _prepared(
        model, spec, kv_dtype, max_num_tokens, max_num_seqs, device, share_prefixes=share_prefixes
    )
    compile_steps(runner, count, _with_prompts(steps, runner, max_num_tokens, max_num_seqs))
    clock.lap("kernels")
    torch.cuda.empty_cache()
    ours = torch.cuda.memory_allocated(device) - before
    buffers = ours - cache.nbytes - runner.token_ids.nbytes - runner.block_tables.nbytes

    reserved = torch.cuda.memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    for plan in steps:
        runner.collect(runner.sample(runner.forward(plan)))
    runner.warm_up()
    probes = _spread(graph_sizes(count)) if graphs else {}
    shared = runner.shared_prefix_sizes(count) if graphs else []
    for size in probes.values():
        runner._decode(size)
    for size in shared[-1:]:
        runner._decode_shared(size)
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_reserved(device)
    torch.cuda.empty_cache()
    # What remains belongs to libraries (cuBLAS workspaces) and stays allocated: it is in use, but not part of a step.
    stays = torch.cuda.memory_reserved(device) - reserved
    if graphs:
        _first_graph(device)
        torch.cuda.empty_cache()
    in_use = _in_use(device) - ours
    clock.lap("largest steps")
    for_graphs = _measure_graphs(runner, probes, graph_sizes(count), shared, device) if graphs else 0

    for layer in runner.attention_layers:
        del layer.k_cache, layer.v_cache
    del runner, cache
    torch.cuda.empty_cache()
    clock.lap("graphs' memory")
    return StepNeeds(peak - reserved - stays, for_graphs, buffers, in_use)


@torch.inference_mode()
def kernels_of_a_start(
    model: CausalLM, spec: CacheSpec, kv_dtype: torch.dtype, max_num_tokens: int, max_num_seqs: int,
    device: torch.device, *, share_prefixes: bool = True,
) -> set[Job]:  # fmt: skip
    """What `measure_steps` compiles, and with it whatever a start runs. No weight is read and no kernel is launched."""
    runner, _, steps = _prepared(
        model, spec, kv_dtype, max_num_tokens, max_num_seqs, device, share_prefixes=share_prefixes
    )
    plans = _with_prompts(steps, runner, max_num_tokens, max_num_seqs)
    return needed_kernels(runner, min(max_num_seqs, max_num_tokens), plans)


def _prepared(
    model: CausalLM, spec: CacheSpec, kv_dtype: torch.dtype, max_num_tokens: int, max_num_seqs: int,
    device: torch.device, *, share_prefixes: bool,
) -> tuple[DeviceRunner, Cache, list[StepPlan]]:  # fmt: skip
    """A runner with the real number of rows and one page, and the steps that need most."""
    count = min(max_num_seqs, max_num_tokens)
    lengths = _lengths(max_num_tokens, count, model.max_model_len - 1)
    longest = max(lengths)
    runner = DeviceRunner(
        model, spec, num_rows=max_num_seqs + 1, max_model_len=longest + 2, max_num_tokens=max_num_tokens,
        device=device, share_prefixes=share_prefixes,
    )  # fmt: skip
    cache = Cache(spec, 1, kv_dtype, device)
    runner.bind_cache(cache)
    # Steps with few sequences use other kernels. If a step has no more tokens than sequences, the largest step is a
    # decode step.
    small = [[2]] if longest > 1 else [[2], [2, *[1] * (count - 2)]]
    return runner, cache, [*_largest_steps(lengths), *(_largest_steps(prompts)[0] for prompts in small)]


def _with_prompts(
    steps: Iterable[StepPlan], runner: DeviceRunner, max_num_tokens: int, max_num_seqs: int
) -> list[StepPlan]:
    """Those of the steps that have prompts, and full ones in which only a few prompts end."""
    few = [count for count in _FEW_PROMPTS if count <= min(max_num_seqs, max_num_tokens)]
    limit = runner.max_model_len - 2
    lengths = [_lengths(min(max_num_tokens, count * limit), count, limit) for count in few]
    full = [_largest_steps(each, prompt_logprobs=False)[0] for each in lengths]
    return [plan for plan in (*steps, *full) if plan.num_tokens > len(plan.seqs)]


def _lengths(num_tokens: int, count: int, limit: int) -> list[int]:
    """Lengths of `count` prompts with `num_tokens` in all, at most `limit` each: a few long ones, the rest one
    token."""
    lengths, left = [], num_tokens
    for others in reversed(range(count)):
        lengths.append(min(limit, left - others))
        left -= lengths[-1]
    return lengths


def _largest_steps(lengths: list[int], *, prompt_logprobs: bool = True) -> list[StepPlan]:
    """A step with prompts of these lengths, then a step with one more token of each. There are no pages yet, so all of
    them use page 0. The first prompt asks for the logprobs of its tokens: then the last layer computes all rows."""
    asked = MAX_LOGPROBS if prompt_logprobs else None
    params = SamplingParams(top_p=0.9, presence_penalty=0.1, logprobs=MAX_LOGPROBS, max_tokens=None)
    inits = [RowInit(i + 1, [0] * n, min(n, _PROMPT_LOGPROBS + 1), params, i, ()) for i, n in enumerate(lengths)]
    prompts = [
        ScheduledSeq(str(i), i, i + 1, 0, n, samples=True, prompt_logprobs=asked if i == 0 else None)
        for i, n in enumerate(lengths)
    ]
    decodes = [ScheduledSeq(str(i), i, i + 1, n, 1, samples=True) for i, n in enumerate(lengths)]
    return [StepPlan(0, prompts, inits), StepPlan(1, decodes)]


def _first_graph(device: torch.device) -> None:
    """Record one graph first: the driver allocates extra memory for a process's first graph, which later ones do not
    need."""
    graph, word = torch.cuda.CUDAGraph(), torch.zeros(1, device=device)
    with torch.cuda.graph(graph):
        word += 1
    graph.replay()
    torch.cuda.synchronize(device)


def _measure_graphs(
    runner: DeviceRunner, probes: dict[int, int], sizes: list[int], shared: list[int], device: torch.device
) -> int:
    """Bytes that all graphs will take, from a few of them. `shared`: the sizes for sequences that share a prefix.

    The pool holds what the largest graph needs, which the others share, and the hidden states of each. The driver's
    records have about the same size for all decode steps, which have the same kernels, and for all shapes of mixed
    steps. Steps with a shared prefix have one kernel more a layer; the largest of them is the only one measured.
    """
    in_use, reserved = _in_use(device), torch.cuda.memory_reserved(device)
    shapes = runner.mixed_shapes()
    probed = shapes[-2:]  # the last has most tokens; attention of fewer tokens may be sliced, which takes scratch
    mixed = MixedGraphs(runner.mixed_of, runner.fill_mixed, probed)
    mixed_records = _records(mixed, probed, device, in_use, reserved, fill=runner.fill_mixed)
    runner.staging.device_words.zero_()
    decode = DecodeGraphs(lambda turn: runner._decode(probes[turn]), graph_sizes(max(probes)), mixed.pool)
    decode_records = _records(decode, probes, device, in_use + mixed_records, reserved)
    of_shared = 0
    if shared:
        graph = DecodeGraphs(runner._decode_shared, shared[-1:], decode.pool)
        of_shared = _GRANULE + _records(graph, graph.sizes, device, in_use + mixed_records + decode_records, reserved)
    pool = torch.cuda.memory_reserved(device) - reserved
    rows = sum(sizes) - sum(set(probes.values())) + sum(shared[:-1]) + sum(s.singles + s.tokens for s in shapes[:-2])
    hidden = rows * runner.model.config.hidden_size * runner.dtype.itemsize
    of_mixed = -(-mixed_records // max(1, len(probed))) + _GRANULE  # --batch-invariant records no mixed steps
    of_decode = -(-(decode_records + _GRANULE) // len(probes))
    return pool + hidden + of_mixed * len(shapes) + of_decode * len(sizes) + of_shared * len(shared)


def _records(
    graphs: Graphs[Key],
    keys: Iterable[Key],
    device: torch.device,
    in_use: int,
    reserved: int,
    fill: Callable[[Key], None] = lambda _: None,
) -> int:
    """Bytes that the driver allocated for their records, beyond what was in use and the growth of the pool. `fill(key)`
    prepares a graph's inputs: those of another shape would lead its kernels out of their memory."""
    for key in keys:
        fill(key)
        graphs.replay(key)  # a record is loaded when it first runs
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return max(0, _in_use(device) - in_use - (torch.cuda.memory_reserved(device) - reserved))


def _spread(sizes: list[int]) -> dict[int, int]:
    """The sizes to probe, from the smallest to the largest, by the batch size under which each is recorded."""
    turns = graph_sizes(_PROBES)
    return {turn: sizes[(len(sizes) - 1) * i // (len(turns) - 1)] for i, turn in enumerate(turns)}


def _in_use(device: torch.device) -> int:
    free, total = torch.cuda.mem_get_info(device)
    return total - free
