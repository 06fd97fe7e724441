"""Conformance: the API's promises, each tested from outside. One function per promise; `_CHECKS` lists them."""

import asyncio
import json
import math
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Any

from appliance.load.http_client import HttpError
from appliance.service.findings import Finding, Severity, made
from appliance.service.verification.api import Answer, Api
from appliance.service.verification.context import Verifying
from installer.base.i18n import plain, t

_FREED_SECONDS = 20.0    # from a client's disconnect until its memory is free
_PROMPT = "Count from one to ten."


class Broken(Exception):
    """A promise that was not kept: what was seen, in words."""


Check = Callable[[Api, dict[str, Any]], Awaitable[str]]
"""Returns what was seen. Raises Broken. The second argument is the model's entry in /v1/models, filled by the first."""


async def _models(api: Api, entry: dict[str, Any]) -> str:
    answer = await api.get("/v1/models")
    _expect(answer, 200)
    entries = (answer.json or {}).get("data") or []
    mine = next((each for each in entries if each.get("id") == api.model), None)
    if mine is None:
        raise Broken(t("{model} is not in the list", model=api.model))
    entry.update(mine)
    return t("{model}, context {tokens}", model=api.model, tokens=mine.get("max_model_len", "–"))


async def _chat(api: Api, entry: dict[str, Any]) -> str:
    answer = await api.chat(_PROMPT, max_tokens=8, temperature=0)
    _expect(answer, 200)
    choice = _choice(answer)
    message = choice.get("message") or {}
    if not isinstance(message.get("content"), str) or message.get("role") != "assistant":
        raise Broken(t("the answer has no message of an assistant"))
    usage = _usage(answer.json)
    if usage["completion_tokens"] > 8:
        raise Broken(t("{count} tokens came, but only 8 were allowed", count=usage["completion_tokens"]))
    _finish(choice.get("finish_reason"), usage["completion_tokens"] == 8)
    return t("{count} tokens, ended by {reason}", count=usage["completion_tokens"], reason=choice["finish_reason"])


async def _completion(api: Api, entry: dict[str, Any]) -> str:
    answer = await api.post("/v1/completions", {"prompt": _PROMPT, "max_tokens": 4, "temperature": 0})
    _expect(answer, 200)
    choice = _choice(answer)
    if not isinstance(choice.get("text"), str):
        raise Broken(t("the answer has no text"))
    usage = _usage(answer.json)
    _finish(choice.get("finish_reason"), usage["completion_tokens"] == 4)
    return t("{count} tokens, ended by {reason}", count=usage["completion_tokens"], reason=choice["finish_reason"])


async def _stream(api: Api, entry: dict[str, Any]) -> str:
    answer = await api.chat(_PROMPT, max_tokens=12, temperature=0, stream=True, stream_options={"include_usage": True})
    _expect(answer, 200)
    kind = answer.headers.get(b"content-type", b"").decode(errors="replace")
    if not kind.startswith("text/event-stream"):
        raise Broken(t("its type is {kind}", kind=kind or "–"))
    if not answer.events or answer.events[-1] != "[DONE]":
        raise Broken(t("the stream broke off before [DONE]"))
    chunks = answer.chunks
    if len(chunks) != len(answer.events) - 1:
        raise Broken(t("an event is not JSON"))
    if any("error" in chunk for chunk in chunks):
        raise Broken(next(str(chunk["error"]) for chunk in chunks if "error" in chunk))
    choices = [choice for chunk in chunks for choice in chunk.get("choices") or []]
    reasons = [choice["finish_reason"] for choice in choices if choice.get("finish_reason")]
    if len(reasons) != 1:
        raise Broken(t("{count} finish reasons instead of one", count=len(reasons)))
    counted = [chunk for chunk in chunks if chunk.get("usage")]
    if len(counted) != 1 or counted[0].get("choices"):
        raise Broken(t("usage was requested but is not in one last event"))
    usage = _usage(counted[0])
    _finish(reasons[0], usage["completion_tokens"] == 12)
    if not any((choice.get("delta") or {}).get("content") for choice in choices):
        raise Broken(t("no content token arrived"))
    return t("{count} tokens, ended by {reason}, then [DONE]", count=usage["completion_tokens"], reason=reasons[0])


