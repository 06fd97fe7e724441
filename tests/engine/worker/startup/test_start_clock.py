"""A start says in one line where its seconds went."""

from engine.worker.startup import start_clock
from engine.worker.startup.start_clock import StartClock


def test_phases_add_up_to_the_whole(monkeypatch):
    now = iter([12.0, 12.5, 15.5, 15.75])
    monkeypatch.setattr(start_clock.time, "monotonic", lambda: next(now))
    clock = StartClock(began=10.0)
    for phase in ("imports", "model", "weights", "imports"):
        clock.lap(phase)
    assert clock.line() == "Started in 5.75 s: imports 2.25, model 0.50, weights 3.00."
