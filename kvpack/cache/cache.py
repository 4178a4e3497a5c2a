"""Packed caches (``Cache``), with one ``Layer`` per model layer, and ``concat``, which joins caches of consecutive tokens.

Caches, layers, sides and packed runs are immutable. Slicing, appending and joining return new objects that share the packed bytes. Copying
returns the same object. Objects compare by identity.
"""

from __future__ import annotations

import operator
import os
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, SupportsIndex, overload

import numpy
import torch

from kvpack.coding.encoding import RAW_NAMES, STATE_DTYPES, Progress
from kvpack.coding.recipes import Recipe, parse_recipe
from kvpack.coding.token_errors import collect_poor_fits, warn_of_poor_fits
from kvpack.file import container, layer_positions, layer_states, position_offsets
from kvpack.file.header import Contents, LayerEntry, SideEntry, list_features
from kvpack.file.inputs import Inputs, join_inputs
from kvpack.file.layer_states import StateEntry
from kvpack.file.metadata import FEATURE, Value, to_bytes
from kvpack.formats.arguments import as_integer, check_callback, checked_device, prefix_errors
from kvpack.formats.errors import InvalidParameter, InvalidType, NotConsecutive, OutOfBounds

from .conversion import convert_layers
from .layer import Layer, Pair, slice_layer
from .packed_objects import PackedObject, explain_errors
from .side import row_indices
from .states import States, StatesAt, collect_states, select_states, with_states

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from kvpack.formats.base import Codec

    from .side import Rows, Side


