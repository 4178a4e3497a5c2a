"""Digests of what an encoder was given, in the text of an undetermined input (``kvpack.file.inputs``)."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

FROM_ENCODER = "depend on what an encoder was given"
"""Middle or end of the clause about tokens of an encoder-decoder model."""
_DIGESTS = f"{FROM_ENCODER}, by sequence sha256 of its input/output: "
DIGEST = 32
"""Number of hexadecimal digits of a digest: the first 128 bits of SHA-256."""
MAX_NAMED = 256
"""Maximum number of sequences whose sources are named: they take half of the room for texts."""
_SEQUENCE = re.compile(rf"((?:[0-9a-f]{{{DIGEST}}})?)/([0-9a-f]{{{DIGEST}}})", re.ASCII)


class Source(NamedTuple):
    """The digests of an encoder's input, empty if it is not known, and of its output, for one sequence."""

    input: str
    output: str

    def __str__(self) -> str:
        return f"{self.input}/{self.output}"

    def is_same(self, other: Source) -> bool:
        """Return True if both name one source: outputs of one input may differ by rounding, and embeddings have the output of their ids."""
        return self.output == other.output or (self.input == other.input != "")


Sources = tuple[Source, ...]
"""The source of each sequence of a batch; one element if all have the same."""


def clause(sources: Sources) -> str:
    """Return the text of an undetermined input that names ``sources``; more than ``MAX_NAMED`` are not named: a file has no room."""
    if len(sources) > MAX_NAMED:
        return f"tokens {FROM_ENCODER}"
    return f"tokens {_DIGESTS}{' '.join(map(str, sources))}"


def sources_in(text: str) -> Sources | None:
    """Return the sources that a text of ``clause`` names; None for any other text."""
    _, found, names = text.partition(_DIGESTS)
    sequences = [_SEQUENCE.fullmatch(name) for name in names.split(" ")] if found else [None]
    return tuple(Source(*sequence.groups()) for sequence in sequences if sequence) if all(sequences) else None


def selected(sources: Sources, indices: Sequence[int]) -> Sources:
    """Return the sources of the sequences ``indices``, in that order."""
    return sources if len(sources) == 1 else tuple(sources[index] for index in indices)


def selected_text(text: str, indices: Sequence[int]) -> str:
    """Return the text for the sequences ``indices`` of a batch; one that names no sources stays as it is."""
    sources = sources_in(text)
    if sources is None or max(indices, default=0) >= len(sources) > 1:
        return text
    return clause(selected(sources, indices))


def differing(known: Sources, given: Sources) -> int | None:
    """Return the first sequence whose source differs; None if all are the same."""
    count = max(len(known), len(given))
    if len(known) not in (1, count) or len(given) not in (1, count):
        return 0
    pairs = zip(known * (count // len(known)), given * (count // len(given)), strict=True)
    return next((number for number, (one, other) in enumerate(pairs) if not one.is_same(other)), None)
