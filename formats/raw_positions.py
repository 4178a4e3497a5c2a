"""raw_positions: some tokens stored unquantized, in every head, with their positions (spec/side-cars.md).

Attention sinks have keys of low norm and values near zero, at any position in a sequence. Codecs with a low average error often have their
largest errors on sinks. If a constant or a few large channels dominate the keys, sinks can be found only from the values. A key of high
norm, over all heads or in one, raises scales that other tokens and heads share. The same tokens are raw in keys and values. If heads or
tokens share scales, tokens that make these scales too large for the others are raw, too. kvpack.pack, which also measures errors
(kvpack/coding/token_errors.py), adds the tokens whose own error is too large. Sources: StreamingLLM (arXiv 2309.17453) for the first
tokens, OTT and OScaR Sec. 3.1 for norms.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

from .errors import InvalidParameter, InvalidPayload, ValueTooLarge
from .lazy import numpy, torch
from .raw import DTYPES, TORCH_DTYPE_NAMES
from .sidecar import RawTokenSidecar, RunStep
from .streams import Layout
from .token_norms import (
    drop_crowded_pages,
    find_large_sizes,
    large_size_mask,
    measure_fit_errors,
    median_norms,
    norms_over_heads,
    norms_per_head,
)
from .value_blocks import BLOCK_VALUES, read_values, row_blocks

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from .base import Codec
    from .options import Options
    from .runs import Run
    from .value_blocks import Array

POSITIONS, VALUES = "raw_positions", "raw_values"

TOKENS_PER_SLOT = 64
"""Number of tokens in an engine's page per raw token that the page's row can store. In smaller pages, slots would take too much space."""

LOW_VALUE_SHARE = 0.55
"""Share of ``low_norm`` below which values are near zero: 0.33 times the median if ``low_norm`` is 0.6.

