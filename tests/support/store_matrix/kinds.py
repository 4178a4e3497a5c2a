"""The kinds of stores to which faults are applied, and what can be observed from outside while a store is in use."""

from __future__ import annotations

import contextlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import kvpack
from support.store_matrix.oracle import CHUNK, IDENTITIES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.redis_server import Server

ENTRY_BYTES = 6720
"""Size in bytes of the largest entry, which is that of a prompt's first chunk, because it has the most raw tokens."""
BUDGET = 12 * ENTRY_BYTES
"""Budget in bytes: about a seventh of the size of all prompts of all identities."""
MAX_ENTRY_BYTES = 2**20
KEYS = {"now": bytes(range(32)), "before": bytes(32)}

_STORED = """
local total = 0
for _, name in ipairs(redis.call('KEYS', '{kvpack}:entry:*')) do
    if redis.call('TYPE', name)['ok'] == 'string' then total = total + redis.call('STRLEN', name) end
end
return total
"""


@dataclass(frozen=True)
class Kind:
    """A kind of store, defined by its tiers, fastest first. A tier is "memory", "folder" or "Redis"."""

    name: str
    tiers: tuple[str, ...]
    encrypted: bool = False
    write_back: bool = False


KINDS = {
    kind.name: kind
    for kind in (
        Kind("plain", ("folder",)),
        Kind("encrypted", ("folder",), encrypted=True),
        Kind("memory + folder", ("memory", "folder")),
        Kind("folder + folder", ("folder", "folder"), write_back=True),
        Kind("folder + Redis", ("folder", "Redis")),
        Kind("encrypted tiers", ("memory", "folder", "Redis"), encrypted=True),
        Kind("Redis", ("Redis",)),
    )
}


@dataclass
class Place:
    """A store of one kind below the folder ``root``, with a server if the kind needs one. Every tier has the ``budget``."""

    kind: Kind
    root: Path
    server: Server | None = None
    budget: int | None = BUDGET
    durable: bool = False

    @property
    def folders(self) -> list[str]:
        """Return the folders of all tiers that have one."""
        return [str(self.root / f"tier-{number}") for number, tier in enumerate(self.kind.tiers) if tier == "folder"]

    @property
    def has_server(self) -> bool:
        return "Redis" in self.kind.tiers

    @property
    def survives_server(self) -> bool:
        """Return True if entries outlive the server."""
        return "folder" in self.kind.tiers

    def open(self, who: int | kvpack.Identity = 0, *, chunk: int = CHUNK, **options: Any) -> kvpack.Store:
        """Open the store of an identity, or of the identity with the number ``who`` in ``IDENTITIES``.

        ``options`` apply to every tier.
        """
        identity = who if isinstance(who, kvpack.Identity) else IDENTITIES[who]
        options = {"max_bytes": self.budget, **options}
        tiers = []
        for number, tier in enumerate(self.kind.tiers):
            location, own = str(self.root / f"tier-{number}"), {"durable": self.durable or None, **options}
            if tier == "memory":
                location, own = "memory://", {"max_bytes": options["max_bytes"] or 10**9}
            elif tier == "Redis":
                assert self.server is not None
                location, own = self.server.url, {"max_bytes": options["max_bytes"], "timeout": 5}
            tiers.append((location, own))
        given: dict[str, Any] = {"chunk": chunk, "encryption": KEYS if self.kind.encrypted else None, "max_entry_bytes": MAX_ENTRY_BYTES}
        if len(tiers) == 1:
            return kvpack.Store(tiers[0][0], identity, **given, **tiers[0][1])
        several = [kvpack.Tier(location, **own) for location, own in tiers]
        return kvpack.Store(several, identity, **given, write_back=self.kind.write_back or None)

    def clear(self) -> None:
        """Delete everything that is stored."""
        for folder in self.folders:
            shutil.rmtree(folder, ignore_errors=True)
        if self.server is not None:
            self.client().flushall()

    def client(self) -> Any:
        import redis

        assert self.server is not None
        return redis.Redis.from_url(self.server.url, socket_timeout=10)

    def max_stored_bytes(self) -> int:
        """Return the largest size in bytes that the entries and unfinished files of one tier had at one moment."""
        sizes = [bytes_stored(folder) for folder in self.folders]
        if self.server is not None:
            sizes.append(int(self.client().eval(_STORED, 0)))
        return max(sizes)

    def unfinished_files(self) -> list[str]:
        """Return the unfinished files of all tiers."""
        found = []
        for folder in self.folders:
            with contextlib.suppress(FileNotFoundError):
                found += [f"{folder}/unfinished/{name}" for name in os.listdir(f"{folder}/unfinished")]
        return found

    def foreign_paths(self, uid: int | None = None) -> list[str]:
        """Return files and folders that ``uid`` (default: this process's user) does not own, or that others may read."""
        uid = os.geteuid() if uid is None else uid
        found = []
        for path in all_paths(self.folders):
            with contextlib.suppress(FileNotFoundError):
                status = os.lstat(path)
                if status.st_uid != uid or status.st_mode & 0o077:
                    found.append(f"{path} of user {status.st_uid}, mode {status.st_mode:o}")
        return found


def all_paths(folders: list[str]) -> Iterator[str]:
    """Yield the path of every file and folder below ``folders``."""
    for folder in folders:
        for parent, inner, names in os.walk(folder):
            yield from (os.path.join(parent, name) for name in (*inner, *names))


def bytes_stored(folder: str) -> int:
    """Return the size in bytes of the entries and unfinished files that appear in both of two listings.

    These files certainly existed at the same time.
    """
    before, after = (dict(_sizes(folder)) for _ in range(2))
    return sum(size for path, (size, file) in before.items() if after.get(path) == (size, file))


def _sizes(folder: str) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield (path, (bytes, inode)) of every file."""
    for parent, _, names in os.walk(folder):
        if os.path.basename(parent) == "unfinished" or len(os.path.basename(parent)) == 1:
            for name in names:
                path = os.path.join(parent, name)
                with contextlib.suppress(FileNotFoundError):
                    status = os.lstat(path)
                    yield path, (status.st_size, status.st_ino)
