"""Pages of serving engines: their geometry, their layout in an engine's memory, and the codec between them and rows."""
