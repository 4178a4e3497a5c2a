"""The conformance vectors of frames at their limits: pairs of RoPE, sizes of tables, scopes, sequences, and states without a meaning."""

from __future__ import annotations

import struct
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

from kvpack.coding.bases import Basis, basis_bytes
from kvpack.file import container
from kvpack.file.header import Contents
from kvpack.file.layer_states import StateEntry, features_of
from kvpack.formats.frames import Frames, Rope, Tables
from spec.generate import transform_vectors
from spec.generate.invalid_vectors import add
from spec.generate.valid_vectors import add as add_valid
from support.file_parts import bits, changed, file_of, random_side
from support.klt_bases import random_basis, random_frames, random_rows, random_tables, transform_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvpack.formats.transform import Transform

TURNED = "valid/basis-frames-turned.kvpack"
WIDEST = "valid/basis-frames-256-symbols.kvpack"
BOTH_SCOPES = "valid/basis-frames.kvpack"


def add_all() -> None:
    shows = (
        "three pairs of halves with a frequency of 0, two of neighbours, channels left over; 64 tables of 4 symbols; "
        "states of other names, and tables of another layer"
    )
    add_valid("basis-frames-turned", shows, turned, "front-12", "basis-16", "container-47")
    shows = "a basis with one table of 256 symbols"
    add_valid("basis-frames-256-symbols", shows, widest, "front-12")
    add_turned()
    add_sequences()
    add_refused()


def framed(shapes: Mapping[int, int], seed: str, tables: Tables, ropes: Mapping[int, Rope]) -> bytes:
    """A basis of keys of one head; ``shapes`` are head dims and ``ropes`` what turns them, by layer."""
    rows = {(layer, "k"): random_rows(1, dim, f"{seed} {layer}") for layer, dim in shapes.items()}
    frames = {}
    for layer, dim in shapes.items():
        one = random_frames(1, dim, "head", f"{seed} {layer}", tables, "v")
        scales = one.scales.copy()
        scales[0, :2] = 0, 255
        frames[layer, "k"] = Frames(one.rows, scales, tables, ropes.get(layer))
    return basis_bytes(rows, len(shapes), {"name": "x"}, "fp16", frames)


@cache
def turned() -> bytes:
    ropes = {0: Rope((2.0, 0.0, 0.3125), "halves"), 1: Rope((0.75, 0.125), "neighbours")}
    data = framed({0: 8, 1: 5}, "turned", random_tables("turned", 64, 1), ropes)
    others = {
        StateEntry(0, "k.notes", "F32", (1,)): struct.pack("<f", float("nan")),
        StateEntry(1, "table.frequencies", "U16", (1, 1, 4)): b"\xff" * 8,
        StateEntry(1, "table.values", "F16", (1, 1, 3)): struct.pack("<3e", 1.0, float("nan"), float("inf")),
    }
    return with_states(data, others)


@cache
def widest() -> bytes:
    return framed({0: 4}, "widest", random_tables("widest", 1, 127), {})


def with_states(data: bytes, others: Mapping[StateEntry, bytes]) -> bytes:
    """A basis with more states."""
    with container.open_bytes(data) as file:
        header = file.header
        arrays = {name: bytes(file.tensor(name)) for name in file.tensors}
    required, ignorable = features_of([*header.states, *others])
    contents = Contents(
        codecs=header.codecs, layers=header.layers, model=header.model, required=tuple(sorted({"basis", *required})), ignorable=ignorable
    )
    return container.to_bytes(contents, arrays | {state.where: stored for state, stored in others.items()})


def codec(basis: bytes, layer: int, step: int, scope: str = "head") -> Transform:
    return replace(transform_of(Basis.of_bytes(basis), layer, "k", step, given=True), scope=scope)


def add_turned() -> None:
    shows = (
        "keys of 8 channels in three pairs of halves by the last of 64 tables, and of 5 in two pairs of neighbours; both scopes of one head"
    )

    def pairs() -> bytes:
        halves, neighbours = codec(turned(), 0, 255), codec(turned(), 1, 30, "layer")
        return file_of((random_side(halves, (18,), 0, heads=1), None), (random_side(neighbours, (3,), 0, 2, 1), None))

    add_valid("transform-turned-pairs", shows, pairs, "transform-12", "basis-16", basis=TURNED)
    shows = "tokens at 2^32 - 2 to 2^32 + 1 of one group, turned in halves and in neighbours"

    def beyond() -> bytes:
        sides = [random_side(codec(turned(), layer, 40), (4,), 0, heads=1) for layer in (0, 1)]
        return changed(file_of(*((side, None) for side in sides)), *(bits(f"{n}.k.positions", 0, "feff ffff") for n in (0, 1)))

    add_valid("transform-beyond-32-bits", shows, beyond, "transform-12", "basis-16", basis=TURNED)
    levels = [127, -127, 126, 128, -128, 0, 1]
    shows = "one table for all columns, of 256 symbols"
    make = lambda: transform_vectors.of_levels(codec(widest(), 0, 90), levels, 3, 1)  # noqa: E731
    add_valid("transform-256-symbols", shows, make, "transform-12", basis=WIDEST)


def add_sequences() -> None:
    @cache
    def two() -> bytes:
        return file_of((random_side(transform_vectors.codec(0, "k"), (3,), 0, 2), None))

    add_valid("transform-layer-of-two-sequences", "two sequences by the frame of a layer", two, "transform-12", basis=BOTH_SCOPES)
    shows = "a group of which the second sequence claims 2 tokens, and the first one all 3"
    claimed = bits("0.k.tokens", 2, "0200")
    add("transform-tokens-of-a-sequence", "transform-8", "InvalidPayload", shows, lambda: changed(two(), claimed), basis=BOTH_SCOPES)


def add_refused() -> None:
    def rope(found: dict[str, Any]) -> None:
        found.clear()
        found["rope.halves"] = "F32", (1, 1)

    def without_keys() -> bytes:
        return changed(random_basis({(0, "v"): (1, 2)}, 1, scopes={(0, "v"): "head"}), transform_vectors.states(rope))

    shows = "a frequency for the keys of a layer that has none"
    add("basis-frames-turned-without-keys", "basis-13", "InvalidHeader", shows, without_keys)
