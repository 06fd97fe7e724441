"""The figures of a stage, from the time series alone, and whether they stop it or meet its goal."""

from pydantic import BaseModel

from appliance.series import Window
from appliance.series.names import UP
from appliance.service.findings import Finding, made
from appliance.service.pilot.plan import Goal, Stop
from installer.base.i18n import t

_TTFT, _ITL = "time_to_first_token_seconds", "inter_token_latency_seconds"
_E2E, _KV = "e2e_request_latency_seconds", "kv_cache_usage_perc"


class Kpi(BaseModel):
    """Throughputs a second, latencies in milliseconds.

    `errors`: answers 5xx, and requests that the engine ended with an error. An upper bound: a failed request that was
    not streamed counts as both.
    """

    seconds: float = 0.0
    requests: float = 0.0
    errors: float = 0.0
    error_rate: float = 0.0
    tokens_in: float = 0.0
    tokens_out: float = 0.0
    throughput: float = 0.0
    ttft_p95: float | None = None
    itl_p95: float | None = None
    share_ttft: float | None = None
    share_e2el: float | None = None
    kv_most: float | None = None
    temperature_most: float | None = None
    up_share: float | None = None
    cost: float | None = None
    cost_per_request: float | None = None
    cost_per_million_tokens: float | None = None


def requests_of(window: Window) -> tuple[float, float]:
    """Requests to the models, and how many of them failed."""
    by_status = window.requests_by_status()
    total = sum(count for status, count in by_status.items() if status != "4xx")
    failed = by_status.get("5xx", 0.0) + window.increase("request_success", finished_reason="error")
    return total, min(failed, total)


def measure(window: Window, goal: Goal, *, per_hour: float | None = None) -> Kpi:
    """`per_hour`: the machine's cost per hour."""
    requests, errors = requests_of(window)
    tokens_in, tokens_out = window.increase("prompt_tokens"), window.increase("generation_tokens")
    seconds = window.seconds
    cost = per_hour * seconds / 3600 if per_hour is not None else None
    return Kpi(
        seconds=seconds, requests=requests, errors=errors, error_rate=errors / requests if requests else 0.0,
        tokens_in=tokens_in, tokens_out=tokens_out, throughput=window.rate("generation_tokens"),
        ttft_p95=window.milliseconds(_TTFT, 0.95), itl_p95=window.milliseconds(_ITL, 0.95),
        share_ttft=window.share_below(_TTFT, goal.ttft / 1000) if goal.ttft else None,
        share_e2el=window.share_below(_E2E, goal.e2el / 1000) if goal.e2el else None,
        kv_most=window.most(_KV), temperature_most=window.most("gpu_temperature"), up_share=window.mean(UP), cost=cost,
        cost_per_request=cost / requests if cost is not None and requests else None,
        cost_per_million_tokens=cost / (tokens_in + tokens_out) * 1e6
        if cost is not None and tokens_in + tokens_out else None,
    )  # fmt: skip


def tripped(window: Window, stop: Stop) -> list[str]:
    """The stop conditions that hold, in words; empty: continue."""
    found = []
    requests, errors = requests_of(window)
    enough = requests >= stop.requests
    if stop.error_rate is not None and enough and errors / requests > stop.error_rate:
        found.append(t("error rate {seen:.1%}, limit {limit:.1%}", seen=errors / requests, limit=stop.error_rate))
    for name, metric, limit in (("TTFT", _TTFT, stop.ttft), ("ITL", _ITL, stop.itl)):
        seen = window.milliseconds(metric, 0.95)
        if limit is not None and enough and seen is not None and seen > limit:
            found.append(t("{name} p95 {seen:.0f} ms, limit {limit:.0f} ms", name=name, seen=seen, limit=limit))
    usage = window.mean(_KV)
    if stop.kv_usage is not None and usage is not None and usage > stop.kv_usage:
        found.append(t("KV cache {seen:.1%} in use, limit {limit:.1%}", seen=usage, limit=stop.kv_usage))
    heat = window.most("gpu_temperature")
    if stop.temperature is not None and heat is not None and heat > stop.temperature:
        found.append(t("GPU at {seen:.0f} °C, limit {limit:.0f} °C", seen=heat, limit=stop.temperature))
    return found


def judged(kpi: Kpi, goal: Goal) -> list[Finding]:
    """Each goal as a finding."""
    found = [
        _one("requests", t("Requests"), kpi.requests >= goal.requests, f"{kpi.requests:,.0f}", f"≥ {goal.requests:,}"),
        _one("error-rate", t("Error rate"), kpi.error_rate <= goal.error_rate, f"{kpi.error_rate:.2%}",
             f"≤ {goal.error_rate:.2%}"),
    ]  # fmt: skip
    for id, title, limit, share in (
        ("ttft", t("Requests within the TTFT target"), goal.ttft, kpi.share_ttft),
        ("e2el", t("Requests within the latency target"), goal.e2el, kpi.share_e2el),
    ):
        if limit is not None:
            found.append(_one(id, title, share is not None and share >= goal.share,
                              "–" if share is None else f"{share:.1%}", f"≥ {goal.share:.1%} ≤ {limit:g} ms"))
    if goal.throughput is not None:
        found.append(_one("throughput", t("Tokens out a second"), kpi.throughput >= goal.throughput,
                          f"{kpi.throughput:,.1f}", f"≥ {goal.throughput:,.1f}"))  # fmt: skip
    return found


def _one(id: str, title: str, ok: bool, observed: str, required: str) -> Finding:
    return made(f"pilot-{id}", "info" if ok else "block", ok, title, observed=observed, required=required)
