"""Tile loaders decode to 16-bit values in the coded frame, which are compared with the codecs' own decoding.

interpreter.py describes which process runs which of these tests.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

import pytest
import torch

from support.interpreter import DEVICE, INTERPRETED, needs_loaded_bounds
from support.random_sides import codecs, random_side

if TYPE_CHECKING:
    from kvpack.cache.side import Side
    from kvpack.kernels.attend.scratch import DecodedFrame

CODECS = [
    "group:b=4,g=32",
    "group:b=3,g=32,rotation=hadamard,token_scale=fp16",
    "group:b=2,g=16,axis=channel,token_scale=fp32",
    "group:b=2,g=16,axis=token,token_scale=fp32-per-head",
    "scalar:b=2,high=3",
    "octahedral:b=3",
    "octahedral:b=4,arrangement=direct",
    "angle:n=128,norm=linear8",
    "polar:b=3",
    "quaternion:s=24,r=3",
    "minifloat:element=e4m3",
]
ERRORS = {torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7 if INTERPRETED else 2.0**-8}
"""Relative error in the 2-norm from the rounding of tiles and of the output. The interpreter truncates bfloat16."""

pytestmark = [needs_loaded_bounds, pytest.mark.usefixtures("uninitialized_is_poisoned")]


def decoded(side: Side, frame: DecodedFrame, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
    """Return tokens ``[start, stop)`` of ``side``, decoded in the frame ``frame``."""
    from kvpack.kernels.attend import scratch

    block = scratch.DecodedBlock(side, frame, start, stop, dtype)
    memory = torch.empty(block.elements, dtype=dtype, device=DEVICE)
    block.decode(side, None, memory, 0)
    return block.tokens(memory, 0, 0, stop - start)


@pytest.mark.kernels
@pytest.mark.parametrize(("codec", "dtype"), [*product(CODECS, [torch.float16]), *product(CODECS[:2], [torch.bfloat16])])
def test_every_loader_decodes_like_its_codec(codec: str, dtype: torch.dtype) -> None:
    from kvpack.kernels.attend import scratch

    made, _ = codecs(codec, codec, (64, 64))
    # Pages that end within a tile, sequences that do not follow one another, and tokens of the tail.
    side = random_side(made, 2, (64, 33, 98), 9, 3, batch=2)
    there = side.to(DEVICE)
    frame = scratch.decoded_frame(there)
    assert frame.codec is not None
    found = decoded(there, frame, 0, side.tokens, dtype).cpu().float()
    channels = scratch._channels(frame.codec)
    coded = torch.cat([*(page.decode_frame(0, page.tokens) for page in side.runs), made.rotation.forward(side.tail.float())], 2)
    real = channels < made.dim
    expected = coded[..., channels[real]]
    assert ((found[..., real] - expected).norm() / expected.norm()) < ERRORS[dtype]
    assert torch.isfinite(found).all()


@pytest.mark.kernels
def test_parts_of_a_side_are_decoded() -> None:
    from kvpack.kernels.attend import scratch

    made, _ = codecs("group:b=4,g=32", "raw", (64, 64))
    side = random_side(made, 2, (128, 96), 9, 3).to(DEVICE)
    frame = scratch.decoded_frame(side)
    whole = decoded(side, frame, 0, side.tokens, torch.float16)
    for start, stop in ((0, 40), (37, 150), (128, 224), (200, 233), (226, 230)):
        assert torch.equal(decoded(side, frame, start, stop, torch.float16), whole[:, :, start:stop])


@pytest.mark.kernels
def test_layers_share_a_launch() -> None:
    from kvpack.kernels.attend import scratch
    from kvpack.kernels.decode import tiles

    made, _ = codecs("octahedral:b=3", "raw", (64, 64))
    tiles._launch.cache_clear()
    for seed in range(3):
        side = random_side(made, 2, (128,), 0, seed).to(DEVICE)
        decoded(side, scratch.decoded_frame(side), 0, 128, torch.float16)
    assert tiles._launch.cache_info().misses == 1


@pytest.mark.kernels
def test_codecs_without_a_loader_are_decoded_otherwise() -> None:
    from kvpack.kernels.attend import scratch

    for codec in ("raw:dtype=fp16", "scalar:b=3,qjl=fp16", "group:b=4,g=32,outliers=3"):
        made, _ = codecs(codec, codec, (64, 64))
        side = random_side(made, 2, (96,), 0, 3).to(DEVICE)
        assert scratch.decoded_frame(side) == scratch.DecodedFrame()
