"""The identity of a model: everything that its caches' bytes depend on, as text that files and stores record and compare."""
