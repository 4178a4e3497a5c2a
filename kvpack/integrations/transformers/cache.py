"""KvpackCache: a transformers cache over a packed cache."""

from __future__ import annotations

import contextlib
import copy
import os
import warnings
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

import torch

from kvpack import cache_names
from kvpack.cache.cache import Cache, without_states
from kvpack.cache.files import load
from kvpack.cache.side import row_indices
from kvpack.cache.states import with_states
from kvpack.coding.recipes import Recipe, parse_recipe
from kvpack.file.inputs import Inputs
from kvpack.formats.arguments import as_integer, describe
from kvpack.formats.errors import InvalidParameter, KvpackError, KvpackWarning, OutOfBounds
from kvpack.live.cache import LiveCache

from .arguments import check_cache, check_flags, check_model_of_file, checked_recipe
from .attention_switch import AttentionSwitch
from .compiled import CompiledCalls
from .graphs import ForwardSwitch, step_graphs
from .hooks import Hooks, models_in, outermost_model
from .layers import DecodingWarnings, EmptyLayer, PackedLayer, following_layers, live_batch_size
from .model_state import active_adapters
from .models import ExpectedLayers, Model, NamedModel, check_identity, execution_device, identity_for
from .pass_calls import PassCalls
from .positions import RotaryPositions
from .prompts import as_token_ids, check_rows_known, crop_to_prompt
from .record import Record
from .rollback import Rollback
from .state_layers import PackedStateLayer, StateLayer, check_states_available, copy_states, restore_states
from .tracking import Tracking, check_rows_fit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpack.cache.files import Bases
    from kvpack.cache.parts import Layers, Tokens
    from kvpack.coding.encoding import Progress

MAX_ROWS = 2**20
"""Maximum number of sequences in a cache."""


