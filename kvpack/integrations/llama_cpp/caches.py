"""Reads caches from llama.cpp's sequence state files, and writes them back."""

from __future__ import annotations

from dataclasses import replace
from itertools import zip_longest
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvpack.cache.packing import pack
from kvpack.coding.encoding import RAW_DTYPES, RAW_NAMES, Progress
from kvpack.coding.recipes import Recipe, parse_recipe
from kvpack.file.atomic import write_file
from kvpack.file.inputs import ID_BYTES, Inputs
from kvpack.file.limits import MAX_LAYERS
from kvpack.file.user_files import path_text
from kvpack.formats.errors import InvalidParameter
from kvpack.identity.arguments import ModelArgument, model_fields
from kvpack.integrations.exported_values import export_values, parse_windows

from .quantized import Quantized, exact_clause, extract_blocks
from .state_file import BLOCK, CONFIG, LIST, QUANTIZED, SERVER, TYPES, CellBlock, Reader, Section, StateFile, parse, pieces

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    from kvpack.cache.cache import Cache
    from kvpack.cache.layer import Layer
    from kvpack.cache.side import Side
    from kvpack.file.metadata import Value

_SEQUENCE, _STREAMS, _TRANSPOSED, _WINDOWED, _IDS = (
    f"llama.cpp {name}" for name in ("sequence", "streams", "transposed", "sliding-window layers", "token ids")
)
"""Names of the metadata in which a cache stores everything in the file except tokens, keys and values."""
_MAX_POSITION = 2**31 - 1
_KINDS = " keys beside values of "
"""Text between the types of keys and values in the recorded dtype of a quantized cache."""
_Stored = tuple[CellBlock, memoryview]


def import_slot(
    path: str | os.PathLike[str],
    recipe: str | Recipe = "raw",
    *,
    kv_heads: int | Sequence[int],
    windows: Mapping[int, int] | None = None,
    latents: bool = False,
    model: ModelArgument | None = None,
    progress: Progress | None = None,
) -> Cache:
    """Read the sequence state in the file ``path`` and pack it with ``recipe``. The recipe ``raw`` keeps every bit.

    The file's token ids become the cache's inputs. ``kv_heads`` is the number of KV heads, one for all layers or one per layer, because the
    file records only the total number of channels. ``windows`` maps the number of each sliding-window layer, counting only layers with
    their own cache, to its window in tokens. ``latents`` is True for a model with multi-head latent attention, whose cache consists of keys
    of one head. Keys stay as llama.cpp stores them, after its rotary embedding and in its channel order. The cache's ``model`` therefore
    marks it as llama.cpp's, and the argument ``model``, as for ``kvpack.pack``, adds fields such as its name. The metadata contains
    everything else that ``export_slot`` needs.

    Blocks of q8_0, q5_0 and q4_0 are kept bit for bit. They require the recipe ``raw``, because llama.cpp may have rotated them, which the
    file does not record.

    Raises MissingFile, and the same errors as ``kvpack.pack``. Raises InvalidParameter for another kind or version of file, and for
    anything that kvpack cannot store exactly: positions that are not consecutive, several sequences, images, or recurrent states.
    """
    where = path_text(path)
    fields = model_fields(model)
    with Reader(where) as reader:
        file = parse(reader, 2 if windows else 1, latents=latents)
        layers = sum(len(section.keys) for section in file.sections)
        windows = parse_windows(windows, layers)
        tokens = _check_counts(where, file, windows)
        heads = _layer_heads(kv_heads, layers)
        orders = [_position_order(where, section.positions, tokens - len(section.positions)) for section in file.sections]
        left = [zip_longest(section.keys, section.values) for section in file.sections]
        states: list[tuple[torch.Tensor | Quantized | None, torch.Tensor | Quantized | None, int]] = []
        for number in range(layers):
            section_number = int(number in windows)
            section = file.sections[section_number]
            keys, values = next(left[section_number])
            k, v = (
                None
                if block is None
                else _read_values(
                    reader, f"{where}: layer {number}", block, len(section.positions), heads[number], orders[section_number], turned
                )
                for block, turned in ((keys, False), (values, section.transposed))
            )
            states.append((k, v, tokens - len(section.positions)))
    whole = file.sections[0]
    said: dict[str, Value] = {_SEQUENCE: whole.sequence, _STREAMS: whole.streams, _TRANSPOSED: int(whole.transposed)}
    metadata = MappingProxyType({**said, _WINDOWED: len(windows), _IDS: file.ids_form})
    stored = [[x.kind if isinstance(x, Quantized) else RAW_NAMES[x.dtype] for x in state[:2] if x is not None] for state in states]
    dtype = " and ".join(dict.fromkeys(kind for kinds in stored for kind in kinds))
    if any(kind in QUANTIZED for kinds in stored for kind in kinds):
        recipe, dtype = _exact_recipe(where, stored, recipe), _KINDS.join(stored[0])
    named = {**fields, "dtype": f"{dtype} of llama.cpp", "config": CONFIG}
    inputs = Inputs(file.ids) if file.ids else None
    return replace(pack(states, recipe, model=named, inputs=inputs, progress=progress), metadata=metadata)


