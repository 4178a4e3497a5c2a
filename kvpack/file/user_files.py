"""Files named by a user: read whole and up to a limit, or open, read piece by piece and mapped when a tensor is requested.

FIFOs and devices are refused, so that no read waits or runs forever.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import stat
from typing import TYPE_CHECKING, Any, Protocol

from kvpack.formats.errors import InvalidParameter, InvalidType, LimitExceeded, MissingFile, Truncated
from kvpack.runtime.mapping import populate
from kvpack.runtime.reader import read_cold
from kvpack.runtime.threads import in_parallel

if TYPE_CHECKING:
    from collections.abc import Generator

    Buffer = bytes | bytearray | memoryview | mmap.mmap

PIECE_BYTES = 1 << 22
"""Bytes that a thread maps at a time."""
THREADS = 16
"""Maximum number of threads that map at a time: they wait for the disk, which needs many requests to be busy."""

_PIECE_BYTES = 2**20
_MAX_PATH = 4096
"""Maximum number of bytes of a path that the system accepts."""
_RELEASED = "the file was released"
_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}


def path_text(path: Any) -> str:
    """Return ``path`` as text; an empty one appears as ``''`` in messages. Raises InvalidParameter for anything but a path."""
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
    """Return the bytes of the regular file ``path``; ``what`` names it in messages, such as "a recipe file".

    Raises MissingFile as ``open_regular``, and for a file that cannot be read; LimitExceeded for more than ``max_bytes`` bytes.
    """
    return _read(path, max_bytes, what)[0]


def read_text(path: str | os.PathLike[str], max_bytes: int, what: str = "a file") -> str:
    """Read the text of a UTF-8 file, without a byte order mark.

    Raises the errors of ``read_bytes``, and InvalidParameter for other encodings.
    """
    return read_text_and_mode(path, max_bytes, what)[0]


def read_text_and_mode(path: str | os.PathLike[str], max_bytes: int, what: str = "a file") -> tuple[str, int]:
    """Return the text as ``read_text`` does, and the permission bits of the file."""
    data, mode = _read(path, max_bytes, what)
    try:
        return data.decode("utf-8-sig"), mode
    except UnicodeDecodeError as error:
        raise InvalidParameter(f"{path_text(path)}: the byte at {error.start} is not UTF-8: {what} is text") from None


def read_json(path: str | os.PathLike[str], max_bytes: int, what: str = "a JSON file") -> Any:
    """Return the value in a JSON file; ``what`` names the file in messages, such as "a JSON array of token ids".

    Raises the errors of ``read_text``, and InvalidParameter for invalid JSON and JSON nested too deeply.
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
    """Return the bytes and the permission bits of a regular file. The reported size is ignored, because it is 0 for files in /proc."""
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
        raise LimitExceeded(f"{where or repr(where)}: has more than {max_bytes} bytes, the limit for {what}")
    return b"".join(pieces), mode


def could_not_open(where: str, error: OSError | ValueError, what: str = "a regular file") -> MissingFile:
    """Return the error to raise when the system refuses to open ``where`` with ``error``."""
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


class Source(Protocol):
    """The bytes of a file."""

    size: int

    @property
    def descriptor(self) -> int | None:
        """Descriptor of an open file; None for other bytes."""
        ...

    def read(self, begin: int, end: int, into: bytearray | None = None) -> memoryview:
        """Read the current bytes ``[begin, end)`` of the file. Raises Truncated and MissingFile.

        The copy goes ``into`` memory that the caller reuses, if it is given and large enough.
        """
        ...

    def read_into(self, begin: int, memory: memoryview) -> None:
        """Read the current bytes from ``begin`` on into all of ``memory``. Raises Truncated and MissingFile."""
        ...

    def view(self, begin: int, end: int) -> memoryview:
        """Return bytes ``[begin, end)`` as they are in memory or in the mapped file. Raises Truncated and MissingFile."""
        ...

    def ahead(self, begin: int, end: int) -> Generator[int, None, None]:
        """Read bytes ``[begin, end)`` into memory for views, in order, and yield the end of the bytes read so far.

        Raises the errors of ``view``.
        """
        ...

    def close(self) -> None:
        """Release the file; views stay valid."""
        ...


