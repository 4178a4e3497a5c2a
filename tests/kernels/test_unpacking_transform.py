"""Tests of decoding transform by Triton: factors are exact, and values are within the spec page's tolerance.

The tests run in Triton's interpreter anywhere, and compiled on CUDA devices. interpreter.py describes which process runs which of them.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

import kvpack
from kvpack.cache import files
from kvpack.cache.device_copy import HostCopyQueue
from kvpack.coding import dispatch
from kvpack.coding.bases import Basis
from kvpack.errors import InvalidParameter, InvalidPayload
from kvpack.file import container
from kvpack.formats.frames import Frames, SymbolTables
from support.interpreter import DEVICE, INTERPRETED, needs_loaded_bounds
from support.klt_bases import random_basis, with_random_frames
from support.strategies import create
from support.transform_streams import transform_streams

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from kvpack.cache.side import Side
    from kvpack.formats.transform import Transform

pytestmark = [pytest.mark.kernels, needs_loaded_bounds, pytest.mark.usefixtures("uninitialized_is_poisoned")]

SHAPES = {(0, "k"): (2, 12), (0, "v"): (2, 9)}
ROUNDED = {torch.float32: 0.0, torch.bfloat16: 2.0**-7 if INTERPRETED else 2.0**-8, torch.float16: 2.0**-11}
"""Largest error of rounding to each dtype, relative to the value. The interpreter truncates bfloat16."""


@pytest.fixture(scope="module", params=["head", "layer"])
def basis(request: pytest.FixtureRequest) -> Basis:
    return Basis.from_bytes(random_basis(SHAPES, 1, scopes=dict.fromkeys(SHAPES, request.param)))


def pair(tokens: int, batch: int = 1, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens + seed)
    return torch.randn(batch, 2, tokens, 12, generator=generator), torch.randn(batch, 2, tokens, 9, generator=generator)


def there(streams: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: stream.to(DEVICE) for name, stream in streams.items()}


def near(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Return True if values equal those of the reference, except for the order of sums and rounding to the dtype."""
    allowed = ROUNDED[found.dtype] * 1.01 * expected.abs() + 2.0**-18 * expected.abs().amax() + 2.0**-24
    return bool(((found.float().cpu() - expected).abs() <= allowed).all())


def unpacked(side: Side, dtype: torch.dtype) -> torch.Tensor:
    """Unpack all tokens of a side by kernels into a tensor with unusual strides, and return it."""
    from kvpack.kernels.decode import sides

    out = torch.full((side.batch, side.tokens, side.heads, side.dim), torch.nan, dtype=dtype, device=DEVICE).transpose(1, 2)
    assert sides.unpack_into(side.to(DEVICE), 0, side.tokens, out) == []
    return out


@pytest.mark.scenario
@pytest.mark.parametrize(("basis", "dtype"), [("layer", torch.float32), ("head", torch.bfloat16)], indirect=["basis"])
def test_pages_of_any_length_are_decoded_together(basis: Basis, dtype: torch.dtype) -> None:
    cache = kvpack.pack([pair(37, 2)], kvpack.Recipe("kv=transform:bits=3,chunk=16", basis), start=70_000).append([pair(16, 2)])
    cache = cache.append([pair(5, 2)])
    for side in cache[0].sides.values():
        whole = side.slice(0, side.packed_tokens)
        assert len(whole.runs) > 1
        assert near(unpacked(whole, dtype), whole.unpack(torch.float32))
        # The last chunk is coded again, with the tokens that are left.
        assert near(unpacked(whole.prefix(35), dtype), whole.unpack(torch.float32)[:, :, :35])


