"""The memory plan: what fits is used, what does not is fitted or refused with numbers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.kv.planner import GIB, MemoryBudget, plan_memory
from engine.core.kv.spec import AttentionSpec, pages_for
from engine.errors import OutOfMemoryPlanError

# An 8B model: 144 KiB a token.
SPEC = AttentionSpec(num_layers=36, num_kv_heads=8, head_dim=128, dtype_bytes=2, page_size=16)


def plan(usable_gib=72.0, weights_gib=16.0, **kwargs):
    arguments = {"max_model_len": None, "model_max_len": 40960, "max_num_seqs": None, "default_num_seqs": 256}
    budget = MemoryBudget(80 * GIB, int(usable_gib * GIB), int(weights_gib * GIB), GIB, kwargs.pop("kv_limit", None))
    return plan_memory(budget, SPEC, device="gpu", **(arguments | kwargs))


def test_everything_left_becomes_pages():
    made = plan()
    assert made.max_model_len == 40960
    assert made.page_bytes == 36 * 2 * 8 * 128 * 2 * 16
    left = 72 * GIB - 17 * GIB - made.table_bytes
    assert 0 <= left - made.num_pages * made.page_bytes < made.page_bytes
    assert f"{made.kv_tokens:,} tokens" in made.table()


def test_context_is_fitted_when_left_open():
    made = plan(usable_gib=19.0)
    assert made.max_model_len < 40960
    assert made.num_pages - 1 >= pages_for(made.max_model_len, 16)
    assert "fitted" in made.table()


def test_a_context_that_was_asked_for_is_refused_with_the_largest_that_fits():
    with pytest.raises(OutOfMemoryPlanError) as refusal:
        plan(usable_gib=19.0, max_model_len=32768)
    assert "--max-model-len 32768" in str(refusal.value)
    largest = int(refusal.value.hint.split("--max-model-len ")[1].split(";")[0])
    assert plan(usable_gib=19.0, max_model_len=largest).max_model_len == largest
    with pytest.raises(OutOfMemoryPlanError):
        plan(usable_gib=19.0, max_model_len=largest + 16)


def test_the_refusal_names_the_flag_that_limits():
    with pytest.raises(OutOfMemoryPlanError, match="raise --kv-cache-memory-bytes"):
        plan(max_model_len=40960, kv_limit=GIB)
    with pytest.raises(OutOfMemoryPlanError, match="not even two KV pages"):
        plan(kv_limit=1000)


def test_a_model_that_does_not_fit_is_refused_with_its_numbers():
    with pytest.raises(OutOfMemoryPlanError, match=r"weights 16\.00 GiB") as refusal:
        plan(usable_gib=10.0)
    assert refusal.value.flag == "--gpu-memory-utilization"


@given(usable=st.floats(17.2, 75), seqs=st.one_of(st.none(), st.integers(1, 2000)), limit=st.one_of(
    st.none(), st.integers(1 << 24, 1 << 36)))
def test_a_plan_never_exceeds_its_budget(usable, seqs, limit):
    try:
        made = plan(usable_gib=usable, max_num_seqs=seqs, kv_limit=limit)
    except OutOfMemoryPlanError:
        return
    pages = made.num_pages * made.page_bytes
    assert made.budget.weights + made.budget.activations + made.table_bytes + pages <= made.budget.usable
    assert limit is None or pages <= limit
    assert made.num_pages - 1 >= pages_for(made.max_model_len, 16)
    assert 1 <= made.max_num_seqs <= (seqs or 256)
