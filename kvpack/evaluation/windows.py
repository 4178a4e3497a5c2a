"""Compares a model's predictions over packed files with its predictions over an uncompressed cache, in windows of text."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import torch
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache

import kvpack
from kvpack import cache_names
from kvpack.attention import attend
from kvpack.coding.recipes import Recipe
from kvpack.formats.errors import InvalidParameter
from kvpack.integrations.transformers import KvpackCache, attention, mask
from kvpack.integrations.transformers.models import Model

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvpack.cache.cache import Cache
    from kvpack.cache.layer import Layer

Pairs = list[tuple[torch.Tensor, torch.Tensor]]

QUERIES = 128
"""Number of queries at the end of a window for which attention errors are measured."""

SINK_TOKENS = 4
"""Number of first tokens that stay visible if the past is dropped. Models use them as attention sinks."""

PASS_TOKENS = 32
"""Maximum number of scored tokens per forward pass. A pass attends to its own tokens before they are packed."""

_ROWS = 64
"""Number of positions whose distributions are compared in one operation."""

_RECORDED = "kvpack-recorded"
_OBSERVED = "kvpack-observed"

_OTHER_WEIGHTS = ("s_aux", "position_bias")
"""Options that affect attention weights, other than queries, keys and masks."""


@dataclass(frozen=True)
class RecordedAttention:
    """A layer's newest queries ``[1, q_head, token, dim]``, the exact attention outputs, and the options of the attention call."""

    query: torch.Tensor
    output: torch.Tensor
    options: dict[str, Any]


