"""Checks the forward passes over one KvpackCache, and records them."""

from __future__ import annotations

import copy
import warnings
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

import torch

from kvpack.formats.errors import InvalidParameter, KvpackWarning

from .generate_checks import GenerateChecks
from .hooks import PassStack, models_in, outermost_model
from .model_state import checkpointing_modules
from .models import SAME_MODEL_ADVICE, Model, NamedModel, current_weights_digest, name_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvpack.file.sources import Sources

    from .passes import Pass
    from .positions import RotaryPositions
    from .record import Record


_ROWS = ("decoder_input_ids", "input_ids", "decoder_inputs_embeds", "inputs_embeds")
"""Arguments that have a row for each sequence. Those of a decoder come first."""

_FIELDS = ("dtype", "rope", "adapter", "weights", "config")
"""Fields of ``model_identity`` that may change over a model's lifetime. Fields that users change precede the digests that change with them.
"""


class Tracking(GenerateChecks):
    """Checks passes when they begin, and records their inputs in ``record``. With ``packed``, the model's attention must be "kvpack".

    ``assisted`` is True if the next passes belong to assisted decoding, whose first pass receives all token ids. ``states`` is True if the
    cache keeps states, which are unusable after a failed pass. ``first`` is the result of ``name_model`` for ``watched`` if the cache was
    compared with it. For an empty cache it is None, and the model is identified at the first token. A pass holds the cache's ``lock`` from
    beginning to end.
    """

    def __init__(
        self,
        record: Record,
        positions: RotaryPositions | None,
        model: Model | None,
        packed: bool,
        watched: torch.nn.Module | None,
        first: NamedModel | None,
    ) -> None:
        super().__init__(record, model)
        self._positions, self._packed = positions, packed
        self._watched = None if watched is None else weakref.ref(watched)
        self._first = self._latest = first
        self._is_new, self._held = first is None, True
        """Two flags: whether ``first`` is yet to name the cache, and whether passes can no longer change the weights that ``first`` names.
        """
        self._is_unused = first is not None
        """True until a pass continues a cache that was compared with the model."""
        self._verified = record.tokens
        """Number of tokens that are known to precede any unnoticed change of weights."""
        self._changed = ""
        self.changes = 0
        """Number of times that a change of the model's weights was detected after the first token."""
        self._passes = PassStack()
        self.states = False
        self.rows: Callable[[], int | None] = lambda: None
        self._checkpointed = [] if watched is None else checkpointing_modules(watched)
        self._running = self._failed = self._muted = False
        self.has_warned_of_source = False
        """True after the warning that the encoder's input is unknown for the cache's tokens."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = type(self)(
            copy.deepcopy(self.record, memo), copy.deepcopy(self._positions, memo), self._model, self._packed, None, self._first
        )
        copied.states, copied._failed = self.states, self._failed
        copied.rows, copied._checkpointed = copy.deepcopy(self.rows, memo), self._checkpointed
        copied._left, copied.has_warned_of_source = self._left, self.has_warned_of_source
        # Hooks do not run after a KeyboardInterrupt.
        if self._running and self._passes.current is not None:
            copied._record_failed_pass(self._passes.current)
        copied._watched, copied._is_unused = self._watched, self._is_unused
        copied._is_new, copied._latest, copied._held, copied._verified = self._is_new, self._latest, self._held, self._verified
        copied._changed, copied.changes = self._changed, self.changes
        return copied

    # Do not compile reads of the record, which changes with every pass.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def enter(self, module: torch.nn.Module, arguments: dict[str, Any]) -> None:
        """Check a call that begins. Raises InvalidParameter before anything is appended."""
        if self._muted:
            return
        self._acquire()
        if (unfinished := self._passes.enter(module, arguments, self.record.tokens)) is not None:
            self._record_failed_pass(unfinished)
        if self._passes.is_outermost:
            self._begin(module, arguments)
        else:
            self._check_positions(arguments)
        self._running = True

    def record_sources(self, sources: Sources) -> None:
        if self._passes.current is not None:
            self._passes.current.sources = sources

    @property
    def is_continuing(self) -> bool:
        """True if the current pass began with tokens in the cache."""
        return self._passes.current is not None and self._passes.current.start > 0

    def _begin(self, module: torch.nn.Module, arguments: dict[str, Any]) -> None:
        self._check_model(module)
        if self._model is not None and self._model.has_encoder and not self._passes.has_encoder:
            raise InvalidParameter(
                f"{self._model.name} has an encoder, whose cache has two parts: use "
                "EncoderDecoderCache(KvpackCache(model, recipe), KvpackCache(model, recipe))"
            )
        self._check_checkpointing(module)
        self._check_rows(arguments)
        if self._packed and self._model is not None and not self._model.runs_packed_layers:
            raise InvalidParameter(
                f"the attention of {self._model.name} is {self._model.attention!r}, which does not support packed layers: "
                'call model.set_attn_implementation("kvpack")'
            )
        if self._packed and arguments.get("output_attentions"):
            raise InvalidParameter(
                "output_attentions=True is not supported with packed layers, because attention weights are never computed: omit it, or use "
                "KvpackCache(model, recipe, dense=True), which decodes each layer before attention"
            )
        if self.record.tokens:
            self._compare_model()
        else:
            self._identify_model()
        if self._positions is not None:
            self._positions.set_deltas(self.model_of_cache, arguments, self.record.tokens)
        self._check_positions(arguments)
        self._check_failed_pass()
        self._check_visible(arguments)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def leave(self, module: torch.nn.Module, arguments: dict[str, Any], output: Any) -> None:
        """Record the end of a call. ``output`` is None if it failed."""
        # A call that another thread's generation rejects does not begin.
        if self._muted or not self.lock.is_own:
            return
        ended = self._passes.leave(module)
        if ended is not None:
            self._count_prompt()
            if self._running and output is None:
                self._record_failed_pass(ended)
            self._running = False
            self._wait_for_weights()
        if self._passes.is_idle:
            self.lock.release()

    def _check_positions(self, arguments: dict[str, Any]) -> None:
        """Raise InvalidParameter if positions do not follow the cache, or if a failed pass may have changed states."""
        if self._positions is not None:
            self._positions.record_or_check(arguments, self.record.tokens)
        self.check_states()

    def _check_checkpointing(self, module: torch.nn.Module) -> None:
        """Raise InvalidParameter in training mode with gradient checkpointing, which calls layers without the cache."""
        for kept in self._checkpointed:
            if (part := kept()) is not None and part.training and part.gradient_checkpointing:
                raise InvalidParameter(
                    f"{type(module).__name__} is in training mode with gradient checkpointing, which gives layers no cache: call "
                    "model.eval(), turn gradient checkpointing off, or omit the cache and pass use_cache=False"
                )

    def _check_rows(self, arguments: dict[str, Any]) -> None:
        """Raise InvalidParameter if the number of rows in a pass differs from the number of sequences in the cache."""
        held = self.rows()
        tensor = next((x for name in _ROWS if isinstance(x := arguments.get(name), torch.Tensor)), None)
        if held is not None and tensor is not None and tensor.shape[0] != held:
            check_rows_fit(tensor.shape[0], held)
            raise InvalidParameter(
                f"the forward pass has {tensor.shape[0]} rows, but the cache holds {_sequence_count_text(held)}: "
                f"repeat each of them with cache.batch_repeat_interleave({tensor.shape[0] // held})"
            )

    def _check_model(self, module: torch.nn.Module) -> None:
        """Raise InvalidParameter unless the model of a pass is the cache's model, contains it, or is a submodel of it."""
        model = None if self._watched is None else self._watched()
        if model is None or module is outermost_model(model):
            return
        modules = {id(part) for part in model.modules()}
        if not any(id(part) in modules for part in (module, *models_in(module))):
            raise InvalidParameter(
                f"the cache was made for a different model than this {type(module).__name__}: continue it with "
                "KvpackCache.of(cache.packed, model), which compares the models, or begin with KvpackCache(model, recipe)"
            )

    def changed_identity(self) -> dict[str, str] | None:
        """Return the fields by which the cache identifies its model. Returns None if they are those of the cache that it continues.

        If weights changed unnoticed since the last call, that is recorded for the tokens added since then.
        """
        model = None if self._watched is None else self._watched()
        if not self.record.tokens:
            return name_model(model).identity_fields if self._is_new and model is not None else None
        self._wait_for_weights()
        if model is not None:
            self._verify(model)
        if not self._is_new or self._first is None:
            return None
        if self._first.unnamed:
            reason = "the cache cannot record its model, so a wrong one would not be noticed"
            warnings.warn(f"{reason}: {self._first.unnamed}", KvpackWarning, 4)
        return self._first.identity_fields

    def _identify_model(self) -> None:
        """Identify the model that computes the first token. Its weights are read in the background during the pass."""
        model = None if self._watched is None else self._watched()
        if model is None:
            return
        self._first = self._latest = name_model(model)
        self._is_new, self._held, self._verified, self._changed = True, False, 0, ""
        self._is_unused = False

    def _wait_for_weights(self) -> None:
        """Wait until the weights that the first pass used have been read."""
        if not self._held and self._first is not None:
            self._first.wait_until_read()
            self._held, self._verified = True, self.record.tokens

    def _compare_model(self) -> None:
        """If weights have changed, record in which fields the model differs from the model of the first token.

        Raises InvalidParameter if the model changed between the check of the cache and the cache's first forward pass.
        """
        model, seen = None if self._watched is None else self._watched(), self._passes.current
        if model is None or seen is None or self._first is None or self._latest is None or self._latest.state is None:
            return
        state, unused, inner = self._latest.state, self._is_unused, outermost_model(model)
        few = seen.ids is not None and seen.ids.shape[1] == 1
        has_changed = not state.matches(inner) if unused else state.has_other_weights(inner, first_only=few)
        if has_changed and self._first.weights and (current := name_model(model)).identity_fields:
            changed = self._first_changed_field(current)
            if unused and changed:
                raise InvalidParameter(
                    f"the model's {changed} changed between the check of the cache and the cache's first forward pass: load the cache "
                    f"with the model that computed it; {SAME_MODEL_ADVICE}"
                )
            self._latest, self._changed = current, changed
            self.changes += 1
        self._is_unused = False
        if self._changed:
            seen.note(f"were computed after the model's {self._changed} changed")

    def _verify(self, model: torch.nn.Module) -> None:
        """If weights have changed without any pass noticing, record that this may affect the tokens since the last call.

        For example, assigning to ``Parameter.data`` goes unnoticed.
        """
        if self._latest is None or self._first is None or self._latest.state is None or not self._latest.weights:
            return
        # Every pass checks a few weights. If they differ, they have changed since the last pass.
        if self._latest.state.has_other_weights(outermost_model(model), first_only=True):
            return
        if current_weights_digest(model) != self._latest.weights:
            self.record.note(self._verified, "may have been computed after the model's weights changed")
            self._latest = name_model(model)
            self._changed = self._first_changed_field(self._latest)
        self._verified = self.record.tokens

    def _first_changed_field(self, latest: NamedModel) -> str:
        """Return the first field in which ``latest`` differs from the model of the first token, or an empty string."""
        assert self._first is not None
        first, now = self._first.identity_fields, latest.identity_fields
        return next((name for name in _FIELDS if now.get(name) != first.get(name)), "")

    def _end_interrupted_pass(self) -> None:
        if self.lock.is_own:
            if self._passes.current is not None:
                self._record_failed_pass(self._passes.current)
            self._running, self._passes = False, PassStack()
            self.lock.release()

    def _record_failed_pass(self, failed: Pass) -> None:
        self._failed = True
        if self.record.tokens > failed.start:
            self._left = failed.start, self.record.tokens

    def _check_visible(self, arguments: dict[str, Any]) -> None:
        """Raise InvalidParameter if the pass would attend to tokens that were hidden when they were computed."""
        if not self.record.tokens or self._passes.has_encoder:
            return
        tensor = next((x for name in _ROWS if isinstance(x := arguments.get(name), torch.Tensor)), None)
        self.check_mask(0 if tensor is None else tensor.shape[1], arguments.get("attention_mask"))

    def check_mask(self, tokens: int, mask: Any) -> None:
        """Raise InvalidParameter if a pass of ``tokens`` tokens with this attention mask would attend to hidden tokens."""
        message = self.record.hidden_tokens_message(mask, tokens)
        if message is not None:
            raise InvalidParameter(message)

    def _check_failed_pass(self) -> None:
        """Raise InvalidParameter if a failed pass has added tokens, and the caller has neither kept nor dropped them."""
        if self._left is not None:
            start, stop = self._left
            raise InvalidParameter(
                f"a forward pass over the cache failed, but tokens {start} to {stop - 1}, which it added, are still in the cache: drop "
                f"them with crop({start - stop}) and run the pass again, or keep them with crop(0)"
            )

    @property
    def model_of_cache(self) -> torch.nn.Module | None:
        return None if self._watched is None else self._watched()

    def prepare_positions(self, arguments: dict[str, Any]) -> None:
        """Make ``generate`` compute multi-dimensional positions that follow the cache."""
        if self._positions is not None and self.record.tokens:
            self._positions.set_deltas(self.model_of_cache, arguments, self.record.tokens)

    def offsets(self, rows: int) -> tuple[int, ...] | None:
        """Return ``Cache.position_offsets`` of the recorded tokens, or None if token ids imply that the offsets are 0."""
        offsets = None if self._positions is None else self._positions.offsets(rows, self.record.tokens)
        inputs = self.record.inputs
        if offsets is None or any(offsets):
            return offsets
        return offsets if inputs is None or inputs.undetermined or inputs.tokens != self.record.tokens else None

    @property
    def is_idle(self) -> bool:
        """True if no pass is in progress."""
        return self._passes.is_idle

    def is_running(self, module: torch.nn.Module) -> bool:
        """Return True if the current pass is a call of ``module``, and this call has not called another module with hooks yet."""
        return self._running and self._passes.is_outermost_call(module)

    @property
    def added_tokens(self) -> int:
        return 0 if self._passes.current is None else self.record.tokens - self._passes.current.start

    @contextmanager
    def without_recording(self) -> Iterator[None]:
        """Return a context manager that suspends recording, for calls that are captured in a CUDA graph during a recorded call."""
        self._muted = True
        try:
            yield
        finally:
            self._muted = False

    def check_states(self, *, ended: bool = False) -> None:
        """Raise InvalidParameter if a failed pass may have changed states or, with ``ended``, if a pass has not ended."""
        if self.states and (self._failed or (ended and self._running)):
            raise InvalidParameter(
                "a forward pass over the cache failed, and states cannot be rolled back: call reset(), or continue with a new KvpackCache"
            )

    def crop(self, tokens: int) -> None:
        """Record that the cache dropped all but the first ``tokens`` tokens."""
        self.record.crop(tokens)
        self._verified = min(self._verified, tokens)
        if self._positions is not None:
            self._positions.crop(tokens)
        # The tokens of an interrupted pass are dropped or kept by the caller, but its states cannot be undone.
        self._failed |= self._running
        self._left, self._running, self._passes = None, False, PassStack()

    @property
    def has_failed(self) -> bool:
        """True if a forward pass failed, or did not end, after the states last matched the cache's last token."""
        return self._failed or self._running

    def mark_restored(self) -> None:
        """Record that states match the cache's last token again."""
        self._failed = False

    def reset(self) -> None:
        self.crop(0)
        self.mark_restored()

    def check_update(self) -> None:
        """Raise InvalidParameter if tokens are about to be appended at positions that do not follow the cache."""
        if self._positions is not None and self._passes.current is not None and self._passes.current.start == self.record.tokens:
            self._positions.require_positions(self.record.tokens)

    def record_appended(self, tokens: int) -> None:
        """Record that a layer has now seen ``tokens`` tokens in all."""
        if tokens > self.record.tokens:
            self.record.add(tokens - self.record.tokens, self._passes.current)

    def select(self, indices: torch.Tensor) -> None:
        self.record.select(indices)
        if self._positions is not None:
            self._positions.select(indices)


def check_rows_fit(rows: int, sequences: int) -> None:
    """Raise InvalidParameter unless a pass's row count is a multiple of the number of sequences in the cache."""
    if rows % sequences:
        raise InvalidParameter(
            f"the forward pass has {rows} rows, but the cache holds {_sequence_count_text(sequences)}: pass a multiple of {sequences} "
            "rows, or "
            "select sequences with Cache.select"
        )


def _sequence_count_text(count: int) -> str:
    return f"{count} sequence" if count == 1 else f"{count} sequences"
