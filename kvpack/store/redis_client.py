"""A client for a Redis server. It pipelines requests, calls scripts by digest, checks each reply, and limits its size and duration.

The limits apply even if the server sends only one byte from time to time.
"""

from __future__ import annotations

import hashlib
import re
import time
import warnings
import weakref
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

from kvpack.formats.errors import InvalidParameter, KvpackWarning, MissingPackage

from .breaker import CircuitBreaker, RequestGuard
from .entry_kind import FRONT_BYTES
from .options import check_seconds
from .redis_page_scripts import DESCRIBE, MISSING, RECOUNT, SUM, TOTALS
from .redis_replies import (
    check_integer,
    check_keys,
    check_sum_progress,
    check_two_integers,
    make_fronts_check,
    make_integers_check,
    make_put_results_check,
    parse_count_page,
    parse_entry_page,
    parse_totals,
)
from .redis_scripts import DELETE, FRONTS, KEYS, LIST, PIN, PUT, RELEASE, ROOM, SIZE, USE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .counters import Counters

    Command = tuple[Callable[[Any], Any], *tuple[Any, ...]]
    Call = Sequence[Any]


_SCRIPTS = {
    **{"put": PUT, "room": ROOM, "touch": USE, "delete": DELETE, "fronts": FRONTS, "list": LIST},
    **{"size": SIZE, "count": RECOUNT, "sum": SUM, "pin": PIN, "release": RELEASE},
    **{"totals": TOTALS, "missing": MISSING, "describe": DESCRIBE},
}
FRONTS_BYTES = 64 * 1024
"""Maximum number of bytes of an entry in a reply from the script that returns fronts. Most headers are smaller."""
_REPLY_CHECKS: dict[str, Callable[[Any], Any]] = {
    "put": make_put_results_check(FRONT_BYTES),
    "room": make_integers_check(4),
    "touch": check_integer,
    "delete": check_keys,
    "fronts": make_fronts_check(FRONTS_BYTES),
    "list": parse_entry_page,
    "size": check_two_integers,
    "count": parse_count_page,
    "sum": check_sum_progress,
    "pin": check_integer,
    "release": check_integer,
    "totals": parse_totals,
    "missing": parse_entry_page,
    "describe": check_integer,
}
"""The function that checks each script's reply."""
_OTHER_PROTOCOL = re.compile(r"""(Protocol Error: b?|[Pp]rotocol error, got )['"][A-Za-z0-9<\\]""")
"""Pattern of redis-py's message for a reply that is not valid Redis and begins like HTTP, TLS, SSH or memcached."""
_UNKNOWN_OPTION = re.compile(r"unexpected keyword argument '(.*)'", re.DOTALL)
"""Pattern of the end of Python's message for a keyword argument that a connection class does not accept."""
_FIXED_OPTIONS = {"decode_responses": False, "encoding": "utf-8", "encoding_errors": "strict", "protocol": 2}
"""URL options that change how replies are parsed, with the only supported value of each."""
_URL_OPTIONS = {
    *("client_name", "db", "health_check_interval", "lib_name", "lib_version", "max_connections", "password", "retry_on_timeout"),
    *("socket_connect_timeout", "socket_keepalive", "socket_timeout", "ssl_ca_certs", "ssl_ca_data", "ssl_ca_path", "ssl_cert_reqs"),
    *("ssl_certfile", "ssl_check_hostname", "ssl_ciphers", "ssl_keyfile", "ssl_password", "username"),
}
"""Options that a URL may contain. redis-py accepts others, but their values are Python objects, so text would fail later."""
_DATABASE = re.compile(r"/?[0-9]*")
"""Pattern of the path of a URL. redis-py would interpret any other path as database 0."""
_UNKNOWN_COMMAND = "unknown command"
"""Beginning of the error message of a server that does not support a command."""
_CALLER_STACK_LEVEL = 8
"""Number of stack frames between the warning and the caller that opens a store."""
BYTES_PER_SECOND = 2**20
"""Number of bytes in a request and its reply that extend the timeout by one second."""
_ANSWER_TYPES = b"+-:$*"
"""Possible first bytes of a reply in protocol version 2."""
_MAX_LINE_BYTES = 2**16
"""Maximum size, in bytes, of a reply's first line, which is a status, an error, a number or a size."""
_SHOWN_BYTES = 40


