"""Codec polar (spec/codecs/polar.md)."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from ..codec import FLOAT_DTYPES, Codec, Digits, Numbers, NumberStream, make_packings, read_ascending_table, single_digit, take_parameters
from ..conventions import ceil_div, f32
from ..directions import angle_direction, bin_direction
from ..packing import MAX_DIM, Columns
from ..refusal import require
from ..rotation import ROTATION_KINDS, check_rotation


def polar(entry: Mapping[str, Any]) -> Codec:
    rule = "codecs/polar.md, Parameters and ranges"
    dim, dotted, norm, rotation_kind, seed, table_bytes, fields = take_parameters(
        entry,
        {
            "dim": range(2, MAX_DIM + 1, 2),
            "bits": str,
            "norm": FLOAT_DTYPES,
            "rotation_kind": ROTATION_KINDS,
            "seed": int,
            "angle_table": bytes,
            "fields": dict,
        },
    )
    require(
        re.fullmatch(r"[1-8](\.[1-8])*", dotted) is not None, rule, f"bits is {dotted!r}, expected integers from 1 to 8, separated by dots"
    )
    bits = [0, *map(int, dotted.split("."))]
    levels = len(bits) - 1
    require(2 ** (levels - 1) < dim, rule, f"bits has {levels} levels, which is too many for {dim} channels")
    check_rotation(rotation_kind, dim)
    radii = [ceil_div(dim, 2**level) for level in range(levels + 1)]
    pairs = [0] + [radii[level - 1] // 2 for level in range(1, levels + 1)]

    def has_unequal_pair(level: int) -> bool:
        """Return True if the second radius of the last pair of ``level`` covers fewer channels than the first."""
        of_equal_pairs: int = pairs[level] << level
        return bool(of_equal_pairs > dim)

    # Tables: per level, the directions of equal pairs and those of the unequal one.
    directions: list[tuple[list[tuple[float, float]], list[tuple[float, float]]]] = [([], [])]
    directions.append(([bin_direction(code, 2 ** bits[1]) for code in range(2 ** bits[1])], []))
    at = 0
    for level in range(2, levels + 1):
        tables = []
        for present in (pairs[level] > has_unequal_pair(level), has_unequal_pair(level)):
            size = 4 * 2 ** bits[level] if present else 0
            psi = read_ascending_table("codecs/polar.md, Layout", "angle_table", table_bytes[at : at + size], size // 4, math.pi / 2)
            tables.append([angle_direction(value) for value in psi])
            at += size
        directions.append((tables[0], tables[1]))
    require(at == len(table_bytes), "codecs/polar.md, Layout", f"angle_table has {len(table_bytes)} bytes, expected {at}")

    # Streams: consecutive levels of equal bits share one.
    first_level: dict[str, list[int]] = {}
    for level in range(1, levels + 1):
        if bits[level] != bits[level - 1]:
            name = f"angles{level}"
            first_level[name] = []
        first_level[name].append(level)
    codes: dict[str, Columns] = {}
    require(list(fields) == list(first_level), rule, f"fields names the streams {list(fields)}, expected {list(first_level)}")
    for name, members in first_level.items():
        symbols = sum(pairs[level] for level in members)
        codes |= make_packings("polar", {name: fields[name]}, symbols, {name: single_digit(2 ** bits[members[0]])})

    def decode(digits: Digits, row: Numbers) -> list[float]:
        by_level: dict[int, list[int]] = {}
        for name, members in first_level.items():
            remaining = digits[name][0]
            for level in members:
                by_level[level], remaining = remaining[: pairs[level]], remaining[pairs[level] :]
        rho = row["radius"]
        for level in range(levels, 0, -1):
            below: list[float] = []
            for i, code in enumerate(by_level[level]):
                is_unequal = has_unequal_pair(level) and i == pairs[level] - 1
                c, s = directions[level][is_unequal][code]
                below += [f32(rho[i] * c), f32(rho[i] * s)]
            rho = below + rho[pairs[level] :]
        return rho

    def tolerance(digits: Digits, row: Numbers) -> list[float]:
        return [2.0**-19 * abs(row["radius"][channel // 2**levels]) + 2.0**-118 for channel in range(dim)]

    stored = NumberStream("radius", FLOAT_DTYPES[norm], (radii[levels],))
    return Codec("polar", dim, 1, codes, [stored], decode, tolerance, rotation_kind=rotation_kind, rotation_seed=seed)
