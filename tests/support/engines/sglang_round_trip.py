"""Move pages between SGLang's own host pools, through the backend that SGLang's factory creates (``make engines``).

SGLang imports kernels and image functions that are unavailable on a CPU; stubs replace them.
"""

from __future__ import annotations

import hashlib
import importlib.abc
import importlib.machinery
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch

# Import transformers before the stubs exist, because it checks which packages are installed.
from transformers import AutoProcessor  # noqa: F401


class StubFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] in ("torchvision", "sgl_kernel"):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> Any:
        made = MagicMock()
        made.__path__, made.__spec__, made.__name__ = [], spec, spec.name
        return made

    def exec_module(self, module: Any) -> None:
        pass


sys.meta_path.insert(0, StubFinder())

from sglang.srt.mem_cache.device_pool_info import KVBufferLayout, KVBuffers, MHABufferInfo  # noqa: E402
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolHitPolicy, PoolName, PoolTransfer  # noqa: E402
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost  # noqa: E402
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory  # noqa: E402
from sglang.srt.observability.metrics_collector import StorageMetricsCollector  # noqa: E402
from sglang.srt.plugins import load_plugins  # noqa: E402

LAYERS, HEADS, DIM, TOKENS, PAGES = 4, 2, 128, 64, 8
KEYS = [hashlib.sha256(bytes([number])).hexdigest() for number in range(4)]


def pool(layout: str, seed: int | None = None) -> Any:
    def tensors() -> tuple[torch.Tensor, ...]:
        return tuple(torch.zeros(TOKENS * PAGES, HEADS, DIM, dtype=torch.bfloat16) for _ in range(LAYERS))

    k, v = tensors(), tensors()
    pointers = [torch.tensor([x.data_ptr() for x in side], dtype=torch.uint64) for side in (k, v)]
    buffers = KVBuffers(k=k, v=v, k_data_ptrs=pointers[0], v_data_ptrs=pointers[1], layout=KVBufferLayout.NHD)
    info = MHABufferInfo(
        buffers=buffers, page_size=TOKENS, head_num=HEADS, head_dim=DIM, v_head_dim=DIM, dtype=torch.bfloat16, device=torch.device("cpu")
    )
    made = MHATokenToKVPoolHost(
        info,
        2.0,
        0,
        TOKENS,
        layout,
        pin_memory=False,
        device="cpu",
        device_capacity_tokens=TOKENS * PAGES,
        start_layer=0,
        end_layer=LAYERS - 1,
    )
    made.kv_buffer.zero_()
    if seed is not None:
        source = torch.Generator().manual_seed(seed)
        made.kv_buffer.copy_(torch.randn(made.kv_buffer.shape, generator=source))
    return made


def backend(folder: str, recipe: str, kv: Any, others: dict[Any, Any]) -> Any:
    # kvpack's entry point adds the other settings.
    extra = {"backend_name": "kvpack", "location": folder, "recipe": recipe, "revision": "abc"}
    config = HiCacheStorageConfig(
        tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, is_mla_model=False, enable_storage_metrics=True,
        is_page_first_layout=True, model_name="a-model", extra_config=extra,
    )  # fmt: skip
    made = StorageBackendFactory.create_backend("dynamic", config, kv)
    assert config.extra_config["interface_v1"] == 1
    made.register_mem_pool_host(kv)
    for name, other in {PoolName.KV: kv, **others}.items():
        made.register_mem_host_pool_v2(other, name)
    made.on_host_pools_registered()
    return made


def page(backend: Any, number: int) -> torch.Tensor:
    """Return a page as ``[side, layer, token, head, channel]``."""
    x = backend.get_data_page(number * TOKENS, flat=False)
    match backend.layout:
        case "layer_first":
            return x.clone()
        case "page_first":
            return x.transpose(1, 2).clone()
        case "page_first_direct":
            return x[:, 0].clone()
    return x[:, 0].permute(0, 3, 2, 1, 4).clone()


