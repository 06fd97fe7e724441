"""Grammars of forced and strict calls, in the model's own syntax.

    answer := [reasoning] calls              `tool_choice` demands a call
            | [reasoning] (text | call)*     it does not, but a function is `strict`
"""

from collections.abc import Mapping

from engine.text.parsers.calls import Schema, ToolFormat
from engine.text.parsers.grammar import ANYTHING, Grammar, escaped, regex
from engine.text.parsers.reasoning import ReasoningFormat

_SPACE = "/[ \\n]{0,2}/"  # between the reasoning and the first call


def calls_grammar(
    tools: ToolFormat, reasoning: ReasoningFormat | None, ids: Mapping[str, int], schemas: Mapping[str, Schema], *,
    strict: frozenset[str], forced: bool, parallel: bool, thinking: bool, may_think: bool,
) -> str:
    """The grammar of an answer. `thinking`: the prompt ends inside the reasoning; `may_think`: it can still begin."""
    grammar = Grammar(ids)
    one = [tools.call_rule(grammar, name, schema, strict=name in strict) for name, schema in schemas.items()]
    before = ""
    if reasoning is not None and (thinking or may_think):
        space = grammar.rule(_SPACE)
        if reasoning.closer in ids:
            opened = f"{grammar.text()}? {grammar.mark(reasoning.closer)} {space}"
        else:
            opened = f"{grammar.rule(regex(ANYTHING + escaped(reasoning.closer)), '[lazy]')} {space}"
        before = opened if thinking else f"({grammar.mark(reasoning.opener)} {opened})?"
    body = tools.calls_rule(grammar, one, parallel=parallel) if forced else tools.text_and_calls(grammar, one)
    return grammar.lark(f"{before} {body}".strip())
