"""The names of rows. vLLM's manager knows the keys of chunks, but its workers do not.

vLLM's own specs record the locations of chunks. If they also contain the keys, rows of other chunks are detected: those that an earlier
chunk left in the same memory, or that a tier loaded to the wrong block.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

ABSENT = b"kvpack-absent 1\n"
"""First bytes of a row without a block. A sliding window has passed the block, or the chunk is not full."""


def row_key(key: bytes, index: int) -> bytes:
    """Return the name of the row of block ``index`` of the chunk ``key``."""
    return key + index.to_bytes(4, "big")


def attach_keys(manager: Any) -> None:
    """Make ``manager`` add ``keys`` to the specs that it prepares: the keys of the spec's chunks, in order."""
    prepare_store, prepare_load = manager.prepare_store, manager.prepare_load

    def store(keys: Iterable[bytes], req_context: Any) -> Any:
        output = prepare_store(keys, req_context)
        if output is not None:
            output.store_spec.keys = [bytes(key) for key in output.keys_to_store]
        return output

    def load(keys: Iterable[bytes], req_context: Any) -> Any:
        keys = list(keys)
        spec = prepare_load(keys, req_context)
        spec.keys = [bytes(key) for key in keys]
        return spec

    manager.prepare_store, manager.prepare_load = store, load
