"""Digests of an encoder's input and output. They are stored in the clause of an undetermined input (``kvpack.file.inputs``)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

FROM_ENCODER = "depend on what an encoder was given"
"""Middle or end of the clause for tokens of an encoder-decoder model."""
_DIGESTS = f"{FROM_ENCODER}, by sequence sha256 of its input/output: "
DIGEST = 32
"""Number of hexadecimal digits in a digest, which is the first 128 bits of SHA-256."""
MAX_NAMED = 256
"""Maximum number of sequences with sources listed in a clause. They then take up half of the space for clauses."""
_SEQUENCE = re.compile(rf"((?:[0-9a-f]{{{DIGEST}}})?)/([0-9a-f]{{{DIGEST}}})", re.ASCII)


class Source(NamedTuple):
    """Digests of an encoder's input and output for one sequence. If the input is unknown, its digest is empty."""

    input: str
    output: str

    def __str__(self) -> str:
        return f"{self.input}/{self.output}"

    def is_same(self, other: Source) -> bool:
        """Return True if the two sources have the same input digest or the same output digest.

        Outputs for the same input may differ by rounding, and embeddings have the same output as their token ids.
        """
        return self.output == other.output or (self.input == other.input != "")


Sources = tuple[Source, ...]
"""The source of each sequence in a batch, or a single element if all sequences have the same source."""


def clause(sources: Sources) -> str:
    """Return the clause that lists ``sources``. A clause for more than ``MAX_NAMED`` sources does not list them."""
    if len(sources) > MAX_NAMED:
        return f"tokens {FROM_ENCODER}"
    return f"tokens {_DIGESTS}{' '.join(map(str, sources))}"


def parse_sources(text: str) -> Sources | None:
    """Return the sources listed in a clause, or None for any other text."""
    _, found, names = text.partition(_DIGESTS)
    sequences = [_SEQUENCE.fullmatch(name) for name in names.split(" ")] if found else [None]
    return tuple(Source(*sequence.groups()) for sequence in sequences if sequence) if all(sequences) else None


def select_sources(sources: Sources, indices: Sequence[int]) -> Sources:
    """Return the sources of the sequences at ``indices``, in that order."""
    return sources if len(sources) == 1 else tuple(sources[index] for index in indices)


def select_in_clause(text: str, indices: Sequence[int]) -> str:
    """Return the clause ``text`` with only the sources of the sequences at ``indices``. A text that lists no sources is returned unchanged.
    """
    sources = parse_sources(text)
    if sources is None or max(indices, default=0) >= len(sources) > 1:
        return text
    return clause(select_sources(sources, indices))


def first_difference(expected: Sources, actual: Sources) -> int | None:
    """Return the index of the first sequence with a different source, or None if there is none."""
    count = max(len(expected), len(actual))
    if len(expected) not in (1, count) or len(actual) not in (1, count):
        return 0
    pairs = zip(expected * (count // len(expected)), actual * (count // len(actual)), strict=True)
    return next((number for number, (one, other) in enumerate(pairs) if not one.is_same(other)), None)
