"""kvpack bench io: time saving and loading a KV cache, compared with safetensors and a memory copy in the same run.

Speeds are in GB/s of the dense bf16 cache, regardless of its packed size. Files are in the page cache. Times are process times in one
thread, and all measurements are interleaved.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

import kvpack
from kvpack import cache_names
from kvpack.coding.encoding import Progress, suppress_rounding_warnings
from kvpack.evaluation.models import get_vocabulary_size, read_text
from kvpack.formats.errors import InvalidParameter
from kvpack.models import import_transformers, load_model, model_folder
from kvpack.runtime.modes import one_thread

from .attend import matmul_attention
from .process_time import time_interleaved

DEFAULT_SYNTHETIC = "4x1x8x4096x128"
"""Default shape: 64 MiB in bf16, so that neither processor caches nor call overhead dominate."""

RECIPES = ("bf16", "lossless", "fp8", "kivi-2", "turboquant-3", "octopus-3", "polarquant-3", "turboangle-k8v4", "hqmq-s24-r3")
"""Default recipes: one preset per family of codecs."""
DEFAULT_TOKENS = 4096

Q_HEADS = 4
"""Number of query heads per KV head."""

WRITE, READ, ATTEND = "write", "read", "read, attend"
"""Complete operations: write dense values to a file, read a file to dense values in new memory, and attend to a file with one query."""
COPY = "copy into memory in use"
SAFETENSORS = "safetensors"
PARTS = ("encode", "save", "load", "unpack")

_SYNTHETIC = re.compile(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)x([1-9]\d*)x([1-9]\d*)", re.ASCII)


@dataclass(frozen=True)
class Source:
    """The KV cache to measure: a description, and the bf16 keys and values of each layer."""

    label: str
    pairs: list[tuple[torch.Tensor, torch.Tensor]]

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors, by their names in a dense file."""
        return {f"{number}.{side}": x for number, pair in enumerate(self.pairs) for side, x in zip("kv", pair, strict=True)}

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self.tensors.values())


def read_source(model: str | None, text: str | None, tokens: int | None, synthetic: str | None) -> Source:
    """Return the KV cache that the options of ``kvpack bench io`` select.

    Raises InvalidParameter if a shape is invalid or the text has too few tokens, and MissingFile if the text cannot be read.
    """
    if synthetic is not None or (model is None and text is None):
        if tokens is not None:
            raise InvalidParameter("--tokens applies only to --model and --text: pass the shape of Gaussian values with --synthetic")
        return _synthetic_source(synthetic or DEFAULT_SYNTHETIC)
    with model_folder(model) as folder:
        return _prefill_source(folder, text, tokens)


def _synthetic_source(shape_text: str) -> Source:
    match = _SYNTHETIC.fullmatch(shape_text)
    if match is None:
        raise InvalidParameter(f"--synthetic is {shape_text!r}, expected layers x batch x heads x tokens x dim, such as 8x1x8x4096x128")
    layers, *shape = map(int, match.groups())
    generator = torch.Generator().manual_seed(0)
    pairs = [(_random_normal(shape, generator), _random_normal(shape, generator)) for _ in range(layers)]
    return Source(f"Gaussian values, layers x batch x heads x tokens x dim = {shape_text}", pairs)


def _random_normal(shape: list[int], generator: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=generator).to(torch.bfloat16)


def _prefill_source(folder: Path, path: str | None, tokens: int | None) -> Source:
    model = load_model(folder)
    text = read_text(path, folder, get_vocabulary_size(model))
    ids = [*text.start, *text.ids]
    count = min(DEFAULT_TOKENS, len(ids)) if tokens is None else tokens
    if not 1 <= count <= len(ids):
        raise InvalidParameter(f"--tokens is {count}, but {text.name} has only {len(ids)} tokens: pass at most that many")
    cache = import_transformers().DynamicCache()
    with torch.inference_mode():
        model.base_model(torch.tensor([ids[:count]]), **cache_names.cache_argument(model.base_model, cache))
    pairs = [(layer.keys.to(torch.bfloat16), layer.values.to(torch.bfloat16)) for layer in cache.layers]
    return Source(f"{folder.name}, {count:,} tokens of {text.name}", pairs)


