"""KvpackCache: a transformers cache over a packed one."""

from __future__ import annotations

import contextlib
import os
import warnings
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

import torch
from transformers.cache_utils import Cache as TransformersCache

from kvpack import cache_names
from kvpack.cache.cache import Cache, all_states, without_states
from kvpack.cache.files import load
from kvpack.cache.packed_argument import check_packed
from kvpack.cache.rows import row_numbers
from kvpack.cache.states import KeptStates, with_states
from kvpack.coding.recipes import Recipe, parse_recipe
from kvpack.file.inputs import Inputs
from kvpack.formats.arguments import check_flag, integer, shown
from kvpack.formats.errors import InvalidParameter, InvalidType, KvpackWarning, OutOfBounds
from kvpack.live.cache import LiveCache

from .changes import adapters_in_effect
from .compiled import CompiledCalls
from .graphs import ForwardSwitch, StepGraphs, may_replay
from .hooks import Hooks, models_in
from .layers import AbsentLayer, Decoding, PackedLayer, check_window
from .models import Expected, Model, Named, check_identity, check_layers, execution_device, has_multidimensional_positions, identity_for
from .positions import RotaryPositions
from .prompts import changed_since, check_rows_known, common_tokens, other_frequencies, token_ids_of
from .record import Record
from .state_layers import PackedStateLayer, StateLayer, check_kept, keep_states, kept_states, restore
from .states import CapturedLength, CompiledLength, PackedLength, PackedStates, left_out, without_gradients
from .switch import Switch
from .tracking import Tracking, check_rows_fit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpack.cache.files import Bases
    from kvpack.cache.parts import Layers, Tokens
    from kvpack.cache.states import States
    from kvpack.coding.encoding import Progress

MAX_ROWS = 2**20
"""Maximum number of sequences of a cache."""
_DENSE = "a KvpackCache whose layers are decoded for its model (dense=True) decodes them in eager code"


