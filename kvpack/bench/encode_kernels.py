"""kvpack bench kernels: time encoding on a CUDA device, compared with a copy and with published times, and time pack and unpack.

Inputs are keys or values with the shape in the LLM row of OCTOPUS Table 7. Encoding times cover only the kernels, in CUDA graphs that cycle
over inputs that together exceed the L2 cache. Packing and unpacking are the library's calls, including allocation and checks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

import kvpack
from kvpack.coding.dispatch import uses_triton
from kvpack.formats.base import Codec

from . import synthetic_basis
from .timing import graph_seconds, median_seconds


class KeyValueShape(NamedTuple):
    """The shape of a layer's keys or values: sequences, KV heads, tokens and head dim."""

    batch: int
    heads: int
    tokens: int
    dim: int


SHAPE = KeyValueShape(1, 4, 65536, 128)

RECIPES = (
    "fp8",
    "mxfp8",
    "nvfp4",
    "mxfp4",
    "kv=group:b=4,g=32",
    "kv=group:b=2,g=32",
    "oscar-2",
    "kv=scalar:b=4",
    "kv=scalar:b=3",
    "kv=scalar:b=2",
    "kv=octahedral:b=4",
    "kv=octahedral:b=3",
    "kv=octahedral:b=2",
    "kv=octahedral:b=3,arrangement=direct",
    "kv=angle:n=128",
    "kv=polar:b=3",
    "kv=polar:b=4.2.2.2",
    "kv=quaternion:s=24,r=3",
    "kv=quaternion:s=96,r=4",
    "kv=quaternion:s=192,r=6",
    "klt=63211000:53100000",
)

PAPER_SECONDS = {
    "kv=scalar:b=4": 1.5e-3,
    "kv=scalar:b=3": 1.6e-3,
    "kv=scalar:b=2": 1.5e-3,
    "kv=octahedral:b=4": 5.2e-3,
    "kv=octahedral:b=3": 4.6e-3,
    "kv=octahedral:b=2": 4.5e-3,
}
"""Times in seconds on an H200 from OCTOPUS Table 7, for TQ-MSE, and for OCTOPUS with its 3 x 3 rounding."""

_INPUTS = 3


def run(recipes: Sequence[str], shape: KeyValueShape = SHAPE) -> dict[str, Any]:
    """Measure all codecs of ``recipes`` on a CUDA device. Returns a report as JSON values."""
    generator = torch.Generator("cuda").manual_seed(0)
    size = (shape.batch, shape.heads, shape.tokens, shape.dim)
    inputs = [torch.randn(size, device="cuda", generator=generator).to(torch.bfloat16) for _ in range(_INPUTS)]
    targets = [torch.empty_like(x) for x in inputs]
    copied = graph_seconds([lambda x=x, y=y: y.copy_(x) for x, y in zip(inputs, targets, strict=True)])  # type: ignore[misc]
    del targets
    rows = []
    for recipe in recipes:
        for side, codec in measured_codecs(recipe, shape.heads, shape.dim):
            rows.append(_measure_row(inputs, recipe, side, codec, copied))
            torch.cuda.empty_cache()
    return {**shape._asdict(), "bytes": inputs[0].nbytes, "copy_seconds": copied, "rows": rows}


def measured_codecs(recipe: str, heads: int, dim: int) -> Iterator[tuple[str, Codec]]:
    """Yield (side, codec) pairs for ``recipe``, which may name a synthetic basis. Skips repeated codecs, and codecs that store values
    exactly.
    """
    named, basis = synthetic_basis.resolve_recipe(recipe, heads, (dim, dim))
    parsed = kvpack.Recipe(named, basis)
    result: list[Codec] = []
    for side in "kv":
        codec = parsed.codec(0, 1, side, dim)
        if codec.exact_dtype is None and codec not in result:
            result.append(codec)
            yield side, codec


def _measure_row(inputs: list[torch.Tensor], recipe: str, side: str, codec: Codec, copy_seconds: float) -> dict[str, Any]:
    from kvpack.kernels.encode.encode import prepare

    encodings = [prepare(codec, x) for x in inputs] if uses_triton(inputs[0].device) else []
    # PyTorch encodes codecs without kernels; only the time of packing is measured for them.
    runs = [encoding.run for encoding in encodings if encoding is not None and encoding.run()]
    seconds = graph_seconds(runs) if runs else None
    pair = (inputs[0], None) if side == "k" else (None, inputs[0])
    _, heads, _, dim = inputs[0].shape
    named, basis = synthetic_basis.resolve_recipe(recipe, heads, (dim, dim))
    layer = kvpack.pack([pair], kvpack.Recipe(named, basis))[0]
    size = inputs[0].nbytes
    stored = sum(stream.nbytes for page in layer.sides[side].runs for stream in page.streams.values())
    unpacked = median_seconds(lambda: layer.unpack(torch.bfloat16))
    return {
        "recipe": recipe, "side": side, "bytes": stored, "seconds": seconds,
        "gb_per_s": None if seconds is None else size / seconds / 1e9,
        "of_floor": None if seconds is None else seconds / (copy_seconds * (size + stored) / (2 * size)),
        "paper_seconds": PAPER_SECONDS.get(recipe),
        "pack_seconds": median_seconds(lambda: kvpack.pack([pair], kvpack.Recipe(named, basis))),
        "unpack_seconds": unpacked, "unpack_gb_per_s": size / unpacked / 1e9,
    }  # fmt: skip


def show(report: dict[str, Any], device: str) -> None:
    from kvpack.output import bytes_text, print_table

    def number(value: float | None, scale: float, digits: int) -> str:
        return "" if value is None else f"{scale * value:.{digits}f}"

    columns = ["recipe", "side", "bytes written", "us", "GB/s", "x byte\nfloor", "paper\nus", "pack\nms", "unpack\nms", "unpack\nGB/s"]
    rows = [
        [
            row["recipe"],
            row["side"],
            bytes_text(row["bytes"]),
            number(row["seconds"], 1e6, 1),
            number(row["gb_per_s"], 1, 0),
            number(row["of_floor"], 1, 2),
            number(row["paper_seconds"], 1e6, 0),
            number(row["pack_seconds"], 1e3, 2),
            number(row["unpack_seconds"], 1e3, 2),
            number(row["unpack_gb_per_s"], 1, 0),
        ]
        for row in report["rows"]
    ]
    title = f"encode: {report['batch']} x {report['heads']} heads x {report['dim']}, {report['tokens']:,} tokens, on {device}"
    print_table(title, columns, rows, text_columns=2)
    speed = 2 * report["bytes"] / report["copy_seconds"] / 1e12
    print(f"\nThe byte floor is the time to read the input and write the streams at copy speed, {speed:.2f} TB/s read and written.")
    print("GB/s are based on the size of the bf16 values. The paper is OCTOPUS, Table 7.")
