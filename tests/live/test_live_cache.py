"""A live cache keeps the tokens that it was given, whenever they are packed, and attends like an immutable cache of them."""

from __future__ import annotations

import copy
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

import kvpack
from kvpack import LiveCache
from kvpack.cache.layer import Layer
from kvpack.coding import dispatch
from kvpack.formats.errors import InvalidParameter, InvalidType, OutOfBounds
from kvpack.kernels.cpu import attend as cpu_attend
from kvpack.live.side import LiveSide
from support.caches import random_pairs
from support.random_sides import exact_attention

if TYPE_CHECKING:
    from pathlib import Path

RECIPES = [
    "octopus-3",
    "kivi-2",
    "kivi-2;tail=64",
    "kv=group:b=4,g=32,outliers=3,sinks=4,channel_scale=fp16",
    "octopus-3;raw=4,0.95,1.05",
    "raw",
    "k=raw;v=group:b=2,g=32",
]


def tokens(count: int, seed: int = 0, batch: int = 1, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = random_pairs(1, count, dims=(64, 64), batch=batch, seed=seed)[0]
    return k.to(dtype), v.to(dtype)


def queries(count: int, batch: int = 1) -> torch.Tensor:
    return torch.randn(batch, 4, count, 64, generator=torch.Generator().manual_seed(7))


def joined(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
    return [torch.cat([part[side] for part in parts], 2) for side in range(2)]


@pytest.mark.parametrize("recipe", RECIPES)
def test_given_tokens_are_stored_and_complete_windows_are_packed(recipe: str) -> None:
    live, parts = LiveCache(recipe, layers=1), []
    for seed, count in enumerate([300, 1, 1, 40, 130, *[1] * 20, 500]):
        parts.append(tokens(count, seed))
        live.update(0, *parts[-1])
        live.attend(0, queries(count))
    cache = live.freeze()
    whole = joined(parts)
    held = cache[0].k
    assert held is not None
    assert live.tokens == cache.tokens == whole[0].shape[2]
    window, newest = (64, 0) if "tail" in recipe else (128, 128)
    assert newest <= held.tail.shape[2] < newest + window
    assert held.packed_tokens % window == 0
    bound = 0.0 if recipe == "raw" else 0.8
    for found, given in zip(cache[0].unpack(torch.bfloat16), whole, strict=True):
        assert found is not None
        assert (found.float() - given.float()).norm() <= bound * given.float().norm()
        assert torch.equal(found[:, :, held.packed_tokens :], given[:, :, held.packed_tokens :])


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_pass_attends_its_own_tokens_unpacked(recipe: str) -> None:
    live = LiveCache(recipe, layers=1)
    given = tokens(300)
    live.update(0, *given)
    k, v = (x.float() for x in given)
    expected = torch.nn.functional.scaled_dot_product_attention(queries(300), k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(live.attend(0, queries(300)), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("recipe", RECIPES)
def test_steps_attend_like_the_frozen_cache(recipe: str) -> None:
    live = LiveCache.of(kvpack.pack(random_pairs(2, 200, dims=(64, 64)), recipe))
    for step in range(150):
        for layer in range(2):
            live.update(layer, *tokens(1, step, dtype=torch.float32))
        if step % 37 == 0:
            live.roll()
            found = live.attend(1, queries(1))
            torch.testing.assert_close(found, kvpack.attend(queries(1), live.freeze()[1]), rtol=1e-4, atol=1e-4)


def test_pages_are_shared_and_immutable(tmp_path: Path) -> None:
    live = LiveCache("kv=group:b=4,g=32", layers=1)
    live.update(0, *tokens(300))
    live.attend(0, queries(1))
    frozen = live.freeze()
    before = frozen.unpack(torch.float32)
    for step in range(400):
        live.update(0, *tokens(1, step))
    live.truncate(live.tokens - 200)
    live.update(0, *tokens(260, 9))
    live.roll()
    for kept, now in zip(before[0], frozen.unpack(torch.float32)[0], strict=True):
        assert torch.equal(kept, now)
    kvpack.save(frozen, tmp_path / "frozen.kvpack")
    again = LiveCache.of(kvpack.load(tmp_path / "frozen.kvpack"))
    assert again.tokens == 300
    assert torch.equal(again.attend(0, queries(1)), kvpack.attend(queries(1), frozen[0]))


@pytest.mark.parametrize("count", [0, 5, 44, 45, 200, 300])
def test_truncate_keeps_the_first_tokens(count: int) -> None:
    live = LiveCache("raw", layers=1)
    live.update(0, *tokens(300))
    live.truncate(300 - count)
    assert live.tokens == 300 - count
    live.update(0, *tokens(7, 1))
    k, v = live.freeze()[0].unpack(torch.bfloat16)
    for found, first, second in zip((k, v), tokens(300), tokens(7, 1), strict=True):
        assert torch.equal(found, torch.cat([first[:, :, : 300 - count], second], 2))


def test_truncate_beyond_the_end_keeps_all_tokens() -> None:
    live = LiveCache("raw", layers=2)
    with pytest.raises(OutOfBounds, match=r"the cache: truncate\(3\) is out of range: the layer has seen no tokens"):
        live.truncate(3)
    live.update(0, *tokens(5))
    with pytest.raises(OutOfBounds, match=r"layers\[1\]: truncate\(3\) is out of range: the layer has seen no tokens"):
        live.truncate(3, 1)
    live.truncate(0, 1)
    live.truncate(2)
    assert live.seen_tokens(0) == 2


@pytest.mark.parametrize("count", [1, 100, 300, 700])
def test_given_tensors_may_be_overwritten(count: int) -> None:
    live, given = LiveCache("raw", layers=1), tokens(count)
    buffers = [x.clone().requires_grad_() for x in given]
    live.update(0, buffers[0], buffers[1])
    for buffer in buffers:
        buffer.detach().fill_(float("nan"))
    live.attend(0, queries(1))
    for buffer, x in zip(buffers, given, strict=True):
        buffer.detach().copy_(x.flip(2))
    for found, x in zip(live.freeze()[0].unpack(torch.bfloat16), given, strict=True):
        assert torch.equal(found, x)


@pytest.mark.parametrize("count", [1, 29, 290])
def test_truncate_after_a_long_update_keeps_the_window_of_a_sliding_layer(count: int) -> None:
    live = LiveCache("raw", layers=1, sliding_windows=[20])
    parts = [tokens(seen, seed) for seed, seen in enumerate((10, 400, 1))]
    live.update(0, *parts[0])
    live.update(0, *parts[1])
    live.attend(0, queries(400), sliding_window=20)
    live.truncate(410 - count)
    live.update(0, *parts[2])
    assert live.seen_tokens(0) == 411 - count
    first = [x[:, :, : 410 - count] for x in joined(parts)]
    expected = exact_attention(queries(1), kvpack.pack([tuple(joined([first, parts[2]]))], "raw")[0], sliding_window=20)
    torch.testing.assert_close(live.attend(0, queries(1), sliding_window=20).double(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("recipe", ["raw", "kivi-2"])
@pytest.mark.parametrize(
    ("method", "change", "count"),
    [
        ("add", lambda live: live.update(0, *tokens(200, 2)), 600),
        ("add", lambda live: live.roll(), 400),
        ("keep", lambda live: live.truncate(100), 100),
        ("select", lambda live: live.select([0, 0]), 400),
    ],
)
def test_a_failed_change_of_one_side_changes_neither(
    recipe: str, method: str, change: Any, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    live, calls = LiveCache(recipe, layers=1), []
    for seed, given in enumerate((300, 100)):
        live.update(0, *tokens(given, seed))
    live.attend(0, queries(1))
    before, found = live.attend(0, queries(1)), getattr(LiveSide, method)

    def failing(*arguments: Any) -> None:
        calls.append(None)
        if len(calls) == 2:
            raise MemoryError
        found(*arguments)

    monkeypatch.setattr(LiveSide, method, failing)
    with pytest.raises(MemoryError):
        change(live)
    assert live.tokens == 400
    assert torch.equal(live.attend(0, queries(1)), before)
    change(live)
    k, v = live.freeze()[0].unpack(torch.bfloat16)
    assert k is not None
    assert v is not None
    assert k.shape == v.shape
    assert k.shape[2] == live.tokens == count


def test_batch_rows_are_selected_and_repeated() -> None:
    live = LiveCache("raw", layers=1)
    given = tokens(200, batch=3)
    live.update(0, *given)
    live.select([2, 0, 0, 1])
    found = live.freeze()[0].unpack(torch.bfloat16)
    for mine, own in zip(found, given, strict=True):
        assert mine is not None
        assert torch.equal(mine, own[[2, 0, 0, 1]])
    with pytest.raises(OutOfBounds, match="sequence 4 was requested from a batch of 4"):
        live.select([4])


@pytest.mark.parametrize("recipe", ["raw", "kivi-2", "k=group:b=2,g=32;v=raw"])
def test_a_sliding_layer_stores_little_more_than_its_window(recipe: str) -> None:
    live, parts = LiveCache(recipe, layers=1, sliding_windows=[100]), []
    for seed, count in enumerate([700, 3, *[1] * 300]):
        parts.append(tokens(count, seed))
        live.update(0, *parts[-1])
        found = live.attend(0, queries(count), sliding_window=100)
    layer = live.freeze()[0]
    assert layer.seen_tokens == 1003
    assert 100 <= layer.tokens <= 100 + 2 * 128
    k, v = (x[:, :, -100:].float() for x in joined(parts))
    if recipe == "raw":
        expected = torch.nn.functional.scaled_dot_product_attention(queries(1), k, v, enable_gqa=True)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_sides_with_different_tails_continue_together() -> None:
    """A file may contain raw keys of a partial group next to values that are all packed."""
    cache = kvpack.pack(random_pairs(1, 64, dims=(64, 64)), "k=group:b=4,g=32,axis=token;v=group:b=4,g=32,axis=channel")
    cache = cache.append([tokens(20, 3, dtype=torch.float32)])
    assert cache[0].k is not None
    assert cache[0].v is not None
    assert (cache[0].k.tail.shape[2], cache[0].v.tail.shape[2]) == (20, 0)
    live = LiveCache.of(cache)
    live.update(0, *tokens(1, 5, dtype=torch.float32))
    assert live.tokens == 85
    frozen = live.freeze()
    assert frozen.tokens == 85
    q = queries(1)
    assert (live.attend(0, q) - exact_attention(q, frozen[0])).norm() < 1e-3


MEANS = "k=octahedral:b=2,mean=8,norm=log8;v=scalar:b=4,norm=log8;tail=8"
UNEVEN = ["kivi-2", "oscar-2", "k=group:b=4,g=32,axis=token;v=group:b=4,g=32,axis=channel", "k=raw;v=group:b=2,g=64,axis=channel"]
"""Recipes that encode keys and values in groups of different numbers of tokens."""


@pytest.mark.parametrize("recipe", [*UNEVEN, "octopus-3", "kivi-2;tail=64"])
def test_an_unchanged_cache_freezes_to_the_original(recipe: str) -> None:
    cache = kvpack.pack(random_pairs(2, 64, dims=(64, 64)), recipe).append([tokens(57, 1), tokens(57, 2)])
    for packed in (False, True):
        for mine, given in zip(LiveCache.of(cache).freeze(packed=packed), cache, strict=True):
            assert mine is given


@pytest.mark.scenario
@pytest.mark.parametrize("recipe", [*UNEVEN, "octopus-3", "kivi-2;tail=64"])
@pytest.mark.parametrize("step", [1, 7, 33])
def test_every_turn_ends_with_complete_groups(recipe: str, step: int, tmp_path: Path) -> None:
    parts = [tokens(step, seed) for seed in range(-(-150 // step))]
    path = tmp_path / "turn.kvpack"
    first = LiveCache(recipe, layers=1)
    first.update(0, *tokens(89, 1000))
    kvpack.save(first.freeze(packed=True), path)
    for part in parts:
        turn = LiveCache.of(kvpack.load(path))
        turn.update(0, *part)
        kvpack.save(turn.freeze(packed=True), path)
    turns = kvpack.load(path)
    once = LiveCache(recipe, layers=1)
    once.update(0, *joined([tokens(89, 1000), *parts]))
    expected = once.freeze(packed=True)
    assert turns.nbytes <= 1.02 * expected.nbytes
    for name, side in turns[0].sides.items():
        assert side.tail.shape[2] == expected[0].sides[name].tail.shape[2]
        group = side.codec.group_tokens
        assert all(run % group == 0 for run in side.merged_runs())


@pytest.mark.parametrize("recipe", UNEVEN)
@pytest.mark.parametrize("change", ["nothing", "cut into the tail", "cut into pages", "select", "long update", "reset", "copy", "fail"])
def test_raw_tokens_of_one_side_stay_exact_until_their_group_is_complete(recipe: str, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = kvpack.pack(random_pairs(1, 96, dims=(64, 64), batch=2), recipe).append([tokens(25, 3, batch=2, dtype=torch.float32)])
    given = [x.unpack(torch.float32) for x in cache[0].sides.values()]
    live = LiveCache.of(cache)
    more = tokens(1 if change != "long update" else 700, 4, batch=2, dtype=torch.float32)
    rows, first = [0, 1], 121
    live.update(0, *more)
    if change == "cut into the tail":
        first = 111
        live.truncate(111)
        more = [x[:, :, :0] for x in more]
    elif change == "cut into pages":
        first = 64
        live.truncate(64)
        more = [x[:, :, :0] for x in more]
    elif change == "select":
        rows = [1, 1, 0]
        live.select(rows)
    elif change == "reset":
        first = 0
        live.reset()
        live.update(0, *more)
    elif change == "copy":
        live = copy.deepcopy(live)
    elif change == "fail":

        def refuse(*_: Any) -> Any:
            raise MemoryError

        before = live.tokens
        live.update(0, *tokens(700, 5, batch=2, dtype=torch.float32))
        with monkeypatch.context() as patched:
            patched.setattr(LiveSide, "add", refuse)
            with pytest.raises(MemoryError):
                live.roll()
        live.truncate(before)
    found = live.freeze()[0]
    for name, own, new in zip("kv", given, more, strict=True):
        side = found.sides[name]
        expected = torch.cat([own[:, :, :first], new], 2)[rows]
        assert side.tokens == expected.shape[2] == found.tokens
        raw = side.tail.shape[2]
        # Everything that is still raw is as it was given, and what was packed before has the codes that it had.
        assert torch.equal(side.tail, expected[:, :, side.tokens - raw :])
        held = min(cache[0].sides[name].packed_tokens, first)
        assert torch.equal(side.unpack(torch.float32)[:, :, :held], expected[:, :, :held])
        if change not in ("long update", "reset"):
            assert raw == side.tokens - held
    q = queries(1, len(rows))
    torch.testing.assert_close(live.attend(0, q), kvpack.attend(q, live.freeze()[0]), rtol=1e-4, atol=1e-4)


def test_sides_end_at_the_same_token_once_both_complete_their_groups() -> None:
    cache = kvpack.pack(random_pairs(1, 96, dims=(64, 64)), "kivi-2;raw=0").append([tokens(25, 3)])
    live = LiveCache.of(cache)
    for step in range(8):
        assert live.is_uneven
        assert live.room == 0
        live.update(0, *tokens(1, step))
    assert not live.is_uneven
    assert [(side.packed_tokens, side.tail.shape[2]) for side in live.freeze()[0].sides.values()] == [(128, 1), (128, 1)]


def test_sides_that_never_end_at_the_same_token_lose_no_raw_token() -> None:
    """After a cut inside a group, groups of keys and values that have the same size end at different tokens."""
    cache = kvpack.pack(random_pairs(1, 96, dims=(64, 64)), "kv=group:b=4,g=32,axis=token")
    k, v = cache[0].k, cache[0].v
    assert k is not None
    assert v is not None
    apart = replace(cache, layers=(Layer(k.prefix(90), v.prefix(64).append(tokens(26, 1)[1].float())),))
    live = LiveCache.of(apart)
    for step in range(400):
        live.update(0, *tokens(1, step, dtype=torch.float32))
    found = live.freeze(packed=True)[0]
    assert found.tokens == 490
    assert found.k is not None
    assert found.v is not None
    assert [side.tail.shape[2] for side in (found.k, found.v)] == [400 % 32, (26 + 400) % 32]
    assert found.v.merged_runs() == (480,)


def test_a_wider_dtype_is_stored_exactly() -> None:
    live = LiveCache("octopus-3", layers=1)
    live.update(0, *tokens(3))
    wide = tokens(2, 1, dtype=torch.float32)
    live.update(0, *wide)
    k, _ = live.freeze()[0].unpack(torch.float32)
    assert k is not None
    assert torch.equal(k[:, :, 3:], wide[0])


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_copy_continues_independently(copied: Any) -> None:
    live = LiveCache("kivi-2", layers=1)
    live.update(0, *tokens(200))
    other = copied(live)
    other.update(0, *tokens(1, 1))
    assert (live.tokens, other.tokens) == (200, 201)


def test_moving_keeps_everything_that_the_cache_knows() -> None:
    """Layers without tokens need the basis, too."""
    live = LiveCache("kivi-2", layers=2, sliding_windows=[None, 4])
    live.keep_past(1)
    live.update(0, *tokens(3))
    live.update(1, *tokens(3))
    moved = live.to("cpu")
    for later in range(3):
        moved.update(1, *tokens(4, later))
    moved.truncate(3, 1)
    assert moved.stored_tokens(1) == 3
    assert moved._recipe is live._recipe


@pytest.mark.parametrize("layer", [-1, 2])
@pytest.mark.parametrize("call", ["seen_tokens", "stored_tokens", "batch", "shapes", "keep_past", "layer", "reset"])
def test_a_missing_layer_is_named(call: str, layer: int) -> None:
    live = LiveCache("kivi-2", layers=2)
    live.update(0, *tokens(3))
    with pytest.raises(OutOfBounds, match=f"layer {layer} is out of range: the cache has 2 layers"):
        getattr(live, call)(layer)
    with pytest.raises(OutOfBounds, match=f"layer {layer} is out of range"):
        live.attend(layer, queries(1))
    with pytest.raises(OutOfBounds, match=f"layer {layer} is out of range"):
        live.truncate(1, layer)


def test_invalid_updates_are_refused_without_losing_anything() -> None:
    live = LiveCache("kivi-2", layers=2)
    k, v = tokens(150)
    live.update(0, k, v)
    live.update(1, k, v)
    bad = k[:, :, :1].clone()
    bad[0, 0, 0, 3] = math.nan
    refused: list[tuple[type[Exception], str, Any]] = [
        (OutOfBounds, "layer 2 is out of range: the cache has 2 layers", lambda: live.update(2, k, v)),
        (InvalidParameter, r"layers\[0\].k has shape .*, expected .* to continue the cache", lambda: live.update(0, k[..., :32], v)),
        (InvalidParameter, "pass the same number of tokens for keys and values", lambda: live.update(0, k, v[:, :, 1:])),
        (InvalidParameter, "the layer has v, but None was passed", lambda: live.update(0, k, None)),
        (InvalidType, r"layers\[0\].k has dtype torch.float64", lambda: live.update(0, k.double(), v.double())),
        (
            InvalidParameter,
            r"layers\[0\].k: the value at batch 0, head 0, token 150, channel 3 is nan",
            lambda: live.update(0, bad, v[:, :, :1]),
        ),
        (OutOfBounds, r"layers\[0\]: truncate\(151\) is out of range: the layer holds tokens \[0:150\]", lambda: live.truncate(151)),
        (InvalidParameter, "tokens is 0.5, expected an integer", lambda: live.truncate(0.5)),  # type: ignore[arg-type]
        (InvalidParameter, "q has shape", lambda: live.attend(0, queries(1)[..., :32])),
        (InvalidParameter, "has 1 items, but the cache has 2 layers", lambda: LiveCache("raw", layers=2, sliding_windows=[4])),
        (InvalidParameter, "layers is 0", lambda: LiveCache("raw", layers=0)),
        (OutOfBounds, "layer 0 contains no tokens: call update before attend", lambda: LiveCache("raw", layers=1).attend(0, queries(1))),
    ]
    for kind, text, call in refused:
        with pytest.raises(kind, match=text):
            call()
    assert live.freeze().tokens == 150
    live.update(0, k[:, :, :1], v[:, :, :1])
    with pytest.raises(InvalidParameter, match=r"layers\[1\] ends at position 150"):
        live.freeze()


@pytest.mark.scenario
@pytest.mark.kernels
@pytest.mark.parametrize(("recipe", "batch"), [("kv=group:b=4,g=8;tail=8", 1), ("k=octahedral:b=2;v=scalar:b=4;tail=4", 2), (MEANS, 1)])
def test_steps_only_run_kernels(recipe: str, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions are on the device, and rolling the window changes work tables, but no launch."""
    from kvpack.coding import dispatch
    from support.interpreter import DEVICE, INTERPRETED

    if INTERPRETED:
        monkeypatch.setenv(dispatch.VARIABLE, "triton")
    live = LiveCache(recipe, layers=1)
    generator = torch.Generator().manual_seed(1)

    def values(heads: int, count: int) -> torch.Tensor:
        return torch.randn(batch, heads, count, 16, generator=generator)

    live.update(0, values(2, 17).to(DEVICE), values(2, 17).to(DEVICE))
    live.attend(0, values(4, 17).to(DEVICE))
    changed = []
    for step in range(8):
        live.update(0, values(2, 1).to(DEVICE), values(2, 1).to(DEVICE))
        q = values(4, 1)
        found = live.attend(0, q.to(DEVICE)).cpu()
        expected = exact_attention(q, kvpack.Cache((live.layer(0),), recipe).to("cpu")[0])
        assert (found - expected).norm() < 2e-3 * expected.norm()
        if step in (5, 7):
            changed.append(live.roll())
    assert live._steps[0] is not None
    assert changed[-1] is False
    bad = torch.full((batch, 2, 1, 16), math.inf, device=DEVICE)
    live.update(0, bad, bad)
    with pytest.raises(InvalidParameter, match=r"layers\[0\]: a value added since the last roll is not finite"):
        live.roll()


def sliding(recipe: str, batch: int, monkeypatch: pytest.MonkeyPatch) -> tuple[LiveCache, list[bool], list[bool]]:
    """Run steps by kernels on a live cache with a window of 40.

    Returns the cache, whether each attending step ran only kernels, and the results of ``roll``.
    """
    from kvpack.coding import dispatch
    from kvpack.live.steps import TritonSteps
    from support.interpreter import DEVICE, INTERPRETED

    if INTERPRETED:
        monkeypatch.setenv(dispatch.VARIABLE, "triton")
    by_steps: list[bool] = []
    attend = TritonSteps.attend

    def watched(*given: Any, **options: Any) -> Any:
        found = attend(*given, **options)
        by_steps.append(found is not None)
        return found

    monkeypatch.setattr(TritonSteps, "attend", watched)
    live, generator, changed = LiveCache(recipe, layers=1, sliding_windows=[40]), torch.Generator().manual_seed(1), []
    parts = []
    starts = torch.tensor([0, 60, 120][:batch], dtype=torch.int32)
    for step, count in enumerate([90, *[1] * 18, 2, 1, 3, *[1] * 24]):
        parts.append([torch.randn(batch, 1, count, 16, generator=generator) for _ in "kv"])
        live.update(0, *(x.to(DEVICE) for x in parts[-1]))
        if step % 9 == 4:
            changed.append(live.roll())
        if count == 1 and step % 4:
            continue
        q = torch.randn(batch, 2, count, 16, generator=generator)
        given = starts.clamp(max=live.tokens) if batch > 1 else None
        found = live.attend(0, q.to(DEVICE), sliding_window=40, starts=None if given is None else given.to(DEVICE)).cpu()
        mode = {} if given is None else {"starts": given.tolist()}
        if recipe.startswith("fp32"):
            expected = exact_attention(q, kvpack.pack([tuple(joined(parts))], "raw")[0], sliding_window=40, **mode)
            assert (found - expected).norm() <= 2e-3 * expected.norm()
        elif count == 1:
            layer = live.layer(0)
            held = kvpack.Cache((Layer(layer.k, layer.v),), "").to("cpu")[0]
            if given is not None:
                mode["starts"] = (given - layer.skipped).clamp(min=0).tolist()
            with monkeypatch.context() as patch:
                # Threads decode it, and the interpreter takes one.
                patch.setenv(dispatch.VARIABLE, "torch")
                expected = exact_attention(q, held, sliding_window=40, **mode)
            assert (found - expected).norm() <= 2e-3 * expected.norm()
        assert 40 <= live.stored_tokens(0) <= 40 + 3 * 16 or step < 1
    assert live.seen_tokens(0) == 138
    return live, by_steps, changed


@pytest.mark.scenario
@pytest.mark.kernels
@pytest.mark.parametrize(
    ("recipe", "batch"),
    [("fp32;tail=16", 1), ("k=octahedral:b=2;v=scalar:b=4;tail=16", 3), ("kv=group:b=4,g=8,axis=token;tail=16", 1)],
)
def test_steps_of_a_sliding_layer_only_run_kernels(recipe: str, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages are added and dropped, but launches stay the same: only the work tables are rewritten."""
    _, by_steps, changed = sliding(recipe, batch, monkeypatch)
    assert by_steps == [True] * 13
    # Only those of the first pages, and of tables with room for more of them, are new.
    assert not any(changed[3:])


@pytest.mark.scenario
@pytest.mark.kernels
def test_steps_start_at_each_sequences_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding ends in the pages, at the raw tail, or covers all tokens, for one query and for several."""
    from kvpack.coding import dispatch
    from kvpack.live.steps import TritonSteps
    from support.interpreter import DEVICE, INTERPRETED

    if INTERPRETED:
        monkeypatch.setenv(dispatch.VARIABLE, "triton")
    found_by_steps = []
    attend = TritonSteps.attend
    monkeypatch.setattr(
        TritonSteps, "attend", lambda *given, **options: found_by_steps.append(attend(*given, **options)) or found_by_steps[-1]
    )
    live = LiveCache("k=octahedral:b=2;v=scalar:b=4;tail=8", layers=1)
    live.update(0, *(torch.randn(4, 2, 20, 16, generator=torch.Generator().manual_seed(0)).to(DEVICE) for _ in "kv"))
    live.roll()
    for count in (1, 3, 1):
        starts = torch.tensor([3, 0, min(21, live.tokens + count), live.tokens + count], dtype=torch.int32, device=DEVICE)
        live.update(0, *(torch.randn(4, 2, count, 16, generator=torch.Generator().manual_seed(count)).to(DEVICE) for _ in "kv"))
        q = torch.randn(4, 4, count, 16, generator=torch.Generator().manual_seed(100 + count))
        found = live.attend(0, q.to(DEVICE), starts=starts).cpu()
        layer = kvpack.Cache((live.layer(0),), "").to("cpu")[0]
        expected = exact_attention(q, layer, starts=starts.tolist())
        assert (found - expected).norm() < 2e-3 * expected.norm()
        assert not found[3].any()
        listed = live.attend(0, q.to(DEVICE), starts=starts.tolist()).cpu()
        torch.testing.assert_close(listed, found, rtol=2e-3, atol=2e-3)
    # Those of a list are not read on the device.
    assert [one is not None for one in found_by_steps] == [True, False] * 3


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("kernels", ["", "torch"], ids=["C kernels, if built", "torch"])
def test_left_padded_rows_are_attended_alike(kernels: str, window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caches include a sliding layer that has dropped some padding, and reordered rows."""
    monkeypatch.setenv("KVPACK_KERNELS", kernels)
    live, parts = LiveCache("raw", layers=1, sliding_windows=[window]), []
    starts = torch.tensor([0, 120, 349])
    for seed, count in enumerate([300, *[1] * 400]):
        parts.append(tokens(count, seed, batch=3, dtype=torch.float32))
        live.update(0, *parts[-1])
        if count > 1 or seed % 49 == 0:
            given = starts.clamp(max=live.tokens)
            found = live.attend(0, queries(count, 3), sliding_window=window, starts=given)
            k, v = joined(parts)
            held = kvpack.pack([(k, v)], "raw")[0]
            expected = exact_attention(queries(count, 3), held, starts=given.tolist(), **({"sliding_window": window} if window else {}))
            torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)
    assert (live.stored_tokens(0) < live.seen_tokens(0)) == (window is not None)
    live.select([2, 0])
    once_more = live.attend(0, queries(1, 3)[[2, 0]], sliding_window=window, starts=starts[[2, 0]])
    before = exact_attention(queries(1, 3), kvpack.pack([tuple(joined(parts))], "raw")[0], starts=starts.tolist(), sliding_window=window)
    torch.testing.assert_close(once_more.double(), before[[2, 0]], rtol=1e-4, atol=1e-4)


@pytest.mark.cuda
def test_a_captured_step_is_replayed_across_windows() -> None:
    live = LiveCache.of(kvpack.pack(random_pairs(1, 4096, dims=(128, 128)), "octopus-3").to("cuda"))
    k, v = (torch.zeros(1, 2, 1, 128, device="cuda") for _ in "kv")
    q = torch.randn(1, 4, 1, 128, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            live.update(0, k, v)
            live.attend(0, q)
    torch.cuda.current_stream().wait_stream(stream)

    def captured() -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            live.update(0, k, v)
            out = live.attend(0, q)
        return graph, out

    graph, out = captured()
    given = []
    for step in range(300):
        k.copy_(torch.randn(k.shape, generator=torch.Generator().manual_seed(step)))
        v.copy_(torch.randn(v.shape, generator=torch.Generator().manual_seed(1000 + step)))
        given.append((k.clone(), v.clone()))
        graph.replay()
        if step % 100 == 99:
            expected = kvpack.attend(q, live.layer(0))
            assert (out - expected).norm() < 2e-3 * expected.norm()
            if live.roll():
                graph, out = captured()
    assert live.tokens == 4096 + 3 + 300
    tail = live.freeze()[0].k
    assert tail is not None
    count = tail.tail.shape[2]
    assert torch.equal(tail.tail, torch.cat([pair[0] for pair in given[-count:]], 2))


@pytest.mark.cuda
@pytest.mark.parametrize("starts", [None, [100, 4200]], ids=["without padding", "with padding"])
@pytest.mark.parametrize("recipe", ["octopus-3", "kivi-2", "oscar-2", "bf16"])
def test_a_captured_step_of_a_sliding_layer_is_replayed_across_windows(recipe: str, starts: list[int] | None) -> None:
    """Tokens leave the window within a graph, and pages leave the layer between replays, yet a graph attends to the current tokens."""
    window = 1024
    live = LiveCache(recipe, layers=1, sliding_windows=[window])
    given = [[x.to("cuda", torch.bfloat16) for x in random_pairs(1, 4096, dims=(128, 128), batch=2)[0]]]
    live.update(0, *given[0])
    from_token = None if starts is None else torch.tensor(starts, dtype=torch.int32, device="cuda")
    live.attend(0, torch.randn(2, 4, 4096, 128, device="cuda", dtype=torch.bfloat16), sliding_window=window, starts=from_token)
    live.roll()
    k, v = (torch.zeros(2, 2, 1, 128, device="cuda", dtype=torch.bfloat16) for _ in "kv")
    q = torch.randn(2, 4, 1, 128, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            live.update(0, k, v)
            live.attend(0, q, sliding_window=window, starts=from_token)
            given.append([k.clone(), v.clone()])
    torch.cuda.current_stream().wait_stream(stream)

    def captured() -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            live.update(0, k, v)
            out = live.attend(0, q, sliding_window=window, starts=from_token)
        return graph, out

    graph, out = captured()
    captures = 0
    for step in range(2000):
        k.copy_(torch.randn(k.shape, generator=torch.Generator().manual_seed(step)))
        v.copy_(torch.randn(v.shape, generator=torch.Generator().manual_seed(5000 + step)))
        given.append([k.clone(), v.clone()])
        graph.replay()
        if step % 100 == 99:
            layer = live.layer(0)
            # A sequence that has not begun yet begins after the last token.
            begun = {} if starts is None else {"starts": [min(start, live.tokens) for start in starts]}
            expected = kvpack.attend(q, layer, sliding_window=window, **begun)
            assert (out - expected).norm() <= 2e-3 * expected.norm()
            if recipe == "bf16":
                whole = kvpack.pack([tuple(torch.cat([pair[side] for pair in given], 2).cpu() for side in range(2))], "bf16")[0]
                plain = exact_attention(q.cpu(), whole, sliding_window=window, **begun)
                assert (out.cpu() - plain).norm() <= 2e-3 * plain.norm()
            assert window <= live.stored_tokens(0) <= window + 3 * 128
            if live.roll():
                graph, out = captured()
                captures += 1
    assert live.seen_tokens(0) == 4096 + 3 + 2000
    # Launches stay once the pages of the prompt are gone.
    assert captures <= 4


@pytest.mark.parametrize("recipe", ["octopus-3", "kivi-2;tail=64", "raw"])
def test_tokens_may_enter_and_leave_inference_mode(recipe: str) -> None:
    live = LiveCache(recipe, layers=1)
    for step in range(200):
        with torch.inference_mode(step % 3 == 0):
            live.update(0, *tokens(1, step))
            live.attend(0, queries(1))
            if step == 99:
                live.select([0, 0])
                live.select([1])
    live.update(0, *tokens(1, 200, dtype=torch.float32))
    assert live.freeze().tokens == 201


def test_steps_on_the_cpu_prepare_a_layer_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layer is prepared again only if its pages or the tail's buffers change. Results always equal those of ``kvpack.attend``."""
    monkeypatch.delenv(dispatch.VARIABLE, raising=False)
    made = []
    original = cpu_attend.PreparedAttention.create
    monkeypatch.setattr(cpu_attend.PreparedAttention, "create", staticmethod(lambda k, v: made.append(k) or original(k, v)))
    generator = torch.Generator().manual_seed(0)
    live = LiveCache("octopus-3", layers=1)

    def step(tokens: int, dtype: torch.dtype = torch.float16) -> int:
        k, v = (torch.randn(2, 2, tokens, 64, generator=generator).to(dtype) for _ in range(2))
        q, starts = torch.randn(2, 4, tokens, 64, generator=generator), torch.tensor([1, 0])
        live.update(0, k, v)
        found, count = live.attend(0, q, starts=starts, softcap=9.0), len(made)
        # More than the tail has room for is attended as it was given.
        assert tokens == 300 or torch.equal(found, kvpack.attend(q, live.layer(0), starts=starts, softcap=9.0))
        del made[count:]
        return count

    step(5)
    first = step(1)
    assert [step(1) for _ in range(20)] == [first] * 20
    live.truncate(live.tokens - 3)
    assert step(1) == first
    live.select([1, 0])
    assert step(1) == first + 1
    # A wider dtype widens the buffers.
    assert step(1, torch.float32) == first + 2
    step(300)
    assert step(1) > first + 2


def test_steps_on_the_cpu_reuse_a_layer_until_a_window_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(dispatch.VARIABLE, raising=False)
    live, step = LiveCache("octopus-3", layers=1), tokens(1)
    live.update(0, *tokens(200))
    live.attend(0, queries(200))
    # 128 tokens stay raw, and 128 are encoded together.
    assert [live.try_update(0, *step) for _ in range(57)] == [*range(201, 257), None]
    live.update(0, *step)
    assert live.try_update(0, *step) == 258


def test_threads_may_share_a_live_cache() -> None:
    """Every update is added as a whole, and every ``attend`` sees whole updates."""
    live, count = kvpack.LiveCache("raw", layers=1), 300
    given = torch.arange(2 * count, dtype=torch.float32).repeat_interleave(64).view(2 * count, 1, 1, 1, 64) + 1
    live.update(0, given[0] * 0, given[0] * 0)

    def add(first: int) -> None:
        for token in given[first : first + count]:
            live.update(0, token * 0, token)
            out = live.attend(0, torch.zeros(1, 1, 1, 64))
            assert bool((out == out[..., :1]).all())

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(add, (0, count)))
    _, v = live.freeze()[0].unpack(torch.float32)
    assert sorted(v[0, 0, 1:, 0].tolist()) == given[:, 0, 0, 0, 0].tolist()
