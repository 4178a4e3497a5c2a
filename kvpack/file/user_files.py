"""Files named by a user, read whole and up to a limit. FIFOs and devices are refused, so that no read waits or runs forever."""

from __future__ import annotations

import errno
import os
import stat
from typing import Any

from kvpack.formats.errors import InvalidParameter, InvalidType, LimitExceeded, MissingFile

_PIECE_BYTES = 2**20
_MAX_PATH = 4096
"""Maximum number of bytes of a path: the system takes no more."""
_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}


def path_text(path: Any) -> str:
    """``path`` as text; messages show an empty one as ``''``. Raises InvalidParameter for anything but a path."""
    if not isinstance(path, str | bytes | os.PathLike):
        raise InvalidType(f"a path is text or os.PathLike, such as 'prompt.kvpack'; found {_shown(path)}")
    data = path.encode("utf-8", "surrogatepass") if isinstance(path, str) else os.fsencode(path)
    if len(data) > _MAX_PATH or (isinstance(path, bytes) and b"\0" in data):
        raise InvalidType(f"{len(data)} bytes are not a path: give the path of a file, such as 'prompt.kvpack', and not its bytes")
    return os.fsdecode(path)


def open_regular(path: str | os.PathLike[str], what: str = "a regular file") -> int:
    """Open the regular file ``path`` for reading; the caller closes the descriptor. ``what`` names the file in messages.

    Raises MissingFile for a path that cannot be opened, and for a folder, a FIFO, a socket or a device, which is not opened.
    """
    where = path_text(path)
    try:
        _check_kind(where, os.stat(where).st_mode, what)
        # Without O_NONBLOCK, opening a FIFO that has replaced the file would wait for a writer.
        descriptor = os.open(where, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except MissingFile:
        raise
    except (OSError, ValueError) as error:
        raise could_not_open(where, error, what) from None
    try:
        _check_kind(where, os.fstat(descriptor).st_mode, what)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_bytes(path: str | os.PathLike[str], max_bytes: int, what: str = "a file") -> bytes:
    """The bytes of the regular file ``path``; ``what`` names it in messages, such as "a recipe file".

    Raises MissingFile as ``open_regular``, and for a file that cannot be read; LimitExceeded for more than ``max_bytes`` bytes.
    """
    return _read(path, max_bytes, what)[0]


def read_text(path: str | os.PathLike[str], max_bytes: int, what: str = "a file") -> str:
    """The text of a UTF-8 file, without a byte order mark. Raises as ``read_bytes``, and InvalidParameter for other bytes."""
    return read_text_and_mode(path, max_bytes, what)[0]


def read_text_and_mode(path: str | os.PathLike[str], max_bytes: int, what: str = "a file") -> tuple[str, int]:
    """Return the text as ``read_text`` does, and the permission bits of the file."""
    data, mode = _read(path, max_bytes, what)
    try:
        return data.decode("utf-8-sig"), mode
    except UnicodeDecodeError as error:
        raise InvalidParameter(f"{path_text(path)}: the byte at {error.start} is not UTF-8: {what} is text") from None


def read_json(path: str | os.PathLike[str], max_bytes: int, what: str = "a JSON file") -> Any:
    """The value of a JSON file; ``what`` names it in messages, such as "a JSON array of token ids".

    Raises as ``read_text``, and InvalidParameter for invalid JSON and JSON nested too deeply.
    """
    import json

    text = read_text(path, max_bytes, what)
    try:
        return json.loads(text)
    except RecursionError:
        raise InvalidParameter(f"{path_text(path)}: is not {what}: it is nested too deeply") from None
    except ValueError as error:
        raise InvalidParameter(f"{path_text(path)}: is not {what}: {error}") from None


def _read(path: str | os.PathLike[str], max_bytes: int, what: str) -> tuple[bytes, int]:
    """The bytes and the permission bits of a regular file. The reported size is ignored, because it is 0 for files in /proc."""
    where, descriptor = path_text(path), open_regular(path, what)
    pieces, left = [], max_bytes + 1
    try:
        mode = stat.S_IMODE(os.fstat(descriptor).st_mode)
        while left and (piece := os.read(descriptor, min(left, _PIECE_BYTES))):
            pieces.append(piece)
            left -= len(piece)
    except OSError as error:
        raise could_not_open(where, error, what) from None
    finally:
        os.close(descriptor)
    if not left:
        raise LimitExceeded(f"{where or repr(where)}: has more than {max_bytes} bytes, the most that {what} may have")
    return b"".join(pieces), mode


def could_not_open(where: str, error: OSError | ValueError, what: str = "a regular file") -> MissingFile:
    """The error to raise when the system refuses to open ``where`` with ``error``."""
    system = isinstance(error, OSError)
    reason = (error.strerror if system else None) or error  # type: ignore[union-attr]
    purpose = f" as {what}" if what != "a regular file" else ""
    number = error.errno if system else None  # type: ignore[union-attr]
    return MissingFile(f"{where or repr(where)}: could not be opened{purpose}: {reason}", filename=where, number=number or errno.ENOENT)


def _check_kind(where: str, mode: int, what: str) -> None:
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "a device")
        number = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
        raise MissingFile(f"{where or repr(where)}: is {kind}, expected {what}", filename=where, number=number)


def _shown(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
