"""kvpack bench kernels: time attention over packed layers on a CUDA device, compared with the best bf16 attention in the same run.

Calls are timed in CUDA graphs that cycle over buffers that together exceed the L2 cache. One time covers the main kernel and the merge.
Another covers all of ``attend``, which may first rotate the query. Ratios to bf16 use the latter, because callers wait for all of it. Calls
are also timed without graphs.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import kvpack
from kvpack.attention import attention_kernels
from kvpack.cache.layer import Layer
from kvpack.coding import triton_version
from kvpack.coding.encoding import Progress
from kvpack.formats.errors import InvalidParameter, WriteFailed

from . import encode_kernels, flashinfer_pages, query_kernels, synthetic_basis, unpack_kernels
from .query_kernels import QueryShape
from .timing import eager_seconds, graph_seconds, median_seconds

SHAPES = {
    "A": QueryShape(1, 28, 4, 128, 65536),
    "B": QueryShape(1, 32, 8, 128, 131072),
    "C": QueryShape(8, 32, 8, 128, 16384),
    "D": QueryShape(1, 16, 16, 64, 32760),
    "E": QueryShape(64, 32, 8, 128, 4096),
    "F": QueryShape(4, 16, 8, 256, 32768),
}
"""Shapes by letter. Shape A is from Table 7 in the OCTOPUS paper."""

OWN_BF16 = "bf16"

RECIPES = (
    "fp8",
    "mxfp8",
    "nvfp4",
    "mxfp4",
    "kv=group:b=4,g=32",
    "oscar-2",
    "k=group:b=2,g=64;v=group:b=2,g=128",
    "kv=scalar:b=4",
    "kv=scalar:b=3",
    "kv=scalar:b=2",
    "kv=octahedral:b=2,arrangement=direct",
    "kv=octahedral:b=3,arrangement=direct",
    "kv=octahedral:b=4,arrangement=direct",
    "k=octahedral:b=4,arrangement=direct;v=group:b=4",
    "kv=angle:n=128,arrangement=direct",
    "kv=quaternion:s=24,r=3,arrangement=direct",
    "kv=octahedral:b=2",
    "kv=octahedral:b=3",
    "kv=octahedral:b=4",
    "octopus-3",
    "kv=angle:n=128",
    "kv=quaternion:s=24,r=3",
    "kv=polar:b=3",
    "polarquant-3",
    "octopus-qjl-3",
    *synthetic_basis.LAYERS,
)
SWEEP = QueryShape(1, 32, 8, 128, 0)
SWEEP_TOKENS = tuple(1 << power for power in range(10, 19))

PARTS = ("attention", "encode", "unpack", "queries")
"""Parts of the benchmark: attention for each shape, and the others for one shape each."""

QUERIES_SHAPE = QueryShape(1, 32, 8, 128, 65536)
"""Default shape for the part with many queries."""

_COLD_BYTES = 150 << 20
_MAX_COPIES = 64
_CHUNK_TOKENS = 8192
_COPIED_BYTES = 1 << 30


def parse_shape(text: str) -> QueryShape:
    """Return the shape that ``text`` specifies, as a letter or as batch x query heads x KV heads x dim x tokens."""
    if text in SHAPES:
        return SHAPES[text]
    match = re.fullmatch(r"x".join([r"([1-9][0-9]{0,8})"] * 5), text)
    if match is None:
        raise InvalidParameter(f"--shape is {text!r}, expected one of {', '.join(SHAPES)} or batch x query heads x KV heads x dim x tokens")
    shape = QueryShape(*map(int, match.groups()))
    if shape.q_heads % shape.heads:
        raise InvalidParameter(
            f"--shape {text!r}: {shape.q_heads} query heads are not a multiple of {shape.heads} KV heads: pass a "
            "multiple"
        )
    return shape


def run(
    shapes: Sequence[str],
    recipes: Sequence[str] | None,
    *,
    parts: Sequence[str] = PARTS,
    sweep: bool = False,
    peers: bool = False,
    out: str | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Measure ``recipes`` (by default, each part's own) and return a report as JSON values.

    ``sweep`` adds contexts of many lengths and, with ``out``, a plot of them. ``peers`` adds FlashInfer, if it is installed. Raises
    InvalidParameter, for example if there is no CUDA device, and WriteFailed if ``out`` cannot be written.
    """
    named = [(text, parse_shape(text)) for text in shapes]
    for recipe in recipes or ():
        synthetic_basis.check_recipe(recipe)
    if not torch.cuda.is_available():
        raise InvalidParameter("this benchmark needs a CUDA device, but PyTorch found none")
    lengths = [("", SWEEP._replace(tokens=tokens)) for tokens in SWEEP_TOKENS] if sweep else []
    every = [*named, *lengths] if "attention" in parts else []
    bandwidth = copy_bandwidth()
    tables = []
    for done, (name, shape) in enumerate(every, 1):
        tables.append({"name": name, **shape._asdict(), "rows": _measure_rows(shape, recipes or RECIPES, bandwidth, peers)})
        if progress:
            progress(done, len(every) + 1)
    # The codec transform has no encoding kernel.
    encoded = [recipe for recipe in recipes or encode_kernels.RECIPES if not recipe.startswith(synthetic_basis.TRANSFORM)]
    encode = encode_kernels.run(encoded) if "encode" in parts and encoded else None
    unpack = unpack_kernels.run(recipes or unpack_kernels.RECIPES) if "unpack" in parts else None
    shapes_of_queries = [shape for _, shape in named] if parts == ("queries",) and set(shapes) != set(SHAPES) else [QUERIES_SHAPE]
    queries = [query_kernels.run(recipes or query_kernels.RECIPES, shape) for shape in shapes_of_queries if "queries" in parts]
    properties = torch.cuda.get_device_properties(0)
    report = {
        "date": time.strftime("%Y-%m-%d"), "device": properties.name, "torch": torch.__version__,
        "triton": triton_version.installed_version(), "flashinfer": flashinfer_pages.installed_version() if peers else None,
        "bytes_per_s": bandwidth,
        "shapes": tables[: len(named)], "sweep": tables[len(named) :], "encode": encode,
        "unpack": unpack, "queries": queries,
    }  # fmt: skip
    if out is not None:
        _write_report(report, Path(out))
    return report


