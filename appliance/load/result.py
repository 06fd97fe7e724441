"""The result of a load, as a typed model, and as JSON in the field names of `vllm bench serve`."""

import json
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from appliance.load.outcome import Outcome
from appliance.load.profile import TrafficProfile
from appliance.load.slo import Slo
from appliance.load.statistics import PERCENTILES, Distribution, Timeline
from installer.base import fs
from installer.base.errors import usage_error
from installer.base.i18n import plain, reason, t

METRICS = ("ttft", "tpot", "itl", "e2el")
_MOST_DETAILED = 10_000    # requests that are kept one by one, if requested
_MOST_EXAMPLES = 5         # of each kind of error
_MOST_FILE = 256 << 20
_LATEST = 400              # latencies that `Tally.latest` looks at


class Latency(BaseModel):
    """Milliseconds. `percentiles` by their number: "50", "95", "99.9"."""

    model_config = ConfigDict(frozen=True)

    count: int = 0
    mean: float = 0.0
    median: float = 0.0
    std: float = 0.0
    max: float = 0.0
    percentiles: dict[str, float] = Field(default_factory=dict)

    def p(self, percentile: float) -> float:
        """Raises KeyError for one that was not computed."""
        return self.median if percentile == 50 else self.percentiles[_number(percentile)]


class LoadResult(BaseModel):
    """Throughputs are per second. `slo_share` is the share of all requests, including failed ones, within the SLO.
    `timeline` rows are [second, tokens, requests started, requests ended, errors]. `unfinished` requests were still
    running when both the time and the wait for them were over."""

    date: str = ""
    backend: str = "openai"
    label: str | None = None
    base_url: str = ""
    model_id: str = ""
    profile: str = ""
    num_prompts: int = 0
    request_rate: float | None = None       # None: a closed loop, "inf" in JSON
    burstiness: float = 1.0
    max_concurrency: int | None = None
    interrupted: bool = False

    duration: float = 0.0
    completed: int = 0
    failed: int = 0
    unfinished: int = 0
    total_input_tokens: int = 0
    total_output_tokens: int = 0
    request_throughput: float = 0.0
    request_goodput: float | None = None
    output_throughput: float = 0.0
    total_token_throughput: float = 0.0
    max_output_tokens_per_s: float = 0.0
    max_concurrent_requests: int = 0

    ttft: Latency = Latency()
    tpot: Latency = Latency()
    itl: Latency = Latency()
    e2el: Latency = Latency()

    slo: dict[str, float] = Field(default_factory=dict)
    slo_share: float | None = None
    error_kinds: dict[str, int] = Field(default_factory=dict)
    error_examples: dict[str, list[str]] = Field(default_factory=dict)
    without_usage: int = 0
    truncated: int = 0
    timeline: list[list[float]] = Field(default_factory=list)
    detailed: dict[str, list[Any]] = Field(default_factory=dict)
    metadata: dict[str, str] = Field(default_factory=dict)

    @property
    def sent(self) -> int:
        return self.completed + self.failed

    def to_json(self) -> dict[str, Any]:
        """vLLM's names, flat; fields that vLLM lacks come after them."""
        values = self.model_dump(mode="json", exclude={*METRICS, "detailed", "metadata"})
        values |= {"request_rate": "inf" if self.request_rate is None else self.request_rate,
                   "endpoint_type": self.backend, "tokenizer_id": None, **self.metadata, **self.detailed}  # fmt: skip
        for metric in METRICS:
            latency: Latency = getattr(self, metric)
            values |= {f"mean_{metric}_ms": latency.mean, f"median_{metric}_ms": latency.median,
                       f"std_{metric}_ms": latency.std, f"max_{metric}_ms": latency.max}  # fmt: skip
            values |= {f"p{name}_{metric}_ms": value for name, value in latency.percentiles.items()}
        return values

    @classmethod
    def of_json(cls, values: dict[str, Any]) -> "LoadResult":
        """What `to_json` or `vllm bench serve --save-result` wrote. Raises ValueError."""
        if not isinstance(values, dict) or "output_throughput" not in values or "completed" not in values:
            raise ValueError(t("it is not a result of `atoll bench serve` or `vllm bench serve`"))
        known = {name: values[name] for name in cls.model_fields if name in values and name not in METRICS}
        if known.get("request_rate") == "inf":
            known["request_rate"] = None
        for metric in METRICS:
            prefix, suffix = "p", f"_{metric}_ms"
            percentiles = {
                name[1 : -len(suffix)]: value for name, value in values.items()
                if name.startswith(prefix) and name.endswith(suffix)
            }  # fmt: skip
            known[metric] = {
                "mean": values.get(f"mean_{metric}_ms", 0.0), "median": values.get(f"median_{metric}_ms", 0.0),
                "std": values.get(f"std_{metric}_ms", 0.0), "max": values.get(f"max_{metric}_ms", 0.0),
                "percentiles": percentiles,
            }  # fmt: skip
        return cls.model_validate(known)


