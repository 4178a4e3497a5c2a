"""The encoding of pins, their owners and their expiry, which is the same in folders, in object stores and on Redis."""

from __future__ import annotations

import hashlib
import os
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any

from kvpack.formats.arguments import describe
from kvpack.formats.errors import InvalidHeader, InvalidParameter

from .backend import Pin, PinTerms
from .keys import KEY_BYTES
from .options import check_count

PIN_SECONDS = 86_400
"""Default duration of a pin in seconds, so that a forgotten pin does not occupy a store forever."""
MAX_OWNER = 256
"""Maximum size of an owner's name in bytes."""
_MAGIC = b"kvphold1"
_HEAD = struct.Struct("<8sQH")
_DIGEST_BYTES = 8


def make_pin_terms(owner: Any, seconds: Any) -> PinTerms:
    """Return the terms of a pin for ``seconds`` seconds. ``owner`` is None for this process. Raises InvalidParameter."""
    check_count("seconds", seconds, 1)
    name = validate_owner(owner)
    if name is None:
        name = f"{socket.gethostname()[: MAX_OWNER // 2]}:{os.getpid()}"
    return PinTerms(name, min(int(time.time()) + seconds, 2**63 - 1))


def validate_owner(owner: Any) -> str | None:
    """Return ``owner`` unchanged. Raises InvalidParameter unless it is a valid name or None."""
    if owner is None:
        return None
    if not isinstance(owner, str) or not owner or not owner.isprintable() or len(owner.encode()) > MAX_OWNER:
        raise InvalidParameter(f"owner is {describe(owner)}, expected a name of at most {MAX_OWNER} bytes of printable text")
    return owner


def owner_digest(owner: str) -> bytes:
    """Return a short digest of an owner's name. It distinguishes the pins that several owners set on the same chain."""
    return hashlib.sha256(owner.encode()).digest()[:_DIGEST_BYTES]


def encode_pin(chain: Sequence[bytes], terms: PinTerms) -> bytes:
    owner = terms.owner.encode()
    return _HEAD.pack(_MAGIC, terms.until, len(owner)) + owner + b"".join(chain)


def parse_pin(name: str, data: bytes) -> Pin:
    """Parse a pin, which may already have ended. ``name`` identifies it in error messages. Raises InvalidHeader."""
    if len(data) < _HEAD.size or not data.startswith(_MAGIC):
        raise InvalidHeader(f"the pin {name!r:.100} begins with {data[:8]!r}, expected {_MAGIC!r} followed by a time")
    _, until, length = _HEAD.unpack(data[: _HEAD.size])
    chain = split_keys(data[_HEAD.size + length :])
    if not chain:
        raise InvalidHeader(f"the pin {name!r:.100} has no key, expected at least one")
    return Pin(chain, data[_HEAD.size : _HEAD.size + length].decode(errors="replace"), until)


def parse_old_pin(data: bytes) -> Pin | None:
    """Parse a pin that an earlier version wrote, which consists of keys only. Returns None if it has no key."""
    chain = split_keys(data)
    return Pin(chain, "", None) if chain else None


def split_keys(data: bytes) -> tuple[bytes, ...]:
    """Split concatenated keys. An incomplete last key is dropped."""
    return tuple(data[at : at + KEY_BYTES] for at in range(0, len(data) - KEY_BYTES + 1, KEY_BYTES))


def is_active(pin: Pin) -> bool:
    return pin.until is None or pin.until > time.time()
