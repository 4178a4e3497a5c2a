"""The required feature ``basis``: the file holds the rows of a model's basis in place of a cache (spec/basis.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from kvpack.formats.basis import rows_of
from kvpack.formats.errors import InvalidHeader
from kvpack.formats.raw import Raw

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvpack.formats.base import Codec

FEATURE = "basis"
"""The name of the feature in ``required``."""
SUFFIX = ".kvbasis"
DTYPES = ("fp16", "fp32")
"""The dtypes of rows."""


class Side(Protocol):
    """What a basis limits of a side in a header."""

    @property
    def codec(self) -> int: ...

    @property
    def batch(self) -> int: ...

    @property
    def tail(self) -> int: ...

    @property
    def tokens(self) -> int: ...


class HasSides(Protocol):
    """A layer of a header."""

    def sides(self) -> Iterator[tuple[str, Side]]:
        """The sides that are present, by name."""
        ...


def check_basis(layers: Sequence[HasSides], codecs: Sequence[Codec]) -> None:
    """Raise InvalidHeader, which names the place, unless every side holds rows of a basis."""
    for number, layer in enumerate(layers):
        for name, side in layer.sides():
            where, codec = f"layers[{number}].{name}", codecs[side.codec]
            if not isinstance(codec, Raw) or codec.dtype not in DTYPES:
                raise InvalidHeader(f"{where}: the codec of a basis is raw of {' or '.join(DTYPES)}, found {codec.params()!r:.200}")
            if side.batch != 1 or side.tail:
                raise InvalidHeader(f"{where}: batch is {side.batch} and tail {side.tail}, a basis has batch 1 and no tail")
            if side.tokens < rows_of(codec.dim):
                raise InvalidHeader(f"{where}: has {side.tokens} rows, a basis of {codec.dim} channels has at least {rows_of(codec.dim)}")
