"""A traffic profile: what requests look like and when they come. TOML, checked strictly."""

import json
import tomllib
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from appliance.load.lengths import Lengths
from installer.base.errors import InstallError, usage_error
from installer.base.i18n import joined, plain, reason, t
from installer.decide.answers import problems

_HERE = Path(__file__).parent / "profiles"
_LIMIT = 1 << 20
MOST_CLIENTS = 10_000
BUILT_IN = ("chat", "documents", "batch", "single")  # as the presets' workloads

Endpoint = Literal["chat", "completions"]
Line = Annotated[str, StringConstraints(min_length=1, max_length=200)]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Arrival(_Strict):
    """When requests come.

    `rate` makes an open loop: requests per second, however slowly the server answers. Without it, each of `clients`
    users sends the next request when the last answer has ended: a closed loop.
    """

    clients: int | None = Field(default=None, ge=1, le=MOST_CLIENTS)
    think_seconds: float = Field(default=0.0, ge=0, le=3600)    # between an answer and the same client's next request
    rate: float | None = Field(default=None, gt=0, le=100_000)
    burstiness: float = Field(default=1.0, gt=0, le=1000)       # 1: Poisson; below: more bursty; above: more even
    max_concurrency: int | None = Field(default=None, ge=1, le=MOST_CLIENTS)

    @model_validator(mode="after")
    def _one_kind(self) -> "Arrival":
        if (self.clients is None) == (self.rate is None):
            raise ValueError(t("name either clients (a closed loop) or rate (requests a second), not both"))
        if self.rate is None and (self.burstiness != 1.0 or self.max_concurrency is not None):
            raise ValueError(t("burstiness and max_concurrency belong to a rate; with clients they have no meaning"))
        if self.rate is not None and self.think_seconds:
            raise ValueError(t("think_seconds belongs to clients; with a rate it has no meaning"))
        return self


class Prefix(_Strict):
    """A common beginning of requests, such as a system prompt: `groups` different ones of `tokens` tokens."""

    tokens: int = Field(ge=1, le=1_000_000)
    groups: int = Field(default=1, ge=1, le=100_000)
    share: float = Field(default=1.0, gt=0, le=1)   # of all requests, those that start with one


class Sampling(_Strict):
    """Sampling parameters to send; the server's default applies to the others."""

    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    min_p: float | None = Field(default=None, ge=0, le=1)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    repetition_penalty: float | None = Field(default=None, gt=0, le=10)

    def body(self) -> dict[str, Any]:
        return self.model_dump(exclude_none=True)


class Title(_Strict):
    en: Line
    ko: Line


class TrafficProfile(_Strict):
    """Everything about the load except its target.

    `input` includes the shared prefix. `ignore_eos` makes answers as long as `output` says, wherever the model would
    stop.
    """

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}\z")]
    title: Title | None = None
    endpoint: Endpoint = "chat"
    input: Lengths
    output: Lengths
    ignore_eos: bool = True
    arrival: Arrival
    prefix: Prefix | None = None
    sampling: Sampling = Sampling()
    requests: int = Field(default=64, ge=1, le=10_000_000)      # a run's length, unless another is given
    warmup: int = Field(default=2, ge=0, le=10_000)             # requests before the clock starts
    timeout_seconds: float = Field(default=600.0, gt=0, le=86_400)
    seed: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _fits_together(self) -> "TrafficProfile":
        if self.prefix is not None and self.prefix.tokens > min(part.least for part in self.input.parts):
            raise ValueError(t("the shared prefix has {tokens} tokens, more than the shortest input",
                               tokens=self.prefix.tokens))
        return self

    @property
    def longest(self) -> int:
        """Tokens of the longest request, including its answer."""
        return self.input.longest + self.output.longest

    @property
    def clients(self) -> int | None:
        return self.arrival.clients

    def with_clients(self, clients: int) -> "TrafficProfile":
        """The same requests in a closed loop of this many users."""
        arrival = Arrival(clients=clients, think_seconds=self.arrival.think_seconds)
        return self.model_copy(update={"arrival": arrival})

    def fitted(self, context: int) -> "TrafficProfile":
        """The same profile if its longest request fits into `context` tokens, else one with all lengths scaled down in
        proportion. An eighth of the context is left to the chat template and to rounding."""
        room = max(2, context - max(16, context // 8))
        if self.longest <= room:
            return self
        factor = room / self.longest
        values: dict[str, Any] = {"input": self.input.scaled(factor), "output": self.output.scaled(factor)}
        if self.prefix is not None:
            shortest = min(part.least for part in values["input"].parts)
            values["prefix"] = self.prefix.model_copy(
                update={"tokens": max(1, min(shortest, int(self.prefix.tokens * factor)))}
            )
        return self.model_copy(update=values)


@cache
def built_in(name: str) -> TrafficProfile:
    """One of `BUILT_IN`. Raises KeyError."""
    if name not in BUILT_IN:
        raise KeyError(name)
    values = tomllib.loads((_HERE / f"{name}.toml").read_text("utf-8"))
    return TrafficProfile.model_validate({"name": name, **values})


def find_profile(asked: str) -> TrafficProfile:
    """A built-in profile by its name, or a file (TOML; `.json` for JSON). Raises InstallError (usage)."""
    if asked in BUILT_IN:
        return built_in(asked)
    path = Path(asked)
    if not path.suffix and not path.exists():
        raise _wrong(asked, [t("no such file, and no built-in profile of that name")])
    return read_profile(path)


def read_profile(path: Path) -> TrafficProfile:
    """Read and check a profile's file. Raises InstallError (usage) that names what is wrong in it."""
    try:
        with path.open("rb") as file:
            data = file.read(_LIMIT + 1)
        if len(data) > _LIMIT:
            raise ValueError(t("it is larger than 1 MiB"))
        text = data.decode()
        values = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
        if not isinstance(values, dict):
            raise ValueError(t("it is not a table"))
        return TrafficProfile.model_validate({"name": _name_of(path), **values}, strict=False)
    except ValidationError as error:
        raise _wrong(str(path), problems(error, TrafficProfile)) from None
    except (OSError, ValueError, RecursionError) as error:
        raise _wrong(str(path), [reason(error) if isinstance(error, OSError) else plain(error)]) from None


def _name_of(path: Path) -> str:
    kept = "".join(char if char.isascii() and (char.isalnum() or char in "._-") else "-" for char in path.stem)
    return (kept.lstrip("._-") or "profile")[:64]


def _wrong(asked: str, found: list[str]) -> InstallError:
    return usage_error(t("The traffic profile {name} cannot be used: {names}.", name=asked, names=joined(found, "; ")),
                       t("Built-in profiles are {names}. Print one as an example: atoll bench profiles {first}",
                         names=joined(BUILT_IN), first=BUILT_IN[0]))  # fmt: skip


def text_of(profile: TrafficProfile) -> str:
    """The profile as a TOML file."""
    import tomlkit

    values = profile.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
    return tomlkit.dumps(values)
