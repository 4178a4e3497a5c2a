"""Descriptions of codecs for C: packings, other streams and tables; None for codecs and options that C does not support."""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Callable
from functools import cache, lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from kvpack.formats.angle import NORMS as ANGLE_NORMS
from kvpack.formats.angle import Angle, bin_directions
from kvpack.formats.base import NORMS
from kvpack.formats.basis import RUN_COLUMNS
from kvpack.formats.columns import is_power_of_two, next_power_of_two
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
from kvpack.formats.scalar import Scalar, signed_values
from kvpack.formats.side_cars import WithSideCars
from kvpack.formats.token_norms import LOG8, TOKEN_NORMS, log8_bounds, log8_values
from kvpack.formats.trellis import Trellis, window_values

from . import library, rotations

if TYPE_CHECKING:
    from kvpack.formats.base import Codec
    from kvpack.formats.basis import BasisRows
    from kvpack.formats.columns import Columns

MIN_ENTRIES = 16
"""Tables have a power of two of entries from here up: the registers of one lookup."""

MAX_DIM = 1024

MAX_TABLE_BYTES = 1 << 19
"""Maximum size of a codec's tables that C supports; larger ones, which each header may choose, are not cached twice."""

_KEPT = 64


class Described(NamedTuple):
    """A codec as C sees it: its ``streams`` in order, and what must live as long as ``struct``."""

    struct: library.Codec
    streams: tuple[str, ...]
    kept: tuple[Any, ...]


@lru_cache(_KEPT)
def described(codec: Codec) -> Described | None:
    """Return the C description of ``codec``, without the value maps of side-cars.

    Codecs are looked up by exact class, because a subclass may store more.
    """
    if isinstance(codec, WithSideCars):
        return _completed(codec)
    describe = FAMILIES.get(type(codec))
    if describe is None or codec.dim > MAX_DIM:
        return None
    return describe(codec)


