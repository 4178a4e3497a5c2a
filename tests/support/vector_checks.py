"""Compare the values that readers decode from the conformance vectors with those in the manifest."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy
import torch

import kvpack
from kvpack.coding.bases import Basis
from kvpack.coding.basis_sources import with_bases
from kvpack.file import container
from kvpack.formats.streams import DTYPE_BYTES
from spec.generate.vector_files import FOLDER, bases, manifest
from support.second_decoder import decoder, decompress

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

LINES = manifest()
DECODED = [file for file, line in LINES.items() if "error" not in line]


@cache
def read(file: str) -> Any:
    """Return the file as the second decoder reads it. Tests must not modify it."""
    return decoder.read((FOLDER / file).read_bytes(), decompress, bases(LINES[file]))


def load_basis(file: str) -> list[Basis]:
    """Return the bases that a reader of the file receives."""
    return [Basis.from_bytes(data) for data in bases(LINES[file])]


def verify(data: bytes, bases: Sequence[Basis]) -> None:
    """Verify the bytes of a file, with the bases that its reader receives."""
    opened = container.open_bytes(data)
    opened.verify()
    opened.header = with_bases(opened.header, bases)
    if bases:
        # Values coded with tables of the basis can only be checked with the basis.
        opened.verify()


def unpack_all(file: str, device: str = "cpu") -> list[float]:
    """Return all values that the library decodes, layer by layer, keys before values."""
    opened = container.open_file(FOLDER / file)
    if opened.header.is_basis:
        return [
            value
            for number, layer in enumerate(opened.header.layers)
            for side, _ in layer.sides()
            for value in basis_rows(opened, number, side)
        ]
    layers = kvpack.load(FOLDER / file, device=device, basis=load_basis(file))
    return [value for layer in layers for side in layer.sides.values() for value in side.unpack(torch.float32).flatten().tolist()]


def basis_rows(file: container.File, number: int, side: str) -> list[float]:
    """Return the values of all rows that a basis has for the keys or the values of a layer."""
    data = numpy.frombuffer(file.read_side(number, side)["values"], f"<f{DTYPE_BYTES[file.tensors[f'{number}.{side}.values'].dtype]}")
    return [float(value) for value in data]


@dataclass(frozen=True)
class Expected:
    """The values in a manifest line, and their tolerances, which are 0 for exact values."""

    values: numpy.ndarray[Any, numpy.dtype[numpy.float32]]
    tolerances: numpy.ndarray[Any, numpy.dtype[numpy.float32]]
    subnormal_zero: bool

    @classmethod
    def of(cls, folder: Path, line: dict[str, Any]) -> Expected:
        values = numpy.fromfile(folder / line["values"], "<f4")
        exact = line["tolerance"] == "exact"
        tolerances = numpy.zeros_like(values) if exact else numpy.fromfile(folder / line["tolerance"], "<f4")
        assert values.shape == tolerances.shape
        return cls(values, tolerances, line.get("subnormal_zero", False))

    def differs_from(self, found: Sequence[float]) -> numpy.ndarray[Any, numpy.dtype[numpy.bool_]]:
        """Return a mask of the values in ``found`` that do not agree with the expected ones (spec/vectors.md)."""
        values = numpy.array(found, numpy.float32)
        assert values.shape == self.values.shape
        same = values.view(numpy.uint32) == self.values.view(numpy.uint32)
        if self.subnormal_zero:
            subnormal = numpy.abs(self.values) < 2.0**-126
            same |= subnormal & (values == 0) & (numpy.signbit(values) == numpy.signbit(self.values))
        same |= numpy.isnan(values) & numpy.isnan(self.values)
        with numpy.errstate(invalid="ignore"):
            near = numpy.abs(values.astype(numpy.float64) - self.values) <= self.tolerances
        return ~numpy.where(self.tolerances == 0, same, near)


def check_values(file: str, values: Sequence[float]) -> None:
    """Check that every value agrees with that in the manifest."""
    differing = Expected.of(FOLDER, LINES[file]).differs_from(values)
    assert not differing.any(), f"{differing.sum()} values differ, the first at {differing.argmax()}"
