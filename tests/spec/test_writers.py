"""The tables in spec/writers.md, which let writers check their own solvers, match those that kvpack writes."""

from __future__ import annotations

import re
import struct

import pytest

from kvpack.formats.lloyd_max import coordinate_table, direction_table, polar_angle_table, triplet_norm_table
from kvpack.formats.trellis import unit_table
from support.spec_pages import SPEC, section, table

TABLES = section(SPEC / "writers.md", "Tables")
CENTROIDS = table(TABLES, "table", "density", "values")
FIRST = "first values, {} state bits"
TRELLIS = table(TABLES, "bits", FIRST.format(8), "error of 8", FIRST.format(10), "error of 10", "Lloyd-Max", "bound")


def centroids(name: str) -> bytes:
    """Return the table that a row on the page names, as little-endian float32."""
    numbers = [int(number) for number in re.findall(r"\d+", name)]
    if name.startswith("scalar"):
        dim, bits = numbers
        return coordinate_table(dim, 2 ** (bits - 1))
    if name.startswith("octahedral directions"):
        return direction_table(2 ** (numbers[0] - 1))
    if name.startswith("octahedral norms"):
        dim, bits = numbers
        return triplet_norm_table(dim, 2**bits)
    first, second, bits = numbers
    return polar_angle_table(first, second, 2**bits)


@pytest.mark.parametrize("row", CENTROIDS, ids=lambda row: row["table"])
def test_the_centroids_match_the_code(row: dict[str, str]) -> None:
    (stored,) = struct.iter_unpack(f"<{len(row['values'].split())}f", centroids(row["table"]))
    assert [f"{value:.6f}" for value in stored] == row["values"].split()


@pytest.mark.parametrize("state_bits", [8, 10])
@pytest.mark.parametrize("row", TRELLIS, ids=lambda row: row["bits"])
def test_values_of_trellis_tables_match_the_code(row: dict[str, str], state_bits: int) -> None:
    # With a power of four as head dim, the factor of unit vectors is exact.
    values = struct.unpack("<4e", unit_table(64, int(row["bits"]), state_bits)[:8])
    assert [f"{8 * value:.4f}" for value in values] == row[FIRST.format(state_bits)].split()


def test_bounds_and_kinds_of_tables_match_the_code() -> None:
    assert {row["table"].split(",")[0] for row in CENTROIDS} == {"scalar", "octahedral directions", "octahedral norms", "polar"}
    for row in TRELLIS:
        bound, *errors = (float(row[name]) for name in ("bound", "error of 10", "error of 8", "Lloyd-Max"))
        assert bound == pytest.approx(4.0 ** -int(row["bits"]), abs=5e-5)
        assert [bound, *errors] == sorted([bound, *errors])
