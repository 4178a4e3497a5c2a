"""Tests of minifloat elements as tiles: every code and scale is exact, in the interpreter's functions and in inline PTX."""

from __future__ import annotations

import itertools
import math
import re
import struct
from dataclasses import replace

import pytest
import torch

import kvpack
from kvpack import Layer, Side
from kvpack.cache.packed_runs import PackedRun, PackedRuns
from kvpack.coding import triton_version
from kvpack.formats.minifloat import ELEMENTS
from support.interpreter import DEVICE, needs_loaded_bounds
from support.random_sides import check_attention, codecs, random_side


def half(bits: int) -> float:
    return float(struct.unpack("<e", struct.pack("<H", bits))[0])


def bits_of(value: float) -> int:
    return int(struct.unpack("<H", struct.pack("<e", value))[0])


def permuted(first: int, second: int, select: int) -> int:
    """Emulate PTX's ``prmt`` in its default mode."""
    pool = first.to_bytes(4, "little") + second.to_bytes(4, "little")
    found = bytearray()
    for number in range(4):
        chosen = select >> 4 * number & 15
        byte = pool[chosen & 7]
        found.append((255 if byte & 128 else 0) if chosen & 8 else byte)
    return int.from_bytes(found, "little")


def halves(word: int) -> tuple[float, float]:
    return half(word & 0xFFFF), half(word >> 16)


def executed(ptx: str, **given_registers: int) -> dict[str, int]:
    """Execute PTX instructions of the kinds below, and return the registers. ``r1`` is the operand ``$1``."""
    registers = {name.replace("r", "$"): word for name, word in given_registers.items()}

    def value(name: str) -> int:
        return registers[name] if name in registers else int(name, 0)

    for text in re.sub(r"^\{|\}$", "", ptx.strip()).split(";"):
        instruction, *operands = re.split(r"[\s,]+", text.strip())
        if instruction in ("", ".reg"):
            continue
        if operands[0].startswith("{"):
            low, high = (name.strip("{}") for name in operands[:2])
            registers[low], registers[high] = value(operands[2]) & 0xFFFF, value(operands[2]) >> 16
            continue
        target, *given = operands[0], *map(value, operands[1:])
        registers[target] = {
            "mov.b32": lambda a: a,
            "and.b32": lambda a, b: a & b,
            "shl.b32": lambda a, b: a << b & 0xFFFFFFFF,
            "shr.b32": lambda a, b: a >> b,
            "sub.u32": lambda a, b: a - b & 0xFFFFFFFF,
            "mul.lo.u32": lambda a, b: a * b & 0xFFFFFFFF,
            "mad.lo.u32": lambda a, b, c: a * b + c & 0xFFFFFFFF,
            "max.u16x2": lambda a, b: max(a & 0xFFFF, b & 0xFFFF) | max(a >> 16, b >> 16) << 16,
            "lop3.b32": lambda a, b, c, table: {0xEA: a & b | c, 0xA8: (a | b) & c}[table],
            "prmt.b32": permuted,
            "mul.rn.f16x2": lambda a, b: sum(bits_of(x * y) << 16 * at for at, (x, y) in enumerate(zip(halves(a), halves(b), strict=True))),
            "cvt.rn.f16x2.e4m3x2": lambda a: bits_of(ELEMENTS["e4m3"].value(a & 255)) | bits_of(ELEMENTS["e4m3"].value(a >> 8)) << 16,
        }[instruction](*given)
    return registers


@pytest.mark.skipif(not triton_version.is_supported(), reason="the kernels were not tested with this Triton version")
@pytest.mark.parametrize("converts", [False, True], ids=["by integers", "by conversions"])
@pytest.mark.parametrize("element", ELEMENTS)
def test_inline_assembly_is_exact(element: str, converts: bool) -> None:
    """Every element is at every position of a word, surrounded by bits of other elements."""
    from kvpack.kernels.bitpack import minifloats
    from kvpack.kernels.triton_internals import python_function

    form = ELEMENTS[element]
    power = minifloats.E2M1_EXPONENT.value if element == "e2m1" else 0
    for position in range(0, 16, form.bits):
        ptx = python_function(minifloats._elements_ptx)(element, position, converts)
        for code in range(1 << form.bits):
            if code & (1 << form.bits - 1) - 1 >= form.finite:
                continue
            expected = form.value(code) / 2.0**power
            for others in (0x0000, 0xFFFF, 0x5A5A, 0x1234, 0x8421):
                # What is no NaN: conversions here are of elements that readers accept.
                word = others & 0xB6B6 & ~((1 << form.bits) - 1 << position) | code << position
                for both in (word | 0x3456 << 16, 0x3456 | word << 16):
                    found = halves(executed(ptx, r1=both)["$0"])[0 if both & 0xFFFF == word else 1]
                    assert found == expected, (position, hex(both))
                    # The sign of a zero of e2m1 tells no score and no sum.
                    assert math.copysign(1, found) == math.copysign(1, expected) or (element, found) == ("e2m1", 0), (position, hex(both))


