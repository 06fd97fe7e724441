"""`serve`, `engine`, `gateway` and `gpu-ready` in the operator's language: why they give up, and what argparse says."""

from collections.abc import Iterator
from contextlib import contextmanager

from installer.base.i18n import language_of, libraries_in, told


@contextmanager
def engine_errors_told() -> Iterator[None]:
    """For the duration of the block, the engine's messages and those of argparse are in this terminal's language."""
    from engine.errors import retelling  # not for `--help`, which lists them all

    language = language_of()
    with retelling(lambda text: told(text, language)), libraries_in(language):
        yield
