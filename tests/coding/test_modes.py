"""Whatever modes of torch a caller has set, kvpack writes and decodes the same."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

# In a process of its own each: tables are kept, so they must be made in the mode under test.
PROGRAM = """
import contextlib, hashlib, sys, warnings, torch
import kvpack
mode = sys.argv[1]
context = contextlib.nullcontext()
k, v = torch.randn(2, 1, 2, 70, 64, generator=torch.Generator().manual_seed(0))
q = torch.randn(1, 2, 3, 64, generator=torch.Generator().manual_seed(1))
if mode == "autocast":
    context = torch.autocast("cpu", dtype=torch.bfloat16)
elif mode == "default device":
    context = torch.device("meta")
elif mode != "none":
    torch.set_default_dtype(getattr(torch, mode))
warnings.simplefilter("ignore", kvpack.RoundedWarning)
recipes = [
    "bf16", "octopus-3", "kv=octahedral:b=5,arrangement=direct", "kv=octahedral:b=2,rounding=full", "oscar-2", "kivi-4;tail=32",
    "turboangle-k8v4", "kv=scalar:b=3", "kv=angle:n=48,norm=log4", "hqmq-s24-r3",
]
with context:
    from kvpack.formats.quaternion import _search
    for recipe in recipes:
        cache = kvpack.pack([(k, v)], recipe)
        if recipe == "hqmq-s24-r3":
            _search(cache[0].k.codec.seed, 24)._build_grid(torch.device("cpu"))
        cache = cache.append([(k[:, :, :5], v[:, :, :5])])
        kvpack.save(cache, sys.argv[2])
        cache = kvpack.load(sys.argv[2])
        digest = hashlib.sha256(open(sys.argv[2], "rb").read())
        other = cache.append([(k, v)]).convert("kv=angle:n=48,norm=log4,arrangement=direct")
        for x in (*cache[0].unpack(torch.float32), kvpack.attend(q, cache[0]), kvpack.attend(q, other[0])):
            digest.update(x.numpy().tobytes())
        print(recipe, digest.hexdigest())
"""


def results(mode: str, folder: Path) -> list[str]:
    run = subprocess.run([sys.executable, "-c", PROGRAM, mode, folder / "a.kvpack"], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (0, "")
    return run.stdout.splitlines()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return results("none", tmp_path_factory.mktemp("none"))


@pytest.mark.parametrize("mode", ["bfloat16", "autocast", "default device"])
def test_modes_change_no_byte(mode: str, expected: list[str], tmp_path: Path) -> None:
    assert results(mode, tmp_path) == expected
