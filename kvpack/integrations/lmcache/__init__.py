"""A serde for LMCache (MP mode): objects of its L2 adapters as rows of one size, checked by their own checksum::

    {"type": "plugin", "module_path": "kvpack.integrations.lmcache.fs", "class_name": "FSL2Adapter",
     "config_class_name": "FSL2AdapterConfig", "adapter_params": {"base_path": "/var/cache/lmcache"},
     "serde": {"type": "kvpack", "recipe": "octopus-4", "head_dim": 128, "revision": "COMMIT"}}

LMCache has no entry point for serdes: the plugin's module registers it, before LMCache makes the serde.
Experimental: tests run it over stubs of the classes of LMCache 0.5.6, and nobody has run it in a server. Importing this package needs
no LMCache.
"""
