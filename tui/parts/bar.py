"""A bar of one line, and how consoles draw scroll bars."""

from typing import ClassVar

from textual.scrollbar import ScrollBarRender


def bar(width: int, share: float, *, plain: bool) -> str:
    """`share` of 0 to 1."""
    full = round(max(0.0, min(1.0, share)) * width)
    return f"[{'#' * full}{'.' * (width - full)}]" if plain else "█" * full + "░" * (width - full)


class PlainScrollBar(ScrollBarRender):
    """Whole cells in reverse: a console's font lacks the parts of a block."""

    VERTICAL_BARS: ClassVar = [" "] * 8
    HORIZONTAL_BARS: ClassVar = [" "] * 8
