"""Descriptions of codecs for the C kernels: packings, other streams and lookup tables."""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Callable
from functools import cache, lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from kvpack.formats.angle import NORMS as ANGLE_NORMS
from kvpack.formats.angle import Angle, bin_directions
from kvpack.formats.base import Codec
from kvpack.formats.basis import RUN_COLUMNS, BasisRows
from kvpack.formats.columns import Columns, is_power_of_two, next_power_of_two
from kvpack.formats.group import TOKEN_SCALE_DTYPES, Group
from kvpack.formats.key_mean import CODES as MEAN_CODES
from kvpack.formats.key_mean import SCALE as MEAN_SCALE
from kvpack.formats.key_mean import KeyMean
from kvpack.formats.klt import CODES, GAIN_DTYPES, HEAD_RUN_COLUMNS, Klt, columns_by_width
from kvpack.formats.lossless import FLOAT_FORMATS, Lossless
from kvpack.formats.minifloat import Minifloat
from kvpack.formats.octahedral import Octahedral, norm_extends_index, signed_directions
from kvpack.formats.outliers import Outliers
from kvpack.formats.polar import Polar, angle_directions, uniform_directions
from kvpack.formats.qjl import NORM as QJL_NORM
from kvpack.formats.qjl import SIGNS as QJL_SIGNS
from kvpack.formats.qjl import Qjl
from kvpack.formats.quaternion import Quaternion, codewords
from kvpack.formats.raw import DTYPES as RAW_DTYPES
from kvpack.formats.raw import Raw
from kvpack.formats.rotation import PALEY_ORDERS, Rotation, hadamard
from kvpack.formats.scalar import Scalar, signed_values
from kvpack.formats.sidecars import CodecWithSidecars
from kvpack.formats.streams import NORMS
from kvpack.formats.token_norms import LOG8, TOKEN_NORMS, log8_bounds, log8_values
from kvpack.formats.trellis import Trellis, window_values

from . import library

MIN_ENTRIES = 16
"""Minimum number of table entries, which fills the registers of one lookup. Tables are padded to powers of two."""

MAX_DIM = 1024

MAX_TABLE_BYTES = 1 << 19
"""Maximum size of a codec's tables. A file may define larger tables, for which PyTorch is used to save memory."""

_CACHE_SIZE = 64


class CodecDescription(NamedTuple):
    """C description of a codec: its struct, the names of its streams in C's order, and the objects to which the struct points."""

    struct: library.Codec
    streams: tuple[str, ...]
    keep_alive: tuple[Any, ...]


@lru_cache(_CACHE_SIZE)
def describe(codec: Codec) -> CodecDescription | None:
    """Return the C description of ``codec``, without the value maps of its sidecars. Returns None if the C kernels do not support it.

    Codecs are looked up by exact class, because a subclass may store more streams.
    """
    if isinstance(codec, CodecWithSidecars):
        return _describe_sidecars(codec)
    describe_family = FAMILIES.get(type(codec))
    packings = codec.packings().values()
    if describe_family is None or codec.dim > MAX_DIM or len(packings) > library.MAX_PACKINGS:
        return None
    return None if any(len(packing.bases) > library.MAX_DIGITS for packing in packings) else describe_family(codec)


