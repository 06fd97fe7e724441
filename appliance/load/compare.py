"""Two results side by side: what got faster, what got slower, what cannot be compared."""

from dataclasses import dataclass

from appliance.load.result import METRICS, LoadResult
from installer.base.i18n import t

_HIGHER_IS_BETTER = {
    "request_throughput": t("requests/s"), "output_throughput": t("tokens out/s"),
    "total_token_throughput": t("tokens in and out/s"), "request_goodput": t("requests/s within the targets"),
}  # fmt: skip
_NAMES = {"ttft": t("time to first token"), "tpot": t("time per token"), "itl": t("wait between tokens"),
          "e2el": t("whole request")}  # fmt: skip
_SAME = 0.03  # two runs of one system differ by this much


@dataclass(frozen=True, slots=True)
class Row:
    """One number of both. `change` is relative; `better` is None if the difference is too small to count."""

    name: str
    title: str
    unit: str
    before: float
    after: float
    change: float | None
    better: bool | None


def compare(before: LoadResult, after: LoadResult) -> list[Row]:
    """Throughputs, then latencies. Numbers that one of them lacks are left out."""
    rows = []
    for name, title in _HIGHER_IS_BETTER.items():
        rows += _row(name, title, "", getattr(before, name), getattr(after, name), higher=True)
    for metric in METRICS:
        first, second = getattr(before, metric), getattr(after, metric)
        pairs = [("mean", first.mean, second.mean), ("median", first.median, second.median)]
        shared = sorted(set(first.percentiles) & set(second.percentiles) - {"50"}, key=float)
        pairs += [(f"p{each}", first.percentiles[each], second.percentiles[each]) for each in shared]
        for kind, one, two in pairs:
            title = t("{name}, {kind}", name=_NAMES[metric], kind=kind)
            rows += _row(f"{kind}_{metric}_ms", title, "ms", one, two, higher=False)
    return rows


def differences(before: LoadResult, after: LoadResult) -> list[str]:
    """Why the two may not be comparable: another load, another model, failures."""
    found: list[str] = []
    for name, title in (("model_id", t("model")), ("profile", t("profile")), ("request_rate", t("request rate")),
                        ("max_concurrency", t("clients"))):  # fmt: skip
        one, two = getattr(before, name), getattr(after, name)
        if one != two and (one or two):
            found.append(t("{what}: {before} and {after}", what=title, before=_said(one), after=_said(two)))
    for name, title in (("total_input_tokens", t("tokens in a request")), ("total_output_tokens", t("tokens out"))):
        one, two = (getattr(each, name) / max(1, each.completed) for each in (before, after))
        if max(one, two) > 1.1 * min(one, two):
            found.append(t("{what}: {before} and {after}", what=title, before=f"{one:.0f}", after=f"{two:.0f}"))
    for result, title in ((before, t("the first")), (after, t("the second"))):
        if result.failed or result.interrupted:
            found.append(t("{which} has {failed} failed requests of {sent}", which=title, failed=result.failed,
                           sent=result.sent))
    return found


def _said(value: object) -> str:
    return "–" if value is None or value == "" else str(value)


def _row(name: str, title: str, unit: str, before: float | None, after: float | None, *, higher: bool) -> list[Row]:
    if not before or after is None:
        return []
    change = after / before - 1
    better = None if abs(change) < _SAME else (change > 0) == higher
    return [Row(name, title, unit, before, after, change, better)]
