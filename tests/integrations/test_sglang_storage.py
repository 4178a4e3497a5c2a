"""HiCache's storage over stubs of SGLang 0.5.23: its base class, its configuration and its host pools, in all their layouts."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest
import torch

from kvpack.errors import InvalidParameter

from engine_stubs import import_over  # isort: skip

LAYERS, PAGES, TOKENS, HEADS, DIM = 2, 6, 16, 2, 32
SHAPES = {
    "layer_first": (LAYERS, PAGES * TOKENS, HEADS, DIM),
    "page_first": (PAGES * TOKENS, LAYERS, HEADS, DIM),
    "page_first_direct": (PAGES, LAYERS, TOKENS, HEADS, DIM),
    "page_head": (PAGES, HEADS, TOKENS, LAYERS, DIM),
}
ORDERS = {"layer_first": "l(pt)hd", "page_first": "(pt)lhd", "page_first_direct": "plthd", "page_head": "phtld"}


class HiCacheStorage:
    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        self.mem_pool_host = mem_pool_host

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        self.registered_pools = {**getattr(self, "registered_pools", {}), host_pool_name: host_pool}


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> Any:
    stubs = {"sglang.srt.mem_cache.hicache_storage": {"HiCacheStorage": HiCacheStorage}}
    return import_over(monkeypatch, stubs, "kvpack.integrations.sglang.storage")


def pool(layout: str, seed: int | None = None, **values: Any) -> Any:
    source = torch.Generator().manual_seed(seed or 0)
    kv = torch.randn(2, *SHAPES[layout], generator=source).bfloat16() if seed is not None else torch.zeros(2, *SHAPES[layout]).bfloat16()
    fields = {"layer_num": LAYERS, "head_num": HEADS, "head_dim": DIM, "v_head_dim": DIM, "page_size": TOKENS, "page_num": PAGES}
    return types.SimpleNamespace(**fields, layout=layout, dtype=torch.bfloat16, k_buffer=kv[0], v_buffer=kv[1], **values)


def plain(made: Any, page: int) -> list[torch.Tensor]:
    """K and V of a page as [layer, token, head, channel]."""
    found = []
    for x in (made.k_buffer, made.v_buffer):
        match made.layout:
            case "layer_first":
                found.append(x[:, page * TOKENS : (page + 1) * TOKENS])
            case "page_first":
                found.append(x[page * TOKENS : (page + 1) * TOKENS].transpose(0, 1))
            case "page_first_direct":
                found.append(x[page])
            case _:
                found.append(x[page].permute(2, 1, 0, 3))
    return found


def opened(storage: Any, made: Any, folder: Path, *, mla: bool = False, **options: Any) -> Any:
    extra = {"backend_name": "kvpack", "interface_v1": 1, "location": str(folder), "recipe": "bf16", "revision": "abc", **options}
    config = types.SimpleNamespace(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, is_mla_model=mla, model_name="a/model", extra_config=extra)
    backend = storage.KvpackHiCache(config, {})
    backend.register_mem_pool_host(made)
    backend.on_host_pools_registered()
    return backend


def indices(*pages: int) -> torch.Tensor:
    return torch.cat([torch.arange(TOKENS) + page * TOKENS for page in pages])


def test_pages_written_in_one_layout_are_read_into_all(storage: Any, tmp_path: Path) -> None:
    given = pool("page_first", 1)
    backend = opened(storage, given, tmp_path)
    keys = ["a" * 64, "b" * 64, "c" * 64]
    info = types.SimpleNamespace(prefix_keys=["z" * 64], extra_info=None)
    assert backend.batch_exists(keys) == 0
    assert backend.batch_set_v1(keys, indices(4, 0, 3), info) == [True] * 3
    assert backend.batch_exists([*keys[:2], "none", keys[2]]) == 2
    assert backend.exists(keys[2])
    backend.close()
    for layout in SHAPES:
        target = pool(layout)
        backend = opened(storage, target, tmp_path)
        assert backend.batch_get_v1([keys[2], "none", keys[0]], indices(1, 2, 5)) == [True, False, True]
        for page, source in ((1, 3), (5, 4)):
            assert all(torch.equal(x, y) for x, y in zip(plain(target, page), plain(given, source), strict=True)), layout
        assert not any(x.any() for x in plain(target, 2))
        assert backend.get_stats()["loads"] == 1
        backend.close()


def test_latents_are_two_sides(storage: Any, tmp_path: Path) -> None:
    def latents(seed: int | None) -> Any:
        cells = torch.zeros(LAYERS, PAGES * TOKENS, 1, 80).bfloat16()
        if seed is not None:
            cells = torch.randn(cells.shape, generator=torch.Generator().manual_seed(seed)).bfloat16()
        fields = {"layer_num": LAYERS, "page_size": TOKENS, "page_num": PAGES, "kv_lora_rank": 64, "qk_rope_head_dim": 16}
        return types.SimpleNamespace(**fields, layout="layer_first", dtype=torch.bfloat16, kv_buffer=cells)

    given, target = latents(2), latents(None)
    for made, step in ((given, "set"), (target, "get")):
        backend = opened(storage, made, tmp_path, mla=True, recipe="k=scalar:b=4;v=raw")
        assert getattr(backend, f"batch_{step}_v1")(["key"], indices(2)) == [True]
        backend.close()
    rows = slice(2 * TOKENS, 3 * TOKENS)
    assert torch.equal(target.kv_buffer[:, rows, :, 64:], given.kv_buffer[:, rows, :, 64:])
    error = (target.kv_buffer[:, rows].float() - given.kv_buffer[:, rows].float()).norm() / given.kv_buffer[:, rows].float().norm()
    assert 0.01 < error < 0.2


def test_what_cannot_be_served_is_refused(storage: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter, match="extra_config has location, misspelled, recipe, revision for kvpack, expected location"):
        opened(storage, pool("page_first"), tmp_path, misspelled=1)
    with pytest.raises(InvalidParameter, match="the model 'a/model' is no folder: give revision"):
        opened(storage, pool("page_first"), tmp_path, revision=None)
    strange = pool("page_first")
    strange.layout = "page_unified"
    with pytest.raises(InvalidParameter, match="the host pool has the layout 'page_unified'"):
        opened(storage, strange, tmp_path)
    backend = opened(storage, pool("page_first"), tmp_path)
    for call in (lambda: backend.get("key"), lambda: backend.batch_get([]), lambda: backend.set("key"), lambda: backend.batch_set([])):
        with pytest.raises(InvalidParameter, match='write "interface_v1": 1'):
            call()
    with pytest.raises(InvalidParameter, match="1 keys were given for indices of 2 pages"):
        backend.batch_get_v1(["key"], indices(0, 1))
    backend.register_mem_host_pool_v2(object(), "mamba")
    with pytest.raises(InvalidParameter, match="the model has the host pools mamba besides"):
        backend.on_host_pools_registered()
    backend.close()
