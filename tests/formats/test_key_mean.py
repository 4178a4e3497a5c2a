"""Tests of key_mean: its streams and refusals. Slices, live caches, stores and pages keep the bytes of each page."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import kvpack
from kvpack.formats.key_mean import CODES, SCALE, KeyMean
from kvpack.formats.raw_positions import VALUES
from support.sidecar_recipes import attention, relative_error
from support.strategies import create

RECIPE = "k=octahedral:b=3,mean=32;v=octahedral:b=3"
RAW = ",raw_first=2,raw_low_norm=0.6"


def keys(tokens: int, dim: int = 64, seed: int = 0, size: float = 3.0) -> torch.Tensor:
    """Return keys ``[2, 2, tokens, dim]`` around one vector per head, which is ``size`` times as large as the keys' deviation from it."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 2, tokens, dim, generator=generator) + size * torch.randn(1, 2, 1, dim, generator=generator)


def layer(tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    return keys(tokens, seed=seed), torch.randn(2, 2, tokens, 64, generator=torch.Generator().manual_seed(seed + 1))


def same_streams(found: kvpack.Side, expected: kvpack.Side) -> bool:
    assert found.codec == expected.codec
    for name in found.codec.layout(1, 1, 0):
        first, second = (torch.cat([page.streams[name].view(torch.uint8) for page in side.runs], 2) for side in (found, expected))
        if not torch.equal(first, second):
            return False
    return True


@pytest.mark.parametrize("bits", ["4", "8"])
@pytest.mark.parametrize(("codec", "words"), [("octahedral", {"b": "3"}), ("scalar", {"b": "2"}), ("quaternion", {"s": "24", "r": "3"})])
def test_a_shared_mean_costs_no_precision(codec: str, words: dict[str, str], bits: str) -> None:
    """With a large common part, errors are proportional to the tokens' own parts. Without key_mean, they are proportional to the keys."""
    x = keys(128)
    own = x - x.mean(2, keepdim=True)
    plain, mean = create(codec, 64, **words), create(codec, 64, mean="64", mean_bits=bits, **words)
    error, without = (float((one.decode(one.encode(x)) - x).norm()) for one in (mean, plain))
    alone = float((plain.decode(plain.encode(own)) - own).norm())
    assert error < 1.1 * alone
    assert without > 2 * error


def test_channel_scales_are_computed_after_subtracting_the_mean() -> None:
    """A channel that is large only in the mean is not scaled, because scaling would reduce the precision of its own part."""
    x = torch.randn(1, 1, 256, 64, generator=torch.Generator().manual_seed(3))
    x[..., 5] += 100
    x[..., 7] *= 100
    factors = create("scalar", 64, b="2", mean="128", channel_scale="fp16").encode(x)["channel_scale"][0, 0, 0]
    pair = [7, 39]
    assert factors[pair].min() > 25
    assert (factors[[5, 37]] == 1).all()
    # The others are coded less finely than a channel with a mean, but are not outliers either.
    assert (factors > 2).sum() == 2
    alone = create("scalar", 64, b="2", channel_scale="fp16").encode(x)["channel_scale"][0, 0, 0]
    assert alone[5] > 20


def scale(x: torch.Tensor) -> torch.Tensor:
    """Return the factors for keys ``x`` after subtracting page means, as float32 ``[batch, kv_head, 1, dim]``."""
    return create("scalar", x.shape[3], b="2", mean="64", channel_scale="fp32").encode(x)["channel_scale"]


@pytest.mark.parametrize("offset", [1.0, 2.0, 50.0])
def test_channels_with_a_mean_are_encoded_more_finely(offset: float) -> None:
    """In each RoPE pair, queries are about as large as keys, so the factor is the fourth root of the share that the mean leaves."""
    x = torch.randn(1, 2, 4096, 32, generator=torch.Generator().manual_seed(4))
    x[..., [3, 19]] += offset
    found = scale(x)
    assert found.min() == 1
    share = max(1 / (1 + offset**2), 1 / 8)
    others = [channel for channel in range(32) if channel % 16 != 3]
    torch.testing.assert_close(found[..., others], torch.full((1, 2, 1, 30), share**-0.25), rtol=0.03, atol=0)
    torch.testing.assert_close(found[..., 3], found[..., 19])


@pytest.mark.parametrize("size", [4.0, 7.0, 30.0, 1000.0])
def test_very_large_channels_are_scaled_whether_or_not_queries_are_small(size: float) -> None:
    x = torch.randn(1, 2, 1024, 64, generator=torch.Generator().manual_seed(4))
    x[..., [3, 35]] *= size
    factor = scale(x)[..., [3, 35]] / scale(x).median()
    expected = max(1.0, min((size / 8) ** 6, 3 * size**0.5))
    torch.testing.assert_close(factor, torch.full_like(factor, expected), rtol=0.2, atol=0)


def test_outlier_channels_do_not_change_what_the_mean_says_about_the_others() -> None:
    x = torch.randn(1, 2, 4096, 32, generator=torch.Generator().manual_seed(4))
    x[..., [3, 19]] += 2
    ordinary = scale(x)
    x[..., [5, 21]] *= 30
    found = scale(x)
    others = [channel for channel in range(32) if channel % 16 != 5]
    torch.testing.assert_close(found[..., others], ordinary[..., others], rtol=0.01, atol=0)
    assert (found[..., [5, 21]] > 10 * ordinary[..., [5, 21]]).all()


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("bits", [4, 8])
def test_codes_of_a_mean_reach_its_largest_channel_with_either_sign(bits: int, sign: int) -> None:
    mean = torch.randn(1, 2, 50, 64, generator=torch.Generator().manual_seed(4))
    mean[..., 9] = sign * (mean.abs().amax(3) + 1)
    sidecar = KeyMean(64, 32, bits)
    error = (sidecar.vectors(sidecar.encode_means(mean)) - mean).abs()
    # The steps are those of 2^bits codes, not of the 2^bits - 1 that are symmetric.
    assert (error <= 0.501 * mean[..., 9:10].abs() / (2 ** (bits - 1) + 0.4)).all()
    zeros = sidecar.encode_means(torch.zeros(1, 1, 1, 64))
    assert not sidecar.vectors(zeros).any()
    assert not zeros[SCALE].view(torch.int16).any()


def test_a_constant_in_some_channels_costs_little_precision() -> None:
    """An eighth of the channels is shifted by ten standard deviations, and the papers' presets subtract key means."""
    codec = create("octahedral", 64, b="3", mean="32", mean_bits="4")
    x = keys(512, size=1.5)
    shifted = x.clone()
    shifted[..., torch.randperm(64, generator=torch.Generator().manual_seed(5))[:8]] += 10
    errors = [float((codec.decode(codec.encode(each)) - each).square().mean()) for each in (x, shifted)]
    assert errors[1] < 1.12 * errors[0]


@pytest.mark.parametrize("tokens", [1, 2, 17, 64])
def test_identical_keys_have_factors_of_one(tokens: int) -> None:
    one = torch.randn(1, 2, 1, 32, generator=torch.Generator().manual_seed(4)).expand(-1, -1, tokens, -1)
    for x in (one, one * 0, torch.cat([one[..., :16] * 0, one[..., 16:]], 3)):
        found = scale(x.contiguous())
        assert torch.isfinite(found).all()
        assert (found >= 1).all()
    assert (scale(one[:, :, :1].contiguous()) == 1).all()


def test_raw_tokens_are_excluded_from_the_mean() -> None:
    x = keys(64)
    codec = create("scalar", 64, b="2", mean="32", raw_first="3")
    changed = x.clone()
    changed[:, :, :3] *= 100
    first, second = codec.encode(x), codec.encode(changed)
    assert not torch.equal(first[VALUES], second[VALUES])
    assert torch.equal(first[CODES], second[CODES])
    assert torch.equal(first[SCALE], second[SCALE])
    expected = codec.rotation.forward(torch.stack([x[:, :, 3:32].mean(2), x[:, :, 32:].mean(2)], 2))
    sidecar = codec.sidecar(KeyMean)
    assert sidecar is not None
    assert ((sidecar.vectors(first) - expected).abs() <= first[SCALE].float().abs()[..., None]).all()


def test_a_page_with_only_raw_tokens_has_no_mean() -> None:
    codec = create("scalar", 64, b="2", mean="8", raw_first="16")
    x = keys(20)
    streams = codec.encode(x)
    assert not streams[SCALE][:, :, :2].any()
    assert torch.equal(codec.decode(streams)[:, :, :16], x[:, :, :16].to(torch.bfloat16).float())


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("kv=octahedral:b=3,mean=128", "mean=128 applies to keys only"),
        ("k=group:b=2,g=32,mean=128;v=raw", "encodes 32 tokens together"),
        ("k=scalar:b=2,mean=100;v=raw", "expected one of 8, 16, 32"),
        ("k=scalar:b=2,mean=64,mean_bits=6;v=raw", "expected one of 4, 8"),
        ("k=scalar:b=2,mean_bits=4;v=raw", "mean_bits=4 has no effect without mean=<tokens>"),
        ("k=raw:mean=64;v=raw", "does not support sidecars"),
    ],
)
def test_invalid_recipes_are_refused(recipe: str, message: str) -> None:
    with pytest.raises(kvpack.KvpackError, match=message):
        kvpack.pack([layer(8)], recipe)


