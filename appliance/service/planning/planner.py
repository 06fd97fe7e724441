"""What fits on a GPU: the engine's own memory plan, for any card by name, without a GPU and without weights.

Four settings share one budget: context, users, precision of the KV cache, and the engine's share of the GPU. `what_if`
changes one and reads the others; `fitting` says what would fit if the requested plan does not.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from appliance.service.presets.catalogue import GpuModel, catalogue
from engine.config import EngineConfig
from engine.errors import AtollError, OutOfMemoryPlanError
from engine.plan import bytes_per_token, full_requests, native_context, plan_engine, weight_bytes
from installer.base.errors import InstallError, usage_error
from installer.base.i18n import t

_STEP = 1024  # contexts are suggested in multiples of this
MOST_TOKENS, MOST_USERS = 16 << 20, 100_000


@dataclass(frozen=True)
class Knobs:
    """The request for a plan. `context` None: the longest that fits. `users`: requests of `context` tokens at once;
    None: as many as fit. `sequences`: how many may run at once; None: the engine's choice."""

    context: int | None = None
    users: int | None = None
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    gpu_memory_utilization: float = 0.9
    sequences: int | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "max_model_len": self.context, "users": self.users, "quantization": self.quantization,
            "kv_cache_dtype": self.kv_cache_dtype, "gpu_memory_utilization": self.gpu_memory_utilization,
            "max_num_seqs": self.sequences,
        }  # fmt: skip


@dataclass(frozen=True)
class Planned:
    """A plan that fits: `users` requests of `context` tokens, all of them full, at the same time."""

    knobs: Knobs
    context: int
    users: int
    numbers: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        return {"context": self.context, "users": self.users, "knobs": self.knobs.to_json(), "plan": self.numbers}


def changed(knobs: Knobs, knob: str, value: Any) -> Knobs:
    """With one setting changed. If users were given, the number of sequences follows from them."""
    return replace(knobs, **{knob: value}, **({"sequences": None} if knob == "users" else {}))


def check(knobs: Knobs) -> None:
    """Refuse numbers that make no sense. Raises InstallError."""
    for flag, value, most in (("--context", knobs.context, MOST_TOKENS), ("--users", knobs.users, MOST_USERS)):
        if value is not None and not 1 <= value <= most:
            raise usage_error(t("{flag} {value} is out of range.", flag=flag, value=value),
                              t("Give a whole number from 1 to {most}.", most=f"{most:,}"))  # fmt: skip
    if not 0 < knobs.gpu_memory_utilization <= 1:
        raise usage_error(
            t("{flag} {value} is out of range.", flag="--gpu-memory-utilization", value=knobs.gpu_memory_utilization),
            t("Give a share above 0 and at most 1, such as 0.9."),
        )


def plan(model: Path, card: GpuModel, knobs: Knobs) -> Planned | None:
    """None if it does not fit. Raises InstallError for what no amount of memory would solve."""
    check(knobs)
    try:
        _known(model, knobs)
        found = plan_engine(_config(model, knobs), card.planned)
    except OutOfMemoryPlanError:
        return None
    except AtollError as error:
        raise _told(error) from error
    users = full_requests(found, found.max_model_len)
    if users < max(1, knobs.users or 1):
        return None
    return Planned(knobs, found.max_model_len, users, found.numbers())


def refusal(model: Path, card: GpuModel, knobs: Knobs) -> str:
    """Why `plan` found nothing, in the engine's words if it has any."""
    try:
        found = plan_engine(_config(model, replace(knobs, users=None, sequences=knobs.users)), card.planned)
    except OutOfMemoryPlanError as error:
        return error.message
    fit = full_requests(found, found.max_model_len)
    return t("{users} requests of {context} tokens do not fit: {fit} do.", users=f"{knobs.users:,}",
             context=f"{found.max_model_len:,}", fit=f"{fit:,}")  # fmt: skip


