"""The tests of kernels that one file holds, run again in a process whose Triton interprets them: that is chosen before its import."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version

import pytest
import torch

from kvpack import dispatch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
on_cuda = pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="compiled kernels need a CUDA device")
on_kernels = pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="runs in the interpreter's process, and on CUDA")


def run_interpreted(file: str, *, loops_over_loaded_bounds: bool) -> None:
    """Fail unless the tests of ``file`` pass there.

    Skip in that process itself, without Triton, and where ``loops_over_loaded_bounds`` are more than the interpreter takes.
    """
    if INTERPRETED:
        pytest.skip("this is the interpreter's process")
    if not dispatch.triton_installed():
        pytest.skip("Triton is not installed")
    if loops_over_loaded_bounds and tuple(map(int, version("triton").split(".")[:2])) < (3, 7):
        pytest.skip("loops over loaded bounds fail in the interpreter of Triton below 3.7 with NumPy 2.4")
    command = [sys.executable, "-m", "pytest", "--quiet", "-p", "no:cacheprovider", file]
    # Not a worker of this run, if that has several processes.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    run = subprocess.run(command, env=environment | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert " passed" in run.stdout
