"""The checks of ``Codec.check`` for stored words and floats, on the device: one launch per rule for all sides of a cache.

A launch only finds the sides with errors; ``Codec.check`` then reports what is wrong with them.
"""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch
import triton
from triton import language as tl

from kvpack.formats.columns import WordRule

from .columns import launch, table_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvpack.formats.base import Codec

LANES, STEPS = 1 << 10, 16
"""Values that a program processes at once, and the number of repetitions."""
WARPS = 4

FLOATS = {"F16": (tl.int16, 0x7C00), "F32": (tl.int32, 0x7F800000)}
"""Integer dtype of a stored float's bits, and the mask of its exponent, whose bits are all set if it is not finite."""

TABLE_INTEGERS = tl.constexpr(3)
"""Integers of a stream in the table: its address, its values, and the number of its side."""


@lru_cache(maxsize=256)
def rules_of(codec: Codec) -> Mapping[str, WordRule | str] | None:
    """Return the rule of each stream that has one, or the dtype name for floats; None if ``Codec.check`` checks more than these.

    A class with its own check may check more.
    """
    result: dict[str, WordRule | str] = {}
    for stream, packing in codec.packings().items():
        rules = packing.word_rules()
        if rules is None:
            return None
        names = [f"{stream}.{plane}" for plane in range(len(rules))]
        result.update((name, rule) for name, rule in zip(names, rules, strict=True) if rule is not None)
    return result | {name: codec.row_layouts[name].dtype for name in codec.finite_streams()}


def wrong_sides(sides: Sequence[tuple[Codec, Mapping[str, torch.Tensor]]]) -> Callable[[], list[int]]:
    """Start a search for the ``sides`` that break a rule; all must have rules and contiguous streams on one device.

    The returned function waits for the result and returns their numbers.
    """
    streams: dict[WordRule | str, list[tuple[int, int, int]]] = {}
    held = [stream for _, own in sides for stream in own.values()]
    for number, (codec, own) in enumerate(sides):
        for name, rule in (rules_of(codec) or {}).items():
            if own[name].numel():
                streams.setdefault(rule, []).append((own[name].data_ptr(), own[name].numel(), number))
    if not streams:
        return list
    device = held[0].device
    table = table_of([row for rows in streams.values() for row in rows], device)
    status = torch.zeros(len(sides), dtype=torch.int32, device=device)
    first = 0
    for rule, rows in streams.items():
        parts = -(-max(values for _, values, _ in rows) // (LANES * STEPS))
        word, exponent = FLOATS[rule] if isinstance(rule, str) else (tl.int16, 0)
        bounds, width = (status, 1) if isinstance(rule, str) else (_bounds(rule, str(device)), len(rule.limits))
        launch(
            _find_wrong, len(rows) * parts, device, status, table, bounds, first, parts, width,
            WORD=word, EXPONENT=exponent, LANES=LANES, STEPS=STEPS, warps=WARPS,
        )  # fmt: skip
        first += len(rows)
    return lambda: [number for number, wrong in enumerate(status.tolist()) if wrong]


@lru_cache(maxsize=256)
def _bounds(rule: WordRule, device: str) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.tensor([rule.spare, rule.limits], dtype=torch.int32, device=device)


@triton.jit(do_not_specialize=["first", "parts", "width"])
def _find_wrong(
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
    """Set the side's status if a value of this part of a stream breaks its rule: ``bounds`` ``[2, width]``, or a float's exponent."""
    row = table + (first + tl.program_id(0) // parts) * TABLE_INTEGERS
    begin = (tl.program_id(0) % parts).to(tl.int64) * (LANES * STEPS)
    values = tl.load(row + 1)
    pointer = tl.load(row).to(tl.pointer_type(WORD))
    lane = tl.arange(0, LANES)
    wrong = lane < 0
    for step in range(STEPS):
        place = begin + step * LANES
        # Zeros, which are loaded behind the end, keep every rule.
        word = tl.load(pointer + place + lane, place + lane < values, 0).to(tl.int32)
        if EXPONENT:
            wrong |= (word & EXPONENT) == EXPONENT
        else:
            column = ((place % width).to(tl.int32) + lane) % width
            word &= 0xFFFF
            wrong |= ((word & tl.load(bounds + column)) != 0) | (word > tl.load(bounds + width + column))
    if tl.max(wrong.to(tl.int32), 0) != 0:
        tl.store(status + tl.load(row + 2), 1)
