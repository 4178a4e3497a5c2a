"""Reads and writes kvpack files as arrays and bytes, without PyTorch."""
