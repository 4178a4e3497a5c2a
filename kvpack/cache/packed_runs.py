"""The packed tokens of a side: runs of tokens encoded together, stored in stretches of consecutive runs.

A file may have one run per token. A stretch contains consecutive runs as the file stores them, one array per stream, and creates a page
only on request, so that a run costs a few bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from operator import attrgetter
from typing import TYPE_CHECKING, Any, overload

import numpy
import torch

from kvpack.coding.dispatch import decode, decode_frame
from kvpack.formats.batch import select_sequences, take_rows
from kvpack.formats.errors import OutOfBounds
from kvpack.runtime.modes import float32_no_grad

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from kvpack.formats.base import Codec, Layout

    Streams = Mapping[str, torch.Tensor]
    Ends = numpy.ndarray[Any, numpy.dtype[numpy.int64]]

_TOKENS_COUNTED = 1 << 12
"""Number of tokens per sequence and head whose entries are counted together."""


_SHOWN = 4
"""Maximum number of runs that a repr lists."""


@dataclass(frozen=True, eq=False, repr=False)
class Stretch:
    """Consecutive runs with their ``ends``; streams are as a file stores them, with the rows of one run after another."""

    codec: Codec
    ends: Ends
    streams: Streams

    @staticmethod
    def of_runs(codec: Codec, runs: Iterable[int], streams: Streams) -> Stretch:
        """Create a stretch of at least one run; ``runs`` are the token counts."""
        return Stretch(codec, numpy.cumsum(numpy.fromiter(runs, numpy.int64), dtype=numpy.int64), streams)

    @property
    def tokens(self) -> int:
        return int(self.ends[-1])

    @property
    def layout(self) -> Mapping[str, Layout]:
        """The layout of every stream, except for its number of rows."""
        return self.codec.row_layouts

    def run(self, number: int) -> tuple[int, int]:
        """Return the first token of a run, and its end."""
        return int(self.ends[number - 1]) if number else 0, int(self.ends[number])

    @cached_property
    def _first_rows(self) -> dict[int, Ends]:
        """For every number of tokens per row, the first row of each run, and the end."""
        steps = {layout.tokens_per_row for layout in self.layout.values() if layout.per == "token" and layout.tokens_per_row > 1}
        tokens = numpy.diff(self.ends, prepend=0)
        return {step: numpy.concatenate([[0], numpy.cumsum(-(-tokens // step))]) for step in steps}

    @cached_property
    def _first_entries(self) -> dict[str, torch.Tensor]:
        """First row of each token (or of each row of its counts), and the end, for every stream with one row per entry.

        They are int64 ``[token + 1]`` or ``[row + 1]``, on the CPU.
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
        """Token of each entry, ascending int64 on the CPU, for streams whose entries name their tokens."""
        return {name: token.cpu() for name, token in self.codec.entry_tokens(self.streams).items()}

    def rows(self, start: int, stop: int) -> dict[str, torch.Tensor]:
        """Return the streams of tokens ``[start, stop)`` as views, except for entries that name their tokens.

        ``start`` must begin a token group.
        """
        # An empty range after the last token belongs to the last run.
        first = min(int(numpy.searchsorted(self.ends, start, "right")), len(self.ends) - 1)
        last = max(first, int(numpy.searchsorted(self.ends, stop, "left")))
        result = {}
        for name, layout in self.layout.items():
            result[name] = self.streams[name][:, :, slice(*self._rows_of(name, layout, start, stop, first, last))]
        return result | self.codec.shift_tokens(result, -start) if self._entry_tokens and start else result

    def _rows_of(self, name: str, layout: Layout, start: int, stop: int, first: int, last: int) -> tuple[int, int]:
        """Return the rows of a stream for tokens ``[start, stop)``, in the runs ``first`` to ``last``."""
        if layout.per == "run":
            return first, last + 1
        if (tokens := self._entry_tokens.get(name)) is not None:
            begin, end = torch.searchsorted(tokens, torch.tensor([start, stop], dtype=torch.int64, device="cpu")).tolist()
            return begin, end
        step = layout.tokens_per_row
        if step > 1:
            rows = self._first_rows[step]
            start, stop = int(rows[first]) + (start - self.run(first)[0]) // step, int(rows[last]) - (self.run(last)[0] - stop) // step
        if layout.per == "entry":
            entries = self._first_entries[name]
            return int(entries[start]), int(entries[stop])
        return start, stop

    def slice(self, start: int, stop: int) -> Stretch:
        """Return tokens ``[start, stop)``, at least one; streams are shared, except for those that ``Codec.cut`` encodes again.

        Raises OutOfBounds if ``start`` is inside a token group.
        """
        if (start, stop) == (0, self.tokens):
            return self
        first, last = int(numpy.searchsorted(self.ends, start, "right")), int(numpy.searchsorted(self.ends, stop, "left"))
        begin = start - self.run(first)[0]
        if begin % self.codec.token_group:
            raise OutOfBounds(
                f"begins {begin} tokens into a page whose codec encodes {self.codec.token_group} tokens together: start "
                f"at a multiple of {self.codec.token_group}"
            )
        streams: Streams = self.rows(start, stop)
        part = (stop - self.run(last)[0]) % self.codec.token_group
        if part and stop < self.ends[last]:
            with float32_no_grad(next(iter(streams.values())).device):
                streams = self.codec.cut(streams, part)
        return Stretch(self.codec, numpy.minimum(self.ends[first : last + 1], stop) - start, streams)

    def page(self, number: int) -> PackedRun:
        """Return one run as a page; a stretch of one run always returns the same object."""
        if len(self.ends) == 1:
            return self._only_page
        start, stop = self.run(number)
        return PackedRun(self.codec, stop - start, self.rows(start, stop))

    @cached_property
    def _only_page(self) -> PackedRun:
        return PackedRun(self.codec, self.tokens, self.streams)

    @cached_property
    def continues(self) -> numpy.ndarray[Any, numpy.dtype[numpy.bool_]]:
        """Mask, for each run after the first, of those that can be joined to the one before (``PackedRun.continued_by``)."""
        whole = torch.from_numpy(numpy.diff(self.ends, prepend=0)[:-1] % self.codec.token_group == 0)
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
    """One run of ``tokens`` packed tokens: the codec's streams, laid out by ``Codec.layout``."""

    codec: Codec
    tokens: int
    streams: Mapping[str, torch.Tensor]

    def __repr__(self) -> str:
        return f"PackedRun({self.codec.id}, {self.tokens} tokens)"

    @cached_property
    def stretch(self) -> Stretch:
        """The page as a stretch of one run."""
        return Stretch(self.codec, numpy.array([self.tokens], numpy.int64), self.streams)

    def rows(self, start: int, stop: int) -> dict[str, torch.Tensor]:
        """Return the streams of tokens ``[start, stop)`` as views; ``start`` must be a multiple of the codec's token group."""
        return self.stretch.rows(start, stop)

    def frame(self, start: int, stop: int) -> torch.Tensor:
        """Decode tokens ``[start, stop)`` to float32 ``[batch, kv_head, token, dim]`` in the coded frame."""
        aligned = start - start % self.codec.token_group
        # Of a group that is coded together, more tokens than those of the rows may be decoded.
        return decode_frame(self.codec, self.rows(aligned, stop))[:, :, start - aligned : stop - aligned]

    def slice(self, start: int, stop: int) -> PackedRun:
        """Return tokens ``[start, stop)``, at least one; ``start`` must be a multiple of the codec's token group."""
        return self.stretch.slice(start, stop).page(0)

    def decode(self, start: int, stop: int) -> torch.Tensor:
        """Decode tokens ``[start, stop)`` to ``[batch, kv_head, token, dim]`` in the original frame.

        The dtype is the exact dtype, or float32.
        """
        aligned = start - start % self.codec.token_group
        rows = self.rows(aligned, stop)
        return decode(self.codec, rows)[:, :, start - aligned : stop - aligned]

    def query(self, q: torch.Tensor) -> torch.Tensor:
        """Map queries ``[batch, kv_head, row, dim]`` to the coded frame, for products with the keys of ``frame``."""
        return self.codec.query(q, self.streams)

    def original(self, sums: torch.Tensor) -> torch.Tensor:
        """Map sums ``[batch, kv_head, row, dim]`` of ``frame``'s values to the original frame."""
        return self.codec.original(sums, self.streams)

    def continued_by(self, other: PackedRun) -> bool:
        """Return True if ``other`` can be joined on: the last token group is complete, and the streams with one row per run are equal."""
        if self.tokens % self.codec.token_group:
            return False
        of_runs = [name for name, layout in self.codec.row_layouts.items() if layout.per == "run"]
        return all(torch.equal(self.streams[name], other.streams[name]) for name in of_runs)

    def select(self, indices: torch.Tensor) -> PackedRun:
        """Return the sequences ``indices``, int64 ``[row]`` within the batch, in that order; codes are copied, never decoded."""
        return replace(self, streams=select_sequences(self.codec, self.streams, indices))

    @staticmethod
    def joined(runs: Sequence[PackedRun]) -> PackedRun:
        """Join consecutive runs, each ``continued_by`` the next; joining more than one page makes a copy."""
        first = runs[0]
        if len(runs) == 1:
            return first
        with float32_no_grad(next(iter(first.streams.values())).device):
            parts = _in_order(first.codec, [(page.tokens, page.streams) for page in runs])
            streams = {
                name: first.streams[name] if layout.per == "run" else torch.cat([part[name] for part in parts], 2)
                for name, layout in first.codec.row_layouts.items()
            }
        return PackedRun(first.codec, sum(page.tokens for page in runs), streams)


