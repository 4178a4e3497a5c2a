"""Codec raw (spec/codecs/raw.md)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..codec import RAW_DTYPES, Codec, NumberStream, take_parameters
from ..packing import MAX_DIM


def raw(entry: Mapping[str, Any]) -> Codec:
    dim, dtype = take_parameters(entry, {"dim": range(1, MAX_DIM + 1), "dtype": RAW_DTYPES})
    values = NumberStream("values", RAW_DTYPES[dtype], (dim,), any_bits=True)
    return Codec("raw", dim, 1, {}, [values], lambda _, row: row["values"], lambda _, row: [0.0] * dim)
