"""Find the basis that a cache names: the caller passes an object, a path, or a folder to search for the digest.

No file is opened because another file names it.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvpack.file.basis import SUFFIX
from kvpack.file.user_files import could_not_open, path_text
from kvpack.formats.balanced import Balanced
from kvpack.formats.errors import InvalidHeader, InvalidParameter, KvpackError, KvpackWarning, MissingBasis, OutOfBounds
from kvpack.formats.klt import Klt
from kvpack.formats.side_cars import WithSideCars
from kvpack.formats.transform import Transform

from .bases import Basis
from .basis_files import opened

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from kvpack.file.header import Header
    from kvpack.formats.base import Codec


def basis_of(source: Basis | str | os.PathLike[str]) -> Basis:
    """Return the basis that a caller passes for packing, as an object or a path. Raises the errors of ``Basis.load``."""
    given: Any = source
    if isinstance(given, Basis):
        return given
    if os.path.isdir(path_text(given)):
        raise InvalidParameter(f"{path_text(given)}: is a folder; to pack a cache, name one basis in it")
    return Basis.load(given)


def find(source: Basis | str | os.PathLike[str] | Sequence[Basis | str | os.PathLike[str]], digest: bytes) -> Basis:
    """Find the basis with SHA-256 ``digest`` in ``source``: bases, their paths, and folders of files named ``*.kvbasis``.

    Files in a folder are tried smallest first; a KvpackWarning names those that are not bases or cannot be read. Raises MissingBasis, which
    names the digest, and the errors of reading a file or listing a folder.
    """
    for location in source if isinstance(source, list | tuple) else [source]:
        for candidate in _candidates(location, digest):
            if candidate.digest == digest:
                return candidate
    raise MissingBasis(
        f"the basis {digest.hex()} is needed, but no basis passed has this SHA-256: pass the one that the file was packed with"
    )


def _candidates(source: Any, digest: bytes) -> Iterator[Basis]:
    if isinstance(source, Basis):
        yield source
        return
    path = path_text(source)
    if not os.path.isdir(path):
        yield Basis.load(path)
        return
    for file in _files(path):
        try:
            with opened(file) as handle:
                basis = Basis(handle.whole(), file) if handle.digest() == digest else None
        except KvpackError as error:
            warnings.warn(f"{file} was skipped in the search for the basis {digest.hex()}: {error}", KvpackWarning, stacklevel=2)
            continue
        if basis is not None:
            yield basis


def _files(folder: str) -> list[str]:
    """Return the paths in a folder that have the name of a basis, smallest file first. Raises MissingFile."""
    try:
        with os.scandir(folder) as entries:
            result = [(_size(entry), entry.path) for entry in entries if entry.name.endswith(SUFFIX)]
    except OSError as error:
        raise could_not_open(folder, error, "a folder of bases") from None
    return [path for _, path in sorted(result)]


def _size(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat().st_size
    except OSError:
        # Opening it tells why.
        return 0


def bound(header: Header, source: Any = None) -> Header:
    """Return ``header`` with the bases that the codecs of its sides need, from ``source`` as for ``find``.

    A codec whose rows are in the file needs no basis; it gets the one in ``source``, if any, to encode new tokens. Raises MissingBasis, and
    InvalidHeader, naming the position, if a side does not fit the basis that it names.
    """
    used = {side.codec for layer in header.layers for _, side in layer.sides()}
    of_sides = [codec for number, codec in enumerate(header.codecs) if number in used]
    unbound = [part for codec in of_sides for part in _parts(codec) if part.source is None]
    needed = {part.basis for part in unbound if part.bases_needed}
    if not unbound or (source is None and not needed):
        return header
    if source is None:
        raise MissingBasis(f"the basis {min(needed).hex()} is needed: pass basis= (in commands, --basis), as a path or a folder")
    bases = {digest: find(source, digest) for digest in needed}
    for digest in {part.basis for part in unbound} - needed:
        with contextlib.suppress(KvpackError):
            bases[digest] = find(source, digest)
    codecs = tuple(_bound(number, codec, bases) if number in used else codec for number, codec in enumerate(header.codecs))
    for number, layer in enumerate(header.layers):
        for name, side in layer.sides():
            for part in _parts(codecs[side.codec]):
                if part.bases_needed and part.source is not None:
                    heads = part.source.heads(part.dim) if isinstance(part, Transform) else part.source.heads
                    if heads != side.heads:
                        raise InvalidHeader(f"layers[{number}].{name}.heads is {side.heads}, but the {part.place} have {heads} heads")
    return replace(header, codecs=codecs)


def _parts(codec: Codec) -> tuple[Klt | Transform | Balanced, ...]:
    """Return the parts of a codec that name a basis: the codec without side-cars, or a side-car."""
    parts = (codec.family, codec.side_car(Balanced))
    return tuple(part for part in parts if isinstance(part, Klt | Transform | Balanced))


def _bound(number: int, given: Codec, bases: Mapping[bytes, Basis]) -> Codec:
    for part in _parts(given):
        if part.source is None and part.basis in bases:
            basis = bases[part.basis]
            given = _with_frames(number, given, part, basis) if isinstance(part, Balanced) else _with_rows(number, given, part, basis)
    return given


def _with_frames(number: int, given: Codec, side_car: Balanced, basis: Basis) -> Codec:
    assert isinstance(given, WithSideCars)
    try:
        frames = basis.balanced(side_car.layer, side_car.frame).frames
        assert frames is not None
    except OutOfBounds as error:
        raise InvalidHeader(f"codecs[{number}]: {error}") from None
    if frames.dim != side_car.dim:
        raise InvalidHeader(f"codecs[{number}]: dim is {side_car.dim}, but the {side_car.place} have {frames.dim} channels")
    return given.with_side_car(replace(side_car, source=frames))


def _with_rows(number: int, given: Codec, codec: Klt | Transform, basis: Basis) -> Codec:
    try:
        rows = basis.rows(codec.layer, codec.side)
        frames = basis.frames(codec.layer, codec.side) if isinstance(codec, Transform) else None
    except OutOfBounds as error:
        if not codec.bases_needed:
            return given
        raise InvalidHeader(f"codecs[{number}]: {error}") from None
    if rows.dim != codec.dim:
        if not codec.bases_needed:
            return given
        raise InvalidHeader(f"codecs[{number}]: dim is {codec.dim}, but the {codec.place} have {rows.dim} channels")
    if not isinstance(codec, Transform):
        return given.with_family(replace(codec, source=rows))
    assert frames is not None
    if frames.count != (rows.heads if codec.scope == "head" else 1):
        raise InvalidHeader(
            f"codecs[{number}]: scope is {codec.scope}, but the {codec.place} have {frames.count} frames for {rows.heads} heads"
        )
    return given.with_family(replace(codec, source=frames))


def located(where: str, header: Header, source: Any) -> Header:
    """Call ``bound``, and prefix its error messages with ``where``."""
    try:
        return bound(header, source)
    except KvpackError as error:
        raise type(error)(f"{where}: {error}") from None
