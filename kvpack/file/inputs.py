"""The inputs of a cache: known token ids, and descriptions of all other inputs that determined its values."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, takewhile
from typing import Any

from kvpack.formats.arguments import describe
from kvpack.formats.errors import InvalidParameter

from . import hidden_tokens
from .hidden_tokens import HiddenRange
from .limits import MAX_BINARY_BYTES
from .sources import select_in_clause


def split_feature(name: str, data: bytes) -> dict[str, bytes]:
    """Split ``data`` into features of at most ``MAX_BINARY_BYTES`` bytes, by name. Empty data results in no features."""
    return {f"{name}.{number}": data[at : at + MAX_BINARY_BYTES] for number, at in enumerate(range(0, len(data), MAX_BINARY_BYTES))}


def join_features(ignorable: Mapping[str, bytes], name: str) -> bytes:
    """Reverse ``split_feature``: join the features called ``name``, up to the first missing one."""
    names = takewhile(ignorable.__contains__, (f"{name}.{number}" for number in count()))
    return b"".join(ignorable[feature] for feature in names)


FEATURE = "inputs"
"""Name of the ignorable feature that stores a file's inputs."""
IDS_FEATURE = "token-ids"
"""Prefix of the names of the ignorable features that store all known ids if these do not fit into ``inputs``."""
ROWS_FEATURE = "row-ids"
"""Prefix of the names of the ignorable features that store each sequence's ids if sequences differ."""
EARLIER_FEATURE = "earlier-ids"
"""Name of the ignorable feature that stores digests of the ids before a file's first token."""
_DIGEST_BYTES = 32
MAX_IDS = 2**20
"""Maximum number of ids in a file, over all sequences. That many ids fill half of the largest header."""
ID_BYTES = 4
"""Size of a token id in bytes: unsigned, little-endian."""

ROWS_DIFFER = "differ from row to row of the batch"
"""End of the clause for tokens whose ids differ between sequences."""
IDS_LEFT_OUT = "have ids that differ from row to row, and the file had no room for them"
"""End of the clause for tokens whose ids did not fit into the file."""
WITHOUT_IDS = "came without their token ids"
"""End of the clause for tokens without known ids that follow tokens with known ids."""
UNREADABLE_INPUTS = "its inputs are recorded in an unknown form"
"""The clause for inputs stored in an unknown form."""
MASKED = "were computed with an attention mask that hides tokens"
"""End of the clause for tokens computed with an unknown attention mask."""
PADDED = "were computed with an attention mask that hides padding"
"""End of the clause for tokens with an attention mask that hides only ``hidden``. Their positions count only visible tokens."""


