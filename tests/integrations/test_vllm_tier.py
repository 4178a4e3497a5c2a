"""Tests of the tier for vLLM with stubs of the vLLM 0.32 classes that it uses: signatures and order of calls.

``make engines`` runs it in vLLM itself.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import threading
import time
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from pathlib import Path
from typing import Any, ClassVar

import numpy
import pytest
import torch

from kvpack.errors import InvalidParameter, RoundedWarning
from kvpack.integrations import vllm as integration
from kvpack.integrations.vllm import metrics
from kvpack.integrations.vllm.groups import BLOCK_OFFSETS, GROUPS, Group
from kvpack.integrations.vllm.identities import SETTINGS
from kvpack.integrations.vllm.layouts import arrangement, check_layout_name
from kvpack.pages import PageGeometry, PageLayout
from support.engine_conditions import CONDITIONS
from support.engine_stubs import METADATA, STATS, Stats, check_defined
from support.host_settings import Watched, vllm_like_host

pytestmark = pytest.mark.usefixtures("patient_stores")

HEADS, DIM, TOKENS, LAYERS = 2, 32, 32, 3
BLOCK = 2 * HEADS * DIM * TOKENS * 2
"""Size in bytes of one layer's block."""


class LookupResult(Enum):
    MISS = auto()
    HIT = auto()
    HIT_PENDING = auto()
    RETRY = auto()


@dataclass
class JobResult:
    job_id: int
    success: bool
    successful_keys: Any = None
    transfer_time: float | None = None
    transfer_bytes: int | None = None


@dataclass
class TransferJob:
    job_id: int
    keys: Any
    chunk_ids: numpy.ndarray
    is_promotion: bool
    req_context: Any = None


class SecondaryTierManager:
    def __init__(self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str, backpressure_detector: Any = None) -> None:
        assert primary_kv_view.strides is not None
        self.tier_type = tier_type


class AsyncLookupManager:
    """A stub of vLLM's lookup manager without a thread. ``flush`` answers the pending lookups."""

    def __init__(self, tier_type: str) -> None:
        self._state: dict[bytes, bool] = {}
        self._batch: list[bytes] = []

    def lookup(self, key: bytes, req_context: Any) -> bool | None:
        if key not in self._state:
            self._batch.append(key)
        return self._state.get(key)

    def flush(self) -> None:
        self._state |= dict(zip(self._batch, self.batch_lookup(self._batch, None), strict=True))  # type: ignore[attr-defined]
        self._batch = []

    def mark_miss(self, keys: list[bytes]) -> None:
        self._state |= dict.fromkeys(keys, False)

    def cleanup(self, req_id: str) -> None:
        self._state = {}

    def shutdown(self) -> None:
        pass


class Factory:
    _registry: ClassVar[dict[str, Any]] = {}

    @classmethod
    def register_tier(cls, tier_type: str, module_path: str, class_name: str) -> None:
        cls._registry[tier_type] = (module_path, class_name)


class ConnectorFactory:
    _registry: ClassVar[dict[str, Any]] = {}

    @classmethod
    def register_connector(cls, name: str, module_path: str, class_name: str) -> None:
        cls._registry[name] = (module_path, class_name)


def attention(layers: int = LAYERS, *, tokens: int = TOKENS, heads: int = HEADS, dim: int = DIM, dtype: str = "bf16") -> Group:
    return Group(layers, tokens, 2 * heads * dim * tokens * 2, "attention", heads, dim, 0, dtype)


STATES = Group(2, TOKENS, 600)


def told(*groups: Group, **changes: Any) -> dict[str, Any]:
    """Return the settings that the connector passes to the tier about groups with shared memory, by layer number."""
    page = max(group.page_bytes for group in groups)
    places = [[page * layer for layer in range(group.layers)] for group in groups]
    return {SETTINGS: "as it is", GROUPS: list(groups), BLOCK_OFFSETS: places, **changes}


def named(*groups: Group) -> tuple[Any, ...]:
    """Return the groups of an OffloadingConfig. vLLM also counts groups that it does not offload."""
    return tuple(
        types.SimpleNamespace(layer_names=tuple(f"{number}-{layer}" for layer in range(group.layers)), group_id=2 * number)
        for number, group in enumerate(groups)
    )


