"""Tests of cache objects: pack, slice, append, concat, and convert, compared with dense tensors."""

from __future__ import annotations

import copy
import io
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvpack
from kvpack.cache import conversion
from kvpack.formats.errors import InvalidParameter, InvalidType, OutOfBounds, ValueTooLarge
from support.caches import BOUNDS, RECIPES, random_pairs, relative_error, unpack_all

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("tokens", [0, 1, 31, 200], ids=lambda n: f"{n}-tokens")
@pytest.mark.parametrize("recipe", RECIPES)
def test_pack_and_unpack(recipe: str, tokens: int) -> None:
    pairs = random_pairs(2, tokens, batch=2, dims=(64, 96))
    cache = kvpack.pack(pairs, recipe)
    assert (len(cache), cache.tokens, cache.values) == (2, tokens, 2 * 2 * 2 * tokens * (64 + 96))
    assert [x.shape for x in unpack_all(cache)] == [x.shape for pair in pairs for x in pair]
    if tokens:
        assert relative_error(cache, pairs) <= BOUNDS[recipe]


@pytest.mark.parametrize("recipe", ["octopus-3", "kvpack-2", "kivi-2", "fp8", "kv=scalar:b=3"])
def test_layers_packed_together_equal_layers_packed_alone(recipe: str) -> None:
    """Layers of equal shape are encoded together, and each has its own raw tokens. The last layer has a different shape."""
    pairs = [*random_pairs(4, 300, batch=2, dims=(64, 64)), *random_pairs(1, 200, batch=2, dims=(64, 64))]
    for number, (k, v) in enumerate(pairs):
        k[number % 2, :, 40 * number + 7] *= 0.05
        v[0, :, : 3 * number] *= 6
    for packed, pair in zip(kvpack.pack(pairs, recipe), pairs, strict=True):
        (alone,) = kvpack.pack([pair], recipe)
        for side, expected in zip(packed.sides.values(), alone.sides.values(), strict=True):
            (run,), (expected_run,) = side.runs, expected.runs
            assert run.streams.keys() == expected_run.streams.keys()
            for name, stream in run.streams.items():
                assert stream.shape == expected_run.streams[name].shape
                assert torch.equal(stream.view(torch.uint8), expected_run.streams[name].view(torch.uint8))
            assert torch.equal(side.tail, expected.tail)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_prefix_decodes_to_the_first_values(recipe: str) -> None:
    cache = kvpack.pack(random_pairs(2, 150), recipe)
    for tokens in (0, 1, 32, 33, 128, 149, 150):
        for cut, whole in zip(unpack_all(cache[:, :tokens]), unpack_all(cache), strict=True):
            assert torch.equal(cut, whole[:, :, :tokens])


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_slice_decodes_to_its_values(recipe: str, tmp_path: Path) -> None:
    pairs = random_pairs(2, 300)
    whole = kvpack.pack([(k[:, :, :96], v[:, :, :96]) for k, v in pairs], recipe, start=5)
    whole = whole.append([(k[:, :, 96:], v[:, :, 96:]) for k, v in pairs])
    for start, stop in ((0, 300), (64, 128), (96, 96), (128, 299), (64, 300), (256, 300), (300, 300)):
        cut = whole[:, start:stop]
        assert (cut.start, cut.tokens) == (5 + start, stop - start)
        assert all(torch.equal(a, b[:, :, start:stop]) for a, b in zip(unpack_all(cut), unpack_all(whole), strict=True))
        kvpack.save(cut, tmp_path / "cut.kvpack")
        assert all(torch.equal(a, b) for a, b in zip(unpack_all(kvpack.load(tmp_path / "cut.kvpack")), unpack_all(cut), strict=True))
    if not whole[0].k.tail.shape[2]:
        joined = kvpack.concat([whole[:, :64], whole[:, 64:128], whole[:, 128:]])
        assert all(torch.equal(a, b) for a, b in zip(unpack_all(joined), unpack_all(whole), strict=True))
    stream = next(iter(whole[0].k.runs[0].streams.values()))
    part = next(iter(whole[:, 64:96][0].k.runs[0].streams.values()))
    assert part.untyped_storage().data_ptr() == stream.untyped_storage().data_ptr(), "the slice did not share the bytes"


