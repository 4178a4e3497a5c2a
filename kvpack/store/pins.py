"""The pinned chains of a folder. The file of a pin is named after its chain and owner. It contains the chain's keys and the pin's end."""

from __future__ import annotations

import hashlib
import os
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from typing import Any

from kvpack.file.atomic import TEMPORARY_PREFIX, write_file
from kvpack.formats.arguments import describe
from kvpack.formats.errors import InvalidHeader, InvalidParameter, KvpackError, LimitExceeded

from .backend import Pin, PinTerms
from .counters import Counters
from .folder import Folder
from .keys import KEY_BYTES
from .options import check_count
from .trust import read_whole, regular_files

PIN_SECONDS = 86_400
"""Default duration of a pin in seconds. It ensures that a forgotten pin does not occupy a store forever."""
MAX_OWNER = 256
"""Maximum size of an owner's name in bytes."""
_MAGIC = b"kvphold1"
_HEAD = struct.Struct("<8sQH")
_DIGEST_BYTES = 8


def make_pin_terms(owner: Any, seconds: Any) -> PinTerms:
    """Return the terms of a pin that lasts ``seconds`` seconds. If ``owner`` is None, this process owns it."""
    check_count("seconds", seconds, 1)
    name = validate_owner(owner)
    if name is None:
        name = f"{socket.gethostname()[: MAX_OWNER // 2]}:{os.getpid()}"
    return PinTerms(name, min(int(time.time()) + seconds, 2**63 - 1))


def validate_owner(owner: Any) -> str | None:
    """Return ``owner`` unchanged. Raises InvalidParameter unless it is None or a valid name."""
    if owner is None:
        return None
    if not isinstance(owner, str) or not owner or not owner.isprintable() or len(owner.encode()) > MAX_OWNER:
        raise InvalidParameter(f"owner is {describe(owner)}, expected a name of at most {MAX_OWNER} bytes of printable text")
    return owner


def owner_digest(owner: str) -> bytes:
    """Return a short digest of an owner's name. It distinguishes pins of different owners on the same chain."""
    return hashlib.sha256(owner.encode()).digest()[:_DIGEST_BYTES]


def encode_pin(chain: Sequence[bytes], terms: PinTerms) -> bytes:
    owner = terms.owner.encode()
    return _HEAD.pack(_MAGIC, terms.until, len(owner)) + owner + b"".join(chain)


def parse_pin(name: str, data: bytes) -> Pin:
    """Parse a pin, which may have ended. ``name`` identifies it in error messages."""
    if len(data) < _HEAD.size or not data.startswith(_MAGIC):
        raise InvalidHeader(f"the pin {name!r:.100} begins with {data[:8]!r}, expected {_MAGIC!r} followed by the pin's end")
    _, until, length = _HEAD.unpack(data[: _HEAD.size])
    chain = split_keys(data[_HEAD.size + length :])
    if not chain:
        raise InvalidHeader(f"the pin {name!r:.100} contains no keys, expected at least one")
    return Pin(chain, data[_HEAD.size : _HEAD.size + length].decode(errors="replace"), until)


def split_keys(data: bytes) -> tuple[bytes, ...]:
    """Split concatenated keys. An incomplete last key is dropped."""
    return tuple(data[at : at + KEY_BYTES] for at in range(0, len(data) - KEY_BYTES + 1, KEY_BYTES))


def is_active(pin: Pin) -> bool:
    return pin.until > time.time()


_MAX_BYTES = 2**20 * KEY_BYTES
"""Maximum size of a pin's file in bytes, enough for a million chunks."""


class Pins:
    """The pins in ``folder``, shared by all processes. System errors are counted, except that ``active`` and ``keys`` raise OSError."""

    def __init__(self, folder: Folder, counters: Counters) -> None:
        self._folder, self._counters = folder, counters

    def add(self, chain: Sequence[bytes], terms: PinTerms) -> bool:
        """Pin a chain. Returns True on success."""
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
        """Remove the pins that ``owner`` has set on a chain, or all of its pins if ``owner`` is None. Returns True if any were removed."""
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
        for name, path in self._files():
            try:
                pin = self._read(name, path, quiet=True)
                if pin is not None and not is_active(pin):
                    os.unlink(path)
            except FileNotFoundError:
                continue
            except OSError as error:
                self._counters.fault("sweep", error)

    def _active_pins(self, prefix: str = "") -> Iterator[tuple[Pin, str]]:
        """Yield the active pins with file names that start with ``prefix``, each with the path of its file."""
        for name, path in self._files():
            pin = self._read(name, path) if name.startswith(prefix) else None
            if pin is not None and is_active(pin):
                yield pin, path

    def _files(self) -> Iterator[tuple[str, str]]:
        for name, _ in regular_files(self._folder.holds_folder, self._counters):
            if not name.startswith(TEMPORARY_PREFIX):
                yield name, os.path.join(self._folder.holds_folder, name)

    def _read(self, name: str, path: str, *, quiet: bool = False) -> Pin | None:
        """Return the pin in a file, even if it has ended. Returns None if the file is missing, is not a pin, or is not trusted.

        An invalid pin counts as a fault, unless ``quiet`` is True.
        """
        try:
            with self._folder.trust.open_checked(path) as (descriptor, status):
                if status.st_size > _MAX_BYTES:
                    raise LimitExceeded(f"the pin {name!r:.100} has {status.st_size} bytes, but at most {_MAX_BYTES} are allowed")
                data = bytes(read_whole(descriptor, status.st_size))
            return parse_pin(name, data)
        except FileNotFoundError:
            return None
        except (PermissionError, LimitExceeded, InvalidHeader) as error:
            # The folder's owner writes only valid pins, which are never this long.
            if not quiet:
                self._counters.fault("pinned", error)
            return None

    def _path(self, key: bytes, owner: str) -> str:
        return os.path.join(self._folder.holds_folder, f"{key.hex()}-{owner_digest(owner).hex()}")
