"""Finds the tiles of the kernels that are fastest on this machine's GPU: python -m engine.kernels.tuning --help."""
