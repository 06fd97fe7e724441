"""Benchmarks for engine developers. They stay in the checkout: neither a wheel nor a medium carries them."""
