"""Compare the readers in other languages (spec/readers) with the second decoder."""

from __future__ import annotations

from typing import Any

from support.reader_programs import all_started, differences, in_files


def check_readers(data: bytes, suffix: str, bases: tuple[bytes, ...], file: Any, rule: str) -> None:
    """Check that the readers that can run here agree with the second decoder, which either read ``file`` or refused it by ``rule``."""
    found = list(differences(all_started(), data, suffix, in_files(bases), file, rule))
    assert not found, "; ".join(found)
