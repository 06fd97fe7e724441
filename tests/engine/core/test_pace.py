"""Prompt tokens follow a latency target, on devices whose steps take a known time."""

import logging
import random
from collections.abc import Callable

import pytest

from engine.core.batch import ScheduledSeq, StepPlan
from engine.core.pace import PromptPace

Device = Callable[[int, int], float]  # (answers in progress, prompt tokens) -> seconds


def step(pace: PromptPace, device: Device, decoding: int, waiting: int, budget: int = 8192) -> tuple[int, float]:
    """One step with prompts of `waiting` tokens: (prompt tokens, seconds)."""
    tokens = min(waiting, pace.tokens(decoding, budget - decoding))
    seqs = [ScheduledSeq(f"{i}", i, i + 1, 600, 1, True) for i in range(decoding)]
    if tokens:
        seqs.append(ScheduledSeq("prompt", 10_000, 2000, 0, tokens, False))
    seconds = device(decoding, tokens)
    pace.observe(StepPlan(0, seqs), seconds)
    return tokens, seconds


def gpu(decoding: int, tokens: int) -> float:
    """8B in bf16 on an H100, about."""
    rows = decoding + tokens
    return max(5.4e-3, 26e-6 * rows) + 27e-6 * decoding + (2e-3 if tokens else 0)


def long_context(decoding: int, tokens: int) -> float:
    """A few tokens of a prompt whose context is long cost as much as a thousand."""
    return gpu(decoding, tokens) + (25e-3 if tokens else 0)


def dear_tokens(decoding: int, tokens: int) -> float:
    return gpu(decoding, 0) + 75e-6 * tokens


@pytest.mark.parametrize("device", [gpu, long_context, dear_tokens])
@pytest.mark.parametrize("decoding", [8, 64, 256])
def test_steps_take_the_target_and_no_longer(device, decoding):
    pace = PromptPace(0.06)
    step(pace, gpu, 0, 8192)  # nobody waits: prompts alone
    for _ in range(10):
        step(pace, gpu, decoding, 0)
    taken = [step(pace, device, decoding, 100_000) for _ in range(60)]
    settled = [seconds for _, seconds in taken[15:]]
    assert max(settled) <= 0.063  # a whole tile of tokens more or less is 10 ms where each takes 75 us
    if device(decoding, 512) < 0.05:
        assert min(settled) >= 0.04, "prompts get what the target leaves them"


@pytest.mark.parametrize("answers", [32, 128])
def test_a_context_that_is_read_in_waves(answers):
    """528 tokens read it at a time. The first prompt of 32,768 tokens shows what that costs; the next keeps to it."""
    pace = PromptPace(0.06)

    def read_prompt() -> list[tuple[int, float]]:
        taken, start = [], 0
        while start < 32_768:
            tokens = min(pace.tokens(answers, 8192 - answers, start), 32_768 - start)
            seconds = gpu(answers, tokens) + 0.75e-6 * (start + tokens / 2) * -(-tokens // 528)
            seqs = [ScheduledSeq(f"{i}", i, i + 1, 600, 1, True) for i in range(answers)]
            pace.observe(StepPlan(0, [*seqs, ScheduledSeq("p", 10_000, 2000, start, tokens, False)]), seconds)
            taken.append((tokens, seconds))
            start += tokens
        return taken

    step(pace, gpu, 0, 8192)
    for _ in range(10):
        step(pace, gpu, answers, 0)
    read_prompt()
    taken = read_prompt()
    assert max(seconds for _, seconds in taken) <= 0.061
    assert sum(seconds > 0.05 for _, seconds in taken) >= len(taken) / 3
    assert all(tokens >= 384 for tokens, _ in taken[:-1]), "one wave always fits"


def test_a_pause_of_the_host_is_not_what_answers_cost():
    pace = PromptPace(0.06)
    step(pace, gpu, 0, 8192)
    for _ in range(10):
        step(pace, gpu, 32, 0)
    before = pace.tokens(32, 8000)
    step(pace, lambda *_: 0.5, 32, 0)
    assert pace.tokens(32, 8000) >= before - 128


def test_after_a_pause_of_the_host_prompts_soon_get_as_much_as_before():
    pace = PromptPace(0.06)
    step(pace, gpu, 0, 8192)
    for _ in range(10):
        step(pace, gpu, 128, 0)
    before = [step(pace, gpu, 128, 100_000)[0] for _ in range(30)][-1]
    step(pace, lambda *each: gpu(*each) + 1.4, 128, 100_000)
    after = [step(pace, gpu, 128, 100_000)[0] for _ in range(15)]
    assert sum(after) >= 0.6 * 15 * before
    assert after[-1] >= 0.9 * before


def test_noise_does_not_starve_prompts():
    rng = random.Random(1)

    def noisy(decoding: int, tokens: int) -> float:
        return gpu(decoding, tokens) * rng.uniform(0.9, 1.1) + (0.1 if rng.random() < 0.01 else 0)

    pace = PromptPace(0.05)
    step(pace, noisy, 0, 8192)
    for _ in range(10):
        step(pace, noisy, 256, 0)
    tokens = [step(pace, noisy, 256, 100_000)[0] for _ in range(2000)]
    fits = (0.05 - gpu(256, 0) - 2e-3) / 26e-6
    assert sum(tokens) / len(tokens) >= 0.65 * fits


def test_prompts_alone_are_not_limited_nor_without_a_target():
    assert PromptPace(0.01).tokens(0, 8192) == 8192
    assert PromptPace().tokens(64, 8000) == 8000
    unlimited = PromptPace()
    step(unlimited, gpu, 64, 8192)
    assert unlimited.tokens(64, 8000) == 8000


def test_nothing_is_known_at_first():
    assert PromptPace(0.06).tokens(1, 8191) == 512
    assert PromptPace(0.06).tokens(1, 100) == 100


def test_a_target_that_cannot_be_met_is_told_once_and_prompts_go_on(caplog):
    pace = PromptPace(0.001)
    with caplog.at_level(logging.WARNING, "engine.core.pace"):
        tokens = [step(pace, gpu, 64, 100_000)[0] for _ in range(20)]
    assert tokens[5:] == [256] * 15
    assert [r.getMessage() for r in caplog.records] == [
        "max_itl_ms 1 may not be met: prompts get at least 256 tokens a step"]
