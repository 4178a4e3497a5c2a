"""The Redis backend, for Valkey too: entries as strings on a server, which evicts by scripts of its own.

    {kvpack}:entry:<key>   an entry's bytes
    {kvpack}:used          its last use in microseconds of the server's clock, a sorted set by key; less one for each ancestor
    {kvpack}:sizes         its bytes, a hash by key
    {kvpack}:bytes         the sum of those
    {kvpack}:pins          pinned chains, a hash of all keys by the last one

The braces keep all of them on one node of a cluster.
"""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING, Any

from kvpack.formats.errors import InvalidParameter, KvpackError

from ..json_header import front_bytes
from .backend import MAX_ENTRY_BYTES, Stored
from .breaker import Breaker, Guard
from .keys import KEY_BYTES
from .redis_scripts import COLLECT, DELETE, PUT, USE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from .backend import Data
    from .counters import Counters

SCHEMES = ("redis://", "rediss://", "unix://")
PREFIX = b"{kvpack}:"
ENTRY = PREFIX + b"entry:"
_SHARED = [PREFIX + name for name in (b"used", b"sizes", b"bytes", b"pins")]

_FRONT_BYTES = 64 * 1024
"""More than the header of most entries."""
_BYTES_AT_ONCE = 64 * 2**20


class Redis:
    """Entries on the server at ``url`` (redis://, rediss:// or unix://).

    ``max_bytes`` is a hard budget of their bytes, ``ttl`` the seconds after which an entry that nobody uses goes, ``timeout`` the
    seconds that a request may take. Raises InvalidParameter for a URL that makes no sense and KvpackError without the package redis.
    """

    private = False
    puts_at_once = 1

    def __init__(self, url: str, counters: Counters, *, max_bytes: int | None = None, ttl: int | None = None, timeout: float = 1.0) -> None:
        try:
            import redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ImportError:
            raise KvpackError("a store on Redis needs the package redis: pip install 'kvpack[redis]'") from None
        self._counters, self._max_bytes, self._ttl = counters, max_bytes, ttl
        self._breaker = Breaker()
        self._guard = Guard(self._breaker, counters, (redis.RedisError, OSError), (redis.ResponseError,))
        try:
            self._client: Any = redis.Redis.from_url(
                url, socket_timeout=timeout, socket_connect_timeout=timeout, retry=Retry(NoBackoff(), 0), protocol=2
            )
        except ValueError as error:
            raise InvalidParameter(f"the location is no URL of a Redis server: {error}") from None
        # A store that is dropped unclosed gives its sockets back before the collector meets them.
        self._close = weakref.finalize(self, self._client.close)
        self._scripts = {
            name: self._client.register_script(text)
            for name, text in (("put", PUT), ("touch", USE), ("delete", DELETE), ("collect", COLLECT))
        }

    def present(self, keys: Sequence[bytes]) -> int:
        return len(self._leading_sizes(keys))

    def get(self, keys: Sequence[bytes]) -> list[Data]:
        sizes = self._leading_sizes(keys)
        found: list[Data] = []
        while len(found) < len(sizes):
            # As many as fit in one answer, at least one.
            stop, total = len(found) + 1, sizes[len(found)]
            while stop < len(sizes) and total + sizes[stop] <= _BYTES_AT_ONCE:
                total += sizes[stop]
                stop += 1
            names = [ENTRY + key for key in keys[len(found) : stop]]
            values = self._fetched(names)
            whole = [bytearray(value) for value in values if value is not None]
            found += whole
            if len(whole) < len(names):
                break
        self.touch(keys[: len(found)], 0)
        return found

    def peek(self, key: bytes, *, front: bool = False) -> Data | None:
        name = ENTRY + key
        size = self._guard.ask("get", lambda: self._client.strlen(name), 0)
        if not front or size <= _FRONT_BYTES:
            value = self._guard.ask("get", lambda: self._client.get(name), None)
            return None if value is None else bytearray(value)
        beginning = self._range(name, 0, _FRONT_BYTES)
        if beginning is None or size > MAX_ENTRY_BYTES:
            return None
        # Zeros that nobody reads take no memory.
        data = bytearray(size)
        end = min(size, front_bytes(beginning) or size)
        rest = self._range(name, len(beginning), end) if end > len(beginning) else b""
        if rest is None or len(beginning) + len(rest) < end:
            return None
        data[: len(beginning)] = beginning
        data[len(beginning) : len(beginning) + len(rest)] = rest
        return data

    def put(self, chain: Sequence[bytes], pieces: Sequence[memoryview], now_ns: int) -> bool:
        data = b"".join(pieces)
        if len(data) > MAX_ENTRY_BYTES:
            self._counters.add("refused_chunks")
            return False
        answer = self._run("put", b"".join(chain), data, self._most(), self._seconds())
        if answer is None:
            return False
        stored, evicted, freed = answer
        self._counters.add("evicted_entries", evicted)
        self._counters.add("evicted_bytes", freed)
        self._counters.add("refused_chunks", stored == 0)
        if stored == 1:
            self._counters.add("saved_chunks")
            self._counters.add("saved_bytes", len(data))
        return bool(stored)

    def touch(self, chain: Sequence[bytes], now_ns: int) -> None:
        # By the server's clock: those of its users may differ.
        if chain:
            self._run("touch", b"".join(chain), self._seconds())

    def delete(self, keys: Sequence[bytes]) -> set[bytes]:
        return set(self._run("delete", b"".join(keys)) or ()) if keys else set()

    def discard(self, key: bytes, data: Data) -> None:
        self.delete([key])

    def list(self) -> Iterator[Stored]:
        used: Sequence[tuple[bytes, float]] = self._guard.ask("list", lambda: self._client.zrange(_SHARED[0], 0, -1, withscores=True), ())
        sizes: Mapping[bytes, bytes] = self._guard.ask("list", lambda: self._client.hgetall(_SHARED[1]), {})
        for key, score in used:
            if len(key) == KEY_BYTES and key in sizes:
                yield Stored(key, int(sizes[key]), int(score) * 1000)

    def size(self) -> tuple[int, int]:
        entries = self._guard.ask("list", lambda: self._client.zcard(_SHARED[0]), 0)
        return entries, int(self._guard.ask("list", lambda: self._client.get(_SHARED[2]), None) or 0)

    def pin(self, keys: Sequence[bytes]) -> bool:
        return self._guard.ask("pin", lambda: self._client.hset(_SHARED[3], keys[-1], b"".join(keys)), None) is not None

    def unpin(self, keys: Sequence[bytes]) -> bool:
        return bool(self._guard.ask("unpin", lambda: self._client.hdel(_SHARED[3], keys[-1]), 0))

    def pinned(self) -> set[bytes]:
        chains: Sequence[bytes] = self._guard.ask("list", lambda: self._client.hvals(_SHARED[3]), ())
        return {chain[at : at + KEY_BYTES] for chain in chains for at in range(0, len(chain), KEY_BYTES)}

    def collect(self) -> None:
        evicted, freed = self._run("collect", self._most()) or (0, 0)
        self._counters.add("evicted_entries", evicted)
        self._counters.add("evicted_bytes", freed)

    def close(self) -> None:
        self._close()

    def _range(self, name: bytes, start: int, stop: int) -> bytes | None:
        return self._guard.ask("get", lambda: bytes(self._client.getrange(name, start, stop - 1)), None)

    def _fetched(self, names: Sequence[bytes]) -> Sequence[bytes | None]:
        nothing: Sequence[bytes | None] = ()
        return self._guard.ask("get", lambda: self._client.mget(names), nothing)

    def _leading_sizes(self, keys: Sequence[bytes]) -> Sequence[int]:
        """The sizes of the entries before the first that is not there, asked for before any is fetched."""

        def ask() -> Sequence[int]:
            with self._client.pipeline(transaction=False) as pipeline:
                for key in keys:
                    pipeline.strlen(ENTRY + key)
                sizes: Sequence[int] = pipeline.execute()
            return sizes

        nothing: Sequence[int] = ()
        sizes = self._guard.ask("match", ask, nothing) if keys else nothing
        missing = next((number for number, size in enumerate(sizes) if not 0 < size <= MAX_ENTRY_BYTES), len(sizes))
        return sizes[:missing]

    def _run(self, script: str, *arguments: Any) -> Any:
        return self._guard.ask(script, lambda: self._scripts[script](keys=_SHARED, args=arguments), None)

    def _most(self) -> int | str:
        return "" if self._max_bytes is None else self._max_bytes

    def _seconds(self) -> int | str:
        return "" if self._ttl is None else self._ttl


def is_redis(location: str | os.PathLike[str]) -> bool:
    """Whether a location is the URL of a Redis server."""
    return isinstance(location, str) and location.startswith(SCHEMES)
