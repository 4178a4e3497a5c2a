"""Measurements for developers, which users of kvpack do not need: ``python -m benchmarks``."""
