"""The inputs of a cache: the known token ids, and everything that token ids do not determine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from kvpack.formats.errors import InvalidParameter

from .features import joined as joined_feature
from .features import split
from .limits import MAX_BINARY_BYTES

FEATURE = "inputs"
"""The name of the ignorable feature that holds the inputs in a file."""
IDS_FEATURE = "token-ids"
"""The prefix of the names of the ignorable features that hold all known ids where ``inputs`` does not."""
MAX_IDS = 2**20
"""The most ids that a file keeps: they fill half of the largest header."""
ID_BYTES = 4
"""The bytes of a token id: unsigned, little-endian."""


@dataclass(frozen=True)
class Inputs:
    """The inputs from which the tokens of a cache were computed.

    ``token_ids`` holds the known ids of the first tokens of the cache's range, unsigned 32-bit little-endian. ``undetermined``
    lists inputs that the ids do not determine, each as a clause with its tokens, such as "tokens 8 to 15 came from embeddings,
    not from token ids". ``starts`` holds the first token of each (default: 0 for all), because a prefix that ends before that
    token does not depend on it. Raises InvalidParameter.
    """

    token_ids: bytes = b""
    undetermined: tuple[str, ...] = ()
    starts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.token_ids, bytes) or len(self.token_ids) % ID_BYTES:
            raise InvalidParameter(f"token_ids are bytes, {ID_BYTES} for each id; found {_described(self.token_ids)}")
        if not all(isinstance(text, str) and text for text in self.undetermined):
            raise InvalidParameter(f"undetermined is {self.undetermined!r}, expected a tuple of nonempty strings")
        if not self.starts:
            object.__setattr__(self, "starts", (0,) * len(self.undetermined))
        if len(self.starts) != len(self.undetermined):
            raise InvalidParameter(f"starts has {len(self.starts)} positions, and undetermined {len(self.undetermined)} texts")

    @property
    def tokens(self) -> int:
        """The number of known ids."""
        return len(self.token_ids) // ID_BYTES

    def slice(self, start: int, stop: int, first: int) -> Inputs:
        """The inputs of tokens ``[start, stop)``, counted from the cache's first token, at position ``first``.

        Every token depends on all earlier ones, so only undetermined inputs from ``stop`` on are dropped.
        """
        kept = [(text, position) for text, position in zip(self.undetermined, self.starts, strict=True) if position < first + stop]
        return _of(self.token_ids[start * ID_BYTES : stop * ID_BYTES], kept)

    def to_bytes(self) -> bytes:
        """The feature ``inputs`` of a file (spec/container.md): the undetermined inputs, then as many ids as fit."""
        texts = [text.encode() for text in self.undetermined]
        items = b"".join(
            start.to_bytes(8, "little") + len(text).to_bytes(4, "little") + text for start, text in zip(self.starts, texts, strict=True)
        )
        if len(items) > MAX_BINARY_BYTES // 2:
            return Inputs(self.token_ids, ("more than a file lists",), (min(self.starts),)).to_bytes()
        ids = self.token_ids[: (MAX_BINARY_BYTES - 8 - len(items)) // ID_BYTES * ID_BYTES]
        return (len(ids) // ID_BYTES).to_bytes(8, "little") + ids + items

    def to_features(self) -> dict[str, bytes]:
        """The ignorable features of a file with these inputs: ``inputs``, and where that does not hold all ids, ``token-ids.0`` and on."""
        stored = self.to_bytes()
        kept = self.token_ids[: MAX_IDS * ID_BYTES]
        more = kept if Inputs.from_bytes(stored).tokens < self.tokens else b""
        return {FEATURE: stored, **split(IDS_FEATURE, more)}

    @classmethod
    def from_features(cls, ignorable: Mapping[str, bytes]) -> Inputs | None:
        """The inputs in the ignorable features of a file; None if it has none."""
        stored, ids = ignorable.get(FEATURE), joined_feature(ignorable, IDS_FEATURE)
        inputs = cls() if stored is None else cls.from_bytes(stored)
        if len(ids) % ID_BYTES == 0 and ids.startswith(inputs.token_ids):
            inputs = replace(inputs, token_ids=ids or inputs.token_ids)
        return None if stored is None and not inputs.tokens else inputs

    @classmethod
    def from_bytes(cls, data: bytes) -> Inputs:
        """Parse the result of ``to_bytes``; any other bytes give inputs of which nothing is known."""
        try:
            end = 8 + ID_BYTES * int.from_bytes(data[:8], "little")
            if len(data) < max(8, end):
                raise ValueError
            ids, items = data[8:end], []
            while end < len(data):
                start, size = int.from_bytes(data[end : end + 8], "little"), int.from_bytes(data[end + 8 : end + 12], "little")
                text = data[end + 12 : end + 12 + size]
                if len(text) != size or not size:
                    raise ValueError
                items.append((text.decode(), start))
                end += 12 + size
        except ValueError:
            return cls(undetermined=("what its tokens came from is not readable",))
        return _of(ids, items)


def joined(parts: Sequence[tuple[Inputs | None, int]]) -> Inputs | None:
    """Join the inputs of consecutive caches, each given with its number of tokens; None if all are unknown."""
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
