"""Sentences that can be translated: each *is* its English wording, and keeps its template and values.

This package marks its words and knows no other language; installer/base/i18n.py has the catalogue and picks
the language.
"""

import errno
from collections.abc import Callable, Iterable, Mapping
from typing import Any


class Text(str):
    """An English sentence with its `source`, and its `params` or `parts`. Made by `t` and `joined`."""

    __slots__ = ("params", "parts", "source")

    source: str
    params: Mapping[str, Any]
    parts: tuple[str, ...] | None

    def __str__(self) -> str:
        return str.__str__(self)

    def with_values(self, change: Callable[[Any], Any]) -> "Text":
        """The same sentence, each of its values or parts changed."""
        if self.parts is not None:
            return joined([change(part) for part in self.parts], self.source)
        return t(self.source, **{name: change(value) for name, value in self.params.items()})

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)  # a copy or a pickle is plain English


def t(source: str, /, **params: Any) -> Text:
    """`source` with its {placeholders} filled in. Must be called with a literal: the catalogue is made from these."""
    text = Text(source.format(**params))
    text.source, text.params, text.parts = source, params, None
    return text


def joined(parts: Iterable[str], separator: str = ", ") -> Text:
    """A list of texts as one text."""
    parts = tuple(parts)
    text = Text(separator.join(parts))
    text.source, text.params, text.parts = separator, {}, parts
    return text


def plain(error: Exception) -> str:
    """What `error` says: the sentence it was made with, if it was one, else its text."""
    said = error.args[0] if len(error.args) == 1 else None
    return said if isinstance(said, str) and hasattr(said, "source") else str(error)


def complaint(finding: Any) -> str:
    """One entry of pydantic's `ValidationError.errors` in words: our own, where a validator of ours said them."""
    said = finding.get("ctx", {}).get("error")
    if isinstance(said, ValueError):
        return plain(said)
    return _wanted(finding["type"], finding.get("ctx", {})) or f"{finding['msg'][:1].lower()}{finding['msg'][1:]}"


_SHAPES = (
    "bool_type", "bool_parsing", "list_type", "tuple_type", "dict_type", "model_type", "string_type", "path_type",
)  # fmt: skip


def _wanted(kind: str, limits: Mapping[str, Any]) -> str | None:
    """What a value should have been, by pydantic's name of the mistake; None for those that no schema of ours has."""
    word = kind.partition("_")[0]
    if word in ("int", "float"):
        return t("this is not a number")
    if kind in _SHAPES:
        words = {"bool": t("true or false"), "list": t("a list"), "tuple": t("a list"), "string": t("a text")}
        return t("this should be {kind}", kind=words.get(word, t("a text") if word == "path" else t("a table")))
    if kind == "literal_error":
        return t("this should be one of {expected}", expected=str(limits.get("expected")).replace(" or ", ", "))
    if kind == "string_too_short":
        return t("this needs {count} characters or more", count=limits.get("min_length"))
    if kind == "string_too_long":
        return t("this has more than {count} characters", count=limits.get("max_length"))
    if kind == "string_pattern_mismatch":
        return t("this does not match {pattern}", pattern=limits.get("pattern"))
    if kind == "greater_than_equal":
        return t("this is less than {least}", least=limits.get("ge"))
    if kind == "less_than_equal":
        return t("this is more than {most}", most=limits.get("le"))
    return t("this is missing") if kind == "missing" else None


_SYSTEM_SAYS = {
    errno.EACCES: t("Permission denied"),
    errno.EBUSY: t("Device or resource busy"),
    errno.EEXIST: t("File exists"),
    errno.EIO: t("Input/output error"),
    errno.EISDIR: t("Is a directory"),
    errno.ELOOP: t("Too many levels of symbolic links"),
    errno.ENOENT: t("No such file or directory"),
    errno.ENOSPC: t("No space left on device"),
    errno.ENOTDIR: t("Not a directory"),
    errno.ENXIO: t("No such device or address"),
    errno.EPERM: t("Operation not permitted"),
    errno.EROFS: t("Read-only file system"),
    errno.ESTALE: t("Stale file handle"),
}


def reason(error: OSError) -> str:
    """Why the operating system refused, in its own words, without the path."""
    return _SYSTEM_SAYS.get(error.errno or 0) or error.strerror or str(error)