def test_slices_must_start_at_token_groups() -> None:
    cache = kvpack.pack(random_pairs(2, 100), "kivi-2").append(random_pairs(2, 64))
    assert [page.tokens for page in cache[0].k.runs] == [100, 64]
    assert cache[:, 100:164].tokens == 64
    assert cache[:, 96:97].tokens == 1
    with pytest.raises(OutOfBounds, match=r"layers\[0\]: a slice from token 33 begins 33 tokens into a run .* 32 tokens together"):
        cache[:, 33:64]
    with pytest.raises(OutOfBounds, match=r"from token 128 begins 28 tokens into a run"):
        cache[:, 128:164]


@pytest.mark.parametrize("recipe", RECIPES)
def test_append_encodes_each_token_once(recipe: str) -> None:
    pairs = random_pairs(2, 300)
    cut = [(k[:, :, :100], v[:, :, :100]) for k, v in pairs]
    cache = kvpack.pack(cut, recipe)
    first = unpack_all(cache[:, :64])
    sizes = [1, 1, 5, 32, 64, 97]
    start = 100
    for size in sizes:
        cache = cache.append([(k[:, :, start : start + size], v[:, :, start : start + size]) for k, v in pairs])
        start += size
        window = cache[0].k.window or cache[0].k.codec.group_tokens
        assert cache.tokens == start
        assert cache[0].k.tail.shape[2] < window
    assert start == 300
    assert all(torch.equal(a, b) for a, b in zip(unpack_all(cache[:, :64]), first, strict=True)), "packed tokens were changed"
    assert relative_error(cache, pairs) <= BOUNDS[recipe]
    assert len(cache[0].k.runs) <= 12


def test_append_grows_the_raw_tail_up_to_the_window() -> None:
    pairs = random_pairs(1, 200)
    cache = kvpack.pack([(k[:, :, :70], v[:, :, :70]) for k, v in pairs], "kivi-4;tail=64")
    assert [side.tail.shape[2] for side in cache[0].sides.values()] == [6, 6]
    cache = cache.append([(k[:, :, 70:127], v[:, :, 70:127]) for k, v in pairs])
    assert cache[0].k.tail.shape[2] == 63
    assert torch.equal(cache[0].unpack(torch.bfloat16)[0][:, :, 64:], pairs[0][0][:, :, 64:127])
    cache = cache.append([(k[:, :, 127:128], v[:, :, 127:128]) for k, v in pairs])
    assert cache[0].k.tail.shape[2] == 0
    assert cache[0].k.packed_tokens == 128


@pytest.mark.parametrize("recipe", ["kivi-2", "k=octahedral:b=3;v=group:b=3", "bf16"])
def test_concat_of_consecutive_pages(recipe: str) -> None:
    pairs = random_pairs(2, 160)
    parts = [kvpack.pack([(k[:, :, a:b], v[:, :, a:b]) for k, v in pairs], recipe, start=a) for a, b in ((0, 64), (64, 101), (101, 160))]
    joined = kvpack.concat(parts)
    assert (joined.start, joined.tokens) == (0, 160)
    for whole, pieces in zip(unpack_all(joined), zip(*map(unpack_all, parts), strict=True), strict=True):
        assert torch.equal(whole, torch.cat(pieces, 2))
    assert len(joined[0].k.merged().runs) == (2 if recipe == "kivi-2" else 1)
    assert torch.equal(joined[0].k.merged().unpack(), joined[0].k.unpack())


