"""Tests of LMCache objects as pages: the shapes of keys and values, and the options that are refused."""

from __future__ import annotations

import pytest
import torch

from kvpack.errors import InvalidParameter
from kvpack.integrations.lmcache.layouts import (
    adapter_recipe,
    as_page_buffer,
    byte_geometry,
    is_fused,
    keeps_other_objects,
    object_geometry,
)
from kvpack.pages.codec import PageCodec
from kvpack.pages.geometry import PageGeometry

BF16 = torch.bfloat16


@pytest.mark.parametrize("planes", [(1,), ()], ids=["four axes", "three axes"])
def test_fused_objects_are_pages_of_keys_and_values(planes: tuple[int, ...]) -> None:
    """Each head's key is followed by its value. As pages, such objects equal those with two planes."""
    x = torch.randn(2, 3, 32, 2, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    split, fused = x.flatten(3), torch.stack([x[0], x[1]], 3).reshape(*planes, 3, 32, 256)
    geometry = object_geometry(split.shape, BF16, 64, "", False)
    assert geometry == object_geometry(fused.shape, BF16, 64, "", True) == PageGeometry(3, 2, 32, 64, 64, "bf16")
    codec = PageCodec("octopus-4", geometry)
    rows = torch.zeros(2, codec.nbytes, dtype=torch.uint8)
    for row, given in zip(rows, (split, fused), strict=True):
        assert codec.encode_into(as_page_buffer(geometry, given), [0], row[None]) == [None]
    assert torch.equal(*rows)
    with pytest.raises(InvalidParameter, match=r"or with fused \[1, layer, token, head \* 128\], for engines that keep"):
        object_geometry(fused.shape, BF16, 64, "", False)
    with pytest.raises(InvalidParameter, match="set others to 'raw' to keep latents"):
        object_geometry((*planes, 3, 32, 576), BF16, 64, "", True)


@pytest.mark.parametrize("shape", [(2, 3, 32, 100), (1, 3, 32, 576), (3, 32, 576), (3, 32, 128)])
def test_invalid_objects_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidParameter, match=r"expected \[2, layer, token, head \* 64\]"):
        object_geometry(shape, BF16, 64, "", False)


def test_options_are_checked() -> None:
    assert is_fused({"fused": True})
    with pytest.raises(InvalidParameter, match="fused is 'yes', expected true or false"):
        is_fused({"fused": "yes"})
    assert keeps_other_objects({"others": "raw"})
    assert not keeps_other_objects({})
    with pytest.raises(InvalidParameter, match="others is 'packed', expected 'raw'"):
        keeps_other_objects({"others": "packed"})
    with pytest.raises(InvalidParameter, match=r"the object is torch.int64 \[3\], expected one of bf16, "):
        byte_geometry((3,), torch.int64)
    geometry, _ = byte_geometry((4, 6), torch.float32)
    with pytest.raises(InvalidParameter, match=r"strides .*, expected a contiguous tensor"):
        as_page_buffer(geometry, torch.zeros(6, 4).T)
    with pytest.raises(InvalidParameter, match="set kv_dtype, such as fp8_e4m3"):
        object_geometry((2, 3, 32, 128), torch.uint8, 64, "", False)
    with pytest.raises(InvalidParameter, match="selects layers with 'boundary-1', but LMCache's objects do not record which layers"):
        adapter_recipe("octopus-4;boundary-1", None, 64, "")
