"""What a cache was computed from: the token ids that are known, and what token ids do not determine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvpack.formats.errors import InvalidParameter

ID_BYTES = 4
"""Bytes of a token id: unsigned, little-endian."""


@dataclass(frozen=True)
class Inputs:
    """What the tokens of a cache were computed from.

    ``token_ids`` are the ids of the first tokens of the cache's range, unsigned 32-bit little-endian, as far as they are known.
    ``undetermined`` names what those ids do not determine, each a sentence fragment with its tokens, such as "tokens 8 to 15 came
    from embeddings, not from token ids"; ``starts`` has the first of its tokens for each (default: 0, for all), because a prefix
    that ends before it does not depend on it. Raises InvalidParameter.
    """

    token_ids: bytes = b""
    undetermined: tuple[str, ...] = ()
    starts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.token_ids, bytes) or len(self.token_ids) % ID_BYTES:
            raise InvalidParameter(f"token_ids are bytes, {ID_BYTES} for each id; found {_described(self.token_ids)}")
        if not all(isinstance(text, str) and text for text in self.undetermined):
            raise InvalidParameter(f"undetermined is {self.undetermined!r}, expected a tuple of text, none of it empty")
        if not self.starts:
            object.__setattr__(self, "starts", (0,) * len(self.undetermined))
        if len(self.starts) != len(self.undetermined):
            raise InvalidParameter(f"starts has {len(self.starts)} positions, and undetermined {len(self.undetermined)} texts")

    @property
    def tokens(self) -> int:
        """The number of ids that are known."""
        return len(self.token_ids) // ID_BYTES

    def slice(self, start: int, stop: int, first: int) -> Inputs:
        """The inputs of tokens ``[start, stop)``, counted from the cache's first token, which is at position ``first``.

        Every token depends on all before it, so only what is undetermined from ``stop`` on is dropped.
        """
        kept = [(text, position) for text, position in zip(self.undetermined, self.starts, strict=True) if position < first + stop]
        return _of(self.token_ids[start * ID_BYTES : stop * ID_BYTES], kept)


def joined(parts: Sequence[tuple[Inputs | None, int]]) -> Inputs | None:
    """The inputs of consecutive caches, each given with its number of tokens; None when nothing is known of any."""
    if all(inputs is None for inputs, _ in parts):
        return None
    ids, known = b"", True
    undetermined: list[tuple[str, int]] = []
    for inputs, tokens in parts:
        inputs = inputs or Inputs()
        if known:
            ids += inputs.token_ids
            known = inputs.tokens == tokens
        undetermined += zip(inputs.undetermined, inputs.starts, strict=True)
    return _of(ids, dict.fromkeys(undetermined))


def _of(token_ids: bytes, undetermined: Iterable[tuple[str, int]]) -> Inputs:
    pairs = tuple(undetermined)
    return Inputs(token_ids, tuple(text for text, _ in pairs), tuple(position for _, position in pairs))


def _described(token_ids: object) -> str:
    return f"{len(token_ids)} bytes" if isinstance(token_ids, bytes) else f"a {type(token_ids).__name__}"