def export_slot(
    cache: Cache,
    path: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    windows: Mapping[int, int] | None = None,
    transposed: bool | None = None,
    streams: int | None = None,
    progress: Progress | None = None,
) -> int:
    """Write ``cache``, which must come from llama.cpp, as a sequence state. Returns the file's size in bytes.

    ``dtype`` has the same meaning as in ``export_prompt_cache``, and ``windows`` as in ``import_slot``. Quantized blocks are written
    unchanged, so ``dtype`` must be omitted for them. llama.cpp loads the file only in a context of the same model with the same cache
    settings. ``transposed`` is True if values are transposed, as they are without flash attention. ``streams`` is 1, or one per sequence if
    the cache is not unified. Both default to the imported file's. ``progress`` counts layers.

    Raises InvalidParameter if the cache did not come from llama.cpp, or if it contains something that such a file cannot represent: layers
    without keys or values, states, several sequences, windows with missing tokens, or unknown token ids. The message names the layer.
    Raises ValueTooLarge if ``dtype`` would make a value infinite, and WriteFailed.
    """
    where = path_text(path)
    _check_origin(cache)
    windows = parse_windows(windows, len(cache))
    metadata = {name: cache.metadata.get(name) for name in (_SEQUENCE, _STREAMS, _TRANSPOSED, _WINDOWED, _IDS)}
    if metadata[_WINDOWED] not in (None, len(windows)):
        raise InvalidParameter(f"windows has {len(windows)} layers, expected the {metadata[_WINDOWED]} sliding-window layers of the file")
    transposed = _export_setting("transposed", metadata[_TRANSPOSED] if transposed is None else int(bool(transposed)), 0, 1) == 1
    streams = _export_setting("streams", metadata[_STREAMS] if streams is None else streams, 1, 256)
    sequence = _export_setting("sequence", metadata[_SEQUENCE] or 0, 0, 255)
    kinds, tokens, ids = _quantized_types(cache, dtype), cache.tokens, _token_id_bytes(cache)
    if cache.start or not 0 < tokens <= _MAX_POSITION:
        problem = f"the cache begins at position {cache.start}, but a sequence of llama.cpp must begin at position 0"
        raise InvalidParameter(f"{problem}: export a cache that begins at position 0")
    if streams > 1 and sequence >= streams:
        raise InvalidParameter(f"sequence {sequence} is out of range for {streams} streams: pass more streams, or 1")
    sides: list[tuple[list[_Stored], list[_Stored]]] = [([], []) for _ in range(1 + bool(windows))]
    held: list[int | None] = [tokens, None]
    latents = cache[0].v is None
    for number, layer in enumerate(cache):
        section_number, window = int(number in windows), windows.get(number)
        kept = _saved_tokens(number, layer, latents, tokens, window)
        blocks = [
            _side_cells(f"layer {number}", side, kind, dtype, kept, turned, cache.model.get("dtype"))
            for side, turned, kind in zip((layer.k, layer.v), (False, transposed), kinds, strict=True)
            if side is not None
        ]
        if held[section_number] not in (None, kept):
            raise InvalidParameter(
                f"layer {number} would write {kept} tokens, but earlier layers wrote {held[section_number]}, and all share the same cells: "
                "export a cache in which they keep the same tokens"
            )
        held[section_number] = kept
        for stored, block in zip(sides[section_number], blocks, strict=False):
            stored.append(block)
        if progress:
            progress(number + 1, len(cache))
    sections = []
    for both, count in zip(sides, held, strict=False):
        positions = np.arange(tokens - (count or 0), tokens, dtype=np.int32)
        sections.append(Section(streams, sequence, positions, transposed, *(tuple(block for block, _ in side) for side in both)))
    data = [[values for _, values in (*keys, *values)] for keys, values in sides]
    form = SERVER if metadata[_IDS] == SERVER else LIST
    return write_file(where, pieces(StateFile(ids, form, tuple(sections)), data))


