"""Codec angle (spec/codecs/angle.md)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..codec import FLOAT_DTYPES, Codec, Digits, Numbers, NumberStream, make_packings, odd_part, single_digit, take_parameters
from ..conventions import f32
from ..directions import bin_direction
from ..packing import MAX_BASE, MAX_DIM, default_row_bytes, power_of_two_at_least
from ..refusal import require
from ..rotation import ROTATION_KINDS, check_rotation


def angle(entry: Mapping[str, Any]) -> Codec:
    rule = "codecs/angle.md, Parameters and ranges"
    dim, bins, norm, norm_bits, arrangement, range_dtype, rotation_kind, seed, fields = take_parameters(
        entry,
        {
            "dim": range(2, MAX_DIM + 1, 2),
            "bins": range(2, MAX_BASE + 1),
            "norm": ("fp32", "linear", "log"),
            "norm_bits": range(9),
            "arrangement": ("dense", "direct"),
            "range": FLOAT_DTYPES,
            "rotation_kind": ROTATION_KINDS,
            "seed": int,
            "fields": dict,
        },
    )
    coded = norm != "fp32"
    require((norm_bits > 0) == coded, rule, f"norm_bits is {norm_bits}, which the norm format {norm} does not allow")
    require(
        coded or (arrangement, range_dtype) == ("dense", "fp16"),
        rule,
        f"arrangement is {arrangement} and range is {range_dtype}, but fp32 norms require arrangement dense and range fp16",
    )
    check_rotation(rotation_kind, dim)
    pairs = dim // 2
    k, m = odd_part(bins)
    rounded = power_of_two_at_least(bins)
    choices = [(default_row_bytes(pairs, rounded), "rounded")]
    if k > 0 and m > 1:
        choices.append((default_row_bytes(pairs, 2**k, m), "split"))
    choices.append((default_row_bytes(pairs, bins), "exact"))
    base = min(choices, key=lambda choice: choice[0])[1]
    streams: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]
    if arrangement == "direct":
        streams = {"symbol": ((rounded, 2**norm_bits), (bins, 2**norm_bits))}
    else:
        if base == "split":
            streams = {"angle_low": single_digit(2**k), "angle_high": single_digit(m)}
        else:
            streams = {"angle": single_digit(rounded if base == "rounded" else bins, bins)}
        if coded:
            streams["norm_codes"] = single_digit(2**norm_bits)
    stored = NumberStream("range", FLOAT_DTYPES[range_dtype], (2,)) if coded else NumberStream("norm", "F32", (pairs,))

    def bin_numbers(digits: Digits) -> list[int]:
        if arrangement == "direct":
            return digits["symbol"][0]
        if base == "split":
            return [high * 2**k + low for high, low in zip(digits["angle_high"][0], digits["angle_low"][0], strict=True)]
        return digits["angle"][0]

    def norm_codes(digits: Digits) -> list[int]:
        return digits["symbol"][1] if arrangement == "direct" else digits["norm_codes"][0]

    def decode_norms(digits: Digits, row: Numbers) -> list[float]:
        if not coded:
            return row["norm"]
        step, minimum = row["range"]
        sums = [f32(minimum + f32(step * c)) for c in norm_codes(digits)]
        return sums if norm == "linear" else [f32(2.0**e) if e < 128 else math.inf for e in sums]

    def tolerance(digits: Digits, row: Numbers) -> list[float]:
        if not coded:
            return [2.0**-22 * abs(r) + 2.0**-118 for r in row["norm"] for _ in range(2)]
        step, minimum = row["range"]
        products = [abs(step) * c for c in norm_codes(digits)]
        if norm == "linear":
            return [2.0**-21 * (abs(minimum) + product) + 2.0**-118 for product in products for _ in range(2)]
        relative = [2.0**-17 + 2.0**-24 * product for product in products]
        return [share * r + 2.0**-118 for share, r in zip(relative, decode_norms(digits, row), strict=True) for _ in range(2)]

    def decode(digits: Digits, row: Numbers) -> list[float]:
        points = zip(decode_norms(digits, row), bin_numbers(digits), strict=True)
        return [f32(r * part) for r, number in points for part in bin_direction(number, bins)]

    codes = make_packings("angle", fields, pairs, streams)
    return Codec("angle", dim, 1, codes, [stored], decode, tolerance, rotation_kind=rotation_kind, rotation_seed=seed)
