"""The objects a packed cache is made of: Cache, Layer, Side, Page.

All are immutable: a slice, an append or a concat gives a new object that shares the packed bytes, and a copy is the object.
Two are equal when they are one.
A side is a list of pages and a raw tail; a page is one run of packed tokens, its streams being plain
arrays ``[batch, kv_head, rows, ...]``, so cutting and joining pages never touches a code.
"""

from __future__ import annotations

import operator
from bisect import bisect_right
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, SupportsIndex

import torch

from kvpack.coding.blocks import caches_of, for_each_block
from kvpack.coding.encoding import RAW_DTYPES, RAW_NAMES, check_finite, encode, is_rounded
from kvpack.coding.modes import own_modes
from kvpack.file.inputs import joined
from kvpack.formats.batch import select
from kvpack.formats.errors import InvalidDtype, InvalidParameter, InvalidShape, NotConsecutive, OutOfBounds
from kvpack.formats.raw import HOLDS, Raw

from .arguments import check_floating, checked_device, integer
from .pages import Page, Pages
from .rows import check_rows, row_numbers

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from kvpack.coding.encoding import Progress
    from kvpack.coding.recipes import Recipe
    from kvpack.file.inputs import Inputs
    from kvpack.formats.base import Codec

    Rows = torch.Tensor | Iterable[SupportsIndex]

Pair = tuple["torch.Tensor | None", "torch.Tensor | None"]

TILE_VALUES = 1 << 19
"""Values decoded at a time on the CPU, and on any device where a page is attended."""


