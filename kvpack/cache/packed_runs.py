"""Packed tokens: runs that were encoded together (``PackedRun``), and stretches of consecutive runs that share arrays (``Stretch``).

A file may have one run per token, so a run must cost only a few bytes. A stretch therefore stores its runs as a file does, with one array
per stream, and creates ``PackedRun`` objects only on request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, overload

import numpy
import torch

from kvpack.coding.dispatch import decode, decode_frame
from kvpack.formats.batch import select_sequences, take_rows
from kvpack.formats.errors import OutOfBounds
from kvpack.runtime.modes import float32_no_grad

if TYPE_CHECKING:

    from kvpack.formats.base import Codec
    from kvpack.formats.streams import Layout

    Streams = Mapping[str, torch.Tensor]
    Ends = numpy.ndarray[Any, numpy.dtype[numpy.int64]]

_TOKENS_COUNTED = 1 << 12
"""Number of tokens, over all sequences and heads, for which entries are counted in one operation."""


_MAX_SHOWN_RUNS = 4
"""Maximum number of runs shown in a repr."""


@dataclass(frozen=True, eq=False, repr=False)
class Stretch:
    """Consecutive runs that share arrays. ``ends`` contains the end of each run, as a token index.

    Each stream is one array with the rows of all runs in order.
    """

    codec: Codec
    ends: Ends
    streams: Streams

    @property
    def tokens(self) -> int:
        return int(self.ends[-1])

    @property
    def layout(self) -> Mapping[str, Layout]:
        """The layout of each stream, except for its number of rows."""
        return self.codec.row_layouts

    def token_range(self, run_index: int) -> tuple[int, int]:
        """Return the first token of run ``run_index``, and the token after its last token."""
        return int(self.ends[run_index - 1]) if run_index else 0, int(self.ends[run_index])

    @cached_property
    def _first_rows(self) -> dict[int, Ends]:
        """First row of each run, followed by the total number of rows, keyed by the number of tokens per row."""
        steps = {layout.tokens_per_row for layout in self.layout.values() if layout.per == "token" and layout.tokens_per_row > 1}
        tokens = numpy.diff(self.ends, prepend=0)
        return {step: numpy.concatenate([[0], numpy.cumsum(-(-tokens // step))]) for step in steps}

    @cached_property
    def _first_entries(self) -> dict[str, torch.Tensor]:
        """First row of each token, followed by the total number of rows, for each stream with one row per entry.

        The tensors are int64 ``[token + 1]`` on the CPU, or ``[row + 1]`` if entries are counted per row of tokens.
        """
        entries = [name for name, layout in self.layout.items() if layout.per == "entry" and name not in self._entry_tokens]
        counted = {name: [torch.zeros(1, dtype=torch.int64, device="cpu")] for name in entries}
        if counted:
            step = next(self.layout[name].tokens_per_row for name in counted)
            flags = {name for name, layout in self.layout.items() if layout.per == "token" and layout.tokens_per_row == step}
            batch, heads, rows = next(iter(self.streams[name].shape[:3] for name in flags))
            size = max(1, _TOKENS_COUNTED // max(1, batch * heads))
            for start in range(0, rows, size):
                block = {name: self.streams[name][:, :, start : start + size] for name in flags}
                for name, counts in self.codec.entries(block).items():
                    counted[name].append(counts.flatten(1).sum(1).cpu())
        return {name: torch.cat(counts).cumsum(0) for name, counts in counted.items()}

    @cached_property
    def _entry_tokens(self) -> dict[str, torch.Tensor]:
        """Token of each entry, in ascending order, for each stream whose entries store token numbers. int64 on the CPU."""
        return {name: token.cpu() for name, token in self.codec.entry_tokens(self.streams).items()}

    def rows(self, start: int, stop: int, entries: bool = True) -> dict[str, torch.Tensor]:
        """Return the streams of tokens ``[start, stop)`` by name.

        ``start`` must be the first token of a token group. Streams are returned as views. If a stream's entries store token numbers, it is
        a renumbered copy, and is omitted if ``entries`` is False.
        """
        # An empty range at the end belongs to the last run.
        first = min(int(numpy.searchsorted(self.ends, start, "right")), len(self.ends) - 1)
        last = max(first, int(numpy.searchsorted(self.ends, stop, "left")))
        result = {}
        for name, layout in self.layout.items():
            if entries or name not in self._entry_tokens:
                result[name] = self.streams[name][:, :, slice(*self._row_range(name, layout, start, stop, first, last))]
        return result | self.codec.shift_tokens(result, -start) if entries and self._entry_tokens and start else result

    def _row_range(self, name: str, layout: Layout, start: int, stop: int, first: int, last: int) -> tuple[int, int]:
        """Return the range of a stream's rows for tokens ``[start, stop)``.

        These tokens are in runs ``first`` to ``last``.
        """
        if layout.per == "run":
            return first, last + 1
        if (tokens := self._entry_tokens.get(name)) is not None:
            begin, end = torch.searchsorted(tokens, torch.tensor([start, stop], dtype=torch.int64, device="cpu")).tolist()
            return begin, end
        step = layout.tokens_per_row
        if step > 1:
            rows = self._first_rows[step]
            start = int(rows[first]) + (start - self.token_range(first)[0]) // step
            stop = int(rows[last]) - (self.token_range(last)[0] - stop) // step
        if layout.per == "entry":
            entries = self._first_entries[name]
            return int(entries[start]), int(entries[stop])
        return start, stop

    def slice(self, start: int, stop: int) -> Stretch:
        """Return tokens ``[start, stop)``, at least one. Bytes are shared, except in streams that ``Codec.cut`` has to re-encode.

        Raises OutOfBounds if ``start`` is inside a token group.
        """
        if (start, stop) == (0, self.tokens):
            return self
        first, last = int(numpy.searchsorted(self.ends, start, "right")), int(numpy.searchsorted(self.ends, stop, "left"))
        begin = start - self.token_range(first)[0]
        if begin % self.codec.group_tokens:
            raise OutOfBounds(
                f"begins {begin} tokens into a run whose codec encodes {self.codec.group_tokens} tokens together: start "
                f"at a multiple of {self.codec.group_tokens}"
            )
        streams: Streams = self.rows(start, stop)
        part = (stop - self.token_range(last)[0]) % self.codec.group_tokens
        if part and stop < self.ends[last]:
            with float32_no_grad(next(iter(streams.values())).device):
                streams = self.codec.cut(streams, part)
        return Stretch(self.codec, numpy.minimum(self.ends[first : last + 1], stop) - start, streams)

    def packed_run(self, run_index: int) -> PackedRun:
        """Return run ``run_index``. If the stretch has only one run, every call returns the same object."""
        if len(self.ends) == 1:
            return self._only_run
        start, stop = self.token_range(run_index)
        return PackedRun(self.codec, stop - start, self.rows(start, stop))

    @cached_property
    def _only_run(self) -> PackedRun:
        return PackedRun(self.codec, self.tokens, self.streams)

    @cached_property
    def continues_previous(self) -> numpy.ndarray[Any, numpy.dtype[numpy.bool_]]:
        """One bool for each run except the first: True if it can be joined to the previous run (see ``PackedRun.is_continued_by``)."""
        whole = torch.from_numpy(numpy.diff(self.ends, prepend=0)[:-1] % self.codec.group_tokens == 0)
        for name, layout in self.layout.items():
            if layout.per == "run":
                rows = self.streams[name]
                # Some devices cannot compare uint16.
                rows = rows.view(torch.int16) if rows.dtype == torch.uint16 else rows
                same = (rows[:, :, 1:] == rows[:, :, :-1]).transpose(0, 2).flatten(1).all(1)
                whole &= same.cpu()
        result: numpy.ndarray[Any, numpy.dtype[numpy.bool_]] = whole.numpy()
        return result


@dataclass(frozen=True, eq=False, repr=False)
class PackedRun:
    """A run of tokens that were encoded together. ``Codec.layout`` returns the shapes of ``streams``."""

    codec: Codec
    tokens: int
    streams: Mapping[str, torch.Tensor]

    def __repr__(self) -> str:
        return f"PackedRun({self.codec.id}, {self.tokens} tokens)"

    @cached_property
    def stretch(self) -> Stretch:
        return Stretch(self.codec, numpy.array([self.tokens], numpy.int64), self.streams)

    def rows(self, start: int, stop: int, entries: bool = True) -> dict[str, torch.Tensor]:
        """Return the streams of tokens ``[start, stop)`` by name, as ``Stretch.rows`` does."""
        return self.stretch.rows(start, stop, entries)

    def decode_frame(self, start: int, stop: int) -> torch.Tensor:
        """Decode tokens ``[start, stop)`` to float32 ``[batch, kv_head, token, dim]``, without reversing the codec's rotation."""
        aligned = start - start % self.codec.group_tokens
        # Only whole token groups can be decoded, so there may be more tokens than requested.
        return decode_frame(self.codec, self.rows(aligned, stop))[:, :, start - aligned : stop - aligned]

    def slice(self, start: int, stop: int) -> PackedRun:
        """Return tokens ``[start, stop)``, at least one. ``start`` must be a multiple of the codec's token group."""
        return self.stretch.slice(start, stop).packed_run(0)

    def decode(self, start: int, stop: int) -> torch.Tensor:
        """Decode tokens ``[start, stop)`` to the original values, ``[batch, kv_head, token, dim]``.

        The dtype is the one that the codec stores exactly, or float32 if the codec is lossy.
        """
        aligned = start - start % self.codec.group_tokens
        rows = self.rows(aligned, stop)
        return decode(self.codec, rows)[:, :, start - aligned : stop - aligned]

    def query(self, q: torch.Tensor) -> torch.Tensor:
        """Map queries ``[batch, kv_head, row, dim]`` to the codec's rotated frame, in which ``decode_frame`` returns keys."""
        return self.codec.query(q, self.streams)

    def original(self, sums: torch.Tensor) -> torch.Tensor:
        """Map weighted sums of values from the codec's rotated frame to the original frame. ``sums`` is ``[batch, kv_head, row, dim]``."""
        return self.codec.original(sums, self.streams)

    def is_continued_by(self, other: PackedRun) -> bool:
        """Return True if ``other`` can be joined to the end of this run.

        This run must end with a complete token group, and streams with one row per run must be equal in both runs.
        """
        if self.tokens % self.codec.group_tokens:
            return False
        run_streams = [name for name, layout in self.codec.row_layouts.items() if layout.per == "run"]
        return all(torch.equal(self.streams[name], other.streams[name]) for name in run_streams)

    def select(self, indices: torch.Tensor) -> PackedRun:
        """Return a run with the sequences at ``indices`` of the batch, int64 ``[row]``, in that order. Codes are copied, not decoded."""
        return replace(self, streams=select_sequences(self.codec, self.streams, indices))

    @staticmethod
    def joined(runs: Sequence[PackedRun]) -> PackedRun:
        """Join consecutive runs. Each run must pass ``is_continued_by`` for the next run. The streams of two or more runs are copied."""
        first = runs[0]
        if len(runs) == 1:
            return first
        with float32_no_grad(next(iter(first.streams.values())).device):
            streams = _joined_streams(first.codec, [(run.tokens, run.streams) for run in runs])
            streams |= {name: first.streams[name] for name, layout in first.codec.row_layouts.items() if layout.per == "run"}
        return PackedRun(first.codec, sum(run.tokens for run in runs), streams)


