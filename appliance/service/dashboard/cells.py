"""A snapshot in words: cells of tables, each number with its unit, the same for screens and for `atoll top --once`."""

import time

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
    ecc = NO_TRAFFIC
    if gpu.ecc_uncorrected is not None:
        ecc = t("{corrected} corrected, {uncorrected} not", corrected=gpu.ecc_corrected or 0,
                uncorrected=gpu.ecc_uncorrected)  # fmt: skip
    watts = NO_TRAFFIC
    if gpu.power is not None:
        watts = f"{gpu.power:.0f} W" if gpu.power_limit is None else f"{gpu.power:.0f} / {gpu.power_limit:.0f} W"
    degrees = NO_TRAFFIC if gpu.temperature is None else f"{gpu.temperature} °C"
    return (NO_TRAFFIC if gpu.index is None else str(gpu.index), gpu.name, memory, degrees, watts, ecc)


def model_details(model: ModelRow) -> list[str]:
    """What the table has no room for."""
    lines: list[str] = []
    lines.append(t("{model}: first token {first_half} at the median, {first} at the 95th percentile; between tokens "
                   "{between_half} and {between}", model=model.name, first_half=milliseconds(model.ttft_p50),
                   first=milliseconds(model.ttft_p95), between_half=milliseconds(model.itl_p50),
                   between=milliseconds(model.itl_p95)))  # fmt: skip
    lines.append(t("{model}: reads {tokens_in:,.0f} tokens/s, writes {tokens_out:,.0f} tokens/s", model=model.name,
                   tokens_in=model.tokens_in, tokens_out=model.tokens_out))  # fmt: skip
    if model.pages:
        lines.append(t("{model}: {used:,} of {pages:,} KV pages in use, {count} requests pushed back in a minute",
                       model=model.name, used=model.pages_in_use or 0, pages=model.pages,
                       count=model.preemptions))  # fmt: skip
    return lines


def active_cells(active: ActiveRow) -> tuple[str, ...]:
    """One for each of ACTIVE_HEADS."""
    given = active.request_id
    name = given if len(given) <= MOST_ID else given[: MOST_ID - 1] + "~"
    state = ACTIVE_STATES.get(active.state, active.state)
    return (name, active.key or NO_TRAFFIC, state, age(active.age_seconds), f"{active.prompt_tokens:,}",
            f"{active.output_tokens:,}", active.model)  # fmt: skip


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
