"""An SQLite index of a folder's entries: a hint that makes listing all entries cost only as much as has changed (spec/store.md, Folder).

Whoever puts or removes an entry changes its row in the same transaction, and notes the time of the entry's folder there. If a folder has
another time, someone without the index changed it, or was killed while changing it: its entries are listed again.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import stat
import time
from typing import TYPE_CHECKING, NamedTuple

from kvpack.file.atomic import is_on_one_host
from kvpack.runtime.locks import Lock

from .backend import StoredEntry
from .disk_usage import boot_id
from .folder import INDEX_FILES
from .trust import OTHERS_WRITE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from .folder import Folder

MIN_ENTRIES = 4096
"""A folder of fewer entries has no index: it is listed as fast."""
_VERSION = 1
WAIT_SECONDS = 0.05
"""Seconds that a writer waits for another; without the index, it continues, and notes what it has changed."""
_POLL_SECONDS = 0.001
"""SQLite's own waiting grows to many times what a transaction takes."""
_MAX_MISSED = 1024
"""The most changes that wait to be indexed; the folders of others are listed again."""
_MAX_LISTINGS = 2
"""How often a folder that others change is listed before they have to wait."""
_WAL_PAGES = 128
_WAL_BYTES = 2**20
_NUMBER_BYTES = 8
"""The bytes of a key that are its row's number, so that the rows of a folder, which its first byte names, are together."""
_SCHEMA = """
CREATE TABLE folders (folder INTEGER PRIMARY KEY, node INTEGER, changed INTEGER, entries INTEGER, bytes INTEGER, cost INTEGER);
CREATE TABLE entries (id INTEGER PRIMARY KEY, rest BLOB NOT NULL, size INTEGER NOT NULL, used INTEGER NOT NULL, about INTEGER);
CREATE INDEX by_use ON entries (used);
CREATE TABLE abouts (about INTEGER PRIMARY KEY, text TEXT NOT NULL UNIQUE);
CREATE TABLE notes (name TEXT PRIMARY KEY, value) WITHOUT ROWID;
"""

IndexRow = tuple[int, bytes, int, int]
"""Number, the rest of the key, bytes, last use: as old as it was when it was noted."""


class IndexTotals(NamedTuple):
    """Number of entries, their bytes, and their disk space."""

    entries: int
    size: int
    cost: int


class FolderListing(NamedTuple):
    """The contents of a folder: its inode and change time, and for each entry number the rest of the key, bytes and last use."""

    state: tuple[int, int]
    entries: dict[int, tuple[bytes, int, int]]


class MissedChange(NamedTuple):
    """A change of the entry ``key`` that the index has missed: its description, and the states of its folder before and after."""

    key: bytes
    about: str | None
    before: tuple[int, int]
    after: tuple[int, int]


