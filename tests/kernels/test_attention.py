"""Tests of attention over packed rows by Triton, compared with fp64 attention over the decoded values.

The tests run in Triton's interpreter anywhere, and compiled on CUDA devices. interpreter.py describes which process runs which of them.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest
import torch

import kvpack
from kvpack.attention import attention_kernels
from kvpack.cache.layer import Layer
from kvpack.cache.packed_runs import PackedRun, PackedRuns
from kvpack.cache.side import Side
from kvpack.coding import dispatch
from kvpack.formats.group import Group
from support.caches import random_pairs
from support.interpreter import DEVICE, INTERPRETED, needs_loaded_bounds
from support.kernel_calls import attend_by
from support.random_sides import TOLERANCE, check_attention, codecs, exact_attention, random_side
from support.strategies import with_poisoned_padding

if TYPE_CHECKING:
    pass


KEYS = {
    "raw": "raw:dtype=bf16",
    "raw fp32": "raw:dtype=fp32",
    "group 4": "group:b=4,g=32",
    "group 2, token scale": "group:b=2,g=32,rotation=hadamard,token_scale=fp16",
    "group 2, token scale per head": "group:b=2,g=32,rotation=hadamard,token_scale=fp16-per-head",
    "group 3, groups of channels": "group:b=3,g=64,axis=channel",
    "fp8": "minifloat:element=e4m3",
    "fp8 per token": "minifloat:element=e5m2,per=token,scales=fp16",
    "mxfp8": "minifloat:element=e4m3,scales=e8m0",
    "nvfp4": "minifloat:element=e2m1,scales=e4m3",
    "4 bits, outliers": "minifloat:element=e2m1,outliers=3",
    "scalar 3": "scalar:b=3",
    "scalar 2 and 3": "scalar:b=2,high=3",
    "trellis 2": "trellis:b=2,states=256",
    "trellis 3": "trellis:b=3,states=1024",
    "octahedral 2": "octahedral:b=2,arrangement=direct",
    "octahedral 4": "octahedral:b=4,arrangement=direct",
    "dense octahedral 2": "octahedral:b=2",
    "dense octahedral 3": "octahedral:b=3",
    "dense octahedral 4": "octahedral:b=4",
    "angle": "angle:n=128,norm=linear8,arrangement=direct",
    "quaternion": "quaternion:s=24,r=3,arrangement=direct",
    "dense angle": "angle:n=128,norm=linear8",
    "dense angle of wide bins": "angle:n=4096,norm=log4,range=fp32",
    "dense angle, signs": "angle:n=128,qjl=fp16",
    "dense angle of two streams": "angle:n=24,norm=log3,range=fp32",
    "dense quaternion": "quaternion:s=24,r=3",
    "scalar 2, signs": "scalar:b=2,qjl=fp16",
    "dense octahedral 3, signs": "octahedral:b=3,qjl=fp32",
    "scalar 3, outliers": "scalar:b=3,outliers=3",
    "dense quaternion, outliers": "quaternion:s=24,r=3,outliers=3",
    "scalar 2, means": "scalar:b=2,mean=16,norm=log8",
    "dense octahedral 2, 8-bit norms": "octahedral:b=2,norm=log8",
    "trellis 2, 8-bit norms": "trellis:b=2,states=256,norm=log8",
    "dense octahedral 3, means of 4 bits": "octahedral:b=3,mean=32,mean_bits=4",
    "angle, means and signs": "angle:n=128,norm=linear8,qjl=fp16,mean=8",
    "quaternion, means and outliers": "quaternion:s=24,r=3,arrangement=direct,outliers=3,mean=16",
    "trellis 2, means": "trellis:b=2,states=256,mean=64",
    "group 4, means": "group:b=4,g=64,axis=channel,mean=8",
    "nvfp4, means": "minifloat:element=e2m1,scales=e4m3,mean=16",
    "polar, means": "polar:b=3,mean=16",
}
VALUES = {
    "raw": "raw:dtype=fp16",
    "group 4": "group:b=4,g=32",
    "group 2, groups of tokens": "group:b=2,g=16,axis=token,token_scale=fp32",
    "fp8 per head": "minifloat:element=e5m2,per=head,scales=fp16",
    "4 bits per token": "minifloat:element=e2m1,per=token,scales=fp32",
    "mxfp4": "minifloat:element=e2m1,scales=e8m0",
    "nvfp4": "minifloat:element=e2m1,scales=e4m3",
    "scalar 2": "scalar:b=2,norm=fp32",
    "scalar 4": "scalar:b=4",
    "scalar 2, 8-bit norms": "scalar:b=2,norm=log8",
    "octahedral 3, 8-bit norms": "octahedral:b=3,arrangement=direct,norm=log8",
    "trellis 1": "trellis:b=1,states=1024,norm=fp32",
    "trellis 4": "trellis:b=4,states=256",
    "octahedral 3": "octahedral:b=3,arrangement=direct",
    "dense octahedral 2": "octahedral:b=2",
    "dense octahedral 3": "octahedral:b=3",
    "dense octahedral 4": "octahedral:b=4,norm=fp32",
    "angle": "angle:n=48,norm=log4,arrangement=direct,range=fp32",
    "quaternion": "quaternion:s=192,r=6,arrangement=direct",
    "dense angle": "angle:n=48,norm=log4",
    "dense quaternion": "quaternion:s=192,r=6,norm=fp32",
    "group 4, signs": "group:b=4,g=32,qjl=fp16",
    "scalar 3, signs": "scalar:b=3,qjl=fp16",
    "group 4, outliers": "group:b=4,g=128,axis=channel,outliers=3",
    "dense angle, outliers": "angle:n=48,norm=log4,outliers=3",
}

pytestmark = [needs_loaded_bounds, pytest.mark.usefixtures("uninitialized_is_poisoned")]

PAIRS = [(k, v) for number, k in enumerate(KEYS) for v in (list(VALUES) * 2)[number % len(VALUES) :][: 1 if INTERPRETED else len(VALUES)]]
"""All pairs of codecs for keys and values or, if that takes too long, enough pairs to include every codec."""


@pytest.mark.kernels
@pytest.mark.parametrize(("k", "v"), PAIRS)
def test_every_key_codec_works_with_every_value_codec(k: str, v: str) -> None:
    k_codec, v_codec = codecs(KEYS[k], VALUES[v], (32, 64))
    check_attention(Layer(random_side(k_codec, 1, (40,), 0, 1), random_side(v_codec, 1, (40,), 0, 2)), 2)


@pytest.mark.kernels
@pytest.mark.parametrize(
    "family",
    [
        name
        for name in KEYS
        if name in {"group 4", "scalar 3", "trellis 2", "trellis 3", "octahedral 4", "angle", "quaternion", "raw", "fp8", "mxfp8", "nvfp4"}
        or name.startswith("dense")
    ],
)
def test_every_head_dim_agrees_with_exact_attention(family: str) -> None:
    tokens = 33
    for dims in ((80, 96), (128, 256)) if INTERPRETED else ((80, 80), (96, 96), (128, 128), (256, 256)):
        # Values have no means.
        k_codec, v_codec = codecs(KEYS[family], KEYS[family].partition(",mean=")[0], dims)
        check_attention(Layer(random_side(k_codec, 1, (tokens,), 0, 1), random_side(v_codec, 1, (tokens,), 0, 2)), 1)


@pytest.mark.kernels
@pytest.mark.parametrize("states", [256, 1024])
@pytest.mark.parametrize(("bits", "dims"), [(1, (16, 48)), (2, (24, 64)), (3, (16, 80)), (4, (12, 40))])
def test_trellis_windows_are_decoded_in_rows_of_any_length(bits: int, dims: tuple[int, int], states: int) -> None:
    """Rows have an odd number of words or less than a tile, and their first window begins in the last 32-bit word."""
    k_codec, v_codec = codecs(*[f"trellis:b={bits},states={states}"] * 2, dims)
    check_attention(Layer(random_side(k_codec, 1, (33,), 0, 1), random_side(v_codec, 1, (33,), 0, 2)), 1)


@pytest.mark.kernels
@pytest.mark.parametrize("words", ["element=e4m3", "element=e5m2,per=token", "element=e2m1,scales=e8m0", "element=e2m1,scales=e4m3"])
def test_minifloats_are_decoded_with_any_fields_and_blocks(words: str) -> None:
    """Rows have fewer words than a tile has columns, columns of many bytes, partial blocks, and three words of scales."""
    for dim, fields in (
        ((16, 0), (40, 1), (40, 3), (96, 0), (64, 16)) if INTERPRETED else ((16, 0), (40, 1), (40, 3), (96, 0), (192, 0), (64, 16))
    ):
        codec, _ = codecs(f"minifloat:{words}", "raw:dtype=bf16", (dim, dim))
        if fields:
            codec = dataclasses.replace(codec, fields=(("codes", fields),))  # type: ignore[type-var]
        check_attention(Layer(random_side(codec, 1, (33,), 0, 1), random_side(codec, 1, (33,), 0, 2)), 1)


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("element", "spread", "fused"), [("e2m1", 23, True), ("e2m1", 24, False), ("e4m3", 14, True), ("e4m3", 15, False), ("e5m2", 9, False)]
)
def test_powers_of_two_beyond_tiles_are_left_to_torch(element: str, spread: int, fused: bool) -> None:
    """The smallest element belongs to a block that is 2^spread times smaller than another block of its token."""
    from kvpack.kernels.attend import attention

    codec, _ = codecs(f"minifloat:element={element},scales=e8m0", "raw:dtype=bf16", (64, 64))
    side = random_side(codec, 1, (20,), 0, 1)
    scales = side.runs[0].streams["block_scales"]
    scales[..., 0], scales[..., 1] = 127, 127 - spread
    layer = Layer(side.to(DEVICE), side.to(DEVICE))
    assert attention.supports(torch.zeros(1, 1, 1, 64, device=DEVICE), layer) == fused
    # Blocks of zeros lose nothing, whatever their scale.
    codes = codec.digits(side.runs[0].streams)[0]
    codes[..., 32:] = 0
    zeros = Side(codec, PackedRuns.from_runs([PackedRun(codec, 20, {**side.runs[0].streams, **codec.pack_digits(codes)})]), side.tail)
    check_attention(Layer(zeros, zeros), 1)


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("words", "values"), [("", "group:b=2,g=32"), ("", "minifloat:element=e2m1,scales=e8m0"), (",qjl=fp16", "raw:dtype=bf16")]
)
def test_block_steps_of_any_size_are_exact(words: str, values: str) -> None:
    """The products of a step use the power of two of its block.

    The cases are small and large powers, two tokens per row of values, and negative values.
    """
    k_codec, v_codec = codecs(f"minifloat:element=e2m1,scales=e8m0{words}", values, (128, 64))
    side = random_side(k_codec, 1, (70,), 0, 1)
    scales = side.runs[0].streams["block_scales"]
    scales[:, :, 3] = torch.tensor([0, 1, 0, 5], dtype=torch.uint8)
    scales[:, :, 40] = torch.tensor([130, 118, 128, 125], dtype=torch.uint8)
    check_attention(Layer(side, random_side(v_codec, 1, (70,), 0, 2)), 2)


@pytest.mark.kernels
@pytest.mark.parametrize("bits", range(1, 9), ids=lambda bits: f"{bits} bits")
def test_every_code_width_agrees_with_exact_attention(bits: int) -> None:
    for fields in (128 // bits, 3):
        group = Group(40, bits, "token", 32, "none", 0, "none", (("codes", fields),))
        scalar, _ = codecs(f"scalar:b={bits}", "raw:dtype=bf16", (40, 40))
        check_attention(Layer(random_side(group, 1, (33,), 0, 1), random_side(scalar, 1, (33,), 0, 2)), 1)


@pytest.mark.kernels
@pytest.mark.parametrize(("k", "v"), [((1, 1), (42, 4)), ((48, 3), (48, 4)), ((682, 4), (96, 8)), ((171, 1), (192, 3))])
def test_codewords_and_radii_of_any_width_are_decoded(k: tuple[int, int], v: tuple[int, int]) -> None:
    """Codewords and radii of dense quaternions take one symbol or two. There are also more codewords than shared memory can hold."""
    k_codec, v_codec = codecs("quaternion:s={},r={}".format(*k), "quaternion:s={},r={}".format(*v), (64, 60))
    check_attention(Layer(random_side(k_codec, 1, (70,), 0, 1), random_side(v_codec, 1, (70,), 0, 2)), 2)


@pytest.mark.scenario
@pytest.mark.kernels
@pytest.mark.parametrize(("bits", "size", "dim"), [(4, 4, 128), (2, 16, 128), (3, 8, 96), (8, 4, 64), (2, 8, 60), (4, 8, 80), (1, 4, 256)])
def test_groups_of_few_channels_agree_with_exact_attention(bits: int, size: int, dim: int) -> None:
    """A few columns share scales and centers, and fields may contain partial groups."""
    codec, other = codecs(f"group:b={bits},g={size},axis=channel", f"group:b={bits},g={size},axis=channel,token_scale=fp16", (dim, dim))
    check_attention(Layer(random_side(codec, 2, (33, 70), 0, 1), random_side(other, 2, (103,), 0, 2)), 4, q_len=3)


MODES: dict[str, dict[str, Any]] = {
    "one query": {},
    "queries of a chunk": {"q_len": 5},
    "more rows than a block": {"q_len": 9},
    "not causal": {"q_len": 3, "causal": False},
    "a scale": {"scale": 0.7},
    "softcap": {"softcap": 3.0, "q_len": 2},
    "a window": {"sliding_window": 20, "q_len": 2},
    "a window inside the tail": {"sliding_window": 4},
    "a window that is not causal": {"sliding_window": 30, "q_len": 4, "causal": False},
    "half precision": {"dtype": torch.bfloat16},
    "sink logits": {"sink_logits": [2.0, -torch.inf], "q_len": 2},
    "sink logits and a softcap": {"sink_logits": [0.5, 30.0], "softcap": 3.0},
}


@pytest.mark.kernels
@pytest.mark.parametrize("mode", MODES)
def test_all_modes_agree_over_pages_and_a_tail(mode: str) -> None:
    k_codec, v_codec = codecs(KEYS["group 2, token scale"], VALUES["scalar 4"], (32, 64))
    # Pages of keys and of values end at different tokens, so a run of keys begins inside a token group.
    layer = Layer(random_side(k_codec, 1, (96, 1), 9, 1), random_side(v_codec, 1, (50, 47), 9, 2))
    check_attention(layer, 2, **MODES[mode])


LENGTHS: dict[str, dict[str, Any]] = {
    "one query": {},
    "queries of a chunk": {"q_len": 3},
    "a window": {"sliding_window": 20, "q_len": 2},
    "not causal": {"causal": False, "q_len": 3},
    "sink logits": {"sink_logits": [1.0, -2.0]},
}


@pytest.mark.scenario
@pytest.mark.kernels
@pytest.mark.parametrize("mode", LENGTHS)
def test_sequences_with_different_lengths_agree_with_exact_attention(mode: str) -> None:
    k_codec, v_codec = codecs(KEYS["group 2, token scale"], VALUES["scalar 4"], (32, 64))
    layer = Layer(random_side(k_codec, 1, (96, 1), 9, 1, batch=5), random_side(v_codec, 1, (50, 47), 9, 2, batch=5))
    check_attention(layer, 2, lengths=[106, 0, 1, 97, 64], **LENGTHS[mode])


STARTS: dict[str, dict[str, Any]] = {
    "one query": {},
    "queries of a chunk": {"q_len": 5},
    "more rows than a block": {"q_len": 9, "softcap": 3.0},
    "a window": {"sliding_window": 40, "q_len": 2},
    "a short window": {"sliding_window": 3, "q_len": 5},
    "not causal": {"causal": False, "q_len": 3},
    "sink logits": {"sink_logits": [1.0, -2.0]},
    "unequal lengths": {"lengths": [310, 10, 0, 251, 130], "q_len": 3},
    "unequal lengths and a window": {"lengths": [310, 10, 0, 251, 130], "sliding_window": 100},
}


@pytest.mark.scenario
@pytest.mark.kernels
@pytest.mark.parametrize(
    ("mode", "dual"),
    [(mode, False) for mode in STARTS] + [(mode, True) for mode in list(STARTS)[:: 2 if INTERPRETED else 1]],
    ids=lambda given: given if isinstance(given, str) else "two tokens a row" if given else "a token a row",
)
def test_left_padded_sequences_agree_with_exact_attention(mode: str, dual: bool) -> None:
    """Sequences start between tiles, inside them, in the tail, and after all tokens."""
    if dual:
        k_codec, v_codec = codecs(NARROW["scalar 3"], NARROW["group 3, groups of channels"], (64, 64))
    else:
        k_codec, v_codec = codecs(KEYS["group 2, token scale"], VALUES["scalar 4"], (32, 64))
    layer = Layer(random_side(k_codec, 1, (300, 1), 9, 1, batch=5), random_side(v_codec, 1, (50, 251), 9, 2, batch=5))
    for starts in ([0, 1, 310, 308, 64], [130, 0, 3, 250, 129])[: 1 if INTERPRETED else 2]:
        check_attention(layer, 2, starts=starts, **STARTS[mode])


@pytest.mark.scenario
@pytest.mark.kernels
@pytest.mark.parametrize(("tiles", "window"), [(1, None), (2, 200)] if INTERPRETED else [(1, None), (1, 200), (2, None), (2, 200)])
@pytest.mark.parametrize("family", ["group 4", "dense quaternion", "scalar 3, outliers"])
def test_programs_with_many_tiles_skip_left_padding(
    family: str, tiles: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each program processes tiles that are invisible, masked, and fully visible."""
    from kvpack.kernels.attend import plan
    from kvpack.kernels.tiles import shapes

    if INTERPRETED:
        monkeypatch.setattr(plan, "choose_shape", lambda *_: shapes.LaunchShape(2, tiles, 16, 2, 1))
    tokens = 900 if INTERPRETED else 60_000
    k_codec, v_codec = codecs(KEYS[family], KEYS[family], (32, 32))
    layer = Layer(random_side(k_codec, 1, (tokens,), 5, 1, batch=4), random_side(v_codec, 1, (tokens,), 5, 2, batch=4))
    for q_len in (1, 4):
        check_attention(layer, 2, q_len, starts=[33, 500, tokens - 60, tokens + 4], sliding_window=window)


