"""Conversion of a cache's layers to the contents of a file header."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpack.coding.encoding import RAW_NAMES, STATE_DTYPES
from kvpack.file import layer_positions, layer_states, position_offsets
from kvpack.file.header import Contents, LayerEntry, SideEntry, features_of
from kvpack.file.layer_states import StateEntry
from kvpack.file.metadata import FEATURE, Value, to_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvpack.file.inputs import Inputs
    from kvpack.formats.base import Codec

    from .layer import Layer
    from .side import Side


def build_contents(
    layers: Sequence[Layer],
    recipe: str,
    model: Mapping[str, str],
    start: int,
    inputs: Inputs | None,
    metadata: Mapping[str, Value],
    offsets: Sequence[int] | None,
) -> Contents:
    """Return the header contents of a file that stores ``layers``. ``start`` is the position of the first token."""
    codecs: dict[Codec, int] = {}
    layer_entries = []
    for layer in layers:
        entries = {name: _entry(side, codecs.setdefault(side.codec, len(codecs))) for name, side in layer.sides.items()}
        layer_entries.append(LayerEntry(entries.get("k"), entries.get("v")))
    required, ignorable = layer_positions.features_of(start, [start + layer.skipped for layer in layers])
    states = [
        StateEntry(number, name, STATE_DTYPES[state.dtype], tuple(state.shape))
        for number, layer in enumerate(layers)
        for name, state in layer.states.items()
    ]
    state_features, state_data = layer_states.features_of(states)
    offset_features, offset_data = position_offsets.features_of(offsets)
    required = (*required, *state_features, *offset_features, *features_of(codecs))
    ignorable = ignorable | state_data | offset_data
    if inputs is not None:
        input_features, input_data = inputs.to_features(start)
        required, ignorable = (*required, *input_features), ignorable | input_data
    if metadata:
        ignorable[FEATURE] = to_bytes(metadata)
    return Contents(
        codecs=tuple(codecs),
        layers=tuple(layer_entries),
        model=dict(model),
        recipe=recipe,
        start=start,
        required=tuple(sorted(required)),
        ignorable=ignorable,
    )


def _entry(side: Side, codec: int) -> SideEntry:
    rows = {name: 0 for name, layout in side.codec.row_layouts.items() if layout.per == "entry"}
    for streams in side.stored_streams():
        for name in rows:
            rows[name] += streams[name].shape[2]
    tail, dtype = side.tail.shape[2], RAW_NAMES[side.tail.dtype]
    return SideEntry(codec, side.batch, side.heads, side.merged_runs(), tail, dtype, side.window, tuple(rows.items()))
