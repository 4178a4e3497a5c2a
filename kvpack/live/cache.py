"""``LiveCache``: a growing cache that packs keys and values while a model generates, and attends to them without unpacking."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from types import MappingProxyType
from typing import Any, NoReturn

import torch

from kvpack.attention import warm_up
from kvpack.cache.cache import Cache, check_packed
from kvpack.cache.layer import Layer
from kvpack.cache.packed_objects import explain_errors
from kvpack.cache.side import check_rows, row_indices
from kvpack.coding.recipes import SIDES, Recipe, parse_recipe
from kvpack.file.limits import MAX_LAYERS
from kvpack.formats.arguments import as_integer, check_flag, check_floating, checked_device, describe
from kvpack.formats.errors import InvalidParameter, OutOfBounds
from kvpack.identity.arguments import ModelArgument, model_fields
from kvpack.runtime.modes import float32_no_grad

from .layer import LiveLayer, check_windows, create_live_layer, empty_layer
from .operators import Tickets
from .steps import CpuSteps, TritonSteps

MAX_DEFERRED_TOKENS = 1024
"""Maximum size, in tokens, of an update that may stay raw until the next update, so that the first output token is returned sooner.

Longer updates are encoded right after their ``attend``.
"""


@explain_errors
class LiveCache:
    """A mutable cache for decoding, which packs keys and values while a model generates.

    New tokens are added to a raw tail. Whole windows of tokens are later encoded into packed runs. ``LiveCache(recipe, layers=n)`` is
    empty, and each layer gets its heads, dims, dtype and device from its first tokens. ``LiveCache.of(cache)`` continues a cache and shares
    its bytes.

    On a CUDA device, ``update`` and ``attend`` of a few tokens launch only kernels that read positions on the device, so a CUDA graph may
    contain them until ``roll`` reports that launches changed. Code compiled by ``torch.compile`` sees both as opaque operators.

    Calls of several threads run one after another, but another thread's ``update`` may come between an ``update`` and its ``attend``.

    Args:
        recipe: The recipe, in any form that ``pack`` accepts.
        layers: Number of layers.
        sliding_windows: Window of each layer in tokens, or None for full attention. Tokens to which no later query attends are dropped.
        model: The model, in any form that ``pack`` accepts. ``freeze`` records it.

    Raises:
        InvalidParameter: An argument is invalid, or the basis belongs to another model.
        MissingFile: The recipe file does not exist.

    The first tokens of a layer raise MissingBasis if the recipe lacks the basis that it needs.

    >>> live = kvpack.LiveCache("octopus-3", layers=2)
    >>> for layer, (k, v) in enumerate(past):
    ...     live.update(layer, k, v)
    >>> live.attend(0, torch.randn(1, 4, 1, 64, dtype=torch.bfloat16)).shape
    torch.Size([1, 4, 1, 64])
    >>> live.freeze().tokens
    64
    """

    def __init__(
        self,
        recipe: str | os.PathLike[str] | Recipe,
        *,
        layers: int,
        sliding_windows: Sequence[int | None] | None = None,
        model: ModelArgument | None = None,
    ) -> None:
        self._recipe = parse_recipe(recipe)
        self._count = as_integer(layers, "layers")
        if not 1 <= self._count <= MAX_LAYERS:
            raise InvalidParameter(f"layers is {describe(layers)}, expected an integer from 1 to {MAX_LAYERS}")
        self._recipe.check_layers(self._count)
        self._text, self.model, self.start = self._recipe.canonical, MappingProxyType(model_fields(model)), 0
        if self._recipe.basis is not None:
            self._recipe.basis.check_model(self.model)
        self.sliding_windows = check_windows(sliding_windows, self._count)
        self._layers: list[LiveLayer | None] = [None] * self._count
        self._kept, self._shared = set[int](), set[int]()
        self._prepare()

    @classmethod
    def of(cls, cache: Cache, *, sliding_windows: Sequence[int | None] | None = None) -> LiveCache:
        """Create a live cache that continues ``cache`` and shares its bytes. Raises InvalidType unless ``cache`` is a packed cache."""
        check_packed(cache, "LiveCache.of({})")
        cache.check_ends()
        for number, layer in enumerate(cache):
            if layer.states:
                raise InvalidParameter(
                    f"layers[{number}] has the states {' and '.join(layer.states)}, but a LiveCache keeps only keys and values: "
                    "use KvpackCache.of(cache, model), which also keeps states"
                )
        return cls._from_cache(cache, sliding_windows)

    @classmethod
    def _from_cache(cls, cache: Cache, sliding_windows: Sequence[int | None] | None) -> LiveCache:
        live = cls.__new__(cls)
        live._recipe, live._kept, live._shared = Recipe.from_recorded(cache.recipe), set(), set()
        live._text = live._recipe.canonical
        live._count, live.model, live.start = len(cache), MappingProxyType(dict(cache.model)), cache.start
        live.sliding_windows = check_windows(sliding_windows, len(cache))
        # Set the modes once, instead of once for the keys and once for the values of each layer.
        with contextlib.ExitStack() as modes:
            for device in {side.device for layer in cache for side in layer.sides.values()}:
                modes.enter_context(float32_no_grad(device))
            live._layers = [live._create_layer(number, layer) if layer.sides else None for number, layer in enumerate(cache)]
        live._prepare()
        return live

    def _prepare(self) -> None:
        self._steps: list[TritonSteps | CpuSteps | None] = [None] * self._count
        self._calls, self._captures, self._known = Tickets(self, self._count), False, False
        self._value_dims = [0 if layer is None else layer.value_dim for layer in self._layers]
        # Reading can change a cache: it may encode pending tokens.
        self._lock = threading.RLock()
        self.launches = 0
        """Counter that changes whenever kernel launches change. CUDA graphs of ``update`` and ``attend`` must then be captured again."""

    def __reduce__(self) -> NoReturn:
        raise InvalidParameter(
            "a LiveCache or KvpackCache cannot be pickled: save live.freeze() or, for a KvpackCache, cache.packed with kvpack.save. "
            "Continue with LiveCache.of(kvpack.load(path)) or KvpackCache.load(path, model)"
        )

    def __deepcopy__(self, memo: object = None) -> LiveCache:
        return self._continue_with(self.snapshot())

    __copy__ = __deepcopy__

    def _continue_with(self, cache: Cache) -> LiveCache:
        copied = self._from_cache(cache, self.sliding_windows)
        # Keep the basis, which layers without tokens need.
        copied._recipe = self._recipe
        for layer in self._kept:
            copied.keep_past(layer)
        copied._shared = set(self._shared)
        return copied

    def __len__(self) -> int:
        return self._count

    def __repr__(self) -> str:
        return f"LiveCache({self._text!r}, {len(self)} layers, {self.tokens} tokens)"

    @property
    def tokens(self) -> int:
        """Number of tokens that the layers have seen. During a forward pass, layers may differ, and this is the largest number."""
        self._count_replayed_tokens()
        return max((layer.seen_tokens for layer in self._layers if layer is not None), default=0)

    @property
    def nbytes(self) -> int:
        """Number of bytes in use, including space reserved for new tokens."""
        return sum(layer.nbytes for layer in self._layers if layer is not None)

    def seen_tokens(self, layer: int) -> int:
        """Return the number of tokens that ``layer`` has seen. Raises OutOfBounds if the cache has no such layer."""
        live = self._layer_after_replays(layer)
        return 0 if live is None else live.seen_tokens

    def stored_tokens(self, layer: int) -> int:
        """Return the number of tokens that ``layer`` contains now. Raises OutOfBounds if the cache has no such layer."""
        live = self._layer_after_replays(layer)
        return 0 if live is None else live.tokens

    def skipped_tokens(self, layer: int) -> int:
        """Return how many old tokens a sliding window has dropped from ``layer``. Raises OutOfBounds if the cache has no such layer."""
        live = self._layer_or_none(layer)
        return 0 if live is None else live.skipped

    def batch(self, layer: int) -> int:
        """Return the number of sequences in ``layer``, or 1 if it has no tokens. Raises OutOfBounds if the cache has no such layer."""
        live = self._layer_or_none(layer)
        return 1 if live is None or not live.seen_tokens else live.batch

    def shapes(self, layer: int) -> dict[str, tuple[int, int, int]]:
        """Return (batch, heads, dim) of the keys and of the values of ``layer``. The dict is empty before the layer's first tokens.

        After ``reset``, a layer accepts a different batch size. Raises OutOfBounds if the cache has no such layer.
        """
        live = self._layer_or_none(layer)
        return {} if live is None else {name: (side.batch, side.heads, side.dim) for name, side in live.sides.items()}

    def update(self, layer: int, k: torch.Tensor | None, v: torch.Tensor | None) -> None:
        """Add new tokens to ``layer``. ``k`` and ``v`` are ``[batch, kv_head, token, dim]``.

        Tokens are added to the raw tail. If they do not fit, the next ``attend`` encodes them. No gradients flow to ``k`` and ``v``. On a
        CUDA device, the next ``roll`` or ``freeze`` checks that the values are finite. Raises OutOfBounds if the cache has no such layer,
        InvalidType for an unsupported dtype, and InvalidParameter for values that do not continue the layer.
        """
        if torch.compiler.is_dynamo_compiling():
            if v is not None:
                self._value_dims[layer] = v.shape[3]
            self._calls.compiled_update(layer, k, v)
            return
        with self._lock:
            if self.try_update(layer, k, v) is not None:
                return
            self._check_captured(layer)
            live = self._layer(layer, k, v)
            self._layer_after_replays(layer)
            if live.is_due:
                live.roll()
            live.update(k, v)
            self._refresh_steps(layer)

    def try_update(self, layer: int, k: torch.Tensor | None, v: torch.Tensor | None, following: int | None = None) -> int | None:
        """Add a few tokens if they need no further checks, and return the number of tokens seen. Otherwise add nothing and return None.

        If layer ``following`` has seen fewer tokens, this also adds nothing.
        """
        live, steps = self._layer_or_none(layer), self._steps[layer]
        if live is None or steps is None:
            return None
        with self._lock:
            if following is not None and following != layer and self.seen_tokens(following) < self.seen_tokens(layer):
                return None
            return live.seen_tokens if steps.try_update(k, v) else None

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        *,
        scale: float | None = None,
        causal: bool = True,
        softcap: float | None = None,
        sliding_window: int | None = None,
        sink_logits: torch.Tensor | None = None,
        starts: torch.Tensor | Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Attend to all tokens of ``layer``, as ``kvpack.attend`` does. The queries ``[batch, q_head, q_len, dim]`` are the last tokens.

        ``starts`` count from the first token that the layer has seen. If they are on a CUDA device, they are not copied to the host. If the
        last update did not fit in the tail, its tokens are attended to in raw form and then encoded. Raises the same errors as
        ``kvpack.attend``, and OutOfBounds for a layer without tokens.
        """
        if torch.compiler.is_dynamo_compiling():
            options = {"scale": scale, "causal": causal, "softcap": softcap, "sliding_window": sliding_window}
            return self._calls.compiled_attend(layer, q, self._value_dims[layer], sink_logits, starts, **options)
        with self._lock:
            live = self._layer_or_none(layer)
            if live is None:
                raise OutOfBounds(f"layer {layer} contains no tokens: call update before attend")
            if not live.pending_tokens:
                steps = self._steps[layer]
                if steps is None and not live.is_uneven:
                    steps = self._steps[layer] = next((kind(live) for kind in (TritonSteps, CpuSteps) if kind.supports(live, q)), None)
                result = None if steps is None else steps.attend(q, sink_logits, starts, scale, causal, softcap, sliding_window)
                if result is not None:
                    return result
            self._check_captured(layer)
            self._layer_after_replays(layer)
            if not self._known:
                self._known = True
                both = (candidate.sides for candidate in self._selected_layers(None) if len(candidate.sides) == len(SIDES))
                warm_up([(sides["k"].runs, sides["v"].runs) for sides in both], live.device)
            result = live.attend(
                q, scale=scale, causal=causal, softcap=softcap, sliding_window=sliding_window, sink_logits=sink_logits, starts=starts
            )
            if live.pending_tokens > MAX_DEFERRED_TOKENS and layer not in self._shared:
                live.commit()
                self._refresh_steps(layer)
            return result

    def roll(self) -> bool:
        """Encode whole windows of each layer's raw tail, except the newest tokens. Returns True if kernel launches changed.

        Call this between steps, at least once per window of tokens. If it returns True, capture CUDA graphs of ``update`` and ``attend``
        again. The call synchronizes with a CUDA device. Raises InvalidParameter, with the layer's index, if a value added since the last
        call is not finite.
        """
        with self._lock:
            self._count_replayed_tokens()
            self._check_finite()
            changed = [self._refresh_steps(number) for number, layer in enumerate(self._layers) if layer is not None and layer.roll()]
            return any(changed)

    @property
    def room(self) -> int:
        """Number of tokens that still fit in the raw tail of every layer. Replayed tokens count only after ``record_replay``.

        It is 0 while a long update waits to be encoded, or if some layer has packed different numbers of keys and values.
        """
        rooms = (0 if layer.pending_tokens or layer.is_uneven else layer.room - layer.raw_tokens for layer in self._selected_layers(None))
        return min(rooms, default=0)

    @property
    def is_uneven(self) -> bool:
        """True if some layer has packed different numbers of keys and values. Decode steps then need work on the host."""
        return any(layer.is_uneven for layer in self._layers if layer is not None)

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """Return a context manager for capturing calls in a CUDA graph. Report each replay with ``record_replay``.

        Calls that need work on the host raise InvalidParameter. The graph is valid as long as ``launches`` stays the same. A replay needs
        enough ``room``.
        """
        counts = [(layer, layer.raw_tokens) for layer in self._layers if layer is not None]
        captured_before = [(steps, steps.captured) for steps in self._steps if steps is not None]
        self._captures = True
        try:
            yield
        finally:
            self._captures = False
            # Captured steps have not run.
            for layer, raw_tokens in counts:
                layer.raw_tokens = raw_tokens
            for steps, captured in captured_before:
                steps.captured = captured

    def record_replay(self, tokens: int) -> None:
        """Report that a replay of a CUDA graph has added ``tokens`` tokens to every layer."""
        tokens = as_integer(tokens, "tokens")
        for layer in self._selected_layers(None):
            layer.raw_tokens += tokens

    def save_tail(self) -> Callable[[], None]:
        """Save the newest token in each layer's raw tail. Returns a function that restores these tokens."""
        restores = contextlib.ExitStack()
        for layer in self._selected_layers(None):
            restores.callback(layer.save_tail())
        return restores.close

    def adjust_length(self, tokens: int) -> None:
        """Add ``tokens``, which may be negative, to the number of valid tokens in each raw tail. For example, -1 repeats a step."""
        self.record_replay(tokens)
        for number in range(self._count):
            self._refresh_steps(number)

    def layer(self, layer: int, packed: bool = False) -> Layer:
        """Return all tokens of ``layer`` as an immutable layer that shares the packed bytes. For ``packed``, see ``freeze``.

        Raises OutOfBounds if the cache has no such layer.
        """
        check_flag(packed, "packed")
        with self._lock:
            live = self._layer_after_replays(layer)
            frozen = Layer(None, None) if live is None else live.freeze(packed)
            self._refresh_steps(layer)
            return frozen

    def unpack(self, layer: int, dtype: torch.dtype) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the dense keys and values of ``layer``, each ``[batch, kv_head, token, dim]`` of ``dtype``, or None if absent.

        Raw tokens are returned exactly. Raises OutOfBounds if the cache has no such layer.
        """
        check_floating(dtype)
        with self._lock:
            live = self._layer_after_replays(layer)
            return (None, None) if live is None else live.as_layer().unpack(dtype)

    def freeze(self, *, packed: bool = False) -> Cache:
        """Return all tokens as an immutable ``Cache`` that shares the packed bytes and keeps the raw tail. This cache stays usable.

        With ``packed=True``, the tail is packed too, in whole token groups or, if the recipe sets a window, in whole windows. Files are
        then smaller, and stores get all whole chunks. A layer that has not changed since ``LiveCache.of`` is returned as is. Raises
        InvalidParameter during a forward pass, or if a value is not finite.
        """
        cache = self.snapshot(packed)
        cache.check_ends()
        return cache

    def snapshot(self, packed: bool = False) -> Cache:
        """Return a ``Cache``, as ``freeze`` does, even between two layers of a forward pass. Raises InvalidParameter for a NaN or inf."""
        check_flag(packed, "packed")
        self._count_replayed_tokens()
        self._check_finite()
        return Cache(tuple(self.layer(number, packed) for number in range(len(self))), self._text, self.model, self.start)

    def truncate(self, tokens: int, layer: int | None = None) -> None:
        """Keep the first ``tokens`` tokens of every layer, or of one layer. Raises OutOfBounds if some of them have been dropped."""
        tokens = as_integer(tokens, "tokens")
        self._count_replayed_tokens()
        selected = self._selected_layers(layer)
        if tokens and not selected:
            where = "the cache" if layer is None else f"layers[{layer}]"
            raise OutOfBounds(f"{where}: truncate({tokens}) is out of range: the layer has seen no tokens")
        for live in selected:
            if not live.seen_tokens - live.tokens <= tokens <= live.seen_tokens:
                raise OutOfBounds(
                    f"{live.name}: truncate({tokens}) is out of range: the layer holds tokens "
                    f"[{live.seen_tokens - live.tokens}:{live.seen_tokens}]"
                )
        self._change_layers(lambda live: live.truncate(tokens), layer)

    def keep_past(self, layer: int) -> None:
        """Make a sliding-window layer keep tokens outside its window until the next ``truncate``, which can then go back to them."""
        live = self._layer_or_none(layer)
        self._kept.add(layer)
        if live is not None:
            live.keeps_past = True

    def share(self, layer: int) -> None:
        """Let other layers of the model attend to the tokens of ``layer``. A long update then stays raw until the next update."""
        self._layer_or_none(layer)
        self._shared.add(layer)

    def reset(self, layer: int | None = None) -> None:
        """Drop all tokens of every layer, or of one layer. The next tokens may have a different batch size. Raises OutOfBounds."""
        self._change_layers(LiveLayer.reset, layer)

    def select(self, indices: Any, layer: int | None = None) -> None:
        """Keep the sequences at ``indices`` of the batch, in that order, in every layer or in one layer. Indices may repeat.

        Raises OutOfBounds for an index outside the batch, and InvalidParameter if ``indices`` are not integers.
        """
        rows = row_indices(indices)
        for live in self._selected_layers(layer):
            check_rows(rows, live.batch)
        self._change_layers(lambda live: live.select(torch.tensor(rows, dtype=torch.int64, device=live.device)), layer)
        for number in range(self._count) if layer is None else [layer]:
            self._steps[number] = None
        self.launches += 1

    def to(self, device: torch.device | str) -> LiveCache:
        """Return a copy of this cache on ``device``. Raises InvalidParameter if PyTorch cannot use the device."""
        return self._continue_with(self.freeze().to(checked_device(device)))

    def _selected_layers(self, layer: int | None) -> list[LiveLayer]:
        return [live for live in (self._layers if layer is None else [self._layer_or_none(layer)]) if live is not None]

    def _change_layers(self, change: Callable[[LiveLayer], None], layer: int | None = None) -> None:
        with self._lock:
            self._count_replayed_tokens()
            for number in range(self._count) if layer is None else [layer]:
                if (live := self._layer_or_none(number)) is not None:
                    change(live)
                    self._refresh_steps(number)

    def _refresh_steps(self, layer: int) -> bool:
        """Prepare a layer's decode steps for its current state. Returns True if their kernel launches changed."""
        steps = self._steps[layer]
        changed = steps is not None and steps.refresh()
        self.launches += changed
        return changed

    def _check_captured(self, layer: int) -> None:
        """Raise InvalidParameter if the layer's calls need work on the host while a graph is captured."""
        if self._captures:
            raise InvalidParameter(
                f"layers[{layer}] needs work on the host in every step, so a CUDA graph cannot capture it: run its steps without a graph"
            )

    def _count_replayed_tokens(self) -> None:
        """Read from the device how many tokens CUDA graph replays have appended. Adds them to the layers' token counts."""
        for steps in self._steps:
            if steps is not None:
                steps.read_replayed_tokens()

    def _layer_after_replays(self, layer: int) -> LiveLayer | None:
        """Return the layer at index ``layer``, or None before its first tokens. Tokens appended by CUDA graph replays are counted first."""
        live, steps = self._layer_or_none(layer), self._steps[layer]
        if steps is not None and steps.captured:
            steps.read_replayed_tokens()
        return live

    def _check_finite(self) -> None:
        flags = {number: steps.not_finite for number, steps in enumerate(self._steps) if isinstance(steps, TritonSteps)}
        result = torch.cat(list(flags.values())).tolist() if flags else []
        lost = [number for number, flag in zip(flags, result, strict=True) if flag]
        if lost:
            raise InvalidParameter(
                f"layers[{lost[0]}]: a value added since the last roll is not finite: use a recipe with raw or lossless codecs"
            )

    def _layer_or_none(self, layer: int) -> LiveLayer | None:
        """Return the layer at index ``layer``, or None before its first tokens. Raises OutOfBounds if the cache has no such layer."""
        if type(layer) is not int:
            as_integer(layer, "layer")
        if 0 <= layer < self._count:
            return self._layers[layer]
        raise OutOfBounds(f"layer {layer} is out of range: the cache has {self._count} layers")

    def _layer(self, layer_index: int, k: torch.Tensor | None, v: torch.Tensor | None) -> LiveLayer:
        live = self._layer_or_none(layer_index)
        if live is None:
            live = self._layers[layer_index] = self._create_layer(layer_index, empty_layer(self._recipe, layer_index, self._count, k, v))
            self._value_dims[layer_index] = live.value_dim
        x = k if v is None else v
        if not live.seen_tokens and isinstance(x, torch.Tensor) and x.dim() == 4 and x.shape[0] not in (0, live.batch):
            live = self._layers[layer_index] = self._create_layer(layer_index, live.without_tokens(x.shape[0]))
            self._steps[layer_index] = None
            self.launches += 1
        return live

    def _create_layer(self, layer_index: int, layer: Layer) -> LiveLayer:
        created = create_live_layer(layer, layer_index, self.sliding_windows[layer_index], self.start)
        created.keeps_past = layer_index in self._kept
        return created
