"""The words of a front: texts, and the language they are told in."""

from installer.base.i18n import CHOSEN, LANGUAGES, Text, joined, language_of, t, told

__all__ = ["CHOSEN", "LANGUAGES", "Text", "joined", "language_of", "t", "told"]
