"""Compiles a model's kernels for a GPU that need not be present: __main__.py."""
