"""Servers that are not Redis: any reply is a counted miss in bounded time and memory, and other protocols are named."""

from __future__ import annotations

import re
import socket
import threading
import time
import types
from typing import TYPE_CHECKING, Any

import pytest

import kvpack
from kvpack.formats.errors import InvalidParameter
from kvpack.store import redis as redis_backend
from kvpack.store import redis_client
from kvpack.store.keys import KEY_BYTES
from kvpack.store.redis_replies import (
    NotRedis,
    check_byte_strings,
    check_integer,
    check_keys,
    check_sum_progress,
    check_two_integers,
    make_bytes_check,
    make_fronts_check,
    make_integers_check,
    make_put_results_check,
    parse_count_page,
    parse_entry_page,
    parse_totals,
)
from support.store_caches import CHUNK, IDENTITY, cache, prompt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytest.importorskip("redis")

KEY = b"k" * KEY_BYTES
ANSWERS = {
    "a negative number": b":-5\r\n",
    "a huge number": b":99999999999999999999\r\n",
    "a number": b":100\r\n",
    "no bytes": b"$-1\r\n",
    "no list": b"*-1\r\n",
    "an empty list": b"*0\r\n",
    "two numbers": b"*2\r\n:1\r\n:2\r\n",
    "a cursor that stays": b"*2\r\n:5\r\n*0\r\n",
    "bytes": b"$3\r\nabc\r\n",
    "bytes that are no text": b"$5\r\nab\xff\x00\x01\r\n",
    "a status": b"+OK\r\n",
    "an error": b"-ERR x\r\n",
    "nested lists": b"*1\r\n" * 5000 + b":1\r\n",
    "a map": b"%1\r\n:1\r\n:2\r\n",
    "a truth": b"#t\r\n",
    "another type": b"?junk\r\n",
    "a list of all": b"*3\r\n$1\r\nx\r\n:3\r\n$2\r\nyy\r\n",
    "keys of entries": b"*2\r\n$1\r\nx\r\n*2\r\n$47\r\n{kvpack}:entry:" + KEY + b"\r\n:4\r\n",
    "an error in a list": b"*2\r\n-ERR x\r\n:1\r\n",
    "a length that is no number": b"$x\r\n",
    "a size of 2^60": b"$1152921504606846976\r\nabc",
    "a list of 2^60": b"*1152921504606846976\r\n:1\r\n",
}
CALLS: dict[str, Callable[[kvpack.Store, list[int]], Any]] = {
    "load": lambda store, ids: store.load(ids),
    "match": lambda store, ids: store.match(ids),
    "save": lambda store, ids: store.save(ids, cache(len(ids))),
    "pin": lambda store, ids: store.pin(ids),
    "unpin": lambda store, ids: store.unpin(ids),
    "delete": lambda store, ids: store.delete(ids),
    "stats": lambda store, ids: store.stats()["entries"],
    "prometheus": lambda store, ids: store.prometheus(),
    "collect": lambda store, ids: store.collect(),
    "list": lambda store, ids: list(store._backend.list()),
    "pinned": lambda store, ids: store._backend.pinned_keys(),
}


class Answering:
    """A server that replies ``answer`` to every command, and OK while a connection is set up."""

    def __init__(self, answer: Callable[[bytes, socket.socket], None]) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._socket.getsockname()[1]}"
        self._answer = answer
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                while request := connection.recv(2**16):
                    self._answer(request, connection)
            except OSError:
                return

    def close(self) -> None:
        self._socket.close()


def constant(answer: bytes) -> Callable[[bytes, socket.socket], None]:
    def serve(request: bytes, connection: socket.socket) -> None:
        count = request.count(b"\r\n*") + 1
        connection.sendall(b"+OK\r\n" * count if b"CLIENT" in request else answer * count)

    return serve


