"""Random bases for benchmarks. The cost of the kernels of klt and transform depends on widths and bits, but not on the model.

``klt=63211000:53100000`` selects these widths for the runs of keys and of values. ``transform=0.6:head`` selects the bits per value and the
scope of frames. For transform, the packed values are scaled so that columns are distributed as widely as a model's.
"""

from __future__ import annotations

import math
import re
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy
import torch

import kvpack
from kvpack.coding.bases import DISTORTIONS, Basis, basis_bytes
from kvpack.coding.basis_files import SIDES
from kvpack.coding.recipes import parse_recipe
from kvpack.formats import rans
from kvpack.formats.basis import MAX_WIDTH, RUN_COLUMNS, flatten_tables, run_count
from kvpack.formats.errors import InvalidParameter
from kvpack.formats.frames import SCALES_PER_OCTAVE, SCALES_PER_TABLE, Frames, Rope, SymbolTables
from kvpack.formats.transform import SCOPES

if TYPE_CHECKING:
    from kvpack.cache.layer import Layer

NAME = "klt="
TRANSFORM = "transform="

LAYERS = {
    "klt=63211000:53100000": "a usual layer of dim 128: 1.38 bits per value, the average of klt-1.39",
    "klt=63221110:53200000": "an average layer: 1.62 bits per value, the average of klt-1.64",
    "klt=75543221:65310000": "a heavy layer: 2.75 bits per value, like the heaviest of klt-1.75, whose average is 1.73",
}
"""Widths to measure, each with a description of its layer, from calibrations of bytelm on the first half of its text."""

_SLOPE = 1.0
_NORMAL = 1 << 14

_OCTAVES = 8
"""Range of the columns' standard deviations, in powers of 2. At 0.6 bits, two fifths of the columns have symbols."""
_FIRST_DEVIATION = 2.0**-4
_MIN_TABLE, _TABLES, _MAX_LEVEL = -4, 41, 63
"""Constants of the tables: smallest standard deviation in steps (2^-4), number of tables (four per octave), and largest level."""


def check_recipe(recipe: str) -> None:
    """Raise InvalidParameter unless ``recipe`` is a recipe or names a synthetic basis."""
    if recipe.startswith(NAME):
        _parse_widths(recipe)
    elif recipe.startswith(TRANSFORM):
        _parse_transform(recipe)
    else:
        parse_recipe(recipe)


def resolve_recipe(recipe: str, heads: int, dims: tuple[int, int]) -> tuple[str, Basis | None]:
    """Return the actual recipe and the synthetic basis that ``recipe`` stands for. The basis is None if ``recipe`` names none.

    The model has ``heads`` KV heads. ``dims`` are the head dims of keys and values.
    """
    if recipe.startswith(TRANSFORM):
        rate, scope = _parse_transform(recipe)
        return f"kv=transform:bits={rate}", _frames_basis(scope, heads, dims)
    if recipe.startswith(NAME):
        basis, bits = _create_basis(recipe, heads, dims)
        # Slightly more than the widths need, and less than the next larger widths.
        return f"kv=klt:bits={bits + 1e-4:.4f}", basis
    return recipe, None


def pack(k: torch.Tensor, v: torch.Tensor, recipe: str) -> Layer:
    """Pack ``k`` and ``v``, ``[batch, kv_head, token, dim]``, as a layer, with a synthetic basis if ``recipe`` names one."""
    named, basis = resolve_recipe(recipe, k.shape[1], (k.shape[3], v.shape[3]))
    if recipe.startswith(TRANSFORM):
        assert basis is not None
        k, v = (_values_from_columns(x, basis.frames(0, side)) for x, side in ((k, "k"), (v, "v")))
    layer: Layer = kvpack.pack([(k, v)], kvpack.Recipe(named, basis))[0]
    return layer


def _parse_widths(recipe: str) -> tuple[list[int], list[int]]:
    match = re.fullmatch(rf"{NAME}([0-{MAX_WIDTH}]+):([0-{MAX_WIDTH}]+)", recipe)
    if match is None or not all(text.strip("0") for text in match.groups()):
        raise InvalidParameter(
            f"{recipe!r}: expected a name such as {NAME}63211000:53100000: one digit (0 to {MAX_WIDTH} bits) for each run of keys, then of "
            "values"
        )
    return [int(digit) for digit in match[1]], [int(digit) for digit in match[2]]


@lru_cache(maxsize=4)
def _create_basis(recipe: str, heads: int, dims: tuple[int, int]) -> tuple[Basis, float]:
    """Return the one-layer basis that ``recipe`` names, and the bits per value that result in the named widths.

    A head with fewer runs uses the first widths. Additional runs have width 0.
    """
    rows, all_widths = {}, {}
    for side, run_widths, dim in zip(SIDES, _parse_widths(recipe), dims, strict=True):
        widths = (run_widths + [0] * run_count(dim))[: run_count(dim)]
        rows[0, side] = torch.stack([_random_rows(widths, dim, seed) for seed in range(heads)])
        all_widths[0, side] = bytes(widths)
    basis = Basis.from_bytes(basis_bytes(rows, 1, {}), where=recipe)
    return basis, basis.average_bits(all_widths)


