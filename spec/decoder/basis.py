"""Checks of the tensors of a basis (spec/basis.md)."""

from __future__ import annotations

import math
from collections.abc import Mapping

from .codec import NumberStream
from .contents import File, Side, Tensor
from .conventions import ceil_div, numbers
from .rans import check_frequencies
from .refusal import refuse, require

RUN_COLUMNS, SHORT_COLUMNS = 16, 8
TABLE_VALUES = 510


def basis_rows(dim: int) -> int:
    """Return N(dim), the minimum number of rows per head in a basis."""
    return 2 + dim + ceil_div(TABLE_VALUES * ceil_div(dim, RUN_COLUMNS), dim)


def check_basis(file: File) -> None:
    """Check basis.md, File, except the rules about values."""
    rule = "basis.md, File"
    for number, layer in enumerate(file.layers):
        for name, side in layer.items():
            if side is not None:
                what = f"{number}.{name}"
                dtypes = [stream.dtype for stream in side.codec.streams.values() if isinstance(stream, NumberStream)]
                require(
                    side.codec.id == "raw" and dtypes[0] in ("F16", "F32"),
                    rule,
                    f"{what} has the codec {side.codec.id} and the dtypes {dtypes}, expected the codec raw with F16 or F32",
                )
                require(
                    side.batch == 1 and side.tail == 0,
                    rule,
                    f"{what} has batch {side.batch} and tail {side.tail}, expected batch 1 and tail 0",
                )
                require(
                    side.packed >= basis_rows(side.codec.dim),
                    rule,
                    f"{what} has {side.packed} rows, expected at least {basis_rows(side.codec.dim)}",
                )


FRAMES = "basis.md, Transform matrices"
ROPE = ("rope.halves", "rope.neighbours")
TABLES = ("table.frequencies", "table.values")
KEYS = ("k.balanced", "k.centered", "k.queries", "k.mean")


def check_frames(file: File, states: Mapping[str, Tensor]) -> None:
    """Check basis.md, Transform matrices, except the rules about values. ``states`` are the tensors of layer states by name."""
    framed = False
    for number, layer in enumerate(file.layers):
        for name, side in layer.items():
            frames, scales = (states.get(f"{number}.state.{name}.{what}") for what in ("frames", "scales"))
            if frames is None and scales is None:
                continue
            if frames is None or scales is None or side is None:
                refuse(FRAMES, f"{number}.{name} must have rows, frames and scales")
            framed, dim = True, side.codec.dim
            shapes: dict[tuple[int, ...], tuple[int, ...]] = {
                (1, f, 1 + n, n): (1, f, n) for f, n in ((side.heads, dim), (1, side.heads * dim))
            }
            require(frames.dtype in ("F16", "F32") and frames.shape in shapes, FRAMES, f"{frames.name} is {frames.dtype} {frames.shape}")
            require((scales.dtype, scales.shape) == ("U8", shapes[frames.shape]), FRAMES, f"{scales.name} is {scales.dtype} {scales.shape}")
        key_dim = check_keys(states, number, layer["k"])
        ropes = [states[f"{number}.state.{name}"] for name in ROPE if f"{number}.state.{name}" in states]
        require(len(ropes) <= 1, FRAMES, f"layer {number} has RoPE frequencies for two pairings of channels, expected at most one")
        for rope in ropes:
            dim = layer["k"].codec.dim if layer["k"] else key_dim
            is_valid = rope.dtype == "F32" and len(rope.shape) == 2 and 2 * rope.shape[1] <= dim
            require(is_valid, FRAMES, f"{rope.name} is {rope.dtype} {rope.shape}, expected F32 [1, pairs] with at most {dim // 2} pairs")
    frequencies, values = (states.get(f"0.state.{name}") for name in TABLES)
    if not framed and frequencies is None and values is None:
        return
    if frequencies is None or values is None:
        refuse(FRAMES, "layer 0 must have both table.frequencies and table.values")
    shape = frequencies.shape
    is_valid = frequencies.dtype == "U16" and len(shape) == 3 and shape[1] <= 64 and shape[2] in range(4, 257, 2)
    require(is_valid, FRAMES, f"{frequencies.name} is {frequencies.dtype} {shape}")
    is_valid = (values.dtype, values.shape) == ("F16", (1, shape[1], shape[2] - 1))
    require(is_valid, FRAMES, f"{values.name} is {values.dtype} {values.shape}")


def check_keys(states: Mapping[str, Tensor], number: int, side: Side | None) -> int:
    """Check basis.md, Balanced matrices, except the rules about values. Returns the head dim of the keys, or 0 if there are no such
    matrices.
    """
    rule = "basis.md, Balanced matrices"
    key_states = {name: states[f"{number}.state.{name}"] for name in KEYS if f"{number}.state.{name}" in states}
    if not key_states:
        return 0
    first = next((key_states[name] for name in KEYS[:2] if name in key_states), None)
    if first is None:
        refuse(rule, f"layer {number} has neither k.balanced nor k.centered")
    heads, n = (side.heads, side.codec.dim) if side else (first.shape[1], first.shape[3]) if len(first.shape) == 4 else (0, 0)
    require(n <= 1024, rule, f"{first.name} has the shape {first.shape}, expected [1, heads, dim, dim]")
    for name, state in key_states.items():
        dtypes, shape = (("F16", "F32") if name in KEYS[:2] else ("F32",)), ((1, heads, n) if name == "k.mean" else (1, heads, n, n))
        require(state.dtype in dtypes and state.shape == shape, rule, f"{state.name} is {state.dtype} {state.shape}")
    return n


def check_frame_values(file: File) -> None:
    """Check the rules of basis.md about the values of transform matrices, balanced matrices, tables and RoPE."""
    tensors = {tensor.name: tensor for tensor in file.tensors}
    for name, content in file.states.items():
        kind = name.split(".", 2)[2]
        if kind not in ("k.frames", "v.frames", *KEYS, *ROPE) and name not in [f"0.state.{table}" for table in TABLES]:
            continue
        values = numbers(content, tensors[name].dtype)
        if kind == TABLES[0]:
            alphabet = tensors[name].shape[2]
            for first in range(0, len(values), alphabet):
                check_frequencies(f"{name}, table {first // alphabet}", values[first : first + alphabet])
        else:
            rule = "basis.md, Balanced matrices" if kind in KEYS else FRAMES
            require(all(map(math.isfinite, values)), rule, f"{name} contains a value that is not finite")
            require(
                kind not in ROPE or all(0 <= one <= 2 for one in values), FRAMES, f"{name} contains a frequency that is not between 0 and 2"
            )
