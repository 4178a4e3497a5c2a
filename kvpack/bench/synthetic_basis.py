"""Bases of random numbers whose runs have given widths: what the kernels of klt cost depends on the widths, and not on the model."""

from __future__ import annotations

import math
import re
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

import kvpack
from kvpack.coding.bases import DISTORTIONS, GAIN_BITS, SIDES, Basis, basis_bytes
from kvpack.coding.recipes import parse_recipe
from kvpack.formats.basis import MAX_WIDTH, RUN_COLUMNS, flat_tables, runs_of
from kvpack.formats.errors import InvalidParameter

if TYPE_CHECKING:
    from kvpack.cache.layer import Layer

NAME = "klt="
"""What names of recipes with a synthetic basis begin with: ``klt=63211000:53100000`` has the widths of the runs of keys and of values."""

_SLOPE = 1.0
_NORMAL = 1 << 14


def check(recipe: str) -> None:
    """Raise InvalidRecipe or InvalidParameter unless ``recipe`` is one, or names a synthetic basis."""
    if recipe.startswith(NAME):
        _widths(recipe)
    else:
        parse_recipe(recipe)


def pack(k: torch.Tensor, v: torch.Tensor, recipe: str) -> Layer:
    """``k`` and ``v`` ``[batch, kv_head, token, dim]`` as a layer of ``recipe``, by a synthetic basis where it names one."""
    if not recipe.startswith(NAME):
        layer: Layer = kvpack.pack([(k, v)], recipe)[0]
        return layer
    basis, bits = _basis(recipe, k.shape[1], (k.shape[3], v.shape[3]))
    # Not less than what the widths take: the next bit of a run is far away.
    own: Layer = kvpack.pack([(k, v)], f"kv=klt:bits={bits + 1e-4:.4f}", basis=basis)[0]
    return own


def _widths(recipe: str) -> tuple[list[int], list[int]]:
    match = re.fullmatch(rf"{NAME}([0-{MAX_WIDTH}]+):([0-{MAX_WIDTH}]+)", recipe)
    if match is None or not all(text.strip("0") for text in match.groups()):
        raise InvalidParameter(
            f"{recipe!r}: expected {NAME}63211000:53100000, a digit of 0 to {MAX_WIDTH} bits for each run of keys and values"
        )
    return [int(digit) for digit in match[1]], [int(digit) for digit in match[2]]


@lru_cache(maxsize=4)
def _basis(recipe: str, heads: int, dims: tuple[int, int]) -> tuple[Basis, float]:
    """The basis of ``recipe`` for one layer, and the bits per value at which its runs have their widths.

    A head of fewer runs has the first of the widths, and one of more has runs without codes behind them.
    """
    rows, bits, values = {}, 0, 0
    for side, given, dim in zip(SIDES, _widths(recipe), dims, strict=True):
        widths = (given + [0] * runs_of(dim))[: runs_of(dim)]
        rows[0, side] = torch.stack([_rows(widths, dim, seed) for seed in range(heads)])
        columns = [min(RUN_COLUMNS, dim - RUN_COLUMNS * run) for run in range(runs_of(dim))]
        bits += sum(width * count for width, count in zip(widths, columns, strict=True)) + GAIN_BITS
        values += dim
    return Basis.of_bytes(basis_bytes(rows, 1, {}), where=recipe), bits / values


def _rows(widths: list[int], dim: int, seed: int) -> torch.Tensor:
    """Rows of one head: a random rotation, a small mean, tables of a normal distribution."""
    generator = torch.Generator("cpu").manual_seed(seed)
    matrix = torch.linalg.qr(torch.randn(dim, dim, generator=generator, dtype=torch.float64)).Q
    mean = torch.randn(1, dim, generator=generator, dtype=torch.float64) / 256
    weights = torch.tensor([_weight(width) for width in widths], dtype=torch.float64).sqrt().repeat_interleave(RUN_COLUMNS)[None, :dim]
    quantiles = (torch.arange(_NORMAL, dtype=torch.float64) + 0.5) / _NORMAL
    normal = torch.special.ndtri(quantiles)
    tables = [normal.view(1 << width, -1).mean(1) for width in range(1, MAX_WIDTH + 1)]
    rows = torch.cat([mean, matrix, weights / math.sqrt(_weight(MAX_WIDTH)), flat_tables([tables] * len(widths), dim)])
    return rows.to(torch.float32)


def _weight(width: int) -> float:
    """A weight at which a run takes ``width`` bits, and no more, where a bit must be worth more than ``_SLOPE``."""
    last = DISTORTIONS[width - 1] - DISTORTIONS[width] if width else 4 * (DISTORTIONS[0] - DISTORTIONS[1])
    following = DISTORTIONS[width] - DISTORTIONS[width + 1] if width < MAX_WIDTH else last / 4
    return _SLOPE / math.sqrt(last * following)
