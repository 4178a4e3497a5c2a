"""Reads of a file by threads in C, which take the interpreter no time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from . import library

if TYPE_CHECKING:
    from collections.abc import Sequence

_MILLISECONDS = 100
"""The longest wait without a look for signals, whose handlers Python calls between two waits."""


class Reader:
    """``reads`` of the open file ``descriptor`` in order: its first byte, the number of its bytes, and the address that they go to.

    Threads share each in pieces of up to ``piece_bytes``. None is begun before ``allow``. A context manager: until its end the descriptor
    is read and ``memory``, which holds the addresses and is kept, written. Raises MemoryError where no thread can be started.
    """

    def __init__(self, descriptor: int, reads: Sequence[tuple[int, int, int]], memory: object, piece_bytes: int, threads: int) -> None:
        compiled = library.library()
        assert compiled is not None
        self._library, self._reader, self._memory = compiled, None, memory
        self._reads = (library.Read * len(reads))(*(library.Read(*read) for read in reads))
        self._reader = compiled.kvpack_reader_start(descriptor, self._reads, len(reads), piece_bytes, threads)
        if not self._reader:
            raise MemoryError("no thread could be started")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def _stop(self) -> None:
        reader, self._reader = self._reader, None
        if reader:
            self._library.kvpack_reader_stop(reader)

    __del__ = _stop

    def allow(self, upto: int) -> None:
        """Let the reads below ``upto`` begin."""
        self._library.kvpack_reader_allow(self._reader, upto)

    def wait(self, number: int) -> bool:
        """Wait for the end of that read, which is allowed, and of those before it; whether it has all its bytes."""
        while not self._library.kvpack_reader_wait(self._reader, number + 1, _MILLISECONDS):
            continue
        return not self._reads[number].failed


def available() -> bool:
    """Whether the library is there."""
    return library.library() is not None
