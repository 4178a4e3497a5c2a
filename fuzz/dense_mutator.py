"""Mutation of safetensors files of dense keys and values, which `kvpack pack` reads. Edits change their JSON header or their bytes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from fuzz.byte_mutator import mutate_bytes, mutate_numbers
from fuzz.value_mutator import mutate_position

if TYPE_CHECKING:
    import random

WORDS = ("0.k", "0.v", "1.k", "dtype", "shape", "data_offsets", "__metadata__", "kvpack.unpacked", "F64", "F32", "F16", "BF16", "I64", "U8")
_NOTES = ('{"start": 7, "model": {"name": "x"}}', '{"start": true, "model": {}}', '{"start": -1, "model": {}}', '{"model": []}', "[" * 4000)


def _join(header: Any, body: bytes) -> bytes:
    text = json.dumps(header, default=lambda value: value.hex()).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + body


def dense_file(tensors: dict[str, tuple[str, list[int]]], note: str = "") -> bytes:
    """Return a safetensors file with these tensors (name, dtype and shape), filled with zeros."""
    header: dict[str, Any] = {"__metadata__": {"kvpack.unpacked": note}} if note else {}
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + shape[0] * shape[1] * shape[2] * shape[3] * (4 if dtype == "F32" else 2)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    return _join(header, bytes(end))


SEEDS = (
    dense_file({"0.k": ("F32", [1, 1, 2, 4]), "0.v": ("F32", [1, 1, 2, 4])}),
    dense_file({"0.k": ("BF16", [1, 2, 5, 8]), "0.v": ("F16", [1, 2, 5, 12]), "1.k": ("F16", [2, 1, 3, 8])}, _NOTES[0]),
    dense_file({"0.v": ("F16", [1, 1, 0, 4])}, _NOTES[1]),
)


def mutate_dense(data: bytes, source: random.Random, max_bytes: int) -> bytes:
    """Return ``data`` after one edit of a header value, of its tensors, or of any byte."""
    end = 8 + int.from_bytes(data[:8], "little")
    kind = source.randrange(6)
    if kind == 0:
        return mutate_bytes(data, source, max_bytes)
    if kind == 1:
        return data[:end] + mutate_numbers(data[end:], source.choice(("F16", "F32", "BF16")), source)
    try:
        header = json.loads(data[8:end])
        if kind == 2:
            header["__metadata__"] = {"kvpack.unpacked": source.choice(_NOTES)}
        else:
            mutate_position(header, WORDS, source)
        return _join(header, data[end:])[:max_bytes]
    except (ValueError, TypeError, RecursionError):
        return mutate_bytes(data, source, max_bytes)
