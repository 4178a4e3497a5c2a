"""Tests of attention of many queries by Triton over decoded blocks, compared with fp64 attention over the decoded values.

interpreter.py describes which process runs which of these tests.
"""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch

import kvpack
from kvpack.attention import many_queries_kernels
from kvpack.cache.layer import Layer
from kvpack.cache.packed_runs import PackedRuns
from kvpack.coding import dispatch
from kvpack.coding.recipes import parse_recipe
from support.caches import random_pairs
from support.interpreter import DEVICE, INTERPRETED, needs_loaded_bounds
from support.kernel_calls import attend_by
from support.random_sides import codecs, exact_attention, random_side

TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 2e-2 if INTERPRETED else 8e-3}
"""Relative tolerance in the 2-norm for each dtype of queries. The interpreter truncates bfloat16."""

pytestmark = [needs_loaded_bounds, pytest.mark.usefixtures("uninitialized_is_poisoned")]


def check(layer: Layer, q_heads: int, q_len: int, dtype: torch.dtype = torch.float16, **mode: Any) -> None:
    """Check that the result of ``many_queries`` is within the tolerance."""
    from kvpack.kernels.attend import many_queries

    assert layer.k is not None
    q = torch.randn(layer.k.batch, q_heads, q_len, layer.k.dim, generator=torch.Generator().manual_seed(7)).to(dtype)
    expected = exact_attention(q, layer, **mode)
    there = Layer(*(side.to(DEVICE) for side in layer.sides.values()))
    assert many_queries.supports(q.to(DEVICE), there)
    logits, lengths, starts = mode.get("sink_logits"), mode.get("lengths"), mode.get("starts")
    found = attend_by(
        many_queries,
        q.to(DEVICE), there, mode.get("scale", layer.k.dim**-0.5), mode.get("causal", True), mode.get("softcap"),
        mode.get("sliding_window"), None if logits is None else torch.tensor(logits),
        None if lengths is None else torch.tensor(lengths, device=DEVICE),
        None if starts is None else torch.tensor(starts, device=DEVICE),
    )  # fmt: skip
    assert found.dtype == dtype
    error = (found.cpu().to(torch.float64) - expected).norm() / expected.norm()
    assert error < TOLERANCE[dtype], (layer, error)


def layer_of(k: str, v: str, runs: tuple[int, ...], tail: int, batch: int = 1, heads: int = 2, dims: tuple[int, int] = (64, 64)) -> Layer:
    k_codec, v_codec = codecs(k, v, dims)
    return Layer(random_side(k_codec, heads, runs, tail, 1, batch), random_side(v_codec, heads, runs, tail, 2, batch))


MODES: list[dict[str, Any]] = [
    {},
    {"causal": False},
    {"softcap": 5.0},
    {"sliding_window": 20},
    {"sliding_window": 20, "causal": False},
    {"sink_logits": [0.5, -1.0, 2.0, -torch.inf]},
    {"lengths": [100, 37]},
    {"lengths": [3, 150], "sliding_window": 9, "softcap": 8.0, "sink_logits": [0.5, 1.0, 2.0, 0.0]},
    {"lengths": [0, 150], "causal": False},
    {"starts": [140, 37]},
    {"starts": [0, 149], "sliding_window": 9, "softcap": 8.0, "sink_logits": [0.5, 1.0, 2.0, 0.0]},
    {"starts": [64, 150], "causal": False},
    {"starts": [63, 100], "lengths": [100, 64], "sliding_window": 45},
    {"scale": 0.3},
]


@pytest.mark.scenario
@pytest.mark.kernels
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_all_modes_agree_with_exact_attention(mode: dict[str, Any]) -> None:
    check(layer_of("group:b=4,g=32,rotation=hadamard", "octahedral:b=3", (64, 64), 22, batch=2), 4, 40, **mode)


BLOCKS: list[dict[str, Any]] = [{}, {"causal": False}, {"softcap": 5.0}, {"sliding_window": 70}, {"lengths": [150]}, {"starts": [70]}]


