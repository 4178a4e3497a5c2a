"""kvpack bench kernels: time unpacking a layer to bf16 on a CUDA device, compared with a copy of the same values.

There are two times per recipe: for many library calls in a row (device time, or host time if longer), and for the device only.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from . import synthetic_basis
from .encode_kernels import KeyValueShape
from .timing import graph_seconds, queued_seconds, repeated_seconds

SHAPE = KeyValueShape(1, 8, 65536, 128)

RECIPES = (
    "bf16",
    "lossless",
    "kv=group:b=4,g=32",
    "kv=group:b=3,g=32",
    "oscar-2",
    "kv=scalar:b=3",
    "octopus-3",
    "kv=octahedral:b=3",
    "kv=octahedral:b=3,arrangement=direct",
    "kv=angle:n=128",
    "kv=quaternion:s=24,r=3",
    "kv=quaternion:s=192,r=6",
    "kv=polar:b=3",
    "octopus-3-scaled",
    "transform=0.6:head",
)


def run(recipes: Sequence[str], shape: KeyValueShape = SHAPE) -> dict[str, Any]:
    """Measure ``recipes`` on a CUDA device, and return a report as JSON values."""
    generator = torch.Generator("cuda").manual_seed(0)
    size = (shape.batch, shape.heads, shape.tokens, shape.dim)
    pair = [torch.randn(size, device="cuda", generator=generator).to(torch.bfloat16) for _ in range(2)]
    targets = [torch.empty_like(x) for x in pair]
    copied = sum(graph_seconds([lambda x=x, y=y: y.copy_(x)]) for x, y in zip(pair, targets, strict=True))  # type: ignore[misc]
    del targets
    rows = []
    for recipe in recipes:
        row = _measure_row(pair, recipe)
        alone = row["device_seconds"]
        rows.append(row | {"of_copy_speed": copied / row["seconds"], "device_of_copy_speed": copied / alone if alone else None})
        torch.cuda.empty_cache()
    return {**shape._asdict(), "bytes": sum(x.nbytes for x in pair), "copy_seconds": copied, "rows": rows}


def _measure_row(pair: list[torch.Tensor], recipe: str) -> dict[str, Any]:
    layer = synthetic_basis.pack(pair[0], pair[1], recipe)
    row: dict[str, Any] = {"recipe": recipe}
    for name, side in layer.sides.items():
        row[f"{name}_seconds"] = repeated_seconds(partial(side.unpack, torch.bfloat16))
    row["seconds"] = repeated_seconds(partial(layer.unpack, torch.bfloat16))
    row["device_seconds"] = queued_seconds(partial(layer.unpack, torch.bfloat16))
    row["bytes"] = sum(stream.nbytes for side in layer.sides.values() for page in side.runs for stream in page.streams.values())
    return row


def show(report: dict[str, Any], device: str) -> None:
    from kvpack.output import bytes_text, print_table

    rows = [
        [
            row["recipe"],
            bytes_text(row["bytes"]),
            f"{1e6 * row['k_seconds']:.0f}",
            f"{1e6 * row['v_seconds']:.0f}",
            f"{1e6 * row['seconds']:.0f}",
            f"{report['bytes'] / row['seconds'] / 1e9:.0f}",
            f"{row['of_copy_speed']:.2f}",
            "" if row["device_seconds"] is None else f"{1e6 * row['device_seconds']:.0f}",
            "" if row["device_of_copy_speed"] is None else f"{row['device_of_copy_speed']:.2f}",
        ]
        for row in report["rows"]
    ]
    title = f"unpack to bf16: {report['batch']} x {report['heads']} heads x {report['dim']}, {report['tokens']:,} tokens, on {device}"
    columns = ["recipe", "bytes read", "k us", "v us", "layer us", "GB/s\nwritten", "of copy\nspeed", "device\nalone, us", "of copy\nspeed"]
    print_table(title, columns, rows)
    speed = 2 * report["bytes"] / report["copy_seconds"] / 1e12
    print(f"\nA copy of the layer's bf16 values takes {1e6 * report['copy_seconds']:.0f} us, {speed:.2f} TB/s read and written.")