@dataclass
class Config:
    """The fields of OffloadingConfig that the tier reads."""

    name: str
    dtype: str = "bfloat16"
    groups: Any = field(default_factory=lambda: named(attention()))
    workers: int = 1
    blocks_per_chunk: int = 2
    canonical_layout: bool = False
    replicated_layout: bool = False
    kv_cache_layout: str | None = "LBHNC"
    extra_config: Any = field(default_factory=lambda: told(attention()))
    worker_kv_bytes_per_block: int = BLOCK * LAYERS

    @property
    def model(self) -> Any:
        return types.SimpleNamespace(name=self.name, dtype=self.dtype)

    @property
    def cache(self) -> Any:
        return types.SimpleNamespace(tokens_per_hash=TOKENS, blocks_per_chunk=self.blocks_per_chunk)

    @property
    def parallel(self) -> Any:
        return types.SimpleNamespace(rank=0, world_size=self.workers, tp_size=self.workers, pp_size=1, pcp_size=1, dcp_size=1)


@pytest.fixture
def tier_class(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    modules = {
        "vllm": {"__version__": "0.32.0"},
        "vllm.platforms": {"current_platform": types.SimpleNamespace(is_cpu=lambda: False)},
        "vllm.distributed": {},
        "vllm.distributed.kv_transfer": {},
        "vllm.distributed.kv_transfer.kv_connector": {},
        STATS: {"OffloadingConnectorStats": Stats},
        "vllm.distributed.kv_transfer.kv_connector.factory": {"KVConnectorFactory": ConnectorFactory},
        "vllm.v1": {},
        "vllm.v1.kv_offload": {},
        "vllm.v1.kv_offload.base": {
            "LookupResult": LookupResult,
            "Medium": types.SimpleNamespace(STORAGE="STORAGE"),
            "RequestOffloadingContext": types.SimpleNamespace,
            "get_offload_group_idx": lambda key: int.from_bytes(key[-4:], "big"),
            **METADATA,
        },
        "vllm.v1.kv_offload.tiering": {},
        "vllm.v1.kv_offload.tiering.async_lookup": {"AsyncLookupManager": AsyncLookupManager},
        "vllm.v1.kv_offload.tiering.base": {"JobResult": JobResult, "SecondaryTierManager": SecondaryTierManager},
        "vllm.v1.kv_offload.tiering.factory": {"SecondaryTierFactory": Factory},
    }
    for name, values in modules.items():
        module = types.ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "kvpack.integrations.vllm.tier", raising=False)
    yield importlib.import_module("kvpack.integrations.vllm.tier").KvpackTier
    sys.modules.pop("kvpack.integrations.vllm.tier", None)


def key(chunk: int, group: int = 0) -> bytes:
    return bytes([chunk]) * 32 + group.to_bytes(4, "big")


NONE = key(99)


