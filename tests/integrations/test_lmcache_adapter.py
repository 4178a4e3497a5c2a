"""Tests of the L2 adapter for LMCache with stubs of LMCache 0.5.6. ``make engines`` runs it in LMCache's storage manager."""

from __future__ import annotations

import errno
import sys
import threading
import time
import types
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch

from kvpack.errors import InvalidParameter, MissingBasis
from support import redis_server
from support.engine_conditions import CONDITIONS
from support.engine_stubs import import_over, parse_metrics
from support.faulty_os import FaultyOs
from support.host_settings import Watched, vllm_like_host
from support.klt_bases import random_basis

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("patient_stores")


@dataclass(frozen=True)
class ObjectKey:
    chunk_hash: bytes
    model_name: str = "model"
    kv_rank: int = 0
    object_group_id: int = 0
    cache_salt: str = ""


class Bitmap:
    def __init__(self, size: int) -> None:
        self.bits = [False] * size

    def set(self, index: int) -> None:
        self.bits[index] = True


class StoreResult(int):
    def __new__(cls, success: bool, size: int) -> StoreResult:
        return super().__new__(cls, size if success else -1)


class Interface:
    def __init__(self) -> None:
        self.told: list[tuple[str, int]] = []
        self.used = 0

    def _notify_keys_stored(self, keys: list[Any], sizes: list[int]) -> None:
        self.told.append(("stored", len(keys)))
        self.used += sum(sizes)

    def _notify_keys_accessed(self, keys: list[Any]) -> None:
        self.told.append(("accessed", len(keys)))

    def _notify_keys_deleted(self, keys: list[Any], sizes: list[int]) -> None:
        self.told.append(("deleted", len(keys)))
        self.used -= sum(sizes)


class Event:
    numbers = iter(range(3, 1000))

    def __init__(self) -> None:
        self.number, self.flag = next(Event.numbers), threading.Event()

    def fileno(self) -> int:
        return self.number

    def notify(self) -> None:
        self.flag.set()

    def close(self) -> None:
        pass


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    stubs = {
        "lmcache.lmcache_native": {"Bitmap": Bitmap},
        "lmcache.v1.distributed.internal_api": {"L2StoreResult": StoreResult},
        "lmcache.v1.distributed.l2_adapters.base": {"L2AdapterInterface": Interface},
        "lmcache.v1.platform": {"create_event_notifier": Event},
    }
    adapter = import_over(monkeypatch, stubs, "kvpack.integrations.lmcache.adapter").KvpackL2Adapter
    options = {"location": str(tmp_path), "recipe": "raw", "head_dim": 32, "revision": "abc"}

    def make(**changes: Any) -> Any:
        return adapter({name: value for name, value in (options | changes).items() if value is not None}, l1_memory_desc=None)

    return make


def waited(call: Callable[[], Any]) -> Any:
    end = time.monotonic() + 60
    while not (found := call()):
        assert time.monotonic() < end
        time.sleep(0.005)
    return found


def objects(count: int, seed: int = 0) -> list[Any]:
    source = torch.Generator().manual_seed(seed)
    return [types.SimpleNamespace(tensor=torch.randn(2, 2, 16, 64, generator=source).bfloat16()) for _ in range(count)]


KEYS = [ObjectKey(bytes([number])) for number in range(4)]
LAYOUTS = {0: types.SimpleNamespace(shapes=[torch.Size([2, 2, 16, 64])], dtypes=[torch.bfloat16])}


