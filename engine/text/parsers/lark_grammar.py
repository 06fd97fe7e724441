"""Writes the rules of a grammar in Lark, as llguidance reads it, with the model's control tokens by their ids."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from engine.errors import InvalidRequestError

ANYTHING = "(.|\\n)*"
SPACE = "[\\s\\x1c-\\x1f]"  # what str.isspace() says is space
_MOST_RULES = 4096
# Models write JSON like Python's json.dumps. If white space were free, they might write nothing else for ever.
_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Grammar:
    """Collects rules. Wherever Lark takes a rule's name, an expression is allowed, too."""

    def __init__(self, ids: Mapping[str, int]) -> None:
        self._ids = ids
        self._rules: dict[str, str] = {}
        self._names: dict[str, str] = {}

    def mark(self, literal: str) -> str:
        return f"<[{self._ids[literal]}]>" if literal in self._ids else quoted(literal)

    def has(self, literal: str) -> bool:
        return literal in self._ids

    def rule(self, body: str, options: str = "") -> str:
        """The name of a rule with this body; equal bodies share a rule. Raises InvalidRequestError if there are too
        many."""
        key = f"{options}:{body}"
        if key not in self._names:
            if len(self._names) >= _MOST_RULES:
                raise InvalidRequestError("tools: the schemas are too large to be enforced.", "tools")
            self._names[key] = name = f"r{len(self._names)}"
            self._rules[name] = f"{name}{options}: {body}"
        return self._names[key]

    def recursive(self, key: str, body: Callable[[], str]) -> str:
        """A rule whose body may refer to the rule itself, by asking for the same key."""
        key = f"@{key}"
        if key not in self._names:
            self._names[key] = name = f"s{len(self._names)}"
            self._rules[name] = f"{name}: {body()}"
        return self._names[key]

    def json(self, schema: Any, root: Any, *, strict: bool) -> str:
        """A JSON value. With `strict`, it is an error if the library cannot enforce the schema."""
        schema = dict(schema) if isinstance(schema, Mapping) else {}
        if isinstance(root, Mapping):
            schema = {name: root[name] for name in ("$defs", "definitions") if name in root} | schema
        schema["x-guidance"] = {**_STYLE, "lenient": not strict}
        return self.rule(f"%json {json.dumps(schema)}")

    def text(self, *unlike: str) -> str:
        """Any text that matches none of the regular expressions `unlike` as a whole."""
        return self.lexeme("(.|\\n)+", *unlike)

    def lexeme(self, pattern: str, *unlike: str, lazy: bool = False) -> str:
        """Text that matches `pattern` and none of `unlike`. `lazy`: it ends as soon as it matches, and wins over
        other lexemes that would go on."""
        options = "[lazy]" if lazy else ""
        excluded = "|".join(filter(None, unlike))
        if not excluded:
            return self.rule(regex(pattern), options)
        body = f"{regex(pattern)} & ~{regex(f'({excluded})')}"
        if (key := f"T:{body}") not in self._names:
            self._names[key] = name = f"T{len(self._names)}"  # only terminals, in capitals, can exclude
            self._rules[name] = f"{name}: {body}"
        return self.rule(self._names[key], options)

    def lark(self, start: str) -> str:
        return "\n".join(["%llguidance {}", f"start: {start}", *self._rules.values(), ""])


def either(options: Sequence[str]) -> str:
    return options[0] if len(options) == 1 else f"({' | '.join(options)})"


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=True)


def regex(pattern: str) -> str:
    return f"/{pattern}/"


_SPECIAL = frozenset("\\.+*?()|[]{}^$#&-~/<>\"' ")


def escaped(text: str) -> str:
    """A regular expression that matches `text`."""
    return "".join({"\n": "\\n", "\t": "\\t"}.get(c, f"\\x{ord(c):02x}" if c in _SPECIAL else c) for c in text)


def containing(literals: Iterable[str]) -> str:
    """A regular expression for text with one of `literals` in it; "" if there are none."""
    options = "|".join(map(escaped, literals))
    return f"{ANYTHING}({options}){ANYTHING}" if options else ""


def string_regex(schema: Any) -> str | None:
    """The regular expression for a string's `pattern` or length; None if any text is allowed."""
    if not isinstance(schema, Mapping):
        return None
    if isinstance(pattern := schema.get("pattern"), str) and pattern:
        begin = "" if pattern.startswith("^") else ANYTHING
        end = "" if pattern.endswith("$") and not pattern.endswith("\\$") else ANYTHING
        return f"{begin}({pattern.removeprefix('^').removesuffix('$' if not end else '')}){end}".replace("/", "\\x2f")
    least, most = schema.get("minLength"), schema.get("maxLength")
    if isinstance(least, int) or isinstance(most, int):
        return f"(.|\\n){{{least or 0},{most if isinstance(most, int) else ''}}}"
    return None
