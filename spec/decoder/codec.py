"""codecs/: what every codec's page defines."""

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
    """An array of scales, norms or raw values: ``[batch, heads or 1, rows, *sizes]``.

    It has one row for ``tokens`` tokens, or ``per`` "run", or per "entry" in an array of ``[1, 1, entry, *sizes]``.
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
class SideCar:
    """What a side-car adds to a codec: its streams, those of codes before the others."""

    codes: Mapping[str, Columns]
    numbers: Sequence[NumberStream]
    seed: int = 0
    block: int = 0
    bits: int = 0
    basis: tuple[bytes, int, str] | None = None
    """The digest and the layer of the basis that a reader must be given, and which frames of it."""


Digits = Mapping[str, list[list[int]]]
"""Of one token: for each code stream its digits, each a list with one integer a symbol."""
Numbers = Mapping[str, list[float]]
"""Of one token: for each number stream its row."""


@dataclass(frozen=True)
class Codec:
    """A codec with its parameters.

    ``decode`` takes a token of one head to the coded frame; ``tolerance`` gives how far from the exact value every value
    there may be, by the codec's page; ``check`` refuses what the page says beyond digits and numbers that are not finite.
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
    side_cars: Mapping[str, SideCar] = field(default_factory=dict)
    coded: Callable[[Any, str], dict[str, list[list[list[int]]]]] = lambda side, prefix: {}
    """The rows of digits that other streams of a side code together, as those of code streams."""
    basis: tuple[bytes, int, str] | None = None
    """The digest, the layer and the side of the basis that a reader must be given."""
    feature: str = ""
    """The required feature that stands for a parameter."""
    scope: str = ""
    """That of the frames of the basis, for a codec that needs these and not its rows."""
    heads: int = 0
    """The only number of heads of sides; 0 for any."""
    check_sizes: Callable[[Any, str], None] = lambda side, prefix: None
    """Refuses of a side, before anything is decoded, what needs no basis."""

    @property
    def streams(self) -> dict[str, Columns | NumberStream]:
        """All streams in order: those of the codec, then those of its side-cars."""
        made: dict[str, Columns | NumberStream] = {}
        parts: list[Codec | SideCar] = [self, *self.side_cars.values()]
        for part in parts:
            made |= {**part.codes, **{stream.name: stream for stream in part.numbers}}
        return made


HALF_OR_SINGLE = {"fp16": "F16", "fp32": "F32"}
RAW_DTYPES = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}


def take_parameters(entry: Mapping[str, Any], ranges: Mapping[str, Any], optional: Mapping[str, Any] | None = None) -> list[Any]:
    """The parameters in the page's order, each within its range: a range of integers, the values allowed, or a type.

    A seed may be any integer: those of the msgpack profile are from 0 to 2^64 - 1.

    Those of ``optional``, which come last, are None where they are left out.
    """
    rule = f"codecs/{entry['id']}.md, Parameters and ranges"
    optional = {} if optional is None else optional
    expected = ["id", *ranges, *(name for name in optional if name in entry)]
    require(list(entry) == expected, rule, f"the keys are {list(entry)}, not {expected}")
    for name, allowed in [*ranges.items(), *((name, optional[name]) for name in optional if name in entry)]:
        value = entry[name]
        if isinstance(allowed, type):
            require(isinstance(value, allowed), rule, f"{name} is {value!r}")
        else:  # a list, for what may not be a key of a map
            require(value in (allowed if isinstance(allowed, range) else list(allowed)), rule, f"{name} is {value!r}")
    return [*(entry[name] for name in ranges), *(entry.get(name) for name in optional)]


def packings(
    codec_id: str, fields: Mapping[str, Any], symbols: int, streams: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]
) -> dict[str, Columns]:
    """The packing of every code stream, from its bases and alphabets and the F of the header."""
    rule = f"codecs/{codec_id}.md, Parameters and ranges"
    require(list(fields) == list(streams), rule, f"fields names {list(fields)}, not {list(streams)}")
    made = {}
    for name, (bases, alphabets) in streams.items():
        count = fields[name]
        require(isinstance(count, int), rule, f"fields of {name} is {count!r}")
        require(within_limits(bases, count), "packing.md, Bit packing", f"{name} with bases {bases} has {count} fields a column")
        made[name] = Columns(symbols, bases, count, alphabets)
    return made


def one_digit(base: int, alphabet: int | None = None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return (base,), (alphabet or base,)


def ascending_table(rule: str, name: str, data: bytes, length: int, highest: float) -> list[float]:
    require(len(data) == 4 * length, rule, f"{name} has {len(data)} bytes, not {4 * length}")
    values: list[float] = numbers(data, "F32")
    require(all(0 <= value <= highest for value in values), rule, f"a value of {name} is not in [0, {highest}]")
    require(all(a < b for a, b in pairwise(values)), rule, f"{name} does not ascend strictly")
    return values


def odd_part(n: int) -> tuple[int, int]:
    """(k, m) with n = 2^k * m and m odd."""
    k = (n & -n).bit_length() - 1
    return k, n >> k
