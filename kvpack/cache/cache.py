"""Cache: the keys and values of a model, one Layer per model layer; and concat, which joins caches of consecutive tokens.

A cache and its layers, sides and pages are immutable: slice, append and concat return new objects that share the packed bytes,
and a copy is the same object. Equality is identity.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn, SupportsIndex, overload

import numpy
import torch

from kvpack.coding import shared_scales
from kvpack.coding.recipes import parse_recipe
from kvpack.file import container
from kvpack.file.inputs import joined
from kvpack.formats.arguments import check_callback
from kvpack.formats.errors import InvalidParameter, InvalidType, NotConsecutive, OutOfBounds

from .arguments import checked_device, explained, integer, refuse_pickle
from .contents import contents_of
from .conversion import converted
from .layer import Layer, sliced
from .rows import row_numbers
from .states import selected, states_of, with_states

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping, Sequence

    from kvpack.coding.encoding import Progress
    from kvpack.coding.recipes import Recipe
    from kvpack.file.header import Contents
    from kvpack.file.inputs import Inputs
    from kvpack.file.metadata import Value

    from .layer import Pair
    from .side import Rows
    from .states import States, StatesAt


@explained
@dataclass(frozen=True, eq=False, repr=False)
class Cache:
    """A packed KV cache: one Layer per model layer, the recipe's text, the model's identity, the first token's position.

    ``cache[i]`` is a layer, ``cache[:, a:b]`` the tokens ``[a, b)`` of every layer. The cache's range is ``start`` to ``stop``;
    a layer holds the positions ``start + layer.skipped`` to ``start + layer.seen``. ``inputs`` says what the tokens were
    computed from; None means unknown. ``metadata`` holds the caller's own texts and numbers by name: parts and conversions of a
    cache keep it, ``concat`` keeps that of the first.
    """

    layers: tuple[Layer, ...]
    recipe: str
    model: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    start: int = 0
    inputs: Inputs | None = None
    metadata: Mapping[str, Value] = field(default_factory=lambda: MappingProxyType({}))
    computed: int = 0
    """The most tokens of a cache that this one was cut from, where ``inputs`` is None; a file does not hold it."""
    position_offsets: tuple[int, ...] | None = None
    """For each sequence, what is added to the number of a token after the range to give its rotary position; None if it is not known.

    A model with positions of several dimensions gives images fewer positions than tokens.
    """
    states_at: StatesAt = field(default_factory=lambda: MappingProxyType({}))
    """The states of all layers at positions inside the range, by position: a slice may end there, and a store keeps them. A file holds
    only the states after the last token."""

    def __post_init__(self) -> None:
        if self.inputs is not None and self.inputs.first not in (None, self.start):
            raise InvalidParameter(
                f"the cache starts at position {self.start}, and its inputs are those of tokens from position {self.inputs.first} on: give "
                f"inputs= of the tokens from position {self.start} on, or inputs=None"
            )

    def __copy__(self) -> Cache:
        return self

    def __deepcopy__(self, memo: object) -> Cache:
        return self

    def __reduce__(self) -> NoReturn:
        refuse_pickle(self)

    def __repr__(self) -> str:
        held = {self.positions(number) for number, layer in enumerate(self) if layer.sides} - {(self.start, self.stop)}
        others = "".join(f", some layers {first} to {last}" for first, last in sorted(held))
        return f"Cache({self.recipe!r}, {len(self)} layers, tokens {self.start} to {self.stop}{others}, model {dict(self.model)})"

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
            index = integer(index, "a layer's number")
            if not -len(self) <= index < len(self):
                raise OutOfBounds(f"layer {index} is out of range: the cache has {len(self)} layers")
            return self.layers[index]
        match index:
            case (
                slice(start=None, stop=None, step=None),
                slice(start=SupportsIndex() | None as start, stop=SupportsIndex() | None as stop, step=None | 1),
            ):
                return self._slice(
                    0 if start is None else integer(start, "start"),
                    self.tokens if stop is None else integer(stop, "stop"),
                )
        raise OutOfBounds(f"cache[{index!r:.80}]: a cache is indexed as cache[layer] or cache[:, start:stop]")

    @property
    def tokens(self) -> int:
        """The number of tokens in the cache's range: the most that any layer has seen."""
        return max((layer.seen for layer in self.layers), default=0)

    @property
    def token_ids(self) -> torch.Tensor:
        """The known ids of the first tokens of each sequence, int64 ``[batch, token]`` on the CPU; no tokens where none are known."""
        known = self.inputs.known if self.inputs is not None else (b"",)
        batch = next((side.batch for layer in self.layers for side in layer.sides.values()), 1)
        ids = numpy.stack([numpy.frombuffer(row, "<u4") for row in known]).astype(numpy.int64)
        return torch.from_numpy(ids).expand(batch, -1)

    @property
    def stop(self) -> int:
        """The position after the last token."""
        return self.start + self.tokens

    def positions(self, number: int) -> tuple[int, int]:
        """The first position that layer ``number`` holds, and the position after its last."""
        layer = self[integer(number, "number")]
        return self.start + layer.skipped, self.start + layer.seen

    def check_ends(self) -> None:
        """Raise NotConsecutive, naming the layer, if a layer ends before ``stop``: no token can follow it."""
        tokens = self.tokens
        for number, layer in enumerate(self.layers):
            if layer.sides and layer.seen != tokens:
                raise NotConsecutive(
                    f"layers[{number}] ends at position {self.start + layer.seen} and the cache at {self.stop}: "
                    "new tokens cannot follow both, so the cache cannot be continued"
                )

    @property
    def values(self) -> int:
        """The number of key and value elements held, over all layers, and of elements of states."""
        sides = sum(side.batch * side.heads * side.tokens * side.dim for layer in self.layers for side in layer.sides.values())
        return sides + sum(state.numel() for layer in self.layers for state in layer.states.values())

    @property
    def contents(self) -> Contents:
        """The header contents for a file of this cache."""
        return contents_of(self.layers, self.recipe, self.model, self.start, self.inputs, self.metadata, self.position_offsets)

    @cached_property
    def nbytes(self) -> int:
        """The bytes that ``save`` writes without compression: codes, scales, tables, header and padding."""
        return container.file_size(self.contents)

    @property
    def bits_per_value(self) -> float:
        """Bits per value in the file, counting every byte (0 for an empty cache)."""
        return 8 * self.nbytes / self.values if self.values else 0.0

    @property
    def nominal_bits(self) -> float:
        """Bits per value as the source papers count them, averaged over the sides."""
        sides = [side for layer in self.layers for side in layer.sides.values()]
        weights = [side.batch * side.heads * side.tokens * side.dim for side in sides]
        total = sum(weights)
        return sum(side.codec.nominal_bits * weight for side, weight in zip(sides, weights, strict=True)) / total if total else 0.0

    def _slice(self, start: int, stop: int) -> Cache:
        """Tokens ``[start, stop)`` of every layer, counted from the cache's first token; the packed bytes are shared.

        Raises OutOfBounds when a layer does not hold all of them, when ``start`` is inside tokens that a codec encoded together, and
        when layers keep states and none are known at ``stop`` (``states_at``). A slice of the whole range always succeeds.
        """
        if not 0 <= start <= stop <= self.tokens:
            raise OutOfBounds(f"tokens {start} to {stop} were requested from a cache of {self.tokens}")
        held, states = self.layers, None
        if stop != self.tokens and (states := self.states_at.get(self.start + stop)) is not None:
            held = without_states(self).layers
        layers: Sequence[Layer] = [sliced(layer, number, (start, stop), self.start, self.tokens) for number, layer in enumerate(held)]
        if states is not None:
            layers = with_states(layers, states)
        states_at = {position: own for position, own in self.states_at.items() if start < position - self.start < stop}
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
        """Select the rows ``indices`` of the batch, in that order, repeats allowed; codes are copied, never decoded.

        ``indices`` is a list of integers or an integer tensor ``[row]``. Raises OutOfBounds, which names the layer, for a row
        that the batch does not have, and InvalidParameter for anything but a list of integers.
        """
        rows = row_numbers(indices)
        layers = []
        for number, layer in enumerate(self.layers):
            try:
                layers.append(layer.select(rows))
            except OutOfBounds as error:
                raise OutOfBounds(f"layers[{number}]: {error}") from None
        inputs = None if self.inputs is None else self.inputs.select(rows, self.start)
        offsets = None if self.position_offsets is None else tuple(self.position_offsets[row] for row in rows)
        states_at = MappingProxyType({position: selected(own, rows) for position, own in self.states_at.items()})
        return replace(self, layers=tuple(layers), inputs=inputs, position_offsets=offsets, states_at=states_at)

    def append(self, pairs: Sequence[Pair]) -> Cache:
        """Add new tokens, one (k, v) per layer; packed tokens stay as they are.

        Raises InvalidParameter, InvalidType or OutOfRange, and NotConsecutive when a layer ends before the cache; the cache
        itself never changes.
        """
        if not isinstance(pairs, list | tuple) or not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs):
            raise InvalidParameter("append takes a list of (k, v), one pair for each layer, such as [(k, v)] for a cache of one layer")
        if len(pairs) != len(self):
            raise InvalidParameter(f"{len(pairs)} layers were appended to a cache of {len(self)}")
        self.check_ends()
        with shared_scales.collected() as misfits:
            layers = tuple(
                layer.append(k, v, f"layers[{i}]", self.start) for i, (layer, (k, v)) in enumerate(zip(self.layers, pairs, strict=True))
            )
        shared_scales.warn(misfits)
        added = {layer.seen - self.tokens: number for number, layer in reversed([*enumerate(layers)]) if layer.sides}
        if len(added) > 1:
            counts = " and ".join(f"layers[{number}] {count}" for count, number in sorted(added.items(), key=operator.itemgetter(1)))
            raise InvalidParameter(f"every layer gets the same tokens; {counts} were appended")
        return replace(self, layers=layers)

    def convert(
        self,
        recipe: str | os.PathLike[str] | Recipe,
        *,
        progress: Progress | None = None,
    ) -> Cache:
        """Convert the cache to another recipe, given as for ``pack``. A side with the same codec and window is not changed.

        Raises InvalidParameter, MissingFile for a missing recipe file, MissingBasis, or InvalidParameter when a codec cannot take a
        layer's head dim, and for the basis of another model.
        """
        check_callback(progress)
        parsed = parse_recipe(recipe)
        if parsed.basis is not None:
            parsed.basis.check_model(self.model)
        with shared_scales.collected() as misfits:
            layers, text = converted(self.layers, parsed, self.start, progress)
        shared_scales.warn(misfits)
        return replace(self, layers=layers, recipe=text)

    def unpack(self, dtype: torch.dtype = torch.bfloat16) -> list[Pair]:
        """Decode to one dense (K, V) per layer."""
        return [layer.unpack(dtype) for layer in self.layers]

    def to(self, device: torch.device | str) -> Cache:
        """The cache with every buffer on ``device``. Raises InvalidParameter for an invalid device."""
        device = checked_device(device)
        return replace(self, layers=tuple(layer.to(device) for layer in self.layers))


