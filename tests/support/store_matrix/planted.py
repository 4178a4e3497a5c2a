"""Put objects in the place of an entry, in a folder or on a server, as another user could."""

from __future__ import annotations

import glob
import os
import tempfile
from collections.abc import Callable
from typing import Any

import kvpack
from kvpack.store.backend import MAX_ENTRY_BYTES
from support.store_matrix.oracle import CHUNK, IDENTITIES, packed_prompt, prompt

Plant = Callable[[str, str], None]
"""A function (path, folder) that puts an object at the path of an entry in the folder of a tier."""
OnServer = Callable[[Any, bytes], None]
"""A function (client, key) that puts an object on the client's server, for example in the place of the key's entry."""

LARGE = MAX_ENTRY_BYTES + 2**20
"""Size in bytes of a sparse file that is larger than any entry."""
ENTRY = b"{kvpack}:entry:"


def junk(path: str, folder: str) -> None:
    _write(path, os.urandom(5000))


def empty_file(path: str, folder: str) -> None:
    _write(path, b"")


def zeros(path: str, folder: str) -> None:
    _write(path, bytes(5760))


def sparse(path: str, folder: str) -> None:
    _write(path, b"")
    os.truncate(path, LARGE)


def sparse_encrypted(path: str, folder: str) -> None:
    """Write a sparse file that begins like an encrypted entry."""
    _write(path, b"kvpack-encrypted 1\n\x03now" + bytes(100))
    os.truncate(path, LARGE)


def fifo(path: str, folder: str) -> None:
    _make_room(path)
    os.mkfifo(path, 0o666)


def dangling_link(path: str, folder: str) -> None:
    _make_room(path)
    os.symlink("/etc/passwd", path)


def link_to_entry(path: str, folder: str) -> None:
    _make_room(path)
    os.symlink(_another(path, folder), path)


def empty_folder(path: str, folder: str) -> None:
    _make_room(path)
    os.makedirs(f"{path}/inner")


def another_entry(path: str, folder: str) -> None:
    """Write the intact bytes of another entry."""
    other = _another(path, folder)
    data = os.urandom(100)
    if os.path.isfile(other):
        with open(other, "rb") as file:
            data = file.read()
    _write(path, data)


def plaintext(path: str, folder: str) -> None:
    """Write the same entry with other values and without encryption, which is valid for a store that is not encrypted."""
    name = os.path.basename(path)
    pieces = _prepared_entries[bytes.fromhex(name)]
    _write(path, pieces if not _trusts_plaintext(folder) else pieces[:-100])


def unreadable(path: str, folder: str) -> None:
    """Make the entry unreadable by setting its mode to 0000."""
    _write(path, bytes(100))
    os.chmod(path, 0)


IN_FOLDERS: list[Plant] = [
    *(
        junk,
        empty_file,
        zeros,
        sparse,
        sparse_encrypted,
        fifo,
        dangling_link,
        link_to_entry,
        empty_folder,
        another_entry,
        plaintext,
        unreadable,
    ),
]

KEPT_PLANTS: list[Plant] = [sparse, sparse_encrypted, empty_folder, unreadable]
"""Objects that a store does not remove, because they may be valid for others. They are misses, and ``save`` reports them."""


def _junk_entry(client: Any, key: bytes) -> None:
    client.set(ENTRY + key, os.urandom(5000))


def _empty_entry(client: Any, key: bytes) -> None:
    client.set(ENTRY + key, b"")


def _large_entry(client: Any, key: bytes) -> None:
    client.setrange(ENTRY + key, LARGE // 64, b"x")


def _list_entry(client: Any, key: bytes) -> None:
    client.delete(ENTRY + key)
    client.rpush(ENTRY + key, b"a", b"b")


def _another_entry(client: Any, key: bytes) -> None:
    client.set(ENTRY + key, next((client.get(name) for name in client.keys(ENTRY + b"*") if name != ENTRY + key), b"x"))


def _plaintext_entry(client: Any, key: bytes) -> None:
    client.set(ENTRY + key, _prepared_entries[key][:-100])


def _no_bookkeeping(client: Any, key: bytes) -> None:
    client.delete(*(b"{kvpack}:" + name for name in (b"used", b"sizes", b"bytes")))


def _sum_of_junk(client: Any, key: bytes) -> None:
    client.set(b"{kvpack}:bytes", b"junk")


def _negative_sum(client: Any, key: bytes) -> None:
    client.set(b"{kvpack}:bytes", b"-1000000000")


def _large_sum(client: Any, key: bytes) -> None:
    client.set(b"{kvpack}:bytes", b"9000000000000000000")


def _sizes_of_junk(client: Any, key: bytes) -> None:
    client.hset(b"{kvpack}:sizes", mapping={key: b"junk", b"short": b"1"})


def _text_for(name: str) -> OnServer:
    """Return a function that replaces one of the store's sets or maps by text."""

    def plant(client: Any, key: bytes) -> None:
        client.delete(f"{{kvpack}}:{name}")
        client.set(f"{{kvpack}}:{name}", b"text")

    plant.__name__ = f"_text_for_{name}"
    return plant


def _list_for_sum(client: Any, key: bytes) -> None:
    client.delete(b"{kvpack}:bytes")
    client.rpush(b"{kvpack}:bytes", b"1")


def _uses_of_junk(client: Any, key: bytes) -> None:
    client.zadd(b"{kvpack}:used", {b"short": 1.0, key: float("inf"), b"x" * 40: -1.0})


ON_SERVERS: list[OnServer] = [
    *(_junk_entry, _empty_entry, _large_entry, _list_entry, _another_entry, _plaintext_entry, _no_bookkeeping, _sum_of_junk),
    *(_negative_sum, _large_sum, _sizes_of_junk, _text_for("used"), _text_for("sizes"), _list_for_sum, _text_for("holds"), _uses_of_junk),
]


def _write(path: str, data: bytes) -> None:
    _make_room(path)
    with open(path, "wb") as file:
        file.write(data)


def _make_room(path: str) -> None:
    os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
    if os.path.lexists(path):
        os.unlink(path)


def _another(path: str, folder: str) -> str:
    """Return the path of some other entry in a folder."""
    found = [other for other in glob.glob(f"{folder}/?/?/" + "?" * 64) if other != path]
    return found[0] if found else "/nowhere"


def _trusts_plaintext(folder: str) -> bool:
    """Return True if a folder is not encrypted, so that a store trusts any complete entry in it."""
    for other in glob.glob(f"{folder}/?/?/" + "?" * 64):
        if os.path.isfile(other) and os.access(other, os.R_OK):
            with open(other, "rb") as file:
                return not file.read(16).startswith(b"kvpack-encrypted")
    return True


_prepared_entries: dict[bytes, bytes] = {}


def keys(who: int, number: int) -> list[bytes]:
    """Return the keys of the chunks of a prompt."""
    return kvpack.Store("memory://", IDENTITIES[who], chunk=CHUNK, max_bytes=0).keys(prompt(number))


def prepare(who: int, number: int) -> None:
    """Create the entries of a prompt with the values of the next identity, as that identity's store would write them."""
    with tempfile.TemporaryDirectory() as parent, kvpack.Store(f"{parent}/store", IDENTITIES[who], chunk=CHUNK) as store:
        store.save(prompt(number), packed_prompt((who + 1) % len(IDENTITIES), number))
        for path in glob.glob(f"{parent}/store/?/?/" + "?" * 64):
            with open(path, "rb") as file:
                _prepared_entries[bytes.fromhex(os.path.basename(path))] = file.read()
