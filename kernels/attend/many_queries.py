"""Attention for many queries: blocks of tokens are decoded to a bounded scratch buffer in the queries' dtype, and attended there.

If all keys (or all values) share one coded frame, queries (or sums of values) are rotated once, and tokens stay in that frame (OCTOPUS
Eq. 13). Results of blocks are merged by their log-sum-exp. PyTorch decodes blocks that no fused kernel supports.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterator
from contextlib import nullcontext
from itertools import pairwise
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from kvpack.formats.columns import next_power_of_two
from kvpack.kernels.gpu import gpu
from kvpack.kernels.tiles import addresses
from kvpack.kernels.tiles.layers import Layer, Side, keys_and_values

from . import flash, layer_sharing, scratch
from .prepared import AttendOptions

DTYPES = (torch.bfloat16, torch.float16)

MAX_DIM = 256
"""Maximum head dim; a tile of ``flash`` with a larger head dim would not fit a multiprocessor."""

SCRATCH_BYTES = 256 << 20
"""Maximum size of the scratch buffer: room for 65,536 tokens of eight heads with 128 channels. A smaller buffer means more launches."""

MIN_TOKENS = 256
"""Minimum number of tokens per block, even if the block then exceeds ``SCRATCH_BYTES``."""

MAX_QUERIES = 1 << 13
"""Maximum number of queries per pass over the tokens, which bounds the memory for their float32 sums.

Decoding the tokens takes about 1% of the time of attention with that many queries.
"""

LIBRARY_PROGRAM_ROWS = 128
"""Number of query rows that one program of cuDNN or FlashAttention processes."""

MAX_LIBRARY_CHOICES = 256
"""Maximum number of cached choices of an attention library."""

MIN_SPLIT_TOKENS, MAX_SPLITS = 1024, 16
"""Minimum tokens per split, and maximum splits, of a block that is split because it has fewer programs than multiprocessors."""


MAX_SINGLE_CALL_TOKENS, MAX_SINGLE_CALL_SCORES = 1 << 14, 1 << 28
"""Maximum number of tokens, and of scores of all heads, for one FlashAttention call over all tokens.

Below these limits, fewer calls on the host save more time than cuDNN does.
"""

MAX_WHOLE_CONTEXT_QUERIES = 128
"""Maximum number of queries for which ``flash`` handles the queries' own tokens (the causal triangle): one program's rows."""

MAX_CACHED_CALLS = 64
"""Maximum number of cached calls per layer, and of templates."""

_libraries: dict[Any, str | None] = {}
_calls: WeakKeyDictionary[Layer, dict[Any, ManyQueriesCall]] = WeakKeyDictionary()
_templates: dict[Any, ManyQueriesCall | None] = {}
"""Calls that are bound to no layer (``make_template``), by layer kind, query shape and options."""


def supports(q: torch.Tensor, layer: Layer) -> bool:
    """Return True if these kernels support the call: 16-bit queries on the layer's device, and head dims up to ``MAX_DIM``."""
    k, v = keys_and_values(layer)
    return q.device == k.device == v.device and q.dtype in DTYPES and max(k.dim, v.dim) <= MAX_DIM


def prepare(q: torch.Tensor, layer: Layer, options: AttendOptions) -> ManyQueriesCall:
    """Prepare attention over ``layer`` for queries shaped like ``q``. The prepared call is cached with the layer.

    Decoded keys and values, and rotated queries, are rounded to the dtype of the queries, so the output is as accurate as attention over an
    unpacked layer. Besides the output, a call allocates at most ``SCRATCH_BYTES`` bytes for decoded tokens, plus partial outputs for
    ``MAX_QUERIES`` queries.
    """
    calls = _calls.setdefault(layer, {})
    key = (q.shape, q.dtype, options, os.environ.get(addresses.VARIABLE))
    if key not in calls:
        if len(calls) >= MAX_CACHED_CALLS:
            calls.clear()
        calls[key] = create_call(q, layer, options, layer_sharing.kind_key(layer))
    return calls[key]


