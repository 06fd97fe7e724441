"""When several threads do not pay, and when they are tried again."""

from engine.worker import pause
from engine.worker.pause import Pause, Timing

BUSY, QUIET = Timing(cpu=1.0, wall=1.0), Timing(cpu=1.0, wall=0.55)
LEAST = 1.25


def steps_left(paused: Pause) -> int:
    """Steps until the way is allowed again."""
    count = 0
    while not paused.allows():
        count += 1
    return count


def test_threads_that_share_one_core_pause_for_longer_each_time() -> None:
    paused = Pause(LEAST)
    pauses = []
    for _ in range(6):
        for _ in range(pause._WINDOW):
            assert paused.allows()
            paused.observe(BUSY)
        pauses.append(steps_left(paused))
    assert pauses == [64, 128, 256, 512, 512, 512]


def test_threads_that_pay_go_on_and_the_next_pause_is_short_again() -> None:
    paused = Pause(LEAST)
    for timing in [BUSY] * pause._WINDOW:
        paused.observe(timing)
    assert steps_left(paused) == 64
    for timing in [QUIET] * 3 * pause._WINDOW + [BUSY] * 2:  # two slow steps are no reason
        assert paused.allows()
        paused.observe(timing)
    assert paused.allows()
    for timing in [BUSY] * pause._WINDOW:
        paused.observe(timing)
    assert steps_left(paused) == 64


def test_one_very_slow_step_is_no_reason() -> None:
    paused = Pause(LEAST, trial=3)
    for timing in (Timing(cpu=10.0, wall=10.0), QUIET, QUIET):
        paused.observe(timing)
    assert paused.allows()


def test_a_short_trial_decides_at_first_and_after_each_pause() -> None:
    paused = Pause(LEAST, trial=3)
    for expected in (64, 128):
        for _ in range(3):
            assert paused.allows()
            paused.observe(BUSY)
        assert steps_left(paused) == expected
    for timing in [QUIET] * pause._WINDOW + [BUSY] * 3:  # once it has paid for a while, three are not enough
        paused.observe(timing)
    assert paused.allows()
