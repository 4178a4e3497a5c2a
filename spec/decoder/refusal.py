"""How a breach of the text is reported."""

from __future__ import annotations

from typing import NoReturn


class Refused(Exception):
    """A file breaks a rule of the text: ``rule`` names the page and the section, ``detail`` says where and how."""

    def __init__(self, rule: str, detail: str) -> None:
        super().__init__(f"{rule}: {detail}")
        self.rule = rule


def refuse(rule: str, detail: str) -> NoReturn:
    raise Refused(rule, detail)


def require(holds: bool, rule: str, detail: str) -> None:
    if not holds:
        refuse(rule, detail)
