"""The record of the inputs of a cache's tokens, updated pass by pass."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy
import torch

from kvpack.file.hidden_tokens import HiddenRange
from kvpack.file.inputs import MASKED, PADDED, ROWS_DIFFER, Inputs, differing_ids_clause
from kvpack.file.sources import Sources, clause, first_difference, parse_sources, select_sources

if TYPE_CHECKING:
    from .passes import Pass

_MAX_PENDING_PASSES = 64
"""Maximum number of passes that are collected before their values are read, because reading waits for the device."""

_MAX_PENDING_BYTES = 1 << 24
"""Maximum total size of the masks of collected passes, in bytes."""

_MAX_SHOWN_RANGES = 4
"""Maximum number of ranges of hidden tokens that a message lists."""

_OTHER_ADAPTERS = "were computed with different adapters from the first token"

CHANGED = "are no longer those that forward passes computed: tokens were dropped before them, or values changed"
UNRECORDED_PASSES = "came from forward passes that were not recorded: give KvpackCache the model"


@dataclass
class _InputNote:
    """A note about an input that affects tokens ``[start:stop]`` but is not determined by their ids."""

    start: int
    stop: int
    text: str

    def __str__(self) -> str:
        tokens = f"token {self.start}" if self.stop == self.start + 1 else f"tokens {self.start} to {self.stop - 1}"
        return f"{tokens} {self.text}"


class Record:
    """The inputs that produced a cache's tokens: ``inputs`` produced those already present, and recorded passes added the others.

    Ids are stored for each of the ``batch`` rows, because beam search makes them diverge. ``adapters`` is the result of
    ``active_adapters`` for the tokens already present, or None if unknown.
    """

    def __init__(self, inputs: Inputs | None, tokens: int, adapters: tuple[Any, ...] | None = None, batch: int = 1) -> None:
        self.tokens = tokens
        self.edited = False
        """True if tokens were dropped or sequences selected since ``generate`` last compared the ids."""
        self._adapters = adapters
        self._known = inputs is not None
        inputs = inputs or Inputs()
        self._ids = known_id_rows(inputs)
        self._visible = visible_tokens(inputs, batch, tokens)
        named = {text: sources for text in inputs.undetermined if (sources := parse_sources(text)) and len(sources) in (1, batch)}
        self.sources: list[Sources] = list(named.values())
        """The encoder inputs on which the tokens depend. Empty if unknown; several if tokens depend on different inputs."""
        # Omit notes that are computed again from the ids and masks of the rows.
        self._older = [
            (text, start)
            for text, start in zip(inputs.undetermined, inputs.starts, strict=True)
            if not (text.endswith(ROWS_DIFFER) and inputs.rows) and not (text.endswith(PADDED) and inputs.hidden) and text not in named
        ]
        padded = ((text, start) for text, start in zip(inputs.undetermined, inputs.starts, strict=True) if text.endswith(PADDED))
        self._findings = [_InputNote(start, tokens, PADDED) for text, start in padded if inputs.hidden]
        masked = (pair for pair in self._older if pair[0].endswith((MASKED, PADDED)))
        self._unknown_mask = None if inputs.hidden else next(masked, None)
        self._pending: list[tuple[int, int, Pass | None]] = []

    def __deepcopy__(self, memo: object) -> Self:
        self._settle_pending()
        other = copy.copy(self)
        other._older, other._findings, other._pending = list(self._older), [copy.copy(finding) for finding in self._findings], []
        other.sources = list(self.sources)
        return other

    def add(self, tokens: int, recorded_pass: Pass | None) -> None:
        """Add ``tokens`` tokens of one forward pass. ``recorded_pass`` is None if the pass was not recorded."""
        # If the source of the first tokens is unknown, so is the source of all.
        pass_sources = None if recorded_pass is None or not tokens or (self.tokens and not self.sources) else recorded_pass.sources
        if pass_sources is not None and all(first_difference(sources, pass_sources) is not None for sources in self.sources):
            self.sources.append(pass_sources)
        self._pending.append((self.tokens, self.tokens + tokens, recorded_pass))
        self.tokens += tokens
        masks = sum(
            recorded_pass.visible.numel()
            for _, _, recorded_pass in self._pending
            if recorded_pass is not None and recorded_pass.visible is not None
        )
        if len(self._pending) >= _MAX_PENDING_PASSES or masks > _MAX_PENDING_BYTES:
            self._settle_pending()

    def note(self, start: int, text: str) -> None:
        """Add the note ``text`` to all tokens from ``start`` on, if there are any."""
        self._settle_pending()
        if start < self.tokens:
            self._findings.append(_InputNote(start, self.tokens, text))

    def select(self, indices: torch.Tensor) -> None:
        self._settle_pending()
        self.edited = True
        self.sources = [select_sources(sources, indices.tolist()) for sources in self.sources]
        if self._ids.shape[0] > 1:
            self._ids = self._ids[indices.cpu()]
        if self._visible is not None:
            self._visible = self._visible[indices.cpu()]
            self._drop_visible()

    def crop(self, tokens: int) -> None:
        self._settle_pending()
        self.tokens, self.edited = tokens, True
        self.sources = self.sources if tokens else []
        # Without tokens, the cache can continue with any number of rows.
        self._ids = self._ids[:, :tokens] if tokens else self._ids[:1, :0]
        if self._visible is not None:
            self._visible = self._visible[:, :tokens]
            self._drop_visible()
        if self._unknown_mask is not None and self._unknown_mask[1] >= tokens:
            self._unknown_mask = None
        self._older = [(text, start) for text, start in self._older if start < tokens]
        self._findings = [
            _InputNote(finding.start, min(finding.stop, tokens), finding.text) for finding in self._findings if finding.start < tokens
        ]

    def forget(self, tokens: int) -> None:
        """Discard the record, because the cache's ``tokens`` tokens no longer have values that a pass computed."""
        masked = self.hides_tokens
        self.crop(0)
        self.tokens, self._known = tokens, True
        self._findings = [_InputNote(0, tokens, text) for text in (CHANGED, *([MASKED] if masked else []))] if tokens else []

    @property
    def hides_tokens(self) -> bool:
        """True if a token was hidden when it was computed, or may have been."""
        self._settle_pending()
        texts = [*(text for text, _ in self._older), *(finding.text for finding in self._findings)]
        return self._visible is not None or any(text.endswith((MASKED, PADDED)) for text in texts)

    def first_mismatch(self, ids: torch.Tensor) -> tuple[int, int, int, int] | None:
        """Return the first id in ``ids``, ``[batch, token]``, that differs from the known one, or None if all agree.

        It is returned as (token, row, known id, other id). The ids of hidden tokens, such as padding, do not matter.
        """
        self._settle_pending()
        recorded = self._ids[:, : ids.shape[1]]
        if not recorded.shape[1] or ids.shape[0] % recorded.shape[0]:
            return None
        # generate repeats each row for its beams.
        recorded = recorded.repeat_interleave(ids.shape[0] // recorded.shape[0], 0)
        actual = ids[:, : recorded.shape[1]].cpu()
        unequal = actual != recorded
        if self._visible is not None and not ids.shape[0] % self._visible.shape[0]:
            unequal &= self._visible[:, : unequal.shape[1]].repeat_interleave(ids.shape[0] // self._visible.shape[0], 0)
        differing = unequal.nonzero()
        if not len(differing):
            return None
        row, token = differing[differing[:, 1].argmin()].tolist()
        return token, row, int(recorded[row, token]), int(actual[row, token])

    @property
    def ids(self) -> torch.Tensor:
        """Known ids of each row, int64 ``[batch, token]``. If all rows are the same, there is only one row."""
        self._settle_pending()
        return self._ids

    @property
    def inputs(self) -> Inputs | None:
        """The recorded inputs, or None if nothing is known about the first tokens and no tokens have been added."""
        self._settle_pending()
        if not self._known:
            return None
        different = (self._ids != self._ids[:1]).any(0)
        same = int(different.nonzero()[0]) if bool(different.any()) else self._ids.shape[1]
        texts = [*self._older, *((clause(sources), 0) for sources in self.sources)]
        texts += ((str(finding), finding.start) for finding in self._findings)
        rows: list[bytes] = []
        if same < self._ids.shape[1]:
            texts.append((differing_ids_clause(same, self._ids.shape[1]), same))
            rows = [row.tobytes() for row in self._ids.numpy().astype("<u4")]
        token_ids = self._ids[0, :same].numpy().astype("<u4").tobytes()
        notes, starts = tuple(text for text, _ in texts), tuple(start for _, start in texts)
        return Inputs(token_ids, notes, starts, tuple(rows), tuple(self._hidden_ranges()), first=0, count=self.tokens)

    def hidden_tokens_message(self, mask: Any, tokens: int) -> str | None:
        """Return an error message if a pass of ``tokens`` tokens with this mask would attend to hidden tokens, or None otherwise.

        The message suggests a mask. Masks of single tokens are read from the device first.
        """
        if mask is None or tokens != 1:
            self._settle_pending()
        columns = mask if isinstance(mask, torch.Tensor) and mask.dim() == 2 else None
        if mask is not None and columns is None:
            return None
        if self._unknown_mask is not None and (columns is None or bool((columns != 0).all())):
            return (
                f"{self._unknown_mask[0]}, but the cache does not record which: pass attention_mask= as in those passes, with a column for "
                "each token of the cache and each that follows, 0 for hidden ones; if later tokens may see all, write "
                "KvpackCache.of(dataclasses.replace(cache, inputs=None), model)"
            )
        if self._visible is None:
            return None
        rows, held = self._visible.shape
        if columns is None:
            seen = torch.ones_like(self._visible)
        elif columns.shape[0] in (1, rows):
            seen = (columns[:, :held] != 0).cpu().expand(rows, -1)
        else:
            return None
        hidden = (seen & ~self._visible[:, : seen.shape[1]]).nonzero()
        if not len(hidden):
            return None
        row, token = hidden[0].tolist()
        stretches = self._hidden_ranges()
        zeros = "; ".join(f"attention_mask[{row}, {start}:{stop}] = 0" for row, start, stop in stretches[:_MAX_SHOWN_RANGES])
        more = (
            f", and 0 for the others of the {len(stretches)} ranges in cache.packed.inputs.hidden"
            if len(stretches) > _MAX_SHOWN_RANGES
            else ""
        )
        return (
            f"token {token} of row {row} was hidden by the attention mask when it was computed, as padding is, but this pass would see it: "
            f"pass a mask with a column for each of the cache's {self.tokens} tokens and each new one, "
            f"attention_mask = torch.ones({rows}, {self.tokens} + new); {zeros}{more}"
        )

    def _hidden_ranges(self) -> list[HiddenRange]:
        if self._visible is None:
            return []
        edges = torch.nn.functional.pad(~self._visible, (1, 1)).to(torch.int8).diff(dim=1)
        return [
            HiddenRange(row, start, stop)
            for row, line in enumerate(edges)
            for start, stop in zip((line > 0).nonzero()[:, 0].tolist(), (line < 0).nonzero()[:, 0].tolist(), strict=True)
        ]

    def _drop_visible(self) -> None:
        """Drop the record of visible tokens if no token is hidden anymore."""
        if self._visible is not None and bool(self._visible.all()):
            self._visible = None
            self._findings = [finding for finding in self._findings if finding.text != PADDED]

    def _record_mask(self, start: int, stop: int, recorded_pass: Pass) -> list[str]:
        """Record the tokens in ``[start:stop]`` that the mask of their pass hid, and return notes about them."""
        mask = recorded_pass.visible
        if mask is not None and mask.shape[1] != stop:
            return [MASKED]
        if self._visible is None and (mask is None or not recorded_pass.hides_tokens):
            return []
        if mask is None:
            assert self._visible is not None
            mask = torch.ones(1, stop, dtype=torch.bool, device="cpu")
        mask = mask.cpu()
        before = torch.ones(1, start, dtype=torch.bool, device="cpu") if self._visible is None else self._visible
        rows = max(mask.shape[0], before.shape[0], 1 if recorded_pass.ids is None else recorded_pass.ids.shape[0])
        if rows % mask.shape[0] or rows % before.shape[0]:
            return [MASKED]
        mask, before = mask.expand(rows, -1), before.expand(rows, -1)
        self._visible = torch.cat([before, mask[:, start:]], 1)
        return [PADDED if recorded_pass.counts_visible and torch.equal(mask[:, :start], before) else MASKED]

    def _settle_pending(self) -> None:
        pending, self._pending = self._pending, []
        for start, stop, seen in pending:
            self._known = True
            result = [UNRECORDED_PASSES]
            if seen is not None:
                result = [*seen.undetermined_inputs(stop - start), *self._record_mask(start, stop, seen)]
            if self._visible is not None and self._visible.shape[1] < stop:
                self._visible = torch.nn.functional.pad(self._visible, (0, stop - self._visible.shape[1]), value=True)
            if seen is not None and (not start or self._adapters is None):
                self._adapters = seen.adapters
            elif seen is not None and seen.adapters != self._adapters:
                result = [*result, _OTHER_ADAPTERS]
            for text in result:
                last = next((finding for finding in self._findings if finding.stop == start and finding.text == text), None)
                if last is not None:
                    last.stop = stop
                else:
                    self._findings.append(_InputNote(start, stop, text))
            if seen is None or seen.ids is None or seen.ids.shape[1] != stop - start or self._ids.shape[1] != start:
                continue
            ids = seen.ids.cpu().to(torch.int64)
            rows = max(ids.shape[0], self._ids.shape[0])
            self._ids = torch.cat([self._ids.expand(rows, -1), ids.expand(rows, -1)], 1)


def known_id_rows(inputs: Inputs) -> torch.Tensor:
    """Return the known ids of each row, int64 ``[row, token]``. If all rows are the same, there is only one row."""
    return torch.stack([torch.from_numpy(numpy.frombuffer(row, "<u4").astype(numpy.int64)) for row in inputs.known_ids])


def visible_tokens(inputs: Inputs, batch: int, tokens: int) -> torch.Tensor | None:
    """Return a mask of the tokens that are not hidden, bool ``[batch, token]``, or None if no token is hidden."""
    if not inputs.hidden:
        return None
    visible = torch.ones(batch, tokens, dtype=torch.bool, device="cpu")
    for row, start, stop in inputs.hidden:
        visible[row, start:stop] = False
    return visible
