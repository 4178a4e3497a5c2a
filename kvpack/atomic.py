"""Writing a file so that at every moment its name holds the old bytes or the new, never a mixture (spec/container.md, Writing)."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from .formats.errors import WriteFailed

if TYPE_CHECKING:
    from collections.abc import Iterable

TEMPORARY_PREFIX = ".kvpack-"
TEMPORARY_SUFFIX = ".tmp"
"""What the name of an unfinished file begins and ends with: a crash may leave one behind, and whoever owns the folder may remove it."""


def write_file(path: str | os.PathLike[str], pieces: Iterable[memoryview], *, durable: bool = False) -> None:
    """Replace ``path`` by the bytes of ``pieces``: a new file of mode 0600 beside it, renamed over it when complete.

    ``durable`` forces the bytes, then the rename, to the disk before returning. Raises WriteFailed, which names the path
    and the system's reason, after removing the new file; the old one is as it was.
    """
    target = os.fspath(path)
    folder = os.path.dirname(target) or "."
    temporary = os.path.join(folder, f"{TEMPORARY_PREFIX}{os.getpid()}-{os.urandom(8).hex()}{TEMPORARY_SUFFIX}")
    try:
        # KV states are as private as the prompt that they hold.
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except (OSError, ValueError) as error:
        raise WriteFailed(_reason(target, error)) from None
    try:
        try:
            for piece in pieces:
                _write_all(descriptor, piece)
            if durable:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(temporary, target)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        if isinstance(error, OSError):
            raise WriteFailed(_reason(target, error)) from None
        raise
    if durable:
        try:
            _sync_folder(folder)
        except OSError as error:
            raise WriteFailed(f"{target}: written, but its folder could not be synced: {error.strerror or error}") from None


def _write_all(descriptor: int, piece: memoryview) -> None:
    while piece:
        piece = piece[os.write(descriptor, piece) :]


def _sync_folder(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _reason(target: str, error: OSError | ValueError) -> str:
    reason = error.strerror if isinstance(error, OSError) else None
    return f"{target}: could not be written: {reason or error}"
