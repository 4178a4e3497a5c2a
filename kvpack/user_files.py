"""Small files that a user names on the command line: read whole, but never one that waits, such as a FIFO, or that has no end."""

from __future__ import annotations

import json
import os
import stat
from typing import Any

from .formats.errors import InvalidParameter, LimitExceeded, MissingFile

_KINDS = {stat.S_IFDIR: "folder", stat.S_IFIFO: "FIFO", stat.S_IFSOCK: "socket"}


def read_text(path: str | os.PathLike[str], max_bytes: int) -> str:
    """The text of a regular file of at most ``max_bytes`` bytes of UTF-8.

    Raises MissingFile for what cannot be read or is no regular file, LimitExceeded, and InvalidParameter for other bytes.
    """
    return read_text_and_mode(path, max_bytes)[0]


def read_text_and_mode(path: str | os.PathLike[str], max_bytes: int) -> tuple[str, int]:
    """As ``read_text``, with the permission bits of the very file that was read."""
    where = os.fsdecode(path)
    try:
        # Without O_NONBLOCK, opening a FIFO waits for a writer.
        descriptor = os.open(where, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        try:
            mode = os.fstat(descriptor).st_mode
            if not stat.S_ISREG(mode):
                raise MissingFile(f"{where}: is a {_KINDS.get(stat.S_IFMT(mode), 'device')}, expected a regular file")
            data = _read(descriptor, max_bytes + 1)
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        raise MissingFile(f"{where}: could not be read: {reason or error}") from None
    if len(data) > max_bytes:
        raise LimitExceeded(f"{where}: has more than {max_bytes} bytes, which is the most that is read of such a file")
    try:
        return data.decode(), stat.S_IMODE(mode)
    except UnicodeDecodeError as error:
        raise InvalidParameter(f"{where}: is no text: byte {error.start} is not UTF-8") from None


def read_json(path: str | os.PathLike[str], max_bytes: int) -> Any:
    """The value of a JSON file of at most ``max_bytes`` bytes. Raises as ``read_text``, and InvalidParameter for what is no JSON."""
    text = read_text(path, max_bytes)
    try:
        return json.loads(text)
    except RecursionError:
        raise InvalidParameter(f"{os.fsdecode(path)}: is no JSON that can be read: it is nested too deep") from None
    except ValueError as error:
        raise InvalidParameter(f"{os.fsdecode(path)}: is no JSON: {error}") from None


def _read(descriptor: int, most: int) -> bytes:
    # What a file of /proc says of its size is nothing to go by.
    pieces, left = [], most
    while left > 0 and (piece := os.read(descriptor, min(left, 1 << 20))):
        pieces.append(piece)
        left -= len(piece)
    return b"".join(pieces)
