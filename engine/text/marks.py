"""Control tokens that a user typed stay plain text; control tokens that the chat template wrote stay control tokens.

A template mixes both into one string, so provenance must travel through the template. Unicode noncharacters (U+FDD0…,
reserved for a process's own use and never valid in exchanged text) do that. Before rendering, every control literal
in user text is put between OPEN and CLOSE: the template can still trim it, compare it or split at it::

    user      "a<|im_end|>b"      ->  "a" OPEN "<|im_end|>" CLOSE "b"
    template  "<|im_start|>user\\n" + content + "<|im_end|>\\n"

After rendering, `resolve` puts BREAK between all characters of the marked literals. The tokenizer matches control
tokens in the raw text first, where a broken literal does not match, and its first normaliser then drops all marks.
"""

import re
from collections.abc import Iterable
from typing import Any

OPEN, CLOSE, BREAK, TAIL = "\ufdd0", "\ufdd1", "\ufdd2", "\ufdd3"
MARKS = OPEN + CLOSE + BREAK + TAIL
_TO_REPLACEMENT = dict.fromkeys(map(ord, MARKS), "\ufffd")


class ControlTokens:
    """The control literals of one tokenizer, and the marking of user text against them."""

    def __init__(self, literals: Iterable[str]) -> None:
        self.literals = sorted({text for text in literals if len(text) > 1}, key=lambda text: (-len(text), text))
        # Case is ignored because templates change case (type names in tool declarations).
        either = "|".join(map(re.escape, self.literals)) or r"(?!)"
        self._literal = re.compile(either, re.IGNORECASE)
        self._marked = re.compile(f"{OPEN}({either}){CLOSE}", re.IGNORECASE)
        self._heads = frozenset(text[:n] for text in self.literals for n in range(1, len(text)))
        self._tails = frozenset(text[n:] for text in self.literals for n in range(1, len(text)))
        self._longest = max(map(len, self.literals), default=0)

    def plain(self, text: str) -> str:
        """`text` with every control literal broken, ready to encode."""
        return self._literal.sub(_break, _cleaned(text))

    def mark(self, text: str) -> str:
        """`text` with every control literal marked, ready for a template.

        A text that begins or ends with a part of a literal gets a BREAK there, because the template's own characters
        might complete the literal.
        """
        text = _cleaned(text)
        marked = self._literal.sub(lambda match: f"{OPEN}{match[0]}{CLOSE}", text)
        window = range(1, min(self._longest, len(text)))
        if any(text[:n] in self._tails for n in window) or text in self._tails:
            marked = BREAK + marked
        if any(text[-n:] in self._heads for n in window) or text in self._heads:
            marked += BREAK
        return marked

    def mark_tree(self, value: Any) -> Any:
        """`mark` on every string, keys included, of nested dicts and lists."""
        if isinstance(value, str):
            return self.mark(value)
        if isinstance(value, dict):
            return {self.mark_tree(key): self.mark_tree(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.mark_tree(item) for item in value]
        return value

    def resolve(self, rendered: str) -> str:
        """A rendered template, ready to encode: marked literals are broken, the template's own are left intact."""
        return self._marked.sub(lambda match: _break(match, 1), rendered)


def unmarked(text: str) -> str:
    """`text` without any marks, for people."""
    return text.translate(dict.fromkeys(map(ord, MARKS)))


def _cleaned(text: str) -> str:
    """Replace marks that the sender wrote by U+FFFD, as Unicode recommends for noncharacters."""
    return text if text.isascii() else text.translate(_TO_REPLACEMENT)


def _break(match: re.Match[str], group: int = 0) -> str:
    return BREAK.join(match[group])
