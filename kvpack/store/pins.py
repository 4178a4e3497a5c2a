"""The pinned chains of a folder. A pin is a file, named by its chain and owner, that contains the chain's keys and the pin's end.

Pins of earlier versions have no owner and no end. They are in a separate folder and stay in effect.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from kvpack.file.atomic import TEMPORARY_PREFIX, write_file
from kvpack.formats.errors import InvalidHeader, KvpackError, LimitExceeded

from .keys import KEY_BYTES
from .pin_terms import encode_pin, is_active, owner_digest, parse_old_pin, parse_pin
from .reading import read_whole, regular_files

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .backend import Pin, PinTerms
    from .counters import Counters
    from .folder import Folder


_MAX_BYTES = 2**20 * KEY_BYTES
"""Maximum size of a pin's file in bytes, enough for a million chunks."""


class Pins:
    """The pins in ``folder``, which all processes share. System errors are counted, but ``active`` and ``keys`` raise OSError."""

    def __init__(self, folder: Folder, counters: Counters) -> None:
        self._folder, self._counters = folder, counters

    def add(self, chain: Sequence[bytes], terms: PinTerms) -> bool:
        """Pin a chain. Returns True if it is pinned now."""
        pieces = [memoryview(encode_pin(chain, terms))]
        try:
            self._folder.make_folders(self._folder.holds_folder)
            durable, take_ownership = self._folder.durable, self._folder.trust.assign_owner
            # Do not create the file among unfinished entries, which count toward the budget.
            write_file(
                self._path(chain[-1], terms.owner), pieces, durable=durable, unfinished=self._folder.holds_folder, begin=take_ownership
            )
        except (OSError, KvpackError) as error:
            self._counters.fault("pin", error)
            return False
        return True

    def remove(self, chain: Sequence[bytes], owner: str | None) -> bool:
        """Remove the pins of a chain that ``owner`` has set (None for all owners). Returns True if there were any."""
        try:
            removed = [path for pin, path in self._active_pins(chain[-1].hex()) if pin.key == chain[-1] and owner in (None, pin.owner)]
            for path in removed:
                os.unlink(path)
        except FileNotFoundError:
            # Another process has just unpinned it.
            return True
        except OSError as error:
            self._counters.fault("unpin", error)
            return False
        return bool(removed)

    def active(self) -> list[Pin]:
        return [pin for pin, _ in self._active_pins()]

    def keys(self) -> set[bytes]:
        return {key for pin in self.active() for key in pin.chain}

    def sweep(self) -> None:
        """Remove the pins that have ended."""
        for name, path in self._files(self._folder.holds_folder):
            try:
                pin = self._read(name, path, quiet=True)
                if pin is not None and not is_active(pin):
                    os.unlink(path)
            except FileNotFoundError:
                continue
            except OSError as error:
                self._counters.fault("sweep", error)

    def _active_pins(self, prefix: str = "") -> Iterator[tuple[Pin, str]]:
        """Yield the pins in effect whose file names start with ``prefix``, each with the path of its file."""
        for folder in (self._folder.pins_folder, self._folder.holds_folder):
            for name, path in self._files(folder):
                pin = self._read(name, path) if name.startswith(prefix) else None
                if pin is not None and is_active(pin):
                    yield pin, path

    def _files(self, folder: str) -> Iterator[tuple[str, str]]:
        for name, _ in regular_files(folder, self._counters):
            if not name.startswith(TEMPORARY_PREFIX):
                yield name, os.path.join(folder, name)

    def _read(self, name: str, path: str, *, quiet: bool = False) -> Pin | None:
        """Return the pin in a file, even if it has ended. Returns None if the file is missing, is not a pin, or cannot be trusted.

        An invalid pin counts as a fault, unless ``quiet`` is True.
        """
        try:
            with self._folder.trust.open_checked(path) as (descriptor, status):
                if status.st_size > _MAX_BYTES:
                    raise LimitExceeded(f"the pin {name!r:.100} has {status.st_size} bytes, but a pin has at most {_MAX_BYTES}")
                data = bytes(read_whole(descriptor, status.st_size))
            return parse_old_pin(data) if os.path.dirname(path) == self._folder.pins_folder else parse_pin(name, data)
        except FileNotFoundError:
            return None
        except (PermissionError, LimitExceeded, InvalidHeader) as error:
            # Valid pins are written by the folder's owner and are not this long.
            if not quiet:
                self._counters.fault("pinned", error)
            return None

    def _path(self, key: bytes, owner: str) -> str:
        return os.path.join(self._folder.holds_folder, f"{key.hex()}-{owner_digest(owner).hex()}")
