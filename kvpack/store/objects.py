"""Access to the objects of an object store through the obstore package, with a timeout and without retries.

An operation is one request, or a few concurrent requests for ranges of an object.
"""

from __future__ import annotations

import datetime
import os
import re
from typing import TYPE_CHECKING, Any

from kvpack.file.front import front_bytes
from kvpack.formats.errors import InvalidParameter, LimitExceeded, MissingPackage
from kvpack.runtime.threads import in_parallel

from .entry_kind import FRONT_BYTES, check_size
from .redaction import redacted_location

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .backend import Data

SCHEMES = ("s3://", "s3a://", "gs://", "az://", "azure://", "adl://", "abfs://", "abfss://")
PART_BYTES = 8 * 2**20
"""Size in bytes of the parts in which a larger object is fetched concurrently."""
_PARTS_AT_ONCE = 8
_CLIENT_SETTINGS = {
    *("allow_http", "allow_invalid_certificates", "connect_timeout", "default_headers", "http1_only", "http2_only", "pool_idle_timeout"),
    *("proxy_ca_certificate", "proxy_excludes", "proxy_url", "randomize_addresses", "read_timeout", "root_certificate", "timeout"),
    "user_agent",
}
"""Settings that obstore expects as client options instead of configuration."""
_FRONT_BYTES = 64 * 1024
"""Number of bytes fetched as an object's front. This is larger than the header of most entries."""
_NO_OBJECT = f"0/0/{bytes(32).hex()}"
"""Name of an object that cannot exist, because its key is not a digest."""
_CODE = re.compile(r"<Code>(\w+)</Code>|(redirect without LOCATION)")
_REFUSALS = {
    **dict.fromkeys(("NoSuchBucket", "InvalidBucketName", "ContainerNotFound"), "that the bucket exists, and its name"),
    **dict.fromkeys(("InvalidAccessKeyId", "SignatureDoesNotMatch", "AuthenticationFailed"), "the access key and its secret"),
    **dict.fromkeys(("ExpiredToken", "InvalidToken", "TokenRefreshRequired"), "the session token, which may have expired"),
    **dict.fromkeys(("AuthorizationHeaderMalformed", "redirect without LOCATION"), "the region of the bucket"),
}
"""Conditions to check, by error code, after errors that every request to S3, Google Cloud Storage or Azure would cause."""