class Tally:
    """Collects outcomes in bounded memory and can compute the result at any time."""

    def __init__(
        self, profile: TrafficProfile, *, slo: Slo | None = None, detailed: bool = False,
        percentiles: tuple[float, ...] = PERCENTILES,
    ) -> None:  # fmt: skip
        self.profile, self.slo = profile, slo or Slo()
        self._percentiles = percentiles
        self._of = {metric: Distribution() for metric in METRICS}
        self.completed = self.failed = self.good = self.tokens_in = self.tokens_out = 0
        self.without_usage = self.truncated = self.unfinished = 0
        self.in_flight = self.most_in_flight = 0
        self._kinds: dict[str, int] = {}
        self._examples: dict[str, list[str]] = {}
        self._timeline = Timeline()
        self._detailed: list[Outcome] | None = [] if detailed else None
        self.interrupted = False
        self._latest = {metric: deque[float](maxlen=_LATEST) for metric in ("ttft", "itl")}

    def begun(self, seconds: float) -> None:
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        self._timeline.add(seconds, "begun")

    def ended(self, outcome: Outcome) -> None:
        self.in_flight -= 1
        end = outcome.start + outcome.e2e
        self._timeline.add(end, "ended")
        if self._detailed is not None and len(self._detailed) < _MOST_DETAILED:
            self._detailed.append(outcome)
        if not outcome.ok:
            self._failed(outcome, end)
            return
        self.completed += 1
        self.good += self.slo.met_by(outcome)
        self.tokens_in += outcome.tokens_in
        self.tokens_out += outcome.tokens_out
        self.without_usage += not outcome.has_usage
        self._of["ttft"].add(outcome.ttft)
        self._of["e2el"].add(outcome.e2e)
        if outcome.tokens_out > 1:
            self._of["tpot"].add(outcome.tpot)
        self._of["itl"].extend(outcome.gaps)
        self._latest["ttft"].append(outcome.ttft)
        self._latest["itl"].extend(outcome.gaps)
        at = outcome.start + outcome.ttft
        tokens = outcome.tokens_out / (len(outcome.gaps) + 1)
        self._timeline.add(at, "tokens", tokens)
        for gap in outcome.gaps:
            at += gap
            self._timeline.add(at, "tokens", tokens)

    def latest(self) -> dict[str, float] | None:
        """Percentiles of what ended last, milliseconds; None before the first answer."""
        if not self._latest["ttft"]:
            return None
        return {f"{metric}_p{p}": round(float(np.percentile(list(seen), p)) * 1000, 2)
                for metric, seen in self._latest.items() if seen for p in (50, 95)}  # fmt: skip

    def _failed(self, outcome: Outcome, end: float) -> None:
        self.failed += 1
        kind = outcome.error or ""
        self.truncated += kind == "truncated"
        self._timeline.add(end, "errors")
        self._kinds[kind] = self._kinds.get(kind, 0) + 1
        examples = self._examples.setdefault(kind, [])
        if outcome.detail and len(examples) < _MOST_EXAMPLES and outcome.detail not in examples:
            examples.append(outcome.detail)

    def result(self, seconds: float, **facts: Any) -> LoadResult:
        """The result so far, `seconds` after the start."""
        rate = 1 / seconds if seconds > 0 else 0.0
        sent = self.completed + self.failed
        arrival = self.profile.arrival
        return LoadResult(
            date=time.strftime("%Y%m%d-%H%M%S"), profile=self.profile.name, num_prompts=sent + self.unfinished,
            request_rate=arrival.rate, burstiness=arrival.burstiness,
            max_concurrency=arrival.clients or arrival.max_concurrency, interrupted=self.interrupted,
            duration=seconds, completed=self.completed, failed=self.failed, unfinished=self.unfinished,
            total_input_tokens=self.tokens_in, total_output_tokens=self.tokens_out,
            request_throughput=self.completed * rate,
            request_goodput=self.good * rate if self.slo else None,
            output_throughput=self.tokens_out * rate,
            total_token_throughput=(self.tokens_in + self.tokens_out) * rate,
            max_output_tokens_per_s=max(self._timeline.peak_per_second("tokens"), self.tokens_out * rate),
            max_concurrent_requests=self.most_in_flight,
            slo=self.slo.to_json(), slo_share=self.good / sent if self.slo and sent else None,
            error_kinds=dict(self._kinds), error_examples={k: v for k, v in self._examples.items() if v},
            without_usage=self.without_usage, truncated=self.truncated, timeline=self._timeline.rows(),
            detailed=_details(self._detailed),
            **{metric: _latency(self._of[metric], self._percentiles) for metric in METRICS}, **facts,
        )  # fmt: skip


