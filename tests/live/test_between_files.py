"""A live cache keeps the tokens that it was given, whether it is saved, loaded, cut or continued, in any order."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvpack
from kvpack import LiveCache
from support.caches import random_pairs

if TYPE_CHECKING:
    from pathlib import Path


def tokens(count: int, seed: int, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = random_pairs(1, count, dims=(64, 64), batch=batch, seed=seed)[0]
    return k.float(), v.float()


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_tokens_keep_their_positions_whatever_happens_between_files(data: st.DataObject, tmp_path: Path) -> None:
    """Values are kept exactly, and keys within the error of their codec, which is zero for raw keys."""
    window = data.draw(st.sampled_from([None, 40]))
    recipe = "k=group:b=8,g=32,axis=token;v=raw:dtype=fp32" + data.draw(st.sampled_from(["", ";tail=64"]))
    live = LiveCache(recipe, layers=1, sliding_windows=[window])
    k, v = (torch.zeros(2, 2, 0, 64) for _ in range(2))
    whole = True
    for seed in range(data.draw(st.integers(2, 10))):
        kind = data.draw(st.sampled_from(["update", "update", "file", "file", "unpacked file", "cut", "select", "roll", "attend", "copy"]))
        if kind == "update" or not live.tokens:
            new = tokens(data.draw(st.sampled_from([1, 7, 31, 64, 200])), seed, k.shape[0])
            live.update(0, *new)
            k, v = (torch.cat(pair, 2) for pair in zip((k, v), new, strict=True))
        elif kind.endswith("file"):
            kvpack.save(live.freeze(packed=kind == "file"), tmp_path / "file")
            live = LiveCache.of(kvpack.load(tmp_path / "file"), sliding_windows=[window])
        elif kind == "cut":
            count = data.draw(st.integers(0, min(live.stored_tokens(0), 50)))
            live.truncate(live.seen_tokens(0) - count)
            # A cut may cut a token group that is packed.
            whole &= not count
            k, v = k[:, :, : k.shape[2] - count], v[:, :, : v.shape[2] - count]
        elif kind == "select":
            rows = data.draw(st.lists(st.integers(0, k.shape[0] - 1), min_size=1, max_size=3))
            live.select(rows)
            k, v = k[rows], v[rows]
        elif kind == "roll":
            live.roll()
        elif kind == "copy":
            live = copy.deepcopy(live)
        elif live.stored_tokens(0):
            q = torch.randn(k.shape[0], 4, 1, 64)
            if window is not None and live.stored_tokens(0) < min(live.tokens, window):
                # A crop leaves fewer tokens than the last query sees.
                assert not whole
                with pytest.raises(kvpack.InvalidParameter, match=f"the query at token {live.tokens - 1} attends to {window} tokens"):
                    live.attend(0, q, sliding_window=window)
            else:
                live.attend(0, q, sliding_window=window)
        layer = live.layer(0)
        assert layer.k is not None
        assert layer.v is not None
        assert live.tokens == layer.seen_tokens == k.shape[2]
        assert layer.k.tokens == layer.v.tokens
        assert not whole or layer.tokens >= min(k.shape[2], k.shape[2] if window is None else window)
        mine, theirs = layer.unpack(torch.float32)
        assert torch.equal(theirs, v[:, :, layer.skipped :])
        expected, raw = k[:, :, layer.skipped :], layer.k.tail.shape[2]
        assert torch.equal(mine[:, :, mine.shape[2] - raw :], expected[:, :, expected.shape[2] - raw :])
        assert (mine - expected).norm() <= 0.02 * expected.norm()
        assert not whole or all(run % 32 == 0 for run in layer.k.merged_runs()[:-1])


def test_a_query_whose_window_was_cropped_is_refused_until_its_tokens_are_back() -> None:
    """A layer with a window of 40 holds the last 72 of 200 tokens. After 33 of these are cropped, the last query lacks one."""
    recipe = "k=group:b=8,g=32,axis=token;v=raw:dtype=fp32;tail=64"
    live = LiveCache(recipe, layers=1, sliding_windows=[40])
    k, v = tokens(200, 0, 1)
    live.update(0, k, v)
    assert live.layer(0).tokens == 72
    live.truncate(167)
    q = torch.randn(1, 4, 1, 64, generator=torch.Generator().manual_seed(0))
    held = r"the layer has only tokens \[128:167\] of its cache, but the query at token 166 attends to 40 tokens"
    with pytest.raises(kvpack.InvalidParameter, match=held):
        live.attend(0, q, sliding_window=40)
    live.update(0, k[:, :, 167:168], v[:, :, 167:168])
    held_k, held_v = (x.repeat_interleave(2, 1) for x in live.layer(0).unpack(torch.float32))
    assert torch.equal(held_v, v[:, :, 128:168].repeat_interleave(2, 1))
    expected = torch.nn.functional.scaled_dot_product_attention(q, held_k, held_v)
    torch.testing.assert_close(live.attend(0, q, sliding_window=40), expected)