@pytest.mark.cuda
def test_starts_may_change_between_replays_of_a_cuda_graph() -> None:
    layer = kvpack.pack(random_pairs(1, 3000, batch=2, dims=(64, 64)), "k=scalar:b=4;v=group:b=4;tail=128").to(DEVICE)[0]
    q = torch.randn(2, 4, 1, 64, device=DEVICE)
    starts = torch.tensor([0, 100], device=DEVICE)
    kvpack.attend(q, layer, starts=starts)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = kvpack.attend(q, layer, starts=starts)
    for given in ([0, 100], [2990, 17], [2999, 3000], [1024, 1500]):
        starts.copy_(torch.tensor(given))
        graph.replay()
        assert torch.equal(captured, kvpack.attend(q, layer, starts=given))
        expected = exact_attention(q.cpu(), Layer(*(side.to("cpu") for side in layer.sides.values())), starts=given)
        assert (captured.cpu() - expected).norm() < TOLERANCE * expected.norm()


NARROW = {
    "group 2, groups of tokens": "group:b=2,g=32,axis=token,rotation=hadamard,token_scale=fp16",
    "group 2, short groups of tokens": "group:b=2,g=16,axis=token",
    "group 3, groups of channels": "group:b=3,g=32,axis=channel",
    "group 2, groups within fields": "group:b=2,g=4,axis=channel,token_scale=fp32",
    "group 2, scales per head": "group:b=2,g=32,axis=channel,token_scale=fp32-per-head",
    "scalar 3": "scalar:b=3",
    "scalar 2": "scalar:b=2,norm=fp32",
    "octahedral 2": "octahedral:b=2,arrangement=direct",
    "octahedral 3": "octahedral:b=3,arrangement=direct,norm=fp32",
    "octahedral 4": "octahedral:b=4,arrangement=direct",
    "dense angle": "angle:n=128,norm=linear8",
    "dense angle, logarithms": "angle:n=32,norm=log4,range=fp32",
}
"""Codecs whose rows have 4 or 8 words for head dim 64."""
WIDE = {
    "raw": "raw:dtype=bf16",
    "group 4": "group:b=4,g=32",
    "scalar 4": "scalar:b=4",
    "dense octahedral 3": "octahedral:b=3",
    "angle": "angle:n=128,norm=linear8,arrangement=direct",
    "group 4, signs": "group:b=4,g=32,qjl=fp16",
    "scalar 3, signs": "scalar:b=3,qjl=fp32",
}
"""Codecs to combine with one that has narrow rows."""


