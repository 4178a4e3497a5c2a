"""Converts between pages in host memory and rows, with the codec's own threads."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple

import numpy
import torch

from kvpack.coding.blocks import single_threaded
from kvpack.errors import KvpackWarning
from kvpack.file.row import KEY_BYTES, RowLayout, build_front, check_row, check_row_matches, write_checksum
from kvpack.formats.errors import KvpackError
from kvpack.formats.group import PER_HEAD
from kvpack.runtime.modes import float32_no_grad
from kvpack.runtime.threads import WorkerThreads

from .bound_lanes import BoundLane
from .lanes import Lane, check_row_values

if TYPE_CHECKING:
    from kvpack.file.header import Contents

    from .buffer import PageBuffer
    from .geometry import PageGeometry


class LeftOutTokens:
    """Counts tokens that should have been kept raw but did not fit in their page. Safe to use from any thread.

    A token of low norm is harmless, because only its own error grows. A token is ``costly`` if tokens or heads that share a scale with it
    lose precision, or if its own channel map, mean, scale or norm represents it poorly.
    """

    def __init__(self, geometry: PageGeometry) -> None:
        self._tokens = geometry.tokens
        self._lock, self._has_warned = Lock(), False
        self.count = self.costly = 0

    def add(self, count: int, costly: int) -> None:
        """Add the counts of one page, without a warning."""
        with self._lock:
            self.count += count
            self.costly += costly

    def warn(self, costly: int) -> None:
        """Issue a KvpackWarning that ``costly`` tokens lose precision. Warns at most once."""
        with self._lock:
            if self._has_warned or not costly:
                return
            self._has_warned = True
        warnings.warn(
            f"in pages of {self._tokens} tokens, {costly} tokens lose precision, or tokens and heads that share scales with them do: "
            "they differ too much from the rest and cannot be kept raw for lack of room, or their norms are too small for norm=log8. To "
            "avoid this, use larger pages, of 64 tokens or more, with raw=0,0.6,4 in the recipe, or set "
            f"token_scale=fp16{PER_HEAD} for the group codec, per=token for minifloat, and norm=fp16 in place of norm=log8, and omit mean= "
            "and channel_scale=. This warning is issued once; PageCodec.raw_tokens_left_out keeps counting the tokens without room",
            KvpackWarning,
            stacklevel=3,
        )


Outcome = KvpackError | None
"""The outcome for one page: None, or the error that prevented it."""

CPU = torch.device("cpu")


class RowPlan(NamedTuple):
    """The layout of all rows of a page codec. Checks rows against it."""

    geometry: PageGeometry
    contents: Contents
    layout: RowLayout
    namespace: bytes
    lanes: Sequence[Lane]

    def row_error(self, row: memoryview, digest: bytes | None, check_values: bool, where: str) -> Outcome:
        """Return the error of an invalid row, or None if it is valid. With ``check_values``, the rules of its codecs are checked too."""
        try:
            frame = check_row(row, where)
            check_row_matches(row[: frame.length], frame, self.layout, self.namespace, digest, where)
            if check_values:
                check_row_values(row[: frame.length], self.contents, self.layout, where)
        except KvpackError as error:
            return error
        return None


class HostPages:
    """The implementation of ``PageCodec`` for pages in host memory."""

    def __init__(self, plan: RowPlan, threads: int, left_out: LeftOutTokens) -> None:
        self._plan, self._threads, self._left_out = plan, threads, left_out
        self._own = WorkerThreads(threads, "kvpack-pages")

    def close(self) -> None:
        self._own.close()

    def encode(
        self,
        pages: PageBuffer,
        slots: Sequence[int],
        targets: Sequence[memoryview],
        digests: Sequence[bytes | None],
        names: Sequence[int] | None = None,
    ) -> list[Outcome]:
        """Encode the pages in ``slots`` into ``targets``. Returns a list with None for each encoded page, and an error for each other page.

        Errors contain the slot numbers in ``names``, if set, instead of ``slots``.
        """
        plan = self._plan
        lanes = [BoundLane.bind(lane, pages) for lane in plan.lanes]

        def encode(page_index: int, threads: int) -> Outcome:
            row = targets[page_index][: plan.layout.nbytes]
            row[: plan.layout.payload] = build_front(plan.layout, plan.namespace, digests[page_index] or bytes(KEY_BYTES))
            try:
                left_out = numpy.zeros(2, numpy.int64)
                for lane in lanes:
                    left_out += lane.encode(slots[page_index], row, threads)
            except KvpackError as error:
                row[:8] = bytes(8)
                return type(error)(f"slot {(slots if names is None else names)[page_index]}: {error}")
            for begin, end in plan.layout.pads:
                row[begin:end] = bytes(end - begin)
            write_checksum(row)
            self._left_out.add(*left_out.tolist())
            return None

        outcomes = self._run_all(encode, len(slots))
        self._left_out.warn(self._left_out.costly)
        return outcomes

    def check(self, sources: Sequence[memoryview], digests: Sequence[bytes | None], check_values: bool) -> list[Outcome]:
        """Return a list with None for each valid row, and an error for each invalid row."""
        return self._run_all(
            lambda index, _: self._plan.row_error(sources[index], digests[index], check_values, f"row {index}"), len(sources)
        )

    def decode(
        self, sources: Sequence[memoryview], pages: PageBuffer, slots: Sequence[int], digests: Sequence[bytes | None], check_values: bool
    ) -> list[Outcome]:
        """Check each row, and decode valid rows into their slots.

        Returns a list with None for each decoded row, and an error for each other row.
        """
        plan = self._plan
        lanes = [BoundLane.bind(lane, pages) for lane in plan.lanes]

        def decode(page_index: int, threads: int) -> Outcome:
            row = sources[page_index]
            error = plan.row_error(row, digests[page_index], check_values, f"row {page_index}")
            if error is None:
                for lane in lanes:
                    lane.decode(row[: plan.layout.nbytes], slots[page_index], threads)
            return error

        return self._run_all(decode, len(slots))

    def _run_all(self, work: Callable[[int, int], Outcome], count: int) -> list[Outcome]:
        workers = min(self._threads, count)
        # Use all threads for a single page, and one thread per page for several.
        run = partial(_run_isolated, work, self._threads if count == 1 else 1)
        if workers < 2:
            return [run(number) for number in range(count)]
        calls = [self._own.submit(partial(run, number)) for number in range(count)]
        wait(calls)
        return [call.result() for call in calls]


def _run_isolated(work: Callable[[int, int], Outcome], threads: int, page_index: int) -> Outcome:
    with float32_no_grad(CPU), single_threaded():
        return work(page_index, threads)
