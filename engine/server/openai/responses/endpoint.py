"""`POST /v1/responses`, stateless: converted to a chat, and handled by the chat's own stages."""

from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from engine.core.request import FinishReason
from engine.server.http.documented import documented
from engine.server.http.limits import Limits
from engine.server.openai.answer import Choice
from engine.server.openai.chat import endpoint as chat
from engine.server.openai.generation import ChoiceDelta, Generation
from engine.server.openai.pipeline import GENERATING_ERRORS, Pipeline, generating_router
from engine.server.openai.reply.replies import to_json
from engine.server.openai.request.responses_schema import ResponseEvent, ResponseObject, ResponsesChat, ResponsesRequest
from engine.server.openai.responses.as_chat import as_chat, renamed
from engine.server.openai.responses.items import Items, Told
from engine.server.openai.serving import ServedModel
from engine.text.parsers.events import CallArguments, CallBegun, CallEnded, Content, Event, Reasoning, parsed


class ResponseAnswer(chat.ChatAnswer):
    id_prefix = "resp"
    named_events = True

    def __init__(self, body: ResponsesChat, model: ServedModel, generation: Generation, limits: Limits) -> None:
        super().__init__(body, model, generation, limits)
        self.id = self.id.replace("-", "_", 1)
        self._origin = body.origin
        self._items = Items(self._call_id)
        self._number = -1

    def _call_id(self) -> str:
        return self._spoken[0].call_id()

    def _news(self, delta: ChoiceDelta) -> list[Event]:
        if self._spoken:
            return self._read(delta)
        return [Content(delta.text)] if delta.text else []

    async def events(self) -> AsyncIterator[bytes]:
        begun, cut = False, False
        deltas = aiter(self.generation)
        try:
            async for delta in deltas:
                if not begun:
                    begun = True
                    for kind in ("created", "in_progress"):
                        yield self._told((f"response.{kind}", {"response": self._object("in_progress")}))
                for event in self._news(delta):
                    for told in self._items.add(event):
                        yield self._told(told)
                cut = delta.finish_reason is FinishReason.LENGTH
        finally:
            await deltas.aclose()  # type: ignore[attr-defined]
        status = "incomplete" if cut else "completed"
        for told in self._items.close(status):
            yield self._told(told)
        yield self._told((f"response.{status}", {"response": self._object(status)}))

    def reply(self, choices: list[Choice]) -> ResponseObject:
        choice = choices[0]
        said = parsed(self._said[0]) if self._spoken else parsed([Content(choice.text)])
        events: list[Event] = [Reasoning(said.reasoning)] if said.reasoning else []
        events += [Content(said.content)] if said.content else []
        for i, call in enumerate(said.calls):
            events += [CallBegun(i, call.name), CallArguments(i, call.arguments), CallEnded(i)]
        for event in events:
            for _ in self._items.add(event):
                pass
        cut = choice.end is not None and choice.end.finish_reason is FinishReason.LENGTH
        status = "incomplete" if cut else "completed"
        for _ in self._items.close(status):
            pass
        return self._object(status)

    def _told(self, told: Told) -> bytes:
        kind, fields = told
        self._number += 1
        body = to_json({"type": kind, "sequence_number": self._number, **fields})
        return b"event: " + kind.encode() + b"\ndata: " + body

    def _object(self, status: Any) -> ResponseObject:
        asked, params, over = self._origin, self.generation.params, status != "in_progress"
        effort = asked.reasoning.effort if asked.reasoning is not None else None
        form = asked.text.format if asked.text is not None else None
        return ResponseObject(
            self.id, "response", self.created, status, None,
            {"reason": "max_output_tokens"} if status == "incomplete" else None, asked.instructions,
            asked.max_output_tokens, self.model, self._items.output if over else [],
            asked.parallel_tool_calls is not False, None, {"effort": effort, "summary": None}, False,
            params.temperature, {"format": form or {"type": "text"}}, asked.tool_choice or "auto", asked.tools or [],
            params.top_p, "disabled", self._usage() if over else None, asked.metadata or {})

    def _usage(self) -> dict[str, Any]:
        usage = self.generation.usage
        cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details is not None else 0
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self.generation.reasoning_tokens or 0},
            "total_tokens": usage.total_tokens,
        }


_PIPELINE = Pipeline(
    ResponsesRequest, chat.prompts, chat.sampling, ResponseAnswer, chat.check, chat.options, as_chat, renamed)
router = generating_router()


@router.post("/v1/responses", **documented(
    "Answer a conversation, in the form of the Responses API", body=ResponsesRequest, reply=ResponseObject,
    event=ResponseEvent, errors=GENERATING_ERRORS))
async def responses(request: Request) -> Response:
    return await _PIPELINE(request)
