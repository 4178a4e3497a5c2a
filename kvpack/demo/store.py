"""The store demo. Process A prefills a prompt and saves it, and processes B and C load the prefix and produce the same tokens.

Each process has the model, the prompt and the store's location, and does not communicate with the other processes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

import kvpack
from kvpack import cache_names
from kvpack.coding.encoding import Progress
from kvpack.coding.recipes import parse_recipe
from kvpack.models import BOS, demo_text, import_transformers, load_model
from kvpack.output import print_table
from kvpack.runtime.modes import one_thread
from kvpack.store.redaction import redacted_location

from .files import PROMPT_BYTES

RECIPE = "octopus-4"
PROCESSES = ("A", "B", "C")
NEW_TOKENS = 40


def run(location: str, recipe: str = RECIPE, *, progress: Progress | None = None) -> dict[str, Any]:
    """Run the processes one after another on the store at ``location``, and return their results as JSON values.

    ``progress`` counts processes. Raises InvalidParameter for an invalid recipe, and KvpackError if transformers is not installed or a
    process fails.
    """
    import_transformers()
    parse_recipe(recipe)
    rows = []
    for number, name in enumerate(PROCESSES):
        command = [sys.executable, "-m", "kvpack.demo.store", location, recipe]
        process = subprocess.run(command, capture_output=True, text=True, check=False)
        if process.returncode:
            raise kvpack.KvpackError(f"process {name} failed: {process.stderr.strip().rpartition(chr(10))[2]}")
        rows.append({"process": name, **json.loads(process.stdout)})
        if progress:
            progress(number + 1, len(PROCESSES))
    same = len({tuple(row["tokens"]) for row in rows}) == 1
    return {"store": redacted_location(location), "recipe": recipe, "processes": rows, "same": same}


def load_or_prefill(location: str, recipe: str) -> dict[str, Any]:
    """Do the work of one process: load the longest stored prefix, or prefill and save it, and generate tokens. Returns the results."""
    from kvpack.integrations.transformers import KvpackCache

    model = load_model(attention="kvpack")
    prompt = [BOS, *demo_text()[: PROMPT_BYTES - 1]]
    with kvpack.Store(location, kvpack.Identity.of(model, recipe, name="tinylm")) as store, torch.inference_mode():
        started = time.perf_counter()
        # The model needs a token to continue from, so the last one is never loaded from the store.
        loaded, cache = store.load(prompt[:-1])
        if cache is None:
            dense = import_transformers().DynamicCache()
            model(torch.tensor([prompt[:-1]]), **cache_names.cache_argument(model, dense))
            store.save(prompt[:-1], kvpack.pack(dense, recipe))
            # Continue from the stored bytes, so that all processes produce the same tokens.
            _, cache = store.load(prompt[:-1])
        if cache is None:
            faults = store.counters()["faults"]
            raise kvpack.KvpackError(f"the prefix could not be stored ({faults}): check that the location is writable")
        past, next_ids, tokens = KvpackCache.of(cache), torch.tensor([prompt[cache.tokens :]]), []
        for _ in range(NEW_TOKENS):
            tokens.append(int(model(next_ids, **cache_names.cache_argument(model, past)).logits[0, -1, :BOS].argmax()))
            if len(tokens) == 1:
                first = time.perf_counter() - started
            next_ids = torch.tensor([tokens[-1:]])
    return {"prompt": len(prompt), "found": loaded, "first_token_ms": 1000 * first, "tokens": tokens}


def show(report: dict[str, Any]) -> None:
    rows = [
        [
            row["process"],
            f"{row['prompt']:,}",
            f"{row['found']:,}",
            f"{row['prompt'] - row['found']:,}",
            f"{row['first_token_ms']:,.0f}",
            repr(bytes(row["tokens"]).decode(errors="backslashreplace")),
        ]
        for row in report["processes"]
    ]
    columns = ["process", "prompt\ntokens", "found in\nthe store", "computed", "ms to the\nfirst token", "continuation"]
    print_table(f"{report['store']}: one prompt, three processes, {report['recipe']}", columns, rows)
    print("all produce the same tokens" if report["same"] else "the processes produce DIFFERENT tokens")


def main(argv: Sequence[str]) -> int:
    """Run ``python -m kvpack.demo.store LOCATION RECIPE``, which prints the results of one process as JSON."""
    location, recipe = argv
    with one_thread():
        print(json.dumps(load_or_prefill(location, recipe)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
