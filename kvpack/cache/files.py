"""Writes caches to kvpack files, and reads files into memory-mapped views or onto a device."""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from kvpack.coding.basis_sources import bind_bases, find_basis
from kvpack.coding.encoding import TORCH_DTYPES, Progress
from kvpack.coding.recipes import Recipe, parse_recipe
from kvpack.file import container
from kvpack.file.metadata import Value, from_bytes, to_bytes
from kvpack.file.user_files import PIECE_BYTES, path_text
from kvpack.formats.arguments import as_integer, check_callback, check_flag, checked_device, prefix_errors
from kvpack.formats.errors import InvalidParameter, OutOfBounds
from kvpack.runtime.modes import float32_no_grad

from .cache import check_packed
from .device_copy import Bus, CopyQueue
from .layer import Layer
from .parts import CachePart, Layers, Tokens
from .staged_load import load_layers
from .staged_save import save_from
from .stored_layers import build_cache, build_layer, build_side, stored_streams

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Mapping, Sequence

    import numpy

    from kvpack.coding.bases import Basis
    from kvpack.file.header import Contents, Header
    from kvpack.formats.streams import Layout

    from .cache import Cache

    Bases = Basis | str | os.PathLike[str] | Sequence[Basis | str | os.PathLike[str]]


_bases_needed = attrgetter("summary.bases_needed")


def save(
    cache: Cache,
    path: str | os.PathLike[str],
    *,
    compress: bool = False,
    durable: bool = False,
    metadata: Mapping[str, Value] | None = None,
    progress: Progress | None = None,
) -> int:
    """Write a cache to a file atomically.

    The file appears only when it is complete; until then, an existing file at that path is kept.

    Args:
        cache: A packed cache.
        path: Path of the file.
        compress: Compress tensors with zstd if that saves 3% or more. Such a file is decompressed when it is loaded, not mapped.
        durable: Return only when the file and its folder are on disk.
        metadata: Strings, integers and finite floats to store in the file, by name. Defaults to the cache's metadata.
        progress: Called as ``progress(done, total)``, both in bytes.

    Returns:
        The number of bytes written.

    Raises:
        WriteFailed: The system could not write the file.
        LimitExceeded: The cache exceeds a limit of the format.
        InvalidType: ``cache`` is not a packed cache.
        InvalidParameter: The metadata has names or values that a file cannot store.

    >>> kvpack.save(kvpack.pack(past, "octopus-3"), "copy.kvpack") > 0
    True
    """
    target = path_text(path)
    check_packed(cache, "kvpack.save({}, path)")
    check_flag(compress, "compress")
    check_flag(durable, "durable")
    check_callback(progress)
    if metadata is not None:
        cache = replace(cache, metadata=MappingProxyType(from_bytes(to_bytes(metadata))))
    devices = {side.device for layer in cache.layers for side in layer.sides.values()}
    if not compress and {device.type for device in devices} == {"cuda"} and len(devices) == 1:
        return save_from(CopyQueue(devices.pop()), cache, target, durable=durable, progress=progress)
    contents, arrays = header_and_arrays(cache)
    return container.write(target, contents, arrays, compress=compress, durable=durable, progress=progress)


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
    """Open a file as a Cache.

    On the CPU, buffers are views of the mapped file. All digests, codes, scales and padding bits are checked before the cache is returned.
    If another process may change or truncate the file later, pass ``copy=True``: reading a truncated mapping kills this process.

    Args:
        path: The file.
        device: Device of the buffers. For a CUDA device, threads read the file into pinned memory, and layers are checked on the device if
            kernels support their codecs. The current stream waits for the last copies.
        layers: A layer, a list of layers, or a slice. The other layers stay in the cache, but without keys and values.
        tokens: A number of tokens, or (start, stop), to load only ``cache[:, start:stop]``. Whole tensors are still read, because a digest
            covers a whole tensor.
        memory_limit: Maximum number of bytes for the file and for its contents in memory.
        copy: Read the file into memory before the checks instead of mapping it.
        basis: Where to find the file's basis by its digest: a Basis, its path, a folder of bases, or a list of these.
        recipe: Recipe to convert the layers to, as ``Cache.convert`` does. A file in this recipe stays as it is. For example, a small
            ``transform`` file must be converted before attention can use it without unpacking.
        progress: Called as ``progress(done, total)``, both in layers, or in blocks of the file for a CUDA device.

    Returns:
        The packed cache.

    Raises:
        MissingFile: The file does not exist or cannot be read.
        NotKvpack, Truncated, DigestMismatch, InvalidHeader, InvalidPayload: The file is damaged or is not a kvpack file.
        UnsupportedVersion, UnknownCodec: A newer kvpack wrote the file.
        MissingBasis: The file needs a basis.
        LimitExceeded: The file exceeds ``memory_limit`` or a limit of the format.
        OutOfBounds: The file lacks a layer or a token, or ``tokens`` starts inside a group of tokens encoded together.
        InvalidParameter: The file is a basis.

    >>> kvpack.load("prompt.kvpack").tokens
    64
    >>> kvpack.load("prompt.kvpack", layers=0, tokens=32)[0].tokens
    32
    """
    target = checked_device(device)
    check_flag(copy, "copy")
    check_callback(progress)
    if memory_limit is not None:
        memory_limit = as_integer(memory_limit, "memory_limit")
    if target.type == "cuda":
        loaded = read_to_device(CopyQueue(target), container.open_file(path, memory_limit=memory_limit), layers, tokens, basis, progress)
        return loaded if recipe is None else _convert(loaded, recipe, basis)
    file = container.open_file(path, memory_limit=memory_limit, copy=copy)
    part = None if layers is None and tokens is None else _selected_part(file, layers, tokens)
    cache = read(file, None if part is None else part.layer_indices, basis=basis, progress=progress)
    if part is not None and not part.has_all_tokens:
        with prefix_errors(file.where, OutOfBounds):
            cache = cache[:, part.start : part.stop]
    cache = cache if target.type == "cpu" else cache.to(target)
    return cache if recipe is None else _convert(cache, recipe, basis)


