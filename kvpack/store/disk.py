"""Disk usage of files and folders, in whole blocks."""

from __future__ import annotations

import os

from kvpack.file.atomic import is_on_one_host

BLOCK = 4096
"""The block of nearly every file system, and the least that a file of a byte is counted as."""
_LARGEST_BLOCK = 65_536
"""Network mounts call their requests' size a block."""


def block_bytes(path: str) -> int:
    """Return the block size of the disk of a file below ``path``, which need not exist yet.

    Machines that share a folder over a network count alike, whatever each of them mounts.
    """
    while not os.path.lexists(path) and path != os.path.dirname(path):
        path = os.path.dirname(path)
    try:
        return min(max(os.statvfs(path).f_frsize, BLOCK), _LARGEST_BLOCK) if is_on_one_host(path) else BLOCK
    except OSError:
        return BLOCK


def taken_by(*paths: str) -> int:
    """Return the disk space of these files and folders; missing ones need none."""
    total = 0
    for path in paths:
        try:
            total += 512 * os.lstat(path).st_blocks
        except OSError:
            continue
    return total