class RedisClient:
    """A client for the server at ``url``.

    ``max_bytes`` limits the size of a reply, and ``timeout`` is the number of seconds for a request. ``uses_ttl`` is True if entries
    expire. Some servers evict such entries first. If the server fails, methods do not raise, but count a fault. The constructor raises
    InvalidParameter if the URL is invalid or the server does not speak the Redis protocol, and MissingPackage if the redis package is not
    installed.
    """

    def __init__(self, url: str, counters: Counters, timeout: float, max_bytes: int, *, uses_ttl: bool) -> None:
        try:
            import redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ImportError:
            raise MissingPackage("stores on Redis need the redis package: pip install 'kvpack[redis]'") from None
        self._counters = counters
        self.breaker = CircuitBreaker()
        # If the server is not Redis, the client may raise any error.
        self._guard = RequestGuard(self.breaker, counters, (Exception,), (redis.ResponseError, MemoryError))
        _check_url(url)
        try:
            self._client: Any = redis.Redis.from_url(
                url, socket_timeout=timeout, socket_connect_timeout=timeout, retry=Retry(NoBackoff(), 0), protocol=2
            )
            pool = self._client.connection_pool
            # Create a connection without opening it, which raises an error for unknown options and for values of other types.
            pool.connection_class(**pool.connection_kwargs)
        except TypeError as error:
            if (unknown := _UNKNOWN_OPTION.search(str(error))) is None:
                raise InvalidParameter(f"the location is not the URL of a Redis server: {error}") from None
            raise InvalidParameter(
                f"the Redis URL sets {unknown[1]!r:.60}, which is not a connection option: remove it"
            ) from None
        except (ValueError, redis.RedisError) as error:
            raise InvalidParameter(f"the location is not the URL of a Redis server: {error}") from None
        for name in ("socket_timeout", "socket_connect_timeout"):
            check_seconds(f"{name} of the location", pool.connection_kwargs[name])
        for name, needed in _FIXED_OPTIONS.items():
            if (given := pool.connection_kwargs.get(name, needed)) != needed:
                raise InvalidParameter(f"the Redis URL sets {name} to {given!r:.40}, but kvpack needs {needed!r}: remove it from the URL")
        pool.connection_class = limit_connection(pool.connection_class, max_bytes)
        # A store that is dropped unclosed releases its sockets before the garbage collector finds them.
        self.close = weakref.finalize(self, self._client.close)
        self._digests = {name: hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest() for name, text in _SCRIPTS.items()}
        self._no_script = redis.exceptions.NoScriptError
        self._check_server(uses_ttl)

    def send(self, operation: str, *command: Any, check: Callable[[Any], Any], default: Any = None) -> Any:
        """Send one command, check the reply with ``check``, and return its result. Returns ``default`` after a fault."""
        return self._guard.request(operation, lambda: check(self._client.execute_command(*command)), default)

    def send_all(self, operation: str, commands: Sequence[Command]) -> Sequence[Any]:
        """Send commands in one request and return the server's replies. Returns an empty list if the server does not reply.

        The first element of each command is the function that checks its reply. A reply is None if the server rejects the command, for
        example because a key has the wrong type.
        """
        return self._count_faults(operation, self._send_pipeline(operation, commands))

    def call(self, script: str, *arguments: Any) -> Any:
        """Call one script and return the checked reply. Returns None after a fault."""
        return next(iter(self.call_each(script, [(script, *arguments)])), None)

    def call_each(self, operation: str, calls: Sequence[Call]) -> Sequence[Any]:
        """Call scripts in one request, or in two if the server has not cached all of them yet. Returns the replies as ``send_all`` does.

        A call consists of a script's name and arguments.
        """
        commands: list[Command] = [
            (_REPLY_CHECKS[script], "EVALSHA", self._digests[script], len(KEYS), *KEYS, *arguments) for script, *arguments in calls
        ]
        replies = list(self._send_pipeline(operation, commands))
        unknown = [number for number, reply in enumerate(replies) if isinstance(reply, self._no_script)]
        if unknown:
            scripts = sorted({calls[number][0] for number in unknown})
            loads: list[Command] = [(lambda reply: reply, "SCRIPT LOAD", _SCRIPTS[script]) for script in scripts]
            retried = self._send_pipeline(operation, [*loads, *(commands[number] for number in unknown)])
            for number, reply in zip(unknown, retried[len(loads) :], strict=False):
                replies[number] = reply
        return self._count_faults(operation, replies)

    def _send_pipeline(self, operation: str, commands: Sequence[Command]) -> Sequence[Any]:
        def send() -> Sequence[Any]:
            with self._client.pipeline(transaction=False) as pipeline:
                for _, *command in commands:
                    pipeline.execute_command(*command)
                replies = pipeline.execute(raise_on_error=False)
            checks = [check for check, *_ in commands]
            return [reply if isinstance(reply, Exception) else check(reply) for check, reply in zip(checks, replies, strict=True)]

        nothing: Sequence[Any] = ()
        return self._guard.request(operation, send, nothing) if commands else nothing

    def _count_faults(self, operation: str, replies: Sequence[Any]) -> Sequence[Any]:
        for error in replies:
            if isinstance(error, Exception):
                self._counters.fault(operation, error)
        return [None if isinstance(reply, Exception) else reply for reply in replies]

    def _check_server(self, uses_ttl: bool) -> None:
        """Load the scripts, and warn if the server evicts entries on its own. Does nothing if the server does not answer.

        Raises InvalidParameter if the server does not speak the Redis protocol, or rejects the user or database in the URL.
        """
        import redis

        commands = [("PING",), ("INFO", "memory"), ("EXISTS", KEYS[0]), *(("SCRIPT LOAD", text) for text in _SCRIPTS.values())]
        try:
            with self._client.pipeline(transaction=False) as pipeline:
                for command in commands:
                    pipeline.execute_command(*command)
                _, memory, *refusals = pipeline.execute(raise_on_error=False)
            _check_not_refused(refusals)
            policy = str(memory.get("maxmemory_policy", ""))
        except redis.InvalidResponse as error:
            if _OTHER_PROTOCOL.search(str(error)):
                raise InvalidParameter(
                    f"the server at the location is not Redis: it answers with {str(error)!r:.100}; check the host and the port"
                ) from None
            return
        except (redis.AuthenticationError, redis.ResponseError) as error:
            # If the server refuses the commands that open a connection, no later call can work. Error replies to other commands are not
            # raised.
            raise InvalidParameter(
                f"the Redis server refuses the user, the password or the database of the location: {str(error)!r:.100}; check the URL"
            ) from None
        except InvalidParameter:
            raise
        except Exception:
            return
        if policy.startswith("allkeys-") or (uses_ttl and policy.startswith("volatile-")):
            text = (
                f"the Redis server has maxmemory-policy {policy[:40]}: it removes entries by itself, regardless of prefixes, so "
                "saved tokens may not be found. Set the policy to noeviction, and give the store max_bytes"
            )
            warnings.warn(text, KvpackWarning, stacklevel=_CALLER_STACK_LEVEL)