@pytest.fixture
def serve() -> Iterator[Callable[[Callable[[bytes, socket.socket], None]], str]]:
    servers: list[Answering] = []

    def begin(answer: Callable[[bytes, socket.socket], None]) -> str:
        servers.append(Answering(answer))
        return servers[-1].url

    yield begin
    for server in servers:
        server.close()


@pytest.mark.scenario
@pytest.mark.parametrize("name", ANSWERS)
def test_any_invalid_reply_is_a_counted_miss(name: str, serve: Callable[..., str]) -> None:
    url, ids = serve(constant(ANSWERS[name])), prompt(2)
    for call in CALLS.values():
        # Every answer is bad, so none can come too late; those of great sizes are waited for.
        store = kvpack.Store(url, IDENTITY, chunk=CHUNK, timeout=0.05, max_bytes=10**6)
        begun = time.monotonic()
        found = call(store, ids)
        assert time.monotonic() - begun < 60
        assert not isinstance(found, tuple) or found == (0, None)
    store = kvpack.Store(url, IDENTITY, chunk=CHUNK, timeout=0.2)
    assert store.load(ids) == (0, None)
    assert store.save(ids, cache(len(ids))) == 0
    missing = {"an empty list", "no bytes", "no list"}
    assert store.counters()["faults"] or name in missing


@pytest.mark.parametrize(
    "greeting",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"<!DOCTYPE HTML>\r\n",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"ERROR\r\n",
        b"220 mail.example ESMTP\r\n",
        b"\x15\x03\x01\x00\x02\x02\x28\r\n",
    ],
)
def test_a_server_with_another_protocol_is_named_when_opening(greeting: bytes, serve: Callable[..., str]) -> None:
    url = serve(lambda _, connection: connection.sendall(greeting))
    with pytest.raises(InvalidParameter, match=r"the server at the location is not Redis: it answers with .*; check the host and the port"):
        kvpack.Store(url, IDENTITY)


@pytest.mark.parametrize("first", [b"x", b"+OK", b"\x16"])
def test_an_endless_line_costs_little(first: bytes, serve: Callable[..., str]) -> None:
    """A server with another protocol may send any number of bytes, as fast as they are read."""
    sent = [0]

    def flood(_: bytes, connection: socket.socket) -> None:
        connection.sendall(first)
        while True:
            connection.sendall(b"x" * 2**16)
            sent[0] += 2**16

    with pytest.raises(InvalidParameter, match=r"the server at the location is not Redis: it answers with .Protocol Error: "):
        kvpack.Store(serve(flood), IDENTITY, timeout=5)
    assert sent[0] < 2**24


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"-NOPERM User x has no permissions to run the 'script|load' command\r\n", "a user that may run scripts"),
        (b"-ERR unknown command 'SCRIPT', with args beginning with: 'LOAD'\r\n", "refuses commands that a store needs: .*unknown command"),
        (b"-MOVED 3999 10.1.2.3:6381\r\n", r"kvpack's keys are on the node 10\.1\.2\.3:6381: use that node"),
    ],
)
def test_permanent_refusals_are_reported_when_opening(answer: bytes, message: str, serve: Callable[..., str]) -> None:
    with pytest.raises(InvalidParameter, match=message):
        kvpack.Store(serve(constant(answer)), IDENTITY)