def _convert(cache: Cache, recipe: str | os.PathLike[str] | Recipe, bases: Bases | None) -> Cache:
    """Convert ``cache`` to ``recipe``, unless it has this recipe. If the recipe needs a basis, ``bases`` must contain it."""
    parsed: Recipe = parse_recipe(recipe)
    if parsed.canonical == cache.recipe:
        # Keep the raw tail, which a conversion would encode.
        return cache
    if parsed.uses_basis and parsed.basis is None and bases is not None:
        used = {digest for layer in cache for side in layer.sides.values() for digest in side.codec.bases_needed}
        given: Any = bases
        parsed = Recipe(parsed, find_basis(given, used.pop()) if len(used) == 1 else given)
    return cache.convert(parsed)


def _bind_header_bases(file: container.File, basis: Bases | None) -> Header:
    """Return the header of an open cache file, bound to the bases that it needs. Raises InvalidParameter if the file is a basis."""
    if file.header.is_basis:
        raise InvalidParameter(f"{file.where} is a basis, not a cache: load it with kvpack.Basis.load")
    if basis is not None or any(map(_bases_needed, file.header.codecs)):
        file.header = bind_bases(file.where, file.header, basis)
    return file.header


def read_to_device(
    queue: Bus,
    file: container.File,
    layers: Layers | None = None,
    tokens: Tokens | None = None,
    basis: Bases | None = None,
    progress: Progress | None = None,
) -> Cache:
    """Read a cache, or part of it, from an open file onto the device of ``queue``, and close the file. Raises the errors of ``load``."""
    with float32_no_grad(queue.device), file:
        _bind_header_bases(file, basis)
        part = _selected_part(file, layers, tokens)
        loaded = [Layer(None, None)] * len(file.header.layers)
        with prefix_errors(file.where, OutOfBounds):
            for number, layer in load_layers(file, part, queue, progress=progress).items():
                loaded[number] = layer
    cache = build_cache(file.header, loaded)
    if part.has_all_tokens:
        return cache
    inputs = None if cache.inputs is None else cache.inputs.slice(part.start, part.stop, cache.start)
    computed, offsets = part.tokens if inputs is None else 0, cache.position_offsets if part.stop == part.tokens else None
    return replace(cache, start=cache.start + part.start, inputs=inputs, computed=computed, position_offsets=offsets)


def header_and_arrays(cache: Cache) -> tuple[Contents, dict[str, numpy.ndarray]]:
    """Return the header contents and arrays that ``container.write`` needs for a cache."""
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
    layer_indices: Iterable[int] | None = None,
    *,
    check_values: bool = True,
    basis: Bases | None = None,
    progress: Progress | None = None,
) -> Cache:
    """Return the cache in an open file as views of the file's bytes, after the same checks as in ``File.read_side``.

    Keys, values and states are read only for the layers in ``layer_indices`` (default: all). Raises DigestMismatch, InvalidPayload and, for
    ``basis``, the same errors as ``load``.
    """
    header = _bind_header_bases(file, basis)
    layers, cpu = [Layer(None, None)] * len(header.layers), torch.device("cpu")
    with float32_no_grad(cpu):
        selected = list(range(len(header.layers)) if layer_indices is None else layer_indices)
        # A file with a single piece is not worth reading ahead.
        ready = selected if file.size <= PIECE_BYTES else file.read_ahead(selected)
        for done, number in enumerate(ready, 1):
            sides = {}
            for name, entry in header.layers[number].sides():
                data, tensors = file.read_side(number, name, check_values=check_values), {}
                for stream, layout in header.streams[entry].items():
                    tensors[stream] = _tensor_from_bytes(data[stream], layout)
                sides[name] = build_side(header, number, name, entry, tensors, cpu)
            states = {}
            for state in header.states_in_layer(number):
                states[state.name] = _tensor_from_bytes(file.read_state(state), state.layout)
            layers[number] = build_layer(header, number, sides, states)
            if progress is not None:
                progress(done, len(selected))
    return build_cache(header, layers)


def _selected_part(file: container.File, layers: Layers | None, tokens: Tokens | None) -> CachePart:
    with prefix_errors(file.where, OutOfBounds):
        return CachePart.from_arguments(file.header, layers, tokens)


def _bytes(tensor: torch.Tensor) -> numpy.ndarray:
    array: numpy.ndarray = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return array


def _tensor_from_bytes(data: memoryview, layout: Layout) -> torch.Tensor:
    dtype = TORCH_DTYPES[layout.dtype]
    # torch.frombuffer does not accept an empty buffer.
    flat = torch.frombuffer(data, dtype=dtype) if len(data) else torch.empty(0, dtype=dtype, device="cpu")
    return flat.view(layout.shape)
