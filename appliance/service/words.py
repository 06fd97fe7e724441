"""Texts for a user interface, and the language to show them in."""

from installer.base.i18n import CHOSEN, LANGUAGES, Text, joined, language_of, t, told

__all__ = ["CHOSEN", "LANGUAGES", "Text", "human_bytes", "joined", "language_of", "t", "told"]


def human_bytes(size: float) -> str:
    """Bytes for a person: 1.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
