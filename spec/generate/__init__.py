"""Generators of the conformance vectors."""
