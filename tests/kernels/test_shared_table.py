"""Lookups in shared memory by inline assembly equal indexing, and the same function without assembly."""

from __future__ import annotations

import pytest
import torch

from support.interpreter import DEVICE, INTERPRETED

COUNT = 1024


@pytest.mark.kernels
@pytest.mark.parametrize("fast", [False] if INTERPRETED else [False, True], ids=lambda fast: "assembly" if fast else "portable")
@pytest.mark.parametrize(("warps", "budget"), [(1, 40 << 10), (4, 40 << 10), (4, 160 << 10)])
@pytest.mark.parametrize("values", [2, 4])
@pytest.mark.parametrize(
    ("entries", "bits", "position"), [(3, 2, 0), (16, 4, 12), (24, 5, 3), (128, 7, 9), (256, 8, 0), (576, 10, 6), (4608, 13, 1)]
)
def test_any_word_finds_its_entry_or_the_last_one(
    entries: int, bits: int, position: int, values: int, warps: int, budget: int, fast: bool
) -> None:
    from kvpack.kernels.tables import shared_table, table_assembly
    from support.shared_table_kernel import look_up_words_kernel

    copies = shared_table.choose_copies(entries, 2 * values, budget)
    offset = 1024
    generator = torch.Generator().manual_seed(entries)
    table = torch.randn(entries, values, generator=generator).to(torch.float16)
    # What no code means repeats the last entry, for where the index is not held below ``entries``.
    table = table[torch.arange(1 << bits).clamp(max=entries - 1)]
    words = torch.randint(-(1 << 15), 1 << 15, (COUNT,), generator=generator).to(torch.int16)
    out = torch.full((values * COUNT + 1,), torch.nan, dtype=torch.float16, device=DEVICE)
    size = offset + entries * 2 * values * copies
    arguments = (out, words.to(DEVICE), table.to(DEVICE))
    constants = {
        "COUNT": COUNT, "POSITION": position, "BITS": bits, "VALUES": values, "ENTRIES": entries, "OFFSET": offset, "COPIES": copies,
        "SIZE": size, "WARPS": warps, "FAST": fast and copies > 0, "num_warps": warps,
    }  # fmt: skip
    if fast:
        shared_table.allow_tables(look_up_words_kernel.warmup(*arguments, grid=(1,), **constants), size)
    look_up_words_kernel[(1,)](*arguments, **constants)
    if size > table_assembly.MAX_STATIC_BYTES:
        assert out[-1] == int(words.sum()) & 0xFF
    assert torch.equal(out[:-1].reshape(values, COUNT).cpu(), table[(words.to(torch.int32) & 0xFFFF) >> position & ((1 << bits) - 1)].T)


def test_declared_memory_leaves_matrices_where_matrix_instructions_read_them() -> None:
    """The compiler's memory begins after the table. At byte 1,536, products of 128 x 16 by 16 x 64 values were wrong on an H200."""
    from kvpack.kernels.tables import table_assembly

    for size in (16, 1024, 1536, table_assembly.MAX_STATIC_BYTES):
        declared = int(table_assembly.declare_ptx(size).split("[")[1].split("]")[0])
        assert declared % table_assembly.MATRIX_ALIGNMENT == 0
        assert size <= declared < size + table_assembly.MATRIX_ALIGNMENT
