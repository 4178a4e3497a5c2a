"""Encoding by the C kernels of the CPU: the bytes that formats/ writes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kvpack
from kvpack.coding import cpu_library, dispatch
from kvpack.formats.errors import KvpackError, NonFinite, OutOfRange
from kvpack.kernels.cpu import encode as cpu_encode
from kvpack.kernels.cpu import library

from strategies import CONTENTS, DIMS, contents, create, poisoned  # isort: skip

pytestmark = pytest.mark.skipif(not cpu_library.built(), reason="the C kernels were not built")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(dispatch.VARIABLE, raising=False)
    monkeypatch.delenv(library.THREADS, raising=False)


@given(data=st.data())
def test_any_group_is_encoded_to_the_same_bytes(data: st.DataObject) -> None:
    words = {
        "b": str(data.draw(st.integers(1, 8))),
        "g": data.draw(st.sampled_from(("4", "8", "16", "32", "64", "128"))),
        "axis": data.draw(st.sampled_from(("token", "channel"))),
        "centre": data.draw(st.sampled_from(("middle", "zero"))),
    }
    codec = create("group", data.draw(st.sampled_from(DIMS)), **words)
    shape = (data.draw(st.integers(1, 2)), data.draw(st.integers(1, 2)), data.draw(st.integers(0, 600)), codec.dim)
    x = contents(data.draw(st.sampled_from([kind for kind in CONTENTS if kind != "large"])), shape, data.draw(st.integers(0, 99)))
    x = poisoned(x.to(data.draw(st.sampled_from(DTYPES))))
    if not cpu_encode.supports(codec, x):
        packing = codec.packings()["codes"]
        assert packing.symbols % packing.width or packing.column_bytes > 4
        return
    try:
        expected = codec.encode(x.float())
    except OutOfRange:
        expected = None
    for level in range(len(library.levels())):
        found = cpu_encode.encode(codec, x, threads=data.draw(st.integers(1, 3)), level=level)  # type: ignore[arg-type]
        if expected is None:
            assert found is None
            continue
        assert found is not None
        assert list(found) == list(expected)
        for name, stream in expected.items():
            # Of a group of zeros of both signs, a centre may have either.
            assert torch.equal(*(each.view(torch.int16) if each.dtype == torch.uint16 else each for each in (found[name], stream)))


@pytest.mark.parametrize("axis", ["token", "channel"])
@pytest.mark.parametrize(("value", "error"), [(torch.nan, NonFinite), (torch.inf, NonFinite), (-torch.inf, NonFinite), (2e5, OutOfRange)])
def test_values_that_are_refused_are_named(axis: str, value: float, error: type[KvpackError]) -> None:
    x = torch.randn(1, 2, 700, 64)
    x[0, 1, 650, 37] = value
    codec = create("group", 64, b="4", axis=axis)
    assert cpu_encode.supports(codec, x)
    assert cpu_encode.encode(codec, x) is None  # type: ignore[arg-type]
    with pytest.raises(error):
        kvpack.pack([(x, x)], f"kv=group:b=4,g=32,axis={axis}")


@pytest.mark.parametrize("recipe", ["kivi-2", "kivi-4;tail=64", "octopus-3", "int-3"])
def test_packed_caches_are_those_of_torch(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = [tuple(torch.randn(2, 3, 333, 128).to(torch.bfloat16).transpose(1, 2).contiguous().transpose(1, 2) for _ in range(2))]
    calls = []
    original = cpu_encode.encode
    monkeypatch.setattr(cpu_encode, "encode", lambda *arguments: calls.append(arguments) or original(*arguments))
    found = kvpack.pack(pairs, recipe)
    assert calls
    monkeypatch.setenv(dispatch.VARIABLE, "torch")
    expected = kvpack.pack(pairs, recipe)
    for side, other in zip(found[0].sides.values(), expected[0].sides.values(), strict=True):
        for name, stream in side.pages[0].streams.items():
            assert bytes(stream.numpy().data) == bytes(other.pages[0].streams[name].numpy().data)
