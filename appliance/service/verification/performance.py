"""Performance: realistic load, closed and open loop, against the operator's targets."""

from collections.abc import Callable

from appliance.load.generator import Load, Progress
from appliance.load.profile import Arrival, TrafficProfile, find_profile
from appliance.load.result import LoadResult
from appliance.load.senders import OpenAISender
from appliance.load.target import Target
from appliance.service.findings import Finding, made
from appliance.service.verification.context import Numbers, Told, Verifying, not_checked
from appliance.service.verification.plan import Targets, VerifyAnswers
from appliance.service.verification.subject import Served
from installer.base.i18n import t

_MOST_NUMBERS = 300
_OPEN_SHARE = 0.7   # of the closed loop's requests per second: busy, but not overloaded
_TUNE = t("Tune again, or relax the target.")


def load_of(
    target: Target, profile: TrafficProfile, plan: VerifyAnswers, told: Told, label: str, *,
    requests: int | None = None, seconds: float | None = None, numbers: Numbers = lambda topic, facts: None,
) -> Load:  # fmt: skip
    """A load that reports its progress, and its latest latencies at most about three hundred times."""
    last = 0.0
    body = {**profile.sampling.body(), **({"ignore_eos": True} if profile.ignore_eos else {})}

    def on_progress(seen: Progress) -> None:
        nonlocal last
        if seen.phase == "run" and seen.latest and seen.seconds - last >= max(1.0, (seconds or 0) / _MOST_NUMBERS):
            last = seen.seconds
            rate = seen.tokens_out / seen.seconds
            numbers("load", {"label": label, "seconds": round(seen.seconds, 1), "of": seen.total_seconds,
                             "done": seen.done, "requests": seen.total, "rate": round(rate, 2), **seen.latest})
        if seen.phase == "run" and seen.total is None:
            told(label, int(seen.seconds), int(seen.total_seconds or 0))
        elif seen.phase == "run":
            told(label, seen.done, seen.total or 0)

    load = Load(lambda: OpenAISender(target, profile.endpoint, body), profile, requests=requests, seconds=seconds,
                slo=plan.targets.slo, on_progress=on_progress)  # fmt: skip
    load.facts["base_url"] = target.base_url
    return load


async def run(work: Verifying) -> list[Finding]:
    found: list[Finding] = []
    profile = find_profile(work.plan.profile)
    for model in work.subject.models:
        target = work.subject.of(model)

        def tag(id: str, model: Served = model) -> str:
            return work.subject.tagged(id, model)

        budget = {"requests": work.plan.requests, "seconds": work.plan.seconds}
        if profile.arrival.clients is not None:
            closed = await load_of(target, profile, work.plan, work.told, t("Load, closed loop"),
                                   numbers=work.numbers, **budget).run()  # fmt: skip
            rate = work.plan.rate or closed.request_throughput * _OPEN_SHARE
        else:
            closed, rate = None, work.plan.rate or profile.arrival.rate
        opened = None
        if rate:
            arrival = Arrival(rate=rate, burstiness=profile.arrival.burstiness)
            even = profile.model_copy(update={"arrival": arrival})
            opened = await load_of(target, even, work.plan, work.told, t("Load, open loop"),
                                   numbers=work.numbers, **budget).run()  # fmt: skip
        measured = {"closed": closed, "open": opened}
        work.data.setdefault("loads", {})[model.name] = {
            name: result.to_json() for name, result in measured.items() if result is not None
        }  # fmt: skip
        for name, result in measured.items():
            if result is not None:
                found += judged(result, work.plan.targets, name, tag)
        if work.plan.targets.users is not None:
            found.append(await _users(work, target, profile, tag("users"), model.name))
    return found


