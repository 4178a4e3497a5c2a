"""The record of the inputs of one cache's tokens, pass by pass."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy
import torch

from kvpack.file.inputs import Inputs

if TYPE_CHECKING:
    from .passes import Pass

_PENDING = 64
"""The number of passes collected before they are read: reading waits for the device."""

_OTHER_ADAPTERS = "were computed with other adapters than the first token"

NOT_RECORDED = "came from forward passes that were not recorded: give KvpackCache the model"


@dataclass
class _Finding:
    """Tokens ``[start, stop)`` and what is said of them."""

    start: int
    stop: int
    what: str

    def __str__(self) -> str:
        tokens = f"token {self.start}" if self.stop == self.start + 1 else f"tokens {self.start} to {self.stop - 1}"
        return f"{tokens} {self.what}"


class Record:
    """What the tokens of a cache came from: ``inputs`` for those there already, then one pass after the other.

    Ids are kept for each row of the batch until they are asked for: rows differ while beams are searched. ``adapters`` is
    ``adapters_in_effect`` on the model of the tokens that are there already, None where it is not known.
    """

    def __init__(self, inputs: Inputs | None, tokens: int, adapters: tuple[Any, ...] | None = None) -> None:
        self.tokens = tokens
        self._adapters = adapters
        self._known = inputs is not None
        known = inputs.token_ids if inputs is not None else b""
        self._ids = torch.from_numpy(numpy.frombuffer(known, "<u4").astype(numpy.int64))[None]
        self._older = list(zip(inputs.undetermined, inputs.starts, strict=True)) if inputs is not None else []
        self._findings: list[_Finding] = []
        self._pending: list[tuple[int, int, Pass | None]] = []

    def __deepcopy__(self, memo: object) -> Self:
        self._settle()
        other = copy.copy(self)
        other._older, other._findings, other._pending = list(self._older), [copy.copy(finding) for finding in self._findings], []
        return other

    def add(self, tokens: int, seen: Pass | None) -> None:
        """``tokens`` more, which one forward pass made; None for one that was not recorded."""
        self._pending.append((self.tokens, self.tokens + tokens, seen))
        self.tokens += tokens
        if len(self._pending) >= _PENDING:
            self._settle()

    def select(self, indices: torch.Tensor) -> None:
        """Keep these rows of the batch."""
        self._settle()
        if self._ids.shape[0] > 1:
            self._ids = self._ids[indices.cpu()]

    def crop(self, tokens: int) -> None:
        """Keep the first ``tokens``."""
        self._settle()
        self.tokens = tokens
        # Without tokens, any number of rows begins.
        self._ids = self._ids[:, :tokens] if tokens else self._ids[:1, :0]
        self._older = [(text, start) for text, start in self._older if start < tokens]
        self._findings = [_Finding(found.start, min(found.stop, tokens), found.what) for found in self._findings if found.start < tokens]

    def differing(self, ids: torch.Tensor) -> tuple[int, int, int, int] | None:
        """The first token whose id in ``[batch, token]`` is not the one known, its row, the known id and the given one."""
        self._settle()
        known = self._ids[:, : ids.shape[1]]
        if not known.shape[1] or ids.shape[0] % known.shape[0]:
            return None
        # generate repeats each row for its beams.
        known = known.repeat_interleave(ids.shape[0] // known.shape[0], 0)
        given = ids[:, : known.shape[1]].cpu()
        differing = (given != known).nonzero()
        if not len(differing):
            return None
        row, token = differing[differing[:, 1].argmin()].tolist()
        return token, row, int(known[row, token]), int(given[row, token])

    @property
    def ids(self) -> torch.Tensor:
        """The known ids of each row, int64 ``[batch, token]``; one row where all have the same."""
        self._settle()
        return self._ids

    @property
    def inputs(self) -> Inputs | None:
        """The known inputs; None when nothing was known of the first tokens and no tokens were added."""
        self._settle()
        if not self._known:
            return None
        rows_differ = (self._ids != self._ids[:1]).any(0)
        same = int(rows_differ.nonzero()[0]) if bool(rows_differ.any()) else self._ids.shape[1]
        findings = list(self._findings)
        if same < self._ids.shape[1]:
            findings.append(_Finding(same, self._ids.shape[1], "differ from row to row of the batch"))
        texts = [*self._older, *((str(found), found.start) for found in findings)]
        token_ids = self._ids[0, :same].numpy().astype("<u4").tobytes()
        return Inputs(token_ids, tuple(text for text, _ in texts), tuple(start for _, start in texts))

    def _settle(self) -> None:
        """Read the pending passes."""
        pending, self._pending = self._pending, []
        for start, stop, seen in pending:
            self._known = True
            found = [NOT_RECORDED] if seen is None else seen.undetermined(stop - start)
            if seen is not None and (not start or self._adapters is None):
                self._adapters = seen.adapters
            elif seen is not None and seen.adapters != self._adapters:
                found = [*found, _OTHER_ADAPTERS]
            for what in found:
                last = next((finding for finding in self._findings if finding.stop == start and finding.what == what), None)
                if last is not None:
                    last.stop = stop
                else:
                    self._findings.append(_Finding(start, stop, what))
            if seen is None or seen.ids is None or seen.ids.shape[1] != stop - start or self._ids.shape[1] != start:
                continue
            ids = seen.ids.cpu().to(torch.int64)
            rows = max(ids.shape[0], self._ids.shape[0])
            self._ids = torch.cat([self._ids.expand(rows, -1), ids.expand(rows, -1)], 1)
