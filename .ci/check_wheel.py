"""Check an installed wheel: pack, save, verify, load and attend, with the C library where the wheel has one."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import torch

import kvpack

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder, "cache.kvpack")
    keys, values = torch.randn(2, 1, 2, 100, 64).unbind()
    kvpack.save(kvpack.pack([(keys, values)], "octopus-4"), path)
    subprocess.run([sys.executable, "-m", "kvpack", "verify", path], check=True)
    query = torch.randn(1, 4, 1, 64)
    found = kvpack.attend(query, kvpack.load(path)[0])
    expected = torch.nn.functional.scaled_dot_product_attention(query, keys, values, enable_gqa=True)
    error = (found - expected).norm() / expected.norm()
    print(f"{kvpack.backends()['cpu']}; relative error of attention over octopus-4: {error:.3f}")
    if error > 0.2:
        sys.exit("attention over the packed cache is wrong")
