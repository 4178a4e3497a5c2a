"""Properties of the GPUs on which kernels run, and of a GPU that stands for Triton's interpreter."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch


class Gpu(NamedTuple):
    """Properties of a GPU: compute capability, number of multiprocessors, and maximum shared memory per program in bytes.

    ``interpreted`` is True for Triton's interpreter, which has no inline PTX and cannot multiply bfloat16.
    """

    capability: tuple[int, int]
    multiprocessors: int
    shared_bytes: int
    interpreted: bool = False

    @property
    def overlaps_launches(self) -> bool:
        """True if a kernel can start while the previous one finishes (programmatic dependent launch)."""
        return self.capability >= (9, 0)

    @property
    def multiplies_bf16(self) -> bool:
        """True if the GPU supports bfloat16 matrix products."""
        return self.capability >= (8, 0)


INTERPRETER = Gpu((8, 0), 2, 227 << 10, interpreted=True)
"""GPU to assume in Triton's interpreter: no overlap of launches, few multiprocessors, and as much shared memory as an H100."""

_without_device = INTERPRETER


def gpu(device: torch.device | str) -> Gpu:
    """Return the properties of ``device``. The CPU stands for Triton's interpreter, or for a GPU for which kernels are compiled ahead."""
    device = torch.device(device)
    return _properties(device) if device.type == "cuda" else _without_device


@lru_cache(maxsize=16)
def _properties(device: torch.device) -> Gpu:
    properties = torch.cuda.get_device_properties(device)
    shared_bytes = getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)
    return Gpu(torch.cuda.get_device_capability(device), properties.multi_processor_count, int(shared_bytes))
