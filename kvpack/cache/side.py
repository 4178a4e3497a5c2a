"""The packed keys or values of one layer (``Side``): runs of tokens that were encoded together, followed by a raw tail.

A side is immutable: slicing, appending and concatenating return a new side that shares the packed bytes. Streams are arrays ``[batch,
kv_head, row, ...]``, which can be cut and joined along rows without decoding.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy
import torch

from kvpack.coding import dispatch
from kvpack.coding.blocks import for_each_block
from kvpack.coding.dispatch import unpack_into
from kvpack.coding.encoding import RAW_DTYPES, RAW_NAMES, check_finite, encode, is_rounded
from kvpack.formats.arguments import as_integer, check_floating, checked_device, describe
from kvpack.formats.batch import select_sequences, split_sequences
from kvpack.formats.errors import InvalidParameter, InvalidType, NotConsecutive, OutOfBounds
from kvpack.formats.raw import EXACT_DTYPES
from kvpack.formats.value_blocks import block_factor
from kvpack.runtime.memory import empty
from kvpack.runtime.modes import float32_no_grad, writable

from .packed_objects import PackedObject
from .packed_runs import PackedRun, PackedRuns, Stretch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from kvpack.formats.base import Codec

    Rows = torch.Tensor | Iterable[SupportsIndex]

TILE_VALUES = 1 << 19
"""Maximum number of values to decode in one tile: on the CPU, and on any device for attention."""

GROUP_VALUES = 1 << 24
"""Maximum number of values of a token group to decode together, over all sequences, unless one sequence has more."""


@dataclass(frozen=True, eq=False, repr=False)
class Side(PackedObject):
    """The keys or the values of one layer: packed runs of tokens, followed by a raw tail.

    Args:
        codec: Codec of the packed tokens.
        runs: Runs of packed tokens, in order. The tokens of a run were encoded together.
        tail: Raw tokens ``[batch, kv_head, token, dim]``, which follow the runs.
        window: Number of raw tokens that are encoded together, or 0 to encode tokens as soon as they fill the codec's token group.

    >>> side = kvpack.pack(past, "octopus-3;window=32")[0].k
    >>> side.unpack(torch.float32).shape
    torch.Size([1, 2, 64, 64])
    """

    codec: Codec
    runs: PackedRuns
    tail: torch.Tensor
    window: int = 0

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
        return self.runs.tokens

    @property
    def tokens(self) -> int:
        """Number of packed tokens and raw tail tokens."""
        return self.packed_tokens + self.tail.shape[2]

    @cached_property
    def boundaries(self) -> list[int]:
        """The token positions, in ascending order, at which a run or the tail begins or ends."""
        return [0, *self.runs.ends.tolist(), self.tokens]

    def run_containing(self, start: int, stop: int) -> tuple[PackedRun | None, int]:
        """Return the run that contains tokens ``[start, stop)``, and the index of the run's first token. The run is None for the tail.

        Raises OutOfBounds if the tokens are not in one run.
        """
        if start >= self.packed_tokens:
            return None, self.packed_tokens
        number = bisect_right(self.boundaries, start, 0, len(self.runs)) - 1
        run, first = self.runs[number], self.boundaries[number]
        if not first <= start <= stop <= first + run.tokens:
            raise OutOfBounds(
                f"tokens [{start}:{stop}] span more than one run: token {start} is in the run [{first}:{first + run.tokens}], so stop at "
                f"{first + run.tokens} or earlier"
            )
        return run, first

    def decode_frame(self, start: int, stop: int) -> tuple[torch.Tensor, PackedRun | None]:
        """Decode tokens ``[start, stop)`` to float32 without reversing the codec's rotation. All tokens must be in one run or in the tail.

        Also returns the run, which can map queries to the rotated frame and sums back to the original one. For the tail, which is not
        rotated, the run is None.
        """
        run, first = self.run_containing(start, stop)
        if run is None:
            return self.tail[:, :, start - first : stop - first].to(torch.float32), None
        return run.decode_frame(start - first, stop - first), run

    def tiles(self, per_tile: int, edges: Sequence[int] = ()) -> Iterator[tuple[int, int]]:
        """Split the tokens into ranges of at most ``per_tile`` tokens that cross neither run boundaries nor the positions ``edges``."""
        marks = sorted({*self.boundaries, *edges})
        for first, last in pairwise(marks):
            for start in range(first, last, per_tile):
                yield start, min(start + per_tile, last)

    def unpack(self, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Decode all tokens to ``[batch, kv_head, token, dim]`` of ``dtype``.

        Triton kernels decode all runs of a codec in one launch. If ``dtype`` has 16 bits, they reverse rotations with float16 products,
        with an error below 2^-11 of each token's norm. C kernels use float32. Other codecs are decoded tile by tile. Raises InvalidType
        unless ``dtype`` is a floating-point dtype.
        """
        check_floating(dtype)
        with float32_no_grad(self.device):
            result = empty((self.batch, self.heads, self.tokens, self.dim), dtype, self.device)
            self._unpack_into(result)
        return result

    def unpack_into(self, out: torch.Tensor) -> None:
        """Decode all tokens into ``out``, ``[batch, kv_head, token, dim]``, as ``unpack`` does.

        ``out`` may have any floating-point dtype and arbitrary strides. Raises InvalidType if it is not a floating-point tensor, and
        InvalidParameter if its shape or device is wrong.
        """
        if not isinstance(out, torch.Tensor):
            raise InvalidType(f"unpack_into: expected a tensor, but got a {type(out).__name__}")
        check_floating(out.dtype)
        expected = (self.batch, self.heads, self.tokens, self.dim)
        if tuple(out.shape) != expected:
            raise InvalidParameter(f"out has shape {list(out.shape)}, expected {list(expected)}")
        if out.device != self.device:
            raise InvalidParameter(f"unpack_into: the tensor is on {out.device}, but the cache is on {self.device}: use the same device")
        with float32_no_grad(self.device):
            # Kernels write contiguous channels. Tables that are kept must not be created in inference mode.
            if not out.is_inference() and (out.is_contiguous() or (out.device.type == "cpu" and out.stride(3) == 1)):
                self._unpack_into(out)
                return
            values = self.unpack(out.dtype)
            with writable(out):
                out.copy_(values)

    def _unpack_into(self, out: torch.Tensor) -> None:
        remaining = unpack_into(self, out)
        # A file without tokens may claim any number of sequences and heads.
        if not remaining or not self.tokens:
            return
        if (at_once := sequences_at_once(self)) < self.batch:
            for first in range(0, self.batch, at_once):
                rows = range(first, min(first + at_once, self.batch))
                self.select(rows)._unpack_into(out[rows.start : rows.stop])
            return

        def unpack_tile(start: int, stop: int) -> None:
            run, first = self.run_containing(start, stop)
            source = self.tail[:, :, start - first : stop - first] if run is None else run.decode(start - first, stop - first)
            out[:, :, start:stop] = source

        group_tokens = self.codec.group_tokens
        per_tile = tokens_at_once(self.batch * self.heads * self.dim, max(128, group_tokens), group_tokens, self.device)
        tiles = [tile for tile in self.tiles(per_tile) if any(start <= tile[0] < stop for start, stop in remaining)]
        for_each_block(unpack_tile, tiles, self.device)

    def norms(self, start: int = 0) -> torch.Tensor:
        """Return the norms of the decoded tokens, starting with token ``start``, float32 ``[batch, kv_head, token]``."""
        if self.tokens and (at_once := sequences_at_once(self)) < self.batch:
            rows = (range(first, min(first + at_once, self.batch)) for first in range(0, self.batch, at_once))
            return torch.cat([self.select(part).norms(start) for part in rows])
        per_tile = tokens_at_once(self.batch * self.heads * self.dim, 128, self.codec.group_tokens, self.device)
        with float32_no_grad(self.device):
            result = [torch.empty(self.batch, self.heads, 0, dtype=torch.float32, device=self.device)]
            for first, stop in self.tiles(per_tile, (start,) if start < self.tokens else ()):
                if first >= start:
                    run, begin = self.run_containing(first, stop)
                    part = self.tail[:, :, first - begin : stop - begin] if run is None else run.decode(first - begin, stop - begin)
                    result.append(dispatch.norms(part))
            return torch.cat(result, 2)

    def prefix(self, tokens: int) -> Side:
        """Return the first ``tokens`` tokens. Packed bytes are shared."""
        return self.slice(0, tokens)

    def slice(self, start: int, stop: int) -> Side:
        """Return tokens ``[start, stop)``. Packed bytes are shared, and nothing is decoded.

        Raises OutOfBounds if the side lacks some of the tokens, or if ``start`` is inside a group of tokens encoded together.
        """
        start, stop = as_integer(start, "start"), as_integer(stop, "stop")
        if not 0 <= start <= stop <= self.tokens:
            raise OutOfBounds(f"tokens [{start}:{stop}] are out of range: the keys or values have {self.tokens} tokens")
        try:
            runs = self.runs.slice(start, stop)
        except OutOfBounds as error:
            raise OutOfBounds(f"a slice from token {start} {error}") from None
        tail_start, tail_stop = (max(0, position - self.packed_tokens) for position in (start, stop))
        return replace(self, runs=runs, tail=self.tail[:, :, tail_start:tail_stop])

    def select(self, indices: Rows) -> Side:
        """Return a side with the sequences at ``indices`` of the batch, in that order. Indices may repeat. Codes are copied, not decoded.

        Raises OutOfBounds if the batch lacks one of the sequences, and InvalidParameter if ``indices`` is not a list of integers.
        """
        rows = row_indices(indices)
        check_rows(rows, self.batch)
        if len(rows) == self.batch and rows == tuple(range(self.batch)):
            return self
        with float32_no_grad(self.device):
            chosen = torch.tensor(rows, dtype=torch.int64, device=self.device)
            runs = self.runs.mapped(self.codec, lambda streams: select_sequences(self.codec, streams, chosen))
            return replace(self, runs=runs, tail=self.tail.index_select(0, chosen))

    def check_new_tokens(self, x: torch.Tensor, where: str) -> None:
        """Raise InvalidParameter or InvalidType if ``x`` cannot be appended to this side."""
        check_tensor(x, where)
        expected = (self.batch, self.heads, x.shape[2], self.dim)
        if tuple(x.shape) != expected:
            raise InvalidParameter(f"{where} has shape {list(x.shape)}, expected {list(expected)}, as in the cache")
        if x.device != self.device:
            raise InvalidParameter(
                f"{where}: the values are on {x.device}, but the cache is on {self.device}: append x.to({str(self.device)!r})"
            )

    def append(
        self,
        x: torch.Tensor,
        where: str = "append",
        first: int | None = None,
        unit: int | None = None,
        norms: Callable[[int, int], torch.Tensor | None] = lambda start, stop: None,
    ) -> Side:
        """Return the side with new tokens appended to the tail. The tail is encoded if it is long enough.

        Args:
            x: New tokens ``[batch, kv_head, token, dim]``.
            where: Name for error messages.
            first: Position of the side's first token, if known. Some codecs then need fewer bits.
            unit: Number of tokens that are encoded together if ``window`` is 0: a multiple of the codec's token group. Defaults to one
                group.
            norms: Function that returns the norms of the keys of tokens ``[start, stop)``, or None if they are not known.

        Raises InvalidParameter or InvalidType if the dtype or shape of ``x`` does not match this side, and ValueTooLarge if the codec
        cannot store a value.
        """
        self.check_new_tokens(x, where)
        with float32_no_grad(self.device):
            if self.codec.exact_dtype is None:
                # Check values now, because the message must name the new tokens, and encoding may happen later.
                check_finite(x, self.tokens, where)
            tail = self._tail_with(x, where)
            unit = self.window or unit or self.codec.group_tokens
            ready = tail.shape[2] // unit * unit
            if not ready:
                return replace(self, tail=tail)
            before = self.runs[-1].streams if self.runs else None
            position = None if first is None else first + self.packed_tokens
            key_norms = norms(self.packed_tokens, self.packed_tokens + ready)
            streams = encode(self.codec, tail[:, :, :ready], where, before, position, key_norms)
            return replace(self, runs=self.runs.append(PackedRun(self.codec, ready, streams)), tail=tail[:, :, ready:].clone())

    def _tail_with(self, x: torch.Tensor, where: str) -> torch.Tensor:
        """Append ``x`` to the tail. If the tail's dtype would round a value, the result has a wider dtype.

        Raises InvalidType if all earlier values are stored exactly but the codec would round values of ``x``.
        """
        narrow = x.to(self.tail.dtype)
        if not is_rounded(x, narrow):
            return torch.cat([self.tail, narrow], 2)
        if self.codec.exact_dtype is not None:
            exact = EXACT_DTYPES[self.codec.exact_dtype]
            if RAW_NAMES[self.tail.dtype] in exact and RAW_NAMES[x.dtype] not in exact:
                exact_dtype = RAW_DTYPES[self.codec.exact_dtype]
                raise InvalidType(
                    f"{where}: the values are {x.dtype}, but the cache stores {exact_dtype}, which would round them: "
                    f"append x.to({exact_dtype}), or convert the cache to fp32 first"
                )
        wide = torch.promote_types(x.dtype, self.tail.dtype)
        return torch.cat([self.tail.to(wide), x.to(wide)], 2)

    def concat(self, *others: Side) -> Side:
        """Return this side followed by ``others``.

        Raises NotConsecutive if the sides differ in codec or shape, or if any side except the last has a raw tail.
        """
        for side, other in pairwise((self, *others)):
            if side.codec is not other.codec and side.codec != other.codec:
                raise NotConsecutive(f"codec {_codec_difference(side.codec, other.codec)}: convert one cache to the other's recipe first")
            if (side.batch, side.heads) != (other.batch, other.heads):
                raise NotConsecutive(
                    f"a cache with batch {side.batch} and {side.heads} heads cannot be followed by a cache with batch {other.batch} and "
                    f"{other.heads} heads: join only caches of the same shape"
                )
            if side.tail.shape[2]:
                raise NotConsecutive(
                    f"a cache with a raw tail of {side.tail.shape[2]} tokens cannot be followed by packed tokens: "
                    "append the second cache's tokens to the first, or pack the first with window=0"
                )
        sides = (self, *others)
        return replace(sides[-1], runs=PackedRuns(tuple(stretch for side in sides for stretch in side.runs.stretches)))

    def merged(self) -> Side:
        """Return the same tokens in as few runs as possible, with one array per stream, as in a file."""
        merged = self.runs.merged()
        return self if merged is self.runs else replace(self, runs=merged)

    def merged_runs(self) -> tuple[int, ...]:
        """Return the number of tokens in each run that ``merged()`` returns."""
        return self.runs.merged_runs()

    def stored_streams(self) -> list[Mapping[str, torch.Tensor]]:
        """Return the streams of each stretch of consecutive runs. A ``merged()`` side has one stretch, or none without packed tokens."""
        return [stretch.streams for stretch in self.runs.stretches]

    def repack(self, codec: Codec) -> Side:
        """Return a side with the same codes, repacked in the bit layout of ``codec``."""
        return replace(self, codec=codec, runs=self.runs.mapped(codec, lambda streams: self.codec.repack(streams, codec)))

    def with_run(self, run: PackedRun, tail: torch.Tensor) -> Side:
        """Return a copy of the side with ``run`` appended and its tail replaced by ``tail``."""
        return replace(self, runs=PackedRuns((*self.runs.stretches, run.stretch)), tail=tail)

    def to(self, device: torch.device | str) -> Side:
        """Return the side with all buffers on ``device``. Raises InvalidParameter if PyTorch cannot use the device."""
        device = checked_device(device)
        return self.map_buffers(lambda tensor: tensor.to(device))

    def map_buffers(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Side:
        """Return the side with ``change`` applied to each buffer."""
        runs = self.runs.mapped(self.codec, lambda streams: {name: change(stream) for name, stream in streams.items()})
        return replace(self, runs=runs, tail=change(self.tail))


def _codec_difference(codec: Codec, other: Codec) -> str:
    """Describe how two codecs differ, for messages: by their ids or, if the ids are equal, by their parameters."""
    params, other_params = codec.params(), other.params()
    if params["id"] != other_params["id"]:
        return f"{params['id']} is followed by {other_params['id']}"
    changed = [name for name in {**params, **other_params} if params.get(name) != other_params.get(name)]
    parts = ({name: values[name] for name in changed if name in values} for values in (params, other_params))
    shown = (", ".join(f"{name} {value.hex() if isinstance(value, bytes) else value}" for name, value in part.items()) for part in parts)
    return f"{params['id']} " + " is followed by ".join(text or "no such option" for text in shown)


def sequences_at_once(*sides: Side) -> int:
    """Return how many sequences to process at once.

    This is the largest number, but at least 1, for which one token group of each side has at most ``GROUP_VALUES`` values.
    """
    return max(1, GROUP_VALUES // max(side.heads * side.dim * side.codec.group_tokens for side in sides))


def tokens_at_once(values: int, multiple: int, group_tokens: int, device: torch.device) -> int:
    """Return the number of tokens per tile, if each token has ``values`` values.

    It is a multiple of ``multiple``. If even ``multiple`` tokens are too many, it is a multiple of ``group_tokens``.
    """
    tokens = TILE_VALUES * block_factor(device) // max(1, values)
    return tokens // multiple * multiple or max(group_tokens, tokens // group_tokens * group_tokens)


def check_tensor(x: Any, where: str) -> None:
    """Raise InvalidType unless ``x`` is a dense bfloat16, float16 or float32 tensor, or InvalidParameter unless its rank is 4."""
    if not isinstance(x, torch.Tensor):
        hint = ": convert it with torch.from_numpy" if type(x).__module__ == "numpy" else ""
        raise InvalidType(f"{where}: expected a tensor or None, but got a {type(x).__name__}{hint}")
    if x.is_meta or x.layout != torch.strided:
        raise InvalidType(f"{where}: expected a dense tensor in memory, but got a tensor with layout {x.layout} on {x.device}")
    if x.dim() != 4:
        raise InvalidParameter(f"{where} has shape {list(x.shape)}, expected [batch, kv_head, token, dim]")
    if x.dtype not in RAW_DTYPES.values():
        raise InvalidType(f"{where} has dtype {x.dtype}, expected bfloat16, float16 or float32")


def pack_side(x: torch.Tensor, codec: Codec, window: int, where: str, first: int | None = None, norms: torch.Tensor | None = None) -> Side:
    """Encode ``x``, ``[batch, kv_head, token, dim]``, with ``codec``. The newest tokens stay raw if ``window`` keeps them.

    ``first`` is the position of the first token. ``norms``, ``[batch, kv_head, token]``, are the norms of the layer's keys, if known.
    """
    (side,) = pack_sides(x, 1, codec, window, where, first, norms)
    return side


def pack_sides(
    x: torch.Tensor,
    layers: int,
    codec: Codec,
    window: int,
    where: str,
    first: int | None = None,
    norms: torch.Tensor | None = None,
    chosen: torch.Tensor | None = None,
    measured: dispatch.ValueSizes | None = None,
) -> list[Side]:
    """Encode several layers as ``pack_side`` does. Returns their sides.

    In the batch of ``x``, the sequences of each layer follow those of the previous layer. ``chosen`` is a mask of the raw tokens, as in
    ``encode``, and ``measured`` contains the sizes of all tokens, if known.
    """
    tokens = x.shape[2]
    # With a window, the newest tokens stay raw. Without one, all tokens are packed, including a partial last group.
    packed = tokens - tokens % (window or 1)
    with float32_no_grad(x.device):
        if packed < tokens and codec.exact_dtype is None:
            check_finite(x[:, :, packed:], packed, where)
        packed_norms = None if norms is None else norms[:, :, :packed]
        parts: Sequence[Mapping[str, torch.Tensor] | None] = [None] * layers
        if packed:
            sizes = measured if measured is None or packed == tokens else measured.before(packed)
            streams = encode(
                codec, x[:, :, :packed], where, position=first, norms=packed_norms, layers=layers, chosen=chosen, measured=sizes
            )
            parts = [streams] if layers == 1 else split_sequences(codec, streams, layers)
        sides = []
        for part, tail in zip(parts, x[:, :, packed:].chunk(layers, 0), strict=True):
            runs = PackedRuns(() if part is None else (Stretch(codec, numpy.array([packed], numpy.int64), part),))
            sides.append(Side(codec, runs, tail.clone(), window))
        return sides


def row_indices(indices: Rows) -> tuple[int, ...]:
    """Return ``indices`` as integers. Raises InvalidParameter unless they are a list or a rank-1 tensor of at least one integer."""
    if isinstance(indices, torch.Tensor):
        if indices.dim() != 1:
            raise InvalidParameter(f"indices is a tensor of shape {list(indices.shape)}, expected a list or a tensor of rank 1")
        if indices.is_meta or indices.layout != torch.strided:
            raise InvalidParameter(f"indices is {describe(indices)} on {indices.device}, expected a list or a dense tensor")
        indices = indices.tolist()
    if isinstance(indices, str | bytes) or not hasattr(indices, "__iter__"):
        raise InvalidParameter(f"indices is {describe(indices)}, expected a list of integers, such as select([0, 2])")
    rows = []
    for index in indices:
        if isinstance(index, bool | type) or not isinstance(index, SupportsIndex):
            raise InvalidParameter(f"indices contains {describe(index)}, expected integers, such as select([0, 2])")
        rows.append(as_integer(index, "a sequence index"))
    if not rows:
        raise InvalidParameter("indices is empty: pass at least one sequence index")
    return tuple(rows)


def check_rows(rows: Iterable[int], batch: int) -> None:
    """Raise OutOfBounds unless all ``rows`` are valid indices in a batch of ``batch`` sequences."""
    for row in rows:
        if not 0 <= row < batch:
            raise OutOfBounds(f"sequence {row} was requested from a batch of {batch} sequences, expected an index from 0 to {batch - 1}")
