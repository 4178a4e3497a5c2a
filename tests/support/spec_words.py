"""Count the words of the specification by document, and add them up for normative and informative documents.

``python -m support.spec_words`` prints the counts. A word is a sequence between spaces that contains a letter or a digit, so table rules
and operators do not count.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from support.numbered_rules import RULES, SPEC

MAX_NORMATIVE, MAX_INFORMATIVE = 28_000, 10_000


def words(document: Path) -> int:
    """Return the number of words of ``document``."""
    return sum(bool(re.search(r"\w", word)) for word in document.read_text(encoding="utf-8").split())


def is_informative(document: Path) -> bool:
    """Return True if ``document`` states no rules itself, like the list of rules and documents that are marked as informative."""
    return document == RULES or document.read_text(encoding="utf-8").split("\n")[2].startswith("*Informative.*")


def counts() -> dict[bool, dict[str, int]]:
    """Return the word count of each document by path, for normative documents (False) and informative ones (True)."""
    result: dict[bool, dict[str, int]] = {False: {}, True: {}}
    for document in sorted((*SPEC.glob("*.md"), *SPEC.glob("codecs/*.md"))):
        result[is_informative(document)][document.relative_to(SPEC).as_posix()] = words(document)
    return result


def main() -> int:
    """Print all counts. Return 1 if a sum exceeds its limit."""
    within = True
    for informative, limit in ((False, MAX_NORMATIVE), (True, MAX_INFORMATIVE)):
        found = counts()[informative]
        for name, count in found.items():
            print(f"{count:7,} {name}")
        total = sum(found.values())
        print(f"{total:7,} {'informative' if informative else 'normative'}, at most {limit:,}\n")
        within &= total <= limit
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