def copy_bandwidth() -> float:
    """Return the bandwidth of a simple copy kernel, in bytes per second."""
    source = torch.empty(_COPIED_BYTES // 4, dtype=torch.int32, device="cuda").random_()
    target = torch.empty_like(source)
    # On an H200, a plain copy of this size in a graph had only two thirds of this speed.
    return 2 * _COPIED_BYTES / graph_seconds([lambda: torch.bitwise_not(source, out=target)])


def _measure_rows(shape: QueryShape, recipes: Sequence[str], bandwidth: float, with_peers: bool) -> list[dict[str, Any]]:
    generator = torch.Generator("cuda").manual_seed(0)
    kv = [
        torch.randn(shape.batch, shape.heads, shape.tokens, shape.dim, device="cuda", generator=generator).to(torch.bfloat16)
        for _ in range(2)
    ]
    q = torch.randn(shape.batch, shape.q_heads, 1, shape.dim, device="cuda", generator=generator).to(torch.bfloat16)
    rows = _library_rows(q, kv)
    for recipe in (OWN_BF16, *recipes):
        rows.append(_recipe_row(q, kv, recipe))
        torch.cuda.empty_cache()
    peers = rows[: len(rows) - len(recipes)]
    best, best_eager = (min(row[name] for row in peers) for name in ("whole_seconds", "eager_seconds"))
    if with_peers:
        # Ratios are those to the best bf16 of PyTorch's libraries.
        peer_calls = flashinfer_pages.decode_calls(q, kv, _copy_count)
        rows[:0] = [_peer_row(name, size, calls, graph_seconds(calls)) for name, size, calls in peer_calls]
    for row in rows:
        row["eager_of_bf16"] = row["eager_seconds"] / best_eager
        row["gb_per_s"] = row["bytes"] / row["seconds"] / 1e9
        row["of_floor"] = row["seconds"] / (row["bytes"] / bandwidth)
        row["of_bf16"] = row["whole_seconds"] / best
    return rows


def _library_rows(q: torch.Tensor, kv: list[torch.Tensor]) -> list[dict[str, Any]]:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    size = sum(x.nbytes for x in kv)
    copies = [kv, *([x.clone() for x in kv] for _ in range(_copy_count(size) - 1))]
    rows = []
    for name, backend in (("SDPA flash", SDPBackend.FLASH_ATTENTION), ("SDPA cuDNN", SDPBackend.CUDNN_ATTENTION)):
        with sdpa_kernel(backend):
            try:
                calls = [partial(scaled_dot_product_attention, q, k, v, enable_gqa=True) for k, v in copies]
                seconds = graph_seconds(calls)
            except RuntimeError:
                # This version of PyTorch lacks the backend, or the backend does not support the shape.
                continue
        rows.append(_peer_row(name, size, calls, seconds))
    return rows


def _peer_row(name: str, size: int, calls: Sequence[Callable[[], object]], seconds: float) -> dict[str, Any]:
    return {
        "recipe": name, "bytes": size, "seconds": seconds, "whole_seconds": seconds, "eager_seconds": eager_seconds(calls),
        "error": None, "unpack_seconds": None,
    }  # fmt: skip


def _recipe_row(q: torch.Tensor, kv: list[torch.Tensor], recipe: str) -> dict[str, Any]:
    layer = synthetic_basis.pack(kv[0], kv[1], recipe)
    kernels = attention_kernels(q, layer)
    size = sum(stream.nbytes for side in layer.sides.values() for page in side.runs for stream in page.streams.values())
    if kernels is None:
        # PyTorch operations, which a graph cannot capture.
        seconds = whole = eager = median_seconds(lambda: kvpack.attend(q, layer))
    else:
        layers = [layer, *(_copy_layer(layer) for _ in range(_copy_count(size) - 1))]
        seconds = graph_seconds([_after_rotation(q, one_layer) for one_layer in layers])
        calls = [partial(kvpack.attend, q, one_layer) for one_layer in layers]
        whole, eager = graph_seconds(calls), eager_seconds(calls)
    return {
        "recipe": recipe, "decoded_first": kernels is None, "bytes": size, "seconds": seconds, "whole_seconds": whole,
        "eager_seconds": eager, "error": _relative_error(q, layer), "unpack_seconds": median_seconds(lambda: layer.unpack(torch.bfloat16)),
    }  # fmt: skip


def _after_rotation(q: torch.Tensor, layer: Layer) -> Callable[[], object]:
    """Return a function that launches only the kernels that follow the query's rotation: the split kernels and the merge."""
    from kvpack.kernels.attend import attention
    from kvpack.kernels.attend.prepared import AttendOptions

    return attention.prepare(q, layer, AttendOptions(q.shape[-1] ** -0.5)).after_rotation(q)


def _copy_count(size: int) -> int:
    """Return the number of buffers of ``size`` bytes that together exceed the L2 cache."""
    return max(1, min(_MAX_COPIES, math.ceil(_COLD_BYTES / size)))


def _copy_layer(layer: Layer) -> Layer:
    sides = []
    for side in layer.sides.values():
        runs = side.runs.mapped(side.codec, lambda streams: {name: stream.clone() for name, stream in streams.items()})
        sides.append(replace(side, runs=runs))
    return kvpack.Layer(*sides)


def _relative_error(q: torch.Tensor, layer: Layer) -> float:
    """Return the relative 2-norm error of ``kvpack.attend``, compared with float64 attention over the decoded values."""
    k, v = layer.unpack(torch.float32)
    assert k is not None
    assert v is not None
    rows = q.to(torch.float64).reshape(*k.shape[:2], -1, q.shape[-1]) * q.shape[-1] ** -0.5
    scores = torch.cat([rows @ part.to(torch.float64).transpose(-1, -2) for part in torch.split(k, _CHUNK_TOKENS, 2)], -1)
    weights = torch.split(torch.softmax(scores, -1), _CHUNK_TOKENS, -1)
    exact = torch.stack([w @ part.to(torch.float64) for w, part in zip(weights, torch.split(v, _CHUNK_TOKENS, 2), strict=True)]).sum(0)
    output = kvpack.attend(q.to(torch.float32), layer).to(torch.float64).reshape(exact.shape)
    return float((output - exact).norm() / exact.norm())


def _write_report(report: dict[str, Any], folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "kernels.json").write_text(json.dumps(report, indent=2) + "\n")
    except OSError as error:
        raise WriteFailed(f"{error.filename}: could not be written: {error.strerror}") from None


def show(report: dict[str, Any]) -> None:
    from kvpack.output import bytes_text, print_table

    columns = [
        "recipe", "bytes read", "us", "us with\nrotations", "us\neager", "GB/s", "x byte\nfloor",
        "x best\nbf16", "eager x\nbest bf16", "relative\nerror", "unpack\nms",
    ]  # fmt: skip
    for table in [*report["shapes"], *report["sweep"]]:
        rows = [
            [
                row["recipe"] + (" (decoded first)" if row.get("decoded_first") else ""),
                bytes_text(row["bytes"]),
                f"{1e6 * row['seconds']:.1f}",
                f"{1e6 * row['whole_seconds']:.1f}",
                f"{1e6 * row['eager_seconds']:.1f}",
                f"{row['gb_per_s']:.0f}",
                f"{row['of_floor']:.2f}",
                f"{row['of_bf16']:.3f}",
                f"{row['eager_of_bf16']:.2f}",
                "" if row["error"] is None else f"{row['error']:.1e}",
                "" if row["unpack_seconds"] is None else f"{1e3 * row['unpack_seconds']:.2f}",
            ]
            for row in table["rows"]
        ]
        title = f"{table['name'] or 'sweep'}: {table['batch']} x {table['q_heads']}/{table['heads']} heads x {table['dim']}, "
        print_table(f"{title}{table['tokens']:,} tokens, on {report['device']}", columns, rows)
    if report["shapes"] or report["sweep"]:
        _explain(report)
    if report["encode"] is not None:
        encode_kernels.show(report["encode"], report["device"])
    if report["unpack"] is not None:
        unpack_kernels.show(report["unpack"], report["device"])
    for table in report["queries"]:
        query_kernels.show(table, report["device"])


def _explain(report: dict[str, Any]) -> None:
    """Explain the columns in the tables of attention, and the widths used for klt."""
    print(f"\nThe byte floor is the bytes read at the speed of a copy, {report['bytes_per_s'] / 1e12:.2f} TB/s read and written.")
    print("Times cover the main kernel and the merge with a cold L2 cache; with rotations, they cover the whole call.")
    print("The ratio to the best bf16 compares whole calls, rotations included; GB/s and the byte floor omit them.")
    print("Eager: the whole call from Python, compared with the faster SDPA backend, called in the same way.")
    print("Recipes without a kernel are decoded first and attended with PyTorch: times cover the whole call. Errors are relative to fp64.")
    recipes = {row["recipe"] for table in [*report["shapes"], *report["sweep"]] for row in table["rows"]}
    if any(recipe.startswith(synthetic_basis.NAME) for recipe in recipes):
        print(f"{synthetic_basis.NAME}... is klt with these run widths and a random basis: it measures speed, not quality.")
    for recipe, whose in synthetic_basis.LAYERS.items():
        if recipe in recipes:
            print(f"{recipe} uses the widths of {whose}.")
