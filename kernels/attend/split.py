"""Attention kernel over packed tokens: each program processes one work item, and ``merge`` then combines the results.

A program has a block of query rows (the q_len queries of all query heads of one KV head) and processes its tokens in tiles ``[warp,
token]``. Each warp has its own tokens, scores and sums, independent of the other warps until the merge. Scores are S^T = K q^T and sums O^T
= V^T P^T, so that the few query rows are the short side of matrix products.

If a token has few words, a tile row contains the words of two tokens (``Tiles.dual``), neighboring or further apart. Each query row then
occurs twice: once with zeros for the columns of the second token, and once with zeros for the columns of the first token. This separates
the two tokens on matrix units that would otherwise idle; the two results of a row are added at the end.

Sources: split-K flash decoding with a log-sum-exp merge; OCTOPUS Eq. 13 for queries and values in the coded frame.
"""

# Triton compiles neither unpacking nor conditional expressions of tensors.
# ruff: noqa: SIM108
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

import triton
from triton import language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kvpack.kernels.bitpack.bitfields import load_column_fields
from kvpack.kernels.bitpack.tile_layout import second_token_offset
from kvpack.kernels.loaders.key_mean import declare_products
from kvpack.kernels.loaders.outlier_patches import declare_patches
from kvpack.kernels.tiles.table_setup import begin_tables, fill_tables
from kvpack.kernels.tiles.work import POSITION_BIAS, limit_to_length, load_tiles, load_work, prefetch, skip_unseen

from .means import load_means, multiply_page_means
from .patches import begin_patches, load_patches, next_patches
from .queries import load_queries, relative_to, with_scale
from .scores import DecodeConstants, VisibleTokens, score
from .softmax import Softmax, add, empty_softmax, merge_tokens

