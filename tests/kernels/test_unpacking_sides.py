"""Sides that Triton unpacks with one launch for all pages of a codec equal those unpacked by torch.

interpreter.py describes which process runs which of these tests.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import kvpack
from kvpack.cache.layer import Layer
from kvpack.cache.packed_runs import PackedRuns
from kvpack.cache.side import Side
from kvpack.coding import dispatch
from kvpack.formats.errors import InvalidParameter
from kvpack.formats.sidecars import CodecWithSidecars
from support.caches import random_pairs
from support.interpreter import DEVICE, INTERPRETED
from support.random_sides import codecs, random_page, random_side

pytestmark = pytest.mark.usefixtures("uninitialized_is_poisoned")

CODECS = {
    "group 4": "group:b=4,g=32",
    "group 3, rotated": "group:b=3,g=32,rotation=hadamard,token_scale=fp16",
    "group 2, rotated, groups of 128 tokens": "group:b=2,g=128,rotation=signed-hadamard",
    "group 2, rotated, groups of channels": "group:b=2,g=16,axis=channel,rotation=hadamard,token_scale=fp32",
    "group 4, groups of more than all channels": "group:b=4,g=128,axis=channel",
    "scalar 3": "scalar:b=3",
    "scalar 5": "scalar:b=5,norm=fp32",
    "octahedral 3": "octahedral:b=3",
    "direct octahedral 4": "octahedral:b=4,arrangement=direct",
    "angle": "angle:n=128,norm=linear8",
    "angle of a base that is no power of two": "angle:n=48,norm=log4,range=fp32",
    "quaternion": "quaternion:s=24,r=3",
    "rotated quaternion": "quaternion:s=7,r=2,rotation=hadamard",
}
"""Recipes that the kernels can decode. Dense quaternions with s = 24 have digits of base 9."""

EXACT = {torch.bfloat16: 2.0**-7 if INTERPRETED else 2.0**-8, torch.float16: 2.0**-11}
"""Largest error of rounding to each dtype, relative to the value. The interpreter truncates bfloat16."""


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    assert found.shape == expected.shape
    return float((found.double().cpu() - expected.double()).norm() / expected.double().norm())


def fused(side: Side, dtype: torch.dtype) -> torch.Tensor:
    """Unpack a side, all of it by kernels, and return the values."""
    from kvpack.kernels.decode import sides

    there = side.to(DEVICE)
    # Strides of another tensor: [batch, token, kv_head, dim].
    out = torch.full((side.batch, side.tokens, side.heads, side.dim), torch.nan, dtype=dtype, device=DEVICE).transpose(1, 2)
    assert sides.unpack_into(there, 0, side.tokens, out) == []
    return out


def launches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list to which the pointers of every launch are appended."""
    from kvpack.kernels.triton_internals import CachedLaunch

    launched: list[Any] = []
    own = CachedLaunch.__call__
    monkeypatch.setattr(CachedLaunch, "__call__", lambda self, *pointers: launched.append(pointers) or own(self, *pointers))
    return launched


