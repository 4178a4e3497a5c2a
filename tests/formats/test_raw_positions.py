"""Tests of tokens stored raw by position: how they are chosen and stored, and that their positions stay correct."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

import kvpack
from kvpack.errors import InvalidParameter, InvalidPayload
from kvpack.formats import token_norms
from kvpack.formats.errors import ValueTooLarge
from kvpack.formats.raw_positions import POSITIONS, VALUES, RawPositions, mark_poor_fits, replace_tokens, store_in_slots
from kvpack.formats.sidecars import CodecWithSidecars
from kvpack.formats.token_norms import (
    MAX_PER_PAGE,
    PAGE_TOKENS,
    drop_crowded_pages,
    measure_fit_errors,
    norms_over_heads,
    norms_per_head,
    relative_norms,
    shared_scale_factors,
    widening_factors,
)
from kvpack.live.cache import LiveCache
from support.strategies import create

if TYPE_CHECKING:
    from pathlib import Path

    from kvpack.cache.side import Side

DIM, HEADS, TOKENS = 16, 2, 300
LOW = {0: (130, 200), 1: (5, 77)}
"""For each sequence, the tokens whose keys have a low norm."""
WORDS = "raw_first=2,raw_low_norm=0.5"
EXPECTED = [[0, 1, 130, 200], [0, 1, 5, 77]]
RECIPES = {
    "a token at a time": f"kv=scalar:b=2,{WORDS}",
    "groups of tokens": f"kv=group:b=2,g=32,{WORDS}",
    "codecs of different groups": f"k=group:b=2,g=32,{WORDS};v=octahedral:b=3,{WORDS}",
    "other sidecars": f"kv=group:b=2,g=32,rotation=hadamard,outliers=3,qjl=fp16,{WORDS},raw_dtype=fp32",
    "a window": f"kv=scalar:b=2,{WORDS};tail=64",
}


def pairs(begin: int = 0, end: int = TOKENS) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return keys and values of two sequences: the tokens ``[begin, end)`` of 300."""
    k, v = torch.randn(2, 2, HEADS, TOKENS, DIM, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    for sequence, tokens in LOW.items():
        k[sequence, :, list(tokens)] *= 0.1
    return [(k[:, :, begin:end], v[:, :, begin:end])]


def raw_of(side: Side) -> list[list[int]]:
    """Return the positions of the raw tokens in each of two sequences."""
    found: list[list[int]] = [[], []]
    raw, first = side.codec.raw_positions, 0
    assert raw is not None
    for page in side.runs:
        for token, sequence in zip(*(places.tolist() for places in raw.token_positions(page.streams)), strict=True):
            found[sequence].append(first + token)
        first += page.tokens
    return found


def check(cache: kvpack.Cache, expected: list[list[int]], begin: int = 0) -> None:
    """Check that both sides store the ``expected`` tokens exactly. Positions are counted from ``begin``."""
    layer = cache[0]
    given, decoded = pairs(begin)[0], cache.unpack(torch.bfloat16)[0]
    for side, x, found in zip((layer.k, layer.v), given, decoded, strict=True):
        assert side is not None
        assert found is not None
        assert raw_of(side) == expected
        for sequence, tokens in enumerate(expected):
            assert torch.equal(found[sequence, :, tokens], x[sequence, :, tokens])


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_keys_select_raw_tokens_for_both_sides(recipe: str, tmp_path: Path) -> None:
    cache = kvpack.pack(pairs(), recipe)
    check(cache, EXPECTED)
    kvpack.save(cache, tmp_path / "x")
    check(kvpack.load(tmp_path / "x"), EXPECTED)
    assert kvpack.load(tmp_path / "x").contents.required == ("raw-positions",)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_positions_are_relative_to_parts_of_a_cache(recipe: str, tmp_path: Path) -> None:
    cache = kvpack.pack(pairs(), recipe)
    cut = cache[:, 128:TOKENS]
    check(cut, [[2, 72], []], 128)
    joined = kvpack.concat([cache[:, :96], cache[:, 96:192], cache[:, 192:TOKENS]])
    check(joined, EXPECTED)
    kvpack.save(joined, tmp_path / "x")
    check(kvpack.load(tmp_path / "x"), EXPECTED)
    chosen = cache.select([1, 1, 0])
    for found, whole in zip(chosen.unpack(torch.float32)[0], cache.unpack(torch.float32)[0], strict=True):
        assert found is not None
        assert whole is not None
        assert torch.equal(found, whole[[1, 1, 0]])


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_parts_are_encoded_like_the_complete_cache(recipe: str) -> None:
    """First tokens are counted from the start of the sequence, and pages begin at multiples of their size."""
    first, second = kvpack.pack(pairs(0, PAGE_TOKENS), recipe), kvpack.pack(pairs(PAGE_TOKENS), recipe, start=PAGE_TOKENS)
    check(second, [[2, 72], []], PAGE_TOKENS)
    check(kvpack.concat([first, second]), EXPECTED)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_raw_tokens_can_be_appended(recipe: str, tmp_path: Path) -> None:
    """Tokens that are encoded together form a page, within which low norms are determined."""
    cache = kvpack.pack(pairs(0, 128), recipe).append(pairs(128)).append([(x[:, :, :0], y[:, :, :0]) for x, y in pairs()])
    assert raw_of(cache[0].v) == raw_of(cache[0].k)  # type: ignore[arg-type]
    assert raw_of(cache[0].v)[0][:4] == EXPECTED[0]  # type: ignore[arg-type]
    kvpack.save(kvpack.pack(pairs(0, 128), recipe), tmp_path / "x")
    check(kvpack.load(tmp_path / "x").append(pairs(128)), EXPECTED)
    live = LiveCache(f"{recipe};window=128", layers=1)
    for begin in range(0, TOKENS, 50):
        live.update(0, *pairs(begin, begin + 50)[0])
        live.roll()
    check(live.freeze(), EXPECTED)


def test_values_select_raw_tokens_if_there_are_no_keys() -> None:
    k, v = pairs()[0]
    (side,) = kvpack.pack([(None, k)], f"kv=scalar:b=2,{WORDS}")[0].sides.values()
    assert raw_of(side) == EXPECTED
    # Values have the norms that they have.
    assert raw_of(kvpack.pack([(None, v)], f"kv=scalar:b=2,{WORDS}")[0].v) == [[0, 1], [0, 1]]  # type: ignore[arg-type]


def test_only_values_may_have_raw_tokens() -> None:
    layer = kvpack.pack(pairs(), f"k=raw;v=scalar:b=2,{WORDS}")[0]
    assert layer.v is not None
    assert raw_of(layer.v) == EXPECTED


def test_a_conversion_selects_raw_tokens_by_decoded_keys() -> None:
    cache = kvpack.pack(pairs(), "k=group:b=8,g=32;v=group:b=4,g=32").convert(f"kv=group:b=4,g=16,{WORDS}")
    assert raw_of(cache[0].k) == raw_of(cache[0].v) == EXPECTED  # type: ignore[arg-type]


def hidden(begin: int = 0, end: int = TOKENS) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return ``pairs`` with a constant in two key channels, so that the same tokens have a low norm in the values only."""
    ((k, v),) = pairs()
    k[..., [3, 8]] += 20
    for sequence, tokens in LOW.items():
        v[sequence, :, list(tokens)] *= 0.1
    return [(k[:, :, begin:end], v[:, :, begin:end])]


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_values_show_attention_sinks_where_a_constant_hides_them_in_the_keys(recipe: str) -> None:
    live = LiveCache(f"{recipe};window=128", layers=1)
    for begin in range(0, TOKENS, 50):
        live.update(0, *hidden(begin, begin + 50)[0])
        live.roll()
    caches = [
        kvpack.pack(hidden(), recipe),
        kvpack.pack(hidden(), "raw").convert(recipe),
        kvpack.pack(hidden(0, 128), recipe).append(hidden(128)),
        live.freeze(),
    ]
    for cache in caches:
        assert raw_of(cache[0].k) == raw_of(cache[0].v)  # type: ignore[arg-type]
        assert [tokens[:4] for tokens in raw_of(cache[0].k)] == EXPECTED  # type: ignore[arg-type]


def test_values_near_zero_count_like_a_low_norm_of_a_key() -> None:
    one = RawPositions(DIM, "bf16", 0, 0.6, 4.0)
    keys, values = torch.ones(2, 1, 3, PAGE_TOKENS).unbind()
    for token, (key, value) in enumerate([(0.59, 1.0), (0.61, 0.34), (0.61, 0.32), (3.0, 0.32), (5.0, 1.0)]):
        keys[:, :, token], values[:, :, token] = key, value
    chosen = [one.choose(norms).nonzero()[:, 1].tolist() for norms in (keys, one.selection_norms(keys, values))]
    assert chosen == [[0, 4], [0, 2, 3, 4]]
    assert torch.equal(one.selection_norms(keys, None), keys)
    assert torch.equal(RawPositions(DIM, "bf16", 0, 0.0, 4.0).selection_norms(keys, values), keys)
    for alike in (torch.zeros(1, 3, 40), torch.full((1, 3, 40), torch.inf)):
        assert not one.choose(one.selection_norms(torch.ones(1, 3, 40), alike)).any()


def test_many_values_of_low_norm_are_no_attention_sinks() -> None:
    one = RawPositions(DIM, "bf16", 0, 0.6)
    keys, values = torch.ones(2, 1, 3, 2 * PAGE_TOKENS).unbind()
    values[:, :, :17] = 0.1
    values[:, :, PAGE_TOKENS : PAGE_TOKENS + 16] = 0.1
    assert one.choose(one.selection_norms(keys, values)).nonzero()[:, 1].tolist() == [*range(PAGE_TOKENS, PAGE_TOKENS + 16)]


def test_the_threshold_depends_on_the_median_of_a_page() -> None:
    norms = torch.ones(1, 1, 3 * PAGE_TOKENS)
    norms[0, 0, PAGE_TOKENS : 2 * PAGE_TOKENS] = 10.0
    norms[0, 0, [3, PAGE_TOKENS + 3, 2 * PAGE_TOKENS + 3]] = torch.tensor([0.59, 5.9, 0.61])
    one = RawPositions(DIM, "bf16", 0, 0.6)
    assert one.choose(norms).nonzero()[:, 1].tolist() == [3, PAGE_TOKENS + 3]
    assert one.choose(norms[..., :1]).sum() == 0
    assert not one.choose(torch.zeros(1, 2, 40)).any()
    assert not one.choose(torch.full((1, 2, 40), torch.inf)).any()


@pytest.mark.parametrize(
    ("position", "continues", "count"), [(None, False, 3), (None, True, 0), (0, True, 3), (2, False, 1), (7, False, 0)]
)
def test_first_tokens_are_those_of_the_sequence(position: int | None, continues: bool, count: int) -> None:
    chosen = RawPositions(DIM, "bf16", 3).choose(torch.ones(2, 3, 40), position, continues)
    assert torch.equal(chosen.sum(1), torch.tensor([count, count]))


def test_tokens_are_replaced_by_the_mean_of_their_group() -> None:
    x = torch.randn(2, HEADS, 10, DIM, generator=torch.Generator().manual_seed(1))
    chosen = torch.zeros(2, 10, dtype=torch.bool)
    chosen[0, [1, 2]] = chosen[1, 8:] = True
    token, sequence = chosen.T.nonzero().unbind(1)
    found = replace_tokens(x, token, sequence, chosen, 4)
    torch.testing.assert_close(found[0, :, 1:3], x[0, :, [0, 3]].mean(1, keepdim=True).expand(-1, 2, -1))
    assert not found[1, :, 8:].any()
    assert torch.equal(found[~chosen[:, None].expand(2, HEADS, 10)], x[~chosen[:, None].expand(2, HEADS, 10)])
    assert not replace_tokens(x, token, sequence, chosen, 1)[chosen[:, None].expand(2, HEADS, 10)].any()


def test_norms_are_computed_per_head_and_over_all_heads() -> None:
    x = torch.randn(2, HEADS, 300, DIM, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(norms_per_head(x), torch.linalg.vector_norm(x, dim=3))
    torch.testing.assert_close(norms_over_heads(norms_per_head(x)), torch.linalg.vector_norm(x, dim=(1, 3)))
    assert norms_per_head(x[:, :, :0]).shape == (2, HEADS, 0)


@pytest.mark.parametrize("tokens", [1, 5, PAGE_TOKENS, PAGE_TOKENS + 1, 3 * PAGE_TOKENS - 1])
def test_a_large_norm_in_one_head_is_enough(tokens: int) -> None:
    """The quick test and the medians find the same tokens, even if heads differ in their usual norms or low-norm tokens are near."""
    source = torch.Generator().manual_seed(tokens)
    norms = (torch.rand(3, HEADS, tokens, generator=source) + 1) * torch.tensor([1.0, 30.0, 1e-3])[:HEADS, None]
    norms[1, 1, tokens // 2] *= 5
    norms[2, :, tokens // 3] *= 0.01
    norms[2, 0, -1] *= 3.5
    found = RawPositions(DIM, "bf16", high_norm=4.0).choose(norms)
    pages = norms.split(PAGE_TOKENS, 2)
    if tokens > PAGE_TOKENS and tokens % PAGE_TOKENS:
        pages = (*pages[:-1], norms[..., -PAGE_TOKENS:])
    medians = torch.cat([page.median(2, keepdim=True).values.expand(page.shape) for page in pages], 2)
    medians = torch.cat([medians[..., : tokens // PAGE_TOKENS * PAGE_TOKENS], medians[..., medians.shape[2] - tokens % PAGE_TOKENS :]], 2)
    assert torch.equal(found, (norms > 4 * medians).any(1))
    assert found.any() == (tokens > 1)


def test_a_shared_scale_is_too_large_if_one_head_dominates() -> None:
    norms = torch.ones(2, 3, 200) * torch.tensor([1.0, 20.0, 2.0])[:, None]
    # All heads are large; the small one is large, which the scale does not follow; the largest one is.
    norms[0, :, 5] *= 3
    norms[0, 0, 6] *= 3
    norms[1, 1, 7] *= 3
    # What the others need is as much of their own: the scale is twice too large.
    norms[1, :, 8] *= torch.tensor([2.0, 4.0, 2.0])
    found = shared_scale_factors(norms)
    assert (found > 1.5).nonzero().tolist() == [[1, 7], [1, 8]]
    torch.testing.assert_close(found[1, 7:9], torch.tensor([3.0, 2.0]), rtol=0.02, atol=0)
    assert relative_norms(norms)[1, :, 7].tolist() == [1, 3, 1]
    norms[:, 2] = 0
    assert (shared_scale_factors(norms) > 1.5).nonzero().tolist() == [[1, 7], [1, 8]]
    assert not shared_scale_factors(norms[:, :1]).any()


def test_a_head_that_does_not_follow_the_shared_scale_widens_a_group() -> None:
    norms = torch.ones(1, 8, 200) * torch.arange(1.0, 9.0)[:, None]
    norms[0, 0, 5] *= 3
    norms[0, :, 6] *= 3
    norms[0, 7, 7] *= 1.9
    alone, shared = (widening_factors(norms, of) for of in ({token_norms.TOKENS}, {token_norms.TOKENS, token_norms.HEADS}))
    assert alone.nonzero().tolist() == [[0, 5], [0, 6]]
    assert alone[0, 5:7].tolist() == [3, 3]
    # The scale of token 6 is three times as large, that of token 5 little more than usual.
    assert shared.nonzero().tolist() == [[0, 5]]
    assert 2.9 < shared[0, 5] < 3
    norms[0, 1] = 0
    norms[0, 1, 9] = 1
    assert widening_factors(norms, {token_norms.TOKENS}).nonzero().tolist() == [[0, 5], [0, 6]]
    assert not widening_factors(norms[..., 5:7] ** 4, {token_norms.TOKENS}).any()


def test_many_tokens_with_a_large_head_are_not_outliers() -> None:
    one, norms = RawPositions(DIM, "bf16", high_norm=4.0), torch.ones(1, 3, 2 * PAGE_TOKENS)
    norms[0, 0, 10:12] = norms[0, 1, 30:32] = 5.0
    assert one.choose(norms).nonzero()[:, 1].tolist() == [10, 11, 30, 31]
    norms[0, 2, [50, PAGE_TOKENS + 1]] = 5.0
    assert one.choose(norms).nonzero()[:, 1].tolist() == [PAGE_TOKENS + 1]
    norms[0, :, 60] = 5.0
    assert one.choose(norms).nonzero()[:, 1].tolist() == [60, PAGE_TOKENS + 1]


def test_few_tokens_per_page_may_be_raw_for_a_shared_scale() -> None:
    chosen = torch.zeros(2, 2 * PAGE_TOKENS + 9, dtype=torch.bool)
    chosen[0, :MAX_PER_PAGE] = chosen[0, PAGE_TOKENS : PAGE_TOKENS + MAX_PER_PAGE + 1] = chosen[1, -MAX_PER_PAGE:] = True
    found = drop_crowded_pages(chosen)
    assert torch.equal(found[:, :PAGE_TOKENS], chosen[:, :PAGE_TOKENS])
    assert not found[:, PAGE_TOKENS : 2 * PAGE_TOKENS].any()
    assert torch.equal(found[:, 2 * PAGE_TOKENS :], chosen[:, 2 * PAGE_TOKENS :])
    norms = torch.ones(1, 2, PAGE_TOKENS)
    norms[0, 0, 20 : 20 + MAX_PER_PAGE] = 3.0
    none = RawPositions(DIM, "bf16", high_norm=4.0).choose(norms)
    assert not none.any()
    for shared in ({token_norms.HEADS}, {token_norms.TOKENS}):
        assert mark_poor_fits(none, measure_fit_errors(norms, shared)).nonzero()[:, 1].tolist() == [*range(20, 20 + MAX_PER_PAGE)]
    norms[0, 0, 60] = 3.0
    assert not mark_poor_fits(none, measure_fit_errors(norms, {token_norms.HEADS, token_norms.TOKENS})).any()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("raw_dtype=fp16", "has no effect without raw_first=<count>, raw_low_norm=<share> or raw_high_norm=<ratio>"),
        ("raw_low_norm=1", "expected a number above 0 and below 1"),
        ("raw_low_norm=0.0", "expected a number above 0 and below 1"),
        ("raw_low_norm=nan", "expected a number above 0 and below 1"),
        ("raw_high_norm=1", "expected a number above 1 and up to 1000"),
        ("raw_high_norm=inf", "expected a number above 1 and up to 1000"),
        ("raw_first=0", "expected an integer from 1"),
    ],
)
def test_options_are_checked(words: str, message: str) -> None:
    with pytest.raises(InvalidParameter, match=message):
        kvpack.Recipe(f"kv=scalar:b=2,{words}")


@pytest.mark.parametrize("codec", ["raw", "lossless"])
def test_lossless_codecs_have_no_raw_tokens(codec: str) -> None:
    with pytest.raises(InvalidParameter, match="does not support sidecars: omit raw_positions"):
        kvpack.Recipe(f"kv={codec}:raw_first=1")


def test_raw_values_beyond_the_range_are_refused() -> None:
    x = torch.ones(1, 1, 40, DIM)
    x[0, 0, 1, 3] = 7e4
    with pytest.raises(ValueTooLarge, match=r"layers\[0\]\.k: raw token 1 \(sequence 0, head 0\) has the value 70000 in channel 3"):
        kvpack.pack([(x, x)], "kv=scalar:b=2,raw_first=2,raw_dtype=fp16")
    x[0, 0, 1, 3] = torch.inf
    with pytest.raises(InvalidParameter, match=r"layers\[0\]\.k: the value at batch 0, head 0, token 1, channel 3 is inf"):
        kvpack.pack([(x, x)], "kv=scalar:b=2,raw_first=2")


def test_raw_values_stay_finite_in_float16() -> None:
    x = torch.ones(1, 1, 64, DIM, dtype=torch.float16)
    x[0, 0, 1, 3], x[0, 0, 1, 4] = 65504, -65440
    keys, _ = kvpack.pack([(x, x)], "kv=scalar:b=2,raw_first=2")[0].unpack(torch.float16)
    assert keys is not None
    slots = store_in_slots(RawPositions(DIM, "bf16", high_norm=4.0), x, norms_per_head(x), 32, 1).streams[VALUES].half()
    assert keys[0, 0, 1, 3:5].tolist() == slots[0, 0, 0, 3:5].tolist() == [65280, -65280]


@pytest.mark.parametrize("codec_id", ["scalar", "group", "klt", "transform"])
def test_both_ways_to_encode_agree(codec_id: str) -> None:
    """The block-wise reference agrees with ``kvpack.coding``, which passes a whole run to a kernel."""
    words = {"klt": {}, "transform": {"chunk": "16"}}.get(codec_id, {"b": "2"})
    codec = create(codec_id, DIM, "k", raw_first="2", raw_low_norm="0.5", **words)
    assert isinstance(codec, CodecWithSidecars)
    from kvpack.coding.encoding import encode

    x = pairs()[0][0].to(torch.float32)
    one, other = codec.encode(x), encode(codec, x, "x")
    assert [*one] == [*other] == [*codec.layout(2, HEADS, TOKENS)]
    for name in (POSITIONS, VALUES):
        assert torch.equal(one[name].view(torch.int16), other[name].view(torch.int16))
    torch.testing.assert_close(codec.decode(one), codec.decode(other))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([[2, 0, 0, 0], [2, 0, 0, 0]], "position 1 is .*, which must be greater than the position before it"),
        ([[9, 0, 0, 0]], "position 0 is .*, expected a token number from 1 to 8 in the first three words and a sequence below 2"),
        ([[2, 0, 0, 2]], "position 0 is"),
        ([[0, 0, 0, 0], [2, 0, 0, 0]], "position 1 is .*, which follows an unused one, but those come last"),
        ([[2, 0, 0, 0], [0, 0, 0, 0]], "an unused entry is not zero, expected zeros after the 1 used entries"),
    ],
)
def test_invalid_positions_are_refused(words: list[list[int]], message: str) -> None:
    one = RawPositions(DIM, "fp16")
    positions = torch.tensor(words, dtype=torch.int16).view(1, 1, -1, 4).view(torch.uint16).numpy()
    values = torch.ones(1, 1, len(words), HEADS, DIM, dtype=torch.float16).numpy()
    arrays = {POSITIONS: positions, VALUES: values}
    one.check(arrays, "x")
    with pytest.raises(InvalidPayload, match=message):
        one.check_runs(arrays, (5, 3), 2, "x")


@pytest.mark.parametrize("value", [1e3, 7e4])
@pytest.mark.parametrize(
    "keys",
    [
        "octahedral:b=3",
        "octahedral:b=3,channel_scale=fp16",
        "scalar:b=3,channel_scale=fp16",
        "group:b=2,g=32",
        "group:b=2,g=32,rotation=hadamard,token_scale=fp16",
        "group:b=2,g=32,rotation=hadamard,token_scale=fp16,channel_scale=fp16",
    ],
)
def test_an_outlier_affects_no_other_token_or_head(keys: str, value: float) -> None:
    k, v = torch.randn(2, 1, 2, 320, 128, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    recipe = f"k={keys},raw_high_norm=4;v=group:b=2,g=32,raw_high_norm=4"
    usual = [(found - x).norm() for found, x in zip(kvpack.pack([(k, v)], recipe)[0].unpack(torch.float32), (k, v), strict=True)]
    k[0, 1, 9, 3] = value
    found = kvpack.pack([(k, v)], recipe)[0].unpack(torch.float32)
    for decoded, x, error in zip(found, (k, v), usual, strict=True):
        assert decoded is not None
        assert torch.equal(decoded[:, :, 9], x[:, :, 9].float())
        assert (decoded - x).norm() < 1.02 * error


def test_a_token_among_zeros_is_not_an_outlier() -> None:
    norms = torch.zeros(1, 2, 200)
    norms[0, 0, 7] = 1.0
    one = RawPositions(DIM, "bf16", high_norm=4.0)
    assert not one.choose(norms).any()
    norms[0, 0, 8:] = 0.1
    assert one.choose(norms).nonzero().tolist() == [[0, 7]]


def test_pages_keep_tokens_with_high_norms_raw_if_tokens_share_scales() -> None:
    x = torch.randn(3, 2, 64, 16, generator=torch.Generator().manual_seed(0))
    x[[0, 2], :, 5] *= 0.1
    x[[1, 2], 0, 9] *= 1000
    raw = RawPositions(16, "bf16", low_norm=0.5, high_norm=4.0)
    together, one_by_one = (store_in_slots(raw, x, norms_per_head(x), group, 1) for group in (32, 1))
    used = [slots.streams[POSITIONS][..., 0].to(torch.int64).bool().tolist() for slots in (together, one_by_one)]
    assert used == [[[True]] * 3, [[True], [False], [True]]]
    left = [(slots.wanted & ~slots.chosen).sum(2).T.tolist() for slots in (together, one_by_one)]
    assert left == [[[0, 0], [0, 0], [1, 0]], [[0, 0]] * 3]
    assert together.streams[POSITIONS][:, 0, 0].tolist() == [6, 10, 10]
    assert together.codec_input.abs().max() < 10


@pytest.mark.parametrize("group", [32, 1])
def test_pages_keep_tokens_raw_if_a_shared_scale_does_not_fit(group: int) -> None:
    x = torch.randn(2, 4, 64, 16, generator=torch.Generator().manual_seed(0)).sign()
    x[0, :, 5] *= 0.1
    x[:, 1, [9, 20]] *= torch.tensor([3.3, 2.5])[:, None]
    raw, norms = RawPositions(16, "bf16", low_norm=0.5, high_norm=4.0), norms_per_head(x)
    alone, shared = (store_in_slots(raw, x, norms, group, 2, misfits) for misfits in (None, measure_fit_errors(norms, {token_norms.HEADS})))
    assert [slots.streams[POSITIONS][..., 0].tolist() for slots in (alone, shared)] == [[[6, 0], [0, 0]], [[6, 10], [10, 21]]]
    assert [(slots.wanted & ~slots.chosen).sum(2).T.tolist() for slots in (alone, shared)] == [[[0, 0]] * 2, [[1, 1], [0, 0]]]


def test_positions_and_flags_can_be_combined() -> None:
    """If a token is in both sidecars, both ways of encoding give precedence to the positions."""
    from kvpack.coding.encoding import encode

    codec = create("scalar", DIM, "k", b="2", sinks="2", raw_tokens="fp32", raw_first="3", raw_dtype="fp32")
    x = pairs()[0][0].to(torch.float32)
    for streams in (codec.encode(x), encode(codec, x, "x")):
        assert torch.equal(codec.decode(streams)[:, :, :3], x[:, :, :3])


@pytest.mark.parametrize("words", ["scalar:b=2", "octahedral:b=3", "group:b=2,g=32", "group:b=2,g=32,axis=channel", "polar:b=3"])
def test_groups_are_encoded_without_their_raw_tokens(words: str) -> None:
    """The streams equal those of the values without the raw tokens, even in a partial last group."""
    from kvpack.coding.encoding import encode

    codec_id, _, options = words.partition(":")
    codec = create(codec_id, 64, "k", raw_first="2", raw_low_norm="0.6", **dict(word.split("=") for word in options.split(",")))
    x = torch.randn(2, 2, 300, 64, generator=torch.Generator().manual_seed(0))
    x[0, :, [70, 299]] *= 0.1
    x[1, :, 140] *= 0.1
    found, plain = encode(codec, x, "x", position=0), codec.without_raw_positions
    (raw,) = codec.sidecars
    rest, own = raw.encode(x, raw.choose(norms_per_head(x), 0), codec.group_tokens)
    assert own[POSITIONS].shape[2] == 7
    for name, stream in encode(plain, rest, "x").items():
        assert torch.equal(found[name].view(torch.uint8), stream.view(torch.uint8)), name