async def _logprobs(api: Api, entry: dict[str, Any]) -> str:
    answer = await api.chat(_PROMPT, max_tokens=6, temperature=0, logprobs=True, top_logprobs=3)
    _expect(answer, 200)
    content = (_choice(answer).get("logprobs") or {}).get("content") or []
    tokens = _usage(answer.json)["completion_tokens"]
    if len(content) not in (tokens, tokens - 1):  # some servers send none for the end token
        raise Broken(t("{count} log-probabilities for {tokens} tokens", count=len(content), tokens=tokens))
    for each in content:
        values = [top["logprob"] for top in each["top_logprobs"]]
        if values != sorted(values, reverse=True) or not all(math.isfinite(v) and v <= 1e-4 for v in values):
            raise Broken(t("the candidates are not in order, or no probabilities: {values}", values=str(values)))
    return t("{count} tokens with 3 candidates each", count=len(content))


async def _stop(api: Api, entry: dict[str, Any]) -> str:
    free = await api.chat(_PROMPT, max_tokens=24, temperature=0)
    _expect(free, 200)
    text = _choice(free)["message"]["content"]
    word = next((part for part in text.split()[1:] if part.isalnum() and len(part) > 2 and text.count(part) == 1), None)
    if word is None:
        return t("the model's answer has no word to stop at")
    answer = await api.chat(_PROMPT, max_tokens=24, temperature=0, stop=[word])
    _expect(answer, 200)
    choice = _choice(answer)
    if word in choice["message"]["content"]:
        raise Broken(t("the stop string is in the answer"))
    return t("it ended before the stop string")


async def _mistakes(api: Api, entry: dict[str, Any]) -> str:
    """Each kind of client mistake gets its own status and OpenAI's form of an error."""
    message = [{"role": "user", "content": "x"}]
    longest = int(entry.get("max_model_len") or 0)
    cases: list[tuple[str, str, Any, tuple[int, ...]]] = [
        (t("no JSON"), "/v1/chat/completions", b"{oops", (400, 422)),
        (t("no messages"), "/v1/chat/completions", {}, (400, 422)),
        (t("negative temperature"), "/v1/chat/completions", {"messages": message, "temperature": -1}, (400, 422)),
        (t("negative max_tokens"), "/v1/chat/completions", {"messages": message, "max_tokens": -5}, (400, 422)),
        (t("unknown role"), "/v1/chat/completions", {"messages": [{"role": "wizard", "content": "x"}]}, (400, 422)),
        (t("unknown model"), "/v1/chat/completions", {"model": secrets.token_hex(8), "messages": message}, (404,)),
        (t("unknown path"), "/v1/no-such-path", {}, (404,)),
    ]  # fmt: skip
    if longest:
        words = "word " * (longest + 8)
        if len(words) < 8 << 20:
            cases.append((t("too long"), "/v1/chat/completions", {"messages": [{"role": "user", "content": words}]},
                          (400, 413, 422)))  # fmt: skip
    for name, path, body, allowed in cases:
        answer = await api.post(path, body)
        if answer.status not in allowed:
            raise Broken(t("{name}: HTTP {status}, expected {expected}", name=name, status=answer.status,
                           expected=" / ".join(map(str, allowed))))  # fmt: skip
        error = (answer.json or {}).get("error") if isinstance(answer.json, dict) else None
        if not isinstance(error, dict) or not isinstance(error.get("message"), str) or not error["message"]:
            raise Broken(t("{name}: the answer has no error with a message", name=name))
    return t("{count} mistakes, each refused with its own status", count=len(cases))


async def _limits(api: Api, entry: dict[str, Any]) -> str:
    """A body far beyond any request is refused, not read into memory. Some servers close the connection while it is
    sent."""
    body = json.dumps({"model": api.model, "prompt": "x", "user": "x" * (96 << 20)}).encode()
    try:
        answer = await api.post("/v1/completions", body)
    except (HttpError, OSError):
        return t("the connection was closed")
    if answer.status not in (400, 413, 422):
        raise Broken(t("a body of 96 MiB: HTTP {status}", status=answer.status))
    return f"HTTP {answer.status}"


