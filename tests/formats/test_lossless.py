"""Tests of lossless: every bit is preserved in cuts, joins, selections and files, and sizes and refusals are as specified."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kvpack
from kvpack.coding.recipes import Recipe
from kvpack.errors import RoundedWarning
from kvpack.file import container
from kvpack.formats.errors import InvalidParameter, InvalidPayload, InvalidType, OutOfBounds, ValueTooLarge
from kvpack.formats.lossless import Lossless
from support.lossless_streams import DTYPES
from support.strategies import codecs, create, with_poisoned_padding


def lossless(dim: int = 64, **words: Any) -> Lossless:
    codec = create("lossless", dim, **words)
    assert isinstance(codec, Lossless)
    return codec


def patterns(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return values with arbitrary bits. Most are normally distributed, others have any exponent, including NaN and infinities."""
    generator = torch.Generator().manual_seed(seed)
    usual = torch.randn(shape, generator=generator).to(dtype).view(torch.int16)
    any_bits = torch.randint(-(2**15), 2**15, shape, generator=generator).to(torch.int16)
    return torch.where(torch.rand(shape, generator=generator) < 0.05, any_bits, usual).view(dtype)


def same_bits(a: torch.Tensor | None, b: torch.Tensor) -> bool:
    assert a is not None
    return a.dtype == b.dtype and torch.equal(a.view(torch.int16), b.view(torch.int16))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_16_bit_pattern_is_restored(dtype: str, tmp_path: Path) -> None:
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(DTYPES[dtype]).view(1, 2, 512, 64)
    cache = kvpack.pack([(every, every.flip(2))], "lossless")
    kvpack.save(cache, tmp_path / "x.kvpack")
    k, v = kvpack.load(tmp_path / "x.kvpack")[0].unpack(DTYPES[dtype])
    assert same_bits(k, every)
    assert same_bits(v, every.flip(2))


@given(st.data())
def test_any_part_of_a_chunk_is_restored(data: st.DataObject) -> None:
    codec = data.draw(codecs("lossless"))
    assert isinstance(codec, Lossless)
    tokens = data.draw(st.integers(0, 40))
    x = patterns((2, 3, tokens, codec.dim), DTYPES[codec.dtype], data.draw(st.integers(0, 99)))
    streams = codec.encode(with_poisoned_padding(x))
    assert same_bits(codec.stored_values({name: with_poisoned_padding(stream) for name, stream in streams.items()}), x)
    arrays = {name: stream.numpy() for name, stream in streams.items()}
    codec.check(arrays, "x")
    codec.check_runs(arrays, (tokens,) if tokens else (), "x")


@pytest.mark.scenario
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [5, 64, 300])
def test_sliced_joined_and_appended_caches_are_lossless(dim: int, dtype: str, tmp_path: Path) -> None:
    k, v = (patterns((2, 3, 700, dim), DTYPES[dtype], seed) for seed in (1, 2))
    cache = kvpack.pack([(k[:, :, :512], v[:, :, :512])], "lossless").append([(k[:, :, 512:600], v[:, :, 512:600])])
    cache = cache.append([(k[:, :, 600:], v[:, :, 600:])])
    parts = {
        "whole": (cache, 0, 700),
        "prefix inside a chunk": (cache[:, :390], 0, 390),
        "prefix of one token": (cache[:, :1], 0, 1),
        "from a chunk on": (cache[:, 256:], 256, 700),
        "the middle": (cache[:, 256:301], 256, 301),
        "cut twice": (cache[:, :450][:, :300], 0, 300),
        "joined": (kvpack.concat([cache[:, :512], cache[:, 512:]]), 0, 700),
        "joined after a partial chunk": (
            kvpack.concat([cache[:, :300], kvpack.pack([(k[:, :, 300:], v[:, :, 300:])], "lossless", start=300)]),
            0,
            700,
        ),
    }
    for name, (part, start, stop) in parts.items():
        kvpack.save(part, tmp_path / "x.kvpack", compress=name == "whole")
        for one in (part, kvpack.load(tmp_path / "x.kvpack")):
            for found, x in zip(one[0].unpack(DTYPES[dtype]), (k, v), strict=True):
                assert same_bits(found, x[:, :, start:stop]), name
        container.open_file(tmp_path / "x.kvpack").verify()
    chosen = kvpack.load(tmp_path / "x.kvpack").select([1, 0, 1])
    kvpack.save(chosen, tmp_path / "y.kvpack")
    for found, x in zip(kvpack.load(tmp_path / "y.kvpack")[0].unpack(DTYPES[dtype]), (k, v), strict=True):
        assert same_bits(found, x[[1, 0, 1]])
    with pytest.raises(OutOfBounds, match=r"encodes .* tokens together"):
        cache[:, 7:]


