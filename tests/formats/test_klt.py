"""Tests of the codec klt: its worked example, its basis, refusals, and attention over it."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvpack
from kvpack import cli
from kvpack.cache import files
from kvpack.cache.cache import Cache
from kvpack.cache.layer import Layer
from kvpack.cache.side import pack_side
from kvpack.coding.bases import Basis, basis_bytes
from kvpack.coding.presets import CALIBRATED_RAW_CLAUSE
from kvpack.file import container
from kvpack.formats.basis import BasisRows, row_count
from kvpack.formats.errors import InvalidHeader, InvalidParameter, InvalidPayload, LimitExceeded, MissingBasis, OutOfBounds, ValueTooLarge
from kvpack.formats.frames import Frames
from kvpack.formats.klt import Klt, columns_by_width
from support.file_parts import change_file
from support.klt_bases import random_basis, random_frames, random_rows, random_tables, with_random_basis
from support.sidecar_recipes import attention
from support.spec_pages import SPEC, section
from support.strategies import check_round_trip, codecs, create, tensors

if TYPE_CHECKING:
    from pathlib import Path

SHAPES = {(0, "k"): (2, 32), (0, "v"): (2, 48), (1, "k"): (2, 32), (1, "v"): (2, 48)}


@pytest.fixture(scope="module")
def basis() -> Basis:
    return Basis.from_bytes(random_basis(SHAPES, 2))


def pairs(tokens: int, batch: int = 1, seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(tokens + seed)
    return [
        (torch.randn(batch, 2, tokens, 32, generator=generator), torch.randn(batch, 2, tokens, 48, generator=generator)) for _ in range(2)
    ]


@settings(max_examples=12)
@given(st.data())
def test_values_survive_a_round_trip_within_the_bound(data: st.DataObject) -> None:
    codec = data.draw(codecs("klt"))
    check_round_trip(codec, data.draw(tensors(codec.dim)))


@settings(max_examples=12)
@given(st.data())
def test_values_survive_a_round_trip_with_widths_per_head(data: st.DataObject) -> None:
    dim, heads = data.draw(st.sampled_from((1, 5, 8, 13, 24, 64))), data.draw(st.integers(1, 3))
    widths = data.draw(st.lists(st.integers(0, 8), min_size=heads * -(-dim // 8), max_size=heads * -(-dim // 8)).filter(any))
    codec = of_heads(dim, heads, bytes(widths), data.draw(st.sampled_from(("none", "fp16"))), data.draw(st.sampled_from(("fp16", "fp32"))))
    x = data.draw(tensors(dim))
    check_round_trip(codec, x.repeat(1, heads, 1, 1)[:, :heads].contiguous())


def of_heads(dim: int, heads: int, widths: bytes, gain: str = "none", rows: str = "basis") -> Klt:
    return Klt.from_widths(dim, bytes(32), 0, "k", widths, gain, rows, BasisRows(random_rows(heads, dim, "k")[None]), per_head=True)


@pytest.mark.parametrize("gain", ["none", "fp16"])
def test_equal_widths_per_head_decode_like_shared_ones(gain: str) -> None:
    """Two short runs have the same codes and gains as one run in which all heads share widths, but their bytes differ."""
    own = of_heads(40, 3, bytes((5, 5, 0, 0, 2)) * 3, gain)
    shared = Klt.from_widths(40, bytes(32), 0, "k", bytes((5, 0, 2)), gain, "basis", own.source)
    x = torch.randn(2, 3, 50, 40, generator=torch.Generator().manual_seed(5))
    found, expected = own.encode(x), shared.encode(x)
    assert torch.equal(own.decode(found), shared.decode(expected))
    assert found["codes"].shape == (2, 1, 50, 3 * 12)
    assert own.nominal_bits == 8 * 12 / 40 + (0.4 if gain == "fp16" else 0) == shared.nominal_bits


def test_codes_of_a_short_run_start_at_the_lowest_bit() -> None:
    codec = of_heads(10, 2, bytes((3, 2, 0, 5)))
    codes = torch.tensor([0b10_001_000, 0b1_100_011_0, 0b111_110_10, 0b0000_10_01, 0b010_00001, 0b000000_10], dtype=torch.uint8)
    found = {part.width: digits.flatten().tolist() for part, digits in codec.head_codes({"codes": codes.view(1, 1, 1, 6)})}
    assert found == {2: [1, 2, 0, 0, 0, 0, 0, 0], 3: [0, 1, 2, 3, 4, 5, 6, 7], 5: [1, 18, 0, 0, 0, 0, 0, 0]}
    assert [codec.row_bytes, codec.code_bit_masks] == [6, [255, 255, 255, 0b1111, 255, 0b11]]
    codec.check({"codes": codes.view(1, 1, 1, 6).numpy()}, "x")
    codes[5] |= 4
    with pytest.raises(InvalidPayload, match=r"x.codes: the byte at \[0, 0, 0, 5\] is 6, expected zero bits after the last column"):
        codec.check({"codes": codes.view(1, 1, 1, 6).numpy()}, "x")


def test_widths_per_head_require_the_same_number_of_heads(basis: Basis, tmp_path: Path) -> None:
    codec = of_heads(8, 2, b"\1\2")
    with pytest.raises(InvalidParameter, match="for 2 heads, but the values have 3"):
        replace(codec, source=BasisRows(random_rows(3, 8, "k")[None])).encode(torch.zeros(1, 3, 1, 8))
    path = tmp_path / "x.kvpack"
    kvpack.save(kvpack.pack(pairs(3), kvpack.Recipe("kv=klt:rows=fp16,widths=heads", basis)), path)

    def fewer(parts: Any) -> None:
        parts.header["codecs"][0]["widths"] = parts.header["codecs"][0]["widths"][:4]

    path.write_bytes(change_file(path.read_bytes(), fewer))
    with pytest.raises(InvalidHeader, match=r"layers\[0\].k.heads is 2, but the widths of codec klt are for 1 heads"):
        kvpack.load(path)


def test_heads_get_bits_by_importance() -> None:
    """Errors in the second head cost a hundredth of those in the first, so it gets fewer bits."""
    rows = random_rows(1, 32, "x").repeat(2, 1, 1)
    rows[1, 33] /= 16
    basis = Basis.from_bytes(basis_bytes({(0, "k"): rows}, 1, {"name": "x"}))
    widths = basis.widths(2.0, per_head=True)[0, "k"]
    assert sum(widths[:4]) > 2 * sum(widths[4:])
    assert [len(basis.widths(2.0)[0, "k"]), len(widths)] == [2, 8]
    codec = kvpack.Recipe("klt-2", basis).codec(0, 1, "k", 32)
    assert (codec.without_sidecars.fixed_heads, codec.nominal_bits) == (2, sum(widths) / 8)
    assert kvpack.Recipe("kv=klt", basis).codec(0, 1, "k", 32).without_sidecars.fixed_heads is None


def test_the_worked_example_is_reproduced() -> None:
    lines = re.search(r"```example\n(.*?)```", section(SPEC / "codecs" / "klt.md", "Worked example"), re.DOTALL)
    assert lines is not None
    found = dict(line.split(": ", 1) for line in lines[1].strip().split("\n"))
    stated: dict[str, Any] = ast.literal_eval(found["parameters"])
    stated |= {"basis": bytes.fromhex(found["basis"]), "widths": bytes.fromhex(found["widths"])}
    names = ("dim", "basis", "layer", "side", "rows", "widths", "gain", "fields")
    codec = Klt.from_params({name: stated[name] for name in names})
    rows = torch.zeros(row_count(2), 2)
    rows[0] = torch.tensor(ast.literal_eval(found["m"])) / 256
    rows[1:3] = torch.tensor(ast.literal_eval(found["D"]))
    values = rows[4:].view(-1)
    values[2:6] = torch.tensor(ast.literal_eval(found["table of run 0 at 2 bits"]))
    streams = {
        "codes_2.0": torch.frombuffer(bytearray.fromhex(found["codes_2.0"]), dtype=torch.uint16).view(1, 1, 1, -1),
        "gain": torch.frombuffer(bytearray.fromhex(found["gain"]), dtype=torch.float16).view(1, 1, 1),
        "rows": rows.to(torch.float16)[None, None, None],
    }
    assert codec.unpack("codes_2", streams)[0].flatten().tolist() == ast.literal_eval(found["codes_2"])
    assert codec.decode(streams).flatten().tolist() == ast.literal_eval(found["decoded"])


def test_sizes_match_the_specification() -> None:
    table = section(SPEC / "codecs" / "klt.md", "Layout")
    for widths, size, bits in re.findall(r"^\| ((?:\d ){7}\d) \| (\d+) \| ([\d.]+) \|$", table, re.MULTILINE):
        codec = Klt.from_widths(128, bytes(32), 0, "k", bytes(map(int, widths.split())))
        assert sum(packing.row_bytes for packing in codec.packings().values()) + 2 == int(size)
        assert codec.nominal_bits == float(bits)
    assert (row_count(128), 2 * 128 * row_count(128)) == (162, 41472)


@pytest.mark.parametrize("widths", ["heads", "shared"])
@pytest.mark.parametrize("rows", ["basis", "fp16"])
def test_caches_keep_their_values_in_files_and_parts(basis: Basis, rows: str, widths: str, tmp_path: Path) -> None:
    cache = kvpack.pack(pairs(20, 2), kvpack.Recipe(f"kv=klt:bits=4,rows={rows},widths={widths}", basis)).append(pairs(13, 2))
    path = tmp_path / "x.kvpack"
    assert kvpack.save(cache, path) == cache.nbytes
    loaded = kvpack.load(path, basis=basis)
    expected = [side.unpack(torch.float32) for layer in cache for side in layer.sides.values()]
    for found, values in zip([side for layer in loaded for side in layer.sides.values()], expected, strict=True):
        assert torch.equal(found.unpack(torch.float32), values)
        torch.testing.assert_close(found.prefix(7).unpack(torch.float32), values[:, :, :7])
        torch.testing.assert_close(found.select([1, 1]).unpack(torch.float32), values[[1, 1]])
    # The page goes on after it was loaded: with its own rows, or with those of the basis.
    assert loaded.append(pairs(5, 2)).tokens == 38
    assert (cache.layers[0].k.merged_runs() if cache.layers[0].k else ()) == (33,)
    if rows == "fp16":
        for layer, other in zip(kvpack.load(path).append(pairs(5, 2)), loaded.append(pairs(5, 2)), strict=True):
            for name, side in layer.sides.items():
                assert torch.equal(side.unpack(torch.float32), other.sides[name].unpack(torch.float32))


def test_a_cache_without_packed_tokens_is_extended_with_the_given_basis(basis: Basis, tmp_path: Path) -> None:
    """The rows in a file only help to decode packed tokens, so a file without packed tokens needs the basis."""
    recipe, path = "kv=klt:bits=4,rows=fp16;tail=32", tmp_path / "x.kvpack"
    cache = kvpack.pack(pairs(20), kvpack.Recipe(recipe, basis))
    kvpack.save(cache, path)
    bare, added = kvpack.load(path), pairs(15)
    with pytest.raises(MissingBasis, match="no basis was passed: pass basis= when loading or converting the cache"):
        bare.append(added)
    other = tmp_path / "other.kvbasis"
    other.write_bytes(random_basis({(0, "k"): (2, 16)}, 2))
    # Of no use, but no fault either: no token needs it.
    with pytest.raises(MissingBasis):
        kvpack.load(path, basis=other).append(added)
    assert kvpack.load(path, basis=tmp_path / "none.kvbasis").tokens == 20
    expected = [side.unpack(torch.float32) for layer in cache.append(added) for side in layer.sides.values()]
    for found in (kvpack.load(path, basis=basis), bare.convert(kvpack.Recipe(recipe, basis)), kvpack.load(path, basis=[other, basis])):
        sides = [side for layer in found.append(added) for side in layer.sides.values()]
        for side, values in zip(sides, expected, strict=True):
            assert side.packed_tokens == 32
            assert torch.equal(side.unpack(torch.float32), values)


def test_attention_multiplies_queries_and_sums_only_once(basis: Basis) -> None:
    cache = kvpack.pack(pairs(70), kvpack.Recipe("kv=klt:bits=3;tail=32", basis)).append(pairs(5))
    q = torch.randn(1, 4, 3, 32, generator=torch.Generator().manual_seed(1))
    k, v = cache[1].unpack(torch.float32)
    assert k is not None
    assert v is not None
    torch.testing.assert_close(kvpack.attend(q, cache[1]), attention(q, k, v).float(), rtol=0, atol=1e-5)


def test_gains_correct_products_and_widths_reduce_the_error() -> None:
    x = torch.randn(1, 1, 2000, 32, generator=torch.Generator().manual_seed(3))
    errors = []
    for width in (1, 2, 4):
        codec = with_random_basis(create("klt", 32, rows="fp16", gain="fp16"), bytes([width, width]))
        streams = codec.encode(x)
        rows = codec.basis_rows(streams)
        values, found = (one @ rows.inverse - rows.mean for one in (x, codec.decode(streams)))
        weights = rows.weights.square()
        product, square = (weights * values * found).sum(-1), (weights * values.square()).sum(-1)
        # The few tokens that are more than 45 degrees from their codes keep the factor of least error.
        assert ((product - square).abs() <= 2e-3 * square).float().mean() > 0.99
        errors.append((weights * (values - found).square()).sum().item())
    assert errors[0] > errors[1] > errors[2]


def test_a_basis_is_found_by_its_digest(basis: Basis, tmp_path: Path) -> None:
    path, folder = tmp_path / "x.kvpack", tmp_path / "bases"
    kvpack.save(kvpack.pack(pairs(9), kvpack.Recipe("klt-2", basis)), path)
    folder.mkdir()
    other = random_basis(SHAPES, 2, seed="other")
    (folder / "a.kvbasis").write_bytes(other)
    for source in (folder, Basis.from_bytes(other), [folder, folder / "a.kvbasis"]):
        with pytest.raises(MissingBasis, match=f"the basis {basis.digest.hex()} is needed, but no basis that was passed"):
            kvpack.load(path, basis=source)
    with pytest.raises(MissingBasis, match=r"x\.kvpack: the basis [0-9a-f]{64} is needed: pass its file"):
        kvpack.load(path)
    (folder / "b.kvbasis").write_bytes(random_basis(SHAPES, 2))
    for source in (folder, folder / "b.kvbasis", basis, [Basis.from_bytes(other), folder]):
        assert kvpack.load(path, basis=source).tokens == 9
    with pytest.raises(InvalidParameter, match="is a basis, not a cache"):
        kvpack.load(folder / "b.kvbasis")
    with pytest.raises(InvalidParameter, match="is a cache, but a basis is needed"):
        Basis.load(path)


def test_unused_codecs_do_not_need_a_basis(basis: Basis, tmp_path: Path) -> None:
    path, codec = tmp_path / "x.kvpack", Klt.from_widths(32, basis.digest, 0, "k", b"\2\2")
    kvpack.save(kvpack.pack(pairs(3), "raw"), path)
    entry = {"id": codec.id, **codec.params()}
    path.write_bytes(change_file(path.read_bytes(), lambda parts: parts.header["codecs"].append(entry)))
    assert kvpack.load(path).tokens == 3


def test_an_unsuitable_basis_is_refused(basis: Basis, tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter, match="is a basis for a model with 2 layers, but the cache has 1"):
        kvpack.pack(pairs(3)[:1], kvpack.Recipe("klt-2", basis))
    with pytest.raises(InvalidParameter, match=r"layers\[0\].k: .*the head dim is 48, but the basis is for head dim 32"):
        kvpack.pack([(v, k) for k, v in pairs(3)], kvpack.Recipe("klt-2", basis))
    with pytest.raises(InvalidParameter, match="the basis is for 2 heads, but the values have 1"):
        kvpack.pack([(k[:, :1], v[:, :1]) for k, v in pairs(3)], kvpack.Recipe("klt-2", basis))
    with pytest.raises(InvalidParameter, match="model whose name is 'x', but the name of the cache's model is 'y'"):
        kvpack.pack(pairs(3), kvpack.Recipe("klt-2", basis), model={"name": "y"})
    with pytest.raises(MissingBasis, match="recipe 'klt-2' needs a basis: pass --basis FILE"):
        kvpack.pack(pairs(3), "klt-2")
    plain = kvpack.pack(pairs(3), "raw", model={"name": "y"})
    with pytest.raises(InvalidParameter, match="model whose name is 'x', but the name of the cache's model is 'y'"):
        plain.convert(kvpack.Recipe("klt-2", basis))
    with pytest.raises(MissingBasis, match="recipe 'klt-2' needs a basis: pass --basis FILE"):
        plain.convert("klt-2")
    with pytest.raises(OutOfBounds, match="the basis has no matrices for the values of layer 7"):
        basis.rows(7, "v")
    codec = Klt.from_widths(32, basis.digest, 0, "k", b"\2\2")
    with pytest.raises(MissingBasis, match=r"keys of layer 0 of the basis [0-9a-f]{64} are needed, but no basis was passed"):
        codec.encode(torch.zeros(1, 2, 1, 32))
    path = tmp_path / "x.kvpack"
    kvpack.save(kvpack.pack(pairs(3), kvpack.Recipe("klt-2", basis)), path)
    smaller = Basis.from_bytes(random_basis({(0, "k"): (1, 32)}, 1))
    smaller.digest = basis.digest
    with pytest.raises(InvalidHeader, match="the basis has no"):
        kvpack.load(path, basis=smaller)


def test_a_singular_matrix_can_decode_but_not_encode() -> None:
    rows = random_rows(1, 4, "singular")
    rows[:, 1:5] = 0
    codec = replace(with_random_basis(create("klt", 4, rows="fp32")), source=BasisRows(rows[None]))
    with pytest.raises(ValueTooLarge, match="no inverse"):
        codec.encode(torch.zeros(1, 1, 1, 4))
    with pytest.raises(InvalidParameter, match="basis rows have shape"):
        BasisRows(rows[None, :, :100])


def scaled_basis(rows: float = 1.0, tables: float = 1.0, weights: float = 1.0, frames: float = 1.0) -> Basis:
    """Return a basis of 32 channels in which some parts are multiplied by the given factors."""
    made = {}
    for side in "kv":
        one = random_rows(2, 32, f"scaled {side}").clone()
        one[:, 1:33] *= rows
        one[:, 33] *= weights
        one[:, 34:] *= tables
        made[0, side] = one
    framed = {}
    for side in "kv":
        of_side = random_frames(2, 32, "head", f"scaled {side}", random_tables("scaled"), side)
        framed[0, side] = Frames(of_side.rows * frames, of_side.scales, of_side.tables, of_side.rope)
    return Basis.from_bytes(basis_bytes(made, 1, {"name": "x"}, "fp32", framed))


@pytest.mark.parametrize(
    ("recipe", "scales", "message"),
    [
        ("kv=klt:bits=2,rows=fp16", {"weights": 7e4}, r"keys of layer 0 of the basis [0-9a-f]+: a row contains .*: set rows=fp32"),
        ("kv=klt:bits=2,rows=fp16", {"rows": 1e5}, "exceeds the largest fp16 value, 65504"),
        ("kv=klt:bits=2,rows=fp16", {"tables": 1e6}, "exceeds the largest fp16 value, 65504"),
        ("klt-2", {"rows": 1e30, "tables": 1e30}, "with the rows of the basis, a channel could decode to"),
        ("klt-2", {"rows": 1e37}, "with the rows of the basis, a channel could decode to"),
        ("klt-2", {"tables": 1e35}, "with the rows of the basis, a channel could decode to"),
        ("kv=klt:bits=2,rows=fp32", {"rows": 1e30, "tables": 1e30}, "with the rows of the basis, a channel could decode to"),
        ("transform-4", {"frames": 1e30}, "with the frames of the basis, a channel could decode to"),
    ],
)
def test_a_basis_that_decodes_to_infinities_cannot_encode(recipe: str, scales: dict[str, float], message: str) -> None:
    generator = torch.Generator().manual_seed(0)
    layer = [(torch.randn(1, 2, 40, 32, generator=generator),) * 2]
    with pytest.raises(ValueTooLarge, match=message):
        kvpack.pack(layer, kvpack.Recipe(recipe, scaled_basis(**scales)))


def test_large_rows_that_decode_to_finite_values_are_kept(tmp_path: Path) -> None:
    """The remedies that the error message suggests work, and weights whose squares overflow do not change values."""
    generator = torch.Generator().manual_seed(0)
    layer = [(torch.randn(1, 2, 40, 32, generator=generator),) * 2]
    for recipe, scales in (
        ("kv=klt:bits=2,rows=fp32", {"weights": 7e4}),
        ("klt-2", {"weights": 7e4}),
        ("klt-2", {"weights": 1e37}),
        ("kv=klt:bits=2,rows=fp32", {"rows": 1e10, "tables": 1e-10}),
        ("transform-4", {}),
    ):
        basis = scaled_basis(**scales)
        kvpack.save(kvpack.pack(layer, kvpack.Recipe(recipe, basis)), tmp_path / "x.kvpack")
        loaded = kvpack.load(tmp_path / "x.kvpack", basis=basis)
        assert all(side.isfinite().all() for side in loaded[0].unpack(torch.float32) if side is not None)


def test_caches_with_different_bases_cannot_be_joined(basis: Basis) -> None:
    other = Basis.from_bytes(random_basis(SHAPES, 2, seed="other"))
    first, next_ = (kvpack.pack(pairs(9), kvpack.Recipe("klt-2", one), start=start) for one, start in ((basis, 0), (other, 9)))
    message = rf"codec klt basis {basis.digest.hex()}.* is followed by basis {other.digest.hex()}.*: convert one cache"
    with pytest.raises(InvalidParameter, match=message):
        kvpack.concat([first, next_])
    for recipe, message in (("fp8", "codec klt is followed by minifloat"), ("kv=klt:bits=2", "gain none, .* gain fp16")):
        with pytest.raises(InvalidParameter, match=message):
            kvpack.concat([first, kvpack.pack(pairs(9), kvpack.Recipe(recipe, basis), start=9)])


def test_recipes_name_the_basis(basis: Basis) -> None:
    digest = basis.digest.hex()
    assert kvpack.Recipe("klt-1.5;tail=32", basis).text == f"kv=klt:basis={digest},bits=1.5,widths=heads;{CALIBRATED_RAW_CLAUSE};tail=32"
    named = kvpack.Recipe(f"k=klt:basis={digest};v=group:b=4,g=32")
    assert kvpack.Recipe(named.text, basis).text == named.text
    written = kvpack.Recipe(f"kv=klt:widths=heads;{CALIBRATED_RAW_CLAUSE}", basis)
    assert written.codec(0, 2, "k", 32) == kvpack.Recipe("klt-2", basis).codec(0, 2, "k", 32)
    for text, message in (
        ("klt-9", "klt:bits is '9', expected 0.25 to 8"),
        ("kv=klt:bits=two", "klt:bits is 'two'"),
        ("kv=klt:basis=12", "expected the 64 hexadecimal digits of a SHA-256"),
        ("kv=klt:norm=fp16", "codec klt has no option 'norm'"),
    ):
        with pytest.raises(InvalidParameter, match=message):
            kvpack.Recipe(text)
    with pytest.raises(InvalidParameter, match=f"names the basis {'0' * 64}, but {digest} was passed"):
        kvpack.Recipe(f"kv=klt:basis={'0' * 64}", basis)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("gain", [None, "none", "fp16"])
@pytest.mark.parametrize("bits", [1.0, 1.75, 3.0])
def test_widths_meet_the_requested_bits_and_follow_the_weights(basis: Basis, bits: float, gain: str | None, own: bool) -> None:
    found = basis.widths(bits, gain, own)
    words = f"bits={bits}{'' if gain is None else f',gain={gain}'}{',widths=heads' if own else ''}"
    recipe = kvpack.Recipe(f"kv=klt:{words}", basis)
    codecs_ = [recipe.codec(layer, 2, side, basis.rows(layer, side).dim) for layer, side in found]
    assert [codec.widths for codec in codecs_ if isinstance(codec, Klt)] == [*found.values()]
    mean = sum(codec.nominal_bits * codec.dim for codec in codecs_) / sum(codec.dim for codec in codecs_)
    # A file's headers take a little, and one more bit of the lightest run would be too much.
    assert bits - 0.3 < mean <= bits
    assert all(any(widths) for widths in found.values())
    # Every layer and side of every pass asks: the search is made once.
    assert basis.widths(bits, gain, own) is found
    assert basis.average_bits(found, gain, own) <= bits
    with pytest.raises(InvalidParameter, match=r"bits is 0.1, expected 0.25 to 8"):
        basis.widths(0.1)


def test_widths_per_head_have_a_gain_by_default_above_dim_64() -> None:
    for dim, gain in ((16, "none"), (64, "none"), (65, "fp16"), (128, "fp16")):
        basis = Basis.from_bytes(random_basis({(0, "k"): (2, dim)}, 1))
        for recipe, expected in (
            ("klt-2", gain),
            ("kv=klt", "fp16"),
            ("kv=klt:widths=heads,gain=fp16", "fp16"),
            ("kv=klt:gain=none", "none"),
        ):
            codec = kvpack.Recipe(recipe, basis).codec(0, 1, "k", dim)
            assert ("gain" in codec.scale_layouts(1, 2, 1)) == (expected == "fp16")
            assert codec.nominal_bits <= 2


def test_columns_are_grouped_by_their_widths() -> None:
    assert columns_by_width(bytes((2, 0, 1, 2)), 50) == {1: list(range(32, 48)), 2: [*range(16), 48, 49]}


def test_commands_accept_a_basis(basis: Basis, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    packed, given = tmp_path / "x.kvpack", tmp_path / "b.kvbasis"
    given.write_bytes(random_basis(SHAPES, 2))
    kvpack.save(kvpack.pack(pairs(9), "raw"), packed)
    assert cli.main(["convert", str(packed), str(tmp_path / "y.kvpack"), "klt-2", "--basis", str(given)]) == 0
    assert cli.main(["inspect", str(tmp_path / "y.kvpack")]) == 0
    assert f"needs the basis {basis.digest.hex()}" in capsys.readouterr().out
    dense = str(tmp_path / "z.safetensors")
    assert cli.main(["unpack", str(tmp_path / "y.kvpack"), dense]) == MissingBasis.exit_code == 1
    assert cli.main(["convert", str(packed), str(tmp_path / "z.kvpack"), "klt-2"]) == 2, "the error blamed the file instead of the request"
    assert cli.main(["unpack", str(tmp_path / "y.kvpack"), dense, "--basis", str(tmp_path)]) == 0
    assert cli.main(["pack", dense, str(tmp_path / "w.kvpack"), "--recipe", "klt-2", "--basis", str(given)]) == 0
    assert cli.main(["pack", dense, str(tmp_path / "w.kvpack"), "--recipe", "raw", "--basis", str(given)]) == 2, (
        "a basis that nothing would read was accepted"
    )
    capsys.readouterr()
    assert cli.main(["inspect", str(given)]) == 0
    shown = capsys.readouterr().out
    assert f"a basis, which caches refer to by its SHA-256, {basis.digest.hex()}\nmodel x\n" in shown
    assert "recipe" not in shown
    assert cli.main(["inspect", str(given), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sha256"] == basis.digest.hex()


def test_memory_of_stored_rows_is_counted() -> None:
    """binary16 rows are converted as a whole when they are used, so a file of 24 heads takes megabytes more than its size."""
    codec = with_random_basis(create("klt", 128, rows="fp16"), bytes([1, 0, 0, 0, 0, 0, 0, 0]))
    side = pack_side(torch.zeros(1, 24, 1, 128), codec, 0, "k")
    data = container.to_bytes(*files.header_and_arrays(Cache((Layer(side, None),), "")))
    with pytest.raises(LimitExceeded, match=r"for [0-9]+ values that are decoded together"):
        container.open_bytes(data, memory_limit=len(data))
    container.open_bytes(data, memory_limit=2**25).verify()
