"""The properties of a codec that headers and encoders read."""

from __future__ import annotations

from typing import NamedTuple


class CodecSummary(NamedTuple):
    """Properties of a codec that are needed for every layer.

    ``entries`` are the names of the streams with one row per entry. ``has_run_rows`` is True if any stream has one row per run,
    and ``has_byte_norms`` if norms are stored as bytes.
    """

    features: frozenset[str]
    bases_needed: frozenset[bytes]
    group_tokens: int
    fixed_heads: int | None
    entries: tuple[str, ...]
    has_run_rows: bool
    has_byte_norms: bool
    keys_only: bool
    exact_dtype: str | None
    shared_scales: frozenset[str]
    changes_norms: bool
    error_spread: float
    direction_spread: float
    min_error: float
    spreads_channels: bool
