"""Measure the time to the first token after a stored prompt, for models with recurrent layers or sliding windows.

The model has random weights, and the shape of a known model or of a configuration file. ``kvpack.prefill`` computes a prompt into a store,
from which generation then resumes. For comparison, the same model computes the whole prompt with transformers' own cache.
"""

from __future__ import annotations

import importlib
import tempfile
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

import kvpack
from kvpack import cache_names
from kvpack.bench.serve import DTYPES, PREFIXES, SUFFIX, call_seconds, free_memory, random_model, synchronize
from kvpack.coding.recipes import parse_recipe
from kvpack.formats.errors import InvalidParameter
from kvpack.models import import_transformers
from kvpack.output import step_counter
from kvpack.runtime.modes import one_thread
from kvpack.store.store import CHUNK_TOKENS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvpack.coding.encoding import Progress

SHAPES = {"cuda": ("qwen3.5-9b", "gemma-3-12b"), "cpu": ("small-hybrid", "small-sliding")}
"""One hybrid and one sliding-window shape for each device."""
RECIPES = ("bf16", "octopus-3")
COMPUTED = "computing"
KERNELS = {"fla": "flash-linear-attention", "causal_conv1d": "causal_conv1d"}
"""Optional packages with faster recurrent and convolution layers for transformers, by module name."""


def run(
    shapes: Sequence[str] | None = None,
    recipes: Sequence[str] | None = None,
    prefixes: Sequence[int] | None = None,
    *,
    every: int = 4096,
    layers: int | None = None,
    dtype: str | None = None,
    folder: str | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Run all measurements and return the report for ``show``.

    ``every`` is as in ``kvpack.prefill``, and the other arguments are as in ``serve.run``. Raises InvalidParameter for an unknown shape or
    dtype, for a prefix that is not a multiple of the chunk size, and if the store does not return a whole prompt.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shapes, recipes, prefixes = shapes or SHAPES[device], recipes or RECIPES, prefixes or PREFIXES[device]
    for recipe in recipes:
        parse_recipe(recipe)
    for tokens in prefixes:
        if tokens < 1 or tokens % CHUNK_TOKENS:
            raise InvalidParameter(f"a prefix has {tokens} tokens, expected a multiple of {CHUNK_TOKENS}, the tokens of a chunk of a store")
    if dtype is not None and dtype not in DTYPES:
        raise InvalidParameter(f"dtype is {dtype!r}, expected one of {', '.join(DTYPES)}")
    count = step_counter(progress, len(shapes) * len(prefixes) * (1 + len(recipes)))

    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "every": every,
        "chunk": CHUNK_TOKENS,
        "missing_kernels": [name for module, name in KERNELS.items() if not _importable(module)],
        "rows": [],
    }
    with one_thread() if device == "cpu" else nullcontext(), torch.no_grad():
        for shape in shapes:
            model = random_model(shape, layers, device, dtype, random_weights=False)
            for tokens in prefixes:
                report["rows"] += _rows(model, shape, tokens, recipes, every, device, folder, count)
            del model
            free_memory(device)
    return report


def _importable(module: str) -> bool:
    """Return True if transformers can import the module. transformers silently ignores a module whose dependencies are missing."""
    try:
        importlib.import_module(module)
    except Exception:  # whatever it raises, transformers falls back
        return False
    return True


def _rows(
    model: Any, shape: str, tokens: int, recipes: Sequence[str], every: int, device: str, folder: str | None, count: Callable[[], None]
) -> list[dict[str, Any]]:
    """Return one row for computing a prompt of ``tokens`` tokens and a suffix, and one per recipe for resuming after the prompt."""
    suffix = SUFFIX[device]
    ids = torch.randint(1, min(500, model.config.vocab_size), (1, tokens + suffix), device=device)
    row = {"shape": shape, "layers": model.config.num_hidden_layers, "dtype": str(model.dtype).removeprefix("torch."), "tokens": tokens,
           "suffix": suffix}  # fmt: skip
    held: list[int] = []

    def logits(past: Any, given: torch.Tensor) -> None:
        model(given, **cache_names.cache_argument(model, past), use_cache=True, logits_to_keep=1).logits.argmax().item()

    def compute() -> None:
        past = import_transformers().DynamicCache(config=model.config)
        logits(past, ids)
        held[:] = [sum(x.nbytes for layer in past.layers for x in _tensors(vars(layer)))]

    ((seconds, error),) = call_seconds([compute], device)
    rows = [{**row, "from": COMPUTED, "seconds": seconds, "bytes_per_token": held[0] / (tokens + suffix) if held else None, "error": error}]
    count()
    for recipe in recipes:
        rows.append({**row, "from": recipe, **_resumed(model, ids, tokens, recipe, every, device, folder, logits)})
        free_memory(device)
        count()
    return rows