def test_four_bits_need_an_even_head_dim() -> None:
    with pytest.raises(kvpack.InvalidParameter, match="mean_bits=8"):
        create("group", 5, b="2", axis="channel", mean="8", mean_bits="4")


def test_recipes_have_a_canonical_text() -> None:
    assert kvpack.Recipe("k=scalar:mean_bits=8,mean=128,b=2;v=scalar:b=2").canonical == "k=scalar:b=2,mean=128;v=scalar:b=2"
    assert "mean_bits=4" in kvpack.Recipe("k=scalar:mean_bits=4,mean=128,b=2;v=scalar:b=2").canonical


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize(
    "k",
    [
        "octahedral:b=3,mean=32",
        f"scalar:b=2,mean=16,mean_bits=4{RAW}",
        f"scalar:b=2,mean=64,channel_scale=fp16,outliers=3,qjl=fp16{RAW}",
        "trellis:b=2,mean=32",
        "group:b=4,axis=channel,rotation=hadamard,mean=8",
    ],
)
def test_attention_over_several_runs_is_exact(k: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The runs end within a page, or are followed by a tail or by a window that begins within a page, with few and many query rows."""
    monkeypatch.setenv("KVPACK_KERNELS", backend)
    x, v = layer(203)
    cache = kvpack.pack([(x[:, :, :75], v[:, :, :75])], f"k={k};v=raw:dtype=fp32")
    cache = cache.append([(x[:, :, 75:], v[:, :, 75:])])
    decoded = cache[0].k.unpack(torch.float32)
    assert relative_error(decoded, x) < 0.25
    for queries in (1, 40):
        q = torch.randn(2, 4, queries, 64, generator=torch.Generator().manual_seed(5))
        assert relative_error(kvpack.attend(q, cache[0]), attention(q, decoded, v)) < 1e-5
    windowed = kvpack.attend(q, cache[0], sliding_window=50)
    scores = q.double() @ decoded.double().repeat_interleave(2, 1).transpose(-1, -2) / 8
    at = torch.arange(203 - 40, 203)[:, None]
    seen = (torch.arange(203) <= at) & (torch.arange(203) > at - 50)
    expected = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v.double().repeat_interleave(2, 1)
    assert relative_error(windowed, expected) < 1e-5


def test_a_page_depends_only_on_its_tokens() -> None:
    x, v = layer(128)
    whole = kvpack.pack([(x, v)], RECIPE)
    for start in (0, 32, 64):
        part = kvpack.pack([(x[:, :, start : start + 64], v[:, :, start : start + 64])], RECIPE)
        assert same_streams(whole[:, start : start + 64][0].k, part[0].k)
    with pytest.raises(kvpack.OutOfBounds, match="at a multiple of"):
        whole[:, 40:]


def test_a_live_cache_packs_complete_pages(tmp_path: Path) -> None:
    x, v = layer(150)
    live = kvpack.LiveCache(f"{RECIPE};tail=64", layers=1)
    for start in range(0, 150, 15):
        live.update(0, x[:, :, start : start + 15], v[:, :, start : start + 15])
    q = torch.randn(2, 4, 1, 64)
    frozen = live.freeze()
    side = frozen[0].k
    assert side.packed_tokens in (64, 128)
    assert all(page.tokens % 32 == 0 for page in side.runs)
    assert relative_error(live.attend(0, q), attention(q, side.unpack(torch.float32), frozen[0].v.unpack(torch.float32))) < 1e-5
    kvpack.save(frozen, tmp_path / "frozen")
    loaded = kvpack.load(tmp_path / "frozen")
    assert same_streams(loaded[0].k, side)
    packed = kvpack.pack([(x[:, :, : side.packed_tokens], v[:, :, : side.packed_tokens])], RECIPE)
    assert same_streams(side, packed[0].k)


def test_a_recipes_window_is_a_multiple_of_pages() -> None:
    with pytest.raises(kvpack.InvalidParameter, match="must be a multiple of 32"):
        kvpack.Recipe(f"{RECIPE};tail=48")


def test_store_chunks_contain_complete_pages(tmp_path: Path) -> None:
    identity = kvpack.Identity("m", RECIPE)
    with pytest.raises(kvpack.InvalidParameter, match="encodes 32 tokens together"):
        kvpack.Store(tmp_path / "other", identity, chunk=16)
    x, v = layer(64)
    cache = kvpack.pack([(x[:1], v[:1])], RECIPE)
    with kvpack.Store(tmp_path / "store", identity, chunk=32) as store:
        assert store.save(list(range(64)), cache) == 64
        count, found = store.load(list(range(64)))
        assert count == 64
        assert found is not None
        assert same_streams(found[0].k, cache[0].k)