def test_concat_refuses_caches_that_are_not_consecutive() -> None:
    pairs = random_pairs(1, 64)
    a, b = kvpack.pack(pairs, "kivi-2"), kvpack.pack(pairs, "kivi-2", start=64)
    with pytest.raises(InvalidParameter, match=r"tokens \[0:64\] are followed by tokens \[0:64\]"):
        kvpack.concat([a, a])
    with pytest.raises(InvalidParameter, match="convert one cache to the other's recipe first"):
        kvpack.concat([a, b.convert("kivi-4")])
    with pytest.raises(InvalidParameter, match="cannot be joined with a cache with 2 layers"):
        kvpack.concat([a, kvpack.pack(random_pairs(2, 64), "kivi-2", start=64)])
    with pytest.raises(InvalidParameter, match="model"):
        kvpack.concat([a, kvpack.pack(pairs, "kivi-2", start=64, model={"name": "model"})])
    tail = kvpack.pack(random_pairs(1, 70), "kivi-2;tail=64")
    after = kvpack.pack(pairs, "kivi-2;tail=64", start=70)
    with pytest.raises(InvalidParameter, match="raw tail of 6 tokens"):
        kvpack.concat([tail, after])
    with pytest.raises(InvalidParameter, match="no caches"):
        kvpack.concat([])


def test_concat_refuses_a_layer_without_its_oldest_tokens() -> None:
    pairs = random_pairs(2, 64)
    short = kvpack.pack([pairs[0], tuple(x[:, :, 40:] for x in pairs[1])], "kivi-2")
    first = replace(short, layers=(short[0], replace(short[1], skipped=40)))
    assert [layer.tokens for layer in kvpack.concat([first, kvpack.pack(pairs, "kivi-2", start=64)])] == [128, 88]
    with pytest.raises(InvalidParameter, match=r"layers\[1\] of the cache that starts at position 64 has only 24 of its 64 tokens"):
        kvpack.concat([first, replace(first, start=64)])


def test_a_cache_cannot_be_pickled() -> None:
    cache = kvpack.pack(random_pairs(1, 4), "kivi-2")
    for value, name in ((cache, "Cache"), (cache[0], "Layer"), (cache[0].k, "Side")):
        with pytest.raises(InvalidParameter, match=rf"a packed {name} cannot be pickled: write it with kvpack\.save\(cache, path\)"):
            torch.save(value, io.BytesIO())


def test_a_live_cache_cannot_be_pickled() -> None:
    with pytest.raises(InvalidParameter, match=r"a LiveCache or KvpackCache cannot be pickled: save live\.freeze"):
        torch.save(kvpack.LiveCache("kivi-2", layers=1), io.BytesIO())


def test_caches_compare_by_identity_and_copy_as_themselves() -> None:
    cache, other = (kvpack.pack(random_pairs(1, 40), "kivi-2") for _ in range(2))
    assert copy.deepcopy(cache) is cache
    assert (copy.copy(cache), copy.copy(cache[0])) == (cache, cache[0])
    assert (cache == other, cache in [other, cache], len({cache, other})) == (False, True, 2)
    assert (cache[0] == other[0], cache[0].k == other[0].k, cache[0].k.runs == other[0].k.runs) == (False,) * 3


def test_a_tail_has_no_values_beyond_the_range_of_its_dtype() -> None:
    k, v = (x.to(torch.float16) for x in random_pairs(1, 40)[0])
    cache = kvpack.pack([(k, v)], "kivi-2;tail=64")
    assert cache.append([(k[:, :, :1].float(), v[:, :, :1].float())])[0].k.tail.dtype == torch.float16
    wider = torch.full((1, 2, 1, 64), 7e4)
    grown = cache.append([(wider, v[:, :, :1])])[0]
    assert (grown.k.tail.dtype, grown.v.tail.dtype) == (torch.float32, torch.float16)
    found = grown.unpack(torch.float32)
    assert torch.equal(found[0], torch.cat([k.float(), wider], 2))
    assert torch.equal(found[1], torch.cat([v, v[:, :, :1]], 2).float())