@pytest.mark.scenario
@pytest.mark.kernels
@pytest.mark.parametrize(("dim", "dtype"), [(64, torch.bfloat16), (80, torch.float16)])
@pytest.mark.parametrize("codec", CODECS)
def test_pages_of_a_codec_are_decoded_together(codec: str, dim: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = launches(monkeypatch)
    made, _ = codecs(CODECS[codec], CODECS[codec], (dim, dim))
    side = random_side(made, 2, (128, 256, 70), 0, 1, batch=2)
    found = fused(side, dtype)
    assert len(launched) == 1
    expected = side.unpack(torch.float32)
    # Half of the largest error is above the usual one; products of binary16 add theirs.
    assert relative_error(found, expected) < EXACT[dtype] / 2 + (0 if made.rotation.kind == "none" else 2.0**-12)
    if made.rotation.kind == "none":
        assert ((found.cpu() - expected).abs() <= EXACT[dtype] * 1.01 * expected.abs() + 1e-7).all()


@pytest.mark.kernels
@pytest.mark.parametrize("codec", CODECS)
def test_values_in_the_coded_frame_equal_those_of_torch(codec: str) -> None:
    from kvpack.kernels.decode import decode

    made, _ = codecs(CODECS[codec], CODECS[codec], (64, 64))
    for page in random_side(made, 1, (128, 33), 0, 2).runs:
        there = {name: stream.to(DEVICE) for name, stream in page.streams.items()}
        torch.testing.assert_close(decode.decode_frame(made, there).cpu(), page.decode_frame(0, page.tokens), rtol=1e-6, atol=1e-6)


@pytest.mark.kernels
def test_polar_with_equal_pairs_equals_torch() -> None:
    made, _ = codecs("polar:b=3", "polar:b=3", (64, 64))
    side = random_side(made, 2, (128, 70), 0, 1, batch=2)
    assert relative_error(fused(side, torch.bfloat16), side.unpack(torch.float32)) < EXACT[torch.bfloat16] / 2 + 2.0**-10


@pytest.mark.scenario
@pytest.mark.kernels
@pytest.mark.parametrize(("codec", "dim"), [("octahedral:b=3", 96), ("quaternion:s=24,r=3", 64), ("angle:n=128", 80), ("scalar:b=3", 256)])
def test_programs_with_several_tiles_equal_torch(codec: str, dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvpack.kernels.decode import tiles

    made, _ = codecs(codec, codec, (dim, dim))
    side = random_side(made, 1, (700, 33, 300), 0, 1, batch=2)
    monkeypatch.setattr(tiles, "PROGRAMS", 1)
    found = fused(side, torch.float16)
    assert relative_error(found, side.unpack(torch.float32)) < 2.0**-11
    monkeypatch.setattr(tiles, "MAX_TILES", 1)
    assert torch.equal(fused(side, torch.float16), found)


@pytest.mark.scenario
@pytest.mark.kernels
@pytest.mark.parametrize(("codec", "dim"), [("octahedral:b=3,channel_scale=fp16", 64), ("scalar:b=3,channel_scale=fp32", 80)])
def test_every_page_has_its_own_channel_scales(codec: str, dim: int) -> None:
    made, _ = codecs(codec, "raw", (dim, dim))
    assert isinstance(made, CodecWithSidecars)
    pages = []
    for number, tokens in enumerate((128, 256, 70)):
        page = random_page(made.codec, 2, 2, tokens, number)
        scales = torch.rand(2, 2, 1, dim, generator=torch.Generator().manual_seed(number)) * 8 + 0.1
        scales = scales.to(torch.float16 if "fp16" in codec else torch.float32)
        pages.append(replace(page, codec=made, streams={**page.streams, "channel_scale": scales}))
    side = Side(made, PackedRuns.from_runs(pages), torch.zeros(2, 2, 0, dim))
    expected = side.unpack(torch.float32)
    assert relative_error(fused(side, torch.bfloat16), expected) < EXACT[torch.bfloat16] / 2 + 2.0**-12
    assert relative_error(fused(side.slice(130, 390), torch.float16), expected[:, :, 130:390]) < 2.0**-11


@pytest.mark.scenario
@pytest.mark.kernels
@pytest.mark.parametrize(
    ("codec", "dim"),
    [
        ("octahedral:b=3,mean=32,mean_bits=4,norm=log8", 64),
        ("scalar:b=3,channel_scale=fp16,mean=128,norm=log8", 80),
        ("quaternion:s=24,r=3,mean=8", 64),
    ],
)
def test_means_and_raw_tokens_are_unpacked_with_the_codec(codec: str, dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.cat([k + torch.linspace(-4, 4, dim) for k, _ in random_pairs(1, 700, batch=2, dims=(dim, dim))], 2)
    x[:, :, 200] *= 20
    recipe = f"k={codec};v=raw;raw=4,0.5,4"
    side = kvpack.pack([(x[:, :, :300], x[:, :, :300])], recipe).append([(x[:, :, 300:], x[:, :, 300:])])[0].k
    assert side is not None
    assert len(side.runs) > 1
    side = side.slice(0, side.packed_tokens)
    expected = side.unpack(torch.float32)
    launched = launches(monkeypatch)
    assert relative_error(fused(side, torch.bfloat16), expected) < EXACT[torch.bfloat16] / 2 + 2.0**-12
    assert len(launched) == 1
    assert relative_error(fused(side.slice(128, 390), torch.float16), expected[:, :, 128:390]) < 2.0**-11


@pytest.mark.kernels
def test_sides_are_unpacked_on_a_device_with_little_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvpack.kernels.decode import unpack

    made, _ = codecs("octahedral:b=3", "raw", (128, 128))
    side = random_side(made, 1, (70,), 0, 1)
    expected = side.unpack(torch.float32)
    shapes = []
    for place in range(len(unpack.SHAPES)):
        shapes.append(unpack._find_shape.__wrapped__(made, DEVICE))
        monkeypatch.setattr(unpack, "_find_shape", lambda *_, shape=shapes[-1]: shape)
        assert relative_error(fused(side, torch.bfloat16), expected) < EXACT[torch.bfloat16] / 2 + 2.0**-12
        if shapes[-1] is None:
            break
        monkeypatch.undo()
        monkeypatch.setattr(unpack, "SHAPES", [shape for shape in unpack.SHAPES if shape.joined][place + 1 :])
    assert len(shapes) == 4


@pytest.mark.kernels
@pytest.mark.parametrize("size", [2.0**-60, 2.0**30])
def test_values_beyond_binary16_are_rotated(size: float) -> None:
    made, _ = codecs("scalar:b=3,norm=fp32", "raw", (64, 64))
    page = random_page(made, 1, 2, 40, 3)
    page.streams["norm"].mul_(size)
    side = Side(made, PackedRuns.from_runs([page]), torch.zeros(1, 2, 0, 64))
    assert relative_error(fused(side, torch.bfloat16), side.unpack(torch.float32)) < EXACT[torch.bfloat16] / 2 + 2.0**-12


@pytest.mark.kernels
def test_token_ranges_are_unpacked_and_unsupported_values_are_left_out() -> None:
    from kvpack.kernels.decode import sides

    group, wide = codecs("group:b=4,g=32", "scalar:b=3,qjl=fp16", (64, 64))
    side = random_side(group, 2, (96, 96, 96), 5, 4).to(DEVICE)
    expected = side.unpack(torch.float32)
    out = torch.zeros(1, 2, 229, 64, dtype=torch.float16, device=DEVICE)
    assert sides.unpack_into(side, 64, 293, out) == [(288, 293)]
    assert relative_error(out[:, :, :224], expected[:, :, 64:288].cpu()) < EXACT[torch.float16]
    assert (out[:, :, 224:] == 0).all()
    # Token 48 lies within a group of tokens.
    assert sides.unpack_into(side, 48, 96, out) == [(48, 96)]
    assert sides.unpack_into(random_side(wide, 2, (40, 40), 0, 4).to(DEVICE), 10, 50, out) == [(10, 50)]
    raw, _ = codecs("raw:dtype=fp16", "raw:dtype=fp16", (64, 64))
    side = random_side(raw, 2, (40, 40), 0, 4).to(DEVICE)
    assert sides.unpack_into(side, 10, 50, out) == []
    assert torch.equal(out[:, :, :40].float(), side.unpack(torch.float32)[:, :, 10:50])


@pytest.mark.kernels
@pytest.mark.parametrize("recipe", ["oscar-2", "octopus-3", "k=polar:b=3;v=group:b=4;tail=32", "turboquant-2.5", "octopus-3-scaled", "raw"])
def test_a_layer_unpacks_alike_with_and_without_kernels(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = kvpack.pack(random_pairs(1, 300, dims=(64, 128)), recipe)
    found: dict[str, Any] = {}
    for backend in ("torch", "triton"):
        monkeypatch.setenv(dispatch.VARIABLE, backend)
        layer = Layer(*(side.to(DEVICE) for side in cache[0].sides.values()))
        found[backend] = [x.float().cpu() for x in layer.unpack(torch.bfloat16) if x is not None]
    for mine, theirs in zip(found["triton"], found["torch"], strict=True):
        # Both are rounded: values differ where they are about halfway between two.
        assert relative_error(mine, theirs) < EXACT[torch.bfloat16]


@pytest.mark.kernels
def test_zero_tokens_can_be_unpacked() -> None:
    made, _ = codecs("group:b=4,g=32", "raw", (64, 64))
    side = Side(made, PackedRuns(), torch.zeros(1, 2, 0, 64))
    assert fused(side, torch.bfloat16).shape == (1, 2, 0, 64)


@pytest.mark.kernels
@pytest.mark.parametrize("codec", ["octahedral:b=3", "group:b=4,g=32,rotation=hadamard"])
def test_tokens_beyond_the_range_of_offsets_are_left_out(codec: str) -> None:
    from kvpack.kernels.decode import decode, sides

    made, _ = codecs(codec, codec, (64, 64))
    far = torch.empty_strided((1, 1, 2, 64), (0, 0, decode.MAX_TOKEN_STRIDE, 1), dtype=torch.float16, device=DEVICE)
    assert sides.unpack_into(random_side(made, 1, (2,), 0, 4).to(DEVICE), 0, 2, far) == [(0, 2)]


@pytest.mark.kernels
def test_streams_with_a_wrong_layout_are_refused() -> None:
    from kvpack.kernels.decode import rows, unpack

    made, _ = codecs("octahedral:b=3", "raw", (64, 64))
    page = random_page(made, 1, 1, 40, 3)
    out = torch.empty(1, 1, 41, 64, dtype=torch.float16, device=DEVICE)
    streams = {name: stream.to(DEVICE) for name, stream in page.streams.items()}
    with pytest.raises(InvalidParameter):
        unpack.prepare(made, [rows.PackedPart(streams, 41, 0)], out)
