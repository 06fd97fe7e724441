"""Requests to the endpoint from outside, as any client would send them. Answers are returned complete and
uninterpreted."""

import asyncio
import json
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from appliance.load.http_client import HttpClient
from appliance.load.target import Target

_SECONDS = 300.0


@dataclass
class Answer:
    status: int
    raw: bytes
    headers: dict[bytes, bytes] = field(default_factory=dict)

    @property
    def json(self) -> Any:
        """None if the body is not JSON."""
        try:
            return json.loads(self.raw)
        except (ValueError, RecursionError):
            return None

    @property
    def said(self) -> str:
        return self.raw[:300].decode(errors="replace")

    @property
    def events(self) -> list[str]:
        """The data of each event of a stream."""
        lines = self.raw.decode(errors="replace").split("\n")
        return [line[5:].strip() for line in lines if line.startswith("data:")]

    @property
    def chunks(self) -> list[dict[str, Any]]:
        """The events that are JSON objects."""
        found = []
        for event in self.events:
            try:
                value = json.loads(event)
            except ValueError:
                continue
            if isinstance(value, dict):
                found.append(value)
        return found


class Api:
    """Use as an async context manager."""

    def __init__(self, target: Target, model: str) -> None:
        self.target, self.model = target, model
        self._client = HttpClient(target)

    async def __aenter__(self) -> "Api":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.__aexit__(kind, error, trace)

    async def get(self, path: str) -> Answer:
        return await self._exchange("GET", path, None)

    async def post(self, path: str, body: Any, *, seconds: float = _SECONDS) -> Answer:
        """`body`: bytes as they are, or JSON, into which `model` is filled."""
        if not isinstance(body, bytes):
            body = json.dumps({"model": self.model, **body}, ensure_ascii=False).encode()
        return await self._exchange("POST", path, body, seconds)

    async def chat(self, content: str, **more: Any) -> Answer:
        body = {"messages": [{"role": "user", "content": content}], **more}
        return await self.post("/v1/chat/completions", body)

    async def abandoned(self, path: str, body: dict[str, Any], *, seconds: float = 60.0) -> bool:
        """Begin a stream and close the connection after its first text. Returns whether there was any."""
        begun = asyncio.Event()

        def seen(data: bytes, now: float) -> None:
            if b'"content":"' in data.replace(b" ", b"") or b'"text":"' in data.replace(b" ", b""):
                begun.set()

        whole = json.dumps({"model": self.model, **body}).encode()
        task = asyncio.create_task(self._client.request("POST", self.target.root + path, whole, seen))
        waiting = asyncio.create_task(begun.wait())
        try:
            await asyncio.wait({task, waiting}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in (task, waiting):
                each.cancel()
            await asyncio.gather(task, waiting, return_exceptions=True)
        return begun.is_set()

    async def metrics(self) -> dict[str, float]:
        """Gauges and counters of /metrics by name, summed over their labels. Raises ValueError if there are none."""
        answer = await self.get("/metrics")
        if answer.status != 200:
            raise ValueError(f"HTTP {answer.status}")
        found: dict[str, float] = {}
        for line in answer.raw.decode(errors="replace").splitlines():
            if line and not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                name = name.partition("{")[0]
                try:
                    found[name] = found.get(name, 0.0) + float(value)
                except ValueError:
                    continue
        return found

    async def _exchange(self, method: str, path: str, body: bytes | None, seconds: float = _SECONDS) -> Answer:
        pieces: list[bytes] = []
        async with asyncio.timeout(seconds):
            status, headers = await self._client.request(
                method, self.target.root + path, body, lambda data, now: pieces.append(data)
            )
        return Answer(status, b"".join(pieces), headers)
