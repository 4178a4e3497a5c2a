"""Checks of basis files, which callers choose but others may have written. Imports torch."""

from __future__ import annotations

import contextlib
import warnings
from typing import TYPE_CHECKING, Any

import torch

import kvpack
from fuzz.oracles import MAX_DECODED_BYTES
from kvpack.coding.bases import Basis
from kvpack.file import container
from kvpack.formats.errors import KvpackError
from support.klt_bases import balanced_basis, random_basis, random_tables

if TYPE_CHECKING:
    from collections.abc import Iterator

SHAPES = {(0, "k"): (2, 8), (0, "v"): (1, 8)}
SEEDS = (
    *(
        random_basis(SHAPES, 1, dtype, scopes=scopes, tables=random_tables("fuzz"))
        for dtype in ("fp16", "fp32")
        for scopes in (None, {(0, "k"): "head", (0, "v"): "layer"})
    ),
    balanced_basis({0: (2, 8)}, 1, "fp32"),
    balanced_basis({0: (2, 8)}, 1, "fp16", SHAPES),
)
"""Small bases: without frames, with frames per head or per layer, and with balanced frames."""
_MAX_VALUES = 1 << 13
_TOKENS = 5


def load_basis(data: bytes) -> Basis | None:
    """Return the basis in ``data``, or None if it is refused."""
    try:
        with container.open_bytes(data, memory_limit=MAX_DECODED_BYTES):
            return Basis.from_bytes(data)
    except KvpackError:
        return None


def check_basis(data: bytes) -> bool:
    """Return True if a basis is accepted. Data encoded with it must load from a file and decode to finite values, or be refused."""
    basis = load_basis(data)
    if basis is None:
        return False
    layers = _random_layers(basis)
    if layers is None:
        return True
    for recipe in ("klt-2", "kv=klt:bits=2,rows=fp16", "kv=klt:bits=4,rows=fp32", "transform-8", "k=scalar:b=4,frame=balanced;v=raw"):
        _check_recipe(basis, layers, recipe)
    return True


def _check_recipe(basis: Basis, layers: list[Any], recipe: str) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            cache = kvpack.pack(layers, kvpack.Recipe(recipe, basis))
            again = cache.append(layers)
    except KvpackError:
        return
    from kvpack.cache import files

    for made in (cache, again):
        file = container.to_bytes(*files.header_and_arrays(made))
        reloaded = files.read(container.open_bytes(bytearray(file)), basis=basis)
        for values in _values(reloaded):
            assert values.isfinite().all(), f"{recipe}: finite values decode to different values"


def _random_layers(basis: Basis) -> list[Any] | None:
    """Return random keys and values that fit the shapes of a basis, or None if there would be too many."""
    generator = torch.Generator().manual_seed(0)
    shapes = {place: (basis.rows(*place).heads, _TOKENS, basis.rows(*place).dim) for place in basis.sides()}
    for layer in range(basis.described_layer_count):
        with contextlib.suppress(KvpackError):
            frames = basis.balanced_frames(layer, "balanced").frames
            assert frames is not None
            shapes[layer, "k"] = frames.heads, _TOKENS, frames.dim
    if not shapes or sum(heads * tokens * dim for heads, tokens, dim in shapes.values()) > _MAX_VALUES:
        return None
    layers = []
    for layer in range(basis.described_layer_count):
        pair = [torch.randn(1, *shapes[layer, side], generator=generator) if (layer, side) in shapes else None for side in "kv"]
        layers.append(tuple(pair))
    return layers


def _values(cache: kvpack.Cache) -> Iterator[torch.Tensor]:
    for layer in cache:
        for side in layer.sides.values():
            yield side.unpack(torch.float32)
