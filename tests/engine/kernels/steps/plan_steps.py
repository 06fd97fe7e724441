"""A GPU's runner, planned for by the real scheduler up to the limits of what is legal, without a GPU.

    python plan_steps.py FAMILY crowd PREFIX    256 requests at once that share a prompt of PREFIX tokens, usual limits
    python plan_steps.py FAMILY random SEED     small random limits, and random requests with every sampling field

The runner, its staging buffers and the sampler's host side are the real ones. Of the kernels, those that move what the
host sent run here in plain torch, with their bounds checked; the others do nothing, so every sampled token is 0.

Prints, as JSON, what was planned. Fails where a step does, or where the device's tables differ from what the scheduler
decided. Run by test_step_capacities.py in a process of its own.
"""

import json
import math
import random
import sys
from types import SimpleNamespace

import torch
from note_steps import CPU, random_model, stand_in_for_a_gpu

from engine.config import EngineConfig
from engine.core.kv.spec import CacheSpec
from engine.core.loop import EngineCore
from engine.core.params import SamplingParams
from engine.core.request import EngineRequest
from engine.kernels.runtime import launcher
from engine.layers.context import get_context

VOCAB = 999


# -- the kernels that move what the host sent


def apply_runs(packed, runs_at, tokens, pages, states):
    for which, target, source, count in packed[runs_at:].view(-1)[: 4 * apply_runs.count].view(-1, 4).tolist():
        table = (tokens, pages, states)[which].view(-1)
        assert 0 <= target <= target + count <= len(table)
        assert 0 <= source <= source + count <= len(packed)
        table[target : target + count] = packed[source : source + count]


