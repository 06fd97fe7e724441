"""Dialogs in front of everything else. Esc always closes one, and changes nothing."""
