"""quaternion as tiles (spec/codecs/quaternion.md): four tiles a field, the components of its chunks. Direct arrangement only."""

# Tuples of tensors grow while a kernel is compiled, and Triton has no types.
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
from triton import language as tl

from .fields import beside, code_bits, load_factor, load_planes, product, read_factor, whole_planes
from .shared_table import look_up_bits
from .tiles import Stream, Tiles, channels_of, fields_side_by_side, packing_constants, plane_streams, step_symbols, takes_whole_words

if TYPE_CHECKING:
    from kvpack.formats.quaternion import Quaternion

VALUES = 4


def tiles(codec: Quaternion) -> Tiles | None:
    """The loader of ``codec``, None for the dense arrangement."""
    packing = codec.packings().get("symbol")
    if packing is None or not takes_whole_words(packing):
        return None
    symbols = step_symbols(packing)
    table = torch.zeros(packing.bases[0], VALUES)
    table[: packing.alphabets[0]] = codec.codebook
    streams = plane_streams("symbol", packing)
    scale_bits = 16 if codec.norm == "fp16" else 32
    constants = (
        packing_constants(0, packing), fields_side_by_side(packing), packing.bases[0].bit_length() - 1, codec.radius_bits,
        len(streams), scale_bits,
    )  # fmt: skip
    channels = tuple(channels_of(step, VALUES, value, codec.dim) for step in symbols for value in range(VALUES))
    return Tiles(
        load,
        decode,
        factor,
        constants,
        len(symbols),
        channels,
        (*streams, Stream("scale", scale_bits, 1)),
        table.to(torch.float16),
        packings=(packing,), entries=packing.alphabets[0],
    )


@triton.jit
def load(
    pointers: tl.tuple,
    first: tl.tensor,
    token: tl.tensor,
    valid: tl.tensor,
    C: tl.constexpr,
    MASKED: tl.constexpr,
    WHOLE: tl.constexpr,
    TURNED: tl.constexpr,
    FAST: tl.constexpr,
) -> tl.tuple:
    """The planes, then the scales."""
    PACKING: tl.constexpr = C[0]
    planes = load_planes(pointers, first, token, valid, PACKING, MASKED, TURNED)
    return planes + load_factor(pointers[C[4]], first, token, valid, C[5], MASKED, FAST)


@triton.jit
def decode(
    raw: tl.tuple,
    places: tl.tuple,
    table: tl.tensor,
    STEP: tl.constexpr,
    C: tl.constexpr,
    SHARED: tl.constexpr,
    TURNED: tl.constexpr,
    FAST: tl.constexpr,
) -> tl.tuple:
    """The components of the chunks of ``STEP``: unit quaternions times radius codes."""
    PACKING: tl.constexpr = C[0]
    BESIDE: tl.constexpr = C[1]
    planes = whole_planes(raw, places, 0, PACKING, TURNED, FAST)
    for number in tl.static_range(BESIDE):
        if STEP * BESIDE + number < PACKING[4]:
            found = _field(planes, table, STEP * BESIDE + number, C, SHARED, FAST)
            if number == 0:
                w, x, y, z = found
            else:
                w = beside(w, found[0], places, 0, PACKING[2], number, TURNED, FAST)
                x = beside(x, found[1], places, 0, PACKING[2], number, TURNED, FAST)
                y = beside(y, found[2], places, 0, PACKING[2], number, TURNED, FAST)
                z = beside(z, found[3], places, 0, PACKING[2], number, TURNED, FAST)
    return (w, x, y, z)


@triton.jit
def _field(planes: tl.tuple, table: tl.tensor, FIELD: tl.constexpr, C: tl.constexpr, SHARED: tl.constexpr, FAST: tl.constexpr) -> tl.tuple:
    PACKING: tl.constexpr = C[0]
    CODE_BITS: tl.constexpr = C[2]
    RADIUS_BITS: tl.constexpr = C[3]
    found = look_up_bits(planes, table, FIELD * CODE_BITS, CODE_BITS, 4, 0, SHARED, FAST)
    radius = code_bits(planes, PACKING[4] * CODE_BITS + FIELD * RADIUS_BITS, RADIUS_BITS, FAST)
    return (
        product(found[0], radius, FAST),
        product(found[1], radius, FAST),
        product(found[2], radius, FAST),
        product(found[3], radius, FAST),
    )


@triton.jit
def factor(raw: tl.tuple, C: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """The scale over the largest radius code."""
    return read_factor(raw, C[4], C[5], FAST) * (1.0 / ((1 << C[3]) - 1))