class KvpackCache(PassCalls):
    """A transformers cache that packs keys and values as they arrive and never unpacks them.

    ``KvpackCache(model, recipe)`` is empty, ``KvpackCache.of(cache, model)`` continues a packed cache, and ``KvpackCache.load(path,
    model)`` continues a file. Pass the model the token ids that follow the cache, or pass ``generate`` all token ids.
    ``KvpackCache(config=model.config, recipe=...)`` is an empty cache without a model, for which you set attention "kvpack" yourself with
    ``model.set_attn_implementation``. Such a cache records nothing, and accepts passes of any model.

    With ``model``, a transformers model or a PEFT wrapper of one, the model's attention is switched to "kvpack" until ``release`` or the
    end of a ``with`` block. Plain tensors still use the previous attention. The cache is checked against the model, forward passes are
    recorded (``packed.inputs``), and ``generate`` rejects token ids that differ from the cache's. If the model's attention accepts only
    tensors, each layer is decoded for each call, with a KvpackWarning, unless ``dense=True`` requests it.

    For a model with multi-dimensional rotary positions, such as Qwen2-VL, a KvpackCache records where positions continue. If a cache lacks
    this record, pass ``rope_deltas``: the model's own value after the prompt, or 0 for text. The model's ``rope_deltas`` is set before each
    pass.

    With ``prompt``, the token ids that will be passed to ``generate``, only the common prefix of cache and prompt is kept, and the model
    computes the rest. ``get_seq_length()`` returns the number of tokens kept. No tokens are kept, with a KvpackWarning, if a sliding-window
    layer has dropped tokens that the next token attends to, or if the model's RoPE uses different frequencies for long sequences (dynamic,
    longrope). The cache must contain the token ids of each row, and must not depend on anything else except padding.

    Tokens that an attention mask hid when they were computed, such as padding, stay hidden (``packed.inputs.hidden``). A pass that would
    attend to them is rejected with an error that names the mask to pass.

    With ``keep_all``, sliding-window layers keep all tokens, so that a ``Store`` can save the whole prompt and ``crop`` can return to any
    token. Passes are equally fast, but the cache and its file are larger.

    With ``graphs``, decode steps on a CUDA device replay a CUDA graph. A step is a pass of one token per sequence, with only token ids,
    positions and a mask of padding on the left. In each series of steps, the first ones run normally, and then one is captured. If its
    first replay does not equal the model's own result bit for bit, steps run without a graph. Weights may change in place. Any other change
    of the model (modules, their attributes or code, hooks, modes, addresses of weights) causes a new capture. By default (None), graphs are
    used for models on a CUDA device whose code is all from PyTorch and transformers. True uses them for any model, such as one with
    adapters, and a KvpackWarning reports steps that run without them. Everything else that the forward reads on the host must then stay the
    same. False disables graphs.

    Raises InvalidType unless the arguments are a model and a packed cache. Raises InvalidParameter if the cache belongs to another model
    (the message names the difference), if it does not start at position 0, if a layer ends before the others or lacks tokens of the model's
    window, or if the rows of a batch have unknown ids and there is no ``prompt``.
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
        check_flags(dense=dense, graphs=graphs, keep_all=keep_all)
        parsed = parse_recipe(checked_recipe(model, recipe, config))
        model_properties, inside = inspect_model(model)
        expected = ExpectedLayers(config) if model_properties is None else model_properties
        present = expected.layers_with_tokens()
        # The model is fingerprinted at the first token, but a basis is compared with it now.
        identity = {} if parsed.basis is None or model is None else identity_for(model, parsed.basis)
        windows = expected.windows(len(present))
        self.live = LiveCache(parsed, layers=len(present), sliding_windows=None if keep_all else windows, model=identity)
        self._begin(model, model_properties, inside, expected, None, dense=dense, graphs=graphs)

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
        """Create a KvpackCache that continues the packed ``cache``. If there is a ``model``, the cache is checked against it.

        Without a model, the caller sets attention "kvpack" (``model.set_attn_implementation("kvpack")``), and nothing is recorded. Options
        and errors are documented in the class.
        """
        check_flags(dense=dense, graphs=graphs, keep_all=keep_all)
        check_cache(cache, model)
        model_properties, inside = inspect_model(model)
        if cache.start:
            raise InvalidParameter(
                f"the cache starts at position {cache.start}, but a model continues from position 0: load a cache that begins at position 0"
            )
        cache.check_ends()
        compared: NamedModel | None = None
        if model_properties is not None:
            compared = check_model(cache, model, model_properties)
            if prompt is None:
                check_rows_known(cache)
        windows = [None] * len(cache) if model_properties is None else model_properties.windows(len(cache))
        past = cls.__new__(cls)
        past.live = LiveCache.of(without_states(cache), sliding_windows=None if keep_all else windows)
        past._begin(
            model, model_properties, inside, model_properties, cache, rope_deltas=rope_deltas, compared=compared, dense=dense, graphs=graphs
        )
        if prompt is not None:
            crop_to_prompt(past, cache, prompt, None if model_properties is None else model_properties.config)
        return past

    def _begin(
        self,
        model: torch.nn.Module | None,
        model_properties: Model | None,
        inner_models: list[Any],
        expected: ExpectedLayers | None,
        cache: Cache | None,
        *,
        rope_deltas: torch.Tensor | int | None = None,
        compared: NamedModel | None = None,
        dense: bool | None,
        graphs: bool | None,
    ) -> None:
        """Initialize the layers and the model's hooks. ``cache`` is the packed cache to continue, or None."""
        inputs = Inputs() if cache is None else cache.inputs
        present = [bool(layer.sides) for layer in cache] if cache is not None else [] if expected is None else expected.layers_with_tokens()
        if not any(present):
            raise InvalidParameter("no layer of the cache has keys or values: start with KvpackCache(model, recipe)")
        windows = [None] * len(present) if expected is None else expected.windows(len(present))
        states = [0] * len(present) if expected is None else expected.states(len(present))
        for number in () if expected is None else expected.shared:
            self.live.share(number)
        decoding = DecodingWarnings(bool(dense))
        kinds = enumerate(zip(present, windows, states, strict=True))
        layers = [self._create_layer(number, has_sides, window, decoding, count) for number, (has_sides, window, count) in kinds]
        super().__init__(layers=layers)
        self._following = following_layers(layers)
        if cache is not None:
            restore_states(self.layers, cache)
        self._model, self._dense, self._decoding = model_properties, bool(dense), decoding
        for number, layer in enumerate(self.layers):
            if dense and expected is None and layer.is_sliding:
                raise InvalidParameter(
                    f"layers[{number}] dropped tokens outside its sliding window, so dense=True needs the model's window size: "
                    "use KvpackCache.of(cache, model)"
                )
            layer.check_window()
        tokens = self.live.tokens
        adapters = active_adapters(inner_models[0]) if inner_models else None
        positions = RotaryPositions.after_cache(model_properties, cache, inputs, rope_deltas)
        if model_properties is not None and dense is None and not model_properties.supports_packed_layers:
            self._dense = True
            decoding.warn(model_properties.name)
        record = Record(inputs, tokens, adapters, live_batch_size(self.live) or 1)
        self.passes = Tracking(record, positions, model_properties, not self._dense, model if inner_models else None, compared)
        self.passes.states = any(states)
        self.passes.rows = partial(live_batch_size, self.live)
        self._rollback = Rollback(self.layers, self.live, self.passes, cache)
        self._careful = positions is not None or any(states)
        self._hooks = None if model is None else Hooks.of(model)
        self._switch = None if model_properties is None or self._dense else AttentionSwitch.for_model(model)
        self._seen: set[type] = set()
        self.masked: dict[bool, bool] = {}
        self.compiled = CompiledCalls(self, len(self.layers))
        first = next(number for number, layer in enumerate(self.layers) if isinstance(layer, PackedLayer))
        # With dense layers, states or multi-dimensional positions, a step depends on more than the inputs of a graph.
        obstacle = "keys and values are decoded for each call" if self._dense else ""
        if self._careful:
            obstacle = "it keeps states" if any(states) else "it has multi-dimensional rotary positions"
        self.graphs = step_graphs(self, first, graphs, model, "the model" if model_properties is None else model_properties.name, obstacle)
        self._forward = None if model is None or self.graphs is None else ForwardSwitch.for_model(model)
        self._metadata = {} if cache is None else dict(cache.metadata)

    def _create_layer(self, layer_index: int, has_sides: bool, window: int | None, decoding: DecodingWarnings, states: int) -> Any:
        if states:
            return PackedStateLayer(self.live, layer_index, window, decoding, states) if has_sides else StateLayer(layer_index, states)
        return PackedLayer(self.live, layer_index, window, decoding) if has_sides else EmptyLayer()

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
        """Load the cache in the file at ``path`` onto ``device`` (default: the model's device), so that ``model`` can continue it.

        ``copy``, ``memory_limit``, ``layers``, ``tokens``, ``recipe``, ``basis`` and ``progress`` are as for ``kvpack.load``. The other
        options are as for ``of``, which checks layers, shapes and identity. Raises the same errors as ``kvpack.load`` and ``of``.
        """
        check_model_of_file(path, model)
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
        """The packed cache of all tokens so far, which ``kvpack.save`` accepts.

        Its ``inputs`` are the recorded inputs of the tokens, and ``model`` identifies the model. Every access reads all weights, which
        takes about as long as a decode step. If weights changed since the last pass, ``inputs`` records that. Another thread may access it
        while a model generates, and then waits for the end of a forward pass.
        """
        with self.passes.lock.hold():
            if self.live.tokens:
                check_states_available(self.layers)
            self.passes.check_states(ended=True)
            packed = self.live.snapshot(packed=True)
            layers, tokens = with_states(packed.layers, copy_states(self.layers)), packed.tokens
            states = MappingProxyType(self._rollback.states_before(tokens))
            # This may add to the record, so it comes before the record is read.
            named = self.passes.changed_identity()
            model = packed.model if named is None else MappingProxyType(named)
            offsets = self.passes.offsets(live_batch_size(self.live) or 1)
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
        """Run ``generate`` of the cache's model over this cache, passed under the name that the installed transformers uses.

        ``token_ids``, a list or a tensor ``[batch, token]`` of integers, are the cache's ids followed by at least one new id. ``options``
        are other arguments of the model's ``generate``.

        Raises InvalidParameter if the cache has no model, if the ids differ from the cache's, or if ``generate`` rejects an option, and
        InvalidType or InvalidParameter if the ids are not token ids. Errors of the model's ``generate`` after its first pass are raised
        unchanged.
        """
        model: Any = self.passes.model_of_cache
        if model is None:
            raise InvalidParameter("the cache has no model to generate with: use KvpackCache.of(cache, model)")
        if not hasattr(model, "generate"):
            raise InvalidParameter(f"{type(model).__name__} has no method generate: load the model with AutoModelForCausalLM")
        ids = as_token_ids(token_ids).to(execution_device(model))
        if len(ids) == 1:
            # Without a mask, transformers warns if the padding token is also the end-of-text token.
            options.setdefault("attention_mask", torch.ones_like(ids))
        # Models trained with gradient checkpointing are often saved with use_cache=False.
        options.setdefault("use_cache", True)
        held = self.passes.record.tokens
        try:
            return model.generate(ids, **cache_names.cache_argument(outermost_model(model), self), **options)
        except (TypeError, ValueError) as error:
            # Errors after the first pass are not about options.
            if isinstance(error, KvpackError) or self.passes.record.tokens != held:
                raise
            hint = ". The option for the length of a reply is max_new_tokens" if "max_tokens" in options else ""
            raise InvalidParameter(f"generate rejects these options: {error}{hint}") from error

    def __copy__(self) -> Self:
        # Two caches cannot share layers that grow. Packed bytes are shared by deep copies, too.
        return copy.deepcopy(self)

    def release(self) -> None:
        """Stop recording forward passes, and restore the model's attention. Does nothing while another cache of the model needs them."""
        self._hooks = self._switch = self._forward = self.graphs = None

    def activate_past_recording(self) -> None:
        """Make sliding-window layers keep all tokens between calls of ``crop``, for assisted decoding."""
        if self._model is not None and self._model.has_encoder:
            raise InvalidParameter(
                f"{self._model.name} has an encoder, and transformers crops two-part caches only if both parts are DynamicCaches: "
                "use DynamicCaches for assisted decoding"
            )
        super().activate_past_recording()
        self.passes.assisted = True

    @property
    def keeps_states(self) -> bool:
        return self.passes.states

    @property
    def states_at(self) -> tuple[int, ...]:
        """Token counts, in ascending order, to which ``crop`` can shorten a cache with states."""
        return self._rollback.positions()

    def snapshot_states(self) -> None:
        """Keep a copy of all states after the newest token in host memory, for a ``Store`` and ``crop``.

        Call this between passes, at multiples of the store's ``chunk``. A model without recurrent and convolution layers has nothing to
        keep. Raises InvalidParameter after a pass that failed, and for a model that keeps states in its modules.
        """
        with self.passes.changing():
            self._rollback.snapshot()

    def rewind(self, tokens: int) -> int:
        """Keep the first ``tokens`` tokens, or fewer if states require it (``states_at``), and return how many were kept.

        Raises OutOfBounds if the cache has fewer tokens, and the same errors as ``crop``.
        """
        tokens, held = as_integer(tokens, "tokens"), self.passes.record.tokens
        if not 0 <= tokens <= held:
            raise OutOfBounds(f"rewind({tokens}): the cache holds {held} tokens, expected a number from 0 to {held}")
        tokens = self._rollback.nearest(tokens)
        self.crop(tokens - held)
        return tokens

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the newest tokens of every layer. ``tokens_to_remove`` is their number, negated, as transformers passes it.

        Layers that keep states can only return to 0 and to the positions in ``states_at``. ``rewind`` finds the nearest of them. Tokens are
        counted from the end of the longest layer, so that all layers end at the same token, even after a forward pass that failed between
        two layers. Raises OutOfBounds if a layer has too few tokens, and InvalidParameter for any other argument.
        """
        tokens_to_remove = as_integer(tokens_to_remove, "the number of tokens to remove")
        with self.passes.changing():
            if tokens_to_remove > 0:
                raise OutOfBounds(
                    f"crop({tokens_to_remove}): expected the number of tokens to drop, as a negative number; "
                    f"crop({tokens_to_remove} - cache.get_seq_length()) keeps the first {tokens_to_remove}"
                )
            self._rollback.crop(tokens_to_remove)

    def roll_back(self) -> None:
        """Drop the tokens of the current pass, if the layers support it, before the pass is rejected."""
        with contextlib.suppress(OutOfBounds, InvalidParameter):
            if not self.passes.states:
                self.crop(-self.passes.added_tokens)

    def reset(self) -> None:
        with self.passes.changing():
            super().reset()
            self.passes.reset()
            self._rollback.forget()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        repeats = as_integer(repeats, "repeats")
        if not 1 <= repeats <= MAX_ROWS:
            raise InvalidParameter(f"repeats is {describe(repeats)}, expected the number of copies of each sequence, at least 1")
        self.batch_select_indices(torch.arange(live_batch_size(self.live) or 1, device="cpu").repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the sequences at ``indices`` of the batch, in that order. Codes are copied, not decoded."""
        rows = torch.tensor(row_indices(indices), dtype=torch.int64, device="cpu")
        with self.passes.changing():
            super().batch_select_indices(rows)
            self.passes.select(rows)
            self._rollback.select(rows)

    def expand(self, rows: int) -> None:
        """Repeat each sequence so that the batch has ``rows`` sequences, as ``generate`` repeats token ids for beams.

        Raises InvalidParameter if ``rows`` is not a multiple of the cache's number of sequences.
        """
        held = live_batch_size(self.live)
        if held is None or held == rows:
            return
        check_rows_fit(rows, held)
        self.batch_repeat_interleave(rows // held)

    def begin_again(self, name: str) -> None:
        """Drop all tokens, because the model called ``name`` will compute them again. If there are any, a warning is issued."""
        if tokens := self.passes.record.tokens:
            text = (
                f"{name} computes all tokens again, because its RoPE uses different frequencies from here on: the {tokens} tokens in the "
                "cache are dropped"
            )
            warnings.warn(text, KvpackWarning, stacklevel=4)
            self.reset()


def create_cache(model: torch.nn.Module, contents: Cache | str | os.PathLike[str] | Recipe, **options: Any) -> KvpackCache:
    """Create a cache for ``model``. It continues ``contents`` if that is a packed cache, and is empty if that is a recipe."""
    if isinstance(contents, Cache):
        return KvpackCache.of(contents, model, **options)
    options.pop("prompt", None)
    return KvpackCache(model, contents, **options)


def check_model(cache: Cache, model: Any, model_properties: Model) -> NamedModel:
    """Check that ``cache`` belongs to ``model``, and return the result of ``check_identity``. ``model_properties`` describes the model.

    Raises InvalidParameter if it belongs to another model.
    """
    model_properties.check(cache)
    return check_identity(cache, model)


def inspect_model(model: torch.nn.Module | None) -> tuple[Model | None, list[Any]]:
    """Return the properties of ``model`` on which caches depend, and the transformers models in it."""
    inside = models_in(model) if model is not None and hasattr(model, "modules") else []
    return (None if model is None else Model(model, inside)), inside
