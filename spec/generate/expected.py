"""Computation of a valid vector's manifest entry: its values, their tolerances, and its metadata (spec/vectors.md)."""

from __future__ import annotations

import hashlib
import json
import math
import struct
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

MANIFEST_FORMAT = 2
LEAST_NORMAL = 2.0**-126
"""Smallest positive normal binary32 number."""
ID_FEATURES = ("inputs", "token-ids.", "row-ids.")
OF_OPERATIONS = ("group", "minifloat")
"""Codecs that decode exactly and whose values are results of arithmetic."""


def read_manifest(path: Path) -> dict[str, dict[str, Any]]:
    """Return the lines of a manifest of files or of rows."""
    content = json.loads(path.read_text(encoding="utf-8"))
    assert content["format"] == MANIFEST_FORMAT
    lines: dict[str, dict[str, Any]] = content["vectors"]
    return lines


def write_manifest(path: Path, lines: Mapping[str, Mapping[str, Any]]) -> None:
    rows = ",\n".join(f"{json.dumps(file)}: {json.dumps(line, ensure_ascii=False)}" for file, line in lines.items())
    path.write_text(f'{{"format": {MANIFEST_FORMAT}, "vectors": {{\n{rows}\n}}}}\n', encoding="utf-8")


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def sides_of(file: Any) -> list[Any]:
    """Return the keys and values of each layer in a file or page read by the second decoder, in stored order."""
    return [side for layer in file.layers for side in layer.values() if side]


def values_of(file: Any) -> list[float]:
    """Return all values of a file or page read by the second decoder."""
    return [value for side in sides_of(file) for value in side.values]


def values_path(file: str) -> str:
    return file.rpartition(".")[0] + ".f32"


def tolerance_path(file: str) -> str:
    return file.rpartition(".")[0] + ".tolerance"


def ids_path(file: str) -> str:
    return file.rpartition(".")[0] + ".ids"


def written_values(folder: Path, file: str, read: Any) -> dict[str, Any]:
    """Write the values of ``file``, and their tolerances unless all values are exact. Returns the manifest keys that describe them."""
    values = values_of(read)
    packed = struct.pack(f"<{len(values)}f", *values)
    (folder / values_path(file)).write_bytes(packed)
    return {"values": values_path(file), "values_sha256": digest(packed)} | written_tolerances(folder, file, read)


def written_tolerances(folder: Path, file: str, read: Any) -> dict[str, Any]:
    tolerances = [tolerance for side in sides_of(read) for tolerance in side.tolerances]
    assert all(tolerance == 0 or LEAST_NORMAL <= tolerance < math.inf for tolerance in tolerances)
    keys: dict[str, Any] = {"tolerance": "exact"}
    if any(tolerances):
        packed = struct.pack(f"<{len(tolerances)}f", *map(rounded_down, tolerances))
        (folder / tolerance_path(file)).write_bytes(packed)
        keys = {"tolerance": tolerance_path(file), "tolerance_sha256": digest(packed)}
    return keys | ({"subnormal_zero": True} if any(map(has_subnormal_results, sides_of(read))) else {})


def rounded_down(x: float) -> float:
    """Return the largest binary32 that is at most ``x``. ``x`` is 0 or at least ``LEAST_NORMAL``."""
    (bits,) = struct.unpack("<I", struct.pack("<f", x))
    nearest, before = struct.unpack("<2f", struct.pack("<2I", bits, max(bits, 1) - 1))
    return float(nearest if nearest <= x else before)


def has_subnormal_results(side: Any) -> bool:
    """Return True if an operation of an exactly decoding codec produces a subnormal number."""
    size, tail = side.shape[2] * side.codec.dim, side.tail * side.codec.dim
    packed = (at for head in range(0, len(side.values), size) for at in range(head, head + size - tail)) if size else ()
    exact = (side.values[at] for at in packed if side.tolerances[at] == 0)
    return side.codec.id in OF_OPERATIONS and any(0 < abs(value) < LEAST_NORMAL for value in exact)


def written_ids(folder: Path, file: str, read: Any) -> dict[str, Any]:
    """Write the known token ids of ``file`` if it has a feature with ids. Returns the manifest keys that describe them."""
    keys: dict[str, Any] = {}
    if any(name.startswith(ID_FEATURES) for name in read.ignorable):
        ids = read.token_ids
        packed = b"".join(struct.pack(f"<{len(row)}I", *row) for row in ids)
        (folder / ids_path(file)).write_bytes(packed)
        keys = {"token_ids": ids_path(file), "token_ids_sha256": digest(packed)}
    if "inputs" in read.ignorable:
        keys["undetermined"] = None if read.undetermined is None else [[str(position), text] for position, text in read.undetermined]
    return keys


def typed(metadata: Mapping[str, str | int | float]) -> list[list[str]]:
    """Return the name, type and value of every metadata entry as strings, so that no JSON parser rounds them."""
    types = {str: "text", int: "integer", float: "number"}
    return [
        [name, types[type(value)], struct.pack(">d", value).hex() if isinstance(value, float) else str(value)]
        for name, value in metadata.items()
    ]