@dataclass(frozen=True, eq=False, repr=False)
class Side:
    """The keys or the values of one layer: packed pages, then a raw tail ``[batch, kv_head, token, dim]``.

    ``window`` is the tail's size at which it is encoded (0: as soon as the codec has a whole group).
    """

    codec: Codec
    pages: Sequence[Page]
    tail: torch.Tensor
    window: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "pages", Pages.of(self.pages))

    def __repr__(self) -> str:
        shape = f"{self.batch} x {self.heads} x {self.tokens} x {self.dim}"
        return f"Side({self.codec.id}, {shape}, {len(self.pages)} pages and a raw tail of {self.tail.shape[2]} tokens)"

    @property
    def batch(self) -> int:
        return self.tail.shape[0]

    @property
    def heads(self) -> int:
        return self.tail.shape[1]

    @property
    def dim(self) -> int:
        return self.codec.dim

    @property
    def device(self) -> torch.device:
        return self.tail.device

    @cached_property
    def packed_tokens(self) -> int:
        """Tokens in pages."""
        return self._pages.tokens

    @property
    def _pages(self) -> Pages:
        assert isinstance(self.pages, Pages)
        return self.pages

    @property
    def tokens(self) -> int:
        """Tokens in pages and tail."""
        return self.packed_tokens + self.tail.shape[2]

    @cached_property
    def boundaries(self) -> list[int]:
        """Token positions where a page or the tail starts or ends, ascending."""
        return [0, *self._pages.ends.tolist(), self.tokens]

    def place(self, start: int, stop: int) -> tuple[Page | None, int]:
        """The page that holds tokens ``[start, stop)``, or None for the tail, and its first token. Raises OutOfBounds."""
        if start >= self.packed_tokens:
            return None, self.packed_tokens
        number = bisect_right(self.boundaries, start, 0, len(self.pages)) - 1
        page, first = self.pages[number], self.boundaries[number]
        if not first <= start <= stop <= first + page.tokens:
            raise OutOfBounds(f"tokens {start} to {stop} are not inside one page: that of the first ends at token {first + page.tokens}")
        return page, first

    def frame(self, start: int, stop: int) -> tuple[torch.Tensor, Page | None]:
        """Tokens ``[start, stop)``, inside one page or the tail, as float32, and the page in whose coded frame they are."""
        page, first = self.place(start, stop)
        if page is None:
            return self.tail[:, :, start - first : stop - first].to(torch.float32), None
        return page.frame(start - first, stop - first), page

    def tiles(self, per_tile: int, edges: Sequence[int] = ()) -> Iterator[tuple[int, int]]:
        """Token ranges of at most ``per_tile`` tokens that cross neither a boundary of this side nor an edge given."""
        marks = sorted({*self.boundaries, *edges})
        for first, last in pairwise(marks):
            for start in range(first, last, per_tile):
                yield start, min(start + per_tile, last)

    def unpack(self, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Decode everything to ``[batch, kv_head, token, dim]`` of ``dtype`` in the original frame, tile by tile.

        Raises InvalidDtype unless ``dtype`` is a floating-point one.
        """
        check_floating(dtype)
        per_tile = tokens_at_once(self.batch * self.heads * self.dim, 128, self.codec.token_group, self.device)

        def unpack_tile(start: int, stop: int) -> None:
            page, first = self.place(start, stop)
            source = self.tail[:, :, start - first : stop - first] if page is None else page.decode(start - first, stop - first)
            result[:, :, start:stop] = source

        with own_modes(self.device):
            result = torch.empty(self.batch, self.heads, self.tokens, self.dim, dtype=dtype, device=self.device)
            for_each_block(unpack_tile, list(self.tiles(per_tile)), self.device)
        return result

    def prefix(self, tokens: int) -> Side:
        """The first ``tokens`` tokens; packed bytes are shared, nothing is decoded."""
        return self.slice(0, tokens)

    def slice(self, start: int, stop: int) -> Side:
        """Tokens ``[start, stop)``; packed bytes are shared, nothing is decoded.

        Raises OutOfBounds for tokens that the side does not hold, and for a start inside a token group.
        """
        start, stop = integer(start, "start"), integer(stop, "stop")
        if not 0 <= start <= stop <= self.tokens:
            raise OutOfBounds(f"tokens {start} to {stop} were asked of a side that holds {self.tokens}")
        try:
            pages = self._pages.slice(start, stop)
        except OutOfBounds as error:
            raise OutOfBounds(f"a slice from token {start} {error}") from None
        tail_start, tail_stop = (max(0, position - self.packed_tokens) for position in (start, stop))
        return replace(self, pages=pages, tail=self.tail[:, :, tail_start:tail_stop])

    def select(self, indices: Rows) -> Side:
        """The rows ``indices`` of the batch in that order, repeats allowed; codes are copied, never decoded.

        Raises OutOfBounds for a row that the batch does not have, InvalidParameter for what is not a list of integers.
        """
        rows = row_numbers(indices)
        check_rows(rows, self.batch)
        if rows == tuple(range(self.batch)):
            return self
        with own_modes(self.device):
            chosen = torch.tensor(rows, dtype=torch.int64, device=self.device)
            pages = self._pages.mapped(self.codec, lambda streams: select(self.codec, streams, chosen))
            return replace(self, pages=pages, tail=self.tail.index_select(0, chosen))

    def append(self, x: torch.Tensor, where: str = "append") -> Side:
        """Add tokens ``[batch, kv_head, token, dim]``: the tail grows, and is encoded in whole groups at ``window``.

        Raises InvalidShape or InvalidDtype when ``x`` does not continue this side, NonFinite, OutOfRange.
        """
        check_tensor(x, where)
        expected = (self.batch, self.heads, x.shape[2], self.dim)
        if tuple(x.shape) != expected:
            raise InvalidShape(f"{where}: shape {list(x.shape)} does not continue a side of shape {list(expected)}")
        if x.device != self.device:
            raise InvalidParameter(
                f"{where}: the values are on {x.device} and the cache is on {self.device}: append x.to({str(self.device)!r})"
            )
        with own_modes(self.device):
            if self.codec.id != "raw":
                # Here and not when the tail is encoded: by then the tokens that came with it could not be told apart.
                check_finite(x, self.tokens, where)
            tail = self._tail_with(x, where)
            unit = self.window or self.codec.token_group
            ready = tail.shape[2] // unit * unit
            if not ready:
                return replace(self, tail=tail)
            before = self.pages[-1].streams if self.pages else None
            streams = encode(self.codec, tail[:, :, :ready], where, before)
            return replace(self, pages=self._pages.added(Page(self.codec, ready, streams)), tail=tail[:, :, ready:].clone())

    def _tail_with(self, x: torch.Tensor, where: str) -> torch.Tensor:
        """The tail, then ``x``, exactly: in the tail's dtype where that holds ``x``, else in one that holds both.

        Raises InvalidDtype where the pages are raw, have kept every value so far, and would not keep those of ``x``.
        """
        narrow = x.to(self.tail.dtype)
        if not is_rounded(x, narrow):
            return torch.cat([self.tail, narrow], 2)
        if isinstance(self.codec, Raw):
            held = HOLDS[self.codec.dtype]
            if RAW_NAMES[self.tail.dtype] in held and RAW_NAMES[x.dtype] not in held:
                kept = RAW_DTYPES[self.codec.dtype]
                raise InvalidDtype(
                    f"{where}: the values are {x.dtype}, and the side keeps {kept}, which would round them: "
                    f"append x.to({kept}), or convert the cache to fp32 first"
                )
        wide = torch.promote_types(x.dtype, self.tail.dtype)
        return torch.cat([self.tail.to(wide), x.to(wide)], 2)

    def concat(self, *others: Side) -> Side:
        """This side, then ``others``.

        Raises NotConsecutive when they differ in codec or shape, or one but the last ends in a raw tail.
        """
        for side, other in pairwise((self, *others)):
            if side.codec is not other.codec and side.codec != other.codec:
                raise NotConsecutive(f"codec {side.codec} is followed by {other.codec}: convert one first")
            if (side.batch, side.heads) != (other.batch, other.heads):
                raise NotConsecutive(f"{side.batch} x {side.heads} heads are followed by {other.batch} x {other.heads}")
            if side.tail.shape[2]:
                raise NotConsecutive(
                    f"a side that ends in a raw tail of {side.tail.shape[2]} tokens cannot be followed by a page: "
                    "append the tokens instead, or pack it with tail=0"
                )
        sides = (self, *others)
        return replace(sides[-1], pages=Pages(stretch for side in sides for stretch in side._pages.stretches))

    def merged(self) -> Side:
        """The same tokens in the fewest pages, their streams one array each: as a file stores them."""
        return replace(self, pages=self._pages.merged())

    def merged_runs(self) -> tuple[int, ...]:
        """The tokens of each page of ``merged()``."""
        return self._pages.merged_runs()

    def stored_streams(self) -> list[Mapping[str, torch.Tensor]]:
        """The streams of all pages, in arrays that hold the rows of consecutive pages: one of each for a ``merged()`` side."""
        return [stretch.streams for stretch in self._pages.stretches]

    def repacked(self, codec: Codec) -> Side:
        """The side with the same codes, packed as ``codec`` packs them."""
        return replace(self, codec=codec, pages=self._pages.mapped(codec, lambda streams: self.codec.repack(streams, codec)))

    def followed_by(self, page: Page, tail: torch.Tensor) -> Side:
        """The side with one more page, and another tail."""
        return replace(self, pages=Pages([*self._pages.stretches, page.stretch]), tail=tail)

    def to(self, device: torch.device | str) -> Side:
        """The side with every buffer on ``device``. Raises InvalidParameter for what is no device."""
        device = checked_device(device)
        pages = self._pages.mapped(self.codec, lambda streams: {name: stream.to(device) for name, stream in streams.items()})
        return replace(self, pages=pages, tail=self.tail.to(device))


def tokens_at_once(values: int, multiple: int, token_group: int, device: torch.device) -> int:
    """The tokens of a tile, each of so many ``values``: a ``multiple``; where that is too many, token groups, at least one."""
    tokens = TILE_VALUES * caches_of(device) // max(1, values)
    return tokens // multiple * multiple or max(token_group, tokens // token_group * token_group)


@dataclass(frozen=True, eq=False)
class Layer:
    """One layer: keys and values, each a Side; one of the two may be absent.

    ``skipped`` counts the tokens at the beginning of the cache's range that the layer no longer holds, as a sliding window
    drops them. Raises InvalidParameter for a count below 0, or of a layer without sides.
    """

    k: Side | None
    v: Side | None
    skipped: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        if self.skipped < 0 or (self.skipped and not self.sides):
            raise InvalidParameter(f"skipped is {self.skipped}, allowed are integers from 0, and 0 alone for a layer without sides")

    def __deepcopy__(self, memo: object) -> Layer:
        return self

    @property
    def sides(self) -> dict[str, Side]:
        """The sides present, by name."""
        return {name: side for name, side in (("k", self.k), ("v", self.v)) if side is not None}

    @property
    def tokens(self) -> int:
        """Tokens held; K and V of a layer hold the same number."""
        side = self.v if self.k is None else self.k
        return 0 if side is None else side.tokens

    @property
    def seen(self) -> int:
        """Tokens from the beginning of the cache's range to the layer's last: those skipped and those held."""
        return self.skipped + self.tokens

    def unpack(self, dtype: torch.dtype = torch.bfloat16) -> Pair:
        """Dense K and V ``[batch, kv_head, token, dim]`` of ``dtype``; None for an absent side."""
        return (self.k.unpack(dtype) if self.k else None, self.v.unpack(dtype) if self.v else None)

    def prefix(self, tokens: int) -> Layer:
        """The first ``tokens`` tokens of the cache's range. Raises OutOfBounds."""
        return self.slice(0, tokens)

    def slice(self, start: int, stop: int) -> Layer:
        """Tokens ``[start, stop)``, counted from the beginning of the cache's range, all of which the layer holds; or the whole layer.

        Raises OutOfBounds. A cut through a layer that skipped tokens would leave the last ones without the window before them.
        """
        start, stop = integer(start, "start"), integer(stop, "stop")
        if (start, stop) == (0, self.seen) or not self.sides:
            return self
        if not self.skipped <= start <= stop <= self.seen:
            raise OutOfBounds(f"tokens {start} to {stop} were asked of a layer that holds tokens {self.skipped} to {self.seen}")
        first, last = start - self.skipped, stop - self.skipped
        return Layer(self.k.slice(first, last) if self.k else None, self.v.slice(first, last) if self.v else None)

    def crop(self, count: int) -> Layer:
        """The layer without its newest ``count`` tokens; those that it skipped stay skipped. Raises OutOfBounds."""
        if not 0 <= count <= self.tokens:
            raise OutOfBounds(f"{count} tokens are to be dropped of a layer that holds {self.tokens}")
        held = self.tokens - count
        return replace(self, k=self.k.prefix(held) if self.k else None, v=self.v.prefix(held) if self.v else None)

    def select(self, indices: Rows) -> Layer:
        """The rows ``indices`` of the batch, as ``Side.select``. Raises OutOfBounds, InvalidParameter."""
        rows = row_numbers(indices)
        return replace(self, k=self.k.select(rows) if self.k else None, v=self.v.select(rows) if self.v else None)

    def append(self, k: torch.Tensor | None, v: torch.Tensor | None, where: str = "append") -> Layer:
        """Add tokens to both sides. Raises InvalidShape when a side is missing or K and V differ in tokens."""
        sides = []
        for name, side, x in (("k", self.k, k), ("v", self.v, v)):
            if (side is None) != (x is None):
                held, given = ("no", "some") if side is None else ("a", "none")
                raise InvalidShape(f"{where}.{name}: the layer has {held} {name} side, and {given} was appended")
            sides.append(None if side is None or x is None else side.append(x, f"{where}.{name}"))
        if k is not None and v is not None and k.shape[2] != v.shape[2]:
            raise InvalidShape(f"{where}: k has {k.shape[2]} tokens and v has {v.shape[2]}; a layer's sides hold the same tokens")
        return replace(self, k=sides[0], v=sides[1])

    def to(self, device: torch.device | str) -> Layer:
        """The layer with every buffer on ``device``."""
        return replace(self, k=self.k.to(device) if self.k else None, v=self.v.to(device) if self.v else None)


@dataclass(frozen=True, eq=False, repr=False)
class Cache:
    """A packed KV cache: one Layer a model layer, the recipe's text, the model's identity, the first token's position.

    ``cache[i]`` is a layer, ``cache[:, a:b]`` the tokens ``[a, b)`` of every layer. Its range is ``start`` to ``stop``; a layer of it
    holds the positions from ``start + layer.skipped`` to ``start + layer.seen``. ``inputs`` is what the tokens were computed
    from; None says nothing about it.
    """

    layers: tuple[Layer, ...]
    recipe: str
    model: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    start: int = 0
    inputs: Inputs | None = None

    def __deepcopy__(self, memo: object) -> Cache:
        return self

    def __repr__(self) -> str:
        held = {self.positions(number) for number, layer in enumerate(self) if layer.sides} - {(self.start, self.stop)}
        others = "".join(f", some layers {first} to {last}" for first, last in sorted(held))
        return f"Cache({self.recipe!r}, {len(self)} layers, tokens {self.start} to {self.stop}{others}, model {dict(self.model)})"

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[Layer]:
        return iter(self.layers)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, SupportsIndex):
            index = operator.index(index)
            if not -len(self) <= index < len(self):
                raise OutOfBounds(f"layer {index} is out of range: the cache has {len(self)} layers")
            return self.layers[index]
        match index:
            case (
                slice(start=None, stop=None, step=None),
                slice(start=SupportsIndex() | None as start, stop=SupportsIndex() | None as stop, step=None | 1),
            ):
                return self.slice(
                    0 if start is None else operator.index(start),
                    self.tokens if stop is None else operator.index(stop),
                )
        raise OutOfBounds(f"cache[{index!r}]: a cache is indexed as cache[layer] or cache[:, start:stop]")

    @property
    def tokens(self) -> int:
        """The tokens of the cache's range: the most that a layer has seen."""
        return max((layer.seen for layer in self.layers), default=0)

    @property
    def stop(self) -> int:
        """The position after the last token."""
        return self.start + self.tokens

    def positions(self, number: int) -> tuple[int, int]:
        """The first position that layer ``number`` holds, and the one after its last."""
        layer = self.layers[number]
        return self.start + layer.skipped, self.start + layer.seen

    def check_ends(self) -> None:
        """Raise NotConsecutive, naming it, for a layer that ends before ``stop``: no token can follow it."""
        tokens = self.tokens
        for number, layer in enumerate(self.layers):
            if layer.sides and layer.seen != tokens:
                raise NotConsecutive(
                    f"layers[{number}] ends at position {self.start + layer.seen} and the cache at {self.stop}: "
                    "what follows the cache cannot follow the layer, so neither can be continued"
                )

    @property
    def values(self) -> int:
        """Key and value numbers held, over all layers."""
        return sum(side.batch * side.heads * side.tokens * side.dim for layer in self.layers for side in layer.sides.values())

    @cached_property
    def nbytes(self) -> int:
        """Bytes that ``save`` writes without compression: codes, scales, tables, header and padding."""
        from .files import file_size

        return file_size(self)

    @property
    def bits_per_value(self) -> float:
        """Honest bits a value: every byte of the file over every value (0 for an empty cache)."""
        return 8 * self.nbytes / self.values if self.values else 0.0

    @property
    def nominal_bits(self) -> float:
        """Bits a value as the source papers count them, averaged over the sides."""
        sides = [side for layer in self.layers for side in layer.sides.values()]
        weights = [side.batch * side.heads * side.tokens * side.dim for side in sides]
        total = sum(weights)
        return sum(side.codec.nominal_bits * weight for side, weight in zip(sides, weights, strict=True)) / total if total else 0.0

    def prefix(self, tokens: int) -> Cache:
        """The first ``tokens`` tokens of every layer, sharing the packed bytes.

        Raises OutOfBounds when a layer does not hold them.
        """
        return self.slice(0, tokens)

    def slice(self, start: int, stop: int) -> Cache:
        """Tokens ``[start, stop)`` of every layer, counted from the cache's first, sharing the packed bytes.

        Raises OutOfBounds when a layer does not hold all of them (the whole cache is a slice, whatever its layers hold), and when
        ``start`` is inside tokens that a codec encoded together.
        """
        start, stop = integer(start, "start"), integer(stop, "stop")
        if not 0 <= start <= stop <= self.tokens:
            raise OutOfBounds(f"tokens {start} to {stop} were asked of a cache of {self.tokens}")
        layers = []
        for number, layer in enumerate(self.layers):
            whole = (start, stop) == (0, self.tokens) and layer.seen == stop
            if layer.sides and not whole and not layer.skipped <= start <= stop <= layer.seen:
                raise OutOfBounds(f"tokens {start} to {stop} were asked of layers[{number}], {self._held(number, start, stop)}")
            try:
                layers.append(layer.slice(start, stop))
            except OutOfBounds as error:
                raise OutOfBounds(f"layers[{number}]: {error}") from None
        inputs = None if self.inputs is None else self.inputs.slice(start, stop, self.start)
        return replace(self, layers=tuple(layers), start=self.start + start, inputs=inputs)

    def select(self, indices: Rows) -> Cache:
        """The rows ``indices`` of the batch in that order, repeats allowed; codes are copied, never decoded.

        ``indices`` is a list of integers or an integer tensor ``[row]``. Raises OutOfBounds, which names the layer, for a row
        that the batch does not have, InvalidParameter for what is not a list of integers.
        """
        rows = row_numbers(indices)
        layers = []
        for number, layer in enumerate(self.layers):
            try:
                layers.append(layer.select(rows))
            except OutOfBounds as error:
                raise OutOfBounds(f"layers[{number}]: {error}") from None
        return replace(self, layers=tuple(layers))

    def _held(self, number: int, start: int, stop: int) -> str:
        if not self.layers[number].skipped:
            return f"which holds {self.layers[number].tokens}"
        first, last = self.positions(number)
        return f"which holds positions {first} to {last} alone, not {self.start + start} to {self.start + stop}"

    def append(self, pairs: Sequence[Pair]) -> Cache:
        """Add one (k, v) of new tokens a layer; what is packed stays as it is.

        Raises InvalidShape, InvalidDtype, NonFinite or OutOfRange, NotConsecutive when a layer ends before the cache does; the cache
        itself never changes.
        """
        if not isinstance(pairs, list | tuple) or not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs):
            raise InvalidShape("what is appended is a list of (k, v), one pair for each layer, such as [(k, v)] for a cache of one layer")
        if len(pairs) != len(self):
            raise InvalidShape(f"{len(pairs)} layers were appended to a cache of {len(self)}")
        self.check_ends()
        layers = tuple(layer.append(k, v, f"layers[{i}]") for i, (layer, (k, v)) in enumerate(zip(self.layers, pairs, strict=True)))
        added = {layer.seen - self.tokens: number for number, layer in reversed([*enumerate(layers)]) if layer.sides}
        if len(added) > 1:
            counts = " and ".join(f"layers[{number}] {count}" for count, number in sorted(added.items(), key=operator.itemgetter(1)))
            raise InvalidShape(f"every layer gets the same tokens; {counts} were appended")
        return replace(self, layers=layers)

    def convert(self, recipe: str | os.PathLike[str] | Recipe, *, progress: Progress | None = None) -> Cache:
        """The cache in another recipe (as ``pack`` takes it). A side whose codec and window stay is not touched.

        Raises InvalidRecipe, MissingFile for a recipe file that is not there, or InvalidParameter when a codec cannot take a
        layer's head dim.
        """
        from .packing import convert

        return convert(self, recipe, progress)

    def unpack(self, dtype: torch.dtype = torch.bfloat16) -> list[Pair]:
        """Dense (K, V) of every layer."""
        return [layer.unpack(dtype) for layer in self.layers]

    def to(self, device: torch.device | str) -> Cache:
        """The cache with every buffer on ``device``. Raises InvalidParameter for what is no device."""
        device = checked_device(device)
        return replace(self, layers=tuple(layer.to(device) for layer in self.layers))


