"""The number, size and positions of the windows for which a model and a text have room."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from kvpack.formats.errors import InvalidParameter

if TYPE_CHECKING:
    from .models import Text


def positions(model: Any) -> int | None:
    """Return the number of positions that the model supports; None if its configuration does not say."""
    config = model.config.get_text_config()
    # MPT names them in its own way.
    limit = getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", None)
    return None if limit is None else int(limit)


def window_tokens(asked: int | None, default: int, text: Text, most_positions: int | None) -> int:
    """Return the tokens of a window: ``asked``, or ``default`` within the limits of the model and the text. Raises InvalidParameter."""
    # One id more than the window's tokens: what follows the last of them is scored too.
    limit = min(len(text.ids) + len(text.start) - 1, most_positions or len(text.ids))
    tokens = min(default, limit) if asked is None else asked
    if not 2 <= tokens <= limit:
        raise InvalidParameter(
            f"--tokens is {tokens}, expected an integer from 2 to {limit}, as the model's positions and {text.name} allow"
        )
    return tokens


def check_size(option: str, value: int, least: int, largest: int, why: str) -> None:
    """Raise InvalidParameter, naming the ``option``, unless ``least <= value <= largest``."""
    if not least <= value <= largest:
        raise InvalidParameter(f"--{option} is {value}, expected an integer from {least} to {largest} {why}")


def window_ids(tokens: int, text: Text) -> int:
    """Return the number of ids of ``text`` in a window of ``tokens`` tokens and the next one, after the text's opening."""
    return tokens + 1 - len(text.start)


def starts(ids: int, size: int, count: int, seed: int) -> list[int]:
    """Return the start of each of ``count`` windows of ``size`` ids: a random position in each of ``count`` equal parts of the text."""
    generator = torch.Generator().manual_seed(seed)
    part = ids // count
    return [number * part + int(torch.randint(part - size + 1, (), generator=generator)) for number in range(count)]


def window(text: Text, start: int, size: int) -> torch.Tensor:
    """Return the token ids ``[1, token]`` of the text's opening and ``size`` ids from ``start``."""
    return torch.tensor([[*text.start, *text.ids[start : start + size]]])
