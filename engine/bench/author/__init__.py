"""Benchmarks for who works on the engine. They stay in the checkout: neither a wheel nor a medium carries them."""
