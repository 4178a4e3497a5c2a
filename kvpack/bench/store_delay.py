"""kvpack bench store --location, row round-trips: time a store and an engine's pages on a distant server.

A relay on this machine delays every request, so that a nearby server behaves like a distant one. The delay does not depend on the number of
bytes. The relay also counts requests: everything that a client sends before it reads a reply is one request.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

import torch

import kvpack
from kvpack.formats.errors import InvalidParameter
from kvpack.identity.identity import Identity
from kvpack.output import print_table
from kvpack.store import Store
from kvpack.store.page_store import PageStore
from kvpack.store.redaction import shown_location

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from urllib.parse import SplitResult

CHUNK, DIM = 16, 32
ENDPOINT = "AWS_ENDPOINT_URL"
_PORTS = {"redis": 6379, "http": 80}
_PIECE = 2**20
PAGES = {"s3": 64, "redis": 256}
"""Number of chunks (and pages), by the location's scheme."""
DELAYS_MS = {"s3": 20.0, "redis": 5.0}
"""Default delay by the location's scheme."""
COUNTERPARTS = {"contains": "match", "get_into": "load", "touch": "match", "put of stored pages": "save of stored chunks", "put": "save"}
"""The ``Store`` call that each ``PageStore`` call is compared with. A page call may send twice as many requests."""


def check(location: str, delay_ms: float | None) -> None:
    """Raise InvalidParameter if requests to ``location`` cannot be delayed, or not by ``delay_ms``."""
    if delay_ms is not None and not 0 < delay_ms < 10_000:
        raise InvalidParameter(f"--delay is {delay_ms:g}, expected milliseconds above 0 and below 10,000")
    if urlsplit(location).scheme not in PAGES:
        raise InvalidParameter(
            f"the location is {shown_location(location)!r:.80}, expected redis:// or s3://, whose requests a relay can delay"
        )
    if _server_address(location) is None:
        raise InvalidParameter(
            f"{ENDPOINT} is {shown_location(os.environ.get(ENDPOINT, ''))!r:.80}, expected the http:// address of the object store, "
            "because a relay cannot delay encrypted connections"
        )


def run(location: str, delay_ms: float | None = None) -> dict[str, Any]:
    """Measure a store and pages at ``location``, with every request delayed by ``delay_ms``, and return a report as JSON values.

    Entries of the measurement are removed. Raises InvalidParameter as ``check`` does, and if the location does not keep the entries.
    """
    check(location, delay_ms)
    kind = urlsplit(location).scheme
    delay = DELAYS_MS[kind] if delay_ms is None else delay_ms
    with _delayed_store(location, kind, delay / 1000) as (relay, relayed, options):
        times, requests = _measure(relay, relayed, options, PAGES[kind])
    return {"delay_ms": delay, "pages": PAGES[kind], "ms": times, "requests": requests}


def _measure(
    relay: _Relay, location: str, options: dict[str, Any], count: int
) -> tuple[dict[str, dict[str, float]], dict[str, dict[str, int]]]:
    """Return the time of each call in milliseconds, and the number of requests that it sends."""
    identity = Identity("bench", "bf16", weights=f"delay {os.urandom(8).hex()}")
    ids = list(range(CHUNK * count))
    x = torch.randn(2, 1, 1, CHUNK * count, DIM, generator=torch.Generator().manual_seed(0)).bfloat16()
    cache = kvpack.pack([(x[0], x[1])] * 2, "bf16")
    times: dict[str, dict[str, float]] = {"Store": {}, "PageStore": {}}
    requests: dict[str, dict[str, int]] = {"Store": {}, "PageStore": {}}

    def timed(who: str, what: str, call: Callable[[], Any], expected: Any = None) -> None:
        begun, before = time.perf_counter(), relay.requests
        result = call()
        times[who][what] = 1000 * (time.perf_counter() - begun)
        requests[who][what] = relay.requests - before
        if expected is not None and result != expected:
            raise InvalidParameter(f"{who}.{what} returned {result!r:.60}, expected {expected!r:.60}: the store is too small or too slow")

    with Store(location, identity, chunk=CHUNK, timeout=60.0, **options) as store:
        store.match(ids[:CHUNK])
        timed("Store", "save", lambda: store.save(ids, cache), len(ids))
        timed("Store", "match", lambda: store.match(ids), len(ids))
        timed("Store", "load", lambda: store.load(ids)[0], len(ids))
        timed("Store", "save of stored chunks", lambda: store.save(ids, cache), len(ids))
        store.delete(ids)
    geometry = kvpack.pages.PageGeometry(layers=2, heads=1, tokens=CHUNK, dim_k=DIM, dim_v=DIM)
    pool = torch.randn(count, 2, 1, 2, CHUNK, DIM, generator=torch.Generator().manual_seed(0)).bfloat16()
    pages = kvpack.pages.PageBuffer(geometry, pool[:, :, :, 0], pool[:, :, :, 1])
    keys, slots, stored = [b"page %d" % number for number in range(count)], range(count), [True] * count
    with PageStore(location, identity, geometry, timeout=60.0, **options) as engine:
        engine.contains(keys[:1])
        timed("PageStore", "put", lambda: engine.put(keys, pages, slots), stored)
        timed("PageStore", "contains", lambda: engine.contains(keys), stored)
        timed("PageStore", "get_into", lambda: engine.get_into(keys, pages, slots), stored)
        timed("PageStore", "put of stored pages", lambda: engine.put(keys, pages, slots), stored)
        timed("PageStore", "touch", lambda: engine.touch(keys))
        timed("PageStore", "contains of absent pages", lambda: engine.contains([b"no " + key for key in keys]), [False] * count)
        engine.delete(keys)
    return times, requests


