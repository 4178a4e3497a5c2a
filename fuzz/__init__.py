"""Fuzzers of the readers and the encoders (see README.md)."""
