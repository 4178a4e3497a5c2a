"""Lookup tables of a launch, in device memory, and their offsets in shared memory."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from kvpack.formats.base import MAX_DIM
from kvpack.kernels.tables import shared_table
from kvpack.kernels.tables.shared_tables import SharedTable, SharedTables, TableContents

if TYPE_CHECKING:
    from kvpack.kernels.loaders.tiles import Tiles


def load_tables(
    k: Tiles, v: Tiles, device: torch.device, fast: bool, budget: int
) -> tuple[SharedTables, tuple[torch.Tensor, torch.Tensor], list[SharedTable]]:
    """Load the lookup tables of keys and values. Shared tables take at most ``budget`` bytes in total.

    Returns the shared tables that a kernel fills, and for each side, its table in global memory and its shared table.
    """
    tables = [tiles.table for tiles in (k, v)]
    same = tables[0] is not None and tables[1] is not None and torch.equal(tables[0], tables[1])
    distinct = 1 if same else sum(table is not None for table in tables)
    places: list[SharedTable] = []
    fills, offset = [], 0
    for side, (tiles, table) in enumerate(zip((k, v), tables, strict=True)):
        if table is None or not fast:
            places.append(SharedTable())
        elif same and side == 1:
            places.append(places[0])
        else:
            entries, values = tiles.entries or table.shape[-2], table.shape[-1]
            copies = shared_table.choose_copies(entries, 2 * values, budget // distinct)
            places.append(SharedTable(offset, copies, entries))
            if copies:
                fills.append(TableContents(side, offset, entries, values, copies))
                offset += entries * values * 2 * copies
    on_device = tuple(_on_device(tiles, str(device)) for tiles in (k, v))
    return SharedTables(offset, tuple(fills)), (on_device[0], on_device[1]), places


@lru_cache(maxsize=16)
def counting_tensor(device: str) -> torch.Tensor:
    """Return the numbers 0, 1, 2, ... as int16 for ``bitfields.load_column_fields``, at least as many as a tile has columns."""
    return torch.arange(MAX_DIM, dtype=torch.int16, device=device)


@lru_cache(maxsize=256)
def _on_device(tiles: Tiles, device: str) -> torch.Tensor:
    table = tiles.table if tiles.table is not None else torch.zeros(1, dtype=torch.float16, device="cpu")
    return table.to(device)
