"""Stored norms of tokens: binary16, float32, or one byte for their logarithm (spec/packing.md, Norms of 8 bits)."""

from __future__ import annotations

from .errors import OutOfRange
from .lazy import torch
from .streams import HALF_LIMIT, NORMS, stored_norm
from .tables import cache_per_device

LOG8 = "log8"
TOKEN_NORMS = {**NORMS, LOG8: "U8"}
"""Stored dtypes of token norms, by parameter value."""

LOG_NORMS_FEATURE = "log-norms"
"""Required feature of codecs that store norms as bytes."""

STEPS_PER_OCTAVE, MIN_LOG2 = 16, -7
"""Number of codes per octave, and the base-2 logarithm of the smallest nonzero norm, which has code 1."""

_CODES = 256


def norm_features(norm: str) -> frozenset[str]:
    """Return the required features of a codec that stores norms as ``norm``."""
    return frozenset({LOG_NORMS_FEATURE} if norm == LOG8 else ())


def _code_norm(place: float) -> float:
    return float(2.0 ** (MIN_LOG2 + place / STEPS_PER_OCTAVE))


LARGEST_LOG8 = _code_norm(_CODES - 2)
LOG8_LIMIT = _code_norm(_CODES - 1.5)
"""The smallest norm that is too large for a byte: it would round to a code above 255."""

LIMITS = {"F16": HALF_LIMIT, "F32": float("inf"), "U8": LOG8_LIMIT}
"""For each stored dtype, the smallest norm that does not fit."""

LARGEST_STORED = {"F16": 65504.0, "F32": 3.4028234663852886e38, "U8": LARGEST_LOG8}
"""The largest finite number of each stored dtype."""


@cache_per_device
def log8_values() -> torch.Tensor:
    """Return the norm that each code decodes to, float32 ``[256]``."""
    return torch.tensor([0.0, *(_code_norm(place) for place in range(_CODES - 1))], dtype=torch.float32)


@cache_per_device
def log8_bounds() -> torch.Tensor:
    """Return the smallest norm that each code from 1 on encodes, float32 ``[255]``.

    The first is half of the smallest nonzero norm; the others are midpoints between codes.
    """
    return torch.tensor([_code_norm(0) / 2, *(_code_norm(place - 0.5) for place in range(1, _CODES - 1))], dtype=torch.float32)


def encode_norms(values: torch.Tensor, norm: str, name: str) -> torch.Tensor:
    """Round float32 ``values`` to the stored form ``norm``. Raises OutOfRange if one does not fit; the message calls it ``name``."""
    if norm != LOG8:
        return stored_norm(values, NORMS[norm], name)
    if values.numel() and not values.amax().item() < LOG8_LIMIT:
        at = [int(i) for i in torch.nonzero(~(values < LOG8_LIMIT))[0]]
        raise OutOfRange(
            f"{name} at {at} is {values[tuple(at)].item():.6g}, but the largest that fits in 8 bits is {LARGEST_LOG8:.6g}: scale the "
            "input, or choose norm=fp16"
        )
    return torch.bucketize(values, log8_bounds(values.device), right=True).to(torch.uint8)


def decode_norms(stored: torch.Tensor) -> torch.Tensor:
    """Return the ``stored`` norms as float32 of the same shape."""
    return log8_values(stored.device)[stored.to(torch.int64)] if stored.dtype == torch.uint8 else stored.to(torch.float32)