def _random_rows(widths: list[int], dim: int, seed: int) -> torch.Tensor:
    """Return one head's rows of a basis: a random rotation, a small mean, and tables for a normal distribution."""
    generator = torch.Generator("cpu").manual_seed(seed)
    matrix = torch.linalg.qr(torch.randn(dim, dim, generator=generator, dtype=torch.float64)).Q
    mean = torch.randn(1, dim, generator=generator, dtype=torch.float64) / 256
    weights = (
        torch.tensor([_weight_for_width(width) for width in widths], dtype=torch.float64).sqrt().repeat_interleave(RUN_COLUMNS)[None, :dim]
    )
    quantiles = (torch.arange(_NORMAL, dtype=torch.float64) + 0.5) / _NORMAL
    normal = torch.special.ndtri(quantiles)
    tables = [normal.view(1 << width, -1).mean(1) for width in range(1, MAX_WIDTH + 1)]
    rows = torch.cat([mean, matrix, weights / math.sqrt(_weight_for_width(MAX_WIDTH)), flatten_tables([tables] * len(widths), dim)])
    return rows.to(torch.float32)


def _weight_for_width(width: int) -> float:
    """Return the weight at which a run gets ``width`` bits, if every bit has to reduce the error by more than ``_SLOPE``."""
    last = DISTORTIONS[width - 1] - DISTORTIONS[width] if width else 4 * (DISTORTIONS[0] - DISTORTIONS[1])
    following = DISTORTIONS[width] - DISTORTIONS[width + 1] if width < MAX_WIDTH else last / 4
    return _SLOPE / math.sqrt(last * following)


def _parse_transform(recipe: str) -> tuple[str, str]:
    """Return the bits per value and the scope of frames in ``recipe``."""
    match = re.fullmatch(rf"{TRANSFORM}([0-9.]+):({'|'.join(SCOPES)})", recipe)
    if match is None:
        raise InvalidParameter(
            f"{recipe!r}: expected bits per value and the scope of frames, as in {TRANSFORM}0.6:head; scopes are {' or '.join(SCOPES)}"
        )
    return match[1], match[2]


@lru_cache(maxsize=4)
def _frames_basis(scope: str, heads: int, dims: tuple[int, int]) -> Basis:
    """Return a basis for one layer. Its frames are random rotations, and its keys use RoPE."""
    rows, frames, tables = {}, {}, _normal_tables()
    for side, dim in zip(SIDES, dims, strict=True):
        rows[0, side] = torch.stack([_random_rows([1] * run_count(dim), dim, seed) for seed in range(heads)])
        count, channels = (heads, dim) if scope == "head" else (1, heads * dim)
        scales = numpy.arange(channels) * _OCTAVES * SCALES_PER_OCTAVE // channels
        rope = Rope(tuple(10000.0 ** (-2 * pair / dim) for pair in range(dim // 2)), "halves") if side == "k" else None
        frame = torch.stack([_random_frame(channels, seed) for seed in range(count)])
        frames[0, side] = Frames(frame, numpy.broadcast_to(scales, (count, channels)), tables, rope)
    return Basis.from_bytes(basis_bytes(rows, 1, {}, frames=frames), where=f"{TRANSFORM}{scope}")


def _random_frame(channels: int, seed: int) -> torch.Tensor:
    """Return a frame with a small random mean and a random rotation."""
    generator = torch.Generator("cpu").manual_seed(seed)
    matrix = torch.linalg.qr(torch.randn(channels, channels, generator=generator, dtype=torch.float64)).Q
    return torch.cat([torch.randn(1, channels, generator=generator, dtype=torch.float64) / 256, matrix]).to(torch.float32)


def _normal_tables() -> SymbolTables:
    """Return tables for normally distributed columns. The standard deviations, in quantization steps, grow geometrically from table to
    table.
    """
    # A positive level l begins half a step above l - 1.
    edges = torch.arange(_MAX_LEVEL + 1, dtype=torch.float64) + 0.5
    edges = torch.cat([-edges.flip(0), edges])
    deviations = torch.exp2(_MIN_TABLE + torch.arange(_TABLES, dtype=torch.float64) * SCALES_PER_TABLE / SCALES_PER_OCTAVE)[:, None]
    below = torch.special.ndtr(edges / deviations)
    parts = below.diff(dim=1)
    escapes = (1 - parts.sum(1, keepdim=True)).clamp_min(2.0**-20)
    counts = (torch.cat([escapes, parts], 1) * 2**20).round().to(torch.int64).numpy()
    values = torch.arange(-_MAX_LEVEL, _MAX_LEVEL + 1, dtype=torch.float32).expand(_TABLES, -1)
    return SymbolTables(rans.frequencies(counts), values)


def _values_from_columns(x: torch.Tensor, frames: Frames) -> torch.Tensor:
    """Return keys or values whose coordinates in the frames are ``x`` times the standard deviation that each column's scale implies.

    ``x`` is ``[batch, kv_head, token, dim]``.
    """
    batch, heads, tokens, dim = x.shape
    wide = x.float() if frames.count == heads else x.float().transpose(1, 2).reshape(batch, 1, tokens, heads * dim)
    deviations = torch.from_numpy(_FIRST_DEVIATION * numpy.exp2(-frames.scales / SCALES_PER_OCTAVE)).to(x.device, torch.float32)
    rows = frames.rows_on_device(x.device)
    colored = (wide * deviations[:, None]) @ rows[:, 1:] + rows[:, :1]
    colored = colored if frames.count == heads else colored.view(batch, tokens, heads, dim).transpose(1, 2)
    return (colored if frames.rope is None else frames.rope.rotate(colored, 0)).to(x.dtype)