@pytest.mark.parametrize("recipe", ["kivi-4", "octopus-3;tail=32", "octopus-3;raw=2,0.95", "octopus-3-scaled", "int-4-med3", "fp32"])
@pytest.mark.parametrize("before", ["kv=group:b=3,g=32;tail=128", "kv=octahedral:b=2"])
def test_converting_in_parts_gives_the_same_streams(before: str, recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = kvpack.pack(random_pairs(1, 300), before).append(random_pairs(1, 40))
    whole = cache.convert(recipe)
    monkeypatch.setattr(conversion, "VALUES_AT_ONCE", 1)
    parts = cache.convert(recipe)
    for side, other in zip(parts[0].sides.values(), whole[0].sides.values(), strict=True):
        assert torch.equal(side.tail, other.tail)
        assert [page.tokens for page in side.runs] == [page.tokens for page in other.runs]
        for page, expected in zip(side.runs, other.runs, strict=True):
            assert list(page.streams) == list(expected.streams)
            for name, stream in expected.streams.items():
                assert torch.equal(page.streams[name].view(torch.uint8), stream.view(torch.uint8)), name


@pytest.mark.parametrize("codec", ["group:b=4", "octahedral:b=3", "raw"])
def test_convert_to_another_window_leaves_the_same_tail_as_pack(codec: str) -> None:
    pairs = random_pairs(2, 250)
    for before, after in ((128, 0), (128, 64), (64, 128)):
        cache = kvpack.pack(pairs, f"kv={codec};tail={before}").convert(f"kv={codec};tail={after}")
        found = [(side.packed_tokens, side.tail.shape[2], side.window) for side in cache[1].sides.values()]
        assert found == [(192, 58, after) if after else (250, 0, 0)] * 2
        assert relative_error(cache, pairs) <= 0.2
    direct = kvpack.pack(pairs, "kv=octahedral:b=3;tail=64").convert("kv=octahedral:b=3,arrangement=direct")
    assert direct[0].k.packed_tokens == 250


def test_convert_to_the_same_recipe_encodes_the_tail() -> None:
    pairs = random_pairs(2, 168)
    recipe = "k=scalar:b=4,mean=128;v=scalar:b=4"
    cache = kvpack.pack([(k[:, :, :128], v[:, :, :128]) for k, v in pairs], recipe)
    grown = cache.append([(k[:, :, 128:], v[:, :, 128:]) for k, v in pairs])
    assert grown[0].k.tail.shape[2] == 40
    same = grown.convert(recipe)
    assert [side.tail.shape[2] for layer in same for side in layer.sides.values()] == [0, 0, 0, 0]
    for name, stream in grown[0].k.runs[0].streams.items():
        assert same[0].k.runs[0].streams[name].data_ptr() == stream.data_ptr(), name
    assert relative_error(same, pairs) <= 0.2
    longer = same.append([(k[:, :, :130], v[:, :, :130]) for k, v in pairs])
    assert (longer.tokens, longer[0].k.tail.shape[2]) == (298, 2)


def test_convert_keeps_values_that_already_fit() -> None:
    cache = kvpack.pack(random_pairs(2, 96), "kivi-2")
    same = cache.convert("kivi-2;layers=1:k=group:b=4")
    assert same[0].k.runs[0].streams["codes.0"].data_ptr() == cache[0].k.runs[0].streams["codes.0"].data_ptr()
    assert same[1].k.codec.params()["bits"] == 4
    exact = kvpack.pack(random_pairs(2, 96), "bf16").convert("kivi-2")
    assert all(torch.equal(a, b) for a, b in zip(unpack_all(exact), unpack_all(cache), strict=True)), (
        "bf16 values were not restored exactly"
    )


@pytest.mark.parametrize(
    "codec",
    ["octahedral:b=3", "octahedral:b=2", "quaternion:s=24,r=3", "quaternion:s=5,r=8", "angle:n=48,norm=log4", "angle:n=56"],
)
def test_convert_to_another_arrangement_is_lossless(codec: str) -> None:
    dense_cache = kvpack.pack(random_pairs(1, 70), f"kv={codec}")
    direct = dense_cache.convert(f"kv={codec},arrangement=direct")
    assert direct[0].k.codec.params()["arrangement"] == "direct"
    assert direct.nbytes >= dense_cache.nbytes
    assert all(torch.equal(a, b) for a, b in zip(unpack_all(direct), unpack_all(dense_cache), strict=True))
    back = direct.convert(f"kv={codec}")
    for name, stream in dense_cache[0].k.runs[0].streams.items():
        assert torch.equal(back[0].k.runs[0].streams[name], stream), name


def test_codecs_that_differ_in_more_than_packing_are_reencoded() -> None:
    side = kvpack.pack(random_pairs(1, 70), "kv=octahedral:b=3")[0].k
    assert side.codec.has_same_codes(kvpack.Recipe("kv=octahedral:b=3,arrangement=direct").codec(0, 1, "k", 64))
    for other in ("octahedral:b=3,seed=1", "octahedral:b=2", "quaternion:s=24,r=3", "octahedral:b=3,norm=fp32"):
        assert not side.codec.has_same_codes(kvpack.Recipe(f"kv={other}").codec(0, 1, "k", 64))


def test_layers_may_differ_and_sides_may_be_missing() -> None:
    (k, v), (k2, v2) = random_pairs(2, 40)
    cache = kvpack.pack([(k, v), (k2[:, :1, :33], v2[:, :1, :33]), (k, None), (None, v)], "kivi-2")
    assert [layer.tokens for layer in cache] == [40, 33, 40, 40]
    assert list(cache[2].sides) == ["k"]
    assert cache[3].unpack()[0] is None
    assert cache[:, :33].tokens == 33
    with pytest.raises(OutOfBounds, match=r"layers\[1\], which has 33"):
        cache[:, :34]


@dataclass
class _TransformersLayer:
    keys: torch.Tensor
    values: torch.Tensor


@dataclass
class _TransformersCache:
    layers: list[_TransformersLayer]


def test_all_forms_of_input_give_the_same_cache() -> None:
    pairs = random_pairs(1, 40)
    forms = [pairs, tuple(pairs), pairs[0], [list(pairs[0])], _TransformersCache([_TransformersLayer(*pair) for pair in pairs])]
    for form in forms:
        assert torch.equal(unpack_all(kvpack.pack(form, "kivi-2"))[0], unpack_all(kvpack.pack(pairs, "kivi-2"))[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_raw_tails_keep_the_input_dtype(dtype: torch.dtype) -> None:
    pairs = [(k.to(dtype), v.to(dtype)) for k, v in random_pairs(1, 40)]
    side = kvpack.pack(pairs, "kivi-2;tail=32")[0].k
    assert side.tail.dtype == dtype
    assert torch.equal(side.tail, pairs[0][0][:, :, 32:])


X = torch.zeros(1, 2, 8, 64)
LONG_RECIPE = ";".join(["kv=group:b=2", *(f"layers={n}00000:kv=group:b={2 + n % 7},g={32 << n % 3}" for n in range(1, 520))])
BAD_INPUT = {
    "rank": ([(X[0], X)], InvalidParameter, r"layers\[0\].k has shape \[2, 8, 64\]"),
    "dtype": ([(X.to(torch.int32), X)], InvalidType, r"layers\[0\].k has dtype torch.int32"),
    "float64": ([(X, X.to(torch.float64))], InvalidType, r"layers\[0\].v has dtype torch.float64"),
    "tokens": ([(X, X[:, :, :7])], InvalidParameter, r"k is \[1, 2, 8, 64\], but v is \[1, 2, 7, 64\]"),
    "heads": ([(X, X[:, :1])], InvalidParameter, "batch, kv_head and token must be the same"),
    "both missing": ([(None, None)], InvalidParameter, "k and v are both None"),
    "not a cache": (7, InvalidType, "a int is not a KV cache"),
    "not a tensor": ([("k", X)], InvalidType, "expected a tensor or None, but got a str"),
    "no heads": ([(X[:, :0], X[:, :0])], InvalidParameter, r"layers\[0\].k has shape \[1, 0, 8, 64\], expected at least one sequence"),
    "no sequences": ([(X[:0], X[:0])], InvalidParameter, r"layers\[0\].k has shape \[0, 2, 8, 64\], expected at least one sequence"),
    "head dim": ([(X[..., :63], X[..., :63])], InvalidParameter, "head dim 63"),
}


@pytest.mark.parametrize("name", BAD_INPUT)
def test_errors_name_the_invalid_input(name: str) -> None:
    past, error, message = BAD_INPUT[name]
    with pytest.raises(error, match=message):
        kvpack.pack(past, "octopus-3")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"start": -1}, "start is -1, expected an integer from 0 to 1099511627775"),
        ({"start": 2**40}, "start is 1099511627776, expected an integer from 0 to"),
        ({"model": {"layers": 32}}, r"model\['layers'\] is of type int, expected str"),
        ({"model": {"name": "\ud800"}}, "which UTF-8 cannot encode"),
        ({"recipe": LONG_RECIPE}, "recipe has [0-9]+ bytes, but the maximum is 4096"),
    ],
    ids=["negative start", "large start", "number", "surrogate", "long recipe"],
)
def test_values_that_no_file_can_store_are_refused_when_packed(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidParameter, match=message):
        kvpack.pack([(X, X)], **{"recipe": "kivi-2"} | options)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")], ids=str)
