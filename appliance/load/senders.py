"""What answers a request of the load: an OpenAI endpoint, over HTTP. (Plain transformers: transformers_baseline.py.)"""

import json
from collections.abc import Mapping
from typing import Any, Protocol

from appliance.load import openai_stream
from appliance.load.http_client import HttpClient, HttpError
from appliance.load.outcome import Outcome
from appliance.load.prompts import Request, WordCost, content_of, measured_cost, words
from appliance.load.target import Target
from installer.base.errors import ExitCode, InstallError
from installer.base.i18n import plain, t

_SHORT, _LONG = 16, 96   # words in the two prompts that measure the tokens of a word


class Sender(Protocol):
    """Answers requests. `open` is called before the first, `close` after the last."""

    backend: str
    model: str
    context: int | None     # most tokens of a request, if known

    async def open(self) -> None: ...

    async def cost(self, endpoint: str) -> WordCost: ...

    async def ask(self, request: Request, timeout: float, zero: float) -> Outcome: ...

    async def close(self) -> None: ...


class OpenAISender:
    """Any OpenAI endpoint. `extra` goes into every request's body."""

    backend = "openai"

    def __init__(
        self, target: Target, endpoint: str, extra: Mapping[str, Any], *, keep_text: bool = False
    ) -> None:
        self.target, self._endpoint, self._extra, self._keep_text = target, endpoint, extra, keep_text
        self.backend = "openai-chat" if endpoint == "chat" else "openai"
        self.model = target.model or ""
        self.context: int | None = None
        self._client = HttpClient(target)
        self._path = target.path_of(endpoint)

    async def open(self) -> None:
        """Find out which models it serves. Raises InstallError if it does not answer, or refuses the key."""
        status, body = await self._reach(self._client.get(f"{self.target.root}/v1/models"))
        if status in (401, 403):
            raise _refused(self.target, status, body)
        found = _models(body) if status == 200 else []
        if not self.model:
            if not found:
                raise InstallError(
                    t("The endpoint {url} does not say which models it serves (HTTP {status}).",
                      url=self.target.base_url, status=status),
                    exit_code=ExitCode.UNHEALTHY, hint=t("Name the model: --model NAME"),
                )  # fmt: skip
            self.model = str(found[0]["id"])
        mine = next((entry for entry in found if entry.get("id") == self.model), {})
        length = mine.get("max_model_len")
        self.context = length if isinstance(length, int) and length > 1 else None

    async def cost(self, endpoint: str) -> WordCost:
        """Raises InstallError if the endpoint refuses even a small request: the load would only repeat that."""
        counted = []
        for count in (_SHORT, _LONG):
            text = " ".join(words(_fixed_rng(), count).split()[:count])
            body = {"model": self.model, **content_of(text, endpoint), "max_tokens": 1}
            status, said = await self._reach(
                self._client.post(self._path, json.dumps(body).encode())
            )
            if status in (401, 403):
                raise _refused(self.target, status, said)
            if status != 200:
                raise InstallError(
                    t("The endpoint refuses a small request: HTTP {status}, {said}", status=status,
                      said=said[:300].decode(errors="replace")),
                    exit_code=ExitCode.UNHEALTHY, hint=t("Check --model and --endpoint."),
                )  # fmt: skip
            counted.append((count, _prompt_tokens(said)))
        return measured_cost(counted[0], counted[1])

    async def ask(self, request: Request, timeout: float, zero: float) -> Outcome:
        body = openai_stream.body_of(request, self.model, self._extra)
        return await openai_stream.send(
            self._client, self._path, body, timeout=timeout, zero=zero, keep_text=self._keep_text
        )

    async def close(self) -> None:
        await self._client.__aexit__(None, None, None)

    async def _reach(self, exchange: Any) -> tuple[int, bytes]:
        try:
            return await exchange
        except (HttpError, OSError, TimeoutError) as error:
            raise InstallError(
                t("The endpoint {url} does not answer: {why}.", url=self.target.base_url,
                  why=plain(error) or type(error).__name__),
                exit_code=ExitCode.UNHEALTHY,
                hint=t("Check that it serves: atoll status. For a certificate of a local CA: --ca FILE"),
            ) from None


def _refused(target: Target, status: int, body: bytes) -> InstallError:
    said = body[:300].decode(errors="replace")
    return InstallError(
        t("The endpoint {url} refuses the API key (HTTP {status}).", url=target.base_url, status=status),
        exit_code=ExitCode.USAGE, why=said, changed=t("Nothing was changed."),
        hint=t("Name the file with the key: --api-key-file FILE, or set OPENAI_API_KEY."),
    )


def _models(body: bytes) -> list[dict[str, Any]]:
    try:
        entries = json.loads(body)["data"]
    except (ValueError, KeyError, TypeError):
        return []
    if not isinstance(entries, list):
        return []
    return [entry for entry in entries if isinstance(entry, dict) and entry.get("id")]


def _prompt_tokens(body: bytes) -> int:
    try:
        return int(json.loads(body)["usage"]["prompt_tokens"])
    except (ValueError, KeyError, TypeError):
        return 0


def _fixed_rng() -> Any:
    import random

    return random.Random(7)  # noqa: S311 - words, no secret
