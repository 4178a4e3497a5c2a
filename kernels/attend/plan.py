"""Planning of attention launches: which tokens each program attends to, and with which loaders.

A layer's tokens are cut at the bounds of key pages and value pages, and then into pieces for programs. All segments with the same two
codecs form one launch; the raw tail counts as a page of raw values. A launch's work is a table on the device with one row per program.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy
import torch

from kvpack.formats.columns import next_power_of_two
from kvpack.kernels.cuda import attend_scalar
from kvpack.kernels.gpu import gpu
from kvpack.kernels.loaders.key_mean import PRODUCT_BYTES
from kvpack.kernels.loaders.tiles import NEIGHBORS, Tiles
from kvpack.kernels.tiles import addresses, device_tables, frame_columns, loaders
from kvpack.kernels.tiles.addresses import describe_streams
from kvpack.kernels.tiles.bound_loader import LoadMode, bind
from kvpack.kernels.tiles.frame_columns import loader
from kvpack.kernels.tiles.shapes import LaunchShape, choose_shape, plan_patches, table_budget
from kvpack.kernels.tiles.work import FIRST_ADDRESS, STREAM_INTEGERS

from . import segments

if TYPE_CHECKING:
    from kvpack.formats.base import Codec
    from kvpack.kernels.cuda.attend_scalar import ScalarKernel
    from kvpack.kernels.tiles.layers import Layer, Side

    from .segments import Frame, Segment, SideSegment

PREFETCHED_WITH_SIGNS = 1500
"""Minimum number of tokens per multiprocessor at which prefetching pays off for keys with QJL signs."""

MASKED_TILES = 3
"""Extra cost of a masked tile, in unmasked tiles. For masked tiles, neither data nor code is prefetched."""


PROGRAM_TILES = 3
"""Fixed cost of a program, in tiles."""

MAX_ROUNDS, MIN_TILES = 4, 8
"""Maximum rounds of concurrent programs, and minimum tiles per program of a launch with several programs."""

MIN_MEAN_PAGES, MAX_MEAN_PAGES = 32, 64
"""Minimum, and approximate maximum, number of page means whose products with queries a program stores."""


class LaunchKey(NamedTuple):
    """Key of a launch: the frames of both sides, and True for each side that is decoded before the launch.

    Segments with the same key form one launch.
    """

    k: Frame
    v: Frame
    k_decoded: bool
    v_decoded: bool


_plans: WeakKeyDictionary[Layer, dict[Any, list[Launch]]] = WeakKeyDictionary()


@dataclass(frozen=True, eq=False)
class Launch:
    """A launch of ``split.attend_split`` over all segments with the same two codecs: its ``work`` table and compile-time constants.

    ``keep_alive`` contains the tensors whose addresses are in the work table. ``programs`` is the number of programs that the device runs
    concurrently for each sequence and block of query rows. ``has_tail`` is True if some tokens are in a raw tail, and ``tail_only`` if all
    are. ``balanced`` is True if programs are distributed evenly over the multiprocessors, even while another kernel finishes on some of
    them. ``kernel`` is a kernel that replaces ``split.attend_split``, or None.
    """

    k: Frame
    v: Frame
    shape: LaunchShape
    work: torch.Tensor
    tables: tuple[torch.Tensor, torch.Tensor]
    constants: dict[str, Any]
    keep_alive: tuple[torch.Tensor, ...]
    programs: int
    has_tail: bool
    tail_only: bool
    balanced: bool
    kernel: ScalarKernel | None = None

    @property
    def parts(self) -> int:
        """Number of partial results that the launch writes for each query row."""
        return self.work.shape[0] * (self.shape.warps if self.kernel is None else 1)

    @property
    def dual(self) -> bool:
        """True if one row of scores covers two tokens (see ``split``)."""
        return bool(self.constants["K"].dual or self.constants["V"].dual)


def _choose_loaders(k: Codec, v: Codec, dual: int) -> tuple[Tiles, Tiles]:
    """Return the tile loaders of keys and of values: dual loaders for neighboring tokens if both sides support them."""
    keys, values = loader(k, dual), loader(v, dual)
    result = keys.keys or keys, values.values or values
    if all(tiles.dual and (tiles.whole_groups == 1 or tiles.whole_groups % (2 * tiles.tokens) == 0) for tiles in result):
        k_tiles, v_tiles = (loaders.find_dual_tiles(codec, NEIGHBORS) for codec in (k, v))
        assert k_tiles is not None
        assert v_tiles is not None
        result = k_tiles, v_tiles
    return result


def launches(
    k: Side, v: Side, layer: Layer, begin: int, end: int, whole: tuple[int, int], row_blocks: int, dual: int, same_tokens: bool
) -> list[Launch]:
    """Return the launches that attend to tokens ``[begin, end)``. They are cached with ``layer``.

    Every query attends to all tokens in the range ``whole``. ``dual`` is as in ``frame_columns.loader``. ``same_tokens`` is True if
    ``prepared.supports_scalar_kernel``.
    """
    cached = _plans.setdefault(layer, {})
    key = (begin, end, whole, row_blocks, dual, same_tokens, addresses.uses_inline_ptx(k.device))
    if key not in cached:
        cached[key] = plan_launches(k, v, begin, end, whole, row_blocks, dual, same_tokens)
    return cached[key]


def plan_launches(
    k: Side, v: Side, begin: int, end: int, whole: tuple[int, int], row_blocks: int, dual: int, same_tokens: bool, growing: bool = False
) -> list[Launch]:
    """Uncached implementation of ``launches``. For a ``growing`` layer, work tables stay on the host."""
    fast = addresses.uses_inline_ptx(k.device)
    by_kernel: dict[LaunchKey, list[Segment]] = {}
    for segment in segments.layer_segments(segments.side_segments(k).segments, segments.side_segments(v).segments, begin, end):
        # If one side is decoded, the other is decoded too unless it is the tail, so that one kernel attends to all such segments.
        raw = segment.k.raw or segment.v.raw
        kernel = LaunchKey(segment.k.frame, segment.v.frame, raw and segment.k.page is not None, raw and segment.v.page is not None)
        by_kernel.setdefault(kernel, []).append(segment)
    sequences = k.batch * k.heads * row_blocks
    launches = []
    # Partial results with the same value frame are adjacent. The largest launch comes first, so that the others run alongside it.
    most_first = sorted(by_kernel, key=lambda kernel: -sum(segment.tokens for segment in by_kernel[kernel]))
    frames = list(dict.fromkeys(kernel.v for kernel in most_first))
    for kernel in sorted(most_first, key=lambda kernel: frames.index(kernel.v)):
        result = by_kernel[kernel]
        if kernel.k_decoded:
            result = segments.decode_segments(result, frame_columns.key_columns(kernel.k.codec, dual), "k")
        if kernel.v_decoded:
            result = segments.decode_segments(result, frame_columns.columns(kernel.v.codec, dual), "v")
        arguments = result, kernel.k, kernel.v, whole, sequences, dual, k.device, fast, growing
        launch = _plan_launch(*arguments, same_tokens)
        if launch.kernel is not None and not _reads_whole_rows(launch):
            launch = _plan_launch(*arguments, False)
        launches.append(launch)
    return launches


def _plan_launch(
    segments: list[Segment],
    k: Frame,
    v: Frame,
    whole: tuple[int, int],
    sequences: int,
    dual: int,
    device: torch.device,
    fast: bool,
    growing: bool,
    same_tokens: bool,
) -> Launch:
    k_tiles, v_tiles = _choose_loaders(segments[0].k.codec, segments[0].v.codec, dual)
    shared, tables, table_offsets = device_tables.load_tables(k_tiles, v_tiles, device, fast, table_budget(k_tiles, v_tiles))
    tokens = sum(segment.tokens for segment in segments)
    alignment = math.gcd(*(segment.first - side.first for segment in segments for side in (segment.k, segment.v)))
    properties = gpu(device)
    share = tokens * sequences // properties.multiprocessors
    shape = choose_shape(k_tiles, v_tiles, shared.nbytes, share, alignment, fast)
    tile_tokens = shape.warps * shape.tiles * shape.tokens * (2 if k_tiles.dual or v_tiles.dual else 1)
    kernel = None
    if same_tokens and len(segments) * sequences <= properties.multiprocessors:
        codecs = segments[0].k.codec, segments[0].v.codec
        kernel = attend_scalar.find_kernel(*codecs, k_tiles, v_tiles, dual, share, device)
    if kernel is not None:
        tile_tokens = kernel.shape.warps * attend_scalar.TOKENS
        shape = LaunchShape(kernel.shape.warps, 1, attend_scalar.TOKENS, 1, kernel.shape.blocks, True)
    min_programs = 1 if k_tiles.means is None else _min_programs(segments, k_tiles.means.tokens, tile_tokens)
    programs = choose_programs(shape, tokens, tile_tokens, sequences, properties.multiprocessors, min_programs)
    if segments[0].k.page is segments[0].v.page is None and tokens <= programs * tile_tokens:
        # Each program has only one tile of raw tokens, so there is nothing to load ahead.
        shape = shape._replace(stages=1)
    keep_alive: list[torch.Tensor] = []
    # A second loop over tiles with outliers, without masks, would triple the compilation time, and is no faster without loads ahead.
    whole_tiles = shape.stages > 1 or not fast or k_tiles.outliers is v_tiles.outliers is None
    if not whole_tiles:
        whole = 0, 0
    rows = build_work(segments, k_tiles, v_tiles, tile_tokens, programs, whole, keep_alive)
    k_address = FIRST_ADDRESS.value
    v_address = k_address + STREAM_INTEGERS.value * len(k_tiles.streams)
    means, declared = k_tiles.means, shared.nbytes
    if means is not None:
        span = shape.tokens * (2 if k_tiles.dual or v_tiles.dual else 1)
        first_tokens = rows[:, 5]
        whole_means = means.tokens % span == 0 and not (first_tokens % span).any()
        pages = next_power_of_two(int((-(-(first_tokens % means.tokens + rows[:, 1]) // means.tokens)).max()))
        streams = describe_streams(rows, means.streams, v_address + STREAM_INTEGERS.value * len(v_tiles.streams))
        means = means._replace(streams=streams, whole=whole_means, pages=max(MIN_MEAN_PAGES, pages))
        declared += means.pages * PRODUCT_BYTES
    # Load values after the scores if keys fill the registers (``LATE`` in ``split``).
    late = fast and shape.stages == 1 and v_tiles.tokens < k_tiles.tokens
    k_outliers, v_outliers, patches = plan_patches(k_tiles, v_tiles, shape, declared)
    k_streams, v_streams = describe_streams(rows, k_tiles.streams, k_address), describe_streams(rows, v_tiles.streams, v_address)
    constants = {
        "K": bind(
            k_tiles, LoadMode(table_offsets[0], False, fast), k_outliers, k_streams, _has_whole_tiles(rows, 3, k_tiles, shape), means
        ),
        "V": bind(v_tiles, LoadMode(table_offsets[1], True, fast), v_outliers, v_streams, _has_whole_tiles(rows, 4, v_tiles, shape)),
        "TABLES": shared,
        "PATCHES": patches if fast else 0,
        "WORK_ROW": rows.shape[1],
        "WARPS": shape.warps,
        "TILES": shape.tiles,
        "TOKENS": shape.tokens,
        "STAGES": shape.stages,
        "WHOLE_TILES": whole_tiles,
        "LOADS_AHEAD": k_tiles.loads_ahead and v_tiles.loads_ahead,
        "LATE": late,
        "PREFETCH": late and properties.overlaps_launches and (k_tiles.signs is None or share >= PREFETCHED_WITH_SIGNS),
        "FAST": fast,
    }
    work = torch.from_numpy(rows)
    in_tail = [segment.k.page is None or segment.v.page is None for segment in segments]
    work = work if growing else work.to(device)
    return Launch(k, v, shape, work, tables, constants, tuple(keep_alive), programs, any(in_tail), all(in_tail), shape.balanced, kernel)


def _reads_whole_rows(launch: Launch) -> bool:
    """Return True if all rows of codes are aligned for ``attend_scalar``, and the tokens of a tile are in one page of means."""
    rows = [stream for side in "KV" for stream in launch.constants[side].streams if stream.row_bytes >= attend_scalar.ALIGNMENT]
    aligned = all(stream.aligned == attend_scalar.ALIGNMENT for stream in rows)
    return aligned and (launch.constants["K"].means is None or launch.constants["K"].means.whole)


def _min_programs(segments: list[Segment], page_tokens: int, tile: int) -> int:
    """Return the number of programs per sequence with which no program has more than about ``MAX_MEAN_PAGES`` pages of means.

    A program begins at a multiple of ``tile`` tokens of its segment. Unless that is the beginning of a page, it has one more page.
    """
    aligned = tile % page_tokens == 0 and all(segment.k.start % page_tokens == 0 for segment in segments)
    return -(-sum(segment.tokens for segment in segments) // ((MAX_MEAN_PAGES - (not aligned)) * page_tokens))


def choose_programs(shape: LaunchShape, tokens: int, tile: int, sequences: int, multiprocessors: int, min_programs: int = 1) -> int:
    """Choose the number of programs per sequence, at least ``min_programs``, that takes the shortest estimated time for ``tokens`` tokens.

    A program processes ``tile`` tokens per step. All programs run in one round, or in several if that leaves less of the device idle in the
    last round.
    """
    at_once = multiprocessors * shape.programs
    one_round = max(1, min_programs, at_once // sequences)

    def tokens_of_rounds(programs: int) -> float:
        return -(-programs * sequences // at_once) * (tokens / programs + PROGRAM_TILES * tile)

    limit = min(MAX_ROUNDS * at_once // sequences, tokens // (MIN_TILES * tile))
    return min(range(one_round, max(one_round, limit) + 1), key=tokens_of_rounds)


def build_work(
    segments: list[Segment],
    k_tiles: Tiles,
    v_tiles: Tiles,
    tile: int,
    programs: int,
    whole: tuple[int, int],
    keep_alive: list[torch.Tensor],
) -> numpy.ndarray[Any, numpy.dtype[numpy.int64]]:
    """Return the work table, int64 ``[item, column]``, with one item for each of ``programs`` programs per sequence (``work.load_work``).

    A program processes its tokens in steps of ``tile`` tokens. Every query attends to all tokens in the range ``whole``. Tensors whose
    addresses are in the table are appended to ``keep_alive``.
    """
    cuts = [any(_may_end_inside_word(side, tiles) for side, tiles in ((segment.k, k_tiles), (segment.v, v_tiles))) for segment in segments]
    # A masked last tile costs more than others.
    weights = [
        -(-segment.tokens // tile) + (MASKED_TILES if segment.tokens % tile or cut_words else 0)
        for segment, cut_words in zip(segments, cuts, strict=True)
    ]
    work: list[numpy.ndarray[Any, numpy.dtype[numpy.int64]]] = []
    for segment, cut_words, weight, share in zip(segments, cuts, weights, share_programs(weights, programs), strict=True):
        stream_addresses = addresses.stream_addresses(segment.k.streams, k_tiles.streams, keep_alive)
        stream_addresses += addresses.stream_addresses(segment.v.streams, v_tiles.streams, keep_alive)
        mean_offset = 0
        if k_tiles.means is not None:
            # A segment may begin anywhere in a page.
            mean_offset = segment.k.start % k_tiles.means.tokens
            stream_addresses += addresses.stream_addresses(segment.k.streams, k_tiles.means.streams, keep_alive)
        tiles = -(-segment.tokens // tile)
        program_count = min(tiles, share)
        start = numpy.unique(numpy.minimum(weight * numpy.arange(program_count, dtype=numpy.int64) // program_count, tiles - 1)) * tile
        count = numpy.minimum(numpy.append(start[1:], tiles * tile), segment.tokens) - start
        first = segment.first + start
        whole_tokens = numpy.where(first >= whole[0], numpy.minimum(count, whole[1] - first), 0)
        if cut_words:
            whole_tokens -= start + whole_tokens == segment.tokens
        whole_tokens = numpy.maximum(whole_tokens, 0) // tile * tile
        side_rows = [first - side.first for side in (segment.k, segment.v)]
        rows = numpy.empty((len(start), FIRST_ADDRESS.value + len(stream_addresses)), numpy.int64)
        rows[:, : FIRST_ADDRESS.value] = numpy.stack([first, count, whole_tokens, *side_rows, side_rows[0] + mean_offset], 1)
        rows[:, FIRST_ADDRESS.value :] = stream_addresses
        work.append(rows)
    return numpy.concatenate(work)


def share_programs(weights: list[int], programs: int) -> list[int]:
    """Return the number of programs for each segment of ``weights`` tiles, at least 1, so that the longest program is short.

    No program processes two segments, so shares that are only proportional would leave some programs much longer than others.
    """
    shares = [1] * len(weights)
    for _ in range(programs - len(weights)):
        shares[max(range(len(weights)), key=lambda index: weights[index] / shares[index])] += 1
    return shares


def _may_end_inside_word(segment: SideSegment, tiles: Tiles) -> bool:
    """Return True if a stream of the segment may end inside an aligned 4-byte word, because its rows are not a multiple of 4 bytes long."""
    for stream in tiles.streams:
        if stream.tokens == 1 and stream.row * stream.bits % 32:
            tensor = segment.streams[stream.name]
            size = tensor.element_size()
            if (tensor.data_ptr() + size * tensor.stride(2) * tensor.shape[2]) % 4 or any(size * step % 4 for step in tensor.stride()[:2]):
                return True
    return False


def _has_whole_tiles(rows: numpy.ndarray[Any, numpy.dtype[numpy.int64]], column: int, tiles: Tiles, shape: LaunchShape) -> bool:
    """Return True if every tile of the work table ``rows`` is within one token group.

    ``column`` is the table column with the first packed row of each program.
    """
    tokens = shape.tokens * (2 if tiles.dual == NEIGHBORS else 1)
    return tiles.whole_groups % tokens == 0 and not (rows[:, column] % tokens).any()
