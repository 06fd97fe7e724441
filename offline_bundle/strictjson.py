"""JSON as a signed format needs it: one text per value, one value per text.

`canonical` writes RFC 8785 for the values we use (ASCII keys, integers below 2**53, no floats);
`loads` refuses duplicate keys, non-standard numbers and runaway nesting.
"""

import json
from typing import Any, NoReturn


class StrictJSONError(ValueError):
    """The text is not JSON, or not unambiguous JSON."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise StrictJSONError(f"duplicate key {key!r}")
            seen.add(key)
    return result


def _no_constant(word: str) -> NoReturn:
    raise StrictJSONError(f"{word} is not JSON")


def loads(data: bytes) -> Any:
    """Parse UTF-8 JSON bytes. Raises StrictJSONError on anything malformed, ambiguous or too deep."""
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except StrictJSONError:
        raise
    except UnicodeDecodeError as e:
        raise StrictJSONError("not UTF-8 text") from e
    except RecursionError as e:
        raise StrictJSONError("nested too deeply") from e
    except ValueError as e:
        raise StrictJSONError(str(e)) from e


def canonical(value: Any) -> bytes:
    """The one canonical encoding of `value`: sorted keys, no spaces, UTF-8, no trailing newline."""
    try:
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        return text.encode("utf-8")
    except (UnicodeEncodeError, RecursionError, ValueError) as e:
        raise StrictJSONError("holds a value that has no canonical form") from e