@pytest.mark.skipif(not triton_version.is_supported(), reason="the kernels were not tested with this Triton version")
@pytest.mark.parametrize("lowered", [0, 14])
def test_powers_of_four_scales_are_exact(lowered: int) -> None:
    """Scales are divided by the largest one, which may be at any position.

    Others are equal to it, barely representable, too small, and extreme.
    """
    from kvpack.kernels.bitpack import minifloats
    from kvpack.kernels.triton_internals import python_function

    ptx = python_function(minifloats._four_powers_ptx)(lowered)
    most = 14 + lowered
    for largest in (0, 1, 13, most, most + 1, 127, 128, 254):
        lower = [max(0, largest - below) for below in (0, 1, lowered, most, most + 1, 255)]
        for number, scales in enumerate(itertools.product(lower, repeat=3)):
            words = [(*scales[: number % 4], largest, *scales[number % 4 :]), (254, scales[0], 0, scales[1])]
            for one, other in (words, reversed(words)):
                found = executed(ptx, r4=int.from_bytes(one, "little"), r5=int.from_bytes(other, "little"))
                for at in range(4):
                    expected = [
                        2.0 ** (own[at] - max(own) + lowered) if own[at] - max(own) + lowered >= -14 else 0.0 for own in (one, other)
                    ]
                    assert halves(found[f"${at}"]) == tuple(expected), (one, other, at)


def every_product(dim: int, run_scale: float) -> Side:
    """Return an nvfp4 side whose blocks contain every code with every scale."""
    codec, _ = codecs("minifloat:element=e2m1,scales=e4m3", "raw:dtype=bf16", (dim, dim))
    token = torch.arange(127)[:, None]
    codes = (torch.arange(dim) + token) % 16
    scales = (31 * torch.arange(dim // 16) + token) % 127
    streams = {**codec.pack("codes", codes[None, None]), "block_scales": scales.to(torch.uint8)[None, None]}
    page = PackedRun(codec, 127, {**streams, "global_scale": torch.full((1, 1, 1), run_scale)})
    return Side(codec, PackedRuns.of([page]), torch.zeros(1, 1, 0, dim, dtype=torch.bfloat16))


@pytest.mark.kernels
@needs_loaded_bounds
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize(("dtype", "run_scale"), [(torch.float16, 1.0), (torch.bfloat16, -(2.0**115))], ids=str)
def test_every_product_of_nvfp4_is_exact(dim: int, dtype: torch.dtype, run_scale: float) -> None:
    """Tiles have one, two and four blocks, and one scale cannot be combined with a power of two."""
    from kvpack.kernels.attend import scratch

    side = every_product(dim, run_scale)
    there = side.to(DEVICE)
    frame = scratch.frame_of(there)
    assert frame.codec is not None
    block = scratch.DecodedBlock(there, frame, 0, side.tokens, dtype)
    memory = torch.empty(block.elements, dtype=dtype, device=DEVICE)
    block.decode(there, None, memory, 0)
    found = block.tokens(memory, 0, 0, side.tokens).cpu().float()
    expected = side.runs[0].frame(0, side.tokens)[..., scratch._channels(frame.codec)]
    assert torch.equal(found, expected)


@pytest.mark.kernels
@needs_loaded_bounds
@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("words", ["scales=e4m3", "per=token,scales=fp32", "qjl=fp16", "scales=e4m3,qjl=fp16"])
def test_zeros_with_the_largest_scale_stay_zeros(words: str) -> None:
    """Powers of two that elements cannot represent are moved to the scale, which must not become infinite."""
    codec, _ = codecs(f"minifloat:element=e2m1,{words}", "raw:dtype=bf16", (64, 64))
    side = random_side(codec, 1, (20,), 0, 1)
    (page,) = side.runs
    given = {name: torch.zeros_like(page.streams[name]) for name in page.streams if name.startswith(("codes", "qjl_norm"))}
    name = "global_scale" if "e4m3" in words else "scale"
    given[name] = torch.full_like(page.streams[name], 3e38)
    zeros = replace(side, runs=PackedRuns.of([replace(page, streams={**page.streams, **given})]))
    # Scores of zero: the values' mean.
    check_attention(Layer(zeros, random_side(codec, 1, (20,), 0, 2)), 1)
    attended = kvpack.attend(torch.ones(1, 1, 1, 64, device=DEVICE), Layer(random_side(codec, 1, (20,), 0, 2), zeros).to(DEVICE))
    assert torch.equal(attended.cpu(), torch.zeros(1, 1, 1, 64))


@pytest.mark.kernels
@needs_loaded_bounds
@pytest.mark.parametrize("run_scale", [2.0**100, -(2.0**-100), 0.0])
def test_run_scales_of_any_size(run_scale: float) -> None:
    """One of the two runs has far larger values than the other."""
    codec, raw = codecs("minifloat:element=e2m1,scales=e4m3", "raw:dtype=bf16", (64, 64))
    side = random_side(codec, 1, (40, 33), 0, 1)
    last = side.runs[-1]
    scaled = replace(last, streams={**last.streams, "global_scale": last.streams["global_scale"] * run_scale})
    check_attention(Layer(random_side(raw, 1, (40, 33), 0, 2), replace(side, runs=PackedRuns.of([*side.runs[:-1], scaled]))), 1)
