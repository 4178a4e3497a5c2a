"""A chunk of a prefix as an entry's bytes, and back: a kvpack file whose header says which chunk it is (spec/store.md, Entries)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpack.formats.errors import InvalidHeader

from .. import container
from .keys import KEY_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ..cache import Cache
    from .backend import Data

FEATURE = "prefix-store"
"""The ignorable feature of a header that holds a chunk's key, its parent's key, and its token ids."""


def to_pieces(cache: Cache, key: bytes, parent: bytes, ids: bytes) -> list[memoryview]:
    """The entry of one chunk, its header naming ``key``, ``parent`` and the token ``ids``. Raises LimitExceeded."""
    from .. import files

    contents, arrays = files.stored(cache, {FEATURE: key + parent + ids})
    return container.pieces(contents, arrays)


def from_data(data: Data, key: bytes, *, start: int, model: Mapping[str, str], where: str, check_values: bool) -> Cache:
    """The chunk ``key`` that ``data`` holds, as views of it, its digests checked, and with ``check_values`` the rules of its codecs.

    Raises what ``container.open_bytes`` raises, and InvalidHeader when it is another chunk.
    """
    from .. import files

    file = container.open_bytes(data, where=where)
    check_entry(file, key, start, model)
    return files.read(file, check_values=check_values)


def check_entry(file: container.File, key: bytes, start: int, model: Mapping[str, str]) -> None:
    """Raise InvalidHeader unless the file's header names ``key``, the first token ``start`` and the ``model``."""
    named = file.header.ignorable.get(FEATURE, b"")[:KEY_BYTES]
    for what, found, expected in (
        ("key", named.hex(), key.hex()),
        ("start", file.header.start, start),
        ("model", dict(file.header.model), dict(model)),
    ):
        if found != expected:
            raise InvalidHeader(f"{file.where}: the entry's {what} is {found!r}, expected {expected!r}")


def token_ids(header_bytes: bytes) -> Sequence[int]:
    """The token ids that an entry's feature holds."""
    ids = header_bytes[2 * KEY_BYTES :]
    return memoryview(ids).cast("I")