@explain_errors
@dataclass(frozen=True, eq=False, repr=False)
class Cache(PackedObject):
    """A packed KV cache: one Layer per model layer, with a record of the inputs that the values were computed from.

    ``cache[i]`` is layer i, and ``cache[:, a:b]`` contains tokens ``[a, b)`` of every layer. A cache is immutable: every method returns a
    new one that shares the packed bytes. The cache covers positions ``[start, stop)``, and layer i positions ``[start + layer.skipped,
    start + layer.seen_tokens)``.

    Args:
        layers: The layers in order.
        recipe: Canonical text of the recipe.
        model: Fields that identify the model.
        start: Position of the first token.
        inputs: The inputs from which the values were computed, or None if unknown.
        metadata: Strings and numbers that the caller attached, by name. Slices and conversions keep them. ``concat`` keeps the first
            cache's metadata.

    Raises:
        InvalidParameter: The inputs do not match the cache's positions or number of sequences, or a layer's ``skipped`` is negative (or
            not 0 in a layer without keys and values).

    >>> cache = kvpack.pack(past, "octopus-3")
    >>> cache.tokens, len(cache), cache[:, :32].tokens
    (64, 2, 32)
    >>> k, v = cache[0].unpack(torch.float32)
    >>> k.shape
    torch.Size([1, 2, 64, 64])
    """

    layers: tuple[Layer, ...]
    recipe: str
    model: Mapping[str, str] = field(default_factory=partial(MappingProxyType, {}))
    start: int = 0
    inputs: Inputs | None = None
    metadata: Mapping[str, Value] = field(default_factory=partial(MappingProxyType, {}))
    computed: int = 0
    """Number of tokens in the longest cache from which this one was sliced, or 0 if ``inputs`` is set. Files do not store it."""
    position_offsets: tuple[int, ...] | None = None
    """For each sequence, the rotary position minus the token index after the last token, or None if unknown.

    It is nonzero for multidimensional positions, because an image then has fewer positions than tokens.
    """
    states_at: StatesAt = field(default_factory=partial(MappingProxyType, {}))
    """States of all layers at earlier positions, by position. Slices may end at these positions, and stores save these states.

    Files contain only the states after the last token.
    """

    def __post_init__(self) -> None:
        for number, layer in enumerate(self.layers):
            if layer.skipped and (layer.skipped < 0 or not layer.sides):
                raise InvalidParameter(
                    f"layers[{number}].skipped is {layer.skipped}, expected at least 0, and exactly 0 for a layer without keys and values"
                )
        if self.inputs is not None and self.inputs.first not in (None, self.start):
            raise InvalidParameter(
                f"the cache starts at position {self.start}, but its inputs start at position {self.inputs.first}: pass inputs= "
                f"that start at position {self.start}, or inputs=None"
            )
        rows = () if self.inputs is None else self.inputs.rows
        if rows and (batch := self._batch()) and len(rows) != batch:
            raise InvalidParameter(
                f"the cache has {batch} sequences, but its inputs have token ids for {len(rows)}: pass inputs= with token ids for every "
                "sequence, in order, or inputs=None"
            )
        if self.inputs is not None:
            object.__setattr__(self, "inputs", self.inputs.with_missing_ids(self.start, self.stop))

    def __repr__(self) -> str:
        ranges = {self.positions(number) for number, layer in enumerate(self) if layer.sides} - {(self.start, self.stop)}
        others = "".join(f", some layers [{first}:{last}]" for first, last in sorted(ranges))
        return f"Cache({self.recipe!r}, {len(self)} layers, tokens [{self.start}:{self.stop}]{others}, model {dict(self.model)})"

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[Layer]:
        return iter(self.layers)

    @overload
    def __getitem__(self, index: SupportsIndex) -> Layer: ...
    @overload
    def __getitem__(self, index: tuple[slice, slice]) -> Cache: ...
    def __getitem__(self, index: SupportsIndex | tuple[slice, slice]) -> Layer | Cache:
        if isinstance(index, SupportsIndex) and not isinstance(index, type):
            index = as_integer(index, "a layer index")
            if not -len(self) <= index < len(self):
                raise OutOfBounds(f"layer {index} is out of range: the cache has {len(self)} layers")
            return self.layers[index]
        match index:
            case (
                slice(start=None, stop=None, step=None),
                slice(start=SupportsIndex() | None as start, stop=SupportsIndex() | None as stop, step=None | 1),
            ):
                return self._slice(
                    0 if start is None else as_integer(start, "start"),
                    self.tokens if stop is None else as_integer(stop, "stop"),
                )
        raise OutOfBounds(f"cache[{index!r:.80}]: index a cache as cache[layer] or cache[:, start:stop]")

    @property
    def tokens(self) -> int:
        """Number of tokens that the cache covers, including tokens that sliding windows have dropped."""
        return max((layer.seen_tokens for layer in self.layers), default=0)

    @property
    def token_ids(self) -> torch.Tensor:
        """Known ids of each sequence's first tokens, int64 ``[batch, token]`` on the CPU, or ``[batch, 0]`` if none are known.

        If layers have different numbers of sequences, ``batch`` is the smallest. It is 0 for a cache without keys, values and states.
        """
        known_ids = self.inputs.known_ids if self.inputs is not None else (b"",)
        ids = numpy.stack([numpy.frombuffer(row, "<u4") for row in known_ids]).astype(numpy.int64)
        return torch.from_numpy(ids).expand(self._batch(), -1)

    def _batch(self) -> int:
        """Return the smallest number of sequences in any layer, or 0 for an empty cache. Files store this many rows of token ids."""
        sides = (side.batch for layer in self.layers for side in layer.sides.values())
        states = (state.shape[0] for layer in self.layers for state in layer.states.values())
        return min((*sides, *states), default=0)

    @property
    def stop(self) -> int:
        """Position after the last token."""
        return self.start + self.tokens

    def positions(self, layer_index: int) -> tuple[int, int]:
        """Return the half-open range of token positions covered by layer ``layer_index``."""
        layer = self[as_integer(layer_index, "layer_index")]
        return self.start + layer.skipped, self.start + layer.seen_tokens

    def check_ends(self) -> None:
        """Raise NotConsecutive unless every layer ends at ``stop``, because otherwise no tokens can follow the cache."""
        tokens = self.tokens
        for number, layer in enumerate(self.layers):
            if layer.sides and layer.seen_tokens != tokens:
                raise NotConsecutive(
                    f"layers[{number}] ends at position {self.start + layer.seen_tokens}, but the cache ends at {self.stop}: "
                    "use a cache whose layers all end at the same token"
                )

    @property
    def values(self) -> int:
        """Number of key, value and state elements in all layers."""
        sides = sum(side.batch * side.heads * side.tokens * side.dim for layer in self.layers for side in layer.sides.values())
        return sides + sum(state.numel() for layer in self.layers for state in layer.states.values())

    @property
    def contents(self) -> Contents:
        return build_contents(self.layers, self.recipe, self.model, self.start, self.inputs, self.metadata, self.position_offsets)

    @cached_property
    def nbytes(self) -> int:
        """Size in bytes of the file that ``save`` writes without compression, including header and padding."""
        return container.file_size(self.contents)

    @property
    def bits_per_value(self) -> float:
        """File size (``nbytes``) in bits per value, or 0 for an empty cache."""
        return 8 * self.nbytes / self.values if self.values else 0.0

    @property
    def nominal_bits(self) -> float:
        """Average bits per value as counted in the codecs' papers, without file overhead."""
        sides = [side for layer in self.layers for side in layer.sides.values()]
        weights = [side.batch * side.heads * side.tokens * side.dim for side in sides]
        total = sum(weights)
        return sum(side.codec.nominal_bits * weight for side, weight in zip(sides, weights, strict=True)) / total if total else 0.0

    def _slice(self, start: int, stop: int) -> Cache:
        """Return tokens ``[start, stop)`` of every layer, counted from the cache's first token. Packed bytes are shared.

        Raises OutOfBounds if a layer lacks some of the tokens or its states after them, or if ``start`` is inside a token group. The whole
        range can always be sliced.
        """
        if not 0 <= start <= stop <= self.tokens:
            raise OutOfBounds(f"tokens [{start}:{stop}] are out of range: the cache has {self.tokens} tokens")
        source, states = self.layers, None
        if stop != self.tokens and (states := self.states_at.get(self.start + stop)) is not None:
            source = without_states(self).layers
        layers: Sequence[Layer] = [
            slice_layer(layer, number, (start, stop), self.start, self.tokens) for number, layer in enumerate(source)
        ]
        if states is not None:
            layers = with_states(layers, states)
        states_at = {position: layer_states for position, layer_states in self.states_at.items() if start < position - self.start < stop}
        inputs = None if self.inputs is None else self.inputs.slice(start, stop, self.start)
        computed = max(self.computed, self.tokens) if inputs is None else 0
        offsets = self.position_offsets if stop == self.tokens else None
        return replace(
            self,
            layers=tuple(layers),
            start=self.start + start,
            inputs=inputs,
            computed=computed,
            position_offsets=offsets,
            states_at=MappingProxyType(states_at),
        )

    def select(self, indices: Rows) -> Cache:
        """Return a cache with the sequences at ``indices`` of the batch, in that order. Indices may repeat. Codes are copied, not decoded.

        ``indices`` is a list of integers or an integer tensor ``[row]``. Raises OutOfBounds if a layer lacks one of the sequences, and
        InvalidParameter for any other kind of ``indices``.
        """
        rows = row_indices(indices)
        layers = []
        for number, layer in enumerate(self.layers):
            with prefix_errors(f"layers[{number}]", OutOfBounds):
                layers.append(layer.select(rows))
        inputs = None if self.inputs is None else self.inputs.select(rows, self.start)
        offsets = None if self.position_offsets is None else tuple(self.position_offsets[row] for row in rows)
        states_at = MappingProxyType({position: select_states(states, rows) for position, states in self.states_at.items()})
        return replace(self, layers=tuple(layers), inputs=inputs, position_offsets=offsets, states_at=states_at)

    def append(self, pairs: Sequence[Pair]) -> Cache:
        """Return a cache with new tokens appended. ``pairs`` contains (k, v) for each layer. Packed tokens are not encoded again.

        Raises InvalidParameter, InvalidType or ValueTooLarge if the cache cannot store the values, and NotConsecutive if a layer ends
        before the cache does.
        """
        if not isinstance(pairs, list | tuple) or not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs):
            raise InvalidParameter("append needs a list with one (k, v) per layer, such as [(k, v)] for a cache with one layer")
        if len(pairs) != len(self):
            raise InvalidParameter(f"append got {len(pairs)} layers, but the cache has {len(self)}: pass one (k, v) per layer")
        self.check_ends()
        with collect_poor_fits() as poor_fits:
            layers = tuple(
                layer.append(k, v, f"layers[{i}]", self.start) for i, (layer, (k, v)) in enumerate(zip(self.layers, pairs, strict=True))
            )
        warn_of_poor_fits(poor_fits)
        added = {layer.seen_tokens - self.tokens: number for number, layer in reversed([*enumerate(layers)]) if layer.sides}
        if len(added) > 1:
            counts = " and ".join(f"layers[{number}] {count}" for count, number in sorted(added.items(), key=operator.itemgetter(1)))
            raise InvalidParameter(f"append got different numbers of tokens ({counts}): pass the same number of tokens for every layer")
        return replace(self, layers=layers)

    def convert(
        self,
        recipe: str | os.PathLike[str] | Recipe,
        *,
        progress: Progress | None = None,
    ) -> Cache:
        """Return the cache re-encoded with ``recipe``, in any form that ``pack`` accepts.

        Keys and values that already have the right codec share their packed bytes. A raw tail is encoded as ``pack`` would encode it.
        Raises InvalidParameter if a codec does not support a layer's head dim or the basis belongs to another model, MissingFile if the
        recipe file does not exist, and MissingBasis.
        """
        check_callback(progress)
        parsed = parse_recipe(recipe)
        if parsed.basis is not None:
            parsed.basis.check_model(self.model)
        with collect_poor_fits() as poor_fits:
            layers, text = convert_layers(self.layers, parsed, self.start, progress)
        warn_of_poor_fits(poor_fits)
        return replace(self, layers=layers, recipe=text)

    def unpack(self, dtype: torch.dtype = torch.bfloat16) -> list[Pair]:
        """Decode all layers to dense (k, v) pairs, each ``[batch, kv_head, token, dim]`` of ``dtype``. Absent keys or values are None."""
        return [layer.unpack(dtype) for layer in self.layers]

    def to(self, device: torch.device | str) -> Cache:
        """Return the cache with all buffers on ``device``. Raises InvalidParameter if PyTorch cannot use the device."""
        device = checked_device(device)
        return replace(self, layers=tuple(layer.to(device) for layer in self.layers))


