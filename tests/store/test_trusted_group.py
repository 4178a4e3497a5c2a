"""Folders shared by a trusted group: with Kubernetes' fsGroup, or by several users on one machine."""

from __future__ import annotations

import os
import stat
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvpack.cli import main
from kvpack.formats.errors import InvalidParameter
from support.store_caches import CHUNK, entries, entry_of, is_same_prefix, open_store, prompt, save

if TYPE_CHECKING:
    from collections.abc import Iterator

IDS = prompt(3)
GROUP, ALICE, BOB, EVE = 54_000, 54_001, 54_002, 54_003

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as several users")


@contextmanager
def member(user: int, group: int = GROUP) -> Iterator[None]:
    """A context that runs its block as another user."""
    os.setegid(group)
    os.seteuid(user)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


@pytest.fixture
def shared() -> Iterator[Path]:
    """Yield a folder like a volume that Kubernetes mounts: owned by root and group-writable.

    pytest's own folders are closed to other users.
    """
    with tempfile.TemporaryDirectory() as place:
        home = Path(place)
        home.chmod(0o711)
        # Whatever is imported at its first use, while root is who reads it: other users may not.
        first = open_store(home / "first", trusted_group=GROUP)
        save(first, IDS)
        assert first.load(IDS)[0] == first.pin(IDS) == 3 * CHUNK
        first.collect()
        assert first.unpin(IDS)
        assert first.delete(IDS) == 3
        folder = home / "volume"
        folder.mkdir()
        os.chown(folder, 0, GROUP)
        folder.chmod(0o2775)
        yield folder


@as_root
def test_members_share_a_folder(shared: Path) -> None:
    with member(ALICE):
        alice = open_store(shared, trusted_group=GROUP)
        whole = save(alice, IDS)
    with member(BOB):
        bob = open_store(shared, trusted_group=GROUP)
        assert not bob._backend.is_private
        tokens, found = bob.load(IDS)
        assert tokens == 3 * CHUNK
        assert is_same_prefix(found, whole)
        save(bob, prompt(2, seed=1))
        assert bob.pin(IDS) == 3 * CHUNK
        assert bob.delete(prompt(2, seed=1)) == 2
    with member(ALICE):
        assert alice.match(IDS) == 3 * CHUNK
        assert alice.unpin(IDS)
        alice.collect()
        assert alice.delete(IDS) == 3
    assert alice.counters()["faults"] == bob.counters()["faults"] == {}
    for parent, folders, names in os.walk(shared):
        modes = {stat.S_IMODE(os.stat(os.path.join(parent, name)).st_mode) for name in folders}
        assert modes <= {0o2770}
        assert {stat.S_IMODE(os.stat(os.path.join(parent, name)).st_mode) for name in names} <= {0o660}
        assert {os.stat(os.path.join(parent, name)).st_gid for name in (*folders, *names)} <= {GROUP}


@as_root
def test_a_member_evicts_entries_of_another(shared: Path) -> None:
    with member(ALICE):
        save(open_store(shared, trusted_group=GROUP), IDS)
    size = max(os.path.getsize(path) for path in entries(shared))
    with member(BOB):
        store = open_store(shared, trusted_group=GROUP, max_bytes=4 * size)
        for seed in range(1, 5):
            save(store, prompt(2, seed=seed))
        assert store.match(IDS) < 3 * CHUNK
        assert store.match(prompt(2, seed=4)) == 2 * CHUNK
        assert store.counters()["faults"] == {}
        assert len(entries(shared)) <= 4


@as_root
def test_a_use_of_anothers_entries_is_recorded(shared: Path) -> None:
    with member(ALICE):
        alice = open_store(shared, trusted_group=GROUP)
        save(alice, IDS)
        for path in entries(shared):
            os.utime(path, (10**9, 10**9))
    with member(BOB):
        bob = open_store(shared, trusted_group=GROUP)
        assert bob.load(IDS)[0] == 3 * CHUNK
        assert bob.counters()["faults"] == {}
    used = [os.stat(entry_of(alice, IDS, number)).st_mtime_ns for number in range(3)]
    assert min(used) > 10**18
    assert used == sorted(used, reverse=True)


