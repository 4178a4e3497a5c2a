"""``memory_limit`` bounds the memory for reading a file: files that need more are refused, and others stay within it."""

from __future__ import annotations

import math
import os
import random
import re
import subprocess
import sys
import tracemalloc
from typing import TYPE_CHECKING

import pytest
import torch
from torch.testing import assert_close

from kvpack.cache import files
from kvpack.file import container
from kvpack.file.footprint import CONSTANT_BYTES, FREE_BYTES, RUN_BYTES
from kvpack.formats.errors import LimitExceeded, OutOfBounds
from kvpack.formats.streams import DTYPE_BYTES
from support.file_parts import compress, file_of, random_side
from support.parts import Parts
from support.strategies import create

if TYPE_CHECKING:
    from pathlib import Path

    from kvpack.formats.base import Codec

RUNS = create("group", 1, b="1", g="4")


def many_runs(runs: int, layers: int = 1, codec: Codec = RUNS, chosen: str = "zstd") -> bytes:
    """Return sides with many one-token runs.

    Each stream is stored as a frame just within the permitted ratio, or unfiltered.
    """
    sides = random_side(codec, (1,), 0, heads=1), random_side(codec, (1,), 0, heads=1)
    parts = Parts.of(file_of(*[sides] * layers))
    stored: dict[int, bytes] = {}
    for layer in parts.header["layers"]:
        for side in layer.values():
            side["runs"] = [1] * runs
    for number, row in enumerate(parts.header["tensors"]):
        row[2][2] = runs
        size = math.prod(row[2]) * DTYPE_BYTES[row[1]]
        if size not in stored:
            content, source = bytearray(size), random.Random(1)
            for _ in range(size // 150):
                content[2 * source.randrange(size // 2)] = 1
            stored[size] = compress(bytes(content)) if chosen == "zstd" else bytes(content)
        row[3], parts.tensors[number] = chosen, stored[size]
    return parts.joined()


def frames(size: int) -> bytes:
    """Return a file with one zstd tensor of ``size`` decoded bytes, which is compressed about 150 times."""
    parts = Parts.of(file_of((random_side(create("raw", 256, dtype="fp32"), (1,), 0, heads=1), None)))
    content, source = bytearray(size), random.Random(1)
    for _ in range(size // 600):
        content[source.randrange(size)] = 1
    parts.header["layers"][0]["k"]["runs"] = [size // 1024]
    parts.header["tensors"][0][2][2] = size // 1024
    parts.store("0.k.values", compress(bytes(content)), "zstd")
    return parts.joined()


@pytest.mark.parametrize(
    ("make", "memory_limit", "message"),
    [
        (
            lambda: many_runs(2**17, 20),
            33 * 10**6,
            r"reading could take \d+ bytes of memory \(\d+ for the parsed header of 5\d{6} bytes, .*memory_limit",
        ),
        (lambda: many_runs(20000), 10**6, r"could take \d+ bytes .*\(40960000 for 40000 runs, .*\), but memory_limit is 1000000"),
        (lambda: frames(2**25), 2**25, r"reading could take \d+ bytes of memory \(67108864 for 1 zstd tensors, decoded"),
    ],
    ids=["a large header", "runs", "zstd"],
)
def test_an_operation_above_the_memory_limit_is_refused_and_named(make: object, memory_limit: int, message: str) -> None:
    data = make()  # type: ignore[operator]
    with pytest.raises(LimitExceeded, match=message):
        container.open_bytes(data, memory_limit=memory_limit)


def test_memory_for_ordinary_files_is_not_counted() -> None:
    data = many_runs(FREE_BYTES // RUN_BYTES // 4, chosen="none")
    container.open_bytes(data, memory_limit=len(data))


def codebooks(count: int) -> bytes:
    """Return a file of ``count`` layers, each with its own quaternion codebook: 98,304 codewords that are derived from a seed."""
    made = [create("quaternion", 4, s="4096", r="4", seed=str(number)) for number in range(1, count + 1)]
    return file_of(*[(random_side(codec, (2,), 0, heads=1), random_side(codec, (2,), 0, heads=1)) for codec in made])


ACTIONS = """
import resource, sys
import torch, kvpack
from kvpack.file import container

path, memory_limit = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(1)

def act(cache, action):
    for layer in cache:
        k = layer.k
        if action == "attend" and layer.v:
            kvpack.attend(torch.zeros(k.batch, k.heads, 1, k.dim), layer)
        elif action == "unpack":
            layer.unpack()
        elif action == "append":
            layer.append(*(None if side is None else torch.zeros(side.batch, side.heads, 5, side.dim) for side in (k, layer.v)))
        elif action == "slice":
            cache[:, : cache.tokens // 2]

# What the libraries take when they are first used is not the file's.
few = kvpack.pack([(torch.randn(1, 1, 40, 4),) * 2], "k=quaternion:s=5,r=4;v=group:b=3,g=4")
for action in ("attend", "unpack", "append", "slice"):
    act(few, action)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
with container.open_file(path, memory_limit=memory_limit) as file:
    file.verify()
for action in ("load", "attend", "unpack", "append", "slice"):
    act(kvpack.load(path, memory_limit=memory_limit), action)
    print(action, 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before))
"""


@pytest.mark.scenario
@pytest.mark.parametrize(
    ("make", "memory_limit"),
    [(lambda: many_runs(6000), 10**6), (lambda: frames(2**25), 2**26), (lambda: codebooks(24), 10**6)],
    ids=["runs", "zstd", "codebooks"],
)
def test_accepted_files_use_at_most_the_memory_limit_and_a_constant(make: object, memory_limit: int, tmp_path: Path) -> None:
    (tmp_path / "a.kvpack").write_bytes(make())  # type: ignore[operator]
    command = [sys.executable, "-c", ACTIONS, str(tmp_path / "a.kvpack"), str(memory_limit)]
    # glibc raises this threshold as blocks are freed, and what it then keeps of freed blocks depends on where they happen to lie.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072"}
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300, env=environment).stdout
    for line in output.splitlines():
        action, taken = line.split()
        assert int(taken) <= memory_limit + CONSTANT_BYTES, f"{action} took {int(taken) / 2**20:.0f} MiB"


def test_stored_runs_take_bytes_instead_of_objects() -> None:
    data = many_runs(2**15)
    tracemalloc.start()
    try:
        cache = files.read(container.open_bytes(bytearray(data)))
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(cache[0].k.runs) == 2**15  # type: ignore[union-attr]
    assert kept < 64 * 2 * 2**15, "a run takes more than 64 bytes"


@pytest.mark.filterwarnings("ignore:.*which share")
@pytest.mark.parametrize(
    "codec", [RUNS, create("group", 4, "v", b="2", g="4", scales="u8"), create("group", 4, b="2", g="4", raw_tokens="fp16", sinks="2")]
)
def test_pages_of_consecutive_runs_equal_the_stored_runs(codec: Codec) -> None:
    # No run is whole groups, so that none is joined to the next when it is saved.
    side = random_side(codec, (3, 5, 1, 6, 7), 2)
    cache = files.read(container.open_bytes(bytearray(file_of((side, None)))))
    loaded = cache[0].k
    assert loaded is not None
    for start in range(0, side.tokens + 1):
        for stop in range(start, side.tokens + 1):
            try:
                expected = side.slice(start, stop)
            except OutOfBounds as error:
                with pytest.raises(OutOfBounds, match=re.escape(str(error))):
                    loaded.slice(start, stop)
                continue
            found = loaded.slice(start, stop)
            assert found.merged_runs() == expected.merged_runs()
            assert_close(found.unpack(torch.float32), expected.unpack(torch.float32), rtol=0, atol=0, equal_nan=True)
    x = torch.randn(1, 2, 9, codec.dim)
    assert_close(loaded.append(x).unpack(torch.float32), side.append(x).unpack(torch.float32), rtol=0, atol=0, equal_nan=True)
    assert loaded.append(x).merged_runs() == side.append(x).merged_runs()
    again = files.read(container.open_bytes(bytearray(container.to_bytes(*files.header_and_arrays(cache)))))
    assert_close(again[0].k.unpack(torch.float32), side.unpack(torch.float32), rtol=0, atol=0, equal_nan=True)  # type: ignore[union-attr]