def without_states(cache: Cache) -> Cache:
    return replace(cache, layers=with_states(cache.layers, ({},) * len(cache)), states_at=MappingProxyType({}))


def all_states(cache: Cache) -> dict[int, States]:
    """Return the states of ``cache`` by position, including the states after its last token."""
    last = {cache.stop: collect_states(cache)} if any(layer.states for layer in cache) else {}
    return {**{position: states for position, states in cache.states_at.items() if cache.start < position < cache.stop}, **last}


def concat(caches: Sequence[Cache]) -> Cache:
    """Join caches of consecutive tokens. The joined cache shares the packed bytes, and nothing is encoded again.

    Args:
        caches: At least one cache, in order of position.

    Returns:
        One cache of all tokens.

    Raises:
        InvalidParameter: The caches differ in model, layers, codec or shape, tokens are missing between two caches, or a cache was
            computed after different token ids.
        InvalidType: An element is not a packed cache.

    >>> cache = kvpack.pack(past, "octopus-3")
    >>> kvpack.concat([cache[:, :32], cache[:, 32:]]).tokens
    64
    """
    argument: Any = caches
    if not isinstance(argument, list | tuple):
        raise InvalidType(f"concat needs a list of packed caches, but got a {type(argument).__name__}: pass [cache, ...]")
    for number, cache in enumerate(argument):
        if not isinstance(cache, Cache):
            remedy = "create one with kvpack.pack, or read one with kvpack.load"
            raise InvalidType(f"concat: caches[{number}] is a {type(cache).__name__}, expected a packed cache: {remedy}")
    if not caches:
        raise NotConsecutive("concat got no caches: pass at least one")
    first, tokens = caches[0], [cache.tokens for cache in caches]
    stop, model = first.start + tokens[0], dict(first.model)
    if len(caches) > 1:
        first.check_ends()
    for other, count in zip(caches[1:], tokens[1:], strict=True):
        if stop != other.start:
            raise NotConsecutive(
                f"tokens [{first.start}:{stop}] are followed by tokens [{other.start}:{other.start + count}]: pass caches of consecutive "
                "tokens, in order"
            )
        if model != dict(other.model) or len(first) != len(other):
            raise NotConsecutive(
                f"a cache with {len(first)} layers for the model {model} cannot be joined with a cache with {len(other)} layers for "
                f"{dict(other.model)}: join only caches of the same model"
            )
        other.check_ends()
        for number, layer in enumerate(other):
            if layer.skipped:
                raise NotConsecutive(
                    f"layers[{number}] of the cache that starts at position {other.start} has only {layer.tokens} of its {count} tokens: "
                    "join only caches whose layers have all tokens"
                )
        stop += count
    layers = tuple(_join_layers(number, [cache.layers[number] for cache in caches]) for number in range(len(first)))
    inputs = join_inputs([(cache.inputs, count) for cache, count in zip(caches, tokens, strict=True)], first.start)
    computed, offsets = max(cache.computed for cache in caches), caches[-1].position_offsets
    states_at = {
        position: layer_states for cache in caches for position, layer_states in all_states(cache).items() if position != caches[-1].stop
    }
    states = MappingProxyType(states_at)
    return replace(first, layers=layers, inputs=inputs, computed=computed, position_offsets=offsets, states_at=states)


