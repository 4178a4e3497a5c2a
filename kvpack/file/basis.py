"""The required feature ``basis``, which marks a file that contains a model's basis instead of a cache (spec/basis.md)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol

from kvpack.formats import rans
from kvpack.formats.balanced import FRAMES
from kvpack.formats.base import MAX_DIM, Codec
from kvpack.formats.basis import row_count
from kvpack.formats.errors import InvalidHeader, InvalidPayload
from kvpack.formats.frames import MAX_ALPHABET, MAX_FREQUENCY, MAX_TABLES, PAIRINGS
from kvpack.formats.raw import Raw
from kvpack.formats.value_blocks import check_finite, read_values

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvpack.formats.value_blocks import Array

    from .layer_states import StateEntry

FEATURE = "basis"
SUFFIX = ".kvbasis"
DTYPES = ("fp16", "fp32")
"""Dtypes in which the rows of a basis may be stored."""
FREQUENCIES, VALUES = "table.frequencies", "table.values"
"""Names of the states in layer 0 that store the coding tables shared by the frames of all layers."""
KEY_FRAMES = {frame: f"k.{frame}" for frame in FRAMES}
"""Names of the states that store a layer's frames for keys, by kind: for whole keys, and for keys minus their mean."""
MEAN, QUERIES = "k.mean", "k.queries"
"""Names of the states that store the mean of a layer's keys before RoPE, and the second moments of its queries."""
_KEYS = (*KEY_FRAMES.values(), MEAN, QUERIES)
ROPE = {f"rope.{pairing}": pairing for pairing in PAIRINGS}
"""Names of the states that store a layer's RoPE frequencies, mapped to the way in which RoPE pairs channels."""


class BasisSide(Protocol):
    """The fields of a side's header entry to which the rules for basis files apply."""

    @property
    def codec(self) -> int: ...

    @property
    def batch(self) -> int: ...

    @property
    def heads(self) -> int: ...

    @property
    def tail(self) -> int: ...

    @property
    def tokens(self) -> int: ...


class HasSides(Protocol):
    def sides(self) -> Iterator[tuple[str, BasisSide]]:
        """Yield ("k", keys) and ("v", values), omitting absent sides."""
        ...


def check_basis(layers: Sequence[HasSides], codecs: Sequence[Codec]) -> None:
    """Raise InvalidHeader unless all keys and values in the file are rows of a basis."""
    for number, layer in enumerate(layers):
        for name, side in layer.sides():
            where, codec = f"layers[{number}].{name}", codecs[side.codec]
            if not isinstance(codec, Raw) or codec.dtype not in DTYPES:
                raise InvalidHeader(f"{where}: the codec is {codec.params()!r:.200}, expected raw with dtype {' or '.join(DTYPES)}")
            if side.batch != 1 or side.tail:
                raise InvalidHeader(f"{where}: batch is {side.batch} and tail is {side.tail}, but a basis requires batch 1 and tail 0")
            if side.tokens < row_count(codec.dim):
                raise InvalidHeader(
                    f"{where} has {side.tokens} rows, expected at least {row_count(codec.dim)} in a basis for head dim {codec.dim}"
                )


def check_frames(layers: Sequence[HasSides], codecs: Sequence[Codec], states: Sequence[StateEntry]) -> None:
    """Raise InvalidHeader unless the states that describe frames match each other and the rows."""
    by_name = {(state.layer, state.name): state for state in states}
    has_frames = False
    for number, layer in enumerate(layers):
        sides = dict(layer.sides())
        for name in ("k", "v"):
            frames, scales = by_name.get((number, f"{name}.frames")), by_name.get((number, f"{name}.scales"))
            if frames is not None or scales is not None:
                side = sides.get(name)
                _check_frames_and_scales(f"{number}.{name}", side, codecs[side.codec].dim if side else 0, frames, scales)
                has_frames = True
        keys = [by_name[number, name] for name in _KEYS if (number, name) in by_name]
        if keys:
            _check_keys(number, keys, sides.get("k"), codecs)
        ropes = [by_name[number, name] for name in ROPE if (number, name) in by_name]
        if ropes:
            _check_rope(ropes, codecs[sides["k"].codec].dim if "k" in sides else keys[0].shape[-1] if keys else 0)
    if has_frames or (0, FREQUENCIES) in by_name or (0, VALUES) in by_name:
        _check_tables(by_name.get((0, FREQUENCIES)), by_name.get((0, VALUES)))


