"""Tests of attention over keys in balanced frames, and of unpacking them, by Triton and C.

Only queries and decoded keys are transformed to or from a frame.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from kvpack.cache.layer import Layer
from kvpack.coding.recipes import parse_recipe
from kvpack.kernels.attend import attention as triton_attention
from kvpack.kernels.attend.growing import GrowingCall
from kvpack.kernels.attend.prepared import AttendOptions
from kvpack.kernels.cpu import attend, sides, unpack
from support.interpreter import needs_loaded_bounds
from support.klt_bases import with_random_balanced
from support.random_sides import check_attention, exact_attention, random_side

if TYPE_CHECKING:
    from kvpack.formats.base import Codec

KEYS = {
    "scalar 2": "scalar:b=2",
    "octahedral 3": "octahedral:b=3",
    "trellis 2": "trellis:b=2,states=256",
    "group 4": "group:b=4,g=32",
    "scalar 3, signs": "scalar:b=3,qjl=fp16",
    "scalar 3, outliers": "scalar:b=3,outliers=3",
    "scalar 3, means": "scalar:b=3,mean=32",
}


def keys_and_values(words: str, dims: tuple[int, int] = (64, 32)) -> tuple[Codec, Codec]:
    k, v = parse_recipe(f"k={words},frame=balanced;v=scalar:b=4").rules
    return with_random_balanced(k.codec(dims[0], "k")), v.codec(dims[1], "v")


@pytest.mark.kernels
@needs_loaded_bounds
@pytest.mark.parametrize("words", KEYS.values(), ids=KEYS)
def test_attention_over_balanced_keys_is_exact(words: str) -> None:
    k, v = keys_and_values(words)
    check_attention(Layer(random_side(k, 2, (64, 32), 9, 1), random_side(v, 2, (64, 32), 9, 2)), 4, q_len=3)


@pytest.mark.kernels
@pytest.mark.parametrize("words", ["scalar:b=3,mean=32", "group:b=4,g=32"])
def test_one_cached_matrix_maps_queries_to_the_frame(words: str) -> None:
    # No operation of torch comes before the kernels, so that a CUDA graph may hold the whole call.
    k, v = keys_and_values(words)
    layer = Layer(random_side(k, 2, (64,), 9, 1), random_side(v, 2, (64,), 9, 2))
    q = torch.randn(1, 4, 1, 64, generator=torch.Generator().manual_seed(0))
    assert triton_attention.prepare(q, layer, AttendOptions(0.125)).runs_only_kernels
    assert GrowingCall.supports(q, layer)


@pytest.mark.kernels
@needs_loaded_bounds
def test_many_queries_over_balanced_keys_are_exact() -> None:
    k, v = keys_and_values("scalar:b=3")
    check_attention(Layer(random_side(k, 1, (96,), 9, 1), random_side(v, 1, (96,), 9, 2)), 2, q_len=70)


@pytest.mark.parametrize("words", KEYS.values(), ids=KEYS)
def test_c_attends_and_unpacks_balanced_keys(words: str) -> None:
    k_codec, v_codec = keys_and_values(words)
    k, v = random_side(k_codec, 2, (64, 32, 32), 9, 1), random_side(v_codec, 2, (64, 32, 32), 9, 2)
    prepared = attend.PreparedAttention.create(k, v)
    if "qjl" not in words:
        # All pages are of one frame.
        found = sides.side_parts(k)
        assert found is not None
        assert len(found) == 2
        q = torch.randn(1, 6, 2, 64, generator=torch.Generator().manual_seed(0))
        assert prepared is not None
        expected = exact_attention(q, Layer(k, v))
        assert (prepared(q, 0.125, True, None, None) - expected).norm() <= 1e-5 * expected.norm()
    decoded = torch.cat([*(page.codec.decode(page.streams) for page in k.runs), k.tail.float()], 2)
    for dtype in (torch.float32, torch.bfloat16):
        out = torch.full((1, 2, 137, 64), float("nan"), dtype=dtype)
        if unpack.unpack_into(k, out):
            torch.testing.assert_close(out.float(), decoded, rtol=2e-5 if dtype is torch.float32 else 2**-8, atol=1e-5)
        else:
            assert "qjl" in words