def _in_order(codec: Codec, parts: Sequence[tuple[int, Streams]]) -> list[Streams]:
    """Return the streams of consecutive ``parts``, ready to be joined: entries name tokens counted from the first part's."""
    firsts = accumulate((tokens for tokens, _ in parts), initial=0)
    return [{**streams, **codec.shift_tokens(streams, first)} for first, (_, streams) in zip(firsts, parts, strict=False)]


class PackedRuns(Sequence[PackedRun]):
    """The runs of a side, in order. Runs of a stretch with many runs are created on request and not cached."""

    def __init__(self, stretches: Iterable[Stretch] = ()) -> None:
        self.stretches = tuple(stretches)
        self._last: tuple[int, PackedRun] | None = None

    @staticmethod
    def of(runs: Iterable[PackedRun]) -> PackedRuns:
        """Create ``PackedRuns`` with one stretch per page; return ``PackedRuns`` unchanged."""
        return runs if isinstance(runs, PackedRuns) else PackedRuns(map(attrgetter("stretch"), runs))

    def __repr__(self) -> str:
        shown = repr(self[:_SHOWN])
        return shown if len(self) <= _SHOWN else f"{shown[:-1]}, ... {len(self)} in all)"

    def __len__(self) -> int:
        return self._count

    @cached_property
    def _count(self) -> int:
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
            return self.stretches[number].page(0)
        last = self._last
        if last is None or last[0] != number:
            part = int(numpy.searchsorted(self._first_pages, number, "right")) - 1
            # Successive tiles look up the same page and rely on getting the same object.
            self._last = last = number, self.stretches[part].page(number - int(self._first_pages[part]))
        return last[1]

    def __iter__(self) -> Iterator[PackedRun]:
        return (stretch.page(number) for stretch in self.stretches for number in range(len(stretch.ends)))

    @cached_property
    def _first_pages(self) -> Ends:
        """Number of the first page of every stretch."""
        return numpy.cumsum([0, *(len(stretch.ends) for stretch in self.stretches)])[:-1]

    @cached_property
    def _first_tokens(self) -> list[int]:
        """First token of every stretch, and the end."""
        return [0, *accumulate(stretch.tokens for stretch in self.stretches)]

    @property
    def tokens(self) -> int:
        return self._first_tokens[-1]

    @cached_property
    def ends(self) -> Ends:
        """End of each page, in tokens."""
        parts = [stretch.ends + first for stretch, first in zip(self.stretches, self._first_tokens, strict=False)]
        return numpy.concatenate([numpy.empty(0, numpy.int64), *parts])

    def slice(self, start: int, stop: int) -> PackedRuns:
        """Return tokens ``[start, stop)``; streams are shared. Raises OutOfBounds if ``start`` is inside a token group."""
        result = []
        for stretch, first in zip(self.stretches, self._first_tokens, strict=False):
            begin, end = max(start - first, 0), min(stop - first, stretch.tokens)
            if begin < end:
                result.append(stretch.slice(begin, end))
        return PackedRuns(result)

    def mapped(self, codec: Codec, change: Callable[[Streams], Streams]) -> PackedRuns:
        """Apply ``change`` to the streams of each stretch; the result has ``codec``."""
        return PackedRuns(Stretch(codec, stretch.ends, change(stretch.streams)) for stretch in self.stretches)

    @cached_property
    def _continues(self) -> numpy.ndarray[Any, numpy.dtype[numpy.bool_]]:
        """Mask, for each page after the first, of those that can be joined to the one before (``PackedRun.continued_by``)."""
        if len(self) < 2:
            return numpy.empty(0, bool)
        parts = [stretch.continues for stretch in self.stretches[:1]]
        for stretch, other in pairwise(self.stretches):
            parts += [numpy.array([stretch.page(len(stretch.ends) - 1).continued_by(other.page(0))]), other.continues]
        return numpy.concatenate([numpy.empty(0, bool), *parts])

    def merged_runs(self) -> tuple[int, ...]:
        """Return the tokens of each page of ``merged()``."""
        if len(self) == 1:
            return (self.tokens,)
        last = numpy.append(~self._continues, True)[: len(self)]
        return tuple(numpy.diff(self.ends[last], prepend=0).tolist())

    def merged(self) -> PackedRuns:
        """Return the same tokens in the fewest runs and one stretch; several stretches are copied."""
        if not self.stretches or (len(self.stretches) == 1 and (len(self) == 1 or not self._continues.any())):
            return self
        first, last = numpy.append(True, ~self._continues), numpy.append(~self._continues, True)
        kept, template = torch.from_numpy(numpy.flatnonzero(first)), self.stretches[0]
        streams = {}
        with float32_no_grad(next(iter(template.streams.values())).device):
            of_stretches = _in_order(template.codec, [(stretch.tokens, stretch.streams) for stretch in self.stretches])
            for name, layout in template.layout.items():
                parts = [named[name] for named in of_stretches]
                whole = torch.cat(parts, 2) if len(parts) > 1 else parts[0]
                streams[name] = take_rows(whole, 2, kept.to(whole.device)) if layout.per == "run" else whole
        return PackedRuns([Stretch(template.codec, self.ends[last], streams)])

    def added(self, page: PackedRun) -> PackedRuns:
        """Append ``page``, joined with the last runs as long as those are no longer than it."""
        number, tokens, after = len(self), page.tokens, page
        while number:
            before = self[number - 1]
            if before.tokens > tokens or not before.continued_by(after):
                break
            number, tokens, after = number - 1, tokens + before.tokens, before
        start = int(self.ends[number - 1]) if number else 0
        kept = self.slice(0, start) if number < len(self) else self
        joined = (
            PackedRuns([*self.slice(start, self.tokens).stretches, page.stretch]).merged()
            if number < len(self)
            else PackedRuns([page.stretch])
        )
        return PackedRuns([*kept.stretches, *joined.stretches])
