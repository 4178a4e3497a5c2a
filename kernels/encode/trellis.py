"""Encoder of the trellis codec on the GPU (spec/codecs/trellis.md), with the same streams as ``formats/trellis.py``.

A kernel searches the paths, one row at a time, with the costs of all states in registers. ``formats/`` computes rotations and norms and
packs the codes, which is little work.
"""

# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
from triton import language as tl

from kvpack.formats.norm_rule import relative_errors
from kvpack.kernels.bitpack.columns import launch
from kvpack.kernels.gpu import gpu

if TYPE_CHECKING:
    from kvpack.formats.trellis import Trellis

    from .kernel import Output

ROWS = 1 << 16
"""Maximum number of rows per launch of the search."""
WARPS = 1
"""Number of warps per program. One warp needs no barriers, and the costs of 1,024 states fit in its registers."""
PROGRAMS_PER_CORE = 32
BACK_BYTES = 1 << 27
"""Maximum memory for the back-pointers of all programs. There is one byte per channel and set of states that differ only in their newest
symbol.
"""


def encode(codec: Trellis, x: torch.Tensor, output: Output) -> bool:
    """Encode ``x`` into ``output``. Returns False, and writes nothing, for engine pages.

    Raises ValueTooLarge for norms that the codec cannot store.
    """
    if output.origins is not None:
        return False
    for name, stream in codec.encode_with(x.to(torch.float32), nearest_path, ROWS).items():
        output.streams[name].copy_(stream)
    if output.errors is not None:
        output.errors.copy_(relative_errors(codec, output.streams, x.to(torch.float32)))
    return True


def nearest_path(x: torch.Tensor, table: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the windows of the nearest path, int32 ``[row, dim]``, as ``formats.trellis.nearest_path`` does.

    ``x`` is float32 ``[row, dim]``.
    """
    rows, dim = x.shape
    windows = torch.empty(rows, dim, dtype=torch.int32, device=x.device)
    shared_windows = table.numel() >> bits
    cores = gpu(x.device).multiprocessors
    programs = max(1, min(rows, cores * PROGRAMS_PER_CORE, BACK_BYTES // (dim * shared_windows)))
    back = torch.empty(programs, dim, shared_windows, dtype=torch.uint8, device=x.device)
    launch(
        _find_paths, programs, x.device, x.contiguous(), table, back, windows, rows, dim, programs,
        STATES=table.numel(), BITS=bits, warps=WARPS,
    )  # fmt: skip
    return windows


@triton.jit(do_not_specialize=["rows", "dim", "programs"])
def _find_paths(
    x: tl.tensor,
    table: tl.tensor,
    back: tl.tensor,
    windows: tl.tensor,
    rows: tl.tensor,
    dim: tl.tensor,
    programs: tl.tensor,
    STATES: tl.constexpr,
    BITS: tl.constexpr,
) -> None:
    """Search paths for every ``programs``-th row of ``x`` ``[row, dim]``, and store their windows.

    Each row is searched twice. The first search begins in the middle of the row, and finds the bits that the first and the last window of
    the second search share.
    """
    SYMBOLS: tl.constexpr = 1 << BITS
    KEPT: tl.constexpr = STATES // SYMBOLS
    program = tl.program_id(0)
    back += program.to(tl.int64) * dim * KEPT
    half = dim // 2
    for row in range(program, rows, programs):
        values = x + tl.cast(row, tl.int64) * dim
        state = _search(values, table, back, dim, half, 0, STATES, BITS, False)
        for channel in range(dim - 1, dim - 1 - half, -1):
            state = _step_back(back, channel, state, KEPT, BITS)
        shared = state >> BITS
        # The second search overwrites values that other lanes may still read.
        tl.debug_barrier()
        state = _search(values, table, back, dim, 0, shared, STATES, BITS, True)
        target = windows + tl.cast(row, tl.int64) * dim
        for channel in range(dim - 1, 0, -1):
            tl.store(target + channel, state)
            state = _step_back(back, channel, state, KEPT, BITS)
        tl.store(target, state)
        tl.debug_barrier()


@triton.jit
def _search(
    values: tl.tensor,
    table: tl.tensor,
    back: tl.tensor,
    dim: tl.tensor,
    first_channel: tl.tensor,
    shared: tl.tensor,
    STATES: tl.constexpr,
    BITS: tl.constexpr,
    CIRCULAR: tl.constexpr,
) -> tl.tensor:
    """Find the path with the smallest squared error through ``values``, beginning at channel ``first_channel``. Returns its last window.

    Back-pointers are stored in ``back`` ``[channel, KEPT]``. With ``CIRCULAR``, the low bits of the first window and the high bits of the
    last window must equal ``shared``.
    """
    SYMBOLS: tl.constexpr = 1 << BITS
    KEPT: tl.constexpr = STATES // SYMBOLS
    # Windows have the axes [entering symbol, middle, next leaving symbol]. Their previous states do not depend on the entering
    # symbol, so their costs are broadcast over the first axis.
    MIDDLE: tl.constexpr = KEPT // SYMBOLS
    entering = tl.arange(0, SYMBOLS)[:, None, None]
    middle = tl.arange(0, MIDDLE)[None, :, None]
    leaving = tl.arange(0, SYMBOLS)[None, None, :]
    window = (entering * MIDDLE + middle) * SYMBOLS + leaving
    kept = tl.arange(0, SYMBOLS)[:, None] * MIDDLE + tl.arange(0, MIDDLE)[None, :]
    entries = tl.load(table + window)
    difference = tl.load(values + first_channel) - entries
    cost = difference * difference
    if CIRCULAR:
        cost = tl.where((window & (KEPT - 1)) == shared, cost, float("inf"))
    for channel in range(1, dim):
        # Nonnegative costs have the same order as their bits, so the lowest bits of a cost can contain the leaving symbol, and one minimum
        # finds both.
        keyed_cost = (cost.to(tl.int32, bitcast=True) & -SYMBOLS) | leaving
        least = tl.min(keyed_cost, 2)
        tl.store(back + channel * KEPT + kept, least & (SYMBOLS - 1))
        previous_cost = tl.reshape(least, (1, MIDDLE, SYMBOLS)).to(tl.float32, bitcast=True)
        position = channel + first_channel
        difference = tl.load(values + tl.where(position < dim, position, position - dim)) - entries
        cost = difference * difference + previous_cost
    if CIRCULAR:
        cost = tl.where((window >> BITS) == shared, cost, float("inf"))
    # Wait until every lane has stored its paths.
    tl.debug_barrier()
    # Do not use argmin of reshaped costs: Triton 3.6 compiles it with a different order of indices.
    best = tl.min(tl.min(tl.min(cost, 2), 1), 0)
    return tl.min(tl.min(tl.min(tl.where(cost == best, window, STATES), 2), 1), 0)


@triton.jit
def _step_back(back: tl.tensor, channel: tl.tensor, state: tl.tensor, KEPT: tl.constexpr, BITS: tl.constexpr) -> tl.tensor:
    """Return the window before window ``state`` of ``channel`` on the best path."""
    low = state & (KEPT - 1)
    return (low << BITS) | tl.load(back + channel * KEPT + low).to(tl.int32)
