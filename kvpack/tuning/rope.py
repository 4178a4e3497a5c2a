"""Find the RoPE of each layer of a model by reading single tokens at several positions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from kvpack.evaluation.sizes import positions
from kvpack.evaluation.windows import prefill
from kvpack.formats.errors import InvalidParameter
from kvpack.formats.frames import MAX_FREQUENCY, PAIRINGS, Rope
from kvpack.identity.rope import same_up_to

if TYPE_CHECKING:
    from collections.abc import Sequence

_TOKENS = 8
_PLACES = (1, 5, 331)
"""Positions at which tokens are read, besides 0."""

TOLERANCE = 1e-3
"""The largest error of a key that is turned from position 0 to another, relative to the key."""


def ropes(model: Any, tokens: torch.Tensor) -> list[Rope | None]:
    """Return the RoPE of every layer, None for keys that do not depend on their position; ``tokens`` ``[1, token]`` come from a text.

    A sequence of one token attends only to itself, so that its keys at two positions differ only by RoPE. Whatever its type (default,
    linear, llama3, yarn, ...), RoPE is determined by its frequencies; for types that change with the length of a sequence, they are those
    of short sequences, up to ``Rope.longest``. Raises InvalidParameter, naming the layer, for keys that depend on positions in another way.
    """
    alone = tokens[0, :_TOKENS, None]
    limit = positions(model)
    places = [place for place in _PLACES if limit is None or place < limit]
    first = _keys(model, alone, 0)
    others = {place: _keys(model, alone, place) for place in places}
    longest = same_up_to(model.config.get_text_config())
    candidates = [rope._replace(longest=longest) for rope in _candidates(model)]
    return [
        _matching(number, keys, {place: result[number] for place, result in others.items()}, candidates)
        for number, keys in enumerate(first)
    ]


def _keys(model: Any, tokens: torch.Tensor, position: int) -> list[torch.Tensor]:
    """Return the keys of every layer, ``[sequence, kv_head, 1, dim]``, for sequences of one token at ``position``."""
    return [k for k, _ in prefill(model, tokens, torch.full_like(tokens, position))]


def _candidates(model: Any) -> list[Rope]:
    """Return the RoPE variants that the rotary modules of ``model`` may apply, without duplicates."""
    result = [buffer.float() for name, buffer in model.named_buffers() if name.endswith("inv_freq") and buffer.dim() == 1]
    # Older modules hold sines of positions in place of frequencies.
    if dims := getattr(model.config.get_text_config(), "rotary_dim", None):
        result.append(10000.0 ** -(torch.arange(0, int(dims), 2, dtype=torch.float32, device="cpu") / int(dims)))
    candidates = {tuple(float(one) for one in frequencies): None for frequencies in result}
    allowed = [one for one in candidates if all(0 <= frequency <= MAX_FREQUENCY for frequency in one)]
    return [Rope(frequencies, pairing) for frequencies in allowed for pairing in PAIRINGS]


def _matching(number: int, first: torch.Tensor, others: dict[int, torch.Tensor], candidates: Sequence[Rope]) -> Rope | None:
    if all(_near(first, keys) for keys in others.values()):
        return None
    for rope in candidates:
        fits = 2 * len(rope.frequencies) <= first.shape[3]
        if fits and all(_near(rope.rotate(first, place), keys) for place, keys in others.items()):
            return rope
    raise InvalidParameter(
        f"layer {number}: its keys depend on positions, but not through RoPE with the model's frequencies: calibrate without frames, "
        "--scope none"
    )


def _near(x: torch.Tensor, y: torch.Tensor) -> bool:
    return bool((x - y).norm() <= TOLERANCE * y.norm())
