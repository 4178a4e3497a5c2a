"""Reads and writes llama.cpp's sequence state files, in which llama-server saves slots::

    cache = import_slot("slot.bin", "octopus-4", kv_heads=8)
    export_slot(cache, "again.bin", dtype="fp16")

Supports version 3 of the files, as in llama.cpp 0c1e57098 (vendored in llama-cpp-python 0.3.36). llama.cpp itself is not needed. README.md
in this folder lists the unsupported files.
"""

from .caches import export_slot, import_slot
from .state_file import CONFIG, is_state_file

__all__ = ["CONFIG", "export_slot", "import_slot", "is_state_file"]
