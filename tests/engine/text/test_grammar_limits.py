"""Hostile grammars: each is refused or compiled within moments, and the next request finds the compiler as it was."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.errors import InvalidRequestError
from engine.text.grammar import forms, limits
from engine.text.grammar.compiler import GrammarCompiler, GrammarMatcher

SECONDS = 5.0  # of a machine that is busy; alone the slowest of them takes half a second


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def chain(length: int, link: Callable[[dict[str, Any]], dict[str, Any]], last: Any) -> dict[str, Any]:
    """Definitions that each use the next one."""
    definitions = {f"a{i}": link({"$ref": f"#/$defs/a{i + 1}"}) for i in range(length)} | {f"a{length}": last}
    return {"$ref": "#/$defs/a0", "$defs": definitions}


SCHEMAS: dict[str, Any] = {
    "deep": nested(60), "as deep as JSON": nested(5000), "itself": {"$ref": "#"},
    "all of itself": {"allOf": [{"$ref": "#"}]},
    "wide": {"type": "object", "properties": {f"k{i}": {"enum": [f"{i}"]} for i in range(5000)}},
    "as wide as allowed": {"type": "object", "properties": {f"k{i}": {"enum": [i]} for i in range(512)}},
    "exponential objects": chain(40, lambda next_: {"type": "object", "properties": dict.fromkeys("abcd", next_)}, {}),
    "exponential conjunctions": chain(30, lambda next_: {"allOf": [next_, next_]}, {"type": "integer"}),
    "exponential choices": chain(40, lambda next_: {"anyOf": [next_, {"type": "array", "items": next_}]}, True),
    "products": {"allOf": [{"anyOf": [{"properties": {f"{name}{i}": {"type": "integer"}}} for name in "pq"]}
                           for i in range(20)]},
    "a thousand cubed": {"type": "array", "minItems": 1000, "items": {"type": "array", "minItems": 1000, "items": {
        "type": "array", "minItems": 1000}}},
    "a billion items": {"type": "array", "items": {"type": "integer"}, "minItems": 10**9},
    "a multiple": {"type": "integer", "multipleOf": 99991},
    "primes": {"type": "integer", "allOf": [{"multipleOf": prime} for prime in (97, 89, 83)]},
    "many multiples": {"type": "array", "prefixItems": [{"type": "integer", "multipleOf": 9973}] * 60},
    "an endless fraction": {"type": "number", "multipleOf": 1e-300},
    "patterns": {"type": "object", "properties": {
        f"k{i}": {"type": "string", "pattern": f"(a|b|c){{1,300}}[a-z]{{5,500}}{i}"} for i in range(300)}},
    "a megabyte": {"enum": ["x" * 1_000_000]},
}  # fmt: skip
REGEXES = {
    "repeated repeats": "((a{0,1000}){0,1000}){0,1000}", "exponential automaton": "(.|\n)*a(.|\n){30}",
    "backtracking": "(x+x+)+y", "optional": "a?" * 2000 + "a" * 2000, "unicode": "[\\p{L}\\p{N}]{1,2000}",
    "alternatives": "|".join(f"w{i}" for i in range(1200)), "long": "ab" * 4000, "too long": "ab" * 100_000,
}
GRAMMARS = {
    "ambiguous": 'start: e\ne: e e e | "a"?', "endless": "start: start start |",
    "doubling": "start: r0\n" + "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(2000)) + '\nr2000: "a"',
    "deep": "start: " + "(" * 5000 + '"a"' + ")" * 5000, "deep GBNF": "root ::= " + "(" * 3000 + '"a"' + ")" * 3000,
    "junk": "::=" * 9000, "a schema inside": 'start: %json {"multipleOf": 99991}',
}


@pytest.fixture(scope="module")
def compiler(smollm2_dir: Path) -> GrammarCompiler:
    made = GrammarCompiler(smollm2_dir, 49152, [2])
    compiled(made, forms.whole(forms.regex("a", "x")))  # reads the vocabulary
    return made


def compiled(compiler: GrammarCompiler, grammar: str) -> GrammarMatcher:
    pending = compiler.begin(grammar)
    while (matcher := pending.poll()) is None:
        time.sleep(0.002)
    return matcher


def follow(compiler: GrammarCompiler, make: Callable[[], dict[str, Any]]) -> str:
    """Compile, and compute some masks; returns the reason of a refusal."""
    began = time.monotonic()
    try:
        matcher = compiled(compiler, forms.whole(make()))
        for token in (*b"aa", 0):
            compiler.masks([0], [matcher])
            if matcher.error or matcher.finished:
                break
            matcher.accept(token)
        why = matcher.error
    except InvalidRequestError as error:
        why = str(error)
    assert time.monotonic() - began < SECONDS
    assert len(why) < 500, "no mirror of the input"
    began = time.monotonic()
    compiled(compiler, forms.whole(forms.choice([f"next {began}"], "x")))
    assert time.monotonic() - began < SECONDS, "a thread is still busy with it"
    return why


@pytest.mark.parametrize("name", SCHEMAS)
def test_schemas(compiler: GrammarCompiler, name: str) -> None:
    why = follow(compiler, lambda: forms.json_schema(SCHEMAS[name], "x", strict=True))
    refused = ("deep", "as deep as JSON", "wide", "a multiple", "primes", "many multiples", "a megabyte")
    assert why or name not in refused


@pytest.mark.parametrize("number", [-(2**63), -(2**63) + 1, -9223372036854775799, -(10**19), -1e30])
@pytest.mark.parametrize("schema", [
    lambda n: {"const": n}, lambda n: {"enum": ["a", n]}, lambda n: {"type": "integer", "minimum": n, "maximum": n},
    lambda n: {"type": "object", "properties": {"a": {"allOf": [{"type": "integer", "exclusiveMaximum": n}]}}},
], ids=["const", "enum", "range", "inside"])
def test_numbers_that_the_library_dies_of(schema: Callable[[float], dict], number: float) -> None:
    """Found by the fuzzer: each of them ended the engine's process by a stack that overflowed."""
    with pytest.raises(InvalidRequestError, match="below"):
        forms.json_schema(schema(number), "x", strict=True)


