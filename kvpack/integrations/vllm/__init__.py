"""kvpack in vLLM. vLLM's workers store packed rows in host memory, or a kvpack store is a tier below that memory::

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KvpackConnector", "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"recipe": "octopus-4", "layout": "adjacent",
        "cpu_bytes_to_use": 10000000000, "secondary_tiers": [{"type": "fs", "root_dir": "/var/cache/vllm"}]}}'

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KvpackConnector", "kv_role": "kv_both", "kv_connector_extra_config": {
        "placement": "store", "location": "/var/cache/kvpack", "recipe": "kvpack-4", "layout": "adjacent",
        "cpu_bytes_to_use": 10000000000}}'

Importing this package does not need vLLM. ``register`` is the entry point of ``vllm.general_plugins``. vLLM calls these interfaces
experimental: kvpack was tested with ``VERSIONS``, and refuses others by default.
"""

from __future__ import annotations

from contextlib import suppress

VERSIONS = ("0.32", "0.33")
"""Versions of vLLM with which kvpack was tested."""
PLACEMENTS = ("primary", "store")
"""Values of ``placement``: rows are in vLLM's own host memory, or in a kvpack store below it."""
STORE_OPTIONS = (
    "location", "max_bytes", "encryption_key_file", "recipe", "basis", "layout", "threads", "revision", "adapter", "tenant", "any_version",
)  # fmt: skip
"""Options of a store's tier, in addition to the model's ``heads`` and ``head_dim``."""


def register() -> None:
    """Register kvpack's connector and the tier type "kvpack" with vLLM, if the installed vLLM has such registries."""
    # Register the connector even in a vLLM without tiers, so that its error names the missing interface.
    with suppress(ImportError, AttributeError):
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        if "KvpackConnector" not in KVConnectorFactory._registry:
            KVConnectorFactory.register_connector("KvpackConnector", "kvpack.integrations.vllm.connector", "KvpackConnector")
    with suppress(ImportError, AttributeError):
        from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

        if "kvpack" not in SecondaryTierFactory._registry:
            SecondaryTierFactory.register_tier("kvpack", "kvpack.integrations.vllm.tier", "KvpackTier")
