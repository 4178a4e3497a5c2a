"""The errors that kvpack raises: one class per cause. Each class also derives from the built-in exception that callers would expect.

A message says what is wrong and where, states the rule, and shows the actual and the expected value.

Commands print the same message and exit with the class's ``exit_code``: 1 if the file is invalid, 2 if the request is wrong, 3 if the
system refused (disk, permissions).
"""

import errno
import os


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
    """A path does not exist, cannot be opened, or is not a regular file.

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
        return _missing_file, (self.args[0], self.filename, self.errno)


class MissingPackage(KvpackError, ImportError):
    """An optional package is missing or too old. The message contains the command that installs it.

    >>> issubclass(kvpack.MissingPackage, ImportError)
    True
    """

    exit_code = 3


class WriteFailed(KvpackError, OSError):
    """A file could not be written. An existing file at that path is unchanged.

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
        return _write_failed, (self.args[0], self.filename, self.errno)


class NotKvpack(KvpackError, ValueError):
    """The bytes are not a kvpack file: they are empty, in another format, or another kind of safetensors file.

    >>> kvpack.load("notes.txt")
    Traceback (most recent call last):
    ...
    kvpack.errors.NotKvpack: notes.txt: ...
    """


class Truncated(KvpackError, ValueError):
    """A file is shorter or longer than its header declares.

    >>> kvpack.load("truncated.kvpack")
    Traceback (most recent call last):
    ...
    kvpack.errors.Truncated: truncated.kvpack: ...
    """


class UnsupportedVersion(KvpackError, ValueError):
    """A newer kvpack wrote the file, or the file needs a feature that this version lacks. Upgrade kvpack to read it.

    >>> issubclass(kvpack.UnsupportedVersion, ValueError)
    True
    """


class UnknownCodec(KvpackError, ValueError):
    """The header names a codec that this kvpack lacks. Upgrade kvpack, or import the package that registers the codec.

    >>> issubclass(kvpack.UnknownCodec, ValueError)
    True
    """


class MissingBasis(KvpackError, ValueError):
    """Decoding the values needs a basis that was not passed. The message contains its SHA-256 if known.

    >>> kvpack.pack(past, "klt-2")
    Traceback (most recent call last):
    ...
    kvpack.errors.MissingBasis: layers[0].k: recipe 'klt-2' needs a basis: ...
    """


class InvalidHeader(KvpackError, ValueError):
    """A file's header breaks a rule of the format.

    >>> issubclass(kvpack.InvalidHeader, ValueError)
    True
    """


class InvalidPayload(KvpackError, ValueError):
    """A stored tensor breaks a rule of its codec: for example, a digit is out of range, a spare bit is set, or a scale is not finite.

    >>> issubclass(kvpack.InvalidPayload, ValueError)
    True
    """


class DigestMismatch(KvpackError, ValueError):
    """Stored bytes do not match their digest, so the file is damaged.

    >>> kvpack.load("damaged.kvpack")
    Traceback (most recent call last):
    ...
    kvpack.errors.DigestMismatch: damaged.kvpack: ...
    """


class Undecryptable(KvpackError, ValueError):
    """No available key decrypts a store entry, or a store that requires encryption contains an unencrypted entry.

    >>> issubclass(kvpack.Undecryptable, ValueError)
    True
    """


class LimitExceeded(KvpackError, ValueError, MemoryError):
    """A declared size exceeds a limit of the format or of the caller.

    >>> kvpack.load("prompt.kvpack", memory_limit=1000)
    Traceback (most recent call last):
    ...
    kvpack.errors.LimitExceeded: prompt.kvpack: ...
    """


class InvalidParameter(KvpackError, ValueError):
    """The value, shape or range of an argument, recipe or tensor is not accepted by the call.

    >>> kvpack.load("prompt.kvpack", device="no-such-device")
    Traceback (most recent call last):
    ...
    kvpack.errors.InvalidParameter: device is 'no-such-device', expected ...
    """

    exit_code = 2


class InvalidType(InvalidParameter, TypeError):
    """The type of an argument, or the dtype of a tensor, is not accepted by the call.

    >>> kvpack.save([], "prompt.kvpack")
    Traceback (most recent call last):
    ...
    kvpack.errors.InvalidType: ...
    """


class OutOfRange(InvalidParameter):
    """A value is too large for its stored width. kvpack catches this error to encode the value in another way."""


class NotConsecutive(InvalidParameter):
    """Caches do not follow one another, or differ in model, layers or codec. A store treats such entries as damaged."""


class OutOfBounds(KvpackError, IndexError):
    """The requested layer, head or token position does not exist in the cache.

    >>> kvpack.load("prompt.kvpack")[2]
    Traceback (most recent call last):
    ...
    kvpack.errors.OutOfBounds: layer 2 is out of range: the cache has 2 layers
    """

    exit_code = 2


def _missing_file(message: str, filename: str | None, number: int) -> MissingFile:
    return MissingFile(message, filename=filename, number=number)


def _write_failed(message: str, filename: str | None, number: int | None) -> WriteFailed:
    return WriteFailed(message, filename=filename, number=number)
