"""Benchmarks for engine developers. They are only in a checkout: neither a wheel nor a medium contains them."""