def _create_struct(codec: Codec, values: dict[str, tuple[int, str]]) -> library.Codec:
    """Create the C struct of ``codec`` with the fields that all codec families share.

    ``values`` contains, for each stream of numbers, the count of numbers per token and their dtype.
    """
    result = library.Codec()
    packings = codec.packings()
    result.family = library.FAMILIES.index(codec.id)
    result.dim, result.group_tokens = codec.dim, codec.group_tokens
    result.packings = len(packings)
    for index, packing in enumerate(packings.values()):
        result.packing[index] = _describe_packing(packing)
    result.columns = sum(packing.width * ((packing.column_bytes + 1) // 2) for packing in packings.values())
    result.value_streams = len(values)
    for index, (count, dtype) in enumerate(values.values()):
        table = _log8_tables().data_ptr() if dtype == "LOG8" else None
        result.values[index] = library.Values(count, library.DTYPES.index(dtype), table)
    result.numbers = sum(count for count, _ in values.values())
    result.scales_stream = result.table_stream = result.patch_stream = result.outlier_stream = result.mean_stream = result.heads_stream = -1
    return result


_NORMS = {norm: "LOG8" if norm == LOG8 else dtype for norm, dtype in TOKEN_NORMS.items()}


@cache
def _log8_tables() -> torch.Tensor:
    """Return the C table for norms stored as bytes: the norm of each byte, followed by the bounds between neighboring norms."""
    return torch.cat([log8_values("cpu"), log8_bounds("cpu")]).contiguous()


def _describe_packing(packing: Columns) -> library.Packing:
    digits = (library.Digit * library.MAX_DIGITS)()
    for index, (base, places) in enumerate(zip(packing.bases, packing.place_values, strict=True)):
        bits = (base - 1).bit_length()
        digits[index] = library.Digit(base, bits, places[0].bit_length() - 1 if packing.binary else 0, float(places[0]))
    planes = (packing.column_bytes + 1) // 2
    return library.Packing(packing.symbols, packing.width, planes, packing.column_bytes % 2, packing.binary, len(packing.bases), digits)


def _plane_streams(codec: Codec) -> list[str]:
    return [f"{stream}.{plane}" for stream, packing in codec.packings().items() for plane in range(len(packing.planes))]


def _complete_description(
    result: library.Codec, codec: Codec, streams: list[str], tables: list[torch.Tensor], *keep_alive: Any
) -> CodecDescription | None:
    """Add the names of all streams and the tables to the struct ``result``. Returns None if the tables are too large for C."""
    if len(tables) > library.MAX_TABLES or sum(table.nbytes for table in tables) > MAX_TABLE_BYTES:
        return None
    names = (*_plane_streams(codec), *streams)
    result.streams = len(names)
    padded = []
    for index, table in enumerate(tables):
        entries = max(MIN_ENTRIES, next_power_of_two(len(table)))
        padded.append(torch.nn.functional.pad(table.to(torch.float32), (0, entries - len(table))).contiguous())
        result.table[index] = library.Table(padded[-1].data_ptr(), entries)
    return CodecDescription(result, names, (padded, *keep_alive))


def _describe_raw(codec: Raw) -> CodecDescription | None:
    return _complete_description(_create_struct(codec, {"values": (codec.dim, RAW_DTYPES[codec.dtype])}), codec, ["values"], [])


SCALE_TABLE = "scale_table"
"""Name of a derived stream: the scale and center for each scale byte, float16 ``[batch, kv_head, 1, 256, 2]``."""


def _describe_group(codec: Group) -> CodecDescription | None:
    values: dict[str, tuple[int, str]] = {}
    if codec.axis == "channel":
        values["scales"] = (2 * -(-codec.dim // codec.size), "F16" if codec.scale_dtype == "fp16" else "U8")
    if codec.token_scale != "none":
        values["token_scale"] = (1, TOKEN_SCALE_DTYPES[codec.token_scale])
    result, streams = _create_struct(codec, values), list(values)
    result.size, result.token_scale = codec.size, codec.token_scale != "none"
    planes = len(_plane_streams(codec))
    if codec.axis == "token":
        result.scales_stream = planes + len(streams)
        streams.append("scales")
    if codec.scale_dtype == "u8":
        result.table_stream = planes + len(streams)
        streams.append(SCALE_TABLE)
    return _complete_description(result, codec, streams, [])


def _describe_scalar(codec: Scalar) -> CodecDescription | None:
    result = _create_struct(codec, {"norm": (1, _NORMS[codec.norm])})
    channels = [channel for part in codec.channel_sets for channel in part.channels]
    channel_array = (ctypes.c_int32 * len(channels))(*channels)
    result.channels = channel_array
    tables = [signed_values(table, "cpu") for table in (codec.magnitude_table, codec.high_magnitude_table) if table]
    return _complete_description(result, codec, ["norm"], tables, channel_array)


def _describe_octahedral(codec: Octahedral) -> CodecDescription | None:
    result = _create_struct(codec, {"norm": (1, _NORMS[codec.norm])})
    result.direct, result.index_bits = codec.arrangement == "direct", 2 * (codec.b_dir - 1)
    result.norm_with_index, result.norm_levels = norm_extends_index(codec.b_dir, codec.b_norm), 1 << codec.b_norm
    result.digit_bits = result.index_bits + (codec.b_norm if result.norm_with_index else 0)
    directions = signed_directions(codec.direction_table, "cpu")[: 1 << result.index_bits]
    norms = torch.tensor(struct.unpack(f"<{len(codec.norm_table) // 4}f", codec.norm_table), dtype=torch.float32, device="cpu")
    padded_directions = torch.nn.functional.pad(directions, (0, 1)).flatten()
    return _complete_description(result, codec, ["norm"], [*directions.T, norms, padded_directions])


def _describe_angle(codec: Angle) -> CodecDescription | None:
    stored = codec.norm == "fp32"
    name, numbers = ("norm", (codec.dim // 2, "F32")) if stored else ("range", (2, NORMS[codec.range]))
    result = _create_struct(codec, {name: numbers})
    packings = codec.packings()
    result.direct, result.factored = "symbol" in packings, "angle_high" in packings
    result.norm_kind, result.norm_levels, result.bins = ANGLE_NORMS.index(codec.norm), 1 << codec.norm_bits, codec.bins
    bases = packings["angle_low"].bases + packings["angle_high"].bases if result.factored else next(iter(packings.values())).bases[:1]
    directions = torch.nn.functional.pad(bin_directions(codec.bins, "cpu"), (0, 0, 0, math.prod(bases) - codec.bins))
    if is_power_of_two(codec.bins) and codec.bins > MIN_ENTRIES:
        # Correctly rounded directions repeat every quarter turn.
        directions, result.quarter_bits = directions[: codec.bins // 4], codec.bins.bit_length() - 3
    return _complete_description(result, codec, [name], list(directions.T))


def _describe_polar(codec: Polar) -> CodecDescription | None:
    result = _create_struct(codec, {"radius": (codec.radii, NORMS[codec.norm])})
    if len(codec.levels) > library.MAX_PACKINGS:
        return None
    result.levels, result.radii = len(codec.levels), codec.radii
    tables: list[torch.Tensor] = []
    index = 0
    for stream, levels in enumerate(codec.stream_levels.values()):
        first = 0
        for level in levels:
            result.level_stream[index], result.level_first[index] = stream, first
            result.level_angles[index], result.level_equal[index] = level.angles, level.counts[0]
            kinds = [angle_directions(table, "cpu") for table in codec.tables[index]] or [uniform_directions(2**level.bits, "cpu")]
            tables += [column for kind in (kinds[0], kinds[-1]) for column in kind.T]
            first += level.angles
            index += 1
    return _complete_description(result, codec, ["radius"], tables)


def _describe_quaternion(codec: Quaternion) -> CodecDescription | None:
    result = _create_struct(codec, {"scale": (1, NORMS[codec.norm])})
    packings = codec.packings()
    result.direct, result.factored = "symbol" in packings, "codeword_high" in packings
    result.highest = 2**codec.radius_bits - 1
    book = codewords(codec.seed, codec.secondary, "cpu")
    base = book.shape[0] if result.factored else next(iter(packings.values())).bases[0]
    return _complete_description(result, codec, ["scale"], [torch.nn.functional.pad(book, (0, 0, 0, base - book.shape[0])).flatten()])


def _describe_minifloat(codec: Minifloat) -> CodecDescription | None:
    names = {"block_scales": (codec.blocks_per_token, "U8")} if codec.granularity == "block" else {}
    scale = "scale" if codec.granularity == "token" else codec.run_scale
    result = _create_struct(codec, names | ({} if scale is None else {scale: (1, "F32" if names else NORMS[codec.scale_dtype])}))
    if names:
        result.size, result.scale_kind = codec.block_size, 1 + (codec.run_scale is not None)
    element = codec.format
    result.fraction_bits, result.bias, result.finite = element.fraction_bits, element.bias, element.finite
    return _complete_description(result, codec, [*names, *([] if scale is None else [scale])], [])


BASIS = "basis"
"""Name of a derived stream: the numbers that the C kernels read from a basis, float32 ``[batch, kv_head, run, number]`` (see
``basis_numbers``).
"""

_ALL_TOKENS = 1 << 62


def _describe_klt(codec: Klt) -> CodecDescription | None:
    gain = GAIN_DTYPES[codec.gain]
    result = _create_struct(codec, {} if gain is None else {"gain": (1, gain)})
    offsets, matrix_offset = _basis_offsets(codec)
    streams = [*([] if gain is None else ["gain"]), BASIS]
    result.size, result.scales_stream, result.matrix_place = _ALL_TOKENS, len(_plane_streams(codec)) + len(streams) - 1, matrix_offset
    if codec.fixed_heads is None:
        channels = [column for columns in columns_by_width(codec.widths, codec.dim).values() for column in columns]
        numbers = [*channels, *(offsets[0, column // RUN_COLUMNS] for column in channels)]
    else:
        result.heads_stream = len(streams)
        streams.append(CODES)
        numbers = _head_run_table(codec, offsets)
    number_tensor = torch.tensor(numbers, dtype=torch.int32, device="cpu")
    result.channels = ctypes.cast(number_tensor.data_ptr(), ctypes.POINTER(ctypes.c_int32))
    return _complete_description(result, codec, streams, [], number_tensor)


def _head_run_table(codec: Klt, offsets: dict[tuple[int, int], int]) -> list[int]:
    """Return the C table of column runs for heads with their own widths.

    It contains the offset of each head's numbers, the end offset, and then 5 numbers per run.
    """
    heads: list[list[int]] = [[] for _ in range(codec.fixed_heads or 0)]
    result = [
        (head, run, bytes_[0], part.width, part.columns)
        for part in codec.runs
        for head, run, bytes_ in zip(part.heads, part.runs, part.byte_positions, strict=True)
    ]
    for head, run, byte, width, columns in sorted(result):
        heads[head] += [byte, width, HEAD_RUN_COLUMNS * run, columns, offsets[head, run]]
    ends = [*accumulate(map(len, heads), initial=len(heads) + 1)]
    return [*ends, *(number for numbers in heads for number in numbers)]


def _basis_offsets(codec: Klt) -> tuple[dict[tuple[int, int], int], int]:
    """Return the offsets of each head's tables, by head and run of columns, and the offset of the matrix, in ``basis_numbers``.

    If heads share widths, only head 0 has entries.
    """
    offsets, matrix_offset = {}, codec.dim
    heads = codec.fixed_heads or 1
    count = len(codec.widths) // heads
    for head in range(heads):
        offset = codec.dim
        for run in range(count):
            if width := codec.widths[count * head + run]:
                offsets[head, run], offset = offset, offset + max(MIN_ENTRIES, 1 << width)
        matrix_offset = max(matrix_offset, offset)
    return offsets, matrix_offset


def basis_numbers(codec: Klt, rows: BasisRows) -> torch.Tensor:
    """Return the mean, the tables and the matrix of each head in one row: float32 ``[batch or 1, kv_head, number]``."""
    offsets, matrix_offset = _basis_offsets(codec)
    result = torch.zeros(*rows.rows.shape[:2], matrix_offset + codec.dim**2, dtype=torch.float32, device="cpu")
    result[..., : codec.dim], result[..., matrix_offset:] = rows.mean[:, :, 0], rows.matrix.flatten(2)
    count = len(codec.widths) // (codec.fixed_heads or 1)
    for (head, run), offset in offsets.items():
        width = codec.widths[count * head + run]
        if codec.fixed_heads is None:
            result[..., offset : offset + (1 << width)] = rows.table(run, width)
        else:
            result[:, head, offset : offset + (1 << width)] = rows.head_tables((head,), (run,), width)[:, 0]
    return result


RAW_ENTRY, RAW_ENTRIES = "raw_entry", "raw_entries"
"""Names of two derived streams for raw tokens.

The first contains the index of each token's entry, int32 ``[batch, 1, token]``, or -1 if the token is not raw. The second contains the
entries in the coded frame, float32 ``[1, kv_head, entry, dim]``.
"""

OUTLIER_FIRST, OUTLIER_CHUNKS = "outlier_first", "outlier_chunks"
"""Names of two derived streams for outliers.

The first contains the index of each token's first outlier chunk, int64 ``[batch, kv_head, token + 1]``. The second contains the chunks,
int16 ``[1, 1, chunk, 5]``: four float16 values and the chunk's index in its token.
"""


CHUNK_RANGES = "chunk_places"
"""Name of a derived stream: each chunk's first word, and the stream's word count, int64 ``[batch, kv_head, chunk, 2]``."""


def _describe_lossless(codec: Lossless) -> CodecDescription | None:
    result = _create_struct(codec, {})
    result.fraction_bits, result.chunk_stream = FLOAT_FORMATS[codec.dtype].fraction_bits, len(_plane_streams(codec))
    return _complete_description(result, codec, ["frequencies", "states", CHUNK_RANGES, "words"], [])


def _describe_trellis(codec: Trellis) -> CodecDescription | None:
    result = _create_struct(codec, {"norm": (1, _NORMS[codec.norm])})
    result.index_bits, result.digit_bits = codec.state_bits, codec.bits
    return _complete_description(result, codec, ["norm"], [window_values(codec.table, "cpu")])


def _describe_sidecars(codec: CodecWithSidecars) -> CodecDescription | None:
    """Return the C description of a codec with sidecars, or None if the sidecars are not supported.

    The C kernels support raw tokens, key_mean, outliers and qjl, each at most once.
    """
    description = describe(codec.codec)
    if description is None or any(len(kind) > 1 for kind in (codec.page_vectors, codec.frame_parts, codec.sketches)):
        return None
    if any(type(sidecar) not in (KeyMean, Outliers, Qjl) for sidecar in (*codec.page_vectors, *codec.frame_parts, *codec.sketches)):
        return None
    struct, streams = library.Codec.from_buffer_copy(description.struct), list(description.streams)
    keep_alive: list[Any] = [description]
    for sketch in codec.sketches:
        assert isinstance(sketch, Qjl)
        if struct.packings == library.MAX_PACKINGS or struct.value_streams == library.MAX_VALUES:
            return None
        signs = _describe_packing(sketch.packing)
        struct.packing[struct.packings] = signs
        struct.columns += signs.width * signs.planes
        struct.values[struct.value_streams] = library.Values(1, library.DTYPES.index(NORMS[sketch.norm]))
        positions = (
            sum(struct.packing[index].planes for index in range(struct.packings)),
            len(_plane_streams(codec.codec)) + struct.value_streams,
        )
        streams.insert(positions[1], QJL_NORM)
        streams[positions[0] : positions[0]] = [f"{QJL_SIGNS}.{plane}" for plane in range(signs.planes)]
        for name in ("scales_stream", "table_stream"):
            if getattr(struct, name) >= 0:
                setattr(struct, name, getattr(struct, name) + signs.planes + 1)
        struct.value_streams, struct.numbers, struct.sketches = struct.value_streams + 1, struct.numbers + 1, 1
        rotation = describe_rotation(sketch.rotation)
        struct.sketch_rotation, struct.sketch_size = rotation.struct, math.sqrt(math.pi / (2 * sketch.dim))
        keep_alive.append(rotation)
    for vector in codec.page_vectors:
        assert isinstance(vector, KeyMean)
        struct.mean_stream, struct.mean_tokens, struct.mean_bits = len(streams), vector.tokens, vector.bits
        streams += [MEAN_CODES, MEAN_SCALE]
    if codec.frame_parts:
        struct.outlier_stream = len(streams)
        streams += [OUTLIER_FIRST, OUTLIER_CHUNKS]
    if codec.raw_token_sidecars:
        struct.patch_stream = len(streams)
        streams += [RAW_ENTRY, RAW_ENTRIES]
    struct.streams = len(streams)
    return CodecDescription(struct, tuple(streams), tuple(keep_alive))


FAMILIES: dict[type[Codec], Callable[[Any], CodecDescription | None]] = {
    Raw: _describe_raw,
    Group: _describe_group,
    Scalar: _describe_scalar,
    Octahedral: _describe_octahedral,
    Angle: _describe_angle,
    Polar: _describe_polar,
    Quaternion: _describe_quaternion,
    Minifloat: _describe_minifloat,
    Klt: _describe_klt,
    Lossless: _describe_lossless,
    Trellis: _describe_trellis,
}
"""Functions that describe each codec family. A new codec needs one more row."""


class RotationDescription(NamedTuple):
    """C description of a rotation, and the tensors to which ``struct`` points."""

    struct: library.Rotation
    keep_alive: tuple[torch.Tensor, ...]


NO_ROTATION = RotationDescription(library.Rotation(), ())


@lru_cache(64)
def describe_rotation(rotation: Rotation) -> RotationDescription:
    if rotation.kind == "none":
        return NO_ROTATION
    order = next(p for p in (1, *PALEY_ORDERS) if rotation.dim % p == 0 and is_power_of_two(rotation.dim // p))
    paley = torch.tensor(hadamard(order), dtype=torch.float32, device="cpu")
    first = torch.tensor(hadamard(rotation.dim)[0], dtype=torch.float32, device="cpu")
    factors = (rotation.matrix()[0] * first).contiguous()
    return RotationDescription(library.Rotation(order, paley.data_ptr(), factors.data_ptr()), (paley, factors))
