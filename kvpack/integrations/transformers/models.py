"""The properties that a transformers model requires of its caches, and checks that a packed cache belongs to the model."""

from __future__ import annotations

import contextlib
import inspect
import re
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from os.path import basename
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from transformers import PretrainedConfig, PreTrainedModel, cache_utils
from transformers.cache_utils import (
    CacheLayerMixin,
    DummyLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from kvpack import cache_names
from kvpack.formats.arguments import describe
from kvpack.formats.errors import InvalidParameter, InvalidType, KvpackWarning
from kvpack.identity.canonical_text import ALL, SAMPLE, weights_kind
from kvpack.identity.fingerprint import digest_weights, weights_sample
from kvpack.identity.identity import Identity
from kvpack.identity.modules import ModelPart, cache_layers, list_model_parts

from .hooks import models_in, outermost_model
from .model_state import ModelState, check_accepts_cache, iterate_modules
from .plain_attention import NAMES
from .reads import omits_window, reads_kv

if TYPE_CHECKING:

    from kvpack.cache.cache import Cache
    from kvpack.coding.bases import Basis
    from kvpack.identity.fingerprint import WeightsDigest

_OTHER_ATTENTION = ("kv_lora_rank", "attention_chunk_size")
"""Settings of models that expand cached states before attention, or attend in chunks. Such models cannot use packed layers."""

_STATE_LAYERS = (LinearAttentionLayer, LinearAttentionAndFullAttentionLayer, LinearAttentionAndSlidingWindowAttentionLayer)
"""Cache layers that keep recurrent and convolution states, with or without keys and values."""

SAME_MODEL_ADVICE = "if both compute the same, use KvpackCache.of(dataclasses.replace(cache, model={}), model)"
"""Advice for a cache of a model that may only appear to be different."""


class ExpectedLayers:
    """The layers that a model with the configuration ``config`` expects in its cache.

    Raises InvalidType if ``config`` is not the configuration of a transformers model.
    """

    def __init__(self, config: Any) -> None:
        if not isinstance(config, PretrainedConfig):
            raise InvalidType(f"config is {describe(config)}, expected the configuration of a transformers model, such as model.config")
        self.name = type(config).__name__
        self.config: Any = config.get_text_config(decoder=True)
        self.has_encoder = bool(config.is_encoder_decoder)
        self._decoder_config: Any = self.config
        self._accepts_cache, self._own_cache = True, ""

    def windows(self, layers: int) -> list[int | None]:
        """Return the sliding window of each of the first ``layers`` layers.

        An encoder-decoder has no sliding windows.
        """
        if self.has_encoder:
            return [None] * layers
        layer_windows = [getattr(layer, "sliding_window", None) for layer in self._layer_caches]
        return [*layer_windows, *[None] * layers][:layers]

    def layers_with_tokens(self) -> list[bool]:
        """Return a bool for each layer of the model's own cache: True if it has its own keys and values.

        Raises InvalidParameter if a layer keeps anything else, or if the model does not accept a cache of layers.
        """
        for number, layer in enumerate(self._layer_caches):
            self._check_layer(number, layer)
        self._check_accepts_cache_argument()
        return self._layers_have_tokens

    def states(self, layers: int) -> list[int]:
        """Return the number of states of each kind for each of the first ``layers`` layers. It is 0 if a layer has no states."""
        counts = [layer.number_of_states if type(layer) in _STATE_LAYERS else 0 for layer in self._layer_caches]
        return [*counts, *[0] * layers][:layers]

    @property
    def shared(self) -> list[int]:
        """Indices of the layers whose keys and values other layers use too."""
        modes = getattr(self.config, "kv_sharing_modes", None) or []
        return [number for number, mode in enumerate(modes) if mode == "store"]

    def _check_accepts_cache_argument(self) -> None:
        if not self._accepts_cache:
            raise InvalidParameter(
                f"{self.name} keeps no cache of keys and values, so there is nothing to pack: run the model without a KvpackCache"
            )
        if self._own_cache:
            raise InvalidParameter(f"{self.name} accepts only its own cache, a {self._own_cache}: run the model without a KvpackCache")
        if not any(self._layers_have_tokens):
            raise InvalidParameter(
                f"{self.name} has no layer with keys and values, so there is nothing to pack: run the model without a KvpackCache"
            )
        if crossing := getattr(self.config, "cross_attention_layers", None):
            raise InvalidParameter(
                f"layers {list(crossing)} of {self.name} are cross-attention layers over images, but a packed cache needs the same tokens "
                "in every layer: run the model without a KvpackCache"
            )

    @property
    def _layers_have_tokens(self) -> list[bool]:
        return [isinstance(layer, CacheLayerMixin) for layer in self._layer_caches]

    def _check_layer(self, layer_index: int, layer: Any) -> None:
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer, DummyLayer, *_STATE_LAYERS):
            raise InvalidParameter(
                f"layers[{layer_index}] of {self.name} keeps a {type(layer).__name__}, but a packed cache stores only keys, values, and "
                "the states of recurrent and convolution layers: run the model without a KvpackCache"
            )

    @cached_property
    def _layer_caches(self) -> list[Any]:
        """The layers of the cache that transformers would create for the model, one per decoder layer."""
        try:
            layers = cache_layers(self.config)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise InvalidParameter(f"transformers cannot create the cache layers for the configuration of {self.name}: {error}") from None
        count = decoder_layers(self._decoder_config)
        if count is not None and {type(layer) for layer in layers} == {DynamicLayer}:
            layers = [*layers, *[DynamicLayer()] * count][:count]
        return layers


