"""kvpack encodes and decodes the same values whatever torch modes the caller has set."""

from __future__ import annotations

import subprocess

import pytest

from support import warm_python
from support.klt_bases import random_basis

# Each in a process of its own: tables are kept, so they must be made in the mode under test. They share a process that has made none.
PROGRAM = """
import contextlib, hashlib, os, sys, warnings, numpy, torch
import kvpack
from kvpack.coding.bases import Basis
for mode in sys.argv[3:]:
    child = os.fork()
    if not child:
        break
    assert os.waitpid(child, 0)[1] == 0, mode
else:
    sys.exit()
path = sys.argv[1]
basis = Basis.load(sys.argv[2])
context = contextlib.nullcontext()
k, v = torch.randn(2, 1, 2, 70, 64, generator=torch.Generator().manual_seed(0))
# These tokens are kept raw.
k[:, :, 7] *= 9
k[:, :, 40] *= 0.01
q = torch.randn(1, 2, 3, 64, generator=torch.Generator().manual_seed(1))
if mode == "autocast":
    context = torch.autocast("cpu", dtype=torch.bfloat16)
elif mode == "default device":
    context = torch.device("meta")
elif mode == "flushed subnormals":
    torch.set_flush_denormal(True)
elif mode == "numpy's errors":
    numpy.seterr(all="raise")
elif mode != "none":
    torch.set_default_dtype(getattr(torch, mode))
for category in (kvpack.errors.RoundedWarning, kvpack.KvpackWarning):
    warnings.simplefilter("ignore", category)
recipes = [
    "bf16", "octopus-3", "kv=octahedral:b=5,arrangement=direct", "kv=octahedral:b=2,rounding=full", "oscar-2", "kivi-4;tail=32",
    "oscar-2-u8", "turboangle-k8v4", "kv=scalar:b=3", "kv=angle:n=48,norm=log4", "kv=quaternion:s=6,r=3", "polarquant-3", "fp8", "nvfp4",
    kvpack.Recipe("klt-2", basis), "lossless",
]
with context:
    from kvpack.formats.quaternion import _codebook_search
    for recipe in recipes:
        if recipe == "lossless":
            k, v = k.bfloat16(), v.bfloat16()
        cache = kvpack.pack([(k, v)], recipe)
        if recipe == "kv=quaternion:s=6,r=3":
            _codebook_search(cache[0].k.codec.without_sidecars.seed, 6)._build_grid(torch.device("cpu"))
        cache = cache.append([(k[:, :, :5], v[:, :, :5])])
        kvpack.save(cache, path)
        cache = kvpack.load(path, basis=basis)
        with open(path, "rb") as file:
            digest = hashlib.sha256(file.read())
        other = cache.append([(k, v)]).convert("kv=angle:n=48,norm=log4,arrangement=direct;raw=4,0.6,4")
        live = kvpack.LiveCache.of(cache)
        live.update(0, k, v)
        starts = kvpack.attend(q, cache[0], starts=[7], lengths=[60])
        attended = kvpack.attend(q, cache[0]), kvpack.attend(q, other[0]), starts, live.attend(0, q, starts=[7])
        for x in (*cache[0].unpack(torch.float32), *attended, *live.freeze()[0].unpack(torch.float32)):
            digest.update(x.numpy().tobytes())
        print(mode, recipe, digest.hexdigest(), sep="; ", flush=True)
"""
MODES = ("bfloat16", "autocast", "default device", "flushed subnormals", "numpy's errors")


@pytest.fixture(scope="module")
def digests(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """Return digests of every recipe's file, values, and attention output, by torch mode."""
    folder = tmp_path_factory.mktemp("modes")
    path, basis = folder / "a.kvpack", folder / "a.basis"
    basis.write_bytes(random_basis({(0, side): (2, 64) for side in "kv"}, 1))
    run = subprocess.run([warm_python.python(), "-c", PROGRAM, path, basis, "none", *MODES], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (0, "")
    found: dict[str, dict[str, str]] = {}
    for mode, recipe, digest in (line.split("; ") for line in run.stdout.splitlines()):
        found.setdefault(mode, {})[recipe] = digest
    return found


@pytest.mark.parametrize("mode", MODES)
def test_modes_do_not_change_the_bytes(mode: str, digests: dict[str, dict[str, str]]) -> None:
    assert len(digests["none"]) == 16
    assert digests[mode] == digests["none"]
