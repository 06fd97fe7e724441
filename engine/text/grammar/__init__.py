"""Grammars that answers follow: written from requests (forms), compiled and followed by llguidance (compiler)."""
