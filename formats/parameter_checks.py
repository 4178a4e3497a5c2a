"""Checks of the parameters of codecs."""

from __future__ import annotations

import struct
from itertools import pairwise

from .errors import InvalidParameter

Fields = tuple[tuple[str, int], ...]
"""Number of fields per column (F in the specification) for each code stream, in stream order."""


def check_range(codec: str, name: str, value: int, low: int, high: int) -> None:
    """Check that an integer parameter of a codec is within its range.

    Args:
        codec: Codec id, for the message.
        name: Parameter name, for the message.
        value: The parameter.
        low: Smallest allowed value.
        high: Largest allowed value.

    Raises:
        InvalidParameter: The value is out of range.

    >>> kvpack.formats.parameter_checks.check_range("group", "bits", 9, 1, 8)
    Traceback (most recent call last):
    ...
    kvpack.errors.InvalidParameter: codec group: bits is 9, expected 1 to 8
    """
    if not low <= value <= high:
        raise InvalidParameter(f"codec {codec}: {name} is {value}, expected {low} to {high}")


def check_choice(codec: str, name: str, value: str | int, choices: tuple[str, ...] | tuple[int, ...]) -> None:
    """Check that a parameter of a codec has one of the known values.

    Args:
        codec: Codec id, for the message.
        name: Parameter name, for the message.
        value: The parameter.
        choices: The allowed values.

    Raises:
        InvalidParameter: The value is not one of ``choices``.

    >>> kvpack.formats.parameter_checks.check_choice("group", "axis", "head", ("token", "channel"))
    Traceback (most recent call last):
    ...
    kvpack.errors.InvalidParameter: codec group: axis is 'head', expected one of token, channel
    """
    if value not in choices:
        raise InvalidParameter(f"codec {codec}: {name} is {value!r}, expected one of {', '.join(map(str, choices))}")


def check_fields(codec: str, fields: Fields, expected: tuple[str, ...]) -> None:
    """Check that the parameter ``fields`` of a codec names its code streams in order.

    Args:
        codec: Codec id, for the message.
        fields: Pairs of a stream name and its number of fields per column.
        expected: The stream names.

    Raises:
        InvalidParameter: A name is missing, unknown or out of order.

    >>> kvpack.formats.parameter_checks.check_fields("group", (("code", 8),), ("codes",))
    Traceback (most recent call last):
    ...
    kvpack.errors.InvalidParameter: codec group: fields must name the streams codes, but names code
    """
    names = tuple(name for name, _ in fields)
    if names != expected:
        raise InvalidParameter(f"codec {codec}: fields must name the streams {', '.join(expected)}, but names {', '.join(names) or 'none'}")


def check_magnitudes(codec: str, name: str, table: bytes, length: int) -> None:
    """Raise InvalidParameter unless the parameter ``table`` contains ``length`` strictly ascending float32 values in [0, 1]."""
    if len(table) != 4 * length:
        raise InvalidParameter(f"codec {codec}: {name} has {len(table)} bytes, expected {4 * length} for {length} float32 values")
    values = struct.unpack(f"<{length}f", table)
    if not all(0 <= value <= 1 for value in values) or any(low >= high for low, high in pairwise(values)):
        raise InvalidParameter(f"codec {codec}: the values of {name} must be in [0, 1] and strictly ascending, but are {values}")
