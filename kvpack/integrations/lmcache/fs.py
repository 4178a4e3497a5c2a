"""LMCache's own file adapter, from a module that registers the serde "kvpack" when LMCache imports it as a plugin."""

from __future__ import annotations

from typing import Any

from lmcache.v1.distributed.l2_adapters.fs_l2_adapter import FSL2Adapter as _FSL2Adapter
from lmcache.v1.distributed.l2_adapters.fs_l2_adapter import FSL2AdapterConfig

from . import serde

__all__ = ["FSL2Adapter", "FSL2AdapterConfig", "serde"]


class FSL2Adapter(_FSL2Adapter):  # type: ignore[misc]
    """LMCache's adapter, which takes what LMCache gives a plugin."""

    def __init__(self, config: Any, **kwargs: Any) -> None:
        super().__init__(config)
