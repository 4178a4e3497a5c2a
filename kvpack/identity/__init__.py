"""The identity of a model: everything on which the bytes of its caches depend, as text that files and stores record and compare."""
