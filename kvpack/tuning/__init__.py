"""kvpack tune: choosing a codec for every layer and side of a model under a budget of bytes."""
