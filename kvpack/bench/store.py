"""kvpack bench store: time match, load, put and get on a prefix store, compared with plain reads and a bf16 safetensors store.

All are measured in the same run. Files are in the page cache. Speeds in GB/s are based on the number of stored bytes.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from safetensors.torch import load_file, save_file

import kvpack
from kvpack.formats.errors import InvalidParameter
from kvpack.identity.identity import Identity
from kvpack.output import bytes_text, print_table, step_counter
from kvpack.store import Store
from kvpack.store.counters import Counters
from kvpack.store.directory import Directory

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvpack.coding.encoding import Progress


FLAT_TARGET = 1.5
"""Maximum ratio of a chunk's cost with the most entries to that with the fewest, if the cost is to count as constant."""


def show(report: dict[str, Any]) -> None:
    shape = f"{report['layers']} layers, {report['heads']} heads of dim {report['dim']}, chunks of {report['chunk']} tokens"
    match, load, fewest, most = report["match"], report["load"], report["entries"][0], report["entries"][-1]
    print_table(
        f"{report['recipe']}, {shape}",
        ["what", "measured", "target", ""],
        [
            _target_row(f"match {match['tokens']:,} tokens in {match['chunks']} chunks", match["ms"], match["target_ms"], " ms", False),
            _target_row(f"load {load['tokens']:,} tokens, relative to a read", load["of_read_and_digest"], load["target"], " x", True),
            *(
                _target_row(
                    f"{name} among {most['entries']:,} entries, relative to {fewest['entries']:,}",
                    most[us] / fewest[us],
                    FLAT_TARGET,
                    " x",
                    False,
                )
                for name, us in (("put", "put_us"), ("match", "match_us"), ("get", "get_us"))
            ),
            ["bytes stored per token", bytes_text(round(load["bytes_per_token"])), "", ""],
            ["bytes per token of bf16 safetensors", bytes_text(round(load["safetensors_bytes_per_token"])), "", ""],
        ],
    )
    print_table(
        "load, from the page cache",
        ["way", "ms", "GB/s", "tokens/s"],
        [[row["name"], f"{1000 * row['seconds']:.1f}", f"{row['gb_per_s']:.2f}", f"{row['tokens_per_s']:,.0f}"] for row in load["rows"]],
    )
    size = report["operations"][0]["entry_bytes"]
    print_table(
        f"entries of {size:,} bytes",
        ["processes", "puts/s", "gets/s", "failed"],
        [
            [str(row["processes"]), f"{row['puts_per_s']:,.0f}", f"{row['gets_per_s']:,.0f}", str(row["failed"])]
            for row in report["operations"]
        ],
    )
    print_table(
        "microseconds per chunk, by number of entries in the folder",
        ["entries", "put", "match", "get"],
        [[f"{row['entries']:,}", *(f"{row[f'{name}_us']:.0f}" for name in ("put", "match", "get"))] for row in report["entries"]],
    )
    print("load maps the files, checks every digest and creates the pages.")
    print("A read copies each file to the same memory and computes its digest.")


def _target_row(name: str, measured: float, target: float, unit: str, is_minimum: bool) -> list[str]:
    met = measured >= target if is_minimum else measured <= target
    return [name, f"{measured:.2f}{unit}", f"{'at least' if is_minimum else 'at most'} {target:g}{unit}", "met" if met else "missed"]


RECIPE = "octopus-3"
CHUNK = 256
MATCHED_TOKENS = 131_072
HEADS, DIM = 8, 128
LAYERS = 32
"""Number of layers of Llama 3.1 8B, whose layers have 8 KV heads of dim 128."""
LOADED_CHUNKS = 16
PROCESSES = (1, 2, 4, 8)
ENTRIES = (1_000, 10_000, 100_000)
OPERATIONS = 64
"""Number of entries, of 4 layers each, that each process puts and gets."""
_ENTRY_BYTES = bytes(64)
_MATCHES = 41
"""Number of matches that are timed together, because a single one is too short to time."""
_MATCHES_PER_SIZE = 100

MATCH_TARGET_MS = 5.0
LOAD_TARGET = 0.8