def test_objects_are_restored_except_a_damaged_one(opened: Callable[..., Any], tmp_path: Path) -> None:
    adapter = opened(recipe="octopus-4")
    assert len({adapter.get_store_event_fd(), adapter.get_lookup_and_lock_event_fd(), adapter.get_load_event_fd()}) == 3
    given = objects(3)
    number = adapter.submit_store_task(KEYS[:3], given)
    done = waited(adapter.pop_completed_store_tasks)
    assert set(done) == {number}
    assert done[number] > 0
    assert adapter._events["store"].flag.is_set()
    assert adapter.pop_completed_store_tasks() == {}
    number = adapter.submit_lookup_and_lock_task(KEYS, LAYOUTS)
    assert waited(lambda: adapter.query_lookup_and_lock_result(number)).bits == [True, True, True, False]
    assert adapter.query_lookup_and_lock_result(number) is None
    adapter.submit_unlock(KEYS)
    adapter.close()

    entries = sorted(path for path in tmp_path.rglob("*") if path.is_file() and path.read_bytes()[:10] == b"kvpack-row")
    data = bytearray(entries[0].read_bytes())
    data[len(data) // 2] ^= 8
    entries[0].write_bytes(data)
    adapter = opened(recipe="octopus-4")
    found = objects(3, seed=9)
    before = [one.tensor.clone() for one in found]
    number = adapter.submit_load_task(KEYS[:3], found)
    bits = waited(lambda: adapter.query_load_result(number)).bits
    assert sorted(bits) == [False, True, True]
    for good, one, old, source in zip(bits, found, before, given, strict=True):
        error = (one.tensor.float() - source.tensor.float()).norm() / source.tensor.float().norm()
        assert error < 0.1 if good else torch.equal(one.tensor, old)
    assert adapter.told == [("accessed", 2)]
    assert adapter.report_status()["stores"][0]["damaged_entries"] == 1
    adapter.delete(KEYS[:3])
    number = adapter.submit_lookup_and_lock_task(KEYS[:3], LAYOUTS)
    assert waited(lambda: adapter.query_lookup_and_lock_result(number)).bits == [False] * 3
    adapter.close()


def test_objects_of_other_weights_and_shapes_are_misses(opened: Callable[..., Any]) -> None:
    adapter = opened()
    given = objects(1)
    adapter.submit_store_task(KEYS[:1], given)
    waited(adapter.pop_completed_store_tasks)
    latents = [types.SimpleNamespace(tensor=torch.zeros(2, 16, 576).bfloat16())]
    number = adapter.submit_store_task(KEYS[1:2], latents)
    assert waited(adapter.pop_completed_store_tasks)[number] == -1
    number = adapter.submit_load_task(KEYS[1:2], latents)
    assert waited(lambda: adapter.query_load_result(number)).bits == [False]
    adapter.close()
    other = opened(revision="abd")
    number = other.submit_load_task(KEYS[:1], objects(1))
    assert waited(lambda: other.query_load_result(number)).bits == [False]
    other.close()


def test_every_call_keeps_the_hosts_settings(opened: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    given = objects(3)
    given[1].tensor[0, 0, 0, 0] = float("nan")
    with vllm_like_host(monkeypatch):
        made = Watched(None).call("made", opened)(recipe="octopus-4")
        adapter, kind = Watched(made), type(made)
        adapter.submit_store_task(KEYS[:3], given)
        assert list(waited(adapter.pop_completed_store_tasks).values()) == [-1]
        number = adapter.submit_lookup_and_lock_task(KEYS, LAYOUTS)
        assert waited(lambda: adapter.query_lookup_and_lock_result(number)).bits == [True, False, True, False]
        number = adapter.submit_load_task(KEYS[:3], given)
        assert waited(lambda: adapter.query_load_result(number)).bits == [True, False, True]
        number = adapter.submit_load_task(KEYS[:1], [types.SimpleNamespace(tensor=None)])
        assert waited(lambda: adapter.query_load_result(number)).bits == [False]
        adapter.submit_unlock(KEYS)
        adapter.report_status()
        for event in ("store", "lookup_and_lock", "load"):
            getattr(adapter, f"get_{event}_event_fd")()
        adapter.delete(KEYS)
        adapter.close()
    assert adapter.called >= {name for name, value in vars(kind).items() if not name.startswith("_") and callable(value)}


def test_lmcaches_registry_has_the_metrics_of_every_store(opened: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from kvpack.store import metrics

    registered: list[Any] = []
    client, parser = types.ModuleType("prometheus_client"), types.ModuleType("prometheus_client.parser")
    vars(client).update(REGISTRY=types.SimpleNamespace(register=registered.append))
    vars(parser).update(text_string_to_metric_families=parse_metrics)
    monkeypatch.setitem(sys.modules, "prometheus_client", client)
    monkeypatch.setitem(sys.modules, "prometheus_client.parser", parser)
    metrics.shared_collector.cache_clear()
    adapters = [opened(), opened(revision="other")]
    longer = types.SimpleNamespace(tensor=torch.randn(2, 2, 32, 64).bfloat16())
    adapters[0].submit_store_task(KEYS[:2], [*objects(1), longer])
    waited(adapters[0].pop_completed_store_tasks)
    adapters[1].submit_store_task(KEYS[:1], objects(1))
    waited(adapters[1].pop_completed_store_tasks)
    (collector,) = registered

    def saved() -> dict[tuple[str, ...], float]:
        (family,) = [one for one in collector.collect() if one.name == "kvpack_store_saved_chunks_total"]
        return {(sample.labels["adapter"], sample.labels["shape"]): sample.value for sample in family.samples}

    first, second = (str(adapter._number) for adapter in adapters)
    assert saved() == {(first, "bf16 2x2x16x64"): 1, (first, "bf16 2x2x32x64"): 1, (second, "bf16 2x2x16x64"): 1}
    adapters[0].close()
    assert set(saved()) == {(second, "bf16 2x2x16x64")}
    adapters[1].close()
    assert not list(collector.collect())
    metrics.shared_collector.cache_clear()


def test_options_are_checked(opened: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter, match=r"expected head_dim, location, recipe, revision \(LMCache's keys name a model"):
        opened(revision=None)
    with pytest.raises(InvalidParameter, match=r"the adapter got .*other"):
        opened(other=1)
    (tmp_path / "a file").write_bytes(b"")
    with pytest.raises(InvalidParameter, match="a file is not a folder: pass the path of a store"):
        opened(location=str(tmp_path / "a file"))
    with pytest.raises(InvalidParameter, match="lossless's streams words depend on the values"):
        opened(recipe="lossless")


def test_fused_objects_are_restored(opened: Callable[..., Any]) -> None:
    given = [types.SimpleNamespace(tensor=x.tensor.reshape(1, 2, 16, 128)) for x in objects(2)]
    layouts = {0: types.SimpleNamespace(shapes=[given[0].tensor.shape], dtypes=[torch.bfloat16])}
    for fused in (False, True):
        adapter = opened(fused=fused)
        adapter.submit_store_task(KEYS[:2], given)
        assert (next(iter(waited(adapter.pop_completed_store_tasks).values())) > 0) == fused
        number = adapter.submit_lookup_and_lock_task(KEYS[:2], layouts)
        assert waited(partial(adapter.query_lookup_and_lock_result, number)).bits == [fused] * 2
        found = [types.SimpleNamespace(tensor=torch.zeros_like(x.tensor)) for x in given]
        number = adapter.submit_load_task(KEYS[:2], found)
        assert waited(partial(adapter.query_load_result, number)).bits == [fused] * 2
        assert all(torch.equal(x.tensor, y.tensor) for x, y in zip(given, found, strict=True)) == fused
        adapter.close()


def test_a_failing_task_is_answered(opened: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    adapter = opened()
    strange = [types.SimpleNamespace(tensor=None)]
    number = adapter.submit_store_task(KEYS[:1], strange)
    assert waited(adapter.pop_completed_store_tasks)[number] == -1
    number = adapter.submit_load_task(KEYS[:1], strange)
    assert waited(lambda: adapter.query_load_result(number)).bits == [False]
    number = adapter.submit_lookup_and_lock_task(KEYS[:1], None)
    assert waited(lambda: adapter.query_lookup_and_lock_result(number)).bits == [False]
    assert "LMCache load: 1 of 1 objects failed; first error: AttributeError" in caplog.text

    def broken(keys: Any, *_: Any) -> None:
        raise OSError("no listener")

    adapter._notify_keys_accessed = broken
    number = adapter.submit_load_task(KEYS[:1], strange)
    assert waited(lambda: adapter.query_load_result(number)).bits == [False]
    assert "(load) failed: OSError: no listener" in caplog.text
    adapter.close()


def test_a_refused_object_does_not_affect_the_others_of_its_task(opened: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    """LMCache groups the objects of a task by model and rank, so the objects of a hybrid model have several layouts."""
    adapter = opened()
    states = types.SimpleNamespace(tensor=torch.zeros(3, 50))
    keys = [ObjectKey(b"a", object_group_id=1), ObjectKey(b"a"), ObjectKey(b"b", object_group_id=1), ObjectKey(b"b")]
    given = objects(2)
    number = adapter.submit_store_task(keys, [states, given[0], states, given[1]])
    # LMCache knows no part of a task.
    assert waited(adapter.pop_completed_store_tasks)[number] == -1
    assert "LMCache store: 2 of 4 objects failed; first error: InvalidParameter: the object is torch.float32 [3, 50]" in caplog.text
    layouts = {**LAYOUTS, 1: types.SimpleNamespace(shapes=[torch.Size([3, 50])], dtypes=[torch.float32])}
    number = adapter.submit_lookup_and_lock_task(keys, layouts)
    assert waited(lambda: adapter.query_lookup_and_lock_result(number)).bits == [False, True, False, True]
    found = objects(2, seed=5)
    number = adapter.submit_load_task(keys, [states, found[0], states, found[1]])
    assert waited(lambda: adapter.query_load_result(number)).bits == [False, True, False, True]
    assert all(torch.equal(one.tensor, source.tensor) for one, source in zip(found, given, strict=True))
    assert adapter.report_status()["refused"] == {f"{kind} InvalidParameter": 2 for kind in ("load", "lookup", "store")}
    adapter.close()


def test_states_are_stored_byte_for_byte_with_packed_keys_and_values(opened: Callable[..., Any], tmp_path: Path) -> None:
    """A hybrid model's states may have arbitrary bits. Values of another dtype with the same size count as missing."""
    states = [types.SimpleNamespace(tensor=torch.randn(3, 50)) for _ in range(2)]
    states[0].tensor[0, 0] = float("nan")
    keys = [ObjectKey(b"a", object_group_id=1), ObjectKey(b"a"), ObjectKey(b"b", object_group_id=1), ObjectKey(b"b")]
    given = [states[0], *objects(1), states[1], *objects(1, seed=1)]
    adapter = opened(recipe="octopus-4", others="raw")
    number = adapter.submit_store_task(keys, given)
    assert waited(adapter.pop_completed_store_tasks)[number] > 0
    adapter.close()
    layouts = {**LAYOUTS, 1: types.SimpleNamespace(shapes=[torch.Size([3, 50])], dtypes=[torch.float32])}
    adapter = opened(recipe="octopus-4", others="raw")
    number = adapter.submit_lookup_and_lock_task(keys, layouts)
    assert waited(lambda: adapter.query_lookup_and_lock_result(number)).bits == [True] * 4
    found = [types.SimpleNamespace(tensor=torch.zeros_like(one.tensor)) for one in given]
    number = adapter.submit_load_task(keys, found)
    assert waited(lambda: adapter.query_load_result(number)).bits == [True] * 4
    for one, own in zip(found[::2], states, strict=True):
        assert torch.equal(one.tensor.view(torch.int32), own.tensor.view(torch.int32))
    other = [types.SimpleNamespace(tensor=torch.zeros(6, 50, dtype=torch.bfloat16))]
    number = adapter.submit_load_task(keys[:1], other)
    assert waited(lambda: adapter.query_load_result(number)).bits == [False]
    adapter.close()
    # A process that has met no object yet finds both kinds.
    adapter = opened(recipe="octopus-4", others="raw")
    adapter.delete(keys)
    number = adapter.submit_lookup_and_lock_task(keys, layouts)
    assert waited(lambda: adapter.query_lookup_and_lock_result(number)).bits == [False] * 4
    adapter.close()


def test_lmcache_is_notified_of_stored_and_removed_bytes(opened: Callable[..., Any]) -> None:
    """LMCache's quotas depend on these sizes. If a sum never decreased, LMCache would delete every object."""
    adapter = opened()
    longer = types.SimpleNamespace(tensor=torch.randn(2, 2, 32, 64).bfloat16())
    done = []
    for _ in range(2):
        adapter.submit_store_task(KEYS[:2], [*objects(1), longer])
        done += waited(adapter.pop_completed_store_tasks).values()
    sizes = [store.codec.nbytes for store in adapter._stores.values()]
    assert len(set(sizes)) == 2
    assert done == [sum(sizes), 0]
    assert adapter.used == sum(sizes)
    adapter.delete([KEYS[0], KEYS[3]])
    assert adapter.used == sizes[1]
    adapter.delete(KEYS[:3])
    assert adapter.used == 0
    assert adapter.told == [("stored", 2), ("deleted", 2), ("deleted", 3)]
    adapter.close()


def test_looking_up_stored_objects_takes_two_requests(opened: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One request fetches the objects, and another records their use."""
    redis = pytest.importorskip("redis")

    def store(adapter: Any) -> None:
        adapter.submit_store_task(KEYS, objects(4))
        assert all(result >= 0 for result in waited(adapter.pop_completed_store_tasks).values())

    with redis_server.run_server(tmp_path) as server:
        adapter = opened(location=server.url)
        store(adapter)
        requests, send = [], redis.connection.AbstractConnection.send_packed_command

        def counted(*arguments: Any, **options: Any) -> Any:
            requests.append(arguments)
            return send(*arguments, **options)

        monkeypatch.setattr(redis.connection.AbstractConnection, "send_packed_command", counted)
        store(adapter)
        assert len(requests) == 2
        assert adapter.told == [("stored", 4)]
        adapter.close()


def test_lmcache_is_notified_of_evictions(opened: Callable[..., Any], tmp_path: Path) -> None:
    """LMCache counts the bytes of each salt. Without these notices, it would delete objects that still exist."""
    adapter = opened()
    assert Chunks(adapter).store([0]) == [True]
    (store,) = adapter._stores.values()
    size = store.codec.nbytes
    adapter.close()
    adapter = opened(max_bytes=8 * size)
    given = objects(1)
    for number in range(64):
        adapter.submit_store_task([ObjectKey(bytes([1, number]))], given)
        waited(adapter.pop_completed_store_tasks)
        there = sum(adapter._contains([ObjectKey(bytes([1, earlier])) for earlier in range(number + 1)]))
        assert there * size <= adapter.used <= (there + 2) * size
    # All that is there and was told of, and one of another process.
    adapter.delete([*(ObjectKey(bytes([1, number])) for number in range(64)), KEYS[0]])
    assert adapter.used == 0
    assert not adapter._accounts._reported
    adapter.close()


@pytest.mark.parametrize("ask", ["lookup", "load"])
def test_misses_are_reported_for_their_object(
    ask: str, opened: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = opened()
    engine = Chunks(adapter)
    assert engine.store([0, 1]) == [True, True]
    (store,) = adapter._stores.values()
    size = store.codec.nbytes
    missed = engine.found if ask == "lookup" else engine.load
    assert missed([0, 2]) == [True, False]
    assert adapter.used == 2 * size
    with monkeypatch.context() as broken:
        FaultyOs(("open",), 1, errno.EIO, sticky=True).install(broken)
        assert missed([0, 1]) == [False, False]
    assert adapter.used == 2 * size
    store.delete([key_bytes(KEYS[0])])
    assert missed([0, 1]) == [False, True]
    assert adapter.used == size
    # It is told again of what is stored again, and once.
    assert engine.store([0, 0]) == [True, True]
    assert adapter.used == 2 * size
    adapter.close()


class Chunks:
    """A simulated engine that drives the adapter with LMCache's own calls."""

    def __init__(self, adapter: Any) -> None:
        self._adapter, self._given = adapter, objects(4)

    def store(self, chunks: Any) -> list[bool]:
        # A task is stored as a whole or not, so each has one object.
        numbers = [self._adapter.submit_store_task([KEYS[chunk]], [self._given[chunk]]) for chunk in chunks]
        done: dict[int, int] = {}
        while len(done) < len(numbers):
            done |= waited(self._adapter.pop_completed_store_tasks)
        return [done[number] >= 0 for number in numbers]

    def found(self, chunks: Any) -> list[bool]:
        number = self._adapter.submit_lookup_and_lock_task([KEYS[chunk] for chunk in chunks], LAYOUTS)
        return list(waited(lambda: self._adapter.query_lookup_and_lock_result(number)).bits)

    def load(self, chunks: Any) -> list[bool]:
        targets = [types.SimpleNamespace(tensor=torch.zeros(2, 2, 16, 64).bfloat16()) for _ in chunks]
        number = self._adapter.submit_load_task([KEYS[chunk] for chunk in chunks], targets)
        loaded: list[bool] = waited(lambda: self._adapter.query_load_result(number)).bits
        for chunk, there, target in zip(chunks, loaded, targets, strict=True):
            assert torch.equal(target.tensor, self._given[chunk].tensor) if there else not target.tensor.any()
        return loaded

    def counters(self) -> dict[str, Any]:
        counters: dict[str, Any] = self._adapter.report_status()["stores"][0]
        return counters

    def close(self) -> None:
        self._adapter.close()


@pytest.mark.parametrize("condition", CONDITIONS, ids=lambda condition: condition.__name__)
def test_a_damaged_folder_causes_only_misses(
    condition: Any, opened: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    condition(lambda folder=tmp_path, **options: Chunks(opened(location=str(folder), threads=1, **options)), tmp_path, monkeypatch)


def test_objects_are_misses_after_a_restart_with_other_settings(opened: Callable[..., Any]) -> None:
    """LMCache's key contains the model's name, the rank, the number of ranks, and the salt.

    The adapter must distinguish all other settings itself.
    """
    adapter = opened()
    assert Chunks(adapter).store([0]) == [True]
    adapter.close()
    shapes = {
        "another dtype": (2, 2, 16, 64),
        "fewer heads": (2, 2, 16, 32),
        "another block size": (2, 2, 32, 64),
        "fewer layers": (2, 1, 16, 64),
    }
    for changes in ({}, {"revision": "other"}, {"head_dim": 64}, {"recipe": "fp16"}, {"kv_dtype": "auto"}):
        adapter = opened(**changes)
        assert Chunks(adapter).load([0]) == [not changes]
        for name, shape in shapes.items():
            target = types.SimpleNamespace(tensor=torch.zeros(shape, dtype=torch.float16 if name == "another dtype" else torch.bfloat16))
            number = adapter.submit_load_task(KEYS[:1], [target])
            assert waited(partial(adapter.query_load_result, number)).bits == [False]
            assert not target.tensor.any()
        for key in (
            ObjectKey(KEYS[0].chunk_hash, kv_rank=1),
            ObjectKey(KEYS[0].chunk_hash, "another"),
            ObjectKey(KEYS[0].chunk_hash, cache_salt="t"),
        ):
            number = adapter.submit_lookup_and_lock_task([key], LAYOUTS)
            assert waited(partial(adapter.query_lookup_and_lock_result, number)).bits == [False]
        adapter.close()


def test_objects_of_every_shape_are_deleted(opened: Callable[..., Any]) -> None:
    adapter = opened()
    longer = types.SimpleNamespace(tensor=torch.randn(2, 2, 32, 64).bfloat16())
    adapter.submit_store_task(KEYS[:2], [*objects(1), longer])
    waited(adapter.pop_completed_store_tasks)
    adapter.delete(KEYS[:2])
    number = adapter.submit_load_task(KEYS[:2], [*objects(1), longer])
    assert waited(lambda: adapter.query_load_result(number)).bits == [False, False]
    adapter.close()


def test_objects_of_another_dtype_are_misses(opened: Callable[..., Any]) -> None:
    """LMCache receives an engine's 8-bit floats as bytes."""
    given = [types.SimpleNamespace(tensor=torch.randint(256, (2, 2, 16, 64), dtype=torch.uint8))]
    for kv_dtype, stored, found in ((None, -1, False), ("fp8_e4m3", 1, True), ("fp8_e5m2", 0, False)):
        adapter = opened(kv_dtype=kv_dtype)
        if stored:
            number = adapter.submit_store_task(KEYS[:1], given)
            assert (waited(adapter.pop_completed_store_tasks)[number] > 0) == (stored > 0)
        number = adapter.submit_load_task(KEYS[:1], given)
        assert waited(partial(adapter.query_load_result, number)).bits == [found]
        adapter.close()


def test_recipes_with_layers_are_refused(opened: Callable[..., Any]) -> None:
    with pytest.raises(InvalidParameter, match="selects layers with 'boundary-1', but LMCache's objects do not record which layers"):
        opened(recipe="octopus-4;boundary-1")


def test_a_recipe_uses_the_basis_of_the_complete_model(
    opened: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An object with as many layers and heads as the basis belongs to the complete model, which LMCache's keys name."""
    path = tmp_path / "m.kvbasis"
    path.write_bytes(random_basis({(layer, side): (2, 32) for layer in range(2) for side in "kv"}, 2, model={"name": "folder/m"}))
    with pytest.raises(MissingBasis, match="the recipe 'kv=klt:bits=4' needs a basis: set basis to the path"):
        opened(recipe="kv=klt:bits=4")
    with pytest.raises(InvalidParameter, match="the recipe 'raw' does not use one: omit basis"):
        opened(basis=str(path))
    adapter = opened(recipe="kv=klt:bits=4", basis=str(path))
    key, given = ObjectKey(b"a", "folder/m"), objects(1)
    adapter.submit_store_task([key], given)
    assert next(iter(waited(adapter.pop_completed_store_tasks).values())) > 0
    found = objects(1, seed=1)
    number = adapter.submit_load_task([key], found)
    assert waited(lambda: adapter.query_load_result(number)).bits == [True]
    assert not torch.equal(found[0].tensor, objects(1, seed=1)[0].tensor)
    for other, layers, heads, message in (
        (ObjectKey(b"b", "another"), 2, 2, "whose name is 'folder/m', but the name of the cache's model is 'another'"),
        (ObjectKey(b"b", "folder/m"), 1, 2, "is a basis for a model with 2 layers, but the cache has 1"),
        (ObjectKey(b"b", "folder/m"), 2, 1, "keys of layer 0 of the basis"),
    ):
        part = types.SimpleNamespace(tensor=torch.randn(2, layers, 16, heads * 32).bfloat16())
        adapter.submit_store_task([other], [part])
        assert list(waited(adapter.pop_completed_store_tasks).values()) == [-1]
        assert message in caplog.text
    adapter.close()
    # Another basis is another recipe.
    path.write_bytes(random_basis({(layer, side): (2, 32) for layer in range(2) for side in "kv"}, 2, seed="other"))
    adapter = opened(recipe="kv=klt:bits=4", basis=str(path))
    number = adapter.submit_load_task([ObjectKey(b"a", "x")], found)
    assert waited(lambda: adapter.query_load_result(number)).bits == [False]
    adapter.close()


def test_objects_of_a_task_are_evicted_last_first(opened: Callable[..., Any]) -> None:
    adapter = opened()
    for kind in ("store", "load"):
        number = getattr(adapter, f"submit_{kind}_task")(KEYS, objects(4))
        waited(adapter.pop_completed_store_tasks if kind == "store" else lambda number=number: adapter.query_load_result(number))
        (store,) = adapter._stores.values()
        used = {stored.key: stored.used_ns for stored in store._backend.list()}
        times = [used[name] for name in store._entry_keys([key_bytes(key) for key in KEYS])]
        assert times == sorted(times, reverse=True)
    adapter.close()


def key_bytes(key: ObjectKey) -> bytes:
    """Return kvpack's name for an object. The module is imported here, because it needs LMCache's names."""
    found: bytes = sys.modules["kvpack.integrations.lmcache.adapter"].key_bytes(key)
    return found


@pytest.mark.parametrize("encrypted", [False, True])
def test_objects_can_be_deleted_after_a_restart(encrypted: bool, opened: Callable[..., Any], tmp_path: Path) -> None:
    """The new process has not seen any object, and LMCache's keys do not contain the layout."""
    options = {}
    if encrypted:
        pytest.importorskip("cryptography")
        (tmp_path / "keys").write_text(f"a {bytes(32).hex()}")
        (tmp_path / "keys").chmod(0o600)
        options = {"encryption_key_file": str(tmp_path / "keys")}
    adapter = opened(**options)
    assert Chunks(adapter).store([0, 1, 2]) == [True] * 3
    adapter.close()
    adapter = opened(**options)
    adapter.delete(KEYS[:2])
    assert Chunks(adapter).found([0, 1, 2]) == [False, False, True]
    adapter.delete(KEYS[:3])
    assert Chunks(adapter).found([2]) == [False]
    adapter.close()