@pytest.mark.scenario
@pytest.mark.kernels
@pytest.mark.parametrize(("mode", "queries"), [(mode, 50) for mode in BLOCKS] + [(mode, 1 << 13) for mode in BLOCKS[::2]], ids=str)
def test_partial_blocks_agree_with_exact_attention(mode: dict[str, Any], queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvpack.kernels.attend import many_queries

    monkeypatch.setattr(many_queries, "SCRATCH_BYTES", 0)
    monkeypatch.setattr(many_queries, "MIN_TOKENS", 48)
    monkeypatch.setattr(many_queries, "MIN_SPLIT_TOKENS", 16)
    monkeypatch.setattr(many_queries, "MAX_QUERIES", queries)
    # Blocks begin within pages and groups of tokens; the last queries are of the tail, and of two pages.
    check(layer_of("group:b=4,g=32", "octahedral:b=3", (64, 96), 21, heads=1), 2, 130, **mode)


@pytest.mark.scenario
@pytest.mark.kernels
@pytest.mark.parametrize(
    ("k", "v"),
    [
        ("scalar:b=3,qjl=fp16", "group:b=4,outliers=3"),
        ("polar:b=3", "polar:b=3"),
        ("scalar:b=2,high=3", "raw:dtype=fp32"),
        ("raw:dtype=bf16", "quaternion:s=24,r=3,rotation=hadamard"),
        ("angle:n=48,norm=log4", "angle:n=128"),
    ],
)
def test_all_codecs_and_sidecars_agree_with_exact_attention(k: str, v: str) -> None:
    check(layer_of(k, v, (40, 40), 9), 2, 33)


@pytest.mark.kernels
@pytest.mark.parametrize(("dims", "q_len"), [((80, 96), 17), ((128, 128), 70), ((256, 64), 2), ((16, 16), 1)])
def test_all_dims_and_numbers_of_queries_agree_with_exact_attention(dims: tuple[int, int], q_len: int) -> None:
    check(layer_of("group:b=4,g=32", "group:b=4,g=32", (96,), 5, dims=dims), 4, q_len)


@pytest.mark.kernels
def test_as_many_queries_as_tokens_agree_with_exact_attention() -> None:
    check(layer_of("group:b=4,g=32", "group:b=2,g=32", (128,), 0), 2, 128)
    check(layer_of("group:b=4,g=32", "group:b=2,g=32", (), 30), 2, 30, torch.bfloat16)


@pytest.mark.scenario
@pytest.mark.kernels
@pytest.mark.parametrize(
    "recipe",
    [
        "octopus-3-scaled",
        "rotatekv-2",
        "k=group:b=2,g=32,sinks=2;v=group:b=4",
        "k=scalar:b=4,channel_scale=fp16;v=octahedral:b=3,channel_scale=fp16,channel_order=u8,block_rotation=16;tail=128",
        "kv=group:b=4,g=32,channel_scale=fp16",
    ],
)
def test_attend_uses_the_kernel_for_many_queries(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvpack.kernels.attend import attention

    monkeypatch.setattr(attention, "MAX_ROW_BLOCKS", 8)
    layer = kvpack.pack(random_pairs(1, 300, dims=(64, 64)), recipe)[0]
    q = torch.randn(1, 4, 200, 64, generator=torch.Generator().manual_seed(0)).to(torch.float16)
    expected = exact_attention(q, layer)
    monkeypatch.setenv(dispatch.VARIABLE, "triton")
    there = Layer(*(side.to(DEVICE) for side in layer.sides.values()))
    # Queries of a model: heads within tokens in memory.
    q = q.to(DEVICE).transpose(1, 2).contiguous().transpose(1, 2)
    assert many_queries_kernels(q, there) is not None
    assert many_queries_kernels(q.float(), there) is None
    found = kvpack.attend(q, there)
    assert (found.cpu().double() - expected).norm() < TOLERANCE[torch.float16] * expected.norm()


@pytest.mark.kernels
def test_enough_splits_are_launched_to_fill_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvpack.kernels import gpu
    from kvpack.kernels.attend import many_queries

    monkeypatch.setattr(gpu, "_without_device", gpu.INTERPRETER._replace(multiprocessors=4))
    cpu = torch.device("cpu")
    assert [many_queries._split_count(programs, 8192, cpu) for programs in (1, 2, 3, 8)] == [4, 2, 1, 1]
    assert [many_queries._split_count(1, tokens, cpu) for tokens in (1, 2047, 2048, 5000)] == [1, 1, 2, 4]


@pytest.mark.kernels
def test_tokens_per_block_and_splits_follow_the_device() -> None:
    from kvpack.kernels.attend import scratch

    side = layer_of("group:b=4,g=32", "group:b=4,g=32", (32,), 13, batch=2, heads=3).k
    assert side is not None
    there = side.to(DEVICE)
    block = scratch.DecodedBlock(there, scratch.decoded_frame(side), 5, 45, torch.float16)
    memory = torch.zeros(64 + block.elements, dtype=torch.float16, device=DEVICE)
    block.decode(there, None, memory, 64)
    assert not memory[:64].any()
    whole = block.tokens(memory, 64, 0, 40)
    torch.testing.assert_close(whole, side.unpack(torch.float16)[:, :, 5:].to(DEVICE), rtol=2e-3, atol=2e-3)
    assert whole.data_ptr() == block.tokens(memory, 64, 0, 39).data_ptr()
    for start, stop, splits in ((0, 40, 4), (3, 23, 5), (3, 23, 1)):
        split = block.tokens(memory, 64, start, stop, splits)
        parts = whole[:, :, start:stop].unflatten(2, (splits, -1)).transpose(1, 2).flatten(0, 1)
        assert torch.equal(split, parts)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "all"])
