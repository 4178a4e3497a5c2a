"""Encoding of tensors with a codec, block by block."""

from __future__ import annotations

import contextlib
import math
import warnings
from functools import cache, partial
from operator import attrgetter
from typing import TYPE_CHECKING, Protocol

import torch

from kvpack.errors import RoundedWarning
from kvpack.formats.arguments import prefix_errors
from kvpack.formats.errors import InvalidParameter, ValueTooLarge
from kvpack.formats.foreign import begin_run
from kvpack.formats.norm_rule import relative_errors
from kvpack.formats.raw import EXACT_DTYPES
from kvpack.formats.raw_positions import VALUES, RawPositions, mark_poor_fits, replace_tokens
from kvpack.formats.runs import Run
from kvpack.formats.sidecars import CodecWithSidecars
from kvpack.formats.token_norms import drop_crowded_pages, find_large_sizes, measure_fit_errors
from kvpack.formats.value_blocks import block_factor
from kvpack.runtime.memory import empty
from kvpack.runtime.modes import float32_no_grad

from . import dispatch
from .blocks import for_each_block
from .dispatch import UNMEASURED, TokenSizes, ValueSizes
from .token_errors import EncodedRun, allocate_sizes, measure_losses, report_poor_fit

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from kvpack.formats.base import Codec

