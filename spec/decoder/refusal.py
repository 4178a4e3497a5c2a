"""The error for files that break a rule of the specification."""

from __future__ import annotations

from typing import NoReturn


class Refused(Exception):
    """Error for a file that breaks a rule of the text.

    ``rule`` is the page and the section, and ``detail`` describes the position and the fault.
    """

    def __init__(self, rule: str, detail: str) -> None:
        super().__init__(f"{rule}: {detail}")
        self.rule = rule


def refuse(rule: str, detail: str) -> NoReturn:
    raise Refused(rule, detail)


def require(holds: bool, rule: str, detail: str) -> None:
    if not holds:
        refuse(rule, detail)
