"""In tiles of symbols in the layout of the matrix units' sums, every symbol is at its place, bit for bit."""

from __future__ import annotations

import pytest
import torch

from support.interpreter import DEVICE, INTERPRETED

TOKENS = 64


@pytest.mark.kernels
@pytest.mark.parametrize("fast", [False] if INTERPRETED else [False, True], ids=lambda fast: "assembly" if fast else "portable")
@pytest.mark.parametrize("turned", [False, True], ids=lambda turned: "turned" if turned else "straight")
@pytest.mark.parametrize("symbols", [16, 9])
def test_every_symbol_reaches_its_channel(symbols: int, turned: bool, fast: bool) -> None:
    from kvpack.kernels.bitpack.symbol_tiles import MAX_BITS, WIDTH
    from kvpack.kernels.tables.shared_tables import SharedTable
    from kvpack.kernels.tiles.bound_loader import LoadMode
    from support.symbol_tile_kernel import Rows, tile_kernel

    width, warps, bits = WIDTH.value, 2, MAX_BITS.value
    for begin in range(0, 1 << bits, warps * TOKENS * width):
        # Neighbours in a tile differ in more than their lowest bits.
        given = ((torch.arange(warps * TOKENS * width) + begin) * 4099).to(torch.int16).reshape(-1, width)
        out = torch.full(given.shape, -1, dtype=torch.int16, device=DEVICE)
        tile_kernel[(1,)](
            out, given.to(DEVICE).view(torch.int32), SYMBOLS=symbols, CONSTANTS=Rows((width,)), MODE=LoadMode(SharedTable(), turned, fast),
            WARPS=warps, num_warps=warps,
        )  # fmt: skip
        # An odd symbol that is the last one has a neighbor in its word.
        assert torch.equal(out.cpu()[:, :symbols], given[:, :symbols])
