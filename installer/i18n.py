"""Words for people, in English and Korean, from one gettext catalogue (installer/locale).

A `Text` *is* its English wording, so it can be logged, compared and formatted like any string, and it remembers what it
was made of, so a front end can show the same sentence in another language when it is printed.

    seen = t("{port} is in use by {who}", port=8443, who=t("process {pid}", pid=812))
    str(seen)          # English, for logs and for exceptions
    seen.to("ko")      # Korean, parts included
"""

import gettext
import os
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

LANGUAGES = ("en", "ko")
DOMAIN = "atoll"
LOCALE_DIR = Path(__file__).with_name("locale")


class Text(str):
    """An English sentence that can be told in another language. Made by `t` and `joined`."""

    __slots__ = ("_params", "_parts", "_source")

    _source: str
    _params: Mapping[str, Any]
    _parts: tuple[str, ...] | None

    def to(self, language: str) -> str:
        """This sentence in `language`; in English where there is no translation."""
        if language == "en":
            return str(self)
        if self._parts is not None:
            return self._source.join(told(part, language) for part in self._parts)
        params = {name: told(value, language) for name, value in self._params.items()}
        try:
            return _catalogue(language).gettext(self._source).format(**params)
        except (KeyError, IndexError, ValueError):  # a translation with other placeholders must not hide the fact
            return str(self)

    def __str__(self) -> str:
        return str.__str__(self)

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)  # a copy or a pickle is plain English


def t(source: str, /, **params: Any) -> Text:
    """`source` with its {placeholders} filled in. Must be called with a literal: the catalogue is made from these."""
    text = Text(source.format(**params))
    text._source, text._params, text._parts = source, params, None
    return text


def joined(parts: Iterable[str], separator: str = ", ") -> Text:
    """A list of texts as one text."""
    parts = tuple(parts)
    text = Text(separator.join(parts))
    text._source, text._params, text._parts = separator, {}, parts
    return text


def told(value: Any, language: str) -> Any:
    """`value` in `language` if it is a Text, else as it is."""
    return value.to(language) if isinstance(value, Text) else value


def language_of(environment: Mapping[str, str] | None = None) -> str:
    """The language that the environment asks for, as gettext reads it: the first of these variables that is set."""
    environment = os.environ if environment is None else environment
    for name in ("LC_ALL", "LC_MESSAGES", "LANG"):
        if value := environment.get(name):
            return "ko" if value.lower().startswith("ko") else "en"
    return "en"


@cache
def _catalogue(language: str) -> gettext.NullTranslations:
    return gettext.translation(DOMAIN, LOCALE_DIR, [language], fallback=True)
