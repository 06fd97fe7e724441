"""The search by itself: for any space, any results and any planner it ends, repeats nothing and never loses."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.service.presets.catalogue import find_card, find_model
from appliance.service.presets.resolve import find
from appliance.service.tuning.knobs import Knobs, Traffic, preset_values, sequence_steps, token_steps
from appliance.service.tuning.score import Score, beats
from appliance.service.tuning.search import Failure, Knob, Lack, Position, Space, Trial, best_of, propose
from engine.config import EngineConfig
from installer.base.errors import InstallError

NAMES = ("max-num-seqs", "max-num-batched-tokens", "gpu-memory-utilization", "kv-cache-dtype", "mamba-ssm-cache-dtype")
scores = st.builds(Score, st.floats(0, 100), st.one_of(st.just(0.0), st.floats(0, 10)), st.floats(0, 1e4))


@st.composite
def spaces(draw: st.DrawFn) -> Space:
    knobs = []
    for name in NAMES[: draw(st.integers(1, 5))]:
        count = draw(st.integers(1, 5))
        knobs.append(Knob(name, tuple(range(count)), draw(st.integers(0, count - 1))))
    return Space(tuple(knobs))


def searched(space: Space, result: Callable[[Position], Trial], lack: Lack = Lack()) -> list[Trial]:
    """All trials of a search without a budget."""
    trials: list[Trial] = []
    while (position := propose(space, trials, lack)) is not None:
        trials.append(result(position))
        assert len(trials) <= 5**5
    return trials


@given(spaces(), st.data())
@settings(deadline=None, max_examples=300)
def test_it_ends_repeats_nothing_and_is_never_worse_than_the_start(space: Space, data: st.DataObject) -> None:
    refused = data.draw(st.sets(st.integers(0, 4), max_size=2))
    fits = Space(space.knobs, lambda setting: setting[space.knobs[0].name] not in refused)
    failures: st.SearchStrategy[Failure] = st.sampled_from(["memory", "start", "load"])

    def result(position: Position) -> Trial:
        if position != space.start and data.draw(st.booleans()):
            return Trial(position, None, data.draw(failures))
        return Trial(position, data.draw(scores))

    lack = data.draw(st.builds(Lack, st.booleans(), st.booleans(), st.none() | st.integers(1, 9)))
    trials = searched(fits, result, lack)
    positions = [trial.position for trial in trials]
    assert positions[0] == space.start
    assert len(set(positions)) == len(positions)
    assert all(fits.fits(fits.setting(position)) for position in positions[1:])
    best = best_of(fits, trials)
    assert best is not None
    assert best.score is not None
    assert trials[0].score is not None
    assert not beats(trials[0].score, best.score)
    failed = {trial.position: number for number, trial in enumerate(trials) if trial.failure == "memory"}
    for position, number in failed.items():  # nothing that takes more memory is tried after it
        for later in positions[number + 1 :]:
            assert any(a < b for a, b in zip(later, position, strict=True))


@given(spaces(), st.data())
@settings(deadline=None)
def test_a_search_that_was_cut_off_goes_on_as_if_it_had_not_been(space: Space, data: st.DataObject) -> None:
    known: dict[Position, Trial] = {}

    def result(position: Position) -> Trial:
        return known.setdefault(position, Trial(position, data.draw(scores)))

    trials = searched(space, result)
    cut = data.draw(st.integers(0, len(trials)))
    again = list(trials[:cut])
    while (position := propose(space, again)) is not None:
        again.append(result(position))
    assert again == trials


@given(spaces(), st.data())
def test_noise_moves_nothing(space: Space, data: st.DataObject) -> None:
    """Among results that differ by less than the noise, the current setting is kept."""
    noise = st.floats(0.98, 1.02)

    def result(position: Position) -> Trial:
        return Trial(position, Score(10 * data.draw(noise), 0.0, 100 * data.draw(noise)))

    best = best_of(space, searched(space, result))
    assert best is not None
    assert best.position == space.start


@given(scores, scores)
def test_of_two_at_most_one_is_better(one: Score, other: Score) -> None:
    assert not (beats(one, other) and beats(other, one))
    assert not beats(one, one)


def test_it_climbs_to_the_best_of_a_hill() -> None:
    space = Space((Knob("max-num-seqs", (8, 16, 32, 64, 128), 0), Knob("kv-cache-dtype", ("fp8", "auto"), 1)))

    def result(position: Position) -> Trial:
        return Trial(position, Score(10.0 + 5 * position[0] - position[0] ** 2 / 2 + 4 * (position[1] == 0), 0, 100))

    trials = searched(space, result)
    best = best_of(space, trials)
    assert best is not None
    assert space.setting(best.position) == {"max-num-seqs": 128, "kv-cache-dtype": "fp8"}


def test_of_equals_the_one_with_less_memory_and_nearest_to_the_start() -> None:
    space = Space((Knob("gpu-memory-utilization", (0.85, 0.9, 0.95), 1),))
    trials = [Trial((1,), Score(1, 0, 1)), Trial((2,), Score(2, 0, 2)), Trial((0,), Score(2, 0, 2))]
    best = best_of(space, trials)
    assert best is not None
    assert best.position == (0,)


def test_what_is_tried_first_depends_on_what_is_missed() -> None:
    seqs = Knob("max-num-seqs", (2, 4, 8), 1, 4)
    space = Space((seqs, Knob("max-num-batched-tokens", (256, 512, 1024), 1)))
    start = [Trial(space.start, Score(1, 0.5, 10))]
    assert propose(space, start, Lack(itl=True)) == (1, 0)      # smaller steps delay a stream less
    assert propose(space, start, Lack(ttft=True)) == (2, 1)     # more at once empties the queue
    assert propose(space, start, Lack(ttft=True, clients=4)) == (1, 2)  # unless none waits


def test_an_engine_that_fails_at_the_start_ends_it() -> None:
    space = Space((Knob("max-num-seqs", (1, 2), 0),))
    assert propose(space, [Trial((0,), None, "start")]) is None
    assert best_of(space, [Trial((0,), None, "start")]) is None


# -- the knobs


def test_steps() -> None:
    assert sequence_steps(256, 8) == [2, 4, 256]
    assert sequence_steps(4, 32) == [4, 8, 16, 32]
    assert sequence_steps(256, 1) == [1, 256]
    assert sequence_steps(64, None) == [16, 32, 64, 128, 256]
    assert token_steps(512, "cpu", 10_000) == [128, 256, 512, 1024, 2048]
    assert token_steps(512, "cpu", 300) == [128, 256, 512]
    assert token_steps(8192, "cuda", 1 << 20) == [2048, 4096, 8192, 16384, 32768]


def config(**more: object) -> EngineConfig:
    return EngineConfig(find_model("gemma4-31b").directory, quantization="fp8", max_model_len=32768, **more)  # type: ignore[arg-type]


TRAFFIC = Traffic(64, 4000)


def test_what_the_planner_refuses_is_never_tried() -> None:
    """On a GPU that has room for the weights and little else: never more than fits, and never a shorter context."""
    knobs = Knobs(config(max_num_seqs=16), {"max-num-seqs": 16}, TRAFFIC, card=find_card("l40s"),
                  ours={"max-num-seqs": [16]})  # fmt: skip
    space, _ = knobs.space()
    assert not knobs.is_unplanned
    trials = searched(space, lambda position: Trial(position, Score(1 + sum(position), 0, 1)))
    tried = [space.setting(trial.position) for trial in trials]
    assert all(space.fits(setting) for setting in tried)
    assert any(not space.fits({**space.setting(space.start), "max-num-batched-tokens": 32768, "max-num-seqs": size,
                               "gpu-memory-utilization": 0.85}) for size in (16, 64))  # fmt: skip


def test_the_operators_own_values_stay() -> None:
    settings = {"max_num_seqs": 48, "gpu-memory-utilization": 0.9, "kv-cache-memory-bytes": 1 << 34}
    card = find_card("h100")
    space, pinned = Knobs(config(max_num_seqs=48), settings, TRAFFIC, card=card).space()
    assert {each.name for each in pinned} == {"max-num-seqs", "gpu-memory-utilization"}
    assert {knob.name for knob in space.knobs} == {"max-num-batched-tokens", "kv-cache-dtype"}
    space, pinned = Knobs(config(max_num_seqs=48), settings, TRAFFIC, card=card, ours={"max-num-seqs": [48]}).space()
    assert "max-num-seqs" in {knob.name for knob in space.knobs}
    space, pinned = Knobs(config(max_num_seqs=48), settings, TRAFFIC, card=card, only=["max-num-seqs"]).space()
    assert [knob.name for knob in space.knobs] == ["max-num-seqs"]


@pytest.mark.parametrize(("only", "said"), [
    (["gpu-memory-utilization"], "has no effect together with kv-cache-memory-bytes"),
    (["max-model-len"], "'max-model-len' cannot be tuned here"),
    (["mamba-ssm-cache-dtype"], "'mamba-ssm-cache-dtype' cannot be tuned here"),  # no recurrent layer
])  # fmt: skip
def test_knobs_that_exclude_one_another_are_refused(only: list[str], said: str) -> None:
    with pytest.raises(InstallError, match=said) as caught:
        Knobs(config(), {"kv-cache-memory-bytes": 1 << 34}, TRAFFIC, card=find_card("h100"), only=only).space()
    assert caught.value.exit_code == 2


def test_a_gpu_that_nobody_knows_is_tuned_without_a_plan() -> None:
    knobs = Knobs(EngineConfig(find_model("qwen3.6-35b-a3b").directory, device="cuda"), {}, TRAFFIC, card=None)
    space, _ = knobs.space()
    assert knobs.is_unplanned
    assert {knob.name for knob in space.knobs} == set(NAMES)
    assert space.fits(dict.fromkeys(NAMES))


def test_a_presets_values() -> None:
    values = preset_values(find("gemma4-12b/chat", find_card("l4")))
    assert values == {"max-num-seqs": 256, "gpu-memory-utilization": 0.9, "kv-cache-dtype": "fp8"}
