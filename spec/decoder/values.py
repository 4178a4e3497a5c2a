"""Decoding of a layer's keys or values (spec/container.md, Reading, step 9; spec/side-cars.md, Layout and Decode)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from .basis_lookup import Bases, balanced_matrices, basis_values
from .codec import RAW_DTYPES, Codec, Digits, Numbers, NumberStream
from .contents import Side
from .conventions import ceil_div, f32, numbers
from .norms import decode_norm_byte
from .packing import Columns
from .refusal import require
from .rotation import rotate_back, rotate_tolerance
from .sidecars import SIDECARS, check_special_values


def decode_side(side: Side, prefix: str, contents: Mapping[str, bytes], bases: Bases) -> None:
    """Check the codec's rules, and decode all tokens of each head, packed tokens first (section Reading, step 9)."""
    codec = side.codec
    for name, stream in codec.streams.items():
        if isinstance(stream, Columns):
            side.digits[name] = code_rows(side, prefix + name, stream, contents)
        else:
            side.numbers[name] = numbers(contents[prefix + name], stream.dtype)
            if stream.logarithms:
                side.numbers[name] = [decode_norm_byte(int(c)) for c in side.numbers[name]]
            check_special_values(prefix + name, stream, side.numbers[name])
    codec.check_sizes(side, prefix)
    side.basis_parts = basis_values(side, prefix, bases) if codec.basis else []
    places = {name: entry_indices(flags) for name, flags in entry_flags(side).items()}
    for name, indices in places.items():
        rule = f"{SIDECARS}, Layout"
        require(
            len(indices) == side.entries[name],
            rule,
            f"{prefix}{name} has {side.entries[name]} entries, expected one for each of {len(indices)} set flags",
        )
    if "balanced" in codec.sidecars:
        side.basis_parts = balanced_matrices(side, prefix, bases)
    if "raw_positions" in codec.sidecars:
        places["raw_positions"] = position_indices(side, prefix)
    all_digits = side.digits | codec.derive_digits(side, prefix)
    tail: list[float] = numbers(contents[f"{prefix}tail"], RAW_DTYPES[side.tail_dtype]) if side.tail else []
    if side.shape[2] == 0:
        return
    tokens = [(number, token) for number, run in enumerate(side.runs) for token in range(run)]
    token_streams = [stream for stream in codec.streams.values() if isinstance(stream, NumberStream) and stream.per != "entry"]
    first_rows = {stream.name: list(accumulate((ceil_div(run, stream.tokens) for run in side.runs), initial=0)) for stream in token_streams}
    for b in range(side.batch):
        for h in range(side.heads):
            head = b * side.heads + h
            for t, (run, token) in enumerate(tokens):
                digits = {name: rows[head * len(tokens) + t] for name, rows in all_digits.items()}
                row = {}
                for stream in token_streams:
                    first = first_rows[stream.name]
                    number = run if stream.per == "run" else first[run] + token // stream.tokens
                    rows = len(side.runs) if stream.per == "run" else first[-1]
                    row[stream.name] = number_row(side, stream, number + (head if stream.per_head else b) * rows)
                if side.basis_parts:
                    row |= side.basis_parts[h]
                codec.check(f"{prefix}* batch {b}, head {h}, token {t}", digits, row)
                x, tolerance = decode_token(side, places, (t, b, h), digits, row)
                side.values += x
                side.tolerances += tolerance
            size = side.tail * codec.dim
            side.values += tail[head * size : (head + 1) * size]
            side.tolerances += [0.0] * size


def code_rows(side: Side, name: str, packing: Columns, contents: Mapping[str, bytes]) -> list[list[list[int]]]:
    """Return the digits of every row of a code stream."""
    widths = packing.plane_words
    planes = [numbers(contents[f"{name}.{plane}"], "U16") for plane in range(len(widths))]
    return [
        packing.unpack([plane[row * w : (row + 1) * w] for plane, w in zip(planes, widths, strict=True)], f"{name} row {row}")
        for row in range(side.batch * side.heads * side.packed if side.packed else 0)
    ]