def judged(result: LoadResult, targets: Targets, kind: str, name: Callable[[str], str] = str) -> list[Finding]:
    """One load against the targets: errors, each request's limits, throughputs."""
    title = t("closed loop") if kind == "closed" else t("open loop")
    share = result.failed / result.sent if result.sent else 1.0
    example = next((f"{error}: {text[0]}" for error, text in result.error_examples.items()), "")
    errors_ok = share <= targets.error_rate
    found = [made(
        name(f"errors-{kind}"), "info" if errors_ok else "block", errors_ok, t("Errors, {kind}", kind=title),
        observed=t("{failed} of {sent} requests failed", failed=result.failed, sent=result.sent),
        required=t("at most {share}", share=f"{targets.error_rate:.1%}"), evidence=example,
        why=t("users see each failed request"), fix="" if errors_ok else t("Read why: {command}", command="atoll logs"),
    )]  # fmt: skip
    if result.without_usage or result.truncated:
        found.append(made(
            name(f"answers-{kind}"), "block", False, t("Complete answers, {kind}", kind=title),
            observed=t("{truncated} streams were cut off, {usage} did not report their tokens",
                       truncated=result.truncated, usage=result.without_usage),
            why=t("clients take a truncated answer for a complete "
                  "one"), fix=t("Read why: {command}", command="atoll logs"),
        ))  # fmt: skip
    found.append(_latency(result, targets, kind, title, name(f"latency-{kind}")))
    if kind == "closed":
        found += _throughputs(result, targets, name)
    return found


def _latency(result: LoadResult, targets: Targets, kind: str, title: str, id: str) -> Finding:
    seen = t("first token {ttft} ms, between tokens {itl} ms, whole request {e2el} ms (95th percentiles)",
             ttft=f"{result.ttft.percentiles.get('95', 0):,.0f}", itl=f"{result.itl.percentiles.get('95', 0):,.0f}",
             e2el=f"{result.e2el.percentiles.get('95', 0):,.0f}")  # fmt: skip
    head = t("Waiting, {kind}", kind=title)
    if not targets.slo:
        return made(id, "info", True, head, observed=seen)
    ok = (result.slo_share or 0.0) >= targets.share
    limits = ", ".join(f"{name} {limit:g} ms" for name, limit in targets.slo.to_json().items())
    return made(
        id, "info" if ok else "block", ok, head,
        observed=t("{share} of the requests within the targets; {seen}", share=f"{result.slo_share or 0:.1%}",
                   seen=seen),
        required=t("{share} within {limits}", share=f"{targets.share:.0%}", limits=limits),
        why=t("this is what was promised to users"), fix="" if ok else _TUNE, command="" if ok else "atoll tune",
    )  # fmt: skip


def _throughputs(result: LoadResult, targets: Targets, name: Callable[[str], str]) -> list[Finding]:
    found = []
    both = (("output_throughput", t("Tokens out a second")), ("request_throughput", t("Requests a second")))
    for field, title in both:
        wanted, seen = getattr(targets, field), getattr(result, field)
        ok = wanted is None or seen >= wanted
        id = field.replace("_", "-")
        found.append(made(
            name(id), "info" if ok else "block", ok, title, observed=f"{seen:,.2f}",
            required="" if wanted is None else f"{wanted:,.2f}", fix="" if ok else _TUNE,
            command="" if ok else "atoll tune", why=t("the plan for users and costs relies on it"),
        ))  # fmt: skip
    return found


async def _users(work: Verifying, target: Target, profile: TrafficProfile, id: str, model: str) -> Finding:
    title, wanted = t("Users at once"), work.plan.targets.users or 1
    if not work.plan.targets.slo:
        return not_checked(id, title, t("users are counted against targets such as ttft, and none is given"))
    # One load at the promised number answers the question; `bench serve --find-users` finds how many more would fit.
    load = load_of(target, profile.with_clients(wanted), work.plan, work.told, title, requests=max(8, 3 * wanted))
    result = await load.run()
    work.data["loads"][model]["users"] = result.to_json()
    ok = (result.slo_share or 0.0) >= work.plan.targets.share
    return made(
        id, "info" if ok else "block", ok, title,
        observed=t("{users} users: {share} of their requests within the targets", users=wanted,
                   share=f"{result.slo_share or 0:.1%}"),
        required=t("{users} users", users=wanted), why=t("this many users are to be served"), fix="" if ok else _TUNE,
        command="" if ok else "atoll tune",
    )  # fmt: skip
