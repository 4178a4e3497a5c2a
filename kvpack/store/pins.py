"""Pinned chains of a folder: one file each, named by its last key, that holds all its keys."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from kvpack.atomic import write_file
from kvpack.formats.errors import KvpackError

from .keys import KEY_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .counters import Counters
    from .directory import Directory


class Pins:
    """The pins in ``folder``, for every process. Refusals of the system are counted, but those of ``keys``, which raises OSError."""

    def __init__(self, directory: Directory, folder: str, unfinished: str, counters: Counters) -> None:
        self._directory, self._folder, self._unfinished, self._counters = directory, folder, unfinished, counters

    def add(self, chain: Sequence[bytes]) -> bool:
        """Pin a chain, and say whether it is pinned now."""
        try:
            self._directory.make_folders(self._folder)
            write_file(self._path(chain), [memoryview(b"".join(chain))], durable=self._directory.durable, unfinished=self._unfinished)
        except (OSError, KvpackError) as error:
            self._counters.fault("pin", error)
            return False
        return True

    def remove(self, chain: Sequence[bytes]) -> bool:
        """Unpin a chain, and say whether it was pinned."""
        try:
            os.unlink(self._path(chain))
        except FileNotFoundError:
            return False
        except OSError as error:
            self._counters.fault("unpin", error)
            return False
        return True

    def keys(self) -> set[bytes]:
        """All keys that are pinned."""
        keys: set[bytes] = set()
        for name, _ in self._directory.files(self._folder):
            with contextlib.suppress(FileNotFoundError), open(os.path.join(self._folder, name), "rb") as file:
                data = file.read()
                keys.update(data[at : at + KEY_BYTES] for at in range(0, len(data), KEY_BYTES))
        return keys

    def _path(self, chain: Sequence[bytes]) -> str:
        return os.path.join(self._folder, chain[-1].hex())
