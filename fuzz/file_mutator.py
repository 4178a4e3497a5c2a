"""Mutate kvpack files at random and repair their lengths and digests afterwards, because otherwise every edit would fail at a digest.

A file is taken apart into its header and its stored tensors, one of them is changed, and the file is joined again. Changes of a codec, of a
side or of the layers may also fit the tensors to the new header, so that they reach the codec's own rules.
"""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgpack
import zstandard

from fuzz.byte_mutator import NUMBERS, mutated_bytes, mutated_numbers
from fuzz.refit import refitted
from fuzz.value_mutator import mutate_place
from kvpack.formats.errors import KvpackError
from support.parts import Parts

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterable, Sequence

_PADS = re.compile(rb'"kvpack\.pad\.[0-9]+":\{"dtype":"U8","shape":\[[0-9]+\],"data_offsets":\[([0-9]+),([0-9]+)\]\}')
_NOT_A_FILE = (ValueError, KeyError, IndexError, TypeError, AttributeError, OverflowError, msgpack.UnpackException)
"""The errors of taking apart or joining a file whose header is malformed."""


@dataclass
class Vocabulary:
    """The contents of the seeds, from which mutations choose: codecs as maps, side-cars by name, and every word."""

    codecs: list[dict[str, Any]] = field(default_factory=list)
    words: list[str] = field(default_factory=lambda: ["x"])

    @classmethod
    def of(cls, files: Iterable[bytes]) -> Vocabulary:
        """Return the vocabulary of all files that can be taken apart."""
        codecs: dict[bytes, dict[str, Any]] = {}
        words: set[str] = set()
        for data in files:
            parts = taken_apart(data)
            if parts is None:
                continue
            for codec in parts.header.get("codecs") or []:
                if isinstance(codec, dict):
                    codecs[msgpack.packb(codec)] = codec
                    words.update(word for pair in codec.items() for word in pair if isinstance(word, str))
            words.update(word for word in parts.header if isinstance(word, str))
        return cls([codecs[packed] for packed in sorted(codecs)], sorted(words | {"x", "required", "entries", "zstd", "none"}))


def taken_apart(data: bytes) -> Parts | None:
    """Return the parts of a file, or None for bytes that do not have the header and tensors of a file."""
    try:
        parts = Parts.of(data)
        ends = all(len(stored) == row[4] for row, stored in zip(parts.header["tensors"], parts.tensors, strict=True))
    except _NOT_A_FILE:
        return None
    return parts if ends and isinstance(parts.header.get("layers"), list) else None


def mutated_file(data: bytes, vocabulary: Vocabulary, source: random.Random, most: int) -> bytes:
    """Return ``data``, at most ``most`` bytes long, after one to four edits, most of them repaired."""
    parts = taken_apart(data)
    if parts is None or source.random() < 0.03:
        return mutated_bytes(data, source, most)
    edits, weights = zip(*_EDITS, strict=True)
    packed = None
    for edit in source.choices(edits, weights, k=source.choice((1, 1, 1, 2, 4))):
        try:
            result = edit(parts, vocabulary, source)
        except (KvpackError, *_NOT_A_FILE):
            # An earlier edit left no header to change.
            break
        parts = result if isinstance(result, Parts) else parts
        packed = result if isinstance(result, bytes) else packed
    joined = repaired(parts, packed)
    if joined is None:
        return data
    if source.random() < 0.05:
        joined = source.choice((_with_another_front, _with_another_pad))(joined, source)
    return joined if len(joined) <= most else data


def repaired(parts: Parts, packed: bytes | None = None) -> bytes | None:
    """Return the file of ``parts`` with correct lengths and digests, with ``packed`` as its header if given; None if it is malformed."""
    try:
        return parts.joined(packed)
    except _NOT_A_FILE:
        pass
    # A header without a valid list of tensors is still read before the tensors, so the front lists what it can.
    try:
        packed = msgpack.packb(parts.header) if packed is None else packed
        return Parts({"tensors": []}, []).joined(packed)
    except _NOT_A_FILE:
        return None


