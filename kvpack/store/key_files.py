"""Reads encryption keys from a file. Each line contains one key: its id, followed by its hexadecimal digits."""

from __future__ import annotations

import os
import stat

from kvpack.file.user_files import read_text_and_mode
from kvpack.formats.errors import InvalidParameter

MAX_BYTES = 2**20
"""Maximum size of a key file in bytes."""


def read_key_file(path: str | os.PathLike[str]) -> dict[str, bytes]:
    """Return the encryption keys in a file by id. The first one encrypts. Each line is "ID HEXADECIMAL-DIGITS"; # begins a comment.

    Raises MissingFile, LimitExceeded, or InvalidParameter if a line is invalid, an id is repeated, or users other than the owner may access
    the file.
    """
    text, mode = read_text_and_mode(path, MAX_BYTES)
    where = os.fsdecode(path)
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise InvalidParameter(f"{where} has mode {mode:04o}, but only its owner may access a key file: run chmod 600")
    keys: dict[str, bytes] = {}
    lines: dict[str, int] = {}
    for line_number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        # Messages do not quote the line, because it may contain the secret.
        try:
            name, digits = words
            key = bytes.fromhex(digits)
        except ValueError:
            raise InvalidParameter(f"{where}: line {line_number}: expected an id and a hexadecimal key") from None
        if name in keys:
            raise InvalidParameter(
                f"{where}: line {line_number} repeats the id {name!r} of line {lines[name]}: use another id for one of the keys"
            )
        keys[name], lines[name] = key, line_number
    return keys
