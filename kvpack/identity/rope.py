"""Describes a rotary embedding's settings as text, and finds the length up to which all sequences have the same frequencies."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from .canonical_text import json_digest, json_text, to_json_value

_MAX_TEXT_BYTES = 1024
"""Maximum size in bytes of settings that are recorded as text. Longer ones become a digest, because every entry's header has them."""
_LIMIT_KEY = "same_up_to"
"""Key that is added to the settings if longer sequences have different frequencies."""


def rope_json(config: Any) -> str:
    """Return the rotary settings of a transformers configuration as a JSON object, with a digest in place of long ones."""
    settings = getattr(config, "rope_parameters", None) or {
        key: getattr(config, key) for key in ("rope_theta", "rope_scaling", "partial_rotary_factor") if hasattr(config, key)
    }
    settings = to_json_value("config.rope_parameters", settings)
    if len(json_text(settings)) > _MAX_TEXT_BYTES:
        settings = {"digest": json_digest(settings), "rope_type": settings.get("rope_type")}
    limit = max_uniform_length(config)
    return json_text(settings if limit is None else {**settings, _LIMIT_KEY: limit})


def max_uniform_length(config: Any) -> int | None:
    """Return the number of tokens up to which the RoPE frequencies of a model with ``config`` do not depend on the sequence's length.

    None means no limit.
    """
    limits = (_frequency_limit(config, rope) for rope in _rope_maps(getattr(config, "rope_parameters", None)))
    return min((limit for limit in limits if limit is not None), default=None)


def longest_sequence(rope: str) -> int | None:
    """Return the number of tokens up to which RoPE frequencies do not depend on the sequence's length, according to an identity's field
    ``rope``.

    None means no limit.
    """
    try:
        settings = json.loads(rope)
    except ValueError:
        return None
    limit = settings.get(_LIMIT_KEY) if isinstance(settings, dict) else None
    return limit if isinstance(limit, int) else None


def _rope_maps(settings: Any) -> Iterator[dict[str, Any]]:
    """Yield the maps in ``settings`` that contain a RoPE type: one map, or one for each layer type."""
    if isinstance(settings, dict):
        if "rope_type" in settings:
            yield settings
        for value in settings.values():
            yield from _rope_maps(value)


def _frequency_limit(config: Any, rope: dict[str, Any]) -> int | None:
    kind = rope["rope_type"]
    if not isinstance(kind, str):
        return None
    if kind == "longrope":
        limit = rope.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
        return int(limit or config.max_position_embeddings)
    # A sequence of exactly the model's original length keeps the previous sequence's frequencies.
    return config.max_position_embeddings - 1 if "dynamic" in kind else None
