"""The live cache: packed keys and values to which a model adds tokens while it generates."""
