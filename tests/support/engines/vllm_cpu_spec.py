"""Run vLLM's tiering spec on its CPU platform, although vLLM's own worker requires a GPU.

Device pages and the primary tier are both in host memory.
"""

from __future__ import annotations

from typing import Any

import numpy
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CopyWorker(OffloadingWorker):  # type: ignore[misc]
    """A worker that copies whole blocks synchronously."""

    def __init__(self, kv_caches: Any, blocks_per_chunk: int, region: Any) -> None:
        self._blocks, self._region, self._done = blocks_per_chunk, region, []
        host = [region.create_next_worker_view(cache.page_size_bytes * blocks_per_chunk) for cache in kv_caches.tensors]
        device = [cache.tensor for cache in kv_caches.tensors]
        self._places = [
            [(device[ref.tensor_idx], host[ref.tensor_idx], ref.page_size_bytes) for ref in refs] for refs in kv_caches.group_data_refs
        ]

    def _copy(self, job_id: int, device_spec: Any, host_spec: Any, store: bool) -> bool:
        chunks = numpy.asarray(host_spec.chunk_ids if hasattr(host_spec, "chunk_ids") else host_spec.block_ids).tolist()
        blocks, count = device_spec.block_ids.tolist(), 0
        for places, blocks_here, index in zip(self._places, device_spec.group_sizes, device_spec.block_indices, strict=True):
            skipped = index % self._blocks if blocks_here else 0
            chunks_here = -(-(blocks_here + skipped) // self._blocks)
            slots = [(chunk, part) for chunk in chunks[:chunks_here] for part in range(self._blocks)][skipped:]
            for (chunk, part), block in zip(slots, blocks[:blocks_here], strict=False):
                for device, host, size in places:
                    begin = part * device.shape[1]
                    on_device, on_host = device[block, :size], host[chunk, begin : begin + size]
                    (on_host.copy_(on_device) if store else on_device.copy_(on_host))
                    count += size
            del chunks[:chunks_here], blocks[:blocks_here]
        self._done.append(TransferResult(job_id, True, count, 1e-6))
        return True

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, src_spec, dst_spec, True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False) -> bool:
        return self._copy(job_id, dst_spec, src_spec, False)

    def get_finished(self) -> list[Any]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: Any) -> None:
        """Do nothing, because copies are finished when they are submitted."""

    def shutdown(self) -> None:
        self._places = []
        self._region.cleanup()


class CpuTieringSpec(TieringOffloadingSpec):  # type: ignore[misc]
    """vLLM's own tiering spec with the worker of this module."""

    def get_worker(self, kv_caches: Any) -> CopyWorker:
        if not self._worker:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = CopyWorker(kv_caches, self.blocks_per_chunk, region)
        worker: CopyWorker = self._worker
        return worker
