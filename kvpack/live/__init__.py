"""The live cache: packed keys and values that grow while a model generates."""
