"""Benchmarks: ``python -m engine.bench --help``. They print JSON rows and are never part of the tests."""
