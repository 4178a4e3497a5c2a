"""All 16-bit words in registers of two, and the execution of inline PTX over them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvpack.coding import triton_version

Array = np.ndarray[Any, np.dtype[Any]]

needs_triton = pytest.mark.skipif(not triton_version.is_supported(), reason="the kernels were not tested with this Triton version")

WORDS = np.arange(1 << 16, dtype=np.uint32)

OTHERS = np.random.default_rng(1).permutation(WORDS)


def joined(low: Any, high: Any) -> Array:
    return (np.asarray(low).astype(np.uint32) & 0xFFFF) | np.asarray(high).astype(np.uint32) << 16


def halves(register: Array) -> tuple[Array, Array]:
    return register & 0xFFFF, register >> 16


def as_f16(words: Array) -> Array:
    return words.astype(np.uint16).view(np.float16)


def run(ptx: str, *inputs: Any, constraints: str = "") -> list[Array]:
    """Execute PTX over registers, one output unless ``constraints`` say otherwise. Its memory and lanes are those of one program."""
    from support import emulated_ptx

    count = max(np.size(value) for value in inputs)
    registers = [np.broadcast_to(np.asarray(value), (count,)) for value in inputs]
    registers = [value if value.dtype == np.uint64 else value.astype(np.uint32) for value in registers]
    lanes = np.random.default_rng(2).integers(0, 32, count).astype(np.uint32)
    return emulated_ptx.Execution(ptx, constraints or ",".join(["=r", *["r"] * len(inputs)]), registers, lanes).run()
