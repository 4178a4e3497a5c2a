"""Run objects through LMCache's own storage manager with kvpack's L2 adapter (``make engines``).

Each run stores three objects, empties LMCache's memory, and loads the objects, before and after one bit of the second is flipped.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lmcache.v1.distributed.api import GroupedObjectKeys, MemoryLayoutDesc, ObjectKey, PrefetchTaskSpec
from lmcache.v1.distributed.config import EvictionConfig, L1ManagerConfig, L1MemoryManagerConfig, StorageManagerConfig
from lmcache.v1.distributed.l2_adapters.config import L2AdaptersConfig
from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig
from lmcache.v1.distributed.storage_manager import StorageManager
from prometheus_client import REGISTRY

if TYPE_CHECKING:
    from collections.abc import Callable

SPLIT, FUSED = torch.Size([2, 4, 256, 128]), torch.Size([1, 4, 256, 256])
"""Shapes of objects: with separate planes for keys and values, and with one plane in which each head's key precedes its value."""
KEYS = [ObjectKey(chunk_hash=bytes(31) + bytes([number]), model_name="a-model", kv_rank=0) for number in range(3)]


def config(recipe: str, shape: torch.Size, folder: Path) -> Any:
    given = {"location": str(folder), "recipe": recipe, "head_dim": 64, "revision": "abc", "fused": shape == FUSED}
    return PluginL2AdapterConfig("kvpack.integrations.lmcache.adapter", "KvpackL2Adapter", given)


def wait_until(done: Callable[[], bool], seconds: float = 30) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if done():
            return True
        time.sleep(0.05)
    return False


def manager_of(adapter: Any) -> StorageManager:
    memory = L1MemoryManagerConfig(size_in_bytes=256 << 20, use_lazy=False)
    return StorageManager(
        StorageManagerConfig(
            l1_manager_config=L1ManagerConfig(memory_config=memory),
            eviction_config=EvictionConfig(eviction_policy="LRU"),
            l2_adapter_config=L2AdaptersConfig(adapters=[adapter]),
        )
    )


def load_all(manager: StorageManager, layout: MemoryLayoutDesc) -> list[torch.Tensor]:
    """Empty LMCache's own memory, load all objects, and return those before the first missing one."""
    manager.clear(force=True)
    handle = manager.submit_prefetch_task(PrefetchTaskSpec([GroupedObjectKeys(KEYS, 0, layout)]))
    status: list[Any] = [None]

    def known() -> bool:
        status[0] = manager.query_prefetch_status(handle)
        return status[0] is not None

    assert wait_until(known)
    hits = status[0].hit_cells[0].count_leading_ones()
    found = []
    if hits:
        with manager.read_prefetched_results(KEYS[:hits]) as objects:
            found = [one.tensor.view(layout.shapes[0]).clone() for one in objects]
        manager.finish_read_prefetched(KEYS[:hits])
    return found


def files(folder: Path, data: bytes = b"kvpack-row 1") -> list[Path]:
    """Return the entries of a folder in the order in which they were written."""
    found = [path for path in folder.rglob("*") if path.is_file() and path.read_bytes()[:12] == data]
    return sorted(found, key=lambda path: path.stat().st_mtime_ns)


def metrics() -> dict[str, float]:
    """Return the metrics of the open stores, as LMCache's own endpoint reports them."""
    samples = [sample for family in REGISTRY.collect() for sample in family.samples]
    return {name: sum(sample.value for sample in samples if sample.name == name) for name in {sample.name for sample in samples}}


def run(recipe: str, shape: torch.Size) -> bool:
    layout = MemoryLayoutDesc(shapes=[shape], dtypes=[torch.bfloat16])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        manager = manager_of(config(recipe, shape, folder))
        source = torch.Generator().manual_seed(0)
        given = [torch.randn(shape, generator=source).to(torch.bfloat16) for _ in KEYS]
        for key, values in zip(KEYS, given, strict=True):
            reserved = manager.reserve_write([key], layout)
            reserved[key].tensor.view(shape).copy_(values)
            manager.finish_write([key])
            assert wait_until(lambda: manager.report_status()["store_controller"]["in_flight_task_count"] == 0)
        assert wait_until(lambda: len(files(folder)) == len(KEYS)), files(folder)
        size = files(folder)[0].stat().st_size
        whole = load_all(manager, layout)
        victim = files(folder)[1]
        data = bytearray(victim.read_bytes())
        data[len(data) // 2] ^= 1
        victim.write_bytes(data)
        damaged = load_all(manager, layout)
        shown = metrics()
        released = wait_until(lambda: manager.report_status()["l1_manager"]["memory_used_bytes"] == 0)
        manager.close()
    # LMCache exports the registry of prometheus_client.
    told = shown.get("kvpack_store_damaged_entries_total") == 1 and shown.get("kvpack_store_hit_tokens_total", 0) >= 3 * shape[2]
    errors = [((x.float() - y.float()).norm() / y.float().norm()).item() for x, y in zip(whole, given, strict=False)]
    good = told and len(whole) == 3 and len(damaged) == 1 and released and max(errors) <= (0 if recipe == "raw" else 0.1)
    planes = "fused" if shape == FUSED else "split"
    print(
        f"LMCache, {recipe}, {planes}: {given[0].nbytes / size:.2f} times smaller; {len(whole)} of 3 objects come back, errors at "
        f"most {max(errors):.4f}; after one flipped bit {len(damaged)} before the damaged one {'good' if good else 'WRONG'}",
        flush=True,
    )
    return good


if __name__ == "__main__":
    sys.exit(sum(not run(recipe, shape) for recipe in ("raw", "octopus-4") for shape in (SPLIT, FUSED)))
