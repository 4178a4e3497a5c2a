"""Run prefix stores under load. Processes and threads write, read and evict, and every read is compared with the expected values.

    python -m support.store_stress --processes 8 --threads 4 --count 100000

The tests run a short version. The values of a cache are a function of its token ids, so any process can check what it has read.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import sys
import tempfile
import threading
import time
from dataclasses import replace
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

import torch

import kvpack
from kvpack.cache.states import with_states
from support.store_matrix.kinds import bytes_stored

if TYPE_CHECKING:
    from multiprocessing.sharedctypes import Synchronized

CHUNK = 32
FAMILIES, PROMPTS, LONGEST = 8, 64, 6
"""Number of families, number of prompts, and largest number of chunks per prompt. Prompts of a family share their first chunks."""
LAYERS = (1, 8, 32)
"""Numbers of layers of three models, which give entries of three sizes."""
STATEFUL = 1
"""Index of the model whose first layer has states in addition to keys and values."""
BUDGET = 12_000_000
"""Budget in bytes: about a quarter of the size of all prompts of all models."""

FORK = multiprocessing.get_context("fork")


def identity(model: int) -> kvpack.Identity:
    return kvpack.Identity(f"model-{model}", "bf16", tenant="stress", keeps_states=model == STATEFUL)


def open_store(folder: str, model: int, **options: Any) -> kvpack.Store:
    return kvpack.Store(folder, identity(model), chunk=CHUNK, **{"max_bytes": BUDGET, **options})


@cache
def prompt(number: int) -> tuple[int, ...]:
    """Return the token ids of prompt ``number``: one or two chunks that its family shares, followed by its own."""
    family, own = random.Random(number % FAMILIES), random.Random(1000 + number)
    shared = [family.randrange(100_000) for _ in range(CHUNK * (1 + number % FAMILIES % 2))]
    rest = [own.randrange(100_000) for _ in range(CHUNK * own.randint(0, LONGEST - 2))]
    return (*shared, *rest)


@lru_cache(maxsize=1024)
def expected_keys(number: int, model: int) -> torch.Tensor:
    """Return the keys ``[layer, token, dim]`` of a prompt in bfloat16: integers that encode token, position, and layer."""
    ids = torch.tensor(prompt(number))
    token, layer, channel = ids[None, :, None], torch.arange(LAYERS[model])[:, None, None], torch.arange(64)[None, None, :]
    place = torch.arange(len(ids))[None, :, None]
    return ((token * 7 + place * 13 + layer * 31 + channel * (1 + model)) % 251).to(torch.bfloat16)


def state(number: int, position: int) -> torch.Tensor:
    """Return the state after the first ``position`` tokens of a prompt, ``[1, 2048]``.

    It is the sum of the tokens, and so large that entries become large.
    """
    ids = torch.tensor(prompt(number)[:position])
    places = torch.arange(1, position + 1)
    return ((ids * places).sum() % 1_000_003 + torch.arange(2048)).to(torch.float32)[None]


@lru_cache(maxsize=1024)
def packed_prompt(number: int, model: int) -> kvpack.Cache:
    """Return the cache of a prompt. That of the model ``STATEFUL`` has states after every second chunk and after the last."""
    cache = kvpack.pack([(x[None, None], -x[None, None]) for x in expected_keys(number, model)], "bf16")
    if model != STATEFUL:
        return cache
    ends = {
        position: ({"recurrent.0": state(number, position)}, *[{}] * (len(cache) - 1)) for position in range(CHUNK, cache.tokens + 1, CHUNK)
    }
    last = ends.pop(cache.tokens)
    kept = {position: own for position, own in ends.items() if not position % (2 * CHUNK)}
    return replace(cache, layers=with_states(cache.layers, last), states_at=kept)


def check_states(cache: kvpack.Cache, number: int, model: int, tokens: int) -> None:
    """Raise AssertionError unless a cache has its model's states after its last token, and no others."""
    found = [dict(layer.states) for layer in cache]
    assert [list(own) for own in found] == [["recurrent.0"] if model == STATEFUL and not at else [] for at in range(len(cache))]
    if model == STATEFUL:
        assert torch.equal(found[0]["recurrent.0"], state(number, tokens)), f"prompt {number} was loaded with wrong states"


def check(store: kvpack.Store, number: int, model: int) -> int:
    """Load a prompt, compare every value, and return the number of tokens found. Raises AssertionError for a wrong value."""
    n, cache = store.load(prompt(number))
    if cache is None:
        return 0
    assert n == cache.tokens <= len(prompt(number))
    check_states(cache, number, model, n)
    right = expected_keys(number, model)[:, :n]
    for layer, x in zip(cache, right, strict=True):
        k, v = layer.unpack(torch.bfloat16)
        assert k is not None
        assert v is not None
        assert torch.equal(k[0, 0], x), f"prompt {number} of model {model} was loaded with wrong keys"
        assert torch.equal(v[0, 0], -x), f"prompt {number} of model {model} was loaded with wrong values"
    return n