@pytest.mark.parametrize("recipe", [r for r in RECIPES if r != "bf16"])
def test_errors_give_the_position_of_non_finite_values(recipe: str, value: float) -> None:
    k, v = random_pairs(3, 40)[0]
    bad = v.clone()
    bad[0, 1, 17, 5] = value
    with pytest.raises(InvalidParameter, match=r"layers\[1\].v: the value at batch 0, head 1, token 17, channel 5 is -?(nan|inf)"):
        kvpack.pack([(k, v), (k, bad)], recipe.split(";")[0])
    assert torch.equal(torch.isnan(kvpack.pack([(k, bad)], "bf16")[0].unpack()[1]), torch.isnan(bad)), (
        "raw did not keep the non-finite values"
    )


def test_non_finite_values_never_reach_a_raw_tail() -> None:
    (k, v), *_ = random_pairs(1, 70)
    bad = v.clone()
    bad[0, 1, 69, 5] = float("nan")
    with pytest.raises(InvalidParameter, match=r"layers\[0\].v: .* token 69, channel 5"):
        kvpack.pack([(k, bad)], "kivi-2;tail=64")
    cache = kvpack.pack([(k, v)], "kivi-2;tail=64")
    with pytest.raises(InvalidParameter, match=r"layers\[0\].v: .* token 139, channel 5"):
        cache.append([(k, bad)])
    assert kvpack.pack([(k, bad)], "bf16;tail=64").tokens == 70, "raw did not keep the non-finite values"


