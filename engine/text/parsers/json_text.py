"""JSON in a stream: one value is checked and passed on while it is being written.

Models write raw line breaks into strings; they are escaped, so that what is passed on is valid JSON.
"""

import json
import re
from collections.abc import Callable

from engine.text.parsers.source import BrokenCall, Reading, Source

# The part of a string that needs no inspection: text and complete escapes
_PLAIN = re.compile(r'(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))+')
_SPACE = re.compile(r"[ \t\n\r]+")
_WORD = re.compile(r"[-+.0-9a-zA-Z]+")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_HEX = frozenset("0123456789abcdefABCDEF")
_LONGEST_WORD = 400  # no meaningful number has more characters


def json_value(source: Source, out: Callable[[str], None], depth: int) -> Reading[None]:
    """Consume one JSON value and pass its text on. Raises BrokenCall at the first invalid character."""
    closers: list[str] = []  # of the open objects and arrays
    while True:
        yield from _space(source, out)
        character = yield from source.character()
        if character in ("{", "["):
            if len(closers) == depth:
                raise BrokenCall
            out(source.take(1))
            closers.append("}" if character == "{" else "]")
            yield from _space(source, out)
            if (yield from source.character()) != closers[-1]:
                if character == "{":
                    yield from _key(source, out)
                continue
            out(source.take(1))
            closers.pop()
        elif character == '"':
            yield from json_string(source, out)
        else:
            yield from _word(source, out)
        while closers:  # after a value
            yield from _space(source, out)
            character = yield from source.character()
            if character == ",":
                out(source.take(1))
                if closers[-1] == "}":
                    yield from _key(source, out)
                break
            if character != closers[-1]:
                raise BrokenCall
            out(source.take(1))
            closers.pop()
        else:
            return


def json_string(source: Source, out: Callable[[str], None]) -> Reading[None]:
    """Consume a string with its quotes. Text that spells a mark is part of it."""
    if (yield from source.character()) != '"':
        raise BrokenCall
    out(source.take(1))
    with source.value():
        while (character := (yield from source.character())) or source.text_mark():
            if not character:
                continue
            if character == '"':
                out(source.take(1))
                return
            if size := source.matching(_PLAIN):
                text = source.take(size)
                whole = _PLAIN.match(text)  # the limit of a call may have cut an escape in two
                out(whole[0] if whole else "")
            elif character == "\\":
                yield from _escape(source, out)
            else:
                out(json.dumps(source.take(1))[1:-1])
    raise BrokenCall


def json_key(source: Source) -> Reading[str]:
    """Consume a key and the colon after it; returns the key."""
    pieces: list[str] = []
    yield from json_string(source, pieces.append)
    yield from source.spaces()
    if (yield from source.character()) != ":":
        raise BrokenCall
    source.take(1)
    return decoded("".join(pieces))


def decoded(text: str) -> str:
    """The value of a JSON string."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise BrokenCall from None
    if not isinstance(value, str):
        raise BrokenCall
    return value.encode("utf-8", "replace").decode()  # half of an escaped surrogate pair is not valid text


def _key(source: Source, out: Callable[[str], None]) -> Reading[None]:
    yield from _space(source, out)
    yield from json_string(source, out)
    yield from _space(source, out)
    if (yield from source.character()) != ":":
        raise BrokenCall
    out(source.take(1))


def _escape(source: Source, out: Callable[[str], None]) -> Reading[None]:
    """Consume an escape. It is passed on as a whole, for readers that decode the pieces as they arrive."""
    text = source.take(1)
    character = yield from _next(source)
    text += character
    if character == "u":
        for _ in range(4):
            character = yield from _next(source)
            text += character
            if character not in _HEX:
                raise BrokenCall
    elif character not in '"\\/bfnrt':
        raise BrokenCall
    out(text)


def _next(source: Source) -> Reading[str]:
    if not (yield from source.character()):
        raise BrokenCall
    return source.take(1)


def _word(source: Source, out: Callable[[str], None]) -> Reading[None]:
    """Consume a number or a constant. It is passed on as a whole, because `1` may become `1.5`, and `nul` is
    invalid."""
    word = ""
    while (yield from source.character()):
        if not (size := source.matching(_WORD)):
            break
        word += source.take(min(size, _LONGEST_WORD + 1 - len(word)))  # as much whatever the pieces are
        if len(word) > _LONGEST_WORD:
            raise BrokenCall
    if word not in ("true", "false", "null") and not _NUMBER.fullmatch(word):
        raise BrokenCall
    out(word)


def _space(source: Source, out: Callable[[str], None]) -> Reading[None]:
    while (yield from source.character()) in tuple(" \t\n\r"):
        out(source.take(source.matching(_SPACE)))
