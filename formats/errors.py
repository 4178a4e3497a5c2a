"""The errors that kvpack raises: one flat hierarchy with one class per cause. Each class is also a built-in that callers catch.

A message names what was wrong, where, the rule, and both values (actual and expected).
The command line prints the same message and exits with the class's ``exit_code``:
1: the file is invalid, 2: the request is wrong, 3: the system refused (disk, permissions).
"""

import errno
import os


class KvpackError(Exception):
    """Base class of every error that kvpack raises on purpose.

    ``exit_code`` is the exit code of commands that end with the error.

    >>> try:
    ...     kvpack.load("notes.txt")
    ... except kvpack.KvpackError as error:
    ...     print(type(error).__name__, error.exit_code)
    NotKvpack 1
    """

    exit_code = 1


class KvpackWarning(UserWarning):
    """An operation succeeded, but not quite as requested.

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
    """An optional package is not installed or is too old; the message contains the command that installs it.

    >>> issubclass(kvpack.MissingPackage, ImportError)
    True
    """

    exit_code = 3


class WriteFailed(KvpackError, OSError):
    """A file could not be written; an older file at its path is untouched.

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
    """The bytes are not a kvpack file: they are empty, another format, or another kind of safetensors file.

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
    """A file was written by a newer kvpack, or needs a feature that this version lacks: upgrade kvpack to read it.

    >>> issubclass(kvpack.UnsupportedVersion, ValueError)
    True
    """


class UnknownCodec(KvpackError, ValueError):
    """The header names a codec that this kvpack does not have: upgrade kvpack, or install the package that registers the codec.

    >>> issubclass(kvpack.UnknownCodec, ValueError)
    True
    """


class MissingBasis(KvpackError, ValueError):
    """The values need a basis that was not passed in; the message contains the SHA-256 of the basis.

    >>> kvpack.pack(past, "klt-2")
    Traceback (most recent call last):
    ...
    kvpack.errors.MissingBasis: layers[0].k: recipe 'klt-2' needs a basis: ...
    """


class InvalidHeader(KvpackError, ValueError):
    """The header of a file breaks a rule of the format.

    >>> issubclass(kvpack.InvalidHeader, ValueError)
    True
    """


class InvalidPayload(KvpackError, ValueError):
    """A stored tensor breaks a rule of its codec, such as a digit out of range, a nonzero spare bit or a scale that is not finite.

    >>> issubclass(kvpack.InvalidPayload, ValueError)
    True
    """


class DigestMismatch(KvpackError, ValueError):
    """Stored bytes do not match their digest: the file is damaged.

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
    """An argument, a recipe or a tensor has a value, a shape or a range that the call does not accept.

    >>> kvpack.load("prompt.kvpack", device="no-such-device")
    Traceback (most recent call last):
    ...
    kvpack.errors.InvalidParameter: device is 'no-such-device', expected ...
    """

    exit_code = 2


class InvalidType(InvalidParameter, TypeError):
    """An argument has a type, or a tensor a dtype, that the call does not accept.

    >>> kvpack.save([], "prompt.kvpack")
    Traceback (most recent call last):
    ...
    kvpack.errors.InvalidType: ...
    """


class OutOfRange(InvalidParameter):
    """A value is too large for the width in which the codec stores it; kvpack catches the error to encode the value another way."""


class NotConsecutive(InvalidParameter):
    """Caches do not follow one another, or differ in model, layers or codec; a store treats such entries as damaged."""


class OutOfBounds(KvpackError, IndexError):
    """A cache does not have the requested layer, head or token position.

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
