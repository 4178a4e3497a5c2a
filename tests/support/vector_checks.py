"""Compare the values that readers decode from the conformance vectors with those of the manifest."""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy
import torch

import kvpack
from kvpack.coding.bases import Basis
from kvpack.coding.basis_sources import bound
from kvpack.file import container
from kvpack.formats.base import DTYPE_BYTES
from spec.generate.vector_files import FOLDER, bases, manifest
from support.second_decoder import decoder, decompress

if TYPE_CHECKING:
    from collections.abc import Sequence

LINES = manifest()
DECODED = [file for file, line in LINES.items() if "error" not in line]


@cache
def read(file: str) -> Any:
    """The file as the second decoder reads it; no test changes it."""
    return decoder.read((FOLDER / file).read_bytes(), decompress, bases(LINES[file]))


def basis_of(file: str) -> list[Basis]:
    """The bases that a reader of the file is given."""
    return [Basis.of_bytes(data) for data in bases(LINES[file])]


def verify(data: bytes, given: Sequence[Basis]) -> None:
    """Check the bytes of a file, and whether the bases that its reader is given fit it."""
    opened = container.open_bytes(data)
    opened.verify()
    opened.header = bound(opened.header, given)
    if given:
        # What is coded by tables of the basis is checked with it.
        opened.verify()


def unpacked(file: str, device: str = "cpu") -> list[float]:
    """All values that the library decodes, layer by layer, K before V."""
    opened = container.open_file(FOLDER / file)
    if opened.header.is_basis:
        return [
            value for number, layer in enumerate(opened.header.layers) for side, _ in layer.sides() for value in rows(opened, number, side)
        ]
    layers = kvpack.load(FOLDER / file, device=device, basis=basis_of(file))
    return [value for layer in layers for side in layer.sides.values() for value in side.unpack(torch.float32).flatten().tolist()]


def rows(file: container.File, number: int, side: str) -> list[float]:
    """All values of a side of a basis."""
    data = numpy.frombuffer(file.read_side(number, side)["values"], f"<f{DTYPE_BYTES[file.tensors[f'{number}.{side}.values'].dtype]}")
    return [float(value) for value in data]


def check_values(file: str, found: Sequence[float]) -> None:
    """Each value within its tolerance; values without one have equal bits, except for the payload of NaN."""
    values, expected = numpy.array(found, numpy.float32), numpy.fromfile(FOLDER / LINES[file]["values"], "<f4")
    sides = [side for layer in read(file).layers for side in layer.values() if side]
    tolerances = numpy.array([tolerance for side in sides for tolerance in side.tolerances], numpy.float64)
    assert values.shape == expected.shape == tolerances.shape
    exact = tolerances == 0
    nan = numpy.isnan(expected)
    assert (numpy.isnan(values) == nan)[exact].all()
    assert (values.view(numpy.uint32) == expected.view(numpy.uint32))[exact & ~nan].all()
    assert numpy.isfinite(expected[~exact]).all(), "a value with a tolerance is finite"
    excess = numpy.abs(values[~exact].astype(numpy.float64) - expected[~exact]) - tolerances[~exact]
    assert excess.max(initial=-math.inf) <= 0, f"a value is {excess.max():.3g} beyond its tolerance"
