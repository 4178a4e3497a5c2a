"""The counters of a store, exported as a dict or in Prometheus' text format."""

from __future__ import annotations

import errno
import logging
import re
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from kvpack.formats.arguments import describe
from kvpack.formats.errors import InvalidParameter, InvalidType
from kvpack.runtime.threads import Lock

log = logging.getLogger("kvpack.store")

NAMES = {
    "loads": "Calls to load.",
    "load_tokens": "Tokens requested from load.",
    "hit_tokens": "Tokens that load returned.",
    "hit_chunks": "Chunks that load returned. For one of several tiers: chunks found in this tier.",
    "other_chunks": "Lookups that missed tokens stored in chunks of a different size: use one chunk size for all stores here.",
    "promoted_chunks": "Chunks copied from a slower tier to a faster one.",
    "dropped_writes": "Entries that never reached a slower tier: the queue was full, or was not drained in time when the store closed.",
    "lease_waits": "Calls to load that waited for another worker to save the missing chunks.",
    "lease_timeouts": "Calls to load that waited without success: the other worker took longer than its lease, died or did not save.",
    "saves": "Calls to save with at least one whole chunk.",
    "saved_chunks": "Chunks written by save.",
    "saved_bytes": "Bytes of the chunks written by save.",
    "present_chunks": "Chunks that were already stored when save was called.",
    "refused_chunks": "Chunks not stored, because protected entries fill the budget or the disk, or already use the chunk's key.",
    "damaged_entries": "Damaged entries. Each was a miss and was removed.",
    "unreadable_entries": "Entries not read for lack of memory, or because of an unknown codec or a newer version. Each "
    "was a miss and was kept.",
    "undecryptable_entries": "Entries that no available key can decrypt. Each was a miss.",
    "evicted_entries": "Entries removed to make room.",
    "evicted_bytes": "Bytes of entries removed to make room.",
    "expired_entries": "Entries of a folder or an object store that expired: unused for the ttl of their last user.",
    "vanished_entries": "Entries that the Redis server removed, because they expired or by its eviction policy.",
    "deleted_entries": "Entries removed by delete.",
    "reclaimed_entries": "Removed bases that no entry needed.",
    "reclaimed_bytes": "Bytes of removed bases.",
    "swept_files": "Unfinished files of dead writers that were removed.",
    "faults": "Operations that the system or the server rejected, by operation and reason.",
}
"""All counters and their meanings. ``faults`` has the labels operation and reason."""


SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
"""Upper bounds of a latency histogram's buckets, in seconds."""

MAX_RECENT = 4096
"""Maximum number of latencies kept for a serving engine's histograms."""


