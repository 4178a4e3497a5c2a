"""The conformance vectors at limits of the header and one above: without them a reader with any limits, or none, would pass."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from spec.generate.invalid_vectors import RAW, add
from spec.generate.valid_vectors import add as add_valid
from support.file_parts import Parts, compressed, file_of, one_side
from support.strategies import create

if TYPE_CHECKING:
    from collections.abc import Callable


def add_all() -> None:
    def both(name: str, of: str, count: int, make: Callable[[int], bytes]) -> None:
        add_valid(f"largest-{name}", f"{count} {of}", lambda: make(count), "container-29")
        add(f"limit-of-{name}", "container-29", "LimitExceeded", f"{count + 1} {of}", lambda: make(count + 1))

    both("codecs", "codecs", 4096, lambda count: nothing("codecs", [create("raw", 1, dtype="bf16").params()] * count))
    both("layers", "layers", 4096, lambda count: nothing("layers", [{"k": None, "v": None}] * count))
    both("binary-value", "bytes of an ignorable feature", 65536, lambda count: nothing("ignorable", {"new-feature": bytes(count)}))
    names: Callable[[int], Any] = lambda count: {f"{number:03}": "" for number in range(count)}  # noqa: E731
    add_valid("largest-model", "256 entries of model", lambda: nothing("model", names(256)), "container-29")
    letters: Callable[[int], str] = lambda count: "\u00e9" * (count // 2) + "x" * (count % 2)  # noqa: E731
    both("string-in-bytes", "bytes of a string whose letters take two", 4096, lambda count: nothing("recipe", letters(count)))
    add_valid("largest-batch-and-heads", "65536 sequences of 65536 heads, and no tokens", without_tokens, "container-29")
    add("limit-of-runs", "container-29", "LimitExceeded", "131073 runs of a token", lambda: runs_of_a_token(131073))


def nothing(key: str, value: Any) -> bytes:
    """A file without sides whose header has ``value`` for ``key``."""
    parts = Parts.of(file_of())
    parts.header[key] = value
    return parts.joined()


def without_tokens() -> bytes:
    parts = Parts.of(one_side(RAW, runs=(), tail=0))
    parts.header["layers"][0]["k"] |= {"batch": 65536, "heads": 65536}
    parts.header["tensors"][0][2][:2] = [65536, 65536]
    return parts.joined()


def runs_of_a_token(count: int) -> bytes:
    """A side of ``count`` runs, its tensors compressed."""
    parts = Parts.of(one_side(create("group", 1, b="1", g="4"), runs=(1,), tail=0, heads=1))
    parts.header["layers"][0]["k"]["runs"] = [1] * count
    source = random.Random(1)
    for tensor in parts.header["tensors"]:
        tensor[2][2] *= count
        # Not within one byte per 256, but not much above it either.
        size = 2 * count * (2 if tensor[0].endswith("scales") else 1)
        stored = bytearray(size)
        for _ in range(size // 200):
            stored[2 * source.randrange(size // 2)] = 1
        parts.store(tensor[0], compressed(bytes(stored)), "zstd")
    return parts.joined()
