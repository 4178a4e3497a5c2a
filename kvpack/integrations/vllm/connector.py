"""vLLM's OffloadingConnector, which tells kvpack's spec and tier of the model.

KvpackConnector has KvpackSpec, which also knows the model's cache layers. A block whose row cannot be decoded is reported to vLLM, which
computes it again with ``"kv_load_failure_policy": "recompute"``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import vllm

from kvpack.formats.errors import InvalidParameter

from . import VERSIONS
from .groups import check_blocks, groups_of
from .identities import SETTINGS, settings_of
from .metrics import add_scheduler_stats, worker_stats
from .versions import check_version

try:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

    from .spec import GROUPS, TIERS
except ImportError as error:
    raise InvalidParameter(f"vLLM is {vllm.__version__}, which lacks what kvpack takes of {', '.join(VERSIONS)}: {error}") from error

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .groups import Group


class KvpackTierConnector(OffloadingConnector):  # type: ignore[misc]
    """The connector for ``"kv_connector": "KvpackTierConnector"``: vLLM's own specs, and what the model was started with for KvpackTier.

    The tier sees bytes alone. Here its ``heads``, ``head_dim`` and ``layout`` are compared with the model's cache and its tensors.
    Raises InvalidParameter.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        options = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._tiers = [tier for tier in options.get("secondary_tiers") or () if tier.get("type") in TIERS]
        check_version(vllm.__version__, all(tier.get("any_version", False) for tier in self._tiers))
        self._groups = groups_of(vllm_config, kv_cache_config) if self._tiers else []
        self._kv_cache_config = kv_cache_config
        for tier in self._tiers:
            _check_heads(tier.get("heads"), tier.get("head_dim"), self._groups)
        options[SETTINGS] = settings_of(vllm_config)
        super().__init__(vllm_config, role, kv_cache_config)

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Check that the memory of the layers is arranged as the tiers' ``layout`` says, and go on as vLLM's own."""
        for tier in self._tiers:
            check_blocks(self._groups, str(tier.get("layout")), self._kv_cache_config, kv_caches)
        super().register_kv_caches(kv_caches)


class KvpackConnector(OffloadingConnector):  # type: ignore[misc]
    """The connector for ``"kv_connector": "KvpackConnector"``; ``kv_connector_extra_config`` is that of ``KvpackSpec``."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        options = _choose_spec(vllm_config)
        check_version(vllm.__version__, bool(options.get("any_version", False)))
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


def _check_heads(heads: Any, head_dim: Any, groups: Sequence[Group]) -> None:
    """Raise InvalidParameter unless the cache is one of attention, of so many heads of so many values in a worker."""
    found = [(group.kind, group.heads, group.dim) for group in groups]
    if [kind for kind, *_ in found] != ["attention"]:
        kinds = ", ".join(kind for kind, *_ in found) or "none"
        raise InvalidParameter(
            f"the model's groups of cache layers are {kinds}, and kvpack's tier takes one of attention in bf16, fp16 or fp32: use "
            "KvpackConnector, or vLLM's fs tier"
        )
    if found != [("attention", heads, head_dim)]:
        raise InvalidParameter(
            f"the tier's heads and head_dim are {heads!r} and {head_dim!r}, and a worker's cache has {groups[0].heads} and {groups[0].dim}"
        )


def _choose_spec(vllm_config: Any) -> Any:
    """The configuration of the spec, which is kvpack's."""
    options = vllm_config.kv_transfer_config.kv_connector_extra_config
    options["spec_name"], options["spec_module_path"] = "KvpackSpec", "kvpack.integrations.vllm.spec"
    return options