class KvpackCache(TransformersCache):  # type: ignore[misc]
    """A transformers cache whose keys and values are packed as they arrive, and never unpacked.

    ``KvpackCache(model, recipe)`` is empty, ``KvpackCache.of(cache, model)`` continues a packed cache, and
    ``KvpackCache.load(path, model)`` a file. Give the model the token ids that follow the cache, or give ``generate`` all token ids.
    ``KvpackCache(config=model.config, recipe=...)`` is empty and has no model: set attention "kvpack" with
    ``model.set_attn_implementation``; nothing is recorded, and no other model's pass is refused.

    With ``model``, a transformers model or a PEFT wrapper of one, its attention is switched to "kvpack" until ``release`` or the end of
    a ``with`` block (plain tensors go to the attention that was set before), the cache is checked against it, forward passes are
    recorded (``packed.inputs``), and ``generate`` is refused other token ids than the cache's. A model whose attention
    cannot take packed layers then gets dense keys and values, decoded layer by layer for each call, and a KvpackWarning says so;
    ``dense`` says at once whether it does.

    A model with rotary positions of several dimensions, such as Qwen2-VL, continues where the cache's positions end, which a
    KvpackCache records; for a cache that does not say, ``rope_deltas`` is what the model had of that name after the prompt, or 0 for
    text. The model's own ``rope_deltas`` is then set before each pass.

    With ``prompt``, the token ids that ``generate`` will be given, the cache keeps the tokens that both begin with, and the model
    computes the others: ``get_seq_length()`` tells how many are kept. Where a sliding-window layer has dropped tokens that the next one
    attends to, or the model's RoPE turns keys of either by the frequencies of long sequences (dynamic, longrope), none are, and a
    KvpackWarning says so. The cache must hold its token ids, those of each row of a batch, and depend on nothing else but padding.

    Tokens that an attention mask hid when they were computed, as it hides padding, stay hidden: a pass that would see them is refused,
    and told which mask to give. ``packed.inputs.hidden`` lists them.

    With ``keep_all``, layers with a sliding window keep the tokens that no later one attends to, so that a ``Store`` takes the whole prompt
    and ``crop`` goes back to any token. A pass takes no longer, and the cache and its file are larger.

    With ``graphs``, decode steps on a CUDA device are replays of a CUDA graph, which the host launches at once: a row of passes of one
    token for each sequence, with token ids, positions and a mask of padding on the left at most, after a few that run as they are. Every
    other pass runs as it does without. The graph is captured again in each row of steps, and its first replay must give what the model
    gives without it, bit for bit; where that fails, as for a model whose steps read values on the host, steps run without. Values of
    weights may change in place; where modules, their attributes or code, hooks, modes or the places of weights have changed, the graph is
    captured again. By default (None) that is so for a model on a CUDA device whose code is all PyTorch's and transformers' own; False
    leaves it out. With True it is so for any other, too, such as one with adapters, and a KvpackWarning says where steps run without: what
    else a forward of the model's own reads on the host, or counts there, must then stay as it is.

    Raises InvalidType for what is neither a model nor a packed cache; InvalidParameter; InvalidParameter, naming what differs, for a cache
    of another model, for one that does not start at position 0, and without ``prompt`` for a batch of which the ids of rows are unknown;
    InvalidParameter when a layer ends before the others; InvalidParameter when one lacks tokens of the model's window.
    """

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        recipe: str | os.PathLike[str] | Recipe | None = None,
        *,
        config: Any = None,
        dense: bool | None = None,
        graphs: bool | None = None,
        keep_all: bool = False,
    ) -> None:
        _check_flags(dense=dense, graphs=graphs, keep_all=keep_all)
        parsed = parse_recipe(_checked_recipe(model, recipe, config))
        known, inside = _known(model)
        expected = Expected(config) if known is None else known
        present = expected.layers_with_tokens()
        # The model is named at its first token; a basis is compared with it now.
        identity = {} if parsed.basis is None or model is None else identity_for(model, parsed.basis)
        windows = expected.windows(len(present))
        self.live = LiveCache(parsed, layers=len(present), sliding_windows=None if keep_all else windows, model=identity)
        self._begin(model, known, inside, expected, None, dense=dense, graphs=graphs)

    @classmethod
    def of(
        cls,
        cache: Cache,
        model: torch.nn.Module | None = None,
        *,
        prompt: torch.Tensor | Sequence[int] | None = None,
        rope_deltas: torch.Tensor | int | None = None,
        dense: bool | None = None,
        graphs: bool | None = None,
        keep_all: bool = False,
    ) -> Self:
        """A KvpackCache that continues the packed ``cache``, checked against ``model`` if there is one.

        Without a model, attention "kvpack" is set by the caller (``model.set_attn_implementation("kvpack")``), and nothing is recorded.
        The options, and what is raised, are those of the class.
        """
        _check_flags(dense=dense, graphs=graphs, keep_all=keep_all)
        _check_cache(cache, model)
        known, inside = _known(model)
        if cache.start:
            raise InvalidParameter(
                f"the cache starts at position {cache.start}, but a model continues from position 0: load the cache with its first tokens"
            )
        cache.check_ends()
        compared: Named | None = None
        if known is not None:
            known.check(cache)
            compared = check_identity(cache, model)
            if prompt is None:
                check_rows_known(cache)
        windows = [None] * len(cache) if known is None else known.windows(len(cache))
        past = cls.__new__(cls)
        past.live = LiveCache.of(without_states(cache), sliding_windows=None if keep_all else windows)
        past._begin(model, known, inside, known, cache, rope_deltas=rope_deltas, compared=compared, dense=dense, graphs=graphs)
        if prompt is not None:
            past._keep(cache, prompt)
        return past

    def _begin(
        self,
        model: torch.nn.Module | None,
        known: Model | None,
        inside: list[Any],
        expected: Expected | None,
        cache: Cache | None,
        *,
        rope_deltas: torch.Tensor | int | None = None,
        compared: Named | None = None,
        dense: bool | None,
        graphs: bool | None,
    ) -> None:
        """Set up the layers and the model's hooks; ``cache`` is the packed cache to continue, if any."""
        inputs = Inputs() if cache is None else cache.inputs
        present = [bool(layer.sides) for layer in cache] if cache is not None else [] if expected is None else expected.layers_with_tokens()
        if not any(present):
            raise InvalidParameter("no layer of the cache has keys or values: begin with KvpackCache(model, recipe)")
        windows = [None] * len(present) if expected is None else expected.windows(len(present))
        states = [0] * len(present) if expected is None else expected.states(len(present))
        for number in () if expected is None else expected.shared:
            self.live.share(number)
        decoding = Decoding(bool(dense))
        layers = [
            self._layer(number, held, window, decoding, states[number])
            for number, (held, window) in enumerate(zip(present, windows, strict=True))
        ]
        super().__init__(layers=layers)
        self._following = _following(layers)
        self._states: dict[int, KeptStates] = {}
        if cache is not None:
            keep_states(self.layers, cache)
            self._states = {position: KeptStates(own) for position, own in all_states(cache).items()}
        self._model, self._dense, self._decoding = known, bool(dense), decoding
        for number, layer in enumerate(self.layers):
            if dense and expected is None and layer.is_sliding:
                raise InvalidParameter(
                    f"layers[{number}] skipped tokens: dense layers need the model's window, KvpackCache.of(cache, model)"
                )
            layer.check_window()
        tokens = self.live.tokens
        adapters = adapters_in_effect(inside[0]) if inside else None
        positions = RotaryPositions.of(known, cache, inputs, rope_deltas)
        if known is not None and dense is None and not known.takes_packed_layers:
            self._dense = True
            decoding.tell(known.name)
        record = Record(inputs, tokens, adapters, _rows(self.live) or 1)
        self.passes = Tracking(record, positions, known, not self._dense, model if inside else None, compared)
        self.passes.states = any(states)
        self.passes.rows = partial(_rows, self.live)
        self._careful = positions is not None or any(states)
        self._hooks = None if model is None else Hooks.on(model, inside)
        self._switch = None if known is None or self._dense else Switch.of(model)
        self._seen: set[type] = set()
        self.masked: dict[bool, bool] = {}
        """For layers with and without a sliding window, True if the model's own attention had a causal mask in this pass."""
        self.compiled = CompiledCalls(self, len(self.layers))
        self.graphs = self._step_graphs(graphs, model, "the model" if known is None else known.name)
        self._forward = None if model is None or self.graphs is None else ForwardSwitch.of(model)
        self._metadata = {} if cache is None else dict(cache.metadata)

    def _step_graphs(self, graphs: bool | None, model: torch.nn.Module | None, name: str) -> StepGraphs | None:
        """What replays decode steps; None, with a warning that names the model if ``graphs`` were asked for, if nothing can."""
        number = next(number for number, layer in enumerate(self.layers) if isinstance(layer, PackedLayer))
        # Of decoded keys and values, of states and of several rotary positions a step depends on more than a graph is given.
        wanted = graphs if graphs is not None else model is not None and may_replay(model)
        if wanted and not self._dense and not self._careful:
            return StepGraphs(self, number, bool(graphs))
        if graphs:
            reason = "keys and values are decoded for each call"
            if self._careful:
                reason = "it keeps states" if self.passes.states else "it has rotary positions of several dimensions"
            warnings.warn(f"decode steps of {name} run without CUDA graphs: {reason}", KvpackWarning, stacklevel=4)
        return None

    def _layer(self, number: int, held: bool, window: int | None, decoding: Decoding, states: int) -> Any:
        if states:
            return PackedStateLayer(self.live, number, window, decoding, states) if held else StateLayer(number, states)
        return PackedLayer(self.live, number, window, decoding) if held else AbsentLayer()

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        model: torch.nn.Module,
        *,
        prompt: torch.Tensor | Sequence[int] | None = None,
        copy: bool = False,
        memory_limit: int | None = None,
        layers: Layers | None = None,
        tokens: Tokens | None = None,
        recipe: str | os.PathLike[str] | Recipe | None = None,
        basis: Bases | None = None,
        device: torch.device | str | None = None,
        progress: Progress | None = None,
        rope_deltas: torch.Tensor | int | None = None,
        dense: bool | None = None,
        graphs: bool | None = None,
        keep_all: bool = False,
    ) -> Self:
        """The cache in the file at ``path``, on ``device`` (the model's, if it is None), to be continued by ``model``.

        ``copy``, ``memory_limit``, ``layers``, ``tokens``, ``recipe``, ``basis`` and ``progress`` are those of ``kvpack.load``; the other
        options are those of ``of``, which checks layers, shapes and identity.
        Raises what ``kvpack.load`` and ``of`` raise.
        """
        given: Any = model
        if not isinstance(given, torch.nn.Module):
            swapped = isinstance(path, torch.nn.Module)
            instead = "write KvpackCache.load(path, model)" if swapped else "AutoModelForCausalLM.from_pretrained(folder) loads one"
            raise InvalidType(f"the second argument is {shown(given)}, expected a transformers model: {instead}")
        loaded = load(
            path,
            device=execution_device(model) if device is None else device,
            layers=layers,
            tokens=tokens,
            memory_limit=memory_limit,
            copy=copy,
            basis=basis,
            recipe=recipe,
            progress=progress,
        )
        return cls.of(loaded, model, prompt=prompt, rope_deltas=rope_deltas, dense=dense, graphs=graphs, keep_all=keep_all)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    @property
    def packed(self) -> Cache:
        """Packed cache with every token appended so far: the argument of ``kvpack.save``.

        ``inputs`` says what the tokens came from, as far as it was recorded, and ``model`` what the model is. All
        weights are read, which takes about as long as a decode step: where they are not those of the pass before, ``inputs`` says so.
        Another thread may ask while a model generates: it waits for the end of a forward pass.
        """
        with self.passes.turns.taken():
            if self.live.tokens:
                check_kept(self.layers)
            self.passes.check_states(ended=True)
            packed = self.live.snapshot(packed=True)
            layers, tokens = with_states(packed.layers, kept_states(self.layers)), packed.tokens
            states = MappingProxyType({position: own.now for position, own in self._states.items() if position < tokens})
            # Before the record is read, to which it may add.
            named = self.passes.name()
            model = packed.model if named is None else MappingProxyType(named)
            offsets = self.passes.offsets(_rows(self.live) or 1)
            inputs = self.passes.record.inputs
            return replace(
                packed,
                layers=layers,
                inputs=inputs,
                metadata=self._metadata,
                model=model,
                position_offsets=offsets,
                states_at=states,
            )

    def generate(self, token_ids: Any, **options: Any) -> Any:
        """``generate`` of the cache's model over this cache, which it is given under the name that the installed transformers has for it.

        ``token_ids``, a list or a tensor ``[batch, token]`` of integers, are those of the cache and at least one that follows; ``options``
        are other arguments of the model's ``generate``. Raises InvalidParameter for a cache without a model, and for other ids than the
        cache's; InvalidType or InvalidParameter for anything but token ids; and what ``generate`` raises.
        """
        model: Any = self.passes.model_of_cache
        if model is None:
            raise InvalidParameter("the cache has no model to generate with: write KvpackCache.of(cache, model)")
        ids = token_ids_of(token_ids).to(execution_device(model))
        if len(ids) == 1:
            # Where padding and the end of a text are one token, transformers warns that it cannot tell them apart.
            options.setdefault("attention_mask", torch.ones_like(ids))
        return model.generate(ids, **cache_names.over(model, self), **options)

    def release(self) -> None:
        """Stop recording forward passes, and set the attention that the model had, unless another cache needs either."""
        self._hooks = self._switch = self._forward = self.graphs = None

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Append ``[batch, kv_head, token, dim]`` keys and values to one layer, and return the arguments of attention for both.

        That is the packed layer, or dense keys and values if the model cannot take it.
        Raises OutOfBounds for a layer that the cache does not have, InvalidParameter when the tensors do not continue it, or when an
        earlier pass failed between two layers.
        """
        if type(layer_idx) is not int:
            layer_idx = integer(layer_idx, "layer_idx")
        if not 0 <= layer_idx < len(self.layers):
            raise OutOfBounds(f"the model asks for layer {shown(layer_idx)}, the packed cache has {len(self.layers)} layers")
        if self._dense:
            return self._update_decoded(key_states, value_states, layer_idx)  # type: ignore[no-any-return]
        if torch.compiler.is_dynamo_compiling():
            self.compiled.compiled_update(layer_idx, key_states, value_states)
        else:
            self.take(key_states, value_states, layer_idx)
        states = PackedStates(self, layer_idx, key_states, value_states)
        return states, states

    @left_out(_DENSE)
    def _update_decoded(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int) -> tuple[Any, Any]:
        """Run ``take``, and return the layer's dense keys and values; if they are not available, add nothing."""
        before = self.live.seen(layer_idx)
        self._take(key_states, value_states, layer_idx)
        layer: PackedLayer = self.layers[layer_idx]
        try:
            dense = layer.decoded(key_states.shape[2], key_states.dtype)
        except BaseException:
            self.live.truncate(before, layer_idx)
            raise
        self.passes.appended(self.live.seen(layer_idx))
        k, v = (without_gradients(x, key_states, value_states) for x in dense)
        return k, v

    def take(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int) -> None:
        """Add tokens to one layer as ``update``, which also returns the arguments of attention."""
        # Most steps need no more: what they give is of the shape of the step before.
        seen = None if self._careful else self.live.try_update(layer_idx, key_states, value_states, self._following[layer_idx])
        if seen is None:
            self._take(key_states, value_states, layer_idx)
            seen = self.live.seen(layer_idx)
        self.passes.appended(seen)

    def _take(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int) -> None:
        self._check_states(key_states, value_states, layer_idx)
        self.passes.check_update()
        if self.passes.states and self.live.seen(layer_idx):
            check_kept(self.layers)
        self.live.update(layer_idx, key_states, value_states)

    def attend(self, layer: int, q: torch.Tensor, *, sliding_window: int | None = None, **options: Any) -> torch.Tensor:
        """``LiveCache.attend`` over one layer. Raises InvalidParameter, too, for a window with tokens that the layer has dropped."""
        if skipped := self.live.skipped(layer):
            check_window(skipped, self.live.held(layer) - q.shape[2], sliding_window)
        return self.live.attend(layer, q, sliding_window=sliding_window, **options)

    @property
    def is_watched(self) -> bool:
        """True if hooks on the model tell the cache of forward passes."""
        return self._hooks is not None

    def records(self, model: torch.nn.Module) -> bool:
        """Return True if a call of ``model`` is the current pass over the cache and nothing else records it."""
        return self._hooks is not None and not self._hooks.recordings and self.passes.is_running(model)

    def watched(self, number: int) -> torch.nn.Module | None:
        """The module of that number among those with hooks."""
        return None if self._hooks is None else self._hooks.inside[number]()

    def decoded(self, layer: int, queries: int, dtype: torch.dtype) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Dense keys and values of one layer for a mask over those that a pass of ``queries`` tokens sees, with a KvpackWarning."""
        self._decoding.tell_masked()
        own: PackedLayer = self.layers[layer]
        return own.decoded(queries, dtype)

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        """The number of tokens that a layer has seen; in compiled code a tensor, as of transformers' own caches of a fixed size."""
        if torch.compiler.is_dynamo_compiling() and not self._dense:
            return self.compiled.compiled_seen(layer_idx)
        return self._length(layer_idx)

    @left_out(_DENSE)
    def _length(self, layer_idx: int) -> int:
        if self.graphs is not None and self.graphs.captured is not None:
            return CapturedLength(self.graphs.captured.tokens)
        layer_idx = integer(layer_idx, "layer_idx")
        if layer_idx < 0:
            raise OutOfBounds(f"layer {shown(layer_idx)} is out of range: the cache has {len(self.layers)} layers")
        return int(super().get_seq_length(layer_idx))

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[Any, int]:
        """The number of keys for a mask, marked if attention "kvpack" needs no mask, and the first of them."""
        if not torch.compiler.is_dynamo_compiling():
            return self.mask_sizes(query_length, layer_idx)
        if self._dense:
            return self._dense_mask_sizes(query_length, layer_idx)  # type: ignore[no-any-return]
        sizes = partial(self.mask_sizes, query_length, layer_idx)
        # Where the first key is matters to those alone who ask for the sizes.
        return CompiledLength(sizes, partial(self.compiled.compiled_starts, layer_idx, query_length)), 0

    @left_out(_DENSE)
    def _dense_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.mask_sizes(query_length, layer_idx)

    def mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """``get_mask_sizes`` in eager code."""
        length, offset = super().get_mask_sizes(query_length, layer_idx)
        if self._dense:
            return length, offset
        if self.graphs is not None and (captured := self.graphs.captured) is not None:
            told = CapturedLength(captured.tokens)
            told.captured = captured
            return told + query_length, 0
        packed = PackedLength(length)
        attending = [layer for layer in self.layers if isinstance(layer, PackedLayer | AbsentLayer)]
        # transformers asks for layer 0 also where that keeps states alone, and means the first that attends.
        asked = self.layers[layer_idx] if self.layers[layer_idx] in attending else attending[0]
        packed.first_visible = lambda: min(layer.first_visible for layer in attending if layer.is_sliding == asked.is_sliding)
        self.masked[asked.is_sliding] = False
        packed.leave_to_attention = partial(self.masked.__setitem__, asked.is_sliding)
        if not self.is_watched:
            packed.check_mask = partial(self.passes.check_mask, query_length)
        return packed, offset

    def is_masked(self, layer: int) -> bool:
        """Return True if the model's own attention had a causal mask for ``layer``; some models request one, yet pass is_causal=False."""
        return self.masked.get(self.layers[layer].is_sliding, False)

    @property
    def is_linear(self) -> list[bool]:
        """For each layer, True if it has states and no keys and values."""
        return [isinstance(layer, StateLayer) and not isinstance(layer, PackedLayer) for layer in self.layers]

    def activate_past_recording(self) -> None:
        """Let sliding-window layers keep all tokens from ``crop`` to ``crop``, as assisted decoding needs them. Raises InvalidParameter."""
        if self._model is not None and self._model.has_encoder:
            raise InvalidParameter(
                f"{self._model.name} has an encoder, and transformers cuts caches of two parts only where both are DynamicCaches: "
                "assisted decoding needs those"
            )
        super().activate_past_recording()
        self.passes.assisted = True

    @property
    def keeps_states(self) -> bool:
        """True if layers keep recurrent or convolution states."""
        return self.passes.states

    @property
    def states_at(self) -> tuple[int, ...]:
        """Numbers of tokens, ascending, to which ``crop`` can return in a cache with states."""
        return tuple(sorted(self._states))

    def keep_states(self) -> None:
        """Keep a copy of all states after the newest token, in the host's memory, so that a ``Store`` and ``crop`` have them.

        Call it between passes, at multiples of the store's ``chunk``. A model without recurrent and convolution layers has nothing to keep.
        Raises InvalidParameter after a pass that failed, and for a model that keeps states in its modules.
        """
        with self.passes.turns.taken():
            tokens = self.passes.record.tokens
            if not self.keeps_states or not tokens:
                return
            self.passes.check_states(ended=True)
            check_kept(self.layers)
            own = kept_states(self.layers)
            self._states[tokens] = KeptStates(tuple({name: state.cpu() for name, state in layer.items()} for layer in own))

    def go_back(self, tokens: int) -> int:
        """Keep the first ``tokens`` tokens, or as many as have states (``states_at``), and return the number kept.

        Raises OutOfBounds for more tokens than the cache has, and the errors of ``crop``.
        """
        tokens, held = integer(tokens, "tokens"), self.passes.record.tokens
        if not 0 <= tokens <= held:
            raise OutOfBounds(f"go_back({tokens}): the cache holds {held} tokens, expected a number from 0 to {held}")
        if self.keeps_states and tokens != held:
            tokens = max((position for position in self._states if position <= tokens), default=0)
        self.crop(tokens - held)
        return tokens

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the newest ``-tokens_to_remove`` tokens of every layer, or none. Raises OutOfBounds, InvalidParameter.

        Layers that keep states go back to the tokens in ``states_at``, and to 0; ``go_back`` finds the nearest of them. Tokens are
        counted from the end of the longest layer: after a forward pass that failed between two layers, all end at one token.
        """
        tokens_to_remove = integer(tokens_to_remove, "the number of tokens to remove")
        with self.passes.turns.taken():
            if tokens_to_remove > 0:
                raise OutOfBounds(
                    f"crop({tokens_to_remove}): expected the number of tokens to drop, as a negative number; "
                    f"crop({tokens_to_remove} - cache.get_seq_length()) keeps the first {tokens_to_remove}"
                )
            self._crop(tokens_to_remove)

    def _crop(self, tokens_to_remove: int) -> None:
        tokens = self.passes.record.tokens + tokens_to_remove
        states = self._states_after(tokens, tokens_to_remove)
        removed = [tokens_to_remove] * len(self.layers)
        for number, layer in enumerate(self.layers):
            if isinstance(layer, PackedLayer):
                seen = self.live.seen(number)
                if seen < tokens:
                    raise OutOfBounds(
                        f"crop({tokens_to_remove}) leaves {tokens} tokens, and layers[{number}] has seen {seen}: a forward pass ended "
                        f"before it; crop({seen - self.passes.record.tokens}) drops what that added"
                    )
                removed[number] = tokens - seen
            layer.check_crop(removed[number])
        for layer, count in zip(self.layers, removed, strict=True):
            layer.crop(count)
        self.passes.crop(tokens)
        if states is not None:
            restore(self.layers, states)
            self.passes.restored()
            self._states = {position: own for position, own in self._states.items() if position <= tokens}

    def _states_after(self, tokens: int, tokens_to_remove: int) -> States | None:
        """The states to go back to after the first ``tokens`` tokens; None if no layer keeps any, or all are as they should be.

        Raises OutOfBounds if they are not known.
        """
        if not self.keeps_states or (not tokens_to_remove and not (self.passes.has_failed and tokens in self._states)):
            return None
        if not tokens:
            return ({},) * len(self.layers)
        kept = self._states.get(tokens)
        if kept is None:
            number = next(number for number, layer in enumerate(self.layers) if isinstance(layer, StateLayer))
            nearest = max((position for position in self._states if position < tokens), default=0)
            there = f"the nearest before are after {nearest}: call go_back({tokens}), which keeps {nearest}"
            raise OutOfBounds(
                f"crop({tokens_to_remove}): layers[{number}] keeps states, and has none after the first {tokens} tokens; "
                f"{there if nearest else 'there are none before: call reset()'}, or call keep_states() between passes"
            )
        return kept.now

    def take_back(self) -> None:
        """Drop the tokens of the current pass, as far as layers can go back, because it is about to be refused."""
        with contextlib.suppress(OutOfBounds, InvalidParameter):
            if not self.passes.states:
                self.crop(-self.passes.added)

    def reset(self) -> None:
        with self.passes.turns.taken():
            super().reset()
            self.passes.reset()
            self._states = {}

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        repeats = integer(repeats, "repeats")
        if not 1 <= repeats <= MAX_ROWS:
            raise InvalidParameter(f"repeats is {shown(repeats)}, expected the number of times that each sequence is to be there, from 1")
        self.batch_select_indices(torch.arange(_rows(self.live) or 1, device="cpu").repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows ``indices`` of the batch, in that order; codes are copied, never decoded."""
        with self.passes.turns.taken():
            super().batch_select_indices(indices)
            self.passes.select(indices)
            if self._states:
                rows = row_numbers(indices)
                self._states = {position: own.select(rows) for position, own in self._states.items()}

    def expand(self, rows: int) -> None:
        """Repeat each sequence so that there are ``rows`` of them, as ``generate`` repeats token ids for beams.

        Raises InvalidParameter if ``rows`` is not a multiple of the cache's sequences.
        """
        held = _rows(self.live)
        if held is None or held == rows:
            return
        check_rows_fit(rows, held)
        self.batch_repeat_interleave(rows // held)

    def begin_again(self, name: str) -> None:
        """Drop all tokens for the model ``name``, which computes them again, with a KvpackWarning if there are any."""
        if tokens := self.passes.record.tokens:
            text = f"{name} computes all tokens again, as its RoPE has other frequencies from here on: {tokens} in the cache are dropped"
            warnings.warn(text, KvpackWarning, stacklevel=4)
            self.reset()

    def check_attention(self, module: torch.nn.Module) -> None:
        """Raise InvalidParameter when an attention module belongs to a model that cannot continue this cache."""
        if self._model is not None or type(module) in self._seen:
            return
        check_layers(len(self.layers), module)
        if has_multidimensional_positions(module):
            raise InvalidParameter(
                f"{type(module).__name__} has rotary positions of several dimensions, which need the model: "
                "write KvpackCache.of(cache, model)"
            )
        self._seen.add(type(module))

    def _keep(self, contents: Any, prompt: torch.Tensor | Sequence[int]) -> None:
        """Keep the tokens with which both ``prompt`` and a packed cache begin; none if a layer lacks some, or they have other keys."""
        tokens = 0
        if isinstance(contents, Cache):
            other = changed_since(contents)
            if not other and self._model is not None:
                other = other_frequencies(contents, prompt, self._model.config)
            if other:
                warnings.warn(f"no tokens of the cache are kept for the prompt: {other}", KvpackWarning, stacklevel=4)
            else:
                tokens = common_tokens(contents, prompt)
        try:
            if tokens and (kept := self.go_back(tokens)) < tokens:
                which = f"the first {kept}" if kept else "none"
                text = f"the prompt and the cache begin with the same {tokens} tokens, and {which} of them are kept"
                warnings.warn(f"{text}: layers keep states, and have none after later tokens", KvpackWarning, stacklevel=4)
                tokens = kept
        except (OutOfBounds, InvalidParameter) as error:
            text = f"the prompt and the cache begin with the same {tokens} tokens, and none of them are kept: {error}"
            warnings.warn(text, KvpackWarning, stacklevel=4)
            tokens = 0
        if not tokens:
            self.reset()

    def _check_states(self, key_states: torch.Tensor, value_states: torch.Tensor, number: int) -> None:
        """Raise InvalidParameter unless these states continue layer ``number``, and it is the one that is due."""
        for name, given in (("keys", key_states), ("values", value_states)):
            if not isinstance(given, torch.Tensor) or given.dim() != 4:
                raise InvalidType(f"layers[{number}]: {name} are {shown(given)}, expected a tensor [batch, kv_head, token, dim]")
        shapes = self.live.shapes(number)
        if not shapes and not isinstance(self.layers[number], AbsentLayer):
            return
        for name, side, states in (("keys", "k", key_states), ("values", "v", value_states)):
            if side not in shapes:
                raise InvalidParameter(
                    f"layers[{number}] of the cache has no {name}, but the model has: load the model that computed the cache"
                )
            found = states.shape[0], states.shape[1], states.shape[3]
            # A layer without tokens takes any batch.
            held = shapes[side] if self.live.seen(number) else (found[0], *shapes[side][1:])
            if found != held:
                raise InvalidParameter(
                    f"layers[{number}]: the model's {name} have batch, heads and dim {list(found)}, the cache's {list(held)}: "
                    f"{list(states.shape)} does not continue it"
                )
        seen, following = self.live.seen(number), self._following[number]
        if self.live.seen(following) < seen:
            raise InvalidParameter(
                f"layers[{number}] has seen {seen} tokens and layers[{following}] {self.live.seen(following)}: "
                f"a forward pass ended between them; crop({self.live.seen(following) - seen}) drops what it added"
            )


def begin(model: torch.nn.Module, contents: Cache | str | os.PathLike[str] | Recipe, **options: Any) -> KvpackCache:
    """An empty cache of the recipe ``contents``, or one that continues the packed cache ``contents``."""
    if isinstance(contents, Cache):
        return KvpackCache.of(contents, model, **options)
    options.pop("prompt", None)
    return KvpackCache(model, contents, **options)


def _check_flags(*, keep_all: bool, **options: bool | None) -> None:
    """Raise InvalidParameter unless ``keep_all`` is a flag, and each option is a flag or None."""
    check_flag(keep_all, "keep_all")
    for name, flag in options.items():
        if flag is not None:
            check_flag(flag, name)


def _known(model: torch.nn.Module | None) -> tuple[Model | None, list[Any]]:
    """Return the description of ``model`` that caches need, and the transformers models in it."""
    inside = models_in(model) if model is not None and hasattr(model, "modules") else []
    return (None if model is None else Model(model, inside)), inside


def _checked_recipe(model: Any, recipe: Any, config: Any) -> Any:
    """The recipe of an empty cache. Raises InvalidType, InvalidParameter."""
    if isinstance(model, Cache) or isinstance(recipe, Cache):
        raise InvalidType("KvpackCache(model, recipe) begins an empty cache: write KvpackCache.of(cache, model) to continue a packed one")
    if model is None and config is None:
        raise InvalidType("the model is None: write KvpackCache(model, recipe), or KvpackCache(config=model.config, recipe=...)")
    if model is not None and config is not None:
        raise InvalidParameter("model and config were both given, and a model has its own: leave one of them out")
    if model is not None and not isinstance(model, torch.nn.Module):
        loads = "AutoModelForCausalLM.from_pretrained(folder) loads a model, and KvpackCache.load(path, model) continues a file"
        raise InvalidType(f"the model is {shown(model)}, expected a transformers model: {loads}")
    if recipe is None:
        raise InvalidParameter("KvpackCache(model) needs the recipe of its codes, such as KvpackCache(model, 'octopus-3')")
    return recipe


def _check_cache(cache: Any, model: Any) -> None:
    """Raise InvalidType for anything but a packed cache, and a model or None."""
    if cache is None:
        raise InvalidType(
            "the cache is None, which Store.load returns if nothing is stored: write KvpackCache(model, recipe), which begins an empty one"
        )
    if isinstance(cache, torch.nn.Module):
        raise InvalidType("the first argument is a model: write KvpackCache.of(cache, model), or KvpackCache(model, recipe)")
    if isinstance(cache, str | os.PathLike):
        raise InvalidType(f"{shown(cache)} is not a packed cache: KvpackCache.load(path, model) continues a file")
    check_packed(cache, "KvpackCache.of({}, model)")
    if model is not None and not isinstance(model, torch.nn.Module):
        raise InvalidType(f"the second argument is {shown(model)}, expected the model that continues the cache")


def _rows(live: LiveCache) -> int | None:
    """The number of sequences of a live cache; None before its first tokens."""
    for number in range(len(live)):
        if live.seen(number):
            return live.batch(number)
    return None


def _following(layers: Sequence[Any]) -> list[int]:
    """For each layer the next one that gets tokens in the same pass; itself for the last."""
    packed = [number for number, layer in enumerate(layers) if isinstance(layer, PackedLayer)]
    return [next((after for after in packed if after > number), number) for number in range(len(layers))]
