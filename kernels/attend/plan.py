"""Work of attention programs: which tokens each one attends to, and with which loaders.

A layer's tokens are cut where a page of either side begins or ends, and where a program has enough. All segments with the same two codecs
form one launch, with the raw tail as a page of raw values. Its work is a table on the device with one row per program.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy
import torch

from kvpack.kernels.loaders.tiles import NEIGHBOURS
from kvpack.kernels.tiles import addresses, device_tables, frame_columns, loaders
from kvpack.kernels.tiles.addresses import aligned_streams
from kvpack.kernels.tiles.bound_loader import bind
from kvpack.kernels.tiles.frame_columns import loader
from kvpack.kernels.tiles.shapes import LaunchShape, in_patches, shape_of, table_budget
from kvpack.kernels.tiles.work import FIRST_ADDRESS, STREAM_INTEGERS

from . import segments
from .means import means_of

if TYPE_CHECKING:
    from kvpack.formats.base import Codec
    from kvpack.kernels.loaders.tiles import Tiles
    from kvpack.kernels.tiles.layers import Layer, Side

    from .means import Means
    from .segments import Frame, Segment, SideSegment

INTERPRETED_MULTIPROCESSORS = 2

PREFETCHED_WITH_SIGNS = 1500
"""Minimum number of tokens per multiprocessor for prefetching to pay off with signs."""

MASKED_TILES = 3
"""Whole tiles that take as long as the extra work of a masked tile: neither it nor its code is prefetched."""


PROGRAM_TILES = 3
"""Tiles that take as long as a program's fixed costs."""

MAX_ROUNDS, MIN_TILES = 4, 8
"""Maximum rounds of concurrent programs, and minimum tiles per program if there is more than one."""


class Kernel(NamedTuple):
    """Common properties of the segments in one launch: the frames of both sides, and whether each side is decoded beforehand."""

    k: Frame
    v: Frame
    k_decoded: bool
    v_decoded: bool


_plans: WeakKeyDictionary[Layer, dict[Any, list[Launch]]] = WeakKeyDictionary()


@dataclass(frozen=True, eq=False)
class Launch:
    """One kernel over all segments with the same two codecs: its ``work`` (see ``split.attend_split``) and compile-time constants.

    ``held`` are the tensors whose addresses the work contains. The device runs ``programs`` at once for each sequence and block of rows.
    ``has_tail``: some of its tokens are in a raw tail; ``tail_alone``: all are. ``fills``: no multiprocessor gets more programs than its
    share, even while another kernel finishes on some of them.
    """

    k: Frame
    v: Frame
    shape: LaunchShape
    work: torch.Tensor
    means: Means | None
    tables: tuple[torch.Tensor, torch.Tensor]
    constants: dict[str, Any]
    held: tuple[torch.Tensor, ...]
    programs: int
    has_tail: bool
    tail_alone: bool
    fills: bool

    @property
    def parts(self) -> int:
        """Number of partial results that it writes for each query row."""
        return self.work.shape[0] * self.shape.warps

    @property
    def dual(self) -> bool:
        """True if a row of its scores belongs to two tokens (``split``)."""
        return bool(self.constants["K"].dual or self.constants["V"].dual)


def _loaders(k: Codec, v: Codec, dual: bool) -> tuple[Tiles, Tiles]:
    """Return the loaders of both sides, for two neighboring tokens per row if the loaders and token groups allow it."""
    keys, values = loader(k, dual), loader(v, dual)
    result = keys.keys or keys, values.values or values
    if all(tiles.dual and (tiles.whole_groups == 1 or tiles.whole_groups % (2 * tiles.tokens) == 0) for tiles in result):
        k_tiles, v_tiles = (loaders.dual_tiles_of(codec, NEIGHBOURS) for codec in (k, v))
        assert k_tiles is not None
        assert v_tiles is not None
        result = k_tiles, v_tiles
    return result


