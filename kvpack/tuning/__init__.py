"""kvpack tune: choose a codec for every layer and side of a model within a budget of bytes."""
