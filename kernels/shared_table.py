"""Tables in shared memory, looked up from inside a tile: inline PTX, for Triton has no operation that does it.

A table is copied once a program into memory that the assembly declares, each entry as often as there are banks for it, so that
no two lanes of a warp wait for each other. A lookup is then a shift, a mask and a load, in the layout that the matrix units read.
Where the assembly is off (``FAST`` false: Triton's interpreter, or KVPACK_INLINE_ASSEMBLY=0) the same function reads the
table from global memory. An index is masked to the table's width, and held below its entries, before it is used: no code can read outside.
"""

# Triton compiles neither unpacking nor conditional expressions of tensors.
# ruff: noqa: RUF005
# Tuples of tensors grow while a kernel is compiled, and Triton has no types.
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

import ctypes
from typing import Any

import triton
from triton import language as tl

from .fields import straddling

BANK_BYTES = 128
"""Bytes that a warp reads at once without waiting: 32 banks of 4."""

MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
"""A function attribute of the CUDA driver, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES."""

COPIED_TOGETHER = 16
"""Words that a thread copies at a time when a table is filled."""

LARGEST_BYTES = 40 << 10
"""Shared memory that both sides' tables may take: the assembly's declaration allows 48 KiB, and programs share a multiprocessor."""


def copies_of(entries: int, entry_bytes: int, budget: int) -> int:
    """How often each entry is stored: once a bank group, or the largest power of two that ``budget`` bytes allow; 0: it does not fit."""
    copies = BANK_BYTES // entry_bytes
    while copies and entries * entry_bytes * copies > budget:
        copies //= 2
    return copies


def allow(kernel: Any) -> None:
    """Let the driver launch a compiled ``kernel`` that declares tables: beside them, its own shared memory counts from the first byte.

    Triton asks the driver for more than 48 KiB only when its own part alone is above that.
    """
    size = kernel.metadata.shared
    _ = kernel.run
    driver = ctypes.CDLL("libcuda.so.1")
    error = driver.cuFuncSetAttribute(ctypes.c_void_p(kernel.function), MAX_DYNAMIC_SHARED_SIZE_BYTES, ctypes.c_int(size))
    if error:
        raise RuntimeError(f"the CUDA driver refuses {size} bytes of dynamic shared memory: error {error}")


@triton.constexpr_function
def _declare(size: int) -> str:
    return f".shared .align 16 .b8 kvpack_tables[{size}]; mov.u32 $0, 0;"


@triton.constexpr_function
def _fill(offset: int, words: int, entry_words: int, copies: int) -> str:
    """Each thread copies words ``ntid`` apart, several at a time: their loads wait together."""
    total = words * copies
    entry, run = (entry_words - 1).bit_length(), (entry_words * copies - 1).bit_length()
    loads, stores = "", ""
    for number in range(COPIED_TOGETHER):
        loads += f"""
            setp.lt.u32 p{number}, i, {total};
            shr.u32 source, i, {run}; shl.b32 source, source, {entry};
            and.b32 word, i, {entry_words - 1}; or.b32 source, source, word;
            mul.wide.u32 address, source, 4; add.u64 address, address, $1;
            @p{number} ld.global.b32 v{number}, [address];
            add.u32 i, i, step;"""
        stores += f"@p{number} st.shared.b32 [place + {offset}], v{number}; add.u32 place, place, step_bytes;"
    values = ", ".join(f"v{number}" for number in range(COPIED_TOGETHER))
    predicates = ", ".join(f"p{number}" for number in range(COPIED_TOGETHER))
    return f"""{{
        .reg .pred more, {predicates}; .reg .b32 i, source, word, step, step_bytes, place, {values}; .reg .b64 address;
        mov.u32 i, %tid.x; mov.u32 step, %ntid.x; shl.b32 step_bytes, step, 2;
        mov.u32 place, kvpack_tables; mad.lo.u32 place, i, 4, place;
        next: {loads} {stores}
        setp.lt.u32 more, i, {total}; @more bra next;
        bar.sync 0; mov.u32 $0, 0;
    }}"""