class Counters:
    """The counters of a store or a tier since it was opened. Safe to use from any thread, and after a fork.

    A tier's faults are also counted in ``parent``, the store's counters. ``report(operation, error)`` is called for the first fault of each
    kind. By default, it logs a warning.
    """

    def __init__(self, parent: Counters | None = None, report: Callable[[str, BaseException], None] | None = None) -> None:
        self._parent, self._report = parent, report or _warn
        self._counts: Counter[str] = Counter()
        self._faults: Counter[tuple[str, str]] = Counter()
        self._latencies: dict[str, LatencyHistogram] = {}
        self._recent: deque[tuple[str, float]] = deque(maxlen=MAX_RECENT)
        self._lock = Lock()

    def add(self, name: str, amount: int = 1) -> None:
        """Add ``amount`` to the counter ``name``, one of ``NAMES``. The store's first refused chunks are also logged."""
        with self._lock:
            self._counts[name] += amount
            first = self._counts[name] == amount > 0
        if first and name == "refused_chunks" and self._parent is None:
            log.warning("%s Pass a larger max_bytes=, or unpin entries (logged once; refused_chunks counts them)", NAMES[name])

    @contextmanager
    def time_operation(self, operation: str) -> Iterator[None]:
        """Return a context manager that adds the time spent in it to the histogram of ``operation``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - start
            with self._lock:
                self._latencies.setdefault(operation, LatencyHistogram()).add(seconds)
                self._recent.append((operation, seconds))

    def fault(self, operation: str, error: BaseException) -> None:
        """Count a fault. The first fault of each kind is also reported."""
        if self._parent is not None:
            self._parent.fault(operation, error)
        reason = fault_reason(error)
        with self._lock:
            self._faults[operation, reason] += 1
            first = self._faults[operation, reason] == 1
        if first and self._parent is None:
            self._report(operation, error)

    @property
    def fault_count(self) -> int:
        with self._lock:
            return self._faults.total()

    def pop_recent(self) -> list[tuple[str, float]]:
        """Return (operation, seconds) for each operation timed since the last call. Only the last ``MAX_RECENT`` are kept."""
        with self._lock:
            result = list(self._recent)
            self._recent.clear()
        return result

    def as_dict(self) -> dict[str, int | dict[str, int]]:
        """Return all counters by name. ``faults`` is a dict, keyed by "operation reason"."""
        with self._lock:
            counts: dict[str, int | dict[str, int]] = {name: self._counts[name] for name in NAMES if name != "faults"}
            counts["faults"] = {f"{operation} {reason}": count for (operation, reason), count in sorted(self._faults.items())}
        return counts

    def histogram(self, name: str, labels: Mapping[str, str]) -> list[str]:
        """Return the histograms of all timed operations as lines in Prometheus' text format. ``name`` is the metric's name."""
        with self._lock:
            latencies = sorted(self._latencies.items())
            return [line for operation, latency in latencies for line in latency.lines(name, {**labels, "operation": operation})]

    def prometheus(self, gauges: Mapping[str, tuple[str, int]], tiers: Sequence[Mapping[str, Any]] = ()) -> str:
        """Return all counters in Prometheus' text format, version 0.0.4.

        ``gauges`` maps names to (help text, value) pairs. ``tiers`` is the result of ``Tiers.stats``.
        """
        lines = []
        counts = self.as_dict()
        faults = counts.pop("faults")
        assert isinstance(faults, dict)
        for name, value in counts.items():
            lines += [f"# HELP kvpack_store_{name}_total {NAMES[name]}", f"# TYPE kvpack_store_{name}_total counter"]
            lines.append(f"kvpack_store_{name}_total {value}")
        lines += [f"# HELP kvpack_store_faults_total {NAMES['faults']}", "# TYPE kvpack_store_faults_total counter"]
        for label, count in faults.items():
            operation, _, reason = label.partition(" ")
            lines.append(f'kvpack_store_faults_total{{operation="{operation}",reason="{reason}"}} {count}')
        latencies = self.histogram("kvpack_store_seconds", {})
        lines += [
            "# HELP kvpack_store_seconds Duration of calls in seconds, by operation.",
            "# TYPE kvpack_store_seconds histogram",
            *latencies,
        ]
        for name, (meaning, value) in gauges.items():
            lines += [f"# HELP kvpack_store_{name} {meaning}", f"# TYPE kvpack_store_{name} gauge", f"kvpack_store_{name} {value}"]
        lines += _tier_lines(tiers)
        return "\n".join(lines) + "\n"


def _tier_lines(tiers: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return metric lines with the counters and sizes of each tier. The label ``tier`` is 0 for the fastest tier."""
    if not tiers:
        return []
    lines = []
    sizes = {"entries": "Entries in the tier.", "bytes": "Total size in bytes of the entries in the tier."}
    for name, meaning in (NAMES | sizes).items():
        gauge = name not in NAMES
        metric = f"kvpack_store_tier_{name}" + ("" if gauge else "_total")
        lines += [f"# HELP {metric} {meaning}", f"# TYPE {metric} {'gauge' if gauge else 'counter'}"]
        for tier_number, tier in enumerate(tiers):
            if name != "faults":
                lines.append(f'{metric}{{tier="{tier_number}"}} {tier[name]}')
                continue
            for label, count in tier[name].items():
                operation, _, reason = label.partition(" ")
                lines.append(f'{metric}{{tier="{tier_number}",operation="{operation}",reason="{reason}"}} {count}')
    return lines


