"""Lookups in shared memory and in registers by inline PTX equal indexing, and the same functions without inline PTX."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from support.interpreter import DEVICE, INTERPRETED
from support.ptx_words import OTHERS, WORDS, Array, halves, joined, needs_triton, run

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


@needs_triton
def test_tables_in_registers_are_looked_up_by_every_four_digits() -> None:
    from kvpack.kernels.tables import register_table

    values = torch.arange(0x3C00, 0x3C00 + 8 * 0x111, 0x111).to(torch.int16).view(torch.float16)
    digits = np.arange(1 << 12, dtype=np.uint32)
    digit = [digits >> 3 * number & 7 for number in range(4)]
    word = digit[0] | digit[1] << 16 | digit[2] << 8 | digit[3] << 24
    found = run(register_table._select_f16x2_ptx.fn(register_table.byte_table(values)), word, constraints="=r,=r,=r,=r,r")
    table = values.view(torch.int16).numpy().astype(np.uint16)
    for register, number in zip(found, digit, strict=True):
        assert all(np.array_equal(half, table[number]) for half in halves(register))


def filled(entries: Array, offset: int, copies: int) -> None:
    """Begin a program that declares a table and stores ``entries``, uint32 ``[entry, word]``."""
    from kvpack.kernels.tables import table_assembly
    from support import emulated_ptx

    emulated_ptx.shared.clear()
    count, words = entries.shape
    run(table_assembly.declare_ptx.fn(offset + 4 * entries.size * copies), np.zeros(32))
    padded = np.concatenate([entries, np.full((5, words), 0xDEADBEEF, np.uint32)])
    value = padded[:, 0] if words == 1 else np.ascontiguousarray(padded).view(np.uint64)[:, 0]
    ptx = table_assembly.fill_ptx.fn(offset, count, words, copies)
    run(ptx, value, np.arange(count + 5), constraints="=r,r,r" if words == 1 else "=r,l,r")


def random_entries(count: int, words: int) -> Array:
    return np.random.default_rng(6).integers(0, 1 << 32, (count, words), np.uint32)


@needs_triton
@pytest.mark.parametrize("copies", [1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize("words", [1, 2])
def test_every_word_finds_its_table_entry(words: int, copies: int) -> None:
    from kvpack.kernels.tables import table_assembly as assembly

    if words == 2 and copies == 32:
        return
    offset = 4 * words * copies * 3
    for count, bits, position in ((64, 6, 0), (64, 6, 10), (128, 7, 4), (200, 8, 3), (256, 8, 8)):
        table = random_entries(count, words)
        filled(table, offset, copies)
        indices = [np.minimum(own >> position & (1 << bits) - 1, count - 1) for own in (WORDS, OTHERS)]
        ptx = assembly.tile_lookup_ptx.fn(position, bits, 2 * words, offset, copies, count)
        found = run(ptx, joined(WORDS, OTHERS), constraints=",".join([*["=r"] * 2 * words, "r"]))
        for number, register in enumerate(found):
            for half, index in zip(halves(register), indices, strict=True):
                assert np.array_equal(half, table[index, number // 2] >> 16 * (number % 2) & 0xFFFF)
        if words == 1 and count == 1 << bits:
            found = run(assembly.word_lookup_ptx.fn(position, bits, offset, copies, True), joined(WORDS, OTHERS), constraints="=r,=r,r")
            assert all(np.array_equal(register, table[index, 0]) for register, index in zip(found, indices, strict=True))
        entry_bytes = 4 * words
        for read in range(1, words + 1):
            constraints = ",".join([*["=r"] * read, "r"])
            place = indices[0] * entry_bytes * copies
            found = run(assembly.entry_lookup_ptx.fn(read, offset, copies, entry_bytes), place, constraints=constraints)
            assert all(np.array_equal(register, table[indices[0], number]) for number, register in enumerate(found))


@needs_triton
@pytest.mark.parametrize("copies", [1, 8, 32])
def test_words_of_three_bytes_find_their_table_entries(copies: int) -> None:
    """The upper bytes of words are those of another plane, where the bytes of both columns begin at bit 0 or 8."""
    from kvpack.kernels.tables import table_assembly as assembly

    table = random_entries(64, 1)
    filled(table, 0, copies)
    side = OTHERS % 2
    planes, shifts = joined(WORDS[::-1], OTHERS), joined(8 * side, 8 * side)
    for position in (0, 6, 12, 18):
        found = run(
            assembly.word_lookup_ptx.fn(position, 6, 0, copies, False), joined(WORDS, OTHERS), planes, shifts, constraints="=r,=r,r,r,r"
        )
        for register, own, plane in zip(found, (WORDS, OTHERS), halves(planes), strict=True):
            column = own | (plane >> 8 * side & 0xFF) << 16
            assert np.array_equal(register, table[column >> position & 63, 0])


@needs_triton
@pytest.mark.parametrize("sign_byte", [0, 1])
@pytest.mark.parametrize("copies", [1, 4, 16])
def test_triplets_are_looked_up_with_their_signs(copies: int, sign_byte: int) -> None:
    from kvpack.kernels.tables import table_assembly as assembly

    table = random_entries(256, 2)
    filled(table, 64, copies)
    word, half = joined(WORDS, OTHERS), WORDS % 2
    signs = [np.random.default_rng(number).integers(0, 1 << 32, 1 << 16, np.uint32) for number in range(4)]
    pairs = [register for register in (word, half, *signs) for _ in range(2)]
    found = run(assembly.triplet_lookup_ptx.fn(64, copies, sign_byte), *pairs, constraints="=&r,=&r,=&r" + 12 * ",r")
    indices = [word >> 16 * half + 8 * number & 0xFF for number in range(2)]
    for number, index in enumerate(indices):
        byte = 16 * half + 8 * (sign_byte if number else 0)
        x, y = (sign >> byte + 7 & 1 for sign in signs[2 * number : 2 * number + 2])
        assert np.array_equal(found[number], table[index, 0] ^ joined(x << 15, y << 15))
    assert np.array_equal(found[2], joined(*(table[index, 1] & 0xFFFF for index in indices)))


@needs_triton
@pytest.mark.parametrize("multiplied", [False, True])
@pytest.mark.parametrize("copies", [1, 4, 32])
def test_codes_of_columns_are_looked_up(copies: int, multiplied: bool) -> None:
    """A rotation or a product moves each code to its byte offset. Two neighboring codes share one entry or have one each."""
    from kvpack.kernels.tables import table_assembly as assembly

    unit, bits = 4 * copies, 3
    table = random_entries(64, 1)
    filled(table, 0, copies)
    word, other = joined(WORDS, OTHERS), joined(OTHERS, WORDS)
    target = unit.bit_length() - 1
    at = WORDS % (target + 1 if multiplied else 26), OTHERS % (target + 1 if multiplied else 26)
    by = [1 << (target - own).astype(np.int64) if multiplied else own.astype(np.int64) - target & 31 for own in at]
    first = 8 * (WORDS % 8), 8 * (OTHERS % 8)
    (found,) = run(assembly.column_lookup_ptx.fn(bits, 0, copies, multiplied), word, other, *by, *(own * unit for own in first))
    entries = [table[(own >> shift & 7) + begin, 0] for own, shift, begin in zip((word, other), at, first, strict=True)]
    assert np.array_equal(found, joined(*(entry & 0xFFFF for entry in entries)))
    for joint in (True, False):
        shift = np.minimum(at[0], 26)
        (found,) = run(assembly.pair_lookup_ptx.fn(bits, joint, 0, copies, multiplied), word, by[0], first[0] * unit * (not joint))
        low, high = word >> shift & 7, word >> shift + 3 & 7
        entry = table[low + 8 * high, 0] if joint else joined(table[low + first[0], 0] & 0xFFFF, table[high + first[0], 0] & 0xFFFF)
        real = shift <= 26
        assert np.array_equal(found[real], entry[real])


@needs_triton
def test_values_are_selected_by_one_bit_of_each_word() -> None:
    from kvpack.kernels.tables import table_assembly as assembly

    word, other, zero, change = joined(WORDS, OTHERS), joined(OTHERS, WORDS), joined(OTHERS, OTHERS[::-1]), joined(WORDS[::-1], OTHERS)
    at = WORDS % 32, OTHERS % 32
    (found,) = run(assembly.SELECT_BY_BIT.value, word, other, at[0] + 1, at[1] + 1, zero, change)
    masks = ((own >> bit & 1) * 0xFFFF for own, bit in zip((word, other), at, strict=True))
    assert np.array_equal(found, zero ^ change & joined(*masks))
