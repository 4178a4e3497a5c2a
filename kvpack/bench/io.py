"""kvpack bench io: encode, save, load and unpack one KV cache, compared with safetensors and a memory copy in the same run.

Every speed is in GB/s of the dense bf16 cache, whatever its packed size. Files are read from the page cache.
"""

from __future__ import annotations

import os
import re
import statistics
import tempfile
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from safetensors.torch import load_file, save_file

import kvpack
from kvpack.formats.errors import InvalidParameter
from kvpack.models import load_model, model_folder, transformers_library

from . import io_device
from .models import read_text, vocabulary

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from kvpack.coding.encoding import Progress

DEFAULT_SYNTHETIC = "8x1x8x4096x128"
"""Large enough that neither the processor's cache nor call overhead dominates: 128 MiB in bf16."""

RECIPES = ("bf16", "kivi-2", "octopus-3", "hqmq-s24-r3", "turboangle-k8v4")
DEFAULT_TOKENS = 4096

_PEERS = 5

_SYNTHETIC = re.compile(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)x([1-9]\d*)x([1-9]\d*)", re.ASCII)


@dataclass(frozen=True)
class Source:
    """A KV cache to measure: one bf16 (k, v) per layer, and a description."""

    label: str
    pairs: list[tuple[torch.Tensor, torch.Tensor]]

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors by their names in a dense file."""
        return {f"{number}.{side}": x for number, pair in enumerate(self.pairs) for side, x in zip("kv", pair, strict=True)}

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self.tensors.values())


def source(model: str | None, text: str | None, tokens: int | None, synthetic: str | None) -> Source:
    """The KV cache that the options of ``kvpack bench io`` ask for.

    Raises InvalidParameter for a wrong shape or more tokens than the text has, and MissingFile for an unreadable text.
    """
    if synthetic is not None or (model is None and text is None):
        return _synthetic(synthetic or DEFAULT_SYNTHETIC)
    with model_folder(model) as folder:
        return _prefilled(folder, text, tokens)


def _synthetic(words: str) -> Source:
    match = _SYNTHETIC.fullmatch(words)
    if match is None:
        raise InvalidParameter(f"--synthetic is {words!r}, expected layers x batch x heads x tokens x dim, such as 8x1x8x4096x128")
    layers, *shape = map(int, match.groups())
    generator = torch.Generator().manual_seed(0)
    pairs = [(_gaussian(shape, generator), _gaussian(shape, generator)) for _ in range(layers)]
    return Source(f"Gaussian values, layers x batch x heads x tokens x dim = {words}", pairs)


def _gaussian(shape: list[int], generator: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=generator).to(torch.bfloat16)


def _prefilled(folder: Path, path: str | None, tokens: int | None) -> Source:
    model = load_model(folder)
    text = read_text(path, folder, vocabulary(model))
    ids = [*text.start, *text.ids]
    count = min(DEFAULT_TOKENS, len(ids)) if tokens is None else tokens
    if not 1 <= count <= len(ids):
        raise InvalidParameter(f"--tokens is {count}, {text.name} has {len(ids)}")
    cache = transformers_library().DynamicCache()
    with torch.inference_mode():
        model.base_model(torch.tensor([ids[:count]]), past_key_values=cache)
    pairs = [(layer.keys.to(torch.bfloat16), layer.values.to(torch.bfloat16)) for layer in cache.layers]
    return Source(f"{folder.name}, {count:,} tokens of {text.name}", pairs)


@dataclass
class _Clock:
    """Times several runs, and counts them for the progress bar."""

    repeats: int
    total: int
    progress: Progress | None
    done: int = 0

    def seconds(self, run: Callable[[], object]) -> list[float]:
        """The seconds of ``repeats`` runs after a warm-up run."""
        run()
        seconds = []
        for _ in range(self.repeats):
            started = time.perf_counter()
            result = run()
            seconds.append(time.perf_counter() - started)
            # Freed outside the timing, before the next run allocates.
            del result
        self.done += 1
        if self.progress:
            self.progress(self.done, self.total)
        return seconds


def run(
    cache: Source,
    recipes: Sequence[str],
    *,
    repeats: int = 5,
    folder: str | None = None,
    device: str = "cpu",
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Measure everything on ``cache`` and return JSON values: one row per operation.

    With a CUDA ``device``, ``device_rows`` has the rows of ``io_device.run`` and nothing else is measured.

    A row's ``of_new_copy``, ``of_reused_copy`` and ``of_safetensors`` are ratios of speeds (above 1 is faster): to a copy of
    the bf16 cache into new memory, as encoding allocates, to a copy into existing memory, and to safetensors.
    Raises InvalidParameter.
    """
    if repeats < 1:
        raise InvalidParameter(f"--repeats is {repeats}, expected an integer of at least 1")
    if torch.device(device).type != "cpu":
        return {
            "source": cache.label,
            "bf16_bytes": cache.nbytes,
            "repeats": repeats,
            **io_device.run(cache.pairs, recipes, device, repeats, folder, progress),
        }
    clock = _Clock(repeats, 2 * _PEERS + 4 * len(recipes), progress)
    with tempfile.TemporaryDirectory(prefix="kvpack-bench-", dir=folder) as temporary:
        dense, packed = os.path.join(temporary, "dense.safetensors"), os.path.join(temporary, "packed.kvpack")
        rows = _peers(cache, clock, dense)
        for recipe in recipes:
            rows += _recipe(cache, recipe, clock, packed)
        # Everything is compared with the peers: timed before and after, they see the same load on the machine.
        for row, again in zip(rows, _peers(cache, clock, dense), strict=False):
            row["times"] += again["times"]
    for row in rows:
        row["seconds"] = statistics.median(row.pop("times"))
    new_copy, reused_copy, saved, _, loaded = (row["seconds"] for row in rows[:_PEERS])
    peers = {"save": saved, "load": loaded, "save_file": saved, "load_file, then read": loaded}
    for row in rows:
        row["gb_per_s"] = cache.nbytes / row["seconds"] / 1e9
        row["of_new_copy"] = new_copy / row["seconds"]
        row["of_reused_copy"] = reused_copy / row["seconds"]
        row["of_safetensors"] = peers[row["operation"]] / row["seconds"] if row["operation"] in peers else None
    return {"source": cache.label, "bf16_bytes": cache.nbytes, "repeats": repeats, "threads": torch.get_num_threads(), "rows": rows}


