"""Recipes, and values to streams and back: which codec encodes what, and which code runs it."""
