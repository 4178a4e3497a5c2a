"""The file demo: pack a small model's KV cache with several recipes, and continue each file in its own process.

The writing process prefills 2,000 tokens of real text that contains five lines with keys, and packs and saves the cache. Each reading
process has only the file. It attends over the packed layers, looks up the five keys, continues the text, and scores the 500 bytes that
actually follow. Tokens are bytes.
"""

from __future__ import annotations

import gc
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

import kvpack
from kvpack import Cache, cache_names
from kvpack.coding.encoding import Progress, suppress_rounding_warnings
from kvpack.coding.recipes import parse_recipe
from kvpack.formats.errors import WriteFailed
from kvpack.models import BOS, demo_text, import_transformers, load_model
from kvpack.output import bytes_text, print_table, printable, step_counter
from kvpack.runtime.modes import one_thread

RECIPES = ("bf16", "turboangle-k8v4", "kvpack-4", "octopus-3", "hqmq-s24-r3", "kvpack-3", "oscar-2", "kvpack-2")
"""The uncompressed baseline, kvpack's own recipes, and one recipe of each published family, in descending order of bits."""

PROMPT_BYTES = 2000
SAMPLE_BYTES = 60
READERS = 2
"""Number of concurrent reading processes."""
IDENTITY = {"name": "tinylm"}

_KEY_LINE = re.compile(rb"\[\[key (\w{6}) = (\w{8})\]\]")


def run(recipes: Sequence[str], out: str | None = None, *, progress: Progress | None = None) -> dict[str, Any]:
    """Write one file per recipe, and read each file in a new process. Returns sizes, errors, answers and times as JSON values.

    If ``out`` is set, the files are kept in this folder. ``progress`` counts files written and read. Raises InvalidParameter for an invalid
    recipe, and KvpackError if transformers is not installed or a reader fails.
    """
    for recipe in recipes:
        parse_recipe(recipe)
    # The tensors are small, and on a busy machine several threads would wait for each other.
    with one_thread(), tempfile.TemporaryDirectory(prefix="kvpack-demo-") as temporary:
        folder = Path(out or temporary)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise WriteFailed(f"{folder}: could not be created: {error.strerror or error}") from None
        step = step_counter(progress, 2 * len(recipes) + 1)

        pairs = prefill(demo_text()[: PROMPT_BYTES - 1])
        plain = continue_from(_as_cache(pairs))
        step()
        rows = []
        for number, recipe in enumerate(recipes):
            rows.append(write(pairs, recipe, folder / f"{number}-{_file_name(recipe)}.kvpack"))
            step()
        with ThreadPoolExecutor(min(READERS, os.cpu_count() or 1)) as readers:
            for row, outcome in zip(rows, readers.map(_read_in_process, [row["file"] for row in rows]), strict=True):
                row.update(outcome)
                step()
    return {"prompt_tokens": PROMPT_BYTES, "uncompressed": plain, "files": rows}


