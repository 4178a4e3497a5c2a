"""Inline PTX for lookup tables in shared memory: declaration, filling and lookups. All use the symbol ``kvpack_tables``.

``shared_table`` and ``thread_lookups`` have plain Triton versions of the operations.
"""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import triton
from triton import language as tl

from kvpack.kernels.triton_internals import COMPILER_BYTES, SHARED_MEMORY

BANK_BYTES = 128
"""Number of bytes that a warp can read at once without bank conflicts: 32 banks of 4 bytes."""

MAX_STATIC_BYTES = 40 << 10
"""Maximum bytes of tables, of both sides together, that PTX declares, out of 48 KiB. Larger tables use dynamic shared memory."""


MATRIX_ALIGNMENT = 1024
"""Alignment of operands of matrix instructions at compute capability 9.0. The compiler's shared memory must begin at a multiple of it."""


@triton.constexpr_function
def declare_ptx(size: int) -> str:
    """Return PTX that declares ``kvpack_tables``, the address of the tables.

    Tables of up to ``MAX_STATIC_BYTES`` bytes are declared before the compiler's memory, and padded so that it begins at a multiple of
    ``MATRIX_ALIGNMENT``. Larger tables are in the launch's dynamic shared memory, after the compiler's memory.
    """
    if size > MAX_STATIC_BYTES:
        place = f"mov.u32 kvpack_tables, {SHARED_MEMORY}; add.u32 kvpack_tables, kvpack_tables, {COMPILER_BYTES};"
        return f".reg .b32 kvpack_tables; {place} mov.u32 $0, 0;"
    whole = -(-size // MATRIX_ALIGNMENT) * MATRIX_ALIGNMENT
    return f".shared .align {MATRIX_ALIGNMENT} .b8 kvpack_tables[{whole}]; mov.u32 $0, 0;"


@triton.constexpr_function
def fill_ptx(offset: int, entries: int, entry_words: int, copies: int) -> str:
    """Return PTX that stores the copies of one entry per thread, 16 bytes at a time. Different lanes begin at different banks."""
    run = 4 * entry_words * copies
    value = ["$1", "$1"] if entry_words == 1 else ["first", "second"]
    unpack = "" if entry_words == 1 else "mov.b64 {first, second}, $1;"
    if run < BANK_BYTES // 8:
        stores = f"@real st.shared.v{run // 4}.b32 [place + {offset}], {{{', '.join((value * run)[: run // 4])}}};"
        if run == 4:
            stores = f"@real st.shared.b32 [place + {offset}], $1;"
    else:
        stores = ""
        for number in range(run // 16):
            stores += f"""
                add.u32 at, lane, {number}; and.b32 at, at, {run // 16 - 1}; shl.b32 at, at, 4; add.u32 at, at, place;
                @real st.shared.v4.b32 [at + {offset}], {{{", ".join(value * 2)}}};"""
    return f"""{{
        .reg .pred real; .reg .b32 first, second, lane, at, place;
        setp.lt.u32 real, $2, {entries}; mov.u32 lane, %laneid; {unpack}
        mov.u32 place, kvpack_tables; mad.lo.u32 place, $2, {run}, place;
        {stores} mov.u32 $0, 0;
    }}"""


@triton.constexpr_function
def tile_lookup_ptx(position: int, bits: int, values: int, offset: int, copies: int, entries: int) -> str:
    """Return PTX that looks up a table entry for each of the two 16-bit words in a register.

    An index is ``bits`` bits of a word, beginning at bit ``position``. An entry has ``values`` float16 values (2 or 4). An index past
    ``entries`` selects the last entry.
    """
    entry_bytes = 2 * values
    stride, own = (entry_bytes * copies).bit_length() - 1, (entry_bytes - 1).bit_length()
    mask = ((1 << bits) - 1) << stride
    beyond = f"min.u32 {{0}}, {{0}}, {entries * entry_bytes * copies - entry_bytes};" if 1 << bits > entries else ""
    registers = [f"${number}" for number in range(values)]
    word = f"${values}"

    def entry_offset(name: str, first: int) -> str:
        move = f"shr.b32 {name}, {word}, {first - stride};" if first >= stride else f"shl.b32 {name}, {word}, {stride - first};"
        return f"{move} lop3.b32 {name}, {name}, {mask}, lane, 0xEA; {beyond.format(name)}"

    load = "ld.shared.b32 {0}0," if values == 2 else "ld.shared.v2.b32 {{{0}0, {0}1}},"
    loads = f"{load.format('a')} [low + {offset}]; {load.format('b')} [high + {offset}];"
    joined = "".join(
        f"prmt.b32 {register}, a{number // 2}, b{number // 2}, {'0x7632' if number % 2 else '0x5410'};"
        for number, register in enumerate(registers)
    )
    table = "mov.u32 base, kvpack_tables; add.u32 low, low, base; add.u32 high, high, base;"
    return f"""{{
        .reg .b32 lane, low, high, base, a0, a1, b0, b1;
        mov.u32 lane, %laneid; and.b32 lane, lane, {copies - 1}; shl.b32 lane, lane, {own};
        {entry_offset("low", position)} {entry_offset("high", 16 + position)}
        {table} {loads} {joined}
    }}"""


@triton.constexpr_function
def column_lookup_ptx(bits: int, offset: int, copies: int, multiplied: bool) -> str:
    """Return PTX that looks up the codes in two 32-bit words, in tables whose entries have two equal halves.

    The inputs are the two words, then a number for each word, then an offset for each word. The number turns its word's code into a byte
    offset: it is a right rotation or, if ``multiplied``, a factor. The offset is the byte position of the first table entry, a multiple of
    the table's size.
    """
    mask = ((1 << bits) - 1) * 4 * copies

    def load_entry(name: str, word: int, rotation: int, first: int) -> str:
        return f"""or.b32 first, lane, ${first}; {_move_word(name, f"${word}", f"${rotation}", multiplied)}
            lop3.b32 {name}, {name}, {mask}, first, 0xEA; add.u32 {name}, {name}, base; ld.shared.b32 {name}, [{name} + {offset}];"""

    return f"""{{
        .reg .b32 lane, first, base, low, high;
        mov.u32 lane, %laneid; and.b32 lane, lane, {copies - 1}; shl.b32 lane, lane, 2; mov.u32 base, kvpack_tables;
        {load_entry("low", 1, 3, 5)} {load_entry("high", 2, 4, 6)} prmt.b32 $0, low, high, 0x5410;
    }}"""


@triton.constexpr_function
def _move_word(name: str, word: str, by: str, multiplied: bool) -> str:
    return f"mul.lo.u32 {name}, {word}, {by};" if multiplied else f"shf.r.wrap.b32 {name}, {word}, {word}, {by};"


@triton.constexpr_function
def pair_lookup_ptx(bits: int, joint: bool, offset: int, copies: int, multiplied: bool) -> str:
    """Return PTX that looks up a 16-bit entry for each of two neighboring codes of a word.

    With ``joint``, one table entry for both codes contains the two values. Otherwise, they are the low halves of two table entries. The
    inputs are those of ``column_lookup_ptx``, for one word.
    """
    unit = 4 * copies
    load = f"add.u32 {{0}}, {{0}}, base; ld.shared.b32 {{0}}, [{{0}} + {offset}];"
    start = f"""{{
        .reg .b32 lane, base, low, high;
        mov.u32 lane, %laneid; and.b32 lane, lane, {copies - 1}; shl.b32 lane, lane, 2; mov.u32 base, kvpack_tables; or.b32 lane, lane, $3;
        {_move_word("low", "$1", "$2", multiplied)}"""
    if joint:
        return f"""{start} lop3.b32 low, low, {((1 << 2 * bits) - 1) * unit}, lane, 0xEA; {load.format("low")} mov.b32 $0, low; }}"""
    mask = ((1 << bits) - 1) * unit
    return f"""{start} shf.r.wrap.b32 high, low, low, {bits};
        lop3.b32 low, low, {mask}, lane, 0xEA; lop3.b32 high, high, {mask}, lane, 0xEA;
        {load.format("low")} {load.format("high")} prmt.b32 $0, low, high, 0x5410; }}"""


SELECT_BY_BIT = tl.constexpr(
    """{ .reg .b32 low, high;
        shf.r.wrap.b32 low, $1, $1, $3; shf.r.wrap.b32 high, $2, $2, $4;
        prmt.b32 low, low, high, 0xFFBB; lop3.b32 $0, low, $6, $5, 0x6A; }"""
)
"""PTX that selects two 16-bit values, each by one bit of its own word. A value is one input, XORed with a second input if the bit is 1.

The inputs are the words, the amount by which each word is rotated right so that its bit is the highest, and the first and second inputs of
both values in one register each.
"""


@triton.constexpr_function
def entry_lookup_ptx(words: int, offset: int, copies: int, entry_bytes: int) -> str:
    """Return PTX that reads the first ``words`` words (1 or 2) of an entry, from the copy in the thread's own banks.

    The input is the address of the first copy.
    """
    own = (entry_bytes - 1).bit_length()
    load = "ld.shared.b32 $0, [place]" if words == 1 else "ld.shared.v2.b32 {$0, $1}, [place]"
    return f"""{{
        .reg .b32 lane, place, base;
        mov.u32 lane, %laneid; and.b32 lane, lane, {copies - 1}; shl.b32 lane, lane, {own};
        or.b32 place, ${words}, lane; mov.u32 base, kvpack_tables; add.u32 place, place, base;
        {load.replace("]", f" + {offset}]")};
    }}"""


@triton.constexpr_function
def field_lookup_ptx(pieces: tuple[tuple[int, int, int, int], ...], words: int, offset: int, stride: int) -> str:
    """Return PTX that reads the first ``words`` words of a table entry, from the copy for the thread's lane.

    Each of ``pieces`` contains the fields of a ``BitPiece`` for one part of the index. The inputs are the words that store these parts, in
    the same order. The first entry is at byte ``offset`` of the shared tables, and entries are ``stride`` bytes apart, a power of two.
    """
    own = 2 + words // 2
    copies = stride >> own
    text = f"mov.u32 place, %laneid; and.b32 place, place, {copies - 1}; shl.b32 place, place, {own};"
    for number, piece in enumerate(pieces):
        _, at, count, value_bit = piece
        target = stride.bit_length() - 1 + value_bit
        move = f"shr.b32 part, ${words + number}, {at - target}" if at >= target else f"shl.b32 part, ${words + number}, {target - at}"
        text += f"{move}; lop3.b32 place, part, {((1 << count) - 1) << target}, place, 0xEA;"
    load = "ld.shared.b32 $0," if words == 1 else "ld.shared.v2.b32 {$0, $1},"
    return f"""{{
        .reg .b32 part, place, base;
        {text} mov.u32 base, kvpack_tables; add.u32 place, place, base; {load} [place + {offset}];
    }}"""


@triton.constexpr_function
def register_constraints(outputs: int, inputs: int) -> str:
    return ",".join(["=r"] * outputs + ["r"] * inputs)


@triton.constexpr_function
def triplet_lookup_ptx(offset: int, copies: int, sign_byte: int) -> str:
    """Return PTX that looks up two triplets with positive coordinates, and then applies the signs of x and y.

    The two bytes of one half of a word are the table indices. The outputs are f16x2: (x, y) of each triplet, and z of both. The inputs come
    in pairs of equal registers: the word, the number of the half, then four words whose bytes begin with the signs of x and y, two for each
    triplet. In each half, the first triplet's signs are in byte 0, and the second triplet's in byte ``sign_byte``.
    """
    stride = (8 * copies).bit_length() - 1
    mask = 255 << stride
    return f"""{{
        .reg .b32 lane, base, at, first, second, z0, z1, signs, select;
        mov.u32 lane, %laneid; and.b32 lane, lane, {copies - 1}; shl.b32 lane, lane, 3; mov.u32 base, kvpack_tables;
        shl.b32 at, $5, 4; add.u32 at, at, {32 - stride}; shf.r.wrap.b32 first, $3, $3, at;
        lop3.b32 first, first, {mask}, lane, 0xEA; add.u32 first, first, base;
        add.u32 at, at, 8; shf.r.wrap.b32 second, $3, $3, at;
        lop3.b32 second, second, {mask}, lane, 0xEA; add.u32 second, second, base;
        ld.shared.v2.b32 {{$0, z0}}, [first + {offset}]; ld.shared.v2.b32 {{$1, z1}}, [second + {offset}];
        prmt.b32 $2, z0, z1, 0x5410;
        mul.lo.u32 select, $5, {0x2020}; add.u32 select, select, {0xC080};
        prmt.b32 signs, $7, $9, select; lop3.b32 $0, signs, 0x80008000, $0, 0x6A;
        add.u32 select, select, {0x1010 * sign_byte};
        prmt.b32 signs, $11, $13, select; lop3.b32 $1, signs, 0x80008000, $1, 0x6A;
    }}"""


@triton.constexpr_function
def word_lookup_ptx(position: int, bits: int, offset: int, copies: int, whole: bool) -> str:
    """Return PTX that looks up two entries of two float16 values each, by the lower and by the upper word of a register.

    An index is ``bits`` bits of a word, beginning at bit ``position``. Unless ``whole``, words have 24 bits, and the second input contains
    their upper bytes. The third input is then 0 or 8: the bit of the second input's halves at which both bytes begin.
    """
    stride = 1 + copies.bit_length()
    mask = ((1 << bits) - 1) << stride
    columns = "" if whole else """and.b32 select, $4, 8; shl.b32 select, select, 5;
        add.u32 select, select, 0x0410; prmt.b32 low, $2, $3, select; add.u32 select, select, 0x0222; prmt.b32 high, $2, $3, select;"""

    def entry_address(name: str, word: str, first: int) -> str:
        move = f"shr.b32 {name}, {word}, {first - stride};" if first >= stride else f"shl.b32 {name}, {word}, {stride - first};"
        return f"{move} lop3.b32 {name}, {name}, {mask}, lane, 0xEA; add.u32 {name}, {name}, base;"

    high = entry_address("high", "$2", 16 + position) if whole else entry_address("high", "high", position)
    return f"""{{
        .reg .b32 lane, low, high, base, select;
        mov.u32 lane, %laneid; and.b32 lane, lane, {copies - 1}; shl.b32 lane, lane, 2; mov.u32 base, kvpack_tables;
        {columns} {entry_address("low", "$2" if whole else "low", position)} {high}
        ld.shared.b32 $0, [low + {offset}]; ld.shared.b32 $1, [high + {offset}];
    }}"""