def test_runs_with_equal_parameters_are_joined() -> None:
    x = torch.randn(1, 2, 2048, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    cache = kvpack.pack([(x[:, :, :1024], None)], "lossless").append([(x[:, :, 1024:], None)])
    assert [page.tokens for page in cache[0].k.runs] == [2048]
    assert same_bits(cache[0].unpack()[0], x)
    grown = cache.append([(x * 2.0**40, None)])
    assert [page.tokens for page in grown[0].k.runs] == [2048, 2048]
    assert same_bits(grown[0].unpack()[0], torch.cat([x, x * 2.0**40], 2))


@pytest.mark.parametrize("recipe", ["raw", "fp32", "lossless", "kv=lossless:chunk=16"])
def test_conversion_to_and_from_raw_is_lossless(recipe: str) -> None:
    x = patterns((1, 2, 300, 64), torch.bfloat16)
    for cache in (kvpack.pack([(x, x)], "lossless").convert(recipe), kvpack.pack([(x, x)], "raw").convert(recipe).convert("raw")):
        found, expected = cache[0].unpack()[0], x
        if recipe == "fp32":
            # The payload of NaN is one of another dtype then.
            found, expected = found.nan_to_num(3.0), x.nan_to_num(3.0)
        assert same_bits(found, expected)


def test_normal_values_take_one_third_less_space() -> None:
    x = torch.randn(1, 8, 2048, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    bits = kvpack.pack([(x, x)], "lossless").bits_per_value
    assert bits < 10.65
    assert bits == pytest.approx(Recipe("lossless").codec(0, 1, "k", 128).nominal_bits, rel=0.01)


def test_the_recipe_uses_the_dtype_of_the_cache() -> None:
    x = torch.randn(1, 2, 40, 64)
    for dtype in (torch.float16, torch.bfloat16):
        assert same_bits(kvpack.pack([(x.to(dtype), None)], "lossless")[0].unpack(dtype)[0], x.to(dtype))
    assert Recipe("lossless").lossless(3) == ("bf16", "fp16")
    assert Recipe("k=lossless;v=raw").lossless(3) == ("bf16", "fp16")
    assert Recipe("kv=lossless:dtype=fp16").lossless(3) == ("fp16",)
    refusal = r"layers\[0\]\.k: the lossless codec supports only bf16 and fp16 values, but got fp32\. .* with lossless .* the raw codec, "
    with pytest.raises(InvalidType, match=refusal):
        kvpack.pack([(x, x)], "lossless")
    with pytest.warns(RoundedWarning, match="stores fp32 values as fp16"):
        kvpack.pack([(x, x)], "kv=lossless:dtype=fp16")
    with pytest.raises(ValueTooLarge, match="the largest fp16 value is 65504"):
        kvpack.pack([(x + 1e6, x)], "kv=lossless:dtype=fp16")
    with pytest.raises(InvalidParameter, match="dtype is 'fp32', expected one of bf16, fp16"):
        kvpack.pack([(x, x)], "kv=lossless:dtype=fp32")
    cache = kvpack.pack([(x.bfloat16(), x.bfloat16())], "lossless")
    with pytest.raises(InvalidType, match=r"the cache stores torch\.bfloat16, which would round them"):
        cache.append([(x, x)])


@pytest.mark.parametrize("tokens", [70, 600])
def test_attention_equals_that_of_raw_pages(tokens: int) -> None:
    k, v = (torch.randn(2, 3, tokens, 64, generator=torch.Generator().manual_seed(seed)).bfloat16() for seed in (1, 2))
    q = torch.randn(2, 6, 5, 64, generator=torch.Generator().manual_seed(3))
    found, expected = (kvpack.attend(q, kvpack.pack([(k, v)], recipe)[0]) for recipe in ("lossless", "raw"))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    cut = kvpack.attend(q, kvpack.pack([(k, v)], "lossless")[:, :65][0])
    torch.testing.assert_close(cut, kvpack.attend(q, kvpack.pack([(k[:, :, :65], v[:, :, :65])], "raw")[0]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"chunk": "8"}, "chunk is '8', expected one of 16, 32, 64, 128, 256"),
        ({"dim": 1024, "chunk": "128"}, "chunk is 128, which gives 131072 symbols at head dim 1024, but a chunk may have at most 65536"),
        ({"channel_scale": "fp16"}, "codec lossless does not support sidecars: omit channel_scale"),
    ],
)
def test_invalid_parameters_are_refused(words: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidParameter, match=message):
        create("lossless", words.pop("dim", 64), **words)


