"""The conformance vectors of frames and of the codec transform."""

from __future__ import annotations

import struct
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy
import torch

from kvpack.cache.pages import Page
from kvpack.cache.side import Side
from kvpack.coding.bases import Basis
from kvpack.file.layer_states import StateEntry, features_of
from spec.generate.invalid_vectors import add
from spec.generate.parameter_vectors import add_alone
from spec.generate.valid_vectors import add as add_valid
from support.file_parts import Parts, bits, changed, file_of, random_side
from support.klt_bases import random_basis, transform_of
from support.strategies import create

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvpack.formats.transform import Transform

BASIS = "valid/basis-frames.kvpack"
SHAPES = {(0, "k"): (2, 4), (0, "v"): (2, 3), (1, "k"): (2, 5), (1, "v"): (1, 2), (2, "k"): (1, 2)}
SCOPES = {(0, "k"): "layer", (0, "v"): "head", (1, "k"): "head", (2, "k"): "layer"}


def add_all() -> None:
    shows = "a basis with frames of both scopes, RoPE of both pairings, and a side without frames"
    add_valid("basis-frames", shows, frames, "front-12")
    shows = "a basis with frames in binary32"
    add_valid("basis-frames-fp32", shows, lambda: random_basis({(0, "v"): (1, 2)}, 1, "fp32", scopes={(0, "v"): "head"}), "front-12")
    add_valid_sides()
    add_parameters()
    add_refused_bases()
    add_payload()
    add_frames()


@cache
def frames() -> bytes:
    return random_basis(SHAPES, 3, scopes=SCOPES)


def codec(layer: int, side: str, step: int = 20, chunk: int = 16) -> Transform:
    return transform_of(Basis.of_bytes(frames()), layer, side, step, chunk, given=True)


def add_valid_sides() -> None:
    def by_frames() -> bytes:
        k, v, other = codec(0, "k"), codec(0, "v", 35), codec(1, "k")
        pair = random_side(k, (17, 16, 3), tail=2), random_side(v, (17, 16, 3), tail=2)
        return file_of(pair, (random_side(other, (18,), batch=2), None), (random_side(codec(2, "k"), (2,), heads=1, tail=0), None))

    shows = "frames of a layer and of heads, keys turned in halves and in neighbours, several runs, two sequences, escapes"
    add_valid("transform-by-frames", shows, by_frames, "transform-12", "basis-16", "front-12", basis=BASIS)
    shows = "keys and values by the frames of other layers and sides"
    add_valid(
        "transform-of-others",
        shows,
        lambda: file_of((None, random_side(codec(1, "k"), (3,), tail=0)), (random_side(codec(0, "v"), (3,), tail=0), None)),
        "transform-12",
        basis=BASIS,
    )
    shows = "the last position of 32 bits, whose angles binary32 does not hold"
    far = lambda: changed(side(codec(0, "k"), 1), bits("0.k.positions", 0, "ffff ffff"))  # noqa: E731
    add_valid("transform-far-position", shows, far, "basis-16", "transform-12", basis=BASIS)
    levels = [2**31 - 1, -(2**31), 4, -4, 0, 1, 65536, -65536]
    shows = "escapes of the largest and the smallest level, of levels next to those of symbols, and of halves that are zero"
    add_valid("transform-escapes", shows, lambda: of_levels(codec(0, "v"), levels), "transform-12", basis=BASIS)
    shows = "blocks without columns, which decode to the mean"
    add_valid("transform-no-columns", shows, lambda: of_levels(codec(0, "v"), [0]), "transform-12", basis=BASIS)
    for step, shows in (
        (0, "the widest step: all columns have the first table"),
        (255, "the finest step: all columns have the last table"),
    ):
        add_valid(f"transform-step-{step}", shows, lambda s=step: side(codec(0, "v", s), 3), "transform-12", basis=BASIS)


def side(by: Transform, tokens: int) -> bytes:
    return file_of((random_side(by, (tokens,), tail=0), None))


def of_levels(by: Transform, levels: list[int], tokens: int = 4, heads: int = 2) -> bytes:
    """A file of ``levels``, which fill columns of the heads one after the other."""
    values = numpy.resize(numpy.array(levels, numpy.int64), (1, heads, by.dim, tokens))
    arrays = by.coded([values], by.source_for(heads), (1, heads)) | {"positions": numpy.zeros((1, 1, 1, 2))}
    streams = {name: torch.from_numpy(numpy.array(arrays[name], numpy.uint16, order="C")) for name in by.layout(1, 1, 0)}
    return file_of((Side(by, (Page(by, tokens, streams),), torch.zeros(1, heads, 0, by.dim, dtype=torch.bfloat16)), None))