async def _cancel(api: Api, entry: dict[str, Any]) -> str:
    """A client that disconnects frees its place and its memory, as /metrics shows."""
    try:
        before = await api.metrics()
    except ValueError as error:
        raise Broken(t("/metrics cannot be read: {why}", why=plain(error))) from None
    room = max(16, int(entry.get("max_model_len") or 1024) - 256)
    body = {"messages": [{"role": "user", "content": _PROMPT}], "stream": True, "max_tokens": min(4000, room),
            "ignore_eos": True}  # fmt: skip
    if not await api.abandoned("/v1/chat/completions", body):
        raise Broken(t("no content token arrived"))
    begun = time.monotonic()
    names = ("vllm:num_requests_running", "vllm:kv_cache_usage_perc")
    while True:
        now = await api.metrics()
        if all(now.get(name, 0.0) <= before.get(name, 0.0) + 1e-9 for name in names):
            return t("free after {seconds} s", seconds=f"{time.monotonic() - begun:.1f}")
        if time.monotonic() - begun > _FREED_SECONDS:
            running = now.get(names[0], 0.0)
            raise Broken(t("{seconds} s later {running} requests are running, KV cache {share} in use",
                           seconds=f"{_FREED_SECONDS:.0f}", running=int(running),
                           share=f"{now.get(names[1], 0.0):.1%}"))  # fmt: skip
        await asyncio.sleep(0.2)


_CHECKS: tuple[tuple[str, Severity, str, str, Check], ...] = (
    ("models", "block", t("List of models"), t("clients look there for the model's name"), _models),
    ("chat", "strict", t("Chat"), t("this is what clients use"), _chat),
    ("completions", "block", t("Completions"), t("older clients and batch jobs use it"), _completion),
    ("stream", "strict", t("Streams"), t("a client would wait forever for an end that does not come"), _stream),
    ("logprobs", "warn", t("Log-probabilities"), t("evaluations need them"), _logprobs),
    ("stop-strings", "warn", t("Stop strings"), t("agents cut answers with them"), _stop),
    ("client-mistakes", "block", t("Mistakes of clients"), t("a client must see what it did wrong"), _mistakes),
    ("limits", "block", t("Limits"), t("one client must not fill the server's memory"), _limits),
    ("cancel", "block", t("Cancelled requests"), t("abandoned requests would take the place of others"), _cancel),
)


async def run(work: Verifying) -> list[Finding]:
    found: list[Finding] = []
    total = len(work.subject.models) * len(_CHECKS)
    for model in work.subject.models:
        entry: dict[str, Any] = {}
        async with Api(work.subject.of(model), model.name) as api:
            for id, severity, title, why, check in _CHECKS:
                work.told(title, len(found), total)
                try:
                    ok, seen = True, await check(api, entry)
                except Broken as error:
                    ok, seen = False, plain(error)
                except (HttpError, OSError, TimeoutError, KeyError, TypeError, IndexError, AttributeError) as error:
                    ok, seen = False, _unexpected(error)
                found.append(made(
                    work.subject.tagged(id, model), "info" if ok else severity, ok, title, observed=seen, why=why,
                    fix="" if ok else t("Keep the report and the log for support: {command}",
                                        command="atoll support-bundle"),
                ))  # fmt: skip
    return found


def _unexpected(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return t("no answer in time")
    if isinstance(error, HttpError | OSError):
        return plain(error) or type(error).__name__
    return t("the answer differs from the API: {name} {what}", name=type(error).__name__, what=str(error))


def _expect(answer: Answer, status: int) -> None:
    if answer.status != status:
        raise Broken(f"HTTP {answer.status}: {answer.said}")


def _choice(answer: Answer) -> dict[str, Any]:
    choices = (answer.json or {}).get("choices") or []
    if len(choices) != 1:
        raise Broken(t("{count} choices instead of one", count=len(choices)))
    return choices[0]


def _usage(body: Any) -> dict[str, int]:
    usage = (body or {}).get("usage") or {}
    numbers = [usage.get(name) for name in ("prompt_tokens", "completion_tokens", "total_tokens")]
    whole = [number for number in numbers if isinstance(number, int) and number >= 0]
    if len(whole) != 3 or whole[0] + whole[1] != whole[2]:
        raise Broken(t("usage does not add up: {usage}", usage=json.dumps(usage)))
    return usage


def _finish(reason: Any, full: bool) -> None:
    if reason not in ("stop", "length") or (reason == "length" and not full):
        raise Broken(t("its finish_reason is {reason}", reason=json.dumps(reason)))
