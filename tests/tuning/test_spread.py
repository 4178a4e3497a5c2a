"""Statistics of keys over all positions of a context, from windows that begin at position 0."""

from __future__ import annotations

import torch

from kvpack.formats.frames import Rope
from kvpack.tuning.frames_fit import balancing_frames, frame_cost
from kvpack.tuning.rope import average_moments_over_positions, spread_keys, window_positions
from kvpack.tuning.statistics import KeyMoments, Statistics

ROPE = Rope((1.0, 0.1, 0.003, 0.0004), "halves")
TOKENS, DIM = 512, 8


def keys(first: int, seed: int = 1) -> torch.Tensor:
    """Return keys ``[1, 2, token, dim]`` with the same distribution before RoPE, at the positions from ``first`` on."""
    x = torch.randn(1, 2, TOKENS, DIM, generator=torch.Generator().manual_seed(seed))
    return ROPE.rotate(x * torch.tensor([4, 3, 2, 1, 1, 2, 1, 1.0]) + torch.tensor([1, 0, 2, 3, 0, 0, 1, 0.0]), first)


def moments(first: int) -> KeyMoments:
    q = keys(first, 2)[0].double()
    return KeyMoments.from_keys(keys(first), q.mT @ q, TOKENS, ROPE)


def test_starts_cover_the_positions() -> None:
    assert window_positions(2048, 2048) == window_positions(2048, 100) == [0]
    assert window_positions(2048, 8192) == [0, 2048, 4096, 6144]
    assert len(window_positions(64, 1 << 20)) == 16
    assert window_positions(64, 1 << 20)[-1] == (1 << 20) - 64


def test_spread_moments_equal_those_of_windows_at_these_starts() -> None:
    places = [0, 3000, 7000]
    found = average_moments_over_positions(moments(0), ROPE, places)
    windows = [moments(place) for place in places]
    for name in ("keys", "queries", "pages"):
        expected = sum(getattr(one, name) for one in windows) / 3
        torch.testing.assert_close(getattr(found, name), expected, rtol=1e-4, atol=1e-2)
    torch.testing.assert_close(found.keys_before_rope, windows[0].keys_before_rope)


def test_frames_from_spread_moments_work_at_far_positions() -> None:
    own = moments(0)
    found = average_moments_over_positions(own, ROPE, window_positions(TOKENS, 8192))
    far = moments(6000)
    frames = [balancing_frames(one.pages / one.tokens, one.queries / one.rows) for one in (own, found)]
    near, spread = (float(frame_cost(one, far.pages / far.tokens, far.queries / far.rows).mean()) for one in frames)
    assert spread < 0.95 * near


def test_spread_statistics_equal_those_of_windows_at_these_starts() -> None:
    def statistics(first: int) -> Statistics:
        x, g = keys(first)[0].double(), keys(first, 3)[0].double()
        return Statistics(
            "x",
            1,
            {"0.k": torch.tensor(float(TOKENS))},
            {"0.k": x.sum(1)},
            {"0.k": x.mT @ x},
            {"0.k": (g.mT @ g)[None]},
            {"0.k": [x.float()] * 2},
        )

    near, far = statistics(0), statistics(4000)
    found = spread_keys(near, [ROPE], [0, 4000])
    for own, one, other in ((getattr(s, name)["0.k"] for s in (found, near, far)) for name in ("sums", "products", "costs")):
        torch.testing.assert_close(own, (one + other) / 2, rtol=1e-4, atol=1e-2)
    torch.testing.assert_close(found.samples["0.k"], [near.samples["0.k"][0], far.samples["0.k"][0]], rtol=1e-4, atol=1e-4)
    assert spread_keys(near, [None], [0, 4000]).sums["0.k"] is near.sums["0.k"]
