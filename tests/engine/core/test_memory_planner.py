"""The memory plan: what fits is used, what does not is fitted or refused with numbers."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.kv.planner import GIB, MemoryBudget, plan_memory, request_table_bytes, sensible_seqs
from engine.core.kv.spec import AttentionLayer, CacheSpec, pages_for
from engine.errors import OutOfMemoryPlanError

# An 8B model: 144 KiB a token.
SPEC = CacheSpec((AttentionLayer(num_kv_heads=8, head_dim=128),) * 36, dtype_bytes=2, page_size=16)
FULL = MemoryBudget(80 * GIB, 72 * GIB, 16 * GIB, GIB, None, GIB // 2, GIB // 4, GIB // 8)


def plan(usable_gib=72.0, weights_gib=16.0, kv_limit=None, budget=None, **kwargs):
    arguments = {"max_model_len": None, "model_max_len": 40960, "max_num_seqs": None, "default_num_seqs": 256}
    if budget is None:
        budget = MemoryBudget(80 * GIB, int(usable_gib * GIB), int(weights_gib * GIB), GIB, kv_limit)
    return plan_memory(budget, SPEC, device="gpu", **(arguments | kwargs))


def named_in(refusal) -> int:
    """The context that a refusal says would fit."""
    return int(refusal.value.hint.split("--max-model-len ")[1].split(";")[0])


def test_everything_left_becomes_pages():
    made = plan()
    assert made.max_model_len == 40960
    assert SPEC.page_bytes == 36 * 2 * 8 * 128 * 2 * 16
    left = 72 * GIB - 17 * GIB - made.table_bytes
    assert 0 <= left - made.num_pages * SPEC.page_bytes < SPEC.page_bytes
    assert f"{made.kv_tokens:,} tokens" in made.table()


def test_the_table_has_a_line_for_each_part_and_they_add_up():
    made = plan(budget=FULL)
    lines = {line[2:17].strip(): line[17:30].strip() for line in made.table().splitlines()[1:-1]}
    assert list(lines) == ["usable memory", "weights", "overhead", "activations", "graphs", "step buffers",
                           "request table", "KV pages"]
    assert (lines["graphs"], lines["overhead"], lines["step buffers"]) == ("0.50 GiB", "0.25 GiB", "0.12 GiB")
    assert made.resident_bytes + made.budget.activations <= 72 * GIB
    assert made.resident_bytes + made.budget.activations > 72 * GIB - SPEC.page_bytes
    assert "graphs" not in plan().table(), "what takes nothing has no line"


def test_context_is_fitted_when_left_open():
    made = plan(usable_gib=19.0)
    assert made.max_model_len < 40960
    assert made.num_pages - 1 >= pages_for(made.max_model_len, 16)
    assert "fitted" in made.table()


def test_a_context_that_was_asked_for_is_refused_with_the_largest_that_fits():
    with pytest.raises(OutOfMemoryPlanError) as refusal:
        plan(usable_gib=19.0, max_model_len=32768)
    assert "--max-model-len 32768" in str(refusal.value)
    largest = named_in(refusal)
    assert plan(usable_gib=19.0, max_model_len=largest).max_model_len == largest
    with pytest.raises(OutOfMemoryPlanError):
        plan(usable_gib=19.0, max_model_len=largest + 16)


def test_the_refusal_names_the_flag_that_limits():
    with pytest.raises(OutOfMemoryPlanError, match="raise --kv-cache-memory-bytes"):
        plan(max_model_len=40960, kv_limit=GIB)
    with pytest.raises(OutOfMemoryPlanError, match="raise --gpu-memory-utilization"):
        plan(usable_gib=19.0, max_model_len=40960)
    with pytest.raises(OutOfMemoryPlanError, match="too small for a single token"):
        plan(kv_limit=1000)


def test_a_refusal_names_every_part():
    with pytest.raises(OutOfMemoryPlanError, match=r"weights 16\.00 GiB") as refusal:
        plan(budget=replace(FULL, usable=10 * GIB))
    assert refusal.value.flag == "--gpu-memory-utilization"
    with pytest.raises(OutOfMemoryPlanError) as too_long:
        plan(budget=replace(FULL, usable=19 * GIB), max_model_len=40960)
    for part in ("overhead 0.25 GiB", "activations 1.00 GiB", "graphs 0.50 GiB", "step buffers 0.12 GiB"):
        assert part in str(refusal.value)
        assert part in str(too_long.value)
    assert "leave 0.0 MiB of 10.00 GiB" in str(refusal.value)


def test_fewer_sequences_rather_than_a_shorter_context():
    """A table of 1,024 rows for 262,144 tokens would take a GiB."""
    kwargs = {"model_max_len": 262144, "default_num_seqs": 1024}
    roomy = plan(usable_gib=80.0, **kwargs)
    assert (roomy.max_model_len, roomy.max_num_seqs) == (262144, 1024)
    narrow = plan(usable_gib=54.0, **kwargs)
    assert narrow.max_model_len == 262144
    assert 8 <= narrow.max_num_seqs < 1024
    assert "sequences at once fitted" in narrow.table()
    asked = plan(usable_gib=54.0, max_num_seqs=1024, **kwargs)
    assert asked.max_num_seqs == 1024, "a number that was asked for is honoured"
    assert asked.max_model_len < 262144


def test_a_short_page_budget_alone_does_not_cost_sequences():
    """Where --kv-cache-memory-bytes is what limits the context, fewer rows would give no page more."""
    made = plan(kv_limit=4 * GIB)
    assert made.max_model_len < 40960
    assert made.max_num_seqs == 256


@given(usable=st.floats(17.2, 75), seqs=st.one_of(st.none(), st.integers(1, 2000)), limit=st.one_of(
    st.none(), st.integers(1 << 24, 1 << 36)), overhead=st.integers(0, GIB), graphs=st.integers(0, GIB),
    buffers=st.integers(0, GIB // 4), model_max=st.integers(17, 300_000))  # fmt: skip
def test_a_plan_never_exceeds_its_budget(usable, seqs, limit, overhead, graphs, buffers, model_max):
    budget = MemoryBudget(80 * GIB, int(usable * GIB), 16 * GIB, GIB, limit, graphs, overhead, buffers)
    try:
        made = plan(budget=budget, max_num_seqs=seqs, model_max_len=model_max, default_num_seqs=1024)
    except OutOfMemoryPlanError:
        return
    assert made.resident_bytes + budget.activations <= budget.usable
    assert made.table_bytes == request_table_bytes(made.max_model_len, made.max_num_seqs, SPEC)
    assert limit is None or made.kv_bytes <= limit
    assert made.num_pages - 1 >= pages_for(made.max_model_len, 16)
    assert made.max_num_seqs == seqs if seqs else 1 <= made.max_num_seqs <= 1024
    assert seqs or made.max_num_seqs <= made.num_pages - 1


@given(usable=st.floats(17.2, 60), seqs=st.one_of(st.none(), st.integers(1, 2000)), limit=st.one_of(
    st.none(), st.integers(1 << 24, 1 << 34)), wanted=st.integers(2, 300_000))  # fmt: skip
def test_the_largest_that_a_refusal_names_fits_and_one_page_more_does_not(usable, seqs, limit, wanted):
    kwargs = {"usable_gib": usable, "max_num_seqs": seqs, "kv_limit": limit, "model_max_len": 300_000,
              "default_num_seqs": 1024}  # fmt: skip
    try:
        assert plan(max_model_len=wanted, **kwargs).max_model_len == wanted
    except OutOfMemoryPlanError as refusal:
        if "--max-model-len " not in refusal.hint:
            return  # the model itself does not fit
        largest = int(refusal.hint.split("--max-model-len ")[1].split(";")[0])
        assert largest < wanted
        assert plan(max_model_len=largest, **kwargs).max_model_len == largest
        with pytest.raises(OutOfMemoryPlanError):
            plan(max_model_len=largest + 16, **kwargs)


@pytest.mark.parametrize(
    ("free_gib", "seqs"),
    [(55, 1024), (37, 1024), (35, 512), (10, 256), (1, 16), (0.1, 8), (0, 8)],  # 256 tokens take 36 MiB
)
def test_as_many_sequences_as_could_have_a_short_context(free_gib, seqs):
    assert sensible_seqs(SPEC, 1024, int(free_gib * GIB)) == seqs
