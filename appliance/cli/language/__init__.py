"""The operator's language: help, usage errors, and messages of the engine."""
