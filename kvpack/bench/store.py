"""kvpack bench store: time match and load on a prefix store, compared with plain reads and bf16 safetensors files in the same run.

Files are in the page cache. Speeds in GB/s are based on the number of stored bytes.
"""

from __future__ import annotations

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

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvpack.coding.encoding import Progress


def show(report: dict[str, Any]) -> None:
    shape = f"{report['layers']} layers, {report['heads']} heads of dim {report['dim']}, chunks of {report['chunk']} tokens"
    match, load = report["match"], report["load"]
    print_table(
        f"{report['recipe']}, {shape}",
        ["what", "measured", "target", ""],
        [
            _target_row(f"match {match['tokens']:,} tokens in {match['chunks']} chunks", match["ms"], match["target_ms"], " ms", False),
            _target_row(f"load {load['tokens']:,} tokens, relative to a read", load["of_read_and_digest"], load["target"], " x", True),
            ["bytes stored per token", bytes_text(round(load["bytes_per_token"])), "", ""],
            ["bytes per token of bf16 safetensors", bytes_text(round(load["safetensors_bytes_per_token"])), "", ""],
        ],
    )
    print_table(
        "load, from the page cache",
        ["way", "ms", "GB/s", "tokens/s"],
        [[row["name"], f"{1000 * row['seconds']:.1f}", f"{row['gb_per_s']:.2f}", f"{row['tokens_per_s']:,.0f}"] for row in load["rows"]],
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
_MATCHES = 41
"""Number of matches that are timed together, because a single one is too short to time."""

MATCH_TARGET_MS = 5.0
LOAD_TARGET = 0.8


def run(
    recipe: str = RECIPE,
    *,
    layers: int = LAYERS,
    chunks: int = LOADED_CHUNKS,
    repeats: int = 5,
    folder: str | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Measure in a temporary folder and return a report as JSON values. ``progress`` counts measurements.

    Raises InvalidParameter if a size is below 1.
    """
    for name, value in (("--layers", layers), ("--chunks", chunks), ("--repeats", repeats),):
        if value < 1:
            raise InvalidParameter(f"{name} is {value}, expected a positive integer")
    step = step_counter(progress, 2)

    identity = Identity("bench", recipe)
    report: dict[str, Any] = {"recipe": recipe, "layers": layers, "heads": HEADS, "dim": DIM, "chunk": CHUNK, "repeats": repeats}
    with tempfile.TemporaryDirectory(prefix="kvpack-bench-", dir=folder) as temporary:
        report["match"] = _measure_match(os.path.join(temporary, "match"), identity)
        step()
        report["load"] = _measure_load(os.path.join(temporary, "load"), identity, layers, chunks, repeats)
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
