"""The Grafana dashboard uses only metrics and labels that stores have."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import kvpack
from support.store_caches import entry_of, open_store, prompt, save

DASHBOARD = Path(kvpack.__file__).parent / "guides" / "grafana-dashboard.json"
_METRIC = re.compile(r"kvpack_store_\w+")


def test_every_metric_and_label_exists(tmp_path: Path) -> None:
    store = open_store([tmp_path / "fast", tmp_path / "slow"])
    save(store, prompt(2))
    Path(entry_of(open_store(tmp_path / "fast"), prompt(2), 0)).write_bytes(b"damaged")
    store.load(prompt(2))
    told: dict[str, set[str]] = {}
    for name, labels in re.findall(r"^(\w+)\{([^}]*)\}", store.prometheus(), re.MULTILINE):
        told.setdefault(name, set()).update(re.findall(r'(\w+)="', labels))
    board: dict[str, Any] = json.loads(DASHBOARD.read_text())
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    assert len(asked) >= 8
    for expression in asked:
        names = _METRIC.findall(expression)
        assert names
        assert set(names) <= set(told), expression
        grouped = {label for group in re.findall(r"by \(([^)]*)\)", expression) for label in group.split(", ")}
        assert grouped | {"model"} <= set.union(*(told[name] for name in names)), expression
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    (query,) = (one["query"] for one in board["templating"]["list"] if one["name"] == "model")
    assert _METRIC.findall(query)[0] in told
