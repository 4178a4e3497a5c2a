"""kvpack in LMCache (MP mode): an L2 adapter that stores objects in a PageStore. A damaged object does not affect others::

    {"type": "plugin", "module_path": "kvpack.integrations.lmcache.adapter", "class_name": "KvpackL2Adapter",
     "adapter_params": {"location": "/var/cache/kvpack", "recipe": "octopus-4", "head_dim": 128, "revision": "COMMIT"}}

Experimental: tested under the storage manager of LMCache 0.5.6 on the CPU, but not in a server. Importing this package does not need
LMCache.
"""
