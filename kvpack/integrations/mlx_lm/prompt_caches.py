"""Reads mlx-lm's prompt cache files as caches, and writes caches as such files if nothing is lost.

``mlx_lm.models.cache.save_prompt_cache`` writes these files: safetensors with an array for every part of every layer's state, and metadata
that names the class of each layer. mlx-lm 0.32 stores counts as arrays. Earlier versions stored them as text in the metadata. Both forms
are read, and the newer one is written. mlx itself is not needed.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import torch

from kvpack.cache import tensor_files
from kvpack.cache.packing import pack
from kvpack.file.atomic import write_file
from kvpack.file.limits import MAX_LAYERS, MAX_TOKENS
from kvpack.file.metadata import from_bytes, to_bytes
from kvpack.file.user_files import path_text
from kvpack.formats.errors import InvalidParameter
from kvpack.integrations.exported_values import export_values, parse_windows
from kvpack.integrations.llama_cpp.state_file import CONFIG

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvpack.cache.cache import Cache
    from kvpack.cache.layer import Layer
    from kvpack.coding.encoding import Progress
    from kvpack.coding.recipes import Recipe

_WHOLE, _ROTATING = ("KVCache", "ConcatenateKVCache"), "RotatingKVCache"
"""mlx-lm's cache classes for layers that keep all tokens, and for layers with a sliding window."""
_PART = re.compile(r"(0|[1-9][0-9]{0,4})\.([0-9])")
_MAX_COUNT = 2**31 - 1
"""Maximum count, because mlx-lm stores counts as int32."""
_COUNT = re.compile(r"[0-9]{1,10}")


class _FileMetadata(NamedTuple):
    """The parsed metadata of a file. ``classes`` and ``counts`` have one item per layer, and ``texts`` are the caller's own."""

    classes: list[str]
    counts: list[dict[int, str]]
    texts: dict[str, str]


def import_prompt_cache(
    path: str | os.PathLike[str],
    recipe: str | Recipe = "raw",
    *,
    progress: Progress | None = None,
) -> Cache:
    """Read the prompt cache in the file ``path`` and pack it with ``recipe``. The recipe ``raw`` keeps every bit.

    The file's metadata becomes the cache's. A ``RotatingKVCache`` becomes a layer that has skipped the tokens before its window. mlx-lm
    does not record the model, so the caller must know it. ``progress`` counts layers.

    Raises MissingFile, and the same errors as ``kvpack.pack``. Raises InvalidParameter if the file is not from mlx-lm, or if a layer does
    not contain complete keys and values of consecutive tokens. Examples are quantized values, states, and a window that also keeps earlier
    tokens.
    """
    where = path_text(path)
    arrays, file = tensor_files.read(where, lambda names, metadata: _parse_metadata(where, names, metadata))
    states = []
    for number, name in enumerate(file.classes):
        parts = {part: arrays[f"{number}.{part}"] for part in range(10) if f"{number}.{part}" in arrays}
        states.append(_parse_layer(f"{where}: layer {number}", name, parts, file.counts[number]))
    return replace(pack(states, recipe, progress=progress), metadata=MappingProxyType(from_bytes(to_bytes(file.texts))))


