"""Codec trellis (spec/codecs/trellis.md)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..codec import Codec, Digits, Numbers, take_parameters
from ..conventions import f32, numbers
from ..norms import TOKEN_NORMS, norm_feature, norm_stream
from ..packing import MAX_DIM, Columns
from ..refusal import require
from ..rotation import ROTATION_KINDS, check_rotation


def trellis(entry: Mapping[str, Any]) -> Codec:
    rule = "codecs/trellis.md, Parameters and ranges"
    dim, bits, state_bits, norm, rotation_kind, seed, table_bytes = take_parameters(
        entry,
        {
            "dim": range(1, MAX_DIM + 1),
            "bits": range(1, 5),
            "state_bits": (8, 10),
            "norm": TOKEN_NORMS,
            "rotation_kind": ROTATION_KINDS,
            "seed": int,
            "table": bytes,
        },
    )
    check_rotation(rotation_kind, dim)
    length = dim * bits
    require(length % 16 == 0, rule, f"{dim} channels of {bits} bits take {length} bits per token, expected a multiple of 16")
    require(len(table_bytes) == 2 << state_bits, rule, f"table has {len(table_bytes)} bytes, expected {2 << state_bits}")
    table = numbers(table_bytes, "F16")
    require(all(-1 <= value <= 1 for value in table), rule, "table contains a value that is not between -1 and 1")
    codes = {"codes": Columns(length // 16, (65536,), 1, (65536,))}

    def decode(digits: Digits, row: Numbers) -> list[float]:
        string = sum(word << 16 * place for place, word in enumerate(digits["codes"][0]))
        # If the string is repeated once, no window crosses the end.
        string |= string << length
        windows = [string >> (bits * (c + 1) - state_bits) % length & (1 << state_bits) - 1 for c in range(dim)]
        return [f32(table[window] * row["norm"][0]) for window in windows]

    def tolerance(digits: Digits, row: Numbers) -> list[float]:
        return [2.0**-20 * abs(row["norm"][0]) + 2.0**-126] * dim

    stored, feature = norm_stream(norm), norm_feature(norm)
    return Codec("trellis", dim, 1, codes, [stored], decode, tolerance, rotation_kind=rotation_kind, rotation_seed=seed, feature=feature)
