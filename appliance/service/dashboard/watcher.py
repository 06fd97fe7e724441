"""Polls the service: /metrics with an API key of its own, the status less often.

The key has only the scope `metrics` and lives for an hour. The watcher renews it in time and removes it when it ends;
the key of a killed watcher expires.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any

from appliance.engines import engine_facts
from appliance.load.target import Target
from appliance.series import Window
from appliance.series.recorder import scraped
from appliance.series.store import Row
from appliance.service.dashboard import history
from appliance.service.dashboard.active import active_requests
from appliance.service.dashboard.alerts import alerts
from appliance.service.dashboard.key import KEY
from appliance.service.dashboard.snapshot import ModelRow, Snapshot, gpu_rows, key_rows, model_row
from installer.access import api_keys
from installer.base.errors import ExitCode, InstallError
from installer.base.i18n import t
from installer.base.layout import Layout
from installer.operate.status import status
from installer.release import config
from installer.service.reload import reload_gateway

KEY_SECONDS = 3600.0
RENEWED = 0.8             # of that time
STATUS_SECONDS = 5.0      # between two looks at units, GPUs, disk and certificates
RATE_SECONDS = 15.0       # that a rate covers
LATENCY_SECONDS = 60.0


class Watcher:
    """Use as a context manager, from one thread. `interval`: seconds between two looks, for what counts as stale."""

    def __init__(self, layout: Layout, interval: float = 2.0, *, clock: Callable[[], float] = time.time) -> None:
        self.layout, self.interval, self._clock = layout, interval, clock
        self._key: api_keys.NewKey | None = None
        self._key_at = 0.0
        self._rows: deque[Row] = deque(maxlen=4 * int(LATENCY_SECONDS / interval) + 2)
        self._target: Target | None = None
        self._facts: dict[str, Any] = {}
        self._engines: dict[str, dict[str, Any]] = {}
        self._facts_at = 0.0
        self.history = history.History()
        self._why_not = ""

    def __enter__(self) -> "Watcher":
        self.history.read(self.layout, self._clock())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._drop_key()

    def look(self) -> Snapshot:
        """What there is to see now; no error for a service that is down, or not there. Raises InstallError where the
        installation cannot be read."""
        now = self._clock()
        if now - self._facts_at >= STATUS_SECONDS:
            try:
                self._facts = status(self.layout)
            except InstallError as error:
                if error.exit_code != ExitCode.USAGE:
                    raise
                return _nothing_installed(now)
            names = [str(model["instance"]) for model in self._facts["models"]]
            self._engines, self._facts_at = engine_facts(self.layout, names), now
        facts = self._facts
        if facts["models"] and now - self._key_at > RENEWED * KEY_SECONDS:
            self._open(now)
        fresh = False
        if self._target is not None and (values := asyncio.run(scraped(self._target))) is not None:
            fresh = bool(self._rows)
            self._rows.append(Row(now, now - self._rows[-1].at if fresh else 0.0, values))
        age = now - self._rows[-1].at if self._rows else None
        stale = self._target is not None and (age is None or age > 2 * self.interval)
        recent, minute = self._window(now, RATE_SECONDS), self._window(now, LATENCY_SECONDS)
        models = tuple(model_row(str(model["instance"]), recent, minute, self._engines.get(model["instance"], {}))
                       for model in facts["models"])  # fmt: skip
        if facts["state"] == "stopped":  # figures from before would pass for its state
            models = tuple(ModelRow(model.name, up=False) for model in models)
        elif fresh:
            self.history.add(now, models)
        gpus, requests = gpu_rows(facts["gpu"]), minute.requests_by_status()
        keys = [key for key in facts["keys"] if key.get("name") != KEY]
        active, total = active_requests(self.layout, facts["keys"])
        return Snapshot(
            at=now, state=str(facts["state"]), uptime=facts["service"]["uptime_s"],
            release=str(facts["release"]["committed"] or ""), endpoint=str(facts["endpoint"] or ""), models=models,
            gpus=gpus, alerts=alerts(facts, models, gpus, requests, stale), keys=key_rows(keys), requests=requests,
            active=active, active_total=total, age=age, stale=stale, why_not=self._why_not,
            history=self.history.since(now - history.SECONDS),
        )  # fmt: skip

    def _open(self, now: float) -> None:
        """Make the key. An operator without the right to make one is told so, and sees what needs no key."""
        self._key_at = now
        try:
            self._drop_key()
            usable = {entry["id"] for entry in api_keys.usable(self.layout.api_keys)}
            ended = {str(entry["id"]) for entry in api_keys.read(self.layout.api_keys)
                     if entry.get("name") == KEY and entry["id"] not in usable}  # fmt: skip
            if ended:
                api_keys.remove(self.layout.api_keys, ended)
            self._key = api_keys.add(self.layout.api_keys, KEY, lifetime=KEY_SECONDS, scopes=("metrics",))
            reload_gateway(self.layout)
            endpoint = config.standing(self.layout)
        except (InstallError, OSError) as error:
            self._target = None
            self._why_not = error.message if isinstance(error, InstallError) else t(
                "Only root sees the figures of this service: sudo atoll top")  # fmt: skip
        else:
            self._why_not = ""
            self._target = Target(endpoint.url, key=self._key.text, pinned=endpoint.certificate)

    def _drop_key(self) -> None:
        if self._key is not None:
            with contextlib.suppress(InstallError, OSError):
                api_keys.remove(self.layout.api_keys, {self._key.id})
                reload_gateway(self.layout)
            self._key = None

    def _window(self, now: float, seconds: float) -> Window:
        rows = [row for row in self._rows if row.at > now - seconds]
        older = [row for row in self._rows if row.at <= now - seconds]
        return Window(rows, older[-1] if older else None, now - seconds, now)


def _nothing_installed(now: float) -> Snapshot:
    return Snapshot(at=now, state="not-installed", uptime=None, release="", endpoint="")