def test_a_server_that_does_not_reply_may_be_opened(serve: Callable[..., str]) -> None:
    closed = serve(lambda _, connection: connection.shutdown(socket.SHUT_RDWR))
    silent = serve(lambda *_: None)
    for url in (closed, silent, "redis://127.0.0.1:1", "unix:///nowhere"):
        store = kvpack.Store(url, IDENTITY, chunk=CHUNK, timeout=0.1)
        assert store.load(prompt(1)) == (0, None)
        assert store.counters()["faults"]


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("decode_responses=True", "sets decode_responses to 'True', but kvpack needs False: remove it from the URL"),
        ("encoding=utf-16", "sets encoding to 'utf-16'"),
        ("protocol=3", "sets protocol to 3, but kvpack needs 2"),
        ("no_such_option=1", "^the Redis URL sets 'no_such_option', which is not a connection option: remove it$"),
        ("ssl_cert_reqs=none", "sets 'ssl_cert_reqs', which is not a connection option"),
        ("socket_timeout=abc", "not the URL of a Redis server"),
        ("socket_timeout=0", "socket_timeout of the location is 0.0, expected a number of seconds above 0"),
        ("socket_connect_timeout=-1", "socket_connect_timeout of the location is -1.0"),
        # redis-py expects Python objects as their values.
        ("retry=3", "sets 'retry', which is not a connection option"),
        ("maint_notifications_config=1", "sets 'maint_notifications_config'"),
        ("socket_read_size=0", "sets 'socket_read_size'"),
    ],
)
def test_url_options_that_change_replies_are_refused(query: str, message: str) -> None:
    with pytest.raises(InvalidParameter, match=message):
        kvpack.Store(f"redis://127.0.0.1:1/0?{query}", IDENTITY)


@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("redis://127.0.0.1:1/abc", "the path of the location is '/abc', expected the number of a database, such as /0"),
        ("redis://127.0.0.1:1/0/x", "the path of the location is '/0/x'"),
        ("unix://?db=1", "has no socket path, expected unix:///path/of/socket"),
        ("redis://[::1", "is not the URL of a Redis server"),
        ("REDIS://127.0.0.1:1", "begins with 'REDIS://', expected one of redis://"),
    ],
)
def test_urls_without_a_valid_database_are_refused(location: str, message: str) -> None:
    with pytest.raises(InvalidParameter, match=re.escape(message)):
        kvpack.Store(location, IDENTITY)


@pytest.mark.parametrize("end", ["", "/", "/7", "/0?client_name=worker&socket_timeout=2&max_connections=4", "?db=3"])
def test_urls_with_databases_are_accepted(end: str) -> None:
    kvpack.Store(f"redis://127.0.0.1:1{end}", IDENTITY).close()


def test_a_server_that_sends_slowly_costs_only_the_timeout(serve: Callable[..., str]) -> None:
    def trickle(request: bytes, connection: socket.socket) -> None:
        if b"CLIENT" in request:
            connection.sendall(b"+OK\r\n" * request.count(b"CLIENT"))
            return
        for byte in b"$400\r\n" + b"x" * 400 + b"\r\n":
            connection.sendall(bytes([byte]))
            time.sleep(0.1)

    begun = time.monotonic()
    store = kvpack.Store(serve(trickle), IDENTITY, chunk=CHUNK, timeout=0.3)
    assert store.load(prompt(1)) == (0, None)
    assert time.monotonic() - begun < 30
    assert store.counters()["faults"] == {"match TimeoutError": 1}


def test_a_server_that_receives_slowly_costs_only_the_timeout(serve: Callable[..., str]) -> None:
    """A put of many parts times out even if each part takes less than the timeout."""
    taken = [0]

    def sip(request: bytes, connection: socket.socket) -> None:
        if b"EVALSHA" not in request:
            connection.sendall(b"+OK\r\n" * (request.count(b"\r\n*") + 1))
            return
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        while data := connection.recv(1000):
            taken[0] += len(data)
            time.sleep(0.2)

    store = kvpack.Store(serve(sip), IDENTITY, chunk=CHUNK, timeout=0.3)
    parts = {number: [memoryview(bytes(5000))] for number in range(64)}
    begun = time.monotonic()
    assert store._backend.put_all([bytes([number]) * 32 for number in range(64)], parts, 0) == [False] * 64
    assert time.monotonic() - begun < 30
    assert store.counters()["faults"] == {"put TimeoutError": 1}


