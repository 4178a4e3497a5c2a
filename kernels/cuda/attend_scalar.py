"""Attention of few query rows over tokens of the codec scalar, in CUDA C++ (``attend_scalar.cu``), in place of ``attend.split``.

Its programs need half the registers, so twice as many warps hide the latency of lookups, but a block's table takes 64 KiB.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from kvpack.formats.columns import Columns, is_power_of_two
from kvpack.formats.scalar import Scalar, signed_values
from kvpack.formats.sidecars import CodecWithSidecars
from kvpack.kernels.bitpack.token_factors import FACTOR_BITS
from kvpack.kernels.gpu import gpu
from kvpack.kernels.tiles import addresses, frame_columns

from . import nvrtc

if TYPE_CHECKING:
    from kvpack.formats.base import Codec
    from kvpack.kernels.loaders.tiles import PageMeanConstants, Tiles

DIM, MAX_ROWS, LEVELS = 128, 4, 16
"""Head dim, maximum number of query rows per KV head, and entries for decoded values of single codes."""

TOKENS, MIN_MEAN_TOKENS = 16, 64
"""Number of tokens that a warp processes together, and minimum number per page mean. With fewer, blocks would be too short for a table."""

PACKINGS = {bits: Columns(DIM, (2**bits,), fields) for bits, fields in ((2, 8), (3, 8), (4, 4))}
"""Supported packings of codes, by the number of bits."""

TABLE_BYTES, FACTOR_BYTES, MEAN_BYTES = 1 << 16, 16, 16
"""Bytes of shared memory of a block's table, for the factors of a token, and for the products of the query with the mean of a page."""

CAPABILITY, MIN_SHARED_BYTES = (9, 0), 227 << 10
"""Compute capability of the GPUs on which the kernel was measured, and their maximum shared memory per block, in bytes."""

MIN_TOKENS = {2: 1900, 3: 1900, 4: 5000}
"""Minimum number of tokens per multiprocessor, by the number of bits: blocks begin and end with more work than Triton's programs."""

ALIGNMENT = 16
"""Alignment of rows of codes in bytes."""


class BlockShape(NamedTuple):
    """Number of warps of a block, of blocks per multiprocessor, and of tiles per warp in shared memory."""

    warps: int
    blocks: int
    stages: int


SHAPES = {2: BlockShape(8, 2, 3), 3: BlockShape(8, 2, 3), 4: BlockShape(8, 2, 2)}
"""Shapes of blocks by the number of bits. Two blocks that read 4 bits, with three tiles, would not fit in shared memory."""


@dataclass(frozen=True, eq=False)
class ScalarKernel:
    """A compiled kernel, and its tensor of constants: int16 decoded values of codes, and the column of each channel in q and in sums."""

    kernel: nvrtc.Kernel
    shape: BlockShape
    constants: torch.Tensor
    shared_bytes: int

    def launch(self, blocks: int, mean_pages: int, overlap: bool, integers: tuple[int, ...]) -> nvrtc.CudaLaunch:
        """Return a launch whose integers are those of ``Arguments`` in the source, for programs of up to ``mean_pages`` pages."""
        return nvrtc.CudaLaunch(self.kernel, blocks, self.shared_bytes + MEAN_BYTES * mean_pages, overlap, integers)


def find_kernel(k: Codec, v: Codec, k_tiles: Tiles, v_tiles: Tiles, dual: int, tokens: int, device: torch.device) -> ScalarKernel | None:
    """Return the kernel for keys of codec ``k`` and values of ``v``, or None if their options or the GPU are not supported.

    ``k_tiles`` and ``v_tiles`` are their tile loaders, ``dual`` is as in ``frame_columns.loader``, and ``tokens`` counts the tokens of all
    sequences per multiprocessor.
    """
    keys, values = (codec.codec if isinstance(codec, CodecWithSidecars) else codec for codec in (k, v))
    if type(keys) is not Scalar or type(values) is not Scalar or keys.magnitude_table != values.magnitude_table:
        return None
    packing = PACKINGS.get(keys.bits)
    if packing is None or not keys.packings() == values.packings() == {"codes": packing} or tokens < MIN_TOKENS[keys.bits]:
        return None
    means = k_tiles.means
    if means is not None and (means.tokens < MIN_MEAN_TOKENS or not is_power_of_two(means.tokens)):
        return None
    has_sidecars = any(tiles.signs or tiles.outliers for tiles in (k_tiles, v_tiles))
    if has_sidecars or max(FACTOR_BITS[keys.norm], FACTOR_BITS[values.norm]) > 16 or not _can_run(device):
        return None
    orders = frame_columns.key_columns(k, dual), frame_columns.columns(v, dual)
    return _load_kernel(keys, values, means, orders, device)


def _can_run(device: torch.device) -> bool:
    properties = gpu(device)
    is_known = properties.capability == CAPABILITY and properties.shared_bytes >= MIN_SHARED_BYTES
    return device.type == "cuda" and is_known and addresses.uses_inline_ptx(device)


@lru_cache(maxsize=64)
def _load_kernel(
    k: Scalar, v: Scalar, means: PageMeanConstants | None, orders: tuple[tuple[int, ...], ...], device: torch.device
) -> ScalarKernel | None:
    """Return the kernel for queries and sums whose columns have the channels ``orders``."""
    shape = SHAPES[k.bits]
    constants = {
        "BITS": k.bits, "K_NORM_BITS": FACTOR_BITS[k.norm], "V_NORM_BITS": FACTOR_BITS[v.norm],
        "MEAN_BITS": means.bits if means else 0, "MEAN_SHIFT": means.tokens.bit_length() - 1 if means else 0,
        "WARPS": shape.warps, "BLOCKS": shape.blocks, "STAGES": shape.stages,
    }  # fmt: skip
    levels = torch.nn.functional.pad(signed_values(k.magnitude_table, torch.device("cpu")).half(), (0, LEVELS - 2**k.bits))
    places = [torch.tensor([order.index(channel) for channel in range(DIM)], dtype=torch.int16, device="cpu") for order in orders]
    # In a new thread, this copy makes the context of the device current, which loading the kernel needs.
    numbers = torch.cat([levels.view(torch.int16), *places]).to(device)
    path, threads = Path(__file__).with_suffix(".cu"), 32 * shape.warps
    kernel = nvrtc.load_kernel(path, constants, gpu(device).capability, threads, MIN_SHARED_BYTES, device)
    if kernel is None:
        return None
    tile_bytes = shape.warps * TOKENS * (shape.stages * 2 * PACKINGS[k.bits].row_bytes + FACTOR_BYTES)
    return ScalarKernel(kernel, shape, numbers, TABLE_BYTES + tile_bytes + numbers.nbytes + 2 * MAX_ROWS * DIM)
