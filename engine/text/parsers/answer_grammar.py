"""Grammars of forced, strict and limited calls, in the model's own syntax.

    answer := [reasoning] calls              `tool_choice` requires a call
            | [reasoning] (text | call)*     it does not, but a function is `strict`, or it allows only some tools
            | [reasoning] (@answer | calls)  it does not, and the request specifies a format for the answer
            | [reasoning] @answer            there are no functions
"""

from collections.abc import Mapping

from engine.text.grammar.forms import ANSWER
from engine.text.parsers.calls import Schema, ToolFormat
from engine.text.parsers.lark_grammar import ANYTHING, Grammar, escaped, regex
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
    if forced or answers:
        body = tools.calls_rule(grammar, one, parallel=parallel)
        if not forced:
            body = f"({ANSWER} | {body})"
    else:
        body = tools.text_and_calls(grammar, one)
    before = _reasoning(grammar, reasoning, ids, thinking=thinking, may_think=may_think)
    return grammar.lark(f"{before} {body}".strip())


def answer_behind_reasoning(
    reasoning: ReasoningFormat, ids: Mapping[str, int], *, thinking: bool, may_think: bool
) -> str:
    """The grammar of an answer in the format ANSWER, after reasoning."""
    grammar = Grammar(ids)
    return grammar.lark(f"{_reasoning(grammar, reasoning, ids, thinking=thinking, may_think=may_think)} {ANSWER}")


def _reasoning(
    grammar: Grammar, reasoning: ReasoningFormat | None, ids: Mapping[str, int], *, thinking: bool, may_think: bool
) -> str:
    """The rule for what precedes the answer; "" for nothing."""
    if reasoning is None or not (thinking or may_think):
        return ""
    space = grammar.rule(_SPACE)
    if reasoning.closer in ids:
        opened = f"{grammar.text()}? {grammar.mark(reasoning.closer)} {space}"
    else:
        opened = f"{grammar.rule(regex(ANYTHING + escaped(reasoning.closer)), '[lazy]')} {space}"
    return opened if thinking else f"({grammar.mark(reasoning.opener)} {opened})?"