@dataclass(frozen=True)
class Inputs:
    """The inputs from which a cache's values were computed.

    Args:
        token_ids: Known ids of the first tokens, unsigned 32-bit little-endian. If the sequences of a batch differ, only the ids that all
            of them begin with.
        undetermined: Inputs other than token ids, each described by a clause such as "tokens 8 to 15 came from embeddings".
        starts: First token that each of ``undetermined`` affects (default: 0). Earlier tokens do not depend on that input.
        rows: Ids of each sequence of a batch, if sequences differ. All must have the same number of ids.
        hidden: Tokens hidden by an attention mask, such as padding, as (sequence, start, stop). No later token may attend to them.
        first: Position of the first token.
        count: Number of tokens for which the inputs were recorded.
        sums: Checksums of keys and values ``[row, token]`` by (layer, "k" or "v"), each with the position of its first token.
        before: If the cache is a slice, ids of each sequence before the first token, or None if unknown.
        earlier: SHA-256 of each sequence's ids before a position, by position. If known, this includes the start of each file from which
            this cache was loaded, sliced or joined.

    Raises:
        InvalidParameter: The arguments have the wrong form or contradict one another.

    >>> import struct
    >>> inputs = kvpack.Inputs(struct.pack("<3I", 5, 6, 7))
    >>> kvpack.pack(past, "octopus-3", inputs=inputs).token_ids
    tensor([[5, 6, 7]])
    """

    token_ids: bytes = b""
    undetermined: tuple[str, ...] = ()
    starts: tuple[int, ...] = ()
    rows: tuple[bytes, ...] = ()
    hidden: tuple[HiddenRange, ...] = ()
    first: int | None = field(default=None, compare=False)
    count: int | None = field(default=None, compare=False)
    sums: Mapping[tuple[int, str], tuple[int, Any]] | None = field(default=None, compare=False, repr=False)
    before: tuple[bytes, ...] | None = field(default=None, compare=False, repr=False)
    earlier: Mapping[int, tuple[bytes, ...]] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.token_ids, bytes) or len(self.token_ids) % ID_BYTES:
            raise InvalidParameter(
                f"token_ids must be bytes, {ID_BYTES} for each id, but got {_describe_token_ids(self.token_ids)}: pass, for example, "
                "numpy.array(ids, '<u4').tobytes()"
            )
        if not _is_tuple(self.undetermined, str) or not all(self.undetermined):
            raise InvalidParameter(f"undetermined is {describe(self.undetermined)}, expected a tuple of nonempty strings")
        if not _is_tuple(self.starts, int) or any(start < 0 for start in self.starts):
            raise InvalidParameter(f"starts is {describe(self.starts)}, expected a tuple of positions (non-negative integers)")
        if not self.starts:
            object.__setattr__(self, "starts", (0,) * len(self.undetermined))
        if len(self.starts) != len(self.undetermined):
            raise InvalidParameter(f"starts has {len(self.starts)} positions, but undetermined has {len(self.undetermined)} clauses")
        if not _is_tuple(self.rows, bytes):
            raise InvalidParameter(f"rows is {describe(self.rows)}, expected a tuple with the ids of each sequence as bytes")
        if not _is_tuple(self.hidden, tuple) or not all(len(span) == 3 and _is_tuple(span, int) for span in self.hidden):
            raise InvalidParameter(f"hidden is {describe(self.hidden)}, expected a tuple of (sequence, start, stop)")
        if not all(isinstance(row, bytes) and len(row) == len(self.rows[0]) and len(row) % ID_BYTES == 0 for row in self.rows):
            lengths = ", ".join(map(_describe_token_ids, self.rows))
            raise InvalidParameter(f"rows must all have the same length, a multiple of {ID_BYTES} bytes (one id), but got {lengths}")
        if not all(row.startswith(self.token_ids) for row in self.rows):
            raise InvalidParameter("token_ids must be the ids that all rows begin with, but one row begins with different ids")
        object.__setattr__(self, "hidden", tuple(HiddenRange(*token_range) for token_range in self.hidden))

    @classmethod
    def from_rows(
        cls, rows: Sequence[bytes], undetermined: Iterable[tuple[str, int]], hidden: tuple[HiddenRange, ...], first: int
    ) -> Inputs:
        """Create inputs from the ids of each sequence. All sequences must have the same number of ids.

        The cache's first token is at position ``first``. ``undetermined`` contains (clause, position) pairs. The position is that of the
        first token that the input affects. If sequences differ, a clause that says so is added.
        """
        token_ids, known, result = _common_ids(rows, first)
        items = list(undetermined)
        if result and not any(text.endswith(ROWS_DIFFER) for text, _ in items):
            items += result
        return _joined_inputs(token_ids, items, known, hidden, first)

    @property
    def tokens(self) -> int:
        """Number of known ids per sequence."""
        return len(self.known_ids[0]) // ID_BYTES

    @property
    def known_ids(self) -> tuple[bytes, ...]:
        """Known ids of each sequence. If all sequences have the same ids, there is only one element."""
        return self.rows or (self.token_ids,)

    @property
    def rows_are_unknown(self) -> bool:
        """True if sequences have different ids, and some of these ids are unknown."""
        return any((not self.rows and text.endswith(ROWS_DIFFER)) or text.endswith(IDS_LEFT_OUT) for text in self.undetermined)

    def with_missing_ids(self, start: int, stop: int) -> Inputs:
        """Return the inputs for a cache with tokens ``[start, stop)``. Adds a clause if ids are missing for no recorded reason.

        If no ids are known at all, no clause is added, because the caller is responsible for the ids of such caches.
        """
        unknown = start + self.tokens
        if not start < unknown < stop or any(position <= unknown for position in self.starts):
            return self
        tokens = f"tokens {unknown} to {stop - 1}" if stop - unknown > 1 else f"token {unknown}"
        return replace(self, undetermined=(*self.undetermined, f"{tokens} {WITHOUT_IDS}"), starts=(*self.starts, unknown))

    def slice(self, start: int, stop: int, first: int) -> Inputs:
        """Return the inputs of tokens ``[start, stop)``, counted from the first token, which is at position ``first``.

        Each token depends on all earlier tokens. Undetermined inputs are therefore dropped only if they affect no token before ``stop``.
        """
        clauses = [(text, position) for text, position in zip(self.undetermined, self.starts, strict=True) if position < first + stop]
        cut = slice(start * ID_BYTES, stop * ID_BYTES)
        rows = tuple(row[cut] for row in self.rows) if any(text.endswith(ROWS_DIFFER) for text, _ in clauses) else ()
        begin, end = first + start, first + stop
        clipped = (HiddenRange(row, max(begin, hidden_start), min(end, hidden_stop)) for row, hidden_start, hidden_stop in self.hidden)
        hidden = tuple(token_range for token_range in clipped if token_range.start < token_range.stop)
        if not start and not hidden:
            clauses = [(text, position) for text, position in clauses if not text.endswith(PADDED) or position < first]
        cut_inputs = _joined_inputs(self.token_ids[cut], clauses, rows, hidden, None if self.first is None else self.first + start)
        earlier = {position: digests for position, digests in self.earlier.items() if position < end}
        cut_inputs = replace(cut_inputs, before=self._before(start), earlier=earlier)
        if self.sums is None:
            return cut_inputs
        sums = {
            place: (max(begin, position), values[:, max(0, begin - position) : max(0, end - position)])
            for place, (position, values) in self.sums.items()
        }
        return replace(cut_inputs, sums=sums)

    def _before(self, start: int) -> tuple[bytes, ...] | None:
        """Return the ids of each sequence before token ``start``, or None if some of these ids are unknown."""
        if not start:
            return self.before
        if self.tokens < start:
            return None
        return _append_ids(self.before or (b"",), tuple(ids[: start * ID_BYTES] for ids in self.known_ids))

    def select(self, indices: Sequence[int], first: int) -> Inputs:
        """Return the inputs of the sequences at ``indices``, in that order. The cache's first token is at position ``first``."""
        items = [(select_in_clause(text, indices), start) for text, start in zip(self.undetermined, self.starts, strict=True)]
        token_ids, rows = self.token_ids, self.rows
        if rows:
            rows = tuple(rows[index] for index in indices)
            differ = next((start for text, start in items if text.endswith(ROWS_DIFFER)), first)
            # Sequences that differ before the first token have different values, even if all later ids are the same.
            if len(set(indices)) == 1 or differ >= first:
                items = [(text, start) for text, start in items if not text.endswith(ROWS_DIFFER)]
                token_ids, rows, result = _common_ids(rows, first)
                items += result
        hidden_by_row: dict[int, list[HiddenRange]] = {}
        for token_range in self.hidden:
            hidden_by_row.setdefault(token_range.row, []).append(token_range)
        hidden = tuple(
            HiddenRange(row, *token_range[1:]) for row, index in enumerate(indices) for token_range in hidden_by_row.get(index, ())
        )
        if not hidden:
            items = [(text, start) for text, start in items if not text.endswith(PADDED) or start < first]
        sums = None if self.sums is None else {place: (position, kept[list(indices)]) for place, (position, kept) in self.sums.items()}
        selected = replace(_joined_inputs(token_ids, items, rows, hidden, self.first), sums=sums)
        earlier = {position: _select_rows(digests, indices) for position, digests in self.earlier.items()}
        before = None if self.before is None else _select_rows(self.before, indices)
        return replace(selected, before=before, earlier=earlier)

    def to_bytes(self) -> bytes:
        """Return the data of the feature ``inputs`` (spec/container.md).

        It consists of the undetermined inputs, followed by as many ids as fit.
        """
        texts = [text.encode() for text in self.undetermined]
        items = b"".join(
            start.to_bytes(8, "little") + len(text).to_bytes(4, "little") + text for start, text in zip(self.starts, texts, strict=True)
        )
        if len(items) > MAX_BINARY_BYTES // 2:
            return Inputs(self.token_ids, ("more than a file lists",), (min(self.starts),)).to_bytes()
        ids = self.token_ids[: (MAX_BINARY_BYTES - 8 - len(items)) // ID_BYTES * ID_BYTES]
        return (len(ids) // ID_BYTES).to_bytes(8, "little") + ids + items

    def to_features(self, start: int = 0) -> tuple[tuple[str, ...], dict[str, bytes]]:
        """Return the ``required`` and ``ignorable`` features of a file with these inputs. Its first token is at position ``start``.

        The feature ``inputs`` is always present. If it cannot contain all ids, ``token-ids.0`` and following are added. If sequences
        differ, ``row-ids.0`` and following are added. If the ids before the first token are known, ``earlier-ids`` is added. Raises
        LimitExceeded if there are more hidden tokens than a file can list.
        """
        required, ignorable = hidden_tokens.list_features(self.hidden)
        kept = self.token_ids[: MAX_IDS * ID_BYTES]
        rows, count = b"", 0
        if self.rows:
            count = min(len(self.rows[0]) - len(kept), (MAX_IDS * ID_BYTES - len(kept)) // len(self.rows)) // ID_BYTES
            ids = (row[len(kept) : len(kept) + count * ID_BYTES] for row in self.rows)
            rows = len(self.rows).to_bytes(4, "little") + count.to_bytes(8, "little") + b"".join(ids)
        stored = self._without_ids_after(len(kept) // ID_BYTES + count).to_bytes()
        more = kept if len(Inputs.from_bytes(stored).token_ids) < len(self.token_ids) else b""
        digests = b"".join(self._digests_before(start))
        earlier = {EARLIER_FEATURE: digests} if 0 < len(digests) <= MAX_BINARY_BYTES else {}
        return required, {FEATURE: stored, **split_feature(IDS_FEATURE, more), **split_feature(ROWS_FEATURE, rows), **earlier, **ignorable}

    def _digests_before(self, start: int) -> tuple[bytes, ...]:
        """Return a digest of each sequence's ids before position ``start``, or an empty tuple if some ids are unknown."""
        if start in self.earlier or not start or not self.before or len(self.before[0]) != start * ID_BYTES:
            return self.earlier.get(start, ())
        return tuple(hashlib.sha256(ids).digest() for ids in self.before)

    def _without_ids_after(self, count: int) -> Inputs:
        """Keep only the first ``count`` ids of each sequence, because a file cannot store more. Adds a clause that says so."""
        if not self.rows or count * ID_BYTES == len(self.rows[0]):
            return self
        differ = next(start for text, start in zip(self.undetermined, self.starts, strict=True) if text.endswith(ROWS_DIFFER))
        start = differ - len(self.token_ids) // ID_BYTES + count
        return replace(self, undetermined=(*self.undetermined, f"tokens from {start} on {IDS_LEFT_OUT}"), starts=(*self.starts, start))

    @classmethod
    def from_features(
        cls,
        ignorable: Mapping[str, bytes],
        hidden: tuple[HiddenRange, ...] = (),
        batch: int = 1,
        *,
        start: int = 0,
        tokens: int | None = None,
    ) -> Inputs | None:
        """Return the inputs recorded in a file's ``ignorable`` features, or None if there are none.

        The file has ``batch`` sequences. ``hidden`` are its hidden tokens, and ``start`` is the position of its first token. If ``tokens``
        is set, ids after that many tokens are ignored.
        """
        stored, ids = ignorable.get(FEATURE), join_features(ignorable, IDS_FEATURE)
        inputs = cls() if stored is None else cls.from_bytes(stored)
        if len(ids) % ID_BYTES == 0 and ids.startswith(inputs.token_ids):
            inputs = replace(inputs, token_ids=ids or inputs.token_ids)
        rows = join_features(ignorable, ROWS_FEATURE)
        size = ID_BYTES * int.from_bytes(rows[4:12], "little")
        limit = len(ids) + len(rows) + len(inputs.token_ids) if tokens is None else tokens * ID_BYTES
        inputs = replace(inputs, token_ids=inputs.token_ids[:limit])
        if len(rows) == 12 + batch * size > 12 and int.from_bytes(rows[:4], "little") == batch:
            known = tuple((inputs.token_ids + rows[at : at + size])[:limit] for at in range(12, len(rows), size))
            if len(set(known)) > 1:
                items = list(zip(inputs.undetermined, inputs.starts, strict=True))
                rows_differ = any(text.endswith(ROWS_DIFFER) for text in inputs.undetermined)
                differ = [] if rows_differ else _common_ids(known, start)[2]
                inputs = _joined_inputs(inputs.token_ids, [*items, *differ], known)
            else:
                inputs = replace(inputs, token_ids=known[0])
        if stored is None and not inputs.tokens and not hidden:
            return None
        if hidden and not any(text.endswith((MASKED, PADDED)) for text in inputs.undetermined):
            reason = (f"tokens from {hidden[0].start} on {MASKED}", min(token_range.start for token_range in hidden))
            inputs = _joined_inputs(inputs.token_ids, [*zip(inputs.undetermined, inputs.starts, strict=True), reason], inputs.rows)
        earlier = ignorable.get(EARLIER_FEATURE, b"")
        digests = tuple(earlier[at : at + _DIGEST_BYTES] for at in range(0, len(earlier), _DIGEST_BYTES))
        named = start > 0 and len(earlier) in (_DIGEST_BYTES, batch * _DIGEST_BYTES)
        return replace(inputs, hidden=hidden, earlier={start: digests} if named else {})

    @classmethod
    def from_bytes(cls, data: bytes) -> Inputs:
        """Parse bytes from ``to_bytes``. Any other bytes result in unknown inputs (``UNREADABLE_INPUTS``)."""
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
            return cls(undetermined=(UNREADABLE_INPUTS,))
        return _joined_inputs(ids, items)


def join_inputs(parts: Sequence[tuple[Inputs | None, int]], start: int) -> Inputs | None:
    """Join the inputs of consecutive caches, passed as (inputs, number of tokens) pairs. Returns None if all inputs are unknown.

    The first token is at position ``start``. Raises InvalidParameter if a cache was computed after tokens other than those of the caches
    before it.
    """
    if all(inputs is None for inputs, _ in parts):
        return None
    count = max(len(inputs.rows) if inputs is not None else 0 for inputs, _ in parts)
    ids, rows, known, rows_known = b"", [b""] * count, True, count > 0
    undetermined: list[tuple[str, int]] = []
    hidden: dict[int, list[HiddenRange]] = {}
    beginning, position = parts[0][0] or Inputs(), start
    earlier: dict[int, tuple[bytes, ...]] = {}
    for number, (inputs, tokens) in enumerate(parts):
        inputs = inputs or Inputs()
        if number and (known or rows_known):
            _check_follows(tuple(rows) if rows_known else (ids,), replace(beginning, earlier=earlier), inputs, number, position)
        earlier |= inputs.earlier
        if known:
            ids += inputs.token_ids
            known = len(inputs.token_ids) == tokens * ID_BYTES
        if rows_known:
            # If a part has the same ids for all sequences, they apply to each sequence.
            input_rows = inputs.rows or (inputs.token_ids,) * count
            rows = [row + more for row, more in zip(rows, input_rows, strict=True)]
            rows_known = len(input_rows[0]) == tokens * ID_BYTES
        undetermined += zip(inputs.undetermined, inputs.starts, strict=True)
        for token_range in inputs.hidden:
            ranges_of_row = hidden.setdefault(token_range.row, [])
            if ranges_of_row and ranges_of_row[-1].stop == token_range.start:
                ranges_of_row[-1] = HiddenRange(token_range.row, ranges_of_row[-1].start, token_range.stop)
            else:
                ranges_of_row.append(token_range)
        position += tokens
    all_hidden = tuple(token_range for row in sorted(hidden) for token_range in hidden[row])
    whole = _joined_inputs(ids, dict.fromkeys(undetermined), tuple(rows), all_hidden, beginning.first)
    return replace(whole, before=beginning.before, earlier=earlier)


def _check_follows(ids: tuple[bytes, ...], beginning: Inputs, inputs: Inputs, cache_index: int, position: int) -> None:
    """Raise InvalidParameter if a cache was computed after tokens other than those it is joined to.

    The cache has the index ``cache_index`` and the inputs ``inputs``, and begins at ``position``. ``ids`` are the known ids, by sequence,
    of the tokens joined so far. They follow ``beginning.before``. ``beginning.earlier`` contains digests of all ids before some positions.
    """
    joined_ids = _append_ids(beginning.before or (b"",), ids)
    before = inputs.before or (b"",)
    # Both end just before the part's first token.
    size = min(len(before[0]), len(joined_ids[0]))
    count = max(len(before), len(joined_ids))
    for row, pair in enumerate(zip(_repeat_for_rows(before, count), _repeat_for_rows(joined_ids, count), strict=True)):
        computed, here = (memoryview(one[len(one) - size :]).cast("I") for one in pair)
        if computed != here:
            back = next(back for back in range(1, len(computed) + 1) if computed[-back] != here[-back])
            raise InvalidParameter(
                f"caches[{cache_index}] was computed after different tokens: the id of sequence {row} at position {position - back} was "
                f"{computed[-back]}, but here it is {here[-back]}: join only slices of the same cache"
            )
    for known, earlier in ((joined_ids, inputs.earlier), (before, beginning.earlier)):
        # A digest covers all ids from position 0.
        if len(known[0]) == position * ID_BYTES:
            all_known = _append_ids(known, inputs.known_ids)
            for end, digests in earlier.items():
                if end * ID_BYTES <= len(all_known[0]):
                    _check_digests([hashlib.sha256(row[: end * ID_BYTES]).digest() for row in all_known], digests, cache_index, end)
    for end in inputs.earlier.keys() & beginning.earlier.keys():
        _check_digests(beginning.earlier[end], inputs.earlier[end], cache_index, end)


def _check_digests(expected: Sequence[bytes], digests: tuple[bytes, ...], cache_index: int, end: int) -> None:
    """Raise InvalidParameter unless the ``digests`` of cache ``cache_index`` equal ``expected``.

    The digests cover the ids before position ``end``.
    """
    count = max(len(digests), len(expected))
    for row, pair in enumerate(zip(_repeat_for_rows(digests, count), _repeat_for_rows(tuple(expected), count), strict=True)):
        if len(set(pair)) > 1:
            raise InvalidParameter(
                f"caches[{cache_index}] was computed after different tokens: the SHA-256 of the ids of sequence {row} before position "
                f"{end} differs: join only slices of the same cache"
            )


def _append_ids(first_ids: tuple[bytes, ...], ids: tuple[bytes, ...]) -> tuple[bytes, ...]:
    """Append ``ids`` to ``first_ids``, sequence by sequence."""
    count = max(len(first_ids), len(ids))
    return tuple(a + b for a, b in zip(_repeat_for_rows(first_ids, count), _repeat_for_rows(ids, count), strict=True))


def _select_rows(values: tuple[bytes, ...], indices: Sequence[int]) -> tuple[bytes, ...]:
    """Return the values of the sequences at ``indices``. A single value applies to all sequences and is returned unchanged."""
    return values if len(values) == 1 else tuple(values[index] for index in indices)


def _repeat_for_rows(ids: tuple[bytes, ...], count: int) -> tuple[bytes, ...]:
    """Return the ids of each of ``count`` sequences. A single element applies to all sequences and is repeated."""
    return ids * count if len(ids) == 1 else ids


def differing_ids_clause(start: int, stop: int) -> str:
    """Return the clause for tokens ``[start, stop)`` with different ids in different sequences."""
    return f"{'tokens' if stop - start > 1 else 'token'} {start}{f' to {stop - 1}' if stop - start > 1 else ''} {ROWS_DIFFER}"


def _common_ids(rows: Sequence[bytes], first: int) -> tuple[bytes, tuple[bytes, ...], list[tuple[str, int]]]:
    """Return the ids that all ``rows`` share at the beginning. The first id is at position ``first``.

    Also returns all rows, and a clause that says where they differ, with its position. Both are empty if all rows are equal.
    """
    if len(set(rows)) == 1:
        return rows[0], (), []
    words = [memoryview(row).cast("I") for row in rows]
    same = sum(1 for _ in takewhile(lambda ids: len(set(ids)) == 1, zip(*words, strict=True)))
    start = first + same
    return rows[0][: same * ID_BYTES], tuple(rows), [(differing_ids_clause(start, first + len(words[0])), start)]


def _joined_inputs(
    token_ids: bytes,
    undetermined: Iterable[tuple[str, int]],
    rows: tuple[bytes, ...] = (),
    hidden: tuple[HiddenRange, ...] = (),
    first: int | None = None,
) -> Inputs:
    pairs = tuple(undetermined)
    known = rows if rows and rows[0] else ()
    return Inputs(token_ids, tuple(text for text, _ in pairs), tuple(position for _, position in pairs), known, hidden, first)


def _is_tuple(value: object, kind: type) -> bool:
    return isinstance(value, tuple | list) and all(isinstance(item, kind) for item in value)


def _describe_token_ids(token_ids: object) -> str:
    return f"{len(token_ids)} bytes" if isinstance(token_ids, bytes) else f"a {type(token_ids).__name__}"
