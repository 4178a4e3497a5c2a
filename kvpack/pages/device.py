"""Converts between pages in device memory and rows, with kernels.

The host only provides tables, and reads the outcomes afterward. Recipes that page kernels do not support are coded for all pages of a job
together (``batched``). Pages that kernels reject are coded by the host, which can report their errors. So are recipes with digits that must
be checked before they are looked up in tables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from kvpack.coding import dispatch
from kvpack.file.row import KEY_AT, KEY_BYTES, MULTIPLIER, build_front
from kvpack.formats.errors import DigestMismatch, KvpackError
from kvpack.runtime.modes import float32_no_grad, writable

from . import batched
from .buffer import PageBuffer
from .host import CPU, HostPages, LeftOutTokens, Outcome, RowPlan

if TYPE_CHECKING:
    from kvpack.kernels.pages.lanes import LayerTensors, PageSide

    from .lanes import Lane as PageLane

Rows = Sequence[Any] | torch.Tensor

_MAX_COUNT = 2**31 - 1

_REFUSED, _SUSPECT = 1, 2
"""Statuses of pages that kernels could not encode, and of pages in which tokens may lose precision or cause others to lose it."""


class PageJob:
    """A job that encodes or decodes pages, and may still be running. Slots and rows must not change before ``outcomes`` has returned."""

    def __init__(self, status: torch.Tensor, finish: Callable[[list[int]], list[Outcome]]) -> None:
        self._finish: Callable[[list[int]], list[Outcome]] | None = finish
        self._outcomes: list[Outcome] = []
        self._event: Any = None
        self._status = status
        if status.device.type == "cuda":
            self._status = torch.empty(status.shape, dtype=status.dtype, device="cpu", pin_memory=True)
            self._status.copy_(status, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(status.device))

    @classmethod
    def completed(cls, outcomes: list[Outcome]) -> PageJob:
        return cls(torch.zeros(0, dtype=torch.int32, device="cpu"), lambda _: outcomes)

    @property
    def on_device(self) -> bool:
        """True if the job runs on a CUDA device. Otherwise, it is already finished."""
        return self._event is not None

    @property
    def done(self) -> bool:
        """True if the device has finished. ``outcomes`` then has to process only pages that the device rejected."""
        return self._event is None or bool(self._event.query())

    def outcomes(self) -> list[Outcome]:
        """Wait for the device. Returns a list with None for each finished page, and an error for each other page."""
        if self._finish is not None:
            if self._event is not None:
                self._event.synchronize()
            self._outcomes, self._finish = self._finish(self._status.tolist()), None
        return self._outcomes


class _StartedEncoding(NamedTuple):
    """An encoding job that has been started but not awaited.

    ``status``, int32 ``[page]`` on the device, is 0, ``_REFUSED`` or ``_SUSPECT``. ``measured`` contains the
    (lane, layers, keys) in which ``batched.count_losses`` examines suspect pages: the lane's layers, and the keys of these layers.
    """

    status: torch.Tensor
    measured: list[tuple[PageLane, LayerTensors, LayerTensors]]


class DevicePages:
    """The implementation of ``PageCodec`` for pages on a device. It uses the device's current stream."""

    def __init__(self, plan: RowPlan, host: HostPages, device: torch.device, left_out: LeftOutTokens) -> None:
        self._plan, self._host, self._device, self._nbytes = plan, host, device, plan.layout.nbytes
        self._known: WeakKeyDictionary[PageBuffer, list[PageSide]] = WeakKeyDictionary()
        with torch.inference_mode(False):
            self._front = _uint8_tensor(build_front(plan.layout, plan.namespace, bytes(KEY_BYTES))).to(device)
            pads = [at for begin, end in plan.layout.pads for at in range(begin, end)]
            self._pads = torch.tensor(pads, dtype=torch.int32, device=device) if pads else None
            self._padding = None if self._pads is None else self._pads.to(torch.int64)
            self._shared_left_out, self.left_out = left_out, torch.zeros(2, dtype=torch.int64, device=device)
            """Counts of tokens without a raw slot, and of costly tokens among them (see ``LeftOutTokens``), int64 ``[2]``."""

    def encode(self, pages: PageBuffer, slots: Sequence[int], rows: Rows, digests: Sequence[bytes | None]) -> PageJob:
        """Start encoding pages into ``rows``. This is fastest if the rows are in device memory."""
        target = rows if self._is_usable(rows) else torch.empty(len(slots), self._nbytes, dtype=torch.uint8, device=self._device)
        assert isinstance(target, torch.Tensor)
        with float32_no_grad(self._device):
            begun = self._begin_encoding(pages, slots, target, digests)
            if begun is None:
                return PageJob.completed(self._encode_on_host(pages, slots, rows, digests, range(len(slots))))
            status, measured = begun
            if target is not rows and isinstance(rows, torch.Tensor):
                with writable(rows):
                    rows[:, : self._nbytes].copy_(target, non_blocking=True)

        def finish(statuses: list[int]) -> list[Outcome]:
            if not isinstance(rows, torch.Tensor):
                for number, row in enumerate(target.to(CPU)):
                    _store_row(rows, number, row)
            costly, states = statuses[-1], statuses[:-1]
            outcomes: list[Outcome] = [None] * len(slots)
            # The host encodes the pages that a kernel rejects, or raises an error that names the value.
            refused = [number for number, state in enumerate(states) if state == _REFUSED]
            suspects = [number for number, state in enumerate(states) if state == _SUSPECT]
            try:
                costly += self._count_losses(measured, slots, target, suspects)
            except torch.OutOfMemoryError:
                # Encode suspect pages again on the host, which counts their tokens itself and needs its own memory.
                refused += suspects
            self._shared_left_out.warn(costly)
            for number, outcome in zip(refused, self._encode_on_host(pages, slots, rows, digests, refused), strict=True):
                outcomes[number] = outcome
            return outcomes

        # Copy the counts together with the results, which the host waits for anyway.
        costly = self.left_out[1:].clamp_max(_MAX_COUNT).to(status.dtype)
        return PageJob(torch.cat([status, costly]), finish)

    def decode(self, rows: Rows, pages: PageBuffer, slots: Sequence[int], digests: Sequence[bytes | None], check_values: bool) -> PageJob:
        """Start decoding ``rows``. Rows on the device are checked there.

        With ``check_values``, the host checks all rows instead, including their codecs' rules.
        """
        errors: list[Outcome] = []
        with float32_no_grad(self._device):
            if not check_values and self._is_usable(rows):
                assert isinstance(rows, torch.Tensor)
                on_device, status = rows, self._check(rows, digests)
            else:
                sources = _row_views(rows)
                errors = self._host.check(sources, digests, check_values)
                good = [bytes(self._nbytes) if error else row[: self._nbytes] for row, error in zip(sources, errors, strict=True)]
                on_device = torch.stack([_uint8_tensor(row) for row in good]).to(self._device)
                status = torch.tensor([error is not None for error in errors], dtype=torch.int32, device=self._device)
            if not self._begin_decoding(on_device, pages, slots, status):
                return PageJob.completed(self._decode_on_host(rows, pages, slots, digests, check_values))

        def finish(statuses: list[int]) -> list[Outcome]:
            if errors:
                return errors
            assert isinstance(rows, torch.Tensor)
            return [self._row_error(rows, number, digests[number]) if value else None for number, value in enumerate(statuses)]

        return PageJob(status, finish)

    def _begin_encoding(
        self, pages: PageBuffer, slots: Sequence[int], rows: torch.Tensor, digests: Sequence[bytes | None]
    ) -> _StartedEncoding | None:
        """Start encoding into ``rows`` with kernels. Returns None if the host must encode instead."""
        if not dispatch.uses_triton(self._device):
            return None
        from kvpack.kernels.pages import checksum, lanes

        status = torch.zeros(len(slots), dtype=torch.int32, device=self._device)
        suspects, measured = torch.zeros(len(slots), dtype=torch.bool, device=self._device), []
        job = lanes.PageBatch(slots, rows, status)
        with writable(rows):
            rows[:, : self._front.numel()] = self._front
            if any(digests):
                rows[:, KEY_AT : KEY_AT + KEY_BYTES] = self._key_tensor(digests)
            if self._padding is not None:
                rows.index_fill_(1, self._padding, 0)
        try:
            keys = key_norms = None
            for lane, given in zip(self._plan.lanes, self._page_sides(pages), strict=True):
                norms = cache(partial(lanes.norms, given.layers, slots))
                # The keys of some layers come before their values.
                if lane.side == "k":
                    keys, key_norms = given.layers, norms
                assert keys is not None
                assert key_norms is not None
                errors = batched.allocate_errors(lane, len(slots), self._device)
                if lanes.encode(given, job, errors):
                    if batched.can_lose_precision(lane):
                        suspects |= batched.suspect_pages(lane, norms, key_norms, rows, errors)
                        measured.append((lane, given.layers, keys))
                    continue
                if not batched.supports(lane.codec):
                    return None
                batched.encode_lane(lane, given.layers, keys, slots, rows, self.left_out)
        except (KvpackError, torch.OutOfMemoryError):
            # Fall back to the host, which reports the page's error and needs its own memory.
            return None
        checksum.write(rows, self._nbytes, MULTIPLIER, status)
        status.clamp_max_(_REFUSED)
        return _StartedEncoding(torch.where((status == 0) & suspects, _SUSPECT, status), measured)

    def _count_losses(
        self,
        measured: Sequence[tuple[PageLane, LayerTensors, LayerTensors]],
        slots: Sequence[int],
        rows: torch.Tensor,
        page_indices: Sequence[int],
    ) -> int:
        """Count the tokens in some pages that lose precision or cause others to lose it. Adds them to ``left_out``.

        Returns the number of tokens to warn about.
        """
        if not page_indices:
            return 0
        chosen = [slots[number] for number in page_indices]
        with float32_no_grad(self._device):
            streams, counts = rows[:, : self._nbytes][list(page_indices)], torch.zeros_like(self.left_out)
            for lane, layers, keys in measured:
                counts += batched.count_losses(lane, layers, keys, chosen, streams)
            self.left_out += counts
        return int(counts[1])

    def _begin_decoding(self, rows: torch.Tensor, pages: PageBuffer, slots: Sequence[int], status: torch.Tensor) -> bool:
        if not dispatch.uses_triton(self._device):
            return False
        from kvpack.kernels.pages import lanes

        job = lanes.PageBatch(slots, rows, status)
        try:
            for lane, given in zip(self._plan.lanes, self._page_sides(pages), strict=True):
                if lanes.decode(given, job):
                    continue
                if not batched.supports(lane.codec):
                    return False
                batched.decode_lane(lane, rows, given.layers, slots, status)
        except torch.OutOfMemoryError:
            return False
        return True

    def _check(self, rows: torch.Tensor, digests: Sequence[bytes | None]) -> torch.Tensor:
        from kvpack.kernels.pages import checksum

        keys = self._key_tensor(digests) if any(digests) else None
        return checksum.check(rows, self._nbytes, MULTIPLIER, self._front.view(torch.int32), keys, self._pads)

    def _key_tensor(self, digests: Sequence[bytes | None]) -> torch.Tensor:
        return (
            _uint8_tensor(b"".join(digest or bytes(KEY_BYTES) for digest in digests))
            .view(-1, KEY_BYTES)
            .to(self._device, non_blocking=True)
        )

    def _is_usable(self, rows: Rows) -> bool:
        """Return True if kernels can read and write ``rows`` in place."""
        if not isinstance(rows, torch.Tensor) or rows.device != self._device or not dispatch.uses_triton(self._device):
            return False
        from kvpack.kernels.pages import lanes

        return rows.shape[1] >= self._nbytes and lanes.supports_rows(rows)

    def _page_sides(self, pages: PageBuffer) -> list[PageSide]:
        from kvpack.kernels.pages.lanes import PageSide

        if (known := self._known.get(pages)) is not None:
            return known
        result = self._known[pages] = [
            PageSide(
                lane.codec,
                pages.sides[lane.side][lane.first : lane.first + lane.count],
                {name: begin for name, (begin, _) in lane.byte_ranges.items()},
                lane.stride,
            )
            for lane in self._plan.lanes
        ]
        return result

    def _row_error(self, rows: torch.Tensor, page_index: int, digest: bytes | None) -> Outcome:
        where = f"row {page_index}"
        error = self._plan.row_error(_row_view(rows[page_index].to(CPU)), digest, False, where)
        return error or DigestMismatch(f"{where}: its bytes changed while it was decoded")

    def _encode_on_host(
        self, pages: PageBuffer, slots: Sequence[int], rows: Rows, digests: Sequence[bytes | None], page_indices: Sequence[int]
    ) -> list[Outcome]:
        if not page_indices:
            return []
        chosen = [slots[number] for number in page_indices]
        staged = [[layer[chosen].to(CPU) for layer in pages.sides[side]] for side in pages.sides]
        encoded = torch.zeros(len(chosen), self._nbytes, dtype=torch.uint8, device=CPU)
        outcomes = self._host.encode(
            PageBuffer(pages.geometry, *staged),
            range(len(chosen)),
            [_row_view(row) for row in encoded],
            [digests[number] for number in page_indices],
            chosen,
        )
        for number, row in zip(page_indices, encoded, strict=True):
            _store_row(rows, number, row)
        return outcomes

    def _decode_on_host(
        self, rows: Rows, pages: PageBuffer, slots: Sequence[int], digests: Sequence[bytes | None], check_values: bool
    ) -> list[Outcome]:
        count = len(slots)
        staged = [[torch.empty(count, *x.shape[1:], dtype=x.dtype, device=CPU) for x in pages.sides[side]] for side in pages.sides]
        outcomes = self._host.decode(_row_views(rows), PageBuffer(pages.geometry, *staged), range(count), digests, check_values)
        with torch.inference_mode():
            for part, layers in zip(staged, pages.sides.values(), strict=True):
                for source, target in zip(part, layers, strict=True):
                    for number, slot in enumerate(slots):
                        if outcomes[number] is None:
                            target[slot].copy_(source[number])
        return outcomes


def _uint8_tensor(data: bytes | bytearray | memoryview) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _row_view(row: torch.Tensor) -> memoryview:
    return row.numpy().data.cast("B")


def _row_views(rows: Rows) -> list[memoryview]:
    if isinstance(rows, torch.Tensor):
        return [_row_view(row) for row in rows.detach().to(CPU).contiguous()]
    return [memoryview(row).cast("B") for row in rows]


def _store_row(rows: Rows, page_index: int, row: torch.Tensor) -> None:
    if isinstance(rows, torch.Tensor):
        with torch.inference_mode():
            rows[page_index, : row.numel()].copy_(row)
    else:
        memoryview(rows[page_index]).cast("B")[: row.numel()] = _row_view(row)
