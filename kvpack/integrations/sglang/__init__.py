"""A compressed, checked and bounded storage tier for SGLang's HiCache::

    python -m sglang.launch_server --enable-hierarchical-cache --page-size 64 --hicache-storage-backend dynamic \\
        --hicache-storage-backend-extra-config '{"backend_name": "kvpack", "module_path": "kvpack.integrations.sglang.storage",
        "class_name": "KvpackHiCache", "interface_v1": 1, "location": "/var/cache/kvpack", "recipe": "octopus-4", "revision": "COMMIT"}'

Experimental: it was run with the factory and the host pools of SGLang 0.5.23 on the CPU, and in no server. Importing this package needs
no SGLang.
"""
