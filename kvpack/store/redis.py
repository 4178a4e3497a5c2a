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
from typing import TYPE_CHECKING, Any, TypeVar

from kvpack.formats.errors import InvalidParameter, KvpackError

from .backend import Stored
from .breaker import Breaker
from .keys import KEY_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from .backend import Data
    from .counters import Counters

    Result = TypeVar("Result")

PREFIX = b"{kvpack}:"
ENTRY = PREFIX + b"entry:"
_SHARED = [PREFIX + name for name in (b"used", b"sizes", b"bytes", b"pins")]

MAX_ENTRY_BYTES = 512 * 2**20
"""What a string of Redis may have; a longer one is not asked for."""
_BYTES_AT_ONCE = 64 * 2**20

# KEYS in all: used, sizes, bytes, pins. Members of the sets are keys of 32 bytes.
_REMOVE = """
local function remove(key)
    local size = redis.call('HGET', KEYS[2], key)
    redis.call('ZREM', KEYS[1], key)
    if size then
        redis.call('HDEL', KEYS[2], key)
        redis.call('DECRBY', KEYS[3], size)
    end
    return redis.call('DEL', '{kvpack}:entry:' .. key), tonumber(size or 0)
end
"""

_TOUCH = """
local function touch(chain, seconds)
    local clock = redis.call('TIME')
    local now = clock[1] * 1000000 + clock[2]
    for depth = 1, #chain / 32 do
        local key = string.sub(chain, 32 * depth - 31, 32 * depth)
        redis.call('ZADD', KEYS[1], 'XX', 'GT', string.format('%.0f', now - depth), key)
        if seconds ~= '' then redis.call('EXPIRE', '{kvpack}:entry:' .. key, seconds) end
    end
    return now
end
"""

# ARGV: chain, entry, most bytes or '', seconds to live or ''. Returns {stored, entries evicted, their bytes}.
_PUT = (
    _REMOVE
    + _TOUCH
    + """
local chain, size, most = ARGV[1], #ARGV[2], tonumber(ARGV[3])
local key = string.sub(chain, -32)
local name = '{kvpack}:entry:' .. key
if redis.call('EXISTS', name) == 1 then return {2, 0, 0} end
remove(key)
local evicted, bytes = 0, 0
if most then
    local kept = {}
    for at = 1, #chain, 32 do kept[string.sub(chain, at, at + 31)] = true end
    for _, pinned in ipairs(redis.call('HVALS', KEYS[4])) do
        for at = 1, #pinned, 32 do kept[string.sub(pinned, at, at + 31)] = true end
    end
    local first = 0
    while tonumber(redis.call('GET', KEYS[3]) or 0) + size > most do
        local oldest = redis.call('ZRANGE', KEYS[1], first, first)[1]
        if not oldest then return {0, evicted, bytes} end
        if kept[oldest] then
            first = first + 1
        else
            local _, freed = remove(oldest)
            evicted, bytes = evicted + 1, bytes + freed
        end
    end
end
local now = touch(string.sub(chain, 1, -33), ARGV[4])
redis.call('SET', name, ARGV[2])
if ARGV[4] ~= '' then redis.call('EXPIRE', name, ARGV[4]) end
redis.call('ZADD', KEYS[1], string.format('%.0f', now - #chain / 32), key)
redis.call('HSET', KEYS[2], key, size)
redis.call('INCRBY', KEYS[3], size)
return {1, evicted, bytes}
"""
)

# ARGV: chain, seconds to live or ''.
_USE = _TOUCH + "touch(ARGV[1], ARGV[2]) return 1"

# ARGV: keys, one after the other. Returns how many entries there were.
_DELETE = (
    _REMOVE
    + """
local removed = 0
for at = #ARGV[1] - 31, 1, -32 do removed = removed + (remove(string.sub(ARGV[1], at, at + 31))) end
return removed
"""
)

# Forgets entries that have expired. Returns how many there were.
_COLLECT = (
    _REMOVE
    + """
local gone = 0
for _, key in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do
    if redis.call('EXISTS', '{kvpack}:entry:' .. key) == 0 then
        remove(key)
        gone = gone + 1
    end
end
return gone
"""
)