class LatencyHistogram:
    """A histogram of durations. ``SECONDS`` are the upper bounds of its buckets."""

    def __init__(self) -> None:
        self._counts = [0] * (len(SECONDS) + 1)
        self._sum = 0.0

    def add(self, seconds: float) -> None:
        self._counts[bisect_left(SECONDS, seconds)] += 1
        self._sum += seconds

    def lines(self, name: str, labels: Mapping[str, str]) -> list[str]:
        """Return this histogram as lines in Prometheus' text format. ``name`` is the metric's name."""
        own_labels = labels_text(labels)
        result, cumulative = [], 0
        for bound, count in zip((*SECONDS, "+Inf"), self._counts, strict=True):
            cumulative += count
            result.append(f'{name}_bucket{{{own_labels},le="{bound}"}} {cumulative}')
        return [*result, f"{name}_sum{{{own_labels}}} {self._sum}", f"{name}_count{{{own_labels}}} {cumulative}"]


def labels_text(labels: Mapping[str, str]) -> str:
    """Format labels as the text between braces in Prometheus' text format."""
    return ",".join(f'{name}="{value.translate(_ESCAPED)}"' for name, value in labels.items())


_ESCAPED = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})


def with_labels(text: str, labels: Mapping[str, str]) -> str:
    """Add ``labels`` to each metric in ``text``, which is in Prometheus' text format. Raises the errors of ``check_labels``."""
    check_labels(labels)
    if not labels:
        return text
    own_labels, lines = labels_text(labels), []
    for line in text.splitlines():
        name, sample = _SAMPLE.fullmatch(line).groups() if not line.startswith("#") else ("", "")  # type: ignore[union-attr]
        lines.append(
            line if not name else f"{name}{{{own_labels},{sample[1:]}" if sample.startswith("{") else f"{name}{{{own_labels}}}{sample}"
        )
    return "\n".join(lines) + "\n"


def check_labels(labels: Mapping[str, str]) -> Mapping[str, str]:
    """Check the labels of metrics, and return them unchanged.

    Raises InvalidType if a name or value is not a str, and InvalidParameter if a name is invalid in Prometheus or reserved for kvpack's
    metrics.
    """
    if not isinstance(labels, Mapping) or not all(isinstance(text, str) for pair in labels.items() for text in pair):
        raise InvalidType(f"labels is {describe(labels)}, expected a map of names to text, such as {{'model': 'llama'}}")
    for name in labels:
        if not _LABEL.fullmatch(name):
            raise InvalidParameter(
                f"the label name {name!r:.80} is invalid: use only letters, digits and _, and do not start with a digit"
            )
        if name in _OWN_LABELS or name.startswith("__"):
            raise InvalidParameter(
                f"the label name {name!r:.80} is reserved or already used by kvpack's metrics: choose another"
            )
    return labels


_SAMPLE = re.compile(r"(\w+)(.*)", re.DOTALL)
_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_OWN_LABELS = {"le", "operation", "reason", "tier"}
"""Label names that a store's metrics use. If a metric has a label twice, Prometheus rejects all metrics of the process."""


def _warn(operation: str, error: BaseException) -> None:
    # obstore's messages have dozens of lines.
    reason = str(error).partition("\n")[0]
    log.warning("%s: %s (counted as a fault; later faults of this kind are not logged)", operation, reason)


def fault_reason(error: BaseException) -> str:
    """Return the errno name of an error, such as ENOSPC, or the name of its class if it has no errno."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno is not None:
            return errno.errorcode.get(cause.errno, str(cause.errno))
        cause = cause.__cause__ or cause.__context__
    return type(error).__name__
