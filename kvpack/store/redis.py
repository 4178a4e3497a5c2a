"""The backend for Redis and Valkey: entries are strings on a server, and scripts on the server evict them.

    {kvpack}:entry:<key>   an entry's bytes
    {kvpack}:used          a sorted set by key: its last use in microseconds of the server's clock, less one for each ancestor
    {kvpack}:sizes         a hash by key: its size in bytes
    {kvpack}:bytes         the sum of the sizes
    {kvpack}:pins          a hash of pinned chains: all keys of a chain by its last key

The braces keep all of them on one node of a cluster. Only the entries are authoritative: if the rest is lost or inconsistent,
it is counted again from a scan of the server's names before anything is put.
"""

from __future__ import annotations

import dataclasses
import os
import re
import time
import weakref
from typing import TYPE_CHECKING, Any

from kvpack.file.json_header import front_bytes
from kvpack.formats.errors import InvalidParameter, LimitExceeded, MissingPackage
from kvpack.runtime.locks import Lock

from .backend import MAX_ENTRY_BYTES, OneTier, Stored
from .breaker import Breaker, Guard
from .forms import FRONT_BYTES, PLAIN, Kind, check_size
from .keys import KEY_BYTES
from .redis_answers import data, data_list, flat, integer, integers, member_list, numbers, scanned, stored
from .redis_limits import limited
from .redis_scripts import COLLECT, DELETE, LOOK, PUT, RECOUNT, SIZE, USE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from .backend import Data, Found
    from .counters import Counters
    from .forms import Form

SCHEMES = ("redis://", "rediss://", "unix://")
PREFIX = b"{kvpack}:"
ENTRY = PREFIX + b"entry:"
_SHARED = [PREFIX + name for name in (b"used", b"sizes", b"bytes", b"pins")]

_FRONT_BYTES = 64 * 1024
"""Larger than the header of most entries."""
_BYTES_AT_ONCE = 64 * 2**20
_NAMES_AT_ONCE = 1000
RECOUNT_SECONDS = 600.0
"""The age at which the sum of the sizes is counted again to keep the budget: any user of the server may have changed it."""
SCAN_SECONDS = 5.0
"""How long one put scans the names of a server whose count is lost; the next put continues the scan."""
_MAX_PAGES = 2**20
"""The most pages of a scan: a server of a billion names has no more."""

_ANSWERS = {"put": stored, "touch": integer, "delete": member_list, "list": flat, "size": numbers, "count": integer, "collect": integers(2)}
"""The check of each script's answer."""
_OTHER_PROTOCOL = re.compile(r"""(Protocol Error: b?|[Pp]rotocol error, got )['"][A-Za-z0-9<\\]""")
"""What redis-py says of an answer that begins as those of HTTP, TLS, SSH and memcached do, and none of Redis."""


_FIXED_OPTIONS = {"decode_responses": False, "encoding": "utf-8", "encoding_errors": "strict", "protocol": 2}
"""Options of a URL that change what answers are."""
_SPARE_BYTES = 2**20
"""What an answer takes besides entries."""

if TYPE_CHECKING:
    _Command = tuple[Callable[[Any], Any], *tuple[Any, ...]]