def create_call(q: torch.Tensor, layer: Layer, options: AttendOptions, kind: Hashable | None) -> ManyQueriesCall:
    """Create a call over ``layer``. If a layer of the same ``kind`` (``layer_sharing.kind_key``) already has a template, it is reused."""
    if kind is None:
        return ManyQueriesCall(q, layer, options)
    key = (kind, q.shape, q.dtype, options, os.environ.get(addresses.VARIABLE))
    if (result := _templates.get(key)) is not None:
        return result.bind(layer)
    call = ManyQueriesCall(q, layer, options)
    if key not in _templates:
        if len(_templates) >= MAX_CACHED_CALLS:
            _templates.clear()
        _templates[key] = call.make_template(layer)
    return call


class _TokenBlock(NamedTuple):
    """Tokens ``[start, stop)`` of a layer, which are decoded together and attended to by one pass of queries.

    PyTorch's attention libraries process the first ``seen`` tokens, to which every query attends, in ``splits`` equal ranges. They also
    process the tokens from position ``own`` of the layer on, with a causal mask: these are the queries' own tokens. The kernel in ``flash``
    processes the tokens in between.
    """

    start: int
    stop: int
    keys: scratch.DecodedBlock
    values: scratch.DecodedBlock
    seen: int
    splits: int
    own: int


class _Pass(NamedTuple):
    """``queries`` consecutive queries, beginning with query ``first`` of the call, and the blocks of tokens that they attend to.

    ``position`` is the token position of the first of these queries.
    """

    first: int
    queries: int
    position: int
    parts: list[_TokenBlock]


