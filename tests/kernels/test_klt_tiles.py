"""Tests of attention over klt rows by Triton: every width, heads with their own bases, and cases without tile loaders."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvpack.cache.layer import Layer
from kvpack.cache.packed_runs import PackedRun, PackedRuns
from kvpack.cache.side import Side
from kvpack.formats.basis import row_count
from kvpack.formats.errors import MissingBasis
from kvpack.formats.klt import Klt
from kvpack.formats.raw_positions import RawPositions
from kvpack.formats.sidecars import CodecWithSidecars
from support.interpreter import DEVICE, INTERPRETED, needs_loaded_bounds
from support.kernel_calls import attend_by
from support.klt_bases import klt, random_rows, with_widths_of_heads
from support.random_sides import check_attention, codecs, exact_attention, random_side

pytestmark = [pytest.mark.kernels, needs_loaded_bounds, pytest.mark.usefixtures("uninitialized_is_poisoned")]


def sides(k: Klt, v: Klt, runs: tuple[int, ...] = (40,), tail: int = 0, batch: int = 1) -> tuple[Side, Side]:
    return random_side(k, 2, runs, tail, 1, batch), random_side(v, 2, runs, tail, 2, batch)


WIDTHS = {
    "every width": (128, bytes([1, 2, 3, 4, 5, 6, 7, 8]), bytes([8, 7, 6, 5, 4, 3, 2, 1])),
    "widths that calibrations find": (128, bytes([6, 3, 2, 1, 1, 0, 0, 0]), bytes([5, 3, 1, 0, 0, 0, 0, 0])),
    "three runs of one width": (96, bytes([1, 3, 1, 3, 1, 3]), bytes([2, 4, 2, 4, 2, 4])),
    "three wide runs": (96, bytes([5, 7, 5, 7, 5, 7]), bytes([6, 8, 6, 8, 6, 8])),
    "all runs alike": (64, bytes([3, 3, 3, 3]), bytes([1, 1, 1, 1])),
    "partial runs": (40, bytes([1, 2, 3]), bytes([4, 1, 1])),
    "one run": (64, bytes([0, 0, 0, 1]), bytes([0, 2, 0, 0])),
    "few channels": (5, bytes([3]), bytes([1])),
}


@pytest.mark.scenario
@pytest.mark.parametrize("name", WIDTHS)
def test_every_width_agrees_with_exact_attention(name: str) -> None:
    dim, k, v = WIDTHS[name]
    check_attention(Layer(*sides(klt(dim, k), klt(dim, v, "v", gain="none"))), 4)


OF_HEADS = {
    "every width": (64, bytes(range(1, 9)) + bytes(range(8, 0, -1)), bytes([0, 1, 0, 2, 0, 3, 0, 4, 5, 0, 0, 0, 0, 0, 0, 8])),
    "a head without codes": (32, bytes([0, 0, 0, 0, 3, 1, 0, 0]), bytes([1, 0, 0, 0, 0, 0, 0, 0])),
    "partial runs": (13, bytes([1, 8, 7, 3]), bytes([2, 0, 0, 5])),
    "few channels": (5, bytes([3, 1]), bytes([0, 1])),
    "wide heads": (128, bytes([7, 5, 4, 3, 3, 2, 2, 2, 1, 1, 1, 1, 1, 0, 0, 0]) + bytes([4, 2, 1, 1] + 12 * [0]), bytes(32 * [2])),
}


def of_heads(name: str) -> tuple[Klt, Klt]:
    """Return codecs for keys and values of two heads with different widths."""
    dim, k, v = OF_HEADS[name]
    sides = klt(dim, bytes(-(-dim // 16) * [1])), klt(dim, bytes(-(-dim // 16) * [1]), "v", gain="none")
    return with_widths_of_heads(sides[0], k), with_widths_of_heads(sides[1], v)


@pytest.mark.parametrize("name", OF_HEADS)
def test_widths_per_head_agree_with_exact_attention(name: str) -> None:
    k, v = of_heads(name)
    check_attention(Layer(*sides(k, v)), 4)


def test_widths_per_head_agree_over_pages_and_a_tail() -> None:
    k, v = of_heads("every width")
    check_attention(Layer(*sides(k, v, (50, 33), 9, 2)), 4, q_len=3)
    check_attention(Layer(*sides(replace(v, gain="fp16"), k, (21, 64))), 2)
    check_attention(Layer(sides(k, v)[0], random_side(codecs("group:b=2,g=32", "scalar:b=2", (64, 64))[0], 2, (40,), 0, 3)), 4)


def test_widths_per_head_agree_with_stored_rows() -> None:
    layer = []
    for name, codec in zip("kv", of_heads("a head without codes"), strict=True):
        side = random_side(replace(codec, source=None, rows="fp16"), 2, (40, 35), 5, 4, 2)
        for number, page in enumerate(side.runs):
            stored = torch.stack([random_rows(2, 32, f"{name} {number} {sequence}") for sequence in range(2)])[:, :, None]
            page.streams["rows"].copy_(stored)  # type: ignore[union-attr]
        layer.append(side)
    check_attention(Layer(*layer), 4)


@pytest.mark.scenario
@pytest.mark.parametrize("tail", [0, 9])
def test_raw_tokens_agree_with_exact_attention(tail: int) -> None:
    """Columns without codes cannot represent raw tokens, so tokens near these are decoded to the original frame, as the tail is."""
    layer = []
    for number, codec in enumerate(of_heads("wide heads")):
        kept = CodecWithSidecars(codec, (RawPositions(codec.dim, "bf16"),))
        side = random_side(codec, 2, (150, 83), tail, number, 2)
        pages = []
        for page in side.runs:
            chosen = torch.zeros(2, page.tokens, dtype=torch.bool)
            chosen[0, [0, 3]] = chosen[1, 70:72] = True
            x = torch.randn(2, 2, page.tokens, codec.dim, generator=torch.Generator().manual_seed(number))
            _, own = kept.sidecars[0].encode(x, chosen, 1)  # type: ignore[attr-defined]
            pages.append(PackedRun(kept, page.tokens, {**page.streams, **own}))
        layer.append(Side(kept, PackedRuns.from_runs(pages), side.tail))
    check_attention(Layer(*layer), 4)
    check_attention(Layer(*layer), 2, q_len=3)
    from kvpack.kernels.attend import segments

    found = segments.side_segments(layer[0]).segments
    assert {segment.codec.id for segment in found} == {"klt", "raw"}
    assert [segment.tokens for segment in found if segment.codec.id == "raw" and segment.page is not None] == [64, 64, 64, 19]


@pytest.mark.parametrize("fields", [1, 3, 16, 40])
def test_columns_with_other_numbers_of_fields_are_decoded(fields: int) -> None:
    """Columns may have sizes that no writer chooses. In that case, even 1-bit codes are looked up."""
    k, v = klt(64, bytes([1, 3, 1, 1])), klt(64, bytes([1, 2, 0, 1]), "v")
    k, v = (replace(codec, fields=tuple((name, fields) for name, _ in codec.fields)) for codec in (k, v))
    check_attention(Layer(*sides(k, v)), 2)


MODES: dict[str, dict[str, Any]] = {
    "queries of a chunk": {"q_len": 5},
    "more rows than the merge rotates": {"q_len": 80},
    "softcap": {"softcap": 3.0, "q_len": 2},
    "a window": {"sliding_window": 20, "q_len": 2},
    "half precision": {"dtype": torch.bfloat16},
    "sink logits": {"sink_logits": [2.0, -torch.inf, 0.5, 1.0]},
    "lengths": {"lengths": [30, 77]},
}


@pytest.mark.scenario
@pytest.mark.parametrize("mode", MODES)
def test_all_modes_agree_over_pages_and_a_tail(mode: str) -> None:
    k, v = klt(32, bytes([4, 1])), klt(32, bytes([1, 3]), "v")
    check_attention(Layer(*sides(k, v, (50, 33), 9, 2)), 4, **MODES[mode])


def test_keys_can_be_combined_with_another_codec_for_values() -> None:
    """Tiles of the other side may have two tokens per row, and frames of other codecs have one matrix for all heads."""
    k, v = klt(64, bytes([3, 1, 0, 2])), klt(64, bytes([2, 1, 1, 0]), "v")
    groups, scalars = codecs("group:b=2,g=32", "scalar:b=2", (64, 64))
    check_attention(Layer(sides(k, v)[0], random_side(scalars, 2, (40,), 0, 3)), 4)
    check_attention(Layer(random_side(groups, 2, (40,), 0, 3), sides(k, v)[1]), 4)


@pytest.mark.parametrize("rows", ["fp16", "fp32"])
@pytest.mark.parametrize("widths", [bytes([2, 3]), bytes([0, 2])])
def test_stored_rows_agree_with_exact_attention(widths: bytes, rows: str) -> None:
    """Each sequence and page has its own rows, all of which refer to the same basis. Columns without codes add nothing."""
    layer = []
    for name in "kv":
        codec = klt(32, widths, name, rows=rows)
        side = random_side(replace(codec, source=None), 2, (40, 35), 5, 4, 2)
        for number, page in enumerate(side.runs):
            stored = torch.stack([random_rows(2, 32, f"{name} {number} {sequence}") for sequence in range(2)])[:, :, None]
            assert stored.shape[3] == row_count(32)
            page.streams["rows"].copy_(stored)  # type: ignore[union-attr]
        layer.append(side)
    check_attention(Layer(*layer), 4)


@pytest.mark.parametrize("scale", [2.0**-12, 2.0**12])
def test_bases_of_any_scale_agree_with_exact_attention(scale: float) -> None:
    """Values are far from 1. Tables include the basis's unit as far as binary16 allows."""
    k, v = klt(32, bytes([4, 1]), scale=2.0**5), klt(32, bytes([1, 3]), "v", scale=scale)
    check_attention(Layer(*sides(k, v)), 4)


