"""Export of kvpack's metrics to vLLM's /metrics, in addition to the bytes, seconds and hits that vLLM counts for every tier."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from kvpack.integrations.counter_changes import CounterChanges
from kvpack.store.counters import NAMES, SECONDS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvpack.store.page_store import PageStore

    from .worker import PackedWorker

TIER, PACKED = "vllm:kv_offload_kvpack_", "vllm:kv_offload_kvpack_packed_"
GAUGES = {
    "entries": "Number of entries in the store.",
    "bytes": "Total size in bytes of the entries in the store.",
    "page_bytes": "Bytes in vLLM's memory of one chunk of each group of cache layers.",
    "row_bytes": "Bytes of one chunk of each group of cache layers, packed as rows.",
}
BLOCKS = {
    "encoded": "Device blocks that were packed.",
    "decoded": "Blocks that were unpacked to device memory.",
    "refused": "Blocks that were not packed, by reason.",
    "damaged": "Blocks that were not unpacked, by reason: vLLM computes them again, or fails their requests.",
}
SIZES_EVERY = 30.0
"""Interval in seconds between queries of a store's size, which may need a request to a server."""


def tier_definitions() -> dict[str, Any]:
    """Return vLLM metric definitions for the counters and size of a store, and for the durations of loads and saves."""
    from vllm.v1.kv_offload.base import OffloadingCounterMetadata, OffloadingGaugeMetadata, OffloadingHistogramMetadata

    result: dict[str, Any] = {}
    for name, meaning in NAMES.items():
        labels = ("tier", "operation", "reason") if name == "faults" else ("tier",)
        result[TIER + name] = OffloadingCounterMetadata(documentation=meaning, labelnames=labels)
    for name, meaning in GAUGES.items():
        result[TIER + name] = OffloadingGaugeMetadata(documentation=meaning, labelnames=("tier",))
    result[TIER + "seconds"] = OffloadingHistogramMetadata(
        documentation="Duration in seconds of loading or saving chunks, by operation.", labelnames=("tier", "operation"), buckets=SECONDS
    )
    return result


def packing_metric_definitions() -> dict[str, Any]:
    """Return vLLM metric definitions for packing workers, and for the rows that the scheduler loads."""
    from vllm.v1.kv_offload.base import OffloadingCounterMetadata, OffloadingGaugeMetadata

    result: dict[str, Any] = {
        f"{PACKED}{name}_blocks": OffloadingCounterMetadata(
            documentation=meaning, labelnames=("reason",) if name in ("refused", "damaged") else ()
        )
        for name, meaning in BLOCKS.items()
    }
    damaged = "Chunks from a tier that were damaged or had another key: each is a miss."
    result[PACKED + "damaged_chunks"] = OffloadingCounterMetadata(documentation=damaged, labelnames=("tier",))
    ratio = "Bytes of a chunk on the device, divided by the bytes of its rows."
    result[PACKED + "ratio"] = OffloadingGaugeMetadata(documentation=ratio)
    return result


def _empty_stats() -> Any:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats

    return OffloadingConnectorStats()


class TierMetrics:
    """The metrics of a tier's stores, which share one location, as increments since vLLM last read them."""

    def __init__(self, stores: Sequence[PageStore], tier: str) -> None:
        self._stores, self._tier, self._changes = stores, tier, [CounterChanges(store) for store in stores]
        self._size_executor = ThreadPoolExecutor(1, thread_name_prefix="kvpack-vllm-size")
        self._sizes: Future[Mapping[str, Any]] | None = None
        self._last_request = float("-inf")

    def close(self) -> None:
        self._size_executor.shutdown()

    def pop_stats(self) -> Any:
        """Return the statistics collected since the last call, in vLLM's format, or None if there are none."""
        stats = _empty_stats()
        for changes in self._changes:
            for labels, added in changes.pop_increments().items():
                stats.increase_counter(TIER + labels[0], added, (self._tier, *labels[1:]))
        for store in self._stores:
            for operation, seconds in store.pop_recent():
                stats.observe_histogram(TIER + "seconds", seconds, (self._tier, operation))
        if not stats.is_empty():
            codecs = [store.codec for store in self._stores]
            stats.set_gauge(TIER + "page_bytes", sum(codec.geometry.raw_bytes for codec in codecs), (self._tier,))
            stats.set_gauge(TIER + "row_bytes", sum(codec.nbytes for codec in codecs), (self._tier,))
        self._add_sizes(stats)
        return None if stats.is_empty() else stats

    def _add_sizes(self, stats: Any) -> None:
        """Add the size of the store. It is read in a thread, because reading it from a folder or a server would block the scheduler."""
        if self._sizes is not None and self._sizes.done():
            if self._sizes.exception() is None:
                for name in ("entries", "bytes"):
                    stats.set_gauge(TIER + name, self._sizes.result()[name], (self._tier,))
            self._sizes = None
        if self._sizes is None and time.monotonic() - self._last_request > SIZES_EVERY:
            self._last_request = time.monotonic()
            self._sizes = self._size_executor.submit(self._stores[0].stats)


def worker_stats(worker: PackedWorker) -> Any:
    """Return a worker's counts since the last call in vLLM's format, or None if there are none."""
    stats = _empty_stats()
    for labels, added in worker.pop_counts().items():
        stats.increase_counter(f"{PACKED}{labels[0]}_blocks", added, labels[1:])
    return None if stats.is_empty() else stats


def add_scheduler_stats(stats: Any, manager: Any) -> Any:
    """Add two metrics to the scheduler's ``stats``, which may be None, and return the result.

    The metrics are the number of damaged chunks found in each tier since the last call, and the compression ratio of rows.
    """
    result = _empty_stats()
    for tier in manager.secondary_tiers:
        added, tier.damaged_reported = tier.damaged_chunks - getattr(tier, "damaged_reported", 0), tier.damaged_chunks
        if added:
            result.increase_counter(PACKED + "damaged_chunks", added, (str(tier.tier_type),))
    if stats is None and result.is_empty():
        return None
    result.set_gauge(PACKED + "ratio", manager.kvpack_ratio)
    return result if stats is None else stats.aggregate(result)
