"""The models that a gateway serves, as its settings file names them: loaded at the start, and again while it serves.

A reload compares the file with what is served. New models and replicas are connected; removed ones get no new requests,
finish what they are working on, and are let go. Whatever the file says as before is not touched, so its streams go on.
Files are read in a thread, and the change itself happens between two requests.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from urllib.parse import parse_qs

import msgspec

from engine.errors import AtollError, ConfigError, ModelError
from engine.message import msg
from engine.server.ipc.client import EngineClient
from engine.server.ipc.framing import PeerPolicy
from engine.server.ipc.replicas import Replica
from engine.server.openai.reply.replies import to_json
from engine.server.openai.serving import Gateway, ServedModel, output_settings
from engine.server.settings.commands import engine_of
from engine.server.settings.options import EngineOptions, GatewayOptions
from engine.server.settings.server_file import model_names

log = logging.getLogger("atoll.gateway")

DRAIN_SECONDS = 30.0        # for the requests of a removed engine, unless the reload says otherwise
MOST_DRAIN_SECONDS = 3600.0
_LOOK_SECONDS = 0.2
_QUIET_LOOKS = 3            # without a request, until none can be on its way to the engine any more


class EngineRow(msgspec.Struct):
    model: str
    engine: str              # its instance
    number: int              # its label in metrics
    state: str
    in_flight: int
    progress: str = ""


class FleetReply(msgspec.Struct):
    """`reload`: the number of the last reload that was asked for; `done`: of the last one that has ended. `errors`: of
    that one, by instance ("" for the whole file). `draining`: removed engines that still work, and their requests."""

    reload: int
    done: int
    engines: list[EngineRow]
    draining: dict[str, int]
    errors: dict[str, str]


@dataclass(frozen=True, slots=True)
class _Served:
    """A model as it was loaded, and what decides whether it must be loaded again."""

    model: ServedModel
    names: tuple[str, ...]
    settings: str


@dataclass(slots=True)
class _Loaded:
    """What the settings file names, by instance, in its order."""

    served: dict[str, _Served] = field(default_factory=dict)
    replicas: dict[str, str] = field(default_factory=dict)     # instance -> that of its model
    errors: dict[str, AtollError] = field(default_factory=dict)

    @property
    def models(self) -> dict[str, ServedModel]:
        return {name: served.model for served in self.served.values() for name in served.names}


class Fleet:
    """`models` and `broken` as `create_app` takes them. Raises ConfigError if no model is configured, and the first
    model's error if none can be served; otherwise one bad model spares the others."""

    def __init__(self, options: GatewayOptions) -> None:
        self._options = options
        self._policy = PeerPolicy.parse([], options.allow_group)
        self._now = self._load({})
        if self._now.errors and not self._now.served:
            raise next(iter(self._now.errors.values()))
        for instance, of in self._now.replicas.items():
            self._now.served[of].model.replicas.add(self._client(instance), instance)
        self.models = self._now.models
        self.broken = {instance: str(error.message) for instance, error in self._now.errors.items()}
        self.gateway: Gateway | None = None     # set before the first reload
        self._wanted = self._done = 0
        self._drain_seconds = DRAIN_SECONDS
        self._errors: dict[str, str] = {}
        self._reloading: asyncio.Task[None] | None = None
        self._draining: dict[asyncio.Task[None], tuple[str, EngineClient]] = {}

    def admin_answers(self) -> dict[str, Callable[..., tuple[bytes, str]]]:
        """For the admin socket."""
        return {"GET /models": lambda: (to_json(self.reply()), "application/json"),
                "POST /models/reload?": self._asked}

    def _asked(self, query: str) -> tuple[bytes, str]:
        try:
            seconds = float(parse_qs(query)["drain"][0])
        except (KeyError, ValueError):
            seconds = DRAIN_SECONDS
        self.reload(seconds)
        return to_json(self.reply()), "application/json"

    def reload(self, drain_seconds: float = DRAIN_SECONDS) -> None:
        """Read the settings file again, in the background. `reply` says when it is done."""
        self._wanted += 1
        self._drain_seconds = min(max(drain_seconds, 0.0), MOST_DRAIN_SECONDS)
        if self._reloading is None:
            self._reloading = asyncio.create_task(self._reload(), name="fleet")

    def reply(self) -> FleetReply:
        rows = [EngineRow(served.model.name, replica.name, replica.number, replica.client.state,
                          replica.client.in_flight, str(replica.client.progress))
                for served in self._now.served.values() for replica in served.model.replicas]
        draining = {instance: client.in_flight for instance, client in self._draining.values()}
        return FleetReply(self._wanted, self._done, rows, draining, self._errors)

    # -- inside

    async def _reload(self) -> None:
        assert self.gateway is not None
        try:
            while self._done < self._wanted:
                wanted = self._wanted
                try:
                    loaded = await asyncio.to_thread(self._load, self._now.served)
                    await self._apply(self.gateway, loaded)
                except AtollError as error:
                    self._errors = {"": str(error.message)}
                    log.error("reload: the models stay as they are: %s", error)
                self._done = wanted
        finally:
            self._reloading = None

    def _load(self, present: Mapping[str, _Served]) -> _Loaded:
        """What the file says now; models of `present` that it says as before are taken from there. A model that cannot
        be loaded again stays as it is. Raises ConfigError for the file as a whole."""
        loaded, engines = _Loaded(), dict[str, EngineOptions]()
        for instance in model_names(self._options.config):
            try:
                engines[instance] = engine_of(instance, self._options.config)
            except ConfigError as error:
                self._failed(loaded, present, instance, error)
        for instance, engine in engines.items():
            if not engine.replica_of:
                try:
                    loaded.served[instance] = self._model(instance, engine, loaded, present.get(instance))
                except (ConfigError, ModelError) as error:
                    self._failed(loaded, present, instance, error)
        loaded.replicas = {instance: engine.replica_of for instance, engine in engines.items()
                           if engine.replica_of in loaded.served}
        if not loaded.served and not loaded.errors:
            raise ConfigError(msg("{config} names no model: it has no [models.NAME].", config=self._options.config),
                              "--config")
        return loaded

    def _model(self, instance: str, engine: EngineOptions, loaded: _Loaded, present: _Served | None) -> _Served:
        config, names = engine.engine, tuple(engine.engine.served_model_name)
        taken = [name for name in names if name in loaded.models]
        if taken:
            raise ConfigError(msg("[models.{instance}] uses the name {taken} of another model.", instance=instance,
                                  taken=f"{taken[0]!r}"), "--served-model-name")
        settings = repr((config.model.resolve(), names, output_settings(config)))
        if present is not None and present.settings == settings:
            return present
        model = ServedModel.load(config.model_name, config.model, self._client(instance), instance=instance,
                                 **output_settings(config))
        return _Served(model, names, settings)

    def _failed(self, loaded: _Loaded, present: Mapping[str, _Served], instance: str, error: AtollError) -> None:
        loaded.errors[instance] = error
        if instance in present:
            loaded.served[instance] = present[instance]
            log.error("%s stays as it is: %s", instance, error)
        else:
            log.error("%s is not served: %s", instance, error)

    def _client(self, instance: str) -> EngineClient:
        return EngineClient(self._options.engines / instance / "engine.sock", policy=self._policy)

    async def _apply(self, gateway: Gateway, loaded: _Loaded) -> None:
        """From here on the gateway serves `loaded`. Removed engines are drained in the background."""
        before, self._now = self._now, loaded
        gone: list[tuple[str, EngineClient]] = []
        for instance, served in before.served.items():
            if loaded.served.get(instance) is not served:
                gone += [(replica.name, replica.client) for replica in served.model.replicas]
                gateway.metrics.forget(served.names)
        for instance, served in loaded.served.items():
            new = before.served.get(instance) is not served
            wanted = [name for name, of in loaded.replicas.items() if of == instance]
            gone += [(replica.name, replica.client) for replica in served.model.replicas.keep(wanted)]
            present = {replica.name for replica in served.model.replicas}
            added = [served.model.replicas.add(self._client(name), name) for name in wanted if name not in present]
            if new:
                gateway.metrics.add(served.names, served.model.replicas)
            await self._start(gateway, served.model, list(served.model.replicas) if new else added)
        gateway.models.clear()
        gateway.models.update(loaded.models)
        gateway.broken = {instance: str(error.message) for instance, error in loaded.errors.items()
                          if instance not in loaded.served}
        self._errors = {instance: str(error.message) for instance, error in loaded.errors.items()}
        for instance, client in gone:
            task = asyncio.create_task(self._drain(instance, client), name=f"drain-{instance}")
            self._draining[task] = instance, client
            task.add_done_callback(self._draining.pop)
        log.info("models reloaded", extra={"fields": {
            "models": list(gateway.models), "replicas": list(loaded.replicas), "removed": [name for name, _ in gone]}})

    async def _start(self, gateway: Gateway, model: ServedModel, replicas: list[Replica]) -> None:
        for replica in replicas:
            gateway.metrics.watch(model.name, replica)
            await replica.client.start()

    async def _drain(self, instance: str, client: EngineClient) -> None:
        end, quiet = asyncio.get_running_loop().time() + self._drain_seconds, 0
        try:
            while quiet < _QUIET_LOOKS and asyncio.get_running_loop().time() < end:
                quiet = 0 if client.in_flight else quiet + 1
                await asyncio.sleep(_LOOK_SECONDS)
        finally:
            left = client.in_flight
            await client.close("It was removed from this server.")
            log.info("%s is removed", instance, extra={"fields": {"cut_off": left}})
