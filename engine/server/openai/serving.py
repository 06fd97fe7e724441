"""What the gateway serves: models with their engines; and the state that all requests share."""

import asyncio
import hashlib
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import Any, TypeVar

from engine.config import EngineConfig
from engine.core.request import Pooling
from engine.server.access.auth import KeyFile
from engine.server.access.caller import Caller
from engine.server.access.key_rates import Rates
from engine.server.http.errors import ApiError, invalid, overloaded, shortened
from engine.server.http.expected_wait import SAMPLE_SECONDS, ExpectedWait
from engine.server.http.limits import Limits
from engine.server.ipc.client import EngineClient
from engine.server.ipc.messages import EngineInfo
from engine.server.ipc.replicas import Replicas
from engine.server.observe.active import ActiveRequests
from engine.server.observe.metrics import Metrics
from engine.server.openai.request.sampling import sampling_defaults
from engine.text.parsers.registry import OutputFormat, output_format
from engine.text.tokenizer import TextTokenizer

T = TypeVar("T")
MOST_RETRY_SECONDS = 60  # OpenAI's clients ignore a longer Retry-After


@dataclass(slots=True)
class ServedModel:
    """A model's engines and its text layer. `client`: of the first engine. `defaults` are sampling defaults from
    generation_config.json, used where a request is silent. `auto_tools`: the model may call tools on its own account.
    `pooling`: what makes an embedding."""

    name: str
    client: EngineClient
    tokenizer: TextTokenizer
    defaults: dict[str, float | int] = field(default_factory=dict)
    created: int = field(default_factory=lambda: int(time.time()))
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    auto_tools: bool = True
    wait: ExpectedWait = field(default_factory=ExpectedWait)
    pooling: Pooling = "last"
    instance: str = ""       # of its first engine; its name where there is no other
    _output: OutputFormat | None = None
    replicas: Replicas = field(init=False)

    def __post_init__(self) -> None:
        self.replicas = Replicas(self.client, self.instance or self.name)

    @classmethod
    def load(
        cls, name: str, directory: Path | str, client: EngineClient, *, vendor_defaults: bool = True, **settings: Any
    ) -> "ServedModel":
        """Read tokenizer, template and (`vendor_defaults`) sampling defaults. Raises ModelError.

        `settings`: the fields of that name.
        """
        defaults = sampling_defaults(directory) if vendor_defaults else {}
        return cls(name, client, TextTokenizer.load(directory), defaults, **settings)

    @property
    def output(self) -> OutputFormat:
        """The format in which the model marks reasoning and tool calls."""
        if self._output is None:
            self._output = output_format(self.tokenizer, self.tool_call_parser, self.reasoning_parser)
        return self._output

    @property
    def max_model_len(self) -> int | None:
        info = self.replicas.info
        return info.max_model_len if info is not None else None

    def healthy(self) -> bool:
        """At least one engine is."""
        return any(replica.client.healthy() for replica in self.replicas)

    def ready(self, limits: Limits, key: str | None = None) -> EngineInfo:
        """The engine's facts. Raises ApiError 503 while it cannot take a request, and, with `key`, where one of that
        key would wait too long in the queue."""
        usable, info = self.replicas.usable(), self.replicas.info
        if not usable and any(replica.client.stalled() for replica in self.replicas):
            # who is let in now would wait for as long as it hangs
            raise overloaded("The engine of this model does not answer.", limits.retry_after_seconds,
                             code="engine_unavailable")
        if usable and info is not None:
            waiting = min(client.stats.num_waiting for client in usable)
            if waiting >= limits.max_waiting:
                raise overloaded("Too many requests are waiting for this model; try again.", limits.retry_after_seconds,
                                 refusal="queue_full")
            wait, most = 0.0, limits.max_wait_seconds
            if key is not None and waiting:
                wait = self.wait.seconds(key)
            if most and wait > most:
                retry = max(limits.retry_after_seconds, min(MOST_RETRY_SECONDS, ceil(wait - most)))
                raise overloaded(
                    f"A request would wait about {wait:.0f} seconds for this model, longer than the {most:g} seconds "
                    f"that this server lets requests wait. Retry in {retry} seconds.", retry, refusal="expected_wait")
            return info
        client = next((each.client for each in self.replicas if each.client.state == "loading"), self.client)
        if client.state == "dead":
            raise overloaded(
                "The engine of this model is down and will be restarted.", limits.retry_after_seconds,
                code="engine_unavailable",
            )
        progress = f" ({shortened(client.progress)})" if client.progress else ""
        what = "The model is still loading" if client.state == "loading" else "This model's engine does not run yet"
        raise overloaded(f"{what}{progress}; try again.", limits.retry_after_seconds, code="model_loading")


def output_settings(config: EngineConfig) -> dict[str, Any]:
    """What `ServedModel.load` takes of a model's settings."""
    return {"tool_call_parser": config.tool_call_parser, "reasoning_parser": config.reasoning_parser,
            "auto_tools": config.enable_auto_tool_choice, "pooling": config.pooling}


