"""A model read over packed files of its own KV caches: its text, windows, twins and intervals, for bench, tune and calibrate."""