def export_prompt_cache(
    cache: Cache,
    path: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    windows: Mapping[int, int] | None = None,
    progress: Progress | None = None,
) -> int:
    """Write ``cache`` as a prompt cache of mlx-lm, and return the file's size in bytes. ``path`` must end in .safetensors.

    Values are written in their stored dtype if that is bf16, fp16 or fp32. Otherwise, pass ``dtype``, to which values are then rounded.
    ``windows`` maps the number of each sliding-window layer to its window in tokens. Such a layer becomes a ``RotatingKVCache``, and every
    other layer a ``KVCache``, which keeps all tokens. Strings and numbers in ``cache.metadata`` are written as strings. ``progress`` counts
    layers.

    Raises InvalidParameter if mlx-lm's classes cannot represent the cache: if it does not start at position 0, or if a layer has states,
    lacks keys or values, or lacks tokens of its window. The message names the layer. Raises ValueTooLarge if ``dtype`` would make a value
    infinite, and WriteFailed.
    """
    where = path_text(path)
    if not where.endswith(".safetensors"):
        raise InvalidParameter(f"{where}: use a name that ends in .safetensors, because mlx-lm loads no other files")
    windows = parse_windows(windows, len(cache))
    if cache.model.get("config") == CONFIG:
        raise InvalidParameter(
            "the cache came from llama.cpp, whose keys may have their channels in a different order than mlx-lm's: export it for llama.cpp"
        )
    if cache.start:
        raise InvalidParameter(
            f"the cache begins at position {cache.start}, but mlx-lm's caches begin at position 0: export a cache that begins at position 0"
        )
    tensors: dict[str, torch.Tensor] = {}
    # mlx-lm drops empty lists, so the list of scalars begins with an empty text.
    metadata = {f"0.{name}": str(value) for name, value in cache.metadata.items()} | {"2.0": ""}
    scalars = 0
    for number, layer in enumerate(cache):
        if layer.k is None or layer.v is None or layer.states:
            missing = "states" if layer.states else "no keys or no values"
            raise InvalidParameter(
                f"layer {number} contains {missing}, but kvpack writes only layers of keys and values for mlx-lm: save it as a kvpack file"
            )
        pair = [export_values(f"layer {number}", side, dtype, "mlx-lm", cache.model.get("dtype")) for side in (layer.k, layer.v)]
        metadata[f"1.{number}"], pair, counts = _stored_layer(number, layer, pair, windows.get(number))
        for part, tensor in enumerate((*pair, *(torch.tensor(count, dtype=torch.int32, device="cpu") for count in counts))):
            tensors[f"{number}.{part}"] = tensor
        for part in range(2, 2 + len(counts)):
            scalars += 1
            metadata |= {f"2.{scalars}.0": f"{number}.{part}", f"2.{scalars}.1": "scalar"}
        if progress:
            progress(number + 1, len(cache))
    return write_file(where, tensor_files.pieces(tensors, metadata))


def _parse_metadata(where: str, names: list[str], metadata: dict[str, str]) -> _FileMetadata:
    """Parse the metadata. Raises InvalidParameter unless it contains a known class for every layer that has arrays in ``names``."""
    newer = metadata.get("2.0") == ""
    text_prefix, class_prefix = ("0.", "1.") if newer else ("1.", "2.")
    numbered = {name[2:]: text for name, text in metadata.items() if name.startswith(class_prefix)}
    if "2.0" not in metadata or sorted(numbered) != sorted(map(str, range(len(numbered)))) or len(numbered) > MAX_LAYERS:
        raise InvalidParameter(
            f"{where} is not an mlx-lm prompt cache: its metadata names no layer classes: pass a file that mlx-lm's save_prompt_cache "
            "wrote"
        )
    classes = [numbered[str(number)] for number in range(len(numbered))]
    for number, name in enumerate(classes):
        if name not in (*_WHOLE, _ROTATING):
            raise InvalidParameter(
                f"{where}: layer {number} is a {name!r:.80}, but kvpack reads only {', '.join((*_WHOLE, _ROTATING))}: the other classes "
                "hold quantized keys and values, states, or padded batches"
            )
    for name in names:
        part = _PART.fullmatch(name)
        if part is None or int(part[1]) >= len(classes):
            raise InvalidParameter(f"{where}: the array {name!r:.80} is not part of the {len(classes)} layers that the metadata names")
    counts = [{} if newer else {part: metadata.get(f"0.{number}.{part}", "") for part in range(4)} for number in range(len(classes))]
    return _FileMetadata(classes, counts, {name[2:]: text for name, text in metadata.items() if name.startswith(text_prefix)})


