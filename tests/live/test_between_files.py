"""A live cache that is saved, loaded, cut and continued in any order holds the tokens that it was given."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

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


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_is_done_between_files_every_token_stays_where_it_is(data: st.DataObject, tmp_path: Path) -> None:
    """Values are kept exactly, and keys within the error of their codec, which is nothing for those that are raw."""
    window = data.draw(st.sampled_from([None, 40]))
    recipe = "k=group:b=8,g=32,axis=token;v=raw:dtype=fp32" + data.draw(st.sampled_from(["", ";tail=64"]))
    live = LiveCache(recipe, layers=1, sliding_windows=[window])
    k, v = (torch.zeros(2, 2, 0, 64) for _ in range(2))
    whole = True
    for seed in range(data.draw(st.integers(2, 10))):
        kind = data.draw(st.sampled_from(["update", "update", "file", "file", "unpacked file", "crop", "select", "roll", "attend", "copy"]))
        if kind == "update" or not live.tokens:
            new = tokens(data.draw(st.sampled_from([1, 7, 31, 64, 200])), seed, k.shape[0])
            live.update(0, *new)
            k, v = (torch.cat(pair, 2) for pair in zip((k, v), new, strict=True))
        elif kind.endswith("file"):
            kvpack.save(live.freeze(packed=kind == "file"), tmp_path / "file")
            live = LiveCache.of(kvpack.load(tmp_path / "file"), sliding_windows=[window])
        elif kind == "crop":
            count = data.draw(st.integers(0, min(live.held(0), 50)))
            live.crop(count)
            # A crop may cut a token group that is packed.
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
        elif live.held(0):
            live.attend(0, torch.randn(k.shape[0], 4, 1, 64), sliding_window=window)
        layer = live.layer(0)
        assert layer.k is not None
        assert layer.v is not None
        assert live.tokens == layer.seen == k.shape[2]
        assert layer.k.tokens == layer.v.tokens
        assert not whole or layer.tokens >= min(k.shape[2], k.shape[2] if window is None else window)
        mine, theirs = layer.unpack(torch.float32)
        assert torch.equal(theirs, v[:, :, layer.skipped :])
        expected, raw = k[:, :, layer.skipped :], layer.k.tail.shape[2]
        assert torch.equal(mine[:, :, mine.shape[2] - raw :], expected[:, :, expected.shape[2] - raw :])
        assert (mine - expected).norm() <= 0.02 * expected.norm()
        assert not whole or all(run % 32 == 0 for run in layer.k.merged_runs()[:-1])
