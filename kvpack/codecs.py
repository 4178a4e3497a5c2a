"""Codecs as objects, from which a recipe can be built without its text::

    Recipe(k=Octahedral(b=3), v=Group(b=3, group=32), window=32)

Options have the same names as in a recipe's text: ``Group(b=3, g=32)`` is ``group:b=3,g=32``. Their ranges, and the options of sidecars,
are documented in spec/codecs/ and spec/side-cars.md; ``Recipe`` rejects other values.
"""

from __future__ import annotations

import re
from typing import ClassVar

from .formats.arguments import describe
from .formats.errors import InvalidParameter, InvalidType

_VALUE = re.compile(r"[^\s:;,=]+")


class CodecChoice:
    """A codec with its options. ``str`` returns it as written in a recipe.

    An option is a string, a number, or several integers. Raises InvalidParameter for values that a recipe cannot contain.
    """

    id: ClassVar[str]
    long_names: ClassVar[dict[str, str]] = {}
    """Alternative names of options, mapped to the names used in recipes."""

    def __init__(self, **options: str | float | tuple[int, ...]) -> None:
        self.options: dict[str, str] = {}
        for name, value in options.items():
            word = self.long_names.get(name, name)
            if word in self.options:
                raise InvalidParameter(f"{type(self).__name__} has the option {word} twice: pass it once")
            self.options[word] = _option_text(f"{type(self).__name__}({name}=...)", value)

    def __str__(self) -> str:
        words = ",".join(f"{name}={text}" for name, text in self.options.items())
        return f"{self.id}:{words}" if words else self.id

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={text!r}' for name, text in self.options.items())})"

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))


def _option_text(name: str, value: object) -> str:
    if isinstance(value, tuple | list) and all(type(item) is int for item in value):
        return ".".join(map(str, value))
    if isinstance(value, float):
        return f"{value:.6f}".rstrip("0").rstrip(".")
    if type(value) is int or (isinstance(value, str) and _VALUE.fullmatch(value)):
        return str(value)
    raise InvalidType(
        f"{name} is {describe(value)}, expected a number, a tuple of integers, or a string without spaces and without : ; , ="
    )


class Raw(CodecChoice):
    """Values stored unchanged, or rounded to another dtype."""

    id = "raw"


class Lossless(CodecChoice):
    """Values stored bit for bit, with entropy-coded exponents."""

    id = "lossless"


class Group(CodecChoice):
    """Integer codes with a scale and an offset for each group of values (KIVI, OScaR, QuaRot)."""

    id = "group"
    long_names: ClassVar[dict[str, str]] = {"bits": "b", "group": "g"}


class Minifloat(CodecChoice):
    """Floating-point numbers of 4 or 8 bits with shared scales (fp8, mxfp8, mxfp4, nvfp4)."""

    id = "minifloat"


class Scalar(CodecChoice):
    """Rotated vectors whose coordinates are quantized with a lookup table (TurboQuant)."""

    id = "scalar"
    long_names: ClassVar[dict[str, str]] = {"bits": "b"}


class Octahedral(CodecChoice):
    """Rotated vectors whose triplets are quantized as directions on an octahedron (OCTOPUS)."""

    id = "octahedral"
    long_names: ClassVar[dict[str, str]] = {"bits": "b"}


class Angle(CodecChoice):
    """Rotated vectors whose pairs are quantized as an angle and a norm (TurboAngle)."""

    id = "angle"
    long_names: ClassVar[dict[str, str]] = {"bins": "n"}


class Polar(CodecChoice):
    """Rotated vectors, quantized as a tree of angles (PolarQuant)."""

    id = "polar"
    long_names: ClassVar[dict[str, str]] = {"bits": "b"}


class Quaternion(CodecChoice):
    """Quadruples quantized as a quaternion from a codebook and a radius (HQMQ)."""

    id = "quaternion"
    long_names: ClassVar[dict[str, str]] = {"secondary": "s", "radius_bits": "r"}


class Klt(CodecChoice):
    """Projections onto a calibrated basis, with a bit width for each column. The recipe needs a basis."""

    id = "klt"


class Transform(CodecChoice):
    """Projections onto calibrated frames, quantized with a step size and entropy-coded. The recipe needs a basis."""

    id = "transform"


class Trellis(CodecChoice):
    """Rotated vectors, quantized as paths through a trellis (QTIP)."""

    id = "trellis"
    long_names: ClassVar[dict[str, str]] = {"bits": "b"}
