"""How long work reports itself: `progress(stage, done_bytes, total_bytes)`, always from the caller's thread."""

from collections.abc import Callable

Progress = Callable[[str, int, int], None]


def silent(stage: str, done_bytes: int, total_bytes: int) -> None:
    """A Progress that says nothing."""
