"""A snapshot in words: cells of tables, each number with its unit, the same for screens and for `atoll top --once`."""

import time
from collections import Counter

from appliance.service.dashboard.snapshot import ActiveRow, GpuRow, ModelRow, Snapshot
from installer.base.i18n import joined, t

STATES = {
    "serving": t("SERVING"), "draining": t("DRAINING"), "starting": t("STARTING"), "stopped": t("STOPPED"),
    "failed": t("FAILED"), "interrupted": t("INTERRUPTED"), "busy": t("BUSY"), "not-installed": t("NOT-INSTALLED"),
    "unknown": t("UNKNOWN"),
}  # fmt: skip
MODEL_HEADS = (t("MODEL"), t("STATE"), t("USERS"), t("WAIT"), t("TOK/S"), t("FIRST"), t("BETWEEN"), "KV", t("PREFIX"))
GPU_HEADS = ("GPU", t("NAME"), t("MEMORY"), t("TEMP"), t("POWER"), "ECC")
ACTIVE_HEADS = (t("REQUEST"), t("KEY"), t("STATE"), t("AGE"), t("PROMPT"), t("ANSWER"), t("MODEL"))
ACTIVE_STATES = {"waiting": t("waiting"), "running": t("running")}
KEY_STATES = {"active": t("active"), "expired": t("expired"), "revoked": t("revoked")}
MOST_ID = 16          # characters of a request's id in a table
NO_TRAFFIC = "-"


def headline(seen: Snapshot) -> str:
    """The service in one line."""
    parts = [STATES[seen.state]]
    if seen.uptime is not None:
        parts.append(t("for {duration}", duration=duration(seen.uptime)))
    if seen.stale and seen.age is not None:
        parts.append(t("figures are {seconds:.0f} s old", seconds=seen.age))
    count = len(seen.alerts)
    parts.append(t("{count} alerts", count=count) if count != 1 else t("1 alert"))
    return joined(parts, "  ")


def model_cells(model: ModelRow) -> tuple[str, ...]:
    """One for each of MODEL_HEADS. Latencies are the 95th percentile of the last minute."""
    state = t("ready") if model.up else model.progress or t("down")
    users = f"{model.running}" if model.slots is None else f"{model.running}/{model.slots}"
    return (
        model.name, state, users, f"{model.waiting}", f"{model.tokens_out:,.0f}", milliseconds(model.ttft_p95),
        milliseconds(model.itl_p95), share(model.kv), share(model.prefix),
    )  # fmt: skip


def gpu_cells(gpu: GpuRow) -> tuple[str, ...]:
    """One for each of GPU_HEADS."""
    memory = NO_TRAFFIC
    if gpu.memory_used is not None and gpu.memory_total:
        memory = f"{gpu.memory_used / 2**30:.1f} / {gpu.memory_total / 2**30:.1f} GiB"
    watts = NO_TRAFFIC
    if gpu.power is not None:
        watts = f"{gpu.power:.0f} W" if gpu.power_limit is None else f"{gpu.power:.0f} / {gpu.power_limit:.0f} W"
    degrees = NO_TRAFFIC if gpu.temperature is None else f"{gpu.temperature} °C"
    return (NO_TRAFFIC if gpu.index is None else str(gpu.index), gpu.name.removeprefix("NVIDIA "), memory, degrees,
            watts, _ecc(gpu))  # fmt: skip


def gpu_line_cells(gpu: GpuRow) -> tuple[str, ...]:
    """The same for a table without heads."""
    index, name, memory, degrees, watts, ecc = gpu_cells(gpu)
    return (f"GPU {index}", name, memory, degrees, watts, joined(["ECC", ecc], " "))


def _ecc(gpu: GpuRow) -> str:
    """Errors since the driver was loaded."""
    if gpu.ecc_uncorrected is None:
        return NO_TRAFFIC
    if gpu.ecc_uncorrected:
        return t("{count} uncorrected", count=gpu.ecc_uncorrected)
    return t("{count} corrected", count=gpu.ecc_corrected) if gpu.ecc_corrected else t("no errors")


def model_details(model: ModelRow) -> list[str]:
    """What the table has no room for."""
    lines: list[str] = [joined([model.name, t("ready") if model.up else model.progress or t("down")], "  ")]
    for title, half, most in ((t("first token"), model.ttft_p50, model.ttft_p95),
                              (t("between tokens"), model.itl_p50, model.itl_p95)):  # fmt: skip
        if most is not None:
            lines.append(t("  {what}: p50 {half}, p95 {most}", what=title, half=milliseconds(half),
                           most=milliseconds(most)))  # fmt: skip
    lines.append(t("  reads {tokens_in:,.0f} tokens/s, writes {tokens_out:,.0f} tokens/s", tokens_in=model.tokens_in,
                   tokens_out=model.tokens_out))  # fmt: skip
    if model.pages:
        lines.append(t("  {used:,} of {pages:,} KV pages in use; {count} preemptions in the last minute",
                       used=model.pages_in_use or 0, pages=model.pages, count=model.preemptions))  # fmt: skip
    if model.state_slots:
        lines.append(t("  {used:,} of {slots:,} state slots in use", used=model.slots_in_use or 0,
                       slots=model.state_slots))  # fmt: skip
    return lines


def active_cells(active: ActiveRow) -> tuple[str, ...]:
    """One for each of ACTIVE_HEADS."""
    given = active.request_id
    name = given if len(given) <= MOST_ID else given[: MOST_ID - 1] + "~"
    state = ACTIVE_STATES.get(active.state, active.state)
    return (name, active.key or NO_TRAFFIC, state, age(active.age_seconds), f"{active.prompt_tokens:,}",
            f"{active.output_tokens:,}", active.model)  # fmt: skip


def key_lines(seen: Snapshot) -> list[str]:
    """Every API key, and how many of the active requests are its own."""
    busy = Counter(row.key for row in seen.active)
    lines: list[str] = []
    for key in seen.keys:
        now = busy[key.name] or busy[key.id]
        lines.append(t("API key {id}  {name}  {state}  active requests: {count}", id=key.id, name=key.name,
                       state=KEY_STATES.get(key.state, key.state), count=now))  # fmt: skip
    return lines


def active_line(seen: Snapshot) -> str:
    """How many there are, in one line; empty where it cannot be asked."""
    if seen.active_total is None:
        return ""
    if not seen.active_total:
        return t("No active requests.")
    waiting = sum(row.state == "waiting" for row in seen.active)
    if seen.active_total > len(seen.active):
        return t("Active requests: {total:,}. The oldest {shown:,}, {waiting:,} of them waiting:",
                 total=seen.active_total, shown=len(seen.active), waiting=waiting)  # fmt: skip
    return t("Active requests: {total:,}, {waiting:,} of them waiting.", total=seen.active_total, waiting=waiting)


def age(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else duration(seconds)


def requests_line(seen: Snapshot) -> str:
    if not seen.requests:
        return t("No requests in the last minute.")
    parts = [f"{status} {count:,.0f}" for status, count in sorted(seen.requests.items())]
    return t("Requests in the last minute: {counts}", counts=joined(parts))


def milliseconds(value: float | None) -> str:
    if value is None:
        return NO_TRAFFIC
    return f"{value:.0f} ms" if value < 1000 else f"{value / 1000:.2f} s"


def share(value: float | None) -> str:
    return NO_TRAFFIC if value is None else f"{value:.0%}"


def duration(seconds: float) -> str:
    days, rest = divmod(int(seconds), 86_400)
    clock = time.strftime("%H:%M:%S", time.gmtime(rest))
    return t("{days} d {clock}", days=days, clock=clock) if days else clock
