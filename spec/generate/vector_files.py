"""The conformance vectors in spec/vectors: their manifest, and the code that writes new ones.

``python -m spec.generate.vector_files`` writes the vectors that are missing, with their lines of the manifest, and touches no other.
Vectors never change, so the code that wrote those of finished parts is gone; what is here serves new vectors, and as their pattern.
"""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

from spec.generate import (
    balanced_vectors,
    codec_vectors,
    container_vectors,
    core_reader,
    frame_vectors,
    log_norm_vectors,
    parameter_vectors,
    row_vectors,
    side_car_vectors,
    trellis_vectors,
    valid_vectors,
)
from spec.generate.container_vectors import UNSUPPORTED
from spec.generate.invalid_vectors import INVALID, Invalid
from spec.generate.valid_vectors import VALID, Valid
from support.second_decoder import decoder, decompress

FOLDER = Path(__file__).resolve().parents[2] / "spec" / "vectors"
MANIFEST = FOLDER / "manifest.json"

MODULES = (
    valid_vectors,
    codec_vectors,
    container_vectors,
    side_car_vectors,
    frame_vectors,
    row_vectors,
    parameter_vectors,
    trellis_vectors,
    balanced_vectors,
    log_norm_vectors,
)
for module in MODULES:
    module.add_all()

DEFINED: dict[str, Valid | Invalid] = {
    f"{folder}/{name}.kvpack": vector
    for folder, vectors in (("valid", VALID), ("unsupported", UNSUPPORTED), ("invalid", INVALID))
    for name, vector in vectors.items()
}
"""Every vector that can be written anew, by its file."""


def manifest() -> dict[str, dict[str, Any]]:
    """The line of every vector, by its file."""
    found: dict[str, dict[str, Any]] = json.loads(MANIFEST.read_text(encoding="utf-8")) if MANIFEST.exists() else {}
    return found


def described(vector: Valid | Invalid) -> dict[str, Any]:
    """The fields of a vector in the manifest, without those computed from its bytes."""
    basis = {"basis": vector.basis} if vector.basis else {}
    if isinstance(vector, Invalid):
        return {"shows": vector.shows, "rules": [vector.rule], "error": vector.error} | ({"either": True} if vector.either else {}) | basis
    return {"shows": vector.shows, "rules": list(vector.rules)} | basis


def bases(line: dict[str, Any]) -> list[bytes]:
    """The files of the bases that a reader of a vector is given, from its line of the manifest."""
    return [(FOLDER / line["basis"]).read_bytes()] if "basis" in line else []


def values_path(file: str) -> str:
    return file.removesuffix(".kvpack") + ".f32"


def values_of(file: Any) -> list[float]:
    """All values of a file that the second decoder read, layer by layer, K before V."""
    return [value for layer in file.layers for side in layer.values() if side for value in side.values]


def profile_of(file: Any) -> str:
    """The smallest profile whose readers decode a file that the second decoder read."""
    plain = all(codec.id in core_reader.CODECS and not getattr(codec, "side_cars", {}) for codec in file.codecs)
    return "core" if plain and all(tensor.filter == "none" for tensor in file.tensors) else "full"


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def written(file: str, vector: Valid | Invalid) -> dict[str, Any]:
    """Writes a vector and returns its line of the manifest."""
    data = vector.make()
    (FOLDER / file).write_bytes(data)
    line = described(vector) | {"sha256": digest(data)}
    if isinstance(vector, Valid):
        read = decoder.read(data, decompress, bases(line))
        values = values_of(read)
        packed = struct.pack(f"<{len(values)}f", *values)
        (FOLDER / values_path(file)).write_bytes(packed)
        line |= {"profile": profile_of(read), "values": values_path(file), "values_sha256": digest(packed)}
        line |= {"metadata": read.metadata} if "metadata" in read.ignorable else {}
        line |= {"states": {name: digest(content) for name, content in read.states.items()}} if read.states else {}
        line |= {"offsets": read.offsets} if read.offsets else {}
        line |= {"hidden": read.hidden} if read.hidden else {}
        line |= {"starts": read.starts} if set(read.starts) - {read.start} else {}
    return line


def of_core(file: str, line: dict[str, Any]) -> dict[str, Any]:
    """The fields of a line that say what readers of the profile core make of the file."""
    found = core_reader.refusal((FOLDER / file).read_bytes())
    if "error" not in line:
        return {} if found is None else {"core": found}
    if found == line["error"]:
        return {"profile": "core"}
    return {"profile": "full", "core": found}


def main() -> None:
    lines = manifest()
    for file, vector in DEFINED.items():
        if file not in lines:
            (FOLDER / file).parent.mkdir(parents=True, exist_ok=True)
            line = written(file, vector)
            lines[file] = line | of_core(file, line)
    rows = ",\n".join(f"{json.dumps(file)}: {json.dumps(line, ensure_ascii=False)}" for file, line in lines.items())
    MANIFEST.write_text(f"{{\n{rows}\n}}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
