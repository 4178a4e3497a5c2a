"""Reader of the core profile, which does not support any required features (spec/README.md, Profiles)."""

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
"""Codecs of the core profile."""


def refusal(data: bytes) -> str | None:
    """Return the error class with which the reader refuses ``data``, or None if it reads the file."""
    with _core():
        try:
            with container.open_bytes(data) as file:
                file.verify()
        except KvpackError as error:
            return type(error).__name__
    return None


@contextmanager
def _core() -> Iterator[None]:
    """Restrict the library to the core profile: no other codecs, sidecars, filters or required features."""
    with ExitStack() as stack:
        codecs = {name: formats.CODECS[name] for name in CODECS}
        stack.enter_context(mock.patch.dict(formats.CODECS, codecs, clear=True))
        stack.enter_context(mock.patch.dict(formats.SIDECARS, clear=True))
        for module in (header, front):
            stack.enter_context(mock.patch.object(module, "FEATURES", frozenset()))
        stack.enter_context(mock.patch.dict(header.TENSOR_RULES, filter=Rule(str, choices=("none",))))
        yield
