"""Codec klt (spec/codecs/klt.md)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..basis import RUN_COLUMNS, SHORT_COLUMNS, TABLE_VALUES, basis_rows
from ..codec import FLOAT_DTYPES, Codec, Digits, Numbers, NumberStream, make_packings, single_digit, take_parameters
from ..conventions import ceil_div, f32
from ..packing import MAX_DIM, Columns
from ..refusal import require

KLT_PARAMETERS = "codecs/klt.md, Parameters and ranges"


def klt(entry: Mapping[str, Any]) -> Codec:
    rule = KLT_PARAMETERS
    dim, digest, layer, side, rows, widths, gain, fields = take_parameters(
        entry,
        {
            "dim": range(1, MAX_DIM + 1),
            "basis": bytes,
            "layer": range(4096),
            "side": ("k", "v"),
            "rows": ("basis", *FLOAT_DTYPES),
            "widths": bytes,
            "gain": ("none", "fp16"),
            "fields": dict,
        },
    )
    require(len(digest) == 32, rule, f"basis has {len(digest)} bytes, expected 32")
    per_head, short = list(fields) == ["codes"], ceil_div(dim, SHORT_COLUMNS)
    is_valid = len(widths) > 0 and len(widths) % short == 0 if per_head else len(widths) == ceil_div(dim, RUN_COLUMNS)
    require(is_valid, rule, f"widths has {len(widths)} bytes, which does not match {dim} channels")
    require(
        max(widths) <= 8 and any(widths), rule, f"widths is {widths.hex()}, expected widths of at most 8 bits, and at least one above 0"
    )
    if per_head:
        require(fields["codes"] == SHORT_COLUMNS, rule, f"fields['codes'] is {fields['codes']!r}, expected {SHORT_COLUMNS}")
    columns: dict[str, list[int]] = {} if per_head else {f"codes_{width}": [] for width in sorted({*widths} - {0})}
    for j in range(0 if per_head else dim):
        if widths[j // RUN_COLUMNS]:
            columns[f"codes_{widths[j // RUN_COLUMNS]}"].append(j)
    require(per_head or list(fields) == list(columns), rule, f"fields names the streams {list(fields)}, expected {list(columns)}")
    codes: dict[str, Columns] = {}
    for name, own in columns.items():
        codes |= make_packings("klt", {name: fields[name]}, len(own), {name: single_digit(2 ** int(name[-1]))})
    # The columns of each short run of each head, and its bytes in a row.
    runs = [range(8 * s, min(8 * s + 8, dim)) for s in range(short)] * (len(widths) // short) if per_head else []
    sizes = [ceil_div(len(run) * width, 8) for run, width in zip(runs, widths, strict=True)] if per_head else []

    def check_bits(side: Any, prefix: str) -> None:
        numbers: dict[str, list[Any]] = side.numbers
        for at in range(0, len(numbers["codes"]), sum(sizes)):
            for run, width, size in zip(runs, widths, sizes, strict=True):
                own = int.from_bytes(bytes(numbers["codes"][at : at + size]), "little")
                require(
                    own >> len(run) * width == 0,
                    "codecs/klt.md, Layout",
                    f"{prefix}codes: the run at byte {at} has bits set after its last column",
                )
                at += size

    def head_codes(side: Any, prefix: str) -> dict[str, list[list[list[int]]]]:
        """Return the code and the width of each column for each token of a head."""
        numbers: dict[str, list[Any]] = side.numbers
        rows: list[list[list[int]]] = [[[], []] for _ in range(side.batch * side.heads * side.packed)]
        for token in range(side.batch * side.packed):
            at, (b, t) = token * sum(sizes), divmod(token, side.packed)
            for number, (run, width, size) in enumerate(zip(runs, widths, sizes, strict=True)):
                own = int.from_bytes(bytes(numbers["codes"][at : at + size]), "little")
                found = rows[(b * side.heads + number // short) * side.packed + t]
                found[0] += [own >> j * width & 2**width - 1 for j in range(len(run))]
                found[1] += [width] * len(run)
                at += size
        return {"codes": rows}

    def mean_and_values(digits: Digits, row: Numbers) -> tuple[list[float], list[float]]:
        """Return m and v as defined in section Decode."""
        mean = [256.0 * value for value in row["rows"][:dim]]
        tables = row["rows"][dim * (2 + dim) :]
        v = [0.0] * dim
        all_codes = [(j, int(name[-1]), s) for name, own in columns.items() for j, s in zip(own, digits[name][0], strict=True)]
        if per_head:
            all_codes = [(j, width, s) for j, (s, width) in enumerate(zip(*digits["codes"], strict=True)) if width]
        for j, width, s in all_codes:
            v[j] = tables[TABLE_VALUES * (j // RUN_COLUMNS) + 2**width - 2 + s]
            if gain == "fp16":
                v[j] *= row["gain"][0]
        return mean, v

    def decode(digits: Digits, row: Numbers) -> list[float]:
        mean, v = mean_and_values(digits, row)
        matrix = [row["rows"][dim * (1 + j) : dim * (2 + j)] for j in range(dim)]
        return [f32(math.fsum((m + value) * d[c] for m, value, d in zip(mean, v, matrix, strict=True))) for c in range(dim)]

    def tolerance(digits: Digits, row: Numbers) -> list[float]:
        mean, v = mean_and_values(digits, row)
        matrix = [row["rows"][dim * (1 + j) : dim * (2 + j)] for j in range(dim)]
        sums = (sum((abs(m) + abs(value)) * abs(d[c]) for m, value, d in zip(mean, v, matrix, strict=True)) for c in range(dim))
        return [2.0**-18 * one + 2.0**-126 for one in sums]

    number_streams = [NumberStream("codes", "U8", (sum(sizes),), per_head=False)] if per_head else []
    number_streams += [NumberStream("gain", "F16", ())] if gain == "fp16" else []
    if rows != "basis":
        number_streams.append(NumberStream("rows", FLOAT_DTYPES[rows], (basis_rows(dim), dim), per="run"))
    found = Codec("klt", dim, 1, codes, number_streams, decode, tolerance, basis=(digest, layer, side) if rows == "basis" else None)
    if per_head:
        found = replace(found, heads=len(widths) // short, derive_digits=head_codes, check_sizes=check_bits)
    return found
