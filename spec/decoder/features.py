"""Names of the required and ignorable features that this decoder supports."""

from __future__ import annotations

BASIS = "basis"
BALANCED = "balanced"
SCALE_PER_HEAD = "token-scale-per-head"
LOG_NORMS = "log-norms"
LAYER_POSITIONS = "layer-positions"
LAYER_STATE = "layer-state"
HIDDEN_TOKENS = "hidden-tokens"
POSITION_OFFSETS = "position-offsets"
CHECKSUMS = "zstd-checksum"
SIDECAR_FEATURES = {"balanced": BALANCED, "key_mean": "key-mean", "raw_positions": "raw-positions"}
CODEC_FEATURES = (*SIDECAR_FEATURES.values(), SCALE_PER_HEAD, LOG_NORMS)
REQUIRED_FEATURES = {name.encode() for name in (BASIS, HIDDEN_TOKENS, LAYER_POSITIONS, LAYER_STATE, POSITION_OFFSETS, *CODEC_FEATURES)}