def prefill(prompt: bytes) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the keys and values of each layer after BOS and ``prompt``, each float32 ``[1, kv_head, token, dim]``."""
    transformers = import_transformers()
    model, cache = load_model(), transformers.DynamicCache()
    with torch.inference_mode():
        model(torch.tensor([[BOS, *prompt]]), **cache_names.cache_argument(model, cache))
    return [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]


@suppress_rounding_warnings()
def write(pairs: list[tuple[torch.Tensor, torch.Tensor]], recipe: str, path: Path) -> dict[str, Any]:
    """Pack and save ``pairs``. Returns sizes, times, and how similar the decoded values are to the original ones."""
    pack, save = kvpack.pack, kvpack.save
    started = time.perf_counter()
    cache = pack(pairs, recipe, model=IDENTITY)
    packed = time.perf_counter()
    size = save(cache, path)
    saved = time.perf_counter()
    k, v = (_mean_cosine([pair[side] for pair in pairs], [pair[side] for pair in cache.unpack(torch.float32)]) for side in (0, 1))
    return {
        "recipe": recipe,
        "file": str(path),
        "bytes": size,
        "bits_per_value": 8 * size / cache.values,
        "nominal_bits": cache.nominal_bits,
        "bf16_ratio": 2 * cache.values / size,
        "k_cosine": k,
        "v_cosine": v,
        "pack_ms": 1000 * (packed - started),
        "save_ms": 1000 * (saved - packed),
    }


def read(path: str) -> dict[str, Any]:
    """Load and verify the file, and continue the text without unpacking the cache. Returns times and results."""
    load = kvpack.load
    # Collect garbage from imports now, so that it does not count as loading time.
    gc.collect()
    started = time.perf_counter()
    cache = load(path)
    loaded = time.perf_counter()
    return {"load_ms": 1000 * (loaded - started), "kernels": kvpack.backends()["cpu"]} | continue_from(cache)


@suppress_rounding_warnings()
def continue_from(past: Cache | Any) -> dict[str, Any]:
    """Look up the keys, continue the text, and score the actual continuation, each time from the same prefilled cache.

    ``past`` is a packed Cache, which is attended to directly, or a transformers cache. It contains BOS and the prompt without its last
    byte. Returns the results.
    """
    from kvpack.integrations.transformers import KvpackCache

    model = load_model(attention="kvpack" if isinstance(past, kvpack.Cache) else "sdpa")
    text = demo_text()
    prompt, continuation = text[:PROMPT_BYTES], text[PROMPT_BYTES:]

    def new_cache() -> Any:
        return KvpackCache.of(past) if isinstance(past, kvpack.Cache) else _as_cache([(layer.keys, layer.values) for layer in past.layers])

    answers = []
    with torch.inference_mode():
        for key, value in _KEY_LINE.findall(prompt):
            answer = _generate_greedy(model, new_cache(), prompt[-1:] + b"\n[[key " + key + b" = ", len(value))
            answers.append({"key": key.decode(), "value": value.decode(), "answer": answer, "right": answer == value.decode()})
        sample = _generate_greedy(model, new_cache(), prompt[-1:], SAMPLE_BYTES)
        logits = model(torch.tensor([[*prompt[-1:], *continuation[:-1]]]), **cache_names.cache_argument(model, new_cache())).logits[0]
        loss = functional.cross_entropy(logits.float(), torch.tensor([*continuation])).item()
    return {
        "answers": answers,
        "right": sum(answer["right"] for answer in answers),
        "asked": len(answers),
        "sample": sample,
        "byte_perplexity": math.exp(loss),
    }


def show(report: dict[str, Any]) -> None:
    """Print a table of the files, followed by the text that each reader generated."""
    plain = report["uncompressed"]
    columns = [
        "recipe", "file\nbytes", "bits per\nvalue", "nominal\nbits", "smaller\nthan bf16", "K\ncosine", "V\ncosine",
        "byte\nperplexity", "first key's\nanswer", "keys\nright", "save\nms", "load\nms",
    ]  # fmt: skip
    rows = [["in memory, float32", *[""] * 6, f"{plain['byte_perplexity']:.4f}", *_answer_cells(plain), "", ""]]
    for file in report["files"]:
        rows.append(
            [
                file["recipe"],
                bytes_text(file["bytes"]),
                f"{file['bits_per_value']:.2f}",
                f"{file['nominal_bits']:.2f}",
                f"{file['bf16_ratio']:.2f} x",
                f"{file['k_cosine']:.5f}",
                f"{file['v_cosine']:.5f}",
                f"{file['byte_perplexity']:.4f}",
                *_answer_cells(file),
                f"{file['save_ms']:.1f}",
                f"{file['load_ms']:.1f}",
            ]
        )
    print_table(f"A KV cache of {report['prompt_tokens']:,} tokens, packed; each file read and attended in another process", columns, rows)
    print(f"kernels of the reading processes: {', '.join(sorted({file['kernels'] for file in report['files']}))}")
    print(f"key asked: {plain['answers'][0]['key']}, its value: {plain['answers'][0]['value']}")
    for name, source in (("in memory", plain), *((file["recipe"], file) for file in report["files"])):
        print(f"{name:>16} continues: {source['sample']!r}")


def _answer_cells(source: dict[str, Any]) -> tuple[str, str]:
    first = source["answers"][0]
    return f"{printable(first['answer'])} {'right' if first['right'] else 'wrong'}", f"{source['right']} of {source['asked']}"


def _read_in_process(path: str) -> dict[str, Any]:
    reader = subprocess.run([sys.executable, "-m", "kvpack.demo.files", "reader", path], capture_output=True, text=True, check=False)
    if reader.returncode:
        raise kvpack.KvpackError(f"the process that reads {path} failed: {reader.stderr.strip().rpartition(chr(10))[2]}")
    report: dict[str, Any] = json.loads(reader.stdout)
    return report


def _generate_greedy(model: Any, cache: Any, prompt: bytes, count: int) -> str:
    tokens, result = torch.tensor([[*prompt]]), []
    for _ in range(count):
        token = int(model(tokens, **cache_names.cache_argument(model, cache)).logits[0, -1, :BOS].argmax())
        result.append(token)
        tokens = torch.tensor([[token]])
    return bytes(result).decode(errors="backslashreplace")


def _mean_cosine(originals: Sequence[torch.Tensor], decoded: Sequence[torch.Tensor | None]) -> float:
    cosines = [functional.cosine_similarity(x, y, dim=-1).mean().item() for x, y in zip(originals, decoded, strict=True) if y is not None]
    return sum(cosines) / len(cosines)


def _as_cache(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> Any:
    return import_transformers().DynamicCache(pairs)


def _file_name(recipe: str) -> str:
    return re.sub(r"[^\w.-]+", "_", recipe)[:60]


def main(argv: Sequence[str]) -> int:
    """Run ``python -m kvpack.demo.files reader FILE``, which prints the results of the reader as JSON."""
    command, path = argv
    if command != "reader":
        raise SystemExit(f"unknown command {command!r}, expected reader")
    with one_thread():
        print(json.dumps(read(path)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
