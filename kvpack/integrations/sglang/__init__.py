"""A compressed, checked and bounded storage tier for SGLang's HiCache::

    python -m sglang.launch_server --enable-hierarchical-cache --page-size 64 --hicache-storage-backend dynamic \\
        --hicache-storage-backend-extra-config '{"backend_name": "kvpack", "location": "/var/cache/kvpack", "recipe": "octopus-4",
        "revision": "COMMIT"}'

SGLang's list of backend names is fixed, and ``dynamic`` stands for all others. With ``register``, an entry point of ``sglang.srt.plugins``,
SGLang finds kvpack's class by ``backend_name``. Experimental: tested with the factory and the host pools of SGLang 0.5.23 on the CPU, but
not in a server. Importing this package does not need SGLang.
"""

from __future__ import annotations

from typing import Any

CREATE_BACKEND_PATH = "sglang.srt.mem_cache.storage.backend_factory.StorageBackendFactory.create_backend"
"""Path of the function with which each of SGLang's schedulers creates its backends."""
CLASS = {"module_path": "kvpack.integrations.sglang.storage", "class_name": "KvpackHiCache", "interface_v1": 1}


def register() -> None:
    """Register kvpack's backend with SGLang's factory if the installed SGLang has plugin hooks."""
    try:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    except ImportError:
        return
    HookRegistry.register(CREATE_BACKEND_PATH, name_class, HookType.BEFORE)


def name_class(factory: Any, backend_name: str, storage_config: Any, *arguments: Any, **options: Any) -> None:
    """Add kvpack's class to the settings of a ``dynamic`` backend named kvpack, unless the operator has set a class."""
    settings = storage_config.extra_config
    if backend_name == "dynamic" and isinstance(settings, dict) and settings.get("backend_name") == "kvpack":
        for name, value in CLASS.items():
            settings.setdefault(name, value)
