"""How a cache gets the basis that it names: from its caller, as an object, a path, or a folder in which the digest is looked for.

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
from kvpack.formats.errors import InvalidHeader, InvalidParameter, KvpackError, KvpackWarning, MissingBasis, OutOfBounds
from kvpack.formats.klt import Klt
from kvpack.formats.transform import Transform

from .bases import Basis, opened

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from kvpack.file.header import Header
    from kvpack.formats.base import Codec


def basis_of(source: Basis | str | os.PathLike[str]) -> Basis:
    """The basis that a caller gives for packing: an object, or the path of one. Raises as ``Basis.load``."""
    given: Any = source
    if isinstance(given, Basis):
        return given
    if os.path.isdir(path_text(given)):
        raise InvalidParameter(f"{path_text(given)}: is a folder; to pack a cache, name one basis in it")
    return Basis.load(given)


def find(source: Basis | str | os.PathLike[str] | Sequence[Basis | str | os.PathLike[str]], digest: bytes) -> Basis:
    """The basis with SHA-256 ``digest`` among ``source``: bases, their paths, and folders of files named ``*.kvbasis``.

    Of files in a folder, the smallest first, a KvpackWarning names those that are no bases or cannot be read. Raises MissingBasis, which
    names the digest, and what reading a file or listing a folder raises.
    """
    for one in source if isinstance(source, list | tuple) else [source]:
        for candidate in _candidates(one, digest):
            if candidate.digest == digest:
                return candidate
    raise MissingBasis(f"the basis {digest.hex()} is needed, and none of those given has this SHA-256")


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
            with opened(file) as found:
                basis = Basis(found.whole(), file) if found.digest() == digest else None
        except KvpackError as error:
            warnings.warn(f"{file} is skipped, in which the basis {digest.hex()} was looked for: {error}", KvpackWarning, stacklevel=2)
            continue
        if basis is not None:
            yield basis


def _files(folder: str) -> list[str]:
    """The paths in a folder that are named as bases are, the smallest file first. Raises MissingFile."""
    try:
        with os.scandir(folder) as entries:
            found = [(_size(entry), entry.path) for entry in entries if entry.name.endswith(SUFFIX)]
    except OSError as error:
        raise could_not_open(folder, error, "a folder of bases") from None
    return [path for _, path in sorted(found)]


def _size(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat().st_size
    except OSError:
        # Opening it tells why.
        return 0


def bound(header: Header, source: Any = None) -> Header:
    """``header`` with codecs of sides that have the bases they need, from ``source`` as ``find`` takes it.

    A codec whose rows are in the file needs none; it has its basis if ``source`` holds it, for tokens that are added where no rows are.
    Raises MissingBasis, and InvalidHeader, naming the place, where a side does not fit the basis that it names.
    """
    used = {side.codec for layer in header.layers for _, side in layer.sides()}
    of_sides = [codec for number, codec in enumerate(header.codecs) if number in used]
    unbound = [codec.family for codec in of_sides if isinstance(codec.family, Klt | Transform) and codec.family.source is None]
    needed = {codec.basis for codec in unbound if _needs_basis(codec)}
    if not unbound or (source is None and not needed):
        return header
    if source is None:
        raise MissingBasis(f"the basis {min(needed).hex()} is needed: give basis=, in commands --basis, its path or a folder that holds it")
    bases = {digest: find(source, digest) for digest in needed}
    for digest in {codec.basis for codec in unbound} - needed:
        with contextlib.suppress(KvpackError):
            bases[digest] = find(source, digest)
    codecs = tuple(_bound(number, codec, bases) if number in used else codec for number, codec in enumerate(header.codecs))
    for number, layer in enumerate(header.layers):
        for name, side in layer.sides():
            codec = codecs[side.codec].family
            if isinstance(codec, Klt | Transform) and _needs_basis(codec) and codec.source is not None:
                heads = codec.source.heads if isinstance(codec, Klt) else codec.source.heads(codec.dim)
                if heads != side.heads:
                    raise InvalidHeader(f"layers[{number}].{name}.heads is {side.heads}, the {codec.place} have {heads}")
    return replace(header, codecs=codecs)


def _needs_basis(codec: Klt | Transform) -> bool:
    return isinstance(codec, Transform) or codec.rows == "basis"


def _bound(number: int, given: Codec, bases: Mapping[bytes, Basis]) -> Codec:
    codec = given.family
    if not isinstance(codec, Klt | Transform) or codec.source is not None or codec.basis not in bases:
        return given
    basis = bases[codec.basis]
    try:
        rows = basis.rows(codec.layer, codec.side)
        frames = basis.frames(codec.layer, codec.side) if isinstance(codec, Transform) else None
    except OutOfBounds as error:
        if not _needs_basis(codec):
            return given
        raise InvalidHeader(f"codecs[{number}]: {error}") from None
    if rows.dim != codec.dim:
        if not _needs_basis(codec):
            return given
        raise InvalidHeader(f"codecs[{number}]: dim is {codec.dim}, the {codec.place} have {rows.dim} channels")
    if not isinstance(codec, Transform):
        return given.with_family(replace(codec, source=rows))
    assert frames is not None
    if frames.count != (rows.heads if codec.scope == "head" else 1):
        raise InvalidHeader(
            f"codecs[{number}]: scope is {codec.scope}, the {codec.place} have {frames.count} frames for {rows.heads} heads"
        )
    return given.with_family(replace(codec, source=frames))


def located(where: str, header: Header, source: Any) -> Header:
    """As ``bound``, with ``where`` in front of messages."""
    try:
        return bound(header, source)
    except KvpackError as error:
        raise type(error)(f"{where}: {error}") from None
