"""Mutate the tensor kvpack.header by itself."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import msgpack

from fuzz.byte_mutator import mutated_bytes
from fuzz.value_mutator import mutate_place

if TYPE_CHECKING:
    import random

    from fuzz.file_mutator import Vocabulary


def mutated_header(data: bytes, vocabulary: Vocabulary, source: random.Random, most: int = 1 << 13) -> bytes:
    """Return ``data`` after an edit of one value, with another codec, or after an edit of its bytes."""
    if source.random() < 0.2:
        return mutated_bytes(data, source, most)
    try:
        header = msgpack.unpackb(data, strict_map_key=False)
        if source.random() < 0.2 and header["codecs"]:
            header["codecs"][source.randrange(len(header["codecs"]))] = copy.deepcopy(source.choice(vocabulary.codecs))
        else:
            mutate_place(header, vocabulary.words, source)
        packed: bytes = msgpack.packb(header)
    except (ValueError, TypeError, KeyError, OverflowError, msgpack.UnpackException):
        return mutated_bytes(data, source, most)
    return packed[:most]
