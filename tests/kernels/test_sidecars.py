"""Tests of attention over packed rows with the sidecars that the attention kernel itself supports.

test_attention.py contains those without sidecars.
"""

from __future__ import annotations

import pytest
import torch

import kvpack
from kvpack.cache.layer import Layer
from kvpack.cache.packed_runs import PackedRun, PackedRuns
from kvpack.cache.side import Side
from kvpack.coding import dispatch, triton_version
from kvpack.formats.channel_scale import STREAM
from kvpack.formats.outliers import Outliers
from kvpack.formats.qjl import Qjl
from kvpack.formats.sidecars import CodecWithSidecars
from kvpack.kernels.tiles import loaders
from support.caches import random_pairs
from support.interpreter import DEVICE, needs_loaded_bounds
from support.random_sides import TOLERANCE, check_attention, codecs, exact_attention, random_side

SIDECARS = {
    "signs": "qjl=fp16",
    "signs of wide norms": "qjl=fp32,qjl_seed=9",
    "outliers": "outliers=3",
    "outliers and signs": "outliers=3,qjl=fp16",
}
CODECS = {
    "group 4": "group:b=4,g=32",
    "group 2, token scale": "group:b=2,g=32,axis=channel,rotation=hadamard,token_scale=fp16",
    "quaternion": "quaternion:s=24,r=3,arrangement=direct",
    "dense quaternion": "quaternion:s=24,r=3",
    "dense octahedral 3": "octahedral:b=3",
}

pytestmark = needs_loaded_bounds


@pytest.mark.scenario
@pytest.mark.kernels
@pytest.mark.parametrize("family", CODECS)
@pytest.mark.parametrize("sidecar", SIDECARS)
def test_sidecars_of_keys_and_values_agree_with_exact_attention(sidecar: str, family: str) -> None:
    recipe = f"{CODECS[family]},{SIDECARS[sidecar]}"
    k_codec, v_codec = codecs(recipe, recipe, (64, 128))
    check_attention(Layer(random_side(k_codec, 1, (40,), 3, 1), random_side(v_codec, 1, (40,), 3, 2)), 2)


@pytest.mark.kernels
@pytest.mark.parametrize("sidecar", SIDECARS)
def test_every_head_dim_agrees_with_exact_attention(sidecar: str) -> None:
    for dims in ((80, 96), (256, 16)):
        k_codec, v_codec = codecs(*(f"scalar:b=2,{SIDECARS[sidecar]}" for _ in dims), dims)
        check_attention(Layer(random_side(k_codec, 1, (33,), 0, 1), random_side(v_codec, 1, (33,), 0, 2)), 1)


@pytest.mark.scenario
@pytest.mark.kernels
@pytest.mark.parametrize("sidecar", SIDECARS)
def test_pages_batches_and_lengths_agree_with_exact_attention(sidecar: str) -> None:
    """The pages of keys end at other tokens than those of values."""
    k_codec, v_codec = codecs(*(f"scalar:b=3,{SIDECARS[sidecar]}" for _ in "kv"), (32, 64))
    layer = Layer(random_side(k_codec, 2, (64, 33), 9, 1, batch=2), random_side(v_codec, 2, (50, 47), 9, 2, batch=2))
    check_attention(layer, 4, q_len=2, sliding_window=70)
    layer = Layer(random_side(k_codec, 1, (96, 33), 9, 1, batch=3), random_side(v_codec, 1, (50, 79), 9, 2, batch=3))
    check_attention(layer, 2, lengths=[138, 1, 97])


