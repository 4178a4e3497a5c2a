"""Packed caches in memory: encoding, slicing, saving, loading and attention with PyTorch operations."""
