"""Leases. If several workers miss the same prefix, one computes it, and the others wait until it is saved.

A lease is named after the key of the first missing chunk. It ends when its holder saves the prefix or is closed, or at the latest after the
number of seconds passed to the store. This limits the delay caused by a dead holder.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from typing import TYPE_CHECKING

from kvpack.file.atomic import LOCKED_SUFFIX, TEMPORARY_PREFIX, try_lock
from kvpack.runtime.threads import Lock

from .backend import Backend, Lease, NoLease
from .options import check_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvpack.cache.cache import Cache

    from .counters import Counters
    from .folder import Folder

_PAUSES = (0.005, 0.1)
"""First and longest pause, in seconds, between attempts to acquire a lease."""


class Leases:
    """The leases that one store holds, each for at most ``seconds`` seconds. Safe to use from any thread.

    A forked child starts without leases.
    """

    def __init__(self, backend: Backend, counters: Counters, seconds: float) -> None:
        check_seconds("lease", seconds, ", or None not to wait")
        self._backend, self._counters, self._seconds = backend, counters, seconds
        self._held: dict[bytes, tuple[Lease, int, float]] = {}
        self._pid = os.getpid()
        self._lock = Lock()

    def load(self, keys: Sequence[bytes], load: Callable[[], Cache | None], chunk: int) -> Cache | None:
        """Call ``load()`` and return its result, the cached prefix of the chunks ``keys``.

        If another worker is computing the rest, wait, then call ``load()`` again. On return, this store holds the lease on the first
        missing chunk, unless nothing is missing or the wait timed out.
        """
        deadline = time.monotonic() + self._seconds
        waited = False
        cache = load()
        while (count := 0 if cache is None else cache.tokens // chunk) < len(keys):
            key = keys[count]
            if self._is_held(key):
                break
            lease, attempts = self._acquire(key, deadline)
            waited |= attempts > 1
            if lease is None:
                self._counters.add("lease_timeouts")
                break
            if not self._backend.count_present([key]):
                with self._lock:
                    self._held[key] = lease, threading.get_ident(), time.monotonic()
                break
            # The entry was saved between the load and the lease.
            lease.release()
            cache = load()
            if (0 if cache is None else cache.tokens // chunk) <= count:
                # The entry is present, but cannot be read here.
                break
        self._counters.add("lease_waits", waited)
        return cache

    def release(self, keys: Iterable[bytes]) -> None:
        """Release the leases on ``keys``, and all expired leases."""
        released = set(keys)
        now = time.monotonic()
        with self._lock:
            self._forget_parent_leases()
            ended = [key for key, (_, _, since) in self._held.items() if key in released or now - since > self._seconds]
            leases = [self._held.pop(key)[0] for key in ended]
        for lease in leases:
            lease.release()

    def close(self) -> None:
        self.release([*self._held])

    def _is_held(self, key: bytes) -> bool:
        """Return True if this thread already holds the lease on ``key``."""
        self.release(())
        with self._lock:
            return key in self._held and self._held[key][1] == threading.get_ident()

    def _forget_parent_leases(self) -> None:
        if self._pid != os.getpid():
            self._held, self._pid = {}, os.getpid()

    def _acquire(self, key: bytes, deadline: float) -> tuple[Lease | None, int]:
        """Acquire the lease on ``key``, waiting until ``deadline``. Returns the lease (None after a timeout) and the number of attempts."""
        pause, tries = _PAUSES[0], 0
        while True:
            tries += 1
            lease = self._backend.take_lease(key, self._seconds)
            remaining = deadline - time.monotonic()
            if lease is not None or remaining <= 0:
                return lease, tries
            time.sleep(min(pause, remaining))
            pause = min(2 * pause, _PAUSES[1])


class FileLease:
    """A lease in a folder: an empty file among the unfinished files. Its holder keeps the file locked."""

    def __init__(self, path: str, descriptor: int) -> None:
        self._path, self._descriptor = path, descriptor

    def release(self) -> None:
        # The file is unlinked while it is locked, so that the next process that locks it sees that it has no name, and creates another.
        with contextlib.suppress(OSError):
            os.unlink(self._path)
        os.close(self._descriptor)


def take_file_lease(folder: Folder, key: bytes, seconds: float) -> Lease | None:
    """Acquire the lease on ``key`` in a folder.

    Returns None if another worker has held it for less than ``seconds`` seconds. Raises OSError or KvpackError.
    """
    if not folder.trust.may_write:
        return NoLease()
    folder.make_folders()
    path = os.path.join(folder.unfinished_folder, f"{TEMPORARY_PREFIX}lease-{key.hex()}{LOCKED_SUFFIX}")
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    acquired = False
    try:
        locked = try_lock(descriptor)
        status = os.fstat(descriptor)
        if locked and status.st_nlink:
            folder.trust.assign_owner(descriptor)
            os.utime(descriptor)
            acquired = True
            return FileLease(path, descriptor)
        # Do not wait on a file system without locks, or for a holder that has had the lease for too long.
        late = locked is None or (locked is False and abs(time.time() - status.st_mtime) > seconds)
        return NoLease() if late else None
    finally:
        if not acquired:
            os.close(descriptor)
