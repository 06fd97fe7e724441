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
        for _ in range(pause._TRIAL):
            assert paused.allows()
            paused.observe(BUSY)
        pauses.append(steps_left(paused))
    assert pauses == [64, 128, 256, 512, 512, 512]


def test_threads_that_pay_go_on_and_the_next_pause_is_short_again() -> None:
    paused = Pause(LEAST)
    for timing in [BUSY] * pause._TRIAL:
        paused.observe(timing)
    assert steps_left(paused) == 64
    for timing in [QUIET] * 3 * pause._TRIAL + [BUSY] * 2:  # two slow steps are no reason
        assert paused.allows()
        paused.observe(timing)
    assert paused.allows()
    for timing in [BUSY] * pause._TRIAL:
        paused.observe(timing)
    assert steps_left(paused) == 64


def test_steps_that_take_long_decide_at_once() -> None:
    paused = Pause(LEAST, seconds=0.2)
    for expected in (64, 128):
        assert paused.observe(Timing(cpu=0.1, wall=0.1))
        assert paused.allows()
        assert not paused.observe(Timing(cpu=0.1, wall=0.1))
        assert steps_left(paused) == expected
    assert paused.observe(Timing(cpu=0.5, wall=0.25))
    for _ in range(pause._TRIAL):
        assert paused.observe(Timing(cpu=0.04, wall=0.02))
    assert not paused.observe(Timing(cpu=3.0, wall=3.0))
    assert steps_left(paused) == 64
