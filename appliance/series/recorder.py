"""Takes the samples: one request to /metrics and, less often, the GPUs' facts.

The process that watches a pilot asks the endpoint, with an API key of the scope `metrics`; the sampler asks a Unix
socket. The service itself gets no file to write to.
"""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from appliance.load.http_client import HttpClient, HttpError
from appliance.load.target import Target
from appliance.series.names import MOST_PAGE, UP, parsed
from appliance.series.store import SeriesError, Store, wall_clock
from installer.gpu import nvml
from installer.gpu.facts import GpuFacts
from installer.service.local_socket import ask

_SECONDS = 5.0         # timeout of /metrics
_GPU_EVERY = 10.0      # seconds; a probe is a separate process, about 50 ms


async def scraped(target: Target) -> dict[str, float] | None:
    """The series that are kept of the target's /metrics; None where it does not answer."""
    try:
        async with HttpClient(target) as client:
            status, body = await client.get(target.root + "/metrics", timeout=_SECONDS)
        if status != 200 or len(body) > MOST_PAGE:
            return None
        return parsed(body.decode(errors="replace"))
    except (HttpError, OSError, ValueError, KeyError, TimeoutError):
        return None


class Recorder:
    """`lost`: number of samples that could not be kept; `why`: the reason of the last one."""

    def __init__(
        self, source: Target | Path, store: Store, *, gpus: Callable[[], GpuFacts] | None = None,
        gpu_every: float = _GPU_EVERY,
    ) -> None:  # fmt: skip
        self._source, self._store, self._gpu_every = source, store, gpu_every
        self._gpus = gpus or (lambda: nvml.query(_SECONDS))
        self._now = wall_clock()
        self._gpu: dict[str, float] = {}
        self._gpu_at = -gpu_every
        self._has_gpus = True
        self.lost, self.why = 0, ""
        self.up = False

    def sample(self) -> float | None:
        """Take one sample. Returns its time, or None if it could not be kept. A service that is down is a sample
        too."""
        values = _by_socket(self._source) if isinstance(self._source, Path) else asyncio.run(scraped(self._source))
        self.up = values is not None
        row = {UP: float(self.up), **(values or {}), **self._gpu_facts()}
        try:
            return self._store.add(self._now(), row)
        except SeriesError as error:
            self.lost, self.why = self.lost + 1, str(error)
            return None

    def _gpu_facts(self) -> dict[str, float]:
        now = time.monotonic()
        if self._has_gpus and now - self._gpu_at >= self._gpu_every:
            facts = self._gpus()
            self._gpu_at, self._gpu = now, {}
            self._has_gpus = bool(facts.gpus)  # a machine without a GPU is asked only once
            for number, gpu in enumerate(facts.gpus):
                label = f'{{gpu="{gpu.index if gpu.index is not None else number}"}}'
                if gpu.temperature is not None:
                    self._gpu[f"atoll:gpu_temperature{label}"] = float(gpu.temperature)
                if gpu.memory_used is not None:
                    self._gpu[f"atoll:gpu_memory_used{label}"] = float(gpu.memory_used)
                if gpu.power_draw is not None:
                    self._gpu[f"atoll:gpu_power{label}"] = gpu.power_draw
        return self._gpu


def _by_socket(path: Path) -> dict[str, float] | None:
    """As `scraped`, over the gateway's Unix socket."""
    body = ask(path, "/metrics", seconds=_SECONDS, most=MOST_PAGE)
    try:
        return parsed(body.decode(errors="replace")) if body is not None else None
    except (ValueError, KeyError):
        return None
