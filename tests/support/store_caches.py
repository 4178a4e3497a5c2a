"""Small caches, prompts and identities that several tests of the store use."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

import kvpack
from kvpack.cache import files
from kvpack.file import container
from kvpack.store import breaker
from support.caches import random_pairs, unpack_all

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    import pytest

CHUNK = 32
IDENTITY = kvpack.Identity("model", "kivi-2", weights="w1", dtype="bfloat16", tenant="tenant")
UNIFORM_IDENTITY = replace(IDENTITY, recipe="kivi-2;raw=0")
"""An identity whose recipe has no raw tokens, so that all entries have the same size."""
KEYS = {"k": bytes(range(32))}
OTHER_KEYS = {"other": bytes(32)}


def prompt(chunks: int, first: int = 0, seed: int = 0) -> list[int]:
    """Return the token ids of ``chunks`` chunks and 5 more tokens. The first ``first`` chunks are the same for every seed."""
    shared = list(range(CHUNK * min(first, chunks)))
    own = [1000 * (1 + seed) + n for n in range(CHUNK * (chunks - min(first, chunks)) + 5)]
    return shared + own


@lru_cache(64)
def cache(tokens: int, recipe: str = "kivi-2", seed: int = 0, layers: int = 2) -> kvpack.Cache:
    return kvpack.pack(random_pairs(layers, tokens, dims=(32, 32), seed=seed), recipe)


def open_store(folder: Path | str, identity: kvpack.Identity = IDENTITY, **options: Any) -> kvpack.Store:
    return kvpack.Store(folder, identity, **{"chunk": CHUNK, **options})


def save(store: kvpack.Store, ids: list[int], seed: int = 0) -> kvpack.Cache:
    """Save a cache of all ``ids`` and return it."""
    whole = cache(len(ids), store.identity.recipe, seed)
    assert store.save(ids, whole) == len(ids) // CHUNK * CHUNK
    return whole


def is_same_prefix(prefix: kvpack.Cache | None, cache: kvpack.Cache) -> bool:
    """Return True if ``prefix`` is a prefix of ``cache`` with the same values."""
    assert prefix is not None
    return all(torch.equal(a, b[:, :, : prefix.tokens]) for a, b in zip(unpack_all(prefix), _dense(cache), strict=True))


@lru_cache(64)
def _dense(cache: kvpack.Cache) -> list[torch.Tensor]:
    return unpack_all(cache)


def entries(folder: Path | str) -> list[str]:
    """Return the paths of all entries in a directory."""
    folders = [(parent, names) for parent, _, names in os.walk(folder) if len(os.path.basename(parent)) == 1]
    return sorted(os.path.join(parent, name) for parent, names in folders for name in names)


def entry_of(store: kvpack.Store, ids: list[int], number: int) -> str:
    """Return the path of the entry for chunk ``number``."""
    (path,) = (path for path in entries(store.location) if path.endswith(store.keys(ids)[number].hex()))
    return path


def check_death_and_return(server: Any, opened: Callable[[], kvpack.Store], monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a killed server causes misses and gets no requests, and that the store works when the server is back, empty."""
    monkeypatch.setattr(breaker, "PAUSE_SECONDS", 0.2)
    store = opened()
    ids = prompt(3)
    whole = save(store, ids)
    server.kill()
    try:
        assert store.load(ids) == (0, None)
        assert store.save(ids, whole) == 0
        assert store.match(ids) == store.pin(ids) == store.delete(ids) == 0
        assert store.stats()["entries"] == 0
        faults = store.counters()["faults"]
        assert any(" CircuitOpen" in fault for fault in faults), faults
    finally:
        server.start()
    backend: Any = store._backend
    its = backend._client.breaker if hasattr(backend, "_client") else backend._breaker
    while not its.allows_request():
        time.sleep(0.01)
    its.record_success()
    assert store.match(ids) == 0
    assert store.save(ids, whole) == 3 * CHUNK
    assert is_same_prefix(store.load(ids)[1], whole)


def check_hits_of_an_unsteady_server(server: Any, opened: Callable[[], kvpack.Store], *, steps: int, seconds: float) -> None:
    """Save and load in three threads while a server is killed, started, paused and continued.

    One of these happens every ``seconds`` seconds.
    """
    whole = cache(4 * CHUNK + 5)
    wrong: list[BaseException] = []
    hits = [0] * 3
    stop = threading.Event()

    def use(number: int) -> None:
        choice = random.Random(number)
        store = opened()
        try:
            while not stop.is_set():
                ids = prompt(4, first=4)[: CHUNK * choice.randint(1, 4)]
                if choice.random() < 0.5:
                    store.save(ids, whole[:, : len(ids)])
                n, found = store.load(ids)
                hits[number] += n > 0
                assert found is None if n == 0 else is_same_prefix(found, whole)
            assert store.counters()["damaged_entries"] == 0
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    try:
        for step in range(steps):
            time.sleep(seconds)
            if step % 2:
                os.kill(server.process.pid, signal.SIGSTOP)
                time.sleep(0.1)
                os.kill(server.process.pid, signal.SIGCONT)
            else:
                server.kill()
                server.start()
        # On a busy machine, possibly no call has run yet.
        deadline = time.monotonic() + 120
        while not any(hits) and not wrong and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert wrong == []
    assert sum(hits) > 0


def rewrite(path: str | os.PathLike[str], ignorable: Mapping[str, bytes]) -> None:
    """Rewrite the file at ``path`` with other ignorable features."""
    with open(path, "rb") as file:
        whole = files.read(container.open_bytes(bytearray(file.read())))
    contents, arrays = files.header_and_arrays(whole)
    container.write(path, replace(contents, ignorable=dict(ignorable)), arrays)