def gather(
    row, position, tokens, pages, state_slots, ids, positions, slots, seq_lens, states, count, _stride, _pages_stride,
    _group_stride, _slots_stride, page,
):  # fmt: skip
    assert len(row) == len(position) == len(ids) == len(positions) == slots.shape[1] == len(seq_lens) == count
    row, position = row.long(), position.long()
    assert int(row.max()) < len(tokens)
    assert int(position.max()) < tokens.shape[1]
    ids.copy_(tokens[row, position])
    positions.copy_(position)
    seq_lens.copy_(position + 1)
    slots.copy_(pages[:, row, position // page].long() * page + position % page)
    if states is not None:
        states.copy_(state_slots[row])


def run_kernel(kernel, grid, *args, num_warps=4, num_stages=3, **constants):
    if kernel.name == "_apply_runs_kernel":
        apply_runs.count = grid[0]
        apply_runs(*args)
    elif kernel.name == "_gather_kernel":
        gather(*args, constants["PAGE"])
    elif kernel.name == "_decode_kernel" and constants.get("SPLITS", 1) > 1:
        assert len(args[6]) >= grid[0] * grid[1], "counters of slices that are done"
    elif kernel.name == "_mixed_kernel":
        assert args[9].shape == (grid[0], 2), "tiles"
        if constants["SPLITS"] > 1:
            assert len(args[8]) >= math.prod(grid) // constants["SPLITS"], "counters of slices that are done"


# -- the runner under watch


class Watch:
    """Checks each step against the plan that it came from."""

    def __init__(self, runner):
        self.runner, self.run_step = runner, runner.forward
        self.tokens, self.tables = runner.token_ids.clone(), runner.block_tables.clone()
        self.slots = None if runner.state_slots is None else runner.state_slots.clone()
        self.steps = self.most_seqs = self.most_words = 0
        model = runner.model
        self.forward, model.forward = model.forward, self.watched_forward
        runner.forward = self.watched_step

    def watched_step(self, plan):
        self.plan = plan
        for update in plan.page_updates:
            row = self.tables[update.group, update.row]
            row[update.start : update.start + len(update.pages)] = torch.tensor(update.pages, dtype=torch.int32)
        words = sum(len(update.pages) for update in plan.page_updates)
        for init in plan.row_inits:
            self.tokens[init.row, : len(init.token_ids)] = torch.tensor(init.token_ids, dtype=torch.int32)
            if self.slots is not None:
                self.slots[init.row] = init.slot
            words += len(init.token_ids)
        self.steps += 1
        self.most_seqs = max(self.most_seqs, len(plan.seqs))
        self.most_words = max(self.most_words, words)
        forwarded = self.run_step(plan)
        assert torch.equal(self.runner.block_tables, self.tables), "block tables"
        assert torch.equal(self.runner.token_ids, self.tokens), "tokens"
        assert self.slots is None or torch.equal(self.runner.state_slots, self.slots), "states"
        return forwarded

    def watched_forward(self, token_ids):
        """The step's own tokens stand where its kernels look for them; what fills it up belongs to row 0."""
        seqs, context = self.plan.seqs, get_context()
        positions = context.positions.tolist()
        wanted = [range(seq.start, seq.start + seq.num_tokens) for seq in seqs]
        at = 0
        for part in wanted:
            if len(part) > 1 and at < context.attention.num_single:
                at = context.attention.num_single  # chunks begin behind the places of sequences that decode
            assert positions[at : at + len(part)] == list(part), "positions"
            at += len(part)
        for group in range(len(self.tables)):
            batch = context.of_group(group)[1]
            if batch.tiles is None:
                assert len(batch.rows) == len(batch.seq_lens) == len(token_ids)
                continue
            assert len(batch.rows) == len(batch.starts) == len(batch.q_starts) == len(batch.counts)
            assert len(batch.seq_lens) >= batch.num_single
            assert int(batch.counts.sum()) == len(token_ids)
            covered = batch.num_single
            for seq, first in batch.tiles.tolist():
                covered += max(0, min(batch.tile_tokens, int(batch.counts[seq]) - first))
            assert covered == len(token_ids), "tiles"
        if context.state is not None and context.state.num_chunks:
            needed = sum(-(-n // 64) for n in context.state.counts.tolist() if n > 1)
            assert needed <= context.state.num_chunks, "chunks of recurrent layers"
        return self.forward(token_ids)


def engine(family, *, seqs, tokens, max_len, page, pages, graphs, depth=2, policy="fcfs"):
    from engine.worker.cache import Cache
    from engine.worker.cuda_graphs import graph_sizes
    from engine.worker.device_runner import DeviceRunner

    model = random_model(family)
    spec = CacheSpec(tuple(model.cache_layers()), 2, page)
    slabs = max(pages // spec.per_slab[0], spec.slabs_for(max_len, tokens, 2) + 1)
    with torch.inference_mode():
        runner = DeviceRunner(
            model, spec, num_rows=seqs + 1, max_model_len=max_len, max_num_tokens=tokens, device=CPU
        )
        runner.bind_cache(Cache(spec, slabs, torch.bfloat16, CPU))
    if graphs:
        sizes = graph_sizes(min(seqs, tokens))
        runner.graphs = SimpleNamespace(
            size_for=lambda batch: next((s for s in sizes if s >= batch), batch), has=sizes.__contains__,
            replay=runner._decode,
        )  # fmt: skip
        shapes = runner.mixed_shapes()
        runner.mixed_graphs = SimpleNamespace(shape_for=lambda step: step.shape(shapes), replay=runner.mixed_of)
    watch = Watch(runner)
    core = EngineCore(
        EngineConfig("none", scheduling_policy=policy), runner, memory=spec.memory(slabs), max_model_len=max_len,
        max_num_seqs=seqs, max_num_batched_tokens=tokens, vocab_size=VOCAB, depth=depth,
    )  # fmt: skip
    return core, watch


def drain(core, requests):
    for request in requests:
        core.add_request(request)
    finished = set()
    while core.has_work():
        for output in core.step():
            assert output.error is None, f"{output.request_id}: {output.error}"
            if output.finish_reason is not None:
                finished.add(output.request_id)
        core.check()
    assert finished == {request.request_id for request in requests}


# -- what is asked


def crowd(family, prefix):
    core, watch = engine(
        family, seqs=1024, tokens=8192, max_len=4096, page=16, pages=40_000, graphs=True
    )
    shared = [1 + i % (VOCAB - 1) for i in range(prefix)]
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    drain(core, [EngineRequest("first", shared, params)])
    drain(core, [EngineRequest(str(i), [*shared, 1 + i], params) for i in range(256)])
    return watch


def some_params(choose, prompt_len):
    tokens = range(VOCAB)
    few, many = choose.randint(0, 3), choose.randint(0, VOCAB)
    return SamplingParams(
        temperature=choose.choice([0.0, 0.7]), top_p=choose.choice([1.0, 0.9]), top_k=choose.choice([0, 5]),
        min_p=choose.choice([0.0, 0.1]), presence_penalty=choose.choice([0.0, 0.5]),
        frequency_penalty=choose.choice([0.0, 0.5]), repetition_penalty=choose.choice([1.0, 1.2]),
        seed=choose.choice([None, 7]), max_tokens=choose.randint(1, 12), min_tokens=choose.choice([0, 1]),
        ignore_eos=True, logprobs=choose.choice([None, 0, 20]), prompt_logprobs=choose.choice([None] * 6 + [0, 20]),
        logit_bias=dict.fromkeys(choose.sample(tokens, choose.choice([0, few, many])), 1.0),
        bad_token_ids=choose.sample(tokens, choose.choice([0, few, many])),
        stop_token_ids=choose.sample(range(1, VOCAB), few),
    )  # fmt: skip


def at_random(family, seed):
    choose = random.Random(seed)
    from engine.worker import device_runner

    # So small that steps need several copies; the smallest possible among them.
    device_runner.ROOM_FOR_CHANGES = 16 * choose.choice([2, 3, 8, 64])
    seqs, page = choose.choice([3, 20, 40]), choose.choice([8, 16])
    tokens, max_len = choose.choice([seqs // 2 + 1, seqs + 3, 150]), choose.choice([96, 700])
    core, watch = engine(
        family, seqs=seqs, tokens=tokens, max_len=max_len, page=page,
        pages=choose.choice([2, seqs // 3 + 2, seqs]) * (max_len // page), graphs=choose.random() < 0.7,
        depth=choose.choice([1, 2]), policy=choose.choice(["fcfs", "priority"]),
    )  # fmt: skip
    shared = [choose.randrange(1, VOCAB) for _ in range(max_len)]
    for _ in range(3):
        requests = []
        for i in range(2 * seqs):
            length = choose.choice([1, 2, choose.randint(1, max_len - 13), max_len - 13])
            own = choose.choice([0, 1, length])
            prompt = shared[: length - own] + [choose.randrange(1, VOCAB) for _ in range(own)]
            params = some_params(choose, length)
            requests.append(EngineRequest(str(i), prompt[:length], params, priority=choose.choice([0, 0, 1])))
        drain(core, requests)
    return watch


def main(family, kind, number):
    stand_in_for_a_gpu()
    launcher.Kernel.__call__ = run_kernel
    watch = crowd(family, int(number)) if kind == "crowd" else at_random(family, int(number))
    print(json.dumps({"steps": watch.steps, "sequences": watch.most_seqs, "words": watch.most_words}))


if __name__ == "__main__":
    main(*sys.argv[1:])
