"""The texts of a tuning about its trials and its result: one line each, the reason, and what would help."""

from appliance.service.tuning.measure import Measured
from appliance.service.tuning.search import Position, Space, Value
from installer.base.i18n import joined, t


def line(space: Space, position: Position, measured: Measured | None, why: str) -> str:
    """One trial: its difference from the start, and its result."""
    what = changes(space, position)
    if measured is None:
        return t("{what}: failed, {why}", what=what, why=why)
    return t("{what}: {numbers}", what=what, numbers=numbers(measured))


def changes(space: Space, position: Position) -> str:
    """The settings that differ from the start."""
    start, setting = space.setting(space.start), space.setting(position)
    different = [f"{name} {shown(setting[name])}" for name in setting if setting[name] != start[name]]
    return joined(different) if different else t("the current settings")


def shown(value: Value) -> str:
    return "auto" if value is None else str(value)


def numbers(measured: Measured) -> str:
    """Such as "3.10 good requests/s, 412 tokens/s, TTFT p95 380 ms, ITL p95 31 ms"."""
    goodput = f"{measured.score.goodput:.2f}"
    answered = t("{rate} requests/s", rate=goodput)
    if measured.share is not None:
        answered = t("{rate} requests/s within the target", rate=goodput)
    parts: list[str] = [answered, t("{rate} tokens/s", rate=f"{measured.score.rate:.1f}")]
    for name, title in (("ttft", "TTFT"), ("itl", "ITL")):
        if name in measured.latency:
            parts.append(f"{title} p95 {measured.latency[name]['p95']:.0f} ms")
    return joined(parts)


def reason(before: Measured, after: Measured, *, kept: bool, confirmed: bool) -> str:
    """Why the setting now in force was chosen."""
    if not confirmed:
        return t("The best trial was measured again and was not better than the current settings, so these stay.")
    if not kept:
        return t("No other setting was better by more than the noise of a measurement, so the settings stay.")
    one, other = before.score, after.score
    if other.met and not one.met:
        return t("It meets the target, which was missed by {share} % before.", share=f"{one.excess * 100:.0f}")
    if (gain := _gain(one.goodput, other.goodput)) >= 1:
        return t("It answers {gain} % more requests per second ({before} before, {after} now).", gain=f"{gain:.0f}",
                 before=f"{one.goodput:.2f}", after=f"{other.goodput:.2f}")  # fmt: skip
    if not other.met and other.excess < one.excess:
        return t("It comes closer to the target: missed by {after} % instead of {before} %.",
                 after=f"{other.excess * 100:.0f}", before=f"{one.excess * 100:.0f}")  # fmt: skip
    return t("It produces {gain} % more tokens per second ({before} before, {after} now).",
             gain=f"{_gain(one.rate, other.rate):.0f}", before=f"{one.rate:.1f}", after=f"{other.rate:.1f}")


def helps(measured: Measured, clients: int | None) -> list[str]:
    """What would help if no setting meets the target."""
    found: list[str] = []
    missed = set(measured.missed)
    if clients is not None and clients > 1 and measured.share is not None and measured.share > 0:
        users = max(1, int(clients * measured.share))
        found.append(t("fewer users at once: of {clients} about {users} are served within the target", clients=clients,
                       users=users))  # fmt: skip
    elif clients is not None and clients > 1:
        found.append(t("fewer users at once than {clients}", clients=clients))
    if missed & {"ttft", "e2el"}:
        found.append(t("shorter prompts, or prompts with a common prefix, which is computed only once"))
    if missed & {"itl", "tpot", "e2el"}:
        found.append(t("a smaller model, weights in fp8, or a GPU with more memory bandwidth: {command}",
                       command="atoll presets"))
    found.append(t("a less strict target, if users accept it"))
    return found


def _gain(before: float, after: float) -> float:
    return (after / before - 1) * 100 if before > 0 else float("inf") if after > 0 else 0.0
