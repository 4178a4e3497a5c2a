"""Encoding on the CPU. Scales and codes equal those of ``formats/``, except that codes of near-ties may differ by rounding errors.

Groups without a rotation, and 8-bit and 4-bit floats, are encoded to exactly the bytes that ``formats/`` writes.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy
import torch

from kvpack.formats.angle import Angle
from kvpack.formats.base import Codec
from kvpack.formats.channel_scale import SPAN_TOKENS, STREAM, ChannelScale
from kvpack.formats.columns import next_power_of_two
from kvpack.formats.group import Group
from kvpack.formats.key_mean import KeyMean
from kvpack.formats.lloyd_max import direction_table
from kvpack.formats.minifloat import Minifloat, run_scales
from kvpack.formats.octahedral import Octahedral
from kvpack.formats.octahedral_search import midpoints
from kvpack.formats.polar import Polar
from kvpack.formats.products import product
from kvpack.formats.quaternion import Quaternion, secondary_quaternions
from kvpack.formats.raw_positions import LOW_VALUE_SHARE, MAX_LOW_VALUES_PER_PAGE, RawPositions
from kvpack.formats.runs import Run
from kvpack.formats.scalar import Scalar
from kvpack.formats.sidecars import CodecWithSidecars
from kvpack.formats.token_norms import MAX_PER_PAGE, PAGE_TOKENS, drop_crowded_pages
from kvpack.formats.trellis import Trellis
from kvpack.runtime.memory import empty

from . import codecs, library

TILE_CODECS = (Scalar, Octahedral, Polar, Quaternion, Angle, Trellis)
"""Codecs that the C kernels encode from tiles of rotated values."""

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
"""Supported dtypes of input values, in the order of ``library.DTYPES``."""

MIN_VALUES = 1 << 18
"""Minimum number of values per thread. With fewer, starting another thread costs more than it saves."""

MAX_SECONDARY = 192
"""Maximum number of secondary quaternions for C's exhaustive search; with more, the grid of ``formats/`` is faster."""

MAX_LEVELS = 64
"""Maximum number of levels per octahedral coordinate at which rounding local2x2 yields the same directions as local3x3."""

MAX_EVEN_LEVELS = 8
"""Maximum number of levels of ``direction_table`` at which a linear formula finds the two levels around a coordinate."""

REFUSED = 2
"""Status of ``kvpack_encode`` if ``formats/`` must encode the input or reject some of its values."""

_CANDIDATES = {"full": 0, "scalar": 1, "local2x2": 2, "local3x3": 3}
_EVEN_BRACKETS = 4
_STORED_DTYPES = {"U8": torch.uint8, "U16": torch.uint16, "F16": torch.float16, "F32": torch.float32}
_VECTOR_VALUES = 16
_MAX_MEAN = 2.0**60
_FLOATS, _PAIRS, _POWERS = range(3)
_ROUNDING_MARGIN = 1 - 2.0**-10
_CACHE_SIZE = 64
_RAW_SLOTS = 64
_TABLES, _ROTATION = "tables of the C encoder", "matrix of the rotation"
"""Keys of ``Codec.derived_values``. Each codec object has its own tables, because codecs that only search differently are equal."""


@lru_cache(_CACHE_SIZE)
def supports(codec: Codec) -> bool:
    """Return True if the C kernels can encode values of ``DTYPES`` with ``codec``.

    Groups are supported only with float16 scales, without a rotation or token scales, and with fully used columns of up to 32 bits.
    Minifloats are supported only without token scales and with fully used words. The only supported sidecars are a key mean whose page
    size is a multiple of a vector register, and with it a channel scale.
    """
    if library.library() is None:
        return False
    if isinstance(codec, CodecWithSidecars):
        means = codec.sidecar(KeyMean)
        known = {*map(type, codec.sidecars)} <= {ChannelScale, KeyMean}
        if means is None or not known or means.tokens % _VECTOR_VALUES or codec.dim % _VECTOR_VALUES:
            return False
        return isinstance(codec.codec, TILE_CODECS) and supports(codec.codec)
    if type(codec) is Group:
        (packing,) = codec.packings().values()
        plain = codec.rotation_kind == codec.token_scale == "none" and codec.scale_dtype == "fp16"
        # If the width does not divide the number of channels, some columns have unused fields.
        return plain and packing.symbols % packing.width == 0 and packing.column_bytes <= 4 and codec.dim <= codecs.MAX_DIM
    if type(codec) is Minifloat:
        (packing,) = codec.packings().values()
        has_full_words = (
            packing.planes == (packing.width,) and packing.column_bytes == 2 and packing.symbols == packing.width * packing.fields
        )
        return has_full_words and packing.width % _VECTOR_VALUES == 0 and codec.granularity != "token" and codec.dim <= codecs.MAX_DIM
    if type(codec) is Quaternion and codec.secondary > MAX_SECONDARY:
        return False
    return type(codec) in TILE_CODECS and codecs.describe(codec) is not None


