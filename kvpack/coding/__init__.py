"""Recipes, encoding and decoding: the selection of the codec for each value, and of the implementation that runs it."""
