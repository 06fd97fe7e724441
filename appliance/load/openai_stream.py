"""One streaming request to /v1/completions or /v1/chat/completions, and its outcome."""

import asyncio
import json
import ssl
import time
from collections.abc import Mapping
from typing import Any, NoReturn

import msgspec

from appliance.load import outcome as kinds
from appliance.load.http_client import HttpClient, HttpError
from appliance.load.outcome import Outcome
from appliance.load.prompts import Request
from installer.base.i18n import plain, t

_MOST_LINE = 1 << 20   # of one event
_MOST_SAID = 2000      # of an error's body
_MOST_TEXT = 1 << 20   # characters of an answer that is kept


class _Part(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: msgspec.Raw | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Part | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = 0


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode


class StreamReader:
    """Reads an event stream as its bytes arrive and notes the time of each piece of text."""

    def __init__(self, outcome: Outcome, begun: float, *, keep_text: bool) -> None:
        self.outcome, self._begun, self._keep_text = outcome, begun, keep_text
        self.done = False
        self.problem: tuple[str, str] | None = None
        self._pieces: list[str] = []
        self._kept = self._arrivals = 0
        self._last = 0.0
        self._rest = b""
        self._said = b""        # beginning of the body, for an answer that is not a stream

    def feed(self, data: bytes, now: float) -> None:
        if len(self._said) < _MOST_SAID:
            self._said += data[: _MOST_SAID - len(self._said)]
        if self.done:
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _MOST_LINE:
            self._fail(kinds.MALFORMED, t("an event is longer than 1 MiB"))
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), now)
                if self.done:
                    return

    def _fail(self, kind: str, detail: str) -> NoReturn:
        """Ends the exchange: the rest of what such a server sends is not worth reading."""
        self.problem = (kind, detail)
        raise ValueError(detail)

    @property
    def said(self) -> str:
        return self._said.decode(errors="replace")

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def _event(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self.done = True
            return
        try:
            chunk = _decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError):
            self._fail(kinds.MALFORMED, data[:200].decode(errors="replace"))
        if chunk.error:
            self._fail(kinds.STREAM_ERROR, str(chunk.error))
        outcome = self.outcome
        for choice in chunk.choices:
            part = choice.delta
            text = choice.text if part is None else part.content or part.reasoning or part.reasoning_content
            if text or (part is not None and part.tool_calls):
                self._arrived(text or "", now)
            outcome.finish_reason = choice.finish_reason or outcome.finish_reason
        if chunk.usage is not None and chunk.usage.completion_tokens is not None:
            outcome.has_usage = True
            outcome.tokens_in = chunk.usage.prompt_tokens
            outcome.tokens_out = chunk.usage.completion_tokens

    def _arrived(self, text: str, now: float) -> None:
        outcome = self.outcome
        if self._arrivals == 0:
            outcome.ttft = now - self._begun
        else:
            outcome.gaps.append(now - self._last)
        self._arrivals += 1
        self._last = now
        outcome.e2e = now - self._begun
        if self._keep_text and self._kept < _MOST_TEXT:
            self._pieces.append(text)
            self._kept += len(text)

    def finish(self) -> Outcome:
        """Judge the stream after its body has ended."""
        outcome = self.outcome
        outcome.text = self.text
        if not outcome.has_usage:
            outcome.tokens_out = self._arrivals
        if self.problem:
            return outcome.failed(*self.problem)
        if not self.done:
            return outcome.failed(kinds.TRUNCATED, t("the stream broke off before [DONE]"))
        if outcome.finish_reason is None:
            return outcome.failed(kinds.TRUNCATED, t("the stream ended without a finish_reason"))
        if not self._arrivals and not outcome.tokens_out:
            return outcome.failed(kinds.EMPTY, t("no content token arrived"))
        if not self._arrivals:  # tokens without text, such as an end token alone
            outcome.ttft = outcome.e2e = time.perf_counter() - self._begun
        return outcome


def body_of(request: Request, model: str, extra: Mapping[str, Any]) -> bytes:
    """The request body: the fields that OpenAI documents, and `extra`."""
    values: dict[str, Any] = {"model": model, **request.content, "stream": True,
                              "stream_options": {"include_usage": True}, **extra}  # fmt: skip
    name = "max_completion_tokens" if "messages" in request.content else "max_tokens"
    values.setdefault(name, request.tokens_out)
    return json.dumps(values, ensure_ascii=False).encode()


async def send(
    client: HttpClient, path: str, body: bytes, *, timeout: float, zero: float = 0.0, keep_text: bool = False
) -> Outcome:
    """Send one request and read its stream to the end. Never raises but for cancellation; `zero` is the run's start."""
    begun = time.perf_counter()
    outcome = Outcome(start=begun - zero)
    reader = StreamReader(outcome, begun, keep_text=keep_text)
    try:
        async with asyncio.timeout(timeout):
            status, _ = await client.request("POST", path, body, reader.feed, headers="Accept-Encoding: identity\r\n")
    except TimeoutError:
        outcome.e2e = time.perf_counter() - begun
        return outcome.failed(kinds.TIMEOUT, t("no complete answer within {seconds} s", seconds=f"{timeout:g}"))
    except HttpError as error:
        said = plain(error) or type(error).__name__
        if reader.problem:
            return reader.finish()
        kind = kinds.TRUNCATED if error.began else kinds.CONNECT
        if error.began and not outcome.gaps and not outcome.ttft and "closed" not in str(error):
            kind = kinds.MALFORMED
        return outcome.failed(kind, said)
    except (OSError, ssl.SSLError) as error:
        return outcome.failed(kinds.CONNECT, plain(error) or type(error).__name__)
    outcome.status = status
    if status != 200:
        return outcome.failed(f"http_{status}", reader.said)
    return reader.finish()