def encode(
    codec: Codec,
    x: torch.Tensor,
    previous: Mapping[str, torch.Tensor] | None = None,
    threads: int | None = None,
    level: int = 0,
    norms: torch.Tensor | None = None,
    errors: torch.Tensor | None = None,
    skipped: torch.Tensor | None = None,
    largest: torch.Tensor | None = None,
) -> dict[str, torch.Tensor] | None:
    """Encode ``x`` ``[batch, kv_head, token, dim]`` to streams.

    Returns None if ``formats/`` must encode ``x`` or reject some values, for example because the C kernels do not support the codec, the
    dtype or the strides. ``previous`` contains the streams of the preceding tokens, if any. ``level`` is an index into
    ``library.levels()``. For a codec with ``direction_spread``, the tokens' norms (``codec.coded_norms``) and relative errors are written
    to ``norms`` and ``errors``, contiguous float32 ``[batch, kv_head, token]``. ``skipped``, contiguous bool ``[batch, token]``, marks
    tokens to encode as zeros; only Minifloat supports it. ``largest`` contains the largest magnitudes of tokens, if known, as
    ``measure_sizes`` returns them.
    """
    if skipped is not None and type(codec) is not Minifloat:
        return None
    if x.dtype not in DTYPES or x.requires_grad or not (codec.dim == 1 or x.stride(3) == 1) or not supports(codec):
        return None
    batch, heads, tokens, _ = x.shape
    plain = codec.codec if isinstance(codec, CodecWithSidecars) else codec
    call, names, _keep_alive = create_call(plain, x.shape[:3], x.dtype, x, threads, level)
    run_streams: dict[str, torch.Tensor] = {}
    read_streams: dict[str, torch.Tensor] = {}
    sidecar_streams: dict[str, torch.Tensor] = {}
    if isinstance(codec, CodecWithSidecars):
        measured = _measure_sidecars(codec, x, previous, call)
        if measured is None:
            return None
        sidecar_streams, *_vectors = measured
    elif isinstance(codec, Minifloat) and codec.run_scale is not None:
        if largest is None:
            sizes = measure_sizes(x, threads, level, with_norms=False)
            assert sizes is not None
            largest = sizes[1]
        scale = _compute_run_scale(codec, largest, None if previous is None else previous[codec.run_scale], skipped)
        if scale is None:
            return None
        run_streams[codec.run_scale] = scale
        # The C kernels read run scales as float32.
        read_streams[codec.run_scale] = scale.to(torch.float32).expand(batch, heads, -1)
    streams = {}
    for name, layout in plain.row_layouts.items():
        shape = (batch, heads, -(-tokens // layout.tokens_per_row), *layout.shape[3:])
        streams[name] = run_streams[name] if name in run_streams else empty(shape, _STORED_DTYPES[layout.dtype], x.device)
    call.streams = (library.Stream * len(names))(*map(library.Stream.describe, map((streams | read_streams).__getitem__, names)))
    call.norms = None if norms is None else norms.data_ptr()
    call.errors = None if errors is None else errors.data_ptr()
    call.skipped = None if skipped is None else skipped.data_ptr()
    return None if library.run("encode", call, "encode") == REFUSED else streams | sidecar_streams


def encodes_in_one_call(codec: Codec) -> bool:
    """Return True if one C call encodes values with ``codec``. Other codecs must measure the values first."""
    return not isinstance(codec, CodecWithSidecars) and not (isinstance(codec, Minifloat) and codec.run_scale is not None)


def _measure_sidecars(
    codec: CodecWithSidecars, x: torch.Tensor, previous: Mapping[str, torch.Tensor] | None, call: library.EncodeArguments
) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor | None] | None:
    """Return the streams of the codec's ``ChannelScale``, if any, and ``KeyMean``, and the vectors of both, which are added to ``call``.

    The vectors must outlive the call. Returns None if ``formats/`` must encode ``x``.
    """
    batch, heads, tokens, dim = x.shape
    if not x.numel():
        return None
    (key_mean,) = codec.page_vectors
    assert isinstance(key_mean, KeyMean)
    mean = empty((batch, heads, -(-tokens // key_mean.tokens), dim), torch.float32, x.device)
    call.means, call.mean_tokens, call.share = library.Stream.describe(mean), key_mean.tokens, key_mean.share

    def span_squares() -> tuple[torch.Tensor, torch.Tensor | None]:
        squares = torch.empty(2, batch, heads, dim, -(-tokens // SPAN_TOKENS), dtype=torch.float64, device="cpu")
        call.squares = squares.data_ptr()
        library.run("measure", call, "encode")
        call.squares = None
        centered, whole = squares.transpose(3, 4)
        return centered, whole

    streams: dict[str, torch.Tensor] = {}
    factors = None
    for scale in codec.value_maps:
        run = Run((batch, heads, tokens, dim), x.device, partial(iter, [x]), span_squares=span_squares)
        streams |= scale.begin(run, previous).streams
        factors = streams[STREAM].to(torch.float32).contiguous()
        call.factors = library.Stream.describe(factors)
    library.run("measure", call, "encode")
    if not mean.abs().amax().item() < _MAX_MEAN:
        return None
    if _ROTATION not in codec.derived_values:
        codec.derived_values[_ROTATION] = codec.rotation.matrix()
    matrix = codec.derived_values[_ROTATION]
    streams |= key_mean.encode_means(product(mean.view(-1, dim), matrix.T).view(mean.shape))
    vectors = product(key_mean.vectors(streams).view(-1, dim), matrix).view(mean.shape)
    call.means = library.Stream.describe(vectors)
    return streams, vectors, factors


def _compute_run_scale(
    codec: Minifloat, largest: torch.Tensor, previous: torch.Tensor | None, skipped: torch.Tensor | None
) -> torch.Tensor | None:
    """Return the scale of a run (see ``Minifloat.begin``), or None if it has no values or if some are too large or not finite.

    ``largest``, ``[batch, kv_head, token]``, are the largest magnitudes of its tokens.
    """
    if not largest.numel():
        return None
    if skipped is not None:
        largest = largest.masked_fill(skipped[:, None], 0.0)
    largest = largest.amax(2 if codec.granularity == "head" else (1, 2), keepdim=True)
    if not float(largest.amax()) < math.inf:
        return None
    scale = run_scales(codec, largest, previous)
    return scale if float(scale.amax()) < math.inf else None


def create_call(
    codec: Codec, shape: Sequence[int], dtype: torch.dtype, x: torch.Tensor | None = None, threads: int | None = None, level: int = 0
) -> tuple[library.EncodeArguments, tuple[str, ...], Any]:
    """Create a C call that encodes values of ``shape`` (batch, heads, tokens) and ``dtype``. It lacks the addresses of the streams.

    If ``x`` is None, it also lacks the address of the values; otherwise, it encodes ``x`` with a suitable number of threads. Returns the
    call, its stream names, and objects that must outlive it.
    """
    description = codecs.describe(codec)
    assert description is not None
    if _TABLES not in codec.derived_values:
        codec.derived_values[_TABLES] = _encoder_tables(codec)
    rotation, (candidates, tables) = codecs.describe_rotation(codec.rotation), codec.derived_values[_TABLES]
    call = library.EncodeArguments(
        *shape, ctypes.pointer(description.struct), library.Stream(), DTYPES.index(dtype), rotation.struct, threads=1
    )
    if isinstance(codec, Group):
        call.zero_center, call.per_middle = codec.centre == "zero", 1.0 / (((1 << codec.bits) - 1) / 2)
    elif isinstance(codec, TILE_CODECS):
        call.unbiased = codec.norm_rule == "unbiased"
        call.scaled = isinstance(codec, Scalar) and codec.rounding == "scaled"
    call.candidates = candidates
    for index, table in enumerate(tables):
        call.bounds[index] = library.Table(table.data_ptr(), len(table))
    if x is not None:
        call.x, call.level = library.Stream.describe(x), level
        call.threads = library.thread_count(threads, 1 + x.numel() // MIN_VALUES)
    return call, description.streams, (description, rotation, tables)


def _encoder_tables(codec: Codec) -> tuple[int, tuple[torch.Tensor, ...]]:
    """Return the id of the candidate rule, and the tables that only encoders need, in the order of ``interface.h``."""
    if isinstance(codec, Scalar):
        tables = (table for table in (codec.magnitude_table, codec.high_magnitude_table) if table)
        return 0, tuple(_padded_table(midpoints(table), torch.inf) for table in tables)
    if isinstance(codec, Octahedral):
        candidates = _candidate_rule(codec)
        magnitudes = torch.frombuffer(bytearray(codec.direction_table), dtype=torch.float32)
        if candidates == _EVEN_BRACKETS:
            directions = fit_line(magnitudes)
        else:
            directions = magnitudes[1:-1].tolist() if candidates == _CANDIDATES["local2x2"] else midpoints(codec.direction_table)
        bounds = (_padded_table(values, torch.inf) for values in (directions, midpoints(codec.norm_table)))
        lengths = _padded_table(_reciprocal_lengths(magnitudes).tolist(), 0.0)
        return candidates, (*bounds, _padded_table(magnitudes.tolist(), 0.0), lengths)
    if isinstance(codec, Polar):
        return 0, (_angle_tangents(codec),)
    if isinstance(codec, Quaternion):
        return 0, (secondary_quaternions(codec.seed, codec.secondary, "cpu").flatten().contiguous(),)
    return 0, ()


def _angle_tangents(codec: Polar) -> torch.Tensor:
    """Return the tangents of the bounds between angles, for each level above the first: one table for each of the two kinds of pairs."""
    tables = [torch.empty(0, dtype=torch.float32, device="cpu")]
    for level in codec.tables[1:]:
        bounds = (torch.tensor(midpoints(level[kind]), dtype=torch.float64, device="cpu").tan() for kind in (0, -1))
        tables += [_padded_table([*values.tolist(), torch.inf], torch.inf) for values in bounds]
    return torch.cat(tables)


def _candidate_rule(codec: Octahedral) -> int:
    """Return C's id of the rule that an octahedral codec uses to select candidate directions (see ``_CANDIDATES``)."""
    levels = 1 << codec.b_dir - 1
    exact = codec.rounding == "local3x3" and levels <= MAX_LEVELS
    single = levels == 1 and codec.rounding != "scalar"
    rounding = "full" if single else "local2x2" if exact else codec.rounding
    even = rounding == "local2x2" and levels <= MAX_EVEN_LEVELS and codec.direction_table == direction_table(levels)
    return _EVEN_BRACKETS if even else _CANDIDATES[rounding]


def fit_line(magnitudes: torch.Tensor) -> list[float]:
    """Fit a line that maps ascending ``magnitudes`` to their indices. Returns its slope and offset."""
    x, step = magnitudes.double(), torch.arange(len(magnitudes), dtype=torch.float64, device=magnitudes.device)
    slope = float(((x - x.mean()) * step).sum() / (x - x.mean()).square().sum())
    return [slope, float(step.mean()) - slope * float(x.mean())]


def _reciprocal_lengths(magnitudes: torch.Tensor) -> torch.Tensor:
    """Return, for every pair of magnitudes, the reciprocal norm of their point on the octahedron (OCTOPUS Eq. 6), float64."""
    eta, xi = (axis.flatten() for axis in torch.meshgrid(magnitudes.double(), magnitudes.double(), indexing="ij"))
    third = 1 - xi - eta
    first, second = torch.where(third < 0, 1 - eta, xi), torch.where(third < 0, 1 - xi, eta)
    return (first.square() + second.square() + third.square()).rsqrt()


def _padded_table(values: list[float], padding: float) -> torch.Tensor:
    entries = max(codecs.MIN_ENTRIES, next_power_of_two(len(values)))
    return torch.tensor(values + [padding] * (entries - len(values)), dtype=torch.float32, device="cpu")


def measure_sizes(
    x: torch.Tensor, threads: int | None = None, level: int = 0, *, with_norms: bool = True
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return each token's norm in each head, as ``norms_per_head`` does, and its largest magnitude, which may be inf or NaN.

    Both are float32 ``[batch, kv_head, token]``. Norms are undefined unless ``with_norms``. ``level`` is an index into
    ``library.levels()``. Returns None for unsupported dtypes and strides.
    """
    batch, heads, tokens, dim = x.shape
    if x.dtype not in DTYPES or not (x.stride(3) == 1 or dim == 1):
        return None
    norms, largest = torch.empty(2, batch, heads, tokens, dtype=torch.float32, device="cpu")
    if x.numel():
        threads = library.thread_count(threads, 1 + x.numel() // MIN_VALUES)
        values = library.Stream.describe(x)
        if batch == 1:
            # Threads divide the work by layers.
            batch, heads, values.batch = heads, 1, values.head
        sizes = {"layers": batch, "heads": heads, "tokens": tokens, "dim": dim, "threads": threads, "level": level}
        pointers = {"norms": norms.data_ptr() if with_norms else None, "largest": largest.data_ptr()}
        library.run("raw_slots", library.RawSlotsArguments(x=values, dtype=DTYPES.index(x.dtype), **sizes, **pointers), "measure tokens")
    return norms, largest


def choose_raw_tokens(
    raw: RawPositions, key_norms: torch.Tensor, value_norms: torch.Tensor | None, packed: int, position: int
) -> torch.Tensor:
    """Choose raw tokens as ``raw.choose`` does for the norms from ``raw.selection_norms``. Returns a mask, contiguous bool ``[batch,
    packed]``.

    ``packed`` is the number of tokens to choose from, and ``position`` is the position of the first one.
    """
    if value_norms is not None and raw.low_norm:
        near_zero = _choose_raw_slots(value_norms, low=LOW_VALUE_SHARE * raw.low_norm)
        if near_zero.any():
            key_norms = key_norms.masked_fill(drop_crowded_pages(near_zero, MAX_LOW_VALUES_PER_PAGE)[:, None], 0.0)
    first = min(packed, max(0, raw.first - position))
    return _choose_raw_slots(key_norms[:, :, :packed].contiguous(), low=raw.low_norm, high=raw.high_norm, few=MAX_PER_PAGE, first=first)


def _choose_raw_slots(norms: torch.Tensor, **rules: float) -> torch.Tensor:
    """Return a mask of the tokens that ``kvpack_raw_slots`` chooses by ``norms`` ``[batch, kv_head, token]``, bool ``[batch, token]``."""
    batch, heads, tokens = norms.shape
    # Unused slots contain -1, the last column of the mask.
    mask, left_out, slots = numpy.zeros((batch, tokens + 1), numpy.bool_), numpy.full((batch, 2), _RAW_SLOTS), 0
    while tokens and (missing := int(left_out[:, 0].max())):
        slots += missing
        chosen = numpy.empty((batch, slots), numpy.int64)
        pointers = {"norms": norms.data_ptr(), "chosen": chosen.ctypes.data, "left_out": left_out.ctypes.data}
        sizes = {"layers": batch, "heads": heads, "tokens": tokens, "slots": slots, "page": PAGE_TOKENS, "threads": 1}
        library.run("raw_slots", library.RawSlotsArguments(**sizes, **pointers, **rules), "choose raw tokens")
        mask[numpy.arange(batch)[:, None], chosen] = True
    return torch.from_numpy(numpy.ascontiguousarray(mask[:, :-1]))


def error_scales(codec: Codec, ratio: float) -> tuple[str, int, float] | None:
    """Return a replacement for ``codec.error_sizes`` that the C kernels support: a stream, its kind, and the ratio to use for it.

    Returns None if they do not support this check for the codec.
    """
    family = codec.without_sidecars
    if isinstance(family, Minifloat) and family.scale_dtype == "e8m0":
        return "block_scales", _POWERS, ratio
    if isinstance(family, Group) and family.scale_dtype == "fp16":
        # C's sums of squares may round differently from PyTorch's, so allow a margin.
        return "scales", _PAIRS, ratio * _ROUNDING_MARGIN if family.size < family.dim else ratio
    return None


def has_large_error(codec: Codec, streams: Mapping[str, torch.Tensor], ratio: float, level: int = 0) -> bool | None:
    """Return ``has_large(codec.error_sizes(streams), ratio)``, computed in C. Returns None if the codec is not supported."""
    source = error_scales(codec, ratio)
    return None if source is None else has_large(streams[source[0]], source[2], level, source[1])


def has_large(sizes: torch.Tensor, ratio: float, level: int = 0, kind: int = _FLOATS) -> bool | None:
    """Return True if any size is large, as ``formats.token_norms.has_large_size`` does.

    Returns None if ``sizes`` are empty, not contiguous, or floats other than float32. ``level`` is an index into ``library.levels()``. For
    other values of ``kind``, sizes are computed from scales ``[batch, kv_head, token, scale, ...]``.
    """
    if not sizes.numel() or not sizes.is_contiguous() or (kind == _FLOATS and sizes.dtype != torch.float32):
        return None
    tokens, members = (sizes.shape[-1], 1) if kind == _FLOATS else sizes.shape[2:4]
    rows = sizes.nbytes // (tokens * members * (1 if kind == _POWERS else 4))
    call = library.SizesArguments(sizes.data_ptr(), kind, 1, 0, rows, tokens, members, PAGE_TOKENS, ratio, level)
    return library.run("has_large", call, "compare sizes") != 0