class Index:
    """The index of ``folder``, if it exists or ``build`` creates it. It is safe to use from any thread, and after a fork."""

    def __init__(self, folder: Folder) -> None:
        self._folder, self._path = folder, os.path.join(folder.root, INDEX_FILES[0])
        self._lock = Lock()
        self._connection: sqlite3.Connection | None = None
        self._node = self._pid = 0
        self._inherited: list[sqlite3.Connection] = []
        # The numbers of texts, as far as they were committed.
        self._text_ids: dict[str, int] = {}
        self._missed_changes: list[MissedChange] = []

    def build(self) -> None:
        """Create the index unless there is one; folders of other users and network folders get none."""
        if not self._folder.trust.private:
            return
        with contextlib.suppress(OSError):
            if not is_on_one_host(self._folder.root):
                return
            with contextlib.suppress(FileExistsError):
                # As private as the entries, and so are the files that SQLite puts next to it.
                os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            with self._guard(), self._transaction(new=True) as connection:
                if connection is not None and not connection.execute("PRAGMA user_version").fetchone()[0]:
                    for statement in filter(str.strip, _SCHEMA.split(";")):
                        connection.execute(statement)
                    connection.executemany("INSERT INTO folders VALUES (?, 0, 0, 0, 0, 0)", ((folder,) for folder in range(256)))
                    self._set_note(connection, "run", _boot_number())
                    connection.execute(f"PRAGMA user_version = {_VERSION}")
        self.refresh()

    @property
    def exists(self) -> bool:
        """True if there is an index to query."""
        result = False
        with self._guard():
            result = self._open() is not None
        return result

    def close(self) -> None:
        """Release the connection; the next call opens another."""
        if self._missed_changes:
            with self._guard(), self._transaction():
                pass
        with self._lock:
            self._disconnect()

    def add(self, key: bytes, size: int, used_ns: int, about: str | None, rename: Callable[[], None]) -> None:
        """Call ``rename``, which gives an entry its name, and index the entry with its descriptive text, if known.

        Exceptions of ``rename`` propagate.
        """
        done, number = False, None

        def once() -> None:
            nonlocal done
            if not done:
                done = True
                rename()

        with self._guard(), self._transaction() as connection:
            if connection is not None:
                number = None if about is None else self._text_ids.get(about) or self._about(connection, about)
                with self._update_folder(connection, key[0]):
                    once()
                    self._replace(connection, key, size, used_ns, number)
        if done and about is not None and number is not None:
            self._text_ids[about] = number
        if not done:
            with self._record_missed(key, about):
                once()

    def remove(self, keys: Sequence[bytes], unlink: Callable[[bytes], int | None]) -> dict[bytes, int]:
        """Call ``unlink``, which returns the size of a removed entry, for each of ``keys``, and remove those entries from the index."""
        removed: dict[bytes, int] = {}
        done = 0
        with self._guard(), self._transaction() as connection:
            for key in keys if connection is not None else ():
                assert connection is not None
                with self._update_folder(connection, key[0]):
                    done += 1
                    size = unlink(key)
                    if size is not None:
                        removed[key] = size
                    self._drop(connection, key)
        for key in keys[done:]:
            with self._record_missed(key):
                size = unlink(key)
            if size is not None:
                removed[key] = size
        return removed

    def matches(self) -> bool:
        """Return True if there is an index, and no folder has changed since it was indexed."""
        result = False
        with self._guard():
            result = self._stale_folders() == []
        return result

    def refresh(self, seconds: float | None = None) -> bool:
        """List folders that other processes have changed, beginning none after ``seconds``; return True if the index then matches.

        Within ``seconds``, a folder that others change meanwhile is left for later; without a limit, they wait.
        """
        current = False
        with self._guard(), contextlib.suppress(OSError):
            if self._missed_changes:
                with self._transaction():
                    pass
            stale = self._stale_folders()
            # If the time is short, each has its turn.
            first = time.monotonic_ns() % (len(stale or ()) or 1)
            deadline = time.monotonic() + (seconds or 0)
            for folder in (*(stale or ())[first:], *(stale or ())[:first]):
                if (seconds is not None and time.monotonic() >= deadline) or not self._refresh_folder(folder, wait=seconds is None):
                    return False
            current = stale is not None
        return current

    def check_next(self) -> None:
        """Compare the names of one folder, a different one at each call, with its rows: two changes at one moment leave the same time."""
        with self._guard(), contextlib.suppress(OSError):
            with self._transaction() as connection:
                if connection is None:
                    return
                folder = self._note(connection, "next") % 256
                self._set_note(connection, "next", folder + 1)
            state, names = self._folder_state(folder), {_number(key) for key in self._folder.keys_in(folder)}
            rows = {number for (number,) in connection.execute("SELECT id FROM entries WHERE id BETWEEN ? AND ?", _numbers_of(folder))}
            # What changes meanwhile is in order, or is found when it is this folder's turn again.
            if rows != names and state == self._folder_state(folder):
                self._refresh_folder(folder, wait=False)

    def totals(self) -> IndexTotals | None:
        """Return the totals of the folder according to the index."""
        with self._guard():
            connection = self._open()
            if connection is not None:
                return IndexTotals(*connection.execute("SELECT SUM(entries), SUM(bytes), SUM(cost) FROM folders").fetchone())
        return None

    def oldest(self, count: int, after: tuple[int, int], before: int) -> list[IndexRow]:
        """Return ``count`` rows whose last use and number follow ``after``, least recently used first, up to the time ``before``."""
        query = "SELECT id, rest, size, used FROM entries WHERE (used, id) > (?, ?) AND used <= ? ORDER BY used, id LIMIT ?"
        with self._guard():
            connection = self._open()
            if connection is not None:
                return connection.execute(query, (*after, before, count)).fetchall()
        return []

    def note_uses(self, uses: Sequence[tuple[int, int]]) -> None:
        """Record when rows, by number, were last used: (time, number)."""
        with self._guard(), self._transaction() as connection:
            if connection is not None:
                connection.executemany("UPDATE entries SET used = ? WHERE id = ?", uses)

    def exchange_note(self, name: str, value: int) -> int | None:
        """Store a number and return the previous one."""
        with self._guard(), self._transaction() as connection:
            if connection is not None:
                old = self._note(connection, name)
                self._set_note(connection, name, value)
                return old
        return None

    def abouts(self) -> list[tuple[str | None, int, int]] | None:
        """Return (text, entries, bytes) for every text passed to ``describe``; the text is None for entries without one."""
        query = "SELECT text, COUNT(*), SUM(size) FROM entries LEFT JOIN abouts USING (about) GROUP BY entries.about"
        with self._guard():
            connection = self._open()
            if connection is not None:
                return connection.execute(query).fetchall()
        return None

    def undescribed(self, also_like: str = "") -> list[StoredEntry]:
        """Return the entries without a description, and those whose text is like ``also_like``."""
        query = (
            "SELECT id, rest, size, used FROM entries "
            "WHERE about IS NULL OR about IN (SELECT about FROM abouts WHERE text LIKE ?)"
        )  # fmt: skip
        with self._guard():
            connection = self._open()
            if connection is not None:
                return [
                    StoredEntry(key_of(number, key_rest), size, used)
                    for number, key_rest, size, used in connection.execute(query, (also_like,))
                ]
        return []

    def describe(self, texts: Sequence[tuple[bytes, str]]) -> None:
        """Store descriptions of entries, by key; an entry never changes."""
        with self._guard(), self._transaction() as connection:
            if connection is None:
                return
            current = {text: self._about(connection, text) for text in {text for _, text in texts}}
            connection.executemany("UPDATE entries SET about = ? WHERE id = ?", [(current[text], _number(key)) for key, text in texts])

    @contextlib.contextmanager
    def _guard(self) -> Iterator[None]:
        """Enter one thread at a time; a fault of SQLite ends the block, and a corrupt index is removed."""
        with self._lock:
            try:
                yield
            except sqlite3.OperationalError:
                # It is busy, or the disk is full.
                return
            except sqlite3.Error:
                self._discard()

    def _discard(self) -> None:
        self._disconnect()
        # The log first: with another index it would be taken for that one's.
        for name in reversed(INDEX_FILES):
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(self._folder.root, name))

    def _open(self, *, new: bool = False) -> sqlite3.Connection | None:
        """Return the connection to the file that currently has the index's name. Raises sqlite3.Error."""
        try:
            status = os.stat(self._path, follow_symlinks=False)
            if self._connection is not None and (self._node, self._pid) == (status.st_ino, os.getpid()):
                return self._connection
            self._disconnect()
            is_own = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & OTHERS_WRITE
            # The folder is asked, not the file: closing any descriptor of the file would end SQLite's locks on it.
            if not self._folder.trust.private or not is_own or not is_on_one_host(self._folder.root):
                return None
        except OSError:
            self._disconnect()
            return None
        connection = sqlite3.connect(self._path, timeout=_POLL_SECONDS, isolation_level=None, check_same_thread=False)
        self._connection, self._node, self._pid = connection, status.st_ino, os.getpid()
        connection.execute("PRAGMA journal_mode = WAL")
        # What a loss of power leaves of it is not used: see the note of the machine's run.
        connection.execute("PRAGMA synchronous = OFF")
        connection.execute(f"PRAGMA wal_autocheckpoint = {_WAL_PAGES}")
        connection.execute(f"PRAGMA journal_size_limit = {_WAL_BYTES}")
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if version == _VERSION and self._note(connection, "run") != _boot_number():
            self._discard()
            return None
        if version not in (_VERSION, 0 if new else _VERSION):
            self._disconnect()
            return None
        return connection

    def _disconnect(self) -> None:
        if self._connection is None:
            return
        if self._pid == os.getpid():
            self._connection.close()
        else:
            # The parent's: closing it here would end the parent's locks.
            self._inherited.append(self._connection)
        self._connection = None
        self._text_ids, self._missed_changes = {}, []

    @contextlib.contextmanager
    def _transaction(self, *, new: bool = False) -> Iterator[sqlite3.Connection | None]:
        """Enter a write transaction; yields None if the lock could not be acquired in time. Raises sqlite3.Error.

        Changes that were missed before are indexed first.
        """
        connection = self._open(new=new)
        if connection is None or not self._try_begin(connection):
            yield None
            return
        try:
            missed = len(self._missed_changes)
            self._index_missed(connection)
            yield connection
            connection.execute("COMMIT")
            del self._missed_changes[:missed]
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                connection.execute("ROLLBACK")
            raise

    def _try_begin(self, connection: sqlite3.Connection) -> bool:
        """Begin a transaction; return False if others did not let it begin in time."""
        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            try:
                connection.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() >= deadline:
                    return False
            else:
                return True

    @contextlib.contextmanager
    def _record_missed(self, key: bytes, about: str | None = None) -> Iterator[None]:
        """Enter a change of the entry ``key``, described by ``about``, while others keep the index busy; its row follows."""
        if self._connection is None:
            yield
            return
        before = self._folder_state(key[0])
        yield
        with self._lock:
            self._missed_changes.append(MissedChange(key, about, before, self._folder_state(key[0])))
            del self._missed_changes[:-_MAX_MISSED]

    def _index_missed(self, connection: sqlite3.Connection) -> None:
        """Index the changes that were missed. Their folders match the index again, unless others have changed them since."""
        for key, about, before, after in self._missed_changes:
            try:
                status = os.stat(self._folder.path(key), follow_symlinks=False)
            except FileNotFoundError:
                self._drop(connection, key)
            except OSError:
                continue
            else:
                number = None if about is None else self._about(connection, about)
                self._replace(connection, key, status.st_size, status.st_mtime_ns, number)
            statement = "UPDATE folders SET node = ?, changed = ? WHERE (folder, node, changed) = (?, ?, ?)"
            connection.execute(statement, (*after, key[0], *before))

    @contextlib.contextmanager
    def _update_folder(self, connection: sqlite3.Connection, folder: int) -> Iterator[None]:
        """Enter a change of a folder and its rows; the folder stays indexed if it matched the index before."""
        current = connection.execute("SELECT node, changed FROM folders WHERE folder = ?", (folder,)).fetchone()
        same = current == self._folder_state(folder)
        yield
        state = self._folder_state(folder) if same else (0, 0)
        connection.execute("UPDATE folders SET node = ?, changed = ? WHERE folder = ?", (*state, folder))

    def _folder_state(self, folder: int) -> tuple[int, int]:
        """Return the inode of an entries' folder, and when it was last changed."""
        try:
            status = os.stat(self._folder.entry_folders[folder])
        except OSError:
            return 0, 0
        return status.st_ino, status.st_mtime_ns

    def _stale_folders(self) -> list[int] | None:
        """Return the folders that have changed since they were indexed."""
        connection = self._open()
        if connection is None:
            return None
        return [
            folder
            for folder, *current in connection.execute("SELECT folder, node, changed FROM folders ORDER BY folder").fetchall()
            if tuple(current) != self._folder_state(folder)
        ]

    def _list_folder(self, folder: int) -> FolderListing:
        """Read a folder. Raises OSError."""
        state = self._folder_state(folder)
        entries = self._folder.entries_of(folder)
        return FolderListing(state, {_number(key): (key[_NUMBER_BYTES:], status.st_size, status.st_mtime_ns) for key, status in entries})

    def _refresh_folder(self, folder: int, *, wait: bool) -> bool:
        """Make a folder's rows match its entries, and return True if they then do; correct rows are not written.

        Others change the index while the folder is read, and are waited for only if this must be ``wait``. Raises OSError and
        sqlite3.Error.
        """
        for attempts_left in reversed(range(_MAX_LISTINGS if wait else 1)):
            listing = self._list_folder(folder)
            rows = None if (connection := self._open()) is None else self._rows(connection, folder)
            with self._transaction() as connection:
                if connection is None or rows is None:
                    return False
                if wait and not attempts_left and listing.state != self._folder_state(folder):
                    listing, rows = self._list_folder(folder), self._rows(connection, folder)
                if listing.state == self._folder_state(folder):
                    return self._write(connection, folder, listing, rows)
        return False

    def _rows(self, connection: sqlite3.Connection, folder: int) -> dict[int, tuple[bytes, int, int]]:
        query = "SELECT id, rest, size, used FROM entries WHERE id BETWEEN ? AND ?"
        return {number: (key_rest, size, used) for number, key_rest, size, used in connection.execute(query, _numbers_of(folder))}

    def _write(self, connection: sqlite3.Connection, folder: int, listing: FolderListing, rows: dict[int, tuple[bytes, int, int]]) -> bool:
        """Write what differs between a listing and the rows of its folder; return False if the rows have changed meanwhile."""
        entries = listing.entries
        connection.executemany("DELETE FROM entries WHERE id = ?", [(number,) for number in rows.keys() - entries.keys()])
        connection.executemany(
            "INSERT INTO entries (id, rest, size, used) VALUES (?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET "
            "about = CASE WHEN (rest, size) = (excluded.rest, excluded.size) THEN about END, "
            "rest = excluded.rest, size = excluded.size, used = excluded.used",
            [(number, *row) for number, row in entries.items() if rows.get(number) != row],
        )
        block = self._folder.block
        query = "SELECT COUNT(*), TOTAL(size), TOTAL((size + ? - 1) / ? * ?) FROM entries WHERE id BETWEEN ? AND ?"
        totals = tuple(map(int, connection.execute(query, (block, block, block, *_numbers_of(folder))).fetchone()))
        same = totals[:2] == (len(entries), sum(size for _, size, _ in entries.values()))
        connection.execute("REPLACE INTO folders VALUES (?, ?, ?, ?, ?, ?)", (folder, *(listing.state if same else (0, 0)), *totals))
        return same

    def _replace(self, connection: sqlite3.Connection, key: bytes, size: int, used_ns: int, about: int | None) -> None:
        self._drop(connection, key)
        connection.execute("INSERT INTO entries VALUES (?, ?, ?, ?, ?)", (_number(key), key[_NUMBER_BYTES:], size, used_ns, about))
        self._count(connection, key[0], 1, size, self._folder.cost(size))

    def _about(self, connection: sqlite3.Connection, text: str) -> int:
        connection.execute("INSERT OR IGNORE INTO abouts (text) VALUES (?)", (text,))
        return int(connection.execute("SELECT about FROM abouts WHERE text = ?", (text,)).fetchone()[0])

    def _drop(self, connection: sqlite3.Connection, key: bytes) -> None:
        row = connection.execute("SELECT size FROM entries WHERE id = ?", (_number(key),)).fetchone()
        if row is not None:
            connection.execute("DELETE FROM entries WHERE id = ?", (_number(key),))
            self._count(connection, key[0], -1, -row[0], -self._folder.cost(row[0]))

    def _count(self, connection: sqlite3.Connection, folder: int, *changes: int) -> None:
        statement = "UPDATE folders SET entries = entries + ?, bytes = bytes + ?, cost = cost + ? WHERE folder = ?"
        connection.execute(statement, (*changes, folder))

    def _note(self, connection: sqlite3.Connection, name: str) -> int:
        row = connection.execute("SELECT value FROM notes WHERE name = ?", (name,)).fetchone()
        return 0 if row is None else int(row[0])

    def _set_note(self, connection: sqlite3.Connection, name: str, value: int) -> None:
        connection.execute("REPLACE INTO notes VALUES (?, ?)", (name, value))


def key_of(number: int, key_rest: bytes) -> bytes:
    """Return the key of a row."""
    return (number + 2**63).to_bytes(_NUMBER_BYTES, "big") + key_rest


def _boot_number() -> int:
    """Return this boot as an SQLite integer."""
    return int.from_bytes(boot_id(), "big", signed=True)


def _number(key: bytes) -> int:
    """Return the number of a key's row, which fits SQLite's signed integers."""
    return int.from_bytes(key[:_NUMBER_BYTES], "big") - 2**63


def _numbers_of(folder: int) -> tuple[int, int]:
    """Return the first and the last number of a folder's rows."""
    first = (folder << 56) - 2**63
    return first, first + 2**56 - 1