class Model(ExpectedLayers):
    """The properties of a transformers model, or of a wrapper of one, on which its caches depend. It does not reference weights.

    ``inner_models`` is ``models_in(model)``, if already computed. Raises InvalidType if ``model`` is not a model.
    """

    def __init__(self, model: Any, inner_models: Sequence[PreTrainedModel] | None = None) -> None:
        if inner_models is None:
            inner_models = models_in(model) if hasattr(model, "modules") else []
        if not inner_models:
            raise InvalidType(f"model is a {type(model).__name__}, expected a transformers model or a wrapper of one")
        check_accepts_cache(model)
        outer = inner_models[0]
        decoder = outer.get_decoder()
        decoder = decoder if isinstance(decoder, PreTrainedModel) else outer
        super().__init__(outer.config)
        self.name = type(outer).__name__
        self._accepts_cache = any(map(_accepts_cache, inner_models))
        self._own_cache = next((description for module in inner_models if (description := _own_cache(module))), "")
        other = any(getattr(self.config, name, None) is not None for name in _OTHER_ATTENTION)
        settable = bool(decoder._can_set_attn_implementation()) and not other and not self.has_encoder
        self._tells_no_window = omits_window(decoder)
        self._may_use_packed_layers = settable and not reads_kv(decoder)
        self.keeps_rope_deltas = _has_attribute(outer, "rope_deltas") or _config_uses_mrope(self.config)
        self.has_multidimensional_positions = self.keeps_rope_deltas or _has_attribute(outer, "mrope_section")
        self._decoder_config = decoder.config

    def __deepcopy__(self, memo: object) -> Model:
        return self

    @cached_property
    def supports_packed_layers(self) -> bool:
        """True if the model's attention receives the cache's keys and values unchanged, with the window of their layer."""
        return self._may_use_packed_layers and not (self._tells_no_window and any(self.windows(len(self._layer_caches))))

    @property
    def attention(self) -> str:
        return str(self._decoder_config._attn_implementation)

    @property
    def runs_packed_layers(self) -> bool:
        """True if the model's attention is "kvpack"."""
        return self.attention in NAMES

    def check(self, cache: Cache) -> None:
        """Raise InvalidParameter if the cache is known to belong to another model. The message names the difference."""
        expected = [] if self.has_encoder else self._layer_caches
        for number, layer in enumerate(expected):
            self._check_layer(number, layer)
        self._check_accepts_cache_argument()
        # transformers' own cache may have more layers than the decoder, which stay empty.
        held = next((number for number in range(len(cache), 0, -1) if cache[number - 1].sides or cache[number - 1].states), 0)
        if expected and not held <= len(expected) <= len(cache):
            raise InvalidParameter(
                f"the cache has {len(cache)} layers, but {self.name} has {len(expected)}: load the model that computed the cache"
            )


