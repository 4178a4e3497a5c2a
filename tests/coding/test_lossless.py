"""Tests of recipes without compression: which values they preserve bit for bit, and warnings about values that they round."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import kvpack
from kvpack import cli
from kvpack.coding.encoding import RAW_DTYPES
from kvpack.coding.recipes import Recipe
from kvpack.errors import RoundedWarning
from kvpack.formats.errors import InvalidType

ROUNDED = [("bf16", torch.float32), ("bf16", torch.float16), ("fp16", torch.float32), ("fp16", torch.bfloat16)]
TOLD = "the recipe stores {} values as {} and rounds them; the 'raw' recipe keeps every value exactly"
BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


def values(dtype: torch.dtype, tokens: int = 70, seed: int = 0) -> torch.Tensor:
    """Return values with arbitrary bits except NaN, including subnormal numbers and infinities."""
    bits = torch.randint(-(2**31), 2**31 - 1, (2, 3, tokens, 16), generator=torch.Generator().manual_seed(seed))
    return torch.nan_to_num(bits.to(BITS[dtype]).view(dtype), nan=-0.0, posinf=torch.inf, neginf=-torch.inf)


def equal_bits(a: torch.Tensor | None, b: torch.Tensor) -> bool:
    assert a is not None
    return a.dtype == b.dtype and torch.equal(a.view(BITS[a.dtype]), b.view(BITS[b.dtype]))


@pytest.mark.parametrize("recipe", ["raw", "raw;tail=32", "kv=raw", "fp32", "fp32;tail=32", "own"])
@pytest.mark.parametrize("dtype", BITS, ids=str)
def test_lossless_recipes_keep_every_bit(dtype: torch.dtype, recipe: str, tmp_path: Path) -> None:
    if recipe == "own":
        recipe = next(name for name, known in RAW_DTYPES.items() if known == dtype)
    k, v, new = (values(dtype, tokens, seed) for seed, tokens in enumerate((70, 70, 9)))
    cache = kvpack.pack([(k, v)], recipe).append([(new, new)])
    kvpack.save(cache, tmp_path / "x.kvpack")
    for one in (cache, kvpack.load(tmp_path / "x.kvpack"), cache.convert("raw"), cache.convert("fp32")):
        for found, x in zip(one[0].unpack(dtype), (k, v), strict=True):
            assert equal_bits(found, torch.cat([x, new], 2))


def test_raw_stores_the_dtype_of_each_side() -> None:
    k, v = values(torch.float32), values(torch.bfloat16)
    cache = kvpack.pack([(k, v), (v, None)], "raw")
    assert [side.codec.dtype for layer in cache for side in layer.sides.values()] == ["fp32", "bf16", "bf16"]
    x = torch.randn(1, 2, 40, 64)
    assert kvpack.pack([(x, x)], "kivi-4;boundary-1")[0].k.codec.dtype == "fp32"


@pytest.mark.parametrize(
    ("recipe", "lossless"),
    [
        ("raw", ("bf16", "fp16", "fp32")),
        ("fp32", ("bf16", "fp16", "fp32")),
        ("bf16", ("bf16",)),
        ("fp16;tail=32", ("fp16",)),
        ("k=raw;v=raw:dtype=fp16", ("fp16",)),
        ("octopus-3;kv=raw", ("bf16", "fp16", "fp32")),
        ("raw;layers=1:k=group:b=2", ()),
        ("k=raw:dtype=bf16;v=raw:dtype=fp16", ()),
        ("octopus-3;boundary-1", ()),
    ],
)
def test_recipes_report_which_dtypes_they_preserve(recipe: str, lossless: tuple[str, ...]) -> None:
    assert Recipe(recipe).lossless(3) == lossless


@pytest.mark.parametrize(
    ("recipe", "dtype"), [("bf16", torch.float32), ("bf16", torch.float16), ("fp16", torch.float32), ("fp16", torch.bfloat16)]
)
def test_rounding_is_reported(recipe: str, dtype: torch.dtype) -> None:
    x = torch.randn(1, 2, 40, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    if (recipe, dtype) == ("fp16", torch.bfloat16):
        x *= 2.0**-20
    name = next(name for name, known in RAW_DTYPES.items() if known == dtype)
    with pytest.warns(
        RoundedWarning, match=f"^the recipe stores {name} values as {recipe} and rounds them; the 'raw' recipe keeps every value exactly$"
    ):
        cache = kvpack.pack([(x, x)], recipe)
    # Who packs so accepts it for what is appended as well.
    with pytest.warns(RoundedWarning):
        cache = cache.append([(x, x)])
    assert torch.equal(cache[0].unpack(torch.float32)[0], torch.cat([x, x], 2).to(RAW_DTYPES[recipe]).float())


def test_values_that_fit_are_not_reported(recwarn: pytest.WarningsRecorder) -> None:
    x = torch.randn(1, 2, 40, 16).to(torch.bfloat16)
    for dtype in (torch.float32, torch.bfloat16):
        kvpack.pack([(x.to(dtype), x.to(dtype))], "bf16").append([(x, x)])
    x[0, 0, 3, 4] = torch.nan
    kvpack.pack([(x.float(), x.float())], "bf16")
    assert not recwarn.list


def test_rounding_is_reported_once(recwarn: pytest.WarningsRecorder) -> None:
    warnings.simplefilter("default")
    for seed in range(3):
        kvpack.pack([(torch.randn(1, 1, 8, 16), torch.randn(1, 1, 8, 16))] * (seed + 1), "bf16")
    assert len(recwarn.list) == 1


# Appended values of another dtype.


@pytest.mark.parametrize("recipe", ["raw", "raw;tail=64", "bf16", "bf16;tail=64"])
def test_a_raw_side_that_was_lossless_refuses_to_round(recipe: str) -> None:
    x = torch.randn(1, 2, 40, 16, generator=torch.Generator().manual_seed(0))
    cache = kvpack.pack([(x.to(torch.bfloat16), x.to(torch.bfloat16))], recipe)
    with pytest.raises(
        InvalidType, match=r"^layers\[0\]\.k: the values are torch\.float32, but the cache stores torch\.bfloat16.*x\.to\(torch"
    ):
        cache.append([(x, x)])
    assert cache.append([(x.to(torch.bfloat16).float(),) * 2]).tokens == 80
    assert cache.convert("fp32").append([(x, x)])[0].unpack(torch.float32)[0][:, :, 40:].equal(x)
    assert cache.tokens == 40


@pytest.mark.parametrize("held", BITS, ids=str)
@pytest.mark.parametrize("given", BITS, ids=str)
def test_a_tail_before_a_lossy_codec_has_the_wider_dtype(held: torch.dtype, given: torch.dtype, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    first, new = (torch.randn(1, 2, tokens, 32, generator=generator).to(dtype) for tokens, dtype in ((40, held), (9, given)))
    cache = kvpack.pack([(first, first)], "kivi-2;tail=64").append([(new, new)])
    kvpack.save(cache, tmp_path / "x.kvpack")
    for one in (cache, kvpack.load(tmp_path / "x.kvpack")):
        assert one[0].k.tail.dtype == (held if torch.equal(new.to(held).to(given), new) else torch.float32)
        assert torch.equal(one[0].unpack(torch.float32)[0], torch.cat([first.float(), new.float()], 2))


def test_converting_decoded_values_is_lossless() -> None:
    x = torch.randn(1, 2, 70, 64).to(torch.bfloat16)
    lossy = kvpack.pack([(x, x)], "octopus-3")
    decoded = lossy[0].unpack(torch.float32)
    for recipe in ("raw", "raw;tail=64", "kv=raw;tail=256", "fp32", "kivi-2;tail=256"):
        found = lossy.convert(recipe)[0].unpack(torch.float32)
        assert all(torch.equal(a, b) for a, b in zip(found, decoded, strict=True)), recipe
    # Nothing is wider than it must be.
    assert kvpack.pack([(x, x)], "kivi-2;tail=128").convert("raw")[0].k.codec.dtype == "bf16"
    assert kvpack.pack([(x, x)], "bf16").convert("raw")[0].k.codec.dtype == "bf16"
    assert lossy.convert("raw")[0].k.codec.dtype == "fp32"


def test_commands_report_losses_on_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x = torch.randn(1, 2, 5, 64)
    save_file({"0.k": x.clone(), "0.v": x}, tmp_path / "in")
    save_file({"0.k": x * torch.tensor([1e-6, 1]).view(1, 2, 1, 1), "0.v": x}, tmp_path / "small")
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        assert cli.main(["pack", str(tmp_path / "in"), str(tmp_path / "out"), "--recipe", "bf16"]) == 0
    told = capsys.readouterr().err
    assert told == f"kvpack: warning: {TOLD.format('fp32', 'bf16')}\n"
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        assert cli.main(["pack", str(tmp_path / "small"), str(tmp_path / "smaller"), "--recipe", "k=octahedral:b=3,norm=log8;v=raw"]) == 0
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert told.startswith("kvpack: warning: layers[0].k: ")
    assert cli.main(["pack", str(tmp_path / "in"), str(tmp_path / "out"), "--recipe", "raw", "--force"]) == 0
    assert capsys.readouterr().err == ""
