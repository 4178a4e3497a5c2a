"""packing.md, Norms of 8 bits, and the other types of a token's norm."""

from __future__ import annotations

import math

from .codec import HALF_OR_SINGLE, NumberStream
from .conventions import f32
from .features import LOG_NORMS

TOKEN_NORMS = {**HALF_OR_SINGLE, "log8": "U8"}


def norm_stream(norm: str) -> NumberStream:
    return NumberStream("norm", TOKEN_NORMS[norm], (), logarithms=norm == "log8")


def feature_of_norm(norm: str) -> str:
    return LOG_NORMS if norm == "log8" else ""


def norm_of_byte(c: int) -> float:
    """packing.md, Norms of 8 bits."""
    octave, part = divmod(c - 1, 16)
    return math.ldexp(f32(2.0 ** (part / 16)), octave - 7) if c else 0.0
