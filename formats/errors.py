"""The errors that kvpack raises: one flat hierarchy, one class per cause, each also the built-in class that callers catch.

A message names what was wrong, where, the rule, and both values (found and expected).
The command line prints the same message and exits with the class's ``exit_code``:
1: the file is invalid, 2: the request is wrong, 3: the system refused (disk, permissions).
"""

import errno
import os


class KvpackError(Exception):
    """Base of every error that kvpack raises on purpose."""

    exit_code = 1


class KvpackWarning(UserWarning):
    """An operation works, but not in the way that was requested."""


class MissingFile(KvpackError, FileNotFoundError):
    """The path does not exist, cannot be opened or is not a regular file.

    ``filename`` is the path and ``errno`` the system's reason, where they are known.
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
    """An optional package is not installed, or too old; the message is the command that installs it."""

    exit_code = 3


class WriteFailed(KvpackError, OSError):
    """The file could not be written; the old file, if any, is untouched. ``filename`` and ``errno`` are set where they are known."""

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
    """The bytes are not a kvpack file (empty, another format, another safetensors file)."""


class Truncated(KvpackError, ValueError):
    """The file ends before, or goes on after, what its header declares."""


class UnsupportedVersion(KvpackError, ValueError):
    """The file was written by a newer kvpack, or needs a feature this one lacks."""


class UnknownCodec(KvpackError, ValueError):
    """The header names a codec that this kvpack does not know."""


class MissingBasis(KvpackError, ValueError):
    """A side needs a basis that the reader was not given; the message names its digest."""


class InvalidHeader(KvpackError, ValueError):
    """The header breaks a rule of the format."""


class InvalidPayload(KvpackError, ValueError):
    """A stored tensor breaks a rule of its codec (a digit, a spare bit, a non-finite scale)."""


class DigestMismatch(KvpackError, ValueError):
    """Stored bytes do not match their digest: the file is damaged."""


class Undecryptable(KvpackError, ValueError):
    """No available key decrypts a store entry, or an entry is not encrypted in a store where every entry must be."""


class LimitExceeded(KvpackError, ValueError, MemoryError):
    """A declared size exceeds a limit of the format or of the caller."""


class InvalidParameter(KvpackError, ValueError):
    """An argument, a recipe or a tensor is not one that the call takes: a range, a shape, a value, a name."""

    exit_code = 2


class InvalidType(InvalidParameter, TypeError):
    """An argument has another type, or a tensor another dtype, than the call takes."""


class OutOfRange(InvalidParameter):
    """A value is too large for the width that the codec stores it in: kvpack itself tells it apart, to encode another way."""


class NotConsecutive(InvalidParameter):
    """Caches are not consecutive, or differ in model, layers or codec: stores tell it apart, as damage of an entry."""


class OutOfBounds(KvpackError, IndexError):
    """The cache has no such layer, head or token position."""

    exit_code = 2


def _missing_file(message: str, filename: str | None, number: int) -> MissingFile:
    return MissingFile(message, filename=filename, number=number)


def _write_failed(message: str, filename: str | None, number: int | None) -> WriteFailed:
    return WriteFailed(message, filename=filename, number=number)
