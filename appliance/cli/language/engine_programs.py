"""`serve`, `engine`, `gateway` and `gpu-ready` in the operator's language: their help, and why they give up."""

from collections.abc import Iterator
from contextlib import contextmanager

from installer.base.i18n import is_text, language_of, libraries_in, looked_up, told

# Also for the commands that typer parses (help_texts.py).
LANGUAGE_FLAG = (
    "--lang", "[ko|en]", "Language: ko or en (default: the system's; English where Hangul cannot be shown).",
)


@contextmanager
def engine_speaks() -> Iterator[None]:
    """For the duration of the block, help and messages of the engine are in this terminal's language."""
    from engine.errors import retelling  # not for `atoll --help`, which lists them all

    language = language_of()

    def retell(text: str) -> str:
        return told(text, language) if is_text(text) else looked_up(text, language)

    with retelling(retell, flags=[LANGUAGE_FLAG]), libraries_in(language):
        yield
