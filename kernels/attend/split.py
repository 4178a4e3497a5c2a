"""The attention kernel: one run of packed tokens a program (``merge`` then sums what all runs give).

A program holds a block of query rows (the query heads of one KV head, and their q_len queries) and walks its tokens in tiles
``[warp, token]``: each warp has tokens, scores and sums of its own, and meets no other before the merge. Scores are
S^T = K q^T and sums O^T = V^T P^T, so that the few query rows are the short side of the matrix units' product.

Where rows of words are narrow, a row of a tile is the words of two tokens (``Tiles.dual``), neighbours or some apart.
Each query row is then there twice: first with zeros for the columns of the second token, then with zeros for those of the first.
So what the matrix units idle at anyway tells the tokens apart; the two results of a row are added in the end.

Sources: split-K flash decoding with a log-sum-exp merge; OCTOPUS Eq. 13 for queries and values in the coded frame.
"""

# Triton compiles neither unpacking nor conditional expressions of tensors.
# ruff: noqa: RUF005
# Tuples of tensors grow while a kernel is compiled, and Triton has no types.
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

import triton
from triton import language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kvpack.kernels.loaders.outlier_patches import declare_patches
from kvpack.kernels.loaders.outliers import entries_of, first_entries, next_entries, ready_patches
from kvpack.kernels.loaders.qjl import half_sum, queries_of_bits
from kvpack.kernels.tables.shared_table import declare, fetch, fill
from kvpack.kernels.words.bitfields import load_column_fields
from kvpack.kernels.words.columns import constant_at
from kvpack.kernels.words.tile_layout import second_token_offset

from .query_tiles import query_tiles, sum_of
from .softmax import UNSEEN, add_halves, add_tiles, key_scores
from .tile_loads import load_tiles, prefetch, stream_pointers

COUNTS = ["items", "heads", "row_blocks", "rows", "first_part", "parts", "position", "q_len", "ahead", "window"]
"""Arguments that change from call to call, and for whose values nothing is compiled anew."""

HEADER = 5
"""Integers of a work row before the addresses: first token, tokens, whole tokens, first K row, first V row."""


@triton.jit
def _zeros(WARPS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr) -> tl.tensor:
    return tl.zeros((WARPS, WIDTH, ROWS), tl.float32)


@triton.jit
def _fetched(k_table: tl.tensor, v_table: tl.tensor, FILL: tl.constexpr) -> tl.tuple:
    """The entries that ``FILL`` names, on their way to registers."""
    return fetch(k_table if FILL.side == 0 else v_table, FILL.entries, FILL.values)


