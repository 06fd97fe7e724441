"""Grammars of forced, strict and limited calls, in the model's own syntax.

    answer := [reasoning] calls              `tool_choice` requires a call
            | [reasoning] (text | call)*     it does not, but a function is `strict`, or it allows only some tools
            | [reasoning] (@answer | calls)  it does not, and the request specifies a format for the answer
            | [reasoning] @answer            there are no functions
"""

from collections.abc import Mapping, Sequence

from engine.text.grammar.forms import ANSWER
from engine.text.parsers.calls import Schema, ToolFormat
from engine.text.parsers.lark_grammar import ANYTHING, SPACE, Grammar, containing, escaped
from engine.text.parsers.reasoning import ReasoningFormat

_SPACE = "/[ \\n]{0,2}/"  # between the reasoning and the first call


def calls_grammar(
    tools: ToolFormat, reasoning: ReasoningFormat | None, ids: Mapping[str, int], schemas: Mapping[str, Schema], *,
    strict: frozenset[str], forced: bool, parallel: bool, thinking: bool, may_think: bool, answers: bool = False,
) -> str:
    """The grammar of an answer. `thinking`: the prompt ends inside the reasoning; `may_think`: reasoning can still
    begin. `answers`: if no call is required, the answer has the format ANSWER."""
    grammar = Grammar(ids)
    one = [tools.call_rule(grammar, name, schema, strict=name in strict) for name, schema in schemas.items()]
    marks = _text_marks(tools.openers[0], tools.marks, ids)
    if forced:
        body = tools.calls_rule(grammar, one, parallel=parallel)
    elif answers:
        body = f"({ANSWER} | {tools.calls_beside_format(grammar, one, parallel=parallel)})"
    else:
        thoughts = _text_marks(reasoning.opener, reasoning.marks, ids) if reasoning is not None else []
        body = tools.text_and_calls(grammar, one, marks + thoughts)
    openers = [mark for mark in marks if mark in tools.openers]
    before = _reasoning(grammar, reasoning, ids, thinking=thinking, may_think=may_think, openers=openers)
    return grammar.lark(f"{before} {body}".strip())


def answer_behind_reasoning(
    reasoning: ReasoningFormat, ids: Mapping[str, int], *, thinking: bool, may_think: bool
) -> str:
    """The grammar of an answer in the format ANSWER, after reasoning."""
    grammar = Grammar(ids)
    return grammar.lark(f"{_reasoning(grammar, reasoning, ids, thinking=thinking, may_think=may_think)} {ANSWER}")


def _text_marks(opener: str, marks: Sequence[str], ids: Mapping[str, int]) -> list[str]:
    """The marks of a format that the parser finds in text. If the opener is a token, there are none."""
    return [mark for mark in marks if mark not in ids] if opener not in ids else []


def _reasoning(
    grammar: Grammar, reasoning: ReasoningFormat | None, ids: Mapping[str, int], *, thinking: bool, may_think: bool,
    openers: Sequence[str] = (),
) -> str:
    """The rule for what precedes the answer; "" for nothing. `openers`: the text of a call's openers. They would end
    the reasoning, as a token does that begins a call."""
    if reasoning is None or not (thinking or may_think):
        return ""
    space = grammar.rule(_SPACE)
    calls = containing(openers)
    if reasoning.closer in ids:
        opened = f"{grammar.text(calls)}? {grammar.mark(reasoning.closer)} {space}"
    else:
        opened = f"{grammar.lexeme(ANYTHING + escaped(reasoning.closer), calls, lazy=True)} {space}"
    if thinking:
        return opened
    opener = grammar.mark(reasoning.opener)
    if not grammar.has(reasoning.opener):  # the parser reads its text as reasoning, so it must win over an answer
        opener = grammar.lexeme(f"{SPACE}*{escaped(reasoning.opener)}", lazy=True)
    return f"({opener} {opened})?"
