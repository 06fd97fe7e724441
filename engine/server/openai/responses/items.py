"""The output items of a response, and the events that report them while they are written."""

import uuid
from collections.abc import Callable, Iterator
from typing import Any

from engine.text.parsers.events import CallArguments, CallBegun, CallEnded, Content, Event, Reasoning

Told = tuple[str, dict[str, Any]]  # type of an event, and its own fields


class Items:
    """`output` holds what has been written so far; the last item may be open."""

    def __init__(self, call_id: Callable[[], str]) -> None:
        self.output: list[dict[str, Any]] = []
        self._call_id = call_id
        self._kind = ""              # kind of the open item
        self._pieces: list[str] = []

    def add(self, event: Event) -> Iterator[Told]:
        match event:
            case Reasoning(text) | Content(text):
                kind = "reasoning" if isinstance(event, Reasoning) else "message"
                if self._kind != kind:
                    yield from self.close()
                    yield from self._open_text(kind)
                yield from self._more(text)
            case CallBegun(_, name):
                yield from self.close()
                self._kind, self._pieces = "function_call", []
                item = {"id": _new("fc"), "type": "function_call", "status": "in_progress", "arguments": "",
                        "call_id": self._call_id(), "name": name}
                yield self._added(item)
            case CallArguments(_, text):
                yield from self._more(text)
            case CallEnded():
                yield from self.close()

    def close(self, status: str = "completed") -> Iterator[Told]:
        """Close the open item."""
        if not self._kind:
            return
        kind, self._kind = self._kind, ""
        text, item = "".join(self._pieces), self.output[-1]
        item["status"] = status
        here = self._here()
        if kind == "function_call":
            item["arguments"] = text
            yield "response.function_call_arguments.done", {**here, "arguments": text, "name": item["name"]}
        else:
            part = _part(kind, text)
            item["content"] = [part]
            done = {**here, "content_index": 0, "text": text}
            yield (("response.reasoning_text.done", done) if kind == "reasoning"
                   else ("response.output_text.done", {**done, "logprobs": []}))
            yield "response.content_part.done", {**here, "content_index": 0, "part": part}
        yield "response.output_item.done", {"output_index": here["output_index"], "item": item}

    def _open_text(self, kind: str) -> Iterator[Told]:
        self._kind, self._pieces = kind, []
        if kind == "reasoning":
            item: dict[str, Any] = {"id": _new("rs"), "type": kind, "status": "in_progress", "summary": [],
                                    "content": []}
        else:
            item = {"id": _new("msg"), "type": kind, "status": "in_progress", "role": "assistant", "content": []}
        yield self._added(item)
        yield "response.content_part.added", {**self._here(), "content_index": 0, "part": _part(kind, "")}

    def _added(self, item: dict[str, Any]) -> Told:
        self.output.append(item)
        return "response.output_item.added", {"output_index": len(self.output) - 1, "item": dict(item)}

    def _more(self, text: str) -> Iterator[Told]:
        self._pieces.append(text)
        delta = {**self._here(), "delta": text}
        if self._kind == "function_call":
            yield "response.function_call_arguments.delta", delta
        elif self._kind == "reasoning":
            yield "response.reasoning_text.delta", {**delta, "content_index": 0}
        else:
            yield "response.output_text.delta", {**delta, "content_index": 0, "logprobs": []}

    def _here(self) -> dict[str, Any]:
        return {"item_id": self.output[-1]["id"], "output_index": len(self.output) - 1}


def _part(kind: str, text: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _new(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
