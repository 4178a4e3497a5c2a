"""True if the C kernels of the CPU were built: without a compiler, kvpack installs without them."""

from __future__ import annotations

import warnings
from functools import cache

from kvpack.formats.errors import KvpackWarning

SHORTFALL = "the C kernels: they were not built, or from other sources, when kvpack was installed (install it again with a C compiler)"


def built() -> bool:
    """Return True if the C kernels were built, and run on this machine."""
    from kvpack.kernels.cpu import library

    return library.library() is not None


def levels() -> tuple[str, ...]:
    """The instruction sets that the C kernels have and this processor runs, best first."""
    from kvpack.kernels.cpu import library

    return library.levels()


@cache
def warn_missing() -> None:
    """Warn, once per process, that PyTorch operations handle tensors on the CPU (KvpackWarning)."""
    warnings.warn(
        f"attention and unpacking on the CPU are by PyTorch operations, several times slower than by {SHORTFALL}; "
        "KVPACK_KERNELS=torch turns this warning off",
        KvpackWarning,
        stacklevel=3,
    )
