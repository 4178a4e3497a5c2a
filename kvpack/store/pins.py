"""The pinned chains of a folder: one file per chain, named by the chain's last key, holds all its keys."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from kvpack.file.atomic import TEMPORARY_PREFIX, write_file
from kvpack.formats.errors import KvpackError, LimitExceeded

from .keys import KEY_BYTES
from .reading import read_whole, regular_files

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .counters import Counters
    from .folder import Folder


_MAX_BYTES = 2**20 * KEY_BYTES
"""The most bytes of a pin: a million chunks."""


class Pins:
    """The pins of ``folder``, for every process. Errors of the system are counted, except in ``keys``, which raises OSError."""

    def __init__(self, folder: Folder, counters: Counters) -> None:
        self._folder, self._counters = folder, counters

    def add(self, chain: Sequence[bytes]) -> bool:
        """Pin a chain, and return whether it is pinned now."""
        try:
            self._folder.make_folders(self._folder.pins_folder)
            keys, durable, own = memoryview(b"".join(chain)), self._folder.durable, self._folder.trust.own
            # Not among the unfinished entries, which count towards the budget.
            write_file(self._path(chain), [keys], durable=durable, unfinished=self._folder.pins_folder, begin=own)
        except (OSError, KvpackError) as error:
            self._counters.fault("pin", error)
            return False
        return True

    def remove(self, chain: Sequence[bytes]) -> bool:
        """Unpin a chain, and return whether it was pinned."""
        try:
            os.unlink(self._path(chain))
        except FileNotFoundError:
            return False
        except OSError as error:
            self._counters.fault("unpin", error)
            return False
        return True

    def keys(self) -> set[bytes]:
        """All pinned keys."""
        keys: set[bytes] = set()
        for name, _ in regular_files(self._folder.pins_folder, self._counters):
            if name.startswith(TEMPORARY_PREFIX):
                continue
            path = os.path.join(self._folder.pins_folder, name)
            try:
                with self._folder.trust.opened(path) as (descriptor, status):
                    if status.st_size > _MAX_BYTES:
                        raise LimitExceeded(f"the pin {name!r:.100} has {status.st_size} bytes, the limit is {_MAX_BYTES}")
                    data = read_whole(descriptor, status.st_size)
            except FileNotFoundError:
                continue
            except (PermissionError, LimitExceeded) as error:
                # Only the owner's pins count, and none is so long.
                self._counters.fault("pinned", error)
                continue
            keys.update(bytes(data[at : at + KEY_BYTES]) for at in range(0, len(data), KEY_BYTES))
        return keys

    def _path(self, chain: Sequence[bytes]) -> str:
        return os.path.join(self._folder.pins_folder, chain[-1].hex())
