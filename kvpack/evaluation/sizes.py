"""Selection of the number, sizes and positions of windows, within the limits of a model and a text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from kvpack.formats.arguments import describe
from kvpack.formats.errors import InvalidParameter

if TYPE_CHECKING:
    from .models import Text


LONGER_TEXT = "pass a longer text or a smaller --tokens"
"""Advice at the end of error messages about a text that is too short."""


def positions(model: Any) -> int | None:
    """Return the number of positions that the model supports, or None if its configuration does not specify it."""
    config = model.config.get_text_config()
    # MPT uses another name.
    limit = getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", None)
    return None if limit is None else int(limit)


def window_tokens(requested: int | None, default: int, text: Text, max_positions: int | None) -> int:
    """Return the number of tokens in a window: ``requested``, or ``default`` reduced to the limits of the model and the text.

    Raises InvalidParameter if ``requested`` exceeds these limits.
    """
    # A window needs one id more than it has tokens, because the prediction after the last one is scored too.
    limit = min(len(text.ids) + len(text.start) - 1, max_positions or len(text.ids))
    tokens = min(default, limit) if requested is None else requested
    if not 2 <= tokens <= limit:
        raise InvalidParameter(
            f"--tokens is {tokens}, expected an integer from 2 to {limit} (limited by the model's positions and the length of {text.name})"
        )
    return tokens


def check_size(name: str, value: int, low: int, high: int, reason: str) -> None:
    """Raise InvalidParameter unless ``value`` is from ``low`` to ``high``. The message begins with ``name`` and ends with ``reason``."""
    if not low <= value <= high:
        expected = low if low == high else f"an integer from {low} to {high}"
        raise InvalidParameter(f"{name} is {describe(value)}, expected {expected} {reason}")


def window_ids(tokens: int, text: Text) -> int:
    """Return how many ids of the text a window of ``tokens`` tokens takes, including the id that follows the window."""
    return tokens + 1 - len(text.start)


def starts(ids: int, size: int, count: int, seed: int) -> list[int]:
    """Return the starts of ``count`` windows of ``size`` ids: one random position in each of ``count`` equal parts of the text."""
    generator = torch.Generator().manual_seed(seed)
    part = ids // count
    return [number * part + int(torch.randint(part - size + 1, (), generator=generator)) for number in range(count)]


def window(text: Text, start: int, size: int) -> torch.Tensor:
    """Return the token ids of a window, ``[1, token]``: the text's ``start`` ids, and ``size`` of its ``ids`` from ``start`` on."""
    return torch.tensor([[*text.start, *text.ids[start : start + size]]])
