"""Definitions that all codecs share (spec/codecs.md and the pages of spec/codecs/)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from .conventions import numbers
from .packing import Columns, within_limits
from .refusal import require


@dataclass(frozen=True)
class NumberStream:
    """A stream of scales, norms or raw values: ``[batch, heads or 1, rows, *sizes]``.

    It has one row per ``tokens`` tokens, or, if ``per`` is "run", one row per run. If ``per`` is "entry", its shape is ``[1, 1, entry,
    *sizes]``.
    """

    name: str
    dtype: str
    sizes: tuple[int, ...]
    tokens: int = 1
    per_head: bool = True
    any_bits: bool = False
    per: str = "tokens"
    logarithms: bool = False


@dataclass(frozen=True)
class Sidecar:
    """A sidecar with its parameters and its streams. Code streams come first."""

    codes: Mapping[str, Columns]
    numbers: Sequence[NumberStream]
    seed: int = 0
    block: int = 0
    bits: int = 0
    basis: tuple[bytes, int, str] | None = None
    """Digest and layer of the basis that a reader needs, and the kind of its frames."""


Digits = Mapping[str, list[list[int]]]
"""Digits of one token: for each code stream, a list per digit with one integer per symbol."""
Numbers = Mapping[str, list[float]]
"""Numbers of one token: for each number stream, its row."""


@dataclass(frozen=True)
class Codec:
    """A codec with its parameters.

    ``decode`` decodes one head's token to the coded frame. ``tolerance`` returns, for each value, the largest deviation that the codec's
    page allows. ``check`` enforces rules of the page beyond the ranges of digits and the finiteness of numbers.
    """

    id: str
    dim: int
    token_group: int
    codes: Mapping[str, Columns]
    numbers: Sequence[NumberStream]
    decode: Callable[[Digits, Numbers], list[float]]
    tolerance: Callable[[Digits, Numbers], list[float]]
    check: Callable[[str, Digits, Numbers], None] = lambda where, digits, numbers: None
    rotation_kind: str = "none"
    rotation_seed: int = 0
    sidecars: Mapping[str, Sidecar] = field(default_factory=dict)
    derive_digits: Callable[[Any, str], dict[str, list[list[list[int]]]]] = lambda side, prefix: {}
    """Function that derives additional rows of digits from other streams of a layer's keys or values, in the form of code streams."""
    basis: tuple[bytes, int, str] | None = None
    """Digest, layer and side of the basis that a reader needs."""
    feature: str = ""
    """Required feature that corresponds to a parameter, or an empty string."""
    scope: str = ""
    """Scope of the basis's frames, if the codec needs frames instead of rows."""
    heads: int = 0
    """The only number of heads that the codec accepts, or 0 if it accepts any number."""
    check_sizes: Callable[[Any, str], None] = lambda side, prefix: None
    """Function that checks the rules that need neither the basis nor decoded values."""

    @property
    def streams(self) -> dict[str, Columns | NumberStream]:
        """All streams in order: those of the codec, followed by those of its sidecars."""
        result: dict[str, Columns | NumberStream] = {}
        parts: list[Codec | Sidecar] = [self, *self.sidecars.values()]
        for part in parts:
            result |= {**part.codes, **{stream.name: stream for stream in part.numbers}}
        return result


FLOAT_DTYPES = {"fp16": "F16", "fp32": "F32"}
RAW_DTYPES = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}


def take_parameters(entry: Mapping[str, Any], ranges: Mapping[str, Any], optional: Mapping[str, Any] | None = None) -> list[Any]:
    """Return the parameters in the order of the page. Each is checked against its range: integers, allowed values, or a type.

    A seed may be any integer, because integers in the msgpack profile are from 0 to 2^64 - 1. Parameters in ``optional`` come last, and are
    None if they are absent.
    """
    rule = f"codecs/{entry['id']}.md, Parameters and ranges"
    optional = {} if optional is None else optional
    expected = ["id", *ranges, *(name for name in optional if name in entry)]
    require(list(entry) == expected, rule, f"the map of the codec has the keys {list(entry)}, expected {expected}")
    for name, allowed in [*ranges.items(), *((name, optional[name]) for name in optional if name in entry)]:
        value = entry[name]
        if isinstance(allowed, type):
            require(isinstance(value, allowed), rule, f"{name} is {value!r}, expected a value of type {allowed.__name__}")
        else:  # a list, for what may not be a key of a map
            known = allowed if isinstance(allowed, range) else list(allowed)
            require(value in known, rule, f"{name} is {value!r}, expected one of {known}")
    return [*(entry[name] for name in ranges), *(entry.get(name) for name in optional)]


def make_packings(
    codec_id: str, fields: Mapping[str, Any], symbols: int, streams: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]
) -> dict[str, Columns]:
    """Return the packing of every code stream, given its bases and alphabets and the number of fields in the header."""
    rule = f"codecs/{codec_id}.md, Parameters and ranges"
    require(list(fields) == list(streams), rule, f"fields names the streams {list(fields)}, expected {list(streams)}")
    result = {}
    for name, (bases, alphabets) in streams.items():
        count = fields[name]
        require(isinstance(count, int), rule, f"fields[{name!r}] is {count!r}, expected an integer")
        require(
            within_limits(bases, count),
            "packing.md, Bit packing",
            f"{name} has {count} fields per column, which exceeds the limits for the bases {bases}",
        )
        result[name] = Columns(symbols, bases, count, alphabets)
    return result


def single_digit(base: int, alphabet: int | None = None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the bases and alphabets of a code stream with one digit."""
    return (base,), (alphabet or base,)


def read_ascending_table(rule: str, name: str, data: bytes, length: int, highest: float) -> list[float]:
    """Return the binary32 numbers of a table, after checking that they ascend strictly from at least 0 to at most ``highest``."""
    require(len(data) == 4 * length, rule, f"{name} has {len(data)} bytes, expected {4 * length}")
    values: list[float] = numbers(data, "F32")
    require(all(0 <= value <= highest for value in values), rule, f"{name} contains a value that is not between 0 and {highest}")
    require(all(a < b for a, b in pairwise(values)), rule, f"the values of {name} do not ascend strictly")
    return values


def odd_part(n: int) -> tuple[int, int]:
    """Return (k, m) with n = 2^k * m and odd m."""
    k = (n & -n).bit_length() - 1
    return k, n >> k