@pytest.mark.parametrize(
    ("dim", "heads", "chunk", "tokens"), [(20, 2, 32, 33), (7, 3, 64, 66), (130, 1, 16, 3), (1, 2, 16, 17), (2, 1, 16, 5)]
)
@pytest.mark.parametrize("side", ["k", "v"])
def test_random_levels_are_decoded(dim: int, heads: int, chunk: int, tokens: int, side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvpack.kernels.decode import decode, transform

    codec, streams = random_streams(dim, heads, chunk, tokens, side)
    expected = codec.decode(streams)
    # A token group at a time.
    monkeypatch.setattr(transform, "MAX_FACTOR_BYTES", 1)
    found = decode.decode_frame(codec, there(streams))
    assert near(found, expected)
    if side == "v" and tokens == 33:
        part = torch.full((1, heads, 38, dim), torch.nan, device=DEVICE)
        packed = [decode.PackedPart(there({**streams, "tokens": streams["tokens"]}), tokens, 5)]
        assert decode.decode_into(codec, packed, part, True)
        assert torch.equal(part[:, :, 5:], found)
        assert part[:, :, :5].isnan().all()


def random_streams(dim: int, heads: int, chunk: int, tokens: int, side: str) -> tuple[Transform, dict[str, torch.Tensor]]:
    """Return a codec with random frames, and streams with many escapes.

    Frames belong to the layer if the head dim is 1 mod 3, and to each head otherwise.
    """
    codec = replace(with_random_frames(create("transform", dim, side=side, chunk=str(chunk))), step=20)
    source = random.Random(f"{dim} {side}")
    streams = transform_streams(codec, 1, heads, tokens, lambda: source.randrange(1 << 16))
    assert streams is not None
    return codec, streams


@pytest.mark.parametrize("held", [True, False], ids=["binary16", "binary32"])
@pytest.mark.parametrize(("dim", "chunk"), [(16, 64), (5, 16)])
def test_factors_equal_those_of_formats_bit_for_bit(dim: int, chunk: int, held: bool) -> None:
    from kvpack.kernels.decode import transform_chunks

    codec, streams = random_streams(dim, 2, chunk, 70, "v")
    codec = codec if held else with_longer_numbers(codec)
    source = codec.source_for(2)
    ((_, found),) = codec.symbols(streams)
    assert len(found.escaped) > 5
    # The high half of an escape's level: more than any of both dtypes holds.
    sizes = zip(found.symbols, found.columns, found.tokens, strict=True)
    escaping = next(number for number, (row, columns, tokens) in enumerate(sizes) if not row[: columns * tokens].all())
    streams["words"].view(torch.int16).view(-1)[int(found.counts[: escaping + 1].sum()) - 1] = 0x1234
    ((_, found),) = codec.symbols(streams)
    on_device = transform_chunks.frames_on_device(codec, source, 2, torch.device(DEVICE))
    assert on_device is not None
    assert on_device.rows.dtype == on_device.values.dtype == (torch.float16 if held else torch.float32)
    chunks = transform_chunks.gather_chunks(codec, [there(streams)])
    count = len(found.columns)
    into = transform_chunks.allocate_factors(chunks, on_device, count * dim * chunk)
    into.values.fill_(torch.nan)
    transform_chunks.decode_symbols(codec, chunks, on_device, 0, count, 2, into, None)
    heads = 2 if codec.scope == "layer" else 1
    factors = into.values.to("cpu", torch.float32).view(-1, heads * dim * chunk)
    for number, (begin, listed) in enumerate(zip(chunks.begins.tolist(), into.counts.tolist(), strict=True)):
        own = slice((begin + 1) // 2, (begin + 1) // 2 + listed)
        places = into.escape_indices[own].cpu()
        assert not factors[number // heads, places].any()
        factors[number // heads, places] = into.levels[own].to("cpu", torch.float32)
    assert into.counts.any()
    factors = factors.view(-1, dim, heads, chunk).transpose(1, 2).reshape(count, dim, chunk)
    # Of steps of 1.
    expected_factors = replace(codec, step=0)._decode_values(found, source)
    for own, used, expected in zip(factors, chunks.used.tolist(), expected_factors, strict=True):
        columns, tokens = expected.shape
        assert torch.equal(own[:columns, :tokens].view(torch.int32), expected.view(torch.int32))
        assert not own[columns:used].any()
        assert not own[:used, tokens:].any()
        assert own[used:].isnan().all()


def with_longer_numbers(codec: Transform) -> Transform:
    """Return ``codec`` with frames and values that binary16 cannot represent exactly."""
    source = codec.source
    assert source is not None
    frames = source.check_heads(2, codec.dim)
    tables = SymbolTables(frames.tables.frequencies, frames.tables.values * (1 + 2.0**-20))
    return replace(codec, source=Frames(frames.rows * (1 + 2.0**-20), frames.scales, tables, frames.rope))


@pytest.mark.parametrize("side", ["k", "v"])
def test_frames_beyond_binary16_are_decoded(side: str) -> None:
    from kvpack.kernels.decode import decode

    codec, streams = random_streams(6, 2, 16, 20, side)
    codec = with_longer_numbers(codec)
    assert near(decode.decode_frame(codec, there(streams)), codec.decode(streams))


def damaged(streams: dict[str, torch.Tensor], kind: int) -> dict[str, torch.Tensor]:
    """Return ``streams`` with a flipped bit in a word or state, with a word moved to the next chunk, or unchanged."""
    arrays = {name: stream.numpy().copy() for name, stream in streams.items()}
    if kind in (1, 2):
        # All words of the first chunk are those of escapes, whose levels may be any; the second chunk begins with others.
        name, at = ("words", 19) if kind == 1 else ("states", 0)
        arrays[name].reshape(-1)[at] ^= 1 << kind
    elif kind == 3:
        arrays["word_counts"][0, 0, 0, 0] -= 1
        arrays["word_counts"][0, 1, 0, 0] += 1
    elif kind == 4:
        arrays["words"][0, 0, :] = 0xFFFF
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


@pytest.mark.parametrize("kind", range(5))
def test_streams_that_no_encoder_produces_are_refused_as_on_the_cpu(kind: int) -> None:
    from kvpack.kernels.decode import transform

    codec, streams = random_streams(8, 2, 16, 20, "k")
    streams = damaged(streams, kind)
    expected = outcome(lambda: codec.check_chunks({name: stream.numpy() for name, stream in streams.items()}, "0.k"))
    assert (expected is None) == (kind == 0)
    assert outcome(lambda: transform.check_chunks(codec, there(streams), "0.k")) == expected
    unbound = replace(codec, source=None)
    assert outcome(lambda: transform.check_chunks(unbound, there(streams), "0.k")) is None


def outcome(call: Any) -> str | None:
    try:
        call()
    except InvalidPayload as error:
        return str(error)
    return None


def test_invalid_streams_decode_to_arbitrary_values(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvpack.kernels.decode import decode
    from kvpack.kernels.decode.rows import PackedPart

    codec, streams = random_streams(8, 2, 16, 40, "k")
    generator = torch.Generator().manual_seed(0)
    for stream in streams.values():
        stream.view(torch.int16).random_(generator=generator)
    out = torch.full((1, 2, 40, 8), torch.nan, device=DEVICE)
    assert decode.decode_into(codec, [PackedPart(there(streams), 40, 0)], out, True)
    assert not out.isnan().any()
    assert decode.decode_into(codec, [], out, True)
    with pytest.raises(InvalidParameter, match=r"states has shape \[1, 2, 2, 64\], but the codec needs shape \[1, 2, 3, 64\]"):
        decode.decode_into(codec, [PackedPart(there({**streams, "states": streams["states"][:, :, 1:]}), 40, 0)], out, True)


def test_tables_with_wrong_totals_are_left_to_torch() -> None:
    from kvpack.kernels.decode import decode, transform
    from kvpack.kernels.decode.rows import PackedPart

    codec, streams = random_streams(8, 2, 16, 20, "v")
    source = codec.source_for(2)
    frequencies = source.tables.frequencies.copy()
    frequencies[0] += 1
    codec = replace(codec, source=Frames(source.rows, source.scales, SymbolTables(frequencies, source.tables.values)))
    out = torch.empty(1, 2, 20, 8, device=DEVICE)
    assert not decode.decode_into(codec, [PackedPart(there(streams), 20, 0)], out, True)
    expected = outcome(lambda: codec.check_chunks({name: stream.numpy() for name, stream in streams.items()}, "x"))
    assert outcome(lambda: transform.check_chunks(codec, there(streams), "x")) == expected


@pytest.mark.scenario
def test_device_results_equal_cpu_results(basis: Basis, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = kvpack.pack([pair(40)], kvpack.Recipe("kv=transform:bits=3,chunk=16;tail=16", basis)).append([pair(5)])
    q = torch.randn(1, 4, 3, 12, generator=torch.Generator().manual_seed(1))
    expected = kvpack.attend(q, cache[0])
    monkeypatch.setenv(dispatch.VARIABLE, "triton")
    k, v = cache.to(DEVICE)[0].unpack(torch.float32)
    attended = kvpack.attend(q.to(DEVICE), cache.to(DEVICE)[0]).cpu()
    monkeypatch.setenv(dispatch.VARIABLE, "torch")
    for found, side in ((k, cache[0].k), (v, cache[0].v)):
        assert found is not None
        assert side is not None
        assert near(found, side.unpack(torch.float32))
    torch.testing.assert_close(attended, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.scenario
def test_files_are_checked_on_the_device(basis: Basis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.kvpack"
    kvpack.save(kvpack.pack([pair(20)], kvpack.Recipe("kv=transform:bits=3,chunk=16", basis)), path)
    expected = kvpack.load(path, basis=basis).unpack(torch.float32)
    monkeypatch.setenv(dispatch.VARIABLE, "triton")
    asked: list[str] = []
    turned: list[int] = []
    check = dispatch.check_chunks

    def asking(codec: Transform, streams: dict[str, torch.Tensor], where: str) -> None:
        asked.append(where)
        for bit in turned:
            streams["words"].view(torch.int16)[0, 0, 0] ^= bit
        check(codec, streams, where)

    monkeypatch.setattr(dispatch, "check_chunks", asking)

    def load(**part: Any) -> kvpack.Cache:
        if not INTERPRETED:
            return kvpack.load(path, basis=basis, device=DEVICE, **part)
        return files.read_to_device(HostCopyQueue(), container.open_file(path), basis=basis, **part)

    for found, own in zip(load().unpack(torch.float32)[0], expected[0], strict=True):
        assert found is not None
        assert own is not None
        assert near(found, own)
    assert asked == ["0.k", "0.v"]
    # The last chunk of a part is coded again on the CPU, which checks it.
    assert load(tokens=18).tokens == 18
    assert len(asked) == 2
    turned.append(1)
    with pytest.raises(InvalidPayload, match=r"x.kvpack: 0.k.words: the chunk at \[0, 0, 0\] uses \d+ of its \d+ words and ends in"):
        load()
