"""Limits (spec/container.md, Limits)."""

from __future__ import annotations

FORMAT = 1
MAX_FILE_BYTES = 1_152_921_504_606_846_975
MAX_JSON_BYTES = 16_777_216
MAX_HEADER_BYTES = 8_388_608
MAX_CODECS = 4_096
MAX_LAYERS = 4_096
MAX_ENTRIES = 131_072
MAX_BATCH = 65_536
MAX_HEADS = 65_536
MAX_TOKENS = 1_099_511_627_775
MAX_NAMES = 256
MAX_STRING_BYTES = 4_096
MAX_BINARY_BYTES = 65_536
MAX_WINDOW_BYTES = 8_388_608
MAX_RATIO = 256
MAX_DEPTH = 100
"""Maximum nesting depth. No value of this version is nested deeper than five; headers of later versions are read up to this depth."""
LIMITS = "container.md, Limits"
