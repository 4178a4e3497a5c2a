"""Random mutation of kvpack files. Lengths and digests are repaired afterwards, because otherwise every edit would only break a digest.

A file is split into its header and its stored tensors, one of them is changed, and the file is joined again. Edits of a codec, of keys or
values, or of layers may also adjust the tensors to the new header, so that they reach the codec's own rules.
"""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgpack
import zstandard

from fuzz.byte_mutator import NUMBERS, mutate_bytes, mutate_numbers
from fuzz.refit import refit_tensors
from fuzz.value_mutator import mutate_position
from kvpack.formats.errors import KvpackError
from support.parts import Parts

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterable, Sequence

_PADS = re.compile(rb'"kvpack\.pad\.[0-9]+":\{"dtype":"U8","shape":\[[0-9]+\],"data_offsets":\[([0-9]+),([0-9]+)\]\}')
_MALFORMED = (ValueError, KeyError, IndexError, TypeError, AttributeError, OverflowError, msgpack.UnpackException)
"""Errors that are raised when a file with a malformed header is split or joined."""


@dataclass
class Vocabulary:
    """The codecs, as maps, and all words in the seeds, from which mutations choose."""

    codecs: list[dict[str, Any]] = field(default_factory=list)
    words: list[str] = field(default_factory=lambda: ["x"])

    @classmethod
    def of(cls, files: Iterable[bytes]) -> Vocabulary:
        """Return the vocabulary of all files that can be split."""
        codecs: dict[bytes, dict[str, Any]] = {}
        words: set[str] = set()
        for data in files:
            parts = split_file(data)
            if parts is None:
                continue
            for codec in parts.header.get("codecs") or []:
                if isinstance(codec, dict):
                    codecs[msgpack.packb(codec)] = codec
                    words.update(word for pair in codec.items() for word in pair if isinstance(word, str))
            words.update(word for word in parts.header if isinstance(word, str))
        return cls([codecs[packed] for packed in sorted(codecs)], sorted(words | {"x", "required", "entries", "zstd", "none"}))


def split_file(data: bytes) -> Parts | None:
    """Split a file into its parts. Returns None for bytes that do not have the header and tensors of a file."""
    try:
        parts = Parts.of(data)
        ends = all(len(stored) == row[4] for row, stored in zip(parts.header["tensors"], parts.tensors, strict=True))
    except _MALFORMED:
        return None
    return parts if ends and isinstance(parts.header.get("layers"), list) else None


def mutate_file(data: bytes, vocabulary: Vocabulary, source: random.Random, max_bytes: int) -> bytes:
    """Return ``data`` after one to four edits, usually repaired. The result has at most ``max_bytes`` bytes."""
    parts = split_file(data)
    if parts is None or source.random() < 0.03:
        return mutate_bytes(data, source, max_bytes)
    edits, weights = zip(*_EDITS, strict=True)
    packed = None
    for edit in source.choices(edits, weights, k=source.choice((1, 1, 1, 2, 4))):
        try:
            result = edit(parts, vocabulary, source)
        except (KvpackError, *_MALFORMED):
            # An earlier edit left no header to change.
            break
        parts = result if isinstance(result, Parts) else parts
        packed = result if isinstance(result, bytes) else packed
    joined = repair(parts, packed)
    if joined is None:
        return data
    if source.random() < 0.05:
        joined = source.choice((_change_front, _change_pad))(joined, source)
    return joined if len(joined) <= max_bytes else data


def repair(parts: Parts, packed: bytes | None = None) -> bytes | None:
    """Return the file of ``parts`` with correct lengths and digests, or None if they are malformed.

    ``packed`` replaces the header if given.
    """
    try:
        return parts.joined(packed)
    except _MALFORMED:
        pass
    # Readers parse the header before the tensors, so even a header without a valid list of tensors needs a front.
    try:
        packed = msgpack.packb(parts.header) if packed is None else packed
        return Parts({"tensors": []}, []).joined(packed)
    except _MALFORMED:
        return None


def _change_payload(parts: Parts, vocabulary: Vocabulary, source: random.Random) -> None:
    """Change the bytes of a tensor."""
    filled = [number for number, stored in enumerate(parts.tensors) if stored]
    if filled:
        number = source.choice(filled)
        row = parts.header["tensors"][number]
        stored, plain = parts.tensors[number], row[3] == "none" and row[1] in NUMBERS
        parts.tensors[number] = mutate_numbers(stored, row[1], source) if plain else mutate_bytes(stored, source)


def _change_field(parts: Parts, vocabulary: Vocabulary, source: random.Random) -> None:
    """Change a value in the header without adjusting anything that depends on it."""
    mutate_position(parts.header, vocabulary.words, source)


def _change_header_bytes(parts: Parts, vocabulary: Vocabulary, source: random.Random) -> bytes:
    """Change the bytes of the header, which may result in another msgpack encoding, other values, or invalid msgpack."""
    return mutate_bytes(msgpack.packb(parts.header), source)


def _swap_tensors(parts: Parts, vocabulary: Vocabulary, source: random.Random) -> None:
    """Swap, duplicate or drop stored tensors, with or without their rows in the header."""
    rows = parts.header["tensors"]
    if len(rows) < 2:
        return
    one, other = source.randrange(len(rows)), source.randrange(len(rows))
    kind = source.randrange(4)
    if kind == 0:
        parts.tensors[one], parts.tensors[other] = parts.tensors[other], parts.tensors[one]
    elif kind == 1:
        parts.tensors[one], rows[one] = parts.tensors[other], copy.copy(rows[other])
    elif kind == 2:
        parts.tensors.insert(one, parts.tensors[other])
        rows.insert(one, copy.copy(rows[other]))
    else:
        del parts.tensors[one], rows[one]


