"""Checks the installed Triton version. kvpack does not depend on the Triton package, because PyTorch installs a matching version."""

from __future__ import annotations

import re
import warnings
from functools import cache
from importlib.util import find_spec

from kvpack.formats.errors import KvpackWarning

MIN_VERSION = (3, 6)
"""Oldest Triton version that the kernels support. Older versions launch kernels and compile inline assembly differently."""


@cache
def installed_version() -> str | None:
    """Return the version of the installed Triton, or None if Triton is not installed."""
    if find_spec("triton") is None:
        return None
    import triton

    version: str = triton.__version__
    return version


def is_supported() -> bool:
    return _is_recent(installed_version())


@cache
def _is_recent(version: str | None) -> bool:
    match = re.match(r"(\d+)\.(\d+)", version or "")
    return match is not None and (int(match[1]), int(match[2])) >= MIN_VERSION


def requirement() -> str:
    """Return a phrase for messages: the required version and the installed one."""
    version = installed_version()
    return f"Triton {MIN_VERSION[0]}.{MIN_VERSION[1]} or newer, but {'none' if version is None else f'Triton {version}'} is installed"


@cache
def warn_unsupported() -> None:
    """Warn, once per process, that tensors on CUDA devices are processed by PyTorch operations."""
    warnings.warn(
        f"PyTorch operations encode, decode and attend tensors on CUDA devices, because kvpack's kernels need {requirement()}. "
        "Install PyTorch 2.10 or newer, which includes a suitable Triton, or set KVPACK_KERNELS=torch to turn this warning off",
        KvpackWarning,
        stacklevel=3,
    )
