"""Tests of the generator for seeded objects, against published SplitMix64 values and a separate implementation."""

from __future__ import annotations

import math

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpack.formats.generator import Generator, signs, unit_quaternions

PUBLISHED = {
    0: [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC, 0x1B39896A51A8749B],
    1234567: [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821],
}

SEEDS = [0, 1, 1234567, 2**64 - 1]


def splitmix64(seed: int, count: int) -> list[int]:
    """Return ``count`` words of SplitMix64 by its public definition: output n mixes ``seed`` + n times the golden ratio."""
    state = numpy.uint64(seed) + numpy.arange(1, count + 1, dtype=numpy.uint64) * numpy.uint64(0x9E3779B97F4A7C15)
    state = (state ^ state >> numpy.uint64(30)) * numpy.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ state >> numpy.uint64(27)) * numpy.uint64(0x94D049BB133111EB)
    return [int(word) for word in state ^ state >> numpy.uint64(31)]


@pytest.mark.parametrize("seed", PUBLISHED, ids=str)
def test_words_equal_published_ones(seed: int) -> None:
    generator = Generator(seed)
    assert [generator.next_word() for _ in range(5)] == PUBLISHED[seed] == splitmix64(seed, 5)


@given(st.integers(0, 2**64 - 1))
def test_words_equal_splitmix64_for_every_seed(seed: int) -> None:
    generator = Generator(seed)
    assert [generator.next_word() for _ in range(40)] == splitmix64(seed, 40)


@given(st.integers(0, 2**64 - 1), st.integers(0, 300))
def test_signs_are_bits_of_the_words(seed: int, count: int) -> None:
    bits = numpy.unpackbits(numpy.array(splitmix64(seed, 5), dtype="<u8").view(numpy.uint8), bitorder="little")
    assert signs(seed, count) == tuple(1 - 2 * int(bit) for bit in bits[:count])


@pytest.mark.parametrize("seed", SEEDS, ids=str)
def test_unit_quaternions_follow_marsaglia(seed: int) -> None:
    values = iter(math.ldexp((word >> 11) - 2**52, -52) for word in splitmix64(seed, 4000))

    def disc() -> tuple[float, float]:
        return next((x, y) for x, y in zip(values, values, strict=False) if 0 < x * x + y * y < 1)

    for quaternion in unit_quaternions(seed, 200):
        (w, x), (y, z) = disc(), disc()
        stretch = math.sqrt((1 - (w * w + x * x)) / (y * y + z * z))
        assert tuple(quaternion.tolist()) == (w, x, y * stretch, z * stretch)


@pytest.mark.parametrize("seed", SEEDS, ids=str)
def test_unit_quaternions_are_uniform_on_the_sphere(seed: int) -> None:
    count = 4096
    values = numpy.array(unit_quaternions(seed, count))
    assert numpy.allclose(numpy.linalg.norm(values, axis=1), 1, rtol=0, atol=2**-50)
    # Each component has variance 1/4, each product of two has variance at most 1/24: five standard deviations.
    assert numpy.abs(values.mean(0)).max() < 5 * 0.5 / math.sqrt(count)
    assert numpy.abs(values.T @ values / count - numpy.eye(4) / 4).max() < 5 * math.sqrt(1 / 16 / count)
    for component in values.T:
        component = numpy.sort(component)
        cumulative = 0.5 + (component * numpy.sqrt(1 - component**2) + numpy.arcsin(component)) / math.pi
        distance = numpy.abs(cumulative - (numpy.arange(count) + 0.5) / count).max()
        assert distance < 2.0 / math.sqrt(count)


def test_a_longer_sequence_starts_with_the_shorter_one() -> None:
    assert signs(7, 200)[:70] == signs(7, 70)
    assert unit_quaternions(7, 50)[:20].tolist() == unit_quaternions(7, 20).tolist()
    assert signs(7, 64) != signs(8, 64)
