"""Encode on the CPU: scales equal those of ``formats/``, and so do codes unless two are equally near within rounding.

Groups without a rotation, and 8-bit and 4-bit floats, are encoded to exactly the bytes that ``formats/`` writes.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy
import torch

from kvpack.formats.angle import Angle
from kvpack.formats.columns import next_power_of_two
from kvpack.formats.group import Group
from kvpack.formats.head_norms import PAGE_TOKENS
from kvpack.formats.key_mean import KeyMean
from kvpack.formats.lloyd_max import direction_table
from kvpack.formats.minifloat import Minifloat, run_scales
from kvpack.formats.octahedral import Octahedral
from kvpack.formats.octahedral_search import midpoints
from kvpack.formats.quaternion import Quaternion, secondary_quaternions
from kvpack.formats.scalar import Scalar
from kvpack.formats.side_cars import WithSideCars
from kvpack.formats.trellis import Trellis
from kvpack.runtime.memory import empty

from . import codecs, library, rotations

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvpack.formats.base import Codec

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
"""The dtypes that are encoded, in the order of ``library.DTYPES``."""

MIN_VALUES = 1 << 18
"""Values of a call for each of its threads: below it, starting one costs more than it saves."""

MAX_SECONDARY = 192
"""Above this number of secondary quaternions, the grid of ``formats/`` finds the nearest codeword faster than trying all."""

MAX_LEVELS = 64
"""Up to this number of levels per octahedral coordinate, local3x3 of ``formats/`` finds what local2x2 finds: the nearest direction."""

MAX_EVEN_LEVELS = 8
"""Up to this number of levels of ``direction_table``, a line tells between which two of them the nearest direction is."""

_CANDIDATES = {"full": 0, "scalar": 1, "local2x2": 2, "local3x3": 3}
_IN_EVEN_BRACKETS = 4
_STORED = {"U8": torch.uint8, "U16": torch.uint16, "F16": torch.float16, "F32": torch.float32}
_MEMORY, _REFUSED = 1, 2
_VECTOR = 16
_PAGE_TOKENS = 512
_MAX_MEAN = 2.0**60
_FLOATS, _PAIRS, _POWERS = range(3)
_ROUNDED = 1 - 2.0**-10
_KEPT = 64


def supports(codec: Codec, x: torch.Tensor) -> bool:
    """Return True if C can encode ``x`` ``[batch, kv_head, token, dim]``.

    It supports groups with binary16 scales and no rotation, in full columns of at most 32 bits; minifloats in 16-bit words without token
    scales; and means of pages of whole vectors as the only side-car.
    """
    if isinstance(codec, WithSideCars):
        means = [side_car for side_car in codec.side_cars if isinstance(side_car, KeyMean)]
        in_vectors = len(means) == len(codec.side_cars) == 1 and means[0].tokens % _VECTOR == codec.dim % _VECTOR == 0
        return in_vectors and isinstance(codec.codec, Scalar | Octahedral | Quaternion | Angle | Trellis) and supports(codec.codec, x)
    if library.library() is None or x.dtype not in DTYPES or x.requires_grad or not (codec.dim == 1 or x.stride(3) == 1):
        return False
    return _is_supported(codec)


@lru_cache(_KEPT)
def _is_supported(codec: Codec) -> bool:
    if type(codec) is Group:
        (packing,) = codec.packings().values()
        stored = codec.rotation_kind == codec.token_scale == "none" and codec.scale_dtype == "fp16"
        # Where a width does not divide the channels, some columns have unused fields.
        return stored and packing.symbols % packing.width == 0 and packing.column_bytes <= 4 and codec.dim <= codecs.MAX_DIM
    if type(codec) is Minifloat:
        (packing,) = codec.packings().values()
        in_words = packing.planes == (packing.width,) and packing.column_bytes == 2 and packing.symbols == packing.width * packing.fields
        return in_words and packing.width % _VECTOR == 0 and codec.granularity != "token" and codec.dim <= codecs.MAX_DIM
    if type(codec) is Quaternion and codec.secondary > MAX_SECONDARY:
        return False
    return type(codec) in (Scalar, Octahedral, Quaternion, Angle, Trellis) and codecs.described(codec) is not None


def encode(
    codec: Codec,
    x: torch.Tensor,
    before: Mapping[str, torch.Tensor] | None = None,
    threads: int | None = None,
    level: int = 0,
    coded: torch.Tensor | None = None,
) -> dict[str, torch.Tensor] | None:
    """Encode ``x``, which ``supports`` accepts, to streams; None for values that ``formats/`` must encode or refuse.

    ``before`` contains the streams of the run that it continues; ``level`` is an index into ``library.levels()``. For a codec that changes
    norms, ``coded``, contiguous float32 ``[batch, kv_head, token]``, receives ``codec.coded_norms``. Raises MemoryError.
    """
    if isinstance(codec, WithSideCars):
        return _encode_centered(codec, x, threads, level, coded)
    given: dict[str, torch.Tensor] = {}
    if isinstance(codec, Minifloat) and codec.run_scale is not None:
        scale = _run_scale(codec, x, None if before is None else before[codec.run_scale], threads, level)
        if scale is None:
            return None
        given[codec.run_scale] = scale
    return _encode(codec, x, given, None, threads, level)


def is_one_call(codec: Codec) -> bool:
    """Return True if ``call_of`` alone encodes the values, without measuring them first."""
    return not isinstance(codec, WithSideCars) and not (isinstance(codec, Minifloat) and codec.run_scale is not None)


def _encode(
    codec: Codec,
    x: torch.Tensor,
    given: Mapping[str, torch.Tensor],
    means: tuple[torch.Tensor, int] | None,
    threads: int | None,
    level: int,
    coded: torch.Tensor | None = None,
) -> dict[str, torch.Tensor] | None:
    """Run ``encode`` with known streams ``given``, after subtracting the mean of every ``means`` tokens."""
    batch, heads, tokens, _ = x.shape
    streams = {}
    for name, layout in codec.run_layouts(batch, heads).items():
        shape = (*layout.shape[:2], -(-tokens // layout.tokens_per_row), *layout.shape[3:])
        streams[name] = given[name] if name in given else empty(shape, _STORED[layout.dtype], x.device)
    call, names, _kept = _call_over(codec, x, threads, level)
    # C reads scales of runs in binary32.
    read = streams | {name: stream.to(torch.float32).expand(batch, heads, -1) for name, stream in given.items()} if given else streams
    call.streams = (library.Stream * len(names))(*map(library.Stream.of, map(read.__getitem__, names)))
    if means is not None:
        call.means, call.mean_tokens = library.Stream.of(means[0]), means[1]
    if coded is not None:
        call.norms = coded.data_ptr()
    return streams if run(call) else None


def _call_over(codec: Codec, x: torch.Tensor, threads: int | None, level: int) -> tuple[library.Encode, tuple[str, ...], Any]:
    """Run ``call_of`` for the values ``x`` with a suitable number of threads."""
    call, names, kept = call_of(codec, (x.shape[0], x.shape[1], x.shape[2]), x.dtype)
    call.x = library.Stream.of(x)
    call.threads, call.level = min(library.checked_threads(threads, torch.get_num_threads()), 1 + x.numel() // MIN_VALUES), level
    return call, names, kept


def _measured(codec: Codec, x: torch.Tensor, page: int, columns: int, threads: int | None, level: int) -> torch.Tensor:
    """Return the measurements of each ``page`` of tokens (``kvpack_measure``), float32 ``[batch, kv_head, page, column]``."""
    batch, heads, tokens, _ = x.shape
    result = empty((batch, heads, -(-tokens // page), columns), torch.float32, x.device)
    call, _, _kept = _call_over(codec, x, threads, level)
    call.means, call.mean_tokens = library.Stream.of(result), page
    compiled = library.library()
    assert compiled is not None
    if compiled.kvpack_measure(ctypes.byref(call)):
        raise MemoryError("not enough memory to encode: the buffers could not be allocated")
    return result


def _run_scale(codec: Minifloat, x: torch.Tensor, last: torch.Tensor | None, threads: int | None, level: int) -> torch.Tensor | None:
    """Return the scale of a run (``Minifloat.begin``); None for values that are not finite or too large."""
    if not x.shape[2]:
        return None
    largest = _measured(codec, x, _PAGE_TOKENS, 1, threads, level).amax(2)
    if codec.granularity != "head":
        largest = largest.amax(1, keepdim=True)
    if not torch.isfinite(largest).all():
        return None
    scale = run_scales(codec, largest, last)
    return scale if torch.isfinite(scale).all() else None


def _encode_centered(
    codec: WithSideCars, x: torch.Tensor, threads: int | None, level: int, coded: torch.Tensor | None
) -> dict[str, torch.Tensor] | None:
    """Encode keys whose only side-car is ``KeyMean``; the streams equal those of ``KeyMean.begin`` and the codec."""
    (key_mean,) = codec.side_cars
    assert isinstance(key_mean, KeyMean)
    mean = _measured(codec.codec, x, key_mean.tokens, codec.dim, threads, level)
    if not mean.numel() or not mean.abs().amax().item() < _MAX_MEAN:
        return None
    own = key_mean.encode_means(codec.rotation.forward(mean))
    vectors = codec.rotation.inverse(key_mean.vectors(own)).contiguous()
    streams = _encode(codec.codec, x, {}, (vectors, key_mean.tokens), threads, level, coded)
    return None if streams is None else {name: (streams | own)[name] for name in codec.row_layouts}


def call_of(codec: Codec, shape: tuple[int, int, int], dtype: torch.dtype) -> tuple[library.Encode, tuple[str, ...], Any]:
    """Return a call for ``shape`` (batch, heads, tokens) of ``dtype``, its stream names, and the objects that must outlive it.

    Values and streams are not set yet.
    """
    described = codecs.described(codec)
    assert described is not None
    candidates = _candidates(codec) if isinstance(codec, Octahedral) else 0
    rotation, bounds = rotations.described(codec.rotation), _bounds(codec, candidates)
    call = library.Encode(*shape, ctypes.pointer(described.struct), library.Stream(), DTYPES.index(dtype), rotation.struct, threads=1)
    if isinstance(codec, Group):
        call.zero_centre, call.per_middle = codec.centre == "zero", 1.0 / (((1 << codec.bits) - 1) / 2)
    elif isinstance(codec, Scalar | Octahedral | Quaternion | Angle | Trellis):
        call.unbiased = codec.norm_rule == "unbiased"
    call.candidates = candidates
    for number, table in enumerate(bounds):
        call.bounds[number] = library.Table(table.data_ptr(), len(table))
    return call, described.streams, (described, rotation, bounds)


def run(call: library.Encode) -> bool:
    """Encode. Returns False for values that ``formats/`` must encode or refuse. Raises MemoryError."""
    compiled = library.library()
    assert compiled is not None
    failed = compiled.kvpack_encode(ctypes.byref(call))
    if failed == _MEMORY:
        raise MemoryError("not enough memory to encode: the buffers could not be allocated")
    return bool(failed != _REFUSED)


@lru_cache(_KEPT)
def _bounds(codec: Codec, candidates: int) -> tuple[torch.Tensor, ...]:
    """Return the tables that only the encoder needs, in the order of ``interface.h``.

    Codecs that differ only in ``candidates`` share them.
    """
    if isinstance(codec, Scalar):
        return tuple(_padded(midpoints(table), torch.inf) for table in (codec.magnitude_table, codec.high_magnitude_table) if table)
    if isinstance(codec, Octahedral):
        magnitudes = torch.frombuffer(bytearray(codec.direction_table), dtype=torch.float32)
        if candidates == _IN_EVEN_BRACKETS:
            directions = line(magnitudes)
        else:
            directions = magnitudes[1:-1].tolist() if candidates == _CANDIDATES["local2x2"] else midpoints(codec.direction_table)
        bounds = (_padded(values, torch.inf) for values in (directions, midpoints(codec.norm_table)))
        return *bounds, _padded(magnitudes.tolist(), 0.0), _padded(_per_length(magnitudes).tolist(), 0.0)
    if isinstance(codec, Quaternion):
        return (secondary_quaternions(codec.seed, codec.secondary, "cpu").flatten().contiguous(),)
    return ()


def _candidates(codec: Octahedral) -> int:
    """Return the candidates per coordinate, or 0 for all.

    Two candidates are those on either side of the coordinate; where ``formats/`` tries one, it is the nearer.
    """
    levels = 1 << codec.b_dir - 1
    settled = codec.rounding == "local3x3" and levels <= MAX_LEVELS
    alone = levels == 1 and codec.rounding != "scalar"
    rounding = "full" if alone else "local2x2" if settled else codec.rounding
    even = rounding == "local2x2" and levels <= MAX_EVEN_LEVELS and codec.direction_table == direction_table(levels)
    return _IN_EVEN_BRACKETS if even else _CANDIDATES[rounding]


def line(magnitudes: torch.Tensor) -> list[float]:
    """Fit a line that maps a coordinate to steps between ascending magnitudes; return its slope and offset."""
    x, level = magnitudes.double(), torch.arange(len(magnitudes), dtype=torch.float64, device=magnitudes.device)
    slope = float(((x - x.mean()) * level).sum() / (x - x.mean()).square().sum())
    return [slope, float(level.mean()) - slope * float(x.mean())]


def _per_length(magnitudes: torch.Tensor) -> torch.Tensor:
    """Return 1 over the length of the octahedron's point of every index (OCTOPUS Eq. 6), float64."""
    eta, xi = (axis.flatten() for axis in torch.meshgrid(magnitudes.double(), magnitudes.double(), indexing="ij"))
    third = 1 - xi - eta
    first, second = torch.where(third < 0, 1 - eta, xi), torch.where(third < 0, 1 - xi, eta)
    return (first.square() + second.square() + third.square()).rsqrt()


