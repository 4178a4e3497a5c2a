"""Tests of HiCache storage with stubs of SGLang 0.5.23: base class, configuration, and host pools in all layouts."""

from __future__ import annotations

import sys
import types
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch

import kvpack
from kvpack.errors import InvalidParameter, MissingBasis
from kvpack.integrations import sglang as integration
from support.engine_conditions import CONDITIONS
from support.engine_stubs import Metric, import_over
from support.host_settings import Watched, vllm_like_host
from support.klt_bases import random_basis

pytestmark = pytest.mark.usefixtures("patient_stores")

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

    def on_host_pools_registered(self) -> None:
        pass


@dataclass(frozen=True)
class PoolTransferResult:
    kv_hit_pages: int
    extra_pool_hit_pages: dict[str, int]
    restorable_prefix_pages: list[int] | None = None


@dataclass
class StorageMetrics:
    prefetch_pgs: list[int] = field(default_factory=list)
    backup_pgs: list[int] = field(default_factory=list)
    prefetch_bandwidth: list[float] = field(default_factory=list)
    backup_bandwidth: list[float] = field(default_factory=list)


class Policy(Enum):
    ALL = "all_pages"
    TRAILING = "trailing_pages"
    GROUPS = "block_groups"


class StatePool:
    """A stub of SGLang's pool of recurrent states, which consists of pages of bytes, one per index."""

    page_size, layout = 1, "layer_first"

    def __init__(self, seed: int | None = None) -> None:
        source = torch.Generator().manual_seed(seed or 0)
        self.dtype = torch.float32
        self.state = torch.randn(PAGES, 3, 50, generator=source) if seed is not None else torch.zeros(PAGES, 3, 50)

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        return self.state[index].flatten()

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros(150, dtype=self.dtype, device="cpu")

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        self.state[index] = data_page.view(3, 50)


SERVER: dict[str, Any] = {}
"""The arguments of SGLang's server."""


def get_server_args() -> Any:
    if not SERVER:
        raise ValueError("Global server args is not set yet!")
    return types.SimpleNamespace(**SERVER)


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> Any:
    SERVER.clear()
    stubs = {
        "sglang.srt.mem_cache.hicache_storage": {"HiCacheStorage": HiCacheStorage, "PoolTransferResult": PoolTransferResult},
        "sglang.srt.runtime_context": {"get_server_args": get_server_args},
        "sglang.srt.observability.metrics_collector": {"StorageMetrics": StorageMetrics},
    }
    return import_over(monkeypatch, stubs, "kvpack.integrations.sglang.storage")


def pool(layout: str, seed: int | None = None, **values: Any) -> Any:
    source = torch.Generator().manual_seed(seed or 0)
    kv = torch.randn(2, *SHAPES[layout], generator=source).bfloat16() if seed is not None else torch.zeros(2, *SHAPES[layout]).bfloat16()
    fields = {"layer_num": LAYERS, "head_num": HEADS, "head_dim": DIM, "v_head_dim": DIM, "page_size": TOKENS, "page_num": PAGES}
    made = types.SimpleNamespace(**fields, layout=layout, dtype=torch.bfloat16, k_buffer=kv[0], v_buffer=kv[1], **values)
    made.get_size_per_token = lambda: 2 * LAYERS * HEADS * DIM * made.dtype.itemsize
    return made


def plain(made: Any, page: int) -> list[torch.Tensor]:
    """Return the keys and values of a page as ``[layer, token, head, channel]``."""
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


def opened(
    storage: Any, made: Any, folder: Path, *, mla: bool = False, model: str = "a/model", tp: tuple[int, int] = (0, 1), **options: Any
) -> Any:
    extra = {"backend_name": "kvpack", "interface_v1": 1, "location": str(folder), "recipe": "bf16", "revision": "abc", **options}
    ranks = {"tp_rank": tp[0], "tp_size": tp[1], "pp_rank": 0, "pp_size": 1}
    config = types.SimpleNamespace(**ranks, is_mla_model=mla, model_name=model, extra_config=extra)
    backend = storage.KvpackHiCache(config, {})
    backend.register_mem_pool_host(made)
    backend.on_host_pools_registered()
    return backend