def _latency(values: Distribution, wanted: tuple[float, ...]) -> Latency:
    if not values.count:
        return Latency(percentiles={_number(each): 0.0 for each in wanted})
    median, *found = (value * 1000 for value in values.percentiles((50, *wanted)))
    return Latency(
        count=values.count, mean=values.mean * 1000, median=median, std=values.deviation * 1000, max=values.most * 1000,
        percentiles={_number(each): value for each, value in zip(wanted, found, strict=True)},
    )


def _details(outcomes: list[Outcome] | None) -> dict[str, list[Any]]:
    if outcomes is None:
        return {}
    return {
        "input_lens": [each.tokens_in for each in outcomes], "output_lens": [each.tokens_out for each in outcomes],
        "ttfts": [each.ttft for each in outcomes], "itls": [each.gaps for each in outcomes],
        "start_times": [each.start for each in outcomes], "generated_texts": [each.text for each in outcomes],
        "errors": [f"{each.error}: {each.detail}" if each.error else "" for each in outcomes],
    }  # fmt: skip


def _number(percentile: float) -> str:
    return str(int(percentile)) if percentile == int(percentile) else str(percentile)


def read_result(path: Path) -> LoadResult:
    """A saved result, ours or vLLM's; the last one of a file that holds several. Raises InstallError (usage)."""
    try:
        if path.stat().st_size > _MOST_FILE:
            raise ValueError(t("it is larger than 256 MiB"))
        text = path.read_text("utf-8").strip()
        try:
            values = json.loads(text)
        except ValueError:
            values = json.loads(text.splitlines()[-1] if text else "")
        return LoadResult.of_json(values)
    except (OSError, ValueError, RecursionError) as error:
        why = reason(error) if isinstance(error, OSError) else plain(error)
        raise usage_error(t("The result {path} cannot be used: {why}.", path=path, why=why),
                          t("Save one: atoll bench serve --save-result")) from None


def save_result(path: Path, values: dict[str, Any], *, append: bool = False) -> None:
    """One JSON object, whole or not at all; `append` adds it as a further line. Raises OSError."""
    text = json.dumps(values, ensure_ascii=False) + "\n"
    if append and path.exists():
        text = path.read_text("utf-8").rstrip("\n") + "\n" + text
    path.parent.mkdir(parents=True, exist_ok=True)
    fs.write_atomic(path, text, 0o644)