COUNTS = ["items", "heads", "row_blocks", "rows", "first_part", "parts", "position", "q_len", "ahead", "window"]
"""Arguments that change from call to call and must not cause a recompilation."""


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=["lengths", "starts"])
def attend_split(
    sums_out: tl.tensor,
    largest_out: tl.tensor,
    total_out: tl.tensor,
    q: tl.tensor,
    scales: tl.tensor,
    products: tl.tensor,
    mean_q: tl.tensor,
    work_table: tl.tensor,
    iota: tl.tensor,
    k_table: tl.tensor,
    v_table: tl.tensor,
    lengths: tl.tensor,
    starts: tl.tensor | None,
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
    WHOLE_TILES: tl.constexpr,
    LOADS_AHEAD: tl.constexpr,
    LATE: tl.constexpr,
    PREFETCH: tl.constexpr,
    FAST: tl.constexpr,
    LENGTHS: tl.constexpr,
    CUT: tl.constexpr,
    DEPENDENT: tl.constexpr,
    FIRST: tl.constexpr,
) -> None:
    """Attend to one work item for one KV head and one block of query rows, and write one partial result per warp.

    ``work_table`` is int64 ``[item, WORK_ROW]`` (``work.load_work``), and ``iota`` is int16 0, 1, 2, ... for ``load_column_fields``.
    ``k_table`` and ``v_table`` are float16 ``[table, entry, value]``. ``q``, float32 ``[batch, head, column, row]``, and ``scales``,
    float32 ``[batch, head, row]``, are padded to whole row blocks. If keys have means, ``mean_q`` is the query for
    ``means.multiply_page_means``. Without ``FAST``, ``products`` has room for each program's products with page means, float32
    ``[program, page, row]``. The outputs are ``sums_out``, float32 ``[batch, head, row, part, column]``, and ``largest_out`` and
    ``total_out``, ``[batch, head, row, part]``. With ``LENGTHS``, ``lengths``, int32 ``[batch]``, contains the sequence lengths;
    ``position`` is the position of the first query in a sequence of full length. With ``CUT``, the kernel skips the tokens before a
    sequence's windows and, unless ``starts`` is None, before its entry in ``starts``, int32 ``[batch]``.

    Without ``WHOLE_TILES``, all tiles of all work items are masked, so that there is one loop to compile instead of two. With ``LATE``,
    values are loaded only after the scores of their tokens are computed, to save registers. With ``PREFETCH``, the rows of the next tokens
    are prefetched into the L2 cache; with ``LOADS_AHEAD``, they are loaded into registers.
    """
    # Triton 3.6 accepts tuples and strings as function arguments only if they are bound to a name.
    DUAL: tl.constexpr = K.dual or V.dual
    ROW_TOKENS: tl.constexpr = 2 if DUAL else 1
    ADJACENT: tl.constexpr = DUAL and second_token_offset(DUAL, TOKENS) == 1
    OUTLIERS: tl.constexpr = K.outliers is not None or V.outliers is not None
    K_CONSTANTS: tl.constexpr = K.constants
    MEANS: tl.constexpr = K.means
    # Number of tokens in one tile of every warp, and in all tiles of one iteration.
    SPAN: tl.constexpr = WARPS * ROW_TOKENS * TOKENS
    STEP: tl.constexpr = TILES * SPAN
    program = tl.program_id(0)
    item = program % items
    block = program // items % row_blocks
    sequence = program // items // row_blocks
    batch = (sequence // heads).to(tl.int64)
    head = (sequence % heads).to(tl.int64)
    if DEPENDENT and not FIRST:
        gdc_launch_dependents()

    # Load the work item, start copying tables to shared memory, and load the queries.
    k_table += sequence % K.tables * K.table_values
    v_table += sequence % V.tables * V.table_values
    table_entries = begin_tables(k_table, v_table, TABLES, WARPS)
    if PATCHES:
        declare_patches(PATCHES, WARPS)
    if K.means is not None and FAST:
        declare_products(MEANS, BLOCK, WARPS)
    work = load_work(work_table + item * WORK_ROW, batch, head, K, V)
    # Loads that are not issued ahead of time are serialized by barriers: a prefetch into the L2 cache overlaps them.
    PREFETCHED: tl.constexpr = STEP if PREFETCH else 0
    if PREFETCHED and not CUT:
        prefetch(work, 0, K, V, 0, PREFETCHED)
    k_lookup = _load_decode_constants(iota, k_table, work.k, K, TOKENS)
    v_lookup = _load_decode_constants(iota, v_table, work.v, V, TOKENS)
    if LENGTHS:
        length = tl.minimum(tl.load(lengths + batch), position + q_len)
        position = length - q_len
        work, skipped = limit_to_length(work, length, position, ahead, window, SPAN, TILES)
    start = None
    if CUT:
        first = position - window + 1
        if starts is not None:
            start = tl.load(starts + batch)
            first = tl.maximum(first, start)
        # The window of the last query begins ``q_len - 1`` tokens after the window of the first.
        work, before = skip_unseen(work, first, tl.maximum(first, position + q_len - window), SPAN, TILES)
        if starts is not None:
            start = (start - work.begin).to(tl.int32)
        if PREFETCHED:
            prefetch(work, 0, K, V, 0, PREFETCHED)
    k, v = work.k, work.v
    means_first = work.means.first
    pages = 0
    if K.means is not None:
        seen_first = means_first
        if CUT:
            seen_first -= before
        first_page = seen_first // MEANS.tokens
        means_first = (means_first - first_page * MEANS.tokens).to(tl.int32)
        products += program.to(tl.int64) * MEANS.pages * BLOCK
        pages = tl.maximum((means_first + work.count + MEANS.tokens - 1) // MEANS.tokens, 1)
        # The compiler does not know that this is 0, so it shares no page numbers with the rows of tiles (``POSITION_BIAS``).
        no_page = tl.minimum(work.count, 0)
        loaded_means = load_means(work.means.streams, first_page, no_page, pages, MEANS, WARPS)
    if DEPENDENT and FIRST:
        # Packed rows may be read before the wait, because they were written before the kernel that writes the queries began.
        gdc_wait()
        gdc_launch_dependents()
    queries = load_queries(
        q, scales, products, pages, sequence, block, row_blocks, position, q_len, K, DUAL, V.paired, WARPS, ROWS, BLOCK, FAST,
    )  # fmt: skip
    if K.run_product is not None:
        queries = with_scale(queries, K.run_product(queries.scale, k.streams, K_CONSTANTS))
    # Each warp attends consecutive tokens in all of its tiles, so warps share nothing but tables until their results are merged.
    token_of_row = tl.arange(0, TOKENS)[None, :] * (2 if ADJACENT else 1)  # [1, token]
    token = tl.arange(0, WARPS)[:, None] * (TILES * ROW_TOKENS * TOKENS) + token_of_row  # [warp, token], of STEP tokens
    span_token = tl.arange(0, WARPS)[:, None] * (ROW_TOKENS * TOKENS) + token_of_row  # [warp, token], of SPAN tokens
    if LOADS_AHEAD:
        # Load the first tiles, with a mask because a program may have no whole tile.
        k_next = load_tiles(k.streams, k.first, token, work.whole, K, TILES * ROW_TOKENS, TOKENS, True)
        v_next = load_tiles(v.streams, v.first, token, work.whole, V, TILES * ROW_TOKENS, TOKENS, True)
    fill_tables(table_entries, TABLES)
    if K.means is not None:
        padded = row_blocks * BLOCK
        mean_q = mean_q.to(tl.pointer_type(tl.float16)) + (sequence.to(tl.int64) * 2 * padded + block * BLOCK) * MEANS.dim
        multiply_page_means(
            products, mean_q, loaded_means, work.means.streams, first_page, no_page, pages, padded, MEANS, BLOCK, WARPS, FAST,
        )  # fmt: skip
    if TABLES.nbytes or PATCHES or K.means is not None:
        tl.debug_barrier()

    # First loop: tiles of tokens that every query sees.
    softmax = empty_softmax(V, WARPS, TOKENS, ROWS)
    if OUTLIERS:
        ready, entries_ahead = begin_patches(work, iota, K, V, WARPS, TILES, TOKENS, WHOLE_TILES, FAST)
    visible = VisibleTokens(work.count, ahead, window, start)
    if WHOLE_TILES:
        for offset in tl.range(0, work.whole, STEP, num_stages=STAGES):
            if PREFETCHED:
                prefetch(work, offset, K, V, PREFETCHED, PREFETCHED)
            load_at = offset
            if LOADS_AHEAD:
                k_loaded, v_loaded = k_next, v_next
                # The last iteration has no next tiles: it loads its own again instead of branching.
                load_at = tl.minimum(offset + STEP, work.whole - STEP)
            k_next = load_tiles(k.streams, k.first + load_at, token, work.count, K, TILES * ROW_TOKENS, TOKENS, False)
            if not LATE:
                v_next = load_tiles(v.streams, v.first + load_at, token, work.count, V, TILES * ROW_TOKENS, TOKENS, False)
                if not LOADS_AHEAD:
                    v_loaded = v_next
            if not LOADS_AHEAD:
                k_loaded = k_next
            if OUTLIERS:
                entries, entries_ahead = next_patches(work, offset, ready, entries_ahead, K, V, WARPS, TILES * TOKENS)
            else:
                entries = ((), ())
            scores = score(
                k_loaded, entries[0], queries, cap, means_first + offset, token, visible, k_lookup, K, DUAL, SOFTCAP, False, FAST,
            )  # fmt: skip
            if LATE:
                v_loaded = load_tiles(v.streams, v.first + offset, token, work.count, V, TILES * ROW_TOKENS, TOKENS, False)
            softmax = add(softmax, scores, v_loaded, entries[1], queries.is_second, v_lookup, V, FAST)

    # Second loop: tiles with tokens that some queries do not see. Token counts of a work item fit in int32.
    queries = relative_to(queries, work.begin)
    masked = work.whole
    if LENGTHS:
        masked = tl.maximum(work.whole, skipped)
    stop = work.count
    if CUT:
        masked = -before
        stop = work.count - work.whole
    for tile in tl.range(masked, stop, SPAN, num_stages=1):
        offset = tile
        if PREFETCHED and not WHOLE_TILES:
            prefetch(work, offset, K, V, PREFETCHED, PREFETCHED)
        if CUT:
            # Process the tiles before the whole ones first, then the tiles after them.
            offset = tile + tl.where(tile < 0, 0, work.whole)
        k_loaded = load_tiles(k.streams, k.first + offset, span_token, work.count - offset, K, ROW_TOKENS, TOKENS, True)
        if not LATE:
            v_loaded = load_tiles(v.streams, v.first + offset, span_token, work.count - offset, V, ROW_TOKENS, TOKENS, True)
        if OUTLIERS:
            entries = load_patches(work, offset, ready, K, V, WARPS, TOKENS)
        else:
            entries = ((), ())
        position_in_work = span_token + POSITION_BIAS + (offset - POSITION_BIAS)
        scores = score(
            k_loaded, entries[0], queries, cap, means_first + offset, position_in_work, visible, k_lookup, K, DUAL, SOFTCAP, True, FAST,
        )  # fmt: skip
        if LATE:
            v_loaded = load_tiles(v.streams, v.first + offset, span_token, work.count - offset, V, ROW_TOKENS, TOKENS, True)
        softmax = add(softmax, scores, v_loaded, entries[1], queries.is_second, v_lookup, V, FAST)

    _store_results(
        softmax, v.streams, queries.is_second, sums_out, largest_out, total_out, sequence, block, row_blocks * BLOCK, rows, parts,
        first_part, item, V, DUAL, WARPS, ROWS, BLOCK, COLUMNS,
    )  # fmt: skip
    if DEPENDENT and not FIRST:
        # The previous launch may still run: the merge waits only for this one, so this one must not end before it.
        gdc_wait()


@triton.jit
def _load_decode_constants(iota: tl.tensor, table: tl.tensor, rows: tl.tuple, SIDE: tl.constexpr, TOKENS: tl.constexpr) -> tl.tuple:
    """Return the ``DecodeConstants`` for tiles of the loader ``SIDE``."""
    FIELDS: tl.constexpr = SIDE.stream_widths
    CONSTANTS: tl.constexpr = SIDE.constants
    if SIDE.load_columns is None:
        columns = load_column_fields(iota, FIELDS)
    else:
        columns = SIDE.load_columns(table, rows, CONSTANTS, TOKENS)
    return DecodeConstants(columns, table)


@triton.jit
def _store_results(
    softmax: tl.tuple,
    streams: tl.tuple,
    is_second: tl.tensor,
    sums_out: tl.tensor,
    largest_out: tl.tensor,
    total_out: tl.tensor,
    sequence: tl.tensor,
    block: tl.tensor,
    padded: tl.tensor,
    rows: tl.tensor,
    parts: tl.tensor,
    first_part: tl.tensor,
    item: tl.tensor,
    V: tl.constexpr,
    DUAL: tl.constexpr,
    WARPS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Write the partial results of a work item, one per warp, to the outputs of ``attend_split``."""
    CONSTANTS: tl.constexpr = V.constants
    softmax = Softmax(softmax.largest, tl.sum(softmax.total, 1)[:, None, :], softmax.sums)
    if DUAL:
        softmax = merge_tokens(softmax, is_second, V)
    row = tl.arange(0, ROWS // 2 if DUAL else ROWS)  # [row]
    EACH: tl.constexpr = 2 if V.paired else 1
    # With paired values, the second half of the rows has the sums of second fields.
    is_first = row < ROWS
    field = 0
    if V.paired:
        is_first = row < ROWS // 2
        field = (row // (ROWS // 2))[None, None, :]
        row = row % (ROWS // 2)
    row = block * BLOCK + row
    warp = tl.arange(0, WARPS)[:, None, None]
    part = (sequence.to(tl.int64) * padded + row[None, None, :]) * parts + first_part + item * WARPS + warp  # [warp, 1, row]
    valid = (row < rows)[None, None, :]
    tl.store(largest_out + part, softmax.largest, valid & is_first[None, None, :])
    tl.store(total_out + part, softmax.total, valid & is_first[None, None, :])
    column = 0
    for index in tl.static_range(len(softmax.sums)):
        # [warp, column, row]
        value = softmax.sums[index]
        if V.run_product is not None:
            value = V.run_product(value, streams, CONSTANTS)
        tl.store(sums_out + part * COLUMNS + column + tl.arange(0, value.shape[1])[None, :, None] * EACH + field, value, valid)
        column += value.shape[1] * EACH
    if V.offset:
        tl.store(sums_out + part * COLUMNS + column, softmax.total, valid & is_first[None, None, :])
