"""Validation of stored words and floats on the device, with one launch per rule for all sides (keys or values of layers) of a cache.

A launch only finds the sides that break rules; ``Codec.check`` then reports their errors.
"""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

import torch
import triton
from triton import language as tl

from kvpack.formats.base import Codec
from kvpack.formats.columns import WordRule

from .columns import device_table, launch

LANES, STEPS = 1 << 10, 16
"""Values that a program checks per iteration, and its number of iterations."""
WARPS = 4

FLOATS = {"F16": (tl.int16, 0x7C00), "F32": (tl.int32, 0x7F800000)}
"""For each float dtype, the integer dtype of its bits and its exponent mask. Infinities and NaNs have all exponent bits set."""

TABLE_INTEGERS = tl.constexpr(3)
"""Integers per table row. A row describes a stream by its address, its number of values, and the index of its side."""


@lru_cache(maxsize=256)
def stream_rules(codec: Codec) -> Mapping[str, WordRule | str] | None:
    """Return the rules of the codec's streams by name: a ``WordRule``, or the name of a dtype whose values must be finite.

    Streams without a rule are left out. Returns None if the codec has a rule that this module cannot check.
    """
    result: dict[str, WordRule | str] = {}
    for stream, packing in codec.packings().items():
        rules = packing.word_rules()
        if rules is None:
            return None
        names = [f"{stream}.{plane}" for plane in range(len(rules))]
        result.update((name, rule) for name, rule in zip(names, rules, strict=True) if rule is not None)
    return result | {name: codec.row_layouts[name].dtype for name in codec.finite_streams()}


def find_invalid_sides(sides: Sequence[tuple[Codec, Mapping[str, torch.Tensor]]]) -> Callable[[], list[int]]:
    """Start checking all ``sides``. Returns a function that waits for the device and returns the indices of the invalid sides.

    ``stream_rules`` must support every codec, and all streams must be contiguous and on one device.
    """
    streams: dict[WordRule | str, list[tuple[int, int, int]]] = {}
    keep_alive = [stream for _, tensors in sides for stream in tensors.values()]
    for index, (codec, tensors) in enumerate(sides):
        for name, rule in (stream_rules(codec) or {}).items():
            if tensors[name].numel():
                streams.setdefault(rule, []).append((tensors[name].data_ptr(), tensors[name].numel(), index))
    if not streams:
        return list
    device = keep_alive[0].device
    table = device_table([row for rows in streams.values() for row in rows], device)
    status = torch.zeros(len(sides), dtype=torch.int32, device=device)
    first = 0
    for rule, rows in streams.items():
        parts = -(-max(values for _, values, _ in rows) // (LANES * STEPS))
        word, exponent = FLOATS[rule] if isinstance(rule, str) else (tl.int16, 0)
        bounds, width = (status, 1) if isinstance(rule, str) else (_word_bounds(rule, str(device)), len(rule.limits))
        launch(
            _check_values, len(rows) * parts, device, status, table, bounds, first, parts, width,
            WORD=word, EXPONENT=exponent, LANES=LANES, STEPS=STEPS, warps=WARPS,
        )  # fmt: skip
        first += len(rows)
    return lambda: [index for index, invalid in enumerate(status.tolist()) if invalid]


@lru_cache(maxsize=256)
def _word_bounds(rule: WordRule, device: str) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.tensor([rule.spare, rule.limits], dtype=torch.int32, device=device)


@triton.jit(do_not_specialize=["first", "parts", "width"])
def _check_values(
    status: tl.tensor,
    table: tl.tensor,
    bounds: tl.tensor,
    first: tl.tensor,
    parts: tl.tensor,
    width: tl.tensor,
    WORD: tl.constexpr,
    EXPONENT: tl.constexpr,
    LANES: tl.constexpr,
    STEPS: tl.constexpr,
) -> None:
    """Check one part of a stream, and set the ``status`` of its layer's keys or values if any value breaks its rule.

    With ``EXPONENT``, values are floats and must be finite. Otherwise, they are words and must satisfy ``bounds`` ``[2, width]``: a mask of
    bits that must be 0, and a maximum.
    """
    row = table + (first + tl.program_id(0) // parts) * TABLE_INTEGERS
    begin = (tl.program_id(0) % parts).to(tl.int64) * (LANES * STEPS)
    values = tl.load(row + 1)
    pointer = tl.load(row).to(tl.pointer_type(WORD))
    lane = tl.arange(0, LANES)
    invalid = lane < 0
    for step in range(STEPS):
        offset = begin + step * LANES
        # Loads past the end yield zeros, which satisfy every rule.
        word = tl.load(pointer + offset + lane, offset + lane < values, 0).to(tl.int32)
        if EXPONENT:
            invalid |= (word & EXPONENT) == EXPONENT
        else:
            column = ((offset % width).to(tl.int32) + lane) % width
            word &= 0xFFFF
            invalid |= ((word & tl.load(bounds + column)) != 0) | (word > tl.load(bounds + width + column))
    if tl.max(invalid.to(tl.int32), 0) != 0:
        tl.store(status + tl.load(row + 2), 1)