def broken(name: str, arrays: dict[str, Any]) -> None:
    """Introduce a fault into the streams ``arrays`` of two chunks."""
    if name == "sum":
        arrays["frequencies"][1, 0, 0, 3] += 1
    elif name == "state":
        arrays["states"][0, 1, 1, 2 * 17 + 1] = 0
    elif name == "counts":
        arrays["word_counts"][0, 0, 0] += 1
    elif name == "word":
        arrays["words"][0, 0, -1] ^= 0x100
    elif name == "moved":
        arrays["word_counts"][0, 0, 0] -= 1
        arrays["word_counts"][0, 1, 0] += 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("sum", r"0\.k\.frequencies: the frequencies at \[1, 0, 0\] sum to 4097, expected 4096"),
        ("state", r"0\.k\.states: the state at \[0, 1, 1, 17\] is \d+, expected at least 65536"),
        ("counts", r"0\.k\.word_counts: the counts sum to \d+, but 0\.k\.words has \d+ words"),
        ("word", r"0\.k\.words: the chunk at \[1, 1, 1\] uses \d+ of its \d+ words and ends in the states \["),
        ("moved", r"0\.k\.words: the chunk at \[0, [01], 0\] uses \d+ of its \d+ words"),
    ],
)
def test_invalid_streams_are_refused_by_name(name: str, message: str) -> None:
    codec = lossless(20, dtype="fp16", chunk="16")
    arrays = {key: stream.numpy() for key, stream in codec.encode(patterns((2, 2, 30, 20), torch.float16)).items()}
    codec.check(arrays, "0.k")
    codec.check_runs(arrays, (30,), "0.k")
    broken(name, arrays)
    with pytest.raises(InvalidPayload, match=message):
        _check(codec, arrays)


def _check(codec: Lossless, arrays: dict[str, Any]) -> None:
    codec.check(arrays, "0.k")
    codec.check_runs(arrays, (30,), "0.k")


def test_a_large_side_is_checked_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    codec = lossless(20, dtype="fp16", chunk="16")
    monkeypatch.setattr("kvpack.formats.lossless._CHECKED_WORDS", 200)
    monkeypatch.setattr("kvpack.formats.lossless._CHECKED_CHUNKS", 2)
    runs = [codec.encode(patterns((2, 2, tokens, 20), torch.float16, tokens)) for tokens in (30, 1, 64)]
    arrays = {name: numpy.concatenate([run[name].numpy() for run in runs], 2) for name in runs[0]}
    codec.check(arrays, "x")
    codec.check_runs(arrays, (30, 1, 64), "x")
    with pytest.raises(InvalidPayload):
        codec.check_runs(arrays, (1, 30, 64), "x")
    arrays["words"][0, 0, arrays["words"].shape[2] // 2] ^= 1
    with pytest.raises(InvalidPayload):
        codec.check_runs(arrays, (30, 1, 64), "x")
