"""kvpack bench serve: time decode steps, ``generate`` and the first token after a stored prefix, and measure memory.

The model has random weights and a shape that is built in or read from a configuration. Keys and values are random. All results are compared
with transformers' own caches, or with recomputation, in the same run. On a CPU, times are process times in one thread, and each round
measures all caches.
"""

from __future__ import annotations

import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import kvpack
from kvpack import cache_names
from kvpack.formats.errors import InvalidParameter, WriteFailed
from kvpack.hub import model_folder
from kvpack.models import import_transformers
from kvpack.output import step_counter
from kvpack.runtime.modes import one_thread

from .process_time import time_interleaved
from .serve_cpu import step_rows, with_plain_attention
from .serve_graphs import StaticStates, graph_step, use_flash_attention, without_graphs
from .serve_rows import DYNAMIC, FLASH, OUT_OF_MEMORY_ERROR, TIMES, measured_row, try_measure

if TYPE_CHECKING:
    from kvpack.coding.encoding import Progress

LLAMA = {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_key_value_heads": 8}
GEMMA = {"vocab_size": 262208, "hidden_size": 3840, "intermediate_size": 15360, "num_hidden_layers": 48, "num_key_value_heads": 8}
QWEN = {"vocab_size": 151936, "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_key_value_heads": 8}
QWEN_3_5 = {"vocab_size": 248320, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32, "num_key_value_heads": 4}
SMALL = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_key_value_heads": 2}
SHAPES: dict[str, tuple[str, dict[str, int]]] = {
    "llama-3-8b": ("LlamaConfig", {**LLAMA, "num_attention_heads": 32, "head_dim": 128}),
    "qwen3-4b": ("Qwen3Config", {**QWEN, "num_attention_heads": 32, "head_dim": 128}),
    "gemma-3-12b": ("Gemma3TextConfig", {**GEMMA, "num_attention_heads": 16, "head_dim": 256, "sliding_window": 1024}),
    "qwen3.5-9b": ("Qwen3_5TextConfig", {**QWEN_3_5, "num_attention_heads": 16, "head_dim": 256, "linear_num_value_heads": 32}),
    "small-hybrid": ("Qwen3_5TextConfig", {**SMALL, "num_attention_heads": 4, "head_dim": 64, "linear_num_value_heads": 4,
                                           "linear_num_key_heads": 2, "linear_key_head_dim": 32, "linear_value_head_dim": 32}),
    "small-sliding": ("Gemma3TextConfig", {**SMALL, "num_hidden_layers": 6, "num_attention_heads": 4, "head_dim": 64,
                                           "sliding_window": 128}),
    "small": ("LlamaConfig", {**SMALL, "num_attention_heads": 4, "head_dim": 64}),
}  # fmt: skip
"""Configurations by name: the transformers class and its settings."""

RECIPES = ("kv=group:b=4,g=32", "oscar-2", "octopus-3")
CONTEXTS = {"cuda": ((1, 32768), (1, 131072), (8, 16384), (24, 16384)), "cpu": ((1, 1024),)}
"""Batch sizes and numbers of tokens for decode steps, by device."""
PREFIXES = {"cuda": (8192, 32768), "cpu": (1024,)}
SUFFIX = {"cuda": 512, "cpu": 32}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
WARM_STEPS, TIMED_STEPS, GRAPH_STEPS = 6, 12, 24
GENERATED = 64
"""Number of tokens that ``generate`` adds on a GPU."""
DENSE_FILE = "dense safetensors"
"""Name, in reports, of the file with keys and values in the model's dtype."""


def run(
    shape: str | None,
    recipes: Sequence[str] | None,
    contexts: Sequence[tuple[int, int]] | None,
    prefixes: Sequence[int] | None,
    layers: int | None,
    folder: str | None,
    out: str | None,
    progress: Progress | None = None,
    *,
    dtype: str | None = None,
) -> dict[str, Any]:
    """Measure a model, and return the report that ``show`` prints.

    ``shape`` is a name in SHAPES, a name on the hub, or the path of a config.json or of its folder. ``dtype``, a name in DTYPES, is the
    dtype of weights, keys and values. None selects the configuration's dtype, or bf16 if it has none. Raises InvalidParameter if the shape
    or dtype is unknown, for float32 on a CUDA device, or if a layer's attention is neither full nor sliding.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = shape or ("llama-3-8b" if device == "cuda" else "small")
    if dtype is not None and dtype not in DTYPES:
        raise InvalidParameter(f"dtype is {dtype!r}, expected one of {', '.join(DTYPES)}")
    with one_thread() if device == "cpu" else nullcontext():
        report = _measure(shape, recipes, contexts, prefixes, layers, folder, device, dtype, progress)
    if out is not None:
        try:
            Path(out).mkdir(parents=True, exist_ok=True)
            Path(out, "serve.json").write_text(json.dumps(report, indent=2) + "\n")
        except OSError as error:
            raise WriteFailed(f"{error.filename}: could not be written: {error.strerror}") from None
    return report


def _measure(
    shape: str,
    recipes: Sequence[str] | None,
    contexts: Sequence[tuple[int, int]] | None,
    prefixes: Sequence[int] | None,
    layers: int | None,
    folder: str | None,
    device: str,
    dtype: str | None,
    progress: Progress | None,
) -> dict[str, Any]:
    model = random_model(shape, layers, device, dtype)
    recipes = recipes or RECIPES
    contexts = CONTEXTS[device] if contexts is None else contexts
    prefixes = PREFIXES[device] if prefixes is None else prefixes
    count = step_counter(progress, len(contexts) * (1 + len(recipes)) + len(prefixes) * (2 + len(recipes)))

    report: dict[str, Any] = {
        "shape": shape,
        "layers": model.config.num_hidden_layers,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "dtype": next(name for name, torch_dtype in DTYPES.items() if torch_dtype == model.dtype),
        "weights_bytes": sum(parameter.nbytes for parameter in model.parameters()),
        "decode": [],
        "first_token": [],
    }
    with torch.no_grad():
        for batch, tokens in contexts:
            report["decode"] += _decode_rows(model, batch, tokens, recipes, device, count)
        for tokens in prefixes:
            report["first_token"] += _first_token_rows(model, tokens, recipes, device, folder, count)
    return report


def random_model(shape: str, layers: int | None, device: str, dtype: str | None, *, random_weights: bool = True) -> Any:
    """Create a model with random weights. Its shape is built in or read from a configuration.

    With ``random_weights``, all layers must have full or sliding attention, because their keys and values will be random.
    """
    library = import_transformers()
    config = _load_config(shape, layers)
    if random_weights and (others := {*(getattr(config, "layer_types", None) or ())} - {"full_attention", "sliding_attention"}):
        raise InvalidParameter(
            f"{shape} has layers of {', '.join(sorted(others))}, but this benchmark draws random keys and values only for full and sliding "
            "attention: run make bench-resume in a clone of kvpack, which computes them"
        )
    config._attn_implementation = "sdpa"
    weights_dtype = DTYPES[dtype] if dtype is not None else config.dtype or torch.bfloat16
    if weights_dtype not in DTYPES.values():
        raise InvalidParameter(f"{shape}: dtype is {weights_dtype}, expected one of {', '.join(DTYPES)}")
    if weights_dtype == torch.float32 and device == "cuda":
        raise InvalidParameter(f"{shape}: dtype is fp32, but FlashAttention supports only bf16 and fp16: pass --dtype bf16")
    with torch.device(device):
        return library.AutoModelForCausalLM.from_config(config, dtype=weights_dtype).eval()


def _load_config(shape: str, layers: int | None) -> Any:
    library = import_transformers()
    if shape in SHAPES:
        name, settings = SHAPES[shape]
        if layers is not None:
            settings = {**settings, "num_hidden_layers": layers}
        return getattr(library, name)(**settings, max_position_embeddings=1 << 20)
    try:
        source = shape if Path(shape).exists() else model_folder(shape, weights=False)
        config = library.AutoConfig.from_pretrained(source).get_text_config(decoder=True)
    except (OSError, ValueError) as error:
        if Path(shape).exists():
            raise InvalidParameter(f"{shape}: transformers cannot read this configuration: {error}") from None
        raise InvalidParameter(
            f"shape is {shape!r}, expected one of {', '.join(SHAPES)}, a model's name on the hub, or the path of a config.json or of its "
            f"folder; where the hub can be reached, get a model's configuration with: hf download {shape} config.json"
        ) from None
    types = getattr(config, "layer_types", None)
    if layers is not None:
        config.num_hidden_layers = layers
        if types:
            config.layer_types = types[:layers]
    return config


def _tokens_in_layers(config: Any, tokens: int) -> list[int]:
    """Return the number of tokens in each layer's cache after ``tokens`` tokens. A layer with a sliding window has dropped older tokens."""
    types = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    return [tokens if kind == "full_attention" else min(tokens, config.sliding_window - 1) for kind in types]


def _random_states(model: Any, batch: int, tokens: int, device: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [_random_layer_states(model, batch, stored_tokens, device) for stored_tokens in _tokens_in_layers(model.config, tokens)]


def _random_layer_states(model: Any, batch: int, tokens: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    config = model.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    k, v = (torch.randn(batch, heads, tokens, dim, device=device, dtype=model.dtype) for _ in "kv")
    return k, v


def _dynamic_cache(model: Any, states: Sequence[tuple[torch.Tensor, torch.Tensor]], tokens: int) -> Any:
    past = import_transformers().DynamicCache(states, config=model.config)
    for layer in past.layers:
        if layer.is_sliding:
            # The layer counts the tokens passed to it, which were only those in the window.
            layer.cumulative_length = tokens
    return past


def _add_skipped(states: Sequence[tuple[torch.Tensor, torch.Tensor]], tokens: int) -> list[tuple[torch.Tensor, torch.Tensor, int]]:
    """Return ``states`` with the number of tokens that each layer has dropped, as ``kvpack.pack`` accepts them."""
    return [(k, v, tokens - k.shape[2]) for k, v in states]


def _random_ids(model: Any, batch: int, tokens: int, device: str) -> torch.Tensor:
    return torch.randint(1, min(500, model.config.vocab_size), (batch, tokens), device=device)


def _decode_rows(
    model: Any, batch: int, tokens: int, recipes: Sequence[str], device: str, count: Callable[[], None]
) -> list[dict[str, Any]]:
    row: dict[str, Any] = {"batch": batch, "tokens": tokens}
    if device == "cpu":
        states = _random_states(model, batch, tokens, device)
        packed = {recipe: kvpack.pack(_add_skipped(states, tokens), recipe) for recipe in recipes}
        dense = _dynamic_cache(model, states, tokens)
        result = step_rows(model, with_plain_attention(model), dense, packed, _random_ids(model, batch, tokens + 1, device))
        for _ in ("dense", *packed):
            count()
        return [{**row, **packed_row} for packed_row in result]
    rows = [{**row, **result} for result in _dense_rows(model, batch, tokens, device)]
    free_memory(device)
    count()
    for recipe in recipes:
        rows.append({**row, **measured_row(recipe, partial(_packed_row, model, batch, tokens, recipe, device))})
        free_memory(device)
        count()
    return rows


def _dense_rows(model: Any, batch: int, tokens: int, device: str) -> list[dict[str, Any]]:
    """Return the rows of transformers' DynamicCache, with PyTorch's choice of attention and with FlashAttention."""
    try:
        states = _random_states(model, batch, tokens, device)
    except torch.OutOfMemoryError:
        return [{"cache": name, **dict.fromkeys(TIMES), "error": OUT_OF_MEMORY_ERROR} for name in (DYNAMIC, FLASH)]
    dense_bytes = sum(x.nbytes for pair in states for x in pair)

    def graph() -> dict[str, Any]:
        with StaticStates(model, states, tokens) as static:
            return {"graph_seconds": graph_step(model, static.cache, batch, tokens, GRAPH_STEPS)}

    def steps(*, flash: bool) -> dict[str, Any]:
        _reset_peak(device)
        past = _dynamic_cache(model, states, tokens)
        with use_flash_attention() if flash else nullcontext():
            step = _step_seconds(model, past, batch, device)
            generated = _generate_seconds(model, past, batch, device, disable_compile=True)
        return {
            "step_seconds": step,
            "generate_seconds": generated,
            "cache_bytes": dense_bytes,
            "peak_bytes": _peak_bytes(device),
        }

    in_graph = measured_row(DYNAMIC, graph)
    free_memory(device)
    rows = []
    for name, flash in ((DYNAMIC, False), (FLASH, True)):
        rows.append(measured_row(name, partial(steps, flash=flash)))
        free_memory(device)
    # The graph belongs to no cache, so the first row has its time.
    return [in_graph | {name: value for name, value in rows[0].items() if value is not None}, *rows[1:]]


def _random_packed_cache(model: Any, batch: int, tokens: int, recipe: str, device: str) -> kvpack.Cache:
    """Return a packed cache of random keys and values. To save memory, each layer is packed before the next one is created."""
    layers = []
    for stored_tokens in _tokens_in_layers(model.config, tokens):
        pair = _random_layer_states(model, batch, stored_tokens, device)
        layers.append(kvpack.pack([(*pair, tokens - stored_tokens)], recipe)[0])
    return kvpack.Cache(tuple(layers), recipe)


def _packed_row(model: Any, batch: int, tokens: int, recipe: str, device: str) -> dict[str, Any]:
    from kvpack.integrations.transformers import KvpackCache

    cache = _random_packed_cache(model, batch, tokens, recipe, device)
    size = cache.nbytes
    free_memory(device)
    _reset_peak(device)
    # The first run compiles the kernels for steps and for full windows.
    for _ in range(2):
        with KvpackCache.of(cache, model) as past:
            generated = _generate_seconds(model, past, batch, device)
        # Free the first cache: users do not have two at a time, so they would not be part of the peak.
        del past
        free_memory(device)
    with KvpackCache.of(cache, model) as past:
        del cache
        step = _step_seconds(model, past, batch, device)
        with without_graphs(past):
            eager = _step_seconds(model, past, batch, device)
        graph = graph_step(model, past, batch, int(past.get_seq_length()), GRAPH_STEPS)
    return {
        "step_seconds": step,
        "eager_seconds": eager,
        "generate_seconds": generated,
        "graph_seconds": graph,
        "cache_bytes": size,
        "peak_bytes": _peak_bytes(device),
    }


def _generate_seconds(model: Any, past: Any, batch: int, device: str, **options: Any) -> float:
    """Return the seconds that ``generate`` takes per token added to ``past``, including its setup."""
    count = GENERATED
    ids = _random_ids(model, batch, int(past.get_seq_length()) + 1, device)
    options |= {"min_new_tokens": count, "max_new_tokens": count, "do_sample": False, "pad_token_id": 0}
    synchronize(device)
    begin = time.perf_counter()
    model.generate(ids, **cache_names.cache_argument(model, past), **options)
    synchronize(device)
    return (time.perf_counter() - begin) / count


def _step_seconds(model: Any, past: Any, batch: int, device: str) -> float:
    """Return the mean time of a decode step in seconds. Steps that trigger compilation run before the measurement."""
    token, over = torch.full((batch, 1), 5, device=device), cache_names.cache_argument(model, past)
    begin = 0.0
    for step in range(TIMED_STEPS + WARM_STEPS):
        if step == WARM_STEPS:
            synchronize(device)
            begin = time.perf_counter()
        model(token, **over, use_cache=True, logits_to_keep=1)
    synchronize(device)
    return (time.perf_counter() - begin) / TIMED_STEPS


def _first_token_rows(
    model: Any, tokens: int, recipes: Sequence[str], device: str, folder: str | None, count: Callable[[], None]
) -> list[dict[str, Any]]:
    """Return rows with the time to the first logits of a prompt of ``tokens`` tokens and a suffix.

    In one row, the model computes the whole prompt. In the others, the first ``tokens`` tokens are loaded from a file in the page cache.
    """
    from safetensors.torch import load_file, save_file

    from kvpack.integrations.transformers import KvpackCache
    from kvpack.integrations.transformers.models import model_identity

    library = import_transformers()
    suffix = SUFFIX[device]
    ids = _random_ids(model, 1, tokens + suffix, device)
    row = {"tokens": tokens, "suffix": suffix}

    def logits(past: Any, ids: torch.Tensor) -> None:
        model(ids, **cache_names.cache_argument(model, past), use_cache=True, logits_to_keep=1).logits.argmax().item()

    calls: dict[str, Callable[[], None]] = {
        "recompute": lambda: logits(library.DynamicCache(config=model.config), ids),
    }
    loads: dict[str, Callable[[], None]] = {}
    sizes: dict[str, int] = {}
    states = _random_states(model, 1, tokens, device)
    with tempfile.TemporaryDirectory(dir=folder) as place:
        dense = Path(place, "dense.safetensors")
        save_file({f"{number}.{name}": x for number, pair in enumerate(states) for name, x in zip("kv", pair, strict=True)}, dense)

        def from_dense() -> None:
            read = load_file(dense, device=device)
            pairs = [(read[f"{number}.k"], read[f"{number}.v"]) for number in range(len(states))]
            logits(_dynamic_cache(model, pairs, tokens), ids[:, tokens:])

        calls[DENSE_FILE], sizes[DENSE_FILE] = from_dense, dense.stat().st_size
        for number, recipe in enumerate(recipes):
            path = Path(place, f"{number}.kvpack")
            # Record the model, as in files of a KvpackCache, because loading checks it.
            kvpack.save(replace(kvpack.pack(_add_skipped(states, tokens), recipe), model=model_identity(model)), path)

            def from_packed(path: Path = path) -> None:
                with KvpackCache.load(path, model) as past:
                    logits(past, ids[:, tokens:])

            def load_only(path: Path = path) -> None:
                kvpack.load(path, device=device)
                synchronize(device)

            calls[recipe], loads[recipe], sizes[recipe] = from_packed, load_only, path.stat().st_size
        timed = call_seconds([*calls.values(), *loads.values()], device)
    rows = [{**row, "from": name, "seconds": taken} for name, (taken, _) in zip(calls, timed, strict=False)]
    for result, (_, error) in zip(rows, timed, strict=False):
        if error is not None:
            result["error"] = error
        if result["from"] in sizes:
            result["file_bytes"] = sizes[result["from"]]
        count()
    for result, (taken, _) in zip(rows[2:], timed[len(calls) :], strict=True):
        result["load_seconds"] = taken
    return rows


def _reset_peak(device: str) -> None:
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()


def _peak_bytes(device: str) -> int | None:
    return torch.cuda.max_memory_allocated() if device == "cuda" else None


REPEATS = 3
"""Number of timings of a call, after one warm-up call."""


def call_seconds(calls: Sequence[Callable[[], None]], device: str) -> list[tuple[float | None, str | None]]:
    """Return a (seconds, error) pair for each call: its time and None, or None and the text of the error that it raised."""
    if device == "cpu":
        return [(measured.process, None) for measured in time_interleaved(calls, REPEATS)]
    return [try_measure(partial(_median_seconds, call, device)) for call in calls]


def _median_seconds(call: Callable[[], None], device: str) -> float:
    result = []
    for _ in range(REPEATS + 1):
        begin = time.perf_counter()
        call()
        result.append(time.perf_counter() - begin)
    free_memory(device)
    return statistics.median(result[1:])


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def free_memory(device: str) -> None:
    """Return unused memory to the device."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