In SmolLM2, four in five attention sinks, and less than 1 in 1,000 other tokens, have values this small.
"""

MAX_LOW_VALUES_PER_PAGE = 16
"""Maximum number of tokens per page that are kept raw because their values are small. If there are more, they are not attention sinks."""

_MAX_BF16_IN_FP16 = 65280.0
"""The largest bf16 value that is finite in float16."""

_POSITION_WORDS = 4
"""Number of words in a position: three for the token, lowest first, and one for the sequence."""
_MAX_FIRST = 1 << 16


@dataclass(frozen=True)
class RawPositions(RawTokenSidecar):
    """Sidecar that stores raw tokens as ``dtype``: the ``first`` tokens of a sequence, and tokens whose norm is far from the median.

    The median is taken over the token's page. A norm is far from it if it is below ``low_norm`` or above ``high_norm`` times the median; a
    limit of 0 is disabled. With ``low_norm``, tokens whose values are near zero are raw too (``selection_norms``). With ``high_norm``,
    tokens are also raw if their norm in one head is above ``high_norm`` times that head's median, or if they do not fit the scales that
    heads or tokens share (``token_norms.measure_fit_errors``). These two rules apply only to pages with few such tokens.

    If the encoder receives the norms of keys (``Run.norms``), they also select the raw tokens of values.
    """

    name: ClassVar[str] = "raw_positions"
    words: ClassVar[tuple[str, ...]] = ("raw_first", "raw_low_norm", "raw_high_norm", "raw_dtype")
    supports_every_codec: ClassVar[bool] = True
    feature: ClassVar[str] = "raw-positions"

    dim: int
    dtype: str
    first: int = field(default=0, compare=False)
    low_norm: float = field(default=0.0, compare=False)
    high_norm: float = field(default=0.0, compare=False)

    @classmethod
    def from_options(cls, dim: int, side: str, options: Options) -> Self | None:
        dtype = options.choice("raw_dtype", "", tuple(DTYPES), omitted="bf16")
        first = options.integer("raw_first", 0, 1, _MAX_FIRST)
        low_norm, high_norm = options.fraction("raw_low_norm", 0.0), options.ratio("raw_high_norm", 0.0)
        if not (first or low_norm or high_norm):
            if dtype:
                raise InvalidParameter(
                    f"codec {options.codec}: raw_dtype={dtype} has no effect without raw_first=<count>, raw_low_norm=<share> or "
                    "raw_high_norm=<ratio>: add one of them, or omit raw_dtype="
                )
            return None
        return cls(dim, dtype or "bf16", first, low_norm, high_norm)

    def layout(self, batch: int, heads: int, tokens: int) -> dict[str, Layout]:
        """Return the layouts of ``raw_positions``, the token and sequence of each raw token, and of ``raw_values``."""
        return {
            POSITIONS: Layout("U16", (1, 1, 0, _POSITION_WORDS), per="entry", batch_axis=None),
            VALUES: Layout(DTYPES[self.dtype], (1, 1, 0, heads, self.dim), per="entry", batch_axis=None),
        }

    def default_entry_counts(self, batch: int, heads: int, tokens: int) -> dict[str, int]:
        count = batch * min(tokens, self.first)
        return {POSITIONS: count, VALUES: count}

    def begin(self, run: Run, previous: Mapping[str, torch.Tensor] | None, codec: Codec) -> RunStep:
        norms = run.norms
        if norms is None:
            none = torch.empty(*run.shape[:2], 0, dtype=torch.float32, device=run.device)
            norms = torch.cat([none, *(norms_per_head(block) for block in run.blocks())], 2)

        chosen = self.choose(norms, run.position, previous is not None)
        shared = codec.without_sidecars.shared_scales
        if shared and self.high_norm:
            rest = _replace_in_run(run, chosen, codec.group_tokens) if codec.changes_norms else run
            chosen = mark_poor_fits(chosen, measure_fit_errors(codec.coded_norms(rest, previous), shared))
        return RunStep({}, lambda block, start: self.encode(block, chosen[:, start : start + block.shape[2]], codec.group_tokens, start))

    def selection_norms(self, keys: torch.Tensor, values: torch.Tensor | None) -> torch.Tensor:
        """Return the norms for ``choose``: the norms of ``keys``, or 0 for tokens whose ``values`` are near zero.

        Both arguments are norms ``[batch, kv_head, token]``. ``values`` is None if they are unknown.
        """
        if values is None or not self.low_norm:
            return keys
        sizes = norms_over_heads(values)
        near_zero = drop_crowded_pages(sizes < LOW_VALUE_SHARE * self.low_norm * median_norms(sizes), MAX_LOW_VALUES_PER_PAGE)
        return keys.masked_fill(near_zero[:, None], 0.0)

    def choose(self, norms: torch.Tensor, position: int | None = None, continues: bool = False) -> torch.Tensor:
        """Return a mask of the tokens of a run to keep raw, bool ``[batch, token]``.

        ``norms`` are ``[batch, kv_head, token]``, and ``position`` is the position of the first token. If it is None, the run begins the
        sequence unless it ``continues`` another run. Tokens that do not fit the codec's scales are not included; ``mark_poor_fits`` adds
        them.
        """
        batch, _, tokens = norms.shape
        chosen = torch.zeros(batch, tokens, dtype=torch.bool, device=norms.device)
        if position is None:
            position = self.first if continues else 0
        chosen[:, : max(0, self.first - position)] = True
        if (self.low_norm or self.high_norm) and tokens:
            token_norms = norms_over_heads(norms)
            median = median_norms(token_norms)
            chosen |= (token_norms < self.low_norm * median) & torch.isfinite(median)
            if self.high_norm:
                # If the median is 0, as in padding, every other norm would exceed it.
                chosen |= (token_norms > self.high_norm * median) & (median > 0)
                # Waiting for a device takes longer than computing a mask that is usually empty.
                large = find_large_sizes(norms, self.high_norm) if norms.device.type == "cpu" else large_size_mask(norms, self.high_norm)
                if large is not None:
                    chosen |= drop_crowded_pages(large.any(1) & ~chosen)
        return chosen

    def encode(
        self, x: torch.Tensor, chosen: torch.Tensor, group_tokens: int, start: int = 0
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Replace the ``chosen`` tokens of ``x`` ``[batch, kv_head, token, dim]`` (see ``replace_tokens``).

        Returns the new values, and the streams that store the tokens. ``start`` is the index of the first token within its run. Raises
        ValueTooLarge if a value does not fit the dtype.
        """
        token, sequence = chosen.T.nonzero().unbind(1)
        return replace_tokens(x, token, sequence, chosen, group_tokens), self.encode_tokens(x, token, sequence, start)

    def encode_tokens(self, x: torch.Tensor, token: torch.Tensor, sequence: torch.Tensor, start: int = 0) -> dict[str, torch.Tensor]:
        """Return the streams for the tokens of ``x`` at each pair of ``token`` and ``sequence`` indices.

        Other arguments are as in ``encode``.
        """
        values = gather_raw_values(x, token, sequence, self.dtype, "choose a wider raw_dtype")
        return {POSITIONS: encode_positions(token + start, sequence)[None, None], VALUES: values[None, None]}

    def token_positions(self, streams: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return _entry_positions(streams[POSITIONS])

    def kept_values(self, streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return streams[VALUES][0, 0, : len(_entry_positions(streams[POSITIONS])[0])].to(torch.float32)

    def entry_tokens(self, streams: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        token, _ = _entry_positions(streams[POSITIONS])
        return {POSITIONS: token, VALUES: token}

    def shift_tokens(self, streams: Mapping[str, torch.Tensor], tokens: int | torch.Tensor) -> dict[str, torch.Tensor]:
        words = _position_words_as_int64(streams[POSITIONS])
        token = _token_indices(words)
        used = (token >= 0).nonzero()[:, 0]
        positions = encode_positions((token + tokens)[used], words[used, -1])
        return {POSITIONS: positions[None, None], VALUES: streams[VALUES].index_select(2, used)}

    def select_sequences(self, streams: Mapping[str, torch.Tensor], indices: torch.Tensor) -> dict[str, torch.Tensor]:
        token, sequence = _entry_positions(streams[POSITIONS])
        entry, row = (sequence[:, None] == indices.to(sequence.device)[None]).nonzero().unbind(1)
        order = torch.argsort(token[entry] * len(indices) + row)
        entry, row = entry[order], row[order]
        return {POSITIONS: encode_positions(token[entry], row)[None, None], VALUES: streams[VALUES].index_select(2, entry)}

    def split_sequences(self, streams: Mapping[str, torch.Tensor], parts: int, batch: int) -> list[dict[str, torch.Tensor]]:
        """Split ``batch`` sequences into ``parts`` equal parts. Returns the streams of each part.

        The streams must not contain unused entries.
        """
        token, sequence = _entry_positions(streams[POSITIONS])
        order = torch.argsort(sequence // (batch // parts), stable=True)
        counts = torch.bincount(sequence // (batch // parts), minlength=parts).tolist()
        positions = encode_positions(token[order], sequence[order] % (batch // parts))[None, None]
        both = (torch.split(x, counts, 2) for x in (positions, streams[VALUES].index_select(2, order)))
        return [{POSITIONS: position.clone(), VALUES: values.clone()} for position, values in zip(*both, strict=True)]

    def check(self, arrays: Mapping[str, Array], where: str) -> None:
        """Raise InvalidPayload unless there is one position per raw token. The raw values need no check, because all are valid."""
        positions, rows = arrays[POSITIONS].shape[2], arrays[VALUES].shape[2]
        if positions != rows:
            raise InvalidPayload(f"{where}.{POSITIONS}: there are {positions} positions, but {where}.{VALUES} has {rows} raw tokens")

    def check_runs(self, arrays: Mapping[str, Array], runs: Sequence[int], batch: int, where: str) -> None:
        """Raise InvalidPayload for positions that are out of order or out of range, and for unused entries that are not zero."""
        tokens, last, used = sum(runs), -1, 0
        for first, (block,) in row_blocks(arrays[POSITIONS]):
            words = block.astype(numpy.int64)
            token, sequence = _token_indices(words), words[:, -1]
            unused = token < 0
            wrong = (token >= tokens) | (sequence >= batch) | (unused & (sequence > 0))
            if wrong.any():
                at = int(wrong.argmax())
                raise InvalidPayload(
                    f"{where}.{POSITIONS}: position {first + at} is {words[at].tolist()}, expected a token number from 1 to {tokens} in "
                    f"the first three words and a sequence below {batch} in the last, or all zeros if unused"
                )
            place = token * batch + sequence
            behind_unused = numpy.logical_or.accumulate(unused) | (used < first)
            wrong = ~unused & (behind_unused | (numpy.concatenate([[last], place[:-1]]) >= place))
            if wrong.any():
                at = int(wrong.argmax())
                rule = "follows an unused one, but those come last" if behind_unused[at] else "must be greater than the position before it"
                raise InvalidPayload(f"{where}.{POSITIONS}: position {first + at} is {words[at].tolist()}, which {rule}")
            here = int(numpy.count_nonzero(~unused))
            used, last = used + here, int(place[here - 1]) if here else last
        values = arrays[VALUES]
        width = math.prod(values.shape[3:])
        for first in range(used * width, values.shape[2] * width, BLOCK_VALUES):
            block = read_values(values, first, min(first + BLOCK_VALUES, values.shape[2] * width))
            if block.view(f"<u{block.dtype.itemsize}").any():
                raise InvalidPayload(f"{where}.{VALUES}: an unused entry is not zero, expected zeros after the {used} used entries")


def mark_poor_fits(chosen: torch.Tensor, fit_errors: torch.Tensor) -> torch.Tensor:
    """Return ``chosen``, bool ``[batch, token]``, with additional tokens whose ``fit_errors`` are above 1, on pages with few such tokens.

    ``fit_errors`` come from ``token_norms.measure_fit_errors``.
    """
    return chosen | drop_crowded_pages((fit_errors > 1) & ~chosen)


@dataclass(frozen=True)
class RawTokenSlots:
    """The raw tokens of a batch of pages, with the same number of slots on each page.

    ``codec_input`` contains the values to encode, in which raw tokens are replaced (``replace_tokens``). ``chosen``, bool ``[page,
    token]``, marks the raw tokens. ``streams`` have shape ``[page, slot, ...]`` and are zero in unused slots. ``wanted``, bool ``[2, page,
    token]``, contains two masks, which ignore the number of slots: all tokens that should be raw, and those that would cost other tokens
    precision.
    """

    codec_input: torch.Tensor
    chosen: torch.Tensor
    streams: dict[str, torch.Tensor]
    wanted: torch.Tensor


def slot_count(tokens: int, minimum: int = 0) -> int:
    """Return the number of raw tokens that fit in the row of a page of ``tokens`` tokens. The result is at least ``minimum``."""
    return max(minimum, tokens // TOKENS_PER_SLOT)


def store_in_slots(
    raw: RawPositions, x: torch.Tensor, norms: torch.Tensor, group_tokens: int, slots: int, fit_errors: torch.Tensor | None = None
) -> RawTokenSlots:
    """Store the raw tokens of pages ``x`` ``[page, kv_head, token, dim]`` in slots.

    ``norms`` are the argument of ``RawPositions.choose``. ``fit_errors`` is the result of ``token_norms.measure_fit_errors`` if scales are
    shared. The position of a page in its sequence is unknown, so the first tokens of a sequence get no special treatment.

    If there are not enough slots, tokens of high norm come first, in descending order. They are raw only with codecs that encode tokens
    together, because otherwise they do not affect other tokens. Tokens of low norm come next. Tokens that make a shared scale too large
    come last, the worst first, no matter how many there are on a page.

    For codecs that encode tokens one by one and share no scale between heads, the host does not wait for the device. Raises ValueTooLarge
    for a value that does not fit the dtype.
    """
    tokens = x.shape[2]
    token, wanted = choose_slot_tokens(raw, norms, group_tokens, slots, fit_errors)
    used = token < tokens
    page = torch.arange(len(x), device=x.device)[:, None]
    exact = x.transpose(1, 2)[page, token.clamp_max(tokens - 1)]
    values = _round_values(exact, raw.dtype)
    values = values.masked_fill(~used[..., None, None], 0.0)
    if raw.dtype == "fp16" and x.dtype != torch.float16 and bool((values.isinf() & exact.isfinite()).any()):
        raise ValueTooLarge("a raw token exceeds the largest fp16 value, 65504: choose a wider raw_dtype")
    numbers = token.masked_fill(~used, -1).flatten()
    positions = encode_positions(numbers, torch.zeros_like(numbers)).view(*token.shape, _POSITION_WORDS)
    # Tokens with small norms do not enlarge scales; they matter only to codecs with groups of tokens.
    codec_input, chosen = x, slot_mask(token, tokens)
    if group_tokens > 1:
        places, sequence = chosen.T.nonzero().unbind(1)
        codec_input = replace_tokens(x, places, sequence, chosen, group_tokens)
    return RawTokenSlots(codec_input, chosen, {POSITIONS: positions, VALUES: values}, wanted)


def choose_slot_tokens(
    raw: RawPositions, norms: torch.Tensor, group_tokens: int, slots: int, fit_errors: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the raw tokens of pages by ``norms`` ``[page, kv_head, token]``. Returns the tokens that get a slot, and two masks.

    The tokens are int64 ``[page, slot]``, ascending; unused slots contain the number of tokens. The masks, bool ``[2, page, token]``,
    ignore the number of slots: all tokens that should be raw, and those that would cost other tokens precision.
    """
    tokens = norms.shape[2]
    low = replace(raw, high_norm=0.0).choose(norms, raw.first)
    raw_mask = raw.choose(norms, raw.first) if group_tokens > 1 else low
    token_norms = norms_over_heads(norms)
    order = torch.where(low, token_norms, torch.where(raw_mask, -token_norms, torch.inf))
    if fit_errors is not None and raw.high_norm:
        unfit = (fit_errors > 1) & ~raw_mask
        order, raw_mask = torch.where(unfit, torch.finfo(order.dtype).max / fit_errors, order), raw_mask | unfit
    least = order.topk(slots, 1, largest=False, sorted=True).indices
    token = torch.where(raw_mask.gather(1, least), least, tokens).sort(1).values
    return token, torch.stack([raw_mask, raw_mask & ~low])


def slot_mask(token: torch.Tensor, tokens: int) -> torch.Tensor:
    """Convert the tokens that ``choose_slot_tokens`` returned to a mask, bool ``[page, token]``. Each page has ``tokens`` tokens."""
    return torch.zeros(len(token), tokens + 1, dtype=torch.bool, device=token.device).scatter_(1, token, True)[:, :tokens]


def count_left_out(needs_raw: torch.Tensor, chosen: torch.Tensor, fit_errors: torch.Tensor | None = None) -> torch.Tensor:
    """Count the tokens that should be raw but are not ``chosen``. Returns int64 ``[2]``: all of them, and those that cost precision.

    A token costs precision if it loses precision itself or makes other tokens lose it.

    ``chosen`` is bool ``[page, token]``, and ``needs_raw`` contains the masks that ``choose_slot_tokens`` returned. Tokens with
    ``fit_errors`` ``[2, page, token]`` above 1 (see ``token_errors.excess_losses``) also count, but only once.
    """
    left = needs_raw if fit_errors is None else needs_raw | (fit_errors > 1)
    return (left & ~chosen).sum((1, 2))


def restore_slot_tokens(values: torch.Tensor, streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Put the raw tokens in ``streams`` ``[page, slot, ...]`` back into the pages ``values`` ``[page, kv_head, token, dim]``.

    Returns the pages. The host does not wait for the device.
    """
    tokens = values.shape[2]
    words = streams[POSITIONS].view(torch.int16).to(torch.int64).bitwise_and(0xFFFF)
    token = _token_indices(words.flatten(0, 1)).view(words.shape[:2])
    # Ignore invalid positions: rows are decoded after only their checksum was verified.
    token = torch.where((token < 0) | (token > tokens), tokens, token)
    padded = torch.cat([values, values[:, :, :1]], 2)
    padded.transpose(1, 2)[torch.arange(len(padded), device=padded.device)[:, None], token] = streams[VALUES].to(padded.dtype)
    return padded[:, :, :tokens].contiguous()


def gather_raw_values(x: torch.Tensor, token: torch.Tensor, sequence: torch.Tensor, dtype: str, remedy: str) -> torch.Tensor:
    """Return the tokens of ``x`` at each pair of ``token`` and ``sequence`` indices, as ``dtype``: ``[entry, kv_head, dim]``.

    ``x`` is ``[batch, kv_head, token, dim]``. Raises ValueTooLarge if a finite value does not fit the dtype; the message ends with
    ``remedy``.
    """
    exact = x.permute(2, 0, 1, 3)[token, sequence]
    values = _round_values(exact, dtype)
    if exact.dtype == torch.float16 or torch.promote_types(exact.dtype, values.dtype) == values.dtype:
        return values
    lost = torch.isinf(values) & torch.isfinite(exact)
    if lost.any():
        entry, head, channel = torch.nonzero(lost)[0].tolist()
        raise ValueTooLarge(
            f"raw token {int(token[entry])} (sequence {int(sequence[entry])}, head {head}) has the value "
            f"{exact[entry, head, channel].item():.6g} in channel {channel}, but the largest {dtype} value is "
            f"{torch.finfo(values.dtype).max:.6g}: {remedy}"
        )
    return values


def _round_values(exact: torch.Tensor, dtype: str) -> torch.Tensor:
    """Round finite values to ``dtype``. float16 values stay finite in float16, which the nearest bf16 value may not be."""
    values = exact.to(getattr(torch, TORCH_DTYPE_NAMES[dtype]))
    if exact.dtype == torch.float16 and values.dtype == torch.bfloat16:
        return torch.where(exact.isinf(), values, values.clamp(-_MAX_BF16_IN_FP16, _MAX_BF16_IN_FP16))
    return values


def replace_tokens(x: torch.Tensor, token: torch.Tensor, sequence: torch.Tensor, chosen: torch.Tensor, group_tokens: int) -> torch.Tensor:
    """Replace the tokens of ``x`` ``[batch, kv_head, token, dim]`` at each pair of ``token`` and ``sequence`` indices.

    ``chosen`` is the mask of these tokens. To keep the range of their token group narrow, they become the mean of its other tokens, or zero
    if there are none.
    """
    if not len(token):
        return x
    result = x.clone()
    by_token = result.permute(2, 0, 1, 3)
    if group_tokens == 1:
        by_token[token, sequence] = 0
        return result
    tokens, batch = x.shape[2], x.shape[0]
    groups, group_index = torch.unique(token // group_tokens * batch + sequence, return_inverse=True)
    places = (groups // batch * group_tokens)[:, None] + torch.arange(group_tokens, device=x.device)
    exists, places, group_sequence = places < tokens, places.clamp_max(tokens - 1), (groups % batch)[:, None]
    others = exists & ~chosen[group_sequence, places]
    values = by_token[places, group_sequence].to(torch.float64).masked_fill(~others[..., None, None], 0.0)
    means = values.sum(1) / others.sum(1).clamp_min(1)[:, None, None]
    by_token[token, sequence] = means[group_index].to(x.dtype)
    return result


def _replace_in_run(run: Run, chosen: torch.Tensor, group_tokens: int) -> Run:
    """Return ``run`` with its ``chosen`` tokens replaced by ``replace_tokens``."""

    def blocks() -> Iterator[torch.Tensor]:
        start = 0
        for block in run.blocks():
            chosen_here = chosen[:, start : start + block.shape[2]]
            token, sequence = chosen_here.T.nonzero().unbind(1)
            yield replace_tokens(block, token, sequence, chosen_here, group_tokens)
            start += block.shape[2]

    return replace(run, blocks=blocks)


def _token_indices(words: Any) -> Any:
    """Return the token indices in positions ``[entry, word]``, int64. Unused entries get -1."""
    return (words[:, 0] | words[:, 1] << 16 | words[:, 2] << 32) - 1


def _entry_positions(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the token index and the sequence index of each raw token, int64 ``[raw token]`` each. Unused entries are skipped."""
    words = _position_words_as_int64(positions)
    token = _token_indices(words)
    used = token >= 0
    return token[used], words[used, -1]


def _position_words_as_int64(positions: torch.Tensor) -> torch.Tensor:
    """Convert the words of positions ``[1, 1, entry, word]`` to int64 ``[entry, word]``."""
    return positions[0, 0].view(torch.int16).to(torch.int64).bitwise_and(0xFFFF)


def encode_positions(token: torch.Tensor, sequence: torch.Tensor) -> torch.Tensor:
    """Encode int64 indices of tokens (-1 for unused entries) and of sequences as words, uint16 ``[entry, 4]``."""
    # The 16-bit words of int64 numbers; the highest word of a position is free.
    words = (token + 1).view(torch.int16).view(len(token), _POSITION_WORDS)
    words[:, -1] = sequence
    return words.view(torch.uint16)