def _struct(codec: Codec, values: dict[str, tuple[int, str]]) -> library.Codec | None:
    """Fill in the fields that all families share; ``values`` gives the count per token and the dtype of each numeric stream."""
    result = library.Codec()
    packings = codec.packings()
    if len(packings) > library.MAX_PACKINGS or any(len(packing.bases) > library.MAX_DIGITS for packing in packings.values()):
        return None
    result.family = library.FAMILIES.index(codec.id)
    result.dim, result.token_group = codec.dim, codec.token_group
    result.packings = len(packings)
    for number, packing in enumerate(packings.values()):
        result.packing[number] = _packing(packing)
    result.columns = sum(packing.width * ((packing.column_bytes + 1) // 2) for packing in packings.values())
    result.value_streams = len(values)
    for number, (count, dtype) in enumerate(values.values()):
        table = _log8().data_ptr() if dtype == "LOG8" else None
        result.values[number] = library.Values(count, library.DTYPES.index(dtype), table)
    result.numbers = sum(count for count, _ in values.values())
    result.scales_stream = result.table_stream = result.patch_stream = result.outlier_stream = result.mean_stream = result.heads_stream = -1
    return result


_NORMS = {norm: "LOG8" if norm == LOG8 else dtype for norm, dtype in TOKEN_NORMS.items()}


@cache
def _log8() -> torch.Tensor:
    """Return the C tables for norm bytes: the norm of each byte value, then the bounds between them."""
    return torch.cat([log8_values("cpu"), log8_bounds("cpu")]).contiguous()


def _packing(packing: Columns) -> library.Packing:
    digits = (library.Digit * library.MAX_DIGITS)()
    for number, (base, places) in enumerate(zip(packing.bases, packing.place_values, strict=True)):
        bits = (base - 1).bit_length()
        digits[number] = library.Digit(base, bits, places[0].bit_length() - 1 if packing.binary else 0, float(places[0]))
    planes = (packing.column_bytes + 1) // 2
    return library.Packing(packing.symbols, packing.width, planes, packing.column_bytes % 2, packing.binary, len(packing.bases), digits)


def _planes(codec: Codec) -> list[str]:
    return [f"{stream}.{plane}" for stream, packing in codec.packings().items() for plane in range(len(packing.planes))]


def _finished(result: library.Codec | None, codec: Codec, streams: list[str], tables: list[torch.Tensor], *kept: Any) -> Described | None:
    if result is None or len(tables) > library.MAX_TABLES or sum(table.nbytes for table in tables) > MAX_TABLE_BYTES:
        return None
    names = (*_planes(codec), *streams)
    result.streams = len(names)
    padded = []
    for number, table in enumerate(tables):
        entries = max(MIN_ENTRIES, next_power_of_two(len(table)))
        padded.append(torch.nn.functional.pad(table.to(torch.float32), (0, entries - len(table))).contiguous())
        result.table[number] = library.Table(padded[-1].data_ptr(), entries)
    return Described(result, names, (padded, *kept))


def _raw(codec: Raw) -> Described | None:
    return _finished(_struct(codec, {"values": (codec.dim, RAW_DTYPES[codec.dtype])}), codec, ["values"], [])


TABLE = "scale_table"
"""The stream, made when a page is described, of the pairs that bytes of scales stand for: binary16 ``[batch, kv_head, 1, 256, 2]``."""


def _group(codec: Group) -> Described | None:
    values: dict[str, tuple[int, str]] = {}
    if codec.axis == "channel":
        values["scales"] = (2 * -(-codec.dim // codec.size), "F16" if codec.scale_dtype == "fp16" else "U8")
    if codec.token_scale != "none":
        values["token_scale"] = (1, TOKEN_SCALE_DTYPES[codec.token_scale])
    result, streams = _struct(codec, values), list(values)
    if result is None:
        return None
    result.size, result.token_scale = codec.size, codec.token_scale != "none"
    planes = len(_planes(codec))
    if codec.axis == "token":
        result.scales_stream = planes + len(streams)
        streams.append("scales")
    if codec.scale_dtype == "u8":
        result.table_stream = planes + len(streams)
        streams.append(TABLE)
    return _finished(result, codec, streams, [])


def _scalar(codec: Scalar) -> Described | None:
    result = _struct(codec, {"norm": (1, _NORMS[codec.norm])})
    if result is None:
        return None
    channels = [channel for part in codec.channel_sets for channel in part.channels]
    kept = (ctypes.c_int32 * len(channels))(*channels)
    result.channels = kept
    tables = [signed_values(table, "cpu") for table in (codec.magnitude_table, codec.high_magnitude_table) if table]
    return _finished(result, codec, ["norm"], tables, kept)


def _octahedral(codec: Octahedral) -> Described | None:
    result = _struct(codec, {"norm": (1, _NORMS[codec.norm])})
    if result is None:
        return None
    result.direct, result.index_bits = codec.arrangement == "direct", 2 * (codec.b_dir - 1)
    result.norm_with_index, result.norm_levels = norm_extends_index(codec.b_dir, codec.b_norm), 1 << codec.b_norm
    result.digit_bits = result.index_bits + (codec.b_norm if result.norm_with_index else 0)
    directions = signed_directions(codec.direction_table, "cpu")[: 1 << result.index_bits]
    norms = torch.tensor(struct.unpack(f"<{len(codec.norm_table) // 4}f", codec.norm_table), dtype=torch.float32, device="cpu")
    by_four = torch.nn.functional.pad(directions, (0, 1)).flatten()
    return _finished(result, codec, ["norm"], [*directions.T, norms, by_four])


def _angle(codec: Angle) -> Described | None:
    stored = codec.norm == "fp32"
    name, numbers = ("norm", (codec.dim // 2, "F32")) if stored else ("range", (2, NORMS[codec.range]))
    result = _struct(codec, {name: numbers})
    if result is None:
        return None
    packings = codec.packings()
    result.direct, result.factored = "symbol" in packings, "angle_high" in packings
    result.norm_kind, result.norm_levels, result.bins = ANGLE_NORMS.index(codec.norm), 1 << codec.norm_bits, codec.bins
    bases = packings["angle_low"].bases + packings["angle_high"].bases if result.factored else next(iter(packings.values())).bases[:1]
    directions = torch.nn.functional.pad(bin_directions(codec.bins, "cpu"), (0, 0, 0, math.prod(bases) - codec.bins))
    if is_power_of_two(codec.bins) and codec.bins > MIN_ENTRIES:
        # Correctly rounded directions repeat in every quarter turn.
        directions, result.quarter_bits = directions[: codec.bins // 4], codec.bins.bit_length() - 3
    return _finished(result, codec, [name], list(directions.T))


def _polar(codec: Polar) -> Described | None:
    result = _struct(codec, {"radius": (codec.radii, NORMS[codec.norm])})
    if result is None or len(codec.levels) > library.MAX_PACKINGS:
        return None
    result.levels, result.radii = len(codec.levels), codec.radii
    tables: list[torch.Tensor] = []
    number = 0
    for stream, levels in enumerate(codec.stream_levels.values()):
        first = 0
        for level in levels:
            result.level_stream[number], result.level_first[number] = stream, first
            result.level_angles[number], result.level_equal[number] = level.angles, level.counts[0]
            kinds = [angle_directions(table, "cpu") for table in codec.tables[number]] or [uniform_directions(2**level.bits, "cpu")]
            tables += [column for kind in (kinds[0], kinds[-1]) for column in kind.T]
            first += level.angles
            number += 1
    return _finished(result, codec, ["radius"], tables)


def _quaternion(codec: Quaternion) -> Described | None:
    result = _struct(codec, {"scale": (1, NORMS[codec.norm])})
    if result is None:
        return None
    packings = codec.packings()
    result.direct, result.factored = "symbol" in packings, "codeword_high" in packings
    result.highest = 2**codec.radius_bits - 1
    book = codewords(codec.seed, codec.secondary, "cpu")
    base = book.shape[0] if result.factored else next(iter(packings.values())).bases[0]
    return _finished(result, codec, ["scale"], [torch.nn.functional.pad(book, (0, 0, 0, base - book.shape[0])).flatten()])


def _minifloat(codec: Minifloat) -> Described | None:
    names = {"block_scales": (codec.blocks, "U8")} if codec.granularity == "block" else {}
    scale = "scale" if codec.granularity == "token" else codec.run_scale
    result = _struct(codec, names | ({} if scale is None else {scale: (1, "F32" if names else NORMS[codec.scale_dtype])}))
    if result is None:
        return None
    if names:
        result.size, result.scale_kind = codec.block, 1 + (codec.run_scale is not None)
    element = codec.format
    result.fraction_bits, result.bias, result.finite = element.fraction_bits, element.bias, element.finite
    return _finished(result, codec, [*names, *([] if scale is None else [scale])], [])


BASIS = "basis"
"""The stream, made when a page is described, of what C reads of a basis: float32 ``[batch, kv_head, run, number]`` (``basis_numbers``)."""

_WHOLE_RUN = 1 << 62


def _klt(codec: Klt) -> Described | None:
    gain = GAIN_DTYPES[codec.gain]
    result = _struct(codec, {} if gain is None else {"gain": (1, gain)})
    if result is None:
        return None
    places, matrix = _basis_places(codec)
    streams = [*([] if gain is None else ["gain"]), BASIS]
    result.size, result.scales_stream, result.matrix_place = _WHOLE_RUN, len(_planes(codec)) + len(streams) - 1, matrix
    if codec.fixed_heads is None:
        channels = [column for columns in columns_by_width(codec.widths, codec.dim).values() for column in columns]
        numbers = [*channels, *(places[0, column // RUN_COLUMNS] for column in channels)]
    else:
        result.heads_stream = len(streams)
        streams.append(CODES)
        numbers = _head_runs(codec, places)
    kept = torch.tensor(numbers, dtype=torch.int32, device="cpu")
    result.channels = ctypes.cast(kept.data_ptr(), ctypes.POINTER(ctypes.c_int32))
    return _finished(result, codec, streams, [], kept)


def _head_runs(codec: Klt, places: dict[tuple[int, int], int]) -> list[int]:
    """Return the C table of each head's runs: offsets of the heads' numbers, the end, then the numbers of their runs."""
    heads: list[list[int]] = [[] for _ in range(codec.fixed_heads or 0)]
    result = [
        (head, run, bytes_[0], part.width, part.columns)
        for part in codec.runs
        for head, run, bytes_ in zip(part.heads, part.runs, part.places, strict=True)
    ]
    for head, run, byte, width, columns in sorted(result):
        heads[head] += [byte, width, HEAD_RUN_COLUMNS * run, columns, places[head, run]]
    ends = [*accumulate(map(len, heads), initial=len(heads) + 1)]
    return [*ends, *(number for numbers in heads for number in numbers)]


def _basis_places(codec: Klt) -> tuple[dict[tuple[int, int], int], int]:
    """Return the offset of each coded run's table within its head's numbers, which begin with the mean, and of the matrix.

    If heads share widths, the runs of head 0 stand for all.
    """
    places, last = {}, codec.dim
    heads = codec.fixed_heads or 1
    count = len(codec.widths) // heads
    for head in range(heads):
        at = codec.dim
        for run in range(count):
            if width := codec.widths[count * head + run]:
                places[head, run], at = at, at + max(MIN_ENTRIES, 1 << width)
        last = max(last, at)
    return places, last


def basis_numbers(codec: Klt, rows: BasisRows) -> torch.Tensor:
    """Return the mean, the tables and the matrix of each head, float32 ``[batch or 1, kv_head, number]``."""
    places, matrix = _basis_places(codec)
    result = torch.zeros(*rows.rows.shape[:2], matrix + codec.dim**2, dtype=torch.float32, device="cpu")
    result[..., : codec.dim], result[..., matrix:] = rows.mean[:, :, 0], rows.matrix.flatten(2)
    count = len(codec.widths) // (codec.fixed_heads or 1)
    for (head, run), at in places.items():
        width = codec.widths[count * head + run]
        if codec.fixed_heads is None:
            result[..., at : at + (1 << width)] = rows.table(run, width)
        else:
            result[:, head, at : at + (1 << width)] = rows.head_tables((head,), (run,), width)[:, 0]
    return result


ENTRY, ENTRIES = "raw_entry", "raw_entries"
"""The streams, made when a page is described, of raw tokens: each token's entry, int32 ``[batch, 1, token]``, negative without one; and the
entries, float32 ``[1, kv_head, entry, dim]`` in the coded frame."""

FIRST, CHUNKS = "outlier_first", "outlier_chunks"
"""The same of outliers: the first chunk of each token, int64 ``[batch, kv_head, token + 1]``; and the chunks, int16 ``[1, 1, chunk, 5]``,
four values in binary16 and the chunk's number in its token."""


PLACES = "chunk_places"
"""The stream, made when a page is described, of the places of chunks: int64 ``[batch, kv_head, chunk, 2]``, the first word and the number
of all words."""


def _lossless(codec: Lossless) -> Described | None:
    result = _struct(codec, {})
    if result is None:
        return None
    result.fraction_bits, result.chunk_stream = FLOAT_FORMATS[codec.dtype].fraction_bits, len(_planes(codec))
    return _finished(result, codec, ["frequencies", "states", PLACES, "words"], [])


def _trellis(codec: Trellis) -> Described | None:
    result = _struct(codec, {"norm": (1, _NORMS[codec.norm])})
    if result is None:
        return None
    result.index_bits, result.digit_bits = codec.state_bits, codec.bits
    return _finished(result, codec, ["norm"], [window_values(codec.table, "cpu")])


def _completed(codec: WithSideCars) -> Described | None:
    """Complete ``described`` for a codec with raw tokens or at most one side-car of each kind that stores data in the coded frame."""
    plain = described(codec.codec)
    if plain is None or any(len(kind) > 1 for kind in (codec.page_vectors, codec.frame_parts, codec.sketches)):
        return None
    if any(type(side_car) not in (KeyMean, Outliers, Qjl) for side_car in (*codec.page_vectors, *codec.frame_parts, *codec.sketches)):
        return None
    struct, streams = library.Codec.from_buffer_copy(plain.struct), list(plain.streams)
    kept: list[Any] = [plain]
    for sketch in codec.sketches:
        assert isinstance(sketch, Qjl)
        if struct.packings == library.MAX_PACKINGS or struct.value_streams == library.MAX_VALUES:
            return None
        signs = _packing(sketch.packing)
        struct.packing[struct.packings] = signs
        struct.columns += signs.width * signs.planes
        struct.values[struct.value_streams] = library.Values(1, library.DTYPES.index(NORMS[sketch.norm]))
        places = sum(struct.packing[number].planes for number in range(struct.packings)), len(_planes(codec.codec)) + struct.value_streams
        streams.insert(places[1], QJL_NORM)
        streams[places[0] : places[0]] = [f"{QJL_SIGNS}.{plane}" for plane in range(signs.planes)]
        for name in ("scales_stream", "table_stream"):
            if getattr(struct, name) >= 0:
                setattr(struct, name, getattr(struct, name) + signs.planes + 1)
        struct.value_streams, struct.numbers, struct.sketches = struct.value_streams + 1, struct.numbers + 1, 1
        rotation = rotations.described(sketch.rotation)
        struct.sketch_rotation, struct.sketch_size = rotation.struct, math.sqrt(math.pi / (2 * sketch.dim))
        kept.append(rotation)
    for vector in codec.page_vectors:
        assert isinstance(vector, KeyMean)
        struct.mean_stream, struct.mean_tokens, struct.mean_bits = len(streams), vector.tokens, vector.bits
        streams += [MEAN_CODES, MEAN_SCALE]
    if codec.frame_parts:
        struct.outlier_stream = len(streams)
        streams += [FIRST, CHUNKS]
    if codec.kept_tokens:
        struct.patch_stream = len(streams)
        streams += [ENTRY, ENTRIES]
    struct.streams = len(streams)
    return Described(struct, tuple(streams), tuple(kept))


FAMILIES: dict[type[Codec], Callable[[Any], Described | None]] = {
    Raw: _raw,
    Group: _group,
    Scalar: _scalar,
    Octahedral: _octahedral,
    Angle: _angle,
    Polar: _polar,
    Quaternion: _quaternion,
    Minifloat: _minifloat,
    Klt: _klt,
    Lossless: _lossless,
    Trellis: _trellis,
}
"""Descriptions by codec family; a new codec is one row."""
