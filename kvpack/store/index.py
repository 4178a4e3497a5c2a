"""An SQLite index of a folder's entries, with which listing all entries only costs as much as has changed (spec/store.md, Folder).

A writer that puts or removes an entry updates its row, and the modification time of its subfolder, in one transaction. If a subfolder has
another time than in the index, a process changed it without the index or was killed while changing it, and the subfolder is listed again.
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
"""Minimum number of entries in a folder with an index. Smaller folders are listed as fast without one."""
_VERSION = 1
WAIT_SECONDS = 0.05
"""Seconds that a writer waits for the index while others use it. It then continues, and updates the index later."""
_POLL_SECONDS = 0.001
"""The interval in seconds at which a busy index is tried again. SQLite's own intervals grow to many times a transaction's duration."""
_MAX_MISSED = 1024
"""Maximum number of changes that wait to be indexed. The subfolders of dropped changes are listed again."""
_MAX_LISTINGS = 2
"""Number of times that a changing subfolder is listed before its writers have to wait."""
_WAL_PAGES = 128
_WAL_BYTES = 2**20
_NUMBER_BYTES = 8
"""The first bytes of a key, which are its row's number. The first byte names the subfolder, so a subfolder's rows are contiguous."""
_SCHEMA = """
CREATE TABLE folders (folder INTEGER PRIMARY KEY, node INTEGER, changed INTEGER, entries INTEGER, bytes INTEGER, cost INTEGER);
CREATE TABLE entries (id INTEGER PRIMARY KEY, rest BLOB NOT NULL, size INTEGER NOT NULL, used INTEGER NOT NULL, about INTEGER);
CREATE INDEX by_use ON entries (used);
CREATE TABLE abouts (about INTEGER PRIMARY KEY, text TEXT NOT NULL UNIQUE);
CREATE TABLE notes (name TEXT PRIMARY KEY, value) WITHOUT ROWID;
"""

IndexRow = tuple[int, bytes, int, int]
"""A row: its number, the other bytes of the key, the entry's size in bytes, and its last use when the row was written, in nanoseconds."""


class IndexTotals(NamedTuple):
    """The number of indexed entries, their bytes, and their disk space."""

    entries: int
    size: int
    cost: int


class FolderListing(NamedTuple):
    """The contents of a subfolder: its inode and modification time, and the fields of its entries' rows by row number."""

    state: tuple[int, int]
    entries: dict[int, tuple[bytes, int, int]]


class MissedChange(NamedTuple):
    """A change of the entry ``key`` that is not indexed yet.

    ``about`` is the entry's descriptive text; ``before`` and ``after`` are the inode and modification time of its subfolder.
    """

    key: bytes
    about: str | None
    before: tuple[int, int]
    after: tuple[int, int]


