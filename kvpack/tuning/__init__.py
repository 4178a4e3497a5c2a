"""Selection of a codec for the keys and the values of each layer of a model, within a budget of bytes (kvpack tune)."""
