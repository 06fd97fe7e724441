"""JSON as a signed format needs it: one text per value, one value per text.

`canonical` writes RFC 8785 for the values we use (ASCII keys, integers below 2**53, no floats);
`loads` refuses duplicate keys, non-standard numbers and runaway nesting. A part of install.sh.
"""

import json
from collections.abc import Callable
from typing import Any, NoReturn

from offline_bundle.text import t


class StrictJSONError(ValueError):
    """The text is not JSON, or not unambiguous JSON."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise StrictJSONError(t("duplicate key {twice!r}", twice=twice))
    return result


def _no_constant(word: str) -> NoReturn:
    raise StrictJSONError(t("{word} is not JSON", word=word))


def loads(data: bytes, *, forbidden: frozenset[str] = frozenset(), constants: bool = False) -> Any:
    """Parse UTF-8 JSON bytes. Raises StrictJSONError on anything malformed, ambiguous or too deep.

    `forbidden` keys are refused at any depth; `constants` admits NaN and Infinity, which upstream model
    configurations use.
    """

    def build(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = _unique(pairs)
        if bad := forbidden & result.keys():
            raise StrictJSONError(t("the key {min!r} is forbidden", min=min(bad)))
        return result

    hook: Callable[[list[tuple[str, Any]]], dict[str, Any]] = build if forbidden else _unique
    try:
        return json.loads(
            data.decode("utf-8"), object_pairs_hook=hook, parse_constant=None if constants else _no_constant
        )
    except StrictJSONError:
        raise
    except UnicodeDecodeError as e:
        raise StrictJSONError(t("not UTF-8 text")) from e
    except RecursionError as e:
        raise StrictJSONError(t("nested too deeply")) from e
    except ValueError as e:
        raise StrictJSONError(str(e)) from e


def canonical(value: Any) -> bytes:
    """The one canonical encoding of `value`: sorted keys, no spaces, UTF-8, no trailing newline."""
    try:
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        return text.encode("utf-8")
    except (UnicodeEncodeError, RecursionError, ValueError) as e:
        raise StrictJSONError(t("holds a value that has no canonical form")) from e
