"""Inline PTX, executed by an emulator, computes the same as the plain Triton beside it, in whole kernels and over all words."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from kvpack.cache.layer import Layer
from kvpack.formats.minifloat import ELEMENTS
from support.interpreter import INTERPRETED, needs_loaded_bounds
from support.klt_bases import klt
from support.ptx_words import OTHERS, WORDS, as_f16, halves, joined, needs_triton, run
from support.random_sides import check_attention, codecs, random_side

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvpack.formats.base import Codec
    from kvpack.kernels.tiles.bound_loader import BoundLoader, LoadMode

Array = np.ndarray[Any, np.dtype[Any]]

KERNELS = Path(__file__).resolve().parents[2] / "kernels"

CASES: list[tuple[str, str, tuple[int, int], int, int]] = [
    ("scalar:b=3,mean=16", "scalar:b=4,norm=log8", (128, 96), 1, 40),
    ("scalar:b=3", "scalar:b=3", (80, 48), 1, 40),
    ("scalar:b=2,high=3", "scalar:b=2,norm=fp32", (128, 64), 1, 40),
    ("group:b=3,g=64,axis=channel", "group:b=2,g=16,axis=token,token_scale=fp32", (128, 64), 1, 40),
    ("group:b=6,g=32", "group:b=8,g=32", (80, 96), 1, 40),
    ("scalar:b=3", "scalar:b=3", (128, 64), 16, 40),
    ("minifloat:element=e4m3,scales=e8m0", "minifloat:element=e2m1,scales=e4m3", (128, 128), 1, 40),
    ("minifloat:element=e2m1,scales=e8m0", "minifloat:element=e5m2,per=head,scales=fp16", (128, 64), 1, 40),
    ("octahedral:b=3", "octahedral:b=3", (128, 64), 1, 40),
    ("octahedral:b=3,mean=32,mean_bits=4", "octahedral:b=2", (80, 48), 1, 100),
    ("octahedral:b=3", "octahedral:b=4", (32, 64), 1, 40),
    ("octahedral:b=4,arrangement=direct", "octahedral:b=2,arrangement=direct,norm=log8", (128, 64), 1, 40),
    ("angle:n=128,norm=linear8,arrangement=direct", "angle:n=48,norm=log4,arrangement=direct,range=fp32", (128, 64), 1, 40),
    ("angle:n=128,norm=linear8", "angle:n=48,norm=log4", (128, 64), 1, 40),
    ("angle:n=100,norm=linear4", "angle:n=48,norm=log5", (48, 96), 1, 40),
    ("quaternion:s=24,r=3,outliers=3,mean=16", "quaternion:s=192,r=6", (128, 64), 1, 40),
    ("quaternion:s=600,r=6", "quaternion:s=192,r=6,arrangement=direct", (40, 64), 1, 300),
    ("polar:b=3", "polar:b=3.2", (64, 32), 1, 40),
    ("trellis:b=3,states=256", "trellis:b=1,states=1024", (80, 48), 1, 300),
    ("scalar:b=2,qjl=fp16", "group:b=4,g=32,qjl=fp16", (64, 64), 1, 40),
    ("minifloat:element=e2m1,outliers=3", "scalar:b=4,outliers=20", (128, 128), 1, 40),
    ("group:b=2,g=4,outliers=3", "group:b=2,g=4,outliers=3", (64, 128), 1, 40),
]
"""Codecs of keys and values, their head dims, query heads and tokens."""

LEFT_OUT = {"encode/polar.py": "mov.b32 $0, $1;", "loaders/raw.py": "mov.b32 $0, $1;", "tiles/work.py": "cp.async.bulk.prefetch"}
"""Inline PTX that loaders in the interpreter do not use, by file: two copies of a register, and a prefetch (tested below)."""


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[tuple[str, int]]]:
    """Let interpreted kernels use inline PTX, and return the files and lines of its calls. Loaders are compared with plain Triton.

    Each loader also loads, decodes and computes factors without inline PTX, in the same tiles.
    """
    from kvpack.kernels.attend import plan
    from kvpack.kernels.tiles import bound_loader
    from support import emulated_ptx

    lines: set[tuple[str, int]] = set()
    execute = emulated_ptx.execute

    def note(*arguments: Any) -> list[Array]:
        frame = sys._getframe(1)
        while KERNELS not in Path(frame.f_code.co_filename).resolve().parents:
            frame = frame.f_back  # type: ignore[assignment]
        lines.add((str(Path(frame.f_code.co_filename).resolve().relative_to(KERNELS)), frame.f_lineno))
        return execute(*arguments)

    def bind(loader: Any, mode: LoadMode, *arguments: Any, **options: Any) -> BoundLoader:
        bound, plain = bound_loader.bind(loader, mode, *arguments, **options), mode._replace(fast=False)

        def load(*given: Any) -> tuple[Any, Any]:
            return loader.load(*given[:-1], mode), loader.load(*given[:-1], plain)

        def decode(loaded: Any, *given: Any) -> Any:
            return equal(loader.decode(loaded[0], *given[:-1], mode), loader.decode(loaded[1], *given[:-1], plain))

        def factors_by(function: Callable[..., Any]) -> Callable[..., Any]:
            return lambda loaded, *given: equal(function(loaded[0], *given[:-1], True), function(loaded[1], *given[:-1], False))

        factors = {name: factors_by(getattr(loader, name)) for name in ("factor", "step_factor") if getattr(bound, name) is not None}
        return bound._replace(load=load, decode=decode, **factors)

    monkeypatch.setattr(emulated_ptx, "execute", note)
    monkeypatch.setattr(plan, "bind", bind)
    with emulated_ptx.emulation(monkeypatch):
        yield lines


def equal(found: Any, expected: Any) -> Any:
    """Return the tensors ``found`` after comparing them with ``expected``. A product and a sum may be rounded together or one by one."""
    if isinstance(found, tuple):
        assert len(found) == len(expected)
        return tuple(map(equal, found, expected))
    one, other = (tensor.handle.data.astype(np.float64) for tensor in (found, expected))
    np.testing.assert_allclose(one, other, rtol=0, atol=2.0**-9 * np.abs(other).max())
    return found


def klt_pair() -> tuple[Codec, Codec]:
    return klt(128, bytes([1, 2, 3, 4, 5, 6, 7, 8])), klt(128, bytes([8, 7, 6, 5, 4, 3, 2, 1]), "v", gain="none")


@pytest.mark.scenario
@pytest.mark.kernels
@needs_loaded_bounds
@pytest.mark.skipif(not INTERPRETED, reason="the emulator is for the interpreter")
def test_inline_ptx_of_all_loaders_agrees_with_plain_triton(executed: set[tuple[str, int]]) -> None:
    """Attention also agrees with exact attention, and no call of inline PTX is left out."""
    for k, v, dims, heads, tokens in CASES:
        k_codec, v_codec = codecs(k, v, dims)
        check_attention(Layer(random_side(k_codec, 1, (tokens,), 0, 1), random_side(v_codec, 1, (tokens,), 0, 2)), heads)
    k_codec, v_codec = klt_pair()
    check_attention(Layer(random_side(k_codec, 2, (40,), 0, 1), random_side(v_codec, 2, (40,), 0, 2)), 2)
    left_out = {}
    for path in sorted(KERNELS.rglob("*.py")):
        name = str(path.relative_to(KERNELS))
        for call in ast.walk(ast.parse(path.read_text())):
            if not isinstance(call, ast.Call) or not ast.unparse(call.func).endswith("inline_asm_elementwise"):
                continue
            if not any(file == name and call.lineno <= line <= (call.end_lineno or 0) for file, line in executed):
                left_out[name, call.lineno] = ast.unparse(call.args[0])
    assert len(left_out) == len(LEFT_OUT), left_out
    assert all(LEFT_OUT[name] in ptx for (name, _), ptx in left_out.items()), left_out


def check_halves(ptx: str, expected: Callable[..., Array], *pairs: tuple[Array, Array], mask: int = 0xFFFF) -> None:
    """Check that both halves of the result are what ``expected`` returns for the halves of the inputs: words, or float16."""
    found = halves(run(ptx, *(joined(*pair) for pair in pairs))[0])
    for half, own in zip(found, zip(*pairs, strict=True), strict=True):
        result = expected(*own)
        assert np.array_equal(half & mask, result.view(np.uint16) if result.dtype == np.float16 else result & mask)


BOTH = [(WORDS, OTHERS), (OTHERS, WORDS)]
"""All words, in the low and in the high halves of registers, beside any other words."""


@needs_triton
@pytest.mark.parametrize("words", BOTH, ids=["low", "high"])
def test_each_half_is_processed_by_its_own_column(words: tuple[Array, Array]) -> None:
    """The compiler may pair any two columns in a register."""
    from kvpack.kernels.bitpack import bitfields, replicated_columns

    others = words[1][::-1], words[0][::-1]
    check_halves(bitfields.BYTES_PTX.value, lambda word, shift: word >> shift & 0xFF, words, (8 * (WORDS % 2), 8 * (OTHERS % 3 % 2)))
    fields = WORDS % 8, OTHERS % 8
    for field in (1, 2, 7):

        def selected(word: Array, other: Array, own: Array, field: int = field) -> Array:
            return np.where(own < field, word, other)

        check_halves(bitfields.select_ptx.fn(field), selected, words, others, fields)
    for position, stride in ((0, 4), (2, 3), (8, 2)):

        def shifted(word: Array, own: Array, position: int = position, stride: int = stride) -> Array:
            return word >> position + stride * own

        check_halves(bitfields.shift_ptx.fn(position, stride), shifted, words, (WORDS % 3, OTHERS % 3), mask=(1 << stride) - 1)
    for at, last, bits in ((12, 8, 4), (10, 9, 3), (0, 12, 4), (4, 14, 2)):

        def moved(word: Array, shift: Array, at: int = at) -> Array:
            return word >> shift << at

        shifts = WORDS % (last // bits + 1) * bits, OTHERS % (last // bits + 1) * bits
        check_halves(replicated_columns.move_ptx.fn(at, last), moved, words, shifts, mask=(1 << bits) - 1 << at)
    check_halves("lop3.b32 $0, $1, $2, $3, 0xE4;", lambda a, b, keep: a & keep | b & ~keep, words, others, (others[1], words[1]))


@needs_triton
@pytest.mark.parametrize("words", BOTH, ids=["low", "high"])
@pytest.mark.parametrize("position", range(16))
def test_bit_fields_of_every_word_are_extracted(position: int, words: tuple[Array, Array]) -> None:
    from kvpack.kernels.bitpack import bitfields, f16_tiles, replicated_columns
    from kvpack.kernels.loaders import qjl

    others = words[1], words[0]
    for bits in range(1, 17 - position):
        mask = (1 << bits) - 1
        check_halves(bitfields._extract_ptx.fn(position, bits), lambda word, mask=mask: word >> position & mask, words)
        if bits <= 10:
            code = f16_tiles._code_ptx.fn(position, bits)
            check_halves(code, lambda word, mask=mask: (word >> position & mask).astype(np.float16), words)
    check_halves(f16_tiles._negate_ptx.fn(position), lambda value, word: value ^ (word >> position & 1) << 15, others, words)
    check_halves(qjl._sign_ptx.fn(position), lambda word: (1.0 - 2.0 * (word >> position & 1)).astype(np.float16), words)
    value = qjl._bit_value.fn(position)
    check_halves(qjl._isolate_bit_ptx.fn(position), lambda word: (value * (word >> position & 1)).astype(np.float16), words)
    if position:
        check_halves(replicated_columns._join_ptx.fn(position), lambda a, b: a >> position | b << 16 - position, words, others)
    for bits in range(17 - position, 17 if position else 0):
        mask = (1 << bits) - 1
        ptx = bitfields._extract_straddling_ptx.fn(position, bits)
        check_halves(ptx, lambda a, b, mask=mask: (a >> position | b << 16 - position) & mask, words, others)


def rounded_once(code: Array, middle: float, scale: Array, center: Array) -> Array:
    return ((code - middle) * as_f16(scale).astype(np.float64) + as_f16(center).astype(np.float64)).astype(np.float16)


SCALES = np.random.default_rng(3).normal(size=(2, 2, 1 << 16)).astype(np.float16).view(np.uint16).astype(np.uint32)
"""Bits of ordinary float16 scales and centers, for the low and high halves of registers."""


@needs_triton
@pytest.mark.parametrize("bits", range(1, 9))
def test_codes_become_values_with_one_rounding(bits: int) -> None:
    """Scale and center may be any; a code is inserted in the fraction of a float16 number."""
    from kvpack.kernels.attend import means
    from kvpack.kernels.bitpack import f16_tiles, f16x2

    scales, centers = map(tuple, SCALES)
    middle = (1 << bits) - 1
    for position in range(17 - bits):
        for center_code in {middle / 2, (middle + 1) / 2}:

            def affine(word: Array, scale: Array, center: Array, position: int = position, code: float = center_code) -> Array:
                return rounded_once((word >> position & middle).astype(np.float64), code, scale, center)

            check_halves(f16_tiles._affine_ptx.fn(position, bits, center_code), affine, (WORDS, OTHERS), scales, centers)
    codes = WORDS & middle, OTHERS & middle
    check_halves(f16x2._affine_ptx.fn(bits), lambda code, *line: rounded_once(code * 1.0, 1 << bits >> 1, *line), codes, scales, centers)
    if bits not in (4, 8):
        return
    for position in range(0, 8, bits):
        found = run(means._centered_ptx.fn(position, bits), joined(WORDS, OTHERS), constraints="=r,=r,r")
        for number, half in enumerate(half for register in found for half in halves(register)):
            code = (WORDS, OTHERS)[number // 2] >> 8 * (number % 2) + position & middle
            assert np.array_equal(as_f16(half), code - float(1 << bits - 1))


@needs_triton
@pytest.mark.parametrize("converts", [False, True], ids=["by integers", "by conversions"])
@pytest.mark.parametrize("element", ELEMENTS)
def test_minifloats_are_exact_at_every_position(element: str, converts: bool) -> None:
    from kvpack.kernels.bitpack import minifloats

    form = ELEMENTS[element]
    codes = np.arange(1 << form.bits)
    is_finite = (codes & (1 << form.bits - 1) - 1) < form.finite
    power = minifloats.E2M1_EXPONENT.value if element == "e2m1" else 0
    values = np.array([form.value(code) / 2.0**power if ok else np.nan for code, ok in zip(codes, is_finite, strict=True)])
    for position in range(0, 16, form.bits):
        found = halves(run(minifloats._elements_ptx.fn(element, position, converts), joined(WORDS, OTHERS))[0])
        for half, own in zip(map(as_f16, found), (WORDS, OTHERS), strict=True):
            code = own >> position & (1 << form.bits) - 1
            real = is_finite[code]
            # The sign of a zero of e2m1 affects no score and no sum.
            same_sign = (np.signbit(half) == np.signbit(values[code])) | ((half == 0) & (element == "e2m1"))
            assert np.array_equal(half[real], values[code][real])
            assert same_sign[real].all()
    if element == "e4m3":
        found = run(minifloats.FOUR_E4M3_PTX.value, joined(WORDS, OTHERS), joined(OTHERS, WORDS), constraints="=&r,=&r,=&r,=&r,r,r")
        for number, register in enumerate(found):
            for half, word in zip(halves(register), (joined(WORDS, OTHERS), joined(OTHERS, WORDS)), strict=True):
                code = word >> 8 * number & 0xFF
                assert np.array_equal(as_f16(half)[is_finite[code]], values[code][is_finite[code]])


@needs_triton
@pytest.mark.parametrize("exponent_shift", [0, 14])
def test_powers_of_four_scales_are_exact(exponent_shift: int) -> None:
    """Scales are divided by the largest one, which may be at any position. Others may be equal, barely representable or too small."""
    from kvpack.kernels.bitpack import minifloats

    generator = np.random.default_rng(4)
    largest = generator.choice([0, 1, 13, 14, 15, 27, 28, 29, 127, 128, 254, 255], (1 << 16, 2, 1))
    scales = np.maximum(0, largest - generator.choice([0, 0, 1, 13, 14, 15, 27, 28, 29, 30, 255], (1 << 16, 2, 4))).astype(np.uint8)
    words = np.ascontiguousarray(scales).view(np.uint32)[..., 0]
    found = run(minifloats._four_powers_ptx.fn(exponent_shift), words[:, 0], words[:, 1], constraints="=&r,=&r,=&r,=&r,r,r")
    exponents = scales.astype(np.int32) - scales.max(-1, keepdims=True) + exponent_shift
    expected = np.where(exponents >= -14, 2.0**exponents, 0.0)
    for number, register in enumerate(found):
        for half, values in zip(halves(register), expected[..., number].T, strict=True):
            assert np.array_equal(as_f16(half), values)


@needs_triton
def test_arithmetic_of_both_halves() -> None:
    from kvpack.kernels.bitpack import f16x2

    finite = OTHERS & 0x7C00 != 0x7C00
    one, other = (np.where(finite, OTHERS, 0x3C00), WORDS & 0x3FFF), (WORDS & 0x3FFF, np.where(finite, OTHERS, 0xBC00))
    with np.errstate(over="ignore"):
        check_halves("mul.rn.f16x2 $0, $1, $2;", lambda a, b: as_f16(a) * as_f16(b), one, other)
        for index in range(2):
            factor = other[index]
            check_halves(f16x2._scale_ptx.fn(index), lambda a, b, factor=factor: as_f16(a) * as_f16(factor), one, other)
    for low in (7, 15, 23, 31):
        for high in (7, 15, 23, 31):
            values, words, others = joined(WORDS, OTHERS), joined(OTHERS, WORDS), joined(WORDS[::-1], OTHERS)
            found = run(f16x2._negate_ptx.fn(low, high), values, words, others)[0]
            assert np.array_equal(found, values ^ (words >> low & 1) << 15 ^ (others >> high & 1) << 31)


@needs_triton
def test_every_logarithm_of_a_norm_is_decoded() -> None:
    from kvpack.formats.token_norms import decode_norms
    from kvpack.kernels.bitpack import token_factors

    codes = np.arange(256, dtype=np.uint32)
    expected = decode_norms(torch.arange(256).to(torch.uint8)).numpy()
    for shift in range(0, 32, 8):
        word = codes << shift | 0xA5A5A5A5 & ~(0xFF << shift)
        (found,) = run(token_factors._LOG8_PTX.value, word, np.full(256, shift), constraints="=f,r,r")
        np.testing.assert_allclose(found.view(np.float32), expected, rtol=1e-6)


@needs_triton
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_ranges_of_norms_become_scales_and_centers(bits: int) -> None:
    """The divisor is the same power of two as in plain Triton, for all steps with any minima."""
    from kvpack.kernels.loaders import angle

    minima = np.random.default_rng(5).permutation(WORDS)
    step, minimum = (np.where(words & 0x7C00 == 0x7C00, 0, words) for words in (WORDS, minima))
    found = run(angle._norm_affine_ptx.fn(bits), joined(step, minimum), joined(step[::-1], minimum), constraints="=&r,=&r,r,r")
    # The exponents of the larger of both, as in angle._divisor_exponent.
    exponents = np.maximum(step >> 10 & 31, np.maximum((minimum >> 10 & 31).astype(np.int64) - 8, 0))
    inverse = 2.0 ** (15 - np.minimum(exponents, 29))
    scale = (as_f16(step) * inverse).astype(np.float16)
    low = (as_f16(minimum) * inverse).astype(np.float16)
    center = (scale.astype(np.float64) * angle.middle_norm_code.fn(bits) + low).astype(np.float16)
    assert np.array_equal(as_f16(found[0] & 0xFFFF), scale)
    assert np.array_equal(as_f16(found[1] & 0xFFFF), center)


@needs_triton
def test_only_one_thread_prefetches_aligned_bytes() -> None:
    from support import emulated_ptx

    (text,) = (
        node.value
        for node in ast.walk(ast.parse((KERNELS / "tiles" / "work.py").read_text()))
        if isinstance(node, ast.Constant) and "cp.async.bulk.prefetch" in str(node.value)
    )
    for size, issued in ((100, 1), (15, 0), (-16, 0)):
        execution = emulated_ptx.Execution(
            text, "=r,l,r", [np.full(64, 1000, np.uint64), np.full(64, size, np.int64).astype(np.uint32)], np.arange(64) % 32
        )
        execution.run()
        assert execution.registers["real"].sum() == issued
        assert set(execution.registers["begin"].tolist()) == {992}