TORCH_DTYPES = {"U8": torch.uint8, "U16": torch.uint16, "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
"""torch dtypes of stored tensors, by name."""

STATE_DTYPES = {dtype: name for name, dtype in TORCH_DTYPES.items()}

RAW_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""torch dtypes of raw tails, by their name in headers."""

RAW_NAMES = {dtype: name for name, dtype in RAW_DTYPES.items()}

BLOCK_VALUES = 1 << 19
"""Number of values per block on the CPU. A block fits in the processor's cache, but is large enough to hide the overhead of a call."""

_GROUP_MULTIPLE = 128


class Progress(Protocol):
    """Callback for progress. It receives the completed and the total amount of work, in the same unit."""

    def __call__(self, done: int, total: int) -> None: ...


def encode(
    codec: Codec,
    x: torch.Tensor,
    where: str,
    previous: Mapping[str, torch.Tensor] | None = None,
    position: int | None = None,
    norms: torch.Tensor | None = None,
    layers: int = 1,
    chosen: torch.Tensor | None = None,
    measured: ValueSizes | None = None,
) -> dict[str, torch.Tensor]:
    """Encode ``x`` as one run and return its streams, by the names in ``codec.layout``.

    Args:
        codec: Codec of the run.
        x: Values ``[batch, kv_head, token, dim]`` of any float dtype.
        where: Name of ``x`` for messages.
        previous: Streams of the run that this one continues, if any.
        position: Position of the first token, if known.
        norms: Norms of the layer's keys, ``[batch, kv_head, token]`` (``norms_per_head``), if known. Defaults to the norms of ``x``.
        layers: Number of layers that are joined in ``x`` along the batch axis.
        chosen: Mask of raw tokens, bool ``[batch, token]``. Defaults to the tokens that ``norms`` select.
        measured: Sizes of the tokens of ``x`` (``dispatch.measure_sizes``), if known.

    Raises:
        InvalidParameter: A value is NaN or infinite (except for raw and lossless, which store these too), or KVPACK_KERNELS is invalid.
        ValueTooLarge: A norm is too large for its width.

    Issues a RoundedWarning if the codec stores its own dtype exactly but values have to be rounded to this dtype. Issues a KvpackWarning
    about tokens that lose precision, because they share a scale with others or because the codec's maps and means represent them poorly.
    """
    raw, plain = codec.raw_positions, codec.without_raw_positions
    with float32_no_grad(x.device):
        sizes = allocate_sizes(plain, x)
        given = cache(partial(dispatch.norms, x)) if measured is None else partial(attrgetter("norms"), measured)
        if raw is None:
            streams = encode_all(codec, x, where, previous, position, sizes)
            report_poor_fit(measure_losses(EncodedRun(codec, x, streams, given, sizes)), where)
            return streams
        # The encoder of the other tokens, kernels included, receives a whole run.
        if chosen is None:
            chosen = raw.choose((given() if norms is None else norms).to(x.device), position, previous is not None)
        chosen = chosen.to(x.device)
        shared = plain.summary.shared_scales
        if shared and raw.high_norm and not plain.summary.changes_norms:
            chosen = mark_poor_fits(chosen, measure_fit_errors(given(), shared))
        try:
            streams = _encode_with_raw(codec, raw, x, chosen, where, previous, position, sizes, measured)
        except ValueTooLarge:
            # Raw tokens are selected by the keys, so values may still include a token whose norm is too large for its width.
            large = find_large_sizes(given(), raw.high_norm) if raw.high_norm else None
            more = None if large is None else drop_crowded_pages(large.any(1) & ~chosen)
            if layers > 1 or more is None or not more.any():
                raise
            chosen = chosen | more
            streams = _encode_with_raw(codec, raw, x, chosen, where, previous, position, sizes)
        losses = measure_losses(EncodedRun(plain, x, streams, given, sizes, chosen, measured))
        if not losses:
            return streams
        kept = chosen
        if raw.high_norm:
            kept = mark_poor_fits(chosen, torch.stack([loss.factors / loss.ratio for loss in losses]).amax(0))
        report_poor_fit(losses, where, kept, raw.high_norm > 0)
        # Few runs have such tokens, so encoding them twice is faster than measuring all runs before.
        return streams if kept is chosen or torch.equal(kept, chosen) else _encode_with_raw(codec, raw, x, kept, where, previous, position)


def scale_fit_errors(codec: Codec, x: torch.Tensor, shared: Collection[str], where: str) -> torch.Tensor:
    """Return how much precision each token of ``x``, ``[batch, kv_head, token, dim]``, loses because tokens share scales.

    ``shared`` names the axes along which scales are shared. Raises the same errors as ``encode``.
    """
    return measure_fit_errors(_coded_norms(codec, x, where, None), shared)


def _coded_norms(codec: Codec, x: torch.Tensor, where: str, previous: Mapping[str, torch.Tensor] | None) -> torch.Tensor:
    """Return the norms of ``x`` as ``codec.coded_norms`` does. Raises the same errors as ``encode``."""
    if not codec.changes_norms:
        return dispatch.norms(x)
    blocks = _split_blocks(codec, x)
    with prefix_errors(where, ValueTooLarge):
        return codec.coded_norms(
            Run((*x.shape,), x.device, lambda: (_encodable_values(codec, x, *block, where) for block in blocks)), previous
        )


def encode_all(
    codec: Codec,
    x: torch.Tensor,
    where: str,
    previous: Mapping[str, torch.Tensor] | None = None,
    position: int | None = None,
    sizes: TokenSizes = UNMEASURED,
) -> dict[str, torch.Tensor]:
    """Encode ``x`` as ``encode`` does, with a codec that keeps no tokens raw. Issues no warnings about tokens.

    Sizes of tokens are written into the tensors in ``sizes``.
    """
    with float32_no_grad(x.device):
        streams = dispatch.encode(codec, x, previous, sizes)
    if streams is None:
        streams = _encode_in_blocks(codec, x, where, previous, position, sizes)
    kept = codec.summary.exact_dtype
    if kept is not None and RAW_NAMES[x.dtype] not in EXACT_DTYPES[kept] and is_rounded(x, x.to(RAW_DTYPES[kept])):
        message = f"the recipe stores {RAW_NAMES[x.dtype]} values as {kept} and rounds them; the 'raw' recipe keeps every value exactly"
        warnings.warn(message, RoundedWarning, stacklevel=2)
    return streams


def _encode_with_raw(
    codec: Codec,
    raw: RawPositions,
    x: torch.Tensor,
    chosen: torch.Tensor,
    where: str,
    previous: Mapping[str, torch.Tensor] | None,
    position: int | None,
    sizes: TokenSizes = UNMEASURED,
    measured: ValueSizes | None = None,
) -> dict[str, torch.Tensor]:
    """Encode ``x``, and store the tokens in the mask ``chosen``, bool ``[batch, token]``, raw. Sizes are written as by ``encode_all``.

    Raises the same errors as ``encode``.
    """
    token, sequence = chosen.T.nonzero().unbind(1)
    with prefix_errors(where, ValueTooLarge):
        raw_values = raw.encode_tokens(x, token, sequence)
    if not torch.isfinite(raw_values[VALUES]).all():
        check_finite(x, 0, where)
    plain = codec.without_raw_positions
    streams = dispatch.encode(plain, x, previous, skipped=chosen, largest=None if measured is None else measured.largest)
    if streams is None and not (plain.summary.entries or plain.summary.has_run_rows or x.device.type != "cpu"):
        # Rows of tokens can be replaced, which is faster on a CPU than copying all values without the raw tokens.
        with contextlib.suppress(ValueTooLarge):
            streams = encode_all(plain, x, where, previous, position, sizes)
            _reencode_groups(plain, x, chosen, streams, where, previous, sizes)
    if streams is None:
        rest = replace_tokens(x, token, sequence, chosen, codec.summary.group_tokens)
        streams = encode_all(plain, rest, where, previous, position, sizes)
    return streams | raw_values


def _reencode_groups(
    codec: Codec,
    x: torch.Tensor,
    chosen: torch.Tensor,
    streams: dict[str, torch.Tensor],
    where: str,
    previous: Mapping[str, torch.Tensor] | None,
    sizes: TokenSizes,
) -> None:
    """Re-encode every token group that contains a chosen token, with the chosen tokens left out, into ``streams`` and ``sizes``.

    ``chosen`` is bool ``[batch, token]``.
    """
    group, tokens = codec.summary.group_tokens, x.shape[2]
    groups = torch.unique(chosen.any(0).nonzero()[:, 0] // group)
    if not len(groups):
        return
    places = (groups[:, None] * group + torch.arange(group, device=x.device)).flatten()
    places = places[places < tokens]
    chosen_here = chosen[:, places]
    token, sequence = chosen_here.T.nonzero().unbind(1)
    rest = replace_tokens(x[:, :, places], token, sequence, chosen_here, group)
    sizes_here = allocate_sizes(codec, rest)
    encoded = encode_all(codec, rest, where, previous, sizes=sizes_here)
    for target, source in zip(sizes, sizes_here, strict=True):
        if target is not None and source is not None:
            target[:, :, places] = source
    for name, entry in codec.row_layouts.items():
        rows = torch.unique(places // entry.tokens_per_row)
        # Some versions of PyTorch cannot index uint16 on some devices.
        target, source = streams[name], encoded[name]
        if source.dtype == torch.uint16:
            target, source = target.view(torch.int16), source.view(torch.int16)
        target[:, :, rows] = source


def _encode_in_blocks(
    codec: Codec,
    x: torch.Tensor,
    where: str,
    previous: Mapping[str, torch.Tensor] | None,
    position: int | None,
    sizes: TokenSizes,
) -> dict[str, torch.Tensor]:
    batch, heads, tokens, dim = x.shape
    layout = codec.layout(batch, heads, tokens)
    blocks = _split_blocks(codec, x)
    entries: dict[int, dict[str, torch.Tensor]] = {}
    measured: set[int] = set()

    def encode_block(start: int, stop: int) -> None:
        part = _encodable_values(codec, x, start, stop, where)
        with prefix_errors(f"{where}, tokens {start} to {stop - 1}", ValueTooLarge):
            encoded = run.encode(part, start)
        if not isinstance(codec, CodecWithSidecars):
            measure(part, start, encoded)
        for name, entry in layout.items():
            if entry.per == "token":
                streams[name][:, :, start // entry.tokens_per_row : -(-stop // entry.tokens_per_row)] = encoded[name]
        entries[start] = {name: encoded[name] for name, entry in layout.items() if entry.per == "entry"}

    def measure(block: torch.Tensor, start: int, encoded: Mapping[str, torch.Tensor]) -> None:
        here = slice(start, start + block.shape[2])
        if sizes.norms is not None:
            sizes.norms[:, :, here] = dispatch.norms(block)
        if sizes.errors is not None and start not in measured:
            sizes.errors[:, :, here] = relative_errors(codec.without_sidecars, encoded, block)

    def encode_inner(inner: Codec, block: torch.Tensor, start: int) -> dict[str, torch.Tensor] | None:
        if sizes.errors is None:
            return dispatch.encode(inner, block)
        errors = torch.empty(block.shape[:3], dtype=torch.float32, device=block.device)
        encoded = dispatch.encode(inner, block, sizes=TokenSizes(errors=errors))
        if encoded is not None:
            sizes.errors[:, :, start : start + block.shape[2]] = errors
            measured.add(start)
        return encoded

    with float32_no_grad(x.device):
        streams = {name: empty(entry.shape, TORCH_DTYPES[entry.dtype], x.device) for name, entry in layout.items() if entry.per == "token"}
        begin = partial(begin_run, codec)
        if isinstance(codec, CodecWithSidecars):
            begin = partial(codec.begin, kernel=encode_inner, watch=measure)
        with prefix_errors(where, ValueTooLarge):
            given = Run(
                (batch, heads, tokens, dim), x.device, lambda: (_encodable_values(codec, x, *block, where) for block in blocks), position
            )
            run = begin(given, previous)
        for_each_block(encode_block, blocks, x.device)
        for name, entry in layout.items():
            if entry.per == "entry":
                none = torch.empty(entry.shape, dtype=TORCH_DTYPES[entry.dtype], device=x.device)
                streams[name] = torch.cat([none, *(entries[start][name] for start, _ in blocks)], 2)
    streams |= run.streams
    return {name: streams[name] for name in layout}


def _split_blocks(codec: Codec, x: torch.Tensor) -> list[tuple[int, int]]:
    batch, heads, tokens, _ = x.shape
    row = max(1, batch * heads * codec.dim)
    multiple = max(_GROUP_MULTIPLE, codec.summary.group_tokens)
    size = max(multiple, BLOCK_VALUES * block_factor(x.device) // row // multiple * multiple)
    if codec.id == "raw":
        # One copy without temporaries.
        size = max(1, tokens)
    return [(start, min(start + size, tokens)) for start in range(0, tokens, size)]


def _encodable_values(codec: Codec, x: torch.Tensor, start: int, stop: int, where: str) -> torch.Tensor:
    """Return tokens ``[start, stop)`` of ``x`` in the dtype that the codec encodes.

    Raises InvalidParameter if the codec is lossy and a value is not finite.
    """
    part = x[:, :, start:stop]
    if codec.summary.exact_dtype is None:
        part = part.to(torch.float32)
        check_finite(part, start, where)
    return part


def is_rounded(x: torch.Tensor, values: torch.Tensor) -> bool:
    """Return True if the conversion of ``x`` to ``values``, both ``[batch, kv_head, token, dim]``, changed a value."""
    if RAW_NAMES[x.dtype] in EXACT_DTYPES[RAW_NAMES[values.dtype]]:
        return False
    size = max(1, BLOCK_VALUES // max(1, x.shape[0] * x.shape[1] * x.shape[3]))
    for original, stored in zip(torch.split(x, size, 2), torch.split(values, size, 2), strict=True):
        # A NaN that remains NaN does not count as rounded.
        if ((stored.to(x.dtype) != original) & ~torch.isnan(original)).any():
            return True
    return False


@contextlib.contextmanager
def suppress_rounding_warnings() -> Iterator[None]:
    """Return a context manager that suppresses RoundedWarning in all threads, for measurements that already report the cost of rounding."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RoundedWarning)
        yield


def check_finite(x: torch.Tensor, first: int, where: str) -> None:
    """Raise InvalidParameter if ``x`` has a value that is not finite.

    The message contains ``where``, the value and its position. ``first`` is the number of the first token of ``x``.
    """
    # The sum is cheap. Only if it is not finite, which may be an overflow, is every value examined.
    if math.isfinite(x.sum().item()) or torch.isfinite(x).all():
        return
    batch, head, token, channel = torch.nonzero(~torch.isfinite(x))[0].tolist()
    value = x[batch, head, token, channel].item()
    raise InvalidParameter(
        f"{where}: the value at batch {batch}, head {head}, token {first + token}, channel {channel} is {value}: "
        "lossy codecs accept only finite values: use the codec raw or lossless, which store any value"
    )