def concat(caches: Sequence[Cache]) -> Cache:
    """Join caches of consecutive tokens; packed bytes are shared, nothing is encoded.

    Raises NotConsecutive when they differ in model or layers, leave a gap in a layer, or a codec or shape changes.
    """
    given: Any = caches
    if not isinstance(given, list | tuple):
        raise InvalidParameter(f"concat takes a list of packed caches, found a {type(given).__name__}")
    for number, cache in enumerate(given):
        if not isinstance(cache, Cache):
            made = "kvpack.pack makes one, and kvpack.load reads one"
            raise InvalidParameter(f"concat: caches[{number}] is a {type(cache).__name__}, expected a packed cache: {made}")
    if not caches:
        raise NotConsecutive("concat of no caches: at least one is needed")
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
    return replace(first, layers=layers, inputs=inputs)


def _joined_layers(number: int, layers: Sequence[Layer]) -> Layer:
    """Layer ``number`` of consecutive caches. Raises NotConsecutive."""
    for first, second in pairwise(layers):
        if (first.k is None, first.v is None) != (second.k is None, second.v is None):
            raise NotConsecutive(f"layers[{number}] has the sides {list(first.sides)}, then {list(second.sides)}")
    try:
        k, v = [layer.k for layer in layers if layer.k], [layer.v for layer in layers if layer.v]
        return replace(layers[0], k=k[0].concat(*k[1:]) if k else None, v=v[0].concat(*v[1:]) if v else None)
    except NotConsecutive as error:
        raise NotConsecutive(f"layers[{number}]: {error}") from None


def check_tensor(x: Any, where: str) -> None:
    """Raise InvalidDtype unless ``x`` is a tensor of bfloat16, float16 or float32 with values, InvalidShape unless it has rank 4."""
    if not isinstance(x, torch.Tensor):
        hint = ": torch.from_numpy makes one of an array" if type(x).__module__ == "numpy" else ""
        raise InvalidDtype(f"{where}: a {type(x).__name__} where a tensor or None is expected{hint}")
    if x.is_meta or x.layout != torch.strided:
        raise InvalidDtype(f"{where}: a tensor of the layout {x.layout} on {x.device}; keys and values are dense, and in memory")
    if x.dim() != 4:
        raise InvalidShape(f"{where}: rank {x.dim()}, shape {list(x.shape)}; keys and values are [batch, kv_head, token, dim]")
    if x.dtype not in RAW_DTYPES.values():
        raise InvalidDtype(f"{where}: dtype {x.dtype}; keys and values are bfloat16, float16 or float32")