def _check_origin(cache: Cache) -> None:
    if cache.model.get("config") != CONFIG:
        raise InvalidParameter(
            f"the cache did not come from llama.cpp: its model has the config {cache.model.get('config', '')!r:.80}, expected {CONFIG!r}; "
            "llama.cpp stores the channels of keys in GGUF order. If this cache uses that order too, pass "
            f"dataclasses.replace(cache, model={{'config': {CONFIG!r}}})"
        )


def _check_counts(where: str, file: StateFile, windows: dict[int, int]) -> int:
    """Return the number of tokens in the file. Raises InvalidParameter unless layers match ``windows`` and cells match token ids."""
    counts = [len(section.keys) for section in file.sections]
    if not 0 < sum(counts) <= MAX_LAYERS:
        raise InvalidParameter(f"{where} has {sum(counts)} layers, expected 1 to {MAX_LAYERS}")
    if len(windows) != sum(counts[1:]):
        raise InvalidParameter(
            f"the number of sliding-window layers in {where} is {sum(counts[1:])}, but windows has {len(windows)}: pass one window per "
            "sliding-window layer"
        )
    tokens, held_tokens = len(file.sections[0].positions), len(file.sections[-1].positions)
    if file.ids and len(file.ids) != ID_BYTES * tokens:
        raise InvalidParameter(f"{where} has {len(file.ids) // ID_BYTES} token ids for {tokens} cells, expected one per cell, or none")
    for number, window in windows.items():
        if not min(tokens, window - 1) <= held_tokens <= min(tokens, window):
            raise InvalidParameter(
                f"{where}: sliding-window layers hold {held_tokens} of {tokens} tokens, but layer {number} has a window of {window}"
            )
    full, other = file.sections[0], file.sections[-1]
    if (full.streams, full.sequence, full.transposed) != (other.streams, other.sequence, other.transposed):
        raise InvalidParameter(f"{where}: its full-attention and sliding-window layers differ in streams, sequence or layout")
    return tokens


def _layer_heads(kv_heads: int | Sequence[int], layers: int) -> list[int]:
    result = [kv_heads] * layers if isinstance(kv_heads, int) else list(kv_heads)
    if len(result) != layers or not all(type(heads) is int and heads > 0 for heads in result):
        raise InvalidParameter(f"kv_heads is {kv_heads!r:.80}, expected a positive integer, or one for each of {layers} layers")
    return result


def _position_order(where: str, positions: np.ndarray, first: int) -> torch.Tensor | None:
    """Return the order in which cells are sorted by position, or None if they already are.

    Raises InvalidParameter unless the positions are consecutive.
    """
    expected = np.arange(first, first + len(positions))
    if np.array_equal(positions, expected):
        return None
    order = np.argsort(positions, kind="stable")
    if (wrong := np.flatnonzero(positions[order] != expected)).size:
        at = wrong[0]
        raise InvalidParameter(
            f"{where}: its {len(positions)} cells have positions from {positions.min()} to {positions.max()}, with "
            f"{positions[order][at]} in place of {expected[at]}: kvpack stores only consecutive tokens"
        )
    return torch.from_numpy(order)


