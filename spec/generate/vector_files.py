"""Conformance vectors in spec/vectors: their manifest (spec/vectors.md), and the code that writes new ones.

``python -m spec.generate.vector_files`` writes missing vectors and their manifest lines, and does not change others. Vectors never change,
so the code that wrote older ones has been removed. The remaining code writes new vectors, and serves as an example for them.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from spec.generate import (
    answer_vectors,
    balanced_vectors,
    codec_vectors,
    container_vectors,
    core_reader,
    edge_vectors,
    frame_vectors,
    input_vectors,
    log_norm_vectors,
    parameter_vectors,
    row_vectors,
    sidecar_vectors,
    trellis_vectors,
    valid_vectors,
)
from spec.generate.container_vectors import UNSUPPORTED
from spec.generate.expected import digest, read_manifest, typed, write_manifest, written_ids, written_values
from spec.generate.invalid_vectors import INVALID, Invalid
from spec.generate.valid_vectors import VALID, Valid
from support.second_decoder import decoder, decompress

FOLDER = Path(__file__).resolve().parents[2] / "spec" / "vectors"
MANIFEST = FOLDER / "manifest.json"

MODULES = (
    valid_vectors,
    codec_vectors,
    container_vectors,
    sidecar_vectors,
    frame_vectors,
    row_vectors,
    parameter_vectors,
    trellis_vectors,
    balanced_vectors,
    log_norm_vectors,
    input_vectors,
    edge_vectors,
    answer_vectors,
)


@cache
def defined() -> dict[str, Valid | Invalid]:
    """Return all vectors that can be generated, by file."""
    for module in MODULES:
        module.add_all()
    folders = (("valid", VALID), ("unsupported", UNSUPPORTED), ("invalid", INVALID))
    return {f"{folder}/{name}.kvpack": vector for folder, vectors in folders for name, vector in vectors.items()}


def refused_by_decompressors() -> set[str]:
    """Return the files with errors in a frame that only a decompressor can detect."""
    defined()
    return frame_vectors.BLOCKS_REFUSED


def manifest() -> dict[str, dict[str, Any]]:
    """Return the manifest line of every vector, by file."""
    return read_manifest(MANIFEST)


def described(vector: Valid | Invalid) -> dict[str, Any]:
    """Return the fields of a vector in the manifest, without those computed from its bytes."""
    basis = {"basis": vector.basis} if vector.basis else {}
    if isinstance(vector, Invalid):
        return {"shows": vector.shows, "rules": [vector.rule], "error": vector.error} | ({"either": True} if vector.either else {}) | basis
    return {"shows": vector.shows, "rules": list(vector.rules)} | basis


def bases(line: dict[str, Any]) -> list[bytes]:
    """Return the basis files that a reader of the vector receives, from its line of the manifest."""
    return [(FOLDER / line["basis"]).read_bytes()] if "basis" in line else []


def profile_of(file: Any) -> str:
    """Return the smallest profile whose readers decode ``file``, which the second decoder has read."""
    plain = all(codec.id in core_reader.CODECS and not getattr(codec, "sidecars", {}) for codec in file.codecs)
    return "core" if plain and all(tensor.filter == "none" for tensor in file.tensors) else "full"


def written(file: str, vector: Valid | Invalid) -> dict[str, Any]:
    """Write a vector. Returns its manifest line."""
    data = vector.make()
    (FOLDER / file).write_bytes(data)
    line = described(vector) | {"sha256": digest(data)}
    if isinstance(vector, Valid):
        read = decoder.read(data, decompress, bases(line))
        line |= {"profile": profile_of(read)} | written_values(FOLDER, file, read)
        line |= {"metadata": read.metadata, "metadata_entries": typed(read.metadata)} if "metadata" in read.ignorable else {}
        line |= written_ids(FOLDER, file, read)
        line |= {"states": {name: digest(content) for name, content in read.states.items()}} if read.states else {}
        line |= {"offsets": read.offsets} if read.offsets else {}
        line |= {"hidden": read.hidden} if read.hidden else {}
        line |= {"starts": read.starts} if set(read.starts) - {read.start} else {}
    return line


def of_core(file: str, line: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a manifest line that describe the result in readers of the core profile."""
    found = core_reader.refusal((FOLDER / file).read_bytes())
    if "error" not in line:
        return {} if found is None else {"core": found}
    if found == line["error"]:
        return {"profile": "core"}
    return {"profile": "full", "core": found}


def main() -> None:
    lines = manifest()
    for file, vector in defined().items():
        if file not in lines:
            (FOLDER / file).parent.mkdir(parents=True, exist_ok=True)
            line = written(file, vector)
            lines[file] = line | of_core(file, line)
    write_manifest(MANIFEST, lines)


if __name__ == "__main__":
    main()
