"""Tests of opaque bytes of an engine's slots, which are never encoded again and never written to files."""

from __future__ import annotations

import pytest
import torch

from kvpack.formats import CODECS
from kvpack.formats.errors import InvalidParameter, InvalidType
from kvpack.formats.opaque import Opaque
from kvpack.formats.options import Options
from kvpack.formats.streams import Layout


def test_bytes_are_stored_unchanged() -> None:
    codec = Opaque.create(5, "k", Options("opaque", {}))
    x = torch.randint(256, (1, 2, 3, 5), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    streams = codec.encode(x)
    assert torch.equal(streams["bytes"], x)
    assert codec.decode(streams).tolist() == x.float().tolist()
    assert (codec.layout(1, 2, 3), codec.nominal_bits, codec.packings()) == ({"bytes": Layout("U8", (1, 2, 3, 5))}, 8.0, {})
    codec.check({"bytes": x.numpy()}, "x")
    assert Opaque.from_params({"dim": 5}) == codec
    assert codec.params() == {"id": "opaque", "dim": 5}
    assert "opaque" not in CODECS


def test_other_values_are_refused() -> None:
    with pytest.raises(InvalidType, match=r"the dtype is torch.bfloat16, expected torch.uint8: view the engine's slot as bytes"):
        Opaque(5).encode(torch.zeros(1, 1, 1, 5).bfloat16())
    for dim in (0, 1025):
        with pytest.raises(InvalidParameter, match=f"codec opaque: dim is {dim}, expected 1 to 1024"):
            Opaque(dim)
    with pytest.raises(InvalidParameter):
        Opaque.create(5, "k", Options("opaque", {"b": "2"}))
