"""Lanes bound to an engine's memory. They encode its pages to rows, and decode rows to pages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Self

import numpy
import torch

from kvpack.cache.packed_runs import PackedRun, PackedRuns
from kvpack.cache.side import Side
from kvpack.coding import dispatch
from kvpack.coding.dispatch import TokenSizes
from kvpack.coding.encoding import TORCH_DTYPES, encode_all, scale_fit_errors
from kvpack.coding.token_errors import (
    EncodedRun,
    allocate_sizes,
    excess_losses,
    may_lose_precision,
    sample_stride,
    small_norm_heads,
    tokens_fit_scales,
)
from kvpack.formats.errors import ValueTooLarge
from kvpack.formats.opaque import Opaque
from kvpack.formats.raw import DTYPES as RAW_DTYPES
from kvpack.formats.raw import Raw
from kvpack.formats.raw_positions import (
    POSITIONS,
    VALUES,
    RawPositions,
    choose_slot_tokens,
    count_left_out,
    encode_positions,
    gather_raw_values,
    replace_tokens,
    slot_mask,
)
from kvpack.formats.token_norms import norms_per_head

from .lanes import Lane, row_address

if TYPE_CHECKING:
    from kvpack.formats.base import Codec
    from kvpack.formats.streams import Layout

    from .buffer import PageBuffer


Counts = numpy.ndarray[Any, numpy.dtype[numpy.int64]]

_NONE = numpy.zeros((0, 0), numpy.int64), numpy.zeros(2, numpy.int64)


class _RowStreams(Mapping[str, torch.Tensor]):
    """The streams of a lane in one row, by name.

    Access to a stream copies all of its layers into a single tensor, with layers as the batch.
    """

    def __init__(self, lane: Lane, row: memoryview) -> None:
        self._lane, self._row = lane, row

    def __getitem__(self, name: str) -> torch.Tensor:
        lane, layout = self._lane, self._lane.layouts[name]
        # Copy the streams, because they are not contiguous across layers in a row.
        values = torch.from_numpy(numpy.ascontiguousarray(lane.stream_bytes(self._row, name))).view(TORCH_DTYPES[layout.dtype])
        return values.view(lane.count, *layout.shape[1:])

    def __iter__(self) -> Iterator[str]:
        return iter(self._lane.plain_codec.row_layouts)

    def __len__(self) -> int:
        return len(self._lane.plain_codec.row_layouts)


class BoundLane:
    """A lane bound to one engine's memory. It caches addresses, strides and other values that are the same for all slots."""

    def __init__(
        self,
        lane: Lane,
        tensors: Sequence[torch.Tensor],
        keys: Sequence[torch.Tensor],
        encoders: Any = None,
        decoders: Any = None,
        large_errors: Any = None,
        choosers: Any = None,
    ) -> None:
        self._lane, self._tensors, self._keys, self._encoders, self._decoders = lane, tensors, keys, encoders, decoders
        self._large_errors = large_errors
        self._raw_token_functions = choosers
        self._layer_groups: list[tuple[int, int, int, int, tuple[int, int, int]]] = []
        if not _has_contiguous_channels(tensors):
            self._encoders = self._decoders = None
        elif encoders or decoders:
            self._layer_groups = _layer_groups(tensors)
        self._key_groups = [] if choosers is None else _layer_groups(keys)

    @classmethod
    def bind(cls, lane: Lane, pages: PageBuffer) -> Self:
        tensors, keys = (pages.sides[side][lane.first : lane.first + lane.count] for side in (lane.side, "k"))
        if not dispatch.uses_c(pages.device) or isinstance(lane.codec, Opaque | Raw) or lane.geometry.dtype not in RAW_DTYPES:
            return cls(lane, tensors, keys)
        return cls(lane, tensors, keys, *_c_functions(lane), _raw_token_functions(lane, keys))

    def encode(self, slot: int, row: memoryview, threads: int) -> Counts:
        """Encode the page in ``slot`` into ``row``. Returns the counts of ``count_left_out``, int64 ``[2]``."""
        raw, watched = self._lane.raw, self._lane.raw_rule
        chosen, left_out = _NONE if watched is None else self._choose_raw_tokens(watched, slot, threads)
        used = {number: torch.from_numpy(tokens[tokens >= 0]) for number, tokens in enumerate(chosen) if len(tokens) and tokens[0] >= 0}
        # Replace a raw token only if it shares scales with others.
        rest = (
            {number: self._replace_raw_tokens(slot, number, tokens) for number, tokens in used.items()}
            if self._lane.plain_codec.group_tokens > 1
            else {}
        )
        sizes = self._encode(slot, row, threads, rest)
        fit_errors = self._fit_errors(slot, row, sizes, used)
        if fit_errors is not None:
            more = self._with_poorly_fitting(used, fit_errors)
            if changed := {number for number, tokens in more.items() if len(tokens) > len(used.get(number, ()))}:
                used = more
                rest |= {number: self._replace_raw_tokens(slot, number, used[number]) for number in changed}
                sizes = self._encode(slot, row, threads, rest)
            kept = self._mask(used)
            if self._lane.halved_codec is not None and ((fit_errors[0] > 1) & ~kept).any():
                fit_errors = self._halve_means(slot, row, self._lane.halved_codec, sizes, kept, rest, fit_errors)
            # The same token may both fit badly and have no room.
            if watched is not None and left_out.any():
                _, wanted = self._raw_choices(watched, slot)
            else:
                wanted = torch.zeros_like(kept).expand(2, -1, -1)
            left_out = count_left_out(wanted, kept, fit_errors).numpy()
        if raw is None:
            return left_out
        for name in (POSITIONS, VALUES):
            self._lane.stream_bytes(row, name)[:] = 0
        for number, tokens in used.items():
            self._store_raw(raw, slot, row, number, tokens)
        return left_out

    def _choose_raw_tokens(self, raw: RawPositions, slot: int, threads: int) -> tuple[Counts, Counts]:
        """Return the raw tokens of each layer, and the counts of ``count_left_out``, int64 ``[2]``.

        The raw tokens are token indices in ascending order, int64 ``[layer, raw_slot]``, padded with -1.
        """
        if self._raw_token_functions is not None:
            result = [self._raw_token_functions[group[1]].run(self._values(group, slot), threads) for group in self._key_groups]
            return numpy.concatenate([chosen for chosen, _ in result]), numpy.concatenate([left_out for _, left_out in result]).sum(0)
        token, wanted = self._raw_choices(raw, slot)
        tokens = self._lane.geometry.tokens
        left_out = count_left_out(wanted, slot_mask(token, tokens))
        return token.masked_fill(token == tokens, -1).numpy(), left_out.numpy()

    def _raw_choices(self, raw: RawPositions, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        """For each layer of a page, return the tokens to keep raw and all tokens that qualify, as ``choose_slot_tokens`` does."""
        lane, codec = self._lane, self._lane.plain_codec
        dtype, fit_errors = lane.geometry.computed_dtype, None
        if lane.shared_axes:
            layers = enumerate(self._tensors, lane.first)
            fit_errors = torch.cat(
                [scale_fit_errors(codec, x[slot].to(dtype)[None], lane.shared_axes, f"layers[{n}].{lane.side}") for n, x in layers]
            )
        norms = torch.cat([norms_per_head(x[slot].to(dtype)[None]) for x in self._keys])
        return choose_slot_tokens(raw, norms, codec.group_tokens, lane.raw_token_capacity, fit_errors)

    def _fit_errors(self, slot: int, row: memoryview, sizes: TokenSizes, raw_tokens: Mapping[int, torch.Tensor]) -> torch.Tensor | None:
        """Return the ``excess_losses`` of tokens that are not raw, ``[2, layer, token]``, or None if no token loses precision.

        ``sizes`` comes from ``_encode``. ``raw_tokens`` maps layers to their raw tokens.
        """
        lane = self._lane
        if not lane.may_lose_precision:
            return None
        streams = _RowStreams(lane, row)
        if lane.plain_codec.summary.has_byte_norms and small_norm_heads(streams["norm"]).any():
            return self._exact_fit_errors(slot, streams, sizes, self._mask(raw_tokens))
        if self._large_errors is not None and not self._large_errors.run(row_address(row)):
            return None
        # The exact computation needs a copy of the page.
        if not may_lose_precision(lane.plain_codec, streams, sizes, self._tensors[0].device):
            least = lane.plain_codec.min_token_rms(streams)
            step, dtype = sample_stride(lane.geometry.tokens), lane.geometry.computed_dtype
            if least is None:
                return None
            sample = torch.cat([tensor[slot, :, ::step].to(dtype)[None] for tensor in self._tensors])
            if tokens_fit_scales(dispatch.norms(sample), sample.shape[3], least):
                return None
        return self._exact_fit_errors(slot, streams, sizes, self._mask(raw_tokens))

    def _exact_fit_errors(self, slot: int, streams: _RowStreams, sizes: TokenSizes, kept: torch.Tensor) -> torch.Tensor | None:
        x = torch.cat([tensor[slot].to(self._lane.geometry.computed_dtype)[None] for tensor in self._tensors])
        return excess_losses(EncodedRun(self._lane.plain_codec, x, streams, cache(partial(dispatch.norms, x)), sizes, kept))

    def _mask(self, raw_tokens: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """Return a mask of ``raw_tokens``, bool ``[layer, token]``."""
        result = torch.zeros(self._lane.count, self._lane.geometry.tokens, dtype=torch.bool, device="cpu")
        for number, tokens in raw_tokens.items():
            result[number, tokens] = True
        return result

    def _halve_means(
        self,
        slot: int,
        row: memoryview,
        halved: Codec,
        sizes: TokenSizes,
        kept: torch.Tensor,
        encoded_values: Mapping[int, torch.Tensor],
        fit_errors: torch.Tensor,
    ) -> torch.Tensor | None:
        """Re-encode with ``halved`` the layers in which tokens not ``kept`` raw lose precision. Returns the remaining fit errors.

        ``halved`` is the codec with half of each mean.
        """
        for number in ((fit_errors[0] > 1) & ~kept).any(1).nonzero()[:, 0].tolist():
            for target, source in zip(sizes, self._encode_layer(slot, row, number, encoded_values, halved), strict=True):
                if target is not None and source is not None:
                    target[number] = source[0]
        return self._exact_fit_errors(slot, _RowStreams(self._lane, row), sizes, kept)

    def _with_poorly_fitting(self, raw_tokens: Mapping[int, torch.Tensor], fit_errors: torch.Tensor) -> dict[int, torch.Tensor]:
        """Add the tokens with the largest fit errors to ``raw_tokens``, the raw tokens of each layer, while there is room."""
        result = dict(raw_tokens)
        for number in (fit_errors[0] > 1).any(1).nonzero()[:, 0].tolist():
            own = raw_tokens.get(number, torch.empty(0, dtype=torch.int64, device=fit_errors.device))
            room = max(0, self._lane.raw_token_capacity - len(own))
            worst = fit_errors[0, number].argsort(descending=True)[: min(room, int((fit_errors[0, number] > 1).sum()))]
            if len(worst):
                result[number] = torch.cat([own, worst]).sort().values
        return result

    def _replace_raw_tokens(self, slot: int, layer_index: int, tokens: torch.Tensor) -> torch.Tensor:
        """Return a layer of the page in ``slot`` with its raw ``tokens`` replaced (``replace_tokens``), ``[1, kv_head, token, dim]``."""
        x = self._tensors[layer_index][slot].to(self._lane.geometry.computed_dtype)[None]
        chosen = torch.zeros(1, x.shape[2], dtype=torch.bool, device=x.device)
        chosen[0, tokens] = True
        return replace_tokens(x, tokens, torch.zeros_like(tokens), chosen, self._lane.plain_codec.group_tokens)

    def _store_raw(self, raw: RawPositions, slot: int, row: memoryview, layer_index: int, tokens: torch.Tensor) -> None:
        lane, streams = self._lane, self._streams(row, layer_index)
        x, none = self._tensors[layer_index][slot].to(lane.geometry.computed_dtype)[None], torch.zeros_like(tokens)
        try:
            values = gather_raw_values(x, tokens, none, raw.dtype, "choose a wider raw_dtype")
        except ValueTooLarge as error:
            raise ValueTooLarge(f"layers[{lane.first + layer_index}].{lane.side}: {error}") from None
        streams[POSITIONS][0, 0, : len(tokens)] = encode_positions(tokens, none)
        streams[VALUES][0, 0, : len(tokens)] = values

    def _encode(self, slot: int, row: memoryview, threads: int, encoded_values: Mapping[int, torch.Tensor]) -> TokenSizes:
        """Encode all layers of a page. Returns the sizes of their tokens, with layers as the batch.

        For layers with raw tokens, ``encoded_values`` contains the values to encode, ``[1, kv_head, token, dim]``, with raw tokens
        replaced.
        """
        lane = self._lane
        if self._encoders is not None and not encoded_values:
            address = row_address(row)
            shape = lane.count, lane.geometry.heads, lane.geometry.tokens
            errors = torch.from_numpy(numpy.empty(shape, numpy.float32)) if lane.plain_codec.summary.direction_spread else None
            if all(self._run_encoder(group, slot, address, threads, errors) for group in self._layer_groups):
                return TokenSizes(errors=errors)
        result = [self._encode_layer(slot, row, number, encoded_values, lane.plain_codec) for number in range(lane.count)]
        return TokenSizes(*(torch.cat(parts) if parts[0] is not None else None for parts in zip(*result, strict=True)))

    def _encode_layer(
        self, slot: int, row: memoryview, layer_index: int, encoded_values: Mapping[int, torch.Tensor], codec: Codec
    ) -> TokenSizes:
        """Encode layer ``layer_index`` with ``codec``. Returns the sizes of its tokens. Values in ``encoded_values`` take precedence."""
        lane, streams = self._lane, self._streams(row, layer_index)
        x, sizes = encoded_values[layer_index][0] if layer_index in encoded_values else self._tensors[layer_index][slot], TokenSizes()
        if isinstance(codec, Opaque):
            streams["bytes"].copy_(x.view(torch.uint8)[None])
        elif isinstance(codec, Raw) and RAW_DTYPES[codec.dtype] == _stored_name(x.dtype):
            streams["values"].copy_(x[None])
        else:
            x = x.to(lane.geometry.computed_dtype)[None]
            sizes = allocate_sizes(codec, x)
            for name, stream in encode_all(codec, x, f"layers[{lane.first + layer_index}].{lane.side}", sizes=sizes).items():
                streams[name].copy_(stream)
        return sizes

    def decode(self, row: memoryview, slot: int, threads: int) -> None:
        """Decode a checked row into the page in ``slot``."""
        if self._decoders is not None:
            address = row_address(row)
            for group in self._layer_groups:
                self._run_decoder(group, slot, address, threads)
            self._put_raw(slot, row)
            return
        lane = self._lane
        for number, tensor in enumerate(self._tensors):
            target, streams = tensor[slot], self._streams(row, number)
            if isinstance(lane.codec, Opaque):
                result, target = streams["bytes"][0], target.view(torch.uint8)
            elif isinstance(lane.codec, Raw):
                result = streams["values"][0]
            else:
                empty = torch.empty(1, lane.geometry.heads, 0, lane.codec.dim, dtype=lane.geometry.computed_dtype, device="cpu")
                plain = {name: streams[name] for name in lane.plain_codec.row_layouts}
                side = Side(lane.plain_codec, PackedRuns.from_runs([PackedRun(lane.plain_codec, lane.geometry.tokens, plain)]), empty, 0)
                result = side.unpack(lane.geometry.computed_dtype)[0]
            if target.dtype.itemsize == 1 and target.dtype != torch.uint8:
                limit = torch.finfo(target.dtype).max
                result = result.clamp(-limit, limit)
            # Only inference mode may write to memory that the engine created in inference mode.
            with torch.inference_mode():
                target.copy_(result)
        self._put_raw(slot, row)

    def _put_raw(self, slot: int, row: memoryview) -> None:
        """Overwrite the decoded values of raw tokens with the exact values in ``row``."""
        raw = self._lane.raw
        if raw is None:
            return
        with torch.inference_mode():
            # A slot in use has a nonzero byte.
            for number in numpy.flatnonzero(self._lane.stream_bytes(row, POSITIONS).any(1)).tolist():
                tensor, streams = self._tensors[number], self._streams(row, number)
                token, _ = raw.token_positions(streams)
                # A row may be invalid even if its checksum is correct, so check the positions.
                inside = token < self._lane.geometry.tokens
                values = raw.kept_values(streams)[inside].transpose(0, 1)
                if tensor.dtype.itemsize == 1:
                    limit = torch.finfo(tensor.dtype).max
                    values = values.clamp(-limit, limit)
                tensor[slot][:, token[inside]] = values.to(tensor.dtype)

    def _streams(self, row: memoryview, layer_index: int) -> dict[str, torch.Tensor]:
        """Return views of one layer's streams in a row, by name."""
        result = {}
        for name, layout in self._lane.layouts.items():
            begin, end = (place + layer_index * self._lane.stride for place in self._lane.byte_ranges[name])
            result[name] = _tensor(row[begin:end], layout)
        return result

    def _values(self, group: tuple[int, int, int, int, tuple[int, int, int]], slot: int) -> Any:
        from kvpack.kernels.cpu.pages import PageValues

        _, _, address, per_slot, strides = group
        return PageValues(address + slot * per_slot, *strides)

    def _run_encoder(self, group: Any, slot: int, address: int, threads: int, errors: torch.Tensor | None) -> bool:
        at = 0 if errors is None else errors[group[0]].data_ptr()
        result: bool = self._encoders[group[1]].run(self._values(group, slot), address + group[0] * self._lane.stride, threads, at)
        return result

    def _run_decoder(self, group: Any, slot: int, address: int, threads: int) -> None:
        self._decoders[group[1]].run(address + group[0] * self._lane.stride, self._values(group, slot), threads)


def _has_contiguous_channels(tensors: Sequence[torch.Tensor]) -> bool:
    return all(x.stride(3) == 1 or x.shape[3] == 1 for x in tensors)


def _layer_groups(tensors: Sequence[torch.Tensor]) -> list[tuple[int, int, int, int, tuple[int, int, int]]]:
    """Return groups of layers that are evenly spaced in memory, ideally a single one.

    Each group is a tuple of first layer, number of layers, address, bytes per slot, and a tuple of bytes per layer, per head and per token.
    """
    size = tensors[0].element_size()
    strides = {tuple(stride * size for stride in x.stride()[:3]) for x in tensors}
    addresses = [x.data_ptr() for x in tensors]
    steps = {second - first for first, second in pairwise(addresses)}
    if len(strides) == 1 and len(steps) <= 1:
        ((slot, head, token),) = strides
        return [(0, len(tensors), addresses[0], slot, (steps.pop() if steps else 0, head, token))]
    result = []
    for number, x in enumerate(tensors):
        slot, head, token = (stride * size for stride in x.stride()[:3])
        result.append((number, 1, addresses[number], slot, (0, head, token)))
    return result


def _c_functions(lane: Lane) -> tuple[Any, Any, Any]:
    """Return the C functions that encode pages, decode pages, and detect large errors. Each is None if the codec is not supported.

    The encoders and decoders are dicts by number of layers, with a function for one layer and one for all layers.
    """
    from kvpack.kernels.cpu import pages

    geometry, codec = lane.geometry, lane.plain_codec
    dtype, heads, tokens = geometry.computed_dtype, geometry.heads, geometry.tokens
    streams = pages.stream_locations(codec, heads, tokens, {name: begin for name, (begin, _) in lane.byte_ranges.items()})
    counts = {1, lane.count}
    arguments = {count: (codec, count, heads, tokens, dtype, streams, lane.stride) for count in counts}
    encoders = {n: pages.PageEncoder(*arguments[n]) for n in counts} if pages.supports_encoding(codec, dtype) else None
    decoders = {n: pages.PageDecoder(*arguments[n]) for n in counts} if pages.supports_decoding(codec, dtype) else None
    checked = pages.supports_error_check(codec)
    large_errors = pages.LargeErrorCheck(codec, lane.count, heads, tokens, streams, lane.stride) if checked else None
    return encoders, decoders, large_errors


def _raw_token_functions(lane: Lane, keys: Sequence[torch.Tensor]) -> Any:
    """Return the C functions that choose raw tokens, by number of layers: one for a single layer, and one for all layers.

    Returns None if there are no raw tokens, or if the C kernels cannot choose them.
    """
    from kvpack.kernels.cpu import encode, pages

    geometry = lane.geometry
    shared = lane.shared_axes
    # The C kernels compute only norms of original keys. Other codecs with shared scales need the norms passed.
    needs_norms = shared and (lane.side != "k" or lane.plain_codec.changes_norms)
    if lane.raw_rule is None or geometry.computed_dtype not in encode.DTYPES or not _has_contiguous_channels(keys) or needs_norms:
        return None
    group_tokens, capacity = lane.plain_codec.group_tokens, lane.raw_token_capacity
    shape = geometry.heads, geometry.tokens, geometry.dims["k"], geometry.computed_dtype, group_tokens, capacity
    return {n: pages.RawTokenChooser(lane.raw_rule, n, *shape, shared) for n in {1, lane.count}}


def _tensor(data: memoryview, layout: Layout) -> torch.Tensor:
    # PyTorch warns about read-only buffers, but these tensors are never written.
    array = numpy.frombuffer(data, numpy.uint8)
    if data.readonly:
        array = array.copy()
    return torch.from_numpy(array).view(TORCH_DTYPES[layout.dtype]).view(layout.shape)


def _stored_name(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}.get(dtype, "")