@pytest.mark.scenario
@pytest.mark.kernels
@pytest.mark.parametrize(
    ("k", "v"),
    [
        *((k, v) for number, k in enumerate(NARROW) for v in (list(NARROW) * 2)[number:][: 1 if INTERPRETED else len(NARROW)]),
        *((k, v) for number, k in enumerate(NARROW) for v in (list(WIDE) * 2)[number:][: 1 if INTERPRETED else len(WIDE)]),
        *((k, v) for number, v in enumerate(NARROW) for k in (list(WIDE) * 2)[number:][: 1 if INTERPRETED else len(WIDE)]),
    ],
)
def test_rows_with_two_tokens_agree_with_exact_attention(k: str, v: str) -> None:
    from kvpack.kernels.tiles import loaders

    both = NARROW | WIDE
    k_codec, v_codec = codecs(both[k], both[v], (64, 64))
    layer = Layer(random_side(k_codec, 1, (1, 160), 0, 1), random_side(v_codec, 1, (161,), 0, 2))
    assert any(loaders.find_dual_tiles(codec) for codec in (k_codec, v_codec))
    check_attention(layer, 2)


@pytest.mark.scenario
@pytest.mark.kernels
@pytest.mark.parametrize("rows", [(1, 1), (4, 1), (2, 2), (7, 1)], ids=lambda rows: f"{rows[0]} heads, {rows[1]} queries")
@pytest.mark.parametrize(
    ("k", "v", "dims"),
    [
        pytest.param("scalar:b=3", "scalar:b=4,norm=log8", (128, 96), id="paired keys and values"),
        pytest.param("scalar:b=4,mean=16", "group:b=4,g=32", (80, 64), id="paired keys"),
        pytest.param("scalar:b=3,qjl=fp16", "scalar:b=3,norm=fp32", (64, 256), id="paired values"),
        pytest.param("octahedral:b=3,norm=log8", "scalar:b=3", (128, 64), id="octahedral keys"),
        pytest.param("group:b=2,g=32", "scalar:b=4", (64, 64), id="dual keys"),
    ],
)
def test_few_rows_agree_with_exact_attention(k: str, v: str, dims: tuple[int, int], rows: tuple[int, int]) -> None:
    k_codec, v_codec = codecs(k, v, dims)
    layer = Layer(random_side(k_codec, 1, (1, 80), 5, 1), random_side(v_codec, 1, (81,), 5, 2))
    check_attention(layer, rows[0], q_len=rows[1])


