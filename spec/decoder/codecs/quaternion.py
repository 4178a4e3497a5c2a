"""Codec quaternion (spec/codecs/quaternion.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from ..codec import FLOAT_DTYPES, Codec, Digits, Numbers, NumberStream, make_packings, odd_part, single_digit, take_parameters
from ..conventions import ceil_div, f32
from ..generator import unit_quaternions
from ..packing import MAX_BASE, MAX_DIM, default_row_bytes, power_of_two_at_least
from ..refusal import require
from ..rotation import ROTATION_KINDS, check_rotation

UNITS = [
    tuple((1.0 if p % 2 == 0 else -1.0) if part == p // 2 else 0.0 for part in range(4))
    if p < 8
    else tuple(-0.5 if p - 8 >> part & 1 else 0.5 for part in range(4))
    for p in range(24)
]


@cache
def secondary_quaternions(seed: int, count: int) -> list[tuple[float, ...]]:
    return [tuple(map(f32, quaternion)) for quaternion in unit_quaternions(seed, count)]


def hamilton_product(left: Sequence[float], right: Sequence[float]) -> list[float]:
    a, b, c, d = left
    w, x, y, z = right
    product = (
        a * w - b * x - c * y - d * z,
        a * x + b * w + c * z - d * y,
        a * y - b * z + c * w + d * x,
        a * z + b * y - c * x + d * w,
    )
    return [f32(part) for part in product]


def quaternion(entry: Mapping[str, Any]) -> Codec:
    dim, secondary, radius_bits, arrangement, norm, rotation_kind, seed, rotation_seed, fields = take_parameters(
        entry,
        {
            "dim": range(1, MAX_DIM + 1),
            "secondary": range(1, 4097),
            "radius_bits": range(1, 9),
            "arrangement": ("dense", "direct"),
            "norm": FLOAT_DTYPES,
            "rotation_kind": ROTATION_KINDS,
            "seed": int,
            "rotation_seed": int,
            "fields": dict,
        },
    )
    if arrangement == "direct":
        require(
            secondary <= 2730,
            "codecs/quaternion.md, Parameters and ranges",
            f"secondary is {secondary}, expected at most 2730 in the direct arrangement",
        )
    check_rotation(rotation_kind, dim)
    chunks = ceil_div(dim, 4)
    codewords = 24 * secondary
    k, m = odd_part(codewords)
    split = codewords > MAX_BASE or default_row_bytes(chunks, 2**k, m) < default_row_bytes(chunks, codewords)
    streams: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]
    if arrangement == "direct":
        streams = {"symbol": ((power_of_two_at_least(codewords), 2**radius_bits), (codewords, 2**radius_bits))}
    else:
        streams = {"codeword_low": single_digit(2**k), "codeword_high": single_digit(m)} if split else {"codeword": single_digit(codewords)}
        streams["radius"] = single_digit(2**radius_bits)

    def split_codes(digits: Digits) -> tuple[list[int], list[int]]:
        if arrangement == "direct":
            return digits["symbol"][0], digits["symbol"][1]
        if split:
            pairs = zip(digits["codeword_high"][0], digits["codeword_low"][0], strict=True)
            return [high * 2**k + low for high, low in pairs], digits["radius"][0]
        return digits["codeword"][0], digits["radius"][0]

    def decode(digits: Digits, row: Numbers) -> list[float]:
        u: list[float] = []
        unit_radius = f32(row["scale"][0] / (2**radius_bits - 1))
        for g, c in zip(*split_codes(digits), strict=True):
            r = f32(c * unit_radius)
            u += [f32(r * part) for part in hamilton_product(UNITS[g % 24], secondary_quaternions(seed, secondary)[g // 24])]
        return u[:dim]

    def tolerance(digits: Digits, row: Numbers) -> list[float]:
        return [2.0**-22 * abs(value) + 2.0**-118 for value in decode(digits, row)]

    scales = NumberStream("scale", FLOAT_DTYPES[norm], ())
    codes = make_packings("quaternion", fields, chunks, streams)
    return Codec("quaternion", dim, 1, codes, [scales], decode, tolerance, rotation_kind=rotation_kind, rotation_seed=rotation_seed)