def add_parameters() -> None:
    wide = create("transform", 257, chunk="128")
    add_alone("transform-chunk-too-wide", "transform-3", wide, {"chunk": 256}, "a chunk of 256 tokens of 257 channels")
    for name, value in (("channel-scale", "fp16"), ("outliers", {"fields": 1}), ("raw-tokens", "bf16")):
        changes = {name.replace("-", "_"): value}
        add_alone(f"side-car-{name}-of-transform", "transform-4", create("transform", 8, chunk="16"), changes, f"{name} of transform")


def add_refused_bases() -> None:
    add("transform-basis-not-given", "transform-5", "MissingBasis", "a side that needs a basis, and the reader is given none", one_value)
    other = "valid/basis-two-layers.kvpack"
    shows = "a side that needs another basis than the one that is given"
    add("transform-basis-of-another-digest", "transform-5", "MissingBasis", shows, one_value, basis=other)
    value = codec(0, "v")
    for name, rule, changes, heads, shows in (
        ("without-frames", "transform-6", {"layer": 1, "dim": 2}, 1, "a side that has rows and no frames in the basis"),
        ("without-the-side", "transform-6", {"layer": 2}, 2, "a side that is nil in the basis"),
        ("without-the-layer", "transform-6", {"layer": 3}, 2, "a layer that the basis does not have"),
        ("of-another-dim", "transform-7", {"dim": 4}, 2, "a head dim that is not that of the basis"),
        ("of-another-scope", "transform-7", {"scope": "layer"}, 2, "a scope that is not that of the frames"),
        ("of-other-heads", "transform-7", {}, 1, "a number of heads that is not that of the basis"),
    ):
        made = replace(value, **changes, source=None)
        add(f"transform-basis-{name}", rule, "InvalidHeader", shows, lambda of=made, by=heads: empty(of, by), basis=BASIS)


def empty(by: Transform, heads: int) -> bytes:
    """A file of one group of one token without columns."""
    layouts = by.layout(1, heads, 1).items()
    streams = {stream: torch.zeros(layout.shape, dtype=torch.int16).view(torch.uint16) for stream, layout in layouts}
    streams["tokens"] = torch.ones(1, 1, 1, dtype=torch.int16).view(torch.uint16)
    streams["states"].view(torch.int16)[..., 1::2] = 1
    tail = torch.zeros(1, heads, 0, by.dim, dtype=torch.bfloat16)
    return file_of((Side(by, (Page(by, 1, streams),), tail), None))


@cache
def one_value() -> bytes:
    """A file of one group of two heads by the frames of heads, with words and escapes."""
    return of_levels(codec(0, "v"), [5, 0, 1, -1, -9, 2, 0])


def add_payload() -> None:
    def refused(name: str, rule: str, shows: str, *changes: Callable[[Parts], Any]) -> None:
        add(f"transform-{name}", rule, "InvalidPayload", shows, lambda: changed(one_value(), *changes), basis=BASIS)

    refused("tokens-above", "transform-8", "a group of 4 tokens that claims 5", bits("0.k.tokens", 0, "0500"))
    refused("tokens-zero", "transform-8", "a group of 4 tokens that claims none", bits("0.k.tokens", 0, "0000"))
    refused("columns-above", "transform-9", "4 columns of a head of 3", bits("0.k.columns", 2, "0400"))
    refused("columns-largest", "transform-9", "65535 columns", bits("0.k.columns", 0, "ffff"))
    for name, rule, shows, change in (
        ("tokens", "transform-8", "a group of 4 tokens that claims 3", bits("0.k.tokens", 0, "0300")),
        ("word-counts", "transform-10", "word_counts that sum to one less than the words", bits("0.k.word_counts", 0, "00")),
    ):
        shows = f"{shows}, and the reader is given no basis"
        make = lambda c=change: changed(one_value(), c)  # noqa: E731
        add(f"transform-{name}-without-the-basis", rule, "InvalidPayload", shows, make)
    refused("state-low", "rans-2", "a first state below 2^16", bits("0.k.states", 2, "0000"))
    refused("state-of-an-idle-lane", "rans-4", "a lane without a symbol whose state is 2^16 + 1", bits("0.k.states", 124, "0100"))
    refused("word-counts-above", "transform-10", "word_counts that sum to one more than the words", bits("0.k.word_counts", 4, "ff"))
    refused("word-counts-of-32-bits", "transform-10", "word_counts with a high half", bits("0.k.word_counts", 2, "0100"))
    refused("word-surplus", "transform-11", "a chunk with a word that neither a symbol nor an escape takes", words(1))
    refused("escape-missing", "transform-11", "a chunk whose last escape has one word", words(-1))
    shows = "a chunk without words, whose symbols need some"
    add("transform-words-none", "rans-3", "InvalidPayload", shows, without_words, basis=BASIS)
    shows = "a first state below 2^16 that ends at 2^16, for it takes a word of 0"
    add("transform-state-low-that-ends-well", "rans-2", "InvalidPayload", shows, low_state, basis=BASIS)


