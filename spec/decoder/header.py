"""Parsing of the tensor ``kvpack.header`` to layers and tensors (spec/container.md, Fields)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from .basis import check_basis, check_frames
from .codec import RAW_DTYPES, Codec, NumberStream
from .codecs import CODECS
from .codecs.klt import KLT_PARAMETERS
from .contents import File, Side, Tensor
from .features import BASIS, CODEC_FEATURES, HIDDEN_TOKENS, LAYER_POSITIONS, LAYER_STATE, POSITION_OFFSETS, SIDECAR_FEATURES
from .ignorable import take_hidden, take_offsets, take_starts, take_states
from .limits import FORMAT, LIMITS, MAX_BATCH, MAX_CODECS, MAX_HEADS, MAX_LAYERS, MAX_RATIO, MAX_TOKENS
from .msgpack import Msgpack
from .newer import refuse_newer
from .refusal import refuse, require
from .sidecars import SIDECAR_KEYS, SIDECARS, take_sidecars

HEADER_KEYS = ["format", "required", "ignorable", "model", "recipe", "start", "codecs", "layers", "tensors"]
SIDE_KEYS = ["codec", "batch", "heads", "runs", "tail", "tail_dtype", "window"]
FIELDS = "container.md, Fields"


def take_keys(value: Any, keys: list[str], name: str) -> list[Any]:
    found_keys = list(value) if isinstance(value, dict) else type(value).__name__
    require(found_keys == keys, FIELDS, f"{name} has the keys {found_keys}, expected {keys}")
    return list(value.values())


def require_integer(value: object, low: int, high: int, name: str) -> None:
    """Require an integer to be within the range given in section Fields and within its limit."""
    if not isinstance(value, int) or value < low:
        refuse(FIELDS, f"{name} is {value!r}, expected an integer of at least {low}")
    require(value <= high, LIMITS, f"{name} is {value}, expected at most {high}")


def take_names(value: Any, value_type: type, name: str) -> dict[str, Any]:
    require(
        isinstance(value, dict) and all(isinstance(entry, value_type) for entry in value.values()),
        FIELDS,
        f"{name} must be a map from strings to values of type {value_type.__name__}",
    )
    require(list(value) == sorted(value), Msgpack.RULE, f"the keys of {name} are not in ascending order")
    return dict(value)


def parse_msgpack(data: bytes, more_codecs: Sequence[str] = ()) -> dict[str, Any]:
    """Parse a header. A header that is not canonical is refused; if a newer version wrote it, that is reported as the reason.

    ``more_codecs`` are codecs that occur only in rows.
    """
    refuse_newer(data, more_codecs)
    parser = Msgpack(data)
    top = parser.read_value()
    require(isinstance(top, dict), parser.RULE, "the header is not a map")
    parser.expect(parser.at == len(data), f"{len(data) - parser.at} bytes follow the map")
    if parser.breach:
        refuse(parser.RULE, parser.breach)
    return dict(top)


def take_header(
    header: dict[str, Any], known: Mapping[str, Callable[[Mapping[str, Any]], Codec]] | None = None, *, without_tensors: bool = False
) -> File:
    """Check container.md, Fields, and return the file without its contents.

    New versions, features and codecs must have been reported before. ``known`` are the codecs. ``without_tensors`` is True for the page of
    a row.
    """
    require(header.get("format") == FORMAT, FIELDS, f"format is {header.get('format')!r}, expected {FORMAT}")
    required: Any = header.get("required")
    require(isinstance(required, list) and all(isinstance(name, str) for name in required), FIELDS, "required is not an array of strings")
    _, _, ignorable, model, recipe, start, codecs, layers, tensors = take_keys(header, HEADER_KEYS, "the header")
    ignorable, model = take_names(ignorable, bytes, "ignorable"), take_names(model, str, "model")
    require(isinstance(recipe, str), FIELDS, "recipe is not a string")
    require_integer(start, 0, MAX_TOKENS, "start")
    require(isinstance(codecs, list), FIELDS, "codecs is not an array")
    require(isinstance(layers, list), FIELDS, "layers is not an array")
    require(len(codecs) <= MAX_CODECS, LIMITS, f"the header has {len(codecs)} codecs, expected at most {MAX_CODECS}")
    require(len(layers) <= MAX_LAYERS, LIMITS, f"the header has {len(layers)} layers, expected at most {MAX_LAYERS}")
    decoded_codecs = [take_codec(entry, f"codec {number}", CODECS if known is None else known) for number, entry in enumerate(codecs)]
    file = File(required, ignorable, model, recipe, start, [], decoded_codecs, [], [])
    for number, layer in enumerate(layers):
        sides = take_keys(layer, ["k", "v"], f"layer {number}")
        k, v = (None if side is None else take_side(side, decoded_codecs, f"layer {number}") for side in sides)
        if k and v:
            require(
                (k.batch, k.shape[2]) == (v.batch, v.shape[2]),
                FIELDS,
                f"layer {number}: k and v have different numbers of sequences or tokens",
            )
        require(
            v is None or "key_mean" not in v.codec.sidecars,
            SIDECARS,
            f"layer {number}: v has the sidecar key_mean, which only keys may have",
        )
        file.layers.append({"k": k, "v": v})
    require(
        required == sorted(set(required)),
        "container.md, Header tensor",
        f"required is {required}, expected each feature once, in ascending order",
    )
    used = {codec.feature for codec in decoded_codecs}
    used |= {feature for name, feature in SIDECAR_FEATURES.items() if any(name in codec.sidecars for codec in decoded_codecs)}
    for feature in CODEC_FEATURES:
        require(
            (feature in used) == (feature in required),
            "container.md, Header tensor",
            f"{feature} must be in required exactly if a codec needs it",
        )
    file.starts = take_starts(file, LAYER_POSITIONS in required)
    if BASIS in required:
        check_basis(file)
    states = take_states(file, LAYER_STATE in required)
    file.hidden = take_hidden(file, HIDDEN_TOKENS in required, [tensor.shape[0] for _, tensor in states])
    file.offsets = take_offsets(file, states, POSITION_OFFSETS in required)
    if BASIS in required:
        check_frames(file, {tensor.name: tensor for _, tensor in states})
    if without_tensors:
        return file
    expected = []
    for number, layer in enumerate(file.layers):
        expected += [tensor for name, side in layer.items() if side for tensor in side.tensors(f"{number}.{name}.")]
        expected += [tensor for of_layer, tensor in states if of_layer == number]
    require(isinstance(tensors, list) and len(tensors) == len(expected), FIELDS, f"tensors must be an array of {len(expected)} entries")
    file.tensors = [take_tensor(entry, tensor) for entry, tensor in zip(tensors, expected, strict=True)]
    return file


def take_codec(entry: Any, what: str, known: Mapping[str, Callable[[Mapping[str, Any]], Codec]]) -> Codec:
    require(isinstance(entry, dict) and isinstance(entry.get("id"), str), FIELDS, f"{what} has no id")
    codec = known[entry["id"]]({key: value for key, value in entry.items() if key not in SIDECAR_KEYS})
    sidecars = take_sidecars(entry, codec)
    page = entry["key_mean"]["tokens"] if "key_mean" in sidecars else codec.token_group
    return replace(codec, sidecars=sidecars, token_group=page)


def take_side(value: Any, codecs: list[Codec], what: str) -> Side:
    entries = value.get("entries") if isinstance(value, dict) else None
    fields = {key: value[key] for key in value if key != "entries"} if isinstance(value, dict) else value
    number, batch, heads, runs, tail, tail_dtype, window = take_keys(fields, SIDE_KEYS, f"the keys or values of {what}")
    require(isinstance(number, int) and number < len(codecs), FIELDS, f"{what}: codec is {number!r}, but the file has {len(codecs)} codecs")
    codec = codecs[number]
    require_integer(batch, 1, MAX_BATCH, f"{what}: batch")
    require_integer(heads, 1, MAX_HEADS, f"{what}: heads")
    require(codec.heads in (0, heads), KLT_PARAMETERS, f"{what}: heads is {heads}, but the codec has widths for {codec.heads} heads")
    require(isinstance(runs, list), FIELDS, f"{what}: runs is {runs!r}, expected an array")
    for run in runs:
        require(isinstance(run, int) and run >= 1, FIELDS, f"{what}: a run is {run!r}, expected a positive integer")
    require(isinstance(tail, int), FIELDS, f"{what}: tail is {tail!r}, expected an integer")
    require(sum(runs) + tail <= MAX_TOKENS, LIMITS, f"{what} has {sum(runs) + tail} tokens, expected at most {MAX_TOKENS}")
    require(
        isinstance(tail_dtype, str) and tail_dtype in RAW_DTYPES,
        FIELDS,
        f"{what}: tail_dtype is {tail_dtype!r}, expected one of {list(RAW_DTYPES)}",
    )
    require_integer(window, 0, MAX_TOKENS, f"{what}: window")
    require(
        window % codec.token_group == 0, FIELDS, f"{what}: window is {window}, expected a multiple of the token group, {codec.token_group}"
    )
    rows_of_runs = any(isinstance(stream, NumberStream) and stream.per == "run" for stream in codec.streams.values())
    whole = codec.token_group > 1 or rows_of_runs or len(runs) <= 1
    require(whole, "container.md, Runs and tail", f"{what} has {len(runs)} runs, but its codec allows only one")
    entry_streams = [name for name, stream in codec.streams.items() if isinstance(stream, NumberStream) and stream.per == "entry"]
    if entry_streams:
        require(
            list(value) == [*SIDE_KEYS, "entries"],
            FIELDS,
            f"the map of the keys or values of {what} has the keys {list(value)}, expected entries last",
        )
    else:
        require("entries" not in value, FIELDS, f"{what}: entries is {entries!r}, but no stream has a row per entry")
    return Side(codec, batch, heads, runs, tail, tail_dtype, window, take_entries(entries, entry_streams, what))


def take_entries(value: Any, names: list[str], what: str) -> dict[str, int]:
    """Return the number of rows of the streams ``names``, which have one row per entry."""
    if not names:
        return {}
    if not isinstance(value, dict) or list(value) != names:
        refuse(FIELDS, f"{what}: entries is {value!r}, expected a map of the streams {names}")
    for name, count in value.items():
        require_integer(count, 0, MAX_TOKENS, f"{what}: entries of {name}")
    return value


def take_tensor(entry: Any, expected: Tensor) -> Tensor:
    require(isinstance(entry, list) and len(entry) == 6, FIELDS, f"the entry of tensor {expected.name} is not an array of six values")
    name, dtype, shape, filter_, stored_bytes, digest = entry
    same = (name, dtype, shape) == (expected.name, expected.dtype, list(expected.shape))
    require(
        same,
        FIELDS,
        f"tensor {expected.name} has the entry {name!r}, {dtype!r}, {shape!r}, expected {expected.dtype} {list(expected.shape)}",
    )
    require(filter_ in ("none", "zstd"), FIELDS, f"the filter of {name} is {filter_!r}, expected none or zstd")
    require(isinstance(stored_bytes, int), FIELDS, f"stored_bytes of {name} is {stored_bytes!r}, expected an integer")
    require(isinstance(digest, bytes) and len(digest) == 16, FIELDS, f"the digest of {name} is not binary data of 16 bytes")
    if filter_ == "none":
        require(stored_bytes == expected.bytes, FIELDS, f"{name} has {stored_bytes} stored bytes, expected {expected.bytes}")
    else:
        require(
            expected.bytes <= MAX_RATIO * stored_bytes,
            LIMITS,
            f"{name} decodes {stored_bytes} stored bytes to {expected.bytes}, more than {MAX_RATIO} times as many",
        )
    return Tensor(name, dtype, expected.shape, filter_, stored_bytes, digest)
