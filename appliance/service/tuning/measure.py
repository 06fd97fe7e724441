"""The load of one trial, and its score."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from appliance.load.generator import Progress, run_load
from appliance.load.profile import TrafficProfile, find_profile
from appliance.load.result import LoadResult
from appliance.load.slo import Slo
from appliance.load.target import Target
from appliance.service.tuning.request import PROFILES
from appliance.service.tuning.score import Score
from appliance.service.tuning.search import Lack
from installer.base.errors import InstallError
from installer.base.i18n import t
from installer.release.config import Endpoint

FAILED_SHARE = 0.5   # share of failed requests above which a trial does not count
LATENCIES = ("ttft", "itl", "tpot", "e2el")


@dataclass(frozen=True, slots=True)
class Measured:
    """The result of a load. Latencies in milliseconds, each {"p50", "p95", "p99"}."""

    score: Score
    requests: int
    failed: int
    seconds: float
    latency: dict[str, dict[str, float]]
    missed: tuple[str, ...]       # limits that the 95th percentile misses
    share: float | None           # of the requests within all limits
    problem: str = ""             # a Text: why it does not count

    def to_json(self) -> dict[str, Any]:
        return {
            **self.score.to_json(), "requests": self.requests, "failed": self.failed,
            "seconds": round(self.seconds, 2), "latency_ms": self.latency, "missed": list(self.missed),
            "within_target": self.share,
        }  # fmt: skip


class LoadDriver(Protocol):
    """Puts one trial's load on the endpoint."""

    def __call__(self, endpoint: Endpoint, model: str, key: str, on_progress: Callable[[int, int], None]) -> Measured:
        """`on_progress` gets answers and seconds. Raises InstallError if the endpoint does not answer at all."""
        ...


class ProfileLoad:
    """The load of a traffic profile for a number of seconds."""

    def __init__(self, profile: TrafficProfile, slo: Slo, seconds: float) -> None:
        self.profile, self.slo, self.seconds = profile, slo, seconds

    def __call__(self, endpoint: Endpoint, model: str, key: str, on_progress: Callable[[int, int], None]) -> Measured:
        target = Target(endpoint.url, model=model, key=key, pinned=endpoint.certificate)

        def told(progress: Progress) -> None:
            on_progress(progress.done, int(progress.seconds))

        result = run_load(target, self.profile, seconds=self.seconds, slo=self.slo, on_progress=told)
        return judged(result, self.slo)


def profile_called(asked: str) -> TrafficProfile:
    """Raises InstallError (usage)."""
    return find_profile(PROFILES.get(asked, asked))


def judged(result: LoadResult, slo: Slo) -> Measured:
    latency = {
        name: {f"p{p}": round(getattr(result, name).p(p), 2) for p in (50, 95, 99)}
        for name in LATENCIES if result.completed
    }  # fmt: skip
    limits = slo.to_json()
    over = {name: latency[name]["p95"] / limit - 1 for name, limit in limits.items() if name in latency}
    missed = tuple(name for name, excess in over.items() if excess > 0)
    excess = max([0.0, *over.values()]) if over else 0.0
    goodput = result.request_throughput if not slo else (result.request_goodput or 0.0)
    sent = result.sent
    problem = ""
    if not result.completed or result.failed > FAILED_SHARE * sent:
        kinds = ", ".join(f"{kind} × {count}" for kind, count in result.error_kinds.items())
        problem = t("{failed} of {sent} requests failed: {kinds}", failed=result.failed, sent=sent, kinds=kinds)
    return Measured(Score(goodput, excess, result.output_throughput), sent, result.failed, result.duration, latency,
                    missed, result.slo_share if slo else None, problem)  # fmt: skip


def lack_of(measured: Measured | None, clients: int | None) -> Lack:
    """What the best trial misses; it decides the order of the next ones."""
    if measured is None:
        return Lack(clients=clients)
    missed = set(measured.missed)
    return Lack(ttft=bool(missed & {"ttft", "e2el"}), itl=bool(missed & {"itl", "tpot"}), clients=clients)


def measured_of(facts: dict[str, Any]) -> Measured:
    """The result that `Measured.to_json` recorded."""
    return Measured(
        Score.of_json(facts), facts["requests"], facts["failed"], facts["seconds"], facts["latency_ms"],
        tuple(facts["missed"]), facts["within_target"],
    )  # fmt: skip


def parse_target(limits: dict[str, float]) -> Slo:
    """Raises InstallError (usage)."""
    try:
        return Slo(**limits)
    except ValueError as error:
        raise InstallError(t("The target cannot be used: {why}.", why=str(error).splitlines()[0])) from error
