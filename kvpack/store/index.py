"""An SQLite index of a folder's entries. With it, the cost of listing depends only on what has changed (spec/store.md, Folder).

In one transaction, a writer that puts or removes an entry updates its row and the modification time of its subfolder. If a subfolder's time
differs from the index, some process changed the subfolder without the index, or was killed in between. The subfolder is then listed again.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from kvpack.file.atomic import is_local_path
from kvpack.runtime.threads import Lock

from . import index_tables as tables
from .backend import StoredEntry
from .disk_usage import boot_id
from .folder import INDEX_FILES, Folder
from .trust import OTHERS_WRITE

MIN_ENTRIES = 4096
"""Minimum number of entries in a folder with an index. Listing a smaller folder is just as fast without one."""
WAIT_SECONDS = 0.05
"""Time in seconds that a writer waits while other processes use the index. It then continues, and updates the index later."""
_POLL_SECONDS = 0.001
"""Interval in seconds between attempts to use a busy index. SQLite's own intervals become far longer than a transaction."""
_MAX_MISSED = 1024
"""Maximum number of changes waiting to be indexed. If a change is dropped, its subfolder is listed again."""
_MAX_LISTINGS = 2
"""Maximum number of times to list a changing subfolder before its writers have to wait."""
_WAL_PAGES = 128
_WAL_BYTES = 2**20
class IndexTotals(NamedTuple):
    """The number of indexed entries, their total size in bytes, and their disk space in bytes."""

    entries: int
    size: int
    cost: int


class MissedChange(NamedTuple):
    """A change to the entry ``key`` that is not indexed yet.

    ``description`` describes the entry. ``state_before`` and ``state_after`` are the inode and modification time of the entry's subfolder
    before and after the change.
    """

    key: bytes
    description: str | None
    state_before: tuple[int, int]
    state_after: tuple[int, int]