@pytest.mark.scenario
@pytest.mark.kernels
@pytest.mark.parametrize(
    ("recipe", "dims"),
    [
        pytest.param("polar:b=4.2.2.2", (64, 64), id="levels of a radius for 16 channels"),
        pytest.param("polar:b=4.3.2.2", (96, 32), id="no power of two"),
        pytest.param("polar:b=2,norm=fp32", (64, 64), id="one radius of 32 bits"),
        pytest.param("polar:b=8.4.2.2.2", (64, 32), id="a radius for a tile"),
        pytest.param("polar:b=3", (128, 64), id="two angles at once, and fields of two planes"),
        pytest.param("polar:b=4", (128, 32), id="levels above a tile"),
        pytest.param("polar:b=5.5", (128, 32), id="two levels"),
    ],
)
def test_radius_trees_of_any_size_agree_with_exact_attention(recipe: str, dims: tuple[int, int]) -> None:
    tokens = 31 if INTERPRETED else 70
    k_codec, v_codec = codecs(recipe, recipe, dims)
    check_attention(Layer(random_side(k_codec, 1, (tokens,), 0, 1), random_side(v_codec, 1, (tokens,), 0, 2)), 1)


@pytest.mark.scenario
@pytest.mark.kernels
@pytest.mark.parametrize("dim", [64, 96, 128])
@pytest.mark.parametrize("recipe", ["angle:n=128", "angle:n=64,norm=log4", "angle:n=4096,norm=log4", "angle:n=16,norm=linear2,range=fp32"])
def test_every_width_of_dense_angle_agrees_with_exact_attention(recipe: str, dim: int) -> None:
    tokens = 31 if INTERPRETED else 65
    codec, _ = codecs(recipe, recipe, (dim, dim))
    check_attention(Layer(random_side(codec, 1, (tokens,), 0, 1), random_side(codec, 1, (tokens,), 0, 2)), 3, q_len=3)


