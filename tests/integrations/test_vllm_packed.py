"""Tests of rows in vLLM's primary tier, with stubs of the vLLM 0.32 classes that the worker, spec and connector use.

``make engines`` runs the same in vLLM itself.
"""

from __future__ import annotations

import hashlib
import types
from contextlib import nullcontext
from dataclasses import dataclass, make_dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy
import pytest
import torch

from kvpack.errors import InvalidParameter, MissingBasis, MissingFile
from kvpack.integrations.vllm import identities, metrics
from kvpack.integrations.vllm.chunk_keys import ABSENT, attach_keys
from kvpack.integrations.vllm.groups import BLOCK_OFFSETS, GROUPS, Group, block_offsets, check_blocks, offloaded_groups
from kvpack.integrations.vllm.identities import SETTINGS, relevant_settings
from kvpack.pages import PageCodec
from support.engine_stubs import METADATA, STATS, Stats, check_defined, import_over
from support.host_settings import Watched, vllm_like_host
from support.klt_bases import random_basis

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

LAYERS, HEADS, TOKENS, DIM, BLOCKS = 2, 2, 16, 32, 12
ATTENTION = Group(LAYERS, TOKENS, 2 * HEADS * TOKENS * DIM * 2, "attention", HEADS, DIM, 0, "bf16")
STATES = Group(1, TOKENS, 3000)
PER_CHUNK = 2


@dataclass
class TransferResult:
    job_id: int
    success: bool
    transfer_size: int | None = None
    transfer_time: float | None = None


@dataclass
class JobResult:
    job_id: int
    success: bool
    successful_keys: Any = None
    transfer_time: float | None = None
    transfer_bytes: int | None = None


class AsyncLookupManager:
    def __init__(self) -> None:
        self.missed: list[bytes] = []

    def mark_miss(self, keys: Iterable[bytes]) -> None:
        self.missed += keys


class Info(NamedTuple):
    """The size of the primary tier, as vLLM 0.33 publishes it."""

    chunks: int
    chunk_bytes: int

    @classmethod
    def from_config(cls, config: Any, chunks: int, chunk_bytes: int) -> Info:
        return cls(chunks, chunk_bytes)


class TieringOffloadingSpec:
    """A stub of the part of vLLM's constructor that kvpack's class relies on."""

    def __init__(self, config: Any) -> None:
        self.config, self.extra_config = config, config.extra_config
        self.blocks_per_chunk = config.cache.blocks_per_chunk
        self.replicated_layout = config.replicated_layout
        self.kv_bytes_per_chunk = config.worker_kv_bytes_per_block * config.parallel.world_size * self.blocks_per_chunk
        self.num_chunks = 0
        self.cpu_info = Info.from_config(config, self.num_chunks, self.kv_bytes_per_chunk)
        self._manager = self._worker = None
        self._engine_id = config.engine_id
        self.secondary_tier_configs = self.extra_config.get("secondary_tiers", [])

    @classmethod
    def build_metric_definitions(cls, extra_config: Any) -> dict[str, Any]:
        return {"vllm's": None}


MODULES: dict[str, dict[str, Any]] = {
    "vllm": {"__version__": "0.32.0"},
    "vllm.platforms": {"current_platform": types.SimpleNamespace(is_cpu=lambda: False)},
    "vllm.v1.kv_offload.base": {
        "OffloadingWorker": object,
        "TransferResult": TransferResult,
        "get_offload_group_idx": lambda key: int.from_bytes(key[-4:], "big"),
        **METADATA,
    },
    STATS: {"OffloadingConnectorStats": Stats},
    "vllm.v1.kv_offload.cpu.gpu_worker": {"pin_mmap_region": None},
    "vllm.v1.kv_offload.cpu.shared_offload_region": {"SharedOffloadRegion": None},
    "vllm.v1.kv_offload.tiering.async_lookup": {"AsyncLookupManager": AsyncLookupManager},
    "vllm.v1.kv_offload.tiering.spec": {"TieringOffloadingSpec": TieringOffloadingSpec},
}


def module(monkeypatch: pytest.MonkeyPatch, name: str) -> Any:
    for part in ("worker", "promotions", "spec"):
        monkeypatch.delitem(__import__("sys").modules, f"kvpack.integrations.vllm.{part}", raising=False)
    return import_over(monkeypatch, MODULES, f"kvpack.integrations.vllm.{name}")


