"""The load itself: requests of a profile go out as it says, outcomes come back, a result is made.

    closed loop   N clients, each: ask → read to the end → think → ask …
    open loop     arrivals at a rate, whether or not earlier answers have ended
"""

import asyncio
import random
import resource
import secrets
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any

import uvloop

from appliance.load import prompts
from appliance.load.datasets import Dataset
from appliance.load.profile import MOST_CLIENTS, TrafficProfile
from appliance.load.prompts import Request
from appliance.load.result import LoadResult, Tally
from appliance.load.senders import OpenAISender, Sender
from appliance.load.slo import Slo
from appliance.load.statistics import PERCENTILES
from appliance.load.target import Target
from installer.base.errors import usage_error
from installer.base.i18n import t

_PROGRESS_SECONDS = 0.25
_DRAIN_SECONDS = 60.0      # for running requests, after the time of a timed run is over
_OWN_FILES = 64            # descriptors needed in addition to the connections


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a run. `total` is None for a timed run, `total_seconds` for a counted one."""

    phase: str                  # "warmup" or "run"
    done: int
    failed: int
    total: int | None
    seconds: float
    total_seconds: float | None
    tokens_out: int
    latest: dict[str, float] | None = None   # ttft_p50, ttft_p95, itl_p50, itl_p95 of the last requests, milliseconds


OnProgress = Callable[[Progress], None]


class LoadInterrupted(KeyboardInterrupt):
    """Ctrl-C or a cancel; `result` is what was measured until then."""

    def __init__(self, result: LoadResult) -> None:
        super().__init__()
        self.result = result


def run_load(
    target: Target, profile: TrafficProfile, *, requests: int | None = None, seconds: float | None = None,
    slo: Slo | None = None, on_progress: OnProgress | None = None, dataset: Dataset | None = None, fit: bool = True,
    extra: dict[str, Any] | None = None, detailed: bool = False, percentiles: tuple[float, ...] = PERCENTILES,
) -> LoadResult:  # fmt: skip
    """Put the load of `profile` on `target` and measure. Ends after so many `requests`, or so many `seconds`, or what
    the profile says.

    `fit`: lengths that the model's context does not hold are scaled down together. Failed requests are counted, not
    raised. Raises InstallError where the endpoint does not answer at all, LoadInterrupted for Ctrl-C.
    """
    body = {**profile.sampling.body(), **({"ignore_eos": True} if profile.ignore_eos else {}), **(extra or {})}

    def sender() -> Sender:
        return OpenAISender(target, profile.endpoint, body, keep_text=detailed)

    load = Load(sender, profile, requests=requests, seconds=seconds, slo=slo, on_progress=on_progress, dataset=dataset,
                fit=fit, detailed=detailed, percentiles=percentiles)  # fmt: skip
    load.facts["base_url"] = target.base_url
    return load.run_to_end()


class Load:
    """One run. `make_sender` is called inside its event loop."""

    def __init__(
        self, make_sender: Callable[[], Sender], profile: TrafficProfile, *, requests: int | None = None,
        seconds: float | None = None, slo: Slo | None = None, on_progress: OnProgress | None = None,
        dataset: Dataset | None = None, fit: bool = True, detailed: bool = False,
        percentiles: tuple[float, ...] = PERCENTILES,
    ) -> None:  # fmt: skip
        self.profile, self.seconds = profile, seconds
        self.requests = None if seconds is not None and requests is None else requests or profile.requests
        self._make_sender, self._on_progress, self._dataset, self._fit = make_sender, on_progress, dataset, fit
        self._slo, self._detailed, self._percentiles = slo, detailed, percentiles
        self.facts: dict[str, Any] = {}
        self._tally = self._new_tally()
        self._zero: float | None = None
        self._end: float | None = None
        self._warmed = self._begun = 0

    def run_to_end(self) -> LoadResult:
        allow_connections(min(self.profile.arrival.clients or self.profile.arrival.max_concurrency or 1024,
                               self.requests or MOST_CLIENTS))  # fmt: skip
        try:
            return run_in_loop(self.run())
        except KeyboardInterrupt:
            raise LoadInterrupted(self.result(interrupted=True)) from None

    def result(self, *, interrupted: bool = False) -> LoadResult:
        """What has been measured so far."""
        self._tally.interrupted = interrupted
        now = self._end if self._end is not None else time.perf_counter()
        return self._tally.result(now - self._zero if self._zero is not None else 0.0, **self.facts)

    async def run(self) -> LoadResult:
        sender = self._make_sender()
        ticker: asyncio.Task[None] | None = None
        try:
            await sender.open()
            self.facts |= {"backend": sender.backend, "model_id": sender.model}
            if self._fit and self._dataset is None and sender.context is not None:
                self.profile = self.profile.fitted(sender.context)
                self._tally = self._new_tally()
            if self._dataset is None:
                cost = await sender.cost(self.profile.endpoint)
                run = secrets.token_hex(8)
                source = prompts.requests(self.profile, cost, run)
                warmups = prompts.requests(self.profile, cost, run, warmup=True)
            else:
                length = round(self.profile.output.mean)
                source = self._dataset.requests(self.profile.endpoint, length, self.profile.seed)
                warmups = self._dataset.requests(self.profile.endpoint, length, self.profile.seed + 1)
            ticker = asyncio.create_task(self._tick())
            await self._warm_up(sender, warmups)
            self._zero = time.perf_counter()
            if self.profile.arrival.rate is None:
                await self._closed(sender, source)
            else:
                await self._open_loop(sender, source)
            self._end = time.perf_counter()
        finally:
            if ticker is not None:
                ticker.cancel()
            await sender.close()
        self._tell("run")
        return self.result()

    def _new_tally(self) -> Tally:
        return Tally(self.profile, slo=self._slo, detailed=self._detailed, percentiles=self._percentiles)

    # -- the two kinds of arrival

    async def _closed(self, sender: Sender, source: Iterator[Request]) -> None:
        clients = min(self.profile.arrival.clients or 1, self.requests or MOST_CLIENTS)

        async def client() -> None:
            while self._more():
                await self._one(sender, next(source))
                if self.profile.arrival.think_seconds and self._more(count=False):
                    await asyncio.sleep(self.profile.arrival.think_seconds)

        await self._until_done([asyncio.create_task(client()) for _ in range(clients)])

    async def _open_loop(self, sender: Sender, source: Iterator[Request]) -> None:
        assert self._zero is not None
        arrival = self.profile.arrival
        rate, shape = arrival.rate or 1.0, arrival.burstiness
        limit = asyncio.Semaphore(arrival.max_concurrency or MOST_CLIENTS)
        rng = random.Random(f"{self.profile.seed}-arrival")  # noqa: S311 - times, no secret
        tasks: set[asyncio.Task[None]] = set()
        at = self._zero

        async def one(request: Request) -> None:
            async with limit:
                await self._one(sender, request)

        try:
            while self._more():
                while len(tasks) >= 2 * MOST_CLIENTS:  # a target that never answers must not fill our memory
                    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                task = asyncio.create_task(one(next(source)))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
                at += rng.gammavariate(shape, 1 / (rate * shape))  # shape 1: exponential, a Poisson process
                if (wait := at - time.perf_counter()) > 0:
                    await asyncio.sleep(wait)
        finally:
            await self._until_done(list(tasks))

    async def _until_done(self, tasks: list[asyncio.Task[None]]) -> None:
        """Wait for all of them. In a timed run, those that take too long after its end are given up."""
        if not tasks:
            return
        try:
            limit = None
            if self.seconds is not None and self._zero is not None:
                left = self._zero + self.seconds - time.perf_counter()
                limit = max(0.0, left) + max(_DRAIN_SECONDS, self.seconds / 2)
            done, pending = await asyncio.wait(tasks, timeout=limit)
            for task in done:
                task.result()
            self._tally.unfinished = len(pending)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _more(self, *, count: bool = True) -> bool:
        """Whether another request may start; counts it."""
        if self.requests is not None and self._begun >= self.requests:
            return False
        if self.seconds is not None and self._zero is not None and time.perf_counter() - self._zero >= self.seconds:
            return False
        self._begun += count
        return True

    async def _one(self, sender: Sender, request: Request) -> None:
        assert self._zero is not None
        self._tally.begun(time.perf_counter() - self._zero)
        try:
            outcome = await sender.ask(request, self.profile.timeout_seconds, self._zero)
        except BaseException:
            self._tally.in_flight -= 1
            raise
        self._tally.ended(outcome)
        if not outcome.ok and outcome.status == 0:
            await asyncio.sleep(0.05)  # do not ask a target that is down in a busy loop

    async def _warm_up(self, sender: Sender, source: Iterator[Request]) -> None:
        """A few requests side by side, for connections and caches. Their failures show again in the run."""
        limit = asyncio.Semaphore(self.profile.arrival.clients or self.profile.arrival.max_concurrency or 8)

        async def one(request: Request) -> None:
            async with limit:
                await sender.ask(request, self.profile.timeout_seconds, 0.0)
                self._warmed += 1

        async with asyncio.TaskGroup() as group:
            for _ in range(self.profile.warmup):
                group.create_task(one(next(source)))

    # -- progress

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_PROGRESS_SECONDS)
            self._tell("warmup" if self._zero is None else "run")

    def _tell(self, phase: str) -> None:
        if self._on_progress is None:
            return
        tally = self._tally
        if phase == "warmup":
            progress = Progress(phase, self._warmed, 0, self.profile.warmup, 0.0, None, 0)
        else:
            seconds = (self._end or time.perf_counter()) - (self._zero or 0.0)
            progress = Progress(phase, tally.completed + tally.failed, tally.failed, self.requests, seconds,
                                self.seconds, tally.tokens_out, tally.latest())  # fmt: skip
        self._on_progress(progress)


def run_in_loop(work: Coroutine[Any, Any, Any]) -> Any:
    """Run to the end in a new event loop."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


def allow_connections(count: int) -> None:
    """Raises InstallError (usage) if this process may not open that many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + _OWN_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted and (hard == resource.RLIM_INFINITY or soft < hard):
        soft = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft != resource.RLIM_INFINITY and soft < wanted:
        raise usage_error(
            t("{count} clients need more open files than this process may have ({limit}).", count=count, limit=soft),
            t("Use fewer clients, or raise the limit: ulimit -n {wanted}", wanted=wanted),
        )
