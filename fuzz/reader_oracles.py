"""Comparison of the readers in other languages (spec/readers) with the second decoder."""

from __future__ import annotations

from typing import Any

from support.reader_programs import differences, start_all_readers, write_bases


def check_readers(data: bytes, suffix: str, bases: tuple[bytes, ...], file: Any, rule: str) -> None:
    """Check that the available readers agree with the second decoder, which accepted ``file`` or refused it because of ``rule``."""
    faults = list(differences(start_all_readers(), data, suffix, write_bases(bases), file, rule))
    assert not faults, "; ".join(faults)
