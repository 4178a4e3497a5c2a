"""Modules that stand in for an engine's, for as long as a test runs."""

from __future__ import annotations

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pytest


def import_over(monkeypatch: pytest.MonkeyPatch, modules: Mapping[str, Mapping[str, Any]], name: str) -> Any:
    """The module ``name`` of kvpack, imported anew over ``modules`` by name, each with its contents; their packages are made."""
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
    # What was imported over stubs goes with them.
    monkeypatch.setitem(sys.modules, name, module)
    return module