def _change_filter(parts: Parts, vocabulary: Vocabulary, source: random.Random) -> None:
    """Store a tensor as a zstd frame with any options, or change the bytes of such a frame."""
    if not parts.tensors:
        return
    number = source.randrange(len(parts.tensors))
    row, stored = parts.header["tensors"][number], parts.tensors[number]
    if row[3] == "none":
        sizes = source.random() < 0.9
        compressor = zstandard.ZstdCompressor(
            level=source.choice((1, 3, 19)), write_content_size=sizes, write_checksum=source.random() < 0.3, write_dict_id=False
        )
        row[3], parts.tensors[number] = "zstd", compressor.compress(stored)
    else:
        parts.tensors[number] = mutate_bytes(stored, source)


def _with_refit(change: Callable[[Parts, Vocabulary, random.Random], None]) -> Callable[[Parts, Vocabulary, random.Random], Parts]:
    """Return an edit that applies ``change`` and then adjusts the tensors to the changed header."""

    def edit(parts: Parts, vocabulary: Vocabulary, source: random.Random) -> Parts:
        try:
            # This is ten times as fast as a deep copy.
            changed = Parts(msgpack.unpackb(msgpack.packb(parts.header), strict_map_key=False), list(parts.tensors))
        except _MALFORMED:
            return parts
        try:
            change(changed, vocabulary, source)
            return refit_tensors(changed, source)
        except (KvpackError, *_MALFORMED):
            return changed if source.random() < 0.3 else parts

    return edit


def _replace_codec(parts: Parts, vocabulary: Vocabulary, source: random.Random) -> None:
    codecs = parts.header["codecs"]
    if codecs and vocabulary.codecs:
        codecs[source.randrange(len(codecs))] = copy.deepcopy(source.choice(vocabulary.codecs))


def _change_parameter(parts: Parts, vocabulary: Vocabulary, source: random.Random) -> None:
    codec = source.choice(parts.header["codecs"])
    mutate_position(codec, vocabulary.words, source)


def _copy_parameter(parts: Parts, vocabulary: Vocabulary, source: random.Random) -> None:
    """Copy one parameter or sidecar from another codec into a codec."""
    codec, other = source.choice(parts.header["codecs"]), source.choice(vocabulary.codecs)
    name = source.choice([name for name in other if name != "id"])
    codec[name] = copy.deepcopy(other[name])


def _change_shape(parts: Parts, vocabulary: Vocabulary, source: random.Random) -> None:
    """Change the tokens, sequences or heads of the keys and values of a layer."""
    sides = [side for side in source.choice(parts.header["layers"]).values() if side is not None]
    kind = source.randrange(6)
    if kind == 0:
        runs = [source.randrange(1, 40) for _ in range(source.randrange(4))]
        tail = source.randrange(4)
        for side in sides:
            side["runs"], side["tail"] = list(runs), tail
    elif kind == 1:
        for side in sides:
            side["runs"] = [sum(side["runs"])] if sum(side["runs"]) else []
    else:
        name = ("batch", "heads", "tail_dtype", "window")[kind - 2]
        value = source.choice(("bf16", "fp16", "fp32")) if kind == 4 else source.randrange(1, 4) * (32 if kind == 5 else 1)
        for side in sides if kind == 2 else source.sample(sides, 1):
            side[name] = value


def _change_layers(parts: Parts, vocabulary: Vocabulary, source: random.Random) -> None:
    """Repeat or remove a layer, or its keys or values."""
    layers = parts.header["layers"]
    one = source.randrange(len(layers))
    kind = source.randrange(4)
    if kind == 0:
        layers.insert(one, copy.deepcopy(source.choice(layers)))
    elif kind == 1:
        del layers[one]
    elif kind == 2:
        layers[one][source.choice("kv")] = None
    else:
        layers[one][source.choice("kv")] = copy.deepcopy(source.choice(layers)[source.choice("kv")])


def _change_front(joined: bytes, source: random.Random) -> bytes:
    """Change a byte of the length or of the JSON header. They have no digest, but only one form of each is valid."""
    end = 8 + int.from_bytes(joined[:8], "little")
    text = joined[: min(end, len(joined))]
    used = len(text.rstrip(b" ")) + 2
    return mutate_bytes(text[:used], source) + text[used:] + joined[end:]


def _change_pad(joined: bytes, source: random.Random) -> bytes:
    """Set a bit in the padding between tensors, which no digest covers."""
    end = 8 + int.from_bytes(joined[:8], "little")
    pads = _PADS.findall(joined[:end])
    if not pads:
        return joined
    begin, stop = map(int, source.choice(pads))
    changed = bytearray(joined)
    changed[end + source.randrange(begin, stop)] ^= 1 << source.randrange(8)
    return bytes(changed)


_EDITS: Sequence[tuple[Any, float]] = (
    (_change_payload, 6),
    (_change_field, 2),
    (_change_header_bytes, 1),
    (_swap_tensors, 0.5),
    (_change_filter, 1),
    (_with_refit(_replace_codec), 1),
    (_with_refit(_change_parameter), 2),
    (_with_refit(_copy_parameter), 1),
    (_with_refit(_change_shape), 2),
    (_with_refit(_change_layers), 0.5),
)