class Redis:
    """Entries on the server at ``url`` (redis://, rediss:// or unix://).

    ``max_bytes`` is a hard budget of their bytes, ``ttl`` the seconds after which an entry that nobody uses goes, ``timeout`` the
    seconds that a request may take. Raises InvalidParameter for a URL that makes no sense and KvpackError without the package redis.
    """

    private = False

    def __init__(
        self, url: str, counters: Counters, *, max_bytes: int | None = None, ttl: int | None = None, timeout: float = 1.0
    ) -> None:
        try:
            import redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ImportError:
            raise KvpackError("a store on Redis needs the package redis: pip install 'kvpack[redis]'") from None
        self._error = redis.RedisError
        self._counters, self._max_bytes, self._ttl = counters, max_bytes, ttl
        self._breaker = Breaker()
        try:
            self._client: Any = redis.Redis.from_url(
                url, socket_timeout=timeout, socket_connect_timeout=timeout, retry=Retry(NoBackoff(), 0), protocol=2
            )
        except ValueError as error:
            raise InvalidParameter(f"the location is no URL of a Redis server: {error}") from None
        self._scripts = {
            name: self._client.register_script(text)
            for name, text in (("put", _PUT), ("touch", _USE), ("delete", _DELETE), ("collect", _COLLECT))
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

    def peek(self, key: bytes) -> Data | None:
        value = self._asked("get", lambda: self._client.get(ENTRY + key), None)
        return None if value is None else bytearray(value)

    def put(self, chain: Sequence[bytes], pieces: Sequence[memoryview], now_ns: int) -> bool:
        data = b"".join(pieces)
        if len(data) > MAX_ENTRY_BYTES:
            self._counters.add("refused_chunks")
            return False
        most = "" if self._max_bytes is None else self._max_bytes
        answer = self._run("put", b"".join(chain), data, most, self._seconds())
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

    def delete(self, keys: Sequence[bytes]) -> int:
        return int(self._run("delete", b"".join(keys)) or 0) if keys else 0

    def list(self) -> Iterator[Stored]:
        used: Sequence[tuple[bytes, float]] = self._asked("list", lambda: self._client.zrange(_SHARED[0], 0, -1, withscores=True), ())
        sizes: Mapping[bytes, bytes] = self._asked("list", lambda: self._client.hgetall(_SHARED[1]), {})
        for key, score in used:
            if len(key) == KEY_BYTES and key in sizes:
                yield Stored(key, int(sizes[key]), int(score) * 1000)

    def size(self) -> tuple[int, int]:
        entries = self._asked("list", lambda: self._client.zcard(_SHARED[0]), 0)
        return entries, int(self._asked("list", lambda: self._client.get(_SHARED[2]), None) or 0)

    def pin(self, keys: Sequence[bytes]) -> bool:
        return self._asked("pin", lambda: self._client.hset(_SHARED[3], keys[-1], b"".join(keys)), None) is not None

    def unpin(self, keys: Sequence[bytes]) -> bool:
        return bool(self._asked("unpin", lambda: self._client.hdel(_SHARED[3], keys[-1]), 0))

    def pinned(self) -> set[bytes]:
        chains: Sequence[bytes] = self._asked("list", lambda: self._client.hvals(_SHARED[3]), ())
        return {chain[at : at + KEY_BYTES] for chain in chains for at in range(0, len(chain), KEY_BYTES)}

    def collect(self) -> None:
        self._run("collect")

    def close(self) -> None:
        self._client.close()

    def _fetched(self, names: Sequence[bytes]) -> Sequence[bytes | None]:
        nothing: Sequence[bytes | None] = ()
        return self._asked("get", lambda: self._client.mget(names), nothing)

    def _leading_sizes(self, keys: Sequence[bytes]) -> Sequence[int]:
        """The sizes of the entries before the first that is not there, asked for before any is fetched."""

        def ask() -> Sequence[int]:
            with self._client.pipeline(transaction=False) as pipeline:
                for key in keys:
                    pipeline.strlen(ENTRY + key)
                sizes: Sequence[int] = pipeline.execute()
            return sizes

        nothing: Sequence[int] = ()
        sizes = self._asked("match", ask, nothing) if keys else nothing
        missing = next((number for number, size in enumerate(sizes) if not 0 < size <= MAX_ENTRY_BYTES), len(sizes))
        return sizes[:missing]

    def _run(self, script: str, *arguments: Any) -> Any:
        return self._asked(script, lambda: self._scripts[script](keys=_SHARED, args=arguments), None)

    def _seconds(self) -> int | str:
        return "" if self._ttl is None else self._ttl

    def _asked(self, operation: str, ask: Callable[[], Result], otherwise: Result) -> Result:
        """What the server answers, or ``otherwise`` when it does not, or rests after it did not."""
        if not self._breaker.allows():
            self._counters.fault(operation, Resting("the server has not answered, and is left alone for a while"))
            return otherwise
        try:
            answer = ask()
        except (self._error, OSError) as error:
            self._breaker.failed()
            self._counters.fault(operation, error)
            return otherwise
        self._breaker.succeeded()
        return answer


class Resting(Exception):
    """Nothing was asked."""


def is_redis(location: str | os.PathLike[str]) -> bool:
    """Whether a location is the URL of a Redis server."""
    return isinstance(location, str) and location.startswith(("redis://", "rediss://", "unix://"))
