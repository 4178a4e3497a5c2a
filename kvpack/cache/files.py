"""save and load: a Cache as a kvpack file, and back as views of the mapped file."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from kvpack.coding.encoding import TORCH_DTYPES
from kvpack.coding.modes import own_modes
from kvpack.file import container
from kvpack.file.header import Contents, SideEntry
from kvpack.file.inputs import FEATURE, Inputs
from kvpack.file.user_files import path_text
from kvpack.formats.raw import DTYPES

from .arguments import checked_device, integer
from .cache import Cache
from .given import check_packed
from .layer import Layer
from .pages import Pages, Stretch
from .side import Side

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    import numpy

    from kvpack.coding.encoding import Progress
    from kvpack.file.header import Header


def save(
    cache: Cache,
    path: str | os.PathLike[str],
    *,
    compress: bool = False,
    durable: bool = False,
    progress: Progress | None = None,
) -> int:
    """Write ``cache`` to ``path`` atomically and return the bytes written.

    The file appears whole or not at all; an older file stays until then. ``compress`` stores a tensor as a
    zstd frame where that saves 3 % or more (such a file is decoded when loaded, not mapped); ``durable`` returns
    after the file and its folder reach the disk; ``progress`` counts bytes.
    Raises WriteFailed, LimitExceeded when the cache exceeds the format's limits, or InvalidDtype for anything but a packed cache.
    """
    check_packed(cache, "kvpack.save({}, path)")
    contents, arrays = stored(cache)
    return container.write(path_text(path), contents, arrays, compress=compress, durable=durable, progress=progress)


def load(path: str | os.PathLike[str], *, device: torch.device | str = "cpu", max_bytes: int | None = None, copy: bool = False) -> Cache:
    """Open a file as a Cache whose buffers are views of the mapped file, or copies on ``device``.

    Every digest, spare bit, digit and scale is checked before a tensor is returned. A process that writes to a mapped file can
    change checked values, and truncating the file ends this process: ``copy`` reads the file into memory once, before the checks.
    ``max_bytes`` bounds the file and the memory that it takes (``kvpack.file.footprint``).
    Raises MissingFile, NotKvpack, Truncated, DigestMismatch, UnsupportedVersion, UnknownCodec, InvalidHeader, InvalidPayload or
    LimitExceeded.
    """
    target = checked_device(device)
    if max_bytes is not None:
        max_bytes = integer(max_bytes, "max_bytes")
    cache = read(container.open_file(path, max_bytes=max_bytes, copy=copy))
    return cache if target.type == "cpu" else cache.to(target)


def stored(cache: Cache) -> tuple[Contents, dict[str, numpy.ndarray]]:
    """The arguments of ``container.write`` for a cache. Raises LimitExceeded."""
    arrays = {}
    for number, layer in enumerate(cache.layers):
        for name, side in layer.sides.items():
            merged = side.merged()
            with own_modes(side.device):
                for stream, tensor in _stored_streams(merged).items():
                    arrays[f"{number}.{name}.{stream}"] = _bytes(tensor)
    return cache.contents, arrays


def read(file: container.File, *, check_values: bool = True) -> Cache:
    """Read the cache of an open file as views of its bytes; every side is checked (``File.read_side``).

    Raises DigestMismatch and InvalidPayload.
    """
    header = file.header
    layers = []
    with own_modes(torch.device("cpu")):
        for number, layer in enumerate(header.layers):
            sides = {name: _side(header, entry, file.read_side(number, name, check_values=check_values)) for name, entry in layer.sides()}
            layers.append(Layer(sides.get("k"), sides.get("v"), skipped=header.starts[number] - header.start))
    found = header.ignorable.get(FEATURE)
    inputs = None if found is None else Inputs.from_bytes(found)
    return Cache(tuple(layers), header.recipe, MappingProxyType(dict(header.model)), header.start, inputs)


def _stored_streams(side: Side) -> dict[str, torch.Tensor]:
    """A merged side's streams in stored form: the rows of consecutive runs follow one another."""
    names = side.codec.layout(side.batch, side.heads, 0)
    if not side.pages:
        # Without a run, a stream with one row per run has no rows.
        shapes = {name: (*entry.shape[:2], 0, *entry.shape[3:]) for name, entry in names.items()}
        streams = {name: torch.empty(shapes[name], dtype=TORCH_DTYPES[entry.dtype], device="cpu") for name, entry in names.items()}
    else:
        (stored,) = side.stored_streams()
        streams = {name: stored[name] for name in names}
    return {**streams, "tail": side.tail} if side.tail.shape[2] else streams


def _bytes(tensor: torch.Tensor) -> numpy.ndarray:
    array: numpy.ndarray = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return array


def _side(header: Header, entry: SideEntry, data: Mapping[str, memoryview]) -> Side:
    codec, tensors = header.codecs[entry.codec], {}
    for name, layout in header.streams[entry].items():
        dtype = TORCH_DTYPES[layout.dtype]
        # torch cannot make a tensor of an empty buffer.
        flat = torch.frombuffer(data[name], dtype=dtype) if len(data[name]) else torch.empty(0, dtype=dtype, device="cpu")
        tensors[name] = flat.view(layout.shape)
    tail = tensors.pop("tail", None)
    if tail is None:
        tail = torch.empty(entry.batch, entry.heads, 0, codec.dim, dtype=TORCH_DTYPES[DTYPES[entry.tail_dtype]], device="cpu")
    return Side(codec, Pages([Stretch.of_runs(codec, entry.runs, tensors)] if entry.runs else []), tail, entry.window)
