"""KvpackL2Adapter, an L2 adapter that stores LMCache's objects in a PageStore. Each object is checked and evicted independently."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count, islice
from threading import Lock, RLock
from typing import Any

import torch
from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.platform import create_event_notifier

from kvpack.formats.errors import InvalidParameter
from kvpack.identity.identity import Identity
from kvpack.pages.buffer import PageBuffer
from kvpack.pages.codec import key_digest
from kvpack.pages.geometry import DTYPES
from kvpack.store.catalog import row_descriptions
from kvpack.store.counters import Counters
from kvpack.store.encryption import read_key_file
from kvpack.store.keys import page_key
from kvpack.store.locations import open_for_identity
from kvpack.store.metrics import shared_collector
from kvpack.store.options import StoreOptions
from kvpack.store.page_store import PageStore
from kvpack.store.redaction import redacted_location

from .layouts import adapter_recipe, as_page_buffer, byte_geometry, check_model, is_fused, keeps_other_objects, key_bytes, object_geometry

OBJECTS_PER_LOOK = 4
"""Number of reported objects that are checked again for each newly stored object. LMCache's count is then at most about 1/7 too high."""


class StoredObjects:
    """A record of the stored objects, which notifies the listeners of ``adapter`` when an object is stored or deleted.

    There is one notification per event, with the object's size when it was stored. ``contains`` returns a bool for each object: True if it
    is stored, or if that is unknown. Safe to use from any thread.
    """

    def __init__(self, adapter: Any, contains: Callable[[list[Any]], list[bool]]) -> None:
        self._adapter, self._contains = adapter, contains
        self._reported: dict[Any, int] = {}
        # Reentrant, because a listener may delete the objects that it is notified about.
        self._lock = RLock()

    def report_stored(self, sizes: Mapping[Any, int]) -> None:
        """Report newly stored objects, unless they have already been reported."""
        with self._lock:
            new = {key: size for key, size in sizes.items() if key not in self._reported}
            self._reported |= new
            if new:
                self._adapter._notify_keys_stored([*new], [*new.values()])

    def report_deleted(self, keys: Iterable[Any]) -> None:
        """Report the objects among ``keys`` that are no longer stored, including objects that another process had stored."""
        with self._lock:
            names = [*keys]
            missing = [key for key, present in zip(names, self._contains(names), strict=True) if not present]
            if missing:
                self._adapter._notify_keys_deleted(missing, [self._reported.pop(key, 0) for key in missing])

    def report_missing(self, keys: Iterable[Any]) -> None:
        """Report the objects among ``keys`` that were reported as stored but no longer are."""
        with self._lock:
            self.report_deleted([key for key in keys if key in self._reported])

    def report_next_missing(self, count: int) -> None:
        """Look up the next ``count`` reported objects, and report those that are no longer stored."""
        with self._lock:
            candidates = list(islice(self._reported, count))
            for key in candidates:
                self._reported[key] = self._reported.pop(key)
            self.report_deleted(candidates)


log = logging.getLogger("kvpack")
NEEDED = {"location", "recipe", "head_dim", "revision"}
OPTIONAL = {"basis", "threads", "max_bytes", "encryption_key_file", "kv_dtype", "fused", "others"}
LOOK_SECONDS = 600.0
"""Minimum time in seconds between searches of all entries for layouts that are new to this process, to delete their objects."""
_ADAPTERS = count()
"""Generates the numbers of this process's adapters, which label their metrics."""