def metrics(collector: Any, backend: Any) -> dict[str, float]:
    """Return the metrics that SGLang exports for a backend: SGLang's storage metrics and those of kvpack."""
    from prometheus_client import REGISTRY

    collector.log_storage_metrics(backend.get_stats())
    names = ("sglang:prefetch_pgs_sum", "sglang:kvpack_hit_tokens_total", "sglang:kvpack_damaged_entries_total", "sglang:kvpack_row_bytes")
    samples = [sample for family in REGISTRY.collect() for sample in family.samples]
    return {name: sum(sample.value for sample in samples if sample.name == name) for name in names}


def run(recipe: str, collector: Any) -> bool:
    good, worst = True, 0.0
    indices = torch.arange(4 * TOKENS)
    with tempfile.TemporaryDirectory() as folder:
        kv, windows, index = pool("page_first", 0), pool("page_first", 1), pool("page_first", 2)
        first = backend(folder, recipe, kv, {PoolName.SWA: windows, PoolName.INDEXER: index})
        good &= first.batch_set_v1(KEYS, indices) == [True] * 4
        extra = [
            PoolTransfer(PoolName.SWA, indices[2 * TOKENS :], keys=KEYS[2:], hit_policy=PoolHitPolicy.TRAILING_PAGES),
            PoolTransfer(PoolName.INDEXER, indices, keys=KEYS),
        ]
        good &= all(all(found) for found in first.batch_set_v2(extra).values())
        for layout in ("layer_first", "page_first", "page_first_direct", "page_head"):
            targets = [pool(layout), pool(layout), pool("page_first")]
            other = backend(folder, recipe, targets[0], {PoolName.SWA: targets[1], PoolName.INDEXER: targets[2]})
            good &= other.batch_exists([*KEYS, "ff" * 32]) == 4
            good &= other.batch_exists_v2(KEYS, extra).restorable_prefix_pages == [4]
            good &= other.batch_get_v1(KEYS, indices + 2 * TOKENS) == [True] * 4
            good &= all(all(found) for found in other.batch_get_v2(extra).values())
            good &= all(torch.equal(page(targets[2], number), page(index, number)) for number in range(4))
            pairs = [(page(targets[0], number + 2), page(kv, number)) for number in range(4)]
            pairs += [(page(targets[1], number), page(windows, number)) for number in (2, 3)]
            worst = max(worst, *(((x.float() - y.float()).norm() / y.float().norm()).item() for x, y in pairs))
            shown = metrics(collector, other)
        size = other.store.codec.geometry.raw_bytes / other.store.codec.nbytes
        entries = [path for path in Path(folder).rglob("*") if path.is_file() and path.read_bytes()[:10] == b"kvpack-row"]
        victims = [path for path in entries if path.stat().st_size == other.store.codec.nbytes]
        data = bytearray(victims[0].read_bytes())
        data[len(data) // 2] ^= 1
        victims[0].write_bytes(data)
        pools = (*other.batch_get_v1(KEYS, indices), *(one for found in other.batch_get_v2(extra).values() for one in found))
        good &= pools.count(False) == 1
        after = metrics(collector, other)
        good &= after["sglang:kvpack_damaged_entries_total"] - shown["sglang:kvpack_damaged_entries_total"] == 1
        good &= after["sglang:kvpack_hit_tokens_total"] > shown["sglang:kvpack_hit_tokens_total"] > 0
        other.clear()
        good &= other.batch_exists(KEYS) == 0 and not any(map(any, other.batch_get_v2(extra).values()))
        good &= after["sglang:prefetch_pgs_sum"] > 0 and after["sglang:kvpack_row_bytes"] > 0
    good &= worst <= (0 if recipe == "bf16" else 0.1)
    print(
        f"SGLang, {recipe}: {size:.2f} times smaller; pages of three pools come back in four layouts, errors at most {worst:.4f}; "
        f"after one flipped bit {pools.count(True)} of {len(pools)} {'good' if good else 'WRONG'}",
        flush=True,
    )
    return bool(good)


if __name__ == "__main__":
    load_plugins()
    shared = StorageMetricsCollector(labels={"storage_backend": "dynamic", "tp_rank": 0, "dp_rank": 0, "pp_rank": 0, "pp_size": 1})
    sys.exit(sum(not run(recipe, shared) for recipe in ("bf16", "octopus-4")))
