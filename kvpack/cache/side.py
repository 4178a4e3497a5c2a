"""Side: the keys or the values of one layer, as packed runs and a raw tail.

A side is immutable: slice, append and concat return a new side that shares the packed bytes. A page is one run of packed tokens.
Its streams are plain arrays ``[batch, kv_head, rows, ...]``, so cutting and joining runs never touches a code.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, SupportsIndex

import torch

from kvpack.coding import dispatch
from kvpack.coding.blocks import for_each_block
from kvpack.coding.dispatch import unpack_into
from kvpack.coding.encoding import RAW_DTYPES, RAW_NAMES, check_finite, encode, is_rounded
from kvpack.formats.arguments import as_integer, check_floating, checked_device
from kvpack.formats.batch import select_sequences
from kvpack.formats.errors import InvalidParameter, InvalidType, NotConsecutive, OutOfBounds
from kvpack.formats.raw import EXACT_DTYPES
from kvpack.formats.value_blocks import block_factor
from kvpack.runtime.memory import empty
from kvpack.runtime.modes import float32_no_grad

from .packed_runs import PackedRun, PackedRuns, Stretch
from .rows import check_rows, row_numbers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from kvpack.formats.base import Codec

    Rows = torch.Tensor | Iterable[SupportsIndex]

TILE_VALUES = 1 << 19
"""The number of values decoded at once on the CPU, and on any device when a page is attended."""

GROUP_VALUES = 1 << 24
"""Maximum number of values of a token group that are decoded at once, if one sequence has no more."""


@dataclass(frozen=True, eq=False, repr=False)
class Side:
    """The keys or the values of one layer: packed runs of tokens, followed by a raw tail.

    Args:
        codec: The codec of the packed tokens.
        runs: Packed runs, in order.
        tail: Raw tokens ``[batch, kv_head, token, dim]``.
        window: Number of raw tokens at which the tail is encoded; 0 encodes as soon as the codec has a whole group.

    >>> side = kvpack.pack(past, "octopus-3;window=32")[0].k
    >>> side.unpack(torch.float32).shape
    torch.Size([1, 2, 64, 64])
    """

    codec: Codec
    runs: Sequence[PackedRun]
    tail: torch.Tensor
    window: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.runs, PackedRuns):
            object.__setattr__(self, "runs", PackedRuns.of(self.runs))

    def __repr__(self) -> str:
        shape = f"{self.batch} x {self.heads} x {self.tokens} x {self.dim}"
        return f"Side({self.codec.id}, {shape}, {len(self.runs)} runs and a raw tail of {self.tail.shape[2]} tokens)"

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
        """Number of tokens in runs."""
        return self._runs.tokens

    @property
    def _runs(self) -> PackedRuns:
        assert isinstance(self.runs, PackedRuns)
        return self.runs

    @property
    def tokens(self) -> int:
        """Number of tokens in runs and tail."""
        return self.packed_tokens + self.tail.shape[2]

    @cached_property
    def boundaries(self) -> list[int]:
        """Token positions at which a page or the tail begins or ends, ascending."""
        return [0, *self._runs.ends.tolist(), self.tokens]

    def place(self, start: int, stop: int) -> tuple[PackedRun | None, int]:
        """Return the page that contains tokens ``[start, stop)``, or None for the tail, and its first token. Raises OutOfBounds."""
        if start >= self.packed_tokens:
            return None, self.packed_tokens
        number = bisect_right(self.boundaries, start, 0, len(self.runs)) - 1
        page, first = self.runs[number], self.boundaries[number]
        if not first <= start <= stop <= first + page.tokens:
            raise OutOfBounds(
                f"tokens {start} to {stop} are not inside one page: the first token's page ends at token {first + page.tokens}"
            )
        return page, first

    def frame(self, start: int, stop: int) -> tuple[torch.Tensor, PackedRun | None]:
        """Return tokens ``[start, stop)``, within one page or the tail, as float32, and the page whose coded frame they are in."""
        page, first = self.place(start, stop)
        if page is None:
            return self.tail[:, :, start - first : stop - first].to(torch.float32), None
        return page.frame(start - first, stop - first), page

    def tiles(self, per_tile: int, edges: Sequence[int] = ()) -> Iterator[tuple[int, int]]:
        """Yield token ranges of at most ``per_tile`` tokens that cross neither a boundary of this side nor one of ``edges``."""
        marks = sorted({*self.boundaries, *edges})
        for first, last in pairwise(marks):
            for start in range(first, last, per_tile):
                yield start, min(start + per_tile, last)

    def unpack(self, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Decode all tokens to ``[batch, kv_head, token, dim]`` of ``dtype`` in the original frame.

        Kernels that decode a run in one pass take all runs of one codec in one launch; everything else is decoded tile by tile. Such a
        kernel rotates back with binary16 products if ``dtype`` has 16 bits, with an error below 2^-11 of each token's norm; the C kernels
        of the CPU use float32. Raises InvalidType unless ``dtype`` is a floating-point one.
        """
        check_floating(dtype)
        with float32_no_grad(self.device):
            result = empty((self.batch, self.heads, self.tokens, self.dim), dtype, self.device)
            self._unpack_into(result)
        return result

    def unpack_into(self, out: torch.Tensor) -> None:
        """Decode all tokens like ``unpack`` into ``out`` ``[batch, kv_head, token, dim]`` of any floating-point dtype and strides.

        Raises InvalidParameter and InvalidType for a tensor on another device.
        """
        if not isinstance(out, torch.Tensor):
            raise InvalidType(f"unpack_into: expected a tensor, got a {type(out).__name__}")
        check_floating(out.dtype)
        expected = (self.batch, self.heads, self.tokens, self.dim)
        if tuple(out.shape) != expected:
            raise InvalidParameter(f"unpack_into: shape {list(out.shape)}, expected {list(expected)}")
        if out.device != self.device:
            raise InvalidParameter(f"unpack_into: the tensor is on {out.device} and the cache is on {self.device}")
        with float32_no_grad(self.device):
            # Kernels write whole rows.
            rows = out.is_contiguous() or (out.device.type == "cpu" and out.stride(3) == 1)
            self._unpack_into(out) if rows else out.copy_(self.unpack(out.dtype))

    def _unpack_into(self, out: torch.Tensor) -> None:
        left = unpack_into(self, out)
        # A header of no tokens may still claim any number of sequences and heads.
        if not left or not self.tokens:
            return
        if (at_once := sequences_at_once(self)) < self.batch:
            for first in range(0, self.batch, at_once):
                rows = range(first, min(first + at_once, self.batch))
                self.select(rows)._unpack_into(out[rows.start : rows.stop])
            return

        def unpack_tile(start: int, stop: int) -> None:
            page, first = self.place(start, stop)
            source = self.tail[:, :, start - first : stop - first] if page is None else page.decode(start - first, stop - first)
            out[:, :, start:stop] = source

        per_tile = tokens_at_once(self.batch * self.heads * self.dim, max(128, self.codec.token_group), self.codec.token_group, self.device)
        tiles = [tile for tile in self.tiles(per_tile) if any(start <= tile[0] < stop for start, stop in left)]
        for_each_block(unpack_tile, tiles, self.device)

    def norms(self, start: int = 0) -> torch.Tensor:
        """Return the norms of the tokens from ``start`` on, in each head, as decoded: float32 ``[batch, kv_head, token]``."""
        if self.tokens and (at_once := sequences_at_once(self)) < self.batch:
            rows = (range(first, min(first + at_once, self.batch)) for first in range(0, self.batch, at_once))
            return torch.cat([self.select(part).norms(start) for part in rows])
        result = [torch.empty(self.batch, self.heads, 0, dtype=torch.float32, device=self.device)]
        per_tile = tokens_at_once(self.batch * self.heads * self.dim, 128, self.codec.token_group, self.device)
        for first, stop in self.tiles(per_tile, (start,) if start < self.tokens else ()):
            if first >= start:
                page, begin = self.place(first, stop)
                part = self.tail[:, :, first - begin : stop - begin] if page is None else page.decode(first - begin, stop - begin)
                result.append(dispatch.norms(part))
        return torch.cat(result, 2)

    def prefix(self, tokens: int) -> Side:
        """Return the first ``tokens`` tokens; packed bytes are shared."""
        return self.slice(0, tokens)

    def slice(self, start: int, stop: int) -> Side:
        """Return tokens ``[start, stop)``; packed bytes are shared, and nothing is decoded.

        Raises OutOfBounds for tokens that the side does not have, and for a start inside a group of tokens encoded together.
        """
        start, stop = as_integer(start, "start"), as_integer(stop, "stop")
        if not 0 <= start <= stop <= self.tokens:
            raise OutOfBounds(f"tokens {start} to {stop} were requested from a side of {self.tokens} tokens")
        try:
            runs = self._runs.slice(start, stop)
        except OutOfBounds as error:
            raise OutOfBounds(f"a slice from token {start} {error}") from None
        tail_start, tail_stop = (max(0, position - self.packed_tokens) for position in (start, stop))
        return replace(self, runs=runs, tail=self.tail[:, :, tail_start:tail_stop])

    def select(self, indices: Rows) -> Side:
        """Return the sequences ``indices`` of the batch in that order; an index may repeat. Codes are copied, never decoded.

        Raises OutOfBounds for a row that the batch does not have, and InvalidParameter for anything but a list of integers.
        """
        rows = row_numbers(indices)
        check_rows(rows, self.batch)
        if len(rows) == self.batch and rows == tuple(range(self.batch)):
            return self
        with float32_no_grad(self.device):
            chosen = torch.tensor(rows, dtype=torch.int64, device=self.device)
            runs = self._runs.mapped(self.codec, lambda streams: select_sequences(self.codec, streams, chosen))
            return replace(self, runs=runs, tail=self.tail.index_select(0, chosen))

    def append(
        self,
        x: torch.Tensor,
        where: str = "append",
        first: int | None = None,
        unit: int | None = None,
        norms: Callable[[int, int], torch.Tensor | None] = lambda start, stop: None,
    ) -> Side:
        """Add tokens ``[batch, kv_head, token, dim]`` to the tail; at ``window`` tokens it is encoded in whole groups.

        ``first`` is the position of the side's first token, if known: some codecs need fewer bits with it. ``unit``, a multiple of the
        codec's token group, replaces the token group, and ``norms(start, stop)`` returns the norms of the keys of the side's tokens. Raises
        InvalidParameter or InvalidType if ``x`` does not continue this side, and OutOfRange.
        """
        check_tensor(x, where)
        expected = (self.batch, self.heads, x.shape[2], self.dim)
        if tuple(x.shape) != expected:
            raise InvalidParameter(f"{where}: shape {list(x.shape)} does not continue a side of shape {list(expected)}")
        if x.device != self.device:
            raise InvalidParameter(
                f"{where}: the values are on {x.device}, but the cache is on {self.device}: append x.to({str(self.device)!r})"
            )
        with float32_no_grad(self.device):
            if self.codec.exact_dtype is None:
                # Checked here and not when the tail is encoded: by then the new tokens could not be told from older ones.
                check_finite(x, self.tokens, where)
            tail = self._tail_with(x, where)
            unit = self.window or unit or self.codec.token_group
            ready = tail.shape[2] // unit * unit
            if not ready:
                return replace(self, tail=tail)
            before = self.runs[-1].streams if self.runs else None
            position = None if first is None else first + self.packed_tokens
            given = norms(self.packed_tokens, self.packed_tokens + ready)
            streams = encode(self.codec, tail[:, :, :ready], where, before, position, given)
            return replace(self, runs=self._runs.added(PackedRun(self.codec, ready, streams)), tail=tail[:, :, ready:].clone())

    def _tail_with(self, x: torch.Tensor, where: str) -> torch.Tensor:
        """Append ``x`` to the tail exactly: in the tail's dtype if it represents ``x``, otherwise in a dtype that represents both.

        Raises InvalidType if the runs have kept every value so far but would round values of ``x``.
        """
        narrow = x.to(self.tail.dtype)
        if not is_rounded(x, narrow):
            return torch.cat([self.tail, narrow], 2)
        if self.codec.exact_dtype is not None:
            held = EXACT_DTYPES[self.codec.exact_dtype]
            if RAW_NAMES[self.tail.dtype] in held and RAW_NAMES[x.dtype] not in held:
                kept = RAW_DTYPES[self.codec.exact_dtype]
                raise InvalidType(
                    f"{where}: the values are {x.dtype}, but the side stores {kept}, which would round them: "
                    f"append x.to({kept}), or convert the cache to fp32 first"
                )
        wide = torch.promote_types(x.dtype, self.tail.dtype)
        return torch.cat([self.tail.to(wide), x.to(wide)], 2)

    def concat(self, *others: Side) -> Side:
        """Append ``others`` to this side.

        Raises NotConsecutive if sides differ in codec or shape, or if any except the last ends in a raw tail.
        """
        for side, other in pairwise((self, *others)):
            if side.codec is not other.codec and side.codec != other.codec:
                raise NotConsecutive(f"codec {_codec_difference(side.codec, other.codec)}: convert one first")
            if (side.batch, side.heads) != (other.batch, other.heads):
                raise NotConsecutive(
                    f"{side.batch} x {side.heads} heads are followed by {other.batch} x {other.heads}: join caches of the same shape"
                )
            if side.tail.shape[2]:
                raise NotConsecutive(
                    f"a side that ends in a raw tail of {side.tail.shape[2]} tokens cannot be followed by a page: "
                    "append the tokens instead, or pack it with window=0"
                )
        sides = (self, *others)
        return replace(sides[-1], runs=PackedRuns(stretch for side in sides for stretch in side._runs.stretches))

    def merged(self) -> Side:
        """Return the same tokens in the fewest runs, with one array per stream, as a file stores them."""
        merged = self._runs.merged()
        return self if merged is self._runs else replace(self, runs=merged)

    def merged_runs(self) -> tuple[int, ...]:
        """Return the number of tokens in each page of ``merged()``."""
        return self._runs.merged_runs()

    def stored_streams(self) -> list[Mapping[str, torch.Tensor]]:
        """Return the streams of all runs, in arrays with the rows of consecutive runs; a ``merged()`` side has one run."""
        return [stretch.streams for stretch in self._runs.stretches]

    def repacked(self, codec: Codec) -> Side:
        """Return the side with the same codes in the packing of ``codec``."""
        return replace(self, codec=codec, runs=self._runs.mapped(codec, lambda streams: self.codec.repack(streams, codec)))

    def followed_by(self, page: PackedRun, tail: torch.Tensor) -> Side:
        """Return the side with one more page and with ``tail`` as its tail."""
        return replace(self, runs=PackedRuns([*self._runs.stretches, page.stretch]), tail=tail)

    def to(self, device: torch.device | str) -> Side:
        """Return the side with every buffer on ``device``. Raises InvalidParameter for an invalid device."""
        device = checked_device(device)
        return self.moved(lambda tensor: tensor.to(device))

    def moved(self, move: Callable[[torch.Tensor], torch.Tensor]) -> Side:
        """Return the side with ``move`` applied to every buffer."""
        runs = self._runs.mapped(self.codec, lambda streams: {name: move(stream) for name, stream in streams.items()})
        return replace(self, runs=runs, tail=move(self.tail))


