"""Codec octahedral (spec/codecs/octahedral.md)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..codec import Codec, Digits, Numbers, make_packings, read_ascending_table, single_digit, take_parameters
from ..conventions import ceil_div, f32
from ..norms import TOKEN_NORMS, norm_feature, norm_stream
from ..packing import MAX_DIM
from ..refusal import require
from ..rotation import ROTATION_KINDS, check_rotation


def octahedral(entry: Mapping[str, Any]) -> Codec:
    rule = "codecs/octahedral.md, Parameters and ranges"
    dim, b_dir, b_norm, arrangement, norm, rotation_kind, seed, direction_bytes, norm_bytes, fields = take_parameters(
        entry,
        {
            "dim": range(4, MAX_DIM + 1),
            "b_dir": range(1, 9),
            "b_norm": range(9),
            "arrangement": ("dense", "direct"),
            "norm": TOKEN_NORMS,
            "rotation_kind": ROTATION_KINDS,
            "seed": int,
            "direction_table": bytes,
            "norm_table": bytes,
            "fields": dict,
        },
    )
    check_rotation(rotation_kind, dim)
    levels = 2 ** (b_dir - 1)
    direction_table = read_ascending_table(rule, "direction_table", direction_bytes, levels, 1.0)
    norm_table = read_ascending_table(rule, "norm_table", norm_bytes, 2**b_norm, 1.0)
    triplets = ceil_div(dim, 3)

    norm_in_index = 2 * (b_dir - 1) + b_norm in (1, 2, 4, 8, 16)
    index_bits = 2 * (b_dir - 1) + (b_norm if norm_in_index else 0)
    sign_bits = 2 + (0 if norm_in_index else b_norm)
    merged = index_bits + sign_bits <= 8 or index_bits == 0
    streams: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]
    if arrangement == "dense":
        streams = {"index": single_digit(2**index_bits)} if index_bits else {}
        streams["sign"] = single_digit(2**sign_bits)
        symbols = triplets
    else:
        bases: tuple[int, ...] = (2 ** (index_bits + sign_bits),) if merged else (2**index_bits, 2**sign_bits)
        streams = {"symbol": (bases, bases)}
        symbols = ceil_div(triplets, 24) * 24

    def index_and_sign(digits: Digits) -> tuple[list[int], list[int]]:
        if arrangement == "dense":
            return digits["index"][0] if index_bits else [0] * triplets, digits["sign"][0]
        if merged:
            symbol = digits["symbol"][0]
            return [s % 2**index_bits for s in symbol], [s >> index_bits for s in symbol]
        return digits["symbol"][0], digits["symbol"][1]

    def check(where: str, digits: Digits, row: Numbers) -> None:
        for digit in digits.get("symbol", []):
            require(not any(digit[triplets:]), "codecs/octahedral.md, Layout", f"{where}: the bits of a padding triplet are not zero")

    def decode(digits: Digits, row: Numbers) -> list[float]:
        u: list[float] = []
        for index, sign in list(zip(*index_and_sign(digits), strict=True))[:triplets]:
            magnitudes, n = (index % levels**2, index // levels**2) if norm_in_index else (index, sign // 4)
            direction = _octahedral_direction(direction_table[magnitudes % levels], direction_table[magnitudes // levels], sign)
            u += [f32(f32(part * norm_table[n]) * row["norm"][0]) for part in direction]
        return u[:dim]

    def tolerance(digits: Digits, row: Numbers) -> list[float]:
        return [2.0**-20 * abs(row["norm"][0]) + 2.0**-126] * dim

    codes = make_packings("octahedral", fields, symbols, streams)
    norms = norm_stream(norm)
    return Codec("octahedral", dim, 1, codes, [norms], decode, tolerance, check, rotation_kind, seed, feature=norm_feature(norm))


def _octahedral_direction(xi: float, eta: float, sign: int) -> tuple[float, float, float]:
    """Return the direction computed by steps 1 to 4 of section Decode."""
    z = (1 - xi) - eta
    x, y = (xi, eta) if z >= 0 else (1 - eta, 1 - xi)
    length = math.sqrt(x * x + y * y + z * z)
    x, y, z = f32(x / length), f32(y / length), f32(z / length)
    return -x if sign & 1 else x, -y if sign & 2 else y, z
