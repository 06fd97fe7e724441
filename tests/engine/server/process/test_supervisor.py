"""The supervisor: restarts within its limits, final exits, stops at any moment."""

import asyncio
import sys
import time
from pathlib import Path

import pytest

from engine.server.process import supervisor
from engine.server.process.supervisor import FINAL_STATUSES, Restarts, Supervisor

WAITS = "import time; time.sleep(60)"
DEAF = "import signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(60)"


class Kept(Supervisor):
    """A Python program under the plain rule."""

    def __init__(self, program: str, *, limit: int = 3, first_delay: float = 0.0, stop_seconds: float = 5.0,
                 **popen) -> None:
        super().__init__([sys.executable, "-S", "-c", program], stop_seconds=stop_seconds, **popen)
        self.restarts = Restarts(limit, first_delay=first_delay)
        self.statuses: list[int] = []

    async def ended(self, status: int) -> float | None:
        self.statuses.append(status)
        return self.restarts.delay_after(status)


async def test_a_crash_is_restarted_until_the_limit() -> None:
    kept = Kept("raise SystemExit(7)", limit=2)
    kept.spawn()
    async with asyncio.timeout(20):
        await kept.supervise()
    assert kept.statuses == [7, 7, 7]
    assert kept.pid is None


@pytest.mark.parametrize("status", FINAL_STATUSES)
async def test_what_a_restart_cannot_help_is_not_restarted(status: int) -> None:
    kept = Kept(f"raise SystemExit({status})")
    kept.spawn()
    async with asyncio.timeout(20):
        await kept.supervise()
    assert kept.statuses == [status]


async def test_the_units_and_the_supervisor_give_up_on_the_same_statuses() -> None:
    statuses = " ".join(map(str, FINAL_STATUSES))
    for unit in ("atoll-engine@.service", "atoll-gateway.service"):
        text = (Path(__file__).parents[4] / "systemd" / unit).read_text()
        assert f"RestartPreventExitStatus={statuses}\n" in text


def test_delays_double_up_to_a_bound_and_old_ends_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(supervisor.time, "monotonic", lambda: now)
    restarts = Restarts(8, first_delay=0.5)
    assert [restarts.delay_after(1) for _ in range(9)] == [0.5, 1, 2, 4, 8, 16, 30, 30, None]
    now += supervisor.RESTART_WINDOW_SECONDS
    assert restarts.delay_after(-9) == 0.5
    assert restarts.count == 1


async def test_a_stop_while_the_next_start_waits_starts_nothing() -> None:
    kept = Kept("raise SystemExit(7)", first_delay=20.0)
    kept.spawn()
    task = asyncio.create_task(kept.supervise())
    async with asyncio.timeout(10):
        while not kept.statuses:
            await asyncio.sleep(0.01)
        await kept.stop()
        await task
    assert (kept.statuses, kept.pid) == ([7], None)


async def test_a_stop_ends_the_process_and_is_no_crash() -> None:
    kept = Kept(WAITS)
    kept.spawn()
    task = asyncio.create_task(kept.supervise())
    await asyncio.sleep(0)
    async with asyncio.timeout(10):
        assert not await kept.stop()
        await task
    assert (kept.statuses, kept.running) == ([], False)


async def test_a_process_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    with (tmp_path / "out").open("wb") as out:
        kept = Kept(DEAF, stop_seconds=0.3, stdout=out)
        kept.spawn()
    while not (tmp_path / "out").stat().st_size:
        await asyncio.sleep(0.01)
    task, began = asyncio.create_task(kept.supervise()), time.monotonic()
    async with asyncio.timeout(10):
        assert await kept.stop()
        await task
    assert time.monotonic() - began >= 0.3
    assert not kept.running
