"""The errors that kvpack raises: one flat hierarchy, one class per cause.

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


class WriteFailed(KvpackError):
    """The file could not be written; the old file, if any, is untouched."""

    exit_code = 3


class NotWritable(WriteFailed, PermissionError):
    """The file or its folder is read-only; ``filename`` is the path."""

    def __init__(self, message: str = "", *, filename: str | None = None, number: int = errno.EACCES) -> None:
        super().__init__(message)
        self.errno, self.strerror, self.filename = number, os.strerror(number), filename

    def __str__(self) -> str:
        # OSError would build its own message from the three attributes.
        return str(self.args[0])

    def __reduce__(self) -> tuple[object, ...]:
        return _not_writable, (self.args[0], self.filename, self.errno)


class NotKvpack(KvpackError):
    """The bytes are not a kvpack file (empty, another format, another safetensors file)."""


class Truncated(KvpackError):
    """The file ends before, or goes on after, what its header declares."""


class UnsupportedVersion(KvpackError):
    """The file was written by a newer kvpack, or needs a feature this one lacks."""


class UnknownCodec(KvpackError):
    """The header names a codec that this kvpack does not know."""


class MissingBasis(KvpackError):
    """A side needs a basis that the reader was not given; the message names its digest."""


class InvalidHeader(KvpackError):
    """The header breaks a rule of the format."""


class InvalidPayload(KvpackError):
    """A stored tensor breaks a rule of its codec (a digit, a spare bit, a non-finite scale)."""


class DigestMismatch(KvpackError):
    """Stored bytes do not match their digest: the file is damaged."""


class Undecryptable(KvpackError):
    """No available key decrypts a store entry, or an entry is not encrypted in a store where every entry must be."""


class LimitExceeded(KvpackError):
    """A declared size exceeds a limit of the format or of the caller."""


class InvalidShape(KvpackError):
    """A tensor has the wrong rank, or tensors have incompatible shapes."""

    exit_code = 2


class InvalidDtype(KvpackError):
    """A tensor has a dtype that the operation does not accept."""

    exit_code = 2


class NonFinite(KvpackError):
    """NaN or infinity where a lossy codec would have to encode it."""

    exit_code = 2


class OutOfRange(KvpackError):
    """A value is too large for the width that the codec stores it in."""

    exit_code = 2


class InvalidParameter(KvpackError):
    """A codec parameter or an argument is outside its range."""

    exit_code = 2


class InvalidRecipe(KvpackError):
    """A recipe string does not parse, or names something unknown."""

    exit_code = 2


class OutOfBounds(KvpackError, IndexError):
    """The cache has no such layer, head or token position."""

    exit_code = 2


class NotConsecutive(KvpackError):
    """Pages are not consecutive, or differ in model, layers or codec."""

    exit_code = 2


def _missing_file(message: str, filename: str | None, number: int) -> MissingFile:
    return MissingFile(message, filename=filename, number=number)


def _not_writable(message: str, filename: str | None, number: int) -> NotWritable:
    return NotWritable(message, filename=filename, number=number)
