"""Finds the syntax of a model's answers: named by the operator, or recognised by chat template and vocabulary."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.text.parsers.answer_grammar import answer_behind_reasoning, calls_grammar
from engine.text.parsers.calls import Schema, ToolFormat
from engine.text.parsers.events import ParserLimits
from engine.text.parsers.output import OutputParser
from engine.text.parsers.reasoning import REASONING_FORMATS, ReasoningFormat
from engine.text.parsers.tools.gemma4 import Gemma4
from engine.text.parsers.tools.hermes import Hermes
from engine.text.parsers.tools.llama3_json import Llama3Json
from engine.text.parsers.tools.mistral import Mistral
from engine.text.parsers.tools.qwen3_coder import Qwen3Coder
from engine.text.tokenizer import TextTokenizer

# vLLM's names; several of them are one syntax
TOOL_FORMATS: dict[str, type[ToolFormat]] = {
    "gemma4": Gemma4,
    "hermes": Hermes,
    "llama3_json": Llama3Json,
    "llama4_json": Llama3Json,
    "mistral": Mistral,
    "qwen3_coder": Qwen3Coder,
    "qwen3_json": Hermes,
    "qwen3_xml": Qwen3Coder,
}
_TAIL = 64  # tokens at the end of a prompt that show whether it ends inside the reasoning


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """The format of a model's answers, in the tokens of its vocabulary."""

    reasoning: ReasoningFormat | None
    tools: ToolFormat | None
    ids: Mapping[str, int]  # the ids of all marks that are tokens

    def watched(self, *, calls: bool) -> dict[int, str]:
        """The tokens that the detokenizer must distinguish from text."""
        return {self.ids[literal]: literal for literal in self._marks(calls) if literal in self.ids}

    def parser(self, *, calls: bool, schemas: Mapping[str, Schema], thinking: bool, limits: ParserLimits,
               formatted: bool = False) -> OutputParser:
        """`formatted`: the answer follows a grammar that was made with `answers`."""
        literal = tuple(mark for mark in self._marks(calls) if mark not in self.ids)
        return OutputParser(self.reasoning, self.tools if calls else None, schemas, literal_marks=literal,
                            thinking=thinking, limits=limits, formatted=formatted)

    def thinks_after(self, prompt: Sequence[int], tokenizer: TextTokenizer) -> bool:
        """Whether the prompt ends inside the reasoning, as with templates that switch thinking on."""
        reasoning = self.reasoning
        if reasoning is None:
            return False
        opener, closer = self.ids.get(reasoning.opener), self.ids.get(reasoning.closer)
        if opener is None:
            tail = tokenizer.decode(prompt[-_TAIL:], skip_special_tokens=False).rstrip()
            return tail.endswith((reasoning.opener, (reasoning.opener + reasoning.label).rstrip()))
        return opener is not None and _last_of(prompt, opener, closer) == opener

    def may_think_after(self, prompt: Sequence[int]) -> bool:
        """Whether the answer can begin with reasoning, because the template has not already closed it."""
        reasoning = self.reasoning
        if reasoning is None:
            return False
        opener, closer = self.ids.get(reasoning.opener), self.ids.get(reasoning.closer)
        return closer is None or _last_of(prompt, opener, closer) != closer

    def grammar(self, schemas: Mapping[str, Schema], strict: frozenset[str], *, forced: bool, parallel: bool,
                prompt: Sequence[int], tokenizer: TextTokenizer, answers: bool = False, reasons: bool = True) -> str:
        """The grammar of an answer with required, strict or limited calls (engine.text.parsers.answer_grammar).
        `reasons` False: the reasoning is over, whatever the prompt ends with."""
        assert self.tools is not None
        return calls_grammar(
            self.tools, self.reasoning, self.ids, schemas, strict=strict, forced=forced, parallel=parallel,
            thinking=reasons and self.thinks_after(prompt, tokenizer),
            may_think=reasons and self.may_think_after(prompt), answers=answers)

    def before_answer(self, prompt: Sequence[int], tokenizer: TextTokenizer) -> str | None:
        """The grammar of reasoning followed by an answer in its own format; None if there can be no reasoning."""
        thinking, may_think = self.thinks_after(prompt, tokenizer), self.may_think_after(prompt)
        if self.reasoning is None or not (thinking or may_think):
            return None
        return answer_behind_reasoning(self.reasoning, self.ids, thinking=thinking, may_think=may_think)

    def _marks(self, calls: bool) -> tuple[str, ...]:
        """The marks that may occur. If the opener is a token, so are the later marks: one that the vocabulary lacks
        does not occur."""
        groups = [(self.reasoning.opener, self.reasoning.marks)] if self.reasoning is not None else []
        if calls and self.tools is not None:
            groups.append((self.tools.openers[0], self.tools.marks))
        return tuple(mark for opener, marks in groups for mark in marks if opener not in self.ids or mark in self.ids)


def _last_of(prompt: Sequence[int], *tokens: int | None) -> int | None:
    return next((token for token in reversed(prompt[-_TAIL:]) if token in tokens), None)


def output_format(tokenizer: TextTokenizer, tool_parser: str = "auto", reasoning_parser: str = "auto") -> OutputFormat:
    """The format of the model with this tokenizer. The parser names are keys of the tables, `auto` or `none`."""
    tool_parser = _tools_of(tokenizer) if tool_parser == "auto" else tool_parser
    reasoning_parser = _reasoning_of(tokenizer) if reasoning_parser == "auto" else reasoning_parser
    tools = None if tool_parser == "none" else TOOL_FORMATS[tool_parser]()
    reasoning = None if reasoning_parser == "none" else REASONING_FORMATS[reasoning_parser]
    marks = (*(tools.marks if tools else ()), *(reasoning.marks if reasoning else ()))
    ids = {mark: token for mark in marks if (token := tokenizer.token_id(mark)) is not None}
    return OutputFormat(reasoning, tools, ids)


def _tools_of(tokenizer: TextTokenizer) -> str:
    template = tokenizer.template
    if template is None:
        return "none"
    source, knows = template.source, tokenizer.token_id
    if "<|tool_call>" in source and knows("<|tool_call>") is not None:
        return "gemma4"
    if "<function=" in source and "<parameter=" in source:
        return "qwen3_coder"
    if "[TOOL_CALLS]" in source:
        return "mistral"
    if "<|start_header_id|>" in source and "tools" in template.variables and '"parameters": ' in source:
        return "llama3_json"
    # If the template does not show tools, they are added in the form of Hermes (engine.text.tool_prompt).
    return "hermes" if "<tool_call>" in source or "tools" not in template.variables else "none"


def _reasoning_of(tokenizer: TextTokenizer) -> str:
    for name, opener in (("gemma4", "<|channel>"), ("mistral", "[THINK]"), ("qwen3", "<think>")):
        if tokenizer.token_id(opener) is not None:
            return name
    return "none"
