"""Checksums of page rows, computed on the rows' device (spec/row.md, Checksum), either written into rows or compared before decoding.

In a single launch, each program sums one part of a row by Horner's rule, and the last program of a row combines the sums.
"""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
from triton import language as tl

from kvpack.kernels.bitpack.columns import launch

LANES = 1 << 10
"""Number of words that a program processes per iteration."""
STEPS = 16
"""Number of iterations per program, which cover 64 KiB of a row."""
WARPS = 4

CHECKSUM_WORD = tl.constexpr(6)
"""Index in a row of the first of the checksum's two words."""
KEY_WORD, KEY_WORDS = tl.constexpr(16), tl.constexpr(8)

DAMAGED, MISMATCHED = 1, 2
"""Bits of the flags that ``check`` returns: a wrong checksum, and an unexpected frame, description or padding."""


def write(rows: torch.Tensor, nbytes: int, multiplier: int, status: torch.Tensor) -> None:
    """Write the checksum of each row into ``rows``, uint8 ``[page, byte]``.

    Rows are padded to a multiple of 16 bytes; only the first ``nbytes`` are data. If a page's ``status``, int32 ``[page]``, is nonzero, the
    row's first 8 bytes are set to zero instead. Readers then reject the row.
    """
    _launch(rows, nbytes, multiplier, status, None, None, None)


def check(
    rows: torch.Tensor, nbytes: int, multiplier: int, front: torch.Tensor, keys: torch.Tensor | None, pads: torch.Tensor | None
) -> torch.Tensor:
    """Return the faults of each row, int32 ``[page]``: 0, or a combination of ``DAMAGED`` and ``MISMATCHED``.

    ``front``, int32, is the expected beginning of rows, except for the checksum and the key. ``keys``, uint8 ``[page, 32]``, are the
    expected keys, or None to accept any key. ``pads``, int32, are the positions of bytes that must be 0, or None.
    """
    status = torch.empty(rows.shape[0], dtype=torch.int32, device=rows.device)
    _launch(rows, nbytes, multiplier, status, front, None if keys is None else keys.view(torch.int32), pads)
    return status


def _launch(
    rows: torch.Tensor,
    nbytes: int,
    multiplier: int,
    status: torch.Tensor,
    front: torch.Tensor | None,
    keys: torch.Tensor | None,
    pads: torch.Tensor | None,
) -> None:
    words = nbytes // 4
    parts = -(-words // (LANES * STEPS))
    # Per row: the sum, and the number of programs that have added to it.
    sums = torch.zeros(rows.shape[0], 2, dtype=torch.int64, device=rows.device)
    launch(
        _sum_rows, rows.shape[0] * parts, rows.device, rows[:, :nbytes].view(torch.int32), rows.stride(0) // 4, words, parts,
        multiplier_powers(multiplier, parts, str(rows.device)), sums, status, front, 0 if front is None else front.numel(), keys, pads,
        0 if pads is None else pads.numel(), LANES=LANES, STEPS=STEPS, warps=WARPS,
    )  # fmt: skip


@lru_cache(maxsize=64)
def multiplier_powers(multiplier: int, parts: int, device: str) -> torch.Tensor:
    """Return powers of ``multiplier`` in one int64 tensor ``[LANES + parts + 1]``.

    They are the factors of an iteration's words, the factors of a row's parts, and the factor between iterations of a program.
    """
    lanes = _descending_powers(multiplier, LANES)
    result = [*lanes, *_descending_powers(pow(multiplier, LANES * STEPS, 2**64), parts), pow(multiplier, LANES, 2**64)]
    with torch.inference_mode(False):
        return torch.tensor([value - 2**64 if value >> 63 else value for value in result], dtype=torch.int64, device=device)


def _descending_powers(base: int, count: int) -> Sequence[int]:
    values = [1]
    for _ in range(count - 1):
        values.append(values[-1] * base % 2**64)
    return values[::-1]


@triton.jit
def _to_unsigned(words: tl.tensor) -> tl.tensor:
    return words.to(tl.uint32, bitcast=True).to(tl.int64)


@triton.jit
def _find_difference(result: tl.tensor, expected: tl.tensor) -> tl.tensor:
    return tl.max((result != expected).to(tl.int32), 0)


@triton.jit(do_not_specialize=["parts", "front_words", "pad_bytes"])
def _sum_rows(
    rows: tl.tensor,
    row_stride: tl.tensor,
    words: tl.tensor,
    parts: tl.tensor,
    powers: tl.tensor,
    sums: tl.tensor,
    status: tl.tensor,
    front: tl.tensor,
    front_words: tl.tensor,
    keys: tl.tensor,
    pads: tl.tensor,
    pad_bytes: tl.tensor,
    LANES: tl.constexpr,
    STEPS: tl.constexpr,
) -> None:
    """Add one part of a row to the row's sum. The last program of a row writes the checksum or, unless ``front`` is None, checks the row.

    ``rows`` are int32 words, and successive rows are ``row_stride`` words apart. ``words`` is the number of words per row, a multiple of
    16. Words before the beginning of a row count as 0, so that all parts have the same size.
    """
    page = (tl.program_id(0) // parts).to(tl.int64)
    part = tl.program_id(0) % parts
    row = rows + page * row_stride
    lane = tl.arange(0, LANES)
    first = part * (LANES * STEPS) - tl.multiple_of(parts * (LANES * STEPS) - words, 16)
    factor = tl.load(powers + LANES + parts)
    total = tl.zeros((LANES,), tl.int64)
    for step in range(STEPS):
        at = first + step * LANES + lane
        value = tl.load(row + at, at >= 0, 0)
        total = total * factor + _to_unsigned(tl.where(at // 2 != CHECKSUM_WORD // 2, value, 0))
    added = tl.sum(total * tl.load(powers + lane), 0) * tl.load(powers + LANES + part)
    tl.atomic_add(sums + 2 * page, added)
    if tl.atomic_add(sums + 2 * page + 1, 1) == parts - 1:
        whole = tl.atomic_add(sums + 2 * page, 0)
        begin = row.to(tl.pointer_type(tl.int64))
        if front is None:
            tl.store(begin + CHECKSUM_WORD // 2, whole)
            if tl.load(status + page) != 0:
                tl.store(begin, 0)
        else:
            result = tl.where(tl.load(begin + CHECKSUM_WORD // 2) != whole, 1, 0)
            other = tl.zeros((), tl.int32)
            for start in range(0, front_words, LANES):
                at = start + lane
                compared = (at < front_words) & (at // 2 != CHECKSUM_WORD // 2) & ((at < KEY_WORD) | (at >= KEY_WORD + KEY_WORDS))
                other |= _find_difference(tl.load(row + at, compared, 0), tl.load(front + at, compared, 0))
            if keys is not None:
                word = tl.arange(0, KEY_WORDS)
                other |= _find_difference(tl.load(row + KEY_WORD + word), tl.load(keys + page * KEY_WORDS + word))
            if pads is not None:
                for start in range(0, pad_bytes, LANES):
                    at = start + lane
                    byte = row.to(tl.pointer_type(tl.int8)) + tl.load(pads + at, at < pad_bytes, 0)
                    other |= _find_difference(tl.load(byte, at < pad_bytes, 0), tl.zeros((LANES,), tl.int8))
            tl.store(status + page, result + 2 * other)
