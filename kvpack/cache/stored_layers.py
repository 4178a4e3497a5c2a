"""Converts between caches and the tensors in a file.

A header's codecs do not store encoder options, such as norm_rule, which are needed to encode further tokens. These options are looked up in
the header's recipe text. The text is searched instead of parsed, because parsing an untrusted text would create every codec in it.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from functools import lru_cache
from types import MappingProxyType

import numpy
import torch

from kvpack.coding import raw_clause
from kvpack.coding.encoding import TORCH_DTYPES
from kvpack.coding.presets import ADDITIONS, PUBLISHED
from kvpack.coding.recorded_presets import RECORDED
from kvpack.coding.rules import Rule
from kvpack.file.header import Header, SideEntry
from kvpack.file.inputs import Inputs
from kvpack.file.metadata import FEATURE, from_bytes
from kvpack.formats import CODECS
from kvpack.formats.base import Codec
from kvpack.formats.errors import InvalidParameter
from kvpack.formats.options import Options
from kvpack.formats.raw import DTYPES
from kvpack.formats.raw_positions import RawPositions
from kvpack.formats.sidecars import CodecWithSidecars

from .cache import Cache
from .layer import Layer
from .packed_runs import PackedRuns, Stretch
from .side import Side


def stored_streams(side: Side) -> dict[str, torch.Tensor]:
    """Return the streams of a merged side by name, as in a file. The stream "tail" contains the raw tail."""
    names = side.codec.layout(side.batch, side.heads, 0)
    if not side.runs:
        # In a side without runs, a stream with one row per run has no rows.
        shapes = {name: (*entry.shape[:2], 0, *entry.shape[3:]) for name, entry in names.items()}
        streams = {name: torch.empty(shapes[name], dtype=TORCH_DTYPES[entry.dtype], device="cpu") for name, entry in names.items()}
    else:
        (stored,) = side.stored_streams()
        streams = {name: stored[name] for name in names}
    return {**streams, "tail": side.tail} if side.tail.shape[2] else streams


def build_side(
    header: Header, layer_index: int, name: str, entry: SideEntry, tensors: dict[str, torch.Tensor], device: torch.device
) -> Side:
    """Create the keys ("k") or values ("v") of layer ``layer_index`` from the ``tensors`` that ``entry`` describes."""
    codec = header.codecs[entry.codec]
    tail = tensors.pop("tail", None)
    if tail is None:
        tail = torch.empty(entry.batch, entry.heads, 0, codec.dim, dtype=TORCH_DTYPES[DTYPES[entry.tail_dtype]], device=device)
    runs = PackedRuns((Stretch(codec, numpy.cumsum(entry.runs, dtype=numpy.int64), tensors),) if entry.runs else ())
    return Side(with_encoder_options(codec, header.recipe, layer_index, len(header.layers), name), runs, tail, entry.window)


def build_layer(header: Header, layer_index: int, sides: Mapping[str, Side], states: Mapping[str, torch.Tensor]) -> Layer:
    """Create layer ``layer_index``.

    ``sides`` and ``states`` must either contain everything that the header lists for the layer, or be empty.
    """
    skipped = header.starts[layer_index] - header.start if sides else 0
    return Layer(sides.get("k"), sides.get("v"), skipped=skipped, states=MappingProxyType(dict(states)))


def build_cache(header: Header, layers: Iterable[Layer]) -> Cache:
    model = MappingProxyType(dict(header.model))
    if not header.ignorable:
        return Cache(tuple(layers), header.recipe, model, header.start)
    inputs = Inputs.from_features(header.ignorable, header.hidden, header.min_batch, start=header.start, tokens=header.tokens)
    if inputs is not None:
        inputs = replace(inputs, first=header.start)
    metadata = MappingProxyType(from_bytes(header.ignorable.get(FEATURE, b"")))
    return Cache(tuple(layers), header.recipe, model, header.start, inputs, metadata, position_offsets=header.offsets)


_CLAUSE = re.compile(r"(?:layers=([-0-9,]{1,4096}):)?(k|v|kv)=([a-z_]{1,32})(?::(.*))?", re.DOTALL)
_ITEM = re.compile(r"(-?[0-9]{1,9})(?:-(-?[0-9]{1,9}))?")

ENCODER_OPTIONS = {
    codec_id: frozenset(
        field.name
        for field in fields(codec)  # type: ignore[arg-type]
        if not field.metadata.get("stored", True) and field.metadata.get("steers", True)
    )
    for codec_id, codec in CODECS.items()
}
"""Names of options that affect only the encoder, by codec id."""

_NAMED = {name: preset.recipe for name, preset in (PUBLISHED | ADDITIONS).items()} | RECORDED

_WORDS = (raw_clause.PREFIX, *(f"{name}=" for name in sorted(frozenset(RawPositions.words).union(*ENCODER_OPTIONS.values()))))


def with_encoder_options(codec: Codec, recipe: str, layer: int, layers: int, side: str) -> Codec:
    """Add to ``codec``, from a header, the encoder options that ``recipe`` sets for the keys ("k") or values ("v") of one layer.

    Returns the codec unchanged if the text is not a valid recipe or selects another codec. The file format allows both.
    """
    key = recipe, layer, layers, side
    if key not in codec.derived_values:
        codec.derived_values[key] = _apply_options(codec, recipe, layer, layers, side)
    created: Codec = codec.derived_values[key]
    return created


def _apply_options(codec: Codec, recipe: str, layer: int, layers: int, side: str) -> Codec:
    options = _codec_options(recipe, layer, layers, side, codec.id)
    words = {name: value for name, value in options.items() if name in ENCODER_OPTIONS.get(codec.id, ())}
    if words:
        with contextlib.suppress(InvalidParameter):
            codec = codec.with_plain_codec(replace(codec.without_sidecars, **words))  # type: ignore[type-var]
    if isinstance(codec, CodecWithSidecars) and not options.keys().isdisjoint(RawPositions.words):
        with contextlib.suppress(InvalidParameter):
            raw = RawPositions.from_options(codec.dim, side, Options(codec.id, options))
            # Equality ignores the options that select tokens, so this replaces the stored sidecar.
            if raw is not None and raw in codec.sidecars:
                codec = codec.with_sidecar(raw)
    return codec


@lru_cache(maxsize=1024)
def _codec_options(recipe: str, layer: int, layers: int, side: str, codec_id: str) -> dict[str, str]:
    """Return the codec options for the keys or values of one layer. The result is empty if the recipe selects a different codec."""
    result: dict[str, str] = {}
    for rule in _rules(recipe):
        if side in rule.sides and rule.covers(layer, layers):
            result = dict(rule.words) if rule.codec_id == codec_id else {}
    return result


@lru_cache(maxsize=16)
def _rules(recipe: str) -> tuple[Rule, ...]:
    """Return the rules of all clauses, with presets expanded. Options are not validated.

    The result is empty if no clause has encoder options.
    """
    clauses: list[str] = []
    for text in recipe.split(";"):
        clauses += _NAMED.get(text.strip(), text.strip()).split(";")
    if not any(word in clause for clause in clauses for word in _WORDS):
        return ()
    raw = next((_raw_options(clause) for clause in reversed(clauses) if clause.startswith(raw_clause.PREFIX)), "")
    rules = []
    for match in filter(None, map(_CLAUSE.fullmatch, clauses)):
        ranges = filter(None, map(_ITEM.fullmatch, match[1].split(","))) if match[1] else None
        items = None if ranges is None else tuple((int(item[1]), int(item[2] or item[1])) for item in ranges)
        words = tuple(option.partition("=")[::2] for option in _add_raw_options(match[4] or "", raw).split(","))
        rules.append(Rule(match[2], match[3], words, items, match[0]))
    return tuple(rules)


def _raw_options(clause: str) -> str:
    """Return the codec options that a ``raw=`` clause sets, or an empty string if the clause is invalid."""
    try:
        return ",".join(f"{name}={value}" for name, value in raw_clause.parse_raw_clause(clause).items())
    except InvalidParameter:
        return ""


def _add_raw_options(options: str, raw: str) -> str:
    """Add ``raw``, the options for raw tokens, to the options of a codec, unless the codec already sets such options."""
    has_own = any(option.partition("=")[0] in RawPositions.words for option in options.split(","))
    return ",".join(part for part in (options, "" if has_own else raw) if part)
