"""Random bases for klt and transform: rows and frames for any number of heads, basis files, and codecs that use these."""

from __future__ import annotations

import hashlib
import random
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

import numpy
import torch

from kvpack.coding.bases import BalancedKeys, Basis, basis_bytes
from kvpack.formats import rans
from kvpack.formats.balanced import FrameMap
from kvpack.formats.balanced_frames import BalancedFrames
from kvpack.formats.basis import BasisRows, row_count, run_count
from kvpack.formats.frames import PAIRINGS, Frames, Rope, SymbolTables
from kvpack.formats.klt import Klt
from kvpack.formats.sidecars import CodecWithSidecars
from kvpack.formats.transform import Transform

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvpack.formats.base import Codec


@cache
def random_rows(heads: int, dim: int, seed: str) -> torch.Tensor:
    """Return rows ``[kv_head, row, dim]`` of multiples of 1/128, which are exact in binary16.

    The matrix of each head is invertible, and tables ascend.
    """
    source = random.Random(f"{heads} {dim} {seed}")

    def draws(*shape: int) -> torch.Tensor:
        count = torch.Size(shape).numel()
        return torch.tensor([(source.randrange(255) - 127) / 128 for _ in range(count)], dtype=torch.float32).view(shape)

    rows = draws(heads, row_count(dim), dim)
    rows[:, 0] /= 128
    rows[:, 1 : 1 + dim] = torch.eye(dim) * (1 + 2 * (torch.arange(dim) % 3 == 0)) + rows[:, 1 : 1 + dim] / (2 * dim)
    rows[:, 1 + dim] = rows[:, 1 + dim].abs() + 1 / 128
    values = rows[:, 2 + dim :].flatten(1).clone()
    for run in range(run_count(dim)):
        for width in range(1, 9):
            first = 510 * run + (1 << width) - 2
            values[:, first : first + (1 << width)] = (3 * values[:, first : first + (1 << width)]).sort(-1).values
    rows[:, 2 + dim :] = values.view(heads, -1, dim)
    return rows.to(torch.float16).to(torch.float32)


def klt(dim: int, widths: bytes, side: str = "k", heads: int = 2, gain: str = "fp16", rows: str = "basis", scale: float = 1.0) -> Klt:
    """Return a codec with a random basis for each head, which is identified by its digest."""
    found = random_rows(heads, dim, side).clone()
    found[:, 1 : 1 + dim] *= scale
    digest = hashlib.sha256(f"{dim} {heads} {side} {scale}".encode()).digest()
    return Klt.from_widths(dim, digest, 0, side, widths, gain, rows, BasisRows(found[None]))


@cache
def random_balanced(heads: int, dim: int, seed: str) -> torch.Tensor:
    """Return invertible balanced frames ``[kv_head, column, channel]`` of multiples of 1/128, which are exact in binary16."""
    source = random.Random(f"balanced {heads} {dim} {seed}")
    draws = [(source.randrange(255) - 127) / 128 for _ in range(heads * dim * dim)]
    found = torch.eye(dim) * (1 + 2 * (torch.arange(dim) % 3 == 0)) + torch.tensor(draws).view(heads, dim, dim) / (2 * dim)
    return (128 * found).round() / 128


class AnyBalanced(BalancedFrames):
    """Random balanced frames of one head, repeated for any number of heads."""

    def check_heads(self, heads: int) -> BalancedFrames:
        return BalancedFrames(self.matrices.expand(heads, -1, -1))


def with_random_balanced(codec: Codec) -> Codec:
    """Return a recipe's codec with random balanced frames in place of calibrated ones. A codec without frames is unchanged."""
    sidecar = codec.sidecar(FrameMap)
    if sidecar is None:
        return codec
    assert isinstance(codec, CodecWithSidecars)
    return codec.with_sidecar(replace(sidecar, source=AnyBalanced(random_balanced(1, codec.dim, "any"))))