def _check_url(url: str) -> None:
    """Raise InvalidParameter if the URL has an unsupported option, or a path that is neither a database nor a socket."""
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise InvalidParameter(f"the location is not the URL of a Redis server: {error}") from None
    if parts.scheme != "unix" and "@" in parts.path + parts.fragment + parts.query.partition("=")[0]:
        # Do not show the rest of a password.
        raise InvalidParameter("the user or the password of the location contains '/', '?' or '#': write %2F, %3F or %23 instead")
    for name in parse_qs(parts.query):
        if name not in _URL_OPTIONS and name not in _FIXED_OPTIONS:
            raise InvalidParameter(f"the Redis URL sets {name!r:.60}, which is not a connection option: remove it")
    if parts.scheme == "unix":
        if not parts.path:
            raise InvalidParameter("the location has no socket path, expected unix:///path/of/socket")
    elif not _DATABASE.fullmatch(parts.path):
        raise InvalidParameter(f"the path of the location is {parts.path!r:.60}, expected the number of a database, such as /0")


def _check_not_refused(replies: Sequence[Any]) -> None:
    """Raise InvalidParameter if no request can succeed: the server or its user lacks a command, or another node has the keys."""
    from redis.exceptions import MovedError, NoPermissionError

    for reply in replies:
        if isinstance(reply, MovedError):
            host, port = reply.node_addr
            raise InvalidParameter(
                f"the location is a node of a Redis Cluster, but kvpack's keys are on the node {host}:{port}: use that node, or a server "
                "outside of a cluster"
            )
        if isinstance(reply, NoPermissionError) or str(reply).startswith(_UNKNOWN_COMMAND):
            raise InvalidParameter(
                f"the server at the location refuses commands that a store needs: {str(reply)!r:.100}; use a Redis or Valkey server, and "
                "a user that may run scripts and access the keys {kvpack}:*"
            )


