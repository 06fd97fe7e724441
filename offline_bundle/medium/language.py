"""Messages in the operator's language. A part of install.sh, where it stands in for offline_bundle/text.py.

The language is chosen as installer/base/i18n.py does: --lang, then $ATOLL_LANG, then the system's; English where Hangul
cannot be shown. A message is translated when it is made, because there is only one reader.
"""

import os
import sys

from offline_bundle.medium.korean import KOREAN


def speaks_korean(environment, arguments, encodings):
    """Whether the operator reads Korean, and the terminal shows it."""
    asked = environment.get("ATOLL_LANG")
    for word, following in zip(arguments, [*arguments[1:], ""], strict=False):
        if word == "--lang" or word.startswith("--lang="):
            asked = word.partition("=")[2] or following
    if asked in ("ko", "en"):
        return asked == "ko"
    system = next((environment[n] for n in ("LC_ALL", "LC_MESSAGES", "LANG") if environment.get(n)), "")
    if not system.lower().startswith("ko") or environment.get("TERM") == "linux":
        return False
    try:
        return all("한글".encode(encoding or "utf-8") for encoding in encodings)
    except (UnicodeEncodeError, LookupError):
        return False


SPEAKS_KOREAN = speaks_korean(os.environ, sys.argv, [getattr(f, "encoding", None) for f in (sys.stdout, sys.stderr)])


class Text(str):
    """A message of ours, as opposed to text that came from the medium."""

    __slots__ = ("source", "values")

    def with_values(self, change):
        """The same message with each of its values changed."""
        return _filled_in(self.source, {name: change(value) for name, value in self.values.items()})


def t(source, /, **values):
    """`source` in the operator's language, with its {placeholders} filled in."""
    return _filled_in(source, values)


def _filled_in(source, values):
    said = KOREAN.get(source) if SPEAKS_KOREAN else None
    text = Text((said or source).format(**values))
    text.source, text.values = source, values
    return text


def plain(error):
    """The message that `error` was made with, if it is one of ours; else its text."""
    said = error.args[0] if len(error.args) == 1 else None
    return said if isinstance(said, Text) else str(error)


def reason(error):
    """Why the operating system refused."""
    said = error.strerror or str(error)
    return KOREAN.get(said, said) if SPEAKS_KOREAN else said