def balanced_basis(
    shapes: Mapping[int, tuple[int, int]],
    layers: int,
    dtype: str = "fp16",
    rows: Mapping[tuple[int, str], tuple[int, int]] | None = None,
    model: Mapping[str, str] | None = None,
) -> bytes:
    """Return a basis file with random balanced frames and rows.

    ``shapes`` gives (heads, dim) of the keys of each layer. ``rows`` gives the layers and sides that have rows.
    """
    keys = {}
    for layer, (heads, dim) in shapes.items():
        frames, centered = random_balanced(heads, dim, f"{layer}"), random_balanced(heads, dim, f"{layer} centered")
        turned = layer % 2 == 0
        rope = Rope(tuple(2.0 ** (1 - i) for i in range(dim // 2)), "halves") if turned else None
        keys[layer] = BalancedKeys(frames, centered, frames @ frames.transpose(1, 2), frames[:, 0] if turned else None, rope)
    made = {place: random_rows(*shape, f"{place}") for place, shape in (rows or {}).items()}
    return basis_bytes(made, layers, {"name": "x", **(model or {})}, dtype, balanced=keys)


class AnyHeads(BasisRows):
    """Random rows of one head, repeated for any number of heads."""

    def check_heads(self, heads: int) -> BasisRows:
        return BasisRows(self.rows.expand(1, heads, -1, -1))


def widths_for(dim: int) -> bytes:
    """Return the widths of a head's runs, which cycle through 0 to 8. The first one is not 0."""
    return bytes((5, 2, 0, 1, 3, 8, 4, 6, 7)[run % 9] for run in range(run_count(dim)))


def with_random_basis(codec: Codec, widths: bytes | None = None) -> Klt:
    """Return the klt codec of a recipe with a random basis and ``widths`` in place of calibrated ones."""
    assert isinstance(codec, Klt)
    chosen = widths_for(codec.dim) if widths is None else widths
    source = AnyHeads(random_rows(1, codec.dim, "any")[None])
    return Klt.from_widths(codec.dim, codec.basis, codec.layer, codec.side, chosen, codec.gain, codec.rows, source)


def with_widths_of_heads(codec: Klt, widths: bytes) -> Klt:
    """Return the codec with separate ``widths`` for each head, one for each run of 8 columns."""
    return Klt.from_widths(codec.dim, codec.basis, codec.layer, codec.side, widths, codec.gain, codec.rows, codec.source, per_head=True)


def random_basis(
    shapes: Mapping[tuple[int, str], tuple[int, int]],
    layers: int,
    dtype: str = "fp16",
    seed: str = "",
    scopes: Mapping[tuple[int, str], str] | None = None,
    model: Mapping[str, str] | None = None,
    tables: SymbolTables | None = None,
) -> bytes:
    """Return a basis file with random rows for each layer and side, and frames for those in ``scopes``.

    ``shapes`` gives (heads, dim). The frames' ``tables`` are random if none are given.
    """
    rows = {place: random_rows(heads, dim, f"{seed} {place}") for place, (heads, dim) in shapes.items()}
    tables = tables or random_tables(f"{seed} tables")
    frames = {place: random_frames(*shapes[place], scope, f"{seed} {place}", tables, place[1]) for place, scope in (scopes or {}).items()}
    return basis_bytes(rows, layers, {"name": "x", **(model or {})}, dtype, frames)


@cache
def random_tables(seed: str, count: int = 5, reach: int = 3) -> SymbolTables:
    """Return random tables of levels up to ``reach``. Some symbols other than the escape and level 0 have a frequency of zero."""
    source = random.Random(seed)
    counts = numpy.array([[source.choice((0, 1, 5, 40)) for _ in range(2 * reach + 2)] for _ in range(count)], numpy.int64)
    counts[:, 0] += 1
    counts[:, 1 + reach] += 100
    values = torch.tensor([[level - level * source.randrange(9) / 64 for level in range(-reach, reach + 1)] for _ in range(count)])
    return SymbolTables(rans.frequencies(counts), values)


@cache
def normal_tables(count: int = 33, reach: int = 15) -> SymbolTables:
    """Return tables for normally distributed columns. Table k is for a standard deviation of 2^(k / 4) steps."""
    edges = torch.arange(-reach, reach + 2, dtype=torch.float64) - 0.5
    parts = torch.special.ndtr(edges / torch.exp2(torch.arange(count, dtype=torch.float64) / 4)[:, None]).diff(dim=1)
    counts = torch.cat([(1 - parts.sum(1, keepdim=True)).clamp_min(2.0**-12), parts], 1) * 2**20
    values = torch.arange(-reach, reach + 1, dtype=torch.float32).expand(count, -1)
    return SymbolTables(rans.frequencies(counts.round().to(torch.int64).numpy()), values)


@cache
def random_frames(heads: int, dim: int, scope: str, seed: str, tables: SymbolTables, side: str) -> Frames:
    """Return invertible frames of multiples of 1/128.

    Those of keys have a RoPE, which leaves some channels unrotated if there are more than two.
    """
    source = random.Random(f"{heads} {dim} {scope} {seed}")
    count, n = (heads, dim) if scope == "head" else (1, heads * dim)
    draws = [(source.randrange(255) - 127) / 128 for _ in range(count * (1 + n) * n)]
    rows = torch.tensor(draws, dtype=torch.float32).view(count, 1 + n, n)
    rows[:, 1:] = torch.eye(n) * (1 + 2 * (torch.arange(n) % 3 == 0)) + rows[:, 1:] / (2 * n)
    rows = (128 * rows).round() / 128
    scales = numpy.array([[source.randrange(40) for _ in range(n)] for _ in range(count)], numpy.int64)
    pairs = dim // 2 - (dim > 2)
    turned = side == "k" and pairs > 0
    rope = Rope(tuple(2.0 ** (1 - i) for i in range(pairs)), PAIRINGS[dim % 2]) if turned else None
    return Frames(rows, scales, tables, rope)


class AnyFrames(Frames):
    """Random frames of one head, repeated for any number of heads."""

    def __init__(self, dim: int, scope: str, side: str) -> None:
        one = random_frames(1, dim, scope, "any", random_tables("any"), side)
        super().__init__(one.rows, one.scales, one.tables, one.rope)
        self.scope, self.side = scope, side

    def check_heads(self, heads: int, dim: int) -> Frames:
        return random_frames(heads, dim, self.scope, "any", self.tables, self.side)


def with_random_frames(codec: Codec, step: int = 20) -> Transform:
    """Return the transform codec of a recipe with random frames and ``step`` in place of calibrated ones."""
    assert isinstance(codec, Transform)
    scope = "layer" if codec.dim % 3 == 1 else "head"
    return replace(codec, scope=scope, step=step, source=AnyFrames(codec.dim, scope, codec.side))


def transform_of(basis: Basis, layer: int, side: str, step: int, chunk: int = 16, *, with_frames: bool = False) -> Transform:
    """Return the transform codec for a side of ``basis``. It contains the frames if ``with_frames``."""
    rows, frames = basis.rows(layer, side), basis.frames(layer, side)
    scope = "head" if frames.count == rows.heads else "layer"
    return Transform(rows.dim, basis.digest, layer, side, scope, step, chunk, frames if with_frames else None)


def codec_of(basis: Basis, layer: int, side: str, widths: bytes, gain: str = "fp16", *, with_basis: bool = False) -> Klt:
    """Return the klt codec for a side of ``basis``. It contains the basis if ``with_basis``."""
    rows = basis.rows(layer, side)
    codec = Klt.from_widths(rows.dim, basis.digest, layer, side, widths, gain, "basis", rows)
    return codec if with_basis else replace(codec, source=None)