def perform_random_operation(stores: list[kvpack.Store], choice: random.Random, kept: list[Any]) -> None:
    """Perform a random load, save, match, pin, delete, or collection.

    ``kept`` contains loaded caches, whose files may be evicted meanwhile.
    """
    number, model, what = choice.randrange(PROMPTS), choice.randrange(len(LAYERS)), choice.random()
    store = stores[model]
    if what < 0.55:
        check(store, number, model)
    elif what < 0.93:
        assert store.save(prompt(number), packed_prompt(number, model)) <= len(prompt(number))
    elif what < 0.96:
        store.match(prompt(number))
    elif what < 0.975:
        store.delete(prompt(number), start=CHUNK)
    elif what < 0.99:
        n, cache = store.load(prompt(number))
        kept.append((number, model, n, cache))
        if len(kept) > 8:
            number, model, n, cache = kept.pop(0)
            if cache is not None:
                check_states(cache, number, model, n)
            for layer, x in zip(cache or (), expected_keys(number, model)[:, :n], strict=False):
                assert torch.equal(layer.unpack(torch.bfloat16)[0][0, 0], x), "a loaded cache changed after its entries were evicted"
    elif choice.random() < 0.3:
        store.pin(prompt(number)[:CHUNK])
        store.unpin(prompt(number)[:CHUNK])
    else:
        store.collect()


def count_refusals(stores: list[kvpack.Store]) -> int:
    """Return the number of damaged entries and faults in all stores.

    It must be 0 on a sound disk, even if processes are killed.
    """
    counts = [store.counters() for store in stores]
    return sum(count["damaged_entries"] + sum(count["faults"].values()) for count in counts)


def note_refusals(folder: str, count: int) -> None:
    """Append ``count`` to a file next to the store in a single write, which a kill cannot split."""
    if count:
        with open(f"{folder}.refused", "ab", buffering=0) as file:
            file.write(b"x" * count)


def noted_refusals(folder: str) -> int:
    path = f"{folder}.refused"
    return os.stat(path).st_size if os.path.exists(path) else 0


def _work(folder: str, seed: int, threads: int, count: int, failed: Synchronized[int]) -> None:
    # After a fork, torch creates a new thread pool, which crashes if two threads do it at once.
    torch.set_num_threads(1)
    stores = [open_store(folder, model) for model in range(len(LAYERS))]

    def work(number: int) -> None:
        choice, kept = random.Random(seed * 1000 + number), []
        try:
            for _ in range(count // threads):
                perform_random_operation(stores, choice, kept)
        except BaseException as error:
            print(f"worker {seed}, thread {number}: {type(error).__name__}: {error}", file=sys.stderr)
            with failed.get_lock():
                failed.value += 1

    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    note_refusals(folder, count_refusals(stores))


def run_operations(folder: str, processes: int, threads: int, count: int) -> dict[str, Any]:
    """Run ``count`` random operations in total, compare every read, and return a report.

    The operations are made by ``threads`` threads in each of ``processes`` processes.
    """
    failed = FORK.Value("q", 0)
    for number in range(PROMPTS):
        for model in range(len(LAYERS)):
            packed_prompt(number, model)
    started = time.monotonic()
    workers = [
        FORK.Process(target=_work, args=(folder, seed, threads, count // processes, failed), daemon=True) for seed in range(processes)
    ]
    for worker in workers:
        worker.start()
    most = samples = 0
    while any(worker.is_alive() for worker in workers):
        most = max(most, bytes_stored(folder))
        samples += 1
        time.sleep(0.005)
    return {
        "processes": processes,
        "threads": threads,
        "operations": count // processes // threads * processes * threads,
        "seconds": round(time.monotonic() - started, 1),
        "processes_that_failed": sum(worker.exitcode != 0 for worker in workers),
        "threads_that_failed": failed.value,
        "refused": noted_refusals(folder),
        "budget": BUDGET,
        "most_bytes": most,
        "samples": samples,
        "bytes": bytes_stored(folder),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--folder", help="location of the store (default: a temporary folder)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as temporary:
        folder = os.path.join(temporary, "store")
        report = run_operations(folder, arguments.processes, arguments.threads, arguments.count)
    bad = report["refused"] + report["threads_that_failed"] + report["processes_that_failed"]
    bad += report["most_bytes"] > report["budget"]
    print(json.dumps(report, indent=2))
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