class _Operation(NamedTuple):
    name: str
    operation: str
    call: Callable[[], object]
    writes: str | None = None
    """Path of the file that the operation writes. An existing file is removed first, outside the timing."""


def run(
    cache: Source,
    recipes: Sequence[str],
    *,
    repeats: int = 5,
    folder: str | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Measure ``cache`` and return a report as JSON values, with one row per operation.

    In a row, ``of_copy`` is the speed relative to copying the bf16 cache within memory (above 1 is faster). ``of_safetensors`` is the time
    relative to the same operation with safetensors (below 1 is faster): save_file, load_file and a clone of its tensors, or load_file and
    attention. Raises InvalidParameter.
    """
    if repeats < 1:
        raise InvalidParameter(f"--repeats is {repeats}, expected a positive integer")
    with tempfile.TemporaryDirectory(prefix="kvpack-bench-", dir=folder) as temporary, one_thread(), suppress_rounding_warnings():
        whole = torch.cat([x.flatten() for x in cache.tensors.values()])
        in_use = torch.zeros_like(whole)
        ways = [_Operation("memory", COPY, partial(in_use.copy_, whole))]
        paths: dict[str, str] = {}
        paths[SAFETENSORS] = os.path.join(temporary, "dense.safetensors")
        ways += _dense_operations(cache, paths[SAFETENSORS])
        for number, recipe in enumerate(dict.fromkeys(recipes)):
            paths[recipe] = os.path.join(temporary, f"packed-{number}.kvpack")
            ways += _packed_operations(cache, recipe, paths[recipe])
        removals = [None if way.writes is None else partial(_remove, way.writes) for way in ways]
        seconds = time_interleaved([way.call for way in ways], repeats, before=removals, new_memory=True, progress=progress)
        sizes = {name: os.path.getsize(path) for name, path in paths.items()}
    copied = seconds[0].process
    by_safetensors = {way.operation: taken for way, taken in zip(ways, seconds, strict=True) if way.name == SAFETENSORS}
    rows = []
    for way, taken in zip(ways, seconds, strict=True):
        stored = sizes.get(way.name, cache.nbytes)
        rows.append(
            {
                "name": way.name,
                "operation": way.operation,
                "bytes": stored,
                "bits_per_value": 16 * stored / cache.nbytes,
                "seconds": taken.process,
                "wall_seconds": taken.wall,
                "gb_per_s": cache.nbytes / taken.process / 1e9,
                "of_copy": copied / taken.process,
                "of_safetensors": taken.process / other.process if (other := by_safetensors.get(way.operation)) else None,
                "wall_of_safetensors": taken.wall / other.wall if other else None,
            }
        )
    return {"source": cache.label, "bf16_bytes": cache.nbytes, "repeats": repeats, "backend": kvpack.backends()["cpu"], "rows": rows}


def _dense_operations(cache: Source, path: str) -> list[_Operation]:
    tensors = cache.tensors
    queries = [_random_queries(k) for k, _ in cache.pairs]

    def attend() -> list[torch.Tensor]:
        loaded = load_file(path)
        return [matmul_attention(q, loaded[f"{layer}.k"], loaded[f"{layer}.v"]) for layer, q in enumerate(queries)]

    return [
        _Operation(SAFETENSORS, WRITE, lambda: save_file(tensors, path), path),
        _Operation(SAFETENSORS, READ, lambda: {name: x.clone() for name, x in load_file(path).items()}),
        _Operation(SAFETENSORS, ATTEND, attend),
    ]


def _packed_operations(cache: Source, recipe: str, path: str) -> list[_Operation]:
    packed = kvpack.pack(cache.pairs, recipe)
    kvpack.save(packed, path)
    loaded = kvpack.load(path)
    queries = [_random_queries(k) for k, _ in cache.pairs]

    in_use = [torch.zeros_like(x) for pair in cache.pairs for x in pair]

    def unpack() -> None:
        sides = [side for layer in loaded for side in (layer.k, layer.v) if side is not None]
        for side, out in zip(sides, in_use, strict=True):
            side.unpack_into(out)

    def attend() -> list[torch.Tensor]:
        return [kvpack.attend(q, layer) for q, layer in zip(queries, kvpack.load(path), strict=True)]

    return [
        _Operation(recipe, "encode", lambda: kvpack.pack(cache.pairs, recipe)),
        _Operation(recipe, "save", lambda: kvpack.save(packed, path), path),
        _Operation(recipe, "load", lambda: kvpack.load(path)),
        _Operation(recipe, "unpack", unpack),
        _Operation(recipe, WRITE, lambda: kvpack.save(kvpack.pack(cache.pairs, recipe), path), path),
        _Operation(recipe, READ, lambda: kvpack.load(path).unpack(torch.bfloat16)),
        _Operation(recipe, ATTEND, attend),
    ]


def _remove(path: str) -> None:
    if os.path.lexists(path):
        os.unlink(path)


def _random_queries(k: torch.Tensor) -> torch.Tensor:
    """Return one random query per head, ``[batch, q_head, 1, dim]``."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(k.shape[0], Q_HEADS * k.shape[1], 1, k.shape[3], generator=generator).to(k.dtype)


def show(report: dict[str, Any]) -> None:
    from kvpack.output import print_table

    by_place = {(row["name"], row["operation"]): row for row in report["rows"]}
    names = list(dict.fromkeys(row["name"] for row in report["rows"]))
    columns = ["what", "bits per\nvalue"]
    columns += [text for way in (WRITE, READ, ATTEND) for text in (f"{way},\nms", "x safe-\ntensors", "on the\nclock")]
    rows = [[name, *_row_cells(by_place, name)] for name in names if (name, WRITE) in by_place]
    print_table(f"{report['source']}: {report['bf16_bytes']:,} bytes in bf16, median of {report['repeats']}", columns, rows)
    copy = by_place["memory", COPY]
    parts = [text for part in PARTS for text in (f"{part},\nGB/s", "of copy")]
    rows = [
        [name, *(f"{by_place[name, part][key]:.{digits}f}" for part in PARTS for key, digits in (("gb_per_s", 2), ("of_copy", 3)))]
        for name in names
        if (name, PARTS[0]) in by_place
    ]
    print_table(f"The parts; a {COPY} reaches {copy['gb_per_s']:.1f} GB/s", ["what", *parts], rows)
    print(f"\nPacked rows with {report['backend']}. Process CPU times in one thread; every round runs each method once.")
    print("On the clock: the ratio of wall-clock times, which other load and concurrent disk writes disturb.")
    print("write: from values in memory to a new file. read: from the file to bf16 values in new memory. Below 1 x safetensors is faster.")
    print(f"read, attend: from the file to the attention of one query of {Q_HEADS} heads per KV head, in every layer.")
    print("encode: into memory that an earlier pack freed. unpack: into memory already in use, like the copy it is compared with.")
    print("GB/s are based on the size of the bf16 cache; files are in the page cache, and nothing waits for the disk.")
    print("kvpack's load checks every byte; safetensors' load_file maps the file, and its values are then copied.")


def _row_cells(by_place: dict[tuple[str, str], dict[str, Any]], name: str) -> list[str]:
    cells = [f"{by_place[name, WRITE]['bits_per_value']:.2f}"]
    for way in (WRITE, READ, ATTEND):
        row = by_place.get((name, way))
        ratios = [] if row is None else [f"{row[key]:.2f}" for key in ("of_safetensors", "wall_of_safetensors")]
        cells += ["", "", ""] if row is None else [f"{1000 * row['seconds']:.1f}", *ratios]
    return cells