@pytest.mark.scenario
@pytest.mark.kernels
@pytest.mark.parametrize("k", ["scalar:b=3,mean=16", "octahedral:b=2,mean=64,mean_bits=4,outliers=3,qjl=fp16"])
def test_means_agree_for_any_pages_batches_and_lengths(k: str) -> None:
    """Pages end inside tiles and at their edges, and values may have two tokens per row."""
    k_codec, v_codec = codecs(k, "scalar:b=2", (32, 64))
    layer = Layer(random_side(k_codec, 2, (64, 33), 9, 1, batch=2), random_side(v_codec, 2, (97,), 9, 2, batch=2))
    check_attention(layer, 4, q_len=2, sliding_window=70)
    layer = Layer(random_side(k_codec, 1, (96, 33), 9, 1, batch=3), random_side(v_codec, 1, (129,), 9, 2, batch=3))
    check_attention(layer, 2, lengths=[138, 1, 97])
    check_attention(layer, 2, q_len=20, starts=[0, 21, 70])


@pytest.mark.kernels
def test_means_agree_for_many_pages() -> None:
    """A program multiplies means several times, and its number of pages is limited."""
    k_codec, v_codec = codecs("scalar:b=2,mean=8,norm=log8", "scalar:b=2,norm=log8", (16, 16))
    check_attention(Layer(random_side(k_codec, 1, (1100,), 0, 1), random_side(v_codec, 1, (1100,), 0, 2)), 1)


@pytest.mark.kernels
def test_programs_with_many_pages_of_means_fill_their_rounds() -> None:
    """A limit slightly above what the device runs at once must not add a round with few programs."""
    from kvpack.kernels.attend import plan
    from kvpack.kernels.tiles.shapes import LaunchShape

    shape = LaunchShape(warps=2, tiles=1, tokens=32, stages=3, programs=4)
    assert plan.choose_programs(shape, 140_000, 64, 8, 132) == 66
    assert plan.choose_programs(shape, 140_000, 64, 8, 132, min_programs=69) == 132


@pytest.mark.kernels
def test_programs_are_shared_among_the_segments_between_raw_tokens() -> None:
    from kvpack.kernels.attend import plan

    assert plan.share_programs([2048], 66) == [66]
    assert plan.share_programs([93, 161], 8) == [3, 5]
    assert plan.share_programs([7, 1, 1], 2) == [1, 1, 1]


@pytest.mark.scenario
@pytest.mark.kernels
def test_means_agree_if_a_program_rotates_queries_of_several_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvpack.kernels.attend import prepared

    monkeypatch.setattr(prepared, "ROTATED_ROWS", ((1, 16),))
    k_codec, v_codec = codecs("scalar:b=3,mean=16", "scalar:b=2", (32, 64))
    check_attention(Layer(random_side(k_codec, 1, (64, 33), 9, 1, batch=3), random_side(v_codec, 1, (97,), 9, 2, batch=3)), 4)


@pytest.mark.kernels
@pytest.mark.parametrize("mean", [8, 128])
@pytest.mark.parametrize("v", ["scalar:b=3", "scalar:b=4"])
def test_means_agree_with_two_tokens_per_row(v: str, mean: int) -> None:
    """Tiles are within one page of means or in several. The two tokens of a row are neighbors only if both sides have such rows."""
    k_codec, v_codec = codecs(f"scalar:b=2,mean={mean},mean_bits=4", v, (64, 64))
    found = loaders.find_dual_tiles(k_codec)
    assert found is not None
    assert found.means is not None
    check_attention(Layer(random_side(k_codec, 2, (300, 33), 9, 1), random_side(v_codec, 2, (333,), 9, 2)), 4)


