"""Properties of the GPUs on which kernels run, including the one that stands in for Triton's interpreter."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch


class Gpu(NamedTuple):
    """What launches depend on: compute capability, multiprocessors, and the maximum bytes of shared memory of a program.

    ``interpreted`` is True for Triton's interpreter, which has no inline PTX, and cannot multiply bfloat16.
    """

    capability: tuple[int, int]
    multiprocessors: int
    shared_bytes: int
    interpreted: bool = False

    @property
    def overlaps_launches(self) -> bool:
        """True if a kernel can start while the previous kernel finishes (programmatic dependent launch)."""
        return self.capability >= (9, 0)

    @property
    def multiplies_bf16(self) -> bool:
        """True if there are matrix products of bfloat16."""
        return self.capability >= (8, 0)


INTERPRETER = Gpu((8, 0), 2, 227 << 10, interpreted=True)
"""Assumed in Triton's interpreter: no overlap of launches, few multiprocessors, and the shared memory of compute capability 9.0."""

_without_device = INTERPRETER


def gpu(device: torch.device | str) -> Gpu:
    """Return the GPU ``device``; for the CPU, Triton's interpreter, or what ``assume`` set."""
    device = torch.device(device)
    return _properties(device) if device.type == "cuda" else _without_device


def assume(other: Gpu) -> None:
    """Plan launches over tensors on the CPU for the GPU ``other`` from now on, to compile them without it."""
    global _without_device
    _without_device = other


@lru_cache(maxsize=16)
def _properties(device: torch.device) -> Gpu:
    properties = torch.cuda.get_device_properties(device)
    shared_bytes = getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)
    return Gpu(torch.cuda.get_device_capability(device), properties.multi_processor_count, int(shared_bytes))
