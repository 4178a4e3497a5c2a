"""kvpack's metrics at SGLang's /metrics: the server gathers the metrics that prometheus_client counts in each process."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from kvpack.integrations.changes import Changes
from kvpack.store.counters import NAMES, SECONDS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpack.store.page_store import PageStore

PREFIX = "sglang:kvpack_"


@lru_cache(maxsize=1)
def _metrics() -> dict[str, Any]:
    """The metrics of this process by name; none without prometheus_client."""
    try:
        from prometheus_client import Counter, Gauge, Histogram
    except ImportError:
        return {}
    labels = ["pool", "tp_rank", "pp_rank"]
    found: dict[str, Any] = {
        name: Counter(PREFIX + name, meaning, [*labels, "operation", "reason"] if name == "faults" else labels)
        for name, meaning in NAMES.items()
    }
    for name, meaning in (("page_bytes", "Bytes of a page in the host pool."), ("row_bytes", "Bytes of a page as a row.")):
        found[name] = Gauge(PREFIX + name, meaning, labels, multiprocess_mode="mostrecent")
    found["seconds"] = Histogram(
        PREFIX + "seconds", "Seconds of a load or a save of pages, by operation.", [*labels, "operation"], buckets=SECONDS
    )
    return found


class StoreMetrics:
    """Reports the counts of one pool's store to prometheus_client."""

    def __init__(self, store: PageStore, pool: str, ranks: Sequence[int]) -> None:
        self._store, self._labels, self._changes = store, (pool, *map(str, ranks)), Changes(store)

    def tell(self) -> None:
        """Add the counts since the last call."""
        metrics = _metrics()
        if not metrics:
            return
        for labels, added in self._changes.take().items():
            metrics[labels[0]].labels(*self._labels, *labels[1:]).inc(added)
        for operation, seconds in self._store.recent():
            metrics["seconds"].labels(*self._labels, operation).observe(seconds)
        metrics["page_bytes"].labels(*self._labels).set(self._store.codec.geometry.raw_bytes)
        metrics["row_bytes"].labels(*self._labels).set(self._store.codec.nbytes)
