"""Numbers of bytes on the command line: integers, also with a unit such as GB or MiB."""

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
    """The number of bytes that ``text`` names, such as ``1000000000``, ``1GB`` or ``1.5GiB``. Raises ArgumentTypeError."""
    match = _COUNT.fullmatch(text.strip())
    unit = None if match is None else _UNITS.get(match[2].lower())
    if match is None or unit is None:
        raise argparse.ArgumentTypeError(f"{text!r:.80} is not a number of bytes, such as 1000000000, 1GB or 512MiB")
    whole, _, digits = match[1].partition(".")
    return int(whole + digits) * unit // int(f"1{'0' * len(digits)}")


def positive_byte_count(text: str) -> int:
    """``byte_count`` of at least 1. Raises ArgumentTypeError."""
    count = byte_count(text)
    if not count:
        raise argparse.ArgumentTypeError(f"{text!r:.80} is no byte, expected at least 1")
    return count
