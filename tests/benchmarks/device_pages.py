"""Measure how fast a CUDA device encodes an engine's pages to rows and decodes them, compared with a copy.

``make bench-pages`` runs this measurement if it is called with ``--device cuda``.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

import kvpack
from kvpack.bench.timing import eager_seconds, queued_seconds, repeated_seconds
from kvpack.evaluation.models import check_size
from kvpack.formats.errors import InvalidParameter

from .pages import DIM, HEADS, LAYERS, MAX_PAGES, TOKENS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpack.coding.encoding import Progress

PAGES = 64
SPEEDS = ("encode", "decode", "encode_in_a_row", "decode_in_a_row", "encode_on_device", "decode_on_device")
RECIPES = (
    "raw", "kivi-4", "kv=group:b=4,g=32", "octopus-4", "octopus-3", "turboquant-4", "turboangle-k8v4", "hqmq-s24-r3", "fp8", "nvfp4",
    "oscar-2", "oscar-2-u8", "kivi-2-u8", "polarquant-4", "turboquant-2.5", "octopus-3-scaled",
)  # fmt: skip
LATENTS = "latents: "
"""Prefix of recipes for pages of MLA latents ``[layer, token, 512 + 64]``. The latents are the keys, the rotary part the values."""

LATENT_LAYERS, LATENT_TOKENS, LATENT_DIM, ROTARY_DIM = 61, 64, 512, 64
LATENT_RECIPES = tuple(f"{LATENTS}k={words};v=raw" for words in (
    "group:b=4,g=32", "group:b=2,g=32,rotation=hadamard,scales=u8,token_scale=fp16", "octahedral:b=4", "scalar:b=4",
))  # fmt: skip
ALL_RECIPES = RECIPES + LATENT_RECIPES
TARGET = 100e9
"""Target speed of an engine's page jobs, in bytes of bf16 per second."""


def run(pages: int = PAGES, recipes: Sequence[str] = ALL_RECIPES, *, progress: Progress | None = None) -> dict[str, Any]:
    """Measure jobs of ``pages`` bf16 pages of 4 layers x 8 heads x 128 tokens x 128 channels on the CUDA device.

    Returns JSON values. Recipes with the prefix ``LATENTS`` are measured on pages of 61 layers x 64 tokens x (512 + 64) channels. Speeds
    are bytes of bf16 per second:

    - ``encode`` and ``decode``: calls that wait for their results;
    - ``encode_in_a_row`` and ``decode_in_a_row``: calls that start jobs without waiting;
    - ``encode_on_device`` and ``decode_on_device``: the device's part of such calls, or None if they wait;
    - ``copy``: a copy of the pages in device memory.

    ``path`` is "device", or "host" if pages pass through host memory. Raises InvalidParameter for invalid arguments, or without a CUDA
    device.
    """
    check_size("pages", pages, 1, MAX_PAGES, "pages")
    if not torch.cuda.is_available():
        raise InvalidParameter("--device is 'cuda', but PyTorch found no CUDA device: use --device cpu")
    rows = []
    for done, recipe in enumerate(recipes, 1):
        rows.append(_row(recipe, pages))
        if progress:
            progress(done, len(recipes))
    geometry, given, target = _pages(pages, latents=False)
    return {
        "device": torch.cuda.get_device_name(),
        "shape": [LAYERS, HEADS, TOKENS, DIM],
        "latents": [LATENT_LAYERS, 1, LATENT_TOKENS, LATENT_DIM + ROTARY_DIM],
        "pages": pages,
        "page_bytes": geometry.raw_bytes,
        "target": TARGET,
        "copy": pages * geometry.raw_bytes / repeated_seconds(partial(target.copy_, given)),
        "backend": kvpack.backends()["cuda"],
        "rows": rows,
    }


def _pages(count: int, *, latents: bool) -> tuple[kvpack.pages.PageGeometry, torch.Tensor, torch.Tensor]:
    """Return random pages, and uninitialized memory of the same size. Keys and values alternate for every head and token, as in vLLM."""
    if latents:
        geometry = kvpack.pages.PageGeometry(LATENT_LAYERS, 1, LATENT_TOKENS, LATENT_DIM, ROTARY_DIM)
    else:
        geometry = kvpack.pages.PageGeometry(LAYERS, HEADS, TOKENS, DIM, DIM)
    shape = count, geometry.layers, geometry.heads, geometry.tokens, sum(geometry.dims.values())
    given = torch.randn(shape, device="cuda").to(torch.bfloat16)
    return geometry, given, torch.zeros_like(given)


def _row(recipe: str, pages: int) -> dict[str, Any]:
    geometry, given, target = _pages(pages, latents=recipe.startswith(LATENTS))
    sides = list(geometry.dims.values())
    source, sink = (kvpack.pages.PageBuffer(geometry, *torch.split(pool, sides, 4)) for pool in (given, target))
    size, codec = pages * geometry.raw_bytes, kvpack.pages.PageCodec(recipe.removeprefix(LATENTS), geometry)
    stored, slots = torch.zeros(pages, codec.nbytes, dtype=torch.uint8, device="cuda"), range(pages)
    jobs = [codec.start_encode(source, slots, stored), codec.start_decode(stored, sink, slots)]
    refused = [error for job in jobs for error in job.outcomes() if error]
    if refused:
        raise refused[0]
    return {
        "recipe": recipe,
        "row_bytes": codec.nbytes,
        "ratio": geometry.raw_bytes / codec.nbytes,
        "error": ((target.float() - given.float()).norm() / given.float().norm()).item(),
        "path": "device" if all(job.on_device for job in jobs) else "host",
        "encode": size / eager_seconds([partial(codec.encode_into, source, slots, stored)]),
        "decode": size / eager_seconds([partial(codec.decode_into, stored, sink, slots)]),
        "encode_in_a_row": size / repeated_seconds(partial(codec.start_encode, source, slots, stored)),
        "decode_in_a_row": size / repeated_seconds(partial(codec.start_decode, stored, sink, slots)),
        "encode_on_device": _speed(size, queued_seconds(partial(codec.start_encode, source, slots, stored))),
        "decode_on_device": _speed(size, queued_seconds(partial(codec.start_decode, stored, sink, slots))),
    }


def _speed(size: int, seconds: float | None) -> float | None:
    return None if seconds is None else size / seconds


def show(report: dict[str, Any]) -> None:
    """Print the table and explain its columns."""
    from kvpack.output import bytes_text, print_table

    columns = ["recipe", "path", "row bytes", "smaller", "error", "encode\nGB/s", "decode\nGB/s", "encode, in\na row", "decode, in\na row"]
    columns += ["encode, on\nthe device", "decode, on\nthe device"]
    rows = [
        [
            row["recipe"],
            row["path"],
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
    print("A call waits for the results of its pages; in a row, calls start jobs, and only the last one is waited for;")
    print("on the device, only the time of its kernels is counted. With the path host, pages pass through host memory.")
    layers, _, tokens, dim = report["latents"]
    latents = f"Latents are in pages of {layers} layers x {tokens} tokens x {dim}."
    print(f"{latents} The target of encode and decode is {report['target'] / 1e9:.0f} GB/s.")
