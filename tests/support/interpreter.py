"""Choose where tests of Triton kernels run. Triton decides between its interpreter and a device when it is imported.

``TRITON_INTERPRET=1 pytest`` runs only the tests marked ``kernels``, in the interpreter, on any machine. Otherwise, these tests run
compiled, together with those marked ``cuda``, if there is a CUDA device. conftest.py deselects the tests that the process cannot run.
"""

from __future__ import annotations

import os
from importlib.metadata import version
from typing import Any

import pytest

from kvpack.coding import triton_version

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"

OLD_INTERPRETER = INTERPRETED and triton_version.is_supported() and tuple(map(int, version("triton").split(".")[:2])) < (3, 7)

needs_loaded_bounds = pytest.mark.skipif(
    OLD_INTERPRETER and tuple(map(int, version("numpy").split(".")[:2])) >= (2, 4),
    reason="loops over loaded bounds fail in the interpreter of Triton below 3.7 with NumPy 2.4",
)

if OLD_INTERPRETER:
    from triton.language import core

    unwrapped = core._unwrap_if_constexpr

    def with_names(value: Any) -> Any:
        """Return the result of a Triton function as a NamedTuple of ``names``, because Triton 3.6 drops its field names."""
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(with_names, value))
        return tuple(map(with_names, value)) if type(value) is tuple else unwrapped(value)

    # The interpreter passes plain tuples to constexpr functions; compiled code passes constants with the field names.
    core._unwrap_if_constexpr = with_names
