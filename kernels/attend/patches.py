"""Loading of the outliers of keys and values, which are added to tiles. Without outliers, the functions return empty tuples."""

# Triton compiles neither unpacking nor conditional expressions of tensors.
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

import triton
from triton import language as tl

from kvpack.kernels.loaders.outliers import first_entries, next_entries, patch_entries, prepare_patches


@triton.jit
def begin_patches(
    work: tl.tuple,
    iota: tl.tensor,
    K: tl.constexpr,
    V: tl.constexpr,
    WARPS: tl.constexpr,
    TILES: tl.constexpr,
    TOKENS: tl.constexpr,
    AHEAD: tl.constexpr,
    FAST: tl.constexpr,
) -> tl.tuple:
    """Start loading the outliers of keys and of values.

    Returns two pairs (keys, values): the data that all tiles share (``prepare_patches``), and, with ``AHEAD``, the first loads
    (``first_entries``).
    """
    K_OUTLIERS: tl.constexpr = K.outliers
    V_OUTLIERS: tl.constexpr = V.outliers
    k_ready = prepare_patches(work.k.streams, iota, K_OUTLIERS, WARPS, TOKENS, False, AHEAD, FAST)
    v_ready = prepare_patches(work.v.streams, iota, V_OUTLIERS, WARPS, TOKENS, True, AHEAD, FAST)
    k_ahead, v_ahead = (), ()
    if AHEAD:
        k_ahead = first_entries(work.k.streams, work.k.first, work.k.first + work.count, K_OUTLIERS, WARPS, TILES * TOKENS, True)
        v_ahead = first_entries(work.v.streams, work.v.first, work.v.first + work.count, V_OUTLIERS, WARPS, TILES * TOKENS, True)
    return (k_ready, v_ready), (k_ahead, v_ahead)


@triton.jit
def next_patches(
    work: tl.tuple,
    offset: tl.tensor,
    ready: tl.tuple,
    ahead: tl.tuple,
    K: tl.constexpr,
    V: tl.constexpr,
    WARPS: tl.constexpr,
    TOKENS: tl.constexpr,
) -> tl.tuple:
    """Return the outliers of each warp's next ``TOKENS`` tokens, and start loading those of the tokens after them.

    The tokens begin ``offset`` tokens after the first token of the work item. Both results are pairs (keys, values).
    """
    K_OUTLIERS: tl.constexpr = K.outliers
    V_OUTLIERS: tl.constexpr = V.outliers
    k_first = work.k.first + offset
    v_first = work.v.first + offset
    k_entries = patch_entries(ahead[0], work.k.streams, k_first, ready[0], K_OUTLIERS, WARPS, TOKENS, True)
    v_entries = patch_entries(ahead[1], work.v.streams, v_first, ready[1], V_OUTLIERS, WARPS, TOKENS, True)
    k_ahead = next_entries(ahead[0], work.k.streams, k_first, work.k.first + work.count, K_OUTLIERS, WARPS, TOKENS)
    v_ahead = next_entries(ahead[1], work.v.streams, v_first, work.v.first + work.count, V_OUTLIERS, WARPS, TOKENS)
    return (k_entries, v_entries), (k_ahead, v_ahead)


@triton.jit
def load_patches(
    work: tl.tuple,
    offset: tl.tensor,
    ready: tl.tuple,
    K: tl.constexpr,
    V: tl.constexpr,
    WARPS: tl.constexpr,
    TOKENS: tl.constexpr,
) -> tl.tuple:
    """Load the outliers of each warp's ``TOKENS`` tokens. Unlike ``next_patches``, this prefetches nothing for later tokens.

    The tokens begin ``offset`` tokens after the first token of the work item.
    """
    K_OUTLIERS: tl.constexpr = K.outliers
    V_OUTLIERS: tl.constexpr = V.outliers
    k_first = work.k.first + offset
    v_first = work.v.first + offset
    k_bounds = first_entries(work.k.streams, k_first, work.k.first + work.count, K_OUTLIERS, WARPS, TOKENS, False)
    v_bounds = first_entries(work.v.streams, v_first, work.v.first + work.count, V_OUTLIERS, WARPS, TOKENS, False)
    k_entries = patch_entries(k_bounds, work.k.streams, k_first, ready[0], K_OUTLIERS, WARPS, TOKENS, False)
    v_entries = patch_entries(v_bounds, work.v.streams, v_first, ready[1], V_OUTLIERS, WARPS, TOKENS, False)
    return k_entries, v_entries
