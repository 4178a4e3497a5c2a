"""Norms of tokens: 8-bit norms and other dtypes (spec/packing.md, Norms of 8 bits)."""

from __future__ import annotations

import math

from .codec import FLOAT_DTYPES, NumberStream
from .conventions import f32
from .features import LOG_NORMS

TOKEN_NORMS = {**FLOAT_DTYPES, "log8": "U8"}


def norm_stream(norm: str) -> NumberStream:
    return NumberStream("norm", TOKEN_NORMS[norm], (), logarithms=norm == "log8")


def norm_feature(norm: str) -> str:
    return LOG_NORMS if norm == "log8" else ""


def decode_norm_byte(c: int) -> float:
    """Return the norm for a byte (packing.md, Norms of 8 bits)."""
    octave, part = divmod(c - 1, 16)
    return math.ldexp(f32(2.0 ** (part / 16)), octave - 7) if c else 0.0