def _codec_difference(codec: Codec, other: Codec) -> str:
    """Return the parameters in which two codecs differ; only the ids for codecs of different families."""
    params, two = codec.params(), other.params()
    if params["id"] != two["id"]:
        return f"{params['id']} is followed by {two['id']}"
    parts = ({name: value for name, value in values.items() if params.get(name) != two.get(name)} for values in (params, two))
    shown = (", ".join(f"{name} {value.hex() if isinstance(value, bytes) else value}" for name, value in part.items()) for part in parts)
    return f"{params['id']} " + " is followed by ".join(text or "no such option" for text in shown)


def sequences_at_once(*sides: Side) -> int:
    """Return the number of sequences, at least one, whose token groups of all ``sides`` can be decoded at once."""
    return max(1, GROUP_VALUES // max(side.heads * side.dim * side.codec.token_group for side in sides))


def tokens_at_once(values: int, multiple: int, token_group: int, device: torch.device) -> int:
    """Return the tokens of a tile with ``values`` values each: a multiple of ``multiple``, or if that is too many, whole token groups."""
    tokens = TILE_VALUES * block_factor(device) // max(1, values)
    return tokens // multiple * multiple or max(token_group, tokens // token_group * token_group)


def check_tensor(x: Any, where: str) -> None:
    """Raise InvalidType unless ``x`` is a dense bfloat16, float16 or float32 tensor, InvalidParameter unless it has rank 4."""
    if not isinstance(x, torch.Tensor):
        hint = ": torch.from_numpy makes one of an array" if type(x).__module__ == "numpy" else ""
        raise InvalidType(f"{where}: expected a tensor or None, got a {type(x).__name__}{hint}")
    if x.is_meta or x.layout != torch.strided:
        raise InvalidType(f"{where}: a tensor of the layout {x.layout} on {x.device}; keys and values must be dense and in memory")
    if x.dim() != 4:
        raise InvalidParameter(f"{where}: rank {x.dim()}, shape {list(x.shape)}; expected [batch, kv_head, token, dim]")
    if x.dtype not in RAW_DTYPES.values():
        raise InvalidType(f"{where}: dtype {x.dtype}; expected bfloat16, float16 or float32")


def packed_side(
    x: torch.Tensor, codec: Codec, window: int, where: str, first: int | None = None, norms: torch.Tensor | None = None
) -> Side:
    """Encode ``x``, whose tokens begin at position ``first``, with ``codec``, except for the tail that ``window`` leaves.

    ``norms`` ``[batch, kv_head, token]`` are those of the layer's keys, if they are known.
    """
    tokens = x.shape[2]
    # With a residual window the newest tokens stay raw; without one everything is packed, including a partial last group.
    packed = tokens - tokens % window if window else tokens
    with float32_no_grad(x.device):
        if packed < tokens and codec.exact_dtype is None:
            check_finite(x[:, :, packed:], packed, where)
        of_packed = None if norms is None else norms[:, :, :packed]
        runs = PackedRuns()
        if packed:
            streams = encode(codec, x[:, :, :packed], where, position=first, norms=of_packed)
            runs = PackedRuns([Stretch.of_runs(codec, (packed,), streams)])
        return Side(codec, runs, x[:, :, packed:].clone(), window)