def _joined_streams(codec: Codec, parts: Sequence[tuple[int, Streams]]) -> dict[str, torch.Tensor]:
    """Join the streams of consecutive ``parts``, (number of tokens, streams) pairs. Returns one array per stream.

    Token numbers in entries are changed to count from the first part's first token.
    """
    if len(parts) == 1:
        return dict(parts[0][1])
    result = {name: torch.cat([streams[name] for _, streams in parts], 2) for name in codec.row_layouts}
    if numbered := [*codec.entry_tokens(parts[0][1])]:
        entries = torch.tensor([streams[numbered[0]].shape[2] for _, streams in parts], dtype=torch.int64, device="cpu")
        firsts = torch.tensor([0, *accumulate(tokens for tokens, _ in parts[:-1])], dtype=torch.int64, device="cpu")
        result |= codec.shift_tokens(result, firsts.repeat_interleave(entries).to(result[numbered[0]].device))
    return result


@dataclass(eq=False, repr=False)
class PackedRuns(Sequence[PackedRun]):
    """The runs of packed keys or values, in order. A stretch of several runs creates its ``PackedRun`` objects on every access."""

    stretches: tuple[Stretch, ...] = ()
    _last: tuple[int, PackedRun] | None = field(default=None, init=False)

    @staticmethod
    def from_runs(runs: Iterable[PackedRun]) -> PackedRuns:
        """Return ``runs`` as ``PackedRuns`` with one stretch per run, or unchanged if they already are ``PackedRuns``."""
        return runs if isinstance(runs, PackedRuns) else PackedRuns(tuple(run.stretch for run in runs))

    def __repr__(self) -> str:
        shown = repr(self[:_MAX_SHOWN_RUNS])
        return shown if len(self) <= _MAX_SHOWN_RUNS else f"{shown[:-1]}, ... {len(self)} in all)"

    def __len__(self) -> int:
        return self._run_count

    @cached_property
    def _run_count(self) -> int:
        return sum(len(stretch.ends) for stretch in self.stretches)

    @overload
    def __getitem__(self, index: int) -> PackedRun: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[PackedRun, ...]: ...
    def __getitem__(self, index: int | slice) -> PackedRun | tuple[PackedRun, ...]:
        if isinstance(index, slice):
            return tuple(self[number] for number in range(*index.indices(len(self))))
        number = range(len(self))[index]
        if len(self.stretches) == len(self):
            return self.stretches[number].packed_run(0)
        last = self._last
        if last is None or last[0] != number:
            part = int(numpy.searchsorted(self._first_runs, number, "right")) - 1
            # Successive tiles look up the same run, and compare runs by identity.
            self._last = last = number, self.stretches[part].packed_run(number - int(self._first_runs[part]))
        return last[1]

    def __iter__(self) -> Iterator[PackedRun]:
        return (stretch.packed_run(number) for stretch in self.stretches for number in range(len(stretch.ends)))

    @cached_property
    def _first_runs(self) -> Ends:
        """The index of the first run in each stretch."""
        return numpy.cumsum([0, *(len(stretch.ends) for stretch in self.stretches)])[:-1]

    @cached_property
    def _first_tokens(self) -> list[int]:
        """The first token of each stretch, followed by the total number of tokens."""
        return [0, *accumulate(stretch.tokens for stretch in self.stretches)]

    @property
    def tokens(self) -> int:
        return self._first_tokens[-1]

    @cached_property
    def ends(self) -> Ends:
        """The end of each run, as a token index."""
        parts = [stretch.ends + first for stretch, first in zip(self.stretches, self._first_tokens, strict=False)]
        return numpy.concatenate([numpy.empty(0, numpy.int64), *parts])

    def slice(self, start: int, stop: int) -> PackedRuns:
        """Return tokens ``[start, stop)``. Packed bytes are shared. Raises OutOfBounds if ``start`` is inside a token group."""
        result = []
        for stretch, first in zip(self.stretches, self._first_tokens, strict=False):
            begin, end = max(start - first, 0), min(stop - first, stretch.tokens)
            if begin < end:
                result.append(stretch.slice(begin, end))
        return PackedRuns(tuple(result))

    def mapped(self, codec: Codec, change: Callable[[Streams], Streams]) -> PackedRuns:
        """Apply ``change`` to the streams of each stretch. Returns the resulting runs, which have the codec ``codec``."""
        return PackedRuns(tuple(Stretch(codec, stretch.ends, change(stretch.streams)) for stretch in self.stretches))

    @cached_property
    def _joins_next(self) -> numpy.ndarray[Any, numpy.dtype[numpy.bool_]]:
        if len(self) < 2:
            return numpy.empty(0, bool)
        codec = self.stretches[0].codec
        if not codec.summary.has_run_rows:
            whole: numpy.ndarray[Any, numpy.dtype[numpy.bool_]] = numpy.diff(self.ends, prepend=0)[:-1] % codec.group_tokens == 0
            return whole
        parts = [stretch.continues_previous for stretch in self.stretches[:1]]
        for stretch, other in pairwise(self.stretches):
            parts += [
                numpy.array([stretch.packed_run(len(stretch.ends) - 1).is_continued_by(other.packed_run(0))]),
                other.continues_previous,
            ]
        return numpy.concatenate([numpy.empty(0, bool), *parts])

    def merged_runs(self) -> tuple[int, ...]:
        """Return the number of tokens in each run that ``merged()`` returns."""
        if len(self) == 1:
            return (self.tokens,)
        last = numpy.append(~self._joins_next, True)[: len(self)]
        return tuple(numpy.diff(self.ends[last], prepend=0).tolist())

    def merged(self) -> PackedRuns:
        """Return the same tokens in one stretch, with as few runs as possible. The streams of two or more stretches are copied."""
        if not self.stretches or (len(self.stretches) == 1 and (len(self) == 1 or not self._joins_next.any())):
            return self
        first, last = numpy.append(True, ~self._joins_next), numpy.append(~self._joins_next, True)
        kept, template = torch.from_numpy(numpy.flatnonzero(first)), self.stretches[0]
        with float32_no_grad(next(iter(template.streams.values())).device):
            streams = _joined_streams(template.codec, [(stretch.tokens, stretch.streams) for stretch in self.stretches])
            for name, layout in template.layout.items():
                if layout.per == "run":
                    streams[name] = take_rows(streams[name], 2, kept.to(streams[name].device))
        return PackedRuns((Stretch(template.codec, self.ends[last], streams),))

    def append(self, run: PackedRun) -> PackedRuns:
        """Return the runs followed by ``run``.

        To keep the number of runs small, an earlier run is joined with the runs after it unless it has more tokens than they have together.
        """
        number, tokens, after = len(self), run.tokens, run
        while number:
            before = self[number - 1]
            if before.tokens > tokens or not before.is_continued_by(after):
                break
            number, tokens, after = number - 1, tokens + before.tokens, before
        start = int(self.ends[number - 1]) if number else 0
        kept = self.slice(0, start) if number < len(self) else self
        preceding = self.slice(start, self.tokens).stretches if number < len(self) else ()
        joined = PackedRuns((*preceding, run.stretch))
        if preceding:
            joined = joined.merged()
        return PackedRuns((*kept.stretches, *joined.stretches))
