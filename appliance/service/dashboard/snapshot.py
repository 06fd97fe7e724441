"""The state of the service at one moment. Rates are of the last seconds, latencies of the last minute, from
/metrics."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from installer.access import api_keys

if TYPE_CHECKING:
    from appliance.series import Window  # it loads a parser, which `atoll status` does not need

_TTFT, _ITL = "time_to_first_token_seconds", "inter_token_latency_seconds"


@dataclass(frozen=True, slots=True)
class ModelRow:
    """One model. Tokens a second; latencies in milliseconds, None without traffic; `kv` and `prefix` are shares."""

    name: str
    up: bool
    progress: str = ""             # of one that is loading
    running: int = 0
    waiting: int = 0
    slots: int | None = None       # requests that may run at once
    tokens_out: float = 0.0
    tokens_in: float = 0.0
    ttft_p50: float | None = None
    ttft_p95: float | None = None
    itl_p50: float | None = None
    itl_p95: float | None = None
    kv: float | None = None
    pages_in_use: int | None = None
    pages: int | None = None
    slots_in_use: int | None = None   # of recurrent states; None for a model that has none
    state_slots: int | None = None
    prefix: float | None = None
    preemptions: int = 0


@dataclass(frozen=True, slots=True)
class GpuRow:
    """One GPU, as its driver reports it: bytes, °C, watts, counts since the driver was loaded."""

    index: int | None
    name: str
    memory_used: int | None
    memory_total: int | None
    temperature: int | None
    power: float | None
    power_limit: float | None
    ecc_corrected: int | None
    ecc_uncorrected: int | None


@dataclass(frozen=True, slots=True)
class KeyRow:
    """An API key; never its text."""

    id: str
    name: str
    state: str


@dataclass(frozen=True, slots=True)
class ActiveRow:
    """A sequence in progress: ids and numbers, never prompts or answers. `key`: the key's name, or its id;
    `request_id`: the `X-Request-Id` of its HTTP exchange."""

    id: str
    request_id: str
    model: str
    key: str
    state: str
    age_seconds: float
    prompt_tokens: int
    output_tokens: int
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Alert:
    """Something to act on. `next` is a command or a sentence."""

    id: str
    severity: Literal["error", "warning"]
    what: str
    next: str = ""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """`age`: seconds since /metrics answered, None if it never did; `why_not`: why it cannot be asked at all."""

    at: float
    state: str
    uptime: float | None
    release: str
    endpoint: str
    models: tuple[ModelRow, ...] = ()
    gpus: tuple[GpuRow, ...] = ()
    alerts: tuple[Alert, ...] = ()
    keys: tuple[KeyRow, ...] = ()
    requests: Mapping[str, float] = field(default_factory=dict)   # of the last minute, by status class: 2xx, 4xx, 5xx
    active: tuple[ActiveRow, ...] = ()                            # oldest first
    active_total: int | None = None                               # also of those left out; None: it cannot be asked
    age: float | None = None
    stale: bool = False
    why_not: str = ""
    # The last 15 minutes as (time, value): tokens_out, ttft_p95, itl_p95, waiting, kv.
    history: Mapping[str, tuple[tuple[float, float], ...]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def model_row(name: str, now: "Window", minute: "Window", engine: Mapping[str, Any]) -> ModelRow:
    """`now` covers the last seconds, `minute` the last minute; `engine` is what the engine reports."""
    queries = minute.increase("prefix_cache_queries", model_name=name)
    in_use = _count(now.last("atoll:kv_pages_in_use", model_name=name))  # of all its engines
    pages = _count(now.last("atoll:kv_pages_total", model_name=name))
    states = _count(now.last("atoll:state_slots_total", model_name=name)) or None
    return ModelRow(
        name=name,
        up=bool(now.last("atoll:engine_up", model_name=name)),
        progress=str(engine.get("progress") or ""),
        running=_count(now.last("num_requests_running", model_name=name)) or 0,
        waiting=_count(now.last("num_requests_waiting", model_name=name)) or 0,
        slots=engine.get("max_num_seqs"),
        tokens_out=now.rate("generation_tokens", model_name=name),
        tokens_in=now.rate("prompt_tokens", model_name=name),
        ttft_p50=minute.milliseconds(_TTFT, 0.5, model_name=name),
        ttft_p95=minute.milliseconds(_TTFT, 0.95, model_name=name),
        itl_p50=minute.milliseconds(_ITL, 0.5, model_name=name),
        itl_p95=minute.milliseconds(_ITL, 0.95, model_name=name),
        kv=in_use / pages if in_use is not None and pages else now.last("kv_cache_usage_perc", model_name=name),
        pages_in_use=in_use,
        pages=pages,
        slots_in_use=_count(now.last("atoll:state_slots_in_use", model_name=name)) if states else None,
        state_slots=states,
        prefix=minute.increase("prefix_cache_hits", model_name=name) / queries if queries else None,
        preemptions=int(minute.increase("num_preemptions", model_name=name)),
    )


def gpu_rows(facts: Mapping[str, Any] | None) -> tuple[GpuRow, ...]:
    """From the GPUs of `installer.operate.status`."""
    return tuple(
        GpuRow(gpu.get("index"), str(gpu.get("name") or gpu.get("uuid") or "?"), gpu.get("memory_used"),
               gpu.get("memory_total"), gpu.get("temperature"), gpu.get("power_draw"), gpu.get("power_limit"),
               gpu.get("ecc_corrected"), gpu.get("ecc_uncorrected"))
        for gpu in (facts or {}).get("gpus", ())
    )  # fmt: skip


def key_rows(keys: Sequence[Mapping[str, Any]]) -> tuple[KeyRow, ...]:
    """From the keys of `installer.operate.status`."""
    return tuple(KeyRow(str(key["id"]), api_keys.shown_name(dict(key)), str(key.get("state") or "")) for key in keys)


def _count(value: float | None) -> int | None:
    return None if value is None else int(value)
