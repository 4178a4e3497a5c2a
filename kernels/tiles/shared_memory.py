"""Shared memory available to a program. It differs even between GPUs of one generation, and launch shapes are chosen to fit in it."""

from __future__ import annotations

from functools import lru_cache

import torch

INTERPRETER_SHARED_BYTES = 227 << 10
"""Shared memory of compute capability 9.0, assumed in Triton's interpreter."""


@lru_cache(maxsize=16)
def shared_memory(device: str) -> int:
    """Return the maximum number of bytes of shared memory that a program may have on ``device``."""
    if torch.device(device).type != "cuda":
        return INTERPRETER_SHARED_BYTES
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block))
