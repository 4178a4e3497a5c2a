"""rANS in C encodes and decodes exactly like formats/ for any words and states, and never reads out of bounds."""

from __future__ import annotations

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvpack
from kvpack.coding import dispatch
from kvpack.formats import rans
from kvpack.formats.lossless import Lossless
from kvpack.formats.runs import Run
from kvpack.kernels.cpu import library
from kvpack.kernels.cpu import lossless as cpu_lossless
from support.lossless_streams import DTYPES

pytestmark = pytest.mark.skipif(library.library() is None, reason="the C kernels were not built")


TABLES = "of chunks", "of all chunks", "of symbols"


@given(
    st.integers(1, 10), st.integers(0, 1200), st.sampled_from((1, 2, 33, 63, 64, 65, 256)), st.booleans(), st.sampled_from(TABLES),
    st.integers(0, 9999),
)  # fmt: skip
@settings(max_examples=40)
def test_c_encodes_and_decodes_chunks_like_formats(chunks: int, longest: int, alphabet: int, valid: bool, kind: str, seed: int) -> None:
    from kvpack.kernels.cpu import rans as compiled

    source = numpy.random.default_rng(seed)
    symbols = numpy.minimum(source.geometric(source.uniform(0.01, 0.9), (chunks, longest)) - 1, alphabet - 1).astype(numpy.uint8)
    tables = rans.frequencies(numpy.stack([numpy.bincount(row, minlength=alphabet) for row in symbols]))
    lengths, table = source.integers(0, longest + 1, chunks), numpy.arange(chunks)
    if kind == "of all chunks":
        tables, table = rans.frequencies(numpy.bincount(symbols.ravel(), minlength=alphabet)[None]), numpy.zeros(chunks, numpy.int64)
    elif kind == "of symbols":
        # Every symbol has a frequency in every table.
        tables = rans.frequencies(numpy.maximum(tables, 1))
        lengths[0], table = longest, source.integers(0, chunks, (chunks, longest)).astype(numpy.uint8)
    made = rans.encode_in_numpy(symbols, lengths, tables, table)
    for level in range(len(library.levels())):
        coded = compiled.encode(symbols, lengths, tables, table, threads=1 + seed % 3, level=level)
        assert all((ours == theirs).all() for ours, theirs in zip(coded, made, strict=True))
    if not valid:
        # States, words and counts that no encoder makes: more words may be asked for than there are.
        counts = source.integers(0, 30, chunks)
        words = source.integers(0, 1 << 16, int(counts.sum())).astype(numpy.uint16)
        made = rans.Chunks(words, counts, source.integers(0, 1 << 32, (chunks, rans.LANES)).astype(numpy.uint32))
    expected = rans.decode_in_numpy(made, lengths, tables, table)
    for level in range(len(library.levels())):
        found = compiled.decode(made, lengths, tables, table, threads=1 + seed % 3, level=level)
        if valid:
            assert (found.read == expected.read).all()
            assert (found.states == expected.states).all()
        # Behind the last word each decoder goes on with words of its own; that a chunk needs them shows in both.
        assert (found.faulty_chunks(made.counts) == expected.faulty_chunks(made.counts)).all()
        for row, other, length in zip(found.symbols, expected.symbols, lengths, strict=True):
            assert not valid or (row[:length] == other[:length]).all()


@given(st.integers(1, 40), st.sampled_from((16, 64, 256)), st.integers(1, 400), st.booleans(), st.booleans(), st.integers(0, 99))
def test_streams_equal_those_of_formats(half: int, chunk: int, tokens: int, any_bits: bool, follows: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    if any_bits:
        x = torch.randint(-(2**15), 2**15, (2, tokens, 3, 2 * half), generator=generator).to(torch.int16).view(torch.bfloat16)
    else:
        x = torch.randn(2, tokens, 3, 2 * half, generator=generator).to(torch.bfloat16)
    x = x.transpose(1, 2)
    codec = Lossless(2 * half, "bf16", chunk, (("signed_fractions", 2),))
    assert cpu_lossless.supports_encoding(codec, x)
    run = Run(x.shape, x.device, lambda: iter((x,)))
    before = codec.encode(x[:, :, ::2]) if follows else None
    begun = codec.begin(run, before)
    expected = {**begun.encode(x, 0), **begun.streams}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_lossless, "MAX_VALUES_AT_ONCE", 4096)
        for level in range(len(library.levels())):
            found = cpu_lossless.encode(codec, x, before, threads=1 + seed % 3, level=level)
            assert list(found) == list(codec.layout(2, 3, tokens))
            for name, stream in expected.items():
                assert torch.equal(found[name].view(torch.int16), stream.view(torch.int16)), name


@given(st.integers(1, 40), st.sampled_from((16, 64, 256)), st.integers(1, 90), st.integers(0, 99))
def test_joined_values_equal_those_of_formats(half: int, chunk: int, tokens: int, seed: int) -> None:
    """Results agree bit for bit for pages of any strides and lengths, partial chunks, and a tail."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**15), 2**15, (2, 3, 3 * tokens, 2 * half), generator=generator).to(torch.int16)
    x = torch.where(torch.rand(bits.shape, generator=generator) < 0.1, bits, torch.full_like(bits, 0x3F80)).view(torch.bfloat16)
    cache = kvpack.pack([(x, x)], f"kv=lossless:chunk={chunk}").append([(x[:, :, :7], x[:, :, :7])])
    side = cache[:, : seed % cache.tokens + 1][0].k
    assert side is not None
    assert cpu_lossless.supports(side, torch.bfloat16)
    expected = torch.cat([x, x[:, :, :7]], 2)[:, :, : side.tokens]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_lossless, "MAX_VALUES_AT_ONCE", 1 << seed % 16)
        for level in range(len(library.levels())):
            found = torch.zeros_like(expected)
            cpu_lossless.unpack_into(side, found, threads=1 + seed % 3, level=level)
            assert torch.equal(found.view(torch.int16), expected.view(torch.int16))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_cache_is_decoded_in_c(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(2, 3, 700, 64, generator=torch.Generator().manual_seed(0)).to(DTYPES[dtype])
    cache = kvpack.pack([(x, x)], "lossless")[:, :650]
    calls: list[int] = []
    original = rans.compiled_decoder
    assert original is not None
    monkeypatch.setattr(rans, "compiled_decoder", lambda *arguments: (calls.append(1), original(*arguments))[1])
    found = cache[0].unpack(DTYPES[dtype])[0]
    assert calls
    monkeypatch.setattr(rans, "decode_in_numpy", None)
    assert torch.equal(cache[0].unpack(DTYPES[dtype])[0], found)
    assert torch.equal(found, x[:, :, :650])


def test_torch_decodes_without_c(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(1, 2, 300, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    cache = kvpack.pack([(x, x)], "lossless")
    monkeypatch.setenv(dispatch.VARIABLE, "torch")
    monkeypatch.setattr("kvpack.kernels.cpu.rans.decode", None)
    assert torch.equal(cache[0].unpack(torch.bfloat16)[0], x)


def test_tables_with_wrong_totals_are_left_to_formats() -> None:
    from kvpack.kernels.cpu import rans as compiled

    tables = numpy.array([[4096, 0], [1, 0]])
    made = rans.Chunks(numpy.zeros(0, numpy.uint16), numpy.zeros(2, numpy.int64), numpy.full((2, rans.LANES), 0x1FFFF, numpy.uint32))
    found = compiled.decode(made, numpy.array([40, 40]), tables, numpy.arange(2))
    assert found.faulty_chunks(made.counts).all()
