"""What is run to measure a GPU's steps and graphs, and how few graphs stand for all. (The measuring: tests/gpu.)"""

from types import SimpleNamespace

import pytest
import torch

from engine.core.kv.planner import GIB

MIB = 1 << 20
DEVICE = torch.device("cuda", 0)


@pytest.fixture
def probe():
    """Imported when a test runs, not when it is collected: the tests of the kernels set Triton's mode before that."""
    return pytest.importorskip("engine.worker.startup.memory_profile", reason="needs Triton")


@pytest.mark.parametrize(("tokens", "seqs", "limit"), [
    (8192, 1024, 40959), (8192, 1024, 63), (256, 64, 1), (16, 64, 100), (64, 1, 100), (64, 1, 9), (1, 1, 1),
])  # fmt: skip
def test_the_largest_steps_use_all_tokens_and_all_sequences(probe, tokens, seqs, limit):
    """As far as the context allows: there are no positions beyond `limit`."""
    count = min(tokens, seqs)
    first, second = probe._largest_steps(probe._lengths(tokens, count, limit))
    assert (first.num_tokens, len(first.seqs)) == (min(tokens, count * limit), count)
    assert (second.num_tokens, len(second.seqs)) == (count, count)
    assert all(1 <= s.num_tokens <= limit for s in first.seqs)
    assert [len(i.token_ids) for i in first.row_inits] == [s.num_tokens for s in first.seqs]
    assert [s.start for s in second.seqs] == [s.num_tokens for s in first.seqs]
    assert {i.row for i in first.row_inits} == set(range(1, count + 1)), "row 0 is the padding row"


@pytest.mark.parametrize("batch", [1, 2, 3, 64, 1024])
def test_probes_reach_from_the_smallest_graph_to_the_largest(probe, batch):
    sizes = probe.graph_sizes(batch)
    found = probe._spread(sizes)
    assert list(found) == probe.graph_sizes(max(found)), "recorded in place of exactly these sizes"
    assert found[1] == 1
    assert found[max(found)] == batch
    assert set(found.values()) <= set(sizes)


def test_a_few_graphs_tell_what_all_will_take(probe, monkeypatch):
    """A pool of 137 MiB that all share; once it has run, a decode graph takes 3 MiB of the driver, another 5. The
    driver takes 2 MiB at a time, so four graphs, or one, may be about to need 2 more. With a shared prefix the largest
    graph stands for all."""
    from engine.worker.mixed_step import MixedShape

    state = SimpleNamespace(reserved=20 * GIB, driver=GIB, decoded=[], shared=[], filled=[])

    class Graphs:
        def replay(self, key):
            state.driver += self.record

    class MixedGraphs(Graphs):
        record, pool = 5 * MIB, "shared"

        def __init__(self, step, fill, shapes):
            for shape in shapes:
                fill(shape)
                step(shape)
            state.reserved += 100 * MIB

    class DecodeGraphs(Graphs):
        record, pool = 3 * MIB, "shared"

        def __init__(self, decode, sizes, pool):
            assert pool == "shared"
            assert words.sum() == 0, "what mixed steps read stands there no more"
            self.sizes = sizes
            for size in reversed(sizes):
                decode(size)
            state.reserved += 30 * MIB if len(sizes) > 1 else 7 * MIB

    monkeypatch.setattr(probe, "DecodeGraphs", DecodeGraphs)
    monkeypatch.setattr(probe, "MixedGraphs", MixedGraphs)
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: state.reserved)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (80 * GIB - state.reserved - state.driver, 80 * GIB))
    model, words = SimpleNamespace(config=SimpleNamespace(hidden_size=1024)), torch.ones(8)
    shapes = [MixedShape(0, 32), MixedShape(0, 64), MixedShape(8, 64)]
    runner = SimpleNamespace(
        _decode=state.decoded.append, _decode_shared=state.shared.append, mixed_of=lambda shape: None,
        fill_mixed=state.filled.append, mixed_shapes=lambda: shapes, staging=SimpleNamespace(device_words=words),
        model=model, dtype=torch.bfloat16,
    )  # fmt: skip

    sizes = probe.graph_sizes(256)
    probes = probe._spread(sizes)
    found = probe._measure_graphs(runner, probes, sizes, [16, 64, 256], DEVICE)
    assert state.filled == [*shapes[-2:], *shapes[-2:]], "before it is recorded, and before it is run"
    assert state.decoded[0] == 256, "the largest first: its pool serves the others"
    assert state.shared == [256]
    hidden = 2048 * (sum(sizes) - sum(probes.values()) + 16 + 64 + 32)
    assert len(probes) == 4
    of_decode, of_shared, of_mixed = (3 * 4 + 2) * MIB // 4, (3 + 2) * MIB, (5 + 2) * MIB
    assert found == 137 * MIB + hidden + of_decode * len(sizes) + of_shared * 3 + of_mixed * len(shapes)
