"""Encoding on the CPU: the scales of ``formats/``, and its codes except where two are equally near within rounding.

Groups without a rotation are encoded to the bytes that ``formats/`` writes.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from kvpack.formats.angle import Angle
from kvpack.formats.columns import next_power_of_two
from kvpack.formats.group import Group
from kvpack.formats.lloyd_max import direction_table
from kvpack.formats.octahedral import Octahedral
from kvpack.formats.octahedral_search import midpoints
from kvpack.formats.quaternion import Quaternion, secondary_quaternions
from kvpack.formats.scalar import Scalar
from kvpack.formats.trellis import Trellis
from kvpack.runtime.memory import empty
from kvpack.runtime.threads import checked_threads

from . import codecs, library, rotations

if TYPE_CHECKING:
    from kvpack.formats.base import Codec

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
"""The dtypes that are encoded, in the order of ``library.DTYPES``."""

FEWEST_VALUES = 1 << 18
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
_KEPT = 64


def supports(codec: Codec, x: torch.Tensor) -> bool:
    """Return True if C encodes ``x`` ``[batch, kv_head, token, dim]``.

    Of groups, those with binary16 scales and no rotation, in full columns of at most 32 bits.
    """
    if library.library() is None or x.dtype not in DTYPES or x.requires_grad or not (codec.dim == 1 or x.stride(3) == 1):
        return False
    if type(codec) is Group:
        (packing,) = codec.packings().values()
        stored = codec.rotation_kind == codec.token_scale == "none" and codec.scale_dtype == "fp16"
        # Where a width does not divide the channels, some columns have unused fields.
        return stored and packing.symbols % packing.width == 0 and packing.column_bytes <= 4 and codec.dim <= codecs.MAX_DIM
    if type(codec) is Quaternion and codec.secondary > MAX_SECONDARY:
        return False
    return type(codec) in (Scalar, Octahedral, Quaternion, Angle, Trellis) and codecs.described(codec) is not None


def encode(codec: Codec, x: torch.Tensor, threads: int | None = None, level: int = 0) -> dict[str, torch.Tensor] | None:
    """The streams of ``x``, which ``supports`` takes; None for values that ``formats/`` is to encode, or to refuse by name.

    ``level`` is a place in ``library.levels()``. Raises MemoryError.
    """
    batch, heads, tokens, _ = x.shape
    layouts = codec.layout(batch, heads, tokens)
    streams = {name: empty(layout.shape, _STORED[layout.dtype], x.device) for name, layout in layouts.items()}
    threads = min(checked_threads(threads, torch.get_num_threads()), 1 + x.numel() // FEWEST_VALUES)
    call, names, _kept = call_of(codec, (batch, heads, tokens), x.dtype)
    call.x = library.Stream.of(x)
    call.streams = (library.Stream * len(names))(*(library.Stream.of(streams[name]) for name in names))
    call.threads, call.level = threads, level
    return streams if run(call) else None


def call_of(codec: Codec, shape: tuple[int, int, int], dtype: torch.dtype) -> tuple[library.Encode, tuple[str, ...], Any]:
    """A call for ``shape`` (batch, heads, tokens) of ``dtype`` without values and streams, the streams' names, and what must outlive it."""
    described = codecs.described(codec)
    assert described is not None
    candidates = _candidates(codec) if isinstance(codec, Octahedral) else 0
    rotation, bounds = rotations.described(codec.rotation), _bounds(codec, candidates)
    call = library.Encode(*shape, codecs.pointer(described), library.Stream(), DTYPES.index(dtype), rotation.struct, threads=1)
    if isinstance(codec, Group):
        call.zero_centre, call.per_middle = codec.centre == "zero", 1.0 / (((1 << codec.bits) - 1) / 2)
    elif isinstance(codec, Scalar | Octahedral | Quaternion | Angle | Trellis):
        call.unbiased = codec.norm_rule == "unbiased"
    call.candidates = candidates
    for number, table in enumerate(bounds):
        call.bounds[number] = library.Table(table.data_ptr(), len(table))
    return call, described.streams, (described, rotation, bounds)


def run(call: library.Encode) -> bool:
    """Encode; False for values that ``formats/`` is to encode, or to refuse by name. Raises MemoryError."""
    compiled = library.library()
    assert compiled is not None
    failed = compiled.kvpack_encode(ctypes.byref(call))
    if failed == _MEMORY:
        raise MemoryError("there is not enough memory for the buffers of encoding")
    return bool(failed != _REFUSED)


@lru_cache(_KEPT)
def _bounds(codec: Codec, candidates: int) -> tuple[torch.Tensor, ...]:
    """The tables that only the encoder needs, as ``interface.h`` lists them; codecs that differ in ``candidates`` alone are equal."""
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
    """The candidates per coordinate, 0 for all. Two are those on either side of it: where ``formats/`` tries one, it is the nearer."""
    levels = 1 << codec.b_dir - 1
    settled = codec.rounding == "local3x3" and levels <= MAX_LEVELS
    alone = levels == 1 and codec.rounding != "scalar"
    rounding = "full" if alone else "local2x2" if settled else codec.rounding
    even = rounding == "local2x2" and levels <= MAX_EVEN_LEVELS and codec.direction_table == direction_table(levels)
    return _IN_EVEN_BRACKETS if even else _CANDIDATES[rounding]


def line(magnitudes: torch.Tensor) -> list[float]:
    """Slope and offset of the line nearest to the numbers of ascending magnitudes: from a coordinate to steps between levels."""
    x, level = magnitudes.double(), torch.arange(len(magnitudes), dtype=torch.float64, device=magnitudes.device)
    slope = float(((x - x.mean()) * level).sum() / (x - x.mean()).square().sum())
    return [slope, float(level.mean()) - slope * float(x.mean())]


def _per_length(magnitudes: torch.Tensor) -> torch.Tensor:
    """1 over the length of the octahedron's point of every index (OCTOPUS Eq. 6), float64."""
    eta, xi = (axis.flatten() for axis in torch.meshgrid(magnitudes.double(), magnitudes.double(), indexing="ij"))
    third = 1 - xi - eta
    first, second = torch.where(third < 0, 1 - eta, xi), torch.where(third < 0, 1 - xi, eta)
    return (first.square() + second.square() + third.square()).rsqrt()


def _padded(values: list[float], padding: float) -> torch.Tensor:
    entries = max(codecs.MIN_ENTRIES, next_power_of_two(len(values)))
    return torch.tensor(values + [padding] * (entries - len(values)), dtype=torch.float32, device="cpu")
