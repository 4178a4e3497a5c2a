"""One row of the work table: which tokens a program attends, and where their packed rows lie."""

# Triton compiles neither unpacking nor conditional expressions of tensors.
# ruff: noqa: RUF005
# Tuples of tensors grow while a kernel is compiled, and Triton has no types.
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

from typing import Any, NamedTuple

import triton
from triton import language as tl

FIRST_ADDRESS = tl.constexpr(5)
"""Integers of a work row before the addresses: those of ``Work`` before its streams."""

STREAM_INTEGERS = tl.constexpr(3)
"""Integers per stream in a work row: its address, and its batch and head strides in bytes."""


class Rows(NamedTuple):
    """Where the packed rows of one side are: pointers to the first row of this head in each stream, and the row of the first token."""

    streams: Any
    first: Any


class Work(NamedTuple):
    """The tokens of a program: ``count`` of them from token ``begin`` of the layer on.

    Every query sees all of the first ``whole``, a multiple of what the program's warps attend at once.
    """

    begin: Any
    count: Any
    whole: Any
    k: Any
    v: Any


@triton.jit
def load_work(row: tl.tensor, batch: tl.tensor, head: tl.tensor, K: tl.constexpr, V: tl.constexpr) -> tl.tuple:
    """The ``Work`` of a row, int64 ``[FIRST_ADDRESS + STREAM_INTEGERS * streams]`` of both sides, for one sequence and KV head."""
    begin = tl.load(row)
    count = tl.load(row + 1).to(tl.int32)
    whole = tl.load(row + 2).to(tl.int32)
    k_first = tl.load(row + 3)
    v_first = tl.load(row + 4)
    k_streams = _stream_pointers(row + FIRST_ADDRESS, batch, head, K)
    v_streams = _stream_pointers(row + FIRST_ADDRESS + STREAM_INTEGERS * len(K.streams), batch, head, V)
    return Work(begin, count, whole, Rows(k_streams, k_first), Rows(v_streams, v_first))


@triton.jit
def _stream_pointers(row: tl.tensor, batch: tl.tensor, head: tl.tensor, SIDE: tl.constexpr) -> tl.tuple:
    pointers = ()
    for number in tl.static_range(len(SIDE.streams)):
        at = row + STREAM_INTEGERS * number
        pointers = pointers + (_pointer(at, batch, head, SIDE.streams[number].bits, SIDE.streams[number].aligned),)
    return pointers


@triton.jit
def _pointer(at: tl.tensor, batch: tl.tensor, head: tl.tensor, BITS: tl.constexpr, ALIGNED: tl.constexpr) -> tl.tensor:
    address = tl.load(at) + batch * tl.load(at + 1) + head * tl.load(at + 2)
    if BITS == 8:
        pointer = address.to(tl.pointer_type(tl.int8))
    elif BITS == 16:
        pointer = address.to(tl.pointer_type(tl.int16))
    else:
        pointer = address.to(tl.pointer_type(tl.int32))
    return tl.multiple_of(pointer, ALIGNED)


@triton.jit
def within_length(
    work: tl.tuple,
    length: tl.tensor,
    position: tl.tensor,
    ahead: tl.tensor,
    window: tl.tensor,
    SPAN: tl.constexpr,
    TILES: tl.constexpr,
) -> tl.tuple:
    """The work of a sequence of ``length`` tokens, whose first query is at ``position``, and the tokens before its window.

    Both are in whole tiles of ``SPAN`` tokens, ``whole`` in ``TILES`` of them.
    """
    count = tl.maximum(0, tl.minimum(work.count, length - work.begin)).to(tl.int32)
    skipped = tl.maximum(0, position - window + 1 - work.begin).to(tl.int32) // SPAN * SPAN
    seen = tl.maximum(0, tl.minimum(count, position + 1 + ahead - work.begin)).to(tl.int32)
    whole = tl.minimum(work.whole, seen // (TILES * SPAN) * (TILES * SPAN))
    return Work(work.begin, count, whole, work.k, work.v), skipped
