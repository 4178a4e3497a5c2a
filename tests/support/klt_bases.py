"""Bases of random numbers for the codec klt: rows for any number of heads, basis files, and codecs that have their basis."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

import torch

from kvpack.coding.bases import Basis, basis_bytes
from kvpack.formats.basis import BasisRows, rows_of, runs_of
from kvpack.formats.klt import Klt

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvpack.formats.base import Codec


@cache
def random_rows(heads: int, dim: int, seed: str) -> torch.Tensor:
    """Rows ``[kv_head, row, dim]`` of multiples of 1/128, which are exact in binary16; the matrix has an inverse, and tables ascend."""
    source = random.Random(f"{heads} {dim} {seed}")

    def draws(*shape: int) -> torch.Tensor:
        count = torch.Size(shape).numel()
        return torch.tensor([(source.randrange(255) - 127) / 128 for _ in range(count)], dtype=torch.float32).view(shape)

    rows = draws(heads, rows_of(dim), dim)
    rows[:, 0] /= 128
    rows[:, 1 : 1 + dim] = torch.eye(dim) * (1 + 2 * (torch.arange(dim) % 3 == 0)) + rows[:, 1 : 1 + dim] / (2 * dim)
    rows[:, 1 + dim] = rows[:, 1 + dim].abs() + 1 / 128
    values = rows[:, 2 + dim :].flatten(1).clone()
    for run in range(runs_of(dim)):
        for width in range(1, 9):
            first = 510 * run + (1 << width) - 2
            values[:, first : first + (1 << width)] = (3 * values[:, first : first + (1 << width)]).sort(-1).values
    rows[:, 2 + dim :] = values.view(heads, -1, dim)
    return rows.to(torch.float16).to(torch.float32)


class AnyHeads(BasisRows):
    """Random rows of one head, repeated for every number of heads."""

    def of_heads(self, heads: int) -> BasisRows:
        return BasisRows(self.rows.expand(1, heads, -1, -1))


def widths_for(dim: int) -> bytes:
    """Widths 0 to 8 in turn, for the runs of a head; the first is not 0."""
    return bytes((5, 2, 0, 1, 3, 8, 4, 6, 7)[run % 9] for run in range(runs_of(dim)))


def with_random_basis(codec: Codec, widths: bytes | None = None) -> Klt:
    """The codec klt of a recipe's words, with a random basis and ``widths``, which a calibration would have given it."""
    assert isinstance(codec, Klt)
    chosen = widths_for(codec.dim) if widths is None else widths
    source = AnyHeads(random_rows(1, codec.dim, "any")[None])
    return Klt.of(codec.dim, codec.basis, codec.layer, codec.side, chosen, codec.gain, codec.rows, source)


def random_basis(shapes: Mapping[tuple[int, str], tuple[int, int]], layers: int, dtype: str = "fp16", seed: str = "") -> bytes:
    """A basis file with random rows of (heads, dim) for each layer and side."""
    rows = {place: random_rows(heads, dim, f"{seed} {place}") for place, (heads, dim) in shapes.items()}
    return basis_bytes(rows, layers, {"name": "x"}, dtype)


def codec_of(basis: Basis, layer: int, side: str, widths: bytes, gain: str = "fp16", *, given: bool = False) -> Klt:
    """The codec of a side of ``basis``, which it has if it is ``given``."""
    rows = basis.rows(layer, side)
    codec = Klt.of(rows.dim, basis.digest, layer, side, widths, gain, "basis", rows)
    return codec if given else replace(codec, source=None)
