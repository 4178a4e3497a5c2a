"""Loader of the compiled C library of this folder, and its argument structures, which the loader checks against the library.

Python calls plain C functions through ctypes, which releases the GIL. Building does not need Python headers, and one build works with all
Python versions. The library's threads run only during a call (``threads.h``) or while a file is read (``reader.c``).
"""

from __future__ import annotations

import ctypes
import os
from ctypes import POINTER, Structure, byref, c_char_p, c_double, c_float, c_int32, c_int64, c_uint64, c_void_p
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from kvpack.formats.errors import InvalidParameter
from kvpack.runtime.reader import Read, declare
from kvpack.runtime.threads import outer

if TYPE_CHECKING:
    import torch

THREADS = "KVPACK_THREADS"
"""Name of the environment variable that sets the number of threads per call."""

INTERFACE = 37
"""Version of interface.h that the structures below mirror."""

_OUT_OF_MEMORY = 1

MAX_PACKINGS, MAX_DIGITS, MAX_VALUES, MAX_TABLES, MAX_BOUNDS = 12, 2, 3, 48, 4
FAMILIES = ("raw", "group", "scalar", "octahedral", "angle", "polar", "quaternion", "minifloat", "klt", "lossless", "trellis")
DTYPES = ("F16", "BF16", "F32", "U8", "LOG8")


class Digit(Structure):
    _fields_ = (("base", c_int64), ("bits", c_int64), ("place", c_int64), ("weight", c_double))


class Packing(Structure):
    _fields_ = (
        *((name, c_int64) for name in ("symbols", "width", "planes", "odd", "binary", "digits")),
        ("digit", Digit * MAX_DIGITS),
    )


class Values(Structure):
    _fields_ = (("count", c_int64), ("dtype", c_int64), ("table", c_void_p))


class Table(Structure):
    _fields_ = (("data", c_void_p), ("entries", c_int64))


class Rotation(Structure):
    _fields_ = (("order", c_int64), ("paley", c_void_p), ("factors", c_void_p))


class Codec(Structure):
    _fields_ = (
        *((name, c_int64) for name in ("family", "dim", "streams", "packings", "columns")),
        ("packing", Packing * MAX_PACKINGS),
        *((name, c_int64) for name in ("value_streams", "numbers")),
        ("values", Values * MAX_VALUES),
        *((name, c_int64) for name in ("group_tokens", "size", "token_scale", "scales_stream", "table_stream", "patch_stream")),
        *((name, c_int64) for name in ("outlier_stream", "mean_stream", "mean_tokens", "mean_bits", "sketches")),
        ("sketch_rotation", Rotation),
        ("sketch_size", c_float),
        *((name, c_int64) for name in ("direct", "index_bits", "digit_bits", "norm_with_index", "norm_levels", "factored", "norm_kind")),
        *((name, c_int64) for name in ("bins", "quarter_bits")),
        ("highest", c_float),
        *((name, c_int64) for name in ("chunk_stream", "fraction_bits", "bias", "finite", "scale_kind")),
        ("channels", POINTER(c_int32)),
        *((name, c_int64) for name in ("matrix_place", "heads_stream", "levels", "radii")),
        *((name, c_int64 * MAX_PACKINGS) for name in ("level_stream", "level_first", "level_angles", "level_equal")),
        ("table", Table * MAX_TABLES),
    )


class SideArgument(Structure):
    _fields_ = (("codec", POINTER(Codec)), ("segments", c_void_p), ("count", c_int64))


class Span(Structure):
    _fields_ = (("start", c_int64), ("stop", c_int64), ("k", SideArgument), ("v", SideArgument), ("queries", c_void_p), ("sums", c_void_p))


class AttendArguments(Structure):
    _fields_ = (
        *((name, c_int64) for name in ("batch", "heads", "rows", "q_len", "v_dim")),
        ("visible", c_void_p),
        ("sink_logits", c_void_p),
        ("softcap", c_double),
        ("spans", POINTER(Span)),
        *((name, c_int64) for name in ("span_count", "threads", "level")),
    )


class Stream(Structure):
    _fields_ = (("data", c_void_p), *((name, c_int64) for name in ("batch", "head", "row")))

    @classmethod
    def describe(cls, x: torch.Tensor) -> Self:
        """Describe ``x`` ``[batch, kv_head, row, ...]`` for C, by its address and its strides in bytes."""
        batch, head, row, *_ = x.stride()
        size = x.element_size()
        return cls(x.data_ptr(), batch * size, head * size, row * size)


class UnpackArguments(Structure):
    _fields_ = (
        *((name, c_int64) for name in ("batch", "heads", "start", "stop")),
        ("side", SideArgument),
        ("dtype", c_int64),
        ("rotation", Rotation),
        ("channel_scales", Stream),
        ("out", Stream),
        *((name, c_int64) for name in ("past_caches", "threads", "level")),
    )


class EncodeArguments(Structure):
    _fields_ = (
        *((name, c_int64) for name in ("batch", "heads", "tokens")),
        ("codec", POINTER(Codec)),
        ("x", Stream),
        ("dtype", c_int64),
        ("rotation", Rotation),
        ("streams", POINTER(Stream)),
        ("zero_center", c_int64),
        ("per_middle", c_float),
        *((name, c_int64) for name in ("unbiased", "candidates", "scaled")),
        ("bounds", Table * MAX_BOUNDS),
        ("factors", Stream),
        ("means", Stream),
        ("squares", c_void_p),
        ("share", c_float),
        *((name, c_void_p) for name in ("norms", "errors", "skipped")),
        *((name, c_int64) for name in ("mean_tokens", "threads", "level")),
    )


