"""PackedWorker: encodes vLLM's device pages in place into rows in host memory, and decodes them back."""

from __future__ import annotations

import time
from collections import Counter, deque
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy
import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult

from .chunk_keys import ABSENT, row_key

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvpack.pages.buffer import PageBuffer
    from kvpack.pages.codec import PageCodec
    from kvpack.pages.device import PageJob
    from kvpack.pages.host import Outcome


class GroupPart(NamedTuple):
    """The blocks of one group in a transfer. Each block has a row in host memory, uint8 ``[byte]``, and a key.

    ``absent`` contains the rows of the same chunks that have no block.
    """

    group: int
    blocks: list[int]
    rows: list[torch.Tensor]
    keys: list[bytes]
    absent: list[torch.Tensor]


class _Transfer:
    """A transfer: page jobs with rows on the device. ``on_finished`` is called for each job that the device has finished."""

    def __init__(
        self,
        job_id: int,
        parts: list[tuple[GroupPart, torch.Tensor, PageJob]],
        on_finished: Callable[[GroupPart, torch.Tensor, PageJob], None],
        stream: Any,
    ) -> None:
        self.number, self._parts, self._on_finished, self._stream = job_id, parts, on_finished, stream
        self._begun, self._landed = time.perf_counter(), False
        self._event: Any = None

    def done(self, wait: bool = False) -> bool:
        """Return True if the transfer has finished. With ``wait``, wait until it has."""
        if not self._landed:
            if not wait and not all(job.done for _, _, job in self._parts):
                return False
            self._landed = True
            for part, rows, job in self._parts:
                self._on_finished(part, rows, job)
            if self._stream is not None:
                self._event = self._stream.record_event()
        if self._event is None:
            return True
        if wait:
            self._event.synchronize()
        return bool(self._event.query())

    @property
    def result(self) -> Any:
        size = sum(rows.numel() for _, rows, _ in self._parts)
        return TransferResult(self.number, True, size, time.perf_counter() - self._begun)


