"""Each detector fires on the fault that it is for, and not on texts that are merely unusual."""

import json
import math
import random

import pytest

from appliance.service.verification.detectors import growth, repetition, saturation
from appliance.service.verification.plan import Targets, with_targets
from appliance.service.verification.quality import golden
from appliance.service.verification.stability import Series, judged
from appliance.service.verification.subject import Served
from installer.base.errors import InstallError

PROSE = """The keeper climbed the narrow stairs while the wind pressed against every pane. He had counted two hundred
and eleven steps so often that his feet no longer asked. At the top the lamp waited, patient and warm, and beyond the
glass the sea threw itself at the rocks as if it had something to say. A ship showed one light, then none, then two."""
KOREAN = """등대지기는 바람이 창을 두드리는 동안 좁은 계단을 올랐다. 이백열한 개의 계단을 하도 많이 세어서 발이 먼저
알았다. 꼭대기에서는 등불이 기다리고 있었고, 유리 너머의 바다는 할 말이라도 있는 듯 바위에 몸을 던졌다.
배 한 척이 불빛 하나를 보이다가 감추더니 다시 두 개를 보였다. 그는 수건으로 손을 닦고 장부를 펴서
시각을 적은 뒤, 식은 차를 마시며 아침을 기다렸다. 먼 데서 종소리가 들렸고 갈매기 한 마리가 난간에 앉아
젖은 깃을 골랐다. 폭풍은 새벽녘에야 지나갔다."""


@pytest.mark.parametrize("text", [PROSE, KOREAN, PROSE + " " + PROSE, "short short short short", ""])
def test_prose_does_not_run_in_circles(text):
    assert not repetition(text).found, repetition(text)


@pytest.mark.parametrize(
    "text",
    [
        PROSE[:80] + " and then the storm came" * 20,
        "그리고 그는 문을 열었다. " * 30,
        "!" * 400,
        "ab" * 300,
        PROSE[:200] + " the sea" * 60,
    ],
)
def test_loops_are_found(text):
    found = repetition(text)
    assert found.found, found


def entries(values, tops):
    return [{"logprob": value, "top_logprobs": [{"logprob": top} for top in row]}
            for value, row in zip(values, tops, strict=True)]  # fmt: skip


def test_plausible_probabilities_pass():
    rng = random.Random(1)
    tops = [sorted((math.log(rng.uniform(0.01, 0.3)) for _ in range(3)), reverse=True) for _ in range(20)]
    assert saturation(entries([row[0] for row in tops], tops)) == ""
    sure = [[-1e-3, -8.0, -9.0]] * 20  # a model that is certain is not a broken one
    assert saturation(entries([-1e-3] * 20, sure)) == ""


@pytest.mark.parametrize(
    "values, tops, said",
    [
        ([], [], "no log-probabilities"),
        ([float("nan")] * 10, [[-1.0, -2.0]] * 10, "nan is not"),
        ([None] * 10, [[-1.0, -2.0]] * 10, "None is not"),
        ([0.7] * 10, [[-1.0, -2.0]] * 10, "0.7 is not"),
        ([0.0] * 10, [[0.0, -99.0]] * 10, "probability 1"),
        ([-11.0] * 10, [[-11.0, -11.0, -11.0]] * 10, "equally likely"),
        ([-0.1] * 10, [[-0.1, -0.2, -0.3]] * 10, "more than 1"),
    ],
)
def test_broken_arithmetic_is_seen_in_probabilities(values, tops, said):
    assert said in saturation(entries(values, tops))


def series(memory, files) -> Series:
    count = len(memory)
    return Series(at=list(map(float, range(count))), memory=memory, files=files, pages=[0.0] * count)


def blocking(found) -> set[str]:
    return {each.id for each in found if each.blocks}


def test_leaks_are_told_from_caches_that_fill_up():
    mib, count = 1 << 20, 100
    flat = [1000.0 * mib] * count
    leaking = [(1000 + 3 * i) * mib for i in range(count)]
    filling = [(1000 + min(200, 20 * i)) * mib for i in range(count)]
    noisy = [(1000 + random.Random(i).uniform(-40, 40)) * mib for i in range(count)]
    even = [50.0] * count
    assert blocking(judged(series(leaking, even), local=True)) == {"memory"}
    for good in (flat, filling, noisy):
        assert blocking(judged(series(good, even), local=True)) == set()
    growing = [50.0 + i for i in range(count)]
    assert blocking(judged(series(flat, growing), local=True)) == {"descriptors"}
    assert not blocking(judged(series(flat, [50.0 + (i % 7) for i in range(count)]), local=True))
    assert all("not checked" in each.observed for each in judged(series([], []), local=False))
    assert growth([1.0] * 5) is None


def test_targets_are_read_and_nonsense_is_refused():
    targets = with_targets(Targets(), ["ttft=0.5s,itl=40ms", "share=99%", "users=8", "error_rate=0.5%"])
    assert (targets.ttft, targets.itl, targets.share, targets.users) == (500, 40, 0.99, 8)
    assert targets.error_rate == pytest.approx(0.005)
    for wrong in ("ttft", "speed=5", "share=150%", "users=0", "users=5ms", "ttft=-5", "ttft=0"):
        with pytest.raises(InstallError, match="not a target"):
            with_targets(Targets(), [wrong])


def test_golden_questions_by_family(tmp_path):
    assert {each.language for each in golden().of(Served("chat", "gemma4-31b"))} == {"en", "ko"}
    assert [each.answer for each in golden().of(Served("demo", "smollm2-135m-instruct"))] == ["Paris"]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe"}))
    assert len(golden().of(Served("x", "our-own-model", tmp_path))) > 3
    assert golden().of(Served("x", "mystery")) == []