def limit_connection(connection: type[Any], max_bytes: int) -> type[Any]:
    """Return a subclass of the redis-py class ``connection`` that limits the duration of requests and the size of replies."""

    class LimitedConnection(connection):  # type: ignore[misc]
        def _connect(self) -> Any:
            self._exchange = _LimitedSocket(super()._connect(), self.socket_timeout, max_bytes)
            return self._exchange

        def send_packed_command(self, command: Any, *args: Any, **options: Any) -> Any:
            if self._sock is not None:
                self._exchange.begin()
            return super().send_packed_command(command, *args, **options)

    return LimitedConnection


class _LimitedSocket:
    """A socket that raises an error if a request and its reply take more than ``seconds``, or if the reply exceeds ``max_bytes``.

    Each MiB sent or received extends the time limit by one second.
    """

    def __init__(self, socket: Any, seconds: float | None, max_bytes: int) -> None:
        self._socket, self._seconds, self._max_bytes = socket, seconds, max_bytes
        self.begin()

    def begin(self) -> None:
        self._start, self._sent, self._received = time.monotonic(), 0, 0
        self._is_in_first_line = True
        self._socket.settimeout(self._seconds)

    def sendall(self, data: Any, *flags: Any) -> None:
        """Send ``data`` as ``socket.sendall`` does, but with one time limit for the whole request."""
        view = memoryview(data).cast("B")
        while len(view):
            self._apply_deadline(f"a request, of which {self._sent} bytes were sent,")
            count = self._socket.send(view, *flags)
            self._sent += count
            view = view[count:]

    def recv(self, count: int, *flags: Any) -> bytes:
        """Receive bytes as ``socket.recv`` does, within the limits. Raises TimeoutError, InvalidResponse, or OSError for too many bytes."""
        # With a timeout of 0, the client only checks whether an idle connection has something to read.
        if self._socket.gettimeout() != 0:
            self._apply_deadline(f"a reply, of which {self._received} bytes were received,")
        data: bytes = self._socket.recv(count, *flags)
        if self._is_in_first_line and data:
            self._check_first_line(data)
        self._received += len(data)
        if self._received > self._max_bytes:
            raise OSError(f"the reply is larger than {self._max_bytes} bytes")
        return data

    def _check_first_line(self, data: bytes) -> None:
        """Raise InvalidResponse if the reply is in another protocol. Its first line might never end and so block the client."""
        from redis.exceptions import InvalidResponse

        if not self._received and data[0] not in _ANSWER_TYPES:
            raise InvalidResponse(f"Protocol Error: {data[:_SHOWN_BYTES]!r}")
        self._is_in_first_line = b"\n" not in data
        if self._is_in_first_line and self._received + len(data) > _MAX_LINE_BYTES:
            raise InvalidResponse(f"Protocol Error: 'a line of more than {_MAX_LINE_BYTES} bytes'")

    def _apply_deadline(self, description: str) -> None:
        """Set the socket's timeout to the remaining time. Raises TimeoutError with ``description`` in the message if no time remains."""
        if self._seconds is not None:
            remaining = self._start + self._seconds + (self._sent + self._received) / BYTES_PER_SECOND - time.monotonic()
            if remaining <= 0:
                raise TimeoutError(f"{description} took more than {self._seconds} s")
            self._socket.settimeout(min(remaining, self._seconds))

    def recv_into(self, buffer: Any, *args: Any) -> int:
        """Receive bytes into ``buffer`` as ``socket.recv_into`` does. Raises the same errors as ``recv``."""
        room = memoryview(buffer).cast("B")
        data = self.recv(min(len(room), args[0]) if args and args[0] else len(room), *args[1:])
        room[: len(data)] = data
        return len(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)
