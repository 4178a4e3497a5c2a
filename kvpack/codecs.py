"""The codecs as objects, from which a recipe can be built without its text::

    Recipe(k=Octahedral(b=3), v=Group(b=3, group=32), window=32)

The options are those of the recipe's text, by name: ``Group(b=3, g=32)`` is ``group:b=3,g=32``. Their ranges, and the options of side-cars,
are on the pages of spec/codecs/ and spec/side-cars.md; the recipe refuses others.
"""

from __future__ import annotations

import re
from typing import ClassVar

from .formats.arguments import describe
from .formats.errors import InvalidParameter, InvalidType

_VALUE = re.compile(r"[^\s:;,=]+")


class CodecChoice:
    """A codec and its options, which ``str`` formats as in a recipe. Raises InvalidParameter for values that no recipe can hold.

    An option is text, an integer, a number, or several integers.
    """

    id: ClassVar[str]
    long_names: ClassVar[dict[str, str]] = {}
    """Names of options that may be written out, by their names in a recipe."""

    def __init__(self, **options: str | float | tuple[int, ...]) -> None:
        self.options: dict[str, str] = {}
        for name, value in options.items():
            word = self.long_names.get(name, name)
            if word in self.options:
                raise InvalidParameter(f"{type(self).__name__} has the option {word} twice")
            self.options[word] = _text(f"{type(self).__name__}({name}=...)", value)

    def __str__(self) -> str:
        words = ",".join(f"{name}={text}" for name, text in self.options.items())
        return f"{self.id}:{words}" if words else self.id

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={text!r}' for name, text in self.options.items())})"

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))


def _text(what: str, value: object) -> str:
    if isinstance(value, tuple | list) and all(type(item) is int for item in value):
        return ".".join(map(str, value))
    if isinstance(value, float):
        return f"{value:.6f}".rstrip("0").rstrip(".")
    if type(value) is int or (isinstance(value, str) and _VALUE.fullmatch(value)):
        return str(value)
    raise InvalidType(f"{what} is {describe(value)}, expected a word, a number or a tuple of integers")


class Raw(CodecChoice):
    """The values themselves."""

    id = "raw"


class Lossless(CodecChoice):
    """The values themselves, entropy-coded."""

    id = "lossless"


class Group(CodecChoice):
    """Affine codes with a scale and a center per group."""

    id = "group"
    long_names: ClassVar[dict[str, str]] = {"bits": "b", "group": "g"}


class Minifloat(CodecChoice):
    """Floats of 4 or 8 bits."""

    id = "minifloat"


class Scalar(CodecChoice):
    """Rotated coordinates by a table (TurboQuant)."""

    id = "scalar"
    long_names: ClassVar[dict[str, str]] = {"bits": "b"}


class Octahedral(CodecChoice):
    """Rotated triplets as directions on an octahedron (OCTOPUS)."""

    id = "octahedral"
    long_names: ClassVar[dict[str, str]] = {"bits": "b"}


class Angle(CodecChoice):
    """Rotated pairs as angles and norms (TurboAngle)."""

    id = "angle"
    long_names: ClassVar[dict[str, str]] = {"bins": "n"}


class Polar(CodecChoice):
    """A tree of angles (PolarQuant)."""

    id = "polar"
    long_names: ClassVar[dict[str, str]] = {"bits": "b"}


class Quaternion(CodecChoice):
    """Quadruples by a codebook of quaternions and a radius (HQMQ)."""

    id = "quaternion"
    long_names: ClassVar[dict[str, str]] = {"secondary": "s", "radius_bits": "r"}


class Klt(CodecChoice):
    """Columns of a calibrated basis; the recipe needs the basis."""

    id = "klt"


class Transform(CodecChoice):
    """Entropy-coded steps of the columns of a calibrated frame; the recipe needs the basis."""

    id = "transform"


class Trellis(CodecChoice):
    """Rotated coordinates as paths through a trellis (QTIP)."""

    id = "trellis"
    long_names: ClassVar[dict[str, str]] = {"bits": "b"}
