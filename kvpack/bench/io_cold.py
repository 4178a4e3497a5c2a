"""kvpack bench io --cold: time files that are not in the page cache, compared with fio's direct reads from the same disk."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from typing import TYPE_CHECKING, Any

import kvpack
from kvpack.cache.device_copy import HostCopyQueue
from kvpack.cache.staged_load import COPY_BYTES, STAGING_BYTES, StagedCopy, stage_bytes
from kvpack.file.container import open_file
from kvpack.formats.errors import InvalidParameter
from kvpack.runtime.mapping import is_cold

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvpack.coding.encoding import Progress

    from .io import Source

RECIPES = ("bf16",)
FIO = ("--rw=read", "--bs=1M", "--direct=1", "--ioengine=libaio", "--iodepth=16", "--readonly")
DISK, LOAD, COPY, STAGED_READ, WARM_LOAD = (
    "fio --direct=1",
    "load, mapped",
    "load, copy=True",
    "read as for a device",
    "load, from the page cache",
)


def run(
    cache: Source,
    recipes: Sequence[str] | None,
    *,
    repeats: int = 5,
    folder: str | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Measure files of ``cache`` and return a report with one row for each recipe and method of loading.

    ``of_fio`` is the speed relative to fio (above 1 is faster). Raises InvalidParameter if files stay in memory, as in a tmpfs.
    """
    if repeats < 1:
        raise InvalidParameter(f"--repeats is {repeats}, expected a positive integer")
    rows = []
    recipes = recipes or RECIPES
    with tempfile.TemporaryDirectory(prefix="kvpack-bench-", dir=folder) as temporary:
        path = os.path.join(temporary, "packed.kvpack")
        for number, recipe in enumerate(recipes):
            kvpack.save(kvpack.pack(cache.pairs, recipe), path)
            size = os.path.getsize(path)
            ways: dict[str, Callable[[], float]] = {
                LOAD: _time_call(lambda: kvpack.load(path)),
                COPY: _time_call(lambda: kvpack.load(path, copy=True)),
                STAGED_READ: _time_call(lambda: _read_staged(path)),
            }
            if shutil.which("fio") is not None:
                ways = {DISK: lambda: _time_fio(path), **ways}
            seconds: dict[str, list[float]] = {name: [] for name in (*ways, WARM_LOAD)}
            for _ in range(repeats):
                for name, way in ways.items():
                    drop_from_page_cache(path)
                    seconds[name].append(way())
                kvpack.load(path)
                seconds[WARM_LOAD].append(_time_call(lambda: kvpack.load(path))())
            medians = {name: statistics.median(values) for name, values in seconds.items()}
            for name, median in medians.items():
                of_fio = medians[DISK] / median if DISK in medians else None
                rows.append({"recipe": recipe, "way": name, "bytes": size, "seconds": median, "gb_per_s": size / median / 1e9,
                             "of_fio": of_fio})  # fmt: skip
            os.unlink(path)
            if progress is not None:
                progress(number + 1, len(recipes))
    return {"source": cache.label, "repeats": repeats, "cold_rows": rows}


def drop_from_page_cache(path: str) -> None:
    """Drop a file from the page cache. Raises InvalidParameter if it stays there."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        if not is_cold(descriptor, 0, os.path.getsize(path)):
            raise InvalidParameter(
                f"files in {os.path.dirname(path)} stay in memory, so cold reads cannot be timed: pass --folder with a folder on a disk"
            )
    finally:
        os.close(descriptor)


def _time_call(call: Callable[[], object]) -> Callable[[], float]:
    def seconds() -> float:
        started = time.perf_counter()
        result = call()
        passed = time.perf_counter() - started
        del result
        return passed

    return seconds


def _read_staged(path: str) -> None:
    """Read a file into staging memory, as a load to a device does, but without a device."""
    with open_file(path) as file:
        places = [file.side_offsets(number, name) for number, layer in enumerate(file.header.layers) for name, _ in layer.sides()]
        span = file.span(places)
        assert span is not None
        ends = range(0, sum(place.nbytes for place in places), COPY_BYTES)
        copies = [StagedCopy(0, begin, min(begin + COPY_BYTES, span.end - span.begin), span, places[0]) for begin in ends]
        for _ in stage_bytes(copies, file, HostCopyQueue(), STAGING_BYTES, {*()}, {*()}):
            continue


def _time_fio(path: str) -> float:
    """Return the seconds that fio takes to read a file. Raises InvalidParameter with fio's message if it fails."""
    done = subprocess.run(["fio", "--name=cold", f"--filename={path}", *FIO, "--output-format=json"], capture_output=True, text=True)
    if done.returncode:
        raise InvalidParameter(f"fio cannot read {path}: {done.stderr.strip() or done.stdout.strip()}")
    (job,) = json.loads(done.stdout)["jobs"]
    return float(job["read"]["io_bytes"] / job["read"]["bw_bytes"])


def show(report: dict[str, Any]) -> None:
    from kvpack.output import bytes_text, print_table

    cells = [
        [row["recipe"], row["way"], bytes_text(row["bytes"]), f"{row['gb_per_s']:.2f}", f"{row['of_fio']:.2f}" if row["of_fio"] else ""]
        for row in report["cold_rows"]
    ]
    print_table(f"{report['source']}: median of {report['repeats']}", ["recipe", "way", "file", "GB/s", "x fio"], cells)
    if not any(row["way"] == DISK for row in report["cold_rows"]):
        print("\nfio is not installed: install it (such as by apt install fio) to see the speed of the disk.")
    print("\nGB/s are based on the size of the file. In all rows but the last, the file is dropped from the page cache before each timing.")
    print("load, mapped: kvpack.load, which checks every byte. load, copy=True: the same by direct I/O, into private memory.")
    print("read as for a device: by direct I/O into the staging memory of device copies.")