class Gateway:
    """State that all requests share. `models` maps every served name (including aliases) to its model."""

    def __init__(self, models: dict[str, ServedModel], *, limits: Limits, metrics: Metrics,
                 keys: KeyFile | None = None, version: str = "", broken: Mapping[str, str] | None = None) -> None:
        if not models:
            raise ValueError("a gateway needs at least one model")
        self.models = models
        self.limits = limits
        self.metrics = metrics
        self.active = ActiveRequests()
        self.keys = keys
        self.version = version
        self.draining = False  # the operator wants no new requests; running ones may finish
        self.broken = dict(broken or {})  # names that are configured and cannot be served, and why
        self._text = ThreadPoolExecutor(limits.text_threads, thread_name_prefix="text")
        self._in_flight: Counter[str] = Counter()
        self._rates = Rates(limits.max_requests_per_minute_per_key, limits.max_tokens_per_minute_per_key)
        self._sampler: asyncio.Task[None] | None = None
        self._salt_key = secrets.token_bytes(32)

    @property
    def clients(self) -> list[EngineClient]:
        """Each engine once, however many names it has."""
        every = [replica.client for model in self.models.values() for replica in model.replicas]
        return list({id(client): client for client in every}.values())

    def model(self, name: str | None) -> ServedModel:
        """The model of that name; without a name, the only model. Raises ApiError 404 or 400."""
        if not name:
            if len({id(model.client) for model in self.models.values()}) == 1:
                return next(iter(self.models.values()))
            raise invalid(f"model is required: this server serves {', '.join(self.models)}.", "model")
        model = self.models.get(name)
        if model is None and name in self.broken:
            raise overloaded(f"The model {shortened(name)!r} is not served at the moment; its operator knows why from "
                             "the log.", self.limits.retry_after_seconds, code="model_unavailable")
        if model is None:
            raise ApiError(
                404, f"The model {shortened(name)!r} does not exist; see /v1/models.", param="model",
                code="model_not_found",
            )
        return model

    def ready(self, model: ServedModel, key: str) -> EngineInfo:
        """Like `ServedModel.ready`, but counts refusals."""
        try:
            info = model.ready(self.limits, key)
            self._check_waiting(model, key)
            return info
        except ApiError as error:
            self.metrics.refused(error.refusal or "engine_unavailable", model.name)
            raise

    def _check_waiting(self, model: ServedModel, key: str) -> None:
        """Raises ApiError 429 if the key has its share of the queue. While nothing waits, what an engine has just been
        given does not count as far as there are seats for it."""
        most = self.limits.max_waiting_per_key
        if not key or not most:
            return
        seats = sum(max(0, client.info.max_num_seqs - client.stats.num_running) for client in model.replicas.usable()
                    if client.info is not None and not client.stats.num_waiting)
        if self.active.waiting(model.name, key) >= most + seats:
            raise overloaded(
                f"This key has {most} sequences waiting for this model, as many as one key may; wait for one to begin.",
                self.limits.retry_after_seconds, status=429, code="rate_limit_exceeded", refusal="key_waiting")

    @contextmanager
    def admitted(self, caller: Caller) -> Iterator[None]:
        """Count a generating request while it runs. Raises ApiError 503 (draining, or the server is full) or 429 (the
        key's share or rate is used up)."""
        limits, key = self.limits, caller.key_id
        refused = self.metrics.refused
        if self.draining:
            refused("draining")
            raise self.drained()
        if self._in_flight.total() >= limits.max_in_flight:
            refused("server_full")
            raise overloaded(f"The server is at its request limit. Retry in {limits.retry_after_seconds} seconds.",
                             limits.retry_after_seconds)
        if key and limits.max_in_flight_per_key and self._in_flight[key] >= limits.max_in_flight_per_key:
            refused("key_concurrency")
            raise overloaded(
                f"This key may have {limits.max_in_flight_per_key} requests in flight; wait for one to end.",
                limits.retry_after_seconds, status=429, code="rate_limit_exceeded",
            )
        if key and self._in_flight[key] >= limits.max_in_flight - limits.max_in_flight // 8:
            refused("key_concurrency")
            raise overloaded("This key has as many requests in flight as one key may; the rest is for other keys. Wait "
                             "for one to end.", limits.retry_after_seconds, status=429, code="rate_limit_exceeded")
        wait = ceil(self._rates.admit(key)) if key else 0
        caller.headers += self._rates.headers(key)
        if wait:
            refused("key_rate")
            raise overloaded(f"This key is above its requests or tokens per minute. Retry in {wait} seconds.", wait,
                             status=429, code="rate_limit_exceeded")
        self._in_flight[key] += 1
        try:
            yield
        finally:
            self._in_flight[key] -= 1
            if not self._in_flight[key]:
                del self._in_flight[key]

    def drained(self) -> ApiError:
        """The refusal while the server drains."""
        return overloaded("The server is draining for maintenance and takes no new requests.",
                          self.limits.retry_after_seconds, code="draining")

    def spent(self, caller: Caller, tokens: int) -> None:
        """Count the tokens of an answer that has ended, prompt included."""
        self._rates.spend(caller.key_id, tokens)

    @property
    def in_flight(self) -> int:
        return self._in_flight.total()

    def tenant_salt(self, tenant: str, salt: str) -> str:
        """A salt for the prefix cache that no other tenant can produce, whatever it sends as `cache_salt`."""
        return hashlib.blake2b(f"{tenant}\0{salt}".encode(), digest_size=16, key=self._salt_key).hexdigest()

    async def off_loop(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run CPU-bound text work in a thread, so that a long prompt never stalls other streams."""
        return await asyncio.get_running_loop().run_in_executor(self._text, lambda: function(*args, **kwargs))

    async def start(self) -> None:
        for client in self.clients:
            await client.start()
        self._sampler = asyncio.create_task(self._sample(), name="expected-wait")

    async def _sample(self) -> None:
        while True:
            for model in {id(model): model for model in self.models.values()}.values():
                model.wait.sample(model.replicas.stats, self.active.waiting_tokens(model.name))
            await asyncio.sleep(SAMPLE_SECONDS)

    async def close(self) -> None:
        if self._sampler is not None:
            self._sampler.cancel()
        for client in self.clients:
            await client.close()
        self._text.shutdown(wait=False, cancel_futures=True)
