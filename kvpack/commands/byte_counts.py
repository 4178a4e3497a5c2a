"""Parses numbers with units on the command line: sizes such as 10GB, and times such as 7d."""

from __future__ import annotations

import argparse
import re

_COUNT = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?) ?([a-z]*)", re.ASCII | re.IGNORECASE)
_UNITS: dict[str, int] = {
    "": 1,
    "b": 1,
    **{f"{name}b": 1000**power for power, name in enumerate("kmgt", 1)},
    **{f"{name}ib": 1024**power for power, name in enumerate("kmgt", 1)},
}


def byte_count(text: str) -> int:
    """Return the number of bytes in a size such as ``1000000000``, ``1GB`` or ``1.5GiB``. Raises ArgumentTypeError."""
    match = _COUNT.fullmatch(text.strip())
    unit = None if match is None else _UNITS.get(match[2].lower())
    if match is None or unit is None:
        raise argparse.ArgumentTypeError(f"{text!r:.80} must be a size in bytes, such as 1000000000, 1GB or 512MiB")
    whole, _, digits = match[1].partition(".")
    return int(whole + digits) * unit // int(f"1{'0' * len(digits)}")


def positive_byte_count(text: str) -> int:
    """Return a number of bytes as ``byte_count`` does, but reject 0. Raises ArgumentTypeError."""
    count = byte_count(text)
    if not count:
        raise argparse.ArgumentTypeError(f"{text!r:.80} must be at least 1 byte")
    return count


_TIME = re.compile(r"([0-9]{1,9})([smhd])", re.ASCII)
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def seconds(text: str) -> int:
    """Return the number of seconds in a time such as ``90s``, ``30m``, ``12h`` or ``7d``. Raises ArgumentTypeError."""
    match = _TIME.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r:.80} must be a time, such as 90s, 30m, 12h or 7d")
    return int(match[1]) * _SECONDS[match[2]]