def test_values_beyond_tiles_are_left_to_torch() -> None:
    from kvpack.kernels.attend import attention
    from kvpack.kernels.tiles.loaders import find_tiles

    k, v = klt(32, bytes([4, 1]), scale=2.0**30), klt(32, bytes([1, 3]), "v")
    layer = Layer(*(side.to(DEVICE) for side in sides(k, v)))
    assert not attention.supports(torch.zeros(1, 4, 1, 32, device=DEVICE), layer)
    with pytest.raises(MissingBasis, match="keys of layer 0 of the basis"):
        find_tiles(replace(klt(32, bytes([2, 2])), source=None))


@pytest.mark.skipif(INTERPRETED, reason="this test checks compiled kernels")
def test_many_tokens_agree_with_exact_attention() -> None:
    k, v = klt(128, bytes([6, 3, 2, 1, 1, 0, 0, 0])), klt(128, bytes([5, 3, 2, 2, 1, 0, 0, 0]), "v")
    for tokens in (4096, 10007):
        check_attention(Layer(*sides(k, v, (tokens,), 3)), 8)


def test_many_queries_agree_with_exact_attention() -> None:
    """Many queries attend to decoded tokens, because no loader decodes their frame without queries."""
    from kvpack.kernels.attend import many_queries

    k, v = klt(32, bytes([4, 1])), klt(32, bytes([1, 3]), "v")
    layer = Layer(*(side.to(DEVICE) for side in sides(k, v, (50, 33), 9)))
    q = torch.randn(1, 4, 40, 32, generator=torch.Generator().manual_seed(1)).to(DEVICE, torch.float16)
    found = attend_by(many_queries, q, layer, 32**-0.5)
    expected = exact_attention(q.cpu().to(torch.float32), Layer(*(side.to("cpu") for side in layer.sides.values())))
    assert (found.cpu().to(torch.float64) - expected).norm() <= 6e-3 * expected.norm()


