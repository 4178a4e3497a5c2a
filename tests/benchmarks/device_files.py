"""Time loads to and saves from a CUDA device, compared with a pinned copy (and a write) of the same bytes."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from typing import TYPE_CHECKING, Any

import torch

import kvpack
from kvpack.bench import io
from kvpack.formats.arguments import checked_device
from kvpack.formats.errors import InvalidParameter

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvpack.coding.encoding import Progress


def run(
    cache: io.Source,
    recipes: Sequence[str],
    *,
    device: str = "cuda",
    repeats: int = 5,
    folder: str | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Measure loads and saves of ``cache``. Returns a report whose ``device_rows`` has one row per recipe and direction.

    In a row, ``seconds`` is the median time of kvpack's call. ``of_bus_seconds`` is the time to copy the file's bytes from or to pinned
    memory, and for a save, also to write them. ``of_bus`` is the ratio of these times (above 1: kvpack is faster). ``first_seconds`` is the
    time of the first call, which allocates pinned memory. Times include the device's work. Raises InvalidParameter if this machine does not
    have the CUDA device.
    """
    target = checked_device(device)
    if target.type != "cuda" or (target.index or 0) >= torch.cuda.device_count():
        raise InvalidParameter(f"--device is {device!r}, expected one of {torch.cuda.device_count()} CUDA devices")
    pairs = [(k.to(target), v.to(target)) for k, v in cache.pairs]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="kvpack-bench-", dir=folder) as temporary:
        for number, recipe in enumerate(recipes):
            rows += _measure_rows(pairs, recipe, target, repeats, temporary)
            if progress is not None:
                progress(number + 1, len(recipes))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    name = torch.cuda.get_device_name(target)
    return {"source": cache.label, "repeats": repeats, "device": str(target), "device_name": name, "cores": cores, "device_rows": rows}


def _measure_rows(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
    recipe: str,
    device: torch.device,
    repeats: int,
    folder: str,
) -> list[dict[str, Any]]:
    path, plain = os.path.join(folder, "packed.kvpack"), os.path.join(folder, "plain")
    cache = kvpack.pack(list(pairs), recipe)
    size = cache.nbytes
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    buffer = torch.zeros(size, dtype=torch.uint8, device=device)

    def copy_and_write() -> None:
        pinned.copy_(buffer)
        _write_file(plain, memoryview(pinned.numpy().data))

    calls: dict[str, Callable[[], object]] = {
        "save": lambda: kvpack.save(cache, path),
        "write": copy_and_write,
        "load": lambda: kvpack.load(path, device=device),
        "copy": lambda: buffer.copy_(pinned, non_blocking=True),
    }
    measured = {name: _time_calls(call, device, repeats) for name, call in calls.items()}
    os.unlink(path)
    os.unlink(plain)
    return [
        _measure_row(recipe, "load to the device", size, measured["load"], measured["copy"]),
        _measure_row(recipe, "save from the device", size, measured["save"], measured["write"]),
    ]


def _time_calls(call: Callable[[], object], device: torch.device, repeats: int) -> list[float]:
    """Return the times of ``1 + repeats`` calls in seconds. A call ends when the device has finished."""
    seconds = []
    for _ in range(1 + repeats):
        torch.cuda.synchronize(device)
        started = time.perf_counter()
        result = call()
        torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started)
        # Exclude deallocation from the timing.
        del result
    return seconds


def _write_file(path: str, data: memoryview) -> None:
    """Write ``data`` to ``path`` in the same way as ``kvpack.save``: to a new file, which is then renamed."""
    descriptor = os.open(f"{path}.new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        done = 0
        while done < len(data):
            done += os.write(descriptor, data[done:])
    finally:
        os.close(descriptor)
    os.replace(f"{path}.new", path)


def _measure_row(recipe: str, operation: str, size: int, seconds: list[float], bus: list[float]) -> dict[str, Any]:
    taken, of_bus = statistics.median(seconds[1:]), statistics.median(bus[1:])
    return {
        "name": recipe,
        "operation": operation,
        "bytes": size,
        "seconds": taken,
        "first_seconds": seconds[0],
        "of_bus_seconds": of_bus,
        "gb_per_s": size / taken / 1e9,
        "of_bus": of_bus / taken,
    }


def show(report: dict[str, Any]) -> None:
    from kvpack.output import bytes_text, print_table

    rows = [
        [
            row["name"],
            row["operation"],
            bytes_text(row["bytes"]),
            *(f"{1000 * row[key]:.1f}" for key in ("first_seconds", "seconds", "of_bus_seconds")),
            f"{row['gb_per_s']:.2f}",
            f"{row['of_bus']:.2f}",
        ]
        for row in report["device_rows"]
    ]
    title = f"{report['source']}, {report['device_name']}, {report['cores']} cores, median of {report['repeats']}"
    columns = ["what", "operation", "bytes", "ms,\nfirst call", "ms", "ms of the\nbus only", "GB/s", "x bus"]
    print_table(title, columns, rows, text_columns=2)
    print("The bus only: a pinned copy of the file's bytes to the device; for a save, a pinned copy from it, then a write to a new file.")
    print("A load checks every byte and ends when the device has all; files are in the page cache, and no save waits for the disk.")