@lru_cache(maxsize=16)
def overlaps(device: torch.device) -> bool:
    """Return True if a kernel can start while the previous one finishes (programmatic dependent launch)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def launches(k: Side, v: Side, layer: Layer, begin: int, end: int, whole: tuple[int, int], row_blocks: int, dual: bool) -> list[Launch]:
    """Return the launches that attend to tokens ``[begin, end)``, cached with the layer; every query sees all of ``whole``.

    ``dual``: query rows are few enough for tiles of two tokens per row.
    """
    kept = _plans.setdefault(layer, {})
    key = (begin, end, whole, row_blocks, dual, addresses.uses_assembly(k.device))
    if key not in kept:
        kept[key] = planned(k, v, begin, end, whole, row_blocks, dual)
    return kept[key]


def planned(
    k: Side, v: Side, begin: int, end: int, whole: tuple[int, int], row_blocks: int, dual: bool, growing: bool = False
) -> list[Launch]:
    """Plan ``launches`` without the cache; for a ``growing`` layer, the work stays on the host."""
    fast = addresses.uses_assembly(k.device)
    by_kernel: dict[Kernel, list[Segment]] = {}
    for segment in segments.of_layer(segments.of_side(k).segments, segments.of_side(v).segments, begin, end):
        # Where one side is decoded so is the other, if it is packed: one kernel then attends all such segments.
        raw = segment.k.raw or segment.v.raw
        kernel = Kernel(segment.k.frame, segment.v.frame, raw and segment.k.page is not None, raw and segment.v.page is not None)
        by_kernel.setdefault(kernel, []).append(segment)
    sequences = k.batch * k.heads * row_blocks
    launches = []
    # Partial results of one frame of the values are side by side. The most tokens first: other launches then run alongside them.
    most_first = sorted(by_kernel, key=lambda kernel: -sum(segment.tokens for segment in by_kernel[kernel]))
    frames = list(dict.fromkeys(kernel.v for kernel in most_first))
    for kernel in sorted(most_first, key=lambda kernel: frames.index(kernel.v)):
        result = by_kernel[kernel]
        if kernel.k_decoded:
            result = segments.decoded(result, frame_columns.columns(kernel.k.codec, dual), "k")
        if kernel.v_decoded:
            result = segments.decoded(result, frame_columns.columns(kernel.v.codec, dual), "v")
        launches.append(_launch(result, kernel.k, kernel.v, whole, sequences, dual, k.device, fast, growing))
    return launches


def _launch(
    found: list[Segment],
    k: Frame,
    v: Frame,
    whole: tuple[int, int],
    sequences: int,
    dual: bool,
    device: torch.device,
    fast: bool,
    growing: bool,
) -> Launch:
    k_tiles, v_tiles = _loaders(found[0].k.codec, found[0].v.codec, dual)
    shared, tables, places = device_tables.of_sides(k_tiles, v_tiles, device, fast, table_budget(k_tiles, v_tiles))
    tokens = sum(segment.tokens for segment in found)
    aligned = math.gcd(*(segment.first - own.first for segment in found for own in (segment.k, segment.v)))
    share = tokens * sequences // _multiprocessors(device)
    shape = shape_of(k_tiles, v_tiles, shared.nbytes, share, aligned, fast)
    tile = shape.warps * shape.tiles * shape.tokens * (2 if k_tiles.dual or v_tiles.dual else 1)
    programs = programs_of(shape, tokens, tile, sequences, _multiprocessors(device))
    if found[0].k.page is found[0].v.page is None and tokens <= programs * tile:
        # Raw tokens, a tile a program: there is nothing to fetch ahead of time.
        shape = shape._replace(stages=1)
    held: list[torch.Tensor] = []
    means, whole_means, means_places = None, False, [0] * len(found)
    if k_tiles.means is not None:
        means, means_places = means_of([segment.k for segment in found], held)
    rows = work_rows(found, means_places, k_tiles, v_tiles, tile, programs, whole, held)
    if means is not None:
        span = shape.tokens * (2 if k_tiles.dual or v_tiles.dual else 1)
        whole_means = means.key_mean.tokens % span == 0 and not ((rows[:, 3] + rows[:, 5]) % span).any()
    k_address = FIRST_ADDRESS.value
    v_address = k_address + STREAM_INTEGERS.value * len(k_tiles.streams)
    # Values that wait for barriers, after the scores of keys whose rows fill registers (``split``).
    late = fast and shape.stages == 1 and v_tiles.tokens < k_tiles.tokens
    k_outliers, v_outliers, patches = in_patches(k_tiles, v_tiles, shape, shared.nbytes)
    k_streams, v_streams = aligned_streams(rows, k_tiles, k_address), aligned_streams(rows, v_tiles, v_address)
    constants = {
        "K": bind(k_tiles, places[0], k_outliers, k_streams, _whole_tiles(rows, 3, k_tiles, shape), fast, whole_means),
        "V": bind(v_tiles, places[1], v_outliers, v_streams, _whole_tiles(rows, 4, v_tiles, shape), fast),
        "TABLES": shared,
        "PATCHES": patches if fast else 0,
        "WORK_ROW": rows.shape[1],
        "WARPS": shape.warps,
        "TILES": shape.tiles,
        "TOKENS": shape.tokens,
        "STAGES": shape.stages,
        "LOADS_AHEAD": k_tiles.loads_ahead and v_tiles.loads_ahead,
        "LATE": late,
        "PREFETCH": late and overlaps(device) and (k_tiles.signs is None or share >= PREFETCHED_WITH_SIGNS),
        "FAST": fast,
    }
    work = torch.from_numpy(rows)
    of_tail = [segment.k.page is None or segment.v.page is None for segment in found]
    work = work if growing else work.to(device)
    if means is not None and not growing:
        means = means._replace(table=means.table.to(device))
    return Launch(k, v, shape, work, means, tables, constants, tuple(held), programs, any(of_tail), all(of_tail), shape.fills)


def programs_of(shape: LaunchShape, tokens: int, tile: int, sequences: int, multiprocessors: int) -> int:
    """Return the number of programs per sequence that attends to ``tokens`` in steps of ``tile`` soonest.

    That is one full round, or several rounds if many sequences then leave less of the last round empty.
    """
    at_once = multiprocessors * shape.programs
    one_round = max(1, at_once // sequences)

    def tokens_of_rounds(programs: int) -> float:
        return -(-programs * sequences // at_once) * (tokens / programs + PROGRAM_TILES * tile)

    most = min(MAX_ROUNDS * at_once // sequences, tokens // (MIN_TILES * tile))
    return min(range(one_round, max(one_round, most) + 1), key=tokens_of_rounds)


def work_rows(
    found: list[Segment],
    places: list[int],
    k_tiles: Tiles,
    v_tiles: Tiles,
    tile: int,
    programs: int,
    whole: tuple[int, int],
    held: list[torch.Tensor],
) -> numpy.ndarray[Any, numpy.dtype[numpy.int64]]:
    """Return the work of ``programs`` of each sequence, int64 ``[item, column]`` (``work.load_work``).

    Tensors whose addresses it contains are appended to ``held``. A program processes its tokens in steps of ``tile``; every query sees all
    of ``whole``. ``places`` are the positions of segments among means.
    """
    tokens = sum(segment.tokens for segment in found)
    parts: list[numpy.ndarray[Any, numpy.dtype[numpy.int64]]] = []
    for segment, place in zip(found, places, strict=True):
        cut_words = any(_cuts_words(own, tiles) for own, tiles in ((segment.k, k_tiles), (segment.v, v_tiles)))
        found_at = addresses.addresses_of(segment.k.streams, k_tiles.streams, held)
        found_at += addresses.addresses_of(segment.v.streams, v_tiles.streams, held)
        # As many programs as its share of the tokens, of as many tiles each, give or take one and what a masked last one costs.
        tiles = -(-segment.tokens // tile)
        pieces = max(1, min(tiles, segment.tokens * programs // tokens))
        weight = tiles + (MASKED_TILES if segment.tokens % tile or cut_words else 0)
        start = numpy.unique(numpy.minimum(weight * numpy.arange(pieces, dtype=numpy.int64) // pieces, tiles - 1)) * tile
        count = numpy.minimum(numpy.append(start[1:], tiles * tile), segment.tokens) - start
        first = segment.first + start
        seen = numpy.where(first >= whole[0], numpy.minimum(count, whole[1] - first), 0)
        if cut_words:
            seen -= start + seen == segment.tokens
        seen = numpy.maximum(seen, 0) // tile * tile
        own_rows = [first - own.first for own in (segment.k, segment.v)]
        part = numpy.empty((len(start), FIRST_ADDRESS.value + len(found_at)), numpy.int64)
        part[:, : FIRST_ADDRESS.value] = numpy.stack([first, count, seen, *own_rows, numpy.full_like(first, place)], 1)
        part[:, FIRST_ADDRESS.value :] = found_at
        parts.append(part)
    return numpy.concatenate(parts)


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else INTERPRETED_MULTIPROCESSORS


def _cuts_words(segment: SideSegment, tiles: Tiles) -> bool:
    """Return True if a stream with an odd number of halves per token may end inside an aligned 4-byte word."""
    for stream in tiles.streams:
        if stream.bits == 16 and stream.row % 2:
            tensor = segment.streams[stream.name]
            if (tensor.data_ptr() + 2 * tensor.shape[2]) % 4 or any(step % 2 for step in tensor.stride()[:2]):
                return True
    return False


def _whole_tiles(rows: numpy.ndarray[Any, numpy.dtype[numpy.int64]], at: int, tiles: Tiles, shape: LaunchShape) -> bool:
    """Return True if the tokens of a warp's tile are always in one token group."""
    tokens = shape.tokens * (2 if tiles.dual == NEIGHBOURS else 1)
    return tiles.whole_groups % tokens == 0 and not (rows[:, at] % tokens).any()
