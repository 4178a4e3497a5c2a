"""kvpack in vLLM: in the worker, so that its memory of the host holds packed rows, or as a tier below that memory::

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KvpackConnector", "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"recipe": "octopus-4", "layout": "adjacent",
        "cpu_bytes_to_use": 10000000000, "secondary_tiers": [{"type": "fs", "root_dir": "/var/cache/vllm"}]}}'

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KvpackTierConnector", "kv_role": "kv_both", "kv_connector_extra_config": {
        "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 10000000000, "secondary_tiers": [{"type": "kvpack",
        "location": "/var/cache/kvpack", "recipe": "octopus-4", "heads": 8, "head_dim": 128, "layout": "adjacent"}]}}'

Importing this package needs no vLLM. ``register`` is the entry point of ``vllm.general_plugins`` that makes both known.
vLLM calls these interfaces experimental: the versions that were run are ``VERSIONS``, and others are refused.
"""

from __future__ import annotations

from contextlib import suppress

VERSIONS = ("0.32",)
"""The versions of vLLM with which the tier was run."""


def register() -> None:
    """Make the tier type "kvpack" and kvpack's connectors known to vLLM; a vLLM without such registries is left alone."""
    # Of the connectors also a vLLM without tiers is told: they refuse it by name.
    with suppress(ImportError, AttributeError):
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        for name in ("KvpackConnector", "KvpackTierConnector"):
            if name not in KVConnectorFactory._registry:
                KVConnectorFactory.register_connector(name, "kvpack.integrations.vllm.connector", name)
    with suppress(ImportError, AttributeError):
        from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

        if "kvpack" not in SecondaryTierFactory._registry:
            SecondaryTierFactory.register_tier("kvpack", "kvpack.integrations.vllm.tier", "KvpackTier")