def _join_layers(layer_index: int, layers: Sequence[Layer]) -> Layer:
    for first, second in pairwise(layers):
        if (first.k is None, first.v is None) != (second.k is None, second.v is None):
            raise NotConsecutive(
                f"layers[{layer_index}] has {list(first.sides)} in one cache, but {list(second.sides)} in the next: join caches with the "
                "same keys and values in every layer"
            )
        if first.states.keys() != second.states.keys():
            raise NotConsecutive(
                f"layers[{layer_index}] has the states {list(first.states)} in one cache, but {list(second.states)} in the next: join "
                "caches with the same states"
            )
    with prefix_errors(f"layers[{layer_index}]", NotConsecutive):
        k, v = [layer.k for layer in layers if layer.k], [layer.v for layer in layers if layer.v]
        joined_k, joined_v = k[0].concat(*k[1:]) if k else None, v[0].concat(*v[1:]) if v else None
        return replace(layers[0], k=joined_k, v=joined_v, states=layers[-1].states)


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
        entries = {name: side_entry(side, codecs.setdefault(side.codec, len(codecs))) for name, side in layer.sides.items()}
        layer_entries.append(LayerEntry(entries.get("k"), entries.get("v")))
    required, ignorable = layer_positions.list_features(start, [start + layer.skipped for layer in layers])
    states = [
        StateEntry(number, name, STATE_DTYPES[state.dtype], tuple(state.shape))
        for number, layer in enumerate(layers)
        for name, state in layer.states.items()
    ]
    state_features, state_data = layer_states.list_features(states)
    offset_features, offset_data = position_offsets.list_features(offsets)
    required = (*required, *state_features, *offset_features, *list_features(codecs))
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


