"""Codec group (spec/codecs/group.md)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..codec import FLOAT_DTYPES, Codec, Digits, Numbers, NumberStream, make_packings, single_digit, take_parameters
from ..conventions import ceil_div, f16, f32
from ..features import SCALE_PER_HEAD
from ..packing import MAX_DIM
from ..refusal import require
from ..rotation import ROTATION_KINDS, check_rotation

PER_HEAD = "-per-head"


def group(entry: Mapping[str, Any]) -> Codec:
    dim, bits, axis, size, rotation_kind, seed, token_scale, fields, scale_dtype = take_parameters(
        entry,
        {
            "dim": range(1, MAX_DIM + 1),
            "bits": range(1, 9),
            "axis": ("token", "channel"),
            "size": (4, 8, 16, 32, 64, 128),
            "rotation_kind": ROTATION_KINDS,
            "seed": int,
            "token_scale": ("none", *FLOAT_DTYPES, *(name + PER_HEAD for name in FLOAT_DTYPES)),
            "fields": dict,
        },
        optional={"scale_dtype": ("u8",)},
    )
    check_rotation(rotation_kind, dim)
    codes = make_packings("group", fields, dim, {"codes": single_digit(2**bits)})
    by_token = axis == "token"
    dtype = "U8" if scale_dtype else "F16"
    streams = [NumberStream("scales", dtype, (dim, 2) if by_token else (ceil_div(dim, size), 2), size if by_token else 1)]
    if scale_dtype:
        streams.append(NumberStream("scale_range", "F16", (4,), per="run"))
    if token_scale != "none":
        dtype = FLOAT_DTYPES[token_scale.removesuffix(PER_HEAD)]
        streams.append(NumberStream("token_scale", dtype, (), per_head=token_scale.endswith(PER_HEAD)))

    def decode(digits: Digits, row: Numbers) -> list[float]:
        m = (2**bits - 1) / 2
        u = []
        for j, c in enumerate(digits["codes"][0]):
            at = j if by_token else j // size
            scale, center = row["scales"][2 * at : 2 * at + 2]
            if scale_dtype:
                scale, center = decode_8_bits(row, 0, scale), decode_8_bits(row, 1, center)
            value = f32((c - m) * scale + center)
            u.append(value if token_scale == "none" else f32(value * row["token_scale"][0]))
        return u

    def tolerance(digits: Digits, row: Numbers) -> list[float]:
        return [0.0] * dim

    def check(where: str, digits: Digits, row: Numbers) -> None:
        for member in (0, 1) if scale_dtype else ():
            for k in (0, 255):
                finite = math.isfinite(decode_8_bits(row, member, k))
                require(finite, "codecs/group.md, Decode", f"{where}: scale_range gives an infinite number for {k}")

    token_group = size if by_token else 1
    feature = SCALE_PER_HEAD if token_scale.endswith(PER_HEAD) else ""
    return Codec("group", dim, token_group, codes, streams, decode, tolerance, check, rotation_kind, seed, feature=feature)


def decode_8_bits(row: Numbers, member: int, k: float) -> float:
    """Return the scale (``member`` 0) or center (``member`` 1) for the integer ``k`` (section Scales of 8 bits)."""
    step, minimum = row["scale_range"][2 * member : 2 * member + 2]
    r = f32(minimum + step * k)
    return f16(f32(r * abs(r)))
