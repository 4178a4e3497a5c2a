"""The tables of an index: schema, rows, and the SQL that changes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable

    Cost = Callable[[int], int]
    """Returns the disk space of an entry, given its size in bytes."""

VERSION = 1
NUMBER_BYTES = 8
"""Number of leading bytes of a key that form the row number.

The first byte identifies the subfolder, so a subfolder's rows are contiguous.
"""
_SCHEMA = """
CREATE TABLE folders (folder INTEGER PRIMARY KEY, node INTEGER, changed INTEGER, entries INTEGER, bytes INTEGER, cost INTEGER);
CREATE TABLE entries (id INTEGER PRIMARY KEY, rest BLOB NOT NULL, size INTEGER NOT NULL, used INTEGER NOT NULL, about INTEGER);
CREATE INDEX by_use ON entries (used);
CREATE TABLE abouts (about INTEGER PRIMARY KEY, text TEXT NOT NULL UNIQUE);
CREATE TABLE notes (name TEXT PRIMARY KEY, value) WITHOUT ROWID;
"""

IndexRow = tuple[int, bytes, int, int]
"""A row: its number, the rest of the key, the entry's size in bytes, and its last use in nanoseconds at the time of writing."""


class FolderListing(NamedTuple):
    """The contents of a subfolder. ``state`` is its inode and modification time. ``entries`` maps row numbers to the other fields of a row.
    """

    state: tuple[int, int]
    entries: dict[int, tuple[bytes, int, int]]


def create_tables(connection: sqlite3.Connection, run: int) -> None:
    """Create empty tables in the database. ``run`` is the id of the machine's boot."""
    for statement in filter(str.strip, _SCHEMA.split(";")):
        connection.execute(statement)
    connection.executemany("INSERT INTO folders VALUES (?, 0, 0, 0, 0, 0)", ((folder,) for folder in range(256)))
    set_number(connection, "run", run)
    connection.execute(f"PRAGMA user_version = {VERSION}")


def folder_rows(connection: sqlite3.Connection, folder: int) -> dict[int, tuple[bytes, int, int]]:
    """Return a subfolder's rows: for each row number, the other fields, as in ``FolderListing``."""
    query = "SELECT id, rest, size, used FROM entries WHERE id BETWEEN ? AND ?"
    return {number: (key_rest, size, used) for number, key_rest, size, used in connection.execute(query, row_id_range(folder))}


def write_listing(
    connection: sqlite3.Connection, folder: int, listing: FolderListing, rows: dict[int, tuple[bytes, int, int]], block: int
) -> bool:
    """Change the rows of a subfolder in the database from ``rows`` to the rows of ``listing``.

    Returns False if the database no longer contained ``rows``. Files occupy multiples of ``block`` bytes on disk.
    """
    entries = listing.entries
    connection.executemany("DELETE FROM entries WHERE id = ?", [(number,) for number in rows.keys() - entries.keys()])
    connection.executemany(
        "INSERT INTO entries (id, rest, size, used) VALUES (?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET "
        "about = CASE WHEN (rest, size) = (excluded.rest, excluded.size) THEN about END, "
        "rest = excluded.rest, size = excluded.size, used = excluded.used",
        [(number, *row) for number, row in entries.items() if rows.get(number) != row],
    )
    query = "SELECT COUNT(*), TOTAL(size), TOTAL((size + ? - 1) / ? * ?) FROM entries WHERE id BETWEEN ? AND ?"
    totals = tuple(map(int, connection.execute(query, (block, block, block, *row_id_range(folder))).fetchone()))
    same = totals[:2] == (len(entries), sum(size for _, size, _ in entries.values()))
    connection.execute("REPLACE INTO folders VALUES (?, ?, ?, ?, ?, ?)", (folder, *(listing.state if same else (0, 0)), *totals))
    return same


def replace_row(connection: sqlite3.Connection, key: bytes, size: int, used_ns: int, description_id: int | None, cost: Cost) -> None:
    """Write the row of the entry ``key``, and include it in its subfolder's totals."""
    drop_row(connection, key, cost)
    connection.execute("INSERT INTO entries VALUES (?, ?, ?, ?, ?)", (row_id(key), key[NUMBER_BYTES:], size, used_ns, description_id))
    _add_to_totals(connection, key[0], 1, size, cost(size))


def find_description_id(connection: sqlite3.Connection, text: str) -> int:
    """Return the id of a description. Adds the description to the table if necessary."""
    connection.execute("INSERT OR IGNORE INTO abouts (text) VALUES (?)", (text,))
    return int(connection.execute("SELECT about FROM abouts WHERE text = ?", (text,)).fetchone()[0])


def drop_row(connection: sqlite3.Connection, key: bytes, cost: Cost) -> None:
    """Delete the row of the entry ``key``, if any, and subtract it from its subfolder's totals."""
    row = connection.execute("SELECT size FROM entries WHERE id = ?", (row_id(key),)).fetchone()
    if row is not None:
        connection.execute("DELETE FROM entries WHERE id = ?", (row_id(key),))
        _add_to_totals(connection, key[0], -1, -row[0], -cost(row[0]))


def _add_to_totals(connection: sqlite3.Connection, folder: int, *changes: int) -> None:
    statement = "UPDATE folders SET entries = entries + ?, bytes = bytes + ?, cost = cost + ? WHERE folder = ?"
    connection.execute(statement, (*changes, folder))


def read_number(connection: sqlite3.Connection, name: str) -> int:
    """Return the number stored under ``name``, or 0 if there is none."""
    row = connection.execute("SELECT value FROM notes WHERE name = ?", (name,)).fetchone()
    return 0 if row is None else int(row[0])


def set_number(connection: sqlite3.Connection, name: str, value: int) -> None:
    connection.execute("REPLACE INTO notes VALUES (?, ?)", (name, value))


def key_from_row(row_number: int, key_rest: bytes) -> bytes:
    """Return the key of a row. ``key_rest`` contains the key's bytes that are not in the row number."""
    return (row_number + 2**63).to_bytes(NUMBER_BYTES, "big") + key_rest


def row_id(key: bytes) -> int:
    """Return the row number of a key as a signed 64-bit integer, which SQLite requires."""
    return int.from_bytes(key[:NUMBER_BYTES], "big") - 2**63


def row_id_range(folder: int) -> tuple[int, int]:
    """Return the lowest and the highest possible row number in a subfolder."""
    first = (folder << 56) - 2**63
    return first, first + 2**56 - 1
