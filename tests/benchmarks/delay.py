"""A store and an engine's pages on a server with a given delay in milliseconds.

A relay on this machine delays every request, so that a server nearby stands for one far away. It adds no time for bytes, and counts the
requests: what a client sends before it reads an answer is one.
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

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CHUNK, DIM = 16, 32
ENDPOINT = "AWS_ENDPOINT_URL"
_PORTS = {"redis": 6379, "http": 80}
_PIECE = 2**20
PAGES = {"s3": 64, "redis": 256}
"""Chunks, and pages, by the kind of location."""
LIKE = {"present": "match", "get_into": "load", "touch": "match", "put what is there": "save what is there", "put": "save"}
"""The ``Store`` call that each ``PageStore`` call is compared with; a page call may send twice the requests."""


def run(location: str, delay_ms: float) -> dict[str, Any]:
    """Measure a store and pages at ``location`` (redis:// or s3://), every request ``delay_ms`` late; returns JSON values.

    Entries of the bench are removed before and after. Raises InvalidParameter for another kind of location and for an invalid delay.
    """
    if not 0 < delay_ms < 10_000:
        raise InvalidParameter(f"the delay is {delay_ms}, expected milliseconds above 0 and below 10,000")
    kind = urlsplit(location).scheme
    if kind not in PAGES:
        raise InvalidParameter(f"the location is {location!r:.80}, expected redis:// or s3://")
    count = PAGES[kind]
    with _delayed(location, kind, delay_ms / 1000) as (relay, place, options):
        times, requests = _measured(relay, place, options, count)
    return {"location": location, "delay_ms": delay_ms, "pages": count, "ms": times, "requests": requests}


def _measured(
    relay: _Relay, place: str, options: dict[str, Any], count: int
) -> tuple[dict[str, dict[str, float]], dict[str, dict[str, int]]]:
    """Return the milliseconds and the requests of each call."""
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
            raise InvalidParameter(f"{who}, {what}: got {result!r:.60}, expected {expected!r:.60}: the location is too small or too slow")

    with Store(place, identity, chunk=CHUNK, timeout=60.0, **options) as store:
        store.match(ids[:CHUNK])
        timed("Store", "save", lambda: store.save(ids, cache), len(ids))
        timed("Store", "match", lambda: store.match(ids), len(ids))
        timed("Store", "load", lambda: store.load(ids)[0], len(ids))
        timed("Store", "save what is there", lambda: store.save(ids, cache), len(ids))
        store.delete(ids)
    geometry = kvpack.pages.PageGeometry(layers=2, heads=1, tokens=CHUNK, dim_k=DIM, dim_v=DIM)
    pool = torch.randn(count, 2, 1, 2, CHUNK, DIM, generator=torch.Generator().manual_seed(0)).bfloat16()
    pages = kvpack.pages.PageBuffer(geometry, pool[:, :, :, 0], pool[:, :, :, 1])
    keys, slots, stored = [b"page %d" % number for number in range(count)], range(count), [True] * count
    with PageStore(place, identity, geometry, timeout=60.0, **options) as engine:
        engine.present(keys[:1])
        timed("PageStore", "put", lambda: engine.put(keys, pages, slots), stored)
        timed("PageStore", "present", lambda: engine.present(keys), stored)
        timed("PageStore", "get_into", lambda: engine.get_into(keys, pages, slots), stored)
        timed("PageStore", "put what is there", lambda: engine.put(keys, pages, slots), stored)
        timed("PageStore", "touch", lambda: engine.touch(keys))
        timed("PageStore", "present, of absent pages", lambda: engine.present([b"no " + key for key in keys]), [False] * count)
        engine.delete(keys)
    return times, requests


def show(report: dict[str, Any]) -> None:
    """Print the time of each call, in milliseconds and in delays, and its requests."""
    delay, rows = report["delay_ms"], []
    for who, calls in report["ms"].items():
        for what, value in calls.items():
            requests, like = report["requests"][who][what], LIKE.get(what, "") if who == "PageStore" else ""
            ratios = [f"{mine / report[unit]['Store'][like]:.2f}" if like else "" for unit, mine in (("requests", requests), ("ms", value))]
            rows.append([f"{who}: {what}", f"{value:,.0f}", f"{value / delay:,.1f}", f"{requests:,}", like, *ratios])
    title = f"{report['pages']} chunks of a Store, and pages of a PageStore, every request {delay:g} ms late"
    print_table(title, ["call", "ms", "delays", "requests", "compared with Store's", "requests, x", "ms, x"], rows)


@contextlib.contextmanager
def _delayed(location: str, kind: str, seconds: float) -> Iterator[tuple[_Relay, str, dict[str, Any]]]:
    """A relay, the location behind it, and the options that lead there."""
    address = location if kind == "redis" else os.environ.get(ENDPOINT, "")
    parts = urlsplit(address)
    if parts.scheme not in _PORTS or parts.hostname is None:
        raise InvalidParameter(f"an object store behind a delay needs its http:// address in {ENDPOINT}, got {address!r:.80}")
    relay = _Relay((parts.hostname, parts.port or _PORTS[parts.scheme]), seconds)
    try:
        user = f"{parts.netloc.rpartition('@')[0]}@" if "@" in parts.netloc else ""
        there = urlunsplit(parts._replace(netloc=f"{user}127.0.0.1:{relay.port}"))
        yield (relay, there, {}) if kind == "redis" else (relay, location, {"storage_options": {"endpoint": there}})
    finally:
        relay.close()


class _Relay:
    """Passes bytes on between clients and ``address``, those of clients ``seconds`` late, and counts ``requests``."""

    def __init__(self, address: tuple[str, int], seconds: float) -> None:
        self._address, self._seconds = address, seconds
        self.requests = 0
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def close(self) -> None:
        # Only shutting down ends a call of accept.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError), socket.create_connection(self._address) as server:
            for end in (client, server):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            waiting = threading.Event()
            # A long request comes in pieces, each of which is as late as the first.
            late: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
            threads = [
                threading.Thread(target=_send_late, args=(late, server), daemon=True),
                threading.Thread(target=_answer, args=(server, client, waiting), daemon=True),
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


def _send_late(late: queue.SimpleQueue[tuple[float, bytes]], server: socket.socket) -> None:
    """Send each piece to the server at its time, up to an empty one."""
    with contextlib.suppress(OSError):
        while True:
            due, data = late.get()
            if not data:
                break
            time.sleep(max(0.0, due - time.monotonic()))
            server.sendall(data)
    _shut(server)


def _answer(server: socket.socket, client: socket.socket, waiting: threading.Event) -> None:
    """Pass answers on to the client; what it sends after one is another request."""
    with contextlib.suppress(OSError):
        while data := server.recv(_PIECE):
            waiting.clear()
            client.sendall(data)
    _shut(client)


def _shut(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
