"""Grammars that answers must follow: read from requests (forms), compiled and matched by llguidance (compiler)."""
