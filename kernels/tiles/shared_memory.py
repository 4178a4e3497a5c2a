"""The shared memory of a program, which differs between GPUs of one generation; tile shapes are chosen to fit it."""

from __future__ import annotations

from functools import lru_cache

import torch

INTERPRETED_BYTES = 227 << 10
"""Shared memory of compute capability 9.0, for which kernels are interpreted."""


@lru_cache(maxsize=16)
def shared_memory(device: str) -> int:
    """Return the maximum number of bytes of shared memory that a program may have on ``device``."""
    if torch.device(device).type != "cuda":
        return INTERPRETED_BYTES
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block))
