"""Texts for a user interface, and the language to show them in."""

from installer.base.i18n import CHOSEN, LANGUAGES, Text, joined, language_of, t, told

__all__ = ["CHOSEN", "LANGUAGES", "Text", "joined", "language_of", "t", "told"]
