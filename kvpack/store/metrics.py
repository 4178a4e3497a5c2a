"""A store's metrics in the registry of prometheus_client, where that is installed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from kvpack.formats.errors import InvalidParameter

if TYPE_CHECKING:
    from collections.abc import Iterator


class Measured(Protocol):
    """A ``Store`` or a ``PageStore``."""

    def prometheus(self) -> str: ...


class Collector:
    """What prometheus_client asks for metrics at each scrape."""

    def __init__(self, store: Measured) -> None:
        self._store = store

    def collect(self) -> Iterator[Any]:
        from prometheus_client.parser import text_string_to_metric_families

        yield from text_string_to_metric_families(self._store.prometheus())


def register_metrics(store: Measured, registry: Any = None) -> Collector:
    """Have ``registry`` (default: prometheus_client's own) collect what ``store.prometheus()`` tells; unregister what is returned.

    One registry takes one store: give the metrics of further stores to registries of their own. Raises InvalidParameter without
    prometheus_client.
    """
    try:
        from prometheus_client import REGISTRY
    except ImportError:
        raise InvalidParameter("the metrics of a store are registered with prometheus_client, which is not installed") from None
    collector = Collector(store)
    (REGISTRY if registry is None else registry).register(collector)
    return collector