class Objects:
    """A client for the objects at ``location``, a URL or an object of ``obstore.store``. Objects above ``max_bytes`` are never fetched.

    Methods raise only ``errors``. Some of these, the ``refusals``, may also come from a working service. The constructor raises
    InvalidParameter if the URL or ``storage_options`` are invalid, the bucket does not exist, or the service rejects the access key. It
    raises MissingPackage if the obstore package is not installed.
    """

    def __init__(self, location: Any, max_bytes: int, timeout: float, storage_options: Mapping[str, Any] | None) -> None:
        try:
            import obstore
        except ImportError:
            raise MissingPackage("stores on object storage need the obstore package: pip install 'kvpack[object-store]'") from None
        self._obstore: Any = obstore
        self._max_bytes = max_bytes
        known = obstore.exceptions
        self.errors = (known.BaseError, OSError, MemoryError, LimitExceeded, Forked)
        answers = (known.PermissionDeniedError, known.UnauthenticatedError, known.NotSupportedError, FileNotFoundError)
        self.refusals: tuple[type[BaseException], ...] = (*answers, MemoryError, LimitExceeded, Forked)
        self._base_error = known.BaseError
        self._already_exists_error, self._precondition_error = known.AlreadyExistsError, known.PreconditionError
        if not isinstance(location, str) and storage_options:
            raise InvalidParameter("storage_options works only with URLs: set the options of an obstore object when you create it")
        self._store = _open_url(location, timeout, storage_options) if isinstance(location, str) else location
        self._pid = os.getpid()
        self._check_not_refused()

    def _check_not_refused(self) -> None:
        """Raise InvalidParameter if the service rejects a request for a reason that applies to every request.

        Does nothing if the service does not answer.
        """
        try:
            # Every user who may read entries may make this request. Without permission to list, the reply for a missing object is
            # "forbidden" instead of "not found".
            self._read_beginning(_NO_OBJECT, 1)
        except (*self.errors, ValueError) as error:
            if what := _REFUSALS.get(code := _error_code(error)):
                raise InvalidParameter(f"the object store refuses the location with {code}: check {what}") from None

    def size(self, name: str) -> int | None:
        """Return the size of an object in bytes, or None if it does not exist."""
        self._check_process()
        try:
            return int(self._obstore.head(self._store, name)["size"])
        except FileNotFoundError:
            return None

    def list_objects(self, prefix: str) -> list[tuple[str, int, int]]:
        """Return (name, size in bytes, time of the put in nanoseconds) for each object in the folder ``prefix``."""
        self._check_process()
        return [
            (meta["path"], meta["size"], int(meta["last_modified"].timestamp() * 10**9))
            for batch in self._obstore.list(self._store, prefix)
            for meta in batch
        ]

    def read(self, name: str, max_bytes: int | None = None) -> Data | None:
        """Return an object's bytes, or None if it does not exist.

        Raises LimitExceeded, without fetching the object, if it is larger than ``max_bytes`` (default: the client's limit).
        """
        self._check_process()
        try:
            answer = self._obstore.get(self._store, name)
        except FileNotFoundError as error:
            _check_bucket_exists(error)
            return None
        size, tag = answer.meta["size"], answer.meta["e_tag"]
        check_size(name, size, self._max_bytes if max_bytes is None else max_bytes)
        if size <= PART_BYTES:
            return bytearray(memoryview(answer.bytes()))
        # The response is not read, so its connection is closed.
        del answer
        data = bytearray(size)
        return data if self._fill(name, memoryview(data), 0, tag) else None

    def read_beginning(self, name: str, max_bytes: int) -> Data | None:
        """Return an object's first ``max_bytes`` + 1 bytes, or all bytes of a smaller object. Returns None if it does not exist."""
        data = self._read_beginning(name, max_bytes + 1)
        return None if data is None else data[0]

    def read_front(self, name: str) -> Data | None:
        """Return an object's bytes as ``read`` does. In a kvpack file, zeros replace the bytes after the header."""
        result = self._read_beginning(name, _FRONT_BYTES)
        if result is None:
            return None
        beginning, size, tag = result
        check_size(name, size, self._max_bytes)
        if len(beginning) != min(size, _FRONT_BYTES):
            return None
        # The zeros take no memory until they are read.
        data = bytearray(size)
        data[: len(beginning)] = beginning
        end = min(size, front_bytes(beginning) or size)
        return data if self._fill(name, memoryview(data)[:end], len(beginning), tag) else None

    def read_prefix(self, name: str) -> tuple[bytes, int] | None:
        """Return the first bytes of an object, which determine its kind, and its size in bytes. Returns None if it does not exist."""
        data = self._read_beginning(name, FRONT_BYTES)
        return None if data is None else data[:2]

    def _read_beginning(self, name: str, count: int) -> tuple[bytes, int, str | None] | None:
        """Return the first ``count`` bytes of an object, its size and its entity tag, or None if it does not exist."""
        self._check_process()
        try:
            answer = self._obstore.get(self._store, name, options={"range": (0, count)})
            return bytes(memoryview(answer.bytes())), answer.meta["size"], answer.meta["e_tag"]
        except FileNotFoundError as error:
            _check_bucket_exists(error)
            return None
        except self._base_error as error:
            # An empty object has no first byte.
            if "status code: 416" in str(error) or "StartTooLarge" in str(error):
                size = self.size(name)
                if size == 0:
                    return b"", 0, None
            raise

    def put_new(self, name: str, data: bytes) -> bool:
        """Put an object unless it exists already. Returns True if it was put."""
        self._check_process()
        try:
            self._obstore.put(self._store, name, data, mode="create", use_multipart=False)
        except self._already_exists_error:
            return False
        return True

    def put(self, name: str, data: bytes) -> bool:
        """Put an object, or replace it if it exists. Always returns True."""
        self._check_process()
        self._obstore.put(self._store, name, data, use_multipart=False)
        return True

    def remove(self, name: str) -> bool:
        """Remove an object. Returns False if the service reports that it did not exist, which S3 never does."""
        self._check_process()
        try:
            self._obstore.delete(self._store, name)
        except FileNotFoundError:
            return False
        return True

    def _fill(self, name: str, data: memoryview, start: int, tag: str | None) -> bool:
        """Fetch an object's bytes from ``start`` to its end into the same range of ``data``. Returns False if the object has changed."""
        condition = {} if tag is None else {"if_match": tag}

        def fetch(begin: int) -> bool:
            stop = min(begin + PART_BYTES, len(data))
            try:
                part = self._obstore.get(self._store, name, options={"range": (begin, stop), **condition}).bytes()
            except (FileNotFoundError, self._precondition_error):
                return False
            if len(part) != stop - begin:
                return False
            data[begin:stop] = memoryview(part)
            return True

        return all(in_parallel(fetch, range(start, len(data), PART_BYTES), _PARTS_AT_ONCE))

    def _check_process(self) -> None:
        # obstore's threads do not survive a fork, and a request would wait for them forever.
        if os.getpid() != self._pid:
            raise Forked("the process was forked with an open store, but obstore does not work after a fork: use spawn instead")


def _error_code(error: BaseException) -> str:
    """Return the error code in a service's reply, or an empty string if there is none."""
    code = _CODE.search(str(error))
    return "" if code is None else code[1] or code[2]


def _check_bucket_exists(error: FileNotFoundError) -> None:
    """Raise ``error`` if the bucket itself is missing. Without this check, every object would count as a miss."""
    if _error_code(error) in _REFUSALS:
        raise error


class Forked(Exception):
    """The fault that is counted if a request is not sent because this process was forked. obstore does not work after a fork."""


def _open_url(url: str, timeout: float, options: Mapping[str, Any] | None) -> Any:
    from obstore.exceptions import BaseError
    from obstore.store import from_url

    limit = datetime.timedelta(seconds=timeout)
    # An endpoint with http:// is intentional.
    client = {"timeout": limit, "connect_timeout": limit, "allow_http": True}
    try:
        config = dict(options or {})
        client |= {name: config.pop(name) for name in _CLIENT_SETTINGS & set(config)}
        settings: Any = {"config": config, "client_options": client, "retry_config": {"max_retries": 0, "retry_timeout": limit}}
        return from_url(url, **settings)
    except (BaseError, ValueError, TypeError) as error:
        reason = redacted_location(str(error).splitlines()[0])
        raise InvalidParameter(f"the location {redacted_location(url)!r} or its storage_options are invalid: {reason}") from None