@triton.jit
def _fill(entries: tl.tuple, FILL: tl.constexpr) -> None:
    fill(entries, FILL.offset, FILL.entries, FILL.values, FILL.copies)


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=["lengths"])
def attend_split(
    sums_out: tl.tensor,
    largest_out: tl.tensor,
    total_out: tl.tensor,
    q: tl.tensor,
    scales: tl.tensor,
    work: tl.tensor,
    numbers: tl.tensor,
    k_table: tl.tensor,
    v_table: tl.tensor,
    lengths: tl.tensor,
    cap: tl.tensor,
    items: tl.tensor,
    heads: tl.tensor,
    row_blocks: tl.tensor,
    rows: tl.tensor,
    first_part: tl.tensor,
    parts: tl.tensor,
    position: tl.tensor,
    q_len: tl.tensor,
    ahead: tl.tensor,
    window: tl.tensor,
    K: tl.constexpr,
    V: tl.constexpr,
    TABLES: tl.constexpr,
    PATCHES: tl.constexpr,
    WORK_ROW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WARPS: tl.constexpr,
    TILES: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    LOADS_AHEAD: tl.constexpr,
    LATE: tl.constexpr,
    PREFETCH: tl.constexpr,
    FAST: tl.constexpr,
    LENGTHS: tl.constexpr,
    DEPENDENT: tl.constexpr,
    FIRST: tl.constexpr,
) -> None:
    """Attend one work item for one head and one block of rows; write a partial result a warp.

    ``work`` is int64 ``[item, HEADER + 3 a stream]``, a stream being its address and its batch and head strides in bytes;
    ``q`` float32 ``[batch, head, column, row]`` and ``scales`` float32 ``[batch, head, row]`` are padded to whole row blocks.
    ``sums_out`` is float32 ``[batch, head, row, part, column]``, ``largest_out`` and ``total_out`` ``[batch, head, row, part]``.
    ``lengths`` int32 ``[batch]``, read if ``LENGTHS``, are the tokens that each sequence has; ``position`` is that of the first
    query of a sequence of all tokens. ``LATE``: values are loaded after the scores of their tokens. ``PREFETCH``: the rows of the tokens
    that follow are brought to the second-level cache; with ``LOADS_AHEAD`` they are loaded, into registers.
    """
    # Triton 3.6 takes tuples and text as arguments of functions only where they have a name.
    K_DTYPE: tl.constexpr = K.dtype
    K_PLACES: tl.constexpr = K.stream_widths
    V_PLACES: tl.constexpr = V.stream_widths
    K_WIDTHS: tl.constexpr = K.widths
    V_WIDTHS: tl.constexpr = V.widths
    K_SIGNS: tl.constexpr = K.signs
    K_OUTLIERS: tl.constexpr = K.outliers
    V_OUTLIERS: tl.constexpr = V.outliers
    FILLS: tl.constexpr = TABLES.fills
    PAIRS: tl.constexpr = K.dual or V.dual
    TOGETHER: tl.constexpr = 2 if PAIRS else 1
    NEIGHBOURS: tl.constexpr = PAIRS and second_token_offset(PAIRS, TOKENS) == 1
    SPAN: tl.constexpr = WARPS * TOGETHER * TOKENS
    program = tl.program_id(0)
    item = program % items
    block = program // items % row_blocks
    sequence = program // items // row_blocks
    batch = (sequence // heads).to(tl.int64)
    head = (sequence % heads).to(tl.int64)
    if DEPENDENT and not FIRST:
        gdc_launch_dependents()
    if TABLES.nbytes:
        declare(TABLES.nbytes, WARPS)
        entries = ()
        for number in tl.static_range(len(FILLS)):
            entries = entries + (_fetched(k_table, v_table, constant_at(FILLS, number)),)
    if PATCHES:
        declare_patches(PATCHES, WARPS)
    row = work + item * WORK_ROW
    begin = tl.load(row)
    count = tl.load(row + 1).to(tl.int32)
    whole = tl.load(row + 2).to(tl.int32)
    k_first = tl.load(row + 3)
    v_first = tl.load(row + 4)
    k_pointers = stream_pointers(row + 5, batch, head, K)
    v_pointers = stream_pointers(row + 5 + 3 * len(K.streams), batch, head, V)
    # Where tiles are not loaded ahead of time, barriers keep the loads of one from being under way together.
    AHEAD: tl.constexpr = TILES * SPAN if PREFETCH else 0
    if AHEAD:
        prefetch(k_pointers, k_first, tl.minimum(count, AHEAD), K)
        prefetch(v_pointers, v_first, tl.minimum(count, AHEAD), V)
    k_places = load_column_fields(numbers, K_PLACES)
    v_places = load_column_fields(numbers, V_PLACES)
    if LENGTHS:
        length = tl.minimum(tl.load(lengths + batch), position + q_len)
        position = length - q_len
        count = tl.maximum(0, tl.minimum(count, length - begin)).to(tl.int32)
        # The window's first token, and the tokens that all queries see, in whole tiles.
        skipped = tl.maximum(0, position - window + 1 - begin).to(tl.int32) // SPAN * SPAN
        seen = tl.maximum(0, tl.minimum(count, position + 1 + ahead - begin)).to(tl.int32)
        whole = tl.minimum(whole, seen // (TILES * SPAN) * (TILES * SPAN))
    if DEPENDENT and FIRST:
        # The rows were there before the kernel that writes the queries began.
        gdc_wait()
        gdc_launch_dependents()
    padded = row_blocks * BLOCK
    columns: tl.constexpr = sum_of(K_WIDTHS)
    row_number = tl.arange(0, ROWS)
    second = (row_number >= ROWS // 2)[None, None, :]
    if PAIRS:
        row_number = row_number % (ROWS // 2)
    row_number += block * BLOCK
    q_begin = q + sequence.to(tl.int64) * columns * padded
    q_tiles = query_tiles(q_begin, row_number, second, padded, K_WIDTHS, K_DTYPE, WARPS, K.dual, K.interleave, PAIRS)
    SETS: tl.constexpr = 2 if PAIRS and not K.dual else 1
    q_tiles = queries_of_bits(q_tiles, K_SIGNS, SETS)
    q_half_sum = 0.0
    if K_SIGNS is not None:
        q_half_sum = half_sum(q_tiles, K_SIGNS, SETS)
    scale = tl.load(scales + sequence * padded + row_number)[None, None, :]
    at = position + (row_number % q_len)[None, None, :]
    # Tokens of a warp lie side by side, whatever tiles they are cut into.
    token_of_row = tl.arange(0, TOKENS)[None, :] * (2 if NEIGHBOURS else 1)
    token = tl.arange(0, WARPS)[:, None] * (TILES * TOGETHER * TOKENS) + token_of_row
    near = tl.arange(0, WARPS)[:, None] * (TOGETHER * TOKENS) + token_of_row
    if LOADS_AHEAD:
        # A program without whole tiles has nothing to load.
        k_next = load_tiles(
            k_pointers, k_first, token, whole,
            K, TILES * TOGETHER, TOKENS, True, False, FAST,
        )  # fmt: skip
        v_next = load_tiles(
            v_pointers, v_first, token, whole,
            V, TILES * TOGETHER, TOKENS, True, True, FAST,
        )  # fmt: skip
    if TABLES.nbytes:
        for number in tl.static_range(len(FILLS)):
            _fill(entries[number], constant_at(FILLS, number))
    if TABLES.nbytes or PATCHES:
        tl.debug_barrier()
    largest = tl.full((WARPS, 1, ROWS), UNSEEN, tl.float32)
    total = tl.zeros((WARPS, TOKENS, ROWS), tl.float32)
    sums = ()
    for number in tl.static_range(len(V_WIDTHS)):
        sums = sums + (_zeros(WARPS, 2 * V_WIDTHS[number] if V.dual else V_WIDTHS[number], ROWS),)
    # Where registers do not hold a tile ahead of time, they do not hold its entries either.
    ENTRIES_AHEAD: tl.constexpr = STAGES > 1
    k_ready = ready_patches(k_pointers, numbers, K_OUTLIERS, WARPS, TOKENS, False, ENTRIES_AHEAD, FAST)
    v_ready = ready_patches(v_pointers, numbers, V_OUTLIERS, WARPS, TOKENS, True, ENTRIES_AHEAD, FAST)
    k_ahead = first_entries(k_pointers, k_first, k_first + count, K_OUTLIERS, WARPS, TILES * TOKENS, ENTRIES_AHEAD)
    v_ahead = first_entries(v_pointers, v_first, v_first + count, V_OUTLIERS, WARPS, TILES * TOKENS, ENTRIES_AHEAD)
    for offset in tl.range(0, whole, TILES * SPAN, num_stages=STAGES):
        if AHEAD:
            prefetch(k_pointers, k_first + offset + AHEAD, tl.minimum(count - offset - AHEAD, AHEAD), K)
            prefetch(v_pointers, v_first + offset + AHEAD, tl.minimum(count - offset - AHEAD, AHEAD), V)
        at_load = offset
        if LOADS_AHEAD:
            k_raws, v_raws = k_next, v_next
            # Those of the last tiles again, after them.
            at_load = tl.minimum(offset + TILES * SPAN, whole - TILES * SPAN)
        k_next = load_tiles(
            k_pointers, k_first + at_load, token, count,
            K, TILES * TOGETHER, TOKENS, False, False, FAST,
        )  # fmt: skip
        if not LATE:
            v_next = load_tiles(
                v_pointers, v_first + at_load, token, count,
                V, TILES * TOGETHER, TOKENS, False, True, FAST,
            )  # fmt: skip
            if not LOADS_AHEAD:
                v_raws = v_next
        if not LOADS_AHEAD:
            k_raws = k_next
        k_entries = entries_of(k_ahead, k_pointers, k_first + offset, k_ready, K_OUTLIERS, WARPS, TILES * TOKENS, ENTRIES_AHEAD)
        v_entries = entries_of(v_ahead, v_pointers, v_first + offset, v_ready, V_OUTLIERS, WARPS, TILES * TOKENS, ENTRIES_AHEAD)
        k_ahead = next_entries(k_ahead, k_pointers, k_first + offset, k_first + count, K_OUTLIERS, WARPS, TILES * TOKENS, ENTRIES_AHEAD)
        v_ahead = next_entries(v_ahead, v_pointers, v_first + offset, v_first + count, V_OUTLIERS, WARPS, TILES * TOKENS, ENTRIES_AHEAD)
        scores = key_scores(
            k_raws, k_entries, q_tiles, q_half_sum, scale, cap, at, token, second, count, ahead, window, k_places, k_table, total,
            K, V, SOFTCAP, False, FAST,
        )  # fmt: skip
        if LATE:
            v_raws = load_tiles(
                v_pointers, v_first + offset, token, count,
                V, TILES * TOGETHER, TOKENS, False, True, FAST,
            )  # fmt: skip
        largest, total, sums = add_tiles(
            scores, v_raws, v_entries, second, v_places, v_table, largest, total, sums,
            V, FAST,
        )  # fmt: skip
    # Query positions relative to the run's first token: all counts of tokens in a run fit an int32.
    at = (at - begin).to(tl.int32)
    masked = whole
    if LENGTHS:
        masked = tl.maximum(whole, skipped)
    for offset in tl.range(masked, count, SPAN, num_stages=1):
        k_raws = load_tiles(
            k_pointers, k_first + offset, near, count - offset,
            K, TOGETHER, TOKENS, True, False, FAST,
        )  # fmt: skip
        if not LATE:
            v_raws = load_tiles(
                v_pointers, v_first + offset, near, count - offset,
                V, TOGETHER, TOKENS, True, True, FAST,
            )  # fmt: skip
        k_bounds = first_entries(k_pointers, k_first + offset, k_first + count, K_OUTLIERS, WARPS, TOKENS, False)
        v_bounds = first_entries(v_pointers, v_first + offset, v_first + count, V_OUTLIERS, WARPS, TOKENS, False)
        k_entries = entries_of(k_bounds, k_pointers, k_first + offset, k_ready, K_OUTLIERS, WARPS, TOKENS, False)
        v_entries = entries_of(v_bounds, v_pointers, v_first + offset, v_ready, V_OUTLIERS, WARPS, TOKENS, False)
        scores = key_scores(
            k_raws, k_entries, q_tiles, q_half_sum, scale, cap, at, near + offset, second, count, ahead, window, k_places, k_table, total,
            K, V, SOFTCAP, True, FAST,
        )  # fmt: skip
        if LATE:
            v_raws = load_tiles(
                v_pointers, v_first + offset, near, count - offset,
                V, TOGETHER, TOKENS, True, True, FAST,
            )  # fmt: skip
        largest, total, sums = add_tiles(
            scores, v_raws, v_entries, second, v_places, v_table, largest, total, sums,
            V, FAST,
        )  # fmt: skip
    total = tl.sum(total, 1)[:, None, :]
    if PAIRS:
        largest, total, sums = add_halves(largest, total, sums, second, V)
        row_number = block * BLOCK + tl.arange(0, ROWS // 2)
    warp = tl.arange(0, WARPS)[:, None, None]
    part = (sequence.to(tl.int64) * padded + row_number[None, None, :]) * parts + first_part + item * WARPS + warp
    real = (row_number < rows)[None, None, :]
    tl.store(largest_out + part, largest, real)
    tl.store(total_out + part, total, real)
    done = 0
    for number in tl.static_range(len(V_WIDTHS)):
        tl.store(sums_out + part * COLUMNS + done + tl.arange(0, V_WIDTHS[number])[None, :, None], sums[number], real)
        done += V_WIDTHS[number]
    if DEPENDENT and not FIRST:
        # The launch before runs beside this one, and the merge waits for the last of them.
        gdc_wait()
