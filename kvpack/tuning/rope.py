"""Detection of the RoPE in a model's layers, and extension of key statistics to all positions of a context.

RoPE rotates keys and queries by their position. Slow channel pairs rotate only a little within a window, so their statistics are valid only
for the window's positions. Scores depend on differences of positions, so at other positions keys and queries are the same, but rotated.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from kvpack.evaluation.models import position_limit
from kvpack.evaluation.windows import prefill
from kvpack.formats.errors import InvalidParameter
from kvpack.formats.frames import MAX_FREQUENCY, PAIRINGS, Rope
from kvpack.identity.rope import max_uniform_length

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .statistics import KeyMoments, Statistics

_TOKENS = 8
_POSITIONS = (1, 5, 331)
"""Positions other than 0 at which tokens are read."""

TOLERANCE = 1e-3
"""Maximum error of a key that is rotated from position 0 to another position, relative to the key."""

MAX_STARTS = 16
"""Maximum number of start positions over which windows are averaged."""

_ROTATED_MOMENTS = ("keys", "queries", "pages")
"""Names of the second moments of keys and queries after RoPE."""


def find_ropes(model: Any, tokens: torch.Tensor) -> list[Rope | None]:
    """Return the RoPE of each layer's keys, or None for keys that do not depend on position. ``tokens`` is ``[1, token]``.

    A sequence of one token attends only to itself, so its keys at two positions differ only by RoPE. RoPE of any type (default, linear,
    llama3, yarn, ...) is described by its frequencies. If frequencies depend on the sequence length, they are valid for up to
    ``Rope.longest`` tokens. Raises InvalidParameter, with the layer's number, if keys depend on positions in another way.
    """
    single_tokens = tokens[0, :_TOKENS, None]
    limit = position_limit(model)
    test_positions = [position for position in _POSITIONS if limit is None or position < limit]
    first = _keys_at(model, single_tokens, 0)
    others = {position: _keys_at(model, single_tokens, position) for position in test_positions}
    longest = max_uniform_length(model.config.get_text_config())
    candidates = [rope._replace(longest=longest) for rope in _rope_candidates(model)]
    return [
        _match_rope(number, keys, {position: result[number] for position, result in others.items()}, candidates)
        for number, keys in enumerate(first)
    ]


def _keys_at(model: Any, tokens: torch.Tensor, position: int) -> list[torch.Tensor]:
    """Return each layer's keys, ``[sequence, kv_head, 1, dim]``. Each token of ``tokens`` is a sequence of its own at ``position``."""
    return [k for k, _ in prefill(model, tokens, torch.full_like(tokens, position))]


def _rope_candidates(model: Any) -> list[Rope]:
    """Return all variants of RoPE that the rotary modules of ``model`` may use."""
    result = [buffer.float() for name, buffer in model.named_buffers() if name.endswith("inv_freq") and buffer.dim() == 1]
    # Older modules store sines of positions instead of frequencies.
    if dims := getattr(model.config.get_text_config(), "rotary_dim", None):
        result.append(10000.0 ** -(torch.arange(0, int(dims), 2, dtype=torch.float32, device="cpu") / int(dims)))
    candidates = {tuple(float(one) for one in frequencies): None for frequencies in result}
    allowed = [one for one in candidates if all(0 <= frequency <= MAX_FREQUENCY for frequency in one)]
    return [Rope(frequencies, pairing) for frequencies in allowed for pairing in PAIRINGS]


def _match_rope(layer_index: int, first: torch.Tensor, others: dict[int, torch.Tensor], candidates: Sequence[Rope]) -> Rope | None:
    if all(_is_close(first, keys) for keys in others.values()):
        return None
    for rope in candidates:
        fits = 2 * len(rope.frequencies) <= first.shape[3]
        if fits and all(_is_close(rope.rotate(first, position), keys) for position, keys in others.items()):
            return rope
    raise InvalidParameter(
        f"layer {layer_index}: its keys depend on positions, but not through RoPE with the model's frequencies: calibrate without frames "
        "(--scope none)"
    )


def _is_close(x: torch.Tensor, y: torch.Tensor) -> bool:
    return bool((x - y).norm() <= TOLERANCE * y.norm())


def window_positions(tokens: int, positions: int) -> list[int]:
    """Return the start positions, ascending from 0, of windows that together cover about ``positions`` positions."""
    count = min(MAX_STARTS, max(1, round(positions / tokens)))
    return [0] if count == 1 else [round(number * (positions - tokens) / (count - 1)) for number in range(count)]


def average_moments_over_positions(statistics: KeyMoments, rope: Rope | None, starts: Sequence[int]) -> KeyMoments:
    """Average a layer's moments over windows that start at the positions ``starts``. Without RoPE (None), they do not change."""
    if rope is None:
        return statistics
    rotations = _rotation_matrices(rope, statistics.keys.shape[-1], starts)
    return replace(statistics, **{name: _average_rotated(getattr(statistics, name), rotations) for name in _ROTATED_MOMENTS})


def spread_keys(statistics: Statistics, ropes: Sequence[Rope | None], starts: Sequence[int]) -> Statistics:
    """Average the statistics of keys over windows that start at the positions ``starts``. Each sample is rotated to only one of them."""
    sums, products, costs, samples = dict(statistics.sums), dict(statistics.products), dict(statistics.costs), dict(statistics.samples)
    for layer, rope in enumerate(ropes):
        name = f"{layer}.k"
        if rope is None or name not in sums:
            continue
        rotations = _rotation_matrices(rope, sums[name].shape[-1], starts)
        sums[name] = sums[name] @ rotations.mean(0)
        products[name], costs[name] = _average_rotated(products[name], rotations), _average_rotated(costs[name], rotations)
        samples[name] = [part @ rotations[number % len(rotations)].to(part.dtype) for number, part in enumerate(samples[name])]
    return replace(statistics, sums=sums, products=products, costs=costs, samples=samples)


def _rotation_matrices(rope: Rope, dim: int, starts: Sequence[int]) -> torch.Tensor:
    """Return the matrices that rotate a row of channels to each position in ``starts``, float64 ``[start, dim, dim]``."""
    # Each unit vector is its own sequence, because tokens of one sequence are at consecutive positions.
    units = torch.eye(dim, dtype=torch.float32, device="cpu")[:, None]
    return torch.stack([rope.rotate(units, start)[:, 0] for start in starts]).to(torch.float64)


def _average_rotated(moments: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
    """Return the second moments of rotated rows, averaged over ``rotations``. ``moments``, ``[..., dim, dim]``, are those before rotation.
    """
    return (rotations.mT @ moments[..., None, :, :] @ rotations).mean(-3)
