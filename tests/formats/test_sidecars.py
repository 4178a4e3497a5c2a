"""Tests of what sidecars do with any codec, in memory, in files, and in attention (spec/side-cars.md)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import kvpack
from kvpack.cache.side import Side
from kvpack.formats import codec_from_params, create_codec
from kvpack.formats.base import Codec
from kvpack.formats.channel_scale import ChannelScale
from kvpack.formats.errors import InvalidParameter, InvalidPayload, ValueTooLarge
from kvpack.formats.norm_rule import NORM_RULES
from kvpack.formats.options import Options
from kvpack.formats.qjl import Qjl
from kvpack.formats.runs import Run
from support.sidecar_recipes import RECIPES, attention, relative_error


def codec(codec_id: str, dim: int = 64, side: str = "k", **words: str) -> Codec:
    return create_codec(codec_id, dim, side, Options(codec_id, words))


def keys(tokens: int = 96, dim: int = 64, *, seed: int = 0, batch: int = 2, heads: int = 3) -> torch.Tensor:
    return torch.randn(batch, heads, tokens, dim, generator=torch.Generator().manual_seed(seed))


def with_outlier_channels(x: torch.Tensor) -> torch.Tensor:
    factor = torch.ones(x.shape[-1])
    factor[[5, 5 + x.shape[-1] // 2]] = 30.0
    return x * factor


def pairs(tokens: int, seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(with_outlier_channels(keys(tokens, seed=seed)), keys(tokens, seed=seed + 1))]


def side_values(cache: kvpack.Cache) -> list[torch.Tensor]:
    return [x for pair in cache.unpack(torch.float32) for x in pair if x is not None]


@pytest.mark.filterwarnings("ignore:.*which share")
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_files_store_sidecars_and_attention_uses_them(recipe: str, tmp_path: Path) -> None:
    cache = kvpack.pack(pairs(300), recipe)
    path = tmp_path / "x.kvpack"
    assert kvpack.save(cache, path) == cache.nbytes
    loaded = kvpack.load(path)
    assert [side.codec for side in loaded[0].sides.values()] == [side.codec for side in cache[0].sides.values()]
    assert all(map(torch.equal, side_values(loaded), side_values(cache)))
    q = torch.randn(2, 6, 3, 64, generator=torch.Generator().manual_seed(9))
    expected = attention(q, *side_values(loaded))
    assert relative_error(kvpack.attend(q, loaded[0]), expected) < 1e-5


@pytest.mark.filterwarnings("ignore:.*lose precision:kvpack.KvpackWarning")
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_caches_are_sliced_appended_and_converted_losslessly(recipe: str, tmp_path: Path) -> None:
    cache = kvpack.pack(pairs(128), recipe)
    for seed, tokens in enumerate((77, 1, 50), 5):
        cache = cache.append(pairs(tokens, seed))
    path = tmp_path / "x.kvpack"
    kvpack.save(cache, path)
    loaded = kvpack.load(path)
    values = side_values(cache)
    assert all(map(torch.equal, side_values(loaded), values))
    for tokens in (0, 3, 128, 150, 256):
        assert all(torch.equal(part, whole[:, :, :tokens]) for part, whole in zip(side_values(loaded[:, :tokens]), values, strict=True))
    later = loaded[:, 64:]
    assert all(torch.equal(part, whole[:, :, 64:]) for part, whole in zip(side_values(later), values, strict=True))
    assert all(map(torch.equal, side_values(loaded.convert(recipe)), values))


@pytest.mark.parametrize("recipe", ["kv=octahedral:b=3,channel_scale=fp16", "kv=quaternion:s=24,r=3,channel_scale=fp16,outliers=3"])
def test_appended_tokens_use_the_scale_of_their_side(recipe: str) -> None:
    cache = kvpack.pack(pairs(100), recipe)
    for seed in range(20):
        cache = cache.append(pairs(3, seed + 5))
    assert cache[0].k.merged_runs() == (160,)
    other = kvpack.pack(pairs(40, seed=30), recipe, start=160)
    joined = kvpack.concat([cache, other])
    assert joined[0].k.merged_runs() == (160, 40)
    values = [torch.cat(both, 2) for both in zip(side_values(cache), side_values(other), strict=True)]
    assert all(map(torch.equal, side_values(joined), values))


@pytest.mark.parametrize(
    ("codec_id", "words"), [("octahedral", {"b": "3"}), ("scalar", {"b": "3"}), ("group", {"b": "2", "rotation": "hadamard"})]
)
def test_channel_scale_protects_rotated_keys_with_outlier_channels(codec_id: str, words: dict[str, str]) -> None:
    x = with_outlier_channels(keys(256))
    small = x.clone()
    small[..., [5, 37]] = 0
    errors = []
    for extra in ({}, {"channel_scale": "fp16"}):
        one = codec(codec_id, **words, **extra)
        decoded = one.decode(one.encode(x))
        decoded[..., [5, 37]] = 0
        errors.append(relative_error(decoded, small))
    plain = codec(codec_id, **words)
    ordinary = relative_error(plain.decode(plain.encode(keys(256))), keys(256))
    assert errors[0] > 3 * ordinary
    assert errors[1] < 2 * ordinary


def test_channel_scales_follow_their_rule() -> None:
    x = keys(512) * torch.linspace(0.5, 1.5, 64)
    x[..., 7] *= 50
    scale = codec("octahedral", b="3", channel_scale="fp32").encode(x)["channel_scale"]
    rms = x.square().unflatten(2, (-1, 16)).mean(3).median(2, keepdim=True).values.sqrt()
    expected = (rms / (4 * rms.median(3, keepdim=True).values)).clamp(min=1)
    expected = torch.maximum(expected, expected.roll(32, 3))
    assert ((expected > 1).sum((2, 3)) == 2).all()
    torch.testing.assert_close(scale, expected, rtol=1e-5, atol=0)
    values = codec("octahedral", side="v", b="3", channel_scale="fp32").encode(x)["channel_scale"]
    assert ((values > 1).sum((2, 3)) == 1).all()


DEGENERATE = {"0": keys(1) * 0, "small": keys(3) * 1e-38, "large": keys(2) * 1e4, "sparse": torch.eye(64)[None, None, :3] * 1e4}


@pytest.mark.parametrize("x", DEGENERATE.values(), ids=DEGENERATE)
def test_channel_scale_of_degenerate_keys_is_finite(x: torch.Tensor) -> None:
    one = codec("scalar", b="4", channel_scale="fp16", norm="fp32")
    streams = one.encode(x)
    assert torch.isfinite(streams["channel_scale"]).all()
    assert torch.isfinite(one.decode(streams)).all()
    one.check({name: stream.numpy() for name, stream in streams.items()}, "k")


@pytest.mark.parametrize("value", [100.0, 1e3, 6e4])
def test_one_token_does_not_scale_a_channel_of_all_others(value: float) -> None:
    x = torch.randn(1, 2, 300, 64, generator=torch.Generator().manual_seed(0))
    one = codec("octahedral", 64, b="3", channel_scale="fp16")
    usual = one.encode(x)["channel_scale"]
    x[0, 1, 9, 3] = value
    streams = one.encode(x)
    assert torch.equal(streams["channel_scale"], usual)
    others = [token for token in range(300) if token != 9]
    error = (one.decode(streams)[:, :, others] - x[:, :, others]).norm() / x[:, :, others].norm()
    assert error < 0.2


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 40, 300])
def test_the_scale_does_not_depend_on_how_a_run_is_divided(tokens: int) -> None:
    x = torch.randn(1, 2, tokens, 16, generator=torch.Generator().manual_seed(0)) * torch.arange(1, 17)
    cuts = [x.split(size, 2) for size in (tokens, 7, 16, 33)]
    scale = ChannelScale(16, "fp16")
    found = [scale.measure(Run((1, 2, tokens, 16), x.device, lambda cut=cut: iter(cut)))["channel_scale"] for cut in cuts]
    assert all(torch.equal(one, found[0]) for one in found)


def test_qjl_makes_inner_products_unbiased() -> None:
    x, q = keys(64, 128, batch=1, heads=1), keys(1, 128, seed=3, batch=1, heads=1)[0, 0, 0]
    exact = x[0, 0] @ q
    slopes = {}
    for rule, name, words in ((rule, name, words) for rule in NORM_RULES for name, words in (("alone", {}), ("qjl", {"qjl": "fp16"}))):
        found = []
        for seed in range(40):
            one = codec("scalar", 128, b="1", norm_rule=rule, seed=str(seed), **({**words, "qjl_seed": str(1000 + seed)} if words else {}))
            found.append(one.decode(one.encode(x))[0, 0] @ q)
        mean = torch.stack(found).mean(0)
        slopes[rule, name] = float((mean @ exact) / (exact @ exact))
    assert slopes["norm", "alone"] < 0.7
    for found in (("norm", "qjl"), ("unbiased", "qjl"), ("unbiased", "alone")):
        assert slopes[found] == pytest.approx(1, abs=0.03), found


def test_qjl_decodes_by_its_estimator() -> None:
    one, base = codec("scalar", b="2", qjl="fp32"), codec("scalar", b="2", norm_rule="norm")
    x = keys(7)
    streams = one.encode(x)
    left = base.rotation.forward(x) - base.decode_frame(streams)
    qjl = one.sidecar(Qjl)
    assert qjl is not None
    matrix = qjl.rotation.matrix()
    assert not torch.equal(matrix, base.rotation.matrix())
    norm = left.norm(dim=-1, keepdim=True)
    torch.testing.assert_close(streams["qjl_norm"][..., None], norm, rtol=1e-6, atol=0)
    signs = torch.where(left @ matrix.T < 0, -1.0, 1.0)
    expected = base.decode_frame(streams) + math.sqrt(math.pi / 128) * norm * (signs @ matrix)
    torch.testing.assert_close(one.decode_frame(streams), expected, rtol=0, atol=1e-5)


def test_outliers_are_stored_exactly() -> None:
    x = keys(200, batch=2)
    x[0, 1, 17, 8:12] *= 100
    x[1, 2, 150, 60:] *= 80
    one = codec("quaternion", s="24", r="3", outliers="3")
    streams = one.encode(x)
    decoded = one.decode(streams)
    for place in ((0, 1, 17, slice(8, 12)), (1, 2, 150, slice(60, 64))):
        assert torch.equal(decoded[place], x[place].half().float())
    norms = x.unflatten(-1, (-1, 4)).norm(dim=-1)
    threshold = 3 * norms.transpose(0, 1).flatten(1).median(1).values
    flagged = norms > threshold[:, None, None]
    assert streams["outliers"].shape == (1, 1, int(flagged.sum()), 4)
    assert torch.equal(one.entries(streams)["outliers"], flagged.sum((1, 3)).T)
    base = codec("quaternion", s="24", r="3")
    rest = [(y - x)[~flagged.repeat_interleave(4, -1)].square().mean() for y in (decoded, base.decode(base.encode(x)))]
    assert rest[0] < rest[1]


@pytest.mark.filterwarnings("ignore:.*which share")
def test_raw_tokens_are_exact_and_affect_no_group() -> None:
    x = keys(128).to(torch.bfloat16).float() + 3
    x[:, :, :2] *= -20
    x[:, :, 77] *= 0.01
    one = codec("group", b="2", sinks="2", low_norm_tokens="1")
    streams = one.encode(x)
    assert torch.nonzero(streams["raw_token_flags"][0, 0]).flatten().tolist() == [0, 1, 77]
    decoded = one.decode(streams)
    for token in (0, 1, 77):
        assert torch.equal(decoded[:, :, token], x[:, :, token].to(torch.bfloat16).float())
    base = codec("group", b="2")
    others = [token for token in range(128) if token not in (0, 1, 77)]
    errors = [(y - x)[:, :, others].square().mean() for y in (decoded, base.decode(base.encode(x)))]
    assert errors[0] < errors[1] / 2
    # Appended tokens are no sinks.
    side = kvpack.pack([(x, None)], "k=group:b=2,sinks=2;v=raw")[0].k.append(x)
    assert isinstance(side, Side)
    assert sum(int(page.streams["raw_token_flags"].sum()) for page in side.runs) == 4


def test_raw_tokens_contain_nan_only_if_a_writer_stored_it() -> None:
    with pytest.raises(ValueTooLarge, match="raw token"):
        codec("group", b="2", sinks="1", raw_tokens="fp16").encode(keys(4) * 1e6)


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("kv=raw:channel_scale=fp16", "does not support sidecars"),
        ("kv=scalar:b=2,qjl_seed=3", "without qjl"),
        ("kv=scalar:b=2,raw_tokens=bf16", "without sinks=<count> or low_norm_tokens=<count>"),
        ("kv=scalar:b=2,qjl=fp8", "expected one of fp16, fp32"),
        ("kv=scalar:b=2,outliers=0", "from 1 to"),
        ("kv=scalar:b=2,outlier=3", "its options are b, .*outliers"),
    ],
)
def test_invalid_recipes_are_refused(recipe: str, message: str) -> None:
    with pytest.raises(InvalidParameter, match=message):
        kvpack.pack(pairs(4), recipe)


@pytest.mark.parametrize(
    "sidecars",
    [
        {"channel_scale": "bf16"},
        {"channel_scale": 1},
        {"outliers": {"fields": True}},
        {"outliers": {}},
        {"outliers": {"fields": 16, "chunk": 4}},
        {"outliers": {"fields": 1000}},
        {"qjl": {"norm": "fp16", "seed": 1, "fields": 16}},
        {"qjl": {"seed": -1, "norm": "fp16", "fields": 16}},
        {"qjl": {"seed": 1, "norm": "bf16", "fields": 16}},
        {"raw_tokens": "fp8"},
        {"unknown": 1},
    ],
    ids=str,
)
def test_invalid_header_maps_are_refused(sidecars: dict[str, object]) -> None:
    params = codec("scalar", b="2").params()
    with pytest.raises(InvalidParameter):
        codec_from_params({**params, **sidecars})


def test_unsupported_dims_are_refused() -> None:
    assert codec_from_params(codec("group", 62, b="2", channel_scale="fp16").params()).dim == 62
    for words in ({"outliers": "3"}, {"qjl": "fp16"}):
        with pytest.raises(InvalidParameter):
            codec("group", 62, b="2", **words)


BAD = {
    "channel_scale 0": ("channel_scale", (0, 1, 0, 3), 0.0, "above 0"),
    "channel_scale infinite": ("channel_scale", (0, 1, 0, 3), math.inf, "above 0"),
    "outlier infinite": ("outliers", (0, 0, 0, 2), -math.inf, "finite"),
    "outlier flag": ("outlier_flags.0", (0, 0, 0, 0), 0xFFFF, "chunks are flagged"),
    "qjl norm": ("qjl_norm", (0, 0, 3), math.nan, "finite"),
    "raw token flag 2": ("raw_token_flags", (0, 0, 5), 2, "expected 0 or 1"),
    "raw token flag": ("raw_token_flags", (0, 0, 5), 1, "tokens are flagged"),
}


@pytest.mark.parametrize(("stream", "at", "value", "message"), BAD.values(), ids=BAD)
def test_invalid_payloads_are_refused(stream: str, at: tuple[int, ...], value: float, message: str) -> None:
    one = codec("scalar", b="2", channel_scale="fp16", outliers="2", qjl="fp16", sinks="1", raw_tokens="fp32")
    arrays = {name: stream.numpy().copy() for name, stream in one.encode(keys(12)).items()}
    one.check(arrays, "0.k")
    arrays[stream][at] = value
    with pytest.raises(InvalidPayload, match=message):
        one.check(arrays, "0.k")


def test_runs_and_chunks_are_checked_like_the_codecs(monkeypatch: pytest.MonkeyPatch) -> None:
    codec = create_codec("group", keys(1).shape[-1], "k", Options("group", {"b": "2", "g": "4", "channel_scale": "fp16"}))
    asked: list[Any] = []
    for name in ("run_rules", "chunk_rules"):
        monkeypatch.setattr(type(codec.codec), name, lambda _: (lambda *arguments: asked.append(arguments),))  # type: ignore[attr-defined]
    arrays = {name: stream.numpy() for name, stream in codec.encode(keys(12)).items()}
    codec.check_runs(arrays, (3, 4), "0.k")
    codec.check_chunks(arrays, "0.v")
    assert asked == [(arrays, (3, 4), len(keys(12)), "0.k"), (arrays, "0.v")]