def _exact_recipe(where: str, stored: list[list[str]], recipe: str | Recipe) -> str:
    """Return the recipe that stores the quantized keys or values unchanged.

    ``stored`` contains the types of each layer's keys and values. Raises InvalidParameter if layers have different types, or if ``recipe``
    is not raw.
    """
    if parse_recipe(recipe) != Recipe("raw"):
        raise InvalidParameter(
            f"{where}: its keys or values are quantized ({' and '.join(stored[0])}), which kvpack stores unchanged: use the 'raw' recipe, "
            "or save a slot whose cache types are f16, bf16 or f32 (--cache-type-k, --cache-type-v)"
        )
    if any(kinds != stored[0] for kinds in stored):
        raise InvalidParameter(
            f"{where}: its layers have different cache types, expected {' and '.join(stored[0])} in all layers, as in layer 0"
        )
    clauses = [exact_clause(kind, side) if kind in QUANTIZED else f"{side}=raw" for kind, side in zip(stored[0], "kv", strict=False)]
    return ";".join(clauses if len(clauses) == 2 else [*clauses, "v=raw"])


def _quantized_types(cache: Cache, dtype: str | None) -> tuple[str | None, str | None]:
    """Return the quantized types in which keys and values are written back. None means not quantized.

    Raises InvalidParameter for unknown types, or if ``dtype`` is set for quantized blocks.
    """
    dtype_name = cache.model.get("dtype", "").removesuffix(" of llama.cpp")
    keys, _, values = dtype_name.partition(_KINDS)
    if not {keys, values} & QUANTIZED.keys():
        return None, None
    if dtype is not None:
        raise InvalidParameter(
            f"dtype is {dtype!r}, but the cache holds quantized llama.cpp blocks ({dtype_name!r}), which are always written unchanged: "
            "omit dtype"
        )
    if not {keys, values} <= {*QUANTIZED, *TYPES, ""}:
        raise InvalidParameter(
            f"the cache holds quantized llama.cpp blocks ({dtype_name!r:.80}), which this version of kvpack cannot write: upgrade kvpack"
        )
    return keys, values or None


def _side_cells(
    where: str, side: Side, kind: str | None, dtype: str | None, newest: int, transposed: bool, recorded: str | None
) -> _Stored:
    """Return the ``newest`` tokens of a side in llama.cpp's layout. ``recorded`` is the dtype in the cache's model fields.

    Raises the same errors as ``export_values``, and InvalidParameter if the side is not of the quantized type ``kind``.
    """
    if kind in QUANTIZED:
        rows = extract_blocks(side, kind, where)[:, -newest:].transpose(0, 1).contiguous()
        return CellBlock(kind, rows.shape[1] * rows.shape[2] * BLOCK, 0), rows.flatten().numpy().data
    values = export_values(where, side, dtype or kind, "llama.cpp", recorded)
    return _to_cells(values[0, :, -newest:], transposed)


def _read_values(
    reader: Reader, where: str, block: CellBlock, cells: int, heads: int, order: torch.Tensor | None, transposed: bool
) -> torch.Tensor | Quantized:
    if block.channels % heads:
        raise InvalidParameter(
            f"{where}: {block.channels} channels are not divisible by {heads} heads: pass the model's number of KV heads"
        )
    if block.dtype in QUANTIZED:
        return _read_blocks(reader, where, block, cells, heads, order)
    values = torch.empty(cells * block.channels, dtype=RAW_DTYPES[block.dtype], device="cpu")
    reader.read_into(values.view(torch.uint8).numpy().data, block.offset)
    values = values.view(heads, -1, cells).transpose(1, 2) if transposed else values.view(cells, heads, -1).transpose(0, 1)
    return values[None] if order is None else values[None][:, :, order]