class Index:
    """The index of ``folder``, if it exists or ``build`` creates it. Safe to use from any thread, and after a fork."""

    def __init__(self, folder: Folder) -> None:
        self._folder, self._path = folder, os.path.join(folder.root, INDEX_FILES[0])
        self._lock = Lock()
        self._connection: sqlite3.Connection | None = None
        self._node = self._pid = 0
        self._inherited: list[sqlite3.Connection] = []
        # Committed ids of descriptive texts.
        self._text_ids: dict[str, int] = {}
        self._missed_changes: list[MissedChange] = []

    def build(self) -> None:
        """Create the index unless there is one, or the folder belongs to another user or is on a network file system."""
        if not self._folder.trust.is_private:
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
        """True if there is an index that can be queried."""
        result = False
        with self._guard():
            result = self._open() is not None
        return result

    def close(self) -> None:
        """Close the connection. The next call opens another."""
        if self._missed_changes:
            with self._guard(), self._transaction():
                pass
        with self._lock:
            self._disconnect()

    def add(self, key: bytes, size: int, used_ns: int, about: str | None, rename: Callable[[], None]) -> None:
        """Call ``rename``, which moves an entry's file to its final name, and index the entry with its descriptive text ``about``.

        Exceptions raised by ``rename`` propagate.
        """
        done, number = False, None

        def once() -> None:
            nonlocal done
            if not done:
                done = True
                rename()

        with self._guard(), self._transaction() as connection:
            if connection is not None:
                number = None if about is None else self._text_ids.get(about) or self._text_id(connection, about)
                with self._update_folder(connection, key[0]):
                    once()
                    self._replace(connection, key, size, used_ns, number)
        if done and about is not None and number is not None:
            self._text_ids[about] = number
        if not done:
            with self._record_missed(key, about):
                once()

    def remove(self, keys: Sequence[bytes], unlink: Callable[[bytes], int | None]) -> dict[bytes, int]:
        """Call ``unlink`` for each of ``keys``, remove the entries from the index, and return the sizes of the removed entries by key.

        ``unlink`` returns the size of the entry that it removed, or None.
        """
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
        """Return True if there is an index, and no subfolder has changed since it was indexed."""
        result = False
        with self._guard():
            result = self._stale_folders() == []
        return result

    def refresh(self, seconds: float | None = None) -> bool:
        """List the subfolders that have changed since they were indexed; return True if the index now matches the folder.

        With a time limit of ``seconds``, subfolders that keep changing are skipped. Without one, their writers are made to wait.
        """
        current = False
        with self._guard(), contextlib.suppress(OSError):
            if self._missed_changes:
                with self._transaction():
                    pass
            stale = self._stale_folders()
            # Start at a different subfolder each time, so that with little time each is listed eventually.
            first = time.monotonic_ns() % (len(stale or ()) or 1)
            deadline = time.monotonic() + (seconds or 0)
            for folder in (*(stale or ())[first:], *(stale or ())[:first]):
                if (seconds is not None and time.monotonic() >= deadline) or not self._refresh_folder(folder, wait=seconds is None):
                    return False
            current = stale is not None
        return current

    def check_next(self) -> None:
        """Compare the names in one subfolder, the next one at each call, with its rows.

        This finds changes that the modification time does not show, because two happened within one tick of the clock.
        """
        with self._guard(), contextlib.suppress(OSError):
            with self._transaction() as connection:
                if connection is None:
                    return
                folder = self._note(connection, "next") % 256
                self._set_note(connection, "next", folder + 1)
            state, names = self._folder_state(folder), {_row_id(key) for key in self._folder.keys_in(folder)}
            rows = {number for (number,) in connection.execute("SELECT id FROM entries WHERE id BETWEEN ? AND ?", _numbers_of(folder))}
            # A subfolder that changed meanwhile is checked again when its turn comes.
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
        """Return up to ``count`` rows, least recently used first: those after the pair ``after`` (last use, number), up to ``before``."""
        query = "SELECT id, rest, size, used FROM entries WHERE (used, id) > (?, ?) AND used <= ? ORDER BY used, id LIMIT ?"
        with self._guard():
            connection = self._open()
            if connection is not None:
                return connection.execute(query, (*after, before, count)).fetchall()
        return []

    def note_uses(self, uses: Sequence[tuple[int, int]]) -> None:
        """Update the last uses of rows, given as pairs (time in nanoseconds, row number)."""
        with self._guard(), self._transaction() as connection:
            if connection is not None:
                connection.executemany("UPDATE entries SET used = ? WHERE id = ?", uses)

    def exchange_note(self, name: str, value: int) -> int | None:
        """Store the number ``value`` under ``name``, and return the previous one (0 if there was none); None without an index."""
        with self._guard(), self._transaction() as connection:
            if connection is not None:
                old = self._note(connection, name)
                self._set_note(connection, name, value)
                return old
        return None

    def abouts(self) -> list[tuple[str | None, int, int]] | None:
        """Return (text, entries, bytes) for each descriptive text in the index. The text is None for entries without one."""
        query = "SELECT text, COUNT(*), SUM(size) FROM entries LEFT JOIN abouts USING (about) GROUP BY entries.about"
        with self._guard():
            connection = self._open()
            if connection is not None:
                return connection.execute(query).fetchall()
        return None

    def entries_without_about(self, also_like: str = "") -> list[StoredEntry]:
        """Return the entries without a descriptive text, and those whose text matches the SQL pattern ``also_like``."""
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

    def set_abouts(self, texts: Sequence[tuple[bytes, str]]) -> None:
        """Store the descriptive texts of entries, given as pairs (key, text). Entries never change, so the texts stay valid."""
        with self._guard(), self._transaction() as connection:
            if connection is None:
                return
            current = {text: self._text_id(connection, text) for text in {text for _, text in texts}}
            connection.executemany("UPDATE entries SET about = ? WHERE id = ?", [(current[text], _row_id(key)) for key, text in texts])

    @contextlib.contextmanager
    def _guard(self) -> Iterator[None]:
        """Let one thread at a time run the block. An error of SQLite ends the block, and a corrupt index is removed."""
        with self._lock:
            try:
                yield
            except sqlite3.OperationalError:
                # The index is busy, or the disk is full.
                return
            except sqlite3.Error:
                self._discard()

    def _discard(self) -> None:
        self._disconnect()
        # The log must go first: left behind, it would be applied to the next index.
        for name in reversed(INDEX_FILES):
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(self._folder.root, name))

    def _open(self, *, new: bool = False) -> sqlite3.Connection | None:
        """Return a connection to the current index file; None if it does not exist or cannot be trusted. Raises sqlite3.Error."""
        try:
            status = os.stat(self._path, follow_symlinks=False)
            if self._connection is not None and (self._node, self._pid) == (status.st_ino, os.getpid()):
                return self._connection
            self._disconnect()
            is_own = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & OTHERS_WRITE
            # Checks use paths, not a descriptor: closing any descriptor of the file would release SQLite's locks on it.
            if not self._folder.trust.is_private or not is_own or not is_on_one_host(self._folder.root):
                return None
        except OSError:
            self._disconnect()
            return None
        connection = sqlite3.connect(self._path, timeout=_POLL_SECONDS, isolation_level=None, check_same_thread=False)
        self._connection, self._node, self._pid = connection, status.st_ino, os.getpid()
        connection.execute("PRAGMA journal_mode = WAL")
        # An index from before a power loss is not used: see the note "run", which is checked below.
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
            # The connection belongs to the parent process. Closing it here would release the parent's locks.
            self._inherited.append(self._connection)
        self._connection = None
        self._text_ids, self._missed_changes = {}, []

    @contextlib.contextmanager
    def _transaction(self, *, new: bool = False) -> Iterator[sqlite3.Connection | None]:
        """Enter a write transaction; yield None if the lock could not be acquired in time. Raises sqlite3.Error.

        Changes that were missed earlier are indexed first.
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
        """Begin a write transaction; return False if other processes kept the index locked for too long."""
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
        """Enter a change of the entry ``key``, described by ``about``, that is indexed later because the index is busy now."""
        if self._connection is None:
            yield
            return
        before = self._folder_state(key[0])
        yield
        with self._lock:
            self._missed_changes.append(MissedChange(key, about, before, self._folder_state(key[0])))
            del self._missed_changes[:-_MAX_MISSED]

    def _index_missed(self, connection: sqlite3.Connection) -> None:
        """Index the missed changes. Their subfolders then match the index again, unless other processes have changed them since."""
        for key, about, before, after in self._missed_changes:
            try:
                status = os.stat(self._folder.path(key), follow_symlinks=False)
            except FileNotFoundError:
                self._drop(connection, key)
            except OSError:
                continue
            else:
                number = None if about is None else self._text_id(connection, about)
                self._replace(connection, key, status.st_size, status.st_mtime_ns, number)
            statement = "UPDATE folders SET node = ?, changed = ? WHERE (folder, node, changed) = (?, ?, ?)"
            connection.execute(statement, (*after, key[0], *before))

    @contextlib.contextmanager
    def _update_folder(self, connection: sqlite3.Connection, folder: int) -> Iterator[None]:
        """Enter a change of a subfolder and its rows. The subfolder matches the index afterward if it did before."""
        current = connection.execute("SELECT node, changed FROM folders WHERE folder = ?", (folder,)).fetchone()
        same = current == self._folder_state(folder)
        yield
        state = self._folder_state(folder) if same else (0, 0)
        connection.execute("UPDATE folders SET node = ?, changed = ? WHERE folder = ?", (*state, folder))

    def _folder_state(self, folder: int) -> tuple[int, int]:
        """Return the inode and the modification time of a subfolder; (0, 0) if it is missing."""
        try:
            status = os.stat(self._folder.entry_folders[folder])
        except OSError:
            return 0, 0
        return status.st_ino, status.st_mtime_ns

    def _stale_folders(self) -> list[int] | None:
        """Return the subfolders that have changed since they were indexed; None without an index."""
        connection = self._open()
        if connection is None:
            return None
        return [
            folder
            for folder, *current in connection.execute("SELECT folder, node, changed FROM folders ORDER BY folder").fetchall()
            if tuple(current) != self._folder_state(folder)
        ]

    def _list_folder(self, folder: int) -> FolderListing:
        """List a subfolder. Raises OSError."""
        state = self._folder_state(folder)
        entries = self._folder.entries_of(folder)
        return FolderListing(state, {_row_id(key): (key[_NUMBER_BYTES:], status.st_size, status.st_mtime_ns) for key, status in entries})

    def _refresh_folder(self, folder: int, *, wait: bool) -> bool:
        """Make a subfolder's rows match its entries, and return True if they do afterward. Rows that are correct are not written.

        Other processes may change the subfolder while it is listed. With ``wait``, it is listed again, finally while they are locked out.
        Raises OSError and sqlite3.Error.
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
        """Write the differences between a listing and the rows of its subfolder; return False if the rows have changed meanwhile."""
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
        connection.execute("INSERT INTO entries VALUES (?, ?, ?, ?, ?)", (_row_id(key), key[_NUMBER_BYTES:], size, used_ns, about))
        self._count(connection, key[0], 1, size, self._folder.cost(size))

    def _text_id(self, connection: sqlite3.Connection, text: str) -> int:
        connection.execute("INSERT OR IGNORE INTO abouts (text) VALUES (?)", (text,))
        return int(connection.execute("SELECT about FROM abouts WHERE text = ?", (text,)).fetchone()[0])

    def _drop(self, connection: sqlite3.Connection, key: bytes) -> None:
        row = connection.execute("SELECT size FROM entries WHERE id = ?", (_row_id(key),)).fetchone()
        if row is not None:
            connection.execute("DELETE FROM entries WHERE id = ?", (_row_id(key),))
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
    """Return the key of the row ``number`` with the remaining bytes ``key_rest``."""
    return (number + 2**63).to_bytes(_NUMBER_BYTES, "big") + key_rest


def _boot_number() -> int:
    """Return the id of the machine's current boot as an SQLite integer."""
    return int.from_bytes(boot_id(), "big", signed=True)


def _row_id(key: bytes) -> int:
    """Return the id of a key's row, which fits in a signed 64-bit SQLite integer."""
    return int.from_bytes(key[:_NUMBER_BYTES], "big") - 2**63


def _numbers_of(folder: int) -> tuple[int, int]:
    """Return the first and the last possible number of a subfolder's rows."""
    first = (folder << 56) - 2**63
    return first, first + 2**56 - 1
