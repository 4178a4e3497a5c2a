"""Every error class, under the name that users look for: ``kvpack.errors.DigestMismatch``, or ``kvpack.DigestMismatch``.

All errors are subclasses of ``KvpackError``, whose ``exit_code`` is that of the command line:

3. the system refused: a file that is missing or cannot be read or written, a full disk, too little memory
2. the request is wrong: an unknown recipe, a shape or dtype that does not fit
1. a file is refused: damaged, cut, of another kind, of a newer version
0. nothing was refused

A command that checks several files exits with the worst code, in this order: nothing is known of a file that could not be read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpack.formats.errors import (
    DigestMismatch,
    InvalidHeader,
    InvalidParameter,
    InvalidPayload,
    InvalidType,
    KvpackError,
    KvpackWarning,
    LimitExceeded,
    MissingBasis,
    MissingFile,
    MissingPackage,
    NotKvpack,
    OutOfBounds,
    Truncated,
    Undecryptable,
    UnknownCodec,
    UnsupportedVersion,
    WriteFailed,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

WORST_FIRST = (3, 2, 1, 0)
"""Exit codes of several results in one command: the first that occurs is the command's."""

__all__ = [
    "WORST_FIRST",
    "DigestMismatch",
    "InvalidHeader",
    "InvalidParameter",
    "InvalidPayload",
    "InvalidType",
    "KvpackError",
    "KvpackWarning",
    "LimitExceeded",
    "MissingBasis",
    "MissingFile",
    "MissingPackage",
    "NotKvpack",
    "OutOfBounds",
    "RoundedWarning",
    "Truncated",
    "Undecryptable",
    "UnknownCodec",
    "UnsupportedVersion",
    "WriteFailed",
    "worst_exit_code",
]


class RoundedWarning(UserWarning):
    """Values were rounded to the dtype that a recipe names for a raw codec."""


def worst_exit_code(codes: Iterable[int]) -> int:
    """Return the exit code of a command from the exit codes of its parts: the first of ``WORST_FIRST`` among them, or 0 for none."""
    result = {0, *codes}
    return next(code for code in WORST_FIRST if code in result)