@pytest.mark.scenario
@pytest.mark.kernels
@pytest.mark.parametrize("mode", MODES)
def test_all_modes_agree_with_two_tokens_per_row(mode: str) -> None:
    k_codec, v_codec = codecs(NARROW["octahedral 3"], NARROW["group 2, groups of tokens"], (64, 64))
    layer = Layer(random_side(k_codec, 1, (300, 1), 9, 1), random_side(v_codec, 1, (50, 251), 9, 2))
    check_attention(layer, 2, **MODES[mode])


@pytest.mark.scenario
@pytest.mark.kernels
@pytest.mark.parametrize("mode", LENGTHS)
def test_different_lengths_agree_with_two_tokens_per_row(mode: str) -> None:
    k_codec, v_codec = codecs(NARROW["scalar 3"], NARROW["group 3, groups of channels"], (64, 64))
    layer = Layer(random_side(k_codec, 1, (300, 1), 9, 1, batch=5), random_side(v_codec, 1, (50, 251), 9, 2, batch=5))
    check_attention(layer, 2, lengths=[310, 0, 1, 250, 130], **LENGTHS[mode])


@pytest.mark.kernels
def test_any_number_of_sequences_and_heads_agrees_with_exact_attention() -> None:
    k_codec, v_codec = codecs(KEYS["group 2, token scale"], VALUES["scalar 4"], (32, 64))
    check_attention(Layer(random_side(k_codec, 2, (40,), 2, 1, batch=2), random_side(v_codec, 2, (40,), 2, 2, batch=2)), 4)