class ManyQueriesCall:
    """A prepared attention call for queries shaped like ``q``. Everything that depends only on shapes is computed once."""

    def __init__(self, q: torch.Tensor, layer: Layer, options: AttendOptions) -> None:
        k, v = keys_and_values(layer)
        self._sides: tuple[Side, ...] = k, v
        self._tables: layer_sharing.WorkTables | None = None
        self._table: tuple[torch.Tensor, int] | None = None
        self._frames = scratch.decoded_frame(k), scratch.decoded_frame(v)
        self._shape, self._dtype, self._device, self._options = q.shape, q.dtype, q.device, options
        self._tokens, self._batch, self._heads, self._dim_v = k.tokens, k.batch, k.heads, v.dim
        self._map_queries, factor = self._frames[0].query_map(k.heads, q.dtype, q.device)
        self._map_sums = self._frames[1].sum_map(v.heads, q.dtype, q.device)
        self._scale, self._columns = options.scale * factor, self._frames[1].columns(v.dim)
        self._unmasked = all(given is None for given in (options.softcap, options.sliding_window)) and not (
            options.lengths or options.starts
        )
        token_bytes = 2 * k.batch * k.heads * (k.dim + v.dim)
        self._block_tokens = max(MIN_TOKENS, SCRATCH_BYTES // token_bytes // MIN_TOKENS * MIN_TOKENS)
        self._passes = [self._plan_pass(first, k, v) for first in range(0, q.shape[2], MAX_QUERIES)]
        self._elements = max(part.keys.elements + part.values.elements for pass_ in self._passes for part in pass_.parts)
        self._single_call: dict[bool, bool] = {}
        """Cached results of ``_fits_single_call``. The key is True if PyTorch's settings allow FlashAttention."""

    def make_template(self, layer: Layer) -> ManyQueriesCall | None:
        """Return a call without a layer, for ``bind``, or None if layers of this kind cannot share calls."""
        tables, passes = layer_sharing.WorkTables(layer), []
        for pass_ in self._passes:
            parts = []
            for part in pass_.parts:
                keys, values = (
                    part.keys.make_template(self._sides[0], False, tables),
                    part.values.make_template(self._sides[1], True, tables),
                )
                if keys is None or values is None:
                    return None
                parts.append(part._replace(keys=keys, values=values))
            passes.append(pass_._replace(parts=parts))
        call = self._copy()
        call._sides, call._passes, call._tables = (), passes, tables
        return call

    def bind(self, layer: Layer) -> ManyQueriesCall:
        """Return a copy of this template that attends to ``layer``, which must have the template's kind."""
        assert self._tables is not None
        call = self._copy()
        call._sides, call._table = keys_and_values(layer), self._tables.bind(layer, self._device)
        return call

    def _copy(self) -> ManyQueriesCall:
        """Return a shallow copy. This is faster than ``copy.copy``."""
        call = object.__new__(ManyQueriesCall)
        call.__dict__.update(self.__dict__)
        return call

    @property
    def runs_only_kernels(self) -> bool:
        """True if a call consists only of kernels.

        False if PyTorch operations, which depend on modes such as autocast, apply value maps.
        """
        return all(frame.page is None and frame.codec is not None for frame in self._frames)

    def __call__(
        self,
        q: torch.Tensor,
        sink_logits: torch.Tensor | None = None,
        lengths: torch.Tensor | None = None,
        starts: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return attention of ``q`` ``[batch, q_head, q_len, dim]``: ``[batch, q_head, q_len, dim_v]`` of the same dtype.

        ``sink_logits`` are floating point ``[q_head]``; ``lengths`` and ``starts`` are integers ``[batch]``.
        """
        given = tuple(None if tokens is None else tokens.to(self._device, torch.int32) for tokens in (lengths, starts))
        kind = self._device.type
        with torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext():
            if len(self._passes) == 1:
                return self._attend_pass(q, self._passes[0], sink_logits, *given)
            out = torch.empty(*q.shape[:3], self._dim_v, dtype=q.dtype, device=q.device)
            for pass_ in self._passes:
                own = slice(pass_.first, pass_.first + pass_.queries)
                out[:, :, own] = self._attend_pass(q[:, :, own], pass_, sink_logits, *given)
            return out

    def _plan_pass(self, first: int, k: Side, v: Side) -> _Pass:
        count = min(MAX_QUERIES, self._shape[2] - first)
        position = k.tokens - self._shape[2] + first
        parts = []
        for start, stop in self._token_blocks(position, count):
            sides = zip((k, v), self._frames, strict=True)
            keys, values = (scratch.DecodedBlock(side, frame, start, stop, self._dtype) for side, frame in sides)
            seen = stop - start if not self._options.causal else max(0, min(stop, position) - start)
            rows = self._shape[1] // self._heads * count
            splits = _split_count(self._batch * self._heads * -(-rows // LIBRARY_PROGRAM_ROWS), seen, self._device)
            # For few queries, a library call for the causal triangle does not pay off.
            own = start + seen if self._options.causal and count > MAX_WHOLE_CONTEXT_QUERIES else stop
            if not self._unmasked:
                seen, own = 0, stop
            parts.append(_TokenBlock(start, stop, keys, values, seen // splits * splits, splits, own))
        return _Pass(first, count, position, parts)

    def _token_blocks(self, position: int, queries: int) -> Iterator[tuple[int, int]]:
        """Yield the blocks ``[start, stop)`` of tokens that at least one of ``queries`` queries attends to.

        The first query is at token ``position``. For causal attention, a block also starts at ``position`` if there are several sequences,
        or too many tokens for one block.
        """
        options = self._options
        end = min(self._tokens, position + queries) if options.causal else self._tokens
        begin = max(0, position - options.sliding_window + 1) if options.sliding_window else 0
        if options.lengths:
            # Queries are at different positions in each sequence.
            begin, end = 0, self._tokens
        cut = options.causal and begin < position < end and (self._batch > 1 or end - begin > self._block_tokens)
        edges = sorted({begin, end, *([position] if cut else [])})
        for first, last in pairwise(edges):
            for start in range(first, last, self._block_tokens):
                yield start, min(start + self._block_tokens, last)

    def _attend_pass(
        self, q: torch.Tensor, pass_: _Pass, sink_logits: torch.Tensor | None, lengths: torch.Tensor | None, starts: torch.Tensor | None
    ) -> torch.Tensor:
        rotated = self._map_queries(q)
        memory = torch.empty(self._elements, dtype=self._dtype, device=self._device)
        if self._fits_single_call(rotated, pass_, memory):
            (part,) = pass_.parts
            self._decode_block(part, memory)
            return attend_lower_right(rotated, *_decoded_tokens(part, memory, 0, part.stop), self._scale)
        sums = torch.empty(*q.shape[:3], self._columns, dtype=torch.float32, device=self._device)
        lse = torch.empty(q.shape[:3], dtype=torch.float32, device=self._device)
        empty = True
        for part in pass_.parts:
            self._decode_block(part, memory)
            if part.start + part.seen < part.own:
                k, v = _decoded_tokens(part, memory, part.seen, part.own - part.start)
                output = flash.attend(
                    rotated, k, v, scale=self._scale, first_token=part.start + part.seen, tokens=self._tokens,
                    remaining_queries=self._shape[2] - pass_.first, causal=self._options.causal, softcap=self._options.softcap,
                    sliding_window=self._options.sliding_window, lengths=lengths, starts=starts, outputs=(sums, lse) if empty else None,
                )  # fmt: skip
                if not empty:
                    flash.merge(sums, lse, *output)
                empty = False
            if part.own < part.stop:
                self._add_causal_block(
                    sums,
                    lse,
                    rotated,
                    *_decoded_tokens(part, memory, part.own - part.start, part.stop - part.start),
                    part.own - pass_.position,
                    empty,
                )
                empty = False
            if part.seen:
                self._add_visible_tokens(sums, lse, rotated, part, memory, empty)
                empty = False
        if sink_logits is not None:
            # A sink adds its weight to the softmax total, but has no value.
            sink = sink_logits.to(self._device, torch.float32)[None, :, None]
            sums *= torch.where(lse > -torch.inf, torch.sigmoid(lse - sink), 0.0)[..., None]
        return self._map_sums(sums)

    def _decode_block(self, part: _TokenBlock, memory: torch.Tensor) -> None:
        k, v = self._sides
        part.keys.decode(k, self._table, memory, 0)
        part.values.decode(v, self._table, memory, part.keys.elements)

    def _fits_single_call(self, q: torch.Tensor, pass_: _Pass, memory: torch.Tensor) -> bool:
        """Return True if a single FlashAttention call can attend all queries of the call to all tokens, decoded into ``memory``."""
        switches: Any = torch.backends.cuda
        allowed = switches.flash_sdp_enabled()
        if allowed not in self._single_call:
            whole = self._unmasked and self._options.causal and not self._options.sink_logits and self._frames[1].is_original
            few = self._tokens <= MAX_SINGLE_CALL_TOKENS and self._shape[:3].numel() * self._tokens <= MAX_SINGLE_CALL_SCORES
            one_block = len(self._passes) == len(pass_.parts) == 1
            self._single_call[allowed] = (
                whole and few and one_block and supports_lower_right(q, *_decoded_tokens(pass_.parts[0], memory, 0, self._tokens))
            )
        return self._single_call[allowed]

    def _add_causal_block(
        self, sums: torch.Tensor, lse: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ahead: int, empty: bool
    ) -> None:
        """Add causal attention over the tokens ``k`` and ``v`` to ``sums`` and ``lse``.

        The first token is ``ahead`` positions after the first query. With ``empty``, ``sums`` and ``lse`` are overwritten.
        """
        tokens, queries = k.shape[2], q.shape[2]
        if ahead == 0 and tokens == queries:
            flash.merge(sums, lse, *attend_dense(q, k, v, self._scale, True), first=empty)
            return
        # Queries at these tokens' positions see a causal triangle, and later ones see all of the tokens.
        own, after = slice(ahead, ahead + tokens), slice(ahead + tokens, queries)
        flash.merge(sums[:, :, own], lse[:, :, own], *attend_dense(q[:, :, own], k, v, self._scale, True), first=empty)
        if ahead + tokens < queries:
            flash.merge(sums[:, :, after], lse[:, :, after], *attend_dense(q[:, :, after], k, v, self._scale, False), first=empty)

    def _add_visible_tokens(
        self, sums: torch.Tensor, lse: torch.Tensor, q: torch.Tensor, part: _TokenBlock, memory: torch.Tensor, empty: bool
    ) -> None:
        """Add attention over the first ``part.seen`` tokens of a block, to which every query attends, to ``sums`` and ``lse``.

        All query heads of a KV head are processed as one head with more rows, and the tokens are split into ``part.splits`` ranges. With
        ``empty``, ``sums`` and ``lse`` are overwritten.
        """
        q = q.reshape(self._batch, self._heads, -1, q.shape[3])
        if part.splits > 1:
            q = q.repeat_interleave(part.splits, 0)
        output = attend_dense(q, *_decoded_tokens(part, memory, 0, part.seen, part.splits), self._scale, False)
        flash.merge(sums, lse, *output, part.splits, empty)


def _decoded_tokens(part: _TokenBlock, memory: torch.Tensor, start: int, stop: int, splits: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys and values of tokens ``[start, stop)`` of the block ``part``, which was decoded to ``memory``."""
    return part.keys.tokens(memory, 0, start, stop, splits), part.values.tokens(memory, part.keys.elements, start, stop, splits)


def _split_count(programs: int, tokens: int, device: torch.device) -> int:
    """Choose the number of token ranges, a power of two, that gives each multiprocessor about one program.

    ``programs`` is the number of programs without splitting, and ``tokens`` is the number of tokens to split.
    """
    most = max(1, tokens // MIN_SPLIT_TOKENS)
    return min(next_power_of_two(max(1, gpu(device).multiprocessors // programs)), 1 << (most.bit_length() - 1), MAX_SPLITS)


def attend_dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention over dense keys and values, and its natural log-sum-exp, using cuDNN or FlashAttention where they are supported.

    With ``causal``, there must be as many queries as tokens.
    """
    peer = _library_name(q, k, v, causal)
    if peer == "cudnn":
        output: Any = torch.ops.aten._scaled_dot_product_cudnn_attention.default(q, k, v, None, True, 0.0, causal, False, scale=scale)
    elif peer == "flash":
        output = torch.ops.aten._scaled_dot_product_flash_attention.default(q, k, v, 0.0, causal, False, scale=scale)
    else:
        return flash.attend(
            q, k, v, scale=scale, first_token=0, tokens=k.shape[2], remaining_queries=q.shape[2], causal=causal, softcap=None,
            sliding_window=None, lengths=None,
        )  # fmt: skip
    return output[0], output[1].reshape(q.shape[:3])


def supports_lower_right(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    if q.device.type != "cuda" or k.shape[3] != v.shape[3] or k.shape[3] % 8:
        return False
    # PyTorch checks the same before it makes this call for ``torch.nn.attention.bias.causal_lower_right``.
    return torch.backends.cuda.can_use_flash_attention(torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, False, q.shape[1] != k.shape[1]))


def attend_lower_right(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Return causal attention over dense keys and values, using FlashAttention. The queries belong to the last tokens.

    In PyTorch, this mask is called causal lower right (``torch.nn.attention.bias.CausalBias``).
    """
    output: Any = torch.ops.aten._scaled_dot_product_flash_attention.default(q, k, v, 0.0, True, False, scale=scale)
    return output[0]  # type: ignore[no-any-return]


def _library_name(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> str | None:
    """Return the fastest library that supports these tensors: "cudnn" (the fastest on an H200), "flash", or None."""
    if q.device.type != "cuda" or k.shape[3] != v.shape[3] or k.shape[3] % 8 or k.shape[2] < q.shape[2] * causal:
        return None
    switches: Any = torch.backends.cuda
    allowed = switches.cudnn_sdp_enabled(), switches.flash_sdp_enabled()
    key = (*((x.shape, x.stride()) for x in (q, k, v)), q.dtype, q.device, causal, allowed)
    if key not in _libraries:
        if len(_libraries) >= MAX_LIBRARY_CHOICES:
            _libraries.clear()
        _libraries[key] = _find_library(q, k, v, causal)
    return _libraries[key]


def _find_library(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> str | None:
    parameters = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, causal, q.shape[1] != k.shape[1])
    if gpu(q.device).capability >= (9, 0) and torch.backends.cuda.can_use_cudnn_attention(parameters):
        return "cudnn"
    return "flash" if torch.backends.cuda.can_use_flash_attention(parameters) else None
