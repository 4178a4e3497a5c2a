"""The store that a command uses: its encryption keys, its catalog, and a report of its faults."""

from __future__ import annotations

import argparse
import re
import sys
from typing import Any

from kvpack.coding.bases import Basis
from kvpack.errors import KvpackError, worst_exit_code
from kvpack.output import printable, progress
from kvpack.store.backend import MAX_ENTRY_BYTES
from kvpack.store.catalog import Catalog, ChunkEntry, read_catalog
from kvpack.store.counters import Counters
from kvpack.store.encryption import Cipher, read_key_file
from kvpack.store.entry_kind import EntryFormat
from kvpack.store.locations import open_existing
from kvpack.store.options import LocationOptions
from kvpack.store.redaction import redacted_location

SYSTEM_REFUSED = 3


class CommandStore:
    """The store at the location in ``arguments``. With ``skip_sweep``, opening it does not change its contents.

    Raises the errors of opening the store and of reading its key file.
    """

    def __init__(self, arguments: argparse.Namespace, *, skip_sweep: bool = True, **options: Any) -> None:
        self.arguments = arguments
        self.keys = read_key_file(arguments.key_file) if getattr(arguments, "key_file", None) else None
        self.cipher = None if self.keys is None else Cipher(self.keys, arguments.tenant)
        self.max_entry_bytes: int = getattr(arguments, "max_entry_bytes", None) or MAX_ENTRY_BYTES
        self.faults: list[tuple[str, BaseException]] = []
        self.counters = Counters(report=lambda operation, error: self.faults.append((operation, error)))
        form = EntryFormat(self.max_entry_bytes, None if self.cipher is None else self.cipher.key_ids)
        given = LocationOptions(trusted_group=getattr(arguments, "trusted_group", None), **options)
        self.backend = open_existing(arguments.store, self.counters, form, given, skip_sweep=skip_sweep)

    @property
    def name(self) -> str:
        """The location without passwords and control characters, for printing."""
        return printable(redacted_location(self.arguments.store))

    def has_failed(self, entries: int) -> bool:
        """Return True if faults kept the store from returning any entry. ``entries`` is the number of returned entries."""
        return not entries and bool(self.faults)

    def catalog(self) -> Catalog:
        with progress("read") as callback:
            return read_catalog(self.backend, callback, self.cipher, max_entry_bytes=self.max_entry_bytes)

    def basis(self, entry: ChunkEntry) -> Basis | None:
        """Return the basis for an entry's recipe from the store, or None if the recipe needs none or the store does not contain it.

        The store is not changed. Raises DigestMismatch, Undecryptable, or the same errors as ``Basis.from_bytes``.
        """
        from kvpack.coding.recipes import Recipe, basis_digest
        from kvpack.store.bases import parse_basis_entry
        from kvpack.store.keys import basis_keys

        digest = basis_digest(Recipe.from_recorded(entry.recipe))
        keys = [] if digest is None else basis_keys(digest, self.cipher)
        result = ((key, data) for key in keys if (data := self.backend.peek(key)) is not None)
        return next((parse_basis_entry(key, data, digest, self.cipher) for key, data in result if digest is not None), None)

    def exit_code(self, *codes: int) -> int:
        """Print the first fault, if any. Returns the worst exit code of the faults and ``codes``."""
        if not self.faults:
            return worst_exit_code(codes)
        operation, error = self.faults[0]
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        text = f"{self.name}: {operation!r} failed: {printable(redacted_location(reason))}"
        if "://" in self.name and not isinstance(error, KvpackError):
            text += ": check the server and its URL"
        print(f"kvpack: {text}", file=sys.stderr)
        return worst_exit_code((*codes, SYSTEM_REFUSED))


_COUNT = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?) ?([a-z]*)", re.ASCII | re.IGNORECASE)
_UNITS: dict[str, int] = {
    "": 1,
    "b": 1,
    **{f"{name}b": 1000**power for power, name in enumerate("kmgt", 1)},
    **{f"{name}ib": 1024**power for power, name in enumerate("kmgt", 1)},
}


def parse_byte_count(text: str) -> int:
    """Return the number of bytes in a size such as ``1000000000``, ``1GB`` or ``1.5GiB``."""
    match = _COUNT.fullmatch(text.strip())
    unit = None if match is None else _UNITS.get(match[2].lower())
    if match is None or unit is None:
        raise argparse.ArgumentTypeError(f"{text!r:.80} must be a size in bytes, such as 1000000000, 1GB or 512MiB")
    whole, _, digits = match[1].partition(".")
    return int(whole + digits) * unit // int(f"1{'0' * len(digits)}")


def parse_positive_byte_count(text: str) -> int:
    """Return the number of bytes as ``parse_byte_count`` does, but reject 0."""
    count = parse_byte_count(text)
    if not count:
        raise argparse.ArgumentTypeError(f"{text!r:.80} must be at least 1 byte")
    return count


_TIME = re.compile(r"([0-9]{1,9})([smhd])", re.ASCII)
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def parse_duration(text: str) -> int:
    """Return the number of seconds in a time such as ``90s``, ``30m``, ``12h`` or ``7d``."""
    match = _TIME.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r:.80} must be a time, such as 90s, 30m, 12h or 7d")
    return int(match[1]) * _SECONDS[match[2]]