class NamedModel:
    """The fields by which caches identify a model.

    ``identity_fields`` is empty if the model cannot be identified, and ``unnamed`` is the reason. The digest of the weights is computed in
    the background from their values at creation, so they must not change before ``wait_until_read`` returns. ``state`` is the model's state
    before the weights were read, or None if no model was identified.
    """

    def __init__(
        self, state: ModelState | None = None, identity: Identity | None = None, weights: WeightsDigest | None = None, unnamed: str = ""
    ) -> None:
        self.state, self._identity, self._weights, self.unnamed = state, identity, weights, unnamed

    def wait_until_read(self) -> None:
        """Wait until later changes to the weights can no longer affect their digest."""
        if self._weights is not None:
            self._weights.wait_until_read()

    @cached_property
    def identity_fields(self) -> dict[str, str]:
        """Fields that identify the model. Blocks until the digest of the weights is known. If weights cannot be read, their digest is
        omitted.
        """
        if self._identity is None:
            return {}
        try:
            text = "" if self._weights is None else self._weights.text
        except InvalidParameter:
            text = ""
        return replace(self._identity, weights=text).header_model

    @property
    def weights(self) -> str:
        """Digest of the weights, or an empty string if they cannot be read."""
        return self.identity_fields.get("weights", "")


def name_model(model: Any) -> NamedModel:
    """Return the fields by which caches identify ``model`` in its current state.

    The result is empty in training mode, or if buffers are not in memory.
    """
    weights: WeightsDigest | None = None
    state = ModelState(outermost_model(model))
    try:
        model_parts = _submodels(model)
        with contextlib.suppress(InvalidParameter):
            weights = digest_weights(model_parts)
        return NamedModel(state, Identity.from_model_parts(model_parts, "raw", weights="", digests=()), weights)
    except InvalidParameter as error:
        return NamedModel(state, unnamed=str(error))


def model_identity(model: Any) -> dict[str, str]:
    """Return the fields by which caches identify ``model``, as ``name_model`` does."""
    return name_model(model).identity_fields


def identity_for(model: Any, basis: Basis) -> dict[str, str]:
    """Return ``model_identity(model)``, with the weights digest of the same kind as in ``basis``."""
    identity = model_identity(model)
    sampled = weights_kind(basis.model.get("weights", "")) == SAMPLE
    return {**identity, "weights": sample_digest(model)} if sampled and identity else identity


def sample_digest(model: Any) -> str:
    """Return the digest of a sample of a model's weights, as in files of earlier versions. Empty if the weights cannot be read."""
    try:
        return weights_sample(_submodels(model))
    except InvalidParameter:
        return ""


def current_weights_digest(model: Any) -> str:
    """Return the digest of a model's current weights, or an empty string if they cannot be read."""
    try:
        return digest_weights(_submodels(model)).text
    except InvalidParameter:
        return ""


def check_identity(cache: Cache, model: Any) -> NamedModel:
    """Raise InvalidParameter if the cache identifies a model, and ``model`` is a different one or cannot be identified.

    The message states the difference. If digests of both weights are known, they are compared instead of the names, because the same model
    may be in another folder. Issues a KvpackWarning if weights can be compared only in part, or cannot be read. Returns
    ``name_model(model)``, or an empty NamedModel if the cache identifies no model.
    """
    if not cache.model.get("config"):
        return NamedModel()
    this = name_model(model)
    fields = dict(this.identity_fields)
    if not fields:
        reason = "the cache names the model that computed it, but this one cannot be compared with it"
        raise InvalidParameter(f"{reason}: {this.unnamed}; {SAME_MODEL_ADVICE}")
    weights = cache.model.get("weights", "")
    kind = weights_kind(weights)
    if kind == SAMPLE:
        fields["weights"] = sample_digest(model)
    compared = kind in (ALL, SAMPLE) and bool(fields.get("weights"))
    # Report settings that users change before the digests that change with them.
    for field in ("dtype", "rope", "adapter", "weights" if compared else "name", "config"):
        recorded, actual = cache.model.get(field, ""), fields.get(field, "")
        if field == "name" and not (recorded and actual and basename(recorded) != basename(actual)):
            # Files of earlier versions contain the whole path.
            continue
        if field == "adapter":
            # Callers choose the names of adapters; the digest covers their weights.
            recorded, actual = recorded.rpartition(" ")[2], actual.rpartition(" ")[2]
        if recorded != actual:
            verb = "are" if field == "weights" else "is"
            # A file may record any text as the dtype.
            loads = field == "dtype" and isinstance(getattr(torch, recorded, None), torch.dtype)
            remedy = (
                f"load the model with from_pretrained(..., dtype=torch.{recorded}); or, {SAME_MODEL_ADVICE}" if loads else SAME_MODEL_ADVICE
            )
            raise InvalidParameter(
                f"the cache was computed by a model whose {field} {verb} {recorded!r}, but this one's {verb} {actual!r}: {remedy}"
            )
    if kind == SAMPLE and compared:
        warnings.warn(
            "the cache is from an earlier version of kvpack, which recorded only a sample of the model's weights. The sample matches, "
            "but edits to other weights go unnoticed: compute the cache again to record all weights",
            KvpackWarning,
            stacklevel=4,
        )
    elif kind in (ALL, SAMPLE) and not compared:
        warnings.warn(
            "the weights of the model are not in memory (offloaded, or not loaded yet), so only the name and the configuration were "
            "compared with the cache's: load the model into memory to compare its weights",
            KvpackWarning,
            stacklevel=4,
        )
    return this


