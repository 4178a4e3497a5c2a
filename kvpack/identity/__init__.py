"""The identity of a model: what the bytes of its caches depend on, as text that files and stores record and compare."""
