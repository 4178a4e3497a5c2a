"""Check that the kernels run on the installed Triton. PyTorch brings its own Triton, so kvpack does not require a version."""

from __future__ import annotations

import re
import warnings
from functools import cache
from importlib.util import find_spec

from kvpack.formats.errors import KvpackWarning

OLDEST = (3, 6)
"""The first release on which the kernels run: older ones launch kernels and compile inline assembly differently."""


@cache
def installed() -> str | None:
    """Return the version of the installed Triton, or None."""
    if find_spec("triton") is None:
        return None
    import triton

    version: str = triton.__version__
    return version


def supported() -> bool:
    """Return True if the kernels run on the installed Triton: it is ``OLDEST`` or newer."""
    return _recent(installed())


@cache
def _recent(version: str | None) -> bool:
    match = re.match(r"(\d+)\.(\d+)", version or "")
    return match is not None and (int(match[1]), int(match[2])) >= OLDEST


def shortfall() -> str:
    """Return the required and the installed version, for messages."""
    version = installed()
    return f"Triton {OLDEST[0]}.{OLDEST[1]} or newer, and {'none' if version is None else f'Triton {version}'} is installed"


@cache
def warn_unsupported() -> None:
    """Warn, once per process, that tensors on a CUDA device are processed without the kernels (KvpackWarning)."""
    warnings.warn(
        f"tensors on a CUDA device are encoded, decoded and attended with PyTorch operations: kvpack's kernels need {shortfall()}. "
        "PyTorch 2.10 and later bring one that is new enough; set KVPACK_KERNELS=torch to turn this warning off",
        KvpackWarning,
        stacklevel=3,
    )