@pytest.mark.scenario
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["every width", "partial runs", "few channels", "of heads"])
def test_unpacked_values_equal_those_of_formats(name: str, dtype: torch.dtype) -> None:
    from kvpack.kernels.decode import klt as decode_klt
    from kvpack.kernels.decode import sides as decode_sides

    if name == "of heads":
        pair = of_heads("partial runs")
    else:
        dim, k, v = WIDTHS[name]
        pair = klt(dim, k), klt(dim, v, "v", gain="none")
    dim = pair[0].dim
    for codec in pair:
        side = random_side(codec, 2, (150, 33), 9, 1, 2)
        there = side.to(DEVICE)
        out = torch.full((2, 2, 192, dim), torch.nan, dtype=dtype, device=DEVICE)
        assert decode_klt.supports(codec, out)
        assert decode_sides.unpack_into(there, 0, 192, out) == [(183, 192)]
        part = torch.full((2, 2, 100, dim), torch.nan, dtype=dtype, device=DEVICE)
        assert decode_sides.unpack_into(there, 70, 170, part) == []
        # NumPy's products, which the interpreter takes, add up a row in an order that depends on its place: a value may round differently.
        apart = part[:, :, :100].view(torch.int16).int() - out[:, :, 70:170].view(torch.int16).int()
        assert apart.abs().max() <= (1 if INTERPRETED else 0)
        expected = side.unpack(torch.float32)[:, :, :183].double()
        step = 2.0**-7 if dtype == torch.bfloat16 else 2.0**-9
        assert ((out[:, :, :183].cpu().double() - expected).norm(dim=-1) <= step * expected.norm(dim=-1)).all()


@pytest.mark.parametrize("half", range(3))
def test_each_half_has_its_own_selector(half: int) -> None:
    from kvpack.kernels.bitpack import row_registers

    # The register of halves has two bytes, the others four.
    last = [1 if register == half else 3 for register in range(3)]
    both = [(a, b) for a in range(3) for b in range(3) if a != b]
    places = [[row_registers.RegisterByte(a, last[a]), row_registers.RegisterByte(b, last[b] - 1)] for a, b in both]
    words = [[16 * register + byte for byte in range(4)] for register in range(3)]
    upper = [[*word[2:], *word[:2]] if register == half else word for register, word in enumerate(words)]
    steps = row_registers.byte_selectors(places, range(3))
    odd_steps = [row_registers.select_upper_half(step, number, half) for number, step in enumerate(steps, 1)]
    for column, own in enumerate(places):
        expected = [words[place.register][place.byte] for place in own]
        assert joined(words, [step[column] for step in steps])[:2] == expected
        assert joined(upper, [step[column] for step in odd_steps])[:2] == expected


def joined(words: list[list[int]], selectors: list[int]) -> list[int]:
    """Return the bytes that byte permutations of ``words`` produce, one permutation for each of ``selectors``."""
    found = words[0]
    for word, selector in zip(words[1:], selectors, strict=True):
        found = [(found + word)[selector >> 4 * at & 7] for at in range(4)]
    return found