def without_words() -> bytes:
    return changed(of_levels(codec(0, "v", chunk=64), [1, -1, 2, 0, -3, 3, -2], 64), words(None))


def low_state() -> bytes:
    """A block of one symbol, whose state is the second slot of the symbol."""
    by = codec(0, "v")
    tables = by.source_for(2).tables
    table = tables.frequencies[by.source_for(2).tables_at(by.step)[0, 0]]
    symbol = next(number for number, frequency in enumerate(table) if number and number != 1 + tables.reach and frequency > 1)
    state = int(table[:symbol].sum()) + 1
    level = symbol - 1 - tables.reach
    data = of_levels(by, [level, 0, 0, 0, 0, 0], 1)
    return changed(data, bits("0.k.states", 0, struct.pack("<I", state).hex()), words(1), bits("0.k.word_counts", 0, "0100 0000 0000 0000"))


def words(more: int | None) -> Callable[[Parts], None]:
    """Gives the last chunk a word more or less, or leaves it none; the header follows."""

    def apply(parts: Parts) -> None:
        number, counted = parts.tensor("0.k.words"), parts.tensor("0.k.word_counts")
        counts = list(struct.unpack(f"<{len(parts.tensors[counted]) // 2}H", parts.tensors[counted]))
        change = -counts[-2] if more is None else more
        counts[-2] += change
        stored = parts.tensors[number]
        parts.tensors[number] = stored + bytes(2 * change) if change > 0 else stored[: 2 * change]
        parts.tensors[counted] = struct.pack(f"<{len(counts)}H", *counts)
        entries = len(parts.tensors[number]) // 2
        parts.header["layers"][0]["k"]["entries"]["words"] = parts.header["tensors"][number][2][2] = entries

    return apply


