"""kvpack in LMCache (MP mode): an L2 adapter over a PageStore, in which a damaged object is missing alone::

    {"type": "plugin", "module_path": "kvpack.integrations.lmcache.adapter", "class_name": "KvpackL2Adapter",
     "adapter_params": {"location": "/var/cache/kvpack", "recipe": "octopus-4", "head_dim": 128, "revision": "COMMIT"}}

and a serde, which makes objects of LMCache's own L2 adapters rows of one size, checked by their own checksum::

    {"type": "plugin", "module_path": "kvpack.integrations.lmcache.fs", "class_name": "FSL2Adapter",
     "config_class_name": "FSL2AdapterConfig", "adapter_params": {"base_path": "/var/cache/lmcache"},
     "serde": {"type": "kvpack", "recipe": "octopus-4", "head_dim": 128, "revision": "COMMIT"}}

LMCache has no entry point for serdes: the plugin's module registers it, before LMCache makes the serde.
Experimental: both were run under the storage manager of LMCache 0.5.6 on the CPU, and in no server. Importing this package needs no
LMCache.
"""