def test_reprs_fit_on_one_line() -> None:
    cache = kvpack.pack(random_pairs(2, 70), "octopus-3;tail=64", model={"name": "m"}, start=3)
    recipe = "k=octahedral:b=3,mean=32,mean_bits=4,norm=log8;v=group:b=3;raw=4,0.5,4;tail=64"
    assert repr(cache) == f"Cache('{recipe}', 2 layers, tokens [3:73], model {{'name': 'm'}})"
    side = "Side(octahedral, 1 x 2 x 70 x 64, 1 runs and a raw tail of 6 tokens)"
    assert repr(cache[0].k) == side
    assert side in repr(cache[0])
    assert repr(cache[0].k.runs) == "(PackedRun(octahedral, 64 tokens),)"


def test_a_norm_beyond_the_range_of_its_dtype_is_refused() -> None:
    k, v = random_pairs(1, 40)[0]
    with pytest.raises(ValueTooLarge, match=r"layers\[0\].k, tokens 0 to 39: .*65504"):
        kvpack.pack([(k * 1e6, v)], "k=octahedral:b=3;v=group:b=3")


@pytest.mark.parametrize(
    "index",
    [4, -5, "k", (0, slice(0, 2)), (slice(None), slice(1, 2)), (slice(None), slice(None, 9, 2)), (slice(None), slice(None, -1))],
    ids=str,
)
def test_indices_out_of_range_are_refused(index: object) -> None:
    cache = kvpack.pack(random_pairs(4, 8), "kivi-2")
    with pytest.raises(OutOfBounds):
        cache[index]


def test_indices_may_have_any_integer_type() -> None:
    cache = kvpack.pack(random_pairs(2, 8), "kivi-2", start=numpy.int64(3))
    assert cache[numpy.int64(1)] is cache[1]
    assert cache[:, : numpy.int64(5)].tokens == 5
    assert type(cache.start) is int
    with pytest.raises(InvalidParameter, match=r"start is 1\.5, expected an integer"):
        kvpack.pack(random_pairs(2, 8), "kivi-2", start=1.5)


