"""save and load: a Cache as a kvpack file, and back as views of the mapped file."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from kvpack.coding.basis_sources import find, located
from kvpack.coding.encoding import TORCH_DTYPES
from kvpack.coding.recipes import Recipe, parse_recipe
from kvpack.file import container
from kvpack.file.metadata import from_bytes, to_bytes
from kvpack.file.user_files import path_text
from kvpack.formats.arguments import check_callback, check_flag
from kvpack.formats.errors import InvalidParameter, OutOfBounds
from kvpack.runtime.modes import float32_no_grad

from .arguments import checked_device, integer
from .device_copy import StreamBus
from .layer import Layer
from .packed_argument import check_packed
from .parts import CachePart
from .staged_load import load_layers
from .staged_save import save_from
from .stored import cache_of, layer_of, side_of, stored_streams

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import numpy

    from kvpack.coding.bases import Basis
    from kvpack.coding.encoding import Progress
    from kvpack.file.header import Contents, Header
    from kvpack.file.metadata import Value
    from kvpack.formats.base import Layout

    from .cache import Cache
    from .device_copy import Bus
    from .parts import Layers, Tokens

    Bases = Basis | str | os.PathLike[str] | Sequence[Basis | str | os.PathLike[str]]


def save(
    cache: Cache,
    path: str | os.PathLike[str],
    *,
    compress: bool = False,
    durable: bool = False,
    metadata: Mapping[str, Value] | None = None,
    progress: Progress | None = None,
) -> int:
    """Write ``cache`` to ``path`` atomically and return the bytes written.

    The file appears whole or not at all; an older file stays until then. ``compress`` stores a tensor as a
    zstd frame where that saves 3 % or more (such a file is decoded when loaded, not mapped); ``durable`` returns
    after the file and its folder reach the disk; ``metadata`` (default: the cache's own) is kept in the file, texts, integers and
    finite floats by name; ``progress`` counts bytes.
    Raises WriteFailed, LimitExceeded when the cache exceeds the format's limits, InvalidType for anything but a packed cache, or
    InvalidParameter for other metadata.
    """
    check_packed(cache, "kvpack.save({}, path)")
    check_flag(compress, "compress")
    check_flag(durable, "durable")
    check_callback(progress)
    if metadata is not None:
        cache = replace(cache, metadata=MappingProxyType(from_bytes(to_bytes(metadata))))
    devices = {side.device for layer in cache.layers for side in layer.sides.values()}
    if not compress and {device.type for device in devices} == {"cuda"} and len(devices) == 1:
        return save_from(StreamBus(devices.pop()), cache, path_text(path), durable=durable, progress=progress)
    contents, arrays = stored(cache)
    return container.write(path_text(path), contents, arrays, compress=compress, durable=durable, progress=progress)


def load(
    path: str | os.PathLike[str],
    *,
    device: torch.device | str = "cpu",
    layers: Layers | None = None,
    tokens: Tokens | None = None,
    memory_limit: int | None = None,
    copy: bool = False,
    basis: Bases | None = None,
    recipe: str | os.PathLike[str] | Recipe | None = None,
    progress: Progress | None = None,
) -> Cache:
    """Open a file as a Cache whose buffers are views of the mapped file, or copies on ``device``.

    Every digest, spare bit, digit and scale is checked before a tensor is returned. A process that writes to a mapped file can
    change checked values, and truncating the file ends this process: ``copy`` reads the file into memory once, before the checks.
    To a CUDA device, the file is always read once, by several threads into pinned memory. Where kernels know the rules of a layer's codecs,
    digests and rules are checked on the device, of the very bytes that are used, and the host waits for that; otherwise threads check the
    pinned memory before it is copied, and the last copies may be under way when ``load`` returns: the current stream waits for them.

    ``layers``, a number, a list of numbers or a slice, loads these alone; the others are there without sides, so that every layer
    keeps its number. ``tokens``, a number of tokens or a pair (start, stop), loads ``cache[:, start:stop]`` alone. A digest covers
    a tensor, so whole tensors of the chosen layers are read and checked, and the chosen tokens of them are kept.
    ``memory_limit`` bounds the file and the memory that it takes (``kvpack.file.footprint``). ``basis`` is where the basis of a file of the
    codecs klt and transform is found by its digest: a Basis, its path, a folder of bases, or a list of these. ``recipe`` converts what
    was loaded, layer by layer, as ``Cache.convert``: files that are small but slow to attend, of the codec transform, become such as
    attention reads packed. If it needs a basis, that is the one of the file, or else the one that is given.
    ``progress(done, total)`` counts the layers, or to a CUDA device the pieces of the file, that are read.
    Raises MissingFile, NotKvpack, Truncated, DigestMismatch, UnsupportedVersion, UnknownCodec, InvalidHeader, InvalidPayload,
    MissingBasis or LimitExceeded; InvalidParameter for a file that is a basis; OutOfBounds for layers and tokens that the file lacks,
    and for a start inside a token group.
    """
    target = checked_device(device)
    check_flag(copy, "copy")
    check_callback(progress)
    if memory_limit is not None:
        memory_limit = integer(memory_limit, "memory_limit")
    if target.type == "cuda":
        loaded = read_to(StreamBus(target), container.open_file(path, memory_limit=memory_limit), layers, tokens, basis, progress)
        return _in_recipe(loaded, recipe, basis)
    file = container.open_file(path, memory_limit=memory_limit, copy=copy)
    part = _part(file, layers, tokens)
    cache = read(file, part.numbers, basis=basis, progress=progress)
    if not part.has_all_tokens:
        with _located(file.where):
            cache = cache[:, part.start : part.stop]
    return _in_recipe(cache if target.type == "cpu" else cache.to(target), recipe, basis)


def _in_recipe(cache: Cache, recipe: str | os.PathLike[str] | Recipe | None, bases: Bases | None) -> Cache:
    """``cache``, converted to ``recipe`` if there is one. Raises as ``Cache.convert`` and ``find``."""
    if recipe is None:
        return cache
    parsed: Recipe = parse_recipe(recipe)
    if parsed.takes_basis and parsed.basis is None and bases is not None:
        own = {digest for layer in cache for side in layer.sides.values() for digest in side.codec.bases_needed}
        given: Any = bases
        parsed = Recipe(parsed, find(given, own.pop()) if len(own) == 1 else given)
    return cache.convert(parsed)


def _with_basis(file: container.File, basis: Bases | None) -> Header:
    """The header of an open file, which is a cache, with codecs that have their bases; it becomes the file's."""
    if file.header.is_basis:
        raise InvalidParameter(f"{file.where}: is a basis and not a cache; kvpack.Basis.load reads it")
    file.header = located(file.where, file.header, basis)
    return file.header


def read_to(
    bus: Bus,
    file: container.File,
    layers: Layers | None = None,
    tokens: Tokens | None = None,
    basis: Bases | None = None,
    progress: Progress | None = None,
) -> Cache:
    """Read the cache, or a part, of an open file to the device of ``bus``, and close the file. Raises as ``load``."""
    with float32_no_grad(bus.device), file:
        _with_basis(file, basis)
        part = _part(file, layers, tokens)
        loaded = [Layer(None, None)] * len(file.header.layers)
        with _located(file.where):
            for number, layer in load_layers(file, part, bus, progress=progress).items():
                loaded[number] = layer
    cache = cache_of(file.header, loaded)
    if part.has_all_tokens:
        return cache
    inputs = None if cache.inputs is None else cache.inputs.slice(part.start, part.stop, cache.start)
    computed, offsets = part.tokens if inputs is None else 0, cache.position_offsets if part.stop == part.tokens else None
    return replace(cache, start=cache.start + part.start, inputs=inputs, computed=computed, position_offsets=offsets)


def stored(cache: Cache) -> tuple[Contents, dict[str, numpy.ndarray]]:
    """The arguments of ``container.write`` for a cache. Raises LimitExceeded."""
    arrays = {}
    with float32_no_grad(torch.device("cpu")):
        for number, layer in enumerate(cache.layers):
            for name, side in layer.sides.items():
                for stream, tensor in stored_streams(side.merged()).items():
                    arrays[f"{number}.{name}.{stream}"] = _bytes(tensor)
            arrays.update({f"{number}.state.{name}": _bytes(state) for name, state in layer.states.items()})
    return cache.contents, arrays


def read(
    file: container.File,
    numbers: Iterable[int] | None = None,
    *,
    check_values: bool = True,
    basis: Bases | None = None,
    progress: Progress | None = None,
) -> Cache:
    """Read the cache of an open file as views of its bytes; every side is checked (``File.read_side``).

    Only the layers ``numbers`` (default: all) have sides and states. Raises DigestMismatch, InvalidPayload and, as ``load``, for
    ``basis``.
    """
    header = _with_basis(file, basis)
    layers, cpu = [Layer(None, None)] * len(header.layers), torch.device("cpu")
    with float32_no_grad(cpu):
        chosen = list(range(len(header.layers)) if numbers is None else numbers)
        for done, number in enumerate(file.in_memory(chosen), 1):
            sides = {}
            for name, entry in header.layers[number].sides():
                data = file.read_side(number, name, check_values=check_values)
                tensors = {stream: _tensor(data[stream], layout) for stream, layout in header.streams[entry].items()}
                sides[name] = side_of(header, entry, tensors, cpu)
            states = {state.name: _tensor(file.read_state(state), state.layout) for state in header.states_of(number)}
            layers[number] = layer_of(header, number, sides, states)
            if progress is not None:
                progress(done, len(chosen))
    return cache_of(header, layers)


def _part(file: container.File, layers: Layers | None, tokens: Tokens | None) -> CachePart:
    with _located(file.where):
        return CachePart.of(file.header, layers, tokens)


@contextlib.contextmanager
def _located(where: str) -> Iterator[None]:
    """Name the file in OutOfBounds."""
    try:
        yield
    except OutOfBounds as error:
        raise OutOfBounds(f"{where}: {error}") from None


def _bytes(tensor: torch.Tensor) -> numpy.ndarray:
    array: numpy.ndarray = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return array


def _tensor(data: memoryview, layout: Layout) -> torch.Tensor:
    dtype = TORCH_DTYPES[layout.dtype]
    # torch cannot make a tensor of an empty buffer.
    flat = torch.frombuffer(data, dtype=dtype) if len(data) else torch.empty(0, dtype=dtype, device="cpu")
    return flat.view(layout.shape)
