"""The settings of a rotary embedding as an identity's text, and the length up to which they are the same for every sequence."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from .described import json_text, plain, text_digest

if TYPE_CHECKING:
    from collections.abc import Iterator

_LONGEST_BYTES = 1024
"""Bytes of the longest settings that are kept as text: every entry's header has them."""
_LIMIT = "same_up_to"
"""The setting that is added where longer sequences have other frequencies."""


def rope_text(config: Any) -> str:
    """The settings of a transformers configuration as a JSON map. Raises InvalidParameter."""
    settings = getattr(config, "rope_parameters", None) or {
        key: getattr(config, key) for key in ("rope_theta", "rope_scaling", "partial_rotary_factor") if hasattr(config, key)
    }
    settings = plain("config.rope_parameters", settings)
    if len(json_text(settings)) > _LONGEST_BYTES:
        settings = {"digest": text_digest(settings), "rope_type": settings.get("rope_type")}
    limits = [limit for rope in _maps(getattr(config, "rope_parameters", None)) if (limit := _limit(config, rope)) is not None]
    return json_text({**settings, _LIMIT: min(limits)} if limits else settings)


def longest_sequence(rope: str) -> int | None:
    """The tokens of the longest sequence in which ``rope``, of an identity, has the frequencies of every shorter one; None: any."""
    try:
        settings = json.loads(rope)
    except ValueError:
        return None
    limit = settings.get(_LIMIT) if isinstance(settings, dict) else None
    return limit if isinstance(limit, int) else None


def _maps(settings: Any) -> Iterator[dict[str, Any]]:
    """The maps of settings that name a type: one, or one for each type of layers."""
    if isinstance(settings, dict):
        if "rope_type" in settings:
            yield settings
        for value in settings.values():
            yield from _maps(value)


def _limit(config: Any, rope: dict[str, Any]) -> int | None:
    kind = rope["rope_type"]
    if not isinstance(kind, str):
        return None
    if kind == "longrope":
        found = rope.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
        return int(found or config.max_position_embeddings)
    # A sequence of exactly the length that the model was made for keeps what the one before it had.
    return config.max_position_embeddings - 1 if "dynamic" in kind else None
