"""Helpers for invalid conformance vectors: the codecs that they modify, and the list of vectors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvpack.formats.klt import Klt
from support.file_parts import edit, keys_file, overwrite
from support.strategies import create

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvpack.formats.base import Codec


@dataclass(frozen=True)
class Invalid:
    """A refused vector: its fault, the rule that it breaks, the error class, and its bytes.

    ``either`` is True if a reader may also decode it, to any values.
    """

    shows: str
    rule: str
    error: str
    make: Callable[[], bytes]
    either: bool = False
    basis: str = ""
    """Name of the file with the basis that a reader receives."""


INVALID: dict[str, Invalid] = {}

RAW = create("raw", 3, dtype="fp16")
GROUP = create("group", 5, "k", b="3", g="16")
EIGHT_BIT = create("group", 5, b="2", g="4", axis="channel", scales="u8", token_scale="fp32")
OCTAHEDRAL = create("octahedral", 5, b="2", arrangement="direct", rotation="none")
QUATERNION = create("quaternion", 9, s="5", r="4", arrangement="direct", rotation="none")
ANGLE = create("angle", 6, n="100", norm="linear8", rotation="none")
SCALAR = create("scalar", 10, b="2", high="3", rotation="none")
POLAR = create("polar", 6, b="2.3.1", rotation="none")
KLT = Klt.from_widths(3, bytes(32), 0, "k", b"\2", "fp16", "fp16")
TRANSFORM = create("transform", 3, chunk="16")
LOSSLESS = create("lossless", 6, dtype="bf16", chunk="16")
MINIFLOAT = create("minifloat", 6, element="e4m3", per="token", scales="fp16")
MXFP8 = create("minifloat", 40, element="e5m2", scales="e8m0")
NVFP4 = create("minifloat", 20, element="e2m1", scales="e4m3")
CODECS = {
    "raw": RAW,
    "group": GROUP,
    "octahedral": OCTAHEDRAL,
    "quaternion": QUATERNION,
    "angle": ANGLE,
    "scalar": SCALAR,
    "polar": POLAR,
    "minifloat": MINIFLOAT,
    "lossless": LOSSLESS,
    "klt": KLT,
    "transform": TRANSFORM,
}


def add(name: str, rule: str, error: str, shows: str, make: Callable[[], bytes], *, either: bool = False, basis: str = "") -> None:
    assert name not in INVALID
    INVALID[name] = Invalid(shows, rule, error, make, either, basis)


def add_header(name: str, rule: str, codec: Codec, path: str, value: Any, shows: str, error: str = "InvalidHeader") -> None:
    """Add a file whose header has another value at ``path``."""
    add(name, rule, error, shows, lambda: keys_file(codec, edit(path, value)))


def add_payload(name: str, rule: str, codec: Codec, tensor: str, at: int, value: str, shows: str) -> None:
    """Add a file whose tensor has other bytes from ``at`` on, with a correct digest."""
    add(name, rule, "InvalidPayload", shows, lambda: keys_file(codec, overwrite(f"0.k.{tensor}", at, value)))
