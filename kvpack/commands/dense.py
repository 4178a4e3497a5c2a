"""kvpack unpack and kvpack pack: convert kvpack files to and from safetensors files of dense keys and values.

A dense file contains the tensors ``{layer}.k`` and ``{layer}.v``, ``[batch, kv_head, token, dim]``, with layers from 0, and states of
recurrent and convolution layers as ``{layer}.state.{name}``, ``[batch, ...]``. Known token ids are in ``token_ids``, int64 ``[row,
token]``, with a single row if all sequences have the same ids.

The metadata ``kvpack.unpacked`` is a JSON object. ``model`` is the model's identity, and ``start`` the first token's position. If layers
start elsewhere or have no tensors, ``start`` is ``{"range": position, "layers": [position of each]}``. Optional entries are the user's
``metadata``, ``position_offsets``, ``undetermined`` (the inputs that token ids do not determine, each as ``[text, position]``) and
``hidden`` (the tokens hidden by an attention mask, as ``[row, start, stop]``).
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from kvpack.file.hidden_tokens import HiddenRange
from kvpack.file.inputs import ID_BYTES, Inputs
from kvpack.file.limits import MAX_LAYERS, MAX_TOKENS
from kvpack.file.metadata import Value, to_bytes
from kvpack.formats.errors import InvalidParameter, KvpackError
from kvpack.output import add_json, print_report, progress

from .convert import RECIPE_HELP, add_basis_option, add_write_options, parse_recipe_option, save
from .outputs import add_force, check_output

if TYPE_CHECKING:
    import argparse

    import torch

    from kvpack import Cache
    from kvpack.cache.dense_states import DenseLayer
    from kvpack.coding.encoding import Progress

DTYPES = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}
"""For each dtype that ``unpack`` can write, its name in safetensors."""

IDS = "token_ids"
"""Name of the tensor with token ids."""

_NAME = re.compile(r"(0|[1-9][0-9]{0,8})\.([kv]|state\.(?P<state>[a-z][a-z0-9_.]{0,27}))", re.ASCII)


def add_command(commands: Any) -> None:
    parser = commands.add_parser("unpack", help="decode to a safetensors file", description="Decode a file to dense K and V.")
    parser.add_argument("input", metavar="FILE", help="a kvpack file")
    parser.add_argument("output", metavar="OUT.safetensors", help="the safetensors file to write")
    parser.add_argument("--dtype", choices=list(DTYPES), help="dtype of the tensors (default: their stored dtype, or bf16 if packed)")
    add_force(parser)
    add_json(parser)
    add_basis_option(parser)
    parser.set_defaults(run=unpack)
    parser = commands.add_parser("pack", help="encode a safetensors file", description="Encode the dense K and V of a safetensors file.")
    parser.add_argument("input", metavar="IN.safetensors", help="tensors {layer}.k and {layer}.v, [batch, kv_head, token, dim]")
    parser.add_argument("output", metavar="OUT", help="the kvpack file to write")
    parser.add_argument("--recipe", required=True, help=RECIPE_HELP)
    add_write_options(parser)
    add_json(parser)
    add_basis_option(parser)
    parser.set_defaults(run=pack)


def unpack(arguments: argparse.Namespace) -> int:
    """Decode all layers and write the dense file."""
    import kvpack
    from kvpack.cache import tensor_files
    from kvpack.coding.encoding import RAW_NAMES
    from kvpack.file.atomic import write_file

    check_output(arguments, arguments.output, arguments.input, arguments.basis)
    # Read a copy, because truncating a mapped file would kill this process.
    cache = kvpack.load(arguments.input, copy=True, basis=arguments.basis)
    with progress("decode") as callback:
        tensors = _dense_tensors(cache, arguments, callback)
    with progress("write") as callback:
        size = write_file(arguments.output, tensor_files.pieces(tensors, _dense_metadata(cache)), progress=callback)
    dtypes = {RAW_NAMES[tensor.dtype] for name, tensor in tensors.items() if name.endswith((".k", ".v"))}
    report = {"file": arguments.output, "bytes": size, "dtype": " and ".join(sorted(dtypes)), "layers": len(cache), "tokens": cache.tokens}
    return print_report(report, f"{arguments.output}: {size:,} bytes", arguments)


def pack(arguments: argparse.Namespace) -> int:
    """Read the dense file, and write a kvpack file with everything that ``unpack`` recorded."""
    import kvpack

    check_output(arguments, arguments.output, arguments.input, arguments.basis, arguments.recipe)
    layers, note, inputs = _read_dense(arguments.input)
    recipe = parse_recipe_option(arguments, reads_cache=False)
    known = 0 if inputs is None else inputs.tokens
    sides = [(layer.skipped, x) for layer in layers for x in (layer.k, layer.v) if x is not None and len(x.shape) == 4]
    tokens = max((skipped + x.shape[2] for skipped, x in sides), default=known)
    if known > tokens:
        raise InvalidParameter(f"{arguments.input}: {IDS} has {known} ids, but the layers have {tokens} tokens: remove the extra ids")
    with progress("encode") as callback:
        cache = kvpack.pack(layers, recipe, model=note.model, start=note.start, inputs=inputs, progress=callback)
    save(replace(cache, metadata=MappingProxyType(note.metadata), position_offsets=note.offsets), arguments)
    return 0


def _dense_tensors(cache: Cache, arguments: argparse.Namespace, callback: Progress | None) -> dict[str, torch.Tensor]:
    """Return the tensors of the dense file by name. Raises ValueTooLarge if a value does not fit in ``--dtype``."""
    import torch

    from kvpack.integrations.exported_values import export_values

    tensors = {}
    for number, layer in enumerate(cache):
        for name, side in layer.sides.items():
            dtype = arguments.dtype or side.codec.exact_dtype or "bf16"
            tensors[f"{number}.{name}"] = export_values(f"{arguments.input}: {number}.{name}", side, dtype, "a dense file")
        tensors.update({f"{number}.state.{name}": state for name, state in layer.states.items()})
        if callback:
            callback(number + 1, len(cache))
    if cache.inputs is not None and cache.inputs.known_ids[0]:
        ids = torch.frombuffer(bytearray(b"".join(cache.inputs.known_ids)), dtype=torch.uint8).view(
            len(cache.inputs.known_ids), -1, ID_BYTES
        )
        tensors[IDS] = (ids.to(torch.int64) << torch.arange(0, 8 * ID_BYTES, 8, device="cpu")).sum(2)
    return tensors


def _dense_metadata(cache: Cache) -> dict[str, str]:
    """Return the metadata of the dense file (see the module docstring)."""
    starts = [cache.positions(number)[0] for number in range(len(cache))]
    whole = all(layer.sides and not layer.skipped for layer in cache)
    note: dict[str, Any] = {"start": cache.start if whole else {"range": cache.start, "layers": starts}, "model": dict(cache.model)}
    if cache.metadata:
        note["metadata"] = dict(cache.metadata)
    if cache.position_offsets is not None:
        note["position_offsets"] = list(cache.position_offsets)
    if cache.inputs is not None:
        note["undetermined"] = list(zip(cache.inputs.undetermined, cache.inputs.starts, strict=True))
        if cache.inputs.hidden:
            note["hidden"] = cache.inputs.hidden
    return {"format": "pt", "kvpack.unpacked": json.dumps(note)}


def _read_dense(path: str) -> tuple[list[DenseLayer], _UnpackedInfo, Inputs | None]:
    """Return the layers, the metadata and the inputs of a dense file.

    Raises MissingFile if the file does not exist, and InvalidParameter if it is not a safetensors file, or has tensors that dense files do
    not have.
    """
    from kvpack.cache import tensor_files
    from kvpack.cache.dense_states import DenseLayer
    from kvpack.coding.encoding import STATE_DTYPES
    from kvpack.file.layer_states import check_state

    def check(names: list[str], metadata: dict[str, str]) -> tuple[_UnpackedInfo, int]:
        note = _parse_unpacked_info(path, metadata.get("kvpack.unpacked", '{"start": 0, "model": {}}'))
        return note, _count_layers(path, names, note)

    tensors, (note, layers) = tensor_files.read(path, check)
    starts = [note.start] * layers if note.starts is None else note.starts
    states: list[dict[str, torch.Tensor]] = [{} for _ in starts]
    ids = tensors.pop(IDS, None)
    batch = min((tensor.shape[0] for tensor in tensors.values() if tensor.dim()), default=0)
    if ids is not None and ids.dim() == 2 and len(ids) not in (1, batch):
        raise InvalidParameter(
            f"{path}: {IDS} has shape {list(ids.shape)}, but the layers have {batch} sequences: store one row per sequence"
        )
    inputs = _parse_inputs(path, ids, note)
    for name, tensor in tensors.items():
        number, _, state = name.partition(".state.")
        if state:
            check_state(f"{path}: {name}", STATE_DTYPES.get(tensor.dtype), tensor.shape)
            states[int(number)][state] = tensor
    return (
        [DenseLayer(tensors.get(f"{n}.k"), tensors.get(f"{n}.v"), start - note.start, states[n]) for n, start in enumerate(starts)],
        note,
        inputs,
    )


def _parse_inputs(path: str, ids: torch.Tensor | None, info: _UnpackedInfo) -> Inputs | None:
    """Return the inputs that a dense file records, or None. Raises InvalidParameter unless the ids are integers ``[row, token]``."""
    from kvpack.store.keys import token_bytes

    if ids is None and info.undetermined is None:
        return None
    try:
        if ids is not None and ids.dim() == 2 and len(ids) > 1:
            rows = [token_bytes(row) for row in ids]
        else:
            rows = [b"" if ids is None else token_bytes(ids)]
        return Inputs.from_rows(rows, info.undetermined or (), info.hidden, info.start)
    except InvalidParameter as error:
        raise InvalidParameter(f"{path}: {error}") from None


def _count_layers(path: str, names: list[str], info: _UnpackedInfo) -> int:
    """Return the number of layers. Raises InvalidParameter if the metadata contradicts the tensors."""
    if "kvpack.header" in names:
        raise InvalidParameter(f"{path} is a kvpack file, not dense K and V: use kvpack convert, or kvpack unpack first")
    names = [name for name in names if name != IDS]
    for name in names:
        if not _NAME.fullmatch(name):
            raise InvalidParameter(
                f"{path}: the tensor name {name!r} is unknown, expected {{layer}}.k, {{layer}}.v or {{layer}}.state.{{name}} (for example, "
                f"0.k), or {IDS}"
            )
    layers = {int(name.partition(".")[0]) for name in names}
    count = len(layers) if info.starts is None else len(info.starts)
    if count > MAX_LAYERS:
        raise InvalidParameter(f"{path} has {count} layers, expected at most {MAX_LAYERS}")
    if not layers or max(layers) >= count:
        if info.starts is None and layers:
            missing = min(set(range(max(layers))) - layers)
            raise InvalidParameter(f"{path} has layer {max(layers)} but not layer {missing}, expected all layers from 0 to {max(layers)}")
        expected = "at least layer 0" if info.starts is None else f"some of the {count} layers in its metadata"
        raise InvalidParameter(f"{path} has {f'layer {max(layers)}' if layers else 'no layers'}, expected {expected}")
    for number, start in enumerate(info.starts or ()):
        if start < info.start or start > MAX_TOKENS or (start != info.start and number not in layers):
            expected = f"{info.start} to {MAX_TOKENS}" if number in layers else f"{info.start}, because it has no keys and values"
            raise InvalidParameter(
                f"{path}: metadata 'kvpack.unpacked': layer {number} starts at position {start}, expected {expected}"
            )
    return count


class _UnpackedInfo(NamedTuple):
    """The parsed metadata of a dense file. ``starts`` contains each layer's first position. It is None if all layers start at ``start``."""

    model: dict[str, str]
    start: int
    starts: list[int] | None
    metadata: dict[str, Value]
    undetermined: list[tuple[str, int]] | None
    """Inputs that token ids do not determine, each with the first position that it affects, or None if inputs are unknown."""
    offsets: tuple[int, ...] | None
    hidden: tuple[HiddenRange, ...]
    """Tokens hidden by an attention mask."""


