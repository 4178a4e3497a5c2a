"""Fuzzers of the readers, and the encoders (README.md)."""