def _submodels(model: Any) -> list[ModelPart]:
    """Return the text, vision and other submodels of the transformers model that ``model`` is or wraps."""
    model_parts = list_model_parts(model)
    if not isinstance(next(part.module for part in model_parts if not part.adapter), PreTrainedModel):
        # A caller's own module, such as one with a value head.
        model_parts = list_model_parts(outermost_model(model))
    return model_parts


def _accepts_cache(module: torch.nn.Module) -> bool:
    """Return True if a call of ``module`` accepts a transformers cache. XLM also has an argument ``cache``, but it is a dict."""
    parameters = inspect.signature(module.forward).parameters
    return any(name in parameters and not (name == "cache" and "dict[" in str(parameters[name].annotation)) for name in cache_names.NAMES)


def _own_cache(module: torch.nn.Module) -> str:
    """Return the name of the model's own cache class if the model accepts no other, or an empty string."""
    parameters = inspect.signature(module.forward).parameters
    annotations = [str(parameters[name].annotation) for name in cache_names.NAMES if name in parameters]
    kinds = [kind for text in annotations for kind in re.findall(r"\w*Cache\b", text)]
    return next((kind for kind in kinds if not hasattr(cache_utils, kind)), "") if kinds else ""


def execution_device(model: torch.nn.Module) -> torch.device:
    """Return the device on which ``model`` computes. Weights that accelerate has offloaded are on "meta" and are ignored."""
    devices = {parameter.device for parameter in model.parameters()}
    for module in iterate_modules(model):
        if "_hf_hook" in vars(module) and (device := getattr(vars(module)["_hf_hook"], "execution_device", None)) is not None:
            devices.add(torch.device("cuda", device) if isinstance(device, int) else torch.device(device))
    return next((device for device in sorted(devices, key=str) if device.type not in ("meta", "cpu")), torch.device("cpu"))


def has_multidimensional_positions(attention: torch.nn.Module) -> bool:
    """Return True if an attention module divides rotary positions into sections, as in Qwen2-VL, according to its configuration or code."""
    return _config_uses_mrope(getattr(attention, "config", None)) or _module_uses_mrope(type(attention).__module__)


def _config_uses_mrope(config: Any) -> bool:
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    return "mrope_section" in _all_keys(rope)


@lru_cache(maxsize=256)
def _module_uses_mrope(name: str) -> bool:
    """Return True if a class in the module ``name`` divides rotary positions into sections, which the configuration may not show."""
    classes = [value for value in vars(sys.modules[name]).values() if isinstance(value, type) and value.__module__ == name]
    codes = [init.__code__ for cls in classes if isinstance(init := vars(cls).get("__init__"), FunctionType)]
    return any({"rope_deltas", "mrope_section"} & set(code.co_names) for code in codes)


def _has_attribute(model: torch.nn.Module, name: str) -> bool:
    return any(name in vars(module) for module in iterate_modules(model))


def decoder_layers(config: Any) -> int | None:
    """Return the number of decoder layers if the configuration has a separate field for it, or None otherwise.

    In such a configuration, ``num_hidden_layers`` may be the number of encoder layers.
    """
    counts = (getattr(config, name, None) for name in ("num_decoder_layers", "decoder_layers"))
    return next((count for count in counts if isinstance(count, int)), None)


def check_layers(layers: int, module: torch.nn.Module) -> None:
    """Raise InvalidParameter if an attention module's configuration shows that the model has fewer than ``layers`` layers."""
    config = getattr(module, "config", None)
    expected = decoder_layers(config) or getattr(config, "num_hidden_layers", None)
    if isinstance(expected, int) and not getattr(config, "is_encoder_decoder", False) and layers > expected:
        raise InvalidParameter(
            f"the cache has {layers} layers, but the model of this {type(module).__name__} has {expected}: "
            "load the model that computed the cache"
        )


def _all_keys(settings: Any) -> set[str]:
    if not isinstance(settings, Mapping):
        return set()
    return set(settings).union(*(_all_keys(value) for value in settings.values()))
