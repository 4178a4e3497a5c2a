"""Mutation of the tensor kvpack.header."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import msgpack

from fuzz.byte_mutator import mutate_bytes
from fuzz.value_mutator import mutate_position

if TYPE_CHECKING:
    import random

    from fuzz.file_mutator import Vocabulary


def mutate_header(data: bytes, vocabulary: Vocabulary, source: random.Random, max_bytes: int = 1 << 13) -> bytes:
    """Return ``data`` after one edit: a changed value, another codec, or changed bytes."""
    if source.random() < 0.2:
        return mutate_bytes(data, source, max_bytes)
    try:
        header = msgpack.unpackb(data, strict_map_key=False)
        if source.random() < 0.2 and header["codecs"]:
            header["codecs"][source.randrange(len(header["codecs"]))] = copy.deepcopy(source.choice(vocabulary.codecs))
        else:
            mutate_position(header, vocabulary.words, source)
        packed: bytes = msgpack.packb(header)
    except (ValueError, TypeError, KeyError, OverflowError, msgpack.UnpackException):
        return mutate_bytes(data, source, max_bytes)
    return packed[:max_bytes]
