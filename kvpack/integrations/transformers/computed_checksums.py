"""Checksums of the keys and values in transformers' own caches, which reveal changes made after recorded passes."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.cache_utils import Cache as TransformersCache

from kvpack.cache.checksums import checksums, has_checksums
from kvpack.cache.dense_states import keys_and_values
from kvpack.cache.states import States
from kvpack.formats.errors import KvpackError

from .layers import PackedLayer

_VALUES_AT_ONCE = 1 << 22
"""Maximum number of values that are summed together, from layers of equal shape."""


@dataclass
class _SideChecksums:
    """The checksums of one layer's keys or values, beginning at position ``first``. Each of ``parts`` is int64 ``[batch, token]``."""

    first: int
    parts: list[torch.Tensor] = field(default_factory=list)

    @property
    def sums(self) -> torch.Tensor:
        if len(self.parts) > 1:
            self.parts = [torch.cat(self.parts, 1)]
        return self.parts[0]


class ComputedChecksums:
    """The checksums of the first ``tokens`` tokens of a cache, for each layer's keys and values."""

    def __init__(self) -> None:
        self.tokens = 0
        self._lines: dict[tuple[int, str], _SideChecksums] = {}
        self._seen: list[weakref.ref[torch.Tensor]] = []
        self.states: dict[int, States] = {}
        """States that were kept, keyed by the number of tokens that they follow."""

    @property
    def batch(self) -> int:
        return next((line.sums.shape[0] for line in self._lines.values()), 0)

    def add(self, past: TransformersCache, tokens: int) -> None:
        """Record the checksums of ``past`` from token ``self.tokens`` up to token ``tokens``."""
        sides = list(_readable_sides(past))
        self._seen = [weakref.ref(x) for _, _, x in sides]
        sums = _all_checksums([x[:, :, max(first, self.tokens) - first : tokens - first] for _, first, x in sides])
        for (place, first, x), side_sums in zip(sides, sums, strict=True):
            held = max(first, self.tokens)
            line = self._lines.get(place)
            if line is None or line.first + line.sums.shape[1] != held or line.sums.shape[0] != x.shape[0]:
                line = self._lines[place] = _SideChecksums(held)
            line.parts.append(side_sums)
        self.tokens = tokens

    def unchanged(self, past: TransformersCache) -> bool:
        """Return True if ``past`` still has the tensor objects whose checksums were last recorded. Their values may have changed."""
        now = [x for _, _, x in _readable_sides(past)]
        return len(now) == len(self._seen) and all(seen() is x for seen, x in zip(self._seen, now, strict=True))

    def match_rows(self, past: TransformersCache, tokens: int) -> list[int] | None:
        """Return, for each sequence of ``past``, the index of the recorded sequence that begins with the same ``tokens`` tokens.

        Returns None if a sequence has no match.
        """
        noted: list[list[bytes]] = []
        result: list[list[bytes]] = []
        for place, first, x in _readable_sides(past):
            line = self._lines.get(place)
            if line is None:
                return None
            start, stop = max(first, line.first), min(tokens, line.first + line.sums.shape[1], first + x.shape[2])
            if start >= stop:
                continue
            noted.append(_row_sums(line.sums[:, start - line.first : stop - line.first]))
            result.append(_row_sums(checksums(x[:, :, start - first : stop - first])))
        before, now = list(zip(*noted, strict=True)), list(zip(*result, strict=True))
        rows = []
        for number, row in enumerate(now):
            # Rows with the same values were computed from the same inputs.
            same = number if number < len(before) and before[number] == row else None
            rows.append(before.index(row) if same is None and row in before else same)
        return None if None in rows else [row for row in rows if row is not None]

    def checksums_before(self, tokens: int) -> dict[tuple[int, str], tuple[int, Any]]:
        """Return the checksums of each layer's keys and values before token ``tokens``, as (position of the first token, ``[row, token]``)
        pairs.
        """
        return {place: (line.first, line.sums[:, : max(0, tokens - line.first)].cpu().numpy()) for place, line in self._lines.items()}

    def select(self, rows: Sequence[int]) -> None:
        """Keep only the checksums of the sequences at ``rows``, and drop all states."""
        self.states.clear()
        for line in self._lines.values():
            line.parts = [line.sums[list(rows)]]

    def crop(self, tokens: int) -> None:
        """Keep only the checksums and the states of the first ``tokens`` tokens."""
        self.tokens = min(self.tokens, tokens)
        self.states = {position: states for position, states in self.states.items() if position <= tokens}
        for line in self._lines.values():
            line.parts = [line.sums[:, : max(0, tokens - line.first)]]


def _all_checksums(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the ``checksums`` of each tensor. Small tensors of equal shape are combined, so that a step needs few kernel launches."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for number, x in enumerate(tensors):
        groups.setdefault((x.shape, x.dtype, x.device), []).append(number)
    result: dict[int, torch.Tensor] = {}
    for numbers in groups.values():
        if sum(tensors[number].numel() for number in numbers) > _VALUES_AT_ONCE:
            result |= {number: checksums(tensors[number]) for number in numbers}
        else:
            result |= dict(zip(numbers, checksums(torch.cat([tensors[number] for number in numbers])).chunk(len(numbers)), strict=True))
    return [result[number] for number in range(len(tensors))]


def _row_sums(sums: torch.Tensor) -> list[bytes]:
    return [row.tobytes() for row in sums.cpu().numpy()]


def _readable_sides(past: TransformersCache) -> Iterator[tuple[tuple[int, str], int, torch.Tensor]]:
    """Yield the layer number and side, the position of the first token, and the values of all keys and values that can be read."""
    for number, layer in enumerate(past.layers):
        if isinstance(layer, PackedLayer):
            # Only forward passes change packed layers, and reading them would decode them.
            continue
        try:
            held = keys_and_values(layer, f"layers[{number}]")
        except KvpackError:
            continue
        for name, x in (("k", held.k), ("v", held.v)):
            if has_checksums(x):
                yield (number, name), held.skipped, x
