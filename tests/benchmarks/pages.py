"""Measure how fast an engine's pages are encoded to rows and decoded, compared with kernel calls and with a copy.

All measurements are interleaved, and count the process time of one thread, which other load on the machine affects least. ``make
bench-pages`` runs this measurement.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

import kvpack
from kvpack.bench.process_time import time_interleaved
from kvpack.cache.packed_runs import PackedRun, PackedRuns
from kvpack.cache.side import Side
from kvpack.coding.encoding import encode, suppress_rounding_warnings
from kvpack.evaluation.models import check_size
from kvpack.pages import PageBuffer, PageCodec, PageGeometry
from kvpack.runtime.modes import one_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvpack.coding.encoding import Progress

RECIPES = ("raw", "kivi-4", "kv=group:b=4,g=32", "octopus-4", "octopus-3", "turboquant-4", "turboangle-k8v4", "hqmq-s24-r3")
"""Recipes that engines commonly use, and one preset of each family that the C kernels can encode."""

PAGES, LAYERS, HEADS, TOKENS, DIM = 16, 4, 8, 128, 128
MAX_PAGES = 1024


def run(pages: int = PAGES, recipes: Sequence[str] = RECIPES, *, repeats: int = 5, progress: Progress | None = None) -> dict[str, Any]:
    """Measure jobs of ``pages`` bf16 pages of 4 layers x 8 heads x 128 tokens x 128 channels.

    Returns JSON values, which are medians over ``repeats`` rounds in bytes of bf16 per second. ``encode`` and ``decode`` are the speeds of
    whole jobs. ``kernels_encode`` and ``kernels_decode`` are those of the kernels alone, called for one layer and side after the other,
    without rows, checksums, or an engine's strides. Raises InvalidParameter for invalid arguments.
    """
    check_size("repeats", repeats, 1, 1000, "timings")
    check_size("pages", pages, 1, MAX_PAGES, "pages")
    geometry = PageGeometry(LAYERS, HEADS, TOKENS, DIM, DIM)
    source = torch.Generator().manual_seed(0)
    # K and V are next to each other in every head and token, as vLLM keeps them.
    given = torch.randn(pages, LAYERS, HEADS, TOKENS, 2, DIM, generator=source).to(torch.bfloat16)
    target = torch.zeros_like(given)
    buffers = [PageBuffer(geometry, *pool.unbind(4)) for pool in (given, target)]
    with one_thread(), suppress_rounding_warnings():
        rows = []
        for done, recipe in enumerate(recipes, 1):
            rows.append(_row(recipe, geometry, buffers, given, repeats))
            if progress:
                progress(done, len(recipes))
        copied = time_interleaved([partial(target.copy_, given)], repeats)[0].process
    return {
        "shape": [LAYERS, HEADS, TOKENS, DIM],
        "pages": pages,
        "page_bytes": geometry.raw_bytes,
        "copy": pages * geometry.raw_bytes / copied,
        "backend": kvpack.backends()["cpu"],
        "rows": rows,
    }


def _row(recipe: str, geometry: PageGeometry, buffers: list[PageBuffer], given: torch.Tensor, repeats: int) -> dict[str, Any]:
    codec = PageCodec(recipe, geometry)
    count = given.shape[0]
    stored, slots = torch.zeros(count, codec.nbytes, dtype=torch.uint8), range(count)
    by_kernels = [_Kernels(codec.contents.codecs[entry.codec], x) for entry, x in _sides(codec, given[0])]
    calls: list[Callable[[], object]] = [
        partial(codec.encode_into, buffers[0], slots, stored),
        partial(codec.decode_into, stored, buffers[1], slots),
        partial(_each, [side.encode for side in by_kernels]),
        partial(_each, [side.decode for side in by_kernels]),
    ]
    calls[0]()
    encoded, decoded, one_encoded, one_decoded = (found.process for found in time_interleaved(calls, repeats))
    size = geometry.raw_bytes
    return {
        "recipe": recipe,
        "row_bytes": codec.nbytes,
        "ratio": size / codec.nbytes,
        "encode": count * size / encoded,
        "decode": count * size / decoded,
        "kernels_encode": size / one_encoded,
        "kernels_decode": size / one_decoded,
        "encode_of_kernels": count * one_encoded / encoded,
        "decode_of_kernels": count * one_decoded / decoded,
    }


def _sides(codec: PageCodec, page: torch.Tensor) -> list[Any]:
    """Return the header entry of each side and its dense values ``[1, head, token, channel]``."""
    return [
        (entry, page[number, None, :, :, "kv".index(name)].contiguous())
        for number, layer in enumerate(codec.contents.layers)
        for name, entry in layer.sides()
    ]


def _each(calls: Sequence[Callable[[], None]]) -> None:
    for call in calls:
        call()


class _Kernels:
    """The keys or the values of one layer, encoded and decoded by the functions that ``pack`` and ``unpack`` call."""

    def __init__(self, codec: Any, x: torch.Tensor) -> None:
        self._codec, self._x = codec, x
        page = PackedRun(codec, x.shape[2], encode(codec, x, "page"))
        self._side = Side(codec, PackedRuns.from_runs([page]), x[:, :, :0], 0)

    def encode(self) -> None:
        encode(self._codec, self._x, "page")

    def decode(self) -> None:
        self._side.unpack(self._x.dtype)


def show(report: dict[str, Any]) -> None:
    """Print the table and explain its columns."""
    from kvpack.output import bytes_text, print_table

    columns = ["recipe", "row bytes", "smaller", "encode\nGB/s", "decode\nGB/s", "encode, of\nthe kernels", "decode, of\nthe kernels"]
    rows = [
        [
            row["recipe"],
            bytes_text(row["row_bytes"]),
            f"{row['ratio']:.2f}",
            f"{row['encode'] / 1e9:.2f}",
            f"{row['decode'] / 1e9:.2f}",
            f"{row['encode_of_kernels']:.2f}",
            f"{row['decode_of_kernels']:.2f}",
        ]
        for row in report["rows"]
    ]
    layers, heads, tokens, dim = report["shape"]
    print_table(f"{report['pages']:,} pages of {layers} layers x {heads} heads x {tokens} tokens x {dim}, one thread", columns, rows)
    print(f"\nBytes are those of bf16 per second, by {report['backend']}; a copy of the pages takes {report['copy'] / 1e9:.1f} GB/s.")
    print("Ratios to the kernels of pack and unpack, called for each side of one page: above 1 is faster than the kernels.")