@pytest.mark.kernels
@pytest.mark.parametrize("dim", [32, 64, 80, 96, 128])
def test_the_norms_of_four_triplets_are_at_their_positions(dim: int) -> None:
    """The indices that byte permutations select equal those that are read one by one."""
    from kvpack.kernels.bitpack import thread_digits, thread_rows
    from kvpack.kernels.tables import register_table
    from kvpack.kernels.tiles import loaders

    codec = codecs("octahedral:b=4", "octahedral:b=4", (dim, dim))[0]
    tiles = loaders.find_tiles(codec)
    assert tiles is not None
    assert tiles.table is not None
    packing, bits, table = tiles.constants.signs, tiles.constants.norm_index_bits, tiles.constants.norms
    norms = tiles.table[-(1 << bits) :, 0].view(torch.uint16).tolist()
    assert [table[at // 4] >> 8 * (at % 4) & 0xFF | (table[2 + at // 4] >> 8 * (at % 4) & 0xFF) << 8 for at in range(8)] == norms
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(0, 1 << 32, (thread_rows.words_per_token(tiles.constants.rows),), generator=generator).tolist()
    for first in range(0, -(-dim // 3), 4):
        terms = register_table._digit_positions.fn(packing, first, 2, bits, 2 + bits)
        found = 0
        for word, shift, mask in zip(terms[::3], terms[1::3], terms[2::3], strict=True):
            found |= (words[word] >> shift if shift >= 0 else words[word] << -shift) & mask
        for number, at in zip(range(min(4, -(-dim // 3) - first)), (0, 16, 8, 24), strict=False):
            position = (first + number) // packing.width * (2 + bits) + 2
            pieces = thread_digits.column_pieces.fn(packing, (first + number) % packing.width, position, bits)
            assert found >> at & 0xFF == sum((words[word] >> bit & (1 << count) - 1) << before for word, bit, count, before in pieces)


@pytest.mark.kernels
def test_many_short_pages_agree_with_exact_attention() -> None:
    k_codec, v_codec = codecs(KEYS["group 4"], VALUES["group 4"], (32, 32))
    check_attention(Layer(random_side(k_codec, 1, (32,) * 5, 0, 1), random_side(v_codec, 1, (32,) * 5, 0, 2)), 3)


@pytest.mark.kernels
def test_layers_with_only_a_tail_or_one_token_agree_with_exact_attention() -> None:
    k_codec, v_codec = codecs(KEYS["group 4"], VALUES["group 4"], (32, 64))
    check_attention(Layer(random_side(k_codec, 2, (), 20, 1), random_side(v_codec, 2, (), 20, 2)), 2)
    check_attention(Layer(random_side(k_codec, 2, (1,), 0, 1), random_side(v_codec, 2, (1,), 0, 2)), 2)


@pytest.mark.kernels
def test_norms_of_any_size_agree_with_exact_attention() -> None:
    """Keys and values have factors beyond binary16: large, tiny and zero ones next to each other."""
    k_codec, v_codec = codecs("scalar:b=3,norm=fp32", "scalar:b=3,norm=fp32", (64, 64))
    layer = Layer(random_side(k_codec, 1, (80,), 0, 1), random_side(v_codec, 1, (80,), 0, 2))
    assert layer.k is not None
    assert layer.v is not None
    k_norm, v_norm = (side.runs[0].streams["norm"] for side in layer.sides.values())
    k_norm *= 1e-30
    for factor in (1e-25, 1e25):
        # They are then small, and large.
        v_norm *= factor
        v_norm *= max(1.0, factor)
        check_attention(layer, 2, scale=1e29)
    v_norm[..., ::2] *= 1e-15
    check_attention(layer, 2, scale=1e29)


@pytest.mark.kernels
@pytest.mark.parametrize("dim", [20, 64, 128])
def test_key_scales_of_any_size_agree_with_exact_attention(dim: int) -> None:
    """Groups have more tokens than a tile and scales near the limits of binary16, but scores are ordinary."""
    k_codec, v_codec = codecs("group:b=2,g=64", "group:b=2,g=32", (dim, 64))
    layer = Layer(random_side(k_codec, 1, (150, 70), 0, 1), random_side(v_codec, 1, (150, 70), 0, 2))
    assert layer.k is not None
    done = 0
    for power in (-8, 14):
        for page in layer.k.runs:
            page.streams["scales"].mul_(2.0 ** (power - done))
        done = power
        check_attention(layer, 2, scale=2.0**-power * dim**-0.5)


@pytest.mark.kernels
def test_streams_with_any_strides_agree_with_exact_attention() -> None:
    k_codec, v_codec = codecs(KEYS["scalar 3"], VALUES["group 4"], (64, 64))
    layer = Layer(random_side(k_codec, 2, (65,), 0, 1), random_side(v_codec, 2, (65,), 0, 2))
    expected = exact_attention(q := torch.randn(1, 2, 1, 64), layer)
    for side in layer.sides.values():
        streams = side.runs[0].streams
        assert isinstance(streams, dict)
        with torch.device(DEVICE):
            streams |= {name: with_poisoned_padding(stream) for name, stream in streams.items()}
    from kvpack.kernels.attend import attention

    there = Layer(*(Side(side.codec, side.runs, side.tail.to(DEVICE)) for side in layer.sides.values()))
    found = attend_by(attention, q.to(DEVICE), there, 64**-0.5, True, None, None).cpu()
    assert (found - expected).norm() / expected.norm() < TOLERANCE


@pytest.mark.scenario
@pytest.mark.kernels
@pytest.mark.parametrize("family", [name for name, words in KEYS.items() if not words.startswith("minifloat")])
def test_no_word_reads_beyond_a_table(family: str) -> None:
    """Invalid digits decode to finite values, because indices are masked to the size of the table."""
    from kvpack.kernels.attend import attention

    codec, _ = codecs(KEYS[family], "raw:dtype=bf16", (64, 64))
    side = random_side(codec, 1, (64,), 0, 1)
    for name, stream in side.runs[0].streams.items():
        if stream.dtype == torch.uint16 and name != "outlier_flags.0":
            stream.copy_(torch.randint(0, 1 << 16, stream.shape, generator=torch.Generator().manual_seed(3)).to(torch.uint16))
        else:
            assert name not in ("codes.0", "symbol.0", "index.0")
    there = side.to(DEVICE)
    assert torch.isfinite(attend_by(attention, torch.randn(1, 1, 1, 64, device=DEVICE), Layer(there, there), 0.1)).all()


@pytest.mark.scenario
@pytest.mark.kernels
@pytest.mark.parametrize(
    ("recipe", "fused"),
    [
        pytest.param("kivi-4;tail=32", True, id="group"),
        pytest.param("kv=group:b=2,g=32,scales=u8", True, id="scales of 8 bits"),
        pytest.param("k=scalar:b=4;v=group:b=4", True, id="scalar"),
        pytest.param("octopus-3", True, id="dense octahedral"),
        pytest.param("kv=polar:b=4.2.2.2", True, id="polar"),
        pytest.param("kv=polar:b=4.2.2.2,norm=fp32", False, id="polar of several radii of 32 bits"),
        pytest.param("kv=scalar:b=4,channel_scale=fp16", True, id="channel scales"),
        pytest.param("k=group:b=4,g=32,channel_order=u8,block_rotation=32,sinks=4;v=octahedral:b=3,sinks=2", True, id="raw tokens"),
        pytest.param("kv=group:b=4,g=32,axis=token,low_norm_tokens=1,channel_scale=fp32;tail=32", True, id="a raw token in the middle"),
        pytest.param(
            "k=octahedral:b=3,raw_first=4,raw_low_norm=0.95;v=group:b=3,g=32,raw_first=4,raw_low_norm=0.95", True, id="raw positions"
        ),
        pytest.param("octopus-qjl-3", True, id="signs of what is lost"),
        pytest.param("kv=quaternion:s=24,r=4,outliers=3", True, id="outliers"),
    ],
)
def test_attend_uses_kernels_where_they_are_exact_enough(recipe: str, fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvpack.kernels.attend import attention

    called = []
    prepare = attention.prepare
    monkeypatch.setattr(attention, "prepare", lambda *arguments: called.append(1) or prepare(*arguments))
    cache = kvpack.pack(random_pairs(1, 86, dims=(64, 64)), recipe)
    q = torch.randn(1, 4, 2, 64)
    expected = exact_attention(q, cache[0])
    monkeypatch.setenv(dispatch.VARIABLE, "triton")
    found = kvpack.attend(q.to(DEVICE), cache.to(DEVICE)[0]).cpu()
    assert bool(called) == fused
    assert (found - expected).norm() / expected.norm() < TOLERANCE


@pytest.mark.kernels
def test_long_queries_and_gradients_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvpack.kernels.attend.attention import MAX_ROW_BLOCKS, MAX_ROWS

    layer = kvpack.pack(random_pairs(1, 70, dims=(64, 64)), "kivi-4").to(DEVICE)[0]
    monkeypatch.setenv(dispatch.VARIABLE, "triton")
    most = MAX_ROWS * MAX_ROW_BLOCKS // 2
    assert attention_kernels(torch.randn(1, 4, most, 64, device=DEVICE), layer) is not None
    assert attention_kernels(torch.randn(1, 4, most + 1, 64, device=DEVICE), layer) is None
    assert attention_kernels(torch.randn(1, 4, 1, 64, device=DEVICE, requires_grad=True), layer) is None


@pytest.mark.kernels
def test_a_prefill_chunk_is_attended_over_decoded_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = kvpack.pack(random_pairs(1, 600, dims=(64, 64)), "k=scalar:b=3;v=group:b=4;tail=32")[0]
    q = torch.randn(1, 4, 512, 64)
    expected = exact_attention(q, layer)
    monkeypatch.setenv(dispatch.VARIABLE, "triton")
    found = kvpack.attend(q.to(DEVICE), Layer(*(side.to(DEVICE) for side in layer.sides.values()))).cpu()
    assert (found - expected).norm() / expected.norm() < TOLERANCE


@pytest.mark.cuda
@pytest.mark.parametrize("k", KEYS)
def test_kernels_work_without_inline_assembly(k: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvpack.kernels.tiles import addresses

    monkeypatch.setenv(addresses.VARIABLE, "0")
    k_codec, v_codec = codecs(KEYS[k], VALUES["scalar 4"], (128, 64))
    check_attention(Layer(random_side(k_codec, 2, (300,), 0, 1), random_side(v_codec, 2, (300,), 0, 2)), 4)


@pytest.mark.cuda
@pytest.mark.parametrize("k", KEYS)
def test_many_programs_agree_with_exact_attention(k: str) -> None:
    """There are so many tokens that every program has several tiles in flight at once."""
    k_codec, v_codec = codecs(KEYS[k], VALUES["octahedral 3"], (128, 128))
    check_attention(Layer(random_side(k_codec, 2, (40_000,), 17, 1), random_side(v_codec, 2, (40_000,), 17, 2)), 8)


@pytest.mark.kernels
@pytest.mark.parametrize("begin", [0, 33], ids=["aligned", "inside a token group"])
def test_tiles_with_many_tokens_agree_with_exact_attention(begin: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """If tiles do not cross token groups, scales are loaded once per tile of 64 tokens."""
    from kvpack.kernels.attend import plan
    from kvpack.kernels.tiles import shapes

    monkeypatch.setattr(shapes, "MANY_TOKENS", 0)
    if INTERPRETED:
        monkeypatch.setattr(plan, "choose_shape", lambda *_: shapes.LaunchShape(1, 1, 64, 1, 2))
    k_codec, v_codec = codecs("group:b=2,g=64,axis=token", "group:b=2,g=128,axis=channel,token_scale=fp16", (32, 128))
    k, v = random_side(k_codec, 1, (420,), 5, 1), random_side(v_codec, 1, (begin, 420 - begin) if begin else (420,), 5, 2)
    check_attention(Layer(k, v), 2)
    if not INTERPRETED:
        launches = plan.launches(k.to(DEVICE), v.to(DEVICE), Layer(k, v), 0, 420, (0, 420), 1, 0, False)
        assert {launch.shape.tokens for launch in launches} == ({32} if begin else {64})


@pytest.mark.scenario
@pytest.mark.kernels
@pytest.mark.parametrize("lengths", [None, [3, 1], [700, 4]], ids=["all tokens", "short sequences", "a long and a short sequence"])
def test_rows_loaded_ahead_agree_with_exact_attention(lengths: list[int] | None) -> None:
    """If all tiles of a program are whole, the rows of a tile are loaded to registers while the previous tile is decoded."""
    tokens = 900 if INTERPRETED else 60_000
    k_codec, v_codec = codecs(KEYS["dense quaternion"], KEYS["dense quaternion"], (64, 60))
    layer = Layer(random_side(k_codec, 1, (tokens,), 5, 1, batch=2), random_side(v_codec, 1, (tokens,), 5, 2, batch=2))
    check_attention(layer, 2, lengths=lengths)


@pytest.mark.cuda
def test_attention_can_be_captured_in_a_cuda_graph() -> None:
    layer = kvpack.pack(random_pairs(1, 5000, dims=(64, 64)), "k=scalar:b=4;v=group:b=4;tail=128").to(DEVICE)[0]
    q = torch.randn(1, 4, 1, 64, device=DEVICE)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        kvpack.attend(q, layer)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = kvpack.attend(q, layer)
    for seed in range(3):
        q.copy_(torch.randn(q.shape, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        assert torch.equal(captured, kvpack.attend(q, layer))


@pytest.mark.cuda
def test_lengths_may_change_between_replays_of_a_cuda_graph() -> None:
    layer = kvpack.pack(random_pairs(1, 3000, batch=2, dims=(64, 64)), "k=scalar:b=4;v=group:b=4;tail=128").to(DEVICE)[0]
    q = torch.randn(2, 4, 1, 64, device=DEVICE)
    lengths = torch.tensor([3000, 1], device=DEVICE)
    kvpack.attend(q, layer, lengths=lengths)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = kvpack.attend(q, layer, lengths=lengths)
    for given in ([3000, 1], [17, 2999], [2900, 0]):
        lengths.copy_(torch.tensor(given))
        graph.replay()
        assert torch.equal(captured, kvpack.attend(q, layer, lengths=given))


@pytest.mark.scenario
@pytest.mark.kernels
@pytest.mark.parametrize("tail", [0, 32], ids=["pages alone", "a raw tail in a frame of its own"])
@pytest.mark.parametrize("q_heads", [4, 160], ids=["rotated row by row", "rotated by products"])
def test_prepared_launches_are_reused(tail: int, q_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second call over a layer skips checks and planning, and its result is correct for another query."""
    layer = kvpack.pack(random_pairs(1, 75, dims=(32, 32)), f"kv=scalar:b=4;tail={tail}")[0]
    queries = [torch.randn(1, q_heads, 1, 32, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    expected = [exact_attention(q, layer) for q in queries]
    monkeypatch.setenv(dispatch.VARIABLE, "triton")
    there = Layer(*(side.to(DEVICE) for side in layer.sides.values()))
    for q, right in zip(queries, expected, strict=True):
        found = kvpack.attend(q.to(DEVICE), there).cpu()
        assert (found - right).norm() / right.norm() < TOLERANCE


@pytest.mark.kernels
def test_arguments_are_checked_before_prepared_launches_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = kvpack.pack(random_pairs(1, 40, dims=(32, 32)), "kv=scalar:b=4")[0]
    monkeypatch.setenv(dispatch.VARIABLE, "triton")
    there = Layer(*(side.to(DEVICE) for side in layer.sides.values()))
    q = torch.randn(1, 4, 1, 32, device=DEVICE)
    kvpack.attend(q, there)
    with pytest.raises(kvpack.InvalidParameter, match="does not match"):
        kvpack.attend(q[..., :16], there)
    with pytest.raises(kvpack.InvalidType, match="floating-point"):
        kvpack.attend(q.to(torch.int32), there)
