"""The memory plan of models whose layers differ: pages of each window, states, and the slabs that hold them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.kv.planner import GIB, MemoryBudget, plan_memory
from engine.core.kv.spec import AttentionLayer, CacheLayer, CacheSpec, StateLayer
from engine.errors import OutOfMemoryPlanError

STATE = StateLayer(((48, 128, 128), (10240, 4)), ("float32", "bfloat16"))
RECURRENT = CacheSpec(tuple(AttentionLayer(4, 256) if i % 4 == 3 else STATE for i in range(64)), 2, 16)
WINDOWED = CacheSpec(
    tuple(AttentionLayer(4, 512) if i % 6 == 5 else AttentionLayer(16, 256, 1024) for i in range(60)), 2, 16
)


def plan(spec, usable_gib=72.0, weights_gib=28.0, **kwargs):
    budget = MemoryBudget(80 * GIB, int(usable_gib * GIB), int(weights_gib * GIB), GIB)
    arguments = {"max_model_len": None, "model_max_len": 262144, "max_num_seqs": None, "default_num_seqs": 256,
                 "step_tokens": 8192}
    return plan_memory(budget, spec, device="gpu", **(arguments | kwargs))


def test_the_table_explains_pages_and_states():
    made = plan(RECURRENT)
    text = made.table()
    assert f"{made.num_slabs:,} slabs of 0.14 GiB" in text
    assert "1.0 MiB   x 148: 16 tokens in 16 layers of full attention" in text
    assert "x 1: a sequence's state in the recurrent layers" in text
    assert f"{made.num_slabs // (1 + -(-262144 // (16 * 147)))} requests of that length fit" in text


def test_pages_of_a_window_and_of_all_tokens_share_an_slab_size():
    made = plan(WINDOWED)
    text = made.table()
    assert "x 10: 16 tokens in 10 layers of full attention" in text
    assert "x 1: 16 tokens in 50 layers of a window of 1,024 tokens" in text
    assert made.max_model_len == 262144


def test_a_window_makes_room_for_a_longer_context():
    layers = WINDOWED.storing.values()
    unlimited = CacheSpec(tuple(AttentionLayer(layer.num_kv_heads, layer.head_dim) for layer in layers), 2, 16)
    assert plan(WINDOWED, usable_gib=45).max_model_len > 4 * plan(unlimited, usable_gib=45).max_model_len


def test_a_long_step_asks_for_the_pages_that_its_ends_see():
    """Two windows of 1,024 tokens, not 8,192 tokens more, in each layer that has one."""
    memory = WINDOWED.memory(0)
    assert memory.most_pages(1, 262144, 8192) == 2 * (1024 // 16 + 1)
    assert memory.most_pages(1, 262144, 100) == -(-(1023 + 100) // 16) + 1
    assert memory.most_pages(1, 500, 8192) == -(-500 // 16)
    assert memory.most_pages(0, 262144, 8192) == 262144 // 16
    saved = (-(-(1023 + 8192) // 16) + 1 - memory.most_pages(1, 262144, 8192)) * WINDOWED.groups[1].page_bytes
    assert 5.4 * GIB < saved < 5.6 * GIB


@pytest.mark.parametrize("spec", [RECURRENT, WINDOWED])
def test_what_a_refusal_names_fits(spec):
    with pytest.raises(OutOfMemoryPlanError) as refusal:
        plan(spec, usable_gib=38, max_model_len=262144)
    largest = int(refusal.value.hint.split("--max-model-len ")[1].split(";")[0])
    assert plan(spec, usable_gib=38, max_model_len=largest).max_model_len == largest
    with pytest.raises(OutOfMemoryPlanError, match="KV cache"):
        plan(spec, usable_gib=29.01)


@st.composite
def specs(draw):
    page = draw(st.sampled_from([8, 16]))
    attention = st.builds(AttentionLayer, st.integers(1, 8), st.sampled_from([8, 64, 256]),
                          st.sampled_from([None, 24, 512]))
    state = st.builds(lambda heads, size: StateLayer(((heads, size, size), (heads, 3)), ("float32", "bfloat16")),
                      st.integers(1, 32), st.sampled_from([8, 33, 128]))
    layers: list[CacheLayer] = [draw(attention), *draw(st.lists(st.one_of(attention, state), max_size=8))]
    return CacheSpec(tuple(layers), draw(st.sampled_from([1, 2, 4])), page)


@settings(deadline=None)
@given(spec=specs(), usable=st.floats(1.01, 3), seqs=st.one_of(st.none(), st.integers(1, 300)),
       step=st.integers(1, 9000))
def test_a_plan_never_exceeds_its_budget_and_holds_what_it_promises(spec, usable, seqs, step):
    assert spec.slab_bytes % min(spec.per_slab) == 0
    units = [group.page_bytes for group in spec.groups] + ([spec.slot_bytes] if spec.slot_bytes else [])
    for unit, per in zip(units, spec.per_slab, strict=True):
        assert per * unit <= spec.slab_bytes
        assert spec.slab_bytes % per == 0
    try:
        made = plan(spec, usable, 0, max_num_seqs=seqs, step_tokens=step)
    except OutOfMemoryPlanError:
        return
    assert made.resident_bytes + made.budget.activations <= made.budget.usable
    memory = spec.memory(made.num_slabs)
    assert memory.slabs_for(made.max_model_len, step) <= memory.num_slabs
    assert seqs or memory.slabs_for(1, 1, made.max_num_seqs) <= memory.num_slabs
