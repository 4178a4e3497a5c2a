"""Codec scalar (spec/codecs/scalar.md)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..codec import Codec, Digits, Numbers, make_packings, read_ascending_table, single_digit, take_parameters
from ..conventions import ceil_div, f32
from ..norms import TOKEN_NORMS, norm_feature, norm_stream
from ..packing import MAX_DIM
from ..refusal import require
from ..rotation import ROTATION_KINDS, check_rotation


def scalar(entry: Mapping[str, Any]) -> Codec:
    rule = "codecs/scalar.md, Parameters and ranges"
    dim, bits, bits_high, high_channels, norm, rotation_kind, seed, table_bytes, high_table_bytes, fields = take_parameters(
        entry,
        {
            "dim": range(2, MAX_DIM + 1),
            "bits": range(1, 9),
            "bits_high": range(9),
            "high_channels": bytes,
            "norm": TOKEN_NORMS,
            "rotation_kind": ROTATION_KINDS,
            "seed": int,
            "magnitude_table": bytes,
            "high_magnitude_table": bytes,
            "fields": dict,
        },
    )
    check_rotation(rotation_kind, dim)
    require(
        bits_high == 0 or bits_high > bits, rule, f"bits_high is {bits_high}, expected 0 or more than the {bits} bits of the other channels"
    )
    flags = int.from_bytes(high_channels, "little")
    require(
        len(high_channels) == (ceil_div(dim, 8) if bits_high else 0),
        rule,
        f"high_channels has {len(high_channels)} bytes, which does not match {dim} channels",
    )
    require(flags >> dim == 0, rule, "high_channels has a bit set after the last channel")
    high = [bool(flags >> c & 1) for c in range(dim)]
    require(bits_high == 0 or 0 < sum(high) < dim, rule, f"high_channels selects {sum(high)} of {dim} channels, expected some but not all")
    tables = [
        read_ascending_table(rule, "magnitude_table", table_bytes, 2 ** (bits - 1), 1.0),
        read_ascending_table(rule, "high_magnitude_table", high_table_bytes, 2 ** (bits_high - 1) if bits_high else 0, 1.0),
    ]
    codes = make_packings("scalar", {"codes": fields.get("codes")}, dim - sum(high), {"codes": single_digit(2**bits)})
    if bits_high:
        codes |= make_packings("scalar", {"codes_high": fields.get("codes_high")}, sum(high), {"codes_high": single_digit(2**bits_high)})
    require(list(fields) == list(codes), rule, f"fields names the streams {list(fields)}, expected {list(codes)}")

    def decode(digits: Digits, row: Numbers) -> list[float]:
        u = []
        places = [0, 0]
        for of_high in high:
            s = digits["codes_high" if of_high else "codes"][0][places[of_high]]
            places[of_high] += 1
            negative, level = divmod(s, len(tables[of_high]))
            magnitude = tables[of_high][level]
            u.append(f32((-magnitude if negative else magnitude) * row["norm"][0]))
        return u

    def tolerance(digits: Digits, row: Numbers) -> list[float]:
        return [2.0**-20 * abs(row["norm"][0]) + 2.0**-126] * dim

    stored, feature = norm_stream(norm), norm_feature(norm)
    return Codec("scalar", dim, 1, codes, [stored], decode, tolerance, rotation_kind=rotation_kind, rotation_seed=seed, feature=feature)
