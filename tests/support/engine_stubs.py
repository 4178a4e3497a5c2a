"""Stub modules that replace an engine's modules while a test runs."""

from __future__ import annotations

import importlib
import re
import sys
import types
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import pytest


def import_over(monkeypatch: pytest.MonkeyPatch, modules: Mapping[str, Mapping[str, Any]], name: str) -> Any:
    """Import kvpack's module ``name`` afresh over stubs, and return it.

    ``modules`` gives the contents of each stub by name. Stubs of parent packages are added.
    """
    for path, values in modules.items():
        parts = path.split(".")
        for count in range(1, len(parts) + 1):
            part = ".".join(parts[:count])
            if count == len(parts) or part not in sys.modules or part.split(".")[0] not in sys.modules:
                module = types.ModuleType(part)
                vars(module).update(values if count == len(parts) else {})
                monkeypatch.setitem(sys.modules, part, module)
    monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module(name)
    # Remove modules that were imported over the stubs, too.
    monkeypatch.setitem(sys.modules, name, module)
    return module


class Stats:
    """A stub of vLLM's OffloadingConnectorStats."""

    def __init__(self) -> None:
        self.values: dict[str, dict[tuple[str, ...], Any]] = {}

    def is_empty(self) -> bool:
        return not self.values

    def increase_counter(self, name: str, added: float, labels: tuple[str, ...] = ()) -> None:
        of_name = self.values.setdefault(name, {})
        of_name[labels] = of_name.get(labels, 0) + added

    def set_gauge(self, name: str, value: float, labels: tuple[str, ...] = ()) -> None:
        self.values.setdefault(name, {})[labels] = value

    def observe_histogram(self, name: str, value: float, labels: tuple[str, ...] = ()) -> None:
        self.values.setdefault(name, {}).setdefault(labels, []).append(value)

    def aggregate(self, other: Stats) -> Stats:
        for name, of_name in other.values.items():
            self.values.setdefault(name, {}).update(of_name)
        return self


def _metadata(kind: str) -> Any:
    def make(documentation: str, labelnames: tuple[str, ...] = (), buckets: tuple[float, ...] | None = None) -> Any:
        return types.SimpleNamespace(kind=kind, documentation=documentation, labelnames=labelnames, buckets=buckets)

    return make


METADATA = {f"Offloading{kind}Metadata": _metadata(kind) for kind in ("Counter", "Gauge", "Histogram")}
STATS = "vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics"


def check_defined(stats: Stats, definitions: Mapping[str, Any]) -> None:
    """Raise an error, as vLLM does, for a metric that was not defined or that has other labels."""
    for name, of_name in stats.values.items():
        assert definitions[name].documentation
        assert all(len(labels) == len(definitions[name].labelnames) for labels in of_name)
        assert (definitions[name].kind == "Histogram") == any(isinstance(value, list) for value in of_name.values())


class Metric:
    """A stub of a prometheus_client metric that stores one value for each combination of labels."""

    def __init__(self, name: str, meaning: str, labels: list[str], **options: Any) -> None:
        self.name, self.names, self.values = name, labels, {}

    def labels(self, *values: str) -> Any:
        assert len(values) == len(self.names)

        def add(amount: float) -> None:
            self.values[values] = self.values.get(values, 0) + amount

        return types.SimpleNamespace(inc=add, observe=add, set=lambda value: self.values.__setitem__(values, value))


def parse_metrics(text: str) -> Iterator[Any]:
    """Yield the metric families in ``text`` as prometheus_client parses them: names, and samples with labels and values."""
    families: dict[str, Any] = {}
    for name, labels, value in re.findall(r"^(\w+)(?:\{([^}]*)\})? (\S+)$", text, re.MULTILINE):
        family = families.setdefault(name, types.SimpleNamespace(name=name, samples=[]))
        family.samples.append(Sample(name, dict(re.findall(r'(\w+)="([^"]*)"', labels)), float(value)))
    yield from families.values()


class Sample(NamedTuple):
    name: str
    labels: dict[str, str]
    value: float
