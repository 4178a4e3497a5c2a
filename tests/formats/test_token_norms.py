"""Tests of 8-bit norms: the values of the bytes, how norms are rounded, and refusals."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch

import kvpack
from kvpack.coding import dispatch
from kvpack.errors import InvalidParameter
from kvpack.formats.token_norms import LOG8, LOG8_LIMIT, MAX_LOG8, decode_norms, encode_norms, log8_values
from support.sidecar_recipes import attention, relative_error
from support.spec_pages import SPEC, section
from support.strategies import create

CODECS = {"octahedral": {"b": "3"}, "scalar": {"b": "2"}, "trellis": {"b": "2", "states": "256"}}


def test_byte_values_match_the_specification() -> None:
    text = section(SPEC / "packing.md", "Norms of 8 bits")
    table = torch.tensor([int(word, 16) for word in re.findall(r"`([0-9a-f]{8})`", text)], dtype=torch.int32).view(torch.float32)
    assert table.tolist() == [float(torch.tensor(2 ** (i / 16), dtype=torch.float32)) for i in range(16)]
    expected = [0.0, *(math.ldexp(float(table[(c - 1) % 16]), (c - 1) // 16 - 7) for c in range(1, 256))]
    assert log8_values("cpu").tolist() == expected
    largest, refused = map(float, re.findall(r"= (\d+\.\d+) \(c = 255\)[\s\S]*= (\d+\.\d+) and above", text)[0])
    assert (largest, refused) == (round(MAX_LOG8, 3), round(LOG8_LIMIT, 3))


def test_every_byte_is_the_nearest_code_of_its_norm() -> None:
    values, codes = log8_values("cpu"), torch.arange(256, dtype=torch.uint8)
    for factor in (1.0, 2 ** (0.49 / 16), 2 ** (-0.49 / 16)):
        assert torch.equal(encode_norms(values * factor, LOG8, "norm"), codes)
    small = torch.tensor([2.0**-8 * 0.999, 2.0**-8, 0.0, 1e-30])
    assert encode_norms(small, LOG8, "norm").tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("codec", CODECS)
def test_a_norm_beyond_the_range_is_refused(codec: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(dispatch.VARIABLE, backend)
    words = ",".join(f"{name}={value}" for name, value in CODECS[codec].items())
    x = torch.randn(1, 1, 40, 64, generator=torch.Generator().manual_seed(0))
    x[0, 0, 7] *= 480 / x[0, 0, 7].norm()
    with pytest.raises(InvalidParameter, match=r"largest that fits in 8 bits is 469\.506.*norm=fp16"):
        kvpack.pack([(x, x)], f"kv={codec}:{words},norm=log8")


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("codec", CODECS)
def test_bytes_reduce_precision_only_slightly(codec: str, backend: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Codes are the same as with 16-bit norms, factors are within half a step, and C and torch store and read the same bytes."""
    monkeypatch.setenv(dispatch.VARIABLE, backend)
    words = ",".join(f"{name}={value}" for name, value in CODECS[codec].items())
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1, 2, 150, 64, generator=generator) * torch.exp2(6 * torch.rand(1, 2, 150, 1, generator=generator) - 3)
    x[0, 0, 3] = 0
    caches = [kvpack.pack([(x, x)], f"kv={codec}:{words}{norm}") for norm in ("", ",norm=log8")]
    half, byte = (cache[0].k.runs[0] for cache in caches)
    for name in half.streams.keys() - {"norm"}:
        assert torch.equal(half.streams[name], byte.streams[name])
    expected, found = half.streams["norm"].float(), decode_norms(byte.streams["norm"])
    assert ((found / expected - 1).abs()[expected > 0] <= 2 ** (0.5 / 16) - 1 + 2.0**-10).all()
    assert found[0, 0, 3] == 0
    oracle = create(codec, 64, "k", **CODECS[codec], norm="log8")
    assert relative_error(caches[1][0].k.unpack(torch.float32), oracle.decode(byte.streams)) < 1e-6
    q = torch.randn(1, 4, 3, 64, generator=generator)
    decoded = caches[1][0].k.unpack(torch.float32)
    assert relative_error(kvpack.attend(q, caches[1][0]), attention(q, decoded, decoded)) < 1e-5
    kvpack.save(caches[1], tmp_path / "bytes")
    assert torch.equal(kvpack.load(tmp_path / "bytes")[0].k.unpack(torch.float32), decoded)
    assert caches[0].nbytes - caches[1].nbytes > 2 * 2 * 150 - 64


def test_other_codecs_have_no_8_bit_norms() -> None:
    for recipe in ("kv=quaternion:s=24,r=3,norm=log8", "kv=polar:b=3,norm=log8"):
        with pytest.raises(InvalidParameter, match="expected one of fp16, fp32"):
            kvpack.Recipe(recipe)