@dataclass
class _AttentionRecorder:
    """kvpack's attention function, which also records each layer's newest queries and outputs in the latest forward pass."""

    layers: dict[int, RecordedAttention] = field(default_factory=dict)
    has_other_weights: bool = False

    def __call__(
        self, module: torch.nn.Module, query: torch.Tensor, key: Any, value: Any, attention_mask: Any, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        output, weights = attention(module, query, key, value, attention_mask, **options)
        newest = output[:, -QUERIES:].transpose(1, 2).clone()
        kept = {"scale": options.get("scaling")} | {name: options.get(name) for name in ("softcap", "sliding_window")}
        self.has_other_weights |= any(options.get(name) is not None for name in _OTHER_WEIGHTS)
        self.layers[int(module.layer_idx)] = RecordedAttention(query[:, :, -QUERIES:].clone(), newest, kept)  # type: ignore[arg-type]
        return output, weights


@dataclass
class _Observer:
    """kvpack's attention function, which first calls ``observe`` with the layer's number and its queries."""

    observe: Callable[[int, torch.Tensor], object] | None = None

    def __call__(
        self, module: torch.nn.Module, query: torch.Tensor, key: Any, value: Any, attention_mask: Any, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        layer = getattr(module, "layer_idx", None)
        if self.observe is not None and layer is not None:
            self.observe(int(layer), query)
        return attention(module, query, key, value, attention_mask, **options)


_observer = _Observer()
AttentionInterface.register(_OBSERVED, _observer)
AttentionMaskInterface.register(_OBSERVED, mask)
_recorder = _AttentionRecorder()
AttentionInterface.register(_RECORDED, _recorder)
AttentionMaskInterface.register(_RECORDED, mask)


@dataclass(frozen=True)
class UncompressedResult:
    """The uncompressed model's predictions in a window, in float32 on the model's device.

    ``tokens`` is ``[1, prefix tokens + scored tokens + 1]``. ``pairs`` contains each layer's (k, v) for all tokens except the last, in the
    model's dtype. ``log_probabilities`` is ``[scored token, vocabulary]``. ``loss`` is the mean negative log-probability of the tokens.
    ``recorded_attention`` is by layer index.
    """

    tokens: torch.Tensor
    prefix_tokens: int
    pairs: Pairs
    log_probabilities: torch.Tensor
    loss: float
    recorded_attention: dict[int, RecordedAttention]

    @property
    def prefix_pairs(self) -> Pairs:
        """The keys and values of each layer for the prefix."""
        return [(k[:, :, : self.prefix_tokens], v[:, :, : self.prefix_tokens]) for k, v in self.pairs]


@dataclass(frozen=True)
class Predictions:
    """A model's predictions over packed layers.

    ``same_choices`` is the fraction of positions with the same top choice as the uncompressed model. ``cache`` is the cache after the
    scored tokens were appended.
    """

    log_perplexity: float
    kl_divergence: float
    same_choices: float
    log_probabilities: torch.Tensor
    cache: Cache


@dataclass(frozen=True)
class Comparison:
    """Predictions of a window's scored tokens after a different prefix, compared with those of the uncompressed model."""

    log_perplexity: float
    kl_divergence: float
    same_choices: float


@dataclass(frozen=True)
class RecipeResult:
    """Measurements of one recipe in a window. Cosines and errors have one value per layer."""

    log_perplexity: float
    kl_divergence: float
    same_choices: float
    k_cosine: list[float]
    v_cosine: list[float]
    attention_error: list[float]
    bytes: int
    values: int
    nominal_bits: float
    encode_seconds: float
    load_seconds: float


def prefill(
    model: Any,
    tokens: torch.Tensor,
    positions: torch.Tensor | None = None,
    observe: Callable[[int, torch.Tensor], object] | None = None,
) -> Pairs:
    """Return each layer's (k, v) for ``tokens``, ``[batch, token]``. Each is ``[batch, kv_head, token, dim]`` in the model's dtype.

    ``positions``, ``[batch, token]``, start at 0 by default. ``observe(layer, queries)`` is called with the queries that attention
    receives, ``[batch, q_head, token, dim]``, unless the model computes attention in its own code. Raises InvalidParameter if the model has
    layers with states other than keys and values.
    """
    known = Model(model)
    if any(known.states(known.config.num_hidden_layers)):
        raise InvalidParameter(
            f"{known.name} has layers with recurrent or convolution states, which are not supported: use a model in which all layers "
            "have keys and values"
        )
    cache, options = uncompressed_cache(model), {} if positions is None else {"position_ids": positions}
    model.set_attn_implementation("kvpack" if observe is None else _OBSERVED)
    _observer.observe = observe
    try:
        with torch.inference_mode():
            model.base_model(tokens, **cache_names.cache_argument(model, cache), **options)
    finally:
        _observer.observe = None
    return [(layer.keys, layer.values) for layer in cache.layers]


def evaluate_uncompressed(model: Any, tokens: torch.Tensor, scored_tokens: int) -> UncompressedResult:
    """Evaluate a window with the uncompressed cache. ``tokens`` is ``[1, prefix tokens + scored tokens + 1]``.

    The last token is predicted, but not read.
    """
    prefix = tokens.shape[1] - 1 - scored_tokens
    cache = uncompressed_cache(model, prefill(model, tokens[:, :prefix]))
    model.set_attn_implementation(_RECORDED)
    _recorder.layers.clear()
    with torch.inference_mode():
        logits = model(tokens[:, prefix:-1], **cache_names.cache_argument(model, cache)).logits[0]
        log_probabilities = functional.log_softmax(logits.float(), -1)
    loss = functional.nll_loss(log_probabilities, tokens[0, prefix + 1 :]).item()
    pairs = [(layer.keys, layer.values) for layer in cache.layers]
    seen = dict(_recorder.layers)
    _recorder.layers.clear()
    return UncompressedResult(tokens, prefix, pairs, log_probabilities, loss, seen)


def attention_shares(model: Any, tokens: torch.Tensor, pairs: Pairs, chosen: Sequence[torch.Tensor]) -> list[float]:
    """Return the fraction of attention weight that each layer gives to chosen tokens, averaged over heads and the newest queries.

    ``tokens`` is ``[1, token]``. ``pairs`` contains the keys and values of the first tokens. ``chosen``, bool ``[token]`` for each layer,
    marks some of these tokens. The list is empty for models that compute attention in their own code, or whose attention weights depend on
    other terms, such as position biases.
    """
    known = pairs[0][0].shape[2]
    cache = uncompressed_cache(model, [(k.clone(), v.clone()) for k, v in pairs])
    model.set_attn_implementation(_RECORDED)
    _recorder.layers.clear()
    _recorder.has_other_weights = False
    with torch.inference_mode():
        model.base_model(tokens[:, known:], **cache_names.cache_argument(model, cache))
        seen = dict(_recorder.layers)
        _recorder.layers.clear()
        if _recorder.has_other_weights or not all(number in seen for number in range(len(chosen))):
            return []
        shares = []
        for number, raw in enumerate(chosen):
            weights = _attention_weights(seen[number], cache.layers[number].keys)
            shares.append(float(weights[..., : len(raw)][..., raw].sum(-1).mean()))
    return shares


def _attention_weights(recorded: RecordedAttention, keys: torch.Tensor) -> torch.Tensor:
    """Return the attention weights of the newest queries over ``keys``, ``[1, q_head, query, token]``."""
    query = recorded.query.to(torch.float32)
    keys = keys.to(torch.float32).repeat_interleave(query.shape[1] // keys.shape[1], 1)
    scale = recorded.options["scale"]
    scores = query @ keys.transpose(2, 3) * (query.shape[-1] ** -0.5 if scale is None else scale)
    softcap, window = recorded.options["softcap"], recorded.options["sliding_window"]
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    key = torch.arange(keys.shape[2], device=keys.device)
    after = key[-query.shape[2] :, None] - key
    hidden = (after < 0) if window is None else (after < 0) | (after >= window)
    return torch.softmax(scores.masked_fill(hidden, -torch.inf), -1)


def evaluate_forgotten(model: Any, exact: UncompressedResult, visible_tokens: int = SINK_TOKENS) -> Comparison:
    """Evaluate a window's scored tokens, at their original positions, after a prefix of only the first ``visible_tokens`` tokens."""
    return evaluate_over(model, exact, [(k[:, :, :visible_tokens], v[:, :, :visible_tokens]) for k, v in exact.prefix_pairs])


def evaluate_over(model: Any, exact: UncompressedResult, pairs: Pairs) -> Comparison:
    """Evaluate a window's scored tokens, at their original positions, in one pass over the prefix ``pairs``."""
    cache = uncompressed_cache(model, pairs)
    tokens = exact.tokens[:, exact.prefix_tokens : -1]
    positions = torch.arange(exact.prefix_tokens, exact.prefix_tokens + tokens.shape[1], device=tokens.device)[None]
    model.set_attn_implementation("kvpack")
    with torch.inference_mode():
        logits = model(tokens, **cache_names.cache_argument(model, cache), position_ids=positions).logits[0]
    return Comparison(*compare_predictions(exact, functional.log_softmax(logits.float(), -1)))


def packed_file(pairs: Pairs, recipe: str | Recipe, path: str) -> Cache:
    """Convert ``pairs`` to bf16, pack them, save them to ``path``, and return the cache loaded from this file."""
    kvpack.save(pack_as_bf16(pairs, recipe), path)
    return _load_file(path, recipe, pairs[0][0].device)


def _load_file(path: str, recipe: str | Recipe, device: torch.device) -> Cache:
    return kvpack.load(path, device=device, basis=recipe.basis if isinstance(recipe, Recipe) else None)


def pack_as_bf16(pairs: Pairs, recipe: str | Recipe) -> Cache:
    return kvpack.pack([(k.to(torch.bfloat16), v.to(torch.bfloat16)) for k, v in pairs], recipe)


class Bf16Cache(KvpackCache):
    """A packed cache that rounds new keys and values to bf16, as a bf16 model does, even if the model computes in float32."""

    _offsets: Any

    @classmethod
    def from_cache(cls, model: Any, cache: Cache) -> Self:
        """Create a cache for ``model`` that continues ``cache``. It does not record forward passes."""
        past = cls.of(cache)
        past._offsets = key_offsets(model)
        return past

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        key_states = _add_offsets(key_states, self._offsets, layer_idx)
        return super().update(key_states.to(torch.bfloat16), value_states.to(torch.bfloat16), layer_idx, *args, **kwargs)


class _OffsetCache(DynamicCache):  # type: ignore[misc]
    """An uncompressed cache that adds the offsets from ``key_offsets`` to keys."""

    def __init__(self, offsets: dict[int, torch.Tensor], pairs: Pairs | None) -> None:
        super().__init__(pairs)
        self._offsets = offsets

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        # Unset while the constructor fills the layers with pairs, whose keys already have the offsets.
        offset_keys = _add_offsets(key_states, getattr(self, "_offsets", None), layer_idx)
        result: tuple[Any, Any] = super().update(offset_keys, value_states, layer_idx, *args, **kwargs)
        return result


def uncompressed_cache(model: Any, pairs: Pairs | None = None) -> Any:
    offsets = key_offsets(model)
    return DynamicCache(pairs) if offsets is None else _OffsetCache(offsets, pairs)


def key_offsets(model: Any) -> dict[int, torch.Tensor] | None:
    """Return the offsets that ``twins.offset_keys`` adds to each layer's keys, ``[kv_head, 1, dim]``, or None for an unmodified model."""
    return getattr(model, "kvpack_key_offsets", None)


def _add_offsets(keys: torch.Tensor, offsets: dict[int, torch.Tensor] | None, layer: int) -> torch.Tensor:
    return keys if offsets is None else keys + offsets[layer].to(keys.dtype)


def evaluate_packed(model: Any, exact: UncompressedResult, cache: Cache, step: int = PASS_TOKENS) -> Predictions:
    """Evaluate a window's scored tokens over its packed prefix, ``cache``, with at most ``step`` tokens per pass.

    The scored tokens are appended to the cache and packed.
    """
    over = Bf16Cache.from_cache(model, cache)
    model.set_attn_implementation("kvpack")
    read = []
    with torch.inference_mode():
        for tokens in torch.split(exact.tokens[:, exact.prefix_tokens : -1], step, 1):
            logits = model(tokens, **cache_names.cache_argument(model, over)).logits[0]
            read.append(functional.log_softmax(logits.float(), -1))
    result = torch.cat(read)
    return Predictions(*compare_predictions(exact, result), result, over.packed)


def measure(
    model: Any, exact: UncompressedResult, recipe: str | Recipe, path: str, step: int = PASS_TOKENS, *, errors: bool = True
) -> RecipeResult:
    """Pack and save a window's prefix, load it from ``path``, and evaluate the scored tokens over it, ``step`` at a time.

    The result's ``bytes`` is the size of a file of the whole window, including the appended tokens. With ``errors=False``, the errors of
    individual layers are not measured.
    """
    started = time.perf_counter()
    packed = pack_as_bf16(exact.prefix_pairs, recipe)
    encoded = time.perf_counter()
    kvpack.save(packed, path)
    saved = time.perf_counter()
    cache = _load_file(path, recipe, exact.tokens.device)
    loaded = time.perf_counter()
    predicted = evaluate_packed(model, exact, cache, step)
    whole = predicted.cache
    with torch.inference_mode():
        result = [_layer_errors(layer, exact, number) for number, layer in enumerate(cache) if errors]
    k_cosine, v_cosine, attention_error = ([layer[part] for layer in result] for part in range(3))
    return RecipeResult(
        log_perplexity=predicted.log_perplexity,
        kl_divergence=predicted.kl_divergence,
        same_choices=predicted.same_choices,
        k_cosine=k_cosine,
        v_cosine=v_cosine,
        attention_error=attention_error,
        bytes=kvpack.save(whole, path),
        values=whole.values,
        nominal_bits=whole.nominal_bits,
        encode_seconds=encoded - started,
        load_seconds=loaded - saved,
    )


def _layer_errors(layer: Layer, exact: UncompressedResult, layer_index: int) -> tuple[float, float, float]:
    """Return a layer's mean cosine similarities, of keys and of values, and its relative attention error."""
    k, v = exact.pairs[layer_index]
    layer = layer.append(k[:, :, exact.prefix_tokens :].to(torch.bfloat16), v[:, :, exact.prefix_tokens :].to(torch.bfloat16))
    packed_k, packed_v = layer.unpack(torch.float32)
    assert packed_k is not None
    assert packed_v is not None
    seen = exact.recorded_attention[layer_index]
    output = attend(seen.query, layer, **seen.options)
    error = float((output.float() - seen.output.float()).norm() / seen.output.float().norm())
    return _cosine_similarity(k, packed_k), _cosine_similarity(v, packed_v), error


def _cosine_similarity(x: torch.Tensor, y: torch.Tensor) -> float:
    return functional.cosine_similarity(x.float(), y, dim=-1).mean().item()


def compare_predictions(exact: UncompressedResult, log_probabilities: torch.Tensor) -> tuple[float, float, float]:
    """Compare log-probabilities ``[position, vocabulary]`` with those of the uncompressed model.

    Returns the loss of the scored tokens, the KL divergence, and the fraction of positions with the same top choice.
    """
    loss = functional.nll_loss(log_probabilities, exact.tokens[0, exact.prefix_tokens + 1 :]).item()
    same = (log_probabilities.argmax(-1) == exact.log_probabilities.argmax(-1)).double().mean().item()
    return loss, _kl_divergence(exact.log_probabilities, log_probabilities), same


def _kl_divergence(exact: torch.Tensor, log_probabilities: torch.Tensor) -> float:
    return divergences(exact, log_probabilities).mean().item()


def divergences(exact: torch.Tensor, log_probabilities: torch.Tensor) -> torch.Tensor:
    """Return KL(exact || other) in nats, float64 ``[position]``. Both log-probabilities are ``[position, vocabulary]``."""
    parts = []
    for first in range(0, len(exact), _ROWS):
        p, q = exact[first : first + _ROWS].double(), log_probabilities[first : first + _ROWS].double()
        # Use float64, because the terms cancel to a millionth of their size.
        parts.append(functional.kl_div(q, p, reduction="none", log_target=True).sum(-1))
    return torch.cat(parts)
