"""Reads files at paths from the user: whole, in pieces, or mapped. Whole files have a size limit.

FIFOs and devices are rejected, so that no read blocks or runs forever.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import stat
from typing import TYPE_CHECKING, Any

from kvpack.formats.errors import InvalidParameter, InvalidType, LimitExceeded, MissingFile, Truncated
from kvpack.runtime.mapping import populate
from kvpack.runtime.reader import ColdRead, read_cold
from kvpack.runtime.threads import Lock, in_parallel

if TYPE_CHECKING:
    from collections.abc import Generator


    Buffer = bytes | bytearray | memoryview | mmap.mmap

PIECE_BYTES = 1 << 22
"""Number of bytes that one thread maps at a time."""
THREADS = 16
"""Maximum number of threads that map at the same time. They wait for the disk, which is fastest with many requests."""

_PIECE_BYTES = 2**20
_MAX_PATH = 4096
"""Maximum length of a path in bytes."""
_RELEASED = "the file was released"
_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}


def path_text(path: Any) -> str:
    """Return ``path`` as text. Raises InvalidType if it is not a path."""
    if not isinstance(path, str | bytes | os.PathLike):
        raise InvalidType(f"path is {_show_value(path)}, expected a str or os.PathLike, such as 'prompt.kvpack'")
    data = path.encode("utf-8", "surrogatepass") if isinstance(path, str) else os.fsencode(path)
    if len(data) > _MAX_PATH or (isinstance(path, bytes) and b"\0" in data):
        raise InvalidType(f"got {len(data)} bytes instead of a path: pass the path of a file, such as 'prompt.kvpack', not its contents")
    return os.fsdecode(path)


def open_regular(path: str | os.PathLike[str], description: str = "a regular file") -> int:
    """Open a regular file for reading. Returns its descriptor, which the caller must close.

    ``description`` describes the file in messages. Raises MissingFile if the path cannot be opened. Folders, FIFOs, sockets and devices are
    not opened, and also raise MissingFile.
    """
    where = path_text(path)
    try:
        _check_kind(where, os.stat(where).st_mode, description)
        # If a FIFO replaced the file, opening it without O_NONBLOCK would wait for a writer.
        descriptor = os.open(where, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except MissingFile:
        raise
    except (OSError, ValueError) as error:
        raise open_error(where, error, description) from None
    try:
        _check_kind(where, os.fstat(descriptor).st_mode, description)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_bytes(path: str | os.PathLike[str], max_bytes: int, description: str = "a file") -> bytes:
    """Return the bytes of a regular file. ``description`` describes it in messages, such as "a recipe file".

    Raises MissingFile if the file cannot be read, as ``open_regular`` does, and LimitExceeded if it is larger than ``max_bytes``.
    """
    return _read(path, max_bytes, description)[0]


def read_text(path: str | os.PathLike[str], max_bytes: int, description: str = "a file") -> str:
    """Return the text of a UTF-8 file, without a byte order mark.

    Raises InvalidParameter for any other encoding, and the same errors as ``read_bytes``.
    """
    return read_text_and_mode(path, max_bytes, description)[0]


def read_text_and_mode(path: str | os.PathLike[str], max_bytes: int, description: str = "a file") -> tuple[str, int]:
    """Return the text of a UTF-8 file, as ``read_text`` does, and the file's permission bits."""
    data, mode = _read(path, max_bytes, description)
    try:
        return data.decode("utf-8-sig"), mode
    except UnicodeDecodeError as error:
        raise InvalidParameter(f"{path_text(path)}: byte {error.start} is not valid UTF-8: convert the text to UTF-8") from None


def read_json(path: str | os.PathLike[str], max_bytes: int, description: str = "a JSON file") -> Any:
    """Return the value in a JSON file. ``description`` describes the file in messages, such as "a JSON array of token ids".

    Raises InvalidParameter if the JSON is invalid or nested too deeply, and the same errors as ``read_text``.
    """
    import json

    text = read_text(path, max_bytes, description)
    try:
        return json.loads(text)
    except RecursionError:
        raise InvalidParameter(f"{path_text(path)}: the JSON is nested too deeply, expected {description}") from None
    except ValueError as error:
        raise InvalidParameter(f"{path_text(path)} is not {description}: {error}") from None


