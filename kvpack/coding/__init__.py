"""Recipes, encoding and decoding: which codec encodes which values, and which code runs the codec."""
