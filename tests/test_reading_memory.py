"""``max_bytes`` bounds what reading a file takes, whatever it holds: what is above it is refused, and what is accepted stays below it."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING

import pytest

from kvpack import container
from kvpack.footprint import FREE_BYTES, RUN_BYTES
from kvpack.formats.base import DTYPE_BYTES
from kvpack.formats.errors import LimitExceeded

from file_parts import compressed, file_of, random_side  # isort: skip
from parts import Parts  # isort: skip
from strategies import create  # isort: skip

if TYPE_CHECKING:
    from kvpack.formats.base import Codec

RUNS = create("group", 1, b="1", g="4")


def many_runs(runs: int, layers: int = 1, codec: Codec = RUNS, chosen: str = "zstd") -> bytes:
    """Sides of so many runs of a token, every stream a frame that is just within the ratio, or as it is."""
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
            stored[size] = compressed(bytes(content)) if chosen == "zstd" else bytes(content)
        row[3], parts.tensors[number] = chosen, stored[size]
    return parts.joined()


def frames(size: int) -> bytes:
    """A file of one zstd tensor of ``size`` bytes, about 150 times as small."""
    parts = Parts.of(file_of((random_side(create("raw", 256, dtype="fp32"), (1,), 0, heads=1), None)))
    content, source = bytearray(size), random.Random(1)
    for _ in range(size // 600):
        content[source.randrange(size)] = 1
    parts.header["layers"][0]["k"]["runs"] = [size // 1024]
    parts.header["tensors"][0][2][2] = size // 1024
    parts.store("0.k.values", compressed(bytes(content)), "zstd")
    return parts.joined()


@pytest.mark.parametrize(
    ("make", "max_bytes", "message"),
    [
        (
            lambda: many_runs(2**17, 20),
            33 * 10**6,
            r"takes up to \d+ bytes in memory \(\d+ for a header of 5\d{6} bytes, parsed, .*max_bytes",
        ),
        (lambda: many_runs(20000), 10**6, r"takes up to \d+ bytes .*\(40960000 for 40000 runs, .*\), max_bytes is 1000000"),
        (lambda: frames(2**25), 2**25, r"takes up to \d+ bytes in memory \(67108864 for 1 zstd tensors, decoded"),
    ],
    ids=["a large header", "runs", "zstd"],
)
def test_what_takes_more_than_max_bytes_is_refused_and_named(make: object, max_bytes: int, message: str) -> None:
    data = make()  # type: ignore[operator]
    with pytest.raises(LimitExceeded, match=message):
        container.open_bytes(data, max_bytes=max_bytes)


def test_what_ordinary_files_take_is_not_counted() -> None:
    data = many_runs(FREE_BYTES // RUN_BYTES // 4, chosen="none")
    container.open_bytes(data, max_bytes=len(data))
