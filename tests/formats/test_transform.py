"""Tests of the codec transform: its worked example, its basis, refusals, slices of caches, and attention over it."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvpack
from kvpack import cli
from kvpack.cache import side as sides
from kvpack.coding.bases import Basis, basis_bytes
from kvpack.coding.presets import CALIBRATED_RAW_CLAUSE
from kvpack.formats import rans, transform
from kvpack.formats.errors import InvalidHeader, InvalidParameter, InvalidPayload, MissingBasis, OutOfBounds, ValueTooLarge
from kvpack.formats.frames import Frames, Rope, SymbolTables
from kvpack.formats.transform import Transform
from support.klt_bases import random_basis, random_tables, transform_of, with_random_frames
from support.sidecar_recipes import attention
from support.spec_pages import SPEC, section
from support.strategies import check_round_trip, codecs, create, tensors

if TYPE_CHECKING:
    from pathlib import Path

SHAPES = {(0, "k"): (2, 32), (0, "v"): (2, 48), (1, "k"): (2, 32), (1, "v"): (2, 48)}
SCOPES = {(0, "k"): "layer", (0, "v"): "head", (1, "k"): "head", (1, "v"): "layer"}
RECIPE = "kv=transform:bits=4,chunk=16"


@pytest.fixture(scope="module")
def basis() -> Basis:
    return Basis.from_bytes(random_basis(SHAPES, 2, scopes=SCOPES))


def pairs(tokens: int, batch: int = 1, seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(tokens + seed)
    return [
        (torch.randn(batch, 2, tokens, 32, generator=generator), torch.randn(batch, 2, tokens, 48, generator=generator)) for _ in range(2)
    ]


@settings(max_examples=12, deadline=None)
@given(st.data())
def test_values_survive_a_round_trip(data: st.DataObject) -> None:
    codec = data.draw(codecs("transform"))
    check_round_trip(codec, data.draw(tensors(codec.dim)))


def example() -> dict[str, str]:
    lines = re.search(r"```example\n(.*?)```", section(SPEC / "codecs" / "transform.md", "Worked example"), re.DOTALL)
    assert lines is not None
    return dict(line.split(": ", 1) for line in lines[1].strip().split("\n"))


def parse_raw_clause(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint16)


def test_the_worked_example_is_reproduced() -> None:
    found = example()
    stated: dict[str, Any] = ast.literal_eval(found["parameters"]) | {"basis": bytes.fromhex(found["basis"])}
    names = ("dim", "basis", "layer", "side", "scope", "step", "chunk")
    tables = SymbolTables(numpy.array(ast.literal_eval(found["frequencies"])), torch.tensor(ast.literal_eval(found["values"])))
    rope = Rope(tuple(ast.literal_eval(found["rope.halves"])), "halves")
    frames = Frames(torch.tensor([ast.literal_eval(found["rows"])]), numpy.array([ast.literal_eval(found["scales"])]), tables, rope)
    codec = replace(Transform.from_params({name: stated[name] for name in names}), source=frames)
    first, count, others = re.fullmatch(r"([0-9a-f ]+), then (\d+) times ([0-9a-f ]+)", found["states"]).groups()  # type: ignore[union-attr]
    streams = {name: parse_raw_clause(found[name]) for name in ("positions", "tokens", "columns", "word_counts", "words")}
    streams["states"] = parse_raw_clause(first + int(count) * f" {others}")
    shapes = {"positions": (1, 1, 1, 2), "states": (1, 1, 1, 64), "word_counts": (1, 1, 1, 2), "words": (1, 1, 2)}
    streams = {name: stream.view(shapes.get(name, (1, 1, 1))) for name, stream in streams.items()}
    arrays = {name: stream.numpy() for name, stream in streams.items()}
    codec.check(arrays, "x")
    codec.check_runs(arrays, (2,), "x")
    codec.check_chunks(arrays, "x")
    ((first_chunk, symbols),) = codec.symbols(streams)
    assert first_chunk == 0
    assert symbols.symbols[0].tolist() == ast.literal_eval(found["symbols"])
    assert replace(codec, source=Frames(frames.rows, frames.scales, tables)).decode(streams)[0, 0].tolist() == ast.literal_eval(
        found["before RoPE"]
    )
    torch.testing.assert_close(codec.decode(streams)[0, 0, 0], torch.tensor([0.51713, 0.59573]), rtol=0, atol=1e-5)


def test_caches_keep_their_values_in_files_and_parts(basis: Basis, tmp_path: Path) -> None:
    cache = kvpack.pack(pairs(40, 2), kvpack.Recipe(RECIPE, basis), start=1000).append(pairs(13, 2))
    path = tmp_path / "x.kvpack"
    assert kvpack.save(cache, path) == cache.nbytes
    loaded = kvpack.load(path, basis=basis)
    expected = [side.unpack(torch.float32) for layer in cache for side in layer.sides.values()]
    for found, values in zip([side for layer in loaded for side in layer.sides.values()], expected, strict=True):
        assert torch.equal(found.unpack(torch.float32), values)
        # The part of a chunk is coded again.
        torch.testing.assert_close(found.prefix(23).unpack(torch.float32), values[:, :, :23])
        torch.testing.assert_close(found.slice(16, 40).unpack(torch.float32), values[:, :, 16:40])
        torch.testing.assert_close(found.select([1, 1]).unpack(torch.float32), values[[1, 1]])
    again = tmp_path / "y.kvpack"
    kvpack.save(loaded[:, :23], again)
    for layer, whole in zip(kvpack.load(again, basis=basis), loaded, strict=True):
        for name, side in layer.sides.items():
            torch.testing.assert_close(side.unpack(torch.float32), whole.sides[name].unpack(torch.float32)[:, :, :23])
    assert loaded.append(pairs(5, 2)).tokens == 58
    assert [side.tail.shape[2] for layer in loaded for side in layer.sides.values()] == [13] * 4
    with pytest.raises(OutOfBounds, match="begins 5 tokens into a run"):
        loaded[:, 5:20]


def test_positions_are_those_of_the_tokens(basis: Basis) -> None:
    def first(cache: kvpack.Cache) -> list[int]:
        assert cache[0].k is not None
        return [int(row) for page in cache[0].k.runs for row in page.streams["positions"][0, 0, :, 0].to(torch.int64)]

    cache = kvpack.pack(pairs(32), kvpack.Recipe(RECIPE, basis), start=1000)
    assert first(cache) == [1000, 1016]
    assert first(cache.append(pairs(16))) == [1000, 1016, 1032]
    assert first(kvpack.pack(pairs(40), "raw", start=7).convert(kvpack.Recipe(RECIPE, basis))) == [7, 23, 39]
    skipped = [(k, v, 100) for k, v in pairs(32)]
    assert first(kvpack.pack(skipped, kvpack.Recipe(RECIPE, basis), start=7)) == [107, 123]
    assert first(kvpack.pack(pairs(16), kvpack.Recipe(f"{RECIPE};tail=32", basis), start=7).append(pairs(16))) == [7, 23]
    # Without the position of the cache, tokens follow those that are there.
    layer = cache[0].append(*pairs(16)[0])
    assert layer.k is not None
    assert layer.k.runs[-1].streams["positions"].flatten().tolist() == [1032, 0]


def test_values_do_not_depend_on_the_position(basis: Basis) -> None:
    # The last has a group behind the largest position that there is.
    for start in (0, 70000, 2**31, 2**40 - 100, 2**32 - 5):
        cache = kvpack.pack(pairs(20), kvpack.Recipe(RECIPE, basis), start=start)
        for (k, v), (found_k, found_v) in zip(pairs(20), cache.unpack(torch.float32), strict=True):
            for x, found in ((k, found_k), (v, found_v)):
                assert found is not None
                assert (x - found).norm() < 0.2 * x.norm()


def test_sequences_with_another_rope_are_refused(basis: Basis) -> None:
    def limited(longest: int | None) -> Basis:
        frames = {place: basis.frames(*place) for place in basis.sides_with_frames()}
        turned = {place: one.rope and one.rope._replace(longest=longest) for place, one in frames.items()}
        made = {place: Frames(one.rows, one.scales, one.tables, turned[place]) for place, one in frames.items()}
        rows = {place: basis.rows(*place).rows[0] for place in basis.sides()}
        return Basis.from_bytes(basis_bytes(rows, basis.layers, {"name": "x"}, frames=made))

    limit = limited(30)
    assert dict(limit.model) == {"name": "x", "rope_same_up_to": "30"}
    assert limit.frames(0, "k").rope._replace(longest=None) == limited(None).frames(0, "k").rope  # type: ignore[union-attr]
    assert kvpack.pack(pairs(20), kvpack.Recipe(RECIPE, limit), start=10).tokens == 20
    for start, tokens in ((11, 20), (0, 31), (2**39, 1)):
        with pytest.raises(ValueTooLarge, match=rf"layers\[0\].k.* the sequence has {start + tokens} tokens, but .* at most 30 tokens"):
            kvpack.pack(pairs(tokens), kvpack.Recipe(RECIPE, limit), start=start)
    assert kvpack.pack([(None, v) for _, v in pairs(40)], kvpack.Recipe(RECIPE, limit)).tokens == 40
    for text in ("0", "x", "-5", "1" * 19, ""):
        data = random_basis(SHAPES, 2, scopes=SCOPES, model={"rope_same_up_to": text})
        with pytest.raises(InvalidHeader, match=r"basis: model.rope_same_up_to is .*, expected a positive number of tokens"):
            Basis.from_bytes(data)


def test_attention_is_over_the_decoded_values(basis: Basis) -> None:
    cache = kvpack.pack(pairs(70), kvpack.Recipe(f"{RECIPE};tail=32", basis)).append(pairs(5))
    q = torch.randn(1, 4, 3, 32, generator=torch.Generator().manual_seed(1))
    k, v = cache[1].unpack(torch.float32)
    assert k is not None
    assert v is not None
    torch.testing.assert_close(kvpack.attend(q, cache[1]), attention(q, k, v).float(), rtol=0, atol=1e-5)


def test_a_file_is_converted_to_one_that_kernels_attend(basis: Basis, tmp_path: Path) -> None:
    path = tmp_path / "x.kvpack"
    kvpack.save(kvpack.pack(pairs(40), kvpack.Recipe(RECIPE, basis)), path)
    loaded = kvpack.load(path, basis=basis, recipe=kvpack.Recipe("klt-4", basis))
    assert {side.codec.id for layer in loaded for side in layer.sides.values()} == {"klt"}
    assert kvpack.load(path, basis=basis, recipe="klt-4").recipe == loaded.recipe
    whole = kvpack.load(path, basis=basis).convert(kvpack.Recipe("klt-4", basis))
    for layer, other in zip(loaded, whole, strict=True):
        for name, side in layer.sides.items():
            assert torch.equal(side.unpack(torch.float32), other.sides[name].unpack(torch.float32))


def test_an_unsuitable_basis_is_refused(basis: Basis, tmp_path: Path) -> None:
    path = tmp_path / "x.kvpack"
    kvpack.save(kvpack.pack(pairs(20), kvpack.Recipe(RECIPE, basis)), path)
    with pytest.raises(MissingBasis, match=f"the basis {basis.digest.hex()} is needed"):
        kvpack.load(path)
    with pytest.raises(InvalidParameter, match="the frames are for 2 heads, but the values have 1"):
        kvpack.pack([(k[:, :1], v[:, :1]) for k, v in pairs(3)], kvpack.Recipe(RECIPE, basis))
    with pytest.raises(MissingBasis, match=f"recipe '{RECIPE}' needs a basis"):
        kvpack.pack(pairs(3), RECIPE)
    for scopes, message in (({}, "has no frames for the keys of layer 0"), (dict.fromkeys(SHAPES, "head"), "scope is layer")):
        other = Basis.from_bytes(random_basis(SHAPES, 2, scopes=scopes))
        other.digest = basis.digest
        with pytest.raises(InvalidHeader, match=message):
            kvpack.load(path, basis=other)
    with pytest.raises(OutOfBounds, match="no frames for the keys of layer 0"):
        kvpack.pack(pairs(3), kvpack.Recipe("transform-4", Basis.from_bytes(random_basis(SHAPES, 2))))
    codec = transform_of(basis, 0, "k", 20)
    with pytest.raises(MissingBasis, match=r"keys of layer 0 of the basis [0-9a-f]{64} are needed, but no basis was passed"):
        codec.encode(torch.zeros(1, 2, 1, 32))


def test_streams_that_no_encoder_produces_are_refused_if_the_basis_is_known(basis: Basis, tmp_path: Path) -> None:
    cache = kvpack.pack(pairs(20), kvpack.Recipe(RECIPE, basis))
    side = cache[0].k
    assert side is not None
    streams = {name: stream.numpy().copy() for name, stream in side.runs[0].streams.items()}
    streams["words"][0, 0, 3] ^= 1
    unbound = replace(side.codec, source=None)
    unbound.check(streams, "x")
    unbound.check_runs(streams, (20,), "x")
    unbound.check_chunks(streams, "x")
    side.codec.check_runs(streams, (20,), "x")
    with pytest.raises(InvalidPayload, match=r"x.words: the chunk at \[0, 0, 0\]"):
        side.codec.check_chunks(streams, "x")
    with pytest.raises(InvalidPayload, match=r"x.tokens: the count at \[0, 0, 1\] is 4, expected 5"):
        side.codec.check_runs(streams, (21,), "x")


def test_values_beyond_the_table_are_stored_up_to_32_bits() -> None:
    codec = with_random_frames(create("transform", 32), 0)
    x = torch.zeros(1, 1, 20, 32)
    x[0, 0, 3, 5], x[0, 0, 7, 0] = 1e6, -3e4
    assert (codec.decode(codec.encode(x)) - x).abs().max() < 4
    with pytest.raises(ValueTooLarge, match=r"steps from the mean, but the limit is 2147483647"):
        codec.encode(x * 1e5)
    frames = codec.source_for(1)
    tables = SymbolTables(frames.tables.frequencies.copy(), frames.tables.values)
    tables.frequencies[:, 4] += tables.frequencies[:, 0]
    tables.frequencies[:, 0] = 0
    with pytest.raises(ValueTooLarge, match="a value's level has no symbol in its table"):
        replace(codec, source=Frames(frames.rows, frames.scales, tables)).encode(x)
    nearly = frames.rows.clone()
    nearly[:, 2] = nearly[:, 1] * (1 + 1e-6)
    for rows in (torch.zeros_like(frames.rows), nearly):
        with pytest.raises(ValueTooLarge, match=r"is inaccurate|has no inverse"):
            replace(codec, source=Frames(rows, frames.scales, frames.tables)).encode(x)


def test_recipes_give_bits_from_which_a_step_is_computed(basis: Basis) -> None:
    digest = basis.digest.hex()
    assert kvpack.Recipe("transform-0.6", basis).text == f"kv=transform:basis={digest},bits=0.6;{CALIBRATED_RAW_CLAUSE}"
    assert [basis.step(bits) for bits in (8, 4)] == sorted((basis.step(bits) for bits in (8, 4)), reverse=True)
    assert basis.transform_bits(basis.step(4)) <= 4
    # Tokens that are kept raw count: what is left for symbols is less.
    more = basis.transform_bits(255, raw=True) - basis.transform_bits(255)
    assert more == pytest.approx(0.003 * (16 + 64 / 80), rel=0.01)
    text = f"kv=transform:bits={basis.min_transform_bits() + more / 2:.6f}"
    assert kvpack.Recipe(f"{text};raw=0", basis).codec(0, 2, "k", 32).id == "transform"
    with pytest.raises(InvalidParameter, match=f"at least {basis.min_transform_bits(raw=True):.4g} bits"):
        kvpack.Recipe(f"{text};raw=1,0.6", basis).codec(0, 2, "k", 32)
    mixed = kvpack.Recipe("k=transform:bits=4;v=klt:bits=4", basis)
    assert [mixed.codec(0, 2, side, dim).id for side, dim in (("k", 32), ("v", 48))] == ["transform", "klt"]
    for text, message in (
        ("transform-9", "transform:bits is '9', expected 0.05 to 8"),
        ("kv=transform:chunk=17", "chunk"),
        ("kv=transform:norm=fp16", "codec transform has no option 'norm'"),
    ):
        with pytest.raises(InvalidParameter, match=message):
            kvpack.Recipe(text)
    with pytest.raises(InvalidParameter, match=r"bits is 0.01, expected 0.05 to 8"):
        basis.step(0.01)
    least = basis.min_transform_bits()
    with pytest.raises(InvalidParameter, match=rf"bits is 0.05, .* transform codec needs at least {least:.4g} .* write transform-") as told:
        basis.step(0.05)
    accepted = float(str(told.value).split("transform-")[1].split()[0])
    assert least <= accepted < least + 0.011
    assert basis.transform_bits(basis.step(accepted)) <= accepted


def test_commands_accept_a_basis(basis: Basis, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    packed, given = tmp_path / "x.kvpack", tmp_path / "b.kvbasis"
    given.write_bytes(random_basis(SHAPES, 2, scopes=SCOPES))
    kvpack.save(kvpack.pack(pairs(20), "raw"), packed)
    assert cli.main(["convert", str(packed), str(tmp_path / "y.kvpack"), RECIPE, "--basis", str(given)]) == 0
    assert cli.main(["inspect", str(tmp_path / "y.kvpack")]) == 0
    assert f"needs the basis {basis.digest.hex()}" in capsys.readouterr().out
    assert cli.main(["verify", str(tmp_path / "y.kvpack"), str(given)]) == 0
    out = capsys.readouterr().out
    assert "all checked except what needs the basis" in out
    assert cli.main(["verify", "--basis", str(given), str(tmp_path / "y.kvpack")]) == 0
    assert "all checked\n" in capsys.readouterr().out
    dense = str(tmp_path / "z.safetensors")
    assert cli.main(["unpack", str(tmp_path / "y.kvpack"), dense, "--basis", str(tmp_path)]) == 0


def test_sizes_match_the_specification() -> None:
    codec = Transform(128, bytes(32), 0, "v", "head", 0, 256)
    layout = codec.layout(1, 1, 256)
    assert sum(2 * numpy.prod(entry.shape) for name, entry in layout.items() if name != "words") == 134 + 2
    assert random_tables("x").bits.shape == (5,)


def many(basis: Basis, sequences: int) -> kvpack.Cache:
    return kvpack.pack(pairs(40, sequences), kvpack.Recipe(RECIPE, basis))


def test_slices_decode_to_the_same_values(basis: Basis, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = many(basis, 5)
    whole = cache.unpack(torch.float32)
    cut = cache[:, :21].unpack(torch.float32)
    queries = [torch.randn(5, 2 * layer.k.heads, 3, layer.k.dim, generator=torch.Generator().manual_seed(0)) for layer in cache]
    lengths, starts = torch.tensor([40, 37, 40, 40, 30]), torch.tensor([0, 3, 0, 10, 5])
    attended = [kvpack.attend(q, layer, lengths=lengths, starts=starts) for q, layer in zip(queries, cache, strict=True)]
    norms = cache[0].k.norms(3)
    for symbols, values in ((1, 1), (1 << 13, 1 << 24), (1 << 22, 1 << 12)):
        monkeypatch.setattr(transform, "_SYMBOLS_AT_ONCE", symbols)
        monkeypatch.setattr(sides, "GROUP_VALUES", values)
        for found, expected in ((cache, whole), (cache[:, :21], cut)):
            for own, layer in zip(found.unpack(torch.float32), expected, strict=True):
                assert all(map(torch.equal, own, layer))
        assert torch.equal(cache[0].k.norms(3), norms)
        for q, layer, result in zip(queries, cache, attended, strict=True):
            torch.testing.assert_close(kvpack.attend(q, layer, lengths=lengths, starts=starts), result, rtol=1e-5, atol=1e-5)


def test_symbols_are_decoded_in_bounded_batches(basis: Basis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound holds for any number of sequences and token groups, because a chunk without columns takes almost no bytes."""
    cache = many(basis, 40)
    kvpack.save(cache, tmp_path / "x.kvpack")
    decode, sizes = rans.decode, []

    def counted(chunks: rans.Chunks, lengths: Any, *rest: Any) -> rans.DecodedChunks:
        sizes.append(len(lengths) * int(lengths.max(initial=0)))
        return decode(chunks, lengths, *rest)

    monkeypatch.setattr(rans, "decode", counted)
    limit = 2 * max(layer.k.heads * layer.k.dim for layer in cache) * cache[0].k.codec.group_tokens
    monkeypatch.setattr(transform, "_SYMBOLS_AT_ONCE", limit)
    monkeypatch.setattr(sides, "GROUP_VALUES", limit)
    loaded = kvpack.load(tmp_path / "x.kvpack", basis=basis)
    assert sizes
    assert max(sizes) <= limit
    for use in (
        lambda: loaded.unpack(),
        lambda: loaded[:, :21],
        lambda: loaded[0].k.norms(),
        lambda: kvpack.attend(torch.zeros(40, loaded[0].k.heads, 1, loaded[0].k.dim), loaded[0]),
    ):
        sizes.clear()
        use()
        assert sizes
        assert max(sizes) <= limit


def test_an_invalid_chunk_is_named_in_any_slice(basis: Basis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = many(basis, 5)
    page = cache[0].k.runs[0]
    page.streams["states"][3, 1, 0, 0] ^= 1
    kvpack.save(cache, tmp_path / "x.kvpack")
    messages = set()
    for symbols in (1, 1 << 13, 1 << 22):
        monkeypatch.setattr(transform, "_SYMBOLS_AT_ONCE", symbols)
        with pytest.raises(InvalidPayload, match=r"\[3, 1, 0\]") as raised:
            kvpack.load(tmp_path / "x.kvpack", basis=basis)
        messages.add(str(raised.value))
    assert len(messages) == 1
