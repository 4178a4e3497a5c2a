"""kvpack bench serve: what a user of a model gets: decode steps, ``generate``, the first token after a stored prefix, memory.

The model has the shape of a known one, or of a configuration, and random weights; keys and values are random. Every figure is beside that
of transformers' own caches, or of recomputing, in the same run.
"""

from __future__ import annotations

import gc
import json
import statistics
import tempfile
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import kvpack
from kvpack.formats.errors import InvalidParameter, WriteFailed
from kvpack.models import transformers_library

from .serve_graphs import StaticStates, flash_attention, graph_step

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvpack.coding.encoding import Progress

LLAMA = {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_key_value_heads": 8}
GEMMA = {"vocab_size": 262208, "hidden_size": 3840, "intermediate_size": 15360, "num_hidden_layers": 48, "num_key_value_heads": 8}
QWEN = {"vocab_size": 151936, "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_key_value_heads": 8}
SHAPES: dict[str, tuple[str, dict[str, int]]] = {
    "llama-3-8b": ("LlamaConfig", {**LLAMA, "num_attention_heads": 32, "head_dim": 128}),
    "qwen3-4b": ("Qwen3Config", {**QWEN, "num_attention_heads": 32, "head_dim": 128}),
    "gemma-3-12b": ("Gemma3TextConfig", {**GEMMA, "num_attention_heads": 16, "head_dim": 256, "sliding_window": 1024}),
    "small": ("LlamaConfig", {
        "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_key_value_heads": 2,
        "num_attention_heads": 4, "head_dim": 64,
    }),
}  # fmt: skip
"""Configurations by name: the class of transformers and its settings."""

RECIPES = ("kv=group:b=4,g=32", "oscar-2", "octopus-3")
CONTEXTS = {"cuda": ((1, 32768), (1, 131072), (8, 16384), (24, 16384)), "cpu": ((1, 1024),)}
"""Batch and tokens of a decode step, by device."""
PREFIXES = {"cuda": (8192, 32768), "cpu": (1024,)}
SUFFIX = {"cuda": 512, "cpu": 32}
WARM_STEPS, EAGER_STEPS, GRAPH_STEPS = 4, 12, 24
GENERATED = {"cuda": 64, "cpu": 8}
"""Tokens that ``generate`` adds."""


def run(
    shape: str | None,
    recipes: Sequence[str] | None,
    contexts: Sequence[tuple[int, int]] | None,
    prefixes: Sequence[int] | None,
    layers: int | None,
    folder: str | None,
    out: str | None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Measure; the report that ``show`` prints. ``shape`` is a name in SHAPES, or the path of a config.json or of its folder.

    Raises InvalidParameter for a shape that is not known, and for layers that are not of full or sliding attention.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = shape or ("llama-3-8b" if device == "cuda" else "small")
    model = _model(shape, layers, device)
    recipes = recipes or RECIPES
    contexts = CONTEXTS[device] if contexts is None else contexts
    prefixes = PREFIXES[device] if prefixes is None else prefixes
    total = len(contexts) * (1 + len(recipes)) + len(prefixes) * (2 + len(recipes))
    done = 0

    def count() -> None:
        nonlocal done
        done += 1
        if progress:
            progress(done, total)

    report: dict[str, Any] = {
        "shape": shape,
        "layers": model.config.num_hidden_layers,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "weights_bytes": sum(parameter.nbytes for parameter in model.parameters()),
        "decode": [],
        "first_token": [],
    }
    with torch.no_grad():
        for batch, tokens in contexts:
            report["decode"] += _decode_rows(model, batch, tokens, recipes, device, count)
        for tokens in prefixes:
            report["first_token"] += _first_token_rows(model, tokens, recipes, device, folder, count)
    if out is not None:
        try:
            Path(out).mkdir(parents=True, exist_ok=True)
            Path(out, "serve.json").write_text(json.dumps(report, indent=2) + "\n")
        except OSError as error:
            raise WriteFailed(f"{error.filename}: could not be written: {error.strerror}") from None
    return report


def _model(shape: str, layers: int | None, device: str) -> Any:
    library = transformers_library()
    config = _config(shape, layers)
    config._attn_implementation = "sdpa"
    with torch.device(device):
        return library.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def _config(shape: str, layers: int | None) -> Any:
    library = transformers_library()
    if shape in SHAPES:
        name, settings = SHAPES[shape]
        if layers is not None:
            settings = {**settings, "num_hidden_layers": layers}
        return getattr(library, name)(**settings, max_position_embeddings=1 << 20)
    if not Path(shape).exists():
        raise InvalidParameter(f"shape is {shape!r}, expected one of {', '.join(SHAPES)}, or the path of a config.json or of its folder")
    config = library.AutoConfig.from_pretrained(shape).get_text_config(decoder=True)
    types = getattr(config, "layer_types", None) or []
    if layers is not None:
        config.num_hidden_layers = layers
        if types:
            config.layer_types = types = types[:layers]
    if others := set(types) - {"full_attention", "sliding_attention"}:
        raise InvalidParameter(f"{shape}: layers of {', '.join(sorted(others))}; keys and values are drawn for full and sliding attention")
    return config


def _kept(config: Any, tokens: int) -> list[int]:
    """How many of ``tokens`` the cache of each layer holds: a sliding window has dropped the others."""
    types = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    return [tokens if kind == "full_attention" else min(tokens, config.sliding_window - 1) for kind in types]


def _states(model: Any, batch: int, tokens: int, device: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [_layer_states(model, batch, kept, device) for kept in _kept(model.config, tokens)]


def _layer_states(model: Any, batch: int, tokens: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    config = model.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    k, v = (torch.randn(batch, heads, tokens, dim, device=device, dtype=torch.bfloat16) for _ in "kv")
    return k, v


def _dynamic_cache(model: Any, states: Sequence[tuple[torch.Tensor, torch.Tensor]], tokens: int) -> Any:
    past = transformers_library().DynamicCache(states, config=model.config)
    for layer in past.layers:
        if layer.is_sliding:
            # It was given what a window holds, and counts what it is given.
            layer.cumulative_length = tokens
    return past


def _random_ids(model: Any, batch: int, tokens: int, device: str) -> torch.Tensor:
    return torch.randint(1, min(500, model.config.vocab_size), (batch, tokens), device=device)


def _decode_rows(
    model: Any, batch: int, tokens: int, recipes: Sequence[str], device: str, count: Callable[[], None]
) -> list[dict[str, Any]]:
    row: dict[str, Any] = {"batch": batch, "tokens": tokens}
    rows = [{**row, **found} for found in _dense_steps(model, batch, tokens, device)]
    _free(device)
    count()
    for recipe in recipes:
        rows.append({**row, "cache": recipe, **_packed_steps(model, batch, tokens, recipe, device)})
        _free(device)
        count()
    return rows


def _dense_steps(model: Any, batch: int, tokens: int, device: str) -> list[dict[str, Any]]:
    """Steps over a DynamicCache, with the attention that PyTorch chooses, and on a GPU with flash attention."""
    names = ["DynamicCache"] if device == "cpu" else ["DynamicCache", "DynamicCache, flash"]
    rows: list[dict[str, Any]] = [{"cache": name, **dict.fromkeys(_DENSE)} for name in names]
    try:
        states = _states(model, batch, tokens, device)
        for row in rows:
            row["cache_bytes"] = sum(x.nbytes for pair in states for x in pair)
        if device == "cuda":
            with StaticStates(model, states, tokens) as static:
                rows[0]["graph_seconds"] = graph_step(model, static.cache, batch, tokens, GRAPH_STEPS)
        for row in rows:
            _reset_peak(device)
            past = _dynamic_cache(model, states, tokens)
            with flash_attention() if row["cache"].endswith("flash") else nullcontext():
                row["eager_seconds"] = _eager_steps(model, past, batch, device)
                row["generate_seconds"] = _generated(model, past, batch, device)
            row["peak_bytes"] = _peak(device)
            del past
            _free(device)
    except torch.OutOfMemoryError:
        # What has been measured stays.
        pass
    return rows


_DENSE = ("eager_seconds", "generate_seconds", "graph_seconds", "cache_bytes", "peak_bytes")


def _packed_steps(model: Any, batch: int, tokens: int, recipe: str, device: str) -> dict[str, Any]:
    from kvpack.integrations.transformers import KvpackCache

    layers = []
    for kept in _kept(model.config, tokens):
        pair = _layer_states(model, batch, kept, device)
        layers.append(kvpack.pack([(*pair, tokens - kept)], recipe)[0])
    cache = kvpack.Cache(tuple(layers), recipe)
    del pair, layers
    size = cache.nbytes
    _free(device)
    _reset_peak(device)
    with KvpackCache(model, cache, graphs=True) as past:
        generated = _generated(model, past, batch, device)
    with KvpackCache(model, cache) as past:
        del cache
        eager = _eager_steps(model, past, batch, device)
        graph = graph_step(model, past, batch, tokens + EAGER_STEPS + WARM_STEPS, GRAPH_STEPS) if device == "cuda" else None
    return {
        "eager_seconds": eager,
        "generate_seconds": generated,
        "graph_seconds": graph,
        "cache_bytes": size,
        "peak_bytes": _peak(device),
    }


def _generated(model: Any, past: Any, batch: int, device: str) -> float:
    """Seconds of ``generate`` for each token that it adds to ``past``, with all that it does before the first."""
    count = GENERATED[device]
    ids = _random_ids(model, batch, past.get_seq_length() + 1, device)
    options = {"min_new_tokens": count, "max_new_tokens": count, "do_sample": False, "pad_token_id": 0}
    _wait(device)
    begin = time.perf_counter()
    model.generate(ids, past_key_values=past, **options)
    _wait(device)
    return (time.perf_counter() - begin) / count


def _eager_steps(model: Any, past: Any, batch: int, device: str) -> float:
    """Seconds of one decode step, the mean of several after those that compile."""
    token = torch.full((batch, 1), 5, device=device)
    begin = 0.0
    for step in range(EAGER_STEPS + WARM_STEPS):
        if step == WARM_STEPS:
            _wait(device)
            begin = time.perf_counter()
        model(token, past_key_values=past, use_cache=True, logits_to_keep=1)
    _wait(device)
    return (time.perf_counter() - begin) / EAGER_STEPS


def _first_token_rows(
    model: Any, tokens: int, recipes: Sequence[str], device: str, folder: str | None, count: Callable[[], None]
) -> list[dict[str, Any]]:
    """Seconds from a file in the page cache, or from nothing, to the first logits after ``tokens`` and a suffix."""
    from safetensors.torch import load_file, save_file

    from kvpack.integrations.transformers import KvpackCache
    from kvpack.integrations.transformers.models import identity_of

    library = transformers_library()
    suffix = SUFFIX[device]
    ids = _random_ids(model, 1, tokens + suffix, device)
    row = {"tokens": tokens, "suffix": suffix}

    def logits(past: Any, given: torch.Tensor) -> None:
        model(given, past_key_values=past, use_cache=True, logits_to_keep=1).logits.argmax().item()

    rows = [{**row, "from": "recompute", "seconds": _median(lambda: logits(library.DynamicCache(config=model.config), ids))}]
    count()
    states = _states(model, 1, tokens, device)
    dropped = [(*pair, tokens - pair[0].shape[2]) for pair in states]
    with tempfile.TemporaryDirectory(dir=folder) as place:
        path = Path(place, "bf16.safetensors")
        save_file({f"{number}.{name}": x for number, pair in enumerate(states) for name, x in zip("kv", pair, strict=True)}, path)

        def from_bf16() -> None:
            read = load_file(path, device=device)
            pairs = [(read[f"{number}.k"], read[f"{number}.v"]) for number in range(len(states))]
            logits(_dynamic_cache(model, pairs, tokens), ids[:, tokens:])

        rows.append({**row, "from": "bf16 safetensors", "seconds": _median(from_bf16), "file_bytes": path.stat().st_size})
        path.unlink()
        _free(device)
        count()
        for recipe in recipes:
            path = Path(place, "prefix.kvpack")
            # It names its model, as a file of a KvpackCache does, which is checked.
            kvpack.save(replace(kvpack.pack(dropped, recipe), model=identity_of(model)), path)

            def from_packed(path: Path = path) -> None:
                with KvpackCache.load(path, model) as past:
                    logits(past, ids[:, tokens:])

            def load_alone(path: Path = path) -> None:
                kvpack.load(path, device=device)
                _wait(device)

            seconds = _median(from_packed)
            rows.append({**row, "from": recipe, "seconds": seconds, "load_seconds": _median(load_alone), "file_bytes": path.stat().st_size})
            path.unlink()
            _free(device)
            count()
    return rows


def _median(call: Callable[[], None]) -> float:
    found = []
    for _ in range(4):
        begin = time.perf_counter()
        call()
        found.append(time.perf_counter() - begin)
    return statistics.median(found[1:])


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _free(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def _reset_peak(device: str) -> None:
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()


def _peak(device: str) -> int | None:
    return torch.cuda.max_memory_allocated() if device == "cuda" else None


def show(report: dict[str, Any]) -> None:
    """Print a table of decode steps and one of first tokens."""
    from kvpack.output import bytes_text, print_table

    def milliseconds(seconds: float | None) -> str:
        return "" if seconds is None else f"{1e3 * seconds:.2f}"

    def ratio(mine: float | None, *peers: float | None) -> str:
        return " / ".join(f"{mine / peer:.2f}" for peer in peers if mine is not None and peer is not None)

    rows = []
    dense: list[dict[str, Any]] = []
    for row in report["decode"]:
        if row["cache"].startswith("DynamicCache"):
            dense = [*(dense if row["cache"] != "DynamicCache" else []), row]
        static = dense[0]["graph_seconds"]
        peak = None if row.get("peak_bytes") is None else row["peak_bytes"] / (report["weights_bytes"] + row["cache_bytes"])
        graph, eager, generated = row["graph_seconds"], row["eager_seconds"], row["generate_seconds"]
        size = "does not fit" if eager is None else bytes_text(row["cache_bytes"])
        rows.append([
            f"{row['batch']} x {row['tokens']:,}", row["cache"], size,
            milliseconds(eager), ratio(eager, *(peer["eager_seconds"] for peer in dense)),
            milliseconds(generated), ratio(generated, *(peer["generate_seconds"] for peer in dense)), ratio(generated, static),
            milliseconds(graph), ratio(graph, static), "" if graph is None else f"{row['batch'] / graph:.0f}",
            "" if peak is None else f"{peak:.3f}",
        ])  # fmt: skip
    title = f"Decode steps of {report['shape']}, {report['layers']} layers, random weights, on {report['device']}"
    beside = "x Dynamic-\nCache" + (" / flash" if len(dense) > 1 else "")
    columns = [
        "batch x tokens", "cache", "cache\nbytes", "eager\nms", beside, "generate\nms/token", beside, "x bf16\nin a graph",
        "graph\nms", "x bf16\nin a graph", "tokens/s\nin graphs", "peak memory x\nweights + cache",
    ]  # fmt: skip
    print_table(title, columns, rows)
    print("\nEvery eager step is of a length that is new, as in generate; over packed caches generate replays graphs (graphs=True).")
    print("The bf16 graph is of preallocated states, without a mask, and the faster of SDPA's flash and cuDNN attention.")
    rows = []
    for row in report["first_token"]:
        own = [other for other in report["first_token"] if other["tokens"] == row["tokens"]]
        seconds = {other["from"]: other["seconds"] for other in own}
        rows.append([
            f"{row['tokens']:,} + {row['suffix']}", row["from"], "" if "file_bytes" not in row else bytes_text(row["file_bytes"]),
            milliseconds(row.get("load_seconds")), milliseconds(row["seconds"]), ratio(row["seconds"], seconds["recompute"]),
            ratio(row["seconds"], seconds["bf16 safetensors"]),
        ])  # fmt: skip
    columns = ["prefix +\nsuffix", "from", "file", "load\nms", "first token\nms", "x recompute", "x bf16\nfile"]
    print_table("Time to the first token; files are in the page cache", columns, rows)