@pytest.mark.parametrize("number", [-9 * 10**18, 2**63 - 1, 2**63, 10**19, 10**30])
def test_other_large_numbers_are_followed(compiler: GrammarCompiler, number: int) -> None:
    assert not compiled(compiler, forms.whole(forms.json_schema({"const": number}, "x", strict=True))).error


@pytest.mark.parametrize("name", REGEXES)
def test_regular_expressions(compiler: GrammarCompiler, name: str) -> None:
    follow(compiler, lambda: forms.regex(REGEXES[name], "x"))


@pytest.mark.parametrize("name", GRAMMARS)
def test_grammars(compiler: GrammarCompiler, name: str) -> None:
    assert follow(compiler, lambda: forms.grammar(GRAMMARS[name], "x")) or name in ("ambiguous", "endless", "doubling")


def test_ordinary_multiples_are_allowed(compiler: GrammarCompiler) -> None:
    for multiple in (7, 0.01, 100, 0.25):
        schema = {"type": "number", "multipleOf": multiple}
        assert not compiled(compiler, forms.whole(forms.json_schema(schema, "x", strict=True))).error


def test_what_takes_too_long_is_refused_and_the_cache_keeps_its_bounds(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "COMPILE_SECONDS", 0.001)
    slow = '{"grammars": [{"json_schema": {"type": "integer", "multipleOf": 19997}}]}'
    with pytest.raises(InvalidRequestError, match="took more than"):
        compiled(compiler, slow)
    monkeypatch.setattr(limits, "COMPILE_SECONDS", 30.0)
    monkeypatch.setattr(limits, "CACHED_GRAMMARS", 3)
    for i in range(8):
        compiled(compiler, forms.whole(forms.choice([f"{i}"], "x")))
    assert len(compiler._cache) == 3
    monkeypatch.setattr(limits, "CACHED_CHARACTERS", 10)
    compiled(compiler, forms.whole(forms.choice(["last"], "x")))
    assert not compiler._cache


def test_equal_grammars_are_compiled_once_and_followed_apart(compiler: GrammarCompiler) -> None:
    grammar = forms.whole(forms.choice(["aa", "ab"], "x"))
    first, second = compiled(compiler, grammar), compiled(compiler, grammar)
    a = next(i for i in range(49152) if _allows(compiler, first, i))
    first.accept(a)
    assert _allows(compiler, second, a)
    assert first.library is not second.library


def _allows(compiler: GrammarCompiler, matcher: GrammarMatcher, token: int) -> bool:
    return bool(compiler.masks([0], [matcher]).words[0][token // 32] >> (token % 32) & 1)
