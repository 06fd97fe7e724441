"""The last minutes of a few figures, for charts.

Points from before the dashboard opened come from the series on the disk. Each later snapshot adds one point, so that
nothing is computed twice.
"""

import contextlib
from collections import deque
from collections.abc import Sequence

from appliance.series import Series, SeriesError, Window, sampler
from appliance.service.dashboard.snapshot import ModelRow
from appliance.service.pilot.records import series_of
from installer.base.layout import Layout

SECONDS = 900.0
TOKENS, FIRST, BETWEEN, WAITING, KV = "tokens_out", "ttft_p95", "itl_p95", "waiting", "kv"
_MOST_POINTS = 2000
_QUANTILES = ((FIRST, "time_to_first_token_seconds"), (BETWEEN, "inter_token_latency_seconds"))

Points = tuple[tuple[float, float], ...]


class History:
    """One line for all models: their sum or, for latencies and the KV cache, the highest."""

    def __init__(self) -> None:
        self._points: dict[str, deque[tuple[float, float]]] = {
            name: deque(maxlen=_MOST_POINTS) for name in (TOKENS, FIRST, BETWEEN, WAITING, KV)}

    def read(self, layout: Layout, now: float) -> None:
        """From the sampler's series, or else the pilot's."""
        for file in (sampler.file_of(layout), series_of(layout)):
            with contextlib.suppress(SeriesError, OSError), Series(file) as series:
                self._add_rows(series.window(now - SECONDS, now))
            if self._points[TOKENS]:
                return

    def _add_rows(self, window: Window) -> None:
        self._points[TOKENS].extend(window.rates("generation_tokens"))
        self._points[WAITING].extend(window.points("num_requests_waiting"))
        for before, row in zip([window.before, *window.rows], window.rows, strict=False):
            if before is None or row.span <= 0:
                continue
            alone = Window([row], before, before.at, row.at)
            for name, histogram in _QUANTILES:
                if (waited := alone.milliseconds(histogram, 0.95)) is not None:
                    self._points[name].append((row.at, waited))
            if (kv := alone.most("kv_cache_usage_perc")) is not None:
                self._points[KV].append((row.at, kv))

    def add(self, at: float, models: Sequence[ModelRow]) -> None:
        """The figures of one snapshot."""
        self._points[TOKENS].append((at, sum(model.tokens_out for model in models)))
        self._points[WAITING].append((at, float(sum(model.waiting for model in models))))
        for name, values in ((FIRST, [model.ttft_p95 for model in models]), (KV, [model.kv for model in models]),
                             (BETWEEN, [model.itl_p95 for model in models])):  # fmt: skip
            if known := [value for value in values if value is not None]:
                self._points[name].append((at, max(known)))

    def since(self, start: float) -> dict[str, Points]:
        return {name: tuple(point for point in points if point[0] > start) for name, points in self._points.items()}
