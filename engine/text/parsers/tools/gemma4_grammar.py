"""Gemma 4's own syntax of values as grammar rules of a JSON schema: bare keys in order, quote tokens around strings."""

from collections.abc import Mapping
from typing import Any

from engine.errors import InvalidRequestError
from engine.text.parsers.lark_grammar import Grammar, either, quoted, regex, string_regex
from engine.text.parsers.schema_values import resolved, types_of

_QUOTE = '<|"|>'
_INTEGER, _NUMBER = "-?(0|[1-9][0-9]{0,17})", "-?(0|[1-9][0-9]{0,17})(\\.[0-9]{1,17})?([eE][-+]?[0-9]{1,3})?"
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_DEEPEST = 32


class GemmaValues:
    """`root`: the schema in which references are resolved. Only types, members, lengths, patterns, bounds and choices
    are enforced; with `strict`, a schema that says more is refused."""

    def __init__(self, grammar: Grammar, root: Any, *, strict: bool) -> None:
        self._grammar, self._root, self._strict = grammar, root, strict
        self._depth = 0

    def value(self, schema: Any) -> str:
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if isinstance(reference, str):
            key = f"{id(self._root)}:{reference}"
            return self._grammar.recursive(key, lambda: self.value(self._target(schema)))
        if not isinstance(schema, Mapping):
            return self._any()
        if self._depth >= _DEEPEST:
            raise InvalidRequestError("tools: the schemas are nested too deeply to be enforced.", "tools")
        self._depth += 1
        try:
            return self._of(schema)
        finally:
            self._depth -= 1

    def object(self, schema: Any) -> str:
        schema = resolved(schema, self._root) or {}
        properties = schema.get("properties")
        if not isinstance(properties, Mapping) or not properties:
            free = schema.get("additionalProperties", not self._strict or self._depth > 0)
            return self._free_object(free) if free is not False else '"{" "}"'
        required = schema.get("required") if isinstance(schema.get("required"), list) else []
        # From the last member backwards: `rest` follows a member, `begin` is for the place before the first member.
        rest = begin = self._grammar.rule('"}"')
        for key in sorted(properties, key=str.lower, reverse=True):  # as Jinja's dictsort
            pair = self._grammar.rule(f"{quoted(f'{key}:')} {self.value(properties[key])}")
            optional = key not in required
            begin = self._grammar.rule(f"{pair} {rest}{f' | {begin}' if optional else ''}")
            rest = self._grammar.rule(f'"," {pair} {rest}{f" | {rest}" if optional else ""}')
        return self._grammar.rule(f'"{{" {begin}')

    def _of(self, schema: Mapping[str, Any]) -> str:
        if "const" in schema:
            return self._literal(schema["const"])
        if isinstance(values := schema.get("enum"), list) and values:
            return either([self._literal(value) for value in values])
        for word in ("anyOf", "oneOf"):
            if isinstance(options := schema.get(word), list) and options:
                return self._grammar.rule(" | ".join(self.value(option) for option in options))
        if isinstance(parts := schema.get("allOf"), list) and len(parts) == 1:
            return self.value(parts[0])
        types = sorted(types_of(schema, self._root))
        return self._grammar.rule(" | ".join(self._typed(name, schema) for name in types)) if types else self._any()

    def _typed(self, name: str, schema: Mapping[str, Any]) -> str:
        grammar = self._grammar
        if name == "string":
            pattern = string_regex(schema)
            text = grammar.text() + "?" if pattern is None else grammar.rule(regex(pattern))
            return f"{grammar.mark(_QUOTE)} {text} {grammar.mark(_QUOTE)}"
        if name in ("integer", "number"):
            bounds = {word: schema[word] for word in _BOUNDS if word in schema}
            if bounds:
                return grammar.json({"type": name, **bounds}, None, strict=self._strict)
            return grammar.rule(regex(_INTEGER if name == "integer" else _NUMBER))
        if name == "object":
            return self.object(schema)
        if name == "array":
            return self._array(schema)
        return {"boolean": '("true" | "false")', "null": '"null"'}.get(name) or self._any()

    def _array(self, schema: Mapping[str, Any]) -> str:
        item = self.value(schema.get("items"))
        least, most = schema.get("minItems"), schema.get("maxItems")
        least = least if isinstance(least, int) and least > 0 else 0
        if not isinstance(most, int):
            more = f'("," {item}){{{max(least - 1, 0)},}}'
        elif most < 1:
            return '"[" "]"'
        else:
            more = f'("," {item}){{{max(least - 1, 0)},{most - 1}}}' if most > 1 else ""
        items = f"{item} {more}"
        return self._grammar.rule(f'"[" {items if least else f"({items})?"} "]"')

    def _literal(self, value: Any) -> str:
        quote = self._grammar.mark(_QUOTE)
        if isinstance(value, str):
            return f"({quote} {quoted(value)} {quote})" if value else f"({quote} {quote})"
        if isinstance(value, bool) or value is None:
            return quoted({True: "true", False: "false", None: "null"}[value])
        if isinstance(value, int | float):
            return quoted(str(value))
        return self._any()

    def _free_object(self, schema: Any) -> str:
        value = self.value(schema) if isinstance(schema, Mapping) else self._any()
        pair = self._grammar.rule(f'/[A-Za-z_][A-Za-z0-9_]{{0,63}}/ ":" {value}')
        return self._grammar.rule(f'"{{" ({pair} ("," {pair})*)? "}}"')

    def _any(self) -> str:
        """Any value of the syntax."""
        grammar, quote = self._grammar, self._grammar.mark(_QUOTE)

        def body() -> str:
            value = self._any()
            pair = f'/[A-Za-z_][A-Za-z0-9_]{{0,63}}/ ":" {value}'
            return (f'{quote} {grammar.text()}? {quote} | {regex(_NUMBER)} | "true" | "false" | "null" '
                    f'| "[" ({value} ("," {value})*)? "]" | "{{" ({pair} ("," {pair})*)? "}}"')

        return grammar.recursive("any", body)

    def _target(self, schema: Any) -> Any:
        target = resolved(schema, self._root)
        if target is None:
            raise InvalidRequestError("tools: a $ref of a schema points nowhere.", "tools")
        return target