def add_frames() -> None:
    small = lambda: random_basis({(0, "k"): (1, 2)}, 1, scopes={(0, "k"): "head"})  # noqa: E731

    def refused(name: str, rule: str, shows: str, change: Callable[[dict[str, Any]], None]) -> None:
        add(f"basis-frames-{name}", rule, "InvalidHeader", shows, lambda: changed(small(), states(change)))

    refused("without-scales", "basis-8", "frames without scales", lambda found: found.pop("k.scales"))
    refused("without-frames", "basis-8", "scales without frames", lambda found: found.pop("k.frames"))
    shows = "frames of a side that is nil"
    refused("of-no-side", "basis-8", shows, lambda found: found.update({f"v.{what}": found[f"k.{what}"] for what in ("frames", "scales")}))
    refused("bf16", "basis-9", "frames in bf16", lambda found: found.update({"k.frames": ("BF16", (1, 1, 3, 2))}))
    refused("of-two-heads", "basis-9", "two frames for one head", lambda found: found.update({"k.frames": ("F16", (1, 2, 3, 2))}))
    refused("without-the-mean", "basis-9", "a frame of two rows", lambda found: found.update({"k.frames": ("F16", (1, 1, 2, 2))}))
    refused("flat", "basis-9", "frames in one row", lambda found: found.update({"k.frames": ("F16", (1, 6))}))
    refused("scales-u16", "basis-9", "scales of 16 bits", lambda found: found.update({"k.scales": ("U16", (1, 1, 2))}))
    refused("scales-short", "basis-9", "a scale too few", lambda found: found.update({"k.scales": ("U8", (1, 1, 1))}))
    refused("without-frequencies", "basis-10", "no frequencies", lambda found: found.pop("table.frequencies"))
    refused("without-values", "basis-10", "no values of tables", lambda found: found.pop("table.values"))
    for name, shape, shows in (
        ("65-tables", (1, 65, 8), "65 tables"),
        ("odd", (1, 5, 7), "tables of 7 symbols"),
        ("258-symbols", (1, 5, 258), "tables of 258 symbols"),
        ("2-symbols", (1, 5, 2), "tables of 2 symbols"),
        ("flat-tables", (1, 40), "tables in one row"),
    ):
        values = ("F16", (1, shape[1], max(1, shape[-1] - 1)))
        change = {"table.frequencies": ("U16", shape), "table.values": values}
        refused(name, "basis-11", shows, lambda found, c=change: found.update(c))
    refused("tables-u8", "basis-11", "frequencies of 8 bits", lambda found: found.update({"table.frequencies": ("U8", (1, 5, 8))}))
    refused("values-fp32", "basis-11", "values in binary32", lambda found: found.update({"table.values": ("F32", (1, 5, 7))}))
    refused("values-of-8", "basis-11", "a value for the escape", lambda found: found.update({"table.values": ("F16", (1, 5, 8))}))
    rope = ("F32", (1, 1))
    both = {"rope.halves": rope, "rope.neighbours": rope}
    refused("turned-twice", "basis-12", "halves and neighbours", lambda found: found.update(both))
    refused(
        "turned-too-far",
        "basis-13",
        "frequencies of two pairs of two channels",
        lambda found: found.update({"rope.halves": ("F32", (1, 2))}),
    )
    refused("turned-by-fp16", "basis-13", "frequencies in binary16", lambda found: found.update({"rope.halves": ("F16", (1, 1))}))
    refused("turned-flat", "basis-13", "a frequency of no pair", lambda found: found.update({"rope.halves": ("F32", (1,))}))
    for name, rule, state, at, value, shows in (
        ("nan", "basis-14", "k.frames", 2, "007e", "a frame with a NaN"),
        ("infinite-value", "basis-14", "table.values", 0, "007c", "a table with an infinite value"),
        ("fast", "basis-15", "rope.halves", 0, "01000040", "a frequency above 2"),
        ("backwards", "basis-15", "rope.halves", 0, "000080bf", "a frequency below 0"),
        ("no-frequency", "basis-15", "rope.halves", 0, "0000c07f", "a frequency that is a NaN"),
        ("table-sum", "rans-1", "table.frequencies", 16, "ff0f", "a table whose frequencies do not sum to 4096"),
    ):
        add(
            f"basis-frames-{name}",
            rule,
            "InvalidPayload",
            shows,
            lambda s=state, a=at, v=value: changed(small(), bits(f"0.state.{s}", a, v)),
        )


def states(change: Callable[[dict[str, Any]], Any]) -> Callable[[Parts], None]:
    """Applies ``change`` to the dtypes and shapes of the states of the first layer by name; changed ones hold zeros."""

    def apply(parts: Parts) -> None:
        prefix = "0.state."
        places = {
            tensor[0].removeprefix(prefix): number for number, tensor in enumerate(parts.header["tensors"]) if tensor[0].startswith(prefix)
        }
        found = {name: (parts.header["tensors"][number][1], tuple(parts.header["tensors"][number][2])) for name, number in places.items()}
        before, stored = dict(found), {name: parts.tensors[number] for name, number in places.items()}
        change(found)
        entries = [StateEntry(0, name, dtype, shape) for name, (dtype, shape) in sorted(found.items())]
        parts.header["ignorable"] |= features_of(entries)[1]
        first = min(places.values())
        template = parts.header["tensors"][first]
        del parts.header["tensors"][first:], parts.tensors[first:]
        for entry in entries:
            kept = before.get(entry.name) == found[entry.name]
            size = {"U8": 1, "F32": 4}.get(entry.dtype, 2) * int(numpy.prod(entry.shape))
            data = stored[entry.name] if kept else bytes(size)
            parts.header["tensors"].append([entry.where, entry.dtype, list(entry.shape), "none", len(data), template[5]])
            parts.tensors.append(data)

    return apply