def side_entry(side: Side, codec: int) -> SideEntry:
    rows = {name: 0 for name, layout in side.codec.row_layouts.items() if layout.per == "entry"}
    for streams in side.stored_streams():
        for name in rows:
            rows[name] += streams[name].shape[2]
    tail, dtype = side.tail.shape[2], RAW_NAMES[side.tail.dtype]
    return SideEntry(codec, side.batch, side.heads, side.merged_runs(), tail, dtype, side.window, tuple(rows.items()))


def check_packed(value: Any, call: str) -> None:
    """Raise InvalidType unless ``value`` is a Cache. The message suggests ``call``, with ``{}`` in place of the cache."""
    if isinstance(value, Cache):
        return
    if isinstance(getattr(value, "packed", None), Cache):
        correct_call = call.format("cache.packed")
    elif isinstance(value, (str, os.PathLike)):
        correct_call = call.format(f"kvpack.load({os.fspath(value)!r})")
    elif isinstance(value, (list, tuple)) or hasattr(value, "layers"):
        correct_call = call.format("kvpack.pack(past_key_values, recipe)")
    else:
        raise InvalidType(f"a {type(value).__name__} is not a packed cache: create one with kvpack.pack, or read one with kvpack.load")
    raise InvalidType(f"a {type(value).__name__} is not a packed cache: use {correct_call}")
