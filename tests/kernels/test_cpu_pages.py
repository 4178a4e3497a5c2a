"""Tests of the C functions for engines' pages: any shape and strides, writes within slots and rows, and checksums of any length."""

from __future__ import annotations

import random

import pytest
import torch

from kvpack.coding import dispatch
from kvpack.file import row as rows_of
from kvpack.formats.raw_positions import RawPositions, choose_slot_tokens, slot_mask
from kvpack.formats.token_norms import HEADS, TOKENS, measure_fit_errors, norms_per_head
from kvpack.kernels.cpu import encode, library
from kvpack.kernels.cpu.pages import RawTokenChooser
from kvpack.pages import PageBuffer, PageCodec, PageGeometry

pytestmark = pytest.mark.skipif(library.library() is None, reason="the C kernels were not built")

RECIPES = ["kv=group:b=4,g=16,axis=channel", "kivi-2", "octopus-3", "kv=scalar:b=3", "turboangle-k8v4", "hqmq-s24-r3"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_calls_write_only_their_slot_and_row(recipe: str) -> None:
    source = random.Random(recipe)
    for _ in range(4):
        layers, heads, tokens = source.randint(1, 3), source.randint(1, 3), source.randint(1, 70)
        geometry = PageGeometry(layers, heads, tokens, 64, 64, source.choice(["bf16", "fp16", "fp32"]))
        codec = PageCodec(recipe, geometry)
        # Memory that ends where the last value does: what a checker of accesses watches.
        shape = (3, layers, tokens, heads, 2, 64)
        given = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(geometry.torch_dtype)
        target = torch.zeros_like(given)
        pages, found = (PageBuffer(geometry, *(x.transpose(2, 3)[..., side, :] for side in range(2))) for x in (given, target))
        row = bytearray(b"\xaa" * (codec.nbytes + 64))
        assert codec.encode_into(pages, [2], [row]) == codec.decode_into([row[: codec.nbytes]], found, [1]) == [None]
        assert row[codec.nbytes :] == b"\xaa" * 64
        assert target[1].any()
        assert not target[[0, 2]].any()


@pytest.mark.parametrize("recipe", ["fp8", "fp8;raw=0", "mxfp8;raw=0", "nvfp4;raw=0", "kv=minifloat:element=e5m2,per=head;raw=0"])
def test_minifloat_rows_equal_those_of_formats(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    geometry = PageGeometry(2, 3, 40, 64, 64, "bf16")
    given = torch.randn(3, 2, 3, 40, 2, 64, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    # Each layer and page has another scale.
    given *= torch.tensor([1.0, 8.0, 0.25]).view(3, 1, 1, 1, 1, 1) * torch.tensor([1.0, 3.0]).view(1, 2, 1, 1, 1, 1)
    pages, rows = PageBuffer(geometry, *(given[..., side, :] for side in range(2))), []
    for backend in ("cpu", "torch"):
        monkeypatch.setenv(dispatch.VARIABLE, backend)
        codec = PageCodec(recipe, geometry)
        # What memory held before is in no row.
        rows.append([bytearray(b"\xaa" * codec.nbytes) for _ in range(3)])
        assert codec.encode_into(pages, [0, 1, 2], rows[-1]) == [None] * 3
    assert rows[0] == rows[1]


def test_checksums_read_only_their_words() -> None:
    source = random.Random(0)
    for words in (0, 1, 15, 16, 17, 33, 1000):
        data, start = memoryview(bytearray(source.randbytes(4 * words))), source.getrandbits(64)
        expected = start
        for at in range(0, len(data), 4):
            expected = (expected * rows_of.MULTIPLIER + int.from_bytes(data[at : at + 4], "little")) % 2**64
        assert library.add_words(data, start) == expected


@pytest.mark.parametrize("shared", [(), (HEADS,), (TOKENS,), (HEADS, TOKENS)])
@pytest.mark.parametrize("group", [32, 1])
@pytest.mark.parametrize("tokens", [16, 128, 200])
def test_raw_tokens_of_pages_equal_those_of_formats(tokens: int, group: int, shared: tuple[str, ...]) -> None:
    source = torch.Generator().manual_seed(tokens)
    x = torch.randn(64, 4, tokens, 32, generator=source) * torch.tensor([1.0, 20.0, 0.1, 1.0])[:, None, None]
    x[:, torch.arange(4), torch.randint(tokens, (4,), generator=source)] *= torch.linspace(1, 7, 64)[:, None, None]
    x[::3, 1, : tokens // 8] *= 2.2
    x[1::3, 0, : tokens // 16] *= 5
    x[::2, :, tokens // 2] *= 0.3
    for high in (4.0, 0.0):
        raw = RawPositions(32, "bf16", low_norm=0.6, high_norm=high)
        chooser = RawTokenChooser(raw, 64, 4, tokens, 32, torch.float32, group, 3, shared)
        chosen, left_out = chooser.run((x.data_ptr(), *(4 * stride for stride in x.stride()[:3])), 1)
        norms = norms_per_head(x)
        expected, wanted = choose_slot_tokens(raw, norms, group, 3, measure_fit_errors(norms, shared))
        assert torch.equal(torch.from_numpy(chosen), expected.masked_fill(expected == tokens, -1))
        assert torch.equal(torch.from_numpy(left_out), (wanted & ~slot_mask(expected, tokens)).sum(2).T)
        assert len({int(count) for count in (chosen >= 0).sum(1)}) > 1


@pytest.mark.parametrize("rules", [(4, 0.5, 4.0), (0, 0.6, 0.0), (9, 0.0, 4.0), (3, 0.0, 0.0), (0, 0.0, 0.0)], ids=str)
@pytest.mark.parametrize("tokens", [0, 2, 128, 300])
def test_raw_tokens_of_runs_equal_those_of_formats(tokens: int, rules: tuple[int, float, float]) -> None:
    source = torch.Generator().manual_seed(tokens)
    keys, values = (1 + 0.2 * torch.rand(40, 3, tokens, generator=source) for _ in range(2))
    if tokens:
        # Some pages have too many small values or large heads, and some sequences more raw tokens than C has slots for at first.
        for number, factor in enumerate((0.1, 0.3, 3.0, 5.0)):
            count = min(tokens, (3, 20, 5, 80)[number])
            keys[number::5, 1, :count] *= factor
            keys[number::7, :, tokens // 2] *= factor
            values[number::3, :, tokens - count :] *= factor
        keys[8, :, ::2] *= 0.2
        keys[9, 0, 0] = torch.nan
        keys[10, :, tokens - 1] = torch.inf
    raw = RawPositions(32, "bf16", *rules)
    for value_norms in (values, None):
        for packed, position in ((tokens, 0), (tokens // 2, 2), (tokens, 1000)):
            chosen = encode.choose_raw_tokens(raw, keys, value_norms, packed, position)
            assert torch.equal(chosen, raw.choose(raw.selection_norms(keys, value_norms)[:, :, :packed], position))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 37, 100), (1, 2, 5, 7), (1, 1, 130, 64)], ids=str)
def test_norms_equal_those_of_formats(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = norms_per_head(x)
    for given in (x, x.transpose(1, 2).contiguous().transpose(1, 2), torch.cat([x, x], 3)[..., : shape[3]]):
        torch.testing.assert_close(dispatch.norms(given), expected, rtol=1e-6, atol=0)