class RansDecodeArguments(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("words", "first_word", "states", "lengths", "slots", "table", "tables", "symbols", "read", "last")),
        *((name, c_int64) for name in ("chunks", "word_count", "stride", "threads", "level")),
    )


class RansEncodeArguments(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("symbols", "lengths", "table", "tables", "steps", "words", "written", "states")),
        *((name, c_int64) for name in ("chunks", "stride", "threads", "level")),
    )


class JoinArguments(Structure):
    _fields_ = (
        ("exponents", c_void_p),
        ("plane", Stream),
        ("out", Stream),
        *((name, c_int64) for name in ("batch", "heads", "tokens", "dim", "chunk", "longest", "threads", "level")),
    )


class SplitArguments(Structure):
    _fields_ = (
        ("exponents", c_void_p),
        ("plane", Stream),
        ("x", Stream),
        ("counts", c_void_p),
        *((name, c_int64) for name in ("batch", "heads", "tokens", "dim", "chunk", "longest", "threads", "level")),
    )


class RawSlotsArguments(Structure):
    _fields_ = (
        ("x", Stream),
        *((name, c_int64) for name in ("dtype", "layers", "heads", "tokens", "dim", "slots", "page", "few", "first")),
        *((name, c_float) for name in ("low", "high", "shared", "grouped")),
        *((name, c_void_p) for name in ("norms", "largest", "chosen", "left_out")),
        *((name, c_int64) for name in ("threads", "level")),
    )


class SizesArguments(Structure):
    _fields_ = (
        ("data", c_void_p),
        *((name, c_int64) for name in ("kind", "layers", "stride", "rows", "tokens", "members", "page")),
        ("ratio", c_float),
        ("level", c_int64),
    )


_FUNCTIONS = {
    "attend": AttendArguments,
    "encode": EncodeArguments,
    "has_large": SizesArguments,
    "join": JoinArguments,
    "measure": EncodeArguments,
    "rans": RansDecodeArguments,
    "rans_encode": RansEncodeArguments,
    "raw_slots": RawSlotsArguments,
    "split": SplitArguments,
    "unpack": UnpackArguments,
}
"""Argument type of each C function that takes a single struct."""


@cache
def library() -> ctypes.CDLL | None:
    """Load and return the C library, or None if it was not built, cannot be loaded, or was built from different sources."""
    for path in sorted(Path(__file__).parent.glob("_cpu*.so")):
        try:
            result = ctypes.CDLL(str(path))
        except OSError:
            # The file was built for another machine or C runtime.
            continue
        result.kvpack_interface.restype = c_int64
        if result.kvpack_interface() != INTERFACE:
            continue
        result.kvpack_sizes.restype, result.kvpack_sizes.argtypes = c_int64, (c_int64,)
        structures: tuple[Any, ...] = (
            Codec,
            Span,
            AttendArguments,
            UnpackArguments,
            EncodeArguments,
            RansDecodeArguments,
            JoinArguments,
            RansEncodeArguments,
            SplitArguments,
            Read,
            RawSlotsArguments,
            SizesArguments,
        )
        if any(result.kvpack_sizes(number) != ctypes.sizeof(structure) for number, structure in enumerate(structures)):
            continue
        result.kvpack_level_name.restype, result.kvpack_level_name.argtypes = c_char_p, (c_int64,)
        for name, structure in _FUNCTIONS.items():
            function = getattr(result, f"kvpack_{name}")
            function.restype, function.argtypes = c_int64, (POINTER(structure),)
        result.kvpack_checksum.restype, result.kvpack_checksum.argtypes = c_uint64, (c_void_p, c_int64, c_uint64)
        declare(result)
        return result
    return None


def run(name: str, call: Structure, purpose: str) -> int:
    """Run the C function ``kvpack_NAME`` on ``call``, and return its status.

    Raises MemoryError if memory runs out; the message contains ``purpose``, the use of the memory.
    """
    loaded = library()
    assert loaded is not None
    status: int = getattr(loaded, f"kvpack_{name}")(byref(call))
    if status == _OUT_OF_MEMORY:
        raise MemoryError(f"not enough memory to {purpose}: the buffers could not be allocated")
    return status


@cache
def levels() -> tuple[str, ...]:
    """Return the names of the instruction sets that both the library and this processor support, best first."""
    lib = library()
    names: list[str] = []
    while lib is not None and (name := lib.kvpack_level_name(len(names))) is not None:
        names.append(name.decode())
    return tuple(names)


def thread_count(threads: int | None, most: int) -> int:
    """Return ``threads`` if it is not None, otherwise the environment variable KVPACK_THREADS if it is set, otherwise PyTorch's number.

    The result is at most ``most``. Raises InvalidParameter if KVPACK_THREADS is not an integer from 1 to 9999.
    """
    if threads is not None:
        return min(threads, most)
    text = os.environ.get(THREADS, "")
    if not text:
        import torch

        return min(outer.threads or torch.get_num_threads(), most)
    if not (text.isascii() and text.isdigit() and 1 <= len(text) <= 4 and int(text) >= 1):
        raise InvalidParameter(f"the environment variable {THREADS} is {text!r}; set it to an integer from 1 to 9999, or unset it")
    return min(int(text), most)


def add_words(data: memoryview, checksum: int) -> int:
    """Return ``checksum`` updated with the 4-byte words of ``data`` (spec/row.md). The length of ``data`` must be a multiple of 4."""
    c_library = library()
    assert c_library is not None
    import numpy

    address = numpy.frombuffer(data, numpy.uint8).ctypes.data
    result: int = c_library.kvpack_checksum(address, len(data) // 4, checksum)
    return result
