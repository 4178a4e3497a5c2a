"""The limits of the format, for writers and readers (spec/container.md, Limits). Each is the largest value allowed."""

from __future__ import annotations

MAX_FILE_BYTES = 2**60 - 1
"""Bytes of a file."""
MAX_JSON_BYTES = 2**24
"""Bytes of the JSON header with its padding."""
MAX_HEADER_BYTES = 2**23
"""Bytes of the header tensor."""
MAX_CODECS = 4096
"""Entries of ``codecs``."""
MAX_LAYERS = 4096
"""Entries of ``layers``."""
MAX_ENTRIES = 2**17
"""Entries of any array, such as ``tensors`` and the ``runs`` of a side."""
MAX_BATCH = 65536
"""``batch`` of a side."""
MAX_HEADS = 65536
"""``heads`` of a side."""
MAX_TOKENS = 2**40 - 1
"""Tokens of one side, its ``window``, and ``start``."""
MAX_NAMES = 256
"""Entries of each of ``required``, ``ignorable`` and ``model``, and of any msgpack map."""
MAX_STRING_BYTES = 4096
"""UTF-8 bytes of any string."""
MAX_BINARY_BYTES = 65536
"""Bytes of any binary value."""
MAX_WINDOW_BYTES = 2**23
"""Window of a zstd frame."""
MAX_RATIO = 256
"""Decoded bytes of a zstd tensor per stored byte."""
