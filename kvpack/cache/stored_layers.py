"""Conversion between caches and the tensors in a file."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy
import torch

from kvpack.coding.encoder_options import with_encoder_options
from kvpack.coding.encoding import TORCH_DTYPES
from kvpack.file.inputs import Inputs
from kvpack.file.metadata import FEATURE, from_bytes
from kvpack.formats.raw import DTYPES

from .cache import Cache
from .layer import Layer
from .packed_runs import PackedRuns, Stretch
from .side import Side

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kvpack.file.header import Header, SideEntry


def stored_streams(side: Side) -> dict[str, torch.Tensor]:
    """Return the streams of a merged side by name, as in a file. The stream "tail" contains the raw tail."""
    names = side.codec.layout(side.batch, side.heads, 0)
    if not side.runs:
        # Without a run, a stream with one row per run has no rows.
        shapes = {name: (*entry.shape[:2], 0, *entry.shape[3:]) for name, entry in names.items()}
        streams = {name: torch.empty(shapes[name], dtype=TORCH_DTYPES[entry.dtype], device="cpu") for name, entry in names.items()}
    else:
        (stored,) = side.stored_streams()
        streams = {name: stored[name] for name in names}
    return {**streams, "tail": side.tail} if side.tail.shape[2] else streams


def build_side(header: Header, number: int, name: str, entry: SideEntry, tensors: dict[str, torch.Tensor], device: torch.device) -> Side:
    """Create one side of layer ``number`` from the ``tensors`` that ``entry`` describes. ``name`` is "k" or "v"."""
    codec = header.codecs[entry.codec]
    tail = tensors.pop("tail", None)
    if tail is None:
        tail = torch.empty(entry.batch, entry.heads, 0, codec.dim, dtype=TORCH_DTYPES[DTYPES[entry.tail_dtype]], device=device)
    runs = PackedRuns((Stretch(codec, numpy.cumsum(entry.runs, dtype=numpy.int64), tensors),) if entry.runs else ())
    return Side(with_encoder_options(codec, header.recipe, number, len(header.layers), name), runs, tail, entry.window)


def build_layer(header: Header, number: int, sides: Mapping[str, Side], states: Mapping[str, torch.Tensor]) -> Layer:
    """Create layer ``number``. ``sides`` and ``states`` must contain everything that the header lists for the layer, or be empty."""
    skipped = header.starts[number] - header.start if sides else 0
    return Layer(sides.get("k"), sides.get("v"), skipped=skipped, states=MappingProxyType(dict(states)))


def build_cache(header: Header, layers: Iterable[Layer]) -> Cache:
    model = MappingProxyType(dict(header.model))
    if not header.ignorable:
        return Cache(tuple(layers), header.recipe, model, header.start)
    inputs = Inputs.from_features(header.ignorable, header.hidden, header.batch, start=header.start, tokens=header.tokens)
    if inputs is not None:
        inputs = replace(inputs, first=header.start)
    metadata = MappingProxyType(from_bytes(header.ignorable.get(FEATURE, b"")))
    return Cache(tuple(layers), header.recipe, model, header.start, inputs, metadata, position_offsets=header.offsets)
