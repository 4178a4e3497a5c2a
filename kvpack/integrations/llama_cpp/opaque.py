"""Support for slots in a quantized type that no codec represents. Their blocks are kept byte for byte, as states of their layers.

A block of q4_1 and q5_1 is d * code + m, where m is the block's smallest value in binary16. The codec group would need the center m +
(2^bits - 1) / 2 * d, which has more bits. The steps of iq4_nl are unequal, and those of the codec group are equal.

Every layer has one state for its keys and one for its values, uint8 ``[1, token, byte]``, with tokens sorted by position. A state is named
by its type, such as ``k.q4_1``. If only one of the two has such a type, the other is stored in the same way. Layer 0 has the state
``token_ids`` if the ids are known. States belong to one position, so such a cache cannot be cut, and no prefix of it can be used.

Source: ggml-common.h of llama.cpp 0c1e57098, ``block_q4_1``, ``block_q5_1`` and ``block_iq4_nl``.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from kvpack.cache.cache import Cache
from kvpack.cache.dense_states import DenseLayer
from kvpack.cache.layer import Layer
from kvpack.coding.recipes import Recipe, parse_recipe
from kvpack.file.inputs import ID_BYTES
from kvpack.formats.errors import InvalidParameter

from .state_file import BLOCK, BLOCKS, OPAQUE, TYPES, CellBlock, Reader, StateFile

IDS = "token_ids"
"""Name of layer 0's state with the token ids, which have 4 bytes each."""


def is_opaque(file: StateFile) -> bool:
    """Return True if a slot has a quantized type that no codec supports."""
    return any(block.dtype in OPAQUE for section in file.sections for block in (*section.keys, *section.values))


def check_raw(where: str, kinds: Iterable[str], recipe: str | Recipe) -> None:
    """Raise InvalidParameter unless ``recipe`` is raw. ``kinds`` contains the quantized types, for the message."""
    if parse_recipe(recipe) != Recipe("raw"):
        raise InvalidParameter(
            f"{where}: its keys or values are quantized ({' and '.join(kinds)}), which kvpack stores unchanged: use the 'raw' recipe, "
            "or save a slot whose cache types are f16, bf16 or f32 (--cache-type-k, --cache-type-v)"
        )


def opaque_layer(
    reader: Reader, keys: CellBlock, values: CellBlock | None, order: torch.Tensor | None, cells: int, transposed: bool, ids: bytes
) -> DenseLayer:
    """Return a layer whose states contain the keys and values of ``cells`` cells, in ``order``.

    If ``transposed`` is True, values are transposed back. Raises MissingFile or InvalidParameter.
    """
    states = {f"k.{keys.dtype}": _read_rows(reader, keys, order, cells, transposed=False)}
    if values is not None:
        states[f"v.{values.dtype}"] = _read_rows(reader, values, order, cells, transposed=transposed)
    if ids:
        states[IDS] = torch.frombuffer(bytearray(ids), dtype=torch.uint8)[None]
    return DenseLayer(None, None, 0, states)


def has_opaque_layers(cache: Cache, dtype: str | None) -> bool:
    """Return True if all layers come from ``opaque_layer``. Raises InvalidParameter if only some of them do, or if ``dtype`` is set."""
    result = [_cell_types(layer).keys() >= {"k"} for layer in cache]
    if any(result) and not all(result):
        raise InvalidParameter(
            f"layer {result.index(False)} has no blocks of llama.cpp among its states, but layer {result.index(True)} does: "
            "every layer needs them"
        )
    if any(result) and dtype is not None:
        raise InvalidParameter(
            f"dtype is {dtype!r}, but the cache holds {cache.model.get('dtype', '')!r:.80}, which is always written unchanged: omit dtype"
        )
    return any(result)


def opaque_ids(cache: Cache) -> bytes:
    """Return the token ids as bytes, or no bytes if they are unknown. Raises InvalidParameter if only some ids are known."""
    state = cache[0].states.get(IDS)
    if state is None:
        return b""
    if state.dtype != torch.uint8 or tuple(state.shape) != (1, cache.start * ID_BYTES):
        raise InvalidParameter(
            f"the state {IDS} of layer 0 is {state.dtype} {list(state.shape)}, expected uint8 [1, {cache.start * ID_BYTES}]: "
            f"{ID_BYTES} bytes for each token"
        )
    return bytes(state.cpu().numpy().data)


def opaque_blocks(layer_index: int, layer: Layer, transposed: bool, latents: bool) -> tuple[int, list[tuple[CellBlock, memoryview]]]:
    """Return the number of cells in layer ``layer_index``, and its keys and values in llama.cpp's layout. The message names the layer."""
    named, result = _cell_types(layer), []
    if (
        layer.sides
        or named.keys() != ({"k"} if latents else {"k", "v"})
        or (transposed and any(kind in BLOCKS for kind, _ in [*named.values()][1:]))
    ):
        held = " and ".join([*layer.sides, *layer.states])
        how = "values of 16 or 32 bits, which are transposed" if transposed else "only keys" if latents else "keys and values"
        raise InvalidParameter(f"layer {layer_index} holds {held}: expected the states of {how}, such as k.q4_1 and v.fp16")
    cells = {rows.shape[1] for _, rows in named.values()}
    for side, (kind, rows) in named.items():
        size = BLOCKS[kind].size if kind in BLOCKS else TYPES[kind][1]
        if rows.dtype != torch.uint8 or rows.dim() != 3 or rows.shape[0] != 1 or rows.shape[2] % size or len(cells) != 1:
            raise InvalidParameter(
                f"layer {layer_index}: the state {side}.{kind} is {rows.dtype} {list(rows.shape)}, expected uint8 [1, token, byte] with a "
                f"multiple of {size} bytes, and as many tokens as its other states"
            )
        data = rows[0].cpu()
        if side == "v" and transposed:
            data = data.view(data.shape[0], -1, size).transpose(0, 1)
        block = CellBlock(kind, rows.shape[2] // size * (BLOCK if kind in BLOCKS else 1), 0)
        result.append((block, data.contiguous().flatten().numpy().data))
    return cells.pop(), result


def _cell_types(layer: Layer) -> dict[str, tuple[str, torch.Tensor]]:
    """Return the type and the cells of a layer's keys ("k") and values ("v"). The layer must come from ``opaque_layer``."""
    result = {}
    for name, state in layer.states.items():
        side, _, kind = name.partition(".")
        if side in ("k", "v") and (kind in BLOCKS or kind in TYPES):
            result[side] = kind, state
    return dict(sorted(result.items()))


def _read_rows(reader: Reader, block: CellBlock, order: torch.Tensor | None, cells: int, *, transposed: bool) -> torch.Tensor:
    data = torch.empty(cells * block.cell_bytes, dtype=torch.uint8, device="cpu")
    reader.read_into(data.numpy().data, block.offset)
    if transposed:
        data = data.view(block.channels, cells, -1).transpose(0, 1).flatten()
    rows = data.view(1, cells, block.cell_bytes)
    return rows if order is None else rows[:, order]
