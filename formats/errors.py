"""Every way kvpack refuses: one flat family, one class a cause.

A message names what was wrong, where, the rule, and both values (found and allowed).
The command line prints the same message and exits with the class's ``exit_code``:
1 the file is refused, 2 the request is wrong, 3 the system refused (disk, permissions).
"""

import errno
import os


class KvpackError(Exception):
    """Base of every error that kvpack raises on purpose."""

    exit_code = 1


class KvpackWarning(UserWarning):
    """Something works, and not in the way that was asked for."""


class MissingFile(KvpackError, FileNotFoundError):
    """The path does not exist, cannot be opened or is not a regular file.

    ``filename`` is the path and ``errno`` the system's reason, where they are known.
    """

    exit_code = 3

    def __init__(self, message: str = "", *, filename: str | None = None, number: int = errno.ENOENT) -> None:
        super().__init__(message)
        self.errno, self.strerror, self.filename = number, os.strerror(number), filename

    def __str__(self) -> str:
        # OSError would write its own message of the three attributes.
        return str(self.args[0])

    def __reduce__(self) -> tuple[object, ...]:
        return _missing_file, (self.args[0], self.filename, self.errno)


class WriteFailed(KvpackError):
    """The file could not be written; the old file, if any, is untouched."""

    exit_code = 3


class NotKvpack(KvpackError):
    """The bytes are not a kvpack file (empty, another format, another safetensors file)."""


class Truncated(KvpackError):
    """The file ends before, or goes on after, what its header declares."""


class UnsupportedVersion(KvpackError):
    """The file was written by a newer kvpack, or needs a feature this one lacks."""


class UnknownCodec(KvpackError):
    """The header names a codec that this kvpack does not know."""


class InvalidHeader(KvpackError):
    """The header breaks a rule of the format."""


class InvalidPayload(KvpackError):
    """A stored tensor breaks a rule of its codec (a digit, a spare bit, a non-finite scale)."""


class DigestMismatch(KvpackError):
    """Stored bytes do not match their digest: the file is damaged."""


class Undecryptable(KvpackError):
    """An encrypted entry of a store that no key at hand opens, or one that is not encrypted where all must be."""


class LimitExceeded(KvpackError):
    """A declared size is above a limit of the format or of the caller."""


class InvalidShape(KvpackError):
    """A tensor has the wrong rank, or shapes that do not fit together."""

    exit_code = 2


class InvalidDtype(KvpackError):
    """A tensor has a dtype that the operation does not take."""

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
    """A layer, head or token position that the cache does not have."""

    exit_code = 2


class NotConsecutive(KvpackError):
    """Pages that do not continue one another, or differ in model, layers or codec."""

    exit_code = 2


def _missing_file(message: str, filename: str | None, number: int) -> MissingFile:
    return MissingFile(message, filename=filename, number=number)
