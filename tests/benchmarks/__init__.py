"""Measurements for kvpack's developers, run by ``python -m benchmarks``."""