def _parse_layer(where: str, name: str, parts: dict[int, torch.Tensor], texts: dict[int, str]) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return a layer's keys and values, ``[batch, kv_head, token, dim]`` in token order, and the number of tokens before them."""
    if not {0, 1} <= parts.keys() or any(parts[part].dim() != 4 or not parts[part].numel() for part in (0, 1)):
        shapes = [list(parts[part].shape) if part in parts else "missing" for part in (0, 1)]
        raise InvalidParameter(
            f"{where}: arrays 0 and 1 must be nonempty keys and values of shape [batch, kv_head, token, dim], but their shapes are {shapes}"
        )
    keys, values = parts[0], parts[1]
    length = keys.shape[2]
    if keys.shape[:3] != values.shape[:3]:
        raise InvalidParameter(
            f"{where}: its keys are {list(keys.shape)} and its values {list(values.shape)}, expected the same batch, heads and tokens"
        )
    if name in _WHOLE:
        seen = _read_count(where, parts, 2, length) if 2 in parts else length
        if seen > length:
            raise InvalidParameter(f"{where} claims {seen} tokens, but contains only {length}: save the prompt again with mlx-lm")
        return keys[:, :, :seen], values[:, :, :seen], 0
    if texts:
        keep, window, seen, place = (_parse_integer(where, texts[part]) for part in range(4))
    else:
        seen, keep, window, place = (_read_count(where, parts, part, None) for part in range(2, 6))
    skipped = max(0, seen - length)
    # mlx-lm overwrites tokens only after its buffer has grown to one slot for each token of the window.
    fits = place == length >= window or (place < length == window) if skipped else place == seen
    if not fits or not window:
        raise InvalidParameter(
            f"{where} is inconsistent: window {window}, {seen} tokens seen, {length} tokens stored, next position {place}: save the prompt "
            "again with mlx-lm"
        )
    if not skipped:
        return keys[:, :, :seen], values[:, :, :seen], 0
    if keep:
        raise InvalidParameter(
            f"{where} keeps the first {keep} of {seen} tokens next to the newest {length - keep}, "
            "but kvpack's layers hold consecutive tokens: save the prompt without --max-kv-size"
        )
    keys, values = (torch.cat([x[:, :, place:], x[:, :, :place]], 2) for x in (keys, values))
    if place == length == window and not keys[:, :, 0].any() and not values[:, :, 0].any():
        # Skip the unused slot that mlx-lm would write to next.
        return keys[:, :, 1:], values[:, :, 1:], skipped + 1
    return keys, values, skipped


def _read_count(where: str, parts: dict[int, torch.Tensor], part: int, default: int | None) -> int:
    array = parts.get(part)
    if array is None and default is not None:
        return default
    is_integer = array is not None and not (array.dtype.is_floating_point or array.dtype.is_complex or array.dtype is torch.bool)
    if array is None or array.numel() != 1 or not is_integer:
        raise InvalidParameter(f"{where}: part {part} of its state is {'missing' if array is None else 'not an integer'}")
    # PyTorch cannot convert a uint64 of 2^63 or more to int.
    return _parse_integer(where, str(int(array.numpy().item())))


def _parse_integer(where: str, text: str) -> int:
    if not _COUNT.fullmatch(text) or int(text) > MAX_TOKENS:
        raise InvalidParameter(f"{where}: a count in its state is {text!r:.40}, expected an integer from 0 to {MAX_TOKENS}")
    return int(text)


def _stored_layer(
    layer_index: int, layer: Layer, pair: list[torch.Tensor], window: int | None
) -> tuple[str, list[torch.Tensor], tuple[int, ...]]:
    """Return mlx-lm's class for a layer, the layer's arrays, and its counts in the class's order."""
    held = f"layer {layer_index} holds the newest {layer.tokens} of {layer.seen_tokens} tokens"
    if max(layer.seen_tokens, window or 0) > _MAX_COUNT:
        raise InvalidParameter(
            f"layer {layer_index} has {layer.seen_tokens} tokens{f' and a window of {window}' if window else ''}, but mlx-lm supports at "
            f"most {_MAX_COUNT}: export fewer tokens"
        )
    if window is None:
        if layer.skipped:
            raise InvalidParameter(f"{held}: pass its sliding window, such as windows={{{layer_index}: {layer.tokens + 1}}}")
        return _WHOLE[0], pair, (layer.tokens,)
    if layer.skipped and layer.tokens < window - 1:
        raise InvalidParameter(f"{held}, but a window of {window} needs {window - 1} earlier tokens: export a cache that keeps them")
    if layer.skipped and layer.tokens == window - 1:
        # mlx-lm expects a slot for the next token, and overwrites the oldest one.
        pair = [torch.nn.functional.pad(x, (0, 0, 1, 0)) for x in pair]
    return _ROTATING, pair, (layer.seen_tokens, 0, window, pair[0].shape[2])
