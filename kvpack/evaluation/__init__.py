"""Evaluation of a model over packed caches of its own keys and values, for bench, tune and calibrate."""
