"""The owners and the ends of pins."""

from __future__ import annotations

import os
import socket
import time
from typing import Any

from kvpack.formats.arguments import shown
from kvpack.formats.errors import InvalidParameter

from .backend import Hold
from .options import check_count

PIN_SECONDS = 86_400
"""How long a pin holds unless its owner says otherwise: what a program forgets to unpin blocks a store for no longer."""
MAX_OWNER = 256
"""The most bytes of an owner's name."""


def hold_of(owner: Any, seconds: Any) -> Hold:
    """A hold of so many ``seconds`` from now for ``owner``, None for this process. Raises InvalidParameter."""
    check_count("seconds", seconds, 1)
    name = checked_owner(owner)
    if name is None:
        name = f"{socket.gethostname()[:MAX_OWNER // 2]}:{os.getpid()}"
    return Hold(name, min(int(time.time()) + seconds, 2**63 - 1))


def checked_owner(owner: Any) -> str | None:
    """The name of an owner. Raises InvalidParameter for what cannot be one."""
    if owner is None:
        return None
    if not isinstance(owner, str) or not owner or not owner.isprintable() or len(owner.encode()) > MAX_OWNER:
        raise InvalidParameter(f"owner is {shown(owner)}, expected a name of at most {MAX_OWNER} bytes of printable text")
    return owner