def _read(path: str | os.PathLike[str], max_bytes: int, description: str) -> tuple[bytes, int]:
    """Return the bytes and permission bits of a regular file. The system's file size is not used, because it is 0 in /proc."""
    where, descriptor = path_text(path), open_regular(path, description)
    pieces, remaining = [], max_bytes + 1
    try:
        mode = stat.S_IMODE(os.fstat(descriptor).st_mode)
        while remaining and (piece := os.read(descriptor, min(remaining, _PIECE_BYTES))):
            pieces.append(piece)
            remaining -= len(piece)
    except OSError as error:
        raise open_error(where, error, description) from None
    finally:
        os.close(descriptor)
    if not remaining:
        raise LimitExceeded(f"{where or repr(where)}: exceeds the maximum of {max_bytes} bytes for {description}")
    return b"".join(pieces), mode


def open_error(where: str, error: OSError | ValueError, description: str = "a regular file") -> MissingFile:
    """Return the MissingFile to raise if opening ``where`` fails with ``error``. ``description`` describes the expected file."""
    system = isinstance(error, OSError)
    reason = (error.strerror if system else None) or error  # type: ignore[union-attr]
    purpose = f" as {description}" if description != "a regular file" else ""
    number = error.errno if system else None  # type: ignore[union-attr]
    advice = ": check the path" if number in (errno.ENOENT, errno.ENOTDIR) else ""
    message = f"{where or repr(where)}: could not be opened{purpose}: {reason}{advice}"
    return MissingFile(message, filename=where, number=number or errno.ENOENT)


def _check_kind(where: str, mode: int, description: str) -> None:
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "a device")
        number = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
        raise MissingFile(f"{where or repr(where)}: is {kind}, expected {description}", filename=where, number=number)


