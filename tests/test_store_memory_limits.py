"""A process whose address space ends at any point: each operation of a store is right, or a miss, and raises nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import json, os, resource, sys
sys.path.insert(0, sys.argv[2])
import torch
torch.set_num_threads(1)
import kvpack
from store_caches import CHUNK, cache, open_store, prompt, same
if sys.argv[3] == "raises":
    from kvpack.store.counters import Counters
    Counters.fault = lambda self, operation, error: (_ for _ in ()).throw(error)
options = {"encryption": {"k": bytes(32)}} if sys.argv[3] == "encrypted" else {}
folder, ids = os.path.join(sys.argv[1], "store"), prompt(6)
whole = cache(len(ids), layers=12)
open_store(folder, **options).save(ids, whole)
assert same(open_store(folder, **options).load(ids)[1], whole)
hits, faults = 0, {}
for number in range(16):
    used = 4096 * int(open("/proc/self/statm").read().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (used + 15_000 * number, resource.RLIM_INFINITY))
    store = open_store(folder, **options)
    other = prompt(6, seed=1 + number)
    n, found = store.load(ids)
    saved = store.save(other, whole)
    store.match(other)
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert found is None if n == 0 else same(found, whole)
    assert open_store(folder, **options).match(other) == saved
    assert open_store(folder, **options).load(ids)[0] == 6 * CHUNK, "lack of memory is no damage"
    assert saved == 0 or same(open_store(folder, **options).load(other)[1], whole)
    store.delete(other)
    hits += found is not None
    for fault, count in store.counters()["faults"].items():
        faults[fault] = faults.get(fault, 0) + count
print(json.dumps([hits, faults]))
"""


def sweep(folder: Path, variant: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-c", SCRIPT, str(folder), str(Path(__file__).parent), variant]
    return subprocess.run(words, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("variant", ["", "encrypted"])
def test_an_address_space_that_ends_anywhere_is_a_miss(variant: str, tmp_path: Path) -> None:
    if variant:
        pytest.importorskip("cryptography")
    done = sweep(tmp_path, variant)
    assert done.returncode == 0, done.stderr
    hits, faults = json.loads(done.stdout)
    assert 0 < hits < 16, "from steps where a load has no room to steps where it has"
    assert faults != {}


def test_the_rule_above_is_seen_to_break(tmp_path: Path) -> None:
    done = sweep(tmp_path, "raises")
    assert done.returncode == 1
    assert "Cannot allocate memory" in done.stderr
