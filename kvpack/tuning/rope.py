"""Detection of the RoPE of each layer of a model, by reading single tokens at several positions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from kvpack.evaluation.sizes import positions
from kvpack.evaluation.windows import prefill
from kvpack.formats.errors import InvalidParameter
from kvpack.formats.frames import MAX_FREQUENCY, PAIRINGS, Rope
from kvpack.identity.rope import max_uniform_length

if TYPE_CHECKING:
    from collections.abc import Sequence

_TOKENS = 8
_POSITIONS = (1, 5, 331)
"""Positions other than 0 at which tokens are read."""

TOLERANCE = 1e-3
"""Maximum error of a key that is rotated from position 0 to another position, relative to the key."""


def find_ropes(model: Any, tokens: torch.Tensor) -> list[Rope | None]:
    """Return the RoPE of each layer, or None for keys that do not depend on their position. ``tokens`` are ``[1, token]`` from a text.

    A sequence of one token attends only to itself, so its keys at two positions differ only by RoPE. RoPE of any type (default, linear,
    llama3, yarn, ...) is described by its frequencies. If these depend on the length of the sequence, they are those of sequences of up to
    ``Rope.longest`` tokens. Raises InvalidParameter, naming the layer, for keys that depend on positions in another way.
    """
    single_tokens = tokens[0, :_TOKENS, None]
    limit = positions(model)
    test_positions = [position for position in _POSITIONS if limit is None or position < limit]
    first = _keys(model, single_tokens, 0)
    others = {position: _keys(model, single_tokens, position) for position in test_positions}
    longest = max_uniform_length(model.config.get_text_config())
    candidates = [rope._replace(longest=longest) for rope in _candidates(model)]
    return [
        _match_rope(number, keys, {position: result[number] for position, result in others.items()}, candidates)
        for number, keys in enumerate(first)
    ]


def _keys(model: Any, tokens: torch.Tensor, position: int) -> list[torch.Tensor]:
    """Return each layer's keys ``[sequence, kv_head, 1, dim]`` for sequences of one token at ``position``."""
    return [k for k, _ in prefill(model, tokens, torch.full_like(tokens, position))]


def _candidates(model: Any) -> list[Rope]:
    """Return the RoPE variants that the rotary modules of ``model`` may apply, without duplicates."""
    result = [buffer.float() for name, buffer in model.named_buffers() if name.endswith("inv_freq") and buffer.dim() == 1]
    # Older modules store sines of positions instead of frequencies.
    if dims := getattr(model.config.get_text_config(), "rotary_dim", None):
        result.append(10000.0 ** -(torch.arange(0, int(dims), 2, dtype=torch.float32, device="cpu") / int(dims)))
    candidates = {tuple(float(one) for one in frequencies): None for frequencies in result}
    allowed = [one for one in candidates if all(0 <= frequency <= MAX_FREQUENCY for frequency in one)]
    return [Rope(frequencies, pairing) for frequencies in allowed for pairing in PAIRINGS]


def _match_rope(number: int, first: torch.Tensor, others: dict[int, torch.Tensor], candidates: Sequence[Rope]) -> Rope | None:
    if all(_is_close(first, keys) for keys in others.values()):
        return None
    for rope in candidates:
        fits = 2 * len(rope.frequencies) <= first.shape[3]
        if fits and all(_is_close(rope.rotate(first, position), keys) for position, keys in others.items()):
            return rope
    raise InvalidParameter(
        f"layer {number}: its keys depend on positions, but not through RoPE with the model's frequencies: calibrate without frames "
        "(--scope none)"
    )


def _is_close(x: torch.Tensor, y: torch.Tensor) -> bool:
    return bool((x - y).norm() <= TOLERANCE * y.norm())