def without_states(cache: Cache) -> Cache:
    """``cache`` without any states."""
    return replace(cache, layers=with_states(cache.layers, ({},) * len(cache)), states_at=MappingProxyType({}))


def all_states(cache: Cache) -> dict[int, States]:
    """The states of ``cache`` by position, those after its last token among them."""
    own = {cache.stop: states_of(cache)} if any(layer.states for layer in cache) else {}
    return {**{position: states for position, states in cache.states_at.items() if cache.start < position < cache.stop}, **own}


def concat(caches: Sequence[Cache]) -> Cache:
    """Join caches of consecutive tokens; packed bytes are shared, nothing is encoded.

    Raises NotConsecutive when caches differ in model, layers, codec or shape, or leave a gap in a layer.
    """
    given: Any = caches
    if not isinstance(given, list | tuple):
        raise InvalidType(f"concat takes a list of packed caches, found a {type(given).__name__}")
    for number, cache in enumerate(given):
        if not isinstance(cache, Cache):
            made = "kvpack.pack makes one, and kvpack.load reads one"
            raise InvalidType(f"concat: caches[{number}] is a {type(cache).__name__}, expected a packed cache: {made}")
    if not caches:
        raise NotConsecutive("concat got no caches, expected at least one")
    first, tokens = caches[0], [cache.tokens for cache in caches]
    stop, model = first.start + tokens[0], dict(first.model)
    if len(caches) > 1:
        first.check_ends()
    for other, count in zip(caches[1:], tokens[1:], strict=True):
        if stop != other.start:
            raise NotConsecutive(f"tokens {first.start} to {stop} are followed by tokens {other.start} to {other.start + count}")
        if model != dict(other.model) or len(first) != len(other):
            raise NotConsecutive(f"a cache of {len(first)} layers of {model} is followed by {len(other)} layers of {dict(other.model)}")
        other.check_ends()
        for number, layer in enumerate(other):
            if layer.skipped:
                raise NotConsecutive(
                    f"layers[{number}] of the cache from token {other.start} holds {layer.tokens} of its {count} tokens, "
                    f"positions {other.start + layer.skipped} to {other.stop}: those before them would be missing in between"
                )
        stop += count
    layers = tuple(_joined_layers(number, [cache.layers[number] for cache in caches]) for number in range(len(first)))
    inputs = joined([(cache.inputs, count) for cache, count in zip(caches, tokens, strict=True)])
    computed, offsets = max(cache.computed for cache in caches), caches[-1].position_offsets
    states_at = {position: own for cache in caches for position, own in all_states(cache).items() if position != caches[-1].stop}
    states = MappingProxyType(states_at)
    return replace(first, layers=layers, inputs=inputs, computed=computed, position_offsets=offsets, states_at=states)


def _joined_layers(number: int, layers: Sequence[Layer]) -> Layer:
    """Layer ``number`` of consecutive caches. Raises NotConsecutive."""
    for first, second in pairwise(layers):
        if (first.k is None, first.v is None) != (second.k is None, second.v is None):
            raise NotConsecutive(f"layers[{number}] has the sides {list(first.sides)}, then {list(second.sides)}")
        if first.states.keys() != second.states.keys():
            raise NotConsecutive(f"layers[{number}] has the states {list(first.states)}, then {list(second.states)}")
    try:
        k, v = [layer.k for layer in layers if layer.k], [layer.v for layer in layers if layer.v]
        joined_k, joined_v = k[0].concat(*k[1:]) if k else None, v[0].concat(*v[1:]) if v else None
        return replace(layers[0], k=joined_k, v=joined_v, states=layers[-1].states)
    except NotConsecutive as error:
        raise NotConsecutive(f"layers[{number}]: {error}") from None
