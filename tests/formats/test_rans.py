"""Tests of rANS: round trips, sizes, frequencies, invalid chunks, and agreement with the second decoder."""

from __future__ import annotations

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpack.formats import rans
from spec.decoder.rans import decode_chunk


def skewed(chunks: int, longest: int, alphabet: int, seed: int) -> numpy.ndarray:
    """Return symbols of which some are far more frequent than others."""
    source = numpy.random.default_rng(seed)
    found: numpy.ndarray = numpy.minimum(source.geometric(source.uniform(0.05, 0.9), (chunks, longest)) - 1, alphabet - 1).astype(
        numpy.uint8
    )
    return found


def tables_of(symbols: numpy.ndarray, alphabet: int) -> numpy.ndarray:
    return rans.frequencies(numpy.stack([numpy.bincount(row, minlength=alphabet) for row in symbols]))


@given(st.integers(1, 5), st.integers(0, 700), st.sampled_from((1, 2, 32, 200, 256)), st.integers(0, 999))
def test_any_symbols_are_restored(chunks: int, longest: int, alphabet: int, seed: int) -> None:
    source = numpy.random.default_rng(seed)
    symbols = skewed(chunks, longest, alphabet, seed)
    tables, table = tables_of(symbols, alphabet), source.permutation(chunks)
    symbols, lengths = symbols[table], source.integers(0, longest + 1, chunks)
    made = rans.encode(symbols, lengths, tables, table)
    decoded = rans.decode(made, lengths, tables, table)
    assert not decoded.faulty_chunks(made.counts).any()
    assert made.counts.sum() == len(made.words)
    assert (made.states >= rans.MIN_STATE).all()
    for row, found, length in zip(symbols, decoded.symbols, lengths, strict=True):
        assert found[:length].tolist() == row[:length].tolist()


@given(st.integers(1, 4), st.integers(0, 300), st.integers(0, 999))
def test_each_symbol_may_have_its_own_table(chunks: int, longest: int, seed: int) -> None:
    source = numpy.random.default_rng(seed)
    tables = rans.frequencies(source.integers(1, 100, (5, 8)))
    symbols, table = (
        source.integers(0, 8, (chunks, longest)).astype(numpy.uint8),
        source.integers(0, 5, (chunks, longest)).astype(numpy.uint8),
    )
    lengths = source.integers(0, longest + 1, chunks)
    lengths[0] = longest
    made = rans.encode_in_numpy(symbols, lengths, tables, table)
    decoded = rans.decode_in_numpy(made, lengths, tables, table)
    assert not decoded.faulty_chunks(made.counts).any()
    for row, found, length in zip(symbols, decoded.symbols, lengths, strict=True):
        assert found[:length].tolist() == row[:length].tolist()


@given(st.integers(1, 200), st.sampled_from((2, 32, 256)), st.integers(0, 999))
def test_the_second_decoder_agrees(length: int, alphabet: int, seed: int) -> None:
    symbols = skewed(1, length, alphabet, seed)
    tables = tables_of(symbols, alphabet)
    made = rans.encode(symbols, numpy.array([length]), tables, numpy.zeros(1, numpy.int64))
    states = made.states.astype("<u4").view("<u2")[0].tolist()
    assert decode_chunk("x", tables[0].tolist(), states, made.words.tolist(), length) == symbols[0].tolist()


def test_the_number_of_words_matches_the_entropy() -> None:
    symbols = skewed(4, 1 << 15, 256, 3)
    counts = numpy.stack([numpy.bincount(row, minlength=256) for row in symbols])
    tables, lengths = rans.frequencies(counts), numpy.full(4, 1 << 15)
    made = rans.encode(symbols, lengths, tables, numpy.arange(4))
    bits = rans.cost_bits(counts, tables)
    # A state holds up to 16 bits of its symbols.
    assert (abs(16 * made.counts - bits) < 16 * rans.LANES + 0.002 * bits).all()
    proportions = counts / counts.sum(1, keepdims=True)
    entropy = -(proportions * numpy.log2(numpy.where(counts > 0, proportions, 1.0))).sum(1) * (1 << 15)
    assert (bits < 1.005 * entropy + 64).all()


def test_the_word_count_of_the_largest_chunk_fits_in_16_bits() -> None:
    tables = numpy.ones((1, 256), numpy.int64)
    tables[0, 255] = rans.TOTAL - 255
    symbols = numpy.arange(rans.MAX_SYMBOLS, dtype=numpy.int64)[None] % 255
    made = rans.encode(symbols.astype(numpy.uint8), numpy.array([rans.MAX_SYMBOLS]), tables, numpy.zeros(1, numpy.int64))
    assert rans.MAX_SYMBOLS * 12 // 16 - 64 < made.counts[0] < 1 << 16


@pytest.mark.parametrize(
    "counts",
    [[0, 0, 0], [1, 0, 0], [1, 1, 1], [10**12, 1, 0], [3, *[0] * 100, 1], [*range(256)], [10**9, *[1] * 255], [*[400] * 128, *[1] * 128]],
    ids=str,
)
def test_frequencies_have_the_right_sum_and_include_every_symbol(counts: list[int]) -> None:
    given_counts = numpy.array([counts, counts[::-1]], numpy.int64)
    found = rans.frequencies(given_counts)
    assert (found.sum(1) == rans.TOTAL).all()
    assert (found >= (given_counts > 0)).all()
    assert (found[given_counts == 0].sum() == 0) or not any(counts)


def test_a_symbol_without_a_frequency_cannot_be_encoded() -> None:
    counts, tables = numpy.array([[3, 1], [4, 0]]), numpy.array([[4096, 0], [4096, 0]])
    assert rans.cost_bits(counts, tables).tolist() == [numpy.inf, 0.0]


@given(st.data())
def test_arbitrary_words_and_states_are_decoded_safely(data: st.DataObject) -> None:
    """Every change to a state or word is detected, because with these tables the symbols have only one encoding."""
    seed = data.draw(st.integers(0, 99))
    symbols = skewed(3, 150, 32, seed)
    tables, lengths, table = tables_of(symbols, 32), numpy.array([150, 40, 149]), numpy.arange(3)
    made = rans.encode(symbols, lengths, tables, table)
    words, states, counts = made.words.copy(), made.states.copy(), made.counts.copy()
    change = data.draw(st.sampled_from(("word", "state", "counts", "all")))
    if change == "word" and len(words):
        words[data.draw(st.integers(0, len(words) - 1))] ^= data.draw(st.integers(1, 0xFFFF))
    elif change == "state":
        chunk, lane = data.draw(st.integers(0, 2)), data.draw(st.integers(0, rans.LANES - 1))
        states[chunk, lane] ^= numpy.uint32(data.draw(st.integers(1, 0xFFFFFFFF)))
    elif change == "counts" and counts[0]:
        counts[0] -= 1
        counts[1] += 1
    elif change == "all":
        source = numpy.random.default_rng(seed)
        words, states = (source.integers(0, 1 << 8 * x.itemsize, x.shape).astype(x.dtype) for x in (words, states))
    else:
        return
    decoded = rans.decode(rans.Chunks(words, counts, states), lengths, tables, table)
    rows = zip(symbols, decoded.symbols, lengths, strict=True)
    assert decoded.faulty_chunks(counts).any() or any((row[:length] != found[:length]).any() for row, found, length in rows)