def show(report: dict[str, Any]) -> None:
    """Print the time of each call, in milliseconds and in delays, and its requests."""
    delay, rows = report["delay_ms"], []
    for who, calls in report["ms"].items():
        for what, value in calls.items():
            requests, like = report["requests"][who][what], COUNTERPARTS.get(what, "") if who == "PageStore" else ""
            ratios = [f"{mine / report[unit]['Store'][like]:.2f}" if like else "" for unit, mine in (("requests", requests), ("ms", value))]
            rows.append([f"{who}: {what}", f"{value:,.0f}", f"{value / delay:,.1f}", f"{requests:,}", like, *ratios])
    title = f"{report['pages']} chunks of a Store, and pages of a PageStore, every request delayed by {delay:g} ms"
    print_table(title, ["call", "ms", "delays", "requests", "compared with Store's", "requests, x", "ms, x"], rows)


@contextlib.contextmanager
def _delayed_store(location: str, kind: str, seconds: float) -> Iterator[tuple[_Relay, str, dict[str, Any]]]:
    """Run a relay within the context. Yields the relay, the relayed location, and the options of a store there."""
    address = _server_address(location)
    assert address is not None
    assert address.hostname is not None
    relay = _Relay((address.hostname, address.port or _PORTS[address.scheme]), seconds)
    try:
        user = f"{address.netloc.rpartition('@')[0]}@" if "@" in address.netloc else ""
        relayed = urlunsplit(address._replace(netloc=f"{user}127.0.0.1:{relay.port}"))
        yield (relay, relayed, {}) if kind == "redis" else (relay, location, {"storage_options": {"endpoint": relayed}})
    finally:
        relay.close()


def _server_address(location: str) -> SplitResult | None:
    """Return the URL of the server of ``location``, or None if its requests cannot be delayed."""
    scheme = urlsplit(location).scheme
    address = urlsplit({"redis": location, "s3": os.environ.get(ENDPOINT, "")}.get(scheme, ""))
    return address if address.scheme in _PORTS and address.hostname is not None else None


class _Relay:
    """A server between clients and ``address`` that delays requests by ``seconds`` and counts them in ``requests``."""

    def __init__(self, address: tuple[str, int], seconds: float) -> None:
        self._address, self._seconds = address, seconds
        self.requests = 0
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def close(self) -> None:
        # Only a shutdown ends a pending accept.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve_client, args=(client,), daemon=True).start()

    def _serve_client(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError), socket.create_connection(self._address) as server:
            for end in (client, server):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            waiting = threading.Event()
            # A long request arrives in pieces, each of which gets the same delay.
            late: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
            threads = [
                threading.Thread(target=_send_delayed, args=(late, server), daemon=True),
                threading.Thread(target=_relay_replies, args=(server, client, waiting), daemon=True),
            ]
            for thread in threads:
                thread.start()
            with contextlib.suppress(OSError):
                while data := client.recv(_PIECE):
                    if not waiting.is_set():
                        waiting.set()
                        with self._lock:
                            self.requests += 1
                    late.put((time.monotonic() + self._seconds, data))
            late.put((0.0, b""))
            for thread in threads:
                thread.join()


def _send_delayed(late: queue.SimpleQueue[tuple[float, bytes]], server: socket.socket) -> None:
    """Send each piece to the server when it is due, until an empty piece arrives."""
    with contextlib.suppress(OSError):
        while True:
            due, data = late.get()
            if not data:
                break
            time.sleep(max(0.0, due - time.monotonic()))
            server.sendall(data)
    _shut_down(server)


def _relay_replies(server: socket.socket, client: socket.socket, waiting: threading.Event) -> None:
    """Forward replies to the client. Bytes that the client sends after a reply count as another request."""
    with contextlib.suppress(OSError):
        while data := server.recv(_PIECE):
            waiting.clear()
            client.sendall(data)
    _shut_down(client)


def _shut_down(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
