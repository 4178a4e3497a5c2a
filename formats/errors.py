"""The errors that kvpack raises: one class per cause. Each class also derives from the built-in exception that callers would expect.

A message says what is wrong and where, states the rule, and shows the actual and the expected value.

Commands print the same message and exit with the class's ``exit_code``: 1 if the file is invalid, 2 if the request is wrong, 3 if the
system refused (disk, permissions).
"""

import errno
import os
from functools import partial


class KvpackError(Exception):
    """Base class of all errors that kvpack raises on purpose.

    A command that ends with the error exits with its ``exit_code``.

    >>> try:
    ...     kvpack.load("notes.txt")
    ... except kvpack.KvpackError as error:
    ...     print(type(error).__name__, error.exit_code)
    NotKvpack 1
    """

    exit_code = 1


class KvpackWarning(UserWarning):
    """Warning that an operation succeeded, but not quite as requested.

    >>> issubclass(kvpack.KvpackWarning, UserWarning)
    True
    """


class MissingFile(KvpackError, FileNotFoundError):
    """Error for a path that does not exist, cannot be opened, or is not a regular file.

    ``filename`` is the path and ``errno`` the system's error number, if known.

    >>> kvpack.load("missing.kvpack")
    Traceback (most recent call last):
    ...
    kvpack.errors.MissingFile: missing.kvpack: No such file or directory
    """

    exit_code = 3

    def __init__(self, message: str = "", *, filename: str | None = None, number: int = errno.ENOENT) -> None:
        super().__init__(message)
        self.errno, self.strerror, self.filename = number, os.strerror(number), filename

    def __str__(self) -> str:
        # OSError would build its own message from the three attributes.
        return str(self.args[0])

    def __reduce__(self) -> tuple[object, ...]:
        return partial(MissingFile, filename=self.filename, number=self.errno or errno.ENOENT), self.args


class MissingPackage(KvpackError, ImportError):
    """Error for an optional package that is missing or too old. The message contains the command that installs it.

    >>> issubclass(kvpack.MissingPackage, ImportError)
    True
    """

    exit_code = 3


class WriteFailed(KvpackError, OSError):
    """Raised when a file cannot be written. An existing file at that path is unchanged.

    ``filename`` is the path and ``errno`` the system's error number, if known.

    >>> kvpack.save(kvpack.pack(past, "octopus-3"), "no-such-folder/prompt.kvpack")
    Traceback (most recent call last):
    ...
    kvpack.errors.WriteFailed: no-such-folder/prompt.kvpack: No such file or directory
    """

    exit_code = 3

    def __init__(self, message: str = "", *, filename: str | None = None, number: int | None = None) -> None:
        super().__init__(message)
        self.errno, self.strerror, self.filename = number, None if number is None else os.strerror(number), filename

    def __str__(self) -> str:
        # OSError would build its own message from the three attributes.
        return str(self.args[0])

    def __reduce__(self) -> tuple[object, ...]:
        return partial(WriteFailed, filename=self.filename, number=self.errno), self.args


class NotKvpack(KvpackError, ValueError):
    """Error for bytes that are not a kvpack file: they are empty, in another format, or another kind of safetensors file.

    >>> kvpack.load("notes.txt")
    Traceback (most recent call last):
    ...
    kvpack.errors.NotKvpack: notes.txt: ...
    """


class Truncated(KvpackError, ValueError):
    """Error for a file that is shorter or longer than its header declares.

    >>> kvpack.load("truncated.kvpack")
    Traceback (most recent call last):
    ...
    kvpack.errors.Truncated: truncated.kvpack: ...
    """


class UnsupportedVersion(KvpackError, ValueError):
    """Error for a file that a newer kvpack wrote, or that needs a feature this version lacks. Upgrade kvpack to read it.

    >>> issubclass(kvpack.UnsupportedVersion, ValueError)
    True
    """


class UnknownCodec(KvpackError, ValueError):
    """Error for a codec that this version of kvpack lacks. Upgrade kvpack, or import the package that registers the codec.

    >>> issubclass(kvpack.UnknownCodec, ValueError)
    True
    """


class MissingBasis(KvpackError, ValueError):
    """Error for values that need a basis which was not passed. The message contains its SHA-256 if known.

    >>> kvpack.pack(past, "klt-2")
    Traceback (most recent call last):
    ...
    kvpack.errors.MissingBasis: layers[0].k: recipe 'klt-2' needs a basis: ...
    """


class InvalidHeader(KvpackError, ValueError):
    """Error for a file whose header breaks a rule of the format.

    >>> issubclass(kvpack.InvalidHeader, ValueError)
    True
    """


class InvalidPayload(KvpackError, ValueError):
    """Error for a stored tensor that breaks a rule of its codec: for example, a digit is out of range, or a scale is not finite.

    >>> issubclass(kvpack.InvalidPayload, ValueError)
    True
    """


class DigestMismatch(KvpackError, ValueError):
    """Error for stored bytes that do not match their digest: the file is damaged.

    >>> kvpack.load("damaged.kvpack")
    Traceback (most recent call last):
    ...
    kvpack.errors.DigestMismatch: damaged.kvpack: ...
    """


class Undecryptable(KvpackError, ValueError):
    """Error for a store entry that no available key decrypts, or that is not encrypted although the store requires encryption.

    >>> issubclass(kvpack.Undecryptable, ValueError)
    True
    """


class LimitExceeded(KvpackError, ValueError, MemoryError):
    """Error for a declared size that exceeds a limit of the format or of the caller.

    >>> kvpack.load("prompt.kvpack", memory_limit=1000)
    Traceback (most recent call last):
    ...
    kvpack.errors.LimitExceeded: prompt.kvpack: ...
    """


class InvalidParameter(KvpackError, ValueError):
    """Error for an argument, recipe or tensor whose value, shape or range the call does not accept.

    >>> kvpack.load("prompt.kvpack", device="no-such-device")
    Traceback (most recent call last):
    ...
    kvpack.errors.InvalidParameter: device is 'no-such-device', expected ...
    """

    exit_code = 2


class InvalidType(InvalidParameter, TypeError):
    """Error for an argument whose type, or a tensor whose dtype, the call does not accept.

    >>> kvpack.save([], "prompt.kvpack")
    Traceback (most recent call last):
    ...
    kvpack.errors.InvalidType: ...
    """


class ValueTooLarge(InvalidParameter):
    """Error for a value that is too large for its stored width. kvpack catches it and encodes the value in another way."""


class NotConsecutive(InvalidParameter):
    """Error for caches that do not follow one another, or that differ in model, layers or codec. Stores count such entries as damaged."""


class OutOfBounds(KvpackError, IndexError):
    """Error for a layer, head or token position that the cache does not have.

    >>> kvpack.load("prompt.kvpack")[2]
    Traceback (most recent call last):
    ...
    kvpack.errors.OutOfBounds: layer 2 is out of range: the cache has 2 layers
    """

    exit_code = 2
