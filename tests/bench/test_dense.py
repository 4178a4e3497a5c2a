"""Tests of the formats that ``kvpack bench io`` compares with kvpack."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from kvpack.bench import dense

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("way", dense.FORMATS, ids=[way.name for way in dense.FORMATS])
def test_a_format_returns_the_values_that_it_was_given(way: dense.DenseFormat, tmp_path: Path) -> None:
    tensors = {f"{layer}.{side}": torch.randn(1, 2, 33, 16).to(torch.bfloat16) for layer in range(2) for side in "kv"}
    way.write(tensors, str(tmp_path / "file"))
    found = way.read(str(tmp_path / "file"))
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name].flatten(), x.flatten()) for name, x in tensors.items())
    assert dense.stored_bytes(str(tmp_path / "file")) > 0


def test_matrix_products_compute_attention() -> None:
    q, k, v = torch.randn(2, 8, 1, 16), *(torch.randn(2, 2, 33, 16) for _ in range(2))
    expected = scaled_dot_product_attention(q, k, v, enable_gqa=True)
    torch.testing.assert_close(dense.matmul_attention(q, k, v), expected.view(2, 2, 4, 16))
