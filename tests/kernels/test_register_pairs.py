"""Inline PTX that processes two words per register treats each half by its own column, however the compiler pairs columns."""

from __future__ import annotations

import random
import re
from typing import TYPE_CHECKING

import pytest

from kvpack.kernels.bitpack import bitfields, replicated_columns

if TYPE_CHECKING:
    from collections.abc import Callable

WORD = 0xFFFFFFFF


def permute(a: int, b: int, selector: int) -> int:
    """Emulate ``prmt.b32``, which selects bytes of two registers, or repeats the sign of a byte in all of its bits."""
    both, result = a | b << 32, 0
    for place in range(4):
        nibble = selector >> 4 * place & 15
        byte = both >> 8 * (nibble & 7) & 0xFF
        result |= (0xFF * (byte >> 7) if nibble & 8 else byte) << 8 * place
    return result


def choose(a: int, b: int, c: int, table: int) -> int:
    """Emulate ``lop3.b32``, which computes any function of three bits."""
    return sum((table >> ((a >> bit & 1) << 2 | (b >> bit & 1) << 1 | c >> bit & 1) & 1) << bit for bit in range(32))


OPERATIONS: dict[str, Callable[..., int]] = {
    "and.b32": lambda a, b: a & b,
    "add.u32": lambda a, b: a + b,
    "sub.u32": lambda a, b: a - b,
    "shr.u32": lambda a, b: a >> min(b, 32),
    "shl.b32": lambda a, b: a << min(b, 32),
    "mul.lo.u32": lambda a, b: a * b,
    "mad.lo.u32": lambda a, b, c: a * b + c,
    "shf.l.wrap.b32": lambda a, b, c: (b << 32 | a) << (c & 31) >> 32,
    "prmt.b32": permute,
    "lop3.b32": choose,
}


def run(ptx: str, *inputs: int) -> tuple[int, int]:
    """Execute the instructions ``ptx``, whose inputs are ``$1`` and so on, and return both halves of ``$0``."""
    registers = {f"${number}": value for number, value in enumerate(inputs, 1)}
    for line in re.sub(r"[{}]|\.reg [^;]*;", "", ptx).split(";"):
        if not line.strip():
            continue
        name, target, *operands = re.split(r"[\s,]+", line.strip())
        registers[target] = OPERATIONS[name](*(registers[x] if x in registers else int(x, 0) for x in operands)) & WORD
    return registers["$0"] & 0xFFFF, registers["$0"] >> 16


def pairs(count: int, below: int) -> list[tuple[int, int]]:
    generator = random.Random(0)
    return [(generator.randrange(below), generator.randrange(below)) for _ in range(count)]


def joined(halves: tuple[int, int]) -> int:
    return halves[0] | halves[1] << 16


def test_each_half_selects_its_own_byte() -> None:
    for words, sides in zip(pairs(50, 1 << 16), pairs(50, 2), strict=True):
        shifts = sides[0] * 8, sides[1] * 8
        assert run(bitfields.BYTES_PTX.value, joined(words), joined(shifts)) == tuple(
            word >> shift & 0xFF for word, shift in zip(words, shifts, strict=True)
        )


@pytest.mark.parametrize("field", [1, 2, 7])
def test_each_half_is_selected_by_its_own_field(field: int) -> None:
    for values, others, fields in zip(pairs(50, 1 << 16), pairs(50, 1 << 16)[::-1], pairs(50, 8), strict=True):
        expected = tuple(other if own >= field else value for value, other, own in zip(values, others, fields, strict=True))
        assert run(bitfields.select_ptx.fn(field), joined(values), joined(others), joined(fields)) == expected


@pytest.mark.parametrize(("position", "stride"), [(0, 4), (2, 3), (8, 2)])
def test_each_half_is_shifted_to_its_own_field(position: int, stride: int) -> None:
    mask = (1 << stride) - 1
    for words, fields in zip(pairs(50, 1 << 16), pairs(50, 3), strict=True):
        found = run(bitfields.shift_ptx.fn(position, stride), joined(words), joined(fields))
        for word, field, half in zip(words, fields, found, strict=True):
            assert half & mask == word >> (position + stride * field) & mask


@pytest.mark.parametrize(("at", "last", "bits"), [(12, 8, 4), (10, 9, 3), (0, 12, 4), (4, 14, 2)])
def test_each_half_moves_its_own_field(at: int, last: int, bits: int) -> None:
    mask = (1 << bits) - 1
    for words, places in zip(pairs(50, 1 << 16), pairs(50, last // bits + 1), strict=True):
        shifts = places[0] * bits, places[1] * bits
        found = run(replicated_columns.move_ptx.fn(at, last), joined(words), joined(shifts))
        for word, shift, half in zip(words, shifts, found, strict=True):
            assert half >> at & mask == word >> shift & mask
