"""The grammar that a chat's answer must follow, from its format and from tool calls that are required, strict or
limited to some tools."""

from collections.abc import Sequence

from engine.server.openai.chat.tool_use import ToolUse
from engine.server.openai.request.schema import ChatRequest
from engine.server.openai.request.structured import answer_field, answer_form
from engine.server.openai.serving import ServedModel
from engine.text.grammar import forms, limits


def grammar_field(body: ChatRequest, use: ToolUse) -> str:
    """The field that asks for a grammar; "" for none."""
    of_calls = "tools" if use.strict else "tool_choice" if use.limited else ""
    return "tool_choice" if use.forced else answer_field(body) or of_calls


def chat_grammar(
    body: ChatRequest, use: ToolUse, model: ServedModel, prompt: Sequence[int], *, reasons: bool = True
) -> tuple[str, str] | None:
    """(llguidance's form, the field that asks for it); None if the model is free. Raises InvalidRequestError.

    Reasoning is not constrained; the grammar begins after it. `reasons` False: the reasoning is already over.
    """
    form = answer_form(body)
    if use.forced or use.strict or use.limited or (form is not None and use.calls):
        field = grammar_field(body, use)
        for schema in use.schemas.values():
            forms.check_schema(schema, "tools")
        answers = form is not None and not use.forced  # if a call is required, no other answer is possible
        lark = model.output.grammar(
            use.schemas, use.strict, forced=bool(use.forced), answers=answers, parallel=use.parallel,
            prompt=prompt, tokenizer=model.tokenizer, reasons=reasons)
        forms.check_size(lark, field, limits.MAX_CALLS_GRAMMAR_BYTES)
        if form is not None and answers:
            return forms.whole(form[0], lark), field
        return forms.whole({"lark_grammar": lark}), field
    if form is None:
        return None
    before = model.output.before_answer(prompt, model.tokenizer) if reasons else None
    return forms.whole(form[0], before), form[1]