class Redis(OneTier):
    """Entries on the server at ``url`` (redis://, rediss:// or unix://).

    ``max_bytes`` is a hard budget for their bytes, ``ttl`` the seconds after which an unused entry expires, ``timeout`` the most
    seconds per request, and one more for each MiB of the answer. Raises InvalidParameter for an invalid URL and for a server of
    another protocol, and KvpackError without the package redis.
    """

    private = False
    puts_at_once = 1

    def __init__(
        self,
        url: str,
        counters: Counters,
        form: Form = PLAIN,
        *,
        max_bytes: int | None = None,
        ttl: int | None = None,
        timeout: float = 1.0,
    ) -> None:
        try:
            import redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ImportError:
            raise MissingPackage("a store on Redis needs the package redis: pip install 'kvpack[redis]'") from None
        self._counters, self._max_bytes, self._ttl = counters, max_bytes, ttl
        self._form = dataclasses.replace(form, max_bytes=min(form.max_bytes, MAX_ENTRY_BYTES))
        self._lock = Lock()
        self._summed: float | None = None
        self._cursor = 0
        self._breaker = Breaker()
        # A server that is not Redis makes the client raise anything.
        self._guard = Guard(self._breaker, counters, (Exception,), (redis.ResponseError, MemoryError))
        try:
            self._client: Any = redis.Redis.from_url(
                url, socket_timeout=timeout, socket_connect_timeout=timeout, retry=Retry(NoBackoff(), 0), protocol=2
            )
            pool = self._client.connection_pool
            # A connection that is not opened: options that there are not, and values of other types.
            pool.connection_class(**pool.connection_kwargs)
        except (ValueError, TypeError, redis.RedisError) as error:
            raise InvalidParameter(f"the location is not the URL of a Redis server: {error}") from None
        for name, needed in _FIXED_OPTIONS.items():
            if (given := pool.connection_kwargs.get(name, needed)) != needed:
                raise InvalidParameter(f"the location sets {name} to {given!r:.40}, and kvpack needs {needed!r}: leave it out of the URL")
        pool.connection_class = limited(pool.connection_class, self._form.max_bytes + _BYTES_AT_ONCE + _SPARE_BYTES)
        # A store that is dropped unclosed releases its sockets before the garbage collector finds them.
        self._close = weakref.finalize(self, self._client.close)
        scripts = {"put": PUT, "touch": USE, "delete": DELETE, "list": LOOK, "size": SIZE, "count": RECOUNT, "collect": COLLECT}
        self._scripts = {name: self._client.register_script(text) for name, text in scripts.items()}
        self._check_protocol()

    def present(self, keys: Sequence[bytes]) -> int:
        commands: list[_Command] = []
        for key in keys:
            commands += [(integer, "STRLEN", ENTRY + key), (data(FRONT_BYTES), "GETRANGE", ENTRY + key, 0, FRONT_BYTES - 1)]
        answers = self._asked("match", commands)
        kinds = [self._form.kind(front or b"", size or 0) for size, front in zip(answers[::2], answers[1::2], strict=True)]
        return next((number for number, kind in enumerate(kinds) if kind is not Kind.READABLE), len(kinds))

    def get(self, keys: Sequence[bytes]) -> list[Data]:
        # Sizes come first: nothing larger than the limit for entries is fetched.
        sizes = [size or 0 for size in self._asked("match", [(integer, "STRLEN", ENTRY + key) for key in keys])]
        missing = next((number for number, size in enumerate(sizes) if not self._takes(keys[number], size)), len(sizes))
        found: list[Data] = []
        while len(found) < missing:
            # As many entries as fit in one answer, at least one.
            stop, total = len(found) + 1, sizes[len(found)]
            while stop < missing and total + sizes[stop] <= _BYTES_AT_ONCE:
                total += sizes[stop]
                stop += 1
            whole = self._fetched(keys[len(found) : stop], sizes[len(found) : stop])
            found += whole
            if len(found) < stop:
                break
        return found

    def peek(self, key: bytes, *, front: bool = False) -> Data | None:
        name = ENTRY + key
        size = self._guard.ask("get", lambda: integer(self._client.strlen(name)), 0)
        if not self._takes(key, size):
            return None
        if not front or size <= _FRONT_BYTES:
            return next(iter(self._fetched([key], [size])), None)
        return self._guard.ask("get", lambda: self._front(name, size), None)

    def put(self, chain: Sequence[bytes], pieces: Sequence[memoryview], now_ns: int) -> bool:
        size = sum(map(len, pieces))
        if size > self._form.max_bytes:
            self._counters.add("refused_chunks")
            return False
        entry = b"".join(pieces)
        answer = self._put(chain, entry)
        if answer is not None and answer[0] == -1:
            answer = self._put(chain, entry) if self._recounted() else None
        if answer is not None and answer[0] == 2:
            kind = self._form.kind(answer[1], answer[2])
            if kind is Kind.READABLE:
                return True
            answer = self._put(chain, entry, replace=True) if kind is Kind.JUNK else (0, 0, 0)
        if answer is None or answer[0] == -1:
            return False
        stored, evicted, freed = answer
        self._counters.add("evicted_entries", evicted)
        self._counters.add("evicted_bytes", freed)
        self._counters.add("refused_chunks", stored == 0)
        if stored == 1:
            self._counters.add("saved_chunks")
            self._counters.add("saved_bytes", size)
        return bool(stored)

    def touch(self, chain: Sequence[bytes], now_ns: int) -> None:
        # By the server's clock: its users' clocks may differ.
        if chain:
            self._run("touch", b"".join(chain), self._seconds())

    def delete(self, keys: Sequence[bytes]) -> set[bytes]:
        return set(self._run("delete", b"".join(keys)) or ()) if keys else set()

    def discard(self, key: bytes, found: Found) -> None:
        self.delete([key])

    def list(self) -> Iterator[Stored]:
        listed: set[bytes] = set()
        cursor = None
        for _ in range(_MAX_PAGES):
            page = None if cursor == 0 else self._page("list", cursor or 0)
            if page is None:
                break
            cursor, keys = page
            # A scan may return a name twice.
            new = [key for key in dict.fromkeys(keys) if key not in listed]
            listed.update(new)
            found = self._run("list", b"".join(new)) or () if new else ()
            for key, size, used in zip(new, found[::2], found[1::2], strict=False):
                yield Stored(key, int(size), int(used) * 1000 if 0 < used < 2**53 else 0)

    def size(self) -> tuple[int, int]:
        answer = self._run("size")
        if answer is not None and answer[0] == -1:
            sizes = [entry.size for entry in self.list()]
            return len(sizes), sum(sizes)
        return (0, 0) if answer is None else (answer[0], answer[1])

    def pin(self, keys: Sequence[bytes]) -> bool:
        return self._guard.ask("pin", lambda: integer(self._client.hset(_SHARED[3], keys[-1], b"".join(keys))), None) is not None

    def unpin(self, keys: Sequence[bytes]) -> bool:
        return bool(self._guard.ask("unpin", lambda: integer(self._client.hdel(_SHARED[3], keys[-1])), 0))

    def pinned(self) -> set[bytes]:
        chains: Sequence[bytes] = self._guard.ask("list", lambda: data_list(self._client.hvals(_SHARED[3])), ())
        return {chain[at : at + KEY_BYTES] for chain in chains for at in range(0, len(chain), KEY_BYTES)}

    def collect(self) -> None:
        """Count the entries by the server's names, and evict entries above the budget."""
        with self._lock:
            self._cursor = 0
        for _ in range(_MAX_PAGES):
            if self._recounted() or not self._cursor:
                break

    def close(self) -> None:
        self._close()

    def _put(self, chain: Sequence[bytes], entry: bytes, *, replace: bool = False) -> Any:
        due = self._summed is None or time.monotonic() - self._summed > RECOUNT_SECONDS
        if due:
            self._summed = time.monotonic()
        return self._run("put", b"".join(chain), entry, self._most(), self._seconds(), int(replace), FRONT_BYTES, int(due))

    def _recounted(self) -> bool:
        """Count all entries again, then evict; False if the server does not answer or has too many names for the time allowed."""
        deadline = time.monotonic() + SCAN_SECONDS
        with self._lock:
            if not self._cursor and self._run("count", b"") is None:
                return False
            while True:
                page = self._page("count", self._cursor)
                self._cursor, keys = page or (0, ())
                if page is None or (keys and self._run("count", b"".join(keys)) is None):
                    return False
                if not self._cursor:
                    break
                if time.monotonic() > deadline:
                    self._counters.fault("count", TimeoutError(f"the server has more keys than can be scanned in {SCAN_SECONDS} s"))
                    return False
            answer = self._run("collect", self._most())
        if answer is None:
            return False
        self._counters.add("evicted_entries", answer[0])
        self._counters.add("evicted_bytes", answer[1])
        return True

    def _takes(self, key: bytes, size: int) -> bool:
        """Whether there is an entry, within the limit for entries."""
        try:
            check_size(f"entry {key.hex()}", size, self._form.max_bytes)
        except LimitExceeded as error:
            self._counters.fault("get", error)
            return False
        return size > 0

    def _page(self, operation: str, cursor: int) -> tuple[int, Sequence[bytes]] | None:
        """One page of a scan from ``cursor`` on: the next cursor, 0 at the end, and keys of entries."""

        def ask() -> tuple[int, Sequence[bytes]]:
            return scanned(self._client.scan(cursor, match=ENTRY + b"*", count=_NAMES_AT_ONCE), cursor)

        answer = self._guard.ask(operation, ask, None)
        if answer is None:
            return None
        return answer[0], [name[len(ENTRY) :] for name in answer[1] if len(name) == len(ENTRY) + KEY_BYTES]

    def _asked(self, operation: str, commands: Sequence[_Command]) -> Sequence[Any]:
        """The server's answers, None for a refused command, such as one for an entry of another type; [] if the server does not answer.

        Each command comes after the check of its answer.
        """

        def ask() -> Sequence[Any]:
            with self._client.pipeline(transaction=False) as pipeline:
                for _, *command in commands:
                    pipeline.execute_command(*command)
                answers = pipeline.execute(raise_on_error=False)
            checks = [check for check, *_ in commands]
            return [one if isinstance(one, Exception) else check(one) for check, one in zip(checks, answers, strict=True)]

        nothing: Sequence[Any] = ()
        answers = self._guard.ask(operation, ask, nothing) if commands else nothing
        for error in answers:
            if isinstance(error, Exception):
                self._counters.fault(operation, error)
        return [None if isinstance(answer, Exception) else answer for answer in answers]

    def _fetched(self, keys: Sequence[bytes], sizes: Sequence[int]) -> Sequence[bytearray]:
        """The bytes of entries up to the first whose size has changed; never more than ``sizes`` are fetched."""

        def ask() -> Sequence[bytearray]:
            found = []
            pairs = zip(keys, sizes, strict=True)
            values = self._asked("get", [(data(size), "GETRANGE", ENTRY + key, 0, size - 1) for key, size in pairs])
            for value, size in zip(values, sizes, strict=False):
                if value is None or len(value) != size:
                    break
                found.append(bytearray(value))
            return found

        nothing: Sequence[bytearray] = ()
        return self._guard.ask("get", ask, nothing)

    def _front(self, name: bytes, size: int) -> bytearray | None:
        """An entry of ``size`` bytes; those after the header are zeros, which take no memory."""
        beginning = data(_FRONT_BYTES)(self._client.getrange(name, 0, _FRONT_BYTES - 1))
        entry = bytearray(size)
        end = min(size, front_bytes(beginning) or size)
        rest = data(end)(self._client.getrange(name, len(beginning), end - 1)) if end > len(beginning) else b""
        if not end <= len(beginning) + len(rest) <= size:
            return None
        entry[: len(beginning)] = beginning
        entry[len(beginning) : len(beginning) + len(rest)] = rest
        return entry

    def _run(self, script: str, *arguments: Any) -> Any:
        return self._guard.ask(script, lambda: _ANSWERS[script](self._scripts[script](keys=_SHARED, args=arguments)), None)

    def _check_protocol(self) -> None:
        """Raise InvalidParameter if the server speaks another protocol. One that does not answer now may answer later."""
        import redis

        try:
            self._client.ping()
        except redis.InvalidResponse as error:
            if _OTHER_PROTOCOL.search(str(error)):
                raise InvalidParameter(
                    f"the server at the location is not Redis: it answers with {str(error)!r:.100}; check the host and the port"
                ) from None
        except Exception:
            return

    def _most(self) -> int | str:
        return "" if self._max_bytes is None else self._max_bytes

    def _seconds(self) -> int | str:
        return "" if self._ttl is None else self._ttl


def is_redis(location: str | os.PathLike[str]) -> bool:
    """Whether a location is the URL of a Redis server."""
    return isinstance(location, str) and location.startswith(SCHEMES)
