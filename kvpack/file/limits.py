"""Limits of the format for writers and readers (spec/container.md, Limits). Each constant is the largest allowed value."""

from __future__ import annotations

MAX_FILE_BYTES = 2**60 - 1
"""Maximum size of a file in bytes."""
MAX_JSON_BYTES = 2**24
"""Maximum size of the JSON header in bytes, including padding."""
MAX_HEADER_BYTES = 2**23
"""Maximum size of the header tensor in bytes."""
MAX_CODECS = 4096
"""Maximum number of entries in ``codecs``."""
MAX_LAYERS = 4096
"""Maximum number of entries in ``layers``."""
MAX_ENTRIES = 2**17
"""Maximum number of entries in any array, such as ``tensors`` and ``runs``."""
MAX_BATCH = 65536
"""Maximum number of sequences (``batch``)."""
MAX_HEADS = 65536
"""Maximum number of KV heads (``heads``)."""
MAX_TOKENS = 2**40 - 1
"""Maximum number of tokens in a layer, and maximum ``window`` and ``start``."""
MAX_NAMES = 256
"""Maximum number of entries in ``required``, ``ignorable``, ``model``, and any msgpack map."""
MAX_STRING_BYTES = 4096
"""Maximum size of a string in UTF-8 bytes."""
MAX_BINARY_BYTES = 65536
"""Maximum size of a binary value in bytes."""
MAX_WINDOW_BYTES = 2**23
"""Maximum window size of a zstd frame in bytes."""
MAX_RATIO = 256
"""Maximum ratio of decoded to stored size of a zstd tensor."""