def what_if(model: Path, card: GpuModel, base: Planned) -> Iterator[tuple[str, str, Planned | None]]:
    """(setting, change, what then fits): each of the four settings changed alone.

    Users follow from the rest, and so does the context unless it was given.
    """
    free = replace(base.knobs, users=None, sequences=None)
    knobs = replace(free, context=base.context)
    for context in (base.context // 2, base.context * 2):
        if _STEP <= context <= native_context(model):
            changed = t("context {context}", context=f"{context:,}")
            yield "context", changed, plan(model, card, replace(knobs, context=context))
    for users in (base.users * 2, base.users * 4):
        yield "users", t("{users} at once", users=f"{users:,}"), longest(model, card, knobs, users)
    if knobs.kv_cache_dtype == "auto":
        yield "kv_cache_dtype", t("KV cache in fp8"), plan(model, card, replace(free, kv_cache_dtype="fp8"))
    else:
        yield "kv_cache_dtype", t("KV cache in 16 bits"), plan(model, card, replace(free, kv_cache_dtype="auto"))
    for share in (0.85, 0.95):
        if abs(share - knobs.gpu_memory_utilization) > 0.001:
            changed = t("GPU memory share {share}", share=share)
            yield "gpu_memory_utilization", changed, plan(model, card, replace(free, gpu_memory_utilization=share))


def smaller_weights(model: Path, card: GpuModel, asked: Knobs) -> Knobs | None:
    """Weights in fp8, if they make the request fit, or make anything fit at all."""
    fp8 = replace(asked, quantization="fp8")
    if plan(model, card, fp8) or (not plan(model, card, _open(asked)) and plan(model, card, _open(fp8))):
        return fp8
    return None


def fitting(model: Path, card: GpuModel, asked: Knobs) -> Iterator[tuple[str, str, str, Planned]]:
    """(kind, change, GPU, what then fits): single changes that make the request fit, the smallest first."""
    if asked.users is not None and (found := plan(model, card, replace(asked, users=None, sequences=None))):
        yield "users", t("fewer at once"), card.title, found
    if asked.context is not None and (found := longest(model, card, asked, asked.users or 1)):
        yield "context", t("a shorter context"), card.title, found
    ways = [(t("KV cache in fp8"), replace(asked, kv_cache_dtype="fp8"))]
    ways += [(t("weights in fp8"), replace(asked, quantization="fp8"))]
    ways += [(t("weights and KV cache in fp8"), replace(asked, quantization="fp8", kv_cache_dtype="fp8"))]
    for changed, knobs in ways:
        if knobs != asked and (found := plan(model, card, knobs)):
            yield "precision", changed, card.title, found
            break
    for other in sorted(catalogue().cards.values(), key=lambda each: each.memory_gib):
        if other.memory_gib > card.memory_gib and (found := plan(model, other, asked)):
            yield "gpu", t("another GPU"), other.title, found
            break


def _open(knobs: Knobs) -> Knobs:
    return replace(knobs, context=None, users=None, sequences=None)


def stream_bound(model: Path, card: GpuModel, knobs: Knobs) -> float | None:
    """Upper bound of one stream's tokens per second: the data sheet's bandwidth over the bytes that a token must move.

    An estimate; real engines stay below it.
    """
    if card.tb_per_s is None:
        return None
    return card.tb_per_s * 1e12 / bytes_per_token(_config(model, knobs))


def weights_of(model: Path, quantization: str | None) -> tuple[int, int]:
    """Bytes (on the GPU, in host memory)."""
    try:
        return weight_bytes(_config(model, Knobs(quantization=quantization)))
    except AtollError as error:
        raise _told(error) from error


def longest(model: Path, card: GpuModel, knobs: Knobs, users: int) -> Planned | None:
    """The longest context that `users` requests can have at once."""
    if users > MOST_USERS:
        return None
    knobs = replace(knobs, users=users, sequences=users)
    low, high = 0, native_context(model) // _STEP
    best = None
    while low < high:
        middle = (low + high + 1) // 2
        found = plan(model, card, replace(knobs, context=middle * _STEP))
        if found:
            low, best = middle, found
        else:
            high = middle - 1
    return best


def _config(model: Path, knobs: Knobs) -> EngineConfig:
    sequences = knobs.sequences if knobs.sequences is not None else knobs.users
    return EngineConfig(
        model, max_model_len=knobs.context or "auto", max_num_seqs=sequences, quantization=knobs.quantization,
        kv_cache_dtype=knobs.kv_cache_dtype, gpu_memory_utilization=knobs.gpu_memory_utilization,
    )  # fmt: skip


def _known(model: Path, knobs: Knobs) -> None:
    limit = native_context(model)
    if knobs.context is not None and knobs.context > limit:
        raise usage_error(
            t("{flag} {value} is longer than the model's {limit} tokens.", flag="--context",
              value=f"{knobs.context:,}", limit=f"{limit:,}"), t("Ask for {limit} or less.", limit=f"{limit:,}"),
        )  # fmt: skip


def _told(error: AtollError) -> InstallError:
    return usage_error(error.message, error.hint)