def indices(*pages: int) -> torch.Tensor:
    return torch.cat([torch.arange(TOKENS) + page * TOKENS for page in pages])


def test_pages_written_in_one_layout_are_read_into_all_layouts(storage: Any, tmp_path: Path) -> None:
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
        assert backend.store.counters()["loads"] == 1
        backend.close()


def test_every_call_keeps_the_hosts_settings(storage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pools = pool("page_first", 1), pool("layer_first", 2), StatePool(3)
    pools[0].k_buffer[0, 0, 0, 0] = float("nan")
    make = Watched(None).call("made", lambda **options: opened(storage, pools[0], tmp_path, recipe="octopus-4", **options))
    transfers = [
        types.SimpleNamespace(name=name, keys=["a"], host_indices=places, hit_policy=Policy.ALL)
        for name, places in (("kv", indices(1)), ("swa", indices(1)), ("mamba", torch.tensor([1])))
    ]
    at = {pages: indices(*pages) for pages in ((0, 4), (2, 3), (0, 1))}
    with vllm_like_host(monkeypatch):
        with pytest.raises(InvalidParameter):
            make(misspelled=1)
        backend = Watched(make())
        for name, other in zip(("kv", "swa", "mamba"), pools, strict=True):
            backend.register_mem_host_pool_v2(other, name)
        # The first page has a value that no codec takes.
        assert backend.batch_set_v1(["nan", "b"], at[0, 4]) == [False, True]
        assert backend.batch_get_v1(["nan", "b"], at[2, 3]) == [False, True]
        assert all(all(found) for found in backend.batch_set_v2(transfers).values())
        assert backend.batch_exists_v2(["a"], transfers).kv_hit_pages == 1
        assert all(all(found) for found in backend.batch_get_v2(transfers).values())
        assert backend.batch_exists(["b"]) == 1
        assert backend.exists("b")
        for call in (lambda: backend.get("a"), lambda: backend.set("a"), lambda: backend.batch_get([]), lambda: backend.batch_set([])):
            with pytest.raises(InvalidParameter):
                call()
        with pytest.raises(InvalidParameter):
            backend.batch_get_v1(["a"], at[0, 1])
        backend.get_stats()
        backend.clear()
        backend.close()
    public = {name for name, value in vars(storage.KvpackHiCache).items() if not name.startswith("_") and callable(value)}
    assert backend.called >= public - {"register_mem_pool_host"}


def test_sglang_reports_kvpacks_counters(storage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's collector accepts only its own class, and sets an attribute of the object."""

    shown: dict[str, Metric] = {}

    def made(name: str, meaning: str, labels: list[str], **options: Any) -> Metric:
        assert name not in shown, "a metric was registered twice"
        shown[name] = Metric(name, meaning, labels)
        return shown[name]

    client = types.ModuleType("prometheus_client")
    vars(client).update(Counter=made, Gauge=made, Histogram=made)
    monkeypatch.setitem(sys.modules, "prometheus_client", client)
    storage._metrics.cache_clear()
    backends = [opened(storage, pool("page_first", 1), tmp_path, recipe="octopus-4") for _ in range(2)]
    backends[0].batch_set_v1(["a", "b"], indices(4, 0))
    backends[0].register_mem_host_pool_v2(pool("page_first", 2), "swa")
    backends[0].batch_set_v2([types.SimpleNamespace(name="swa", keys=["a"], host_indices=indices(3))])
    backends[1].batch_get_v1(["a", "none", "b"], indices(1, 2, 3))
    with pytest.raises(InvalidParameter):
        backends[1].batch_get_v1(["a"], indices(1, 2))
    found = [backend.get_stats() for backend in backends]
    found[0].prefetch_stats = {}
    assert [(one.backup_pgs, one.prefetch_pgs) for one in found] == [([2, 1], []), ([], [3])]
    assert all(speed > 0 for one in found for speed in one.backup_bandwidth + one.prefetch_bandwidth)
    again = backends[0].get_stats()
    assert not again.backup_pgs
    kv, swa = ("kv", "0", "0"), ("swa", "0", "0")
    assert shown["sglang:kvpack_saved_chunks"].values == {kv: 2, swa: 1}
    assert shown["sglang:kvpack_hit_tokens"].values == {kv: 2 * TOKENS}
    assert shown["sglang:kvpack_load_tokens"].values == {kv: 3 * TOKENS}
    assert set(shown["sglang:kvpack_seconds"].values) == {(*kv, "save"), (*kv, "load"), (*swa, "save")}
    codec = backends[0].store.codec
    assert (
        shown["sglang:kvpack_page_bytes"].values[kv] / shown["sglang:kvpack_row_bytes"].values[kv]
        == codec.geometry.raw_bytes / codec.nbytes
    )
    for backend in backends:
        backend.close()
    # Without it there are SGLang's own numbers alone.
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    storage._metrics.cache_clear()
    backend = opened(storage, pool("page_first", 1), tmp_path)
    assert backend.get_stats() == StorageMetrics()
    backend.close()
    storage._metrics.cache_clear()


def test_the_entry_point_names_the_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """The names of SGLang's backends are fixed, and its hooks run before its factory."""
    integration.register()
    registered: list[Any] = []
    registry = types.SimpleNamespace(register=lambda *given: registered.append(given))
    hooks = {"HookRegistry": registry, "HookType": types.SimpleNamespace(BEFORE="before")}
    import_over(monkeypatch, {"sglang.srt.plugins.hook_registry": hooks}, "kvpack.integrations.counter_changes")
    integration.register()
    assert registered == [(integration.CREATE_BACKEND_PATH, integration.name_class, "before")]
    found = []
    for name, settings in (
        ("dynamic", {"backend_name": "kvpack"}),
        ("dynamic", {"backend_name": "other"}),
        ("file", {"backend_name": "kvpack"}),
    ):
        config = types.SimpleNamespace(extra_config=settings)
        assert integration.name_class(object, name, config, None) is None
        found.append(config.extra_config)
    assert found[0] == {"backend_name": "kvpack", **integration.CLASS}
    assert found[1:] == [{"backend_name": "other"}, {"backend_name": "kvpack"}]
    config = types.SimpleNamespace(extra_config={"backend_name": "kvpack", "class_name": "Mine"})
    integration.name_class(object, "dynamic", storage_config=config, mem_pool_host=None)
    assert config.extra_config["class_name"] == "Mine"
    integration.name_class(object, "file", types.SimpleNamespace(extra_config=None), None)


def test_latents_become_two_sides(storage: Any, tmp_path: Path) -> None:
    def latents(seed: int | None) -> Any:
        cells = torch.zeros(LAYERS, PAGES * TOKENS, 1, 80).bfloat16()
        if seed is not None:
            cells = torch.randn(cells.shape, generator=torch.Generator().manual_seed(seed)).bfloat16()
        fields = {"layer_num": LAYERS, "page_size": TOKENS, "page_num": PAGES, "kv_lora_rank": 64, "qk_rope_head_dim": 16}
        size = LAYERS * 80 * 2
        return types.SimpleNamespace(**fields, layout="layer_first", dtype=torch.bfloat16, kv_buffer=cells, get_size_per_token=lambda: size)

    given, target = latents(2), latents(None)
    for made, step in ((given, "set"), (target, "get")):
        backend = opened(storage, made, tmp_path, mla=True, recipe="k=scalar:b=4;v=raw")
        assert getattr(backend, f"batch_{step}_v1")(["key"], indices(2)) == [True]
        backend.close()
    rows = slice(2 * TOKENS, 3 * TOKENS)
    assert torch.equal(target.kv_buffer[:, rows, :, 64:], given.kv_buffer[:, rows, :, 64:])
    error = (target.kv_buffer[:, rows].float() - given.kv_buffer[:, rows].float()).norm() / given.kv_buffer[:, rows].float().norm()
    assert 0.01 < error < 0.2


def test_unsupported_settings_are_refused(storage: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter, match="extra_config has location, misspelled, recipe, revision for kvpack, expected location"):
        opened(storage, pool("page_first"), tmp_path, misspelled=1)
    with pytest.raises(InvalidParameter, match="the model 'a/model' is not a folder: set revision"):
        opened(storage, pool("page_first"), tmp_path, revision=None)
    strange = pool("page_first")
    strange.layout = "page_unified"
    with pytest.raises(InvalidParameter, match="the host pool has layout 'page_unified'"):
        opened(storage, strange, tmp_path)
    scaled = pool("page_first")
    scaled.get_size_per_token = lambda: 2 * LAYERS * HEADS * DIM * 2 + 64
    with pytest.raises(InvalidParameter, match="the host pool holds 9216 bytes per page, but its keys and values take 8192"):
        opened(storage, scaled, tmp_path)
    vectors = [types.SimpleNamespace(buffers=types.SimpleNamespace(layout="vectorized_5d"))]
    with pytest.raises(InvalidParameter, match="SGLang keeps values in the layout 'vectorized_5d', expected nhd"):
        opened(storage, pool("page_first", _buffer_infos=vectors), tmp_path)
    backend = opened(storage, pool("page_first"), tmp_path)
    for call in (lambda: backend.get("key"), lambda: backend.batch_get([]), lambda: backend.set("key"), lambda: backend.batch_set([])):
        with pytest.raises(InvalidParameter, match='set "interface_v1": 1'):
            call()
    with pytest.raises(InvalidParameter, match="1 keys were passed for indices of 2 pages"):
        backend.batch_get_v1(["key"], indices(0, 1))
    transfer = types.SimpleNamespace(name="kv", keys=["key"], hit_policy=Policy.GROUPS)
    backend.register_mem_host_pool_v2(backend.mem_pool_host, "kv")
    with pytest.raises(InvalidParameter, match="the pool kv has hit policy 'block_groups', expected all_pages"):
        backend.batch_exists_v2(["key"], [transfer])
    backend.close()


def test_models_with_several_pools_are_supported(storage: Any, tmp_path: Path) -> None:
    def attached(seed: int | None) -> tuple[Any, Any, Any, StatePool]:
        made, windows, states = pool("page_first", seed), pool("layer_first", seed and seed + 1), StatePool(seed)
        backend = opened(storage, made, tmp_path, recipe="octopus-4")
        for name, other in (("kv", made), ("swa", windows), ("mamba", states)):
            backend.register_mem_host_pool_v2(other, name)
        backend.on_host_pools_registered()
        return backend, made, windows, states

    def transfers(*keys: str, pages: tuple[int, ...]) -> list[Any]:
        return [
            types.SimpleNamespace(name="kv", keys=list(keys), host_indices=indices(*pages)),
            types.SimpleNamespace(name="swa", keys=list(keys[-2:]), host_indices=indices(*pages[-2:]), hit_policy=Policy.TRAILING),
            types.SimpleNamespace(name="mamba", keys=list(keys[-1:]), host_indices=torch.tensor(pages[-1:]), hit_policy=Policy.TRAILING),
        ]

    keys = ["a", "b", "c", "d"]
    backend, _, windows, states = attached(3)
    stored = backend.batch_set_v2(transfers(*keys[:3], pages=(4, 0, 2)))
    assert stored == {"kv": [True] * 3, "swa": [True] * 2, "mamba": [True]}
    stored = backend.batch_set_v2(transfers(keys[3], pages=(1,))[:1])
    assert stored == {"kv": [True]}
    backend.close()
    backend, _, found, target = attached(None)
    asked = transfers(*keys[:3], pages=(5, 1, 3))
    result = backend.batch_exists_v2(keys, asked[1:])
    assert (result.kv_hit_pages, result.extra_pool_hit_pages, result.restorable_prefix_pages) == (3, {"kv": 4, "swa": 3, "mamba": 3}, [3])
    every = types.SimpleNamespace(name="mamba", keys=keys, hit_policy=Policy.ALL)
    assert backend.batch_exists_v2(keys, [every]).kv_hit_pages == 0
    assert backend.batch_exists_v2(keys).kv_hit_pages == 4
    assert backend.batch_get_v2(asked) == {"kv": [True] * 3, "swa": [True] * 2, "mamba": [True]}
    assert torch.equal(target.state[3], states.state[2])
    assert not target.state[[0, 1, 2, 4, 5]].any()
    for x, y in zip(plain(found, 3), plain(windows, 2), strict=True):
        assert 0 < (x.float() - y.float()).norm() / y.float().norm() < 0.1
    missing = transfers("x", pages=(0,))[2:]
    assert backend.batch_get_v2(missing) == {"mamba": [False]}
    backend.close()


def test_pages_of_another_layout_are_misses(storage: Any, tmp_path: Path) -> None:
    """Flat pages have the order of the pool's layout, which their bytes do not show."""

    def attached(layout: str) -> tuple[Any, StatePool]:
        backend, states = opened(storage, pool("page_first", 3), tmp_path), StatePool(3)
        states.layout = layout
        backend.register_mem_host_pool_v2(states, "mamba")
        return backend, states

    one = [types.SimpleNamespace(name="mamba", keys=["a"], host_indices=torch.tensor([2]))]
    for layout, found in (("layer_first", True), ("page_first", False), ("layer_first", True)):
        backend, _ = attached(layout)
        if layout == "layer_first":
            backend.batch_set_v2(one)
        assert backend.batch_get_v2(one) == {"mamba": [found]}
        backend.close()


def test_pages_of_a_server_with_other_settings_are_misses(storage: Any, tmp_path: Path) -> None:
    """SGLang stores 8-bit floats as bytes, and can run the same model with another rotary embedding."""

    def of_bytes(seed: int | None) -> Any:
        made = pool("page_first", seed)
        made.dtype, made.k_buffer, made.v_buffer = torch.uint8, made.k_buffer.to(torch.uint8), made.v_buffer.to(torch.uint8)
        return made

    with pytest.raises(InvalidParameter, match="bytes of an unknown dtype"):
        opened(storage, of_bytes(1), tmp_path, recipe="raw")
    e4m3 = {**dict.fromkeys(storage._SETTINGS), "kv_cache_dtype": "fp8_e4m3", "json_model_override_args": "{}"}
    others = [
        {"kv_cache_dtype": "fp8_e5m2"},
        {"json_model_override_args": '{"rope_theta": 5e5}'},
        {"quantization": "fp8"},
        # Weights that are not those of the folder.
        {"load_format": "dummy"},
        {"weight_version": "2"},
        # Of those that change values by other experts, images and attention.
        {"kt_method": "AMXINT4"},
        {"mm_process_config": {"image": {"max_pixels": 1}}},
        {"enable_hisparse": True},
    ]
    SERVER.update(e4m3)
    backend = opened(storage, of_bytes(1), tmp_path, recipe="raw")
    backend.batch_set_v1(["a" * 64], indices(2))
    backend.close()
    for settings in (*others, {}):
        SERVER.clear()
        SERVER.update(e4m3 | settings)
        backend = opened(storage, of_bytes(1), tmp_path, recipe="raw")
        assert backend.batch_exists(["a" * 64]) == (not settings)
        backend.close()
    del SERVER["load_format"], SERVER["dtype"]
    with pytest.raises(
        InvalidParameter, match="the installed version of SGLang has no server argument dtype, load_format, on which pages depend: kvpack"
    ):
        opened(storage, of_bytes(1), tmp_path, recipe="raw")


@pytest.mark.parametrize(
    ("name", "setting", "other"), [("mamba", "mamba_ssm_dtype", "float16"), ("draft", "speculative_draft_model_path", "/models/another")]
)
def test_pools_depend_on_their_own_settings(storage: Any, tmp_path: Path, name: str, setting: str, other: str) -> None:
    """SGLang's keys do not distinguish states of the same size but another dtype, or the pages of another draft model."""
    settings = dict.fromkeys((*storage._SETTINGS, *storage._DRAFT_SETTINGS))
    there = {}
    for value in (None, other, None):
        SERVER.update({**settings, setting: value})
        backend = opened(storage, pool("page_first", 1), tmp_path)
        backend.register_mem_host_pool_v2(StatePool(2), name)
        transfer = types.SimpleNamespace(name=name, keys=["key"], host_indices=torch.tensor([1]))
        there.setdefault(value, []).append(backend.batch_get_v2([transfer])[name])
        if value is None:
            backend.batch_set_v2([transfer])
        backend.close()
    assert there == {None: [[False], [True]], other: [[False]]}


def test_clearing_the_backend_removes_what_this_model_stored(storage: Any, tmp_path: Path) -> None:
    """SGLang's base class does nothing here, but the server would report that the storage was cleared."""
    backend = opened(storage, pool("page_first", 1), tmp_path)
    backend.register_mem_host_pool_v2(pool("page_first", 2), "swa")
    other = opened(storage, pool("page_first", 3), tmp_path, revision="another")
    transfer = types.SimpleNamespace(name="swa", keys=["a"], host_indices=indices(3))
    for one in (backend, other):
        one.batch_set_v1(["a", "b"], indices(4, 0))
    backend.batch_set_v2([transfer])
    backend.clear()
    assert backend.batch_exists(["a", "b"]) == 0
    assert backend.batch_get_v2([transfer]) == {"swa": [False]}
    assert other.batch_exists(["a", "b"]) == 2
    for one in (backend, other):
        one.close()


def test_settings_for_sglang_are_ignored(storage: Any, tmp_path: Path) -> None:
    opened(storage, pool("page_first"), tmp_path, allocator="shm", file_storage_path="/tmp/hicache").close()
    # A pool with a page format of its own has its tag behind the model's folder.
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    identities = []
    for tag in (None, "fp4", "fp8"):
        backend = opened(
            storage, pool("page_first", storage_format_tag=tag), tmp_path, model=f"{tmp_path / 'model'}{'' if tag is None else f'-{tag}'}"
        )
        identities.append(backend.store.identity)
        backend.close()
    assert {identity.model for identity in identities} == {"model"}
    assert len({identity.digest for identity in identities}) == 3


def test_a_recipe_uses_the_basis_of_its_model(storage: Any, tmp_path: Path) -> None:
    shapes = {(layer, side): (HEADS, DIM) for layer in range(LAYERS) for side in "kv"}
    for name in ("model", "other"):
        (tmp_path / name).write_bytes(random_basis(shapes, LAYERS, model={"name": f"elsewhere/{name}"}))
    made, read = pool("page_first", 3), pool("layer_first")
    given = {"recipe": "kv=klt:bits=4", "basis": str(tmp_path / "model")}
    backend = opened(storage, made, tmp_path / "store", **given)
    assert backend.batch_set_v1(["a", "b"], indices(1, 4)) == [True, True]
    backend.close()
    backend = opened(storage, read, tmp_path / "store", **given)
    assert backend.batch_get_v1(["b"], indices(2)) == [True]
    # As a codec of the same basis decodes them.
    pages, target = (storage.pool_buffer(x) for x in (made, made))
    rows = torch.zeros(1, backend.store.codec.nbytes, dtype=torch.uint8)
    codec = kvpack.pages.PageCodec(kvpack.Recipe("kv=klt:bits=4", tmp_path / "model"), pages.geometry)
    assert codec.encode_into(pages, [4], rows) == codec.decode_into(rows, target, [4]) == [None]
    assert all(torch.equal(x, y) for x, y in zip(plain(made, 4), plain(read, 2), strict=True))
    with pytest.raises(InvalidParameter, match="uses different columns of its basis in each layer, but this pool does not hold all layers"):
        backend.register_mem_host_pool_v2(pool("page_first"), "swa")
    backend.close()
    with pytest.raises(MissingBasis, match="set basis to the path"):
        opened(storage, pool("page_first"), tmp_path / "store", recipe="kv=klt:bits=4")
    with pytest.raises(InvalidParameter, match="whose name is 'elsewhere/other', but the name of the cache's model is 'a/model'"):
        opened(storage, pool("page_first"), tmp_path / "store", **{**given, "basis": str(tmp_path / "other")})


def test_recipes_with_layers_require_pools_with_all_layers(storage: Any, tmp_path: Path) -> None:
    backend = opened(storage, pool("page_first"), tmp_path, recipe="octopus-4;boundary-1")
    with pytest.raises(InvalidParameter, match="selects layers with 'boundary-1', but this pool does not hold all layers of the model"):
        backend.register_mem_host_pool_v2(pool("page_first"), "swa")
    backend.close()


class Chunks:
    """A simulated engine that drives the backend like SGLang's cache controller, and loads into the last pages of a pool."""

    def __init__(self, storage: Any, folder: Path, **options: Any) -> None:
        self._pool = pool("page_first", 1)
        self._given = [[x.clone() for x in plain(self._pool, page)] for page in range(4)]
        self._backend = opened(storage, self._pool, folder, **options)

    def store(self, chunks: Any) -> list[bool]:
        stored: list[bool] = self._backend.batch_set_v1([str(chunk) for chunk in chunks], indices(*chunks))
        return stored

    def found(self, chunks: Any) -> list[bool]:
        return [self._backend.exists(str(chunk)) for chunk in chunks]

    def load(self, chunks: Any) -> list[bool]:
        loaded = []
        for chunk in chunks:
            target = plain(self._pool, 5)
            for x in target:
                x.zero_()
            loaded += self._backend.batch_get_v1([str(chunk)], indices(5))
            assert all(torch.equal(x, y) if loaded[-1] else not x.any() for x, y in zip(target, self._given[chunk], strict=True))
        return loaded

    def counters(self) -> dict[str, Any]:
        counters: dict[str, Any] = self._backend.store.counters()
        return counters

    def close(self) -> None:
        self._backend.close()


@pytest.mark.scenario
@pytest.mark.parametrize("condition", CONDITIONS, ids=lambda condition: condition.__name__)
def test_a_damaged_folder_causes_only_misses(
    condition: Any, storage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    condition(lambda folder=tmp_path, **options: Chunks(storage, folder, **options), tmp_path, monkeypatch)


def test_pages_are_misses_after_a_restart_with_other_settings(storage: Any, tmp_path: Path) -> None:
    """SGLang's keys identify only the tokens."""

    def made(**values: Any) -> Any:
        found = pool("page_first", 1)
        vars(found).update(values)
        found.k_buffer, found.v_buffer = (x.to(found.dtype) for x in (found.k_buffer, found.v_buffer))
        return found

    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {}),
        ({"dtype": torch.float16}, {}),
        ({"page_size": TOKENS // 2, "page_num": 2 * PAGES}, {}),
        ({}, {"tp": (0, 2)}),
        ({}, {"tp": (1, 2)}),
        ({}, {"adapter": "a-lora"}),
        ({}, {"revision": "other"}),
        ({}, {"model": "another/model"}),
        ({}, {"recipe": "raw"}),
        ({}, {"tenant": "t"}),
        ({}, {}),
    ]
    for number, (values, options) in enumerate(cases):
        target = made(**values)
        backend = opened(storage, target, tmp_path, **options)
        before = target.k_buffer.clone()
        there = number and not values and not options
        assert backend.batch_exists(["key"]) == there
        assert backend.batch_get_v1(["key"], torch.arange(target.page_size)) == [there], (values, options)
        assert torch.equal(target.k_buffer, before)
        if not number:
            assert backend.batch_set_v1(["key"], indices(0)) == [True]
        backend.close()