def _parse_unpacked_info(path: str, text: str) -> _UnpackedInfo:
    try:
        note = json.loads(text)
    except (ValueError, RecursionError):
        note = None
    match note:
        case {"start": start, "model": {**named}} if all(isinstance(word, str) for word in named.values()):
            model = {str(name): str(word) for name, word in named.items()}
            metadata = note.get("metadata", {})
            try:
                to_bytes(metadata)
            except KvpackError as error:
                raise InvalidParameter(f"{path}: metadata 'kvpack.unpacked': {error}") from None
            undetermined = _parse_undetermined(path, note.get("undetermined"))
            offsets = _parse_offsets(path, note.get("position_offsets"))
            hidden = _parse_hidden(path, note.get("hidden", []))
            match start:
                case int() if type(start) is int:
                    return _UnpackedInfo(model, start, None, metadata, undetermined, offsets, hidden)
                case {"range": first, "layers": [*starts]} if all(type(position) is int for position in (first, *starts)):
                    return _UnpackedInfo(model, first, starts, metadata, undetermined, offsets, hidden)
    expected = '{"start": integer, "model": {name: text}}, where start may also be {"range": integer, "layers": [integer, ...]}'
    raise InvalidParameter(f"{path}: metadata 'kvpack.unpacked' is {text!r:.200}, expected {expected}")


