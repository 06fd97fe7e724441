"""Stability: the same load for longer, while memory, file descriptors and pages are watched for leaks."""

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import psutil

from appliance.load.generator import Load
from appliance.load.profile import find_profile
from appliance.load.result import LoadResult
from appliance.service.findings import Finding, made
from appliance.service.verification.api import Api
from appliance.service.verification.context import Verifying, not_checked
from appliance.service.verification.detectors import growth
from appliance.service.verification.performance import load_of
from appliance.service.verification.subject import Subject
from installer.base.i18n import t

_SAMPLES = 240             # at most, however long the soak test is
_LEAST_SECONDS = 0.5       # between two samples
_GROWN_BYTES = 64 << 20    # of memory: allocator caches fill up to about this
_GROWN_SHARE = 0.05
_GROWN_FILES = 16
_IDLE_SECONDS = 30.0       # after the load, until the last pages are released


@dataclass
class Series:
    """What the service held, sample by sample: seconds, bytes of memory, open files, share of pages in use (0 to 1)."""

    at: list[float] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)
    files: list[float] = field(default_factory=list)
    pages: list[float] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {"at": [round(value, 1) for value in self.at], "memory": self.memory, "files": self.files,
                "pages": self.pages}  # fmt: skip


async def run(work: Verifying) -> list[Finding]:
    seconds = work.plan.soak_seconds
    if not seconds:
        return [not_checked("soak", t("Soak"), t("its duration is 0"))]
    subject, model = work.subject, work.subject.models[0]
    profile = find_profile(work.plan.profile)
    load = load_of(subject.of(model), profile, work.plan, work.told, t("Soak"), seconds=seconds,
                   numbers=work.numbers)  # fmt: skip
    series, before = Series(), subject.pids()
    async with Api(subject.of(model), model.name) as api:
        idle = await _pages(api)
        result = await _watched(load, subject, api, series, seconds)
        pages = await _settled(api, idle)
    after = subject.pids()
    work.data["soak"] = {"result": result.to_json(), "series": series.to_json(), "seconds": seconds}
    found = [_answers(result, work.plan.targets.error_rate)]
    found.append(_processes(before, after))
    found += judged(series, local=subject.layout is not None)
    found.append(made(
        "pages", "info" if pages is not None and pages <= (idle or 0.0) + 1e-9 else "block",
        pages is not None and pages <= (idle or 0.0) + 1e-9, t("Pages given back"),
        observed=t("/metrics cannot be read") if pages is None else t("{share} of the KV cache in use when idle",
                                                                      share=f"{pages:.2%}"),
        required=t("as before the load: {share}", share=f"{idle or 0:.2%}"),
        why=t("lost pages leave room for fewer and fewer users"),
        fix=t("Restart the service, and keep the report for support: {command}", command="atoll restart"),
    ))  # fmt: skip
    return found


async def _watched(load: Load, subject: Subject, api: Api, series: Series, seconds: float) -> LoadResult:
    task = asyncio.create_task(load.run())
    begun, every = time.monotonic(), max(_LEAST_SECONDS, seconds / _SAMPLES)
    try:
        while not task.done():
            await asyncio.wait({task}, timeout=every)
            if time.monotonic() - begun <= seconds:  # the end of the load says nothing about growth
                await _sample(subject, api, series, time.monotonic() - begun)
        return task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _sample(subject: Subject, api: Api, series: Series, at: float) -> None:
    memory = files = 0
    for pid in subject.pids():
        try:
            process = psutil.Process(pid)
            memory += process.memory_info().rss
            files += process.num_fds()
        except (psutil.Error, OSError):
            continue  # it has ended, which is judged separately
    series.at.append(at)
    series.memory.append(float(memory))
    series.files.append(float(files))
    series.pages.append(await _pages(api) or 0.0)


async def _pages(api: Api) -> float | None:
    try:
        return (await api.metrics()).get("vllm:kv_cache_usage_perc")
    except Exception:
        return None  # the endpoint may be down at this moment: the load counts that


async def _settled(api: Api, idle: float | None) -> float | None:
    """Pages in use once nothing runs any more, or when the time is up."""
    end = time.monotonic() + _IDLE_SECONDS
    pages = await _pages(api)
    while (pages is None or pages > (idle or 0.0) + 1e-9) and time.monotonic() < end:
        await asyncio.sleep(0.5)
        pages = await _pages(api)
    return pages


def _answers(result: LoadResult, allowed: float) -> Finding:
    share = result.failed / result.sent if result.sent else 1.0
    ok = share <= allowed and result.sent > 0
    kinds = ", ".join(f"{kind} {count}" for kind, count in result.error_kinds.items())
    return made(
        "soak", "info" if ok else "block", ok, t("Soak"),
        observed=t("{sent} requests in {seconds} s, {failed} failed", sent=result.sent, failed=result.failed,
                   seconds=f"{result.duration:.0f}"),
        required=t("at most {share}", share=f"{allowed:.1%}"), why=t("a service must hold out for longer than a test"),
        evidence=kinds, fix="" if ok else t("Read why: {command}", command="atoll logs"),
    )  # fmt: skip


def _processes(before: frozenset[int], after: frozenset[int]) -> Finding:
    gone = before - after
    return made(
        "processes", "info" if not gone else "block", not gone, t("Processes"),
        observed=t("{count} processes ended during the load", count=len(gone)) if gone
        else t("all {count} are still running", count=len(after)),
        why=t("a process that ends under load also ends in production"),
        fix="" if not gone else t("Read why: {command}", command="atoll logs"),
    )  # fmt: skip


def judged(series: Series, *, local: bool) -> list[Finding]:
    """What the series say about leaks."""
    if not local:
        return [not_checked(id, title, t("the processes are on another machine"))
                for id, title in (("memory", t("Memory")), ("descriptors", t("Open files")))]  # fmt: skip
    found = []
    memory, files = growth(series.memory), growth(series.files)
    if memory is None or files is None:
        why = t("the soak test was too short for a series")
        return [not_checked("memory", t("Memory"), why), not_checked("descriptors", t("Open files"), why)]
    leak = memory.steady and memory.grown > max(_GROWN_BYTES, _GROWN_SHARE * memory.before)
    found.append(made(
        "memory", "block" if leak else "info", not leak, t("Memory"),
        observed=t("{before} MiB, then {after} MiB", before=f"{memory.before / (1 << 20):,.0f}",
                   after=f"{memory.after / (1 << 20):,.0f}"),
        required=t("no steady growth"), why=t("memory that grows without limit ends the service one day"),
        fix="" if not leak else t("Run a longer soak test to see whether the growth ends, and keep the report for "
                                  "support."),
    ))  # fmt: skip
    leak = files.steady and files.grown > _GROWN_FILES
    found.append(made(
        "descriptors", "block" if leak else "info", not leak, t("Open files"),
        observed=t("{before}, then {after}", before=f"{files.before:.0f}", after=f"{files.after:.0f}"),
        required=t("no steady growth"), why=t("a process without free file descriptors accepts no more clients"),
        fix="" if not leak else t("Run a longer soak test to see whether the growth ends, and keep the report for "
                                  "support."),
    ))  # fmt: skip
    return found
