"""KvpackL2Adapter: an L2 adapter of LMCache over a PageStore, in which every object is stored, checked and lost alone."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from threading import Lock
from typing import TYPE_CHECKING, Any

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.platform import create_event_notifier

from kvpack.formats.errors import InvalidParameter
from kvpack.store.identity import Identity
from kvpack.store.key_files import read_key_file
from kvpack.store.metrics import shared_collector
from kvpack.store.page_store import PageStore

from .layouts import check_model, geometry_of, key_bytes, pages_of, recipe_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

NEEDED = {"location", "recipe", "head_dim", "revision"}
OPTIONAL = {"basis", "threads", "max_bytes", "encryption_key_file", "kv_dtype"}
_ADAPTERS = count()
"""The numbers of the adapters of this process, which are labels of their metrics."""


class KvpackL2Adapter(L2AdapterInterface):  # type: ignore[misc]
    """Objects of LMCache as rows in ``location``, for ``{"type": "plugin", ...}``; ``params`` are the plugin's ``adapter_params``.

    ``recipe``, ``basis``, ``head_dim``, ``revision`` and ``kv_dtype`` are those of the serde; ``threads`` objects are packed at a time;
    ``max_bytes`` and ``encryption_key_file`` are those of a store, which evicts by itself. Raises InvalidParameter.
    """

    def __init__(self, params: Mapping[str, Any], **_: Any) -> None:
        if set(params) - NEEDED - OPTIONAL or not set(params) >= NEEDED:
            raise InvalidParameter(
                f"the adapter got {', '.join(sorted(params)) or 'no options'}, expected {', '.join(sorted(NEEDED))} (LMCache's keys name a "
                f"model, and not its weights), and may get {', '.join(sorted(OPTIONAL))}"
            )
        super().__init__()
        self._recipe = recipe_of(str(params["recipe"]), params.get("basis"))
        self._kv_dtype = str(params.get("kv_dtype", ""))
        self._location, self._head_dim, self._max_bytes = params["location"], int(params["head_dim"]), params.get("max_bytes")
        self._encryption = read_key_file(params["encryption_key_file"]) if params.get("encryption_key_file") else None
        basis = self._recipe.basis
        self._identity = Identity(
            # LMCache's keys name the model, and a basis is one of a single model.
            "lmcache" if basis is None else basis.model.get("name", "lmcache"),
            self._recipe.text,
            weights=str(params["revision"]),
            dtype=self._kv_dtype,
            extra=f"head_dim={self._head_dim}",
        )
        self._stores: dict[Any, PageStore] = {}
        self._lock, self._numbers, self._number = Lock(), count(), next(_ADAPTERS)
        self._pool = ThreadPoolExecutor(int(params.get("threads", 2)), thread_name_prefix="kvpack-lmcache")
        self._events = {kind: create_event_notifier() for kind in ("store", "lookup", "load")}
        self._done: dict[str, dict[int, Any]] = {kind: {} for kind in self._events}

    def get_store_event_fd(self) -> int:
        return int(self._events["store"].fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        return int(self._events["lookup"].fileno())

    def get_load_event_fd(self) -> int:
        return int(self._events["load"].fileno())

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Begin to store objects; those that are there are kept."""
        return self._submit("store", lambda: self._stored(keys, objects), L2StoreResult(False, 0))

    def pop_completed_store_tasks(self) -> dict[int, Any]:
        with self._lock:
            done, self._done["store"] = self._done["store"], {}
        return done

    def submit_lookup_and_lock_task(self, keys: list[Any], group_layout_descs: Any) -> int:
        """Begin to look for objects, which nothing locks: one that is evicted before it is loaded is a miss."""
        return self._submit("lookup", lambda: self._found(keys, group_layout_descs), Bitmap(len(keys)))

    def query_lookup_and_lock_result(self, task_id: int) -> Any:
        return self._popped("lookup", task_id)

    def submit_unlock(self, keys: list[Any]) -> None:
        """Nothing was locked."""

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Begin to load objects; one that is damaged is missing alone."""
        return self._submit("load", lambda: self._loaded(keys, objects), Bitmap(len(keys)))

    def query_load_result(self, task_id: int) -> Any:
        return self._popped("load", task_id)

    def delete(self, keys: list[Any]) -> None:
        with self._lock:
            stores = list(self._stores.values())
        for store in stores:
            store.delete([key_bytes(key) for key in keys])
        self._notify_keys_deleted(keys, [0] * len(keys))

    def report_status(self) -> dict[str, Any]:
        """The counters of the stores, one for each shape of objects."""
        with self._lock:
            counters = [store.counters() for store in self._stores.values()]
        return {"is_healthy": True, "type": "KvpackL2Adapter", "location": str(self._location), "stores": counters}

    def close(self) -> None:
        self._pool.shutdown()
        for store in self._stores.values():
            if (collector := shared_collector()) is not None:
                collector.remove(store)
            store.close()
        for event in self._events.values():
            event.close()

    def _submit(self, kind: str, work: Callable[[], Any], failed: Any) -> int:
        with self._lock:
            number = next(self._numbers)

        def run() -> None:
            try:
                result = work()
            except Exception as error:
                # Whatever it was, LMCache waits for an answer.
                logging.getLogger("kvpack").warning("LMCache's task %d (%s) failed: %s: %s", number, kind, type(error).__name__, error)
                result = failed
            with self._lock:
                self._done[kind][number] = result
            self._events[kind].notify()

        self._pool.submit(run)
        return number

    def _popped(self, kind: str, number: int) -> Any:
        with self._lock:
            return self._done[kind].pop(number, None)

    def _store_of(self, shape: Sequence[int], dtype: torch.dtype) -> PageStore:
        """The store of objects of one layout. Raises InvalidShape and InvalidParameter."""
        geometry = geometry_of(shape, dtype, self._head_dim, self._kv_dtype)
        with self._lock:
            if geometry not in self._stores:
                store = PageStore(
                    self._location,
                    self._identity,
                    geometry,
                    max_bytes=self._max_bytes,
                    encryption=self._encryption,
                    basis=self._recipe.basis,
                )
                self._stores[geometry] = store
                if (collector := shared_collector()) is not None:
                    shape_text = f"{geometry.dtype} {'x'.join(map(str, shape))}"
                    collector.add(store, {"adapter": str(self._number), "shape": shape_text})
            return self._stores[geometry]

    def _stored(self, keys: list[Any], objects: list[Any]) -> Any:
        stored, size = [], 0
        for key, given in zip(keys, objects, strict=True):
            check_model(self._recipe, key)
            store = self._store_of(given.tensor.shape, given.tensor.dtype)
            if store.put([key_bytes(key)], pages_of(store.codec.geometry, given.tensor), [0]) == [True]:
                stored.append(key)
                size += store.codec.nbytes
        self._notify_keys_stored(stored, [size // max(1, len(stored))] * len(stored))
        return L2StoreResult(len(stored) == len(keys), size)

    def _found(self, keys: list[Any], layouts: Any) -> Any:
        found = Bitmap(len(keys))
        for number, key in enumerate(keys):
            layout = layouts.get(key.object_group_id)
            if layout is not None and len(layout.shapes) == 1:
                store = self._store_of(layout.shapes[0], layout.dtypes[0])
                if store.present([key_bytes(key)]) == [True]:
                    found.set(number)
        return found

    def _loaded(self, keys: list[Any], objects: list[Any]) -> Any:
        loaded, there = Bitmap(len(keys)), []
        for number, (key, target) in enumerate(zip(keys, objects, strict=True)):
            check_model(self._recipe, key)
            store = self._store_of(target.tensor.shape, target.tensor.dtype)
            if store.get_into([key_bytes(key)], pages_of(store.codec.geometry, target.tensor), [0]) == [True]:
                loaded.set(number)
                there.append(key)
        self._notify_keys_accessed(there)
        return loaded