def entry_flags(side: Side) -> dict[str, dict[tuple[int, ...], int]]:
    """Return the flags of each stream with one row per entry, by token and sequence (and head and chunk): side-cars.md, Layout."""
    result: dict[str, dict[tuple[int, ...], int]] = {}
    if "outliers" in side.codec.sidecars:
        rows = enumerate(side.digits["outlier_flags"])
        per_head = ((*divmod(row, side.packed), flag) for row, (flag,) in rows)
        result["outliers"] = {(t, *divmod(head, side.heads), c): one for head, t, flag in per_head for c, one in enumerate(flag)}
    if "raw_tokens" in side.codec.sidecars:
        flags: list[Any] = side.numbers["raw_token_flags"]
        result["raw_tokens"] = {(row % side.packed, row // side.packed): flag for row, flag in enumerate(flags)}
    return result


def entry_indices(flags: Mapping[tuple[int, ...], int]) -> dict[tuple[int, ...], int]:
    """Return the entry number of each flag that is 1. Keys of ``flags`` begin with token and sequence, in the order of the entries."""
    return {place: number for number, place in enumerate(sorted(place for place, flag in flags.items() if flag))}


def position_indices(side: Side, prefix: str) -> dict[tuple[int, ...], int]:
    """Return the entry number of each raw token, by token and sequence (side-cars.md, Layout)."""
    count, rule = side.entries["raw_positions"], f"{SIDECARS}, Layout"
    has = side.entries["raw_values"]
    require(has == count, rule, f"{prefix}raw_values has {has} entries, expected one for each of {count} positions")
    result: dict[tuple[int, ...], int] = {}
    words = [[int(word) for word in side.numbers["raw_positions"][4 * entry : 4 * entry + 4]] for entry in range(count)]
    last: tuple[int, ...] = (-1, 0)
    for entry, (low, middle, high, b) in enumerate(words):
        t = low + 2**16 * middle + 2**32 * high - 1
        what = f"{prefix}raw_positions: entry {entry} is token {t} of sequence {b}"
        if t < 0:
            require(b == 0, rule, f"{what}, but an unused entry must be zero")
            continue
        require(len(result) == entry, rule, f"{what}, but follows an unused entry")
        require(t < side.packed and b < side.batch, rule, f"{what}, but there are {side.packed} tokens and {side.batch} sequences")
        require((t, b) > last, rule, f"{what}, but follows (token, sequence) {last}")
        last = t, b
        result[last] = entry
    size = side.heads * side.codec.dim
    unused = side.numbers["raw_values"][len(result) * size :]
    zero = not any(unused) and all(math.copysign(1.0, one) > 0 for one in unused)
    require(zero, rule, f"{prefix}raw_values: an unused entry is not zero")
    return result


def decode_token(
    side: Side, places: Mapping[str, Mapping[tuple[int, ...], int]], place: tuple[int, int, int], digits: Digits, row: Numbers
) -> tuple[list[float], list[float]]:
    """Return the values of one token, at ``place`` (its sequence and head), and their tolerances (side-cars.md, Decode)."""
    codec, (t, b, h) = side.codec, place
    for name, values in (("raw_positions", "raw_values"), ("raw_tokens", "raw_tokens")):
        if (t, b) in places.get(name, {}):
            at = (places[name][t, b] * side.heads + h) * codec.dim
            return side.numbers[values][at : at + codec.dim], [0.0] * codec.dim
    u, tolerance = list(codec.decode(digits, row)), list(codec.tolerance(digits, row))
    of_head = 0.0
    for c in range(codec.dim // 4 if "outliers" in places else 0):
        if (*place, c) in places["outliers"]:
            entry = 4 * places["outliers"][*place, c]
            u[4 * c : 4 * c + 4] = side.numbers["outliers"][entry : entry + 4]
            tolerance[4 * c : 4 * c + 4] = [0.0] * 4
    if "key_mean" in codec.sidecars:
        u = [f32(one + part) for one, part in zip(u, page_vector(codec, row), strict=True)]
        tolerance = [before + 2.0**-23 * abs(one) + 2.0**-126 for before, one in zip(tolerance, u, strict=True)]
    if "qjl" in codec.sidecars:
        (norm,) = row["qjl_norm"]
        gamma = norm * math.sqrt(math.pi / (2 * codec.dim))
        residual = residual_signs(codec.sidecars["qjl"].seed, digits["qjl_signs"][0])
        u = [f32(one + gamma * sign) for one, sign in zip(u, residual, strict=True)]
        tolerance = [before + 2.0**-23 * abs(one) + 2.0**-126 for before, one in zip(tolerance, u, strict=True)]
        of_head = 2.0**-18 * abs(norm)
    x = rotate_back(codec.rotation_kind, codec.rotation_seed, u)
    if codec.rotation_kind != "none":
        tolerance, of_head = rotate_tolerance(u, tolerance, of_head), 0.0
    if "block_rotation" in codec.sidecars:
        size = codec.sidecars["block_rotation"].block
        blocks = [slice(first, first + size) for first in range(0, codec.dim, size)]
        tolerance = [one for block in blocks for one in rotate_tolerance(x[block], tolerance[block], of_head)]
        x, of_head = [one for block in blocks for one in rotate_back("hadamard", 0, x[block])], 0.0
    tolerance = [one + of_head for one in tolerance]
    if "channel_order" in codec.sidecars:
        placed = sorted(zip(row["channel_order"], x, tolerance, strict=True))
        x, tolerance = [one for _, one, _ in placed], [one for _, _, one in placed]
    if "channel_scale" in codec.sidecars:
        scales = row["channel_scale"]
        x = [f32(one * scale) for one, scale in zip(x, scales, strict=True)]
        products = zip(tolerance, scales, x, strict=True)
        tolerance = [scale * before + 2.0**-23 * abs(one) + 2.0**-126 if before else 0.0 for before, scale, one in products]
    if "balanced" in codec.sidecars:
        columns = [row["balanced"][c :: codec.dim] for c in range(codec.dim)]
        sums = [sum(abs(one * d) for one, d in zip(x, column, strict=True)) for column in columns]
        before = [sum(one * abs(d) for one, d in zip(tolerance, column, strict=True)) for column in columns]
        tolerance = [own + 2.0**-18 * size + 2.0**-126 for own, size in zip(before, sums, strict=True)]
        x = [f32(math.fsum(one * d for one, d in zip(x, column, strict=True))) for column in columns]
    return x, tolerance


def page_vector(codec: Codec, row: Numbers) -> list[float]:
    """Return the vector to add to u (section Decode, step 3)."""
    bits, (scale,) = codec.sidecars["key_mean"].bits, row["key_mean_scale"]
    codes = [int(code) for code in row["key_mean"]]
    if bits == 4:
        codes = [code % 16 for code in codes] + [code // 16 for code in codes]
    return [(code - 2 ** (bits - 1)) * scale for code in codes]


def residual_signs(seed: int, digit: Sequence[int]) -> list[float]:
    """Return R'ᵀ s (section Decode, step 4)."""
    return rotate_back("signed-hadamard", seed, [-1.0 if bit else 1.0 for bit in digit])


def number_row(side: Side, stream: NumberStream, row: int) -> list[float]:
    """Return the numbers in row ``row`` of ``stream``. Rows are counted over all heads and sequences."""
    size = math.prod(stream.sizes)
    return side.numbers[stream.name][row * size : (row + 1) * size]
