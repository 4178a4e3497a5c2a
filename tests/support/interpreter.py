"""Where tests of Triton kernels run: Triton chooses between its interpreter and a device when it is imported.

``TRITON_INTERPRET=1 pytest`` runs the tests marked ``kernels`` in the interpreter, on any machine, and no others. Without it they
run compiled, with those marked ``cuda``, where there is a CUDA device. conftest.py deselects what the process cannot run.
"""

from __future__ import annotations

import os
from importlib.metadata import version

import pytest

from kvpack.coding import triton_version

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"

needs_loaded_bounds = pytest.mark.skipif(
    INTERPRETED and triton_version.supported() and tuple(map(int, version("triton").split(".")[:2])) < (3, 7),
    reason="loops over loaded bounds fail in the interpreter of Triton below 3.7 with NumPy 2.4",
)
