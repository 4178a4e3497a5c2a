"""Use a store for minutes with a small budget. Processes save, load, pin, delete, collect and reopen it, and are killed at random.

    python -m support.store_endurance --minutes 10 --location /var/tmp/store

The location is a folder, or the URL of a Redis server or an object store. Every hit is compared with the values of its tokens.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from support import store_stress
from support.store_stress import FORK

PROCESSES = 4
KILL_SECONDS = 3.0
_DONE, _WRONG, _DAMAGED = range(3)


def _work(location: str, seed: int, counts: Any, slot: int) -> None:
    """Use the store until the process is killed.

    ``counts`` has three numbers for each process. No other process writes them, because a killed process would not release a lock.
    """
    torch.set_num_threads(1)
    choice, kept = random.Random(seed), []
    while True:
        stores = [store_stress.open_store(location, model) for model in range(len(store_stress.LAYERS))]
        for _ in range(choice.randrange(20, 200)):
            try:
                store_stress.perform_random_operation(stores, choice, kept)
            except BaseException as error:
                print(f"process of seed {seed}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
                counts[3 * slot + _WRONG] += 1
            counts[3 * slot + _DONE] += 1
        counts[3 * slot + _DAMAGED] += sum(store.counters()["damaged_entries"] for store in stores)
        for store in stores:
            store.close()


def run_endurance(
    location: str, seconds: float, *, processes: int = PROCESSES, kill_seconds: float = KILL_SECONDS, seed: int = 0
) -> dict[str, Any]:
    """Run processes that use the store at ``location`` for ``seconds`` seconds, and return a report.

    A process is killed every ``kill_seconds`` seconds.
    """
    for number in range(store_stress.PROMPTS):
        for model in range(len(store_stress.LAYERS)):
            store_stress.packed_prompt(number, model)
    counts, choice = FORK.RawArray("q", 3 * processes), random.Random(seed)
    begun = kills = ended = 0

    def begin(slot: int) -> Any:
        nonlocal begun
        begun += 1
        worker = FORK.Process(target=_work, args=(location, 1000 * seed + begun, counts, slot), daemon=True)
        worker.start()
        return worker

    workers = [begin(slot) for slot in range(processes)]
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        time.sleep(min(kill_seconds, left))
        slot = choice.randrange(processes)
        ended += workers[slot].exitcode is not None
        _kill(workers[slot])
        kills += 1
        workers[slot] = begin(slot)
    for worker in workers:
        ended += worker.exitcode is not None
        _kill(worker)
    sums = [sum(counts[kind::3]) for kind in range(3)]
    found = {"operations": sums[_DONE], "kills": kills, "wrong": sums[_WRONG], "damaged": sums[_DAMAGED], "exited on their own": ended}
    return found | (_disk(location) if os.path.isdir(location) else {})


def _kill(worker: Any) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(worker.pid, signal.SIGKILL)
    worker.join()


def _disk(folder: str) -> dict[str, Any]:
    """Return the budget, the disk usage of the folder, and the number of unfinished files after garbage collection."""
    with store_stress.open_store(folder, 0) as store:
        store.collect()
    taken = int(subprocess.run(["du", "-s", "-B1", folder], check=True, capture_output=True, text=True).stdout.split()[0])
    return {"budget": store_stress.BUDGET, "bytes on disk": taken, "unfinished files": len(list(Path(folder).glob("unfinished/.kvpack-*")))}


def has_failed(report: dict[str, Any]) -> bool:
    """Return True if a hit was wrong, an entry was damaged, a process died without being killed, or the budget was exceeded."""
    broken = report["wrong"] or report["damaged"] or report["exited on their own"] or report.get("unfinished files")
    return bool(broken) or report.get("bytes on disk", 0) > 1.05 * report.get("budget", 0) or not report["operations"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--location", help="location of the store to use (default: a temporary folder)")
    parser.add_argument("--processes", type=int, default=PROCESSES)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        location = arguments.location or os.path.join(temporary, "store")
        report = run_endurance(location, 60 * arguments.minutes, processes=arguments.processes, seed=arguments.seed)
    print(json.dumps(report, indent=2))
    return 1 if has_failed(report) else 0


if __name__ == "__main__":
    sys.exit(main())
