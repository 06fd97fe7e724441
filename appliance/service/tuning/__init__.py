"""Tuning: a bounded, resumable search for the engine settings that serve an operator's traffic best."""
