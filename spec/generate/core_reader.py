"""A reader of the profile core that knows no required feature: by which class it refuses a file (spec/README.md, Profiles)."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING
from unittest import mock

from kvpack import formats
from kvpack.errors import KvpackError
from kvpack.file import container, front, header
from kvpack.file.checks import Rule

if TYPE_CHECKING:
    from collections.abc import Iterator

CODECS = ("raw", "group")
"""The codecs of the profile."""


def refusal(data: bytes) -> str | None:
    """Return the class by which it refuses ``data``; None where it reads the file."""
    with _core():
        try:
            with container.open_bytes(data) as file:
                file.verify()
        except KvpackError as error:
            return type(error).__name__
    return None


@contextmanager
def _core() -> Iterator[None]:
    """The library without other codecs, side-cars, filters and required features."""
    with ExitStack() as stack:
        codecs = {name: formats.CODECS[name] for name in CODECS}
        stack.enter_context(mock.patch.dict(formats.CODECS, codecs, clear=True))
        stack.enter_context(mock.patch.dict(formats.SIDE_CARS, clear=True))
        for module in (header, front):
            stack.enter_context(mock.patch.object(module, "FEATURES", frozenset()))
        stack.enter_context(mock.patch.dict(header.TENSOR_RULES, filter=Rule(str, choices=("none",))))
        yield
