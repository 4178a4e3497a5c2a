"""All error classes. ``kvpack.errors.DigestMismatch`` is also ``kvpack.DigestMismatch``.

All errors are subclasses of ``KvpackError``, with an ``exit_code`` for the command line:

- 3: a file is missing or cannot be read or written, the disk is full, or there is too little memory
- 2: the request is invalid, such as an unknown recipe, or a shape or dtype that is not supported
- 1: a file was rejected: it is damaged, truncated, of another kind, or from a newer version
- 0: no error

A command that checks several files exits with the highest of their codes.
"""

from __future__ import annotations

from collections.abc import Iterable

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

WORST_FIRST = (3, 2, 1, 0)
"""Exit codes from worst to best. A command with several outcomes exits with the worst."""

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
    """Warning that values were rounded to the dtype that the recipe sets for a raw codec."""


def worst_exit_code(codes: Iterable[int]) -> int:
    """Return the exit code of a command whose parts have exit codes ``codes``: the worst one, or 0 if there are none."""
    result = {0, *codes}
    return next(code for code in WORST_FIRST if code in result)
