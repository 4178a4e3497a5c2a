"""Lookup of the part of a basis that a codec or sidecar needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from .basis import ROPE, TABLES
from .contents import File, Side
from .conventions import numbers
from .features import BASIS
from .refusal import require
from .sidecars import SIDECARS

Bases = Mapping[bytes, Callable[[], File]]
"""Functions that read the caller's bases, by the digests that identify them."""


def find_basis(digest: bytes, bases: Bases, rule: str, prefix: str) -> File:
    """Return the basis with ``digest``. Raises ``Refused``, naming ``rule``, if the caller does not have it."""
    require(digest in bases, rule, f"{prefix}*: MissingBasis: the basis {digest.hex()} is needed, but was not passed")
    found = bases[digest]()
    require(BASIS in found.required, "basis.md, File", f"{prefix}*: the file with SHA-256 {digest.hex()} is a cache, but a basis is needed")
    return found


def balanced_matrices(side: Side, prefix: str, bases: Bases) -> list[dict[str, list[float]]]:
    """Return the matrix of each head (side-cars.md, Balanced keys)."""
    rule = f"{SIDECARS}, Layout"
    needed_basis = side.codec.sidecars["balanced"].basis
    assert needed_basis is not None
    digest, layer, frame = needed_basis
    file = find_basis(digest, bases, rule, prefix)
    name = f"{layer}.state.k.{frame}"
    tensors = {tensor.name: tensor for tensor in file.tensors}
    require(name in tensors, rule, f"{prefix}*: the basis has no {name}")
    heads, dim = side.heads, side.codec.dim
    require(
        tensors[name].shape == (1, heads, dim, dim), rule, f"{prefix}*: the shape of {name}, {tensors[name].shape}, does not match the keys"
    )
    matrices = numbers(file.states[name], tensors[name].dtype)
    return [{"balanced": matrices[h * dim * dim : (h + 1) * dim * dim]} for h in range(heads)]


def basis_values(side: Side, prefix: str, bases: Bases) -> list[dict[str, list[float]]]:
    """Return the part of the basis that each head needs: its rows or its frame."""
    rule = f"codecs/{side.codec.id}.md, Parameters and ranges"
    assert side.codec.basis is not None
    digest, layer, name = side.codec.basis
    file = find_basis(digest, bases, rule, prefix)
    require(layer < len(file.layers) and file.layers[layer][name] is not None, rule, f"{prefix}*: the basis has no {layer}.{name}")
    basis = file.layers[layer][name]
    assert basis is not None
    same = (basis.heads, basis.codec.dim) == (side.heads, side.codec.dim)
    require(
        same, rule, f"{prefix}*: the basis has {basis.heads} heads of {basis.codec.dim} channels, expected {side.heads} of {side.codec.dim}"
    )
    if side.codec.scope:
        return frame_values(side, prefix, file)
    size = basis.packed * basis.codec.dim
    return [{"rows": basis.values[h * size : (h + 1) * size]} for h in range(basis.heads)]


def frame_values(side: Side, prefix: str, basis: File) -> list[dict[str, list[float]]]:
    """Return, for each head, its rows of the frame, the scales of the frame's columns, the tables and RoPE.

    The rows have one value per channel.
    """
    rule = "codecs/transform.md, Parameters and ranges"
    assert side.codec.basis is not None
    _, layer, name = side.codec.basis
    tensors = {tensor.name: tensor for tensor in basis.tensors}

    def state(number: int, kind: str) -> list[float]:
        return numbers(basis.states[f"{number}.state.{kind}"], tensors[f"{number}.state.{kind}"].dtype)

    require(f"{layer}.state.{name}.frames" in tensors, rule, f"{prefix}*: the basis has no frames for {layer}.{name}")
    _, count, _, n = tensors[f"{layer}.state.{name}.frames"].shape
    heads, dim = side.heads, side.codec.dim
    fits = (count, n) == ((heads, dim) if side.codec.scope == "head" else (1, heads * dim))
    require(fits, rule, f"{prefix}*: the basis has {count} frames of {n} columns, which do not match the scope {side.codec.scope}")
    _, _, alphabet = tensors[f"0.state.{TABLES[0]}"].shape
    shared = {TABLES[0]: state(0, TABLES[0]), TABLES[1]: state(0, TABLES[1]), "alphabet": [float(alphabet)]}
    if name == "k":
        shared |= {kind: state(layer, kind) for kind in ROPE if f"{layer}.state.{kind}" in tensors}
    all_rows, scales = state(layer, f"{name}.frames"), state(layer, f"{name}.scales")
    result = []
    for h in range(heads):
        frame, first = (h, 0) if count == heads else (0, h * dim)
        rows = all_rows[frame * (1 + n) * n : (frame + 1) * (1 + n) * n]
        frame_rows = [value for row in range(1 + n) for value in rows[row * n + first : row * n + first + dim]]
        result.append({"frame": frame_rows, "scales": scales[frame * n : (frame + 1) * n], **shared})
    return result
