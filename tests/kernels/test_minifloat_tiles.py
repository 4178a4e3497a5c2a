"""Tests of minifloat elements as tiles: every code and scale is exact. test_inline_ptx.py tests the same of inline PTX."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import kvpack
from kvpack import Layer, Side
from kvpack.cache.packed_runs import PackedRun, PackedRuns
from support.interpreter import DEVICE, needs_loaded_bounds
from support.random_sides import check_attention, codecs, random_side


def every_product(dim: int, run_scale: float) -> Side:
    """Return an nvfp4 side whose blocks contain every code with every scale."""
    codec, _ = codecs("minifloat:element=e2m1,scales=e4m3", "raw:dtype=bf16", (dim, dim))
    token = torch.arange(127)[:, None]
    codes = (torch.arange(dim) + token) % 16
    scales = (31 * torch.arange(dim // 16) + token) % 127
    streams = {**codec.pack("codes", codes[None, None]), "block_scales": scales.to(torch.uint8)[None, None]}
    page = PackedRun(codec, 127, {**streams, "global_scale": torch.full((1, 1, 1), run_scale)})
    return Side(codec, PackedRuns.from_runs([page]), torch.zeros(1, 1, 0, dim, dtype=torch.bfloat16))


@pytest.mark.kernels
@needs_loaded_bounds
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize(("dtype", "run_scale"), [(torch.float16, 1.0), (torch.bfloat16, -(2.0**115))], ids=str)
def test_every_product_of_nvfp4_is_exact(dim: int, dtype: torch.dtype, run_scale: float) -> None:
    """Tiles have one, two and four blocks, and one scale cannot be combined with a power of two."""
    from kvpack.kernels.attend import scratch

    side = every_product(dim, run_scale)
    there = side.to(DEVICE)
    frame = scratch.decoded_frame(there)
    assert frame.codec is not None
    block = scratch.DecodedBlock(there, frame, 0, side.tokens, dtype)
    memory = torch.empty(block.elements, dtype=dtype, device=DEVICE)
    block.decode(there, None, memory, 0)
    found = block.tokens(memory, 0, 0, side.tokens).cpu().float()
    expected = side.runs[0].decode_frame(0, side.tokens)[..., scratch._channels(frame.codec)]
    assert torch.equal(found, expected)


@pytest.mark.kernels
@needs_loaded_bounds
@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("words", ["scales=e4m3", "per=token,scales=fp32", "qjl=fp16", "scales=e4m3,qjl=fp16"])
def test_zeros_with_the_largest_scale_stay_zeros(words: str) -> None:
    """Powers of two that elements cannot represent are moved to the scale, which must not become infinite."""
    codec, _ = codecs(f"minifloat:element=e2m1,{words}", "raw:dtype=bf16", (64, 64))
    side = random_side(codec, 1, (20,), 0, 1)
    (page,) = side.runs
    given = {name: torch.zeros_like(page.streams[name]) for name in page.streams if name.startswith(("codes", "qjl_norm"))}
    name = "global_scale" if "e4m3" in words else "scale"
    given[name] = torch.full_like(page.streams[name], 3e38)
    zeros = replace(side, runs=PackedRuns.from_runs([replace(page, streams={**page.streams, **given})]))
    # Scores of zero: the values' mean.
    check_attention(Layer(zeros, random_side(codec, 1, (20,), 0, 2)), 1)
    attended = kvpack.attend(torch.ones(1, 1, 1, 64, device=DEVICE), Layer(random_side(codec, 1, (20,), 0, 2), zeros).to(DEVICE))
    assert torch.equal(attended.cpu(), torch.zeros(1, 1, 1, 64))


@pytest.mark.kernels
@needs_loaded_bounds
@pytest.mark.parametrize("run_scale", [2.0**100, -(2.0**-100), 0.0])
def test_run_scales_of_any_size(run_scale: float) -> None:
    """One of the two runs has far larger values than the other."""
    codec, raw = codecs("minifloat:element=e2m1,scales=e4m3", "raw:dtype=bf16", (64, 64))
    side = random_side(codec, 1, (40, 33), 0, 1)
    last = side.runs[-1]
    scaled = replace(last, streams={**last.streams, "global_scale": last.streams["global_scale"] * run_scale})
    check_attention(Layer(random_side(raw, 1, (40, 33), 0, 2), replace(side, runs=PackedRuns.from_runs([*side.runs[:-1], scaled]))), 1)
