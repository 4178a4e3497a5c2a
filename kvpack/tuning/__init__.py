"""Selection of codecs for the keys and the values of each layer of a model, within a byte budget (kvpack tune)."""