def _parse_offsets(path: str, listed: Any) -> tuple[int, ...] | None:
    """Return the position offsets in the metadata. Raises InvalidParameter if they are malformed."""
    if listed is None:
        return None
    if not isinstance(listed, list) or not all(type(offset) is int and abs(offset) <= MAX_TOKENS for offset in listed) or not listed:
        raise InvalidParameter(
            f"{path}: metadata 'kvpack.unpacked': 'position_offsets' is {listed!r:.80}, expected an integer for each sequence"
        )
    return tuple(listed)


def _parse_undetermined(path: str, listed: Any) -> list[tuple[str, int]] | None:
    """Return the (text, position) pairs in the metadata. Raises InvalidParameter if they are malformed."""
    if listed is None:
        return None
    pairs = []
    for pair in listed if isinstance(listed, list) else [listed]:
        match pair:
            case [str() as text, int() as position] if text and type(position) is int and 0 <= position <= MAX_TOKENS:
                pairs.append((text, position))
            case _:
                raise InvalidParameter(
                    f"{path}: metadata 'kvpack.unpacked': 'undetermined' contains {pair!r:.80}, expected [nonempty text, position >= 0]"
                )
    return pairs


def _parse_hidden(path: str, listed: Any) -> tuple[HiddenRange, ...]:
    """Return the ranges of hidden tokens in the metadata. Raises InvalidParameter if they are malformed."""
    for token_range in listed if isinstance(listed, list) else [listed]:
        match token_range:
            case [int(), int(), int()] if all(type(number) is int and 0 <= number <= MAX_TOKENS for number in token_range):
                pass
            case _:
                raise InvalidParameter(
                    f"{path}: metadata 'kvpack.unpacked': 'hidden' contains {token_range!r:.80}, expected [row, start, stop]"
                )
    return tuple(HiddenRange(*token_range) for token_range in listed)
