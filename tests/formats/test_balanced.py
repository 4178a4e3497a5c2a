"""Tests of balanced keys: where their frames come from, which recipes request them, and refusals."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

import kvpack
from kvpack.coding.bases import BalancedKeys, Basis, basis_bytes
from kvpack.errors import (
    InvalidParameter,
    MissingBasis,
    OutOfBounds,
)
from kvpack.formats.balanced import FrameMap
from kvpack.formats.balanced_frames import MAX_GROWTH, BalancedFrames
from support.klt_bases import balanced_basis, random_balanced, random_basis

if TYPE_CHECKING:
    from pathlib import Path

DIM, HEADS = 16, 2
BASIS = Basis.from_bytes(balanced_basis({0: (HEADS, DIM), 1: (HEADS, DIM)}, 2))
RECIPE = "k=scalar:b=4,frame=balanced;v=scalar:b=4"


def pairs(tokens: int, seed: int = 0, heads: int = HEADS, dim: int = DIM) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [tuple(torch.randn(1, heads, tokens, dim, generator=generator) for _ in "kv") for _ in range(2)]  # type: ignore[misc]


def load_basis(frames: torch.Tensor, dtype: str = "fp32") -> Basis:
    return Basis.from_bytes(basis_bytes({}, 1, {"name": "x"}, dtype, balanced={0: BalancedKeys(frames, frames, torch.zeros_like(frames))}))


@pytest.mark.parametrize(
    "codec",
    ["scalar:b=8", "octahedral:b=7", "trellis:b=4,states=1024", "group:b=8,g=16", "scalar:b=8,channel_scale=fp16", "scalar:b=8,mean=32"],
)
def test_keys_are_encoded_in_the_balanced_frame(codec: str) -> None:
    """Keys are decoded correctly, and their codes are those of the keys in the balanced frame."""
    given = pairs(40)
    cache = kvpack.pack(given, kvpack.Recipe(f"k={codec},frame=balanced;v=raw", BASIS))
    for layer, (found, (k, _)) in enumerate(zip(cache, given, strict=True)):
        decoded = found.unpack(torch.float32)[0]
        assert decoded is not None
        assert (decoded - k).norm() <= (0.2 if "trellis" in codec else 0.06) * k.norm()
        inverse = torch.linalg.inv(random_balanced(HEADS, DIM, f"{layer}").double())
        plain = kvpack.pack([((k.double() @ inverse).float(), None)], f"k={codec};v=raw")[0].k
        assert plain is not None
        assert found.k is not None
        for name, stream in plain.runs[0].streams.items():
            same = found.k.runs[0].streams[name] == stream
            assert same.float().mean() > 0.97, name


def test_queries_are_mapped_to_the_balanced_frame() -> None:
    layer = kvpack.pack(pairs(300), kvpack.Recipe(f"{RECIPE};tail=32", BASIS))[1]
    k, v = layer.unpack(torch.float32)
    assert k is not None
    assert v is not None
    q = torch.randn(1, 3 * HEADS, 5, DIM, generator=torch.Generator().manual_seed(1))
    mask = torch.ones(5, 300, dtype=torch.bool).tril(295)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k.repeat_interleave(3, 1), v.repeat_interleave(3, 1), attn_mask=mask)
    torch.testing.assert_close(kvpack.attend(q, layer), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("words", ["scalar:b=4", "group:b=8,g=16"])
def test_one_product_combines_the_frame_and_the_rotation(words: str) -> None:
    layer = kvpack.pack(pairs(20), kvpack.Recipe(f"k={words},frame=balanced;v=raw", BASIS))[0]
    assert layer.k is not None
    page = layer.k.runs[0]
    q = torch.randn(2, HEADS, 3, DIM, generator=torch.Generator().manual_seed(5))
    expected = page.codec.rotation.forward(page.codec.map_query(q, page.streams))
    for given, apart in ((q, expected), (q[:1], expected[:1])):
        torch.testing.assert_close(page.query(given), apart, rtol=1e-5, atol=1e-6)


def test_a_file_names_its_basis(tmp_path: Path) -> None:
    cache = kvpack.pack(pairs(40), kvpack.Recipe(RECIPE, BASIS))
    path = tmp_path / "x.kvpack"
    kvpack.save(cache, path)
    assert cache.recipe == f"k=scalar:b=4,basis={BASIS.digest.hex()},frame=balanced;v=scalar:b=4"
    with pytest.raises(MissingBasis, match=f"the basis {BASIS.digest.hex()} is needed: pass its file"):
        kvpack.load(path)
    other = Basis.from_bytes(balanced_basis({0: (HEADS, DIM)}, 2))
    with pytest.raises(MissingBasis, match="no basis that was passed has this SHA-256"):
        kvpack.load(path, basis=other)
    (tmp_path / "model.kvbasis").write_bytes(BASIS.data)
    loaded = kvpack.load(path, basis=tmp_path)
    for mine, theirs in zip(loaded, cache, strict=True):
        for one, two in zip(mine.unpack(torch.float32), theirs.unpack(torch.float32), strict=True):
            assert one is not None
            assert two is not None
            assert torch.equal(one, two)
    # What is appended is coded by the same frames, and a copy needs the basis as the file does.
    longer = loaded.append(pairs(7, 1))
    assert longer.recipe == cache.recipe
    kvpack.save(longer, path)
    assert kvpack.load(path, basis=BASIS).tokens == 47
    assert kvpack.load(path, basis=BASIS, recipe="kv=scalar:b=2").tokens == 47


def test_recipes_name_the_basis_of_balanced_keys() -> None:
    digest = BASIS.digest.hex()
    named = kvpack.Recipe(RECIPE, BASIS)
    assert named.needs_basis
    assert named == kvpack.Recipe(f"v=scalar:b=4;k=scalar:frame=balanced,b=4,basis={digest}")
    some = kvpack.Recipe("kv=scalar:b=4;layers=1:k=octahedral:b=3,frame=balanced", BASIS)
    assert some.text == f"kv=scalar:b=4;layers=1:k=octahedral:b=3,basis={digest},frame=balanced"
    both = kvpack.Recipe(f"{RECIPE};layers=0:v=klt:bits=2", BASIS)
    assert both.text.count(digest) == 2
    for text, message in (
        ("kv=scalar:b=4,frame=balanced", "frame=balanced applies to keys only: set it in k=<codec>, and omit it from v=<codec>"),
        ("k=scalar:b=4,frame=other;v=raw", "scalar:frame is 'other', expected one of balanced, centered"),
        ("k=scalar:b=4,frame=centered;v=raw", "frame=centered needs keys with their mean subtracted: add mean=<tokens>"),
        ("k=klt:bits=2,frame=balanced;v=raw", "codec klt does not support these sidecars: omit balanced"),
        ("k=raw:frame=balanced;v=raw", "codec raw does not support sidecars: omit balanced"),
        ("k=scalar:b=4,frame=balanced,basis=12;v=raw", "scalar:basis is '12', expected the 64 hexadecimal digits of a SHA-256"),
        (f"k=scalar:b=4,basis={digest};v=raw", "codec scalar has no option 'basis'"),
    ):
        with pytest.raises(InvalidParameter, match=message):
            kvpack.Recipe(text)
    with pytest.raises(InvalidParameter, match="names the basis 00"):
        kvpack.Recipe(f"k=scalar:b=4,frame=balanced,basis={'00' * 32};v=raw", BASIS)


def test_errors_name_missing_parts_of_the_basis() -> None:
    with pytest.raises(MissingBasis, match=r"needs a basis: pass --basis FILE.*kvpack\.Recipe.*kvpack calibrate makes a basis"):
        kvpack.pack(pairs(40), RECIPE)
    without = Basis.from_bytes(random_basis({(layer, side): (HEADS, DIM) for layer in range(2) for side in "kv"}, 2))
    with pytest.raises(OutOfBounds, match=r"layers\[0\].k: .* no balanced frames for the keys of layer 0: make them with kvpack calibrate"):
        kvpack.pack(pairs(40), kvpack.Recipe(RECIPE, without))
    with pytest.raises(InvalidParameter, match="the head dim is 32, but the basis is for head dim 16"):
        kvpack.pack(pairs(40, dim=32), kvpack.Recipe(RECIPE, BASIS))
    with pytest.raises(InvalidParameter, match=r"layer 0 .*: the frames are for 2 heads, but the values have 4"):
        kvpack.pack(pairs(40, heads=4), kvpack.Recipe(RECIPE, BASIS))
    with pytest.raises(InvalidParameter, match="is a basis for a model with 2 layers, but the cache has 4"):
        kvpack.pack(pairs(40) * 2, kvpack.Recipe(RECIPE, BASIS))
    with pytest.raises(InvalidParameter, match="a basis for a model whose name is 'x', but the name of the cache's model is 'y'"):
        kvpack.pack(pairs(40), kvpack.Recipe(RECIPE, BASIS), model={"name": "y"})


@pytest.mark.parametrize(
    ("frames", "message"),
    [
        (torch.zeros(HEADS, DIM, DIM), "a balanced frame of the basis has no inverse"),
        (torch.ones(HEADS, DIM, DIM) + 1e-6 * torch.eye(DIM), "the inverse of .* is inaccurate"),
        (torch.diag(torch.tensor([1.0] * 15 + [2.0**-11])).expand(HEADS, -1, -1), "head 0 is ill-conditioned: .* by a factor of 2048"),
        (2.0**11 * torch.eye(DIM).expand(HEADS, -1, -1), "is ill-conditioned: .* by a factor of 2048, but the limit is 1024"),
        (1e30 * torch.eye(DIM).expand(HEADS, -1, -1), "is ill-conditioned"),
    ],
    ids=["zero", "singular", "uneven", "large", "huge"],
)
def test_ill_conditioned_frames_cannot_encode(frames: torch.Tensor, message: str) -> None:
    with pytest.raises(InvalidParameter, match=message):
        kvpack.pack(pairs(40)[:1], kvpack.Recipe(RECIPE, load_basis(frames.contiguous())))


def test_frames_at_the_limit_of_condition_can_encode() -> None:
    frames = torch.diag(torch.tensor([1.0] * (DIM - 1) + [1 / MAX_GROWTH])).expand(HEADS, -1, -1).contiguous()
    cache = kvpack.pack(pairs(40)[:1], kvpack.Recipe(RECIPE, load_basis(frames)))
    decoded = cache[0].unpack(torch.float32)[0]
    assert decoded is not None
    assert decoded.isfinite().all()


def test_caches_with_different_bases_cannot_be_joined() -> None:
    other = Basis.from_bytes(balanced_basis({0: (HEADS, DIM), 1: (HEADS, DIM)}, 2, "fp32"))
    first, next_ = (kvpack.pack(pairs(9), kvpack.Recipe(RECIPE, one), start=start) for one, start in ((BASIS, 0), (other, 9)))
    with pytest.raises(InvalidParameter, match="convert one cache to the other's recipe first"):
        kvpack.concat([first, next_])


def test_frames_stay_on_their_device() -> None:
    frames = BalancedFrames(random_balanced(HEADS, DIM, "x"))
    assert frames.on_device(torch.device("cpu")) is frames
    elsewhere = frames.on_device(torch.device("meta"))
    assert elsewhere is frames.on_device(torch.device("meta"))
    assert elsewhere.matrices.device.type == "meta"


def test_headers_that_no_writer_produces_are_refused() -> None:
    for digest, layer, frame in (
        (bytes(31), 0, "balanced"),
        (bytes(32), -1, "balanced"),
        (bytes(32), 4096, "balanced"),
        (bytes(32), 0, "x"),
    ):
        with pytest.raises(InvalidParameter, match="sidecar balanced: "):
            FrameMap(DIM, digest, layer, frame)


def test_channel_scales_balance_keys_and_queries(tmp_path: Path) -> None:
    """Factors are proportional to (E[k^2] / E[q^2])^(1/4), and readers do not need the basis."""
    squares = torch.logspace(-1, 1, DIM)
    queries = torch.diag(squares).expand(HEADS, -1, -1).contiguous()
    frames = random_balanced(HEADS, DIM, "x")
    basis = Basis.from_bytes(basis_bytes({}, 2, {"name": "x"}, balanced=dict.fromkeys(range(2), BalancedKeys(frames, frames, queries))))
    given = [(k * torch.linspace(0.5, 2, DIM), v) for k, v in pairs(64)]
    recipe = "k=scalar:b=6,channel_scale=balanced;v=scalar:b=4"
    cache = kvpack.pack(given, kvpack.Recipe(recipe, basis))
    assert cache.recipe == f"k=scalar:b=6,basis={basis.digest.hex()},channel_scale=balanced;v=scalar:b=4"
    side = cache[0].k
    assert side is not None
    found = side.runs[0].streams["channel_scale"][:, :, 0].float()
    expected = (given[0][0].square().mean(2) / squares).pow(0.25)
    torch.testing.assert_close(found, expected / expected.log().mean(2, keepdim=True).exp(), rtol=2e-3, atol=0)
    kvpack.save(cache, tmp_path / "x.kvpack")
    loaded = kvpack.load(tmp_path / "x.kvpack")
    longer = loaded.append(pairs(9, 1))[0].k
    assert longer is not None
    assert torch.equal(longer.runs[0].streams["channel_scale"][:, :, 0].float(), found)
    assert loaded.recipe == cache.recipe
    for text, message in (
        ("kv=scalar:b=4,channel_scale=balanced", "channel_scale=balanced applies to keys only: set it in k=<codec>"),
        ("k=scalar:b=4,channel_scale=balanced,frame=balanced;v=raw", "frame= already balances the channels: omit channel_scale="),
    ):
        with pytest.raises(InvalidParameter, match=message):
            kvpack.Recipe(text)
    with pytest.raises(MissingBasis, match="needs a basis"):
        kvpack.pack(given, recipe)
    with pytest.raises(InvalidParameter, match="the basis has query statistics for 2 heads, but the keys have 4"):
        kvpack.pack(pairs(40, heads=4), kvpack.Recipe(recipe, basis))
    with pytest.raises(InvalidParameter, match="the head dim is 32, but the basis is for head dim 16"):
        kvpack.pack(pairs(40, dim=32), kvpack.Recipe(recipe, basis))


def test_channels_without_keys_or_queries_have_neutral_factors() -> None:
    queries = torch.zeros(HEADS, DIM, DIM)
    frames = random_balanced(HEADS, DIM, "x")
    basis = Basis.from_bytes(basis_bytes({}, 1, {"name": "x"}, balanced={0: BalancedKeys(frames, frames, queries)}))
    k = pairs(40)[0][0].clone()
    k[..., 3] = 0
    cache = kvpack.pack([(k, k)], kvpack.Recipe("k=scalar:b=6,channel_scale=balanced;v=raw", basis))
    found = cache[0].unpack(torch.float32)[0]
    assert found is not None
    assert (found - k).norm() < 0.1 * k.norm()


def test_a_growing_cache_attends_in_one_frame() -> None:
    """The raw tail and the packed tokens need different queries, before and after the tail is packed."""
    live = kvpack.LiveCache(kvpack.Recipe(f"{RECIPE};tail=32", BASIS), layers=2)
    whole = pairs(100)
    for start in range(0, 100, 25):
        for layer, (k, v) in enumerate(whole):
            live.update(layer, k[:, :, start : start + 25], v[:, :, start : start + 25])
    frozen = live.freeze()
    k, v = frozen[0].unpack(torch.float32)
    assert k is not None
    assert v is not None
    q = torch.randn(1, HEADS, 1, DIM, generator=torch.Generator().manual_seed(1))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(kvpack.attend(q, live.layer(0)), expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(k[:, :, 96:], whole[0][0][:, :, 96:])