@pytest.mark.parametrize(("batch", "q_len"), [(1, 33), (1, 300), (2, 64), (2, 500)])
def test_the_fastest_library_is_not_always_deterministic(batch: int, q_len: int, causal: bool, dtype: torch.dtype) -> None:
    torch.use_deterministic_algorithms(False)
    layer = layer_of("octahedral:b=3", "group:b=4,g=32", (2048, 1024), 77, batch, dims=(128, 128))
    check(layer, 8, q_len, dtype, causal=causal)


@pytest.mark.cuda
@pytest.mark.parametrize("peer", ["cudnn", "flash", None])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "all"])
def test_every_library_returns_its_log_sum_exp(peer: str | None, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvpack.kernels.attend import many_queries

    torch.use_deterministic_algorithms(False)
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (torch.randn(2, heads, 192, 64, device="cuda", generator=generator).to(torch.float16) for heads in (8, 2, 2))
    monkeypatch.setattr(many_queries, "_library_name", lambda *_: peer)
    found, lse = many_queries.attend_dense(q, k, v, 0.125, causal)
    scores = q.double() @ k.double().repeat_interleave(4, 1).transpose(-1, -2) * 0.125
    if causal:
        scores = scores.masked_fill(torch.ones(192, 192, dtype=torch.bool, device="cuda").triu(1), -torch.inf)
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(found.double(), torch.softmax(scores, -1) @ v.double().repeat_interleave(4, 1), rtol=1e-2, atol=2e-3)


@pytest.mark.scenario
@pytest.mark.kernels
# Layers of the first two share what is prepared; with the others, that depends on values.
@pytest.mark.parametrize("recipe", ["k=octahedral:b=3;v=group:b=3", "bf16", "octopus-3", "fp8;raw=0", "oscar-2-u8;raw=0"])
def test_layers_with_equal_layouts_are_attended_with_their_own_values(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same holds if other layers have other pages or another tail."""
    from kvpack.kernels.attend import many_queries

    def layer(seed: int, *runs: int, tail: int = 5) -> Layer:
        torch.manual_seed(seed)
        tokens = sum(runs) + tail
        k, v = (torch.randn(1, 1, tokens, 64).to(torch.bfloat16) for _ in "kv")
        cache = kvpack.pack([(k[:, :, : runs[0]], v[:, :, : runs[0]])], f"{recipe};tail=32")
        for start, stop in pairwise([runs[0], *(runs[0] + total for total in accumulate(runs[1:])), tokens]):
            cache = cache.append([(k[:, :, start:stop], v[:, :, start:stop])])
        return cache.to(DEVICE)[0]

    monkeypatch.setattr(many_queries, "_templates", {})
    q = torch.randn(1, 2, 70, 64, generator=torch.Generator().manual_seed(7)).to(torch.bfloat16).to(DEVICE)
    layers = [layer(1, 64, 32), layer(2, 64, 32), layer(3, 96), layer(4, 64, 32, tail=6), layer(5, 64, 32)]
    found = [attend_by(many_queries, q, each, 0.125) for each in layers]
    monkeypatch.setattr(many_queries, "_calls", {})
    for each, out in zip(layers, found, strict=True):
        many_queries._templates.clear()
        assert torch.equal(attend_by(many_queries, q, each, 0.125), out)


@pytest.mark.scenario
@pytest.mark.kernels
def test_tables_of_layers_known_together_are_computed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer has its own tables, a layer with other pages has none of them, and the cache keeps no layer alive."""
    from kvpack.kernels.attend import layer_sharing, many_queries

    def layer(seed: int, tokens: int) -> Layer:
        torch.manual_seed(seed)
        k, v = (torch.randn(1, 1, tokens, 64).to(torch.bfloat16) for _ in "kv")
        return kvpack.pack([(k, v)], "k=octahedral:b=3;v=group:b=3").to(DEVICE)[0]

    def pages(of: Layer) -> tuple[Any, Any]:
        assert of.k is not None
        assert of.v is not None
        return of.k.runs, of.v.runs

    tables: list[tuple[torch.Tensor, int]] = []
    bind = layer_sharing.WorkTables.bind
    monkeypatch.setattr(layer_sharing.WorkTables, "bind", lambda self, *given: (tables.append(bind(self, *given)), tables[-1])[1])
    monkeypatch.setattr(many_queries, "_templates", {})
    layers = [layer(1, 96), layer(2, 96), layer(3, 80), layer(4, 96), layer(5, 96), layer(6, 96)]
    q = torch.randn(1, 2, 70, 64, generator=torch.Generator().manual_seed(7)).to(torch.bfloat16).to(DEVICE)
    expected = [many_queries.ManyQueriesCall(q, each, many_queries.AttendOptions(0.125))(q) for each in layers]
    # The last is not known with the others, and the fifth is gone before there are tables.
    layer_sharing.warm_up(map(pages, layers[:5]))
    gone = [weakref.ref(found) for found in pages(layers[4])]
    del layers[4], expected[4]
    gc.collect()
    assert not any(there() for there in gone)
    for each, out in zip(layers, expected, strict=True):
        assert torch.equal(attend_by(many_queries, q, each, 0.125), out)
    # Of both kinds, the first layer has what was prepared for it.
    assert [held is tables[0][0] for held, _ in tables] == [True, True, False]
    assert tables[0][1] != tables[1][1]
    # Keys of one layer, and values of another.
    mixed = Layer(layers[3].k, layers[1].v)
    out = many_queries.ManyQueriesCall(q, mixed, many_queries.AttendOptions(0.125))(q)
    assert torch.equal(attend_by(many_queries, q, mixed, 0.125), out)


@pytest.mark.scenario
@pytest.mark.kernels
def test_pages_of_a_layer_may_have_streams_in_different_orders() -> None:
    from kvpack.kernels.attend import many_queries

    def layer(seed: int) -> Layer:
        torch.manual_seed(seed)
        k, v = (torch.randn(1, 1, 160, 64).to(torch.bfloat16) for _ in "kv")
        cache = kvpack.pack([(k[:, :, :96], v[:, :, :96])], "k=octahedral:b=3;v=group:b=3")
        both = cache.append([(k[:, :, 96:], v[:, :, 96:])]).to(DEVICE)[0]
        sides = []
        for side in both.sides.values():
            first, second = side.runs
            assert len(second.streams) > 1
            sides.append(replace(side, runs=PackedRuns.from_runs([first, replace(second, streams=dict(reversed(second.streams.items())))])))
        return Layer(*sides)

    q = torch.randn(1, 2, 70, 64, generator=torch.Generator().manual_seed(7)).to(torch.bfloat16).to(DEVICE)
    for each in map(layer, (1, 2, 3)):
        expected = many_queries.ManyQueriesCall(q, each, many_queries.AttendOptions(0.125))(q)
        assert torch.equal(attend_by(many_queries, q, each, 0.125), expected)


@pytest.mark.scenario
@pytest.mark.kernels
def test_tables_of_all_layers_are_copied_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layers are those of a loaded cache, before and after their pages change. One has another number of heads."""
    from kvpack.kernels.attend import layer_sharing, many_queries

    if INTERPRETED:
        monkeypatch.setenv(dispatch.VARIABLE, "triton")
    monkeypatch.setattr(many_queries, "_templates", {})
    tables: list[torch.Tensor] = []
    bind = layer_sharing.WorkTables.bind
    monkeypatch.setattr(layer_sharing.WorkTables, "bind", lambda self, *given: (tables.append((found := bind(self, *given))[0]), found)[1])
    generator = torch.Generator().manual_seed(1)

    def values(heads: int, count: int) -> torch.Tensor:
        return torch.randn(1, heads, count, 64, generator=generator).to(torch.float16)

    heads = (2, 2, 1, 2)
    pairs = [(values(own, 160), values(own, 160)) for own in heads]
    live = kvpack.LiveCache.of(kvpack.pack(pairs, "k=octahedral:b=3;v=group:b=3").to(DEVICE))
    for count in (260, 270):
        tables.clear()
        for layer, own in enumerate(heads):
            live.update(layer, values(own, count).to(DEVICE), values(own, count).to(DEVICE))
            q = values(4, count)
            found = live.attend(layer, q.to(DEVICE)).cpu()
            held = live._layer_or_none(layer)
            assert held is not None
            with monkeypatch.context() as here:
                here.setenv(dispatch.VARIABLE, "torch")
                expected = exact_attention(q, kvpack.Cache((held.as_layer(),), "").to("cpu")[0])
            assert (found - expected).norm() < 2e-3 * expected.norm()
        # The first layer of a kind has what was prepared for it. Layers whose pages changed one by one are looked at one by one.
        assert len(tables) == 2
        assert (tables[0] is tables[1]) == (count == 260)


@pytest.mark.scenario
@pytest.mark.kernels
def test_attend_checks_one_of_the_layers_with_equal_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvpack import attention
    from kvpack.kernels.attend import many_queries

    torch.manual_seed(0)
    pairs = [[torch.randn(1, 2, 320, 64).to(torch.bfloat16) for _ in "kv"] for _ in range(2)]
    layers = list(kvpack.pack([tuple(pair) for pair in pairs], "k=octahedral:b=3;v=group:b=3").to(DEVICE))
    monkeypatch.setenv("KVPACK_KERNELS", "triton")
    monkeypatch.setattr(attention, "_checked_options", {})
    checked: list[Layer] = []
    check = attention.check_call
    monkeypatch.setattr(attention, "check_call", lambda q, layer, *options: (checked.append(layer), check(q, layer, *options))[1])
    # As many rows of queries as the kernels for few do not take.
    q = torch.randn(1, 4, 300, 64).to(torch.bfloat16).to(DEVICE)
    found = [kvpack.attend(q, layer) for layer in layers]
    assert len(checked) == 1
    for layer, out in zip(layers, found, strict=True):
        many_queries._templates.clear()
        assert torch.equal(many_queries.ManyQueriesCall(q, layer, many_queries.AttendOptions(64**-0.5))(q), out)
    with pytest.raises(kvpack.InvalidParameter):
        kvpack.attend(q[:, :3], layers[1])
    with pytest.raises(kvpack.InvalidParameter, match="the layer has only tokens"):
        kvpack.attend(q, replace(layers[1], skipped=5))
    with pytest.raises(kvpack.InvalidParameter):
        kvpack.attend(q, replace(layers[1], v=None))


@pytest.mark.scenario
@pytest.mark.kernels
@pytest.mark.parametrize(
    ("k", "v", "batch", "mode", "calls"),
    [
        ("octahedral:b=3", "group:b=3,g=32", 1, {}, 1),
        ("raw:dtype=bf16", "minifloat:element=e4m3", 1, {"scale": 0.25}, 1),
        ("octahedral:b=3", "scalar:b=3", 1, {}, 0),
        ("octahedral:b=3", "group:b=3,g=32", 2, {}, 0),
        *(("octahedral:b=3", "group:b=3,g=32", 1, mode, 0) for mode in ({"causal": False}, {"softcap": 5.0}, {"sliding_window": 20})),
        *(("octahedral:b=3", "group:b=3,g=32", 1, {name: [7]}, 0) for name in ("lengths", "starts")),
        ("octahedral:b=3", "group:b=3,g=32", 1, {"sink_logits": [0.5, 1.0, -1.0, 2.0]}, 0),
    ],
)
def test_one_call_attends_to_all_tokens_if_the_result_is_the_same(
    k: str, v: str, batch: int, mode: dict[str, Any], calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cases include short prefixes whose values are decoded to their own frame."""
    from kvpack.kernels.attend import many_queries

    counted = []
    attend = many_queries.attend_lower_right

    def attend_lower_right(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        counted.append(k.shape[2])
        if not INTERPRETED:
            return attend(q, k, v, scale)
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=True)

    monkeypatch.setattr(many_queries, "attend_lower_right", attend_lower_right)
    if INTERPRETED:
        monkeypatch.setattr(many_queries, "supports_lower_right", lambda *_: True)
    check(layer_of(k, v, (40, 30), 9, batch), 4, 17, torch.bfloat16, **mode)
    assert counted == [79] * calls
    monkeypatch.setattr(many_queries, "MAX_SINGLE_CALL_TOKENS", 78)
    monkeypatch.setattr(many_queries, "_templates", {})
    check(layer_of(k, v, (40, 30), 9, batch), 4, 17, torch.bfloat16, **mode)
    assert len(counted) == calls


OTHERS: dict[str, dict[str, Any]] = {
    "a window": {"sliding_window": 9},
    "a soft cap": {"softcap": 2.0},
    "a scale": {"scale": 0.5},
    "all tokens": {"causal": False},
    "sinks": {"sink_logits": [0.5, -1.0]},
    "lengths": {"lengths": [61]},
    "padding": {"starts": [30]},
    "fp16 queries": {"dtype": torch.float16},
    "fewer queries": {"queries": 39},
    "more query heads": {"q_heads": 4},
    "another cache": {"seed": 5},
    "an fp16 tail": {"tail_dtype": torch.float16},
    "a longer tail": {"tail": 7},
    "other pages": {"runs": (32, 32)},
    "other codes": {"recipe": "octopus-4;raw=0"},
    "another rotation": {"recipe": "k=octahedral:b=3,rotation=none;v=octahedral:b=3"},
    "more heads": {"heads": 2},
    "two sequences": {"batch": 2},
    "dropped tokens": {"skipped": 5, "sliding_window": 9},
}


@pytest.mark.scenario
@pytest.mark.kernels
@pytest.mark.parametrize("name", OTHERS)
def test_prepared_state_is_not_used_for_a_different_call(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other call runs before or after the usual one."""
    from kvpack import attention
    from kvpack.kernels.attend import many_queries

    monkeypatch.setenv("KVPACK_KERNELS", "triton")
    monkeypatch.setattr(attention, "attention_kernels", lambda *_: None)
    usual: dict[str, Any] = {
        **{"recipe": "k=octahedral:b=3;v=group:b=3", "runs": (64,), "tail": 5, "heads": 1, "batch": 1, "seed": 0, "skipped": 0},
        **{"tail_dtype": torch.bfloat16, "dtype": torch.bfloat16, "queries": 40, "q_heads": 2},
    }

    def call(given: dict[str, Any]) -> torch.Tensor:
        """Return the result of a call over a new layer."""
        own = {**usual, **given}
        sides, recipe = [], parse_recipe(own["recipe"])
        for side in "kv":
            held = random_side(
                recipe.codec(0, 1, side, 64), own["heads"], own["runs"], own["tail"], 2 * own["seed"] + (side == "v"), own["batch"]
            )
            sides.append(replace(held, tail=held.tail.to(own["tail_dtype"])).to(DEVICE))
        q = torch.randn(own["batch"], own["q_heads"], own["queries"], 64, generator=torch.Generator().manual_seed(7))
        options = {key: value for key, value in given.items() if key not in usual}
        for key in {"sink_logits", "lengths", "starts"} & options.keys():
            options[key] = torch.tensor(options[key], device=DEVICE)
        return attention.attend(q.to(own["dtype"]).to(DEVICE), Layer(*sides, skipped=own["skipped"]), **options)

    def forget() -> None:
        for kept in (attention._checked_options, attention._prepared_calls, many_queries._templates, many_queries._calls):
            kept.clear()  # type: ignore[attr-defined]

    found = []
    for first in ({}, OTHERS[name]):
        forget()
        found.append(call(first))
        found.append(call({} if first else OTHERS[name]))
    assert torch.equal(found[0], found[3])
    assert torch.equal(found[1], found[2])
