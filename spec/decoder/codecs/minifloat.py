"""Codec minifloat (spec/codecs/minifloat.md)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..codec import FLOAT_DTYPES, Codec, Digits, Numbers, NumberStream, make_packings, single_digit, take_parameters
from ..conventions import ceil_div, f32
from ..packing import MAX_DIM
from ..refusal import require

ELEMENTS = {"e4m3": (8, 4, 3, 7), "e5m2": (8, 5, 2, 15), "e2m1": (4, 2, 1, 1)}
"""Number of bits, exponent bits and fraction bits, and the bias."""
NONFINITE_CODES = {"e4m3": range(0x7F, 0x80), "e5m2": range(0x7C, 0x80), "e2m1": range(0)}
"""Codes, without their sign, that are NaN or infinity."""


def decode_element(name: str, c: int) -> float:
    """Return the value of a finite code (section Decode, step 2)."""
    bits, _, fraction_bits, bias = ELEMENTS[name]
    g, magnitude = divmod(c, 2 ** (bits - 1))
    e, f = divmod(magnitude, 2**fraction_bits)
    value = math.ldexp(2**fraction_bits + f, e - bias - fraction_bits) if e else math.ldexp(f, 1 - bias - fraction_bits)
    return -value if g else value


def minifloat(entry: Mapping[str, Any]) -> Codec:
    page = "codecs/minifloat.md"
    in_blocks = {"e8m0": 32, "e4m3": 16}
    per_block = entry.get("granularity") == "block"
    dim, name, granularity, scale_dtype, fields = take_parameters(
        entry,
        {
            "dim": range(1, MAX_DIM + 1),
            "element": ELEMENTS,
            "granularity": ("tensor", "head", "token", "block"),
            "scale_dtype": in_blocks if per_block else FLOAT_DTYPES,
            "fields": dict,
        },
    )
    require(
        scale_dtype != "e4m3" or name == "e2m1",
        f"{page}, Parameters and ranges",
        f"scale_dtype is e4m3, which needs element e2m1, but element is {name}",
    )
    bits = ELEMENTS[name][0]
    codes = make_packings("minifloat", fields, dim, {"codes": single_digit(2**bits)})
    size = in_blocks[scale_dtype] if per_block else dim
    if per_block:
        streams = [NumberStream("block_scales", "U8", (ceil_div(dim, size),))]
        if scale_dtype == "e4m3":
            streams.append(NumberStream("global_scale", "F32", (), per_head=False, per="run"))
    else:
        per = "tokens" if granularity == "token" else "run"
        streams = [NumberStream("scale", FLOAT_DTYPES[scale_dtype], (), per_head=granularity != "tensor", per=per)]

    def decode(digits: Digits, row: Numbers) -> list[float]:
        values = []
        for j, c in enumerate(digits["codes"][0]):
            v = decode_element(name, c)
            if not per_block:
                values.append(f32(v * row["scale"][0]))
                continue
            k = int(row["block_scales"][j // size])
            if scale_dtype == "e8m0":
                values.append(f32(v * 2.0 ** (k - 127)))
            else:
                values.append(f32(v * decode_element("e4m3", k) * row["global_scale"][0]))
        return values

    def tolerance(digits: Digits, row: Numbers) -> list[float]:
        return [0.0] * dim

    def check(where: str, digits: Digits, row: Numbers) -> None:
        special = f"{page}, Special values"
        for j, c in enumerate(digits["codes"][0]):
            finite = c % 2 ** (bits - 1) not in NONFINITE_CODES[name]
            require(finite, special, f"{where}: the element of channel {j} has the code {c:#04x}, which is NaN or infinite")
        for number in row["block_scales"] if per_block else ():
            limit = 0xFE if scale_dtype == "e8m0" else 0x7E
            require(
                number <= limit,
                special,
                f"{where}: block_scales contains the {scale_dtype} code {int(number):#04x}, which is negative or not finite",
            )

    return Codec("minifloat", dim, 1, codes, streams, decode, tolerance, check)