def _show_value(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


class MemoryFile:
    """A file with all bytes in memory. Methods return views of these bytes."""

    descriptor = None

    def __init__(self, data: Buffer) -> None:
        self._view = memoryview(data)
        self.size = len(data)

    def read(self, begin: int, end: int, into: bytearray | None = None) -> memoryview:
        return self._view[begin:end]

    def read_into(self, begin: int, memory: memoryview) -> None:
        memory[:] = self._view[begin : begin + len(memory)]

    def view(self, begin: int, end: int) -> memoryview:
        return self._view[begin:end]

    def read_ahead(self, begin: int, end: int) -> Generator[int, None, None]:
        """Yield ``end`` once: all bytes up to it are already in memory."""
        yield end

    def close(self) -> None:
        self._view.release()


class ArrivingFile(MemoryFile):
    """A file that is being copied from disk to memory. Methods wait for the requested bytes to arrive, and return views.

    They raise Truncated if another process truncates the file before it is copied.
    """

    def __init__(self, disk: DiskFile, cold: ColdRead) -> None:
        super().__init__(cold.data)
        self._disk, self._cold, self._lock = disk, cold, Lock()

    def read(self, begin: int, end: int, into: bytearray | None = None) -> memoryview:
        """Return a view of bytes ``[begin, end)``. Raises Truncated or MissingFile."""
        self._wait(end)
        return super().read(begin, end)

    view = read

    def read_into(self, begin: int, memory: memoryview) -> None:
        """Fill ``memory`` with the bytes that start at ``begin``. Raises Truncated or MissingFile."""
        self._wait(begin + len(memory))
        super().read_into(begin, memory)

    def read_ahead(self, begin: int, end: int) -> Generator[int, None, None]:
        """Yield the end of the bytes that have arrived so far, until ``end``. Raises Truncated or MissingFile."""
        while begin < end:
            begin = min(begin + PIECE_BYTES, end)
            self._wait(begin)
            yield begin

    def close(self) -> None:
        """Stop reading, and release the descriptors and the view of the bytes."""
        self._cold.close()
        self._disk.close()
        super().close()

    def _wait(self, end: int) -> None:
        try:
            with self._lock:
                reached = self._cold.wait(end)
        except OSError as error:
            raise _system_error("read", error) from None
        if reached < end:
            raise self._disk.truncated_error(reached)


class DiskFile:
    """An open file. ``read`` copies bytes. ``view`` returns a view of a private mapping, which is created on first use.

    If another process truncates the file, ``read`` raises Truncated, but access to a view kills this process.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._mapping: memoryview | None = None
        self.size = os.fstat(descriptor).st_size

    @property
    def descriptor(self) -> int:
        """The file descriptor. Raises ValueError after ``close``."""
        if self._descriptor < 0:
            raise ValueError(_RELEASED)
        return self._descriptor

    def read(self, begin: int, end: int, into: bytearray | None = None) -> memoryview:
        """Return a copy of bytes ``[begin, end)`` of the file. Raises Truncated or MissingFile.

        If the bytes fit in ``into``, they are copied there, so that callers can reuse memory.
        """
        size = end - begin
        data = memoryview(bytearray(size) if into is None or len(into) < size else into)[:size]
        self.read_into(begin, data)
        return data

    def copy_to_memory(self) -> MemoryFile:
        """Return the whole file in memory.

        If the file is not in the page cache, reads bypass the cache, and the first bytes can be used before all have arrived. Closing the
        returned file closes this one. Raises Truncated or MissingFile.
        """
        if (cold := read_cold(self.descriptor, self.size)) is not None:
            return ArrivingFile(self, cold)
        result = MemoryFile(self.read(0, self.size))
        self.close()
        return result

    def read_into(self, begin: int, memory: memoryview) -> None:
        """Read bytes, starting at ``begin``, until ``memory`` is full. Raises Truncated or MissingFile."""
        if self._descriptor < 0:
            raise ValueError(_RELEASED)
        done = 0
        while done < len(memory):
            try:
                count = os.preadv(self._descriptor, [memory[done:]], begin + done)
            except OSError as error:
                raise _system_error("read", error) from None
            if not count:
                raise self.truncated_error(begin + done)
            done += count

    def view(self, begin: int, end: int) -> memoryview:
        """Return a writable view of bytes ``[begin, end)`` of the private mapping. Raises Truncated or MissingFile."""
        if self._descriptor < 0:
            raise ValueError(_RELEASED)
        if self._mapping is None:
            try:
                current_size = os.fstat(self._descriptor).st_size
                # A private mapping never changes the file.
                mapping = mmap.mmap(self._descriptor, self.size, access=mmap.ACCESS_COPY) if current_size >= self.size else None
            except (OSError, ValueError) as error:
                raise _system_error("mapped", error, ": read it into memory instead with kvpack.load(path, copy=True)") from None
            if mapping is None:
                raise self.truncated_error(current_size)
            self._mapping = memoryview(mapping)
        return self._mapping[begin:end]

    def read_ahead(self, begin: int, end: int) -> Generator[int, None, None]:
        """Map pages in order, in several threads, and yield the end of the bytes mapped so far. Raises the same errors as ``view``.

        Without this, a reader would wait for the disk at every page.
        """
        page = begin // mmap.PAGESIZE * mmap.PAGESIZE
        memory = self.view(page, end)
        address = ctypes.addressof(ctypes.c_ubyte.from_buffer(memory)) if end > page else 0

        def map_piece(first: int) -> int:
            last = min(first + PIECE_BYTES, end - page)
            populate(address + first, last - first)
            return page + last

        pieces = range(0, end - page, PIECE_BYTES)
        try:
            with contextlib.closing(in_parallel(map_piece, pieces, THREADS, 2 * THREADS)) as done:
                yield from done
        except OSError as error:
            current_size = os.fstat(self._descriptor).st_size
            raise (self.truncated_error(current_size) if current_size < end else _system_error("read", error)) from None

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(descriptor)
        if self._mapping is not None:
            self._mapping.release()

    __del__ = close

    def truncated_error(self, size: int) -> Truncated:
        """Return the error to raise for a file that now ends at byte ``size``."""
        return Truncated(
            f"had {self.size} bytes when it was opened, but ended at byte {size} when it was read: another process truncated it"
        )


Source = MemoryFile | DiskFile
"""A file in memory or on disk."""


def _system_error(operation: str, error: OSError | ValueError, remedy: str = "") -> MissingFile:
    reason = (error.strerror if isinstance(error, OSError) else None) or error
    return MissingFile(f"could not be {operation}: {reason}{remedy}", number=getattr(error, "errno", None) or errno.EIO)
