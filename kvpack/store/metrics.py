"""Exports the metrics of stores through prometheus_client, if it is installed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from threading import Lock
from typing import Any, Protocol

from kvpack.formats.errors import MissingPackage

from .counters import check_labels


class MeteredStore(Protocol):
    """A store with metrics: a ``Store`` or a ``PageStore``."""

    def prometheus(self) -> str: ...


class Collector:
    """A collector for prometheus_client. At each scrape, it returns the metrics of all added stores, each with its labels."""

    def __init__(self) -> None:
        self._stores: list[tuple[MeteredStore, dict[str, str]]] = []
        self._lock = Lock()

    def add(self, store: MeteredStore, labels: Mapping[str, str] | None = None) -> None:
        """Start collecting the metrics of ``store``. ``labels`` distinguish them from the metrics of other stores.

        Raises InvalidType or InvalidParameter for invalid labels, which would make every scrape fail.
        """
        labels = dict(check_labels(labels or {}))
        with self._lock:
            self._stores.append((store, labels))

    def remove(self, store: MeteredStore) -> None:
        with self._lock:
            self._stores = [(other, labels) for other, labels in self._stores if other is not store]

    def collect(self) -> Iterator[Any]:
        from prometheus_client.parser import text_string_to_metric_families

        with self._lock:
            stores = list(self._stores)
        families: dict[str, Any] = {}
        for store, labels in stores:
            for family in text_string_to_metric_families(store.prometheus()):
                samples = [sample._replace(labels={**labels, **sample.labels}) for sample in family.samples]
                known = families.setdefault(family.name, family)
                known.samples = samples if known is family else known.samples + samples
        yield from families.values()


def register_metrics(store: MeteredStore, registry: Any = None, labels: Mapping[str, str] | None = None) -> Collector:
    """Make ``registry`` (default: prometheus_client's own) collect the metrics of ``store``.

    Returns the collector, which can be unregistered. More stores can be added to it with different ``labels``. Raises MissingPackage if
    prometheus_client is not installed.
    """
    try:
        from prometheus_client import REGISTRY
    except ImportError:
        raise MissingPackage("registering the metrics of a store needs prometheus_client: pip install prometheus-client") from None
    collector = Collector()
    collector.add(store, labels)
    (REGISTRY if registry is None else registry).register(collector)
    return collector


@lru_cache(maxsize=1)
def shared_collector() -> Collector | None:
    """Return this process's collector in prometheus_client's default registry, or None if the package is not installed.

    The first call registers the collector.
    """
    try:
        from prometheus_client import REGISTRY
    except ImportError:
        return None
    collector = Collector()
    REGISTRY.register(collector)
    return collector
