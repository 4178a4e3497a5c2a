"""Seeds of the fuzzers: conformance vectors, golden files, and the committed corpus of a target."""

from __future__ import annotations

import zipfile
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from fuzz.file_mutator import split_file

if TYPE_CHECKING:
    from support.parts import Parts

ROOT = Path(__file__).resolve().parents[1]
CORPUS = ROOT / "fuzz" / "corpus"
_FOLDERS = (ROOT / "spec" / "vectors", ROOT / "tests" / "golden")
MAX_SEED_BYTES = 1 << 14


@cache
def kvpack_files() -> tuple[bytes, ...]:
    """Return all vectors, including the refused ones, and small golden files, in ascending order of size."""
    paths = sorted(path for folder in _FOLDERS for path in folder.rglob("*.kvpack") if path.stat().st_size <= MAX_SEED_BYTES)
    return tuple(sorted({path.read_bytes() for path in paths}, key=lambda data: (len(data), data)))


def files_with_codec(codec_id: str) -> list[bytes]:
    """Return the files that use only the codec ``codec_id``, without sidecars."""
    return [data for data in kvpack_files() if (parts := split_file(data)) and _codecs(parts) == {(codec_id, False)}]


@cache
def bases() -> tuple[bytes, ...]:
    """Return the vectors that are bases."""
    return tuple(
        data for path in sorted((ROOT / "spec" / "vectors" / "valid").glob("*basis-*.kvpack")) if _is_basis(data := path.read_bytes())
    )


def _is_basis(data: bytes) -> bool:
    parts = split_file(data)
    return parts is not None and "basis" in parts.header["required"]


def files_with_sidecars() -> list[bytes]:
    """Return the files in which a codec has sidecars."""
    return [data for data in kvpack_files() if (parts := split_file(data)) and any(has for _, has in _codecs(parts))]


def _codecs(parts: Parts) -> set[tuple[str, bool]]:
    from kvpack.formats import SIDECARS

    codecs = parts.header.get("codecs")
    found = codecs if isinstance(codecs, list) else []
    return {(str(codec.get("id")), bool(set(codec) & set(SIDECARS))) for codec in found if isinstance(codec, dict)}


def rows() -> list[bytes]:
    """Return all row vectors, including the refused vectors."""
    return [path.read_bytes() for path in sorted((ROOT / "spec" / "row-vectors").glob("*.row"))]


def headers() -> list[bytes]:
    """Return the header tensors of all files."""
    import msgpack

    return [msgpack.packb(parts.header) for data in kvpack_files() if (parts := split_file(data))]


def corpus_path(target: str) -> Path:
    return CORPUS / f"{target}_seed_corpus.zip"


def committed_inputs(target: str) -> list[bytes]:
    """Return the inputs of a target's committed corpus."""
    path = corpus_path(target)
    if not path.exists():
        return []
    with zipfile.ZipFile(path) as archive:
        return [archive.read(name) for name in sorted(archive.namelist())]