def _peers(cache: Source, clock: _Clock, path: str) -> list[dict[str, Any]]:
    tensors = cache.tensors
    dense = torch.cat([x.flatten() for x in tensors.values()])
    destination = torch.empty_like(dense)
    new_copy = clock.seconds(dense.clone)
    reused_copy = clock.seconds(lambda: destination.copy_(dense))
    saved = clock.seconds(lambda: save_file(tensors, path))
    mapped = clock.seconds(lambda: load_file(path))
    # The digest is the fastest of several ways to read every byte once; summing or cloning the tensors takes longer.
    read = clock.seconds(lambda: [xxhash.xxh3_128_digest(x.flatten().view(torch.uint8).numpy().data) for x in load_file(path).values()])
    size = os.path.getsize(path)
    bits = 8 * size / dense.numel()
    with open(path, "rb") as file:
        header = 8 + int.from_bytes(file.read(8), "little")
    return [
        _row("memory copy", "into new memory", new_copy, dense.nbytes, 16.0),
        _row("memory copy", "into memory in use", reused_copy, dense.nbytes, 16.0),
        _row("safetensors", "save_file", saved, size, bits),
        _row("safetensors", "load_file", mapped, header, bits),
        _row("safetensors", "load_file, then read", read, size, bits),
    ]


def _recipe(cache: Source, recipe: str, clock: _Clock, path: str) -> list[dict[str, Any]]:
    encode = clock.seconds(lambda: kvpack.pack(cache.pairs, recipe))
    packed = kvpack.pack(cache.pairs, recipe)
    save = clock.seconds(lambda: kvpack.save(packed, path))
    size, bits = packed.nbytes, packed.bits_per_value
    load = clock.seconds(lambda: kvpack.load(path))
    loaded = kvpack.load(path)
    unpack = clock.seconds(lambda: [layer.unpack(torch.bfloat16) for layer in loaded])
    return [
        _row(recipe, "encode", encode, cache.nbytes, bits),
        _row(recipe, "save", save, size, bits),
        _row(recipe, "load", load, size, bits),
        _row(recipe, "unpack", unpack, cache.nbytes, bits),
    ]


def _row(name: str, operation: str, times: list[float], touched: int, bits: float) -> dict[str, Any]:
    return {"name": name, "operation": operation, "times": times, "bytes_touched": touched, "bits_per_value": bits}


def show(report: dict[str, Any]) -> None:
    """Print one table and the meaning of its columns."""
    from kvpack.output import bytes_text, print_table

    if "device_rows" in report:
        io_device.show(report)
        return

    columns = [
        "what",
        "operation",
        "bits per\nvalue",
        "bytes\ntouched",
        "ms",
        "GB/s\nof bf16",
        "x copy,\nnew",
        "x copy,\nin use",
        "x safe-\ntensors",
    ]
    rows = [
        [
            row["name"],
            row["operation"],
            f"{row['bits_per_value']:.2f}",
            bytes_text(row["bytes_touched"]),
            f"{1000 * row['seconds']:.2f}",
            f"{row['gb_per_s']:.2f}",
            f"{row['of_new_copy']:.3f}",
            f"{row['of_reused_copy']:.3f}",
            "" if row["of_safetensors"] is None else f"{row['of_safetensors']:.2f}",
        ]
        for row in report["rows"]
    ]
    title = f"{report['source']}: {report['bf16_bytes']:,} bytes in bf16, {report['threads']} threads, median of {report['repeats']}"
    print_table(title, columns, rows, left=2)
    print("GB/s count the bf16 cache's bytes in every row; files are in the page cache, and no save waits for the disk.")
    print("x copy compares with a copy of the bf16 cache into new memory, which encoding takes too, and into memory already in use.")
    print("safetensors' load_file maps the file and touches its header only; kvpack's load checks every byte.")
    print("x safetensors compares save with save_file, and load with load_file and one read of every byte (kvpack's own digest of it).")