def device_blocks(group: Group, seed: int) -> list[torch.Tensor]:
    """Return an int8 tensor ``[block, byte]`` for each layer, including the padding that vLLM adds."""
    source = torch.Generator().manual_seed(seed)
    values = torch.randn(group.layers, BLOCKS, group.page_bytes // 2 + 32, generator=source).bfloat16()
    return [*values.view(torch.int8)]


def gpu(blocks: list[list[int]], indices: list[int]) -> Any:
    flat = [block for group in blocks for block in group]
    return types.SimpleNamespace(block_ids=numpy.array(flat, numpy.int32), group_sizes=[len(g) for g in blocks], block_indices=indices)


def cpu(chunks: list[int], keys: list[bytes] | None = None) -> Any:
    """Return vLLM's transfer spec of ``chunks``. By default, their keys are those of the chunks' numbers."""
    return types.SimpleNamespace(block_ids=numpy.array(chunks, numpy.int32), keys=keys or [key(chunk) for chunk in chunks])


def key(number: int, group: int = 0) -> bytes:
    return bytes([number]) * 32 + group.to_bytes(4, "big")


class Engine:
    """A simulated engine: a worker for two groups of cache layers, and host memory to which it offloads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, recipe: str = "raw") -> None:
        self.groups = (ATTENTION, STATES)
        self.layers = [device_blocks(group, number) for number, group in enumerate(self.groups)]
        self.codecs = [PageCodec(x.page_recipe(recipe), x.geometry, namespace=bytes([n] * 32)) for n, x in enumerate(self.groups)]
        self.cell = max(codec.nbytes for codec in self.codecs) * PER_CHUNK
        self.memory = torch.zeros(6, self.cell + 100, dtype=torch.int8)
        self.released: list[bool] = []
        pages = [group.buffer("adjacent", layers) for group, layers in zip(self.groups, self.layers, strict=True)]
        made = module(monkeypatch, "worker").PackedWorker
        self.worker = made(self.codecs, pages, self.memory[:, : self.cell], PER_CHUNK, lambda: self.released.append(True))

    def bytes_of(self, group: int, block: int) -> list[torch.Tensor]:
        return [layer[block, : self.groups[group].page_bytes].clone() for layer in self.layers[group]]


def test_blocks_of_several_groups_are_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(monkeypatch)
    assert engine.worker.submit_store(3, gpu([[4, 7, 1, 2], [5, 6]], [0, 2]), cpu([0, 3, 5]))
    (result,) = engine.worker.get_finished()
    assert (result.job_id, result.success) == (3, True)
    assert result.transfer_size == 4 * engine.codecs[0].nbytes + 2 * engine.codecs[1].nbytes
    kept = {(0, block): engine.bytes_of(0, block) for block in (4, 7, 1, 2)} | {(1, block): engine.bytes_of(1, block) for block in (5, 6)}
    padding = [layer[:, -64:].clone() for layer in engine.layers[0]]
    for layers in engine.layers:
        for layer in layers:
            layer[:, :-64] = 0
    # From the middle of the first chunk on, to other blocks; the last chunk in part.
    assert engine.worker.submit_load(4, cpu([0, 3, 5]), gpu([[9, 8], [11]], [1, 2]), expedited=True)
    engine.worker.wait({4})
    assert [one.job_id for one in engine.worker.get_finished()] == [4]
    for group, found, stored in ((0, 9, 7), (0, 8, 1), (1, 11, 5)):
        for one, other in zip(engine.bytes_of(group, found), kept[group, stored], strict=True):
            assert torch.equal(one, other)
    assert not any(layer[10, :-64].any() for layer in engine.layers[0])
    assert all(torch.equal(layer[:, -64:], old) for layer, old in zip(engine.layers[0], padding, strict=True))
    assert engine.worker.failed_blocks() == set()
    assert not engine.memory[:, engine.cell :].any()
    engine.worker.shutdown()
    assert engine.released == [True]


def test_a_damaged_row_is_reported_as_a_block_that_was_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(monkeypatch, "octopus-4")
    engine.layers[0][1][3].view(torch.bfloat16)[5] = float("nan")
    engine.worker.submit_store(1, gpu([[1, 2, 3], []], [0, 0]), cpu([0, 1]))
    assert engine.worker.get_finished()[0].success
    assert (engine.worker.count("encoded"), engine.worker.count("refused")) == (2, 1)
    engine.memory[0, 500] ^= 4
    before = engine.bytes_of(0, 7) + engine.bytes_of(0, 9)
    engine.worker.submit_load(2, cpu([0, 1]), gpu([[7, 8, 9], []], [0, 0]))
    assert engine.worker.get_finished()[0].success
    assert engine.worker.failed_blocks() == {7, 9}
    assert engine.worker.failed_blocks() == set()
    assert (engine.worker.count("decoded"), engine.worker.count("damaged")) == (1, 2)
    assert all(torch.equal(one, old) for one, old in zip(engine.bytes_of(0, 7) + engine.bytes_of(0, 9), before, strict=True))


def test_every_call_keeps_the_hosts_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(monkeypatch, "octopus-4")
    engine.layers[0][1][3].view(torch.bfloat16)[5] = float("nan")
    kind, worker = type(engine.worker), Watched(engine.worker)
    tier = types.SimpleNamespace(submit_load=lambda _: None, get_finished_jobs=lambda: [JobResult(1, True)])
    check_promotions = module(monkeypatch, "promotions").check_promotions
    with vllm_like_host(monkeypatch):
        worker.submit_store(1, gpu([[1, 2, 3], [4]], [0, 0]), cpu([0, 1, 2]))
        worker.get_finished()
        engine.memory[0, 500] ^= 4
        worker.submit_load(2, cpu([0, 1, 2]), gpu([[7, 8, 9], [5]], [0, 0]))
        worker.wait({2})
        worker.get_finished()
        assert worker.failed_blocks() == {7, 9}
        with pytest.raises(IndexError):
            worker.submit_load(3, cpu([99]), gpu([[7], []], [0, 0]))
        codecs = dict(enumerate([codec] for codec in engine.codecs))
        worker.call("promotions", check_promotions)(tier, memoryview(engine.memory.numpy()), codecs, engine.cell, PER_CHUNK)
        worker.call("promoted", tier.submit_load)(types.SimpleNamespace(job_id=1, keys=[key(0), key(1)], chunk_ids=numpy.array([0, 1])))
        worker.call("promoted", tier.get_finished_jobs)()
        assert worker.count("damaged") == 2
        worker.pop_counts()
        worker.shutdown()
    assert tier.damaged_chunks == 2
    assert worker.called >= {name for name, value in vars(kind).items() if not name.startswith("_") and callable(value)}


def test_vllm_reports_the_counters_of_workers_and_tiers(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(monkeypatch, "octopus-4")
    definitions = module(monkeypatch, "spec").KvpackSpec.build_metric_definitions({})
    assert "vllm's" in definitions
    assert metrics.worker_stats(engine.worker) is None
    engine.layers[0][1][3].view(torch.bfloat16)[5] = float("nan")
    engine.worker.submit_store(1, gpu([[1, 2, 3], []], [0, 0]), cpu([0, 1]))
    engine.worker.get_finished()
    engine.memory[0, 500] ^= 4
    engine.worker.submit_load(2, cpu([0, 1]), gpu([[7, 8, 9], []], [0, 0]))
    engine.worker.get_finished()
    stats = metrics.worker_stats(engine.worker)
    check_defined(stats, definitions)
    assert {name.removeprefix(metrics.PACKED): of_name for name, of_name in stats.values.items()} == {
        "encoded_blocks": {(): 2},
        "refused_blocks": {("InvalidParameter",): 1},
        "decoded_blocks": {(): 1},
        "damaged_blocks": {("DigestMismatch",): 1, ("NotKvpack",): 1},
    }
    assert metrics.worker_stats(engine.worker) is None
    tier = types.SimpleNamespace(damaged_chunks=0, tier_type="fs")
    manager = types.SimpleNamespace(secondary_tiers=[tier], kvpack_ratio=3.2)
    assert metrics.add_scheduler_stats(None, manager) is None
    tier.damaged_chunks = 2
    stats = metrics.add_scheduler_stats(None, manager)
    check_defined(stats, definitions)
    assert stats.values == {metrics.PACKED + "damaged_chunks": {("fs",): 2}, metrics.PACKED + "ratio": {(): 3.2}}
    other = Stats()
    other.set_gauge("vllm's", 1)
    assert metrics.add_scheduler_stats(other, manager).values == {"vllm's": {(): 1}, metrics.PACKED + "ratio": {(): 3.2}}


def test_rows_from_a_tier_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(monkeypatch)
    keys = [key(0), key(1), key(2, group=1)]
    engine.worker.submit_store(1, gpu([[1, 2, 3, 4], [5, 6]], [0, 0]), cpu([0, 1, 2], keys))
    engine.worker.get_finished()
    engine.memory[1, 900] ^= 1
    view = memoryview(engine.memory.numpy())
    results = [JobResult(1, True), JobResult(2, True), JobResult(9, True), JobResult(3, False, [keys[0]])]
    submitted: list[int] = []
    tier = types.SimpleNamespace(
        lookups=AsyncLookupManager(), submit_load=lambda one: submitted.append(one.job_id), get_finished_jobs=lambda: results
    )
    module(monkeypatch, "promotions").check_promotions(
        tier, view, dict(enumerate([codec] for codec in engine.codecs)), engine.cell, PER_CHUNK
    )
    for number, asked, chunks in ((1, keys, [0, 1, 2]), (2, [keys[0], keys[2]], [0, 0]), (3, keys, [0, 1, 2])):
        tier.submit_load(types.SimpleNamespace(job_id=number, keys=asked, chunk_ids=numpy.array(chunks)))
    assert submitted == [1, 2, 3]
    first, second, store, third = tier.get_finished_jobs()
    assert (first.success, first.successful_keys) == (False, [keys[0], keys[2]])
    # A chunk of another group is not read as one of this.
    assert (second.success, second.successful_keys) == (False, [keys[0]])
    assert (store.success, store.successful_keys) == (True, None)
    assert (third.success, third.successful_keys) == (False, [keys[0]])
    assert sorted(tier.lookups.missed) == [keys[1], keys[2]]
    assert tier.damaged_chunks == 2


def test_rows_name_their_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of another chunk is intact and belongs to the same model, so only its key differs."""
    engine = Engine(monkeypatch)
    engine.worker.submit_store(1, gpu([[1, 2, 3, 4], []], [0, 0]), cpu([0, 1]))
    engine.worker.get_finished()
    engine.memory[3] = engine.memory[0]
    engine.memory[4] = engine.memory[1]
    # Its rows have changed places.
    size = engine.codecs[0].nbytes
    engine.memory[5, :size], engine.memory[5, size : 2 * size] = engine.memory[1, size : 2 * size], engine.memory[1, :size]
    before = engine.bytes_of(0, 7) + engine.bytes_of(0, 8)
    asked = [key(2), key(1), key(1)]
    tier = types.SimpleNamespace(submit_load=lambda _: None, get_finished_jobs=lambda: [JobResult(1, True), JobResult(2, True)])
    view = memoryview(engine.memory.numpy())
    module(monkeypatch, "promotions").check_promotions(
        tier, view, dict(enumerate([codec] for codec in engine.codecs)), engine.cell, PER_CHUNK
    )
    for number, (keys, chunks) in enumerate([(asked[:2], [3, 4]), (asked[2:], [5])], 1):
        tier.submit_load(types.SimpleNamespace(job_id=number, keys=keys, chunk_ids=numpy.array(chunks)))
    first, second = tier.get_finished_jobs()
    assert (first.success, first.successful_keys) == (False, [key(1)])
    assert (second.success, second.successful_keys) == (False, None)
    engine.worker.submit_load(2, cpu([3], [key(2)]), gpu([[7, 8], []], [0, 0]))
    engine.worker.submit_load(3, cpu([4], [key(1)]), gpu([[9, 10], []], [0, 0]))
    engine.worker.get_finished()
    assert engine.worker.failed_blocks() == {7, 8}
    assert all(torch.equal(x, y) for x, y in zip(engine.bytes_of(0, 7) + engine.bytes_of(0, 8), before, strict=True))
    assert all(torch.equal(x, y) for x, y in zip(engine.bytes_of(0, 9), engine.bytes_of(0, 3), strict=True))


def test_chunks_may_be_partially_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window may have passed the first block of a chunk before vLLM stores it, in memory that held another chunk."""
    engine = Engine(monkeypatch)
    engine.worker.submit_store(1, gpu([[1, 2], []], [0, 0]), cpu([0], [key(7)]))
    engine.worker.submit_store(2, gpu([[3, 4, 5], []], [1, 0]), cpu([0, 1]))
    engine.worker.get_finished()
    assert bytes(engine.memory[0].numpy().tobytes()[: len(ABSENT)]) == ABSENT
    results = [JobResult(1, True)]
    tier = types.SimpleNamespace(submit_load=lambda _: None, get_finished_jobs=lambda: results)
    view = memoryview(engine.memory.numpy())
    module(monkeypatch, "promotions").check_promotions(
        tier, view, dict(enumerate([codec] for codec in engine.codecs)), engine.cell, PER_CHUNK
    )
    loads = types.SimpleNamespace(job_id=1, keys=[key(0), key(1)], chunk_ids=numpy.array([0, 1]))
    tier.submit_load(loads)
    assert tier.get_finished_jobs() == results
    # No block at all, and one whose row is damaged beside an absent one.
    engine.memory[2, : 2 * engine.codecs[0].nbytes] = engine.memory[0, : engine.codecs[0].nbytes].repeat(2)
    engine.memory[0, engine.codecs[0].nbytes + 600] ^= 2
    tier.submit_load(types.SimpleNamespace(job_id=1, keys=[key(0), key(1), key(2)], chunk_ids=numpy.array([0, 1, 2])))
    (result,) = tier.get_finished_jobs()
    assert (result.success, result.successful_keys) == (False, [key(1)])
    engine.worker.submit_load(3, cpu([1]), gpu([[9], []], [2, 0]))
    engine.worker.submit_load(4, cpu([0]), gpu([[8], []], [0, 0]))
    engine.worker.get_finished()
    assert engine.worker.failed_blocks() == {8}
    assert all(torch.equal(x, y) for x, y in zip(engine.bytes_of(0, 9), engine.bytes_of(0, 4), strict=True))


def test_the_manager_sends_keys_to_workers() -> None:
    class Manager:
        def prepare_store(self, keys: Any, req_context: Any) -> Any:
            kept = [key for key in keys if key != b"there"]
            return types.SimpleNamespace(keys_to_store=kept, store_spec=cpu([0] * len(kept))) if req_context else None

        def prepare_load(self, keys: Any, req_context: Any) -> Any:
            return cpu([0] * len(keys))

    manager = Manager()
    attach_keys(manager)
    assert manager.prepare_store([b"a", b"there", bytearray(b"b")], True).store_spec.keys == [b"a", b"b"]
    assert manager.prepare_store([b"a"], False) is None
    assert manager.prepare_load(iter([b"c", b"d"]), True).keys == [b"c", b"d"]


def record(**values: Any) -> Any:
    return make_dataclass("Record", list(values), frozen=True)(**values)


def config(groups: tuple[Group, ...] = (ATTENTION, STATES), workers: int = 2, **changes: Any) -> Any:
    options = {
        "kvpack_groups": list(groups), "kvpack_settings": "s", "recipe": "octopus-4", "layout": "adjacent", "revision": "abc",
        "cpu_bytes_to_use": 1 << 20, **changes.pop("options", {}),
    }  # fmt: skip
    parallel = {"rank": 1, "world_size": workers, "pp_size": 1, "pcp_size": 1, "dcp_size": 1} | changes.pop("parallel", {})
    values = {
        "extra_config": {name: value for name, value in options.items() if value is not None},
        "groups": tuple(types.SimpleNamespace(group_id=n, layer_names=[str(n)], tokens_per_block=TOKENS) for n in range(len(groups))),
        "model": record(name="m", dtype="bfloat16"),
        "cache": types.SimpleNamespace(tokens_per_hash=TOKENS, blocks_per_chunk=PER_CHUNK),
        "parallel": types.SimpleNamespace(**parallel),
        "worker_kv_bytes_per_block": sum(group.page_bytes * group.layers for group in groups),
        "canonical_layout": False, "replicated_layout": False, "kv_cache_layout": "LBHNC", "engine_id": "e",
    } | changes  # fmt: skip
    return record(**values)


def test_chunks_have_the_size_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    spec_class = module(monkeypatch, "spec").KvpackSpec
    spec = spec_class(config())
    cell = PER_CHUNK * max(codecs[0].nbytes for codecs in spec.codecs)
    assert spec.cpu_page_size_per_worker == cell
    assert spec.kv_bytes_per_chunk == -(-2 * cell // 4096) * 4096
    assert spec.num_chunks == (1 << 20) // spec.kv_bytes_per_chunk
    assert spec.cpu_info == (spec.num_chunks, spec.kv_bytes_per_chunk)
    assert spec.ratio == 2 * PER_CHUNK * LAYERS * ATTENTION.page_bytes / spec.kv_bytes_per_chunk
    # Rows of another rank, group, model or recipe are not those of this one.
    names = {codec.namespace for codecs in spec.codecs for codec in codecs}
    assert len(names) == 4
    for other in (config(options={"revision": "abd"}), config(options={"layout": "split"}), config(options={"recipe": "octopus-3"})):
        assert not names & {codec.namespace for codecs in spec_class(other).codecs for codec in codecs}
    # vLLM's own tiers name their folders, and peers their caches, by this.
    changed = [{}, {"revision": "abd"}, {"recipe": "bf16"}, {"recipe": "raw"}, {"kvpack_settings": "t"}, {"tenant": "u"}]
    folders = [spec_class(config(options=options)).config.model.dtype for options in changed]
    assert len({*folders, "bfloat16"}) == 7
    assert spec_class(config()).config.model.dtype == folders[0]


def test_groups_omitted_by_vllm_have_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys use the numbers of all groups, but a spec contains only the offloaded groups."""
    given = config()
    for group, number in zip(given.groups, (1, 4), strict=True):
        group.group_id = number
    engine = Engine(monkeypatch, "octopus-4")
    spec = module(monkeypatch, "spec").KvpackSpec(given)
    assert spec.codecs_by_group_id == {1: spec.codecs[0], 4: spec.codecs[1]}
    keys = [key(0, group=1), key(1, group=1), key(2, group=4)]
    engine.worker.submit_store(1, gpu([[1, 2, 3, 4], [5, 6]], [0, 0]), cpu([0, 1, 2], keys))
    engine.worker.get_finished()
    engine.memory[1, 900] ^= 1
    tier = types.SimpleNamespace(submit_load=lambda _: None, get_finished_jobs=lambda: [JobResult(1, True)])
    codecs = {1: [engine.codecs[0]], 4: [engine.codecs[1]]}
    module(monkeypatch, "promotions").check_promotions(tier, memoryview(engine.memory.numpy()), codecs, engine.cell, PER_CHUNK)
    tier.submit_load(types.SimpleNamespace(job_id=1, keys=keys, chunk_ids=numpy.array([0, 1, 2])))
    assert tier.get_finished_jobs()[0].successful_keys == [keys[0], keys[2]]


def with_basis(tmp_path: Path, **changes: Any) -> Any:
    """Return the configuration of a model with one group of named layers, and a recipe whose basis is in a file."""
    shapes = {(layer, side): (HEADS, DIM) for layer in range(LAYERS) for side in "kv"}
    (tmp_path / "m.kvbasis").write_bytes(random_basis(shapes, LAYERS, seed=changes.pop("seed", ""), model={"name": "folder/m"}))
    names = changes.pop("names", [f"model.layers.{number}.self_attn.attn" for number in range(LAYERS)])
    options = {"recipe": "kv=klt:bits=4", "basis": str(tmp_path / "m.kvbasis"), **changes.pop("options", {})}
    groups = changes.pop("groups", (ATTENTION,))
    given = config(groups, 1, options=options, parallel={"rank": 0}, **changes)
    return replace(given, groups=tuple(types.SimpleNamespace(layer_names=names, tokens_per_block=TOKENS) for _ in groups))


def test_a_recipe_uses_the_basis_of_its_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spec_class = module(monkeypatch, "spec").KvpackSpec
    spec = spec_class(with_basis(tmp_path))
    ((codec,),) = spec.codecs
    digest = hashlib.sha256((tmp_path / "m.kvbasis").read_bytes()).hexdigest()
    assert codec.recipe.text == f"kv=klt:basis={digest},bits=4"
    buffer = ATTENTION.buffer("adjacent", device_blocks(ATTENTION, 0))
    rows = torch.zeros(2, codec.nbytes, dtype=torch.uint8)
    assert codec.encode_into(buffer, [3, 5], rows) == codec.decode_into(rows, buffer, [1, 2]) == [None, None]
    # Rows of another basis are those of another recipe, and lie elsewhere.
    other = spec_class(with_basis(tmp_path, seed="other"))
    assert other.codecs[0][0].namespace != codec.namespace
    assert other.config.model.dtype != spec.config.model.dtype


def test_an_invalid_basis_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spec_class = module(monkeypatch, "spec").KvpackSpec
    with pytest.raises(MissingBasis, match="the recipe 'kv=klt:bits=4' needs a basis: set basis to the path of the file"):
        spec_class(with_basis(tmp_path, options={"basis": None}))
    with pytest.raises(MissingFile, match=r"elsewhere\.kvbasis"):
        spec_class(with_basis(tmp_path, options={"basis": str(tmp_path / "elsewhere.kvbasis")}))
    with pytest.raises(InvalidParameter, match="is a basis for a model whose name is 'folder/m', but the name of the cache's model is 'n'"):
        spec_class(with_basis(tmp_path, model=record(name="n", dtype="bfloat16")))
    with pytest.raises(InvalidParameter, match="the recipe 'octopus-4' does not use one: omit basis"):
        spec_class(with_basis(tmp_path, options={"recipe": "octopus-4"}))
    for names in (["model.layers.1.attn", "model.layers.0.attn"], ["model.layers.1.attn", "model.layers.2.attn"]):
        with pytest.raises(InvalidParameter, match=r"the layers model.layers.1.attn, .* are not all layers of a model in order"):
            spec_class(with_basis(tmp_path, names=names))
    with pytest.raises(InvalidParameter, match="the model has several groups of cache layers"):
        spec_class(with_basis(tmp_path, groups=(ATTENTION, STATES)))
    latents = Group(LAYERS, TOKENS, TOKENS * (DIM + 8) * 2, "latents", 1, DIM, 8, "bf16")
    with pytest.raises(InvalidParameter, match="vLLM's cache has no keys and values per head to pack"):
        spec_class(with_basis(tmp_path, groups=(latents,)))
    with pytest.raises(InvalidParameter, match="keys of layer 0 of the basis"):
        spec_class(with_basis(tmp_path, groups=(replace(ATTENTION, heads=1, page_bytes=ATTENTION.page_bytes // 2),)))


def vllm_config(of_model: dict[str, Any] | None = None, **changes: Any) -> Any:
    """Return an object with the fields of VllmConfig that ``relevant_settings`` reads."""
    parts: dict[str, dict[str, Any]] = {
        "model_config": {
            **dict.fromkeys(identities._MODEL),
            "hf_config": types.SimpleNamespace(to_dict=lambda: of_model or {}),
            "dtype": torch.bfloat16,
            "max_model_len": 9,
            "multimodal_config": None,
        },
        "cache_config": dict.fromkeys(identities._CACHE),
        "load_config": dict.fromkeys(identities._LOAD),
        "attention_config": dict.fromkeys(identities._ATTENTION),
    }
    made = {
        name: types.SimpleNamespace(**values | {field: changes.pop(field) for field in values if field in changes})
        for name, values in parts.items()
    }
    return types.SimpleNamespace(**{**made, "speculative_config": None, **changes})


def test_errors_name_the_settings_of_vllm() -> None:
    def settings(of_model: dict[str, Any] | None = None, **changes: Any) -> str:
        kept = {"rope_theta": 1e4, "transformers_version": "5.1", "hidden_size": 64, **(of_model or {})}
        return relevant_settings(vllm_config(kept, **changes))

    def draft(**changes: Any) -> Any:
        return types.SimpleNamespace(**dict.fromkeys(identities._DRAFT) | changes)

    def media(**changes: Any) -> Any:
        return types.SimpleNamespace(**dict.fromkeys(identities._MEDIA) | changes)

    longrope = {"rope_parameters": {"rope_type": "longrope"}}
    assert settings() == settings({"transformers_version": "5.2", "_name_or_path": "/elsewhere"}, max_model_len=10)
    others = [
        settings(), settings({"rope_theta": 5e5}), settings({"rope_scaling": {"factor": 2.0}}), settings(quantization="fp8"),
        settings(dtype=torch.float16), settings(cache_dtype="fp8_e5m2"), settings(longrope), settings(longrope, max_model_len=10),
        settings(load_format="dummy"), settings(mamba_cache_dtype="float16"), settings(mamba_ssm_cache_dtype="float16"),
        *(settings(multimodal_config=media(**change)) for change in ({}, *({name: 1} for name in identities._MEDIA))),
        *(settings(speculative_config=draft(**change)) for change in ({}, *({name: "e"} for name in identities._DRAFT))),
        *(settings(**{name: "other"}) for name in (*identities._MODEL, *identities._CACHE, *identities._LOAD, *identities._ATTENTION)),
        *(settings(quantization_config=Quantization(one)) for one in ("int8", "fp8")),
    ]  # fmt: skip
    assert len(set(others)) == len(others)
    # A class of vLLM's is what its fields say, and the same in every process.
    assert settings(quantization_config=Quantization("int8")) == settings(quantization_config=Quantization("int8"))
    without = vllm_config()
    del without.cache_config.use_replayssm
    with pytest.raises(
        InvalidParameter, match=r"cache_config of the installed version of vLLM has no use_replayssm, on which pages depend"
    ):
        relevant_settings(without)


@dataclass(repr=False)
class Quantization:
    linear: str


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (config(options={"kvpack_groups": None}), 'set "kv_connector": "KvpackConnector"'),
        (config(options={"recipe": None}), "recipe is None, expected text"),
        (config(options={"layout": None}), "layout is missing"),
        (config(options={"cpu_bytes_to_use": 100}), "cpu_bytes_to_use is 100, but one chunk takes"),
        (config(options={"revision": None}), "only a revision identifies its weights"),
        (config(canonical_layout=True), "canonical_layout is set"),
        (config(parallel={"pp_size": 2}), "pp_size is 2, but kvpack supports only tensor parallelism"),
        (config(options={"recipe": "octopus-4;boundary-1"}), "selects layers with 'layers=0,-1:k=raw', but the model has several groups"),
        (config(groups=()), "vLLM offloads 1 groups of cache layers, but the connector found 0"),
    ],
    ids=["connector", "recipe", "layout", "bytes", "weights", "canonical", "pipeline", "layers", "groups"],
)
def test_invalid_settings_are_refused(given: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if message.startswith("vLLM offloads"):
        given = replace(given, groups=(types.SimpleNamespace(layer_names=["a"], tokens_per_block=TOKENS),))
    with pytest.raises(InvalidParameter, match=message):
        module(monkeypatch, "spec").KvpackSpec(given)


def test_groups_are_read_from_vllms_description(monkeypatch: pytest.MonkeyPatch) -> None:
    class AttentionSpec:
        dtype, tokens_per_state, block_size = torch.bfloat16, 1, TOKENS

        def __init__(self, heads: int = HEADS, size: int = DIM, v: int | None = None, **values: Any) -> None:
            self.num_kv_heads, self.head_size, self.head_size_v = heads, size, size if v is None else v
            self.unpadded_page_size_bytes = TOKENS * heads * (self.head_size + self.head_size_v) * 2
            vars(self).update(values)

        @property
        def page_size_bytes(self) -> int:
            return int(self.unpadded_page_size_bytes)

    names = ("FullAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec", "MambaSpec", "UniformTypeKVCacheSpecs")
    classes: dict[str, Any] = {name: type(name, (AttentionSpec,) if "Attention" in name or "Sliding" in name else (), {}) for name in names}
    classes["MLAAttentionSpec"] = type("MLAAttentionSpec", (classes["FullAttentionSpec"],), {})
    classes["SlidingWindowMLASpec"] = type("SlidingWindowMLASpec", (classes["SlidingWindowSpec"],), {})
    offloading = {"get_offloading_group_ids": lambda kv: range(len(kv.kv_cache_groups))}
    for name, values in (
        ("vllm.v1.kv_cache_interface", {"AttentionSpec": AttentionSpec, **classes}),
        ("vllm.distributed.kv_transfer.kv_connector.v1.offloading.config", offloading),
    ):
        made = types.ModuleType(name)
        vars(made).update(values)
        monkeypatch.setitem(__import__("sys").modules, name, made)

    mamba = classes["MambaSpec"]()
    vars(mamba).update(block_size=TOKENS, real_page_size_bytes=3000)
    latents = classes["MLAAttentionSpec"](heads=1, size=576, v=0)
    several = classes["UniformTypeKVCacheSpecs"]()
    given = [
        (classes["FullAttentionSpec"](), ATTENTION),
        (classes["SlidingWindowSpec"](), ATTENTION),
        (latents, Group(LAYERS, TOKENS, TOKENS * 576 * 2, "latents", 1, 512, 64, "bf16")),
        (classes["FullAttentionSpec"](dtype=torch.uint8), Group(LAYERS, TOKENS, ATTENTION.page_bytes)),
        (classes["FullAttentionSpec"](v=16), Group(LAYERS, TOKENS, TOKENS * HEADS * 48 * 2)),
        (mamba, Group(LAYERS, TOKENS, 3000)),
    ]
    vllm_config = types.SimpleNamespace(model_config=types.SimpleNamespace(hf_text_config=types.SimpleNamespace(qk_rope_head_dim=64)))
    groups = [types.SimpleNamespace(kv_cache_spec=spec, layer_names=["a", "b"]) for spec, _ in given]
    assert offloaded_groups(vllm_config, types.SimpleNamespace(kv_cache_groups=groups)) == [expected for _, expected in given]
    for other in (classes["FullAttentionSpec"](heads=4), classes["FullAttentionSpec"](heads=2 * HEADS, size=DIM // 2)):
        several.kv_cache_specs = {"a": classes["FullAttentionSpec"](), "b": other}
        one = types.SimpleNamespace(kv_cache_spec=several, layer_names=["a", "b"])
        with pytest.raises(InvalidParameter, match="form one group with 2 block shapes"):
            offloaded_groups(vllm_config, types.SimpleNamespace(kv_cache_groups=[one]))
    several.kv_cache_specs = {"a": classes["FullAttentionSpec"](), "b": classes["FullAttentionSpec"]()}
    one = types.SimpleNamespace(kv_cache_spec=several, layer_names=["a", "b"])
    assert offloaded_groups(vllm_config, types.SimpleNamespace(kv_cache_groups=[one])) == [ATTENTION]


def test_latents_are_two_sides_of_a_block() -> None:
    group = Group(LAYERS, TOKENS, TOKENS * 576 * 2, "latents", 1, 512, 64, "bf16")
    layers = [torch.randn(3, TOKENS * 576, generator=torch.Generator().manual_seed(n)).bfloat16().view(torch.int8) for n in range(LAYERS)]
    pages = group.buffer("", layers)
    codec = PageCodec(group.page_recipe("octopus-4"), group.geometry)
    row = bytearray(codec.nbytes)
    assert codec.encode_into(pages, [2], [row]) == [None]
    assert codec.decode_into([row], pages, [0]) == [None]
    cells = [layer.view(torch.bfloat16).view(3, TOKENS, 576) for layer in layers]
    for cell in cells:
        assert torch.equal(cell[0, :, 512:], cell[2, :, 512:])
        error = (cell[0, :, :512].float() - cell[2, :, :512].float()).norm() / cell[2, :, :512].float().norm()
        assert 0.01 < error < 0.12


PAGE = 1000


def tensor(layers: list[str], *, offset: int = 0, page: int = PAGE, block: int = PAGE) -> Any:
    """Return vLLM's KVCacheTensor of 10 blocks. By default, each layer has its own memory."""
    stride = 10 * page if block == page else page
    return types.SimpleNamespace(layers=layers, offset=offset, layer_stride=stride, block_stride=block)


@pytest.fixture
def one_group(monkeypatch: pytest.MonkeyPatch) -> Any:
    offloading = types.ModuleType("vllm.distributed.kv_transfer.kv_connector.v1.offloading.config")
    offloading.get_offloading_group_ids = lambda kv: range(len(kv.kv_cache_groups))  # type: ignore[attr-defined]
    monkeypatch.setitem(__import__("sys").modules, offloading.__name__, offloading)
    page = types.SimpleNamespace(page_size_bytes=PAGE)
    names = types.SimpleNamespace(layer_names=["layers.0.attn", "layers.1.attn"], kv_cache_spec=page)
    tensors = [tensor(names.layer_names), tensor(["mamba"])]
    groups = [names, types.SimpleNamespace(layer_names=["mamba"], kv_cache_spec=page)]
    return types.SimpleNamespace(kv_cache_groups=groups, kv_cache_tensors=tensors)


def test_attention_blocks_are_compared_with_the_named_layout(one_group: Any) -> None:
    """vLLM's attention may store tokens before heads, or split the cache's blocks. Pages of such memory would mix heads."""
    memory = torch.zeros(BLOCKS, HEADS * TOKENS * 2 * DIM + 32)
    of_block = memory[:, :-32]
    heads_first = of_block.unflatten(1, (HEADS, TOKENS, 2 * DIM))
    tokens_first = of_block.unflatten(1, (TOKENS, HEADS, 2 * DIM)).transpose(1, 2)
    smaller = memory[:, :-32].contiguous().view(2 * BLOCKS, HEADS, TOKENS // 2, 2 * DIM)
    apart = of_block.unflatten(1, (2, TOKENS, HEADS, DIM))

    def check(layout: str, cache: torch.Tensor) -> None:
        caches = {"layers.0.attn": heads_first if layout == "adjacent" else cache, "layers.1.attn": cache, "mamba": torch.zeros(1)}
        check_blocks([ATTENTION, STATES], layout, one_group, caches)

    good = {"adjacent": heads_first, "cpu-vec": heads_first, "adjacent-tokens-first": tokens_first, "split": apart}
    for name, right in good.items():
        check(name, right)
        for wrong in (heads_first, tokens_first, apart, smaller):
            if wrong is not right:
                with pytest.raises(InvalidParameter, match=rf"layers\.\d\.attn: its tensor has blocks .* in the layout '{name}' have "):
                    check(name, wrong)


class OffloadingConnector:
    """A stub of vLLM's connector, which creates the spec and passes on the tensors of the layers."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        self.options = dict(vllm_config.kv_transfer_config.kv_connector_extra_config)
        self.connector_worker: Any = None
        self.connector_scheduler: Any = None
        self.registered: list[Any] = []

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self.registered.append(kv_caches)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set()

    def get_kv_connector_stats(self) -> Any:
        return None

    @classmethod
    def build_prom_metrics(cls, vllm_config: Any, *arguments: Any) -> Any:
        return arguments


CONNECTOR = {"vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector": {"OffloadingConnector": OffloadingConnector}}


@pytest.fixture
def connector(one_group: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    config_module = __import__("sys").modules["vllm.distributed.kv_transfer.kv_connector.v1.offloading.config"]
    found = import_over(monkeypatch, MODULES | CONNECTOR, "kvpack.integrations.vllm.connector")
    monkeypatch.setitem(__import__("sys").modules, config_module.__name__, config_module)
    return found


def configured(**options: Any) -> Any:
    return vllm_config(kv_transfer_config=types.SimpleNamespace(kv_connector_extra_config=options))


def test_the_connector_describes_the_model_to_its_spec(connector: Any, one_group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connector, "offloaded_groups", lambda vllm_config, kv: [ATTENTION, STATES])
    config = configured(layout="adjacent", recipe="octopus-4")
    made = connector.KvpackConnector(config, "worker", one_group)
    assert (made.options["spec_name"], made.options["spec_module_path"]) == ("KvpackSpec", "kvpack.integrations.vllm.spec")
    assert made.options["kvpack_groups"] == [ATTENTION, STATES]
    assert made.options[SETTINGS] == relevant_settings(config)
    assert connector.KvpackConnector.build_prom_metrics(config, 1, 2) == (1, 2)
    blocks = torch.zeros(BLOCKS, HEADS, TOKENS, 2 * DIM)
    caches = {"layers.0.attn": blocks, "layers.1.attn": blocks, "mamba": torch.zeros(1)}
    made.register_kv_caches(caches)
    assert made.registered == [caches]
    with pytest.raises(InvalidParameter, match="its tensor has blocks"):
        made.register_kv_caches(caches | {"layers.1.attn": blocks.view(-1, HEADS, TOKENS // 2, 2 * DIM)})
    assert made.registered == [caches]
    assert made.get_block_ids_with_load_errors() == set()
    assert made.get_kv_connector_stats() is None
    worker = types.SimpleNamespace(failed_blocks=lambda: {7}, pop_counts=lambda: {("encoded",): 3})
    made.connector_worker = types.SimpleNamespace(worker=worker)
    assert made.get_block_ids_with_load_errors() == {7}
    assert made.get_kv_connector_stats().values == {metrics.PACKED + "encoded_blocks": {(): 3}}
    tier = types.SimpleNamespace(damaged_chunks=1, tier_type="fs")
    made.connector_scheduler = types.SimpleNamespace(manager=types.SimpleNamespace(secondary_tiers=[tier], kvpack_ratio=2.0))
    assert set(made.get_kv_connector_stats().values) == {metrics.PACKED + "damaged_chunks", metrics.PACKED + "ratio"}


STORE = {"placement": "store", "location": "/cache", "recipe": "octopus-4", "layout": "adjacent"}


def test_the_connector_describes_the_model_to_the_tier(connector: Any, one_group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connector, "offloaded_groups", lambda vllm_config, kv: [ATTENTION])
    config = configured(**STORE, max_bytes=9, tenant="a", cpu_bytes_to_use=5, secondary_tiers=[{"type": "fs"}])
    # vLLM asks for the metrics before there is a connector, and for connectors of the scheduler and of the workers.
    assert connector.KvpackConnector.build_prom_metrics(config, 1, 2) == (1, 2)
    options = config.kv_transfer_config.kv_connector_extra_config
    packed = {"type": "kvpack", "location": "/cache", "max_bytes": 9, "recipe": "octopus-4", "layout": "adjacent", "tenant": "a"}
    assert options["secondary_tiers"] == [packed, {"type": "fs"}]
    for role in ("scheduler", "worker"):
        made = connector.KvpackConnector(config, role, one_group)
        assert made.options["secondary_tiers"] == [packed, {"type": "fs"}]
        assert (made.options[GROUPS], made.options[BLOCK_OFFSETS]) == ([ATTENTION], [[0, PAGE], [0]])
    assert (made.options["spec_name"], made.options[SETTINGS]) == ("TieringOffloadingSpec", relevant_settings(config))
    assert "spec_module_path" not in made.options
    # A spec of the operator's own, such as one for another platform, stays.
    own = configured(**STORE, spec_name="CpuTieringSpec", spec_module_path="module")
    assert connector.KvpackConnector(own, "worker", one_group).options["spec_name"] == "CpuTieringSpec"
    # vLLM's own stands.
    made.connector_worker = types.SimpleNamespace(worker=types.SimpleNamespace(failed_blocks=lambda: {7}))
    assert made.get_block_ids_with_load_errors() == set()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"placement": "tier"}, 'placement is \'tier\', expected "primary" or "store"'),
        ({"location": "/cache"}, '"location" is set, but "placement" is "primary": set "placement": "store"'),
        ({"placement": "store"}, '"store" requires "location"'),
        ({"secondary_tiers": [{"type": "kvpack"}]}, 'set "placement": "store" and "location" there'),
        (STORE | {"secondary_tiers": [{"type": "kvpack"}]}, 'set "placement": "store" and "location" there'),
    ],
    ids=["no placement", "rows in a store", "no location", "a tier below rows", "a second tier"],
)
def test_placements_are_checked(options: dict[str, Any], message: str, connector: Any, one_group: Any) -> None:
    with pytest.raises(InvalidParameter, match=message):
        connector.KvpackConnector(configured(**options), "scheduler", one_group)
    with pytest.raises(InvalidParameter, match=message):
        connector.KvpackConnector.build_prom_metrics(configured(**options), 1, 2)


def test_layers_of_several_groups_share_memory(one_group: Any) -> None:
    """The tier copies each piece of device memory once, in the order in which the layers of the groups first refer to it."""

    def places(tensors: list[Any], **groups: list[str]) -> list[list[int]]:
        spec = types.SimpleNamespace(page_size_bytes=PAGE)
        made = [types.SimpleNamespace(layer_names=names, kv_cache_spec=spec) for names in groups.values()]
        return block_offsets(types.SimpleNamespace(kv_cache_groups=made, kv_cache_tensors=tensors))

    assert block_offsets(one_group) == [[0, PAGE], [0]]
    # Mamba's second layer lies where the first of attention does.
    swapped = [tensor(["a", "b"]), tensor(["y", "x"])]
    assert places(swapped, attention=["a", "b"], mamba=["x", "y"]) == [[0, PAGE], [PAGE, 0]]
    apart = [tensor(["a", "b"]), tensor(["x"], offset=20 * PAGE)]
    assert places(apart, attention=["a", "b"], mamba=["x"]) == [[0, PAGE], [2 * PAGE]]
    # Of another pipeline stage.
    assert places([tensor(["a"])], attention=["a", "b"]) == [[0]]
    # All layers of a block are together, and the tier copies that.
    whole = [tensor(["a", "b"], block=3 * PAGE), tensor(["x"], offset=2 * PAGE, block=3 * PAGE)]
    assert places(whole, attention=["a", "b"], mamba=["x"]) == [[0, PAGE], [2 * PAGE]]
    of_layers = types.SimpleNamespace(
        kv_cache_specs={name: types.SimpleNamespace(page_size_bytes=size) for name, size in (("a", PAGE), ("b", 200))},
        page_size_bytes=PAGE + 200,
    )
    uneven = types.SimpleNamespace(layer_names=["a", "b"], kv_cache_spec=of_layers)
    tensors = [tensor(["a"]), tensor(["b"], offset=10 * PAGE, page=200, block=200)]
    assert block_offsets(types.SimpleNamespace(kv_cache_groups=[uneven], kv_cache_tensors=tensors)) == [[0, PAGE]]


def test_the_layout_of_a_store_is_that_of_the_tensors(connector: Any, one_group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connector, "offloaded_groups", lambda vllm_config, kv: [ATTENTION])
    one_group.kv_cache_groups.pop()
    blocks = torch.zeros(BLOCKS, HEADS, TOKENS, 2 * DIM)
    caches = {"layers.0.attn": blocks, "layers.1.attn": blocks}
    for layout, good in (("adjacent", True), ("adjacent-tokens-first", False), ("split", False)):
        made = connector.KvpackConnector(configured(**STORE | {"layout": layout}), "worker", one_group)
        with nullcontext() if good else pytest.raises(InvalidParameter, match=f"in the layout '{layout}' have"):
            made.register_kv_caches(caches)
        assert made.registered == [caches] * good


def test_the_connector_refuses_other_versions(connector: Any, one_group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connector refuses other versions before it uses any part of vLLM that may have been renamed."""
    asked: list[Any] = []

    def groups(*arguments: Any) -> list[Group]:
        asked.append(arguments)
        return [ATTENTION]

    monkeypatch.setattr(connector, "offloaded_groups", groups)
    given: tuple[dict[str, Any], ...] = ({}, STORE)
    for version in ("0.320.0", "0.3", "1.0.32"):
        monkeypatch.setattr(connector.vllm, "__version__", version)
        for options in given:
            with pytest.raises(InvalidParameter, match=f"vLLM is {version}, but kvpack was tested only with 0.32 and 0.33"):
                connector.KvpackConnector(configured(**options), "scheduler", one_group)
        assert not asked
    for options in given:
        connector.KvpackConnector(configured(**options, any_version=True), "scheduler", one_group)
    for version in ("0.32.1", "0.33.0"):
        monkeypatch.setattr(connector.vllm, "__version__", version)
        for options in given:
            connector.KvpackConnector(configured(**options), "scheduler", one_group)
    assert len(asked) == 6
