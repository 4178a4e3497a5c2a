"""vLLM's OffloadingConnector, which tells kvpack's spec and tier of the model.

KvpackConnector has KvpackSpec, which also knows the model's cache layers. A block whose row cannot be decoded is reported to vLLM, which
computes it again with ``"kv_load_failure_policy": "recompute"``.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from .groups import check_blocks, groups_of
from .identities import SETTINGS, settings_of
from .metrics import add_scheduler_stats, worker_stats
from .spec import GROUPS


class KvpackTierConnector(OffloadingConnector):  # type: ignore[misc]
    """The connector for ``"kv_connector": "KvpackTierConnector"``: vLLM's own specs, and what the model was started with for KvpackTier."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        vllm_config.kv_transfer_config.kv_connector_extra_config[SETTINGS] = settings_of(vllm_config)
        super().__init__(vllm_config, role, kv_cache_config)


class KvpackConnector(OffloadingConnector):  # type: ignore[misc]
    """The connector for ``"kv_connector": "KvpackConnector"``; ``kv_connector_extra_config`` is that of ``KvpackSpec``."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        options = _choose_spec(vllm_config)
        options[GROUPS], options[SETTINGS] = groups_of(vllm_config, kv_cache_config), settings_of(vllm_config)
        self._kvpack = options[GROUPS], str(options.get("layout", "")), kv_cache_config
        super().__init__(vllm_config, role, kv_cache_config)

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Check that the memory of the layers is arranged as the layout's name says, and go on as vLLM's own."""
        check_blocks(*self._kvpack, kv_caches)
        super().register_kv_caches(kv_caches)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """The blocks that were not loaded."""
        if self.connector_worker is None or self.connector_worker.worker is None:
            return set()
        failed: set[int] = self.connector_worker.worker.failed_blocks()
        return failed

    def get_kv_connector_stats(self) -> Any:
        """What vLLM counts, and what rows are: in a worker the blocks, in the scheduler the chunks that tiers bring back."""
        if self.connector_scheduler is not None:
            return add_scheduler_stats(super().get_kv_connector_stats(), self.connector_scheduler.manager)
        if self.connector_worker is None or self.connector_worker.worker is None:
            return None
        return worker_stats(self.connector_worker.worker)

    @classmethod
    def build_prom_metrics(cls, vllm_config: Any, *arguments: Any) -> Any:
        _choose_spec(vllm_config)
        return super().build_prom_metrics(vllm_config, *arguments)


def _choose_spec(vllm_config: Any) -> Any:
    """The configuration of the spec, which is kvpack's."""
    options = vllm_config.kv_transfer_config.kv_connector_extra_config
    options["spec_name"], options["spec_module_path"] = "KvpackSpec", "kvpack.integrations.vllm.spec"
    return options