class InMemory:
    """A file in memory; all results are views of it."""

    descriptor = None

    def __init__(self, data: Buffer) -> None:
        self._view = memoryview(data)
        self.size = len(data)

    def read(self, begin: int, end: int, into: bytearray | None = None) -> memoryview:
        """Return a view of the bytes."""
        return self._view[begin:end]

    def read_into(self, begin: int, memory: memoryview) -> None:
        """Copy the bytes."""
        memory[:] = self._view[begin : begin + len(memory)]

    def view(self, begin: int, end: int) -> memoryview:
        """Return a view of the bytes."""
        return self._view[begin:end]

    def ahead(self, begin: int, end: int) -> Generator[int, None, None]:
        """Return the end: all bytes are in memory."""
        yield end

    def close(self) -> None:
        """Release the view."""
        self._view.release()


class OnDisk:
    """An open file: ``read`` copies its bytes, ``view`` returns a view of a private mapping, created on first use.

    ``read`` raises Truncated if the file was cut meanwhile. Touching the mapping of such a file ends the process.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._mapping: memoryview | None = None
        self.size = os.fstat(descriptor).st_size

    @property
    def descriptor(self) -> int:
        """The file descriptor."""
        if self._descriptor < 0:
            raise ValueError(_RELEASED)
        return self._descriptor

    def read(self, begin: int, end: int, into: bytearray | None = None) -> memoryview:
        """Return a copy of the bytes."""
        size = end - begin
        data = memoryview(bytearray(size) if into is None or len(into) < size else into)[:size]
        self.read_into(begin, data)
        return data

    def read_whole(self) -> memoryview:
        """Return a copy of the whole file, which is read past the page cache if it is not in it."""
        data = read_cold(self.descriptor, self.size)
        return self.read(0, self.size) if data is None else data

    def read_into(self, begin: int, memory: memoryview) -> None:
        """Copy the bytes."""
        if self._descriptor < 0:
            raise ValueError(_RELEASED)
        done = 0
        while done < len(memory):
            try:
                count = os.preadv(self._descriptor, [memory[done:]], begin + done)
            except OSError as error:
                raise _failed("read", error) from None
            if not count:
                raise self._cut(begin + done)
            done += count

    def view(self, begin: int, end: int) -> memoryview:
        """Return a view of the mapping: writable and private."""
        if self._descriptor < 0:
            raise ValueError(_RELEASED)
        if self._mapping is None:
            try:
                now = os.fstat(self._descriptor).st_size
                # A private mapping never changes the file.
                mapping = mmap.mmap(self._descriptor, self.size, access=mmap.ACCESS_COPY) if now >= self.size else None
            except (OSError, ValueError) as error:
                raise _failed("mapped", error, "; kvpack.load(path, copy=True) reads a file into memory instead") from None
            if mapping is None:
                raise self._cut(now)
            self._mapping = memoryview(mapping)
        return self._mapping[begin:end]

    def ahead(self, begin: int, end: int) -> Generator[int, None, None]:
        """Map the pages of the next pieces in threads; with views alone, reading would wait for the disk at every page."""
        page = begin // mmap.PAGESIZE * mmap.PAGESIZE
        memory = self.view(page, end)
        address = ctypes.addressof(ctypes.c_ubyte.from_buffer(memory)) if end > page else 0

        def mapped(first: int) -> int:
            last = min(first + PIECE_BYTES, end - page)
            populate(address + first, last - first)
            return page + last

        pieces = range(0, end - page, PIECE_BYTES)
        try:
            with contextlib.closing(in_parallel(mapped, pieces, THREADS, 2 * THREADS)) as done:
                yield from done
        except OSError as error:
            now = os.fstat(self._descriptor).st_size
            raise (self._cut(now) if now < end else _failed("read", error)) from None

    def close(self) -> None:
        """Close the descriptor."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(descriptor)
        if self._mapping is not None:
            self._mapping.release()

    __del__ = close

    def _cut(self, size: int) -> Truncated:
        return Truncated(
            f"had {self.size} bytes when it was opened, but ended at byte {size} when it was read: another process truncated it"
        )


def _failed(what: str, error: OSError | ValueError, instead: str = "") -> MissingFile:
    reason = (error.strerror if isinstance(error, OSError) else None) or error
    return MissingFile(f"could not be {what}: {reason}{instead}", number=getattr(error, "errno", None) or errno.EIO)