def _read_blocks(reader: Reader, where: str, block: CellBlock, cells: int, heads: int, order: torch.Tensor | None) -> Quantized:
    if block.channels // heads % BLOCK:
        raise InvalidParameter(
            f"{where}: with {heads} heads, each head has {block.channels // heads} channels, which is not a multiple of the {block.dtype} "
            f"block size, {BLOCK}: pass the model's number of KV heads"
        )
    data = torch.empty(cells * block.cell_bytes, dtype=torch.uint8, device="cpu")
    reader.read_into(data.numpy().data, block.offset)
    blocks = data.view(cells, heads, -1, QUANTIZED[block.dtype].size).transpose(0, 1)
    return Quantized(block.dtype, blocks if order is None else blocks[:, order], where)


def _to_cells(values: torch.Tensor, transposed: bool) -> _Stored:
    rows = values.transpose(1, 2) if transposed else values.transpose(0, 1)
    block = CellBlock(RAW_NAMES[values.dtype], values.shape[0] * values.shape[2], 0)
    return block, rows.contiguous().flatten().view(torch.uint8).numpy().data


def _export_setting(name: str, value: object, minimum: int, maximum: int) -> int:
    if type(value) is not int or not minimum <= value <= maximum:
        problem = f"{name} is {value!r:.40}" if value is not None else f"the cache's metadata does not have {name}: pass {name}="
        raise InvalidParameter(f"{problem}, expected an integer from {minimum} to {maximum}")
    return value


def _token_id_bytes(cache: Cache) -> bytes:
    """Return the token ids as bytes, or no bytes if some ids are unknown."""
    inputs = cache.inputs
    if inputs is None:
        return b""
    if inputs.tokens not in (0, cache.tokens):
        raise InvalidParameter(
            f"the cache has the ids of only {inputs.tokens} of {cache.tokens} tokens: for a file without ids, pass "
            "dataclasses.replace(cache, inputs=None)"
        )
    if inputs.undetermined:
        raise InvalidParameter(
            f"{inputs.undetermined[0]}: a sequence state of llama.cpp holds only token ids, which do not determine this cache: save it "
            "as a kvpack file"
        )
    ids = np.frombuffer(inputs.token_ids, "<u4")
    if len(ids) and ids.max() >= 2**31:
        raise InvalidParameter(f"token {int(ids.argmax())} has id {ids.max()}, but token ids of llama.cpp are below 2^31")
    return inputs.token_ids


def _saved_tokens(layer_index: int, layer: Layer, latents: bool, tokens: int, window: int | None) -> int:
    """Return how many of a layer's newest tokens llama.cpp saves."""
    if layer.k is None or (layer.v is None) != latents or layer.states:
        contents = "no values, unlike layer 0" if layer.v is None else "values, unlike layer 0"
        contents = "states" if layer.states else "no keys" if layer.k is None else contents
        raise InvalidParameter(
            f"layer {layer_index} contains {contents}: for llama.cpp, kvpack writes only keys and values, or only latents"
        )
    if layer.k.batch != 1:
        raise InvalidParameter(f"layer {layer_index} holds {layer.k.batch} sequences, but a sequence state holds one: use Cache.select")
    if layer.seen_tokens != tokens:
        raise InvalidParameter(
            f"layer {layer_index} has seen {layer.seen_tokens} tokens, but the cache has {tokens}: use a cache whose layers all end at the "
            "same token"
        )
    # The next token attends to all tokens or, with a window, to the newest ones.
    if layer.tokens < (tokens if window is None else max(1, min(tokens, window - 1))):
        needed = f"but a window of {window} includes the previous {window - 1}" if window else "so it needs a sliding window: pass windows="
        raise InvalidParameter(f"layer {layer_index} holds the newest {layer.tokens} of {tokens} tokens, {needed}")
    return min(layer.tokens, tokens if window is None else window)
