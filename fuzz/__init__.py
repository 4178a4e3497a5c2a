"""Fuzz the readers and the encoders (see README.md)."""
