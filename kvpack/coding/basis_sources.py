"""Search for a cache's basis, by its SHA-256, in the objects, files and folders that the caller passes.

A cache identifies its basis by digest, not by path, so that no file can make kvpack open another file.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvpack.file.basis import SUFFIX
from kvpack.file.user_files import open_error, path_text
from kvpack.formats.arguments import prefix_errors
from kvpack.formats.balanced import FrameMap
from kvpack.formats.errors import InvalidHeader, InvalidParameter, KvpackError, KvpackWarning, MissingBasis, OutOfBounds
from kvpack.formats.klt import Klt
from kvpack.formats.sidecars import CodecWithSidecars
from kvpack.formats.transform import Transform

from .bases import Basis
from .basis_files import open_basis

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from kvpack.file.header import Header
    from kvpack.formats.base import Codec


def load_basis(source: Basis | str | os.PathLike[str]) -> Basis:
    """Return the basis to pack with. ``source`` is a Basis or the path of a basis file. Raises the same errors as ``Basis.load``."""
    untyped: Any = source
    if isinstance(untyped, Basis):
        return untyped
    if os.path.isdir(path_text(untyped)):
        raise InvalidParameter(f"{path_text(untyped)} is a folder: to pack a cache, pass a single basis file")
    return Basis.load(untyped)


def find_basis(source: Basis | str | os.PathLike[str] | Sequence[Basis | str | os.PathLike[str]], digest: bytes) -> Basis:
    """Return the basis with the SHA-256 ``digest``. ``source`` is a basis, its path, a folder of ``*.kvbasis`` files, or a list of these.

    Files in a folder are tried in ascending order of size. Issues a KvpackWarning about each file that cannot be read as a basis. Raises
    MissingBasis if no basis has this digest, and MissingFile if a path cannot be read.
    """
    for location in source if isinstance(source, list | tuple) else [source]:
        for candidate in _candidate_bases(location, digest):
            if candidate.digest == digest:
                return candidate
    raise MissingBasis(
        f"the basis {digest.hex()} is needed, but no basis that was passed has this SHA-256: pass the basis that the file was packed with"
    )


def _candidate_bases(source: Any, digest: bytes) -> Iterator[Basis]:
    if isinstance(source, Basis):
        yield source
        return
    path = path_text(source)
    if not os.path.isdir(path):
        yield Basis.load(path)
        return
    for file in _basis_files(path):
        try:
            with open_basis(file) as handle:
                basis = Basis(handle.read_all(), file) if handle.digest() == digest else None
        except KvpackError as error:
            warnings.warn(f"{file} was skipped in the search for the basis {digest.hex()}: {error}", KvpackWarning, stacklevel=2)
            continue
        if basis is not None:
            yield basis


def _basis_files(folder: str) -> list[str]:
    """Return the paths of the ``*.kvbasis`` files in a folder, smallest file first."""
    try:
        with os.scandir(folder) as entries:
            result = [(_file_size(entry), entry.path) for entry in entries if entry.name.endswith(SUFFIX)]
    except OSError as error:
        raise open_error(folder, error, "a folder of bases") from None
    return [path for _, path in sorted(result)]


def _file_size(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat().st_size
    except OSError:
        # Opening the file reports the reason.
        return 0


def with_bases(header: Header, source: Any = None) -> Header:
    """Return ``header`` with the bases that its codecs need. ``source`` is as for ``find_basis``.

    If a file contains the codec's rows, the basis is needed only to encode new tokens. Raises MissingBasis, and InvalidHeader if a layer's
    keys or values do not match the basis that their codec names.
    """
    used = {side.codec for layer in header.layers for _, side in layer.sides()}
    unbound = [part for number in sorted(used) for part in _parts_with_basis(header.codecs[number]) if part.source is None]
    needed = {part.basis for part in unbound if part.bases_needed}
    if not unbound or (source is None and not needed):
        return header
    if source is None:
        raise MissingBasis(
            f"the basis {min(needed).hex()} is needed: pass its file, or a folder that contains it: --basis for a command, basis= in Python"
        )
    bases = {digest: find_basis(source, digest) for digest in needed}
    for digest in {part.basis for part in unbound} - needed:
        with contextlib.suppress(KvpackError):
            bases[digest] = find_basis(source, digest)
    codecs = tuple(_bind_basis(number, codec, bases) if number in used else codec for number, codec in enumerate(header.codecs))
    for number, layer in enumerate(header.layers):
        for name, side in layer.sides():
            for part in _parts_with_basis(codecs[side.codec]):
                if part.bases_needed and part.source is not None:
                    heads = part.source.heads(part.dim) if isinstance(part, Transform) else part.source.heads
                    if heads != side.heads:
                        raise InvalidHeader(
                            f"layers[{number}].{name}.heads is {side.heads}, but the {part.basis_location} have {heads} heads"
                        )
    return replace(header, codecs=codecs)


def _parts_with_basis(codec: Codec) -> tuple[Klt | Transform | FrameMap, ...]:
    """Return the parts of ``codec`` that may need a basis: the plain codec if it is klt or transform, and the sidecar for key frames, if
    any.
    """
    parts = (codec.without_sidecars, codec.sidecar(FrameMap))
    return tuple(part for part in parts if isinstance(part, Klt | Transform | FrameMap))


def _bind_basis(codec_index: int, codec: Codec, bases: Mapping[bytes, Basis]) -> Codec:
    for part in _parts_with_basis(codec):
        if part.source is None and part.basis in bases:
            basis = bases[part.basis]
            codec = (
                _bind_frames(codec_index, codec, part, basis) if isinstance(part, FrameMap) else _bind_rows(codec_index, codec, part, basis)
            )
    return codec


def _bind_frames(codec_index: int, codec: Codec, sidecar: FrameMap, basis: Basis) -> Codec:
    assert isinstance(codec, CodecWithSidecars)
    try:
        frames = basis.balanced_frames(sidecar.layer, sidecar.frame).frames
        assert frames is not None
    except OutOfBounds as error:
        raise InvalidHeader(f"codecs[{codec_index}]: {error}") from None
    if frames.dim != sidecar.dim:
        raise InvalidHeader(f"codecs[{codec_index}]: dim is {sidecar.dim}, but the {sidecar.basis_location} have {frames.dim} channels")
    return codec.with_sidecar(replace(sidecar, source=frames))


def _bind_rows(codec_index: int, codec: Codec, family: Klt | Transform, basis: Basis) -> Codec:
    try:
        rows = basis.rows(family.layer, family.side)
        frames = basis.frames(family.layer, family.side) if isinstance(family, Transform) else None
    except OutOfBounds as error:
        if not family.bases_needed:
            return codec
        raise InvalidHeader(f"codecs[{codec_index}]: {error}") from None
    if rows.dim != family.dim:
        if not family.bases_needed:
            return codec
        raise InvalidHeader(f"codecs[{codec_index}]: dim is {family.dim}, but the {family.basis_location} have {rows.dim} channels")
    if not isinstance(family, Transform):
        return codec.with_plain_codec(replace(family, source=rows))
    assert frames is not None
    if frames.count != (expected := rows.heads if family.scope == "head" else 1):
        raise InvalidHeader(
            f"codecs[{codec_index}]: scope is {family.scope}, but the {family.basis_location} have {frames.count} frames, expected "
            f"{expected} for {rows.heads} heads"
        )
    return codec.with_plain_codec(replace(family, source=frames))


def bind_bases(where: str, header: Header, source: Any) -> Header:
    """Return ``with_bases(header, source)``. Error messages begin with ``where``."""
    with prefix_errors(where):
        return with_bases(header, source)
