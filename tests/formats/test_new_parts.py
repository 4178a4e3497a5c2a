"""A new codec or sidecar needs only one file and one row in a table.

All other code finds it in the tables, or leaves it to torch.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import kvpack
from kvpack.coding import dispatch
from kvpack.formats import CODECS, SIDECARS
from kvpack.formats.errors import InvalidHeader, InvalidParameter, InvalidPayload, UnknownCodec
from support.interpreter import DEVICE, needs_loaded_bounds
from support.sidecar_recipes import attention, relative_error
from support.toy_codec import Largest
from support.toy_sidecars import Multiples, TokenMean

RECIPES = {
    "codec": "kv=largest",
    "sidecar": "kv=group:b=4,g=32,token_mean=fp16",
    "sidecar of a toy codec": "kv=largest:token_mean=fp16,multiples=3;tail=32",
    "sidecars beside others": "k=group:b=4,g=32,rotation=hadamard,channel_scale=fp16,block_rotation=16,outliers=3,qjl=fp16,sinks=2,"
    "token_mean=fp16,multiples=4;v=octahedral:b=3,outliers=3,sinks=1,multiples=2,token_mean=fp16",
}


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CODECS, Largest.id, Largest)
    for sidecar in (TokenMean, Multiples):
        monkeypatch.setitem(SIDECARS, sidecar.name, sidecar)


def pairs(tokens: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    k, v = torch.randn(2, 2, 3, tokens, 64, generator=torch.Generator().manual_seed(tokens))
    return [(k + 5, v - 3)]


def queries() -> torch.Tensor:
    return torch.randn(2, 6, 3, 64, generator=torch.Generator().manual_seed(9))


def side_values(cache: kvpack.Cache) -> list[torch.Tensor]:
    return [x for pair in cache.unpack(torch.float32) for x in pair if x is not None]


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_caches_can_contain_new_parts(recipe: str, tmp_path: Path) -> None:
    cache = kvpack.pack(pairs(150), recipe).append(pairs(40))
    path = tmp_path / "x.kvpack"
    assert kvpack.save(cache, path) == cache.nbytes
    loaded = kvpack.load(path)
    assert [side.codec for side in loaded[0].sides.values()] == [side.codec for side in cache[0].sides.values()]
    values = side_values(loaded)
    assert all(map(torch.equal, values, side_values(cache)))
    for found, given in zip(values, (torch.cat(both, 2) for both in zip(pairs(150)[0], pairs(40)[0], strict=True)), strict=True):
        assert relative_error(found, given) < 0.3
    assert relative_error(kvpack.attend(queries(), loaded[0]), attention(queries(), *values)) < 1e-5
    assert all(map(torch.equal, side_values(loaded.select([1, 0])), (x.flip(0) for x in values)))


@pytest.mark.scenario
@pytest.mark.kernels
@needs_loaded_bounds
@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(
    ("recipe", "supported"),
    [*((recipe, False) for recipe in RECIPES.values()), ("kv=group:b=4,g=32,rotation=hadamard,channel_scale=fp16,multiples=4", True)],
)
def test_kernels_refuse_unknown_parts(recipe: str, supported: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Value maps are linear, so kernels can attend to the mapped keys."""
    from kvpack.kernels.attend import attention as kernels

    cache = kvpack.pack(pairs(70), recipe)
    values = side_values(cache)
    expected = attention(queries(), *values)
    monkeypatch.setenv(dispatch.VARIABLE, "triton")
    there, q = cache.to(DEVICE), queries().to(DEVICE)
    assert kernels.supports(q, there[0]) == supported
    assert relative_error(kvpack.attend(q, there[0]).cpu(), expected) < (2e-3 if supported else 1e-5)
    for found, known in zip(side_values(there), values, strict=True):
        torch.testing.assert_close(found.cpu(), known, rtol=1e-5, atol=1e-5)
    given = pairs(70)
    packed_there = side_values(kvpack.pack([(k.to(DEVICE), v.to(DEVICE)) for k, v in given], recipe))
    for found, known, x in zip(packed_there, values, given[0], strict=True):
        # A device sums in another order, so a value between two codes may get the other one.
        assert relative_error(found.cpu(), x) == pytest.approx(relative_error(known, x), rel=1e-2)


def test_bytes_of_new_parts_are_checked(registered: None, tmp_path: Path) -> None:
    cache = kvpack.pack(pairs(20), RECIPES["sidecar of a toy codec"].replace("tail=32", "tail=0"))
    side = cache[0].k
    assert side is not None
    for stream in ("largest", "token_mean"):
        (page,) = side.runs
        kept = page.streams[stream].clone()
        page.streams[stream][0, 1, 3] = torch.inf
        kvpack.save(cache, tmp_path / "bad.kvpack")
        with pytest.raises(InvalidPayload, match=rf"0\.k\.{stream}: the value at \[0, 1, 3\] is inf"):
            kvpack.load(tmp_path / "bad.kvpack")
        page.streams[stream].copy_(kept)


def test_parts_are_unknown_without_their_table_rows(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CODECS, Largest.id, Largest)
        patch.setitem(SIDECARS, TokenMean.name, TokenMean)
        for name in ("codec", "sidecar"):
            kvpack.save(kvpack.pack(pairs(20), RECIPES[name]), tmp_path / f"{name}.kvpack")
    with pytest.raises(UnknownCodec, match="codec 'largest' is unknown"):
        kvpack.load(tmp_path / "codec.kvpack")
    with pytest.raises(InvalidHeader, match="unknown parameters token_mean"):
        kvpack.load(tmp_path / "sidecar.kvpack")
    for recipe, message in ((RECIPES["codec"], "unknown codec 'largest'"), (RECIPES["sidecar"], "has no option 'token_mean'")):
        with pytest.raises(InvalidParameter, match=message):
            kvpack.pack(pairs(20), recipe)


@pytest.mark.usefixtures("registered")
def test_messages_list_words_of_new_parts() -> None:
    options = r"its options are b, .*, raw_first, raw_low_norm, raw_high_norm, raw_dtype, token_mean, multiples"
    with pytest.raises(InvalidParameter, match=options):
        kvpack.pack(pairs(20), "kv=group:b=4,g=32,token_means=fp16")
    with pytest.raises(InvalidParameter, match=r"unknown codec 'larges'; expected one of .*largest.*did you mean largest"):
        kvpack.pack(pairs(20), "kv=larges")
