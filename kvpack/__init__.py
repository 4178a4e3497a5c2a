"""kvpack: compressed KV caches as files, attended without unpacking."""

from pathlib import Path

# A checkout keeps formats/ and kernels/ beside this package; a wheel holds them inside it.
if not Path(__path__[0], "formats").is_dir():
    __path__.append(str(Path(__path__[0]).parent))