@triton.constexpr_function
def _look_up(position: int, bits: int, values: int, offset: int, copies: int, entries: int) -> str:
    """Two 16-bit words a register; the index is ``bits`` bits of each from ``position`` up; ``values`` is 2 or 4 halves an entry.

    An index beyond ``entries`` gives the last one.
    """
    entry_bytes = 2 * values
    stride, own = (entry_bytes * copies).bit_length() - 1, (entry_bytes - 1).bit_length()
    mask = ((1 << bits) - 1) << stride
    beyond = f"min.u32 {{0}}, {{0}}, {entries * entry_bytes * copies - entry_bytes};" if 1 << bits > entries else ""
    registers = [f"${number}" for number in range(values)]
    word = f"${values}"

    def place(name: str, first: int) -> str:
        move = f"shr.b32 {name}, {word}, {first - stride};" if first >= stride else f"shl.b32 {name}, {word}, {stride - first};"
        return f"{move} lop3.b32 {name}, {name}, {mask}, lane, 0xEA; {beyond.format(name)}"

    loads = ("ld.shared.b32 a0, [low];", "ld.shared.b32 b0, [high];") if values == 2 else (
        "ld.shared.v2.b32 {a0, a1}, [low];", "ld.shared.v2.b32 {b0, b1}, [high];")  # fmt: skip
    joined = "".join(
        f"prmt.b32 {register}, a{number // 2}, b{number // 2}, {'0x7632' if number % 2 else '0x5410'};"
        for number, register in enumerate(registers)
    )
    table = "mov.u32 base, kvpack_tables; add.u32 low, low, base; add.u32 high, high, base;"
    loads = tuple(load.replace("]", f" + {offset}]") for load in loads)
    return f"""{{
        .reg .b32 lane, low, high, base, a0, a1, b0, b1;
        mov.u32 lane, %laneid; and.b32 lane, lane, {copies - 1}; shl.b32 lane, lane, {own};
        {place("low", position)} {place("high", 16 + position)}
        {table} {" ".join(loads)} {joined}
    }}"""


@triton.constexpr_function
def _outputs(values: int) -> str:
    return ",".join(["=r"] * values + ["r"])


@triton.jit
def declare(SIZE: tl.constexpr, WARPS: tl.constexpr) -> None:
    """Reserve ``SIZE`` bytes of shared memory for tables; once a kernel, before ``fill``."""
    thread = tl.arange(0, 32 * WARPS)
    tl.inline_asm_elementwise(_declare(SIZE), "=r,r", [thread], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def fill(
    table: tl.tensor, OFFSET: tl.constexpr, WORDS: tl.constexpr, ENTRY_WORDS: tl.constexpr, COPIES: tl.constexpr, WARPS: tl.constexpr
) -> None:
    """Copy a table of ``WORDS`` 32-bit words to ``OFFSET`` bytes, each entry ``COPIES`` times, and wait for the whole program."""
    address = table.to(tl.int64) + tl.arange(0, 32 * WARPS) * 0
    tl.inline_asm_elementwise(_fill(OFFSET, WORDS, ENTRY_WORDS, COPIES), "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def look_up(
    word: tl.tensor,
    table: tl.tensor,
    POSITION: tl.constexpr,
    BITS: tl.constexpr,
    VALUES: tl.constexpr,
    OFFSET: tl.constexpr,
    COPIES: tl.constexpr,
    ENTRIES: tl.constexpr,
    FAST: tl.constexpr,
) -> tl.tuple:
    """``VALUES`` (2 or 4) binary16 tiles: the entry whose index is ``BITS`` bits of each int16 ``word`` from ``POSITION`` up.

    ``table`` is binary16 ``[2^BITS, VALUES]`` in global memory; copies of its first ``ENTRIES`` lie at ``OFFSET`` when ``FAST`` and not 0.
    """
    if FAST and COPIES > 0:
        types: tl.constexpr = (tl.float16,) * VALUES
        found = tl.inline_asm_elementwise(
            _look_up(POSITION, BITS, VALUES, OFFSET, COPIES, ENTRIES), _outputs(VALUES), [word], dtype=types, is_pure=True, pack=2
        )
    else:
        index = (word.to(tl.int32) >> POSITION) & ((1 << BITS) - 1)
        found = ()
        for value in tl.static_range(VALUES):
            found = found + (tl.load(table + index * VALUES + value),)
    return found


@triton.jit
def look_up_bits(
    planes: tl.tuple,
    table: tl.tensor,
    BIT: tl.constexpr,
    BITS: tl.constexpr,
    VALUES: tl.constexpr,
    FIRST: tl.constexpr,
    SHARED: tl.constexpr,
    FAST: tl.constexpr,
) -> tl.tuple:
    """``look_up`` by ``BITS`` bits of each column from ``BIT`` up, in the part of the table that begins at entry ``FIRST``.

    ``SHARED`` is the table's (offset in bytes, copies, entries).
    """
    OFFSET: tl.constexpr = SHARED[0] + FIRST * VALUES * 2 * SHARED[1]
    COPIES: tl.constexpr = SHARED[1]
    ENTRIES: tl.constexpr = SHARED[2] - FIRST
    if BIT % 16 + BITS > 16:
        found = look_up(straddling(planes, BIT, BITS, FAST), table + FIRST * VALUES, 0, BITS, VALUES, OFFSET, COPIES, ENTRIES, FAST)
    else:
        found = look_up(planes[BIT // 16], table + FIRST * VALUES, BIT % 16, BITS, VALUES, OFFSET, COPIES, ENTRIES, FAST)
    return found
