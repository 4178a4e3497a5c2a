"""kvpack bench attend: time one query over packed layers on the CPU, compared with attention over dense layers in the same run.

Times are process times in one thread, which other load on the machine affects least. All measurements are interleaved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

import kvpack
from kvpack.attention import cpu_attention
from kvpack.coding.encoding import Progress, suppress_rounding_warnings
from kvpack.coding.recipes import parse_recipe
from kvpack.evaluation.models import check_size
from kvpack.runtime.modes import one_thread

from .process_time import time_interleaved

RECIPES = (
    "bf16", "lossless", "kivi-2", "kivi-4", "turboquant-3", "oscar-2", "octopus-3", "turboangle-k8v4", "hqmq-s24-r3", "polarquant-3",
)  # fmt: skip
"""Default recipes: one preset per family, and presets with few bits, which are fast."""

TOKENS = (1024, 16384, 65536)
Q_HEADS, HEADS, DIM = 32, 8, 128
MAX_TOKENS = 1 << 20

_READ_BYTES = 1 << 28
_CALLS = 3


class _AttentionMethod(NamedTuple):
    """A method of attention. ``call`` reads ``bytes`` bytes. ``kernels`` is True if it uses kernels other than PyTorch's."""

    name: str
    bytes: int
    call: Callable[[], object]
    kernels: bool


def matmul_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Compute attention of queries ``[batch, q_head, 1, dim]`` with matrix products. In PyTorch, this is fastest for one bf16 query."""
    batch, heads, _, dim = k.shape
    scores = q.view(batch, heads, -1, dim) @ k.transpose(-1, -2)
    return torch.softmax(scores.float() * dim**-0.5, -1).to(k.dtype) @ v


def run(
    tokens: Sequence[int] = TOKENS, recipes: Sequence[str] = RECIPES, *, repeats: int = 5, progress: Progress | None = None
) -> dict[str, Any]:
    """Time one query of 32 heads over 8 KV heads of dim 128, for each number of tokens. Returns a report as JSON values.

    ``seconds`` is the median over ``repeats`` rounds, each of which calls all methods once.
    """
    check_size("--repeats", repeats, 1, 1000, "timings")
    for count in tokens:
        check_size("--tokens", count, 1, MAX_TOKENS, "tokens")
    for recipe in recipes:
        parse_recipe(recipe)
    with one_thread():
        tables = []
        for done, count in enumerate(tokens, 1):
            tables.append({"tokens": count, "rows": _measure_rows(count, recipes, repeats)})
            if progress:
                progress(done, len(tokens))
        return {
            "shape": [Q_HEADS, HEADS, DIM],
            "read_bytes_per_s": _read_speed(),
            "backend": kvpack.backends()["cpu"],
            "tables": tables,
        }


def _measure_rows(tokens: int, recipes: Sequence[str], repeats: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(1, HEADS, tokens, DIM, generator=generator).to(torch.bfloat16) for _ in range(2))
    q = torch.randn(1, Q_HEADS, 1, DIM, generator=generator)
    wide_k, wide_v, narrow_q = k.float(), v.float(), q.to(torch.bfloat16)
    sdpa = partial(scaled_dot_product_attention, enable_gqa=True)
    ways = [
        _AttentionMethod("bf16 by matrix products", 2 * k.nbytes, partial(matmul_attention, narrow_q, k, v), False),
        _AttentionMethod("SDPA, float32", 2 * wide_k.nbytes, partial(sdpa, q, wide_k, wide_v), False),
        _AttentionMethod("SDPA, bf16", 2 * k.nbytes, partial(sdpa, narrow_q, k, v), False),
    ]
    exact = scaled_dot_product_attention(q.double(), k.double(), v.double(), enable_gqa=True)
    errors: dict[str, float] = {}
    for recipe in recipes:
        with suppress_rounding_warnings():
            layer = kvpack.pack([(k, v)], recipe)[0]
        streams = [stream for side in layer.sides.values() for page in side.runs for stream in page.streams.values()]
        tails = sum(side.tail.nbytes for side in layer.sides.values())
        size = sum(stream.nbytes for stream in streams) + tails
        ways.append(_AttentionMethod(recipe, size, partial(kvpack.attend, q, layer), cpu_attention(q, layer) is not None))
        errors[recipe] = float((kvpack.attend(q, layer).double() - exact).norm() / exact.norm())
    times = [measured.process for measured in time_interleaved([way.call for way in ways], repeats, _CALLS)]
    rows: list[dict[str, Any]] = [
        {
            "name": way.name, "bytes": way.bytes, "kernels": way.kernels, "seconds": seconds, "gb_per_s": way.bytes / seconds / 1e9,
            "error": errors.get(way.name),
        }
        for way, seconds in zip(ways, times, strict=True)
    ]  # fmt: skip
    for row in rows:
        row["of_bf16"], row["of_sdpa"] = row["seconds"] / rows[0]["seconds"], row["seconds"] / rows[1]["seconds"]
    return rows


def _read_speed() -> float:
    """Return the speed, in bytes per second, at which one thread reads memory while adding integers."""
    source = torch.ones(_READ_BYTES // 8, dtype=torch.int64)
    return _READ_BYTES / time_interleaved([source.sum], 3, _CALLS)[0].process


def show(report: dict[str, Any]) -> None:
    """Print one table per number of tokens, and explain its columns."""
    from kvpack.output import bytes_text, print_table

    columns = ["what", "bytes read", "ms", "GB/s", "of memory's\nspeed", "x bf16 by\nproducts", "x SDPA,\nfloat32", "error"]
    q_heads, heads, dim = report["shape"]
    for table in report["tables"]:
        rows = [
            [
                row["name"] + ("" if row["kernels"] or row["error"] is None else " (PyTorch)"),
                bytes_text(row["bytes"]),
                f"{1e3 * row['seconds']:.2f}",
                f"{row['gb_per_s']:.2f}",
                f"{1e9 * row['gb_per_s'] / report['read_bytes_per_s']:.2f}",
                f"{row['of_bf16']:.2f}",
                f"{row['of_sdpa']:.2f}",
                "" if row["error"] is None else f"{row['error']:.3f}",
            ]
            for row in table["rows"]
        ]
        print_table(f"{table['tokens']:,} tokens, one query, {q_heads}/{heads} heads x {dim}, one thread", columns, rows)
    print(f"\nAttention with {report['backend']}. Process CPU times; below 1 is faster. Every round runs each method once.")
    print(f"Memory speed is that of one thread summing integers, {report['read_bytes_per_s'] / 1e9:.1f} GB/s.")
    print("Errors are relative to binary64 attention over the dense values, which are Gaussian.")