class Index:
    """The index of ``folder``, which ``build`` creates. Safe to use from any thread, and after a fork."""

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
        """Create the index unless it exists. Does nothing if the folder belongs to another user or is on a network file system."""
        if not self._folder.trust.is_private:
            return
        with contextlib.suppress(OSError):
            if not is_local_path(self._folder.root):
                return
            with contextlib.suppress(FileExistsError):
                # The index is as private as the entries, and so are the files that SQLite creates next to it.
                os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            with self._guard(), self._transaction(new=True) as connection:
                if connection is not None and not connection.execute("PRAGMA user_version").fetchone()[0]:
                    tables.create_tables(connection, _boot_id_number())
        self.refresh()

    @property
    def exists(self) -> bool:
        """True if there is a usable index."""
        result = False
        with self._guard():
            result = self._open() is not None
        return result

    def close(self) -> None:
        """Close the connection. The next call opens a new one."""
        if self._missed_changes:
            with self._guard(), self._transaction():
                pass
        with self._lock:
            self._disconnect()

    def add(self, key: bytes, size: int, used_ns: int, description: str | None, rename: Callable[[], None]) -> None:
        """Add an entry with its description to the index, and call ``rename``, which moves the entry's file to its final name.

        Errors from ``rename`` propagate.
        """
        done, number = False, None

        def rename_once() -> None:
            nonlocal done
            if not done:
                done = True
                rename()

        with self._guard(), self._transaction() as connection:
            if connection is not None:
                number = None
                if description is not None:
                    number = self._text_ids.get(description) or tables.find_description_id(connection, description)
                with self._update_folder(connection, key[0]):
                    rename_once()
                    tables.replace_row(connection, key, size, used_ns, number, self._folder.cost)
        if done and description is not None and number is not None:
            self._text_ids[description] = number
        if not done:
            with self._record_missed(key, description):
                rename_once()

    def remove(self, keys: Sequence[bytes], unlink: Callable[[bytes], int | None]) -> dict[bytes, int]:
        """Remove the entries of ``keys`` and their rows in the index. Returns the sizes of the removed entries by key.

        ``unlink(key)`` removes an entry and returns its size, or None if there is no such entry.
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
                    tables.drop_row(connection, key, self._folder.cost)
        for key in keys[done:]:
            with self._record_missed(key):
                size = unlink(key)
            if size is not None:
                removed[key] = size
        return removed

    def matches(self) -> bool:
        """Return True if there is an index, and no subfolder has changed since it was listed."""
        result = False
        with self._guard():
            result = self._stale_folders() == []
        return result

    def refresh(self, seconds: float | None = None) -> bool:
        """List the subfolders that have changed since they were indexed. Returns True if the index now matches the folder.

        Subfolders that keep changing are listed for at most ``seconds`` seconds. If ``seconds`` is None, their writers have to wait
        instead.
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

    def check_next_folder(self) -> None:
        """Compare the file names in one subfolder with its rows. Each call checks the next subfolder.

        This finds changes that the modification time does not show, because two changes in one tick of the clock have the same time.
        """
        with self._guard(), contextlib.suppress(OSError):
            with self._transaction() as connection:
                if connection is None:
                    return
                folder = tables.read_number(connection, "next") % 256
                tables.set_number(connection, "next", folder + 1)
            state, names = self._folder_state(folder), {tables.row_id(key) for key in self._folder.keys_starting_with(folder)}
            query = "SELECT id FROM entries WHERE id BETWEEN ? AND ?"
            rows = {number for (number,) in connection.execute(query, tables.row_id_range(folder))}
            # A subfolder that has changed since then is checked again when its turn comes.
            if rows != names and state == self._folder_state(folder):
                self._refresh_folder(folder, wait=False)

    def totals(self) -> IndexTotals | None:
        """Return the folder's totals according to the index, or None without an index."""
        with self._guard():
            connection = self._open()
            if connection is not None:
                return IndexTotals(*connection.execute("SELECT SUM(entries), SUM(bytes), SUM(cost) FROM folders").fetchone())
        return None

    def least_recently_used(self, count: int, previous: tuple[int, int], until: int) -> list[tables.IndexRow]:
        """Return up to ``count`` rows last used no later than ``until``, least recently used first.

        ``previous`` is the (last use, row number) pair of the row before the first one to return.
        """
        query = "SELECT id, rest, size, used FROM entries WHERE (used, id) > (?, ?) AND used <= ? ORDER BY used, id LIMIT ?"
        with self._guard():
            connection = self._open()
            if connection is not None:
                return connection.execute(query, (*previous, until, count)).fetchall()
        return []

    def update_last_uses(self, uses: Sequence[tuple[int, int]]) -> None:
        """Update the last uses of rows, passed as (time in nanoseconds, row number) pairs."""
        with self._guard(), self._transaction() as connection:
            if connection is not None:
                connection.executemany("UPDATE entries SET used = ? WHERE id = ?", uses)

    def exchange_number(self, name: str, value: int) -> int | None:
        """Store the number ``value`` under ``name``, and return the previous number (0 if there was none).

        Returns None if there is no index.
        """
        with self._guard(), self._transaction() as connection:
            if connection is not None:
                old = tables.read_number(connection, name)
                tables.set_number(connection, name, value)
                return old
        return None

    def descriptions(self) -> list[tuple[str | None, int, int]] | None:
        """Return (text, number of entries, bytes) for each description in the index, or None if there is no index.

        The text is None for entries without a description.
        """
        query = "SELECT text, COUNT(*), SUM(size) FROM entries LEFT JOIN abouts USING (about) GROUP BY entries.about"
        with self._guard():
            connection = self._open()
            if connection is not None:
                return connection.execute(query).fetchall()
        return None

    def entries_without_description(self, pattern: str = "") -> list[StoredEntry]:
        """Return the entries without a description, or with a description that matches the SQL pattern ``pattern``."""
        query = (
            "SELECT id, rest, size, used FROM entries "
            "WHERE about IS NULL OR about IN (SELECT about FROM abouts WHERE text LIKE ?)"
        )  # fmt: skip
        with self._guard():
            connection = self._open()
            if connection is not None:
                return [
                    StoredEntry(tables.key_from_row(number, key_rest), size, used)
                    for number, key_rest, size, used in connection.execute(query, (pattern,))
                ]
        return []

    def set_descriptions(self, descriptions: Sequence[tuple[bytes, str]]) -> None:
        """Store descriptions of entries, passed as (key, text) pairs. Entries never change, so a description remains valid."""
        with self._guard(), self._transaction() as connection:
            if connection is None:
                return
            current = {text: tables.find_description_id(connection, text) for text in {text for _, text in descriptions}}
            rows = [(current[text], tables.row_id(key)) for key, text in descriptions]
            connection.executemany("UPDATE entries SET about = ? WHERE id = ?", rows)

    @contextlib.contextmanager
    def _guard(self) -> Iterator[None]:
        """Return a context manager that admits one thread at a time and suppresses SQLite errors.

        A corrupt index is removed.
        """
        with self._lock:
            try:
                yield
            except sqlite3.OperationalError:
                # The index is busy, or the disk is full.
                return
            except sqlite3.Error:
                self._delete_files()

    def _delete_files(self) -> None:
        self._disconnect()
        # Remove the log first, because otherwise it would be applied to the next index.
        for name in reversed(INDEX_FILES):
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(self._folder.root, name))

    def _open(self, *, new: bool = False) -> sqlite3.Connection | None:
        """Return a connection to the current index file, or None if the file is missing or untrusted. Raises sqlite3.Error."""
        try:
            status = os.stat(self._path, follow_symlinks=False)
            if self._connection is not None and (self._node, self._pid) == (status.st_ino, os.getpid()):
                return self._connection
            self._disconnect()
            is_own = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & OTHERS_WRITE
            # Checks use paths, not a descriptor: closing any descriptor of the file would release SQLite's locks on it.
            if not self._folder.trust.is_private or not is_own or not is_local_path(self._folder.root):
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
        if version == tables.VERSION and tables.read_number(connection, "run") != _boot_id_number():
            self._delete_files()
            return None
        if version not in (tables.VERSION, 0 if new else tables.VERSION):
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
        """Return a context manager for a write transaction, which starts by indexing the changes missed earlier.

        Yields None if another process holds the lock for too long. Raises sqlite3.Error.
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
        """Begin a write transaction. Returns False if another process holds the lock for too long."""
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
    def _record_missed(self, key: bytes, description: str | None = None) -> Iterator[None]:
        """Return a context manager for a change to the entry ``key`` while the index is busy. The change is indexed later."""
        if self._connection is None:
            yield
            return
        before = self._folder_state(key[0])
        yield
        with self._lock:
            self._missed_changes.append(MissedChange(key, description, before, self._folder_state(key[0])))
            del self._missed_changes[:-_MAX_MISSED]

    def _index_missed(self, connection: sqlite3.Connection) -> None:
        """Index the missed changes. Their subfolders then match the index, unless other processes have changed them since."""
        for key, description, before, after in self._missed_changes:
            try:
                status = os.stat(self._folder.path(key), follow_symlinks=False)
            except FileNotFoundError:
                tables.drop_row(connection, key, self._folder.cost)
            except OSError:
                continue
            else:
                number = None if description is None else tables.find_description_id(connection, description)
                tables.replace_row(connection, key, status.st_size, status.st_mtime_ns, number, self._folder.cost)
            statement = "UPDATE folders SET node = ?, changed = ? WHERE (folder, node, changed) = (?, ?, ?)"
            connection.execute(statement, (*after, key[0], *before))

    @contextlib.contextmanager
    def _update_folder(self, connection: sqlite3.Connection, folder: int) -> Iterator[None]:
        """Return a context manager for a change to a subfolder and its rows. If they matched before, they still match afterward."""
        current = connection.execute("SELECT node, changed FROM folders WHERE folder = ?", (folder,)).fetchone()
        same = current == self._folder_state(folder)
        yield
        state = self._folder_state(folder) if same else (0, 0)
        connection.execute("UPDATE folders SET node = ?, changed = ? WHERE folder = ?", (*state, folder))

    def _folder_state(self, folder: int) -> tuple[int, int]:
        try:
            status = os.stat(self._folder.entry_folders[folder])
        except OSError:
            return 0, 0
        return status.st_ino, status.st_mtime_ns

    def _stale_folders(self) -> list[int] | None:
        """Return the subfolders that have changed since they were indexed, or None if there is no index."""
        connection = self._open()
        if connection is None:
            return None
        return [
            folder
            for folder, *current in connection.execute("SELECT folder, node, changed FROM folders ORDER BY folder").fetchall()
            if tuple(current) != self._folder_state(folder)
        ]

    def _list_folder(self, folder: int) -> tables.FolderListing:
        state = self._folder_state(folder)
        rows = {
            tables.row_id(key): (key[tables.NUMBER_BYTES :], status.st_size, status.st_mtime_ns)
            for key, status in self._folder.entries_starting_with(folder)
        }
        return tables.FolderListing(state, rows)

    def _refresh_folder(self, folder: int, *, wait: bool) -> bool:
        """Make a subfolder's rows match its entries. Writes only rows that differ. Returns True if they match afterward.

        Other processes may change the subfolder while it is listed. With ``wait``, the listing is then repeated; the last attempt locks out
        other processes. Raises OSError or sqlite3.Error.
        """
        for attempts_left in reversed(range(_MAX_LISTINGS if wait else 1)):
            listing = self._list_folder(folder)
            rows = None if (connection := self._open()) is None else tables.folder_rows(connection, folder)
            with self._transaction() as connection:
                if connection is None or rows is None:
                    return False
                if wait and not attempts_left and listing.state != self._folder_state(folder):
                    listing, rows = self._list_folder(folder), tables.folder_rows(connection, folder)
                if listing.state == self._folder_state(folder):
                    return tables.write_listing(connection, folder, listing, rows, self._folder.block)
        return False

def _boot_id_number() -> int:
    return int.from_bytes(boot_id(), "big", signed=True)