def _check_frames_and_scales(where: str, side: BasisSide | None, dim: int, frames: StateEntry | None, scales: StateEntry | None) -> None:
    if side is None or frames is None or scales is None:
        missing = "rows" if side is None else "frames" if frames is None else "scales"
        raise InvalidHeader(f"{where} has no {missing}: balanced frames are stored as rows, frames and scales, so all three are required")
    count, columns = (side.heads, dim) if frames.shape[1:2] == (side.heads,) else (1, side.heads * dim)
    if frames.dtype not in ("F16", "F32") or frames.shape != (1, count, 1 + columns, columns):
        shapes = f"[1, {side.heads}, {1 + dim}, {dim}] or [1, 1, {1 + side.heads * dim}, {side.heads * dim}]"
        raise InvalidHeader(f"{frames.where} is {frames.dtype} {list(frames.shape)}, expected F16 or F32 {shapes}")
    if scales.dtype != "U8" or scales.shape != (1, count, columns):
        raise InvalidHeader(f"{scales.where} is {scales.dtype} {list(scales.shape)}, expected U8 {[1, count, columns]}")


def _check_keys(layer_index: int, states: Sequence[StateEntry], side: BasisSide | None, codecs: Sequence[Codec]) -> None:
    """Raise InvalidHeader unless the states that describe a layer's keys match the keys' number of heads and head dim."""
    frames = states[0]
    if frames.name not in KEY_FRAMES.values():
        raise InvalidHeader(f"{frames.where}: layer {layer_index} must also have {' or '.join(KEY_FRAMES.values())}")
    heads, dim = (frames.shape[1], frames.shape[3]) if len(frames.shape) == 4 else (0, 0)
    if side is not None:
        heads, dim = side.heads, codecs[side.codec].dim
    if not 0 < dim <= MAX_DIM:
        raise InvalidHeader(f"{frames.where} has shape {list(frames.shape)}, expected [1, heads, dim, dim] with dim at most {MAX_DIM}")
    for state in states:
        dtypes = ("F16", "F32") if state.name in KEY_FRAMES.values() else ("F32",)
        shape = (1, heads, dim) if state.name == MEAN else (1, heads, dim, dim)
        if state.dtype not in dtypes or state.shape != shape:
            raise InvalidHeader(f"{state.where} is {state.dtype} {list(state.shape)}, expected {' or '.join(dtypes)} {list(shape)}")


def _check_rope(ropes: Sequence[StateEntry], dim: int) -> None:
    if len(ropes) > 1:
        raise InvalidHeader(f"{ropes[0].where} and {ropes[1].where} are both present, expected only one of them")
    (rope,) = ropes
    if rope.dtype != "F32" or len(rope.shape) != 2 or 2 * rope.shape[1] > dim:
        raise InvalidHeader(f"{rope.where} is {rope.dtype} {list(rope.shape)}, expected F32 [1, pairs] with at most {dim // 2} pairs")


def _check_tables(frequencies: StateEntry | None, values: StateEntry | None) -> None:
    if frequencies is None or values is None:
        raise InvalidHeader(f"layer 0 has no {FREQUENCIES if frequencies is None else VALUES}, but a basis with frames must have both")
    shape = frequencies.shape
    valid = frequencies.dtype == "U16" and len(shape) == 3 and shape[1] <= MAX_TABLES and shape[2] in range(4, MAX_ALPHABET + 1, 2)
    if not valid:
        raise InvalidHeader(
            f"{frequencies.where} is {frequencies.dtype} {list(shape)}, expected U16 [1, tables, symbols] with at most {MAX_TABLES} tables "
            f"and an even number of symbols from 4 to {MAX_ALPHABET}"
        )
    if values.dtype != "F16" or values.shape != (1, shape[1], shape[2] - 1):
        raise InvalidHeader(f"{values.where} is {values.dtype} {list(values.shape)}, expected F16 {[1, shape[1], shape[2] - 1]}")


def check_frame_values(state: StateEntry, array: Array) -> None:
    """Raise InvalidPayload if ``array``, the values of a state that describes frames, breaks a rule."""
    name = state.name
    if name in ("k.frames", "v.frames", *_KEYS) or (name == VALUES and state.layer == 0):
        check_finite(state.where, array, "the frames of a basis")
    elif name == FREQUENCIES and state.layer == 0:
        sums = read_values(array, 0, math.prod(array.shape)).reshape(-1, state.shape[2]).sum(1)
        if (sums != rans.TOTAL).any():
            wrong = int((sums != rans.TOTAL).argmax())
            raise InvalidPayload(f"{state.where}: the frequencies of table {wrong} sum to {sums[wrong]}, expected {rans.TOTAL}")
    elif name in ROPE:
        values = read_values(array, 0, math.prod(array.shape))
        invalid = ~((values >= 0) & (values <= MAX_FREQUENCY))
        if invalid.any():
            raise InvalidPayload(f"{state.where}: frequency {values[invalid.argmax()]} is out of range [0, {MAX_FREQUENCY:g}]")