@as_root
def test_permissions_set_by_kubernetes_are_accepted(shared: Path) -> None:
    """When a pod with fsGroup starts, all files are assigned to the group and become group-writable."""
    folder = shared / "store"
    with member(ALICE):
        whole = save(open_store(folder), IDS)
    for parent, _, names in os.walk(folder):
        for path in (parent, *(os.path.join(parent, name) for name in names)):
            os.chown(path, -1, GROUP)
            os.chmod(path, stat.S_IMODE(os.stat(path).st_mode) | (0o2070 if path == parent else 0o060))
    with member(ALICE):
        with pytest.raises(InvalidParameter, match=f"has mode 2770.*trusted_group={GROUP} trusts the members"):
            open_store(folder)
        store = open_store(folder, trusted_group=GROUP)
        tokens, found = store.load(IDS)
        assert tokens == 3 * CHUNK
        assert is_same_prefix(found, whole)
        save(store, prompt(2, seed=1))
        store.collect()
        assert store.counters()["faults"] == {}
    assert main(["store", "stat", str(folder), "--json", "--trusted-group", str(GROUP)]) == 0
    assert main(["store", "stat", str(folder), "--json"]) == 2


@as_root
def test_only_the_group_is_trusted(shared: Path) -> None:
    with member(ALICE):
        alice = open_store(shared, trusted_group=GROUP)
        save(alice, IDS)
    first = Path(entry_of(alice, IDS, 0))
    # A file of neither the group nor its members, one that others may write, and one that another group may.
    for uid, gid, mode in ((EVE, EVE, 0o664), (ALICE, GROUP, 0o666), (ALICE, EVE, 0o664)):
        os.chown(first, uid, gid)
        first.chmod(mode)
        with member(BOB):
            store = open_store(shared, trusted_group=GROUP)
            assert store.match(IDS) == 0
            assert store.load(IDS) == (0, None)
            assert "match EPERM" in store.counters()["faults"]
    with member(EVE, EVE), pytest.raises(InvalidParameter, match=f"but user {EVE} is not a member of it"):
        open_store(shared, trusted_group=GROUP)
    shared.chmod(0o2777)
    with member(BOB), pytest.raises(InvalidParameter, match="has mode 2777"):
        open_store(shared, trusted_group=GROUP)
    shared.chmod(0o2775)
    os.chown(shared, 0, EVE)
    with member(BOB), pytest.raises(InvalidParameter, match=f"Its group is {EVE}, and trusted_group is {GROUP}"):
        open_store(shared, trusted_group=GROUP)


def test_a_group_folder_is_created_and_read_as_copies(tmp_path: Path) -> None:
    group = os.getegid()
    store = open_store(tmp_path / "new" / "store", trusted_group=group)
    save(store, IDS)
    assert stat.S_IMODE(os.stat(tmp_path / "new" / "store").st_mode) == 0o2770
    assert {stat.S_IMODE(os.stat(path).st_mode) for path in entries(tmp_path / "new")} == {0o660}
    assert store.load(IDS)[0] == 3 * CHUNK
    assert not store._backend.is_private
    assert open_store(tmp_path / "new" / "store", trusted_group=str_of(group)).match(IDS) == 3 * CHUNK


def str_of(group: int) -> str | int:
    """Return the name of a group, or its number if it has no name."""
    grp = pytest.importorskip("grp")
    try:
        return str(grp.getgrgid(group).gr_name)
    except KeyError:
        return group


@pytest.mark.parametrize(
    ("group", "why"),
    [(-1, "the number or the name"), (True, "the number or the name"), (2.5, "the number or the name"), ("no such group", "its number")],
)
def test_invalid_groups_are_refused(group: Any, why: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter, match=why):
        open_store(tmp_path, trusted_group=group)