class KvpackL2Adapter(L2AdapterInterface):  # type: ignore[misc]
    """An L2 adapter that stores LMCache's objects as rows in ``location``. ``params`` are the plugin's ``adapter_params``.

    ``recipe``, ``basis``, ``head_dim``, ``revision``, ``kv_dtype`` and ``fused`` define how objects are packed. With ``others``, objects
    that are not keys and values, such as recurrent states, are kept byte for byte. ``threads`` is the number of tasks that run
    concurrently. ``max_bytes`` and ``encryption_key_file`` are as for a store. The store evicts entries itself.
    """

    def __init__(self, params: Mapping[str, Any], **_: Any) -> None:
        if set(params) - NEEDED - OPTIONAL or not set(params) >= NEEDED:
            raise InvalidParameter(
                f"the adapter got {', '.join(sorted(params)) or 'no options'}, expected {', '.join(sorted(NEEDED))} (LMCache's keys name "
                f"a model but not its weights), and optionally {', '.join(sorted(OPTIONAL))}"
            )
        super().__init__()
        self._kv_dtype, self._fused = str(params.get("kv_dtype", "")), is_fused(params)
        self._location, self._head_dim, self._max_bytes = params["location"], int(params["head_dim"]), params.get("max_bytes")
        self._recipe = adapter_recipe(str(params["recipe"]), params.get("basis"), self._head_dim, self._kv_dtype)
        self._encryption = read_key_file(params["encryption_key_file"]) if params.get("encryption_key_file") else None
        basis = self._recipe.basis
        # One identity per dtype, so that objects of the same size but a different dtype are not hits.
        self._others = {
            dtype: Identity("lmcache", "raw", weights=str(params["revision"]), dtype=dtype, extra="others")
            for dtype in (DTYPES if keeps_other_objects(params) else ())
        }
        self._identity = Identity(
            # LMCache's keys name the model, and a basis belongs to one model.
            "lmcache" if basis is None else basis.model.get("name", "lmcache"),
            self._recipe,
            weights=str(params["revision"]),
            dtype=self._kv_dtype,
            extra=f"head_dim={self._head_dim}",
        )
        self._check_location()
        self._stores: dict[Any, PageStore] = {}
        self._descriptions: set[tuple[bytes, bytes]] = set()
        self._looked: float | None = None
        self._accounts = StoredObjects(self, self._contains)
        self._refused = Counters(report=lambda operation, error: None)
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
        """Start storing objects. Existing objects are kept. A rejected object does not affect the others."""
        return self._submit("store", lambda: self._store_objects(keys, objects), L2StoreResult(False, 0))

    def pop_completed_store_tasks(self) -> dict[int, Any]:
        with self._lock:
            done, self._done["store"] = self._done["store"], {}
        return done

    def submit_lookup_and_lock_task(self, keys: list[Any], group_layout_descs: Any) -> int:
        """Start looking up objects. They are not locked. If one is evicted before it is loaded, it is a miss."""
        return self._submit("lookup", lambda: self._lookup_result(keys, group_layout_descs), Bitmap(len(keys)))

    def query_lookup_and_lock_result(self, task_id: int) -> Any:
        return self._pop_task("lookup", task_id)

    def submit_unlock(self, keys: list[Any]) -> None:
        """Do nothing, because objects are never locked."""

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Start loading objects. A damaged or rejected object does not affect the others."""
        return self._submit("load", lambda: self._load_objects(keys, objects), Bitmap(len(keys)))

    def query_load_result(self, task_id: int) -> Any:
        return self._pop_task("load", task_id)

    def delete(self, keys: list[Any]) -> None:
        """Remove objects in every layout, including those stored by other processes or before a restart."""
        names = [key_bytes(key) for key in keys]
        if sum(store.delete(names) for store in self._open_stores()) < len(names):
            self._delete_unopened(names)
        self._accounts.report_deleted(keys)

    def _delete_unopened(self, names: list[bytes]) -> None:
        """Remove objects whose layouts are not open here, but exist at the location.

        LMCache's keys do not contain the layout, so all entries are inspected from time to time.
        """
        options = StoreOptions(max_bytes=self._max_bytes, encryption=self._encryption)
        backend, cipher, _ = open_for_identity(self._location, self._identity, self._refused, options, skip_sweep=True)
        try:
            with self._lock:
                if self._looked is None or time.monotonic() - self._looked > LOOK_SECONDS:
                    digests = [self._identity.digest, *(other.digest for other in self._others.values())]
                    self._descriptions = {(digest, one) for digest in digests for one in row_descriptions(backend, digest, cipher)}
                    self._looked = time.monotonic()
                descriptions = [*self._descriptions]
            for digest, description in descriptions:
                backend.delete([page_key(digest, key_digest(name), description) for name in names])
        finally:
            backend.close()

    def report_status(self) -> dict[str, Any]:
        """Return the counters of the stores, one for each object shape, and the rejected objects by operation and reason."""
        counters = [store.counters() for store in self._open_stores()]
        refused = self._refused.as_dict()["faults"]
        location = redacted_location(self._location)
        return {"is_healthy": True, "type": "KvpackL2Adapter", "location": location, "stores": counters, "refused": refused}

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
                # Report any error as a failure, because LMCache waits for a result.
                log.warning("LMCache's task %d (%s) failed: %s: %s", number, kind, type(error).__name__, error)
                result = failed
            with self._lock:
                self._done[kind][number] = result
            self._events[kind].notify()

        self._pool.submit(run)
        return number

    def _pop_task(self, kind: str, task_id: int) -> Any:
        with self._lock:
            return self._done[kind].pop(task_id, None)

    def _open_stores(self) -> list[PageStore]:
        with self._lock:
            return list(self._stores.values())

    def _contains(self, keys: list[Any]) -> list[bool]:
        """Return a bool for each object: True if it is stored in any layout, or if a store could not be read."""
        result = [False] * len(keys)
        names = [key_bytes(key) for key in keys]
        for store in self._open_stores():
            before = store.counters()["faults"]
            present = store.contains(names)
            if store.counters()["faults"] != before:
                return [True] * len(keys)
            result = [old or new for old, new in zip(result, present, strict=True)]
        return result

    def _check_location(self) -> None:
        """Raise InvalidParameter, or the backend's error, if the location cannot be used. This is called before any object arrives."""
        options = StoreOptions(max_bytes=self._max_bytes, encryption=self._encryption)
        open_for_identity(self._location, self._identity, Counters(), options, skip_sweep=True).backend.close()

    def _get_store(self, shape: Sequence[int], dtype: torch.dtype) -> PageStore:
        identity = self._identity
        try:
            geometry = object_geometry(shape, dtype, self._head_dim, self._kv_dtype, self._fused)
        except InvalidParameter:
            if not self._others:
                raise
            geometry, name = byte_geometry(shape, dtype)
            identity = self._others[name]
        with self._lock:
            if (identity, geometry) not in self._stores:
                store = PageStore(
                    self._location,
                    identity,
                    geometry,
                    max_bytes=self._max_bytes,
                    encryption=self._encryption,
                )
                self._stores[identity, geometry] = store
                if (collector := shared_collector()) is not None:
                    shape_text = f"{geometry.dtype} {'x'.join(map(str, shape))}"
                    collector.add(store, {"adapter": str(self._number), "shape": shape_text})
            return self._stores[identity, geometry]

    def _store_objects(self, keys: list[Any], objects: list[Any]) -> Any:
        new: dict[Any, int] = {}

        def put(store: PageStore, indices: list[int], pages: list[PageBuffer]) -> list[bool]:
            stored, put_now = store.put_new([key_bytes(keys[number]) for number in indices], pages, [0] * len(indices))
            new.update({keys[number]: store.codec.nbytes for number, is_new in zip(indices, put_now, strict=True) if is_new})
            return stored

        stored = self._map_objects("store", keys, lambda number: self._find_page(keys[number], objects[number]), put)
        self._accounts.report_stored(new)
        if self._max_bytes is not None:
            self._accounts.report_next_missing(OBJECTS_PER_LOOK * len(new))
        return L2StoreResult(all(stored), sum(new.values()))

    def _lookup_result(self, keys: list[Any], layouts: Any) -> Any:
        def find_store(index: int) -> tuple[PageStore, None] | None:
            layout = layouts.get(keys[index].object_group_id)
            return None if layout is None or len(layout.shapes) != 1 else (self._get_store(layout.shapes[0], layout.dtypes[0]), None)

        def find(store: PageStore, indices: list[int], _: Any) -> list[bool]:
            return store.contains([key_bytes(keys[number]) for number in indices])

        result = self._map_objects("lookup", keys, find_store, find)
        self._accounts.report_missing([key for key, present in zip(keys, result, strict=True) if not present])
        return _to_bitmap(result)

    def _load_objects(self, keys: list[Any], objects: list[Any]) -> Any:
        def load(store: PageStore, indices: list[int], pages: list[PageBuffer]) -> list[bool]:
            return store.get_into([key_bytes(keys[number]) for number in indices], pages, [0] * len(indices))

        loaded = self._map_objects("load", keys, lambda number: self._find_page(keys[number], objects[number]), load)
        self._notify_keys_accessed([key for key, success in zip(keys, loaded, strict=True) if success])
        self._accounts.report_missing([key for key, success in zip(keys, loaded, strict=True) if not success])
        return _to_bitmap(loaded)

    def _find_page(self, key: Any, item: Any) -> tuple[PageStore, PageBuffer]:
        """Return the store of an object, and a view of the object as a page."""
        check_model(self._recipe, key)
        store = self._get_store(item.tensor.shape, item.tensor.dtype)
        return store, as_page_buffer(store.codec.geometry, item.tensor)

    def _map_objects(
        self,
        kind: str,
        keys: list[Any],
        find_page: Callable[[int], tuple[PageStore, Any] | None],
        work: Callable[[PageStore, list[int], list[Any]], list[bool]],
    ) -> list[bool]:
        """Call ``work`` once per store, with all objects in this store, and return its result for each object.

        ``find_page`` returns the store and the page of an object number, or None for a missing object. If it raises an error, only this
        object is rejected, because a task of LMCache may contain objects of several layouts.
        """
        done = [False] * len(keys)
        refused: list[Exception] = []
        groups: dict[PageStore, list[tuple[int, Any]]] = {}

        def refuse(error: Exception, count: int) -> None:
            for _ in range(count):
                self._refused.fault(kind, error)
                refused.append(error)

        for number in range(len(keys)):
            try:
                given = find_page(number)
            except Exception as error:
                refuse(error, 1)
                continue
            if given is not None:
                groups.setdefault(given[0], []).append((number, given[1]))
        for store, members in groups.items():
            numbers = [number for number, _ in members]
            try:
                answers = work(store, numbers, [page for _, page in members])
            except Exception as error:
                refuse(error, len(members))
                continue
            for number, answer in zip(numbers, answers, strict=True):
                done[number] = answer
        if refused:
            first = refused[0]
            log.warning(
                "LMCache %s: %d of %d objects failed; first error: %s: %s",
                kind,
                len(refused),
                len(keys),
                type(first).__name__,
                first,
            )
        return done


def _to_bitmap(flags: list[bool]) -> Any:
    bitmap = Bitmap(len(flags))
    for number, flag in enumerate(flags):
        if flag:
            bitmap.set(number)
    return bitmap
