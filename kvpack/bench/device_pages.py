"""kvpack bench pages --device cuda: pages of an engine to rows and back in a device's memory, beside a copy of the same bytes."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

import kvpack
from kvpack.formats.errors import InvalidParameter

from .pages import DIM, HEADS, LAYERS, MOST_PAGES, TOKENS
from .sizes import check_size
from .timing import eager_seconds, queued_seconds, repeated_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpack.coding.encoding import Progress

PAGES = 64
SPEEDS = ("encode", "decode", "encode_in_a_row", "decode_in_a_row", "encode_on_device", "decode_on_device")
RECIPES = ("raw", "kivi-4", "kv=group:b=4,g=32", "octopus-4", "octopus-3", "turboquant-4", "turboangle-k8v4", "hqmq-s24-r3", "fp8", "nvfp4")


def run(pages: int = PAGES, recipes: Sequence[str] = RECIPES, *, progress: Progress | None = None) -> dict[str, Any]:
    """Measure jobs of ``pages`` pages of 4 layers x 8 heads x 128 tokens x 128, of bf16 on the CUDA device, and return JSON values.

    All are bytes of bf16 per second: ``encode`` and ``decode`` of whole calls that wait for their outcomes, ``encode_in_a_row`` and
    ``decode_in_a_row`` of calls that begin jobs and wait for none, ``encode_on_device`` and ``decode_on_device`` of the device's part of
    these, None where a call waits, ``copy`` of a copy of the pages in the device's memory.
    Raises InvalidParameter, also without a CUDA device, and InvalidRecipe.
    """
    check_size("pages", pages, 1, MOST_PAGES, "pages")
    if not torch.cuda.is_available():
        raise InvalidParameter("--device is cuda, and PyTorch sees no CUDA device")
    geometry = kvpack.PageGeometry(LAYERS, HEADS, TOKENS, DIM, DIM)
    # K and V are next to each other in every head and token, as vLLM keeps them.
    given = torch.randn(pages, LAYERS, HEADS, TOKENS, 2, DIM, device="cuda").to(torch.bfloat16)
    target = torch.zeros_like(given)
    source, sink = (kvpack.PageBuffer(geometry, *pool.unbind(4)) for pool in (given, target))
    size = pages * geometry.raw_bytes
    rows = []
    for done, recipe in enumerate(recipes, 1):
        codec = kvpack.PageCodec(recipe, geometry)
        stored, slots = torch.zeros(pages, codec.nbytes, dtype=torch.uint8, device="cuda"), range(pages)
        refused = [error for error in codec.encode_into(source, slots, stored) + codec.decode_into(stored, sink, slots) if error]
        if refused:
            raise refused[0]
        error = ((target.float() - given.float()).norm() / given.float().norm()).item()
        rows.append({
            "recipe": recipe,
            "row_bytes": codec.nbytes,
            "ratio": geometry.raw_bytes / codec.nbytes,
            "error": error,
            "encode": size / eager_seconds([partial(codec.encode_into, source, slots, stored)]),
            "decode": size / eager_seconds([partial(codec.decode_into, stored, sink, slots)]),
            "encode_in_a_row": size / repeated_seconds(partial(codec.start_encode, source, slots, stored)),
            "decode_in_a_row": size / repeated_seconds(partial(codec.start_decode, stored, sink, slots)),
            "encode_on_device": _speed(size, queued_seconds(partial(codec.start_encode, source, slots, stored))),
            "decode_on_device": _speed(size, queued_seconds(partial(codec.start_decode, stored, sink, slots))),
        })  # fmt: skip
        if progress:
            progress(done, len(recipes))
    return {
        "device": torch.cuda.get_device_name(),
        "shape": [LAYERS, HEADS, TOKENS, DIM],
        "pages": pages,
        "page_bytes": geometry.raw_bytes,
        "copy": size / repeated_seconds(partial(target.copy_, given)),
        "backend": kvpack.backends()["cuda"],
        "rows": rows,
    }


def _speed(size: int, seconds: float | None) -> float | None:
    return None if seconds is None else size / seconds


def show(report: dict[str, Any]) -> None:
    """Print the table and the meaning of its columns."""
    from kvpack.output import bytes_text, print_table

    columns = ["recipe", "row bytes", "smaller", "error", "encode\nGB/s", "decode\nGB/s", "encode, in\na row", "decode, in\na row"]
    columns += ["encode, on\nthe device", "decode, on\nthe device"]
    rows = [
        [
            row["recipe"],
            bytes_text(row["row_bytes"]),
            f"{row['ratio']:.2f}",
            f"{row['error']:.4f}",
            *("" if row[name] is None else f"{row[name] / 1e9:.0f}" for name in SPEEDS),
        ]
        for row in report["rows"]
    ]
    layers, heads, tokens, dim = report["shape"]
    title = f"{report['pages']:,} pages of {layers} layers x {heads} heads x {tokens} tokens x {dim} on {report['device']}"
    print_table(title, columns, rows)
    print(f"\nBytes are those of bf16 per second, by {report['backend']}; a copy of the pages takes {report['copy'] / 1e9:.0f} GB/s.")
    print("A call waits for what became of its pages; in a row, calls begin jobs, and the last alone is waited for;")
    print("on the device: its part of these, without what the host does.")
