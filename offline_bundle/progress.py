"""How long-running work reports progress: `progress(stage, done_bytes, total_bytes)`, always from the caller's thread.

A part of install.sh.
"""

from collections.abc import Callable

Progress = Callable[[str, int, int], None]


def silent(stage: str, done_bytes: int, total_bytes: int) -> None:
    """A Progress that reports nothing."""