@pytest.mark.kernels
@pytest.mark.parametrize("k", ["scalar:b=3,mean=128", "group:b=4,axis=channel,rotation=hadamard,mean=8,mean_bits=4,channel_scale=fp16"])
def test_means_agree_with_raw_tokens(k: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Raw tokens split a page at positions where no page of means starts."""
    from kvpack.kernels.attend import attention

    pairs = random_pairs(1, 220, dims=(64, 64))
    keys, values = pairs[0]
    keys += 4 * torch.randn(1, keys.shape[1], 1, 64, generator=torch.Generator().manual_seed(2))
    keys[:, :, [19, 150]] *= 0.05
    raw = "raw_first=2,raw_low_norm=0.6"
    cache = kvpack.pack([(keys, values)], f"k={k},{raw};v=scalar:b=3,{raw}")
    q = torch.randn(1, 4, 2, 64, generator=torch.Generator().manual_seed(3))
    expected = exact_attention(q, cache[0])
    monkeypatch.setenv(dispatch.VARIABLE, "triton")
    there = cache.to(DEVICE)
    assert attention.supports(q.to(DEVICE), there[0])
    found = kvpack.attend(q.to(DEVICE), there[0]).cpu()
    assert (found - expected).norm() / expected.norm() < TOLERANCE


@pytest.mark.scenario
@pytest.mark.kernels
@pytest.mark.parametrize("window", [None, 70])
def test_means_agree_in_a_growing_layer(window: int | None) -> None:
    """Launches stay the same as long as their tables and products have room."""
    from kvpack.kernels.attend.growing import GrowingCall
    from kvpack.kernels.attend.prepared import AttendOptions

    k_codec, v_codec = codecs("scalar:b=3,mean=16,norm=log8", "scalar:b=4,norm=log8", (64, 64))
    q = torch.randn(1, 8, 1, 64, generator=torch.Generator().manual_seed(3))
    mode = {} if window is None else {"sliding_window": window}
    call, changes = None, []
    for runs in ((64, 48), (64, 48, 32), (64, 48, 32, 700)):
        layer = Layer(random_side(k_codec, 2, runs, 9, 1), random_side(v_codec, 2, runs, 9, 2))
        there = layer.to(DEVICE)
        if call is None:
            call = GrowingCall(q.to(DEVICE), there, AttendOptions(0.125, sliding_window=window))
        else:
            changes.append(call.refresh(there))
        expected = exact_attention(q, layer, **mode)
        found = call(q.to(DEVICE), torch.tensor([sum(runs) + 9], dtype=torch.int32, device=DEVICE)).cpu()
        assert (found - expected).norm() / expected.norm() < TOLERANCE
    assert not changes[0]


@pytest.mark.kernels
@pytest.mark.parametrize("fields", [3, 8, 16, 24, 64, 128])
def test_sign_columns_of_any_width_agree_with_exact_attention(fields: int) -> None:
    found = codecs("scalar:b=2", "group:b=2,g=32", (64, 128))
    k_codec, v_codec = (CodecWithSidecars(codec, (Qjl(codec.dim, 1, "fp16", fields),)) for codec in found)
    check_attention(Layer(random_side(k_codec, 1, (33,), 0, 1), random_side(v_codec, 1, (33,), 0, 2)), 1)


@pytest.mark.kernels
def test_factors_of_any_size_agree_with_exact_attention() -> None:
    """The factors of the codec and of its signs are large, tiny and zero, next to each other."""
    k_codec, v_codec = codecs(*("scalar:b=3,norm=fp32,qjl=fp32" for _ in "kv"), (64, 64))
    layer = Layer(random_side(k_codec, 1, (80,), 0, 1), random_side(v_codec, 1, (80,), 0, 2))
    assert layer.v is not None
    streams = layer.v.runs[0].streams
    norms, qjl_norms = streams["norm"].clone(), streams["qjl_norm"].clone()
    for norm, qjl_norm in ((1e-25, 1.0), (1e20, 1e-20), (1e10, 1e20), (0.0, 1.0), (1.0, 0.0), (0.0, 1e-25)):
        torch.mul(norms, norm, out=streams["norm"])
        torch.mul(qjl_norms, qjl_norm, out=streams["qjl_norm"])
        streams["qjl_norm"][..., ::2] *= 1e-10
        check_attention(layer, 2)


@pytest.mark.scenario
@pytest.mark.filterwarnings("ignore:.*which share")
@pytest.mark.kernels
@pytest.mark.parametrize(
    "recipe",
    [
        "octopus-qjl-2",
        "turboquant-qjl-3",
        "kv=group:b=4,g=32,scales=u8,qjl=fp16",
        "k=group:b=4,g=32,channel_order=u8,block_rotation=32,qjl=fp16,sinks=4;v=octahedral:b=3,qjl=fp16,sinks=2",
        "kv=scalar:b=3,channel_scale=fp16,qjl=fp16;tail=32",
        "int-4-med3",
        "hqmq-s24-r4-med3;tail=0",
        "k=group:b=4,g=32,channel_order=u8,block_rotation=32,outliers=2,sinks=4;v=octahedral:b=3,outliers=2,qjl=fp16,sinks=2",
        "kv=group:b=4,g=32,scales=u8,outliers=2,channel_scale=fp16",
    ],
)
def test_channel_scales_agree_with_other_sidecars(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvpack.kernels.attend import attention

    generator = torch.Generator().manual_seed(3)
    pairs = random_pairs(1, 86, dims=(64, 64))
    for x in (x for pair in pairs for x in pair):
        x.unflatten(3, (-1, 4))[torch.rand(*x.shape[:3], 16, generator=generator) < 0.03] *= 8
    cache = kvpack.pack(pairs, recipe)
    q = torch.randn(1, 4, 2, 64, generator=generator)
    expected = exact_attention(q, cache[0])
    monkeypatch.setenv(dispatch.VARIABLE, "triton")
    there = cache.to(DEVICE)
    assert attention.supports(q.to(DEVICE), there[0])
    found = kvpack.attend(q.to(DEVICE), there[0]).cpu()
    assert (found - expected).norm() / expected.norm() < TOLERANCE


@pytest.mark.kernels
@pytest.mark.parametrize("norm", [0.0, 1e-3, 1e3])
def test_outliers_of_any_relative_size_agree_with_exact_attention(norm: float) -> None:
    k_codec, v_codec = codecs(*("scalar:b=3,norm=fp32,outliers=3" for _ in "kv"), (64, 64))
    layer = Layer(random_side(k_codec, 1, (80,), 0, 1), random_side(v_codec, 1, (80,), 0, 2))
    for side in layer.sides.values():
        streams = side.runs[0].streams
        streams["norm"].mul_(norm)
        streams["outliers"][:, :, ::2] *= 1e-3
        if norm > 1:
            # Larger than what the codec has in their places.
            streams["outliers"] *= 200
    check_attention(layer, 2, scale=0.1 if norm < 1 else 1e-4)


@pytest.mark.kernels
def test_outliers_that_no_writer_produces_are_left_to_torch() -> None:
    from kvpack.kernels.attend import attention

    codec, _ = codecs("group:b=4,g=4,axis=channel,outliers=3", "raw:dtype=bf16", (64, 64))
    outliers = codec.sidecar(Outliers)
    assert outliers is not None
    q = torch.randn(1, 1, 1, 64, device=DEVICE)
    for size in (0, 1000):
        side = random_side(codec, 1, (80,), 0, 1)
        streams = side.runs[0].streams
        streams["scales"][..., 1] += size * outliers.flags(streams)
        layer = Layer(there := side.to(DEVICE), there)
        assert attention.supports(q, layer) == (size == 0)


@pytest.mark.kernels
@pytest.mark.parametrize("size", [1e-7, 1.0, 1e6])
def test_raw_tokens_of_either_side_share_a_launch(size: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values that binary16 cannot represent stay unchanged."""
    from kvpack.kernels.attend import attention
    from kvpack.kernels.attend.prepared import AttendOptions

    k, v = random_pairs(1, 300, dims=(64, 64))[0]
    v[:, :, 0] *= size
    k[:, :, 200] *= 1e-3
    layer = kvpack.pack([(k, v)], "k=group:b=2,g=32,low_norm_tokens=1;v=group:b=2,g=32,rotation=hadamard,sinks=1,raw_tokens=fp32")[0]
    q = torch.randn(1, 4, 2, 64)
    expected = exact_attention(q, layer)
    monkeypatch.setenv(dispatch.VARIABLE, "triton")
    there, q = Layer(*(side.to(DEVICE) for side in layer.sides.values())), q.to(DEVICE)
    launches = attention.prepare(q, there, AttendOptions(0.125)).launches
    assert [int(launch.work[:, 1].sum()) for launch in launches] == [300 - 2 * 64, 2 * 64]
    assert len({launch.v for launch in launches}) == 1
    found = kvpack.attend(q, there).cpu()
    assert (found - expected).norm() / expected.norm() < TOLERANCE


@pytest.mark.scenario
@pytest.mark.kernels
@pytest.mark.parametrize("limit", [1, 2 * 64 * 300])
def test_blocks_with_raw_tokens_are_decoded_once_for_any_window(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows begin inside blocks, and one block has values that exceed binary16."""
    from kvpack.kernels.attend import segments

    monkeypatch.setattr(segments, "MAX_DECODED_VALUES", limit)
    k, v = random_pairs(1, 600, dims=(64, 64))[0]
    k[:, :, [70, 300, 450]] *= 1e-3
    v[:, :, 0] *= 1e6
    layer = kvpack.pack([(k, v)], "k=group:b=2,g=32,low_norm_tokens=1;v=group:b=2,g=32,rotation=hadamard,sinks=1,raw_tokens=fp32")[0]
    q = torch.randn(1, 4, 1, 64)
    expected = [exact_attention(q, layer, sliding_window=window) for window in (600, 580, 520, 290, 600)]
    monkeypatch.setenv(dispatch.VARIABLE, "triton")
    there, q = Layer(*(side.to(DEVICE) for side in layer.sides.values())), q.to(DEVICE)
    for window, right in zip((600, 580, 520, 290, 600), expected, strict=True):
        found = kvpack.attend(q, there, sliding_window=window).cpu()
        assert (found - right).norm() / right.norm() < TOLERANCE


@pytest.mark.scenario
@pytest.mark.kernels
@pytest.mark.parametrize(
    "recipe", ["kv=scalar:b=3,norm=fp32;raw=4,0.6", "k=octahedral:b=3;v=group:b=3,g=32;raw=4,0.6", "kv=trellis:b=2,states=256;raw=4,0.6"]
)
def test_scattered_raw_tokens_do_not_disable_the_kernels(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One token in 64 is raw. Only the tokens around the raw ones are decoded first."""
    from kvpack.kernels.attend import attention, segments
    from kvpack.kernels.attend.prepared import AttendOptions

    monkeypatch.setattr(segments, "MAX_RAW_TOKENS", 64)
    k, v = random_pairs(1, 640, dims=(64, 64))[0]
    k[:, :, 30::64] *= 0.1
    layer = kvpack.pack([(k, v)], recipe)[0]
    q = torch.randn(1, 4, 2, 64)
    expected = exact_attention(q, layer)
    monkeypatch.setenv(dispatch.VARIABLE, "triton")
    there, q = Layer(*(side.to(DEVICE) for side in layer.sides.values())), q.to(DEVICE)
    assert attention.supports(q, there)
    launches = attention.prepare(q, there, AttendOptions(0.125)).launches
    assert sum(int(launch.work[:, 1].sum()) for launch in launches) == 640
    found = kvpack.attend(q, there).cpu()
    assert (found - expected).norm() / expected.norm() < TOLERANCE


@pytest.mark.kernels
def test_outliers_of_many_tokens_agree_with_exact_attention() -> None:
    k_codec, v_codec = codecs("scalar:b=2,outliers=3", "group:b=2,g=16,outliers=3", (16, 16))
    check_attention(Layer(random_side(k_codec, 1, (2500,), 0, 1), random_side(v_codec, 1, (1301, 1199), 0, 2)), 1)


@pytest.mark.kernels
def test_more_outliers_than_fit_in_a_thread_agree_with_exact_attention() -> None:
    """Most chunks of some tokens are outliers, other tokens have none, and tiles begin inside a granule of entries."""
    k_codec, v_codec = codecs("group:b=4,g=64,axis=channel,outliers=3", "quaternion:s=24,r=3,outliers=3", (64, 64))
    sides = []
    for seed, codec in enumerate((k_codec, v_codec)):
        outliers = codec.sidecar(Outliers)
        assert outliers is not None
        generator = torch.Generator().manual_seed(seed)
        (side,) = (random_side(codec, 2, runs, 0, seed) for runs in [(83, 77) if seed else (70, 90)])
        for page in side.runs:
            flags = torch.rand(1, 2, page.tokens, 16, generator=generator) < torch.linspace(-0.5, 0.9, page.tokens)[:, None]
            planes = outliers.packing.pack([flags.to(torch.int32)])
            page.streams.update({f"outlier_flags.{plane}": words for plane, words in enumerate(planes)})
            page.streams["outliers"] = (4 * torch.randn(1, 1, int(flags.sum()), 4, generator=generator)).to(torch.float16)
        sides.append(side)
    check_attention(Layer(*sides), 2)


@pytest.mark.skipif(not triton_version.is_supported(), reason="the kernels need a newer Triton")
def test_patches_and_tables_fit_in_shared_memory() -> None:
    from kvpack.kernels.tiles import loaders
    from kvpack.kernels.tiles.shapes import MULTIPROCESSOR_BYTES, STATIC_SHARED_BYTES, LaunchShape, plan_patches

    k_codec, v_codec = codecs("group:b=4,g=128,axis=channel,outliers=3", "quaternion:s=24,r=3,outliers=3", (128, 256))
    k, v = loaders.find_tiles(k_codec), loaders.find_tiles(v_codec)
    assert k is not None
    assert v is not None
    given = (1, 32, 8, 0), (2, 64, 4, 0), (2, 64, 4, 36 << 10), (4, 32, 2, 40 << 10), (4, 64, 2, 40 << 10)
    for warps, tokens, programs, table_bytes in given:
        shape = LaunchShape(warps, 1, tokens, 1, programs)
        k_constants, v_constants, size = plan_patches(k, v, shape, table_bytes)
        assert k_constants is not None
        assert v_constants is not None
        assert table_bytes + size <= STATIC_SHARED_BYTES
        assert programs * (table_bytes + size) < MULTIPROCESSOR_BYTES
        assert size == warps * k_constants.patch_bytes == warps * v_constants.patch_bytes
        for side in (k_constants, v_constants):
            assert side.patch_tiles > 0 or table_bytes > 0
            assert 2 * tokens * side.width * side.patch_tiles <= side.patch_bytes
        assert (k_constants.patch_tiles == k_constants.tiles) == (table_bytes == 0)


@pytest.mark.kernels
def test_pages_with_channel_scales_agree_with_a_raw_tail() -> None:
    """Queries have different norms in each frame: one page scales its channels by 8, one by 1/4, and the tail by 1."""
    from kvpack.kernels.attend import attention
    from kvpack.kernels.attend.prepared import AttendOptions

    (codec, v_codec) = codecs("scalar:b=3", "scalar:b=4", (64, 64))
    scaled = kvpack.Recipe("k=scalar:b=3,channel_scale=fp16;v=raw").codec(0, 1, "k", 64)
    plain = random_side(codec, 2, (64, 32), 9, 1, batch=2)
    shares = torch.rand(2, 2, 1, 64, generator=torch.Generator().manual_seed(3)) + 0.5
    pages = tuple(
        PackedRun(scaled, page.tokens, {**page.streams, STREAM: (factor * shares).to(torch.float16)})
        for page, factor in zip(plain.runs, (8.0, 0.25), strict=True)
    )
    layer = Layer(Side(scaled, PackedRuns.from_runs(pages), plain.tail), random_side(v_codec, 2, (64, 32), 9, 2, batch=2))
    check_attention(layer, 4, q_len=3)
    # Kernels multiply the query by the factors, so that a CUDA graph may hold the whole call.
    assert attention.prepare(torch.randn(2, 4, 1, 64), layer, AttendOptions(0.125)).runs_only_kernels
