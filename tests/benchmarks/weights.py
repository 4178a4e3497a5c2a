"""Measure the time to compute the digest of all weights of a model, for files and at the first start with a checkpoint."""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kvpack import cache_names
from kvpack.bench.serve import random_model
from kvpack.formats.errors import InvalidParameter
from kvpack.identity import engine_identity
from kvpack.identity.fingerprint import digest_weights
from kvpack.identity.modules import list_model_parts
from kvpack.integrations.transformers.models import name_model
from kvpack.models import import_transformers, model_folder
from kvpack.output import print_table

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvpack.coding.encoding import Progress

LARGE = 140_000_000_000
"""Size in bytes of the checkpoint to which the first start is extrapolated: a bf16 model with 70 billion parameters."""
PROMPT = 512
"""Number of tokens in the prefill that runs while the digest is computed."""


@torch.inference_mode()
def run(model: str | None, shape: str | None, device: str, *, repeats: int = 5, progress: Progress | None = None) -> dict[str, Any]:
    """Measure the model in the folder ``model`` (None for the demo's), or one of ``shape`` with random bf16 weights, on ``device``.

    All seconds are medians of ``repeats`` measurements. Raises InvalidParameter for an unknown shape, if both a folder and a shape are
    given, and if the device does not exist.
    """
    if model is not None and shape is not None:
        raise InvalidParameter("--model and --shape both name the model to measure: give one of them")
    if device == "cuda" and not torch.cuda.is_available():
        raise InvalidParameter("--device is 'cuda', but PyTorch found no CUDA device: use --device cpu")
    network = random_model(shape, None, device, "bf16") if shape is not None else _loaded(model, device)
    ids = torch.randint(1, min(200, network.config.vocab_size), (1, PROMPT), device=device)
    past = cache_names.output_cache(network(ids, use_cache=True))

    def digest() -> None:
        _ = digest_weights(list_model_parts(network)).text

    def name() -> None:
        _ = name_model(network).identity_fields

    def decode_step() -> None:
        network(ids[:, :1], **cache_names.cache_argument(network, past))
        past.crop(-1)

    def prefill() -> None:
        network(ids, use_cache=False)

    def prefill_and_digest() -> None:
        weights = digest_weights(list_model_parts(network))
        network(ids, use_cache=False)
        weights.wait_until_read()

    timed: list[Callable[[], None]] = [digest, name, decode_step, prefill, prefill_and_digest]
    seconds = {}
    for number, call in enumerate(timed, 1):
        seconds[call.__name__] = _median(call, repeats, device)
        if progress:
            progress(number, len(timed))
    found = {id(x): x for x in (*network.parameters(), *network.buffers())}.values()
    nbytes = sum(x.nbytes for x in found)
    report = {
        "model": shape or Path(network.name_or_path).name,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "bytes": nbytes,
        "seconds": seconds,
        "bytes_per_second": nbytes / seconds["digest"],
        "checkpoint": None,
    }
    if shape is None:
        with model_folder(model) as folder:
            report["checkpoint"] = _checkpoint(folder, repeats)
    return report


def _checkpoint(folder: Path, repeats: int) -> dict[str, Any]:
    """Measure the time to read a checkpoint's files: first from disk, if the page cache can be dropped, and then from memory."""
    paths = [os.path.realpath(path) for path in sorted(folder.glob("*.safetensors"))]
    nbytes = sum(map(os.path.getsize, paths))

    def read() -> None:
        for path in paths:
            engine_identity.digest_file_bytes(path, os.path.getsize(path))

    for path in paths:
        _forget(path)
    cold = _seconds(read, "cpu")
    warm = _median(read, repeats, "cpu")
    rates = {"cold": nbytes / cold, "cached": nbytes / warm}
    return {"bytes": nbytes, "bytes_per_second": rates, "extrapolated": {name: LARGE / rate for name, rate in rates.items()}}


def _forget(path: str) -> None:
    """Ask the operating system to drop a file from its page cache, on systems that can."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _loaded(model: str | None, device: str) -> Any:
    with model_folder(model) as folder:
        dtype = "auto" if model is not None else torch.float32
        return import_transformers().AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval().to(device)


def _seconds(call: Callable[[], object], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def _median(call: Callable[[], object], repeats: int, device: str) -> float:
    """Return the median duration of several calls in seconds, after one warm-up call."""
    call()
    return statistics.median(_seconds(call, device) for _ in range(repeats))


def show(report: dict[str, Any]) -> None:
    """Print the tables of ``run``."""
    seconds = report["seconds"]
    texts = {
        "digest": "digest of all weights",
        "name": "all information about the model in a file",
        "decode_step": "one decode step",
        "prefill": f"prefill of {PROMPT} tokens",
        "prefill_and_digest": f"prefill of {PROMPT} tokens, with the digest meanwhile",
    }
    title = f"{report['model']} on {report['device']}: {report['bytes'] / 1e9:.2f} GB of weights, {report['threads']} threads of PyTorch"
    print_table(
        title,
        ["what", "ms", "decode steps"],
        ([text, f"{1e3 * seconds[it]:.1f}", f"{seconds[it] / seconds['decode_step']:.2f}"] for it, text in texts.items()),
    )
    print(f"the digest reads {report['bytes_per_second'] / 1e9:.1f} GB/s")
    if (found := report["checkpoint"]) is not None:
        places = {"cold": "from the disk, as far as the file was evicted from the page cache", "cached": "from the page cache"}
        print_table(
            f"the first start of an engine: {found['bytes'] / 1e9:.2f} GB of safetensors are read once",
            ["files", "GB/s", f"seconds for {LARGE / 1e9:.0f} GB, extrapolated"],
            ([text, f"{found['bytes_per_second'][it] / 1e9:.2f}", f"{found['extrapolated'][it]:.0f}"] for it, text in places.items()),
        )
