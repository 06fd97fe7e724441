"""Words for people, in English and Korean, from one gettext catalogue (installer/locale).

A `Text` (offline_bundle/text.py) *is* its English wording, so it can be logged, compared and formatted like any string.
It also keeps its template and values, so a front end can print the same sentence in another language.

    seen = t("{port} is in use by {who}", port=8443, who=t("process {pid}", pid=812))
    str(seen)          # English, for logs and for exceptions
    told(seen, "ko")   # Korean, parts included

Only what a person reads on a terminal is translated; journals, logs and the audit log stay English.
"""

import gettext
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, TextIO

from offline_bundle.text import Text, joined, plain, reason, t

__all__ = [
    "CHOSEN", "LANGUAGES", "Text", "foreign", "is_text", "joined", "language_of", "libraries_in", "looked_up", "plain",
    "reason", "speaking", "t", "told",
]  # fmt: skip

LANGUAGES = ("en", "ko")
DOMAIN = "atoll"
LOCALE_DIR = Path(__file__).parents[1] / "locale"
CHOSEN = "ATOLL_LANG"  # language of --lang, also for programs that this one starts


def told(value: Any, language: str) -> Any:
    """`value` in `language` if it is a Text, or an exception that carries one; anything else unchanged.

    Without a translation it stays English.
    """
    if language == "en":
        return value
    if isinstance(value, BaseException):
        return _exception(value, language)
    if not is_text(value):
        return value
    if value.parts is not None:
        return value.source.join(told(part, language) for part in value.parts)
    params = {name: told(param, language) for name, param in value.params.items()}
    try:
        return _particles(_catalogue(language).gettext(value.source).format(**params))
    except (KeyError, IndexError, ValueError):  # a translation with other placeholders must not hide the fact
        return str(value)


def is_text(value: Any) -> bool:
    """Whether it knows its id and values: a `Text`, or a message of the engine, which has its own class."""
    return isinstance(value, str) and hasattr(value, "source")


def _exception(error: BaseException, language: str) -> str:
    """Like `str(error)`: message and hint of an error of ours, the first argument of any other."""
    message, hint = getattr(error, "message", None), getattr(error, "hint", "")
    if message is not None:
        return f"{told(message, language)} {told(hint, language)}".strip()
    if isinstance(error, OSError):
        return str(told(reason(error), language))
    first = error.args[0] if len(error.args) == 1 else None
    return told(first, language) if is_text(first) else str(error)


def language_of(environment: Mapping[str, str] | None = None) -> str:
    """The language to use: that of --lang, else the system's (as gettext reads it) if the terminal can show it.

    The Linux console (TERM=linux) draws no Hangul, and an ASCII stream cannot carry it: both get English. So does
    systemd's journal, to which a unit may write on a system set to Korean.
    """
    asked = os.environ if environment is None else environment
    if asked.get(CHOSEN) in LANGUAGES:
        return asked[CHOSEN]
    system = next((value for name in ("LC_ALL", "LC_MESSAGES", "LANG") if (value := asked.get(name))), "")
    if not system.lower().startswith("ko") or asked.get("TERM") == "linux":
        return "en"
    if environment is not None:
        return "ko"
    streams = (sys.stdout, sys.stderr)
    return "en" if any(map(_is_journal, streams)) or not all(map(_carries_hangul, streams)) else "ko"


@contextmanager
def speaking(language: str | None) -> Iterator[None]:
    """For the duration of the block, use `language` here and in programs that are started; None changes nothing."""
    before = os.environ.get(CHOSEN)
    try:
        if language is not None:
            os.environ[CHOSEN] = language
        yield
    finally:
        if language is not None:
            os.environ.pop(CHOSEN)
            if before is not None:
                os.environ[CHOSEN] = before


def _is_journal(stream: TextIO | None) -> bool:
    """Whether systemd has connected this stream to its journal ($JOURNAL_STREAM is device:inode)."""
    with suppress(OSError, ValueError, AttributeError):
        info = os.fstat(stream.fileno())  # type: ignore[union-attr]
        return os.environ.get("JOURNAL_STREAM") == f"{info.st_dev}:{info.st_ino}"
    return False


def _carries_hangul(stream: TextIO | None) -> bool:
    try:
        "한글".encode(getattr(stream, "encoding", None) or "utf-8")
        return True
    except (UnicodeEncodeError, LookupError):
        return False


def looked_up(source: str, language: str) -> str:
    """The translation of `source` without filled-in values; `source` itself if there is none."""
    return _catalogue(language).gettext(source) if source else ""  # gettext knows "" as its header


def foreign(source: str) -> str:
    """Marks an id that a library looks up itself, for the catalogue."""
    return source


@contextmanager
def libraries_in(language: str) -> Iterator[None]:
    """Let typer and argparse, which ask gettext, find their words ("Usage", "No such option") in our catalogue."""
    before = os.environ.get("LANGUAGE")
    gettext.bindtextdomain(DOMAIN, str(LOCALE_DIR))
    gettext.textdomain(DOMAIN)
    os.environ["LANGUAGE"] = language
    try:
        yield
    finally:
        gettext.textdomain("messages")
        os.environ.pop("LANGUAGE")
        if before is not None:
            os.environ["LANGUAGE"] = before


@cache
def _catalogue(language: str) -> gettext.NullTranslations:
    return gettext.translation(DOMAIN, LOCALE_DIR, [language], fallback=True)


# -- Korean particles: which form follows depends on whether the word before ends in a consonant ----------------------

_PARTICLE = re.compile(r"([가-힣0-9])(['\"`)\]]?)(이\(가\)|을\(를\)|은\(는\)|와\(과\)|\(으\)로)")
_FORMS = {"이(가)": ("이", "가"), "을(를)": ("을", "를"), "은(는)": ("은", "는"), "와(과)": ("과", "와"),
          "(으)로": ("으로", "로")}  # fmt: skip
_DIGITS_WITH_END = "013678"  # 영 일 삼 육 칠 팔
_ENDS_IN_L = "178"           # 일 칠 팔: 로 follows, as after a vowel


def _particles(text: str) -> str:
    """'8443이(가)' → '8443이'. After a letter of another alphabet both forms stay: its pronunciation is unknown."""
    return _PARTICLE.sub(_fitting, text)


def _fitting(found: re.Match[str]) -> str:
    last, closing, particle = found.groups()
    tail = (ord(last) - 0xAC00) % 28 if last >= "가" else 0
    closed = tail != 0 or last in _DIGITS_WITH_END
    if particle == "(으)로" and (tail == 8 or last in _ENDS_IN_L):
        closed = False
    return last + closing + _FORMS[particle][0 if closed else 1]