def test_values_are_unpacked_only_to_floating_point() -> None:
    with pytest.raises(InvalidType, match=r"torch.int8 cannot represent"):
        kvpack.pack(random_pairs(1, 8), "kivi-2").unpack(torch.int8)


def test_append_refuses_mismatched_values_and_keeps_the_cache() -> None:
    pairs = random_pairs(1, 40)
    cache = kvpack.pack(pairs, "kivi-2")
    before = unpack_all(cache)
    k, v = pairs[0]
    for bad, error in (
        ([(k[:, :1], v)], InvalidParameter),
        ([(k, v[:, :, :3])], InvalidParameter),
        ([(k, None)], InvalidParameter),
        ([(k, v), (k, v)], InvalidParameter),
        ([(k[0], v)], InvalidParameter),
        ([(k.to(torch.int8), v)], InvalidType),
        ([(k.float().numpy(), v)], InvalidType),
        ([(k * float("nan"), v)], InvalidParameter),
    ):
        with pytest.raises(error):
            cache.append(bad)
    assert all(torch.equal(a, b) for a, b in zip(unpack_all(cache), before, strict=True))


@settings(max_examples=15, deadline=None)
@given(tokens=st.integers(0, 300), cut=st.integers(0, 300))
def test_a_prefix_can_be_appended_to(tokens: int, cut: int) -> None:
    cut = min(cut, tokens)
    pairs = random_pairs(1, tokens, dims=(16, 16))
    cache = kvpack.pack(pairs, "kivi-4")[:, :cut].append([(k[:, :, cut:], v[:, :, cut:]) for k, v in pairs])
    assert cache.tokens == tokens
    if tokens:
        assert relative_error(cache, pairs) <= 0.12


@pytest.mark.parametrize("recipe", ["kivi-2;tail=32", "octopus-3-scaled", "ott-2", "lossless", "bf16", "int-4-med3"])
def test_a_side_unpacks_into_a_given_tensor(recipe: str) -> None:
    cache = kvpack.pack(random_pairs(1, 100), recipe)
    for side in cache[0].sides.values():
        batch, heads, tokens, dim = side.batch, side.heads, side.tokens, side.dim
        room = torch.full((batch, heads, tokens + 5, dim + 1), torch.nan, dtype=torch.bfloat16)
        for out in (room[:, :, 2:-3, :dim], room.transpose(2, 3)[:, :, :dim, 2:-3].transpose(2, 3), torch.empty(batch, heads, tokens, dim)):
            room.fill_(torch.nan)
            side.unpack_into(out)
            assert torch.equal(out, side.unpack(out.dtype))
            assert int(room.isnan().sum()) in (room.numel(), room.numel() - out.numel())


def test_a_tensor_created_in_inference_mode_can_be_unpacked_into() -> None:
    side = kvpack.pack(random_pairs(1, 40), "octopus-3")[0].k
    assert side is not None
    with torch.inference_mode():
        out = torch.empty(side.batch, side.heads, side.tokens, side.dim)
        side.unpack_into(out)
    assert torch.equal(out, side.unpack(torch.float32))
    side.unpack_into(out)


def test_unsuitable_output_tensors_are_refused() -> None:
    side = kvpack.pack(random_pairs(1, 100), "kivi-2")[0].k
    assert side is not None
    for out, error, message in (
        (numpy.zeros((1, 2, 100, 64)), InvalidType, "expected a tensor, but got a ndarray"),
        (torch.zeros(1, 2, 100, 64, dtype=torch.int8), InvalidType, "torch.int8 cannot represent decoded values"),
        (torch.zeros(1, 2, 99, 64), InvalidParameter, r"shape \[1, 2, 99, 64\], expected \[1, 2, 100, 64\]"),
        (torch.zeros(1, 2, 100, 64, device="meta"), InvalidParameter, "the tensor is on meta, but the cache is on cpu"),
    ):
        with pytest.raises(error, match=message):
            side.unpack_into(out)  # type: ignore[arg-type]