def test_an_endless_reply_is_cut_off(serve: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    sent = [0]

    def flood(request: bytes, connection: socket.socket) -> None:
        if b"CLIENT" in request or b"PING" in request:
            connection.sendall(b"+OK\r\n" * (request.count(b"\r\n*") + 1))
            return
        connection.sendall(b"$1152921504606846976\r\n")
        while True:
            connection.sendall(bytes(2**20))
            sent[0] += 2**20

    monkeypatch.setattr(redis_backend, "_BYTES_AT_ONCE", 2**22)
    store = kvpack.Store(serve(flood), IDENTITY, chunk=CHUNK, timeout=5, max_entry_bytes=2**22)
    assert store.load(prompt(1)) == (0, None)
    assert sent[0] < 2**26
    assert set(store.counters()["faults"]) == {"match ConnectionError"} or "match OSError" in store.counters()["faults"]


def test_a_long_reply_gets_time_in_proportion_to_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(redis_client, "time", types.SimpleNamespace(monotonic=lambda: now[0]))

    class Slow:
        def __init__(self) -> None:
            self.timeout: float | None = 1.0

        def settimeout(self, seconds: float | None) -> None:
            self.timeout = seconds

        def gettimeout(self) -> float | None:
            return self.timeout

        def recv(self, count: int) -> bytes:
            now[0] += 0.02
            return (b"$9\r\n" + bytes(count))[:count]

    found = redis_client._LimitedSocket(Slow(), 0.05, 2**30)
    for _ in range(20):
        assert len(found.recv(2**19)) == 2**19
    found.begin()
    assert found.recv(1) == b"$"
    now[0] += 0.1
    with pytest.raises(TimeoutError, match="a reply, of which 1 bytes were received, took more than"):
        found.recv(1)


@pytest.mark.parametrize(
    ("check", "good", "bad"),
    [
        (check_integer, [0, 7, 2**53], [-1, 2**53 + 1, True, None, b"1", 1.0, [1]]),
        (make_integers_check(2), [[1, 2]], [[1], [1, 2, 3], [1, b"x"], (1, 2), 5, None]),
        (make_bytes_check(3), [b"", b"abc"], [b"abcd", "abc", None, 3, bytearray(b"a")]),
        (check_byte_strings, [[], [b"a"]], [[1], None, b"a", [None]]),
        (check_keys, [[], [KEY]], [[b"x"], [KEY, b""], None]),
        (make_fronts_check(3), [[0], [1, 5, b"abc", 0, b""]], [[], [0, 5], [b"0"], [0, 5, b"abcd"], [0, b"a", 5], [0, -1, b""], None, 4]),
        (parse_entry_page, [[b"0", b""], [b"5", KEY + bytes(16)]], [[b"0", KEY], [b"x", b""], [0, b""], [b"0", 5], [b"0"], None]),
        (parse_totals, [[], [1, 2, 3], [1, 2, 3, b"f", b"v"]], [[1], [1, 2, 3, b"f"], [1, 2, b"3"], [1, 2, 3, b"f", 4], [-1, 2, 3], None]),
        (
            parse_count_page,
            [[b"0", 0], [b"18446744073709551615", 5]],
            [[b"", 0], [b"x", 0], [b"1" * 21, 0], [1, 0], [b"0", -1], [b"0"], None],
        ),
        (check_sum_progress, [-1, 0, 1], [2, -2, True, b"1", None]),
        (check_two_integers, [[-1], [1, 2]], [[-1, 2], [1], [], [-2], -1, None, [True]]),
        (
            make_put_results_check(5),
            [[-1], [1, 0, b"", [1, 0, 3]], [0, 0, b"why", [[b"front", 9]]]],
            [[0, 0, b"", [[b"longer", 9]]], [0, 0, b"", [[b"f", -1]]], [0, 0, b"", [b"x"]], [0, 0, b"", 1], [0, 0, 1, []], [1], None, 2],
        ),
    ],
)
def test_replies_are_checked(check: Callable[[Any], Any], good: list[Any], bad: list[Any]) -> None:
    for answer in good:
        check(answer)
    for answer in bad:
        with pytest.raises(NotRedis, match="it is not Redis"):
            check(answer)
