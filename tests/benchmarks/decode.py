"""Measure how long one CPU core takes to decode files of the codec transform, and how long the unavoidable steps take.

The transformed columns are normally distributed with the basis's standard deviations, and keys and values are computed from them. The
unavoidable steps are decoding the symbols, and multiplying the columns that have symbols by the frames' rows. Each of them is also timed
separately. ``make bench-decode`` runs this measurement.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

import kvpack
from kvpack.bench.process_time import time_interleaved
from kvpack.coding.bases import Basis
from kvpack.formats.errors import InvalidParameter
from kvpack.formats.frames import SCALES_PER_OCTAVE, Frames
from kvpack.formats.transform import Transform
from kvpack.output import print_table
from kvpack.runtime.modes import one_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvpack.cache.cache import Cache
    from kvpack.cache.side import Side
    from kvpack.coding.encoding import Progress

BITS = (0.3, 0.6, 1.0)
TOKENS = 3840
_UNIT = 2.0**-4
"""Standard deviation of a column whose scale code is 0."""


def run(
    basis: str, bits: Sequence[float] = BITS, tokens: int = TOKENS, *, repeats: int = 5, progress: Progress | None = None
) -> dict[str, Any]:
    """Measure caches of ``tokens`` tokens whose layers are those of the basis in the file ``basis``.

    Returns process times as JSON values. Raises InvalidParameter for a basis without frames of keys and values, and for unsupported sizes.
    """
    found = Basis.load(basis)
    layers = [layer for layer in range(found.layers) if {(layer, "k"), (layer, "v")} <= set(found.sides_with_frames())]
    if len(layers) < found.layers:
        raise InvalidParameter(f"{basis}: has frames of keys and values in {len(layers)} of its {found.layers} layers, expected all")
    if tokens < 1 or repeats < 1:
        raise InvalidParameter(f"tokens is {tokens} and repeats is {repeats}, expected at least 1 of each")
    pairs = [tuple(_values(found, layer, side, tokens) for side in "kv") for layer in layers]
    rows = []
    with one_thread():
        for number, rate in enumerate(bits):
            rows.append(_row(kvpack.pack(pairs, kvpack.Recipe(f"transform-{rate:g}", found)), rate, repeats))
            if progress:
                progress(number + 1, len(bits))
    scope = "layer" if any(found.frames(layer, "v").count < found.rows(layer, "v").heads for layer in layers) else "head"
    return {"basis": basis, "layers": len(layers), "tokens": tokens, "scope": scope, "repeats": repeats, "rows": rows}


def _values(basis: Basis, layer: int, side: str, tokens: int) -> torch.Tensor:
    """Return bfloat16 keys or values ``[1, kv_head, token, dim]`` whose columns have the standard deviations that their scales imply."""
    frames, rows = basis.frames(layer, side), basis.rows(layer, side)
    generator = torch.Generator().manual_seed(2 * layer + (side == "v"))
    deviations = _UNIT * torch.exp2(torch.from_numpy(-frames.scales / SCALES_PER_OCTAVE).to(torch.float32))
    columns = torch.randn(frames.count, tokens, frames.columns, generator=generator) * deviations[:, None]
    x = columns @ frames.rows[:, 1:] + frames.rows[:, :1]
    heads = x if frames.count == rows.heads else x.view(tokens, rows.heads, rows.dim).transpose(0, 1)
    turned = heads if frames.rope is None else frames.rope.rotate(heads, 0)
    return turned[None].to(torch.bfloat16)


def _row(cache: Cache, rate: float, repeats: int) -> dict[str, Any]:
    sides = [side for layer in cache for side in layer.sides.values()]
    shapes = [shape for side in sides for shape in _products(side)]
    calls: list[Callable[[], object]] = [
        partial(cache.unpack, torch.bfloat16),
        partial(_all_symbols, sides),
        partial(_all_products, shapes),
    ]
    whole, symbols, products = (seconds.process for seconds in time_interleaved(calls, repeats))
    size = 2 * cache.values
    return {
        "bits": rate,
        "bits_per_value": cache.bits_per_value,
        "bytes": size,
        "seconds": whole,
        "symbols_seconds": symbols,
        "products_seconds": products,
        "products_per_value": sum(tokens * used * channels for tokens, used, channels in shapes) / cache.values,
    }


def _products(side: Side) -> list[tuple[int, int, int]]:
    """Return the shape of every matrix product of a side: the numbers of tokens, columns with symbols, and channels."""
    codec = side.codec.without_sidecars
    assert isinstance(codec, Transform)
    frames: Frames = codec.source_for(side.heads)
    found = []
    for page in side.runs:
        used = page.streams["columns"].to(torch.int64)
        for row, tokens in enumerate(page.streams["tokens"][0, 0].tolist()):
            if codec.scope == "layer":
                found.append((tokens, side.heads * int(used[0, :, row].max()), frames.columns))
            else:
                found += [(tokens, int(one), frames.columns) for one in used[0, :, row]]
    return found


def _all_symbols(sides: Sequence[Side]) -> None:
    for side in sides:
        for page in side.runs:
            assert isinstance(side.codec.without_sidecars, Transform)
            for _ in side.codec.without_sidecars.symbols(page.streams):
                pass


def _all_products(shapes: Sequence[tuple[int, int, int]]) -> None:
    for tokens, used, channels in shapes:
        torch.ones(tokens, used) @ torch.ones(used, channels)


def show(report: dict[str, Any]) -> None:
    """Print the table and explain its columns."""
    rows = [
        [
            f"transform-{row['bits']:g}",
            f"{row['bits_per_value']:.2f}",
            f"{row['bytes'] / row['seconds'] / 1e9:.2f}",
            f"{row['bytes'] / row['products_seconds'] / 1e9:.2f}",
            f"{row['bytes'] / (row['products_seconds'] + row['symbols_seconds']) / 1e9:.2f}",
            f"{row['products_per_value']:.0f}",
        ]
        for row in report["rows"]
    ]
    title = f"{report['layers']} layers, {report['tokens']:,} tokens, frames of a {report['scope']}, one core"
    header = ["recipe", "bits per value", "GB/s of bf16", "products alone", "products and symbols", "products per value"]
    print_table(title, header, rows)
    print("Columns are normally distributed: real ones have fewer bits at the same step.")