def _padded(values: list[float], padding: float) -> torch.Tensor:
    entries = max(codecs.MIN_ENTRIES, next_power_of_two(len(values)))
    return torch.tensor(values + [padding] * (entries - len(values)), dtype=torch.float32, device="cpu")


def measures(x: torch.Tensor) -> bool:
    """Return True if C can compute the norms of ``x`` ``[batch, kv_head, token, dim]``."""
    return chooses(x.dtype) and (x.stride(3) == 1 or x.shape[3] == 1)


def norms(x: torch.Tensor) -> torch.Tensor:
    """Compute ``formats.head_norms.norms_per_head`` in C. Raises MemoryError."""
    batch, heads, tokens, dim = x.shape
    result, left_out = torch.zeros(batch, heads, tokens, dtype=torch.float32, device="cpu"), numpy.zeros((batch, 2), numpy.int64)
    if x.numel():
        values = library.Stream.of(x)
        sizes = {"layers": batch, "heads": heads, "tokens": tokens, "dim": dim, "page": PAGE_TOKENS}
        pointers = {"norms": result.data_ptr(), "left_out": left_out.ctypes.data}
        run_raw_slots(library.RawSlots(x=values, dtype=DTYPES.index(x.dtype), threads=1, **pointers, **sizes))
    return result