def _tensors(value: Any) -> list[torch.Tensor]:
    """Yield the tensors in a value, including those in nested lists and mappings."""
    if isinstance(value, torch.Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for part in parts for tensor in _tensors(part)]


def _resumed(
    model: Any,
    ids: torch.Tensor,
    tokens: int,
    recipe: str,
    every: int,
    device: str,
    folder: str | None,
    logits: Callable[[Any, torch.Tensor], None],
) -> dict[str, Any]:
    """Store the first ``tokens`` of ``ids``, load them, and compute the remaining ones. Return times and sizes."""
    from kvpack.integrations.transformers import KvpackCache

    prompt = ids[0, :tokens].tolist()
    identity = kvpack.Identity.of(model, recipe)
    with tempfile.TemporaryDirectory(prefix="kvpack-bench-", dir=folder) as place, kvpack.Store(place, identity) as store:
        synchronize(device)
        begin = time.perf_counter()
        with kvpack.prefill(model, ids[:, :tokens], recipe, every=every) as cache:
            synchronize(device)
            computed = time.perf_counter()
            stored = store.save(prompt, cache)
        saved = time.perf_counter()
        del cache
        free_memory(device)
        if stored != tokens or store.match(prompt) != tokens:
            raise InvalidParameter(f"{recipe}: the store holds {stored} of {tokens} tokens; give a folder with more space")

        def load() -> kvpack.Cache:
            _, found = store.load(prompt, device=device)
            # It was there, and nobody else uses this folder.
            assert found is not None
            assert found.tokens == tokens
            return found

        def resume() -> None:
            with KvpackCache.of(load(), model) as past:
                logits(past, ids[:, tokens:])

        def load_alone() -> None:
            load()
            synchronize(device)

        (seconds, error), (loaded, _) = call_seconds([resume, load_alone], device)
        stats = store.stats()
        packed = load()
        states = sum(x.nbytes for layer in packed for x in layer.states.values())
    return {
        "seconds": seconds,
        "load_seconds": loaded,
        "prefill_seconds": computed - begin,
        "save_seconds": saved - computed,
        "bytes_per_token": stats["bytes"] / tokens,
        "state_bytes_per_token": states * (stats["entries"] - tokens // CHUNK_TOKENS) / tokens,
        "loaded_bytes": packed.nbytes,
        "error": error,
    }


def show(report: dict[str, Any]) -> None:
    """Print a table for each shape."""
    from kvpack.output import bytes_text, print_table

    def text(value: float | None, factor: float = 1e3, digits: int = 1) -> str:
        return "" if value is None else f"{factor * value:,.{digits}f}"

    for shape in dict.fromkeys(row["shape"] for row in report["rows"]):
        own = [row for row in report["rows"] if row["shape"] == shape]
        cells = []
        for row in own:
            (computed,) = (other["seconds"] for other in own if other["tokens"] == row["tokens"] and other["from"] == COMPUTED)
            seconds = row["seconds"]
            loaded = "" if "loaded_bytes" not in row else bytes_text(row["loaded_bytes"])
            cells.append([
                f"{row['tokens']:,} + {row['suffix']}", row["from"], text(row.get("load_seconds")), text(seconds),
                f"{seconds / computed:.3f}" if seconds and computed else "", text(row["bytes_per_token"], 1, 0),
                text(row.get("state_bytes_per_token"), 1, 0), loaded, text(row.get("prefill_seconds"), 1), text(row.get("save_seconds"), 1),
            ])  # fmt: skip
        title = f"{shape}, {own[0]['layers']} layers, random weights in {own[0]['dtype']}, on {report['device']}"
        columns = [
            "prompt +\nsuffix", "from", "load\nms", "first token\nms", "x computing", "bytes\nper token", "of these,\nstates",
            "a load\nreads", "prefill\ns", "save\ns",
        ]  # fmt: skip
        print_table(title, columns, cells)
    for row in report["rows"]:
        if row["error"] is not None:
            print(f"{row['shape']}, {row['tokens']:,} + {row['suffix']}, {row['from']}: {row['error']}")
    print("\ncomputing: the prompt and the suffix in one pass over transformers' own cache, and the bytes of this cache.")
    print("Others: the suffix after the prompt was loaded from a store, whose files are in the page cache, and the bytes of the store.")
    print(f"States are stored after every {report['every']:,} tokens, and a load reads those after the last one. Layers with a sliding")
    print("window store all tokens, and a load reads those within the window.")
    if report["missing_kernels"]:
        print(f"Cannot be imported: {', '.join(report['missing_kernels'])}; recurrent layers run in plain PyTorch, in all rows.")
    if report["device"] == "cpu":
        print("Times of loads and first tokens are of the process, in one thread.")
