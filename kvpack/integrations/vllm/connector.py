"""KvpackConnector: vLLM's OffloadingConnector, which passes the model's settings and cache layers to kvpack's spec or tier.

``placement`` specifies where rows are stored. With ``"primary"``, they are in vLLM's own host memory: ``KvpackSpec`` packs in the worker,
and a block whose row cannot be decoded is reported to vLLM, which computes it again with ``"kv_load_failure_policy": "recompute"``. With
``"store"``, that memory contains pages, and ``KvpackTier`` below it packs them into a kvpack store.
"""

from __future__ import annotations

from typing import Any

import vllm

from kvpack.formats.errors import InvalidParameter

from . import PLACEMENTS, STORE_OPTIONS, VERSIONS
from .groups import BLOCK_OFFSETS, GROUPS, block_offsets, check_blocks, offloaded_groups
from .identities import SETTINGS, check_version, relevant_settings
from .metrics import add_scheduler_stats, worker_stats

try:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

    from .spec import KvpackSpec
except ImportError as error:
    raise InvalidParameter(
        f"vLLM {vllm.__version__} lacks an interface that kvpack needs ({error}): install vLLM {VERSIONS[-1]}"
    ) from error

TIER = "kvpack_tier"
"""Key that is set once the options contain the spec of their placement. It is True if they also contain kvpack's tier."""


class KvpackConnector(OffloadingConnector):  # type: ignore[misc]
    """The vLLM connector for ``"kv_connector": "KvpackConnector"``.

    ``kv_connector_extra_config`` contains vLLM's options, ``placement``, and the options of ``KvpackSpec``. With the placement "store", it
    also contains those of ``KvpackTier``.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        options, self._is_packed = _placement_options(vllm_config)
        check_version(vllm.__version__, bool(options.get("any_version", False)))
        groups = offloaded_groups(vllm_config, kv_cache_config)
        options[GROUPS], options[SETTINGS] = groups, relevant_settings(vllm_config)
        if not self._is_packed:
            options[BLOCK_OFFSETS] = block_offsets(kv_cache_config)
        self._kvpack = groups, str(options.get("layout", "")), kv_cache_config
        super().__init__(vllm_config, role, kv_cache_config)

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Check that the layers' memory has the layout set in the options, then register the layers as vLLM does."""
        check_blocks(*self._kvpack, kv_caches)
        super().register_kv_caches(kv_caches)

    def get_block_ids_with_load_errors(self) -> set[int]:
        if not self._is_packed:
            blocks: set[int] = super().get_block_ids_with_load_errors()
            return blocks
        if self.connector_worker is None or self.connector_worker.worker is None:
            return set()
        failed: set[int] = self.connector_worker.worker.failed_blocks()
        return failed

    def get_kv_connector_stats(self) -> Any:
        """Return vLLM's statistics with kvpack's own: counts of packed blocks in a worker, or metrics of loaded rows in the scheduler."""
        if not self._is_packed:
            return super().get_kv_connector_stats()
        if self.connector_scheduler is not None:
            return add_scheduler_stats(super().get_kv_connector_stats(), self.connector_scheduler.manager)
        if self.connector_worker is None or self.connector_worker.worker is None:
            return None
        return worker_stats(self.connector_worker.worker)

    @classmethod
    def build_prom_metrics(cls, vllm_config: Any, *arguments: Any) -> Any:
        _placement_options(vllm_config)
        return super().build_prom_metrics(vllm_config, *arguments)


def _placement_options(vllm_config: Any) -> tuple[Any, bool]:
    """Return the options, completed with the spec and tier of their placement, and True if the primary tier contains rows. vLLM calls this
    several times for the same configuration, even before there is a connector.
    """
    options = vllm_config.kv_transfer_config.kv_connector_extra_config
    placement = options.get("placement", "primary")
    if placement not in PLACEMENTS:
        raise InvalidParameter(f'placement is {placement!r:.40}, expected "primary" or "store"')
    is_packed = placement == "primary"
    if TIER in options:
        return options, is_packed
    tiers = list(options.get("secondary_tiers") or ())
    if any(tier.get("type") == "kvpack" for tier in tiers):
        raise InvalidParameter(
            'secondary_tiers contains a tier of type "kvpack", but kvpack is configured in kv_connector_extra_config: remove the tier, and '
            'set "placement": "store" and "location" there'
        )
    if is_packed == ("location" in options):
        raise InvalidParameter(
            '"location" is set, but "placement" is "primary": set "placement": "store", or omit "location"'
            if is_packed
            else '"placement": "store" requires "location": set it to a folder, a server or an object store'
        )
    if is_packed:
        options["spec_name"], options["spec_module_path"] = KvpackSpec.__name__, KvpackSpec.__module__
    else:
        options.setdefault("spec_name", "TieringOffloadingSpec")
        tiers = [{"type": "kvpack"} | {name: options[name] for name in STORE_OPTIONS if name in options}, *tiers]
        options["secondary_tiers"] = tiers
    options[TIER] = not is_packed
    return options, is_packed
