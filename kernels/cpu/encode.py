"""Encoding on the CPU: groups without a rotation, to the bytes that ``formats/`` writes."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

from kvpack.formats.group import Group

from . import codecs, library

if TYPE_CHECKING:
    from kvpack.formats.base import Codec

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
"""The dtypes that are encoded, in the order of ``library.DTYPES``."""

FEWEST_VALUES = 1 << 18
"""Values of a call for each of its threads: below it, starting one costs more than it saves."""

_MEMORY, _REFUSED = 1, 2


def supports(codec: Codec, x: torch.Tensor) -> bool:
    """Whether C encodes ``x`` ``[batch, kv_head, token, dim]``: groups with binary16 scales, in full columns of at most 32 bits."""
    if library.library() is None or type(codec) is not Group or x.dtype not in DTYPES or x.requires_grad:
        return False
    (packing,) = codec.packings().values()
    stored = codec.rotation_kind == codec.token_scale == "none" and codec.scale_dtype == "fp16"
    # Where a width does not divide the channels, some columns have unused fields.
    full = packing.symbols % packing.width == 0 and packing.column_bytes <= 4
    return stored and full and codec.dim <= codecs.MOST_DIM and (codec.dim == 1 or x.stride(3) == 1)


def encode(codec: Group, x: torch.Tensor, threads: int | None = None, level: int = 0) -> dict[str, torch.Tensor] | None:
    """The streams of ``x``, which ``supports`` takes; None for values that the codec may refuse, which ``formats/`` names.

    ``level`` is a place in ``library.levels()``. Raises MemoryError.
    """
    described, compiled = codecs.described(codec), library.library()
    assert described is not None
    assert compiled is not None
    batch, heads, tokens, _ = x.shape
    dtypes = {"U16": torch.uint16, "F16": torch.float16}
    streams = {
        name: torch.empty(layout.shape, dtype=dtypes[layout.dtype], device=x.device)
        for name, layout in codec.layout(batch, heads, tokens).items()
    }
    planes = [_stream(stream) for name, stream in streams.items() if name != "scales"]
    threads = min(library.checked_threads(threads, torch.get_num_threads()), 1 + x.numel() // FEWEST_VALUES)
    call = library.Encode(
        batch, heads, tokens, codecs.pointer(described), _stream(x), DTYPES.index(x.dtype), codec.centre == "zero",
        1.0 / (((1 << codec.bits) - 1) / 2), (library.Stream * 2)(*planes), _stream(streams["scales"]), threads, level,
    )  # fmt: skip
    failed = compiled.kvpack_encode(ctypes.byref(call))
    if failed == _MEMORY:
        raise MemoryError("there is not enough memory for the buffers of encoding")
    return None if failed == _REFUSED else streams


def _stream(x: torch.Tensor) -> library.Stream:
    return library.Stream(x.data_ptr(), *(stride * x.element_size() for stride in x.stride()[:3]))
