"""Read the keys of encrypted entries from a file, one per line: its id, then its hexadecimal digits."""

from __future__ import annotations

import os
import stat

from kvpack.file.user_files import read_text_and_mode
from kvpack.formats.errors import InvalidParameter

MAX_BYTES = 2**20
"""Maximum number of bytes of a key file."""


def read_key_file(path: str | os.PathLike[str]) -> dict[str, bytes]:
    """Return the keys in a file of lines "ID HEXADECIMAL-DIGITS", starting with the one that encrypts; # begins a comment.

    Raises MissingFile, LimitExceeded, and InvalidParameter for a file that users other than its owner may read, an invalid line and a
    repeated id.
    """
    text, mode = read_text_and_mode(path, MAX_BYTES)
    where = os.fsdecode(path)
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise InvalidParameter(f"{where}: has the mode {mode:04o}, expected 0600: only its owner may read a key file (run chmod 600)")
    keys: dict[str, bytes] = {}
    lines: dict[str, int] = {}
    for line_number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        # The line is not shown: it is, or nearly is, a secret.
        try:
            name, digits = words
            key = bytes.fromhex(digits)
        except ValueError:
            raise InvalidParameter(f"{where}: line {line_number} is not an id and a key in hexadecimal digits") from None
        if name in keys:
            raise InvalidParameter(f"{where}: line {line_number} has the id {name!r} of line {lines[name]}, expected one key per id")
        keys[name], lines[name] = key, line_number
    return keys
