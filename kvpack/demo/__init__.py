"""Demos of files and of the store, run by ``kvpack demo``."""
