"""Recipes, encoding and decoding: which codec stores each value, and which implementation runs it."""