def _payload(parts: Parts, vocabulary: Vocabulary, source: random.Random) -> None:
    """Change the bytes of a tensor."""
    filled = [number for number, stored in enumerate(parts.tensors) if stored]
    if filled:
        number = source.choice(filled)
        row = parts.header["tensors"][number]
        stored, plain = parts.tensors[number], row[3] == "none" and row[1] in NUMBERS
        parts.tensors[number] = mutated_numbers(stored, row[1], source) if plain else mutated_bytes(stored, source)


def _field(parts: Parts, vocabulary: Vocabulary, source: random.Random) -> None:
    """Change a value of the header without the changes elsewhere that it would require."""
    mutate_place(parts.header, vocabulary.words, source)


def _header_bytes(parts: Parts, vocabulary: Vocabulary, source: random.Random) -> bytes:
    """Change the bytes of the header: other msgpack forms, other values, or invalid msgpack."""
    return mutated_bytes(msgpack.packb(parts.header), source)


def _swap(parts: Parts, vocabulary: Vocabulary, source: random.Random) -> None:
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


def _filter(parts: Parts, vocabulary: Vocabulary, source: random.Random) -> None:
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
        parts.tensors[number] = mutated_bytes(stored, source)


def _refitted(change: Callable[[Parts, Vocabulary, random.Random], None]) -> Callable[[Parts, Vocabulary, random.Random], Parts]:
    """Return an edit that applies ``change`` and then fits the tensors to the changed header."""

    def edit(parts: Parts, vocabulary: Vocabulary, source: random.Random) -> Parts:
        try:
            # Ten times as fast as a deep copy, and the header came from msgpack.
            changed = Parts(msgpack.unpackb(msgpack.packb(parts.header), strict_map_key=False), list(parts.tensors))
        except _NOT_A_FILE:
            return parts
        try:
            change(changed, vocabulary, source)
            return refitted(changed, source)
        except (KvpackError, *_NOT_A_FILE):
            return changed if source.random() < 0.3 else parts

    return edit


def _another_codec(parts: Parts, vocabulary: Vocabulary, source: random.Random) -> None:
    codecs = parts.header["codecs"]
    if codecs and vocabulary.codecs:
        codecs[source.randrange(len(codecs))] = copy.deepcopy(source.choice(vocabulary.codecs))


def _codec_parameter(parts: Parts, vocabulary: Vocabulary, source: random.Random) -> None:
    codec = source.choice(parts.header["codecs"])
    mutate_place(codec, vocabulary.words, source)


def _side_car(parts: Parts, vocabulary: Vocabulary, source: random.Random) -> None:
    """Give a codec a value of the same parameter from another codec, or a whole side-car of another codec."""
    codec, other = source.choice(parts.header["codecs"]), source.choice(vocabulary.codecs)
    name = source.choice([name for name in other if name != "id"])
    codec[name] = copy.deepcopy(other[name])


def _shape(parts: Parts, vocabulary: Vocabulary, source: random.Random) -> None:
    """Change the tokens, sequences or heads of both sides of a layer."""
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


def _layers(parts: Parts, vocabulary: Vocabulary, source: random.Random) -> None:
    """Repeat or drop a layer or a side."""
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


def _with_another_front(joined: bytes, source: random.Random) -> bytes:
    """Change a byte of the length or of the JSON header, which have no digest but only one valid form."""
    end = 8 + int.from_bytes(joined[:8], "little")
    text = joined[: min(end, len(joined))]
    used = len(text.rstrip(b" ")) + 2
    return mutated_bytes(text[:used], source) + text[used:] + joined[end:]


def _with_another_pad(joined: bytes, source: random.Random) -> bytes:
    """Set a bit in the padding between tensors, which has no digest either."""
    end = 8 + int.from_bytes(joined[:8], "little")
    pads = _PADS.findall(joined[:end])
    if not pads:
        return joined
    begin, stop = map(int, source.choice(pads))
    changed = bytearray(joined)
    changed[end + source.randrange(begin, stop)] ^= 1 << source.randrange(8)
    return bytes(changed)


_EDITS: Sequence[tuple[Any, float]] = (
    (_payload, 6),
    (_field, 2),
    (_header_bytes, 1),
    (_swap, 0.5),
    (_filter, 1),
    (_refitted(_another_codec), 1),
    (_refitted(_codec_parameter), 2),
    (_refitted(_side_car), 1),
    (_refitted(_shape), 2),
    (_refitted(_layers), 0.5),
)