def run(
    recipe: str = RECIPE,
    *,
    layers: int = LAYERS,
    chunks: int = LOADED_CHUNKS,
    entries: Sequence[int] = ENTRIES,
    repeats: int = 5,
    folder: str | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Measure in a temporary folder and return a report as JSON values. ``progress`` counts measurements.

    Raises InvalidParameter if a size is below 1.
    """
    for name, value in (("--layers", layers), ("--chunks", chunks), ("--repeats", repeats), *(("--entries", count) for count in entries)):
        if value < 1:
            raise InvalidParameter(f"{name} is {value}, expected a positive integer")
    step = step_counter(progress, 2 + len(PROCESSES) + len(entries))

    identity = Identity("bench", recipe)
    report: dict[str, Any] = {"recipe": recipe, "layers": layers, "heads": HEADS, "dim": DIM, "chunk": CHUNK, "repeats": repeats}
    with tempfile.TemporaryDirectory(prefix="kvpack-bench-", dir=folder) as temporary:
        report["match"] = _measure_match(os.path.join(temporary, "match"), identity)
        step()
        report["load"] = _measure_load(os.path.join(temporary, "load"), identity, layers, chunks, repeats)
        step()
        report["operations"] = []
        for count in PROCESSES:
            report["operations"].append(_measure_operations(os.path.join(temporary, f"operations-{count}"), identity, count))
            step()
        report["entries"] = []
        for count in sorted(entries):
            report["entries"].append(_measure_costs(os.path.join(temporary, "entries"), identity, count))
            step()
    return report


def _create_prefix(recipe: str, layers: int, heads: int, dim: int, chunks: int) -> kvpack.Cache:
    """Return a cache of Gaussian values, in which all chunks are the same. The values do not affect the measurements."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, heads, CHUNK, dim, generator=generator).to(torch.bfloat16)
    packed = kvpack.pack([(x, x)] * layers, recipe)
    return kvpack.concat([replace(packed, start=CHUNK * number) for number in range(chunks)])


def _median(run: Callable[[], object], repeats: int) -> float:
    run()
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        result = run()
        seconds.append(time.perf_counter() - started)
        del result
    return statistics.median(seconds)


def _measure_match(folder: str, identity: Identity) -> dict[str, Any]:
    chunks = MATCHED_TOKENS // CHUNK
    ids = torch.arange(MATCHED_TOKENS) % 100_000
    with Store(folder, identity) as store:
        saved = store.save(ids, _create_prefix(identity.recipe, 1, 1, 64, chunks))
        seconds = _median(lambda: store.match(ids), _MATCHES)
    return {"tokens": saved, "chunks": chunks, "ms": 1000 * seconds, "target_ms": MATCH_TARGET_MS}


def _measure_load(folder: str, identity: Identity, layers: int, chunks: int, repeats: int) -> dict[str, Any]:
    ids = list(range(CHUNK * chunks))
    with Store(os.path.join(folder, "store"), identity) as store:
        store.save(ids, _create_prefix(identity.recipe, layers, HEADS, DIM, chunks))
        paths = [_entry_path(store, key) for key in store.keys(ids)]
        dense = _save_dense(folder, layers, chunks)
        memory = memoryview(bytearray(max(map(os.path.getsize, paths))))
        # Measure in turn, so that other load on the machine affects all equally.
        times: dict[str, list[float]] = {}
        ways: dict[str, Callable[[], object]] = {
            "load": lambda: store.load(ids),
            "read and digest": lambda: [xxhash.xxh3_128_digest(_read_into(path, memory)) for path in paths],
            "bf16 safetensors, mapped and read": lambda: [_read_dense(path) for path in dense],
        }
        for number in range(repeats + 1):
            for name, way in ways.items():
                started = time.perf_counter()
                result = way()
                if number:
                    times.setdefault(name, []).append(time.perf_counter() - started)
                del result
    size, dense_size = (sum(map(os.path.getsize, files)) for files in (paths, dense))
    seconds = {name: statistics.median(values) for name, values in times.items()}
    return {
        "tokens": CHUNK * chunks,
        "bytes": size,
        "bytes_per_token": size / (CHUNK * chunks),
        "safetensors_bytes_per_token": dense_size / (CHUNK * chunks),
        "rows": [
            {
                "name": name,
                "seconds": value,
                "gb_per_s": (dense_size if "safetensors" in name else size) / value / 1e9,
                "tokens_per_s": CHUNK * chunks / value,
            }
            for name, value in seconds.items()
        ],
        "of_read_and_digest": seconds["read and digest"] / seconds["load"],
        "target": LOAD_TARGET,
    }


def _entry_path(store: Store, key: bytes) -> str:
    name = key.hex()
    return os.path.join(os.fspath(store.location), name[0], name[1], name)


def _read_into(path: str, memory: memoryview) -> memoryview:
    """Read a file into ``memory``, which is already in use. Returns the part of ``memory`` that was filled."""
    with open(path, "rb", buffering=0) as file:
        done = 0
        while count := file.readinto(memory[done:]):
            done += count
        return memory[:done]


def _save_dense(folder: str, layers: int, chunks: int) -> list[str]:
    x = torch.zeros(1, HEADS, CHUNK, DIM, dtype=torch.bfloat16)
    tensors = {f"{layer}.{side}": x.clone() for layer in range(layers) for side in "kv"}
    paths = [os.path.join(folder, f"{number}.safetensors") for number in range(chunks)]
    for path in paths:
        save_file(tensors, path)
    return paths


def _read_dense(path: str) -> dict[str, torch.Tensor]:
    tensors = load_file(path)
    for x in tensors.values():
        xxhash.xxh3_128_digest(x.flatten().view(torch.uint8).numpy().data)
    return tensors


def _measure_operations(folder: str, identity: Identity, processes: int) -> dict[str, Any]:
    """Put chunks of 4 layers and then get them, in several processes with different prompts. Returns the results."""
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(processes), context.Queue()
    cache = _create_prefix(identity.recipe, 4, HEADS, DIM, 1)
    workers = []
    for number in range(processes):
        workers.append(context.Process(target=_put_and_get, args=(folder, identity, cache, number, barrier, results)))
        workers[-1].start()
    times = [results.get() for _ in workers]
    for worker in workers:
        worker.join()
    put, get = (max(row[stop] for row in times) - min(row[start] for row in times) for start, stop in ((0, 1), (2, 3)))
    count = processes * OPERATIONS
    return {
        "processes": processes,
        "entry_bytes": times[0][4],
        "puts_per_s": count / put,
        "gets_per_s": count / get,
        "failed": sum(row[5] for row in times),
    }


def _put_and_get(folder: str, identity: Identity, cache: kvpack.Cache, process_index: int, barrier: Any, results: Any) -> None:
    torch.set_num_threads(1)
    prompts = [torch.full((CHUNK,), OPERATIONS * process_index + turn) for turn in range(OPERATIONS)]
    with Store(folder, identity) as store:
        barrier.wait()
        started = time.monotonic()
        failed = sum(store.save(ids, cache) != CHUNK for ids in prompts)
        put = time.monotonic()
        barrier.wait()
        again = time.monotonic()
        failed += sum(store.load(ids)[0] != CHUNK for ids in prompts)
        got = time.monotonic()
        size = os.path.getsize(_entry_path(store, store.keys(prompts[0])[0]))
    results.put((started, put, again, got, size, failed))


def _measure_costs(folder: str, identity: Identity, count: int) -> dict[str, Any]:
    """Fill a store with ``count`` small entries, and return the median times of a put, a match and a get, in microseconds."""
    backend = Directory(folder, Counters())
    present = backend.size()[0]
    now = time.time_ns()
    for number in range(present, count):
        key = xxhash.xxh3_128_digest(number.to_bytes(8, "little"))
        backend.put([key + key], [memoryview(_ENTRY_BYTES)], now)
    cache = _create_prefix(identity.recipe, 1, 1, 64, 1)
    prompts = [torch.full((CHUNK,), count + turn) for turn in range(_MATCHES_PER_SIZE)]
    with Store(folder, identity) as store:
        calls = (lambda ids: store.save(ids, cache), store.match, store.load)
        seconds = [_median_per_prompt(call, prompts) for call in calls]
    return {"entries": count, **{f"{name}_us": 1e6 * value for name, value in zip(("put", "match", "get"), seconds, strict=True)}}


def _median_per_prompt(run: Callable[[Any], object], prompts: Sequence[Any]) -> float:
    seconds = []
    for ids in prompts:
        started = time.perf_counter()
        run(ids)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)