class PackedWorker(OffloadingWorker):  # type: ignore[misc]
    """Encodes blocks into chunks of ``memory``, int8 ``[chunk, byte]``, and decodes them. A chunk has one row per block.

    ``codecs`` and ``pages`` have one entry per group. On a CUDA device, work runs on a separate stream, which first waits for the current
    stream. ``release`` frees the memory. Specs of chunks contain ``keys`` (see ``chunk_keys.attach_keys``), which are also in the rows. A
    block whose row cannot be decoded, or belongs to another block, is left unchanged and added to ``failed_blocks``.
    """

    def __init__(
        self,
        codecs: Sequence[PageCodec],
        pages: Sequence[PageBuffer],
        memory: torch.Tensor,
        blocks_per_chunk: int,
        release: Callable[[], None],
    ) -> None:
        self._codecs, self._pages, self._release = codecs, pages, release
        self._memory, self._blocks = memory.view(torch.uint8), blocks_per_chunk
        self._device, self._absent = pages[0].device, torch.tensor(list(ABSENT), dtype=torch.uint8, device="cpu")
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._running: deque[_Transfer] = deque()
        self._failed: set[int] = set()
        self._counts: Counter[tuple[str, ...]] = Counter()
        self._reported: Counter[tuple[str, ...]] = Counter()

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        parts = []
        with self._on_stream():
            for part in self._group_parts(src_spec, dst_spec):
                codec = self._codecs[part.group]
                rows = torch.empty(len(part.blocks), codec.nbytes, dtype=torch.uint8, device=self._device)
                parts.append((part, rows, codec.start_encode(self._pages[part.group], part.blocks, rows, keys=part.keys)))
        self._running.append(_Transfer(job_id, parts, self._copy_rows_out, self._stream))
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False) -> bool:
        parts = []
        with self._on_stream():
            for part in self._group_parts(dst_spec, src_spec):
                codec = self._codecs[part.group]
                rows = torch.empty(len(part.blocks), codec.nbytes, dtype=torch.uint8, device=self._device)
                for row, source in zip(rows, part.rows, strict=True):
                    row.copy_(source, non_blocking=True)
                parts.append((part, rows, codec.start_decode(rows, self._pages[part.group], part.blocks, keys=part.keys)))
        self._running.append(_Transfer(job_id, parts, self._copy_rows_in, self._stream))
        return True

    def get_finished(self) -> list[Any]:
        result = []
        while self._running and self._running[0].done():
            result.append(self._running.popleft().result)
        return result

    def wait(self, job_ids: set[int]) -> None:
        """Wait for the transfers ``job_ids``. vLLM collects their results with ``get_finished``."""
        for transfer in self._running:
            if transfer.number in job_ids:
                transfer.done(wait=True)

    def failed_blocks(self) -> set[int]:
        """Return the blocks that could not be loaded since the last call."""
        failed, self._failed = self._failed, set()
        return failed

    def count(self, name: str) -> int:
        """Return the number of blocks counted as ``name``: "encoded", "refused", "decoded" or "damaged"."""
        return sum(count for labels, count in self._counts.items() if labels[0] == name)

    def pop_counts(self) -> Counter[tuple[str, ...]]:
        """Return the block counts since the last call, by name and, for refused and damaged blocks, by reason."""
        added, self._reported = self._counts - self._reported, self._counts.copy()
        return added

    def shutdown(self) -> None:
        self.wait({transfer.number for transfer in self._running})
        self._running.clear()
        for codec in self._codecs:
            codec.close()
        self._pages = ()
        del self._memory
        self._release()

    def _on_stream(self) -> AbstractContextManager[Any]:
        if self._stream is None:
            return nullcontext()
        # Wait for the model, which may still write blocks to store, and for vLLM, which may still zero blocks to load.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(self._stream)

    def _copy_rows_out(self, part: GroupPart, rows: torch.Tensor, job: PageJob) -> None:
        """Copy rows to host memory. If a page could not be encoded, its row is made invalid, so that loading it fails later."""
        for place in part.absent:
            # Erase the remains of an earlier chunk, so that they are not copied to other tiers.
            place[: len(ABSENT)] = self._absent
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            outcomes = job.outcomes()
            for row, target in zip(rows, part.rows, strict=True):
                target.copy_(row, non_blocking=True)
        self._count("encoded", "refused", outcomes)

    def _copy_rows_in(self, part: GroupPart, rows: torch.Tensor, job: PageJob) -> None:
        outcomes = job.outcomes()
        self._count("decoded", "damaged", outcomes)
        self._failed |= {block for block, outcome in zip(part.blocks, outcomes, strict=True) if outcome is not None}

    def _count(self, success: str, failure: str, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            self._counts[(success,) if outcome is None else (failure, type(outcome).__name__)] += 1

    def _group_parts(self, on_device: Any, on_host: Any) -> list[GroupPart]:
        """Return the blocks of each group with their rows. A transfer may start and end in the middle of a chunk."""
        chunks = numpy.asarray(on_host.chunk_ids if hasattr(on_host, "chunk_ids") else on_host.block_ids).tolist()
        blocks = on_device.block_ids.tolist()
        result, chunk, block = [], 0, 0
        for group, (count, index) in enumerate(zip(on_device.group_sizes, on_device.block_indices, strict=True)):
            if not count:
                continue
            skipped, size = index % self._blocks, self._codecs[group].nbytes
            used = -(-(count + skipped) // self._blocks)
            places = [(number, at) for number in range(chunk, chunk + used) for at in range(self._blocks)]
            rows = [self._memory[chunks[number], at * size : (at + 1) * size] for number, at in places]
            names = [row_key(on_host.keys[number], at) for number, at in places]
            taken = slice(skipped, skipped + count)
            absent = rows[:skipped] + rows[skipped + count :]
            result.append(GroupPart(group, blocks[block : block + count], rows[taken], names[taken], absent))
            chunk, block = chunk + used, block + count
        return result
