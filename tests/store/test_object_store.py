"""The prefix store in an object store, over the S3 protocol and in obstore's own stores.

The server is killed and paused, and it sends false replies.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import kvpack
from kvpack.formats.errors import InvalidParameter
from kvpack.store import breaker, last_used, object_store, objects
from support.s3_server import VARIABLES, Server, run_lying_server, run_server
from support.state_caches import STATEFUL, chunk_ends, same_states, stateful
from support.store_caches import (
    CHUNK,
    IDENTITY,
    UNIFORM_IDENTITY,
    cache,
    check_death_and_return,
    check_hits_of_an_unsteady_server,
    is_same_prefix,
    prompt,
    save,
)
from support.store_stress import FORK

obstore = pytest.importorskip("obstore")

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def shared() -> Iterator[Server]:
    with run_server() as server:
        yield server


@pytest.fixture
def server(shared: Server) -> Server:
    """Return an empty server."""
    files = obstore.store.from_url("s3://bucket", config=shared.options, client_options={"allow_http": True})
    obstore.delete(files, [meta["path"] for batch in obstore.list(files) for meta in batch])
    return shared


@pytest.fixture(params=["s3", "local", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, dict[str, Any]]:
    """Return a location and the options for it."""
    if request.param == "s3":
        server = request.getfixturevalue("server")
        return server.url, {"storage_options": server.options}
    kinds = {"local": lambda: obstore.store.LocalStore(tmp_path, mkdir=True), "memory": obstore.store.MemoryStore}
    return kinds[request.param](), {}


def opened(place: tuple[Any, dict[str, Any]], identity: kvpack.Identity = IDENTITY, **options: Any) -> kvpack.Store:
    location, given = place
    return kvpack.Store(location, identity, **{"chunk": CHUNK, **given, **options})


def at(server: Server, **options: Any) -> kvpack.Store:
    return opened((server.url, {"storage_options": server.options}), **options)


def names(store: kvpack.Store) -> list[str]:
    raw = store._backend._objects._store
    return [meta["path"] for batch in obstore.list(raw) for meta in batch]


def test_states_and_windows_are_stored(place: tuple[Any, dict[str, Any]]) -> None:
    whole = stateful(8 * CHUNK + 5, chunk_ends(2, 5, 7))
    ids = prompt(8)
    identity = dataclasses.replace(STATEFUL, windows=(None, 40))
    with opened(place, identity) as store:
        assert store.save(ids, whole) == 7 * CHUNK
    with opened(place, identity) as store:
        for chunks, expected in ((8, 7), (6, 5), (1, 0)):
            tokens, found = store.load(ids[: chunks * CHUNK])
            assert tokens == expected * CHUNK
            if found is not None:
                assert same_states(found, tokens)
                assert found[1].skipped == (expected - 2) * CHUNK
        assert store.delete(ids, start=4 * CHUNK) == 3
        assert store.load(ids)[0] == 2 * CHUNK


@pytest.mark.parametrize("recipe", ["bf16", "kivi-2"])
def test_saved_entries_are_loaded(recipe: str, place: Any) -> None:
    identity = dataclasses.replace(IDENTITY, recipe=recipe)
    ids = prompt(4)
    with opened(place, identity) as store:
        assert store.load(ids) == (0, None)
        whole = save(store, ids)
        save(store, ids)
        assert store.counters()["saved_chunks"] == 4
    with opened(place, identity) as other:
        n, found = other.load(ids)
        assert n == other.match(ids) == 4 * CHUNK
        assert is_same_prefix(found, whole)
        assert other.stats()["entries"] == 4
        assert other.stats()["bytes"] == store.counters()["saved_bytes"]
        assert other.counters()["faults"] == {}
    assert opened(place, dataclasses.replace(IDENTITY, recipe=recipe, tenant="other")).match(ids) == 0


def test_connection_settings_are_ordinary_options(server: Server) -> None:
    store = at(server, storage_options={**server.options, "user_agent": "kvpack", "allow_http": True})
    save(store, prompt(1))
    closed = at(server, storage_options={**server.options, "allow_http": False})
    assert closed.load(prompt(1)) == (0, None)


def test_the_environment_may_name_the_server(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, variable in VARIABLES.items():
        monkeypatch.setenv(variable, server.options[name])
    save(kvpack.Store(server.url, IDENTITY, chunk=CHUNK), prompt(1))
    assert at(server).match(prompt(1)) == CHUNK


def test_names_equal_those_in_a_folder(tmp_path: Path) -> None:
    ids = prompt(3)
    whole = save(kvpack.Store(obstore.store.LocalStore(tmp_path), IDENTITY, chunk=CHUNK), ids)
    os.chmod(tmp_path, 0o700)
    for location in (tmp_path, tmp_path.as_uri()):
        assert is_same_prefix(kvpack.Store(location, IDENTITY, chunk=CHUNK).load(ids)[1], whole)


def test_an_entry_is_stored_only_once_by_all_writers(place: Any) -> None:
    stores = [opened(place) for _ in range(2)]
    ids = prompt(6)
    whole = cache(len(ids))
    # All race for the same keys: none looks whether they are there.
    for store in stores:
        store._backend.count_present = lambda keys: 0
    threads = [threading.Thread(target=stores[number % 2].save, args=(ids, whole)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(store.counters()["saved_chunks"] for store in stores) == 6
    assert is_same_prefix(opened(place).load(ids)[1], whole)


def test_pins_deletion_and_sizes_work_as_in_a_folder(place: Any) -> None:
    store = opened(place)
    ids = prompt(4)
    save(store, ids)
    assert store.pin(ids) == 4 * CHUNK
    assert len(store._backend.pinned_keys()) == 4
    assert store.unpin(ids)
    assert not store.unpin(ids)
    assert store.pin(ids) == 4 * CHUNK
    assert store.delete(ids, start=2 * CHUNK) == 2
    assert store.match(ids) == 2 * CHUNK
    assert store._backend.pinned_keys() == set()
    assert store.delete(ids) == 2
    assert (store.stats()["entries"], store.stats()["bytes"]) == (0, 0)


def test_the_budget_holds_and_leaves_are_evicted_first(place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "_SLACK", 10**9)
    size = opened(place, UNIFORM_IDENTITY)
    save(size, prompt(1, seed=99))
    (entry,) = size._backend.list()
    size.delete(prompt(1, seed=99))
    store = opened(place, UNIFORM_IDENTITY, max_bytes=8 * entry.size)
    branches = [prompt(4, first=2, seed=seed) for seed in (1, 2)]
    for ids in branches:
        save(store, ids)
        store.close()
    store.load(branches[0])
    store.close()
    found = []
    for seed in range(6):
        save(store, prompt(1, seed=10 + seed))
        assert store.stats()["bytes"] <= 8 * entry.size
        found.append([store.match(ids) // CHUNK for ids in branches])
    assert found == [[4, 4], [4, 4], [4, 3], [4, 2], [3, 2], [2, 2]]
    assert store.counters()["evicted_entries"] == 4
    store.pin(branches[0])
    for seed in range(6, 14):
        save(store, prompt(1, seed=10 + seed))
    assert store.match(branches[0]) == 2 * CHUNK
    tiny = opened(place, identity=dataclasses.replace(UNIFORM_IDENTITY, tenant="tiny"), max_bytes=entry.size - 1)
    assert tiny.save(prompt(1), cache(CHUNK + 5, UNIFORM_IDENTITY.recipe)) == 0
    assert tiny.counters()["refused_chunks"] == 1


def test_uses_are_merged_into_one_record(place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "INTERVAL_SECONDS", 0)
    monkeypatch.setattr(object_store, "_MERGE_INTERVAL", 10**40)
    store = opened(place)
    for seed in range(4):
        save(store, prompt(1, seed=seed))
    store.load(prompt(1))
    store.delete(prompt(1, seed=3))
    records = [name for name in names(store) if name.startswith("uses/")]
    assert len(records) >= 5
    store.collect()
    (record,) = [name for name in names(store) if name.startswith("uses/")]
    merged = bytes(obstore.get(store._backend._objects._store, record).bytes())
    assert merged == b"".join(store.keys(prompt(1, seed=seed))[0] for seed in (1, 2, 0))


@pytest.mark.parametrize("part", [1000, 8 * 2**20])
def test_large_entries_are_fetched_in_ranges(part: int, place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "PART_BYTES", part)
    monkeypatch.setattr(objects, "_FRONT_BYTES", 5000)
    store = opened(place)
    ids = prompt(2)
    whole = save(store, ids)
    assert is_same_prefix(store.load(ids)[1], whole)
    key = store.keys(ids)[0]
    data, front = store._backend.peek(key), store._backend.peek(key, front=True)
    assert len(front) == len(data)
    with kvpack.file.container.open_bytes(front) as file:
        end = len(file.front.text) + len(file.front.tensor)
    assert end > 5000
    assert front[:end] == data[:end]
    assert front[end:] == bytes(len(data) - end)


def test_an_object_that_changes_between_two_ranges_is_a_miss(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "PART_BYTES", 1000)
    store = at(server)
    ids = prompt(1)
    save(store, ids)
    raw, (name,) = store._backend._objects._store, [name for name in names(store) if "uses" not in name]
    good, real = bytes(obstore.get(raw, name).bytes()), store._backend._objects._fill

    def changed(*arguments: Any) -> bool:
        obstore.put(raw, name, good[:-1] + b"x")
        return real(*arguments)

    monkeypatch.setattr(store._backend._objects, "_fill", changed)
    assert store.load(ids) == (0, None)
    assert store.counters()["damaged_entries"] == 0


def test_damaged_entries_are_misses_and_are_replaced(place: Any) -> None:
    store = opened(place)
    ids = prompt(3)
    whole = save(store, ids)
    raw, name = store._backend._objects._store, object_store._object_name(store.keys(ids)[1])
    good = bytes(obstore.get(raw, name).bytes())
    other = bytes(obstore.get(raw, object_store._object_name(store.keys(ids)[0])).bytes())
    for bad in (good[:-1], good + b"x", good[:6000] + b"\0\1\2" + good[6003:], b"x", other, b""):
        obstore.put(raw, name, bad)
        n, found = store.load(ids)
        assert n == CHUNK
        assert is_same_prefix(found, whole)
        assert store.save(ids, whole) == 3 * CHUNK
    assert store.counters()["damaged_entries"] == 6
    obstore.put(raw, name, b"")
    assert store.match(ids) == CHUNK
    assert store.save(ids, whole) == store.match(ids) == 3 * CHUNK, "the empty entry was not replaced"


def test_invalid_entries_are_replaced_and_entries_of_other_keys_are_kept(place: Any) -> None:
    pytest.importorskip("cryptography")
    ours = opened(place, encryption={"ours": bytes(32)})
    ids = prompt(3)
    whole = save(ours, ids)
    raw, name = ours._backend._objects._store, object_store._object_name(ours.keys(ids)[1])
    good = bytes(obstore.get(raw, name).bytes())
    for bad in (b"", bytes(len(good)), b"junk", good[:20]):
        obstore.put(raw, name, bad)
        assert ours.match(ids) == CHUNK
        assert ours.save(ids, whole) == 3 * CHUNK, "a save without a prior load stored too little"
        assert is_same_prefix(ours.load(ids)[1], whole)
    for other in (opened(place), opened(place, encryption={"theirs": bytes(32)})):
        assert other.load(ids) == (0, None)
        assert other.save(ids, whole) == other.match(ids) == 0
        assert 1 <= other.counters()["refused_chunks"] <= 3, "more chunks were refused than are stored concurrently"
    assert is_same_prefix(ours.load(ids)[1], whole)


def test_nothing_larger_than_an_entry_is_fetched(place: Any) -> None:
    store = opened(place, max_entry_bytes=100_000)
    ids = prompt(3)
    whole = save(store, ids)
    raw, name = store._backend._objects._store, object_store._object_name(store.keys(ids)[1])
    obstore.put(raw, name, bytes(obstore.get(raw, name).bytes()) + bytes(100_000))
    assert store.load(ids)[0] == store.match(ids) == CHUNK
    assert store._backend.peek(store.keys(ids)[1]) is store._backend.peek(store.keys(ids)[1], front=True) is None
    assert store.counters()["faults"] == {"get LimitExceeded": 3}
    assert store.counters()["damaged_entries"] == 0
    assert store.save(ids, whole) == 3 * CHUNK
    assert is_same_prefix(store.load(ids)[1], whole)


def test_records_of_other_programs_take_no_memory(place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "MAX_RECORDS_BYTES", 10_000)
    store = opened(place)
    ids = prompt(2)
    save(store, ids)
    assert store.pin(ids) == 2 * CHUNK
    raw = store._backend._objects._store
    asked = []
    for folder in ("holds", "uses"):
        for name in ("00", "zz"):
            obstore.put(raw, f"{folder}/{name}", bytes(20_000))
    real = objects.Objects.read
    monkeypatch.setattr(objects.Objects, "read", lambda self, name, most=None: (asked.append(name), real(self, name, most))[1])
    assert store._backend.pinned_keys() == set(store.keys(ids))
    assert len(list(store._backend.list())) == 2
    assert not any(name.endswith(("/00", "/zz")) for name in asked)
    assert store.counters()["faults"]["list LimitExceeded"] == 2


def test_wrong_replies_of_a_server_are_misses(server: Server) -> None:
    ids = prompt(1)
    store = at(server)
    save(store, ids)
    good = bytes(store._backend.peek(store.keys(ids)[0]))
    lies = {
        "the truth": (good, len(good), 200),
        "other bytes": (good[:-3] + b"abc", len(good), 200),
        "more than it says": (good + b"more", len(good) - 9, 200),
        "less than it says": (good[:-9], len(good), 200),
        "a size that no entry has": (good, 2**50, 200),
        "nothing": (b"", 0, 200),
        "a page": (b"<html>", 6, 200),
        "an error": (b"", 0, 500),
        "no leave": (b"", 0, 403),
    }
    with run_lying_server() as (liar, options):
        for lie, (liar.body, liar.length, liar.status) in lies.items():
            seen = kvpack.Store(server.url, IDENTITY, chunk=CHUNK, storage_options=options)
            n, _ = seen.load(ids)
            assert n == (CHUNK if lie == "the truth" else 0), lie
            counts = seen.counters()
            assert (counts["damaged_entries"] > 0 or counts["faults"] != {}) == (lie != "the truth"), lie


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        (404, "NoSuchBucket", "refuses the location with NoSuchBucket: check that the bucket exists"),
        (403, "InvalidAccessKeyId", "check the access key"),
        (403, "SignatureDoesNotMatch", "check the access key"),
        (400, "ExpiredToken", "check the session token"),
        (301, "PermanentRedirect", "check the region"),
        # An object that is not there, and one of a user who may not list the bucket.
        (404, "NoSuchKey", None),
        (403, "AccessDenied", None),
        (503, "SlowDown", None),
    ],
)
def test_permanent_errors_are_reported_when_opening(status: int, code: str, message: str | None) -> None:
    # A timeout is no permanent error, and a busy machine may take seconds to answer.
    patient = {} if message is None else {"timeout": 60.0}
    with run_lying_server() as (liar, options):
        liar.body = f"<Error><Code>{code}</Code></Error>".encode()
        liar.length, liar.status = len(liar.body), status
        for open_at in (
            lambda: kvpack.Store("s3://bucket/prefix", IDENTITY, chunk=CHUNK, storage_options=options, **patient),
            lambda: kvpack.Store([kvpack.Tier("s3://bucket/prefix", storage_options=options, **patient)], IDENTITY, chunk=CHUNK),
        ):
            if message is None:
                assert open_at().load(prompt(1)) == (0, None)
            else:
                with pytest.raises(InvalidParameter, match=message):
                    open_at()


def test_a_location_with_the_digits_of_a_status_is_refused_like_any_other() -> None:
    with run_lying_server() as (liar, options):
        liar.body = b"<Error><Code>InvalidAccessKeyId</Code></Error>"
        liar.length, liar.status = len(liar.body), 403
        with pytest.raises(InvalidParameter, match="check the access key"):
            kvpack.Store("s3://bucket/416", IDENTITY, chunk=CHUNK, storage_options=options, timeout=60.0)


def test_a_missing_bucket_is_reported_when_opening(server: Server) -> None:
    with pytest.raises(InvalidParameter, match="NoSuchBucket"):
        kvpack.Store("s3://another/some/prefix", IDENTITY, chunk=CHUNK, storage_options=server.options)


def test_a_removed_bucket_is_a_fault(server: Server) -> None:
    with run_lying_server() as (liar, options):
        for code, count in (("NoSuchKey", 0), ("NoSuchBucket", 2)):
            liar.body = f"<Error><Code>{code}</Code></Error>".encode()
            liar.length, liar.status = len(liar.body), 404
            if not count:
                store = kvpack.Store(server.url, IDENTITY, chunk=CHUNK, storage_options=options)
            assert store.match(prompt(1)) == 0
            assert store.load(prompt(1)) == (0, None)
            assert sum(store.counters()["faults"].values()) == count


def test_a_server_that_denies_permission_is_still_asked(server: Server) -> None:
    with run_lying_server() as (liar, options):
        liar.status = 403
        store = kvpack.Store(server.url, IDENTITY, chunk=CHUNK, storage_options=options)
        for _ in range(5):
            assert store.load(prompt(1)) == (0, None)
        assert store.counters()["faults"] == {"get PermissionDeniedError": 5}


def test_a_server_may_restart(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    check_death_and_return(server, lambda: at(server), monkeypatch)


def test_a_hanging_server_costs_only_one_timeout(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ids = prompt(3)
    whole = save(at(server), ids)
    store = at(server, timeout=0.3)
    monkeypatch.setattr(breaker, "PAUSE_SECONDS", 3600)
    os.kill(server.number, signal.SIGSTOP)
    try:
        for _ in range(50):
            assert store.load(ids) == (0, None)
        faults = store.counters()["faults"]
        # Three at once in the first load wait; then nothing is asked.
        assert faults["get GenericError"] <= 3
        assert sum(faults.values()) == faults["get GenericError"] + faults["get CircuitOpen"]
        assert caplog.records
        assert not any("\n" in record.getMessage() for record in caplog.records), "a fault was logged on several lines"
    finally:
        os.kill(server.number, signal.SIGCONT)
    assert is_same_prefix(at(server).load(ids)[1], whole)


def _load_in_child(store: kvpack.Store, results: Any) -> None:
    results.put((store.load(prompt(2))[0], store.counters()["faults"]))


def test_calls_in_a_forked_process_are_misses_and_do_not_hang(server: Server) -> None:
    store = at(server)
    save(store, prompt(2))
    results = FORK.Queue()
    child = FORK.Process(target=_load_in_child, args=(store, results), daemon=True)
    child.start()
    found, faults = results.get(timeout=60)
    child.join()
    assert found == 0
    assert set(faults) == {"get Forked"}
    assert store.load(prompt(2))[0] == 2 * CHUNK


@pytest.mark.scenario
def test_every_hit_is_correct_while_the_server_is_killed_paused_and_started(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(breaker, "PAUSE_SECONDS", 0.02)
    monkeypatch.setattr(object_store, "INTERVAL_SECONDS", 0.05)
    check_hits_of_an_unsteady_server(server, lambda: at(server, max_bytes=100_000, timeout=0.5), steps=4, seconds=0.4)


@pytest.mark.parametrize(
    ("location", "options", "message"),
    [
        ("s3://", {}, "location 's3://' or its storage_options are invalid"),
        ("s3://bucket", {"storage_options": {"endpint": "x"}}, "Configuration key: 'endpint' is not valid"),
        ("s3://bucket", {"storage_options": "endpoint"}, "location 's3://bucket' or its storage_options are invalid"),
        ("s3://bucket", {"durable": True}, "an object store has no option durable"),
        ("folder", {"durable": "no"}, "durable is 'no', expected True or False"),
        ("folder", {"check_values": "no"}, "check_values is 'no', expected True or False"),
        ("folder", {"storage_options": {}}, "a folder has no option storage_options"),
        ("ftp://host/x", {}, r"begins with 'ftp://', expected one of redis://.*s3://"),
        (Path("s3://bucket"), {}, r"begins with 's3:/', expected one of .* in a str"),
        (b"redis://host", {}, r"begins with 'redis://', expected one of .* in a str"),
        ("localhost:6379", {}, r"begins with 'localhost:6379', expected one of redis://"),
        ("file://host/x", {}, "names the host 'host'"),
    ],
)
def test_invalid_locations_are_refused(location: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidParameter, match=message):
        kvpack.Store(location, IDENTITY, chunk=CHUNK, **options)
    with pytest.raises(InvalidParameter, match="storage_options works only with URLs"):
        kvpack.Store(obstore.store.MemoryStore(), IDENTITY, chunk=CHUNK, storage_options={"region": "x"})


@pytest.mark.parametrize("mutant", ["overwrites", "trusts sizes", "no breaker", "ancestors first"])
def test_violations_of_these_rules_are_noticed(mutant: str, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that breaks one of the rules fails the test of that rule."""
    place = (server.url, {"storage_options": server.options})
    if mutant == "overwrites":
        monkeypatch.setattr(objects.Objects, "put_new", objects.Objects.put)
        with pytest.raises(AssertionError):
            test_an_entry_is_stored_only_once_by_all_writers(place)
    elif mutant == "trusts sizes":
        monkeypatch.setattr(objects, "PART_BYTES", 2**60)
        with run_lying_server() as (liar, options):
            liar.body, liar.length = b"x", 2**40
            store = kvpack.Store(server.url, IDENTITY, chunk=CHUNK, storage_options=options, max_entry_bytes=2**60)
            store.load(prompt(1))
            assert "get LimitExceeded" not in store.counters()["faults"], "the body of an object with an impossible size was requested"
    elif mutant == "no breaker":
        monkeypatch.setattr(breaker.CircuitBreaker, "allows_request", lambda self: True)
        with pytest.raises((AssertionError, KeyError)):
            test_a_server_may_restart(server, monkeypatch)
    else:
        real = last_used.UseLog.record_use
        monkeypatch.setattr(last_used.UseLog, "record_use", lambda self, chain: real(self, chain[::-1]))
        with pytest.raises(AssertionError):
            test_the_budget_holds_and_leaves_are_evicted_first(place, monkeypatch)