def rows_of(config: Config, count: int) -> numpy.ndarray:
    size = config.worker_kv_bytes_per_block * config.workers * config.blocks_per_chunk
    return numpy.zeros((count, -(-size // 4096) * 4096 + 4096), numpy.int8)


def opened(tier_class: Callable[..., Any], config: Config, memory: numpy.ndarray, location: Any, **options: Any) -> Any:
    options = {"location": location, "recipe": "bf16", "layout": "adjacent", "revision": "abc", **options}
    return tier_class(types.SimpleNamespace(config=config), memory.data, "kvpack", None, **options)


def store_of(tier: Any, group: int = 0) -> Any:
    return tier.stores[group].store


def finished(tier: Any, count: int) -> list[JobResult]:
    found: list[JobResult] = []
    deadline = time.monotonic() + 60
    while len(found) < count:
        assert time.monotonic() < deadline
        found += tier.get_finished_jobs()
    return found


def fill(memory: numpy.ndarray, seed: int) -> None:
    source = torch.Generator().manual_seed(seed)
    values = torch.randn(memory.shape[0], memory.shape[1] // 2, generator=source).bfloat16()
    memory[:] = values.view(torch.int8).numpy()


@pytest.mark.parametrize(("layout", "workers"), [("adjacent", 1), ("adjacent-tokens-first", 2), ("split", 1), ("cpu-vec", 1)])
def test_chunks_are_restored_in_another_process(layout: str, workers: int, tier_class: Callable[..., Any], tmp_path: Path) -> None:
    config = Config("model", workers=workers, kv_cache_layout="LBNHC" if layout == "adjacent-tokens-first" else "LBHNC")
    memory = rows_of(config, 4)
    fill(memory, 0)
    before, keys = memory.copy(), [key(n) for n in range(3)]
    tier = opened(tier_class, config, memory, tmp_path, layout=layout)
    assert tier.lookup(keys[0], None) is LookupResult.RETRY
    tier.on_schedule_end(None)
    assert tier.lookup(keys[0], None) is LookupResult.MISS
    tier.submit_store(TransferJob(7, keys, numpy.array([2, 0, 3]), False))
    (stored,) = finished(tier, 1)
    assert (stored.job_id, stored.success, stored.successful_keys) == (7, True, keys)
    tier.drain_jobs()
    tier.shutdown()

    memory[:] = 0
    tier = opened(tier_class, config, memory, tmp_path, layout=layout)
    tier.lookup(keys[1], None)
    tier.on_schedule_end(None)
    assert tier.lookup(keys[1], None) is LookupResult.HIT
    tier.submit_load(TransferJob(8, [keys[2], NONE, keys[0]], numpy.array([1, 0, 2]), True))
    (loaded,) = finished(tier, 1)
    assert (loaded.job_id, loaded.success, loaded.successful_keys) == (8, False, [keys[2], keys[0]])
    assert tier.lookup(NONE, None) is LookupResult.MISS
    assert not tier.has_pending_work()
    size = config.worker_kv_bytes_per_block * workers * config.blocks_per_chunk
    assert (memory[1, :size] == before[3, :size]).all()
    assert (memory[2, :size] == before[2, :size]).all()
    # What pads a row is vLLM's.
    assert not memory[:, size:].any()
    assert not memory[0].any()
    tier.shutdown()


@pytest.mark.parametrize("workers", [1, 2])
def test_groups_of_attention_and_states_are_restored(workers: int, tier_class: Callable[..., Any], tmp_path: Path) -> None:
    """Each chunk is a block of one group. Keys and values are encoded, and states are stored byte for byte."""
    window = attention(2)
    groups = (attention(), STATES, window)
    config = Config("model", workers=workers, blocks_per_chunk=1, groups=named(*groups), extra_config=told(*groups))
    memory = rows_of(config, 8)
    fill(memory, 3)
    before, keys = memory.copy(), [key(0, 0), key(1, 0), key(0, 2), key(1, 4), key(2, 4)]
    tier = opened(tier_class, config, memory, tmp_path, recipe="octopus-4")
    # vLLM passes a set, whose order differs from run to run.
    chunks = {keys[3]: 5, keys[0]: 6, keys[4]: 0, keys[2]: 3, keys[1]: 4}
    tier.submit_store(TransferJob(1, chunks.keys(), numpy.array([*chunks.values()]), False))
    (result,) = finished(tier, 1)
    assert (result.success, set(result.successful_keys)) == (True, set(keys))
    ratio = tier.get_stats().values
    tier.shutdown()
    assert ratio[metrics.TIER + "page_bytes"][("kvpack",)] == workers * (5 * BLOCK + 2 * STATES.page_bytes)

    memory[:] = 0
    tier = opened(tier_class, config, memory, tmp_path, recipe="octopus-4")
    missing = key(1, 2)
    for one in (*keys, missing):
        assert tier.lookup(one, None) is LookupResult.RETRY
    tier.on_schedule_end(None)
    assert [tier.lookup(one, None) is LookupResult.HIT for one in (*keys, missing)] == [True] * 5 + [False]
    asked = [*keys[2:], missing, keys[1]]
    tier.submit_load(TransferJob(2, asked, numpy.array([0, 1, 2, 3, 4]), True))
    (result,) = finished(tier, 1)
    assert (result.success, result.successful_keys) == (False, [*keys[2:], keys[1]])
    stores = [tier.stores[2 * number].store for number in range(3)]
    assert result.transfer_bytes == stores[0].codec.nbytes + stores[1].codec.nbytes + 2 * stores[2].codec.nbytes
    assert tier.lookup(missing, None) is LookupResult.MISS
    assert not memory[[3, 5, 6, 7]].any()
    worker_bytes = config.worker_kv_bytes_per_block
    for place, of in ((0, keys[2]), (1, keys[3]), (2, keys[4]), (4, keys[1])):
        group = {0: groups[0], 2: STATES, 4: window}[of[-1]]
        for worker in range(workers):
            for layer in range(LAYERS):
                begin = worker * worker_bytes + layer * BLOCK
                found, stored = memory[place, begin : begin + BLOCK], before[chunks[of], begin : begin + BLOCK]
                if layer >= group.layers:
                    assert not found.any()
                elif group is STATES:
                    assert (found[: STATES.page_bytes] == stored[: STATES.page_bytes]).all()
                    assert not found[STATES.page_bytes :].any()
                else:
                    values, exact = (torch.from_numpy(x.copy()).view(torch.bfloat16).float() for x in (found, stored))
                    assert 0 < (values - exact).norm() / exact.norm() < 0.2
    tier.shutdown()


def test_a_prefix_of_each_group_is_evicted_from_its_end(tier_class: Callable[..., Any], tmp_path: Path) -> None:
    config = Config("model", blocks_per_chunk=1, groups=TWO.groups, extra_config=TWO.extra_config)
    memory = rows_of(config, 8)
    fill(memory, 3)
    keys = [key(chunk, group) for chunk in range(3) for group in (0, 2)]
    request = types.SimpleNamespace(req_id="r", _offload_key_positions={one: (one[0] + 1) * TOKENS for one in keys})
    tier = opened(tier_class, config, memory, tmp_path)
    for job, part in ((1, keys[2:4][::-1] + keys[:2]), (2, keys[4:])):
        tier.submit_store(TransferJob(job, part, numpy.arange(len(part)), False, request))
        assert finished(tier, 1)[0].success
    for group in (0, 2):
        own = [one for one in keys if one[-1] == group]
        assert _newest_first(store_of(tier, group), own) == own
    tier.shutdown()


def test_a_cache_with_other_vllm_settings_is_separate(tier_class: Callable[..., Any], tmp_path: Path) -> None:
    """vLLM chooses a layout by backend and environment, and the same name may mean another arrangement with each."""
    memory, key = rows_of(Config("model"), 1), [bytes(36)]
    fill(memory, 0)
    found = []
    for kept in ("LBHNC", "BLHNC", None, "LBHNC"):
        tier = opened(tier_class, Config("model", kv_cache_layout=kept), memory, tmp_path, layout="split")
        found += store_of(tier).contains(key)
        tier.submit_store(TransferJob(1, key, numpy.array([0]), False))
        finished(tier, 1)
        tier.shutdown()
    assert found == [False, False, False, True]


def test_a_model_started_with_other_settings_is_separate(tier_class: Callable[..., Any], tmp_path: Path) -> None:
    """vLLM's keys do not cover configuration overrides, quantization or random weights, and vLLM does not pass these to a tier."""
    memory, key = rows_of(Config("model"), 1), [bytes(36)]
    fill(memory, 0)
    found = []
    for settings in ("rope_theta 1e4", "rope_theta 5e5", "rope_theta 1e4"):
        tier = opened(tier_class, Config("model", extra_config=told(attention(), **{SETTINGS: settings})), memory, tmp_path)
        found += store_of(tier).contains(key)
        tier.submit_store(TransferJob(1, key, numpy.array([0]), False))
        finished(tier, 1)
        tier.shutdown()
    assert found == [False, False, True]


def test_one_flipped_bit_costs_one_chunk(tier_class: Callable[..., Any], tmp_path: Path) -> None:
    config = Config("model")
    memory = rows_of(config, 4)
    fill(memory, 1)
    keys = [key(n) for n in range(4)]
    tier = opened(tier_class, config, memory, tmp_path, recipe="octopus-4")
    tier.submit_store(TransferJob(1, keys, numpy.arange(4), False))
    assert finished(tier, 1)[0].success
    entries = sorted(path for path in tmp_path.rglob("*") if path.is_file() and path.read_bytes()[:10] == b"kvpack-row")
    data = bytearray(entries[0].read_bytes())
    data[len(data) // 3] ^= 64
    entries[0].write_bytes(data)
    tier.submit_load(TransferJob(2, keys, numpy.arange(4), True))
    (loaded,) = finished(tier, 1)
    assert not loaded.success
    assert len(loaded.successful_keys) == 3
    assert store_of(tier).counters()["damaged_entries"] == 1
    tier.shutdown()


def test_every_call_keeps_the_hosts_settings(tier_class: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config("model")
    memory = rows_of(config, 4)
    fill(memory, 1)
    memory[3, :2] = numpy.array([0x80, 0x7F]).astype(numpy.int8)
    keys = [key(n) for n in range(3)]
    make = Watched(None).call("made", lambda **options: opened(tier_class, config, memory, tmp_path, recipe="octopus-4", **options))
    with vllm_like_host(monkeypatch):
        with pytest.raises(InvalidParameter):
            make(layout="none")
        tier = Watched(make())
        tier.lookup(keys[0], None)
        tier.on_schedule_end(None)
        tier.submit_store(TransferJob(1, keys, numpy.array([0, 1, 3]), False))
        finished(tier, 1)
        for entry in tmp_path.rglob("*"):
            if entry.is_file() and entry.read_bytes()[:10] == b"kvpack-row":
                entry.write_bytes(entry.read_bytes()[:-1] + b"!")
                break
        tier.submit_load(TransferJob(2, [*keys, NONE], numpy.array([0, 1, 2, 3]), True))
        assert not finished(tier, 1)[0].success
        with pytest.raises(ValueError, match="shorter"):
            tier.submit_load(TransferJob(2, keys, numpy.array([0, 0]), True))
        tier.get_stats()
        tier.touch(keys, None)
        tier.on_new_request(None)
        tier.on_request_finished(types.SimpleNamespace(req_id="r"))
        tier.has_pending_work()
        tier.drain_jobs()
        tier.shutdown()
    public = {name for name, value in vars(tier_class).items() if not name.startswith("_") and callable(value)}
    assert tier.called >= public - {"build_metric_definitions"}


def test_vllm_reports_the_counters_of_a_tier(tier_class: Callable[..., Any], tmp_path: Path) -> None:
    config = Config("model")
    memory = rows_of(config, 4)
    fill(memory, 1)
    memory[3, :2] = numpy.array([0x80, 0x7F]).astype(numpy.int8)
    tier = opened(tier_class, config, memory, tmp_path, recipe="octopus-4")
    definitions = tier_class.build_metric_definitions({})
    keys = [key(n) for n in range(3)]
    tier.submit_store(TransferJob(1, keys, numpy.array([0, 1, 3]), False))
    finished(tier, 1)
    tier.submit_load(TransferJob(2, [*keys, NONE], numpy.array([0, 1, 2, 3]), True))
    finished(tier, 1)
    stats = tier.get_stats()
    check_defined(stats, definitions)
    values = {name.removeprefix(metrics.TIER): of_name for name, of_name in stats.values.items()}
    assert values["saved_chunks"] == {("kvpack",): 2}
    assert values["faults"] == {("kvpack", "encode", "InvalidParameter"): 1}
    assert values["hit_tokens"][("kvpack",)] * 2 == values["load_tokens"][("kvpack",)]
    assert {labels: len(found) for labels, found in values["seconds"].items()} == {("kvpack", "save"): 1, ("kvpack", "load"): 1}
    codec = store_of(tier).codec
    assert values["page_bytes"][("kvpack",)] / values["row_bytes"][("kvpack",)] == codec.geometry.raw_bytes / codec.nbytes
    # Sizes are looked up beside the scheduler, and what was told is not told again.
    end, sizes = time.monotonic() + 60, None
    while sizes is None:
        assert time.monotonic() < end
        sizes = tier.get_stats()
    check_defined(sizes, definitions)
    assert sizes.values == {metrics.TIER + "entries": {("kvpack",): 2}, metrics.TIER + "bytes": {("kvpack",): 2 * codec.nbytes}}
    assert tier.get_stats() is None
    tier.shutdown()


TWO = Config("m", groups=named(attention(), STATES), extra_config=told(attention(), STATES))


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (Config("m", worker_kv_bytes_per_block=BLOCK), {}, "need 24576 bytes per block, but vLLM allots 8192"),
        (Config("m"), {"layout": ""}, "layout is missing from kv_connector_extra_config"),
        (Config("m"), {"layout": "LBHNC"}, "layout is 'LBHNC', expected one of adjacent"),
        (Config("m"), {"revision": None}, "the model 'm' is not a folder, so only a revision identifies its weights"),
        (Config("m", groups=named(attention(2 * LAYERS))), {}, "the first pipeline stage has 3 of the 6 layers 0-0, 0-1,"),
        (TWO, {}, "the model has 2 groups of cache layers, and a chunk has 2 blocks"),
        (
            replace(TWO, blocks_per_chunk=1),
            {"recipe": "octopus-4;boundary-1"},
            "the model has several groups of cache layers, each with its own layer numbers",
        ),
        (Config("m", canonical_layout=True), {}, "needs the direct layout of rows"),
        (Config("m", extra_config={}), {}, "only KvpackConnector passes them on: set"),
        (Config("m", kv_cache_layout="LBNHC"), {}, "layout is 'adjacent', but vLLM stores the cache as LBNHC"),
        (Config("m"), {"layout": "adjacent-tokens-first"}, "layout is 'adjacent-tokens-first', but vLLM stores the cache as LBHNC"),
        (Config("m", kv_cache_layout="BHLNC"), {}, "layout is 'adjacent', but vLLM stores the cache as BHLNC"),
        (Config("m"), {"recipe": "octopus-4;boundary-1"}, "selects layers with 'layers=0,-1:k=raw', but a row holds several blocks"),
    ],
    ids=[
        "sizes", "no layout", "layout", "weights", "stages", "groups", "layers of groups", "canonical", "connector", "tokens", "heads",
        "inside", "layers",
    ],
)
def test_invalid_settings_are_refused_at_startup(
    config: Config, options: dict[str, Any], message: str, tier_class: Callable[..., Any], tmp_path: Path
) -> None:
    with pytest.raises(InvalidParameter, match=message):
        opened(tier_class, config, rows_of(Config("m"), 2), tmp_path, **options)


def test_other_versions_are_refused(tier_class: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["vllm"], "__version__", "0.34.1")
    config = Config("m")
    with pytest.raises(InvalidParameter, match=r"vLLM is 0.34.1, but kvpack was tested only with 0.32 and 0.33, .*\"any_version\": true"):
        opened(tier_class, config, rows_of(config, 2), tmp_path)
    identities = []
    for version in ("0.32.0", "0.32.1", "0.33.0", "0.34.1", "0.34.2"):
        monkeypatch.setattr(sys.modules["vllm"], "__version__", version)
        tier = opened(tier_class, config, rows_of(config, 2), tmp_path, any_version=True)
        identities.append(store_of(tier).identity)
        tier.shutdown()
    # Another may arrange chunks otherwise under the same names.
    assert identities[0] == identities[1]
    assert len(set(identities)) == 4


def test_the_entry_point_names_the_tier_and_the_connector(tier_class: Callable[..., Any]) -> None:
    Factory._registry.clear()
    ConnectorFactory._registry.clear()
    integration.register()
    integration.register()
    assert Factory._registry == {"kvpack": ("kvpack.integrations.vllm.tier", "KvpackTier")}
    assert ConnectorFactory._registry == {"KvpackConnector": ("kvpack.integrations.vllm.connector", "KvpackConnector")}


def test_the_connector_passes_on_every_option_of_the_tier(tier_class: Callable[..., Any]) -> None:
    options = {name for name, one in inspect.signature(tier_class).parameters.items() if one.kind is one.KEYWORD_ONLY}
    # vLLM gives the last.
    assert options == {*integration.STORE_OPTIONS, "locality"}


def test_the_entry_point_does_nothing_without_vllm() -> None:
    integration.register()


def test_a_vllm_without_tiers_is_referred_to_the_connector(tier_class: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The connector refuses such a vLLM by name. An error here would stop every vLLM from starting where kvpack is installed."""
    ConnectorFactory._registry.clear()
    monkeypatch.delitem(sys.modules, "vllm.v1.kv_offload.tiering.factory")
    integration.register()
    assert set(ConnectorFactory._registry) == {"KvpackConnector"}
    monkeypatch.delattr(ConnectorFactory, "_registry")
    integration.register()


@pytest.mark.parametrize("name", ["adjacent", "adjacent-tokens-first", "split", "cpu-vec"])
def test_a_named_layout_is_verified_with_a_writer(name: str) -> None:
    geometry = PageGeometry(1, HEADS, TOKENS, DIM, DIM)
    page = torch.zeros(BLOCK // 2, dtype=torch.bfloat16)
    arranged = arrangement(name, HEADS, TOKENS, DIM)

    def write(k: torch.Tensor, v: torch.Tensor | None) -> None:
        assert v is not None
        for x, (first, strides) in ((k, arranged.k), (v, arranged.v)):
            page.as_strided((HEADS, TOKENS, DIM), strides, first).copy_(x[0])

    layout = PageLayout.detect(geometry, write, page)
    check_layout_name(name, layout)
    other = "split" if name != "split" else "adjacent"
    with pytest.raises(InvalidParameter, match="but vLLM's own writer stores keys or values at other offsets"):
        check_layout_name(other, layout)


REQUEST = types.SimpleNamespace(req_id="r")


class Chunks:
    """A simulated engine that drives the tier like vLLM's manager, and loads into the second half of its rows."""

    def __init__(self, tier_class: Callable[..., Any], folder: Path, **options: Any) -> None:
        self._memory = rows_of(Config("model"), 8)
        fill(self._memory[:4], 1)
        self._size = Config("model").worker_kv_bytes_per_block * 2
        self.tier = opened(tier_class, Config("model"), self._memory, folder, **options)

    def store(self, chunks: Any) -> list[bool]:
        return self._done(TransferJob(1, [key(chunk) for chunk in chunks], numpy.array(chunks), False))

    def found(self, chunks: Any) -> list[bool]:
        self.tier.on_request_finished(REQUEST)
        asked = [self.tier.lookup(key(chunk), REQUEST) for chunk in chunks]
        assert asked == [LookupResult.RETRY] * len(asked)
        self.tier.on_schedule_end(None)
        return [self.tier.lookup(key(chunk), REQUEST) is LookupResult.HIT for chunk in chunks]

    def load(self, chunks: Any) -> list[bool]:
        self._memory[4:] = 0
        loaded = self._done(TransferJob(2, [key(chunk) for chunk in chunks], numpy.array(chunks) + 4, True))
        for chunk, there in zip(chunks, loaded, strict=True):
            found, given = self._memory[chunk + 4, : self._size], self._memory[chunk, : self._size]
            assert (found == given).all() if there else not found.any()
        return loaded

    def counters(self) -> dict[str, Any]:
        counters: dict[str, Any] = store_of(self.tier).counters()
        return counters

    def close(self) -> None:
        self.tier.shutdown()

    def _done(self, job: TransferJob) -> list[bool]:
        (self.tier.submit_load if job.is_promotion else self.tier.submit_store)(job)
        (result,) = finished(self.tier, 1)
        done = [one in (result.successful_keys or ()) for one in job.keys]
        assert result.success == all(done)
        return done



@pytest.mark.scenario
@pytest.mark.parametrize("condition", CONDITIONS, ids=lambda condition: condition.__name__)
def test_a_damaged_folder_causes_only_misses(
    condition: Any, tier_class: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    condition(lambda folder=tmp_path, **options: Chunks(tier_class, folder, **options), tmp_path, monkeypatch)


SMALLER_BLOCKS = {"groups": named(attention(6)), "extra_config": told(attention(6, tokens=TOKENS // 2))}


@pytest.mark.parametrize(
    ("config", "options"),
    [
        ({"extra_config": told(attention(dtype="fp16"))}, {}),
        ({"workers": 2}, {}),
        ({"blocks_per_chunk": 1}, {}),
        (SMALLER_BLOCKS, {}),
        ({"extra_config": told(attention(), **{SETTINGS: "another draft model, or factors of RoPE"})}, {}),
        ({"name": "another"}, {}),
        ({"extra_config": told(attention(heads=1, dim=2 * DIM))}, {}),
        ({}, {"adapter": "a-lora"}),
        ({}, {"revision": "abd"}),
        ({}, {"recipe": "raw"}),
        ({}, {"tenant": "t"}),
        ({}, {"layout": "split"}),
    ],
    ids=["dtype", "tp", "chunk", "block", "settings", "model", "heads", "adapter", "weights", "recipe", "tenant", "layout"],
)
def test_chunks_are_misses_after_a_restart_with_other_settings(
    config: dict[str, Any], options: dict[str, Any], tier_class: Callable[..., Any], tmp_path: Path
) -> None:
    engine = Chunks(tier_class, tmp_path)
    assert engine.store([0]) == [True]
    engine.close()
    other = Config(**{"name": "model", **config})
    memory = rows_of(other, 2)
    tier = opened(tier_class, other, memory, tmp_path, **options)
    assert store_of(tier).contains([key(0)]) == [False]
    tier.submit_load(TransferJob(1, [key(0)], numpy.array([0]), True))
    assert not finished(tier, 1)[0].success
    assert not memory.any()
    memory[:] = 1
    with warnings.catch_warnings(action="ignore", category=RoundedWarning):
        tier.submit_store(TransferJob(2, [key(0)], numpy.array([0]), False))
        assert finished(tier, 1)[0].success
    tier.shutdown()
    # Each keeps its own.
    engine = Chunks(tier_class, tmp_path)
    assert engine.load([0]) == [True]
    engine.close()


def test_a_finished_request_leaves_its_chunks_to_the_next(tier_class: Callable[..., Any], tmp_path: Path) -> None:
    """One request is aborted or preempted while its chunks are being loaded, and another needs them before they have arrived."""
    engine = Chunks(tier_class, tmp_path)
    assert engine.store([0, 1]) == [True, True]
    assert engine.found([0, 1]) == [True, True]
    tier, begin = engine.tier, threading.Event()
    for _ in range(2):
        store_of(tier)._threads["get"].submit(lambda: begin.wait(60))
    tier.submit_load(TransferJob(5, [key(0), key(1)], numpy.array([4, 5]), True))
    tier.on_request_finished(REQUEST)
    assert tier.has_pending_work()
    assert engine.found([0, 1]) == [True, True]
    assert store_of(tier).delete([key(1)]) == 1
    tier.submit_load(TransferJob(6, [key(0), key(1)], numpy.array([6, 7]), True))
    assert list(tier.get_finished_jobs()) == []
    begin.set()
    tier.drain_jobs()
    results = {result.job_id: (result.success, result.successful_keys) for result in tier.get_finished_jobs()}
    assert results == {5: (False, [key(0)]), 6: (False, [key(0)])}
    assert [tier.lookup(key(chunk), REQUEST) for chunk in (0, 1)] == [LookupResult.HIT, LookupResult.MISS]
    size = engine._size
    assert (engine._memory[[4, 6], :size] == engine._memory[0, :size]).all()
    assert not engine._memory[[5, 7]].any()
    assert not tier.has_pending_work()
    engine.close()


def test_a_job_that_fails_completely_is_counted(tier_class: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM sees only misses, so the counter alone shows operators the reason."""
    engine = Chunks(tier_class, tmp_path)

    def fails(*_: Any, **__: Any) -> Any:
        raise MemoryError("no room for a row")

    monkeypatch.setattr(store_of(engine.tier).codec, "encode_into", fails)
    assert engine.store([0, 1]) == [False, False]
    assert engine.counters()["faults"] == {"put MemoryError": 1}
    assert engine.tier.get_stats().values[metrics.TIER + "faults"] == {("kvpack", "put", "MemoryError"): 1}
    engine.close()


def test_a_prefix_is_evicted_from_its_end(tier_class: Callable[..., Any], tmp_path: Path) -> None:
    """The keys of vLLM's jobs are in any order, and one request may have several jobs."""
    keys = [key(chunk) for chunk in range(4)]
    positions = {one: (number + 1) * 2 * TOKENS for number, one in enumerate(keys)}
    request = types.SimpleNamespace(req_id="r", _offload_key_positions=positions)
    engine = Chunks(tier_class, tmp_path)
    tier = engine.tier
    for job, chunks in ((1, [2, 0, 1]), (2, [3])):
        tier.submit_store(TransferJob(job, [keys[chunk] for chunk in chunks], numpy.array(chunks), False, request))
        assert finished(tier, 1)[0].success
    assert _newest_first(store_of(tier), keys) == keys
    assert engine.load([0, 1, 2, 3]) == [True] * 4
    assert _newest_first(store_of(tier), keys) == keys
    engine.close()


def _newest_first(store: Any, keys: list[bytes]) -> list[bytes]:
    """Return the keys in the reverse of the order in which they would be evicted."""
    used = {stored.key: stored.used_ns for stored in store._backend.list()}
    names = dict(zip(keys, store._entry_keys(keys), strict=True))
    return sorted(keys, key=lambda one: used[names[one]], reverse=True)
