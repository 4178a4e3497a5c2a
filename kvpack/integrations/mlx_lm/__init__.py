"""Reads mlx-lm's prompt cache files as caches, and writes caches as such files if nothing is lost::

    cache = import_prompt_cache("prompt.safetensors", "octopus-4")
    export_prompt_cache(cache, "again.safetensors", dtype="bf16")

mlx itself is not needed. README.md in this folder lists the unsupported files.
"""

from .prompt_caches import export_prompt_cache, import_prompt_cache

__all__ = ["export_prompt_cache", "import_prompt_cache"]