def has_large(sizes: torch.Tensor, ratio: float, level: int = 0) -> bool | None:
    """Return ``formats.head_norms.has_large_size``; None for sizes that are not contiguous float32.

    ``level`` is an index into ``library.levels()``.
    """
    if sizes.dtype != torch.float32:
        return None
    return _has_large(sizes, _FLOATS, sizes.shape[-1], 1, ratio, level)


def has_large_error(codec: Codec, streams: Mapping[str, torch.Tensor], ratio: float, level: int = 0) -> bool | None:
    """Return ``has_large`` of ``codec.error_sizes(streams)``; None for codecs whose sizes C does not read."""
    family = codec.family
    if isinstance(family, Minifloat) and family.scale_dtype == "e8m0":
        scales, kind, members = streams["block_scales"], _POWERS, streams["block_scales"].shape[3]
    elif isinstance(family, Group) and family.scale_dtype == "fp16":
        scales, kind, members = streams["scales"], _PAIRS, streams["scales"].shape[3]
        if members > 1:
            # Sums of squares may round differently. Only sizes that PyTorch computes are compared with ``ratio`` itself.
            ratio *= _ROUNDED
    else:
        return None
    return _has_large(scales, kind, scales.shape[2], members, ratio, level)


def _has_large(sizes: torch.Tensor, kind: int, tokens: int, members: int, ratio: float, level: int) -> bool | None:
    if not sizes.numel() or not sizes.is_contiguous():
        return None
    rows = sizes.nbytes // (tokens * members * (1 if kind == _POWERS else 4))
    call = library.Sizes(sizes.data_ptr(), kind, rows, tokens, members, PAGE_TOKENS, ratio, level)
    compiled = library.library()
    assert compiled is not None
    return bool(compiled.kvpack_has_large(ctypes.byref(call)))


def run_raw_slots(call: library.RawSlots) -> None:
    """Measure norms and choose raw tokens by them. Raises MemoryError."""
    compiled = library.library()
    assert compiled is not None
    if compiled.kvpack_raw_slots(ctypes.byref(call)):
        raise MemoryError("not enough memory to choose raw tokens: the buffers could not be allocated")


def chooses(dtype: torch.dtype) -> bool:
    """Return True if C can choose raw tokens by keys of ``dtype``."""
    return library.library() is not None and dtype in DTYPES
