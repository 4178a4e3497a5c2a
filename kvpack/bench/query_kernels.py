"""kvpack bench kernels: time attention with many queries over a packed layer on a CUDA device, compared with SDPA over bf16.

This corresponds to the prefill after a stored prefix. Several whole calls in a row are timed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

import kvpack
from kvpack.attention import attention_kernels

from . import synthetic_basis
from .timing import repeated_seconds


class QueryShape(NamedTuple):
    """The shape of attention over a layer: numbers of sequences, query heads and KV heads, the head dim, and the number of tokens."""

    batch: int
    q_heads: int
    heads: int
    dim: int
    tokens: int


QUERIES = (2, 8, 16, 32, 64, 128, 512, 2048, 8192)

RECIPES = ("kv=group:b=4,g=32", "oscar-2", "octopus-3", "kv=octahedral:b=3", "kv=angle:n=128", "kv=polar:b=3", "bf16")

CHECKED_QUERIES = 64
"""Number of queries whose results are compared with float32."""


def _attend_decoded(q: torch.Tensor, layer: kvpack.Layer) -> torch.Tensor:
    """Attend like ``kvpack.attend``, but always with the kernels that first decode all tokens."""
    from kvpack.kernels.attend import many_queries
    from kvpack.kernels.attend.prepared import AttendOptions

    return many_queries.prepare(q, layer, AttendOptions(q.shape[3] ** -0.5))(q)


def run(recipes: Sequence[str], shape: QueryShape, queries: Sequence[int] = QUERIES) -> dict[str, Any]:
    """Measure ``recipes`` for each number of queries in ``queries``, and return a report as JSON values.

    Requires a CUDA device.
    """
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(heads: int, tokens: int) -> torch.Tensor:
        return torch.randn(shape.batch, heads, tokens, shape.dim, device="cuda", generator=generator).to(torch.bfloat16)

    k, v = normal(shape.heads, shape.tokens), normal(shape.heads, shape.tokens)
    tensors = {count: normal(shape.q_heads, count) for count in queries if count <= shape.tokens}
    peers = {count: _sdpa_seconds(q, k, v) for count, q in tensors.items()}
    rows = []
    for recipe in recipes:
        layer = synthetic_basis.pack(k, v, recipe)
        q = normal(shape.q_heads, min(CHECKED_QUERIES, shape.tokens))
        exact = kvpack.attend(q.to(torch.float32), layer)
        error = float((kvpack.attend(q, layer).to(torch.float32) - exact).norm() / exact.norm())
        for count, q in tensors.items():
            seconds = repeated_seconds(partial(kvpack.attend, q, layer))
            best = min(peers[count].values())
            # Few queries use the packed bytes; for comparison, also measure decoding first.
            decoded = repeated_seconds(partial(_attend_decoded, q, layer)) if attention_kernels(q, layer) else seconds
            rows.append(
                {
                    "recipe": recipe,
                    "queries": count,
                    "seconds": seconds,
                    "decoded_seconds": decoded,
                    "of_sdpa": seconds / best,
                    "error": error,
                }
            )
        del layer
        torch.cuda.empty_cache()
    return {**shape._asdict(), "peers": [{"queries": count, **row} for count, row in peers.items()], "rows": rows}


def _sdpa_seconds(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, float]:
    """Return the seconds per call of each SDPA backend that supports the shape.

    Calls have no causal mask, because only FlashAttention would align the queries with the last tokens.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    result = {}
    for name, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION)):
        with sdpa_kernel(backend):
            try:
                result[name] = repeated_seconds(partial(scaled_dot_product_attention, q, k, v, enable_gqa=True))
            except RuntimeError:
                # This version of PyTorch lacks the backend, or the backend does not support the shape.
                continue
    return result


def show(report: dict[str, Any], device: str) -> None:
    from kvpack.output import print_table

    counts = [peer["queries"] for peer in report["peers"]]

    def to_microseconds(seconds: float | None) -> str:
        return "" if seconds is None else f"{1e6 * seconds:.0f}"

    table = [[f"SDPA {name}, us", "", *(to_microseconds(peer.get(name)) for peer in report["peers"])] for name in ("flash", "cudnn")]
    for recipe in dict.fromkeys(row["recipe"] for row in report["rows"]):
        by_count = {row["queries"]: row for row in report["rows"] if row["recipe"] == recipe}
        error = next(iter(by_count.values()))["error"]
        table.append([f"{recipe}, us", f"{error:.1e}", *(to_microseconds(by_count[count]["seconds"]) for count in counts)])
        table.append(["  decoded first, us", "", *(to_microseconds(by_count[count]["decoded_seconds"]) for count in counts)])
        table.append(["  x best SDPA", "", *(f"{by_count[count]['of_sdpa']:.2f}" for count in counts)])
    shape = f"{report['batch']} x {report['q_heads']}/{report['heads']} heads x {report['dim']}, {report['tokens']:,} tokens"
    print_table(f"queries: {shape}, on {device}", ["", "relative\nerror", *(f"{count:,}" for count in counts)], table)
    print("\nWhole calls of kvpack.attend, causal, by the number of queries; SDPA is over bf16 keys and values without a mask.")
    print(f"The error is that of {CHECKED_QUERIES} queries against binary32 over the same layer.")
