"""Metrics of stores in the registry of prometheus_client, if that is installed."""

from __future__ import annotations

from functools import lru_cache
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol

from kvpack.formats.errors import MissingPackage

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


class MeteredStore(Protocol):
    """A ``Store`` or a ``PageStore``."""

    def prometheus(self) -> str: ...


class Collector:
    """The collector that prometheus_client calls at each scrape; it returns the metrics of every added store, with its labels."""

    def __init__(self) -> None:
        self._stores: list[tuple[MeteredStore, dict[str, str]]] = []
        self._lock = Lock()

    def add(self, store: MeteredStore, labels: Mapping[str, str] | None = None) -> None:
        """Collect the metrics of ``store`` with ``labels``, which distinguish it from the other stores."""
        with self._lock:
            self._stores.append((store, dict(labels or {})))

    def remove(self, store: MeteredStore) -> None:
        """Forget ``store``."""
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
    """Make ``registry`` (default: prometheus_client's own) collect the metrics of ``store.prometheus()``.

    Returns the collector, to unregister it or to ``add`` further stores, whose ``labels`` must differ. Raises MissingPackage without
    prometheus_client.
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
    """Return the collector of an engine's process in prometheus_client's own registry; None without prometheus_client."""
    try:
        from prometheus_client import REGISTRY
    except ImportError:
        return None
    collector = Collector()
    REGISTRY.register(collector)
    return collector
