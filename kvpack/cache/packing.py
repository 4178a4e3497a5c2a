"""Encodes a model's KV cache (``pack``)."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import torch

from kvpack.coding import dispatch
from kvpack.coding.encoding import RAW_NAMES, Progress
from kvpack.coding.recipes import Recipe, parse_recipe
from kvpack.coding.token_errors import collect_poor_fits, warn_of_poor_fits
from kvpack.file.inputs import Inputs
from kvpack.file.limits import MAX_TOKENS
from kvpack.formats.arguments import as_integer, as_list, check_callback, check_mapping
from kvpack.formats.errors import InvalidParameter, InvalidType, KvpackWarning, MissingBasis, OutOfBounds, ValueTooLarge
from kvpack.identity.arguments import ModelArgument, model_fields
from kvpack.runtime.memory import shared_arena
from kvpack.runtime.modes import float32_no_grad

from .cache import Cache
from .checksums import checksums, has_checksums
from .dense_states import DenseLayer, extract_layers
from .layer import Layer
from .minifloats import ELEMENT_DTYPES, Minifloats
from .side import Side, check_tensor, pack_sides

if TYPE_CHECKING:
    import os

    from kvpack.formats.base import Codec

    from .states import StatesAt

    Codecs = tuple[Codec | None, Codec | None]


@runtime_checkable
class EngineEncoded(Protocol):
    """Keys or values in a serving engine's own format, such as Minifloats. ``codec`` stores them bit for bit."""

    @property
    def shape(self) -> tuple[int, int, int, int]: ...

    @property
    def codec(self) -> Codec: ...

    def side(self, window: int = 0) -> Side: ...


MAX_CHANNEL_RATIO = 64.0
"""Maximum magnitude of a key channel relative to the median channel of its head. In SmolLM2-135M-Instruct, the ratio is at most 14."""

SAMPLED_TOKENS = 128

BATCHED_VALUES, DEVICE_BATCHED_VALUES = 1 << 19, 1 << 26
"""Maximum number of keys in layers that are encoded together: on the CPU, and on other devices."""


class OutlierChannel(NamedTuple):
    """The channel with the largest magnitude in a layer's keys. ``ratio`` compares it with the median channel of its head."""

    layer: int
    head: int
    channel: int
    ratio: float


def pack(
    past_key_values: Any,
    recipe: str | os.PathLike[str] | Recipe,
    *,
    model: ModelArgument | None = None,
    start: int = 0,
    inputs: Inputs | None = None,
    progress: Progress | None = None,
    states_at: StatesAt | None = None,
) -> Cache:
    """Encode a KV cache.

    Args:
        past_key_values: A transformers Cache, a list with one (k, v) per layer, or one (k, v). k and v are ``[batch, kv_head, token, dim]``
            in bfloat16, float16 or float32; either may be None. A layer may also be (k, v, skipped), where ``skipped`` is the number of
            earlier tokens that a sliding window has dropped. Pass values that an engine stores in fp8, mxfp8, mxfp4 or nvfp4 as
            ``kvpack.pages.Minifloats``; a recipe of the same format stores them bit for bit. States of recurrent and convolution layers are
            stored bit for bit.
        recipe: A preset, a recipe, a Recipe, or the path of a recipe file (as a Path or ``"@path"``). Recipes such as ``"klt-2"`` need a
            basis: ``Recipe("klt-2", basis)``.
        model: The model that computed the values: a transformers model, an Identity, a name, or a mapping of fields.
        start: Position of the first token.
        inputs: The inputs from which the values were computed, if known. Recorded inputs must match the values. Inputs that were not
            recorded cannot be checked, because keys and values do not contain token ids.
        progress: Called as ``progress(done, total)`` after each layer.
        states_at: States of all layers at earlier positions, by position, for use in a store (see ``recording``).

    Returns:
        The packed cache, on the device of the values. It is constant: no gradients flow to the values or to the model.

    Raises:
        InvalidParameter: The recipe is invalid or does not suit the model, or a shape or value is not supported.
        InvalidType: An argument has the wrong type, or a tensor an unsupported dtype.
        MissingBasis: The recipe needs a basis.
        MissingFile: The recipe file does not exist.

    Issues a KvpackWarning about tokens or channels that lose precision; the warning names an option that avoids this.

    >>> cache = kvpack.pack(past, "octopus-3", model="llama")
    >>> cache
    Cache('k=octahedral:b=3,mean=32,mean_bits=4,norm=log8;v=group:b=3;raw=4,0.5,4', 2 layers, tokens [0:64], model {'name': 'llama'})
    """
    check_callback(progress)
    if isinstance(recipe, torch.Tensor):
        raise InvalidType("the recipe is a Tensor: pass keys and values as one argument, such as kvpack.pack((k, v), 'kvpack-4')")
    recipe = parse_recipe(recipe)
    if inputs is not None and not isinstance(inputs, Inputs):
        raise InvalidType(f"inputs is a {type(inputs).__name__}, expected a kvpack.Inputs")
    start, named = as_integer(start, "start"), {} if model is None else model_fields(model)
    if not 0 <= start <= MAX_TOKENS:
        raise InvalidParameter(f"start is {start}, expected an integer from 0 to {MAX_TOKENS}")
    if recipe.basis is not None:
        recipe.basis.check_model(named)
    states = dense_layers(past_key_values)
    recipe.check_layers(len(states))
    layers: list[Layer] = []
    outliers: list[OutlierChannel] = []
    # Modes are set once here, because setting them for each layer would take longer.
    values = 0
    for k, v, *_ in states:
        for x in (k, v):
            values += x.numel() if isinstance(x, torch.Tensor) else 0
    with float32_no_grad(torch.device("cpu")), shared_arena(values), collect_poor_fits() as poor_fits:
        for numbers, codecs in _encoding_groups(states, recipe):
            with dispatch.serial_operations(codecs, states[numbers.start][:2]):
                pairs, found = _pack_layers(numbers, states, codecs, recipe.window, start)
            outliers += found
            for number, pair in zip(numbers, pairs, strict=True):
                layer = states[number]
                layers.append(Layer(*pair, skipped=layer.skipped, states=MappingProxyType(dict(layer.states))))
                if progress:
                    progress(number + 1, len(states))
    if outliers:
        _warn_of_outlier_channels(outliers, len(layers))
    if poor_fits:
        warn_of_poor_fits(poor_fits)
    if inputs is not None:
        inputs = _bind_inputs(inputs, layers, start)
        _check_values(inputs, states, start)
        inputs = replace(inputs, sums=None)
    result = Cache(tuple(layers), recipe.canonical, MappingProxyType(named), start, inputs)
    return result if states_at is None else replace(result, states_at=_checked_states(states_at, result))


def dense_layers(past: Any) -> list[DenseLayer]:
    """Return the layers of ``past``, in any form that ``pack`` accepts.

    Raises InvalidType if ``past`` is not a cache. Raises InvalidParameter if the cache is empty, contains anything except keys, values and
    states, or has layers with different numbers of tokens.
    """
    if isinstance(past, Cache) or isinstance(getattr(past, "packed", None), Cache):
        raise InvalidType(f"a {type(past).__name__} is already packed: change its recipe with Cache.convert")
    if isinstance(past, (list, tuple)):
        if len(past) == 2 and all(x is None or isinstance(x, torch.Tensor | Minifloats) for x in past):
            past = [past]
        layers = []
        for number, pair in enumerate(past):
            if isinstance(pair, DenseLayer):
                layers.append(pair)
                continue
            if not isinstance(pair, (list, tuple)) or len(pair) not in (2, 3):
                kind = f"a {type(pair).__name__}" + (f" of {len(pair)}" if isinstance(pair, (list, tuple)) else "")
                raise InvalidType(f"layers[{number}] is {kind}, expected (k, v) or (k, v, skipped): pass a list with one (k, v) per layer")
            k, v, skipped = (*pair, 0)[:3]
            if type(skipped) is not int or not 0 <= skipped <= MAX_TOKENS:
                shown = skipped if isinstance(skipped, int) else type(skipped).__name__
                raise InvalidParameter(
                    f"layers[{number}]: skipped (the number of tokens dropped before k and v) is {shown}, expected a non-negative integer"
                )
            if k is None and v is None:
                raise InvalidParameter(f"layers[{number}]: k and v are both None: pass keys, values or both")
            layers.append(DenseLayer(k, v, skipped))
        return layers
    return extract_layers(past)


def _checked_states(states_at: StatesAt, cache: Cache) -> StatesAt:
    """Return only the states at positions within ``cache``.

    Raises InvalidParameter unless their layers, names and shapes match the cache's own states.
    """
    check_mapping(states_at, "states_at", "recording(model).states_at(past_key_values)")
    expected = [{name: state.shape for name, state in layer.states.items()} for layer in cache]
    for position, states in states_at.items():
        as_integer(position, "a position of states_at")
        layer_states = as_list(states, f"states_at[{position}]", "maps of names to tensors, one for each layer")
        if (
            not all(isinstance(mapping, Mapping) and all(isinstance(x, torch.Tensor) for x in mapping.values()) for mapping in layer_states)
            or [{name: state.shape for name, state in mapping.items()} for mapping in layer_states] != expected
        ):
            raise InvalidParameter(
                f"states_at[{position}] differs in layers, names or shapes from the states after the last token: pass this cache's states, "
                "as returned by recording(model).states_at(past_key_values)"
            )
    return MappingProxyType({position: tuple(mapping) for position, mapping in states_at.items() if cache.start < position < cache.stop})


def _bind_inputs(inputs: Inputs, layers: Sequence[Layer], start: int) -> Inputs:
    """Return ``inputs`` bound to ``layers``. ``start`` is the position of the first token. Raises InvalidParameter if they do not match."""
    first = start if inputs.first is None else inputs.first
    tokens = max((layer.seen_tokens for layer in layers), default=0)
    count = tokens if inputs.count is None else inputs.count
    if (first, count) != (start, tokens):
        raise InvalidParameter(
            f"inputs were recorded for tokens [{first}:{first + count}] of a sequence, but the cache has tokens "
            f"[{start}:{start + tokens}]: record them after the last change to the cache, or omit inputs="
        )
    if inputs.tokens > tokens:
        raise InvalidParameter(
            f"inputs have {inputs.tokens} token ids per sequence, but the cache has {tokens} tokens: if only the newest tokens were "
            f"dropped, pass inputs.slice(0, {tokens}, {start}); otherwise, omit inputs="
        )
    batch = min((side.batch for layer in layers for side in layer.sides.values()), default=1)
    rows = max([len(inputs.rows), *(stretch.row + 1 for stretch in inputs.hidden)])
    if rows > batch or (inputs.rows and rows != batch):
        raise InvalidParameter(f"inputs are for {rows} sequences, but the cache has {batch}: pass inputs for exactly these sequences")
    return replace(inputs, first=start, count=None)


def _check_values(inputs: Inputs, states: Sequence[DenseLayer], start: int) -> None:
    """Raise InvalidParameter if keys or values differ from the values for which ``inputs`` were recorded.

    The check is skipped unless all keys and values are tensors that were recorded.
    """
    tensors = {
        (number, name): (x, start + layer.skipped) for number, layer in enumerate(states) for name, x in (("k", layer.k), ("v", layer.v))
    }
    sums = inputs.sums or {}
    if sums.keys() != {key for key, (x, _) in tensors.items() if has_checksums(x)}:
        return
    for key, (first, recorded) in sums.items():
        x, position = tensors[key]
        assert isinstance(x, torch.Tensor)
        begin = max(first, position)
        actual, expected = checksums(x)[:, begin - position :].cpu().numpy(), recorded[:, begin - first :]
        if actual.shape != expected.shape or (actual != expected).any():
            raise InvalidParameter(
                f"layers[{key[0]}].{key[1]}: inputs were recorded for different values (sequences or tokens were moved, or values were "
                "rounded): record them after the last change to the cache, or omit inputs="
            )


def _encoding_groups(states: Sequence[DenseLayer], recipe: Recipe) -> Iterator[tuple[range, Codecs]]:
    """Split the layers into ranges that are encoded together. Yields the layer indices and the codecs of each range.

    Layers in a range have equal shapes. Raises the same errors as ``pack`` about shapes and codecs.
    """
    begin, before = 0, None
    codecs: Codecs = (None, None)
    for number, layer in enumerate(states):
        its = _codecs(layer, recipe, number, len(states))
        kind = _layer_properties(layer, its, len(states))
        if number and (kind is None or kind != before or number - begin == kind.max_layers):
            yield range(begin, number), codecs
            begin = number
        before, codecs = kind, its
    if states:
        yield range(begin, len(states)), codecs


def _codecs(layer: DenseLayer, recipe: Recipe, layer_index: int, count: int) -> Codecs:
    """Return the codecs of layer ``layer_index`` of ``count``. Raises the errors that ``pack`` raises for keys and values."""
    where = f"layers[{layer_index}]"
    for name, x in (("k", layer.k), ("v", layer.v)):
        # isinstance is slower for a protocol than for a class.
        if x is None or (not isinstance(x, torch.Tensor) and isinstance(x, EngineEncoded)):
            continue
        if isinstance(x, torch.Tensor) and x.dtype in ELEMENT_DTYPES:
            raise InvalidType(
                f"{where}.{name}: values of dtype {x.dtype} need scales: pass kvpack.pages.Minifloats(elements, scales), "
                "with scales of 1 if the engine has none"
            )
        check_tensor(x, f"{where}.{name}")
        if not x.shape[0] or not x.shape[1]:
            raise InvalidParameter(f"{where}.{name} has shape {list(x.shape)}, expected at least one sequence and one head")
    k, v = layer.k, layer.v
    if k is not None and v is not None and k.shape[:3] != v.shape[:3]:
        raise InvalidParameter(f"{where}: k is {list(k.shape)}, but v is {list(v.shape)}: batch, kv_head and token must be the same")
    codecs: list[Codec | None] = []
    for name, x in (("k", k), ("v", v)):
        try:
            dtype = RAW_NAMES[x.dtype] if isinstance(x, torch.Tensor) else "bf16"
            codecs.append(None if x is None else recipe.codec(layer_index, count, name, x.shape[3], dtype))
        except (InvalidParameter, MissingBasis, OutOfBounds) as error:
            raise type(error)(f"{where}.{name}: {error}") from None
    return codecs[0], codecs[1]


class _LayerProperties(NamedTuple):
    """The properties that layers must share to be encoded together. ``max_layers`` is the maximum number of such layers."""

    max_layers: int
    skipped: int
    sides: tuple[Any, ...]


def _layer_properties(layer: DenseLayer, codecs: Codecs, count: int) -> _LayerProperties | None:
    """Return the properties that other layers must share to be encoded with ``layer``, or None if it must be encoded separately."""
    max_layers, sides = count, []
    for x, codec in zip((layer.k, layer.v), codecs, strict=True):
        if codec is None or not isinstance(x, torch.Tensor):
            return None
        plain = codec.without_raw_positions.summary
        # Exact values are only copied. Of all entries, only those of raw tokens can be divided among layers.
        if plain.exact_dtype is not None or plain.entries:
            return None
        max_layers = min(max_layers, (BATCHED_VALUES if x.device.type == "cpu" else DEVICE_BATCHED_VALUES) // max(1, x.numel()))
        # Equal codecs may have different encoder options.
        sides.append((x.shape, x.dtype, x.device, id(codec)))
    return _LayerProperties(max(1, max_layers), layer.skipped, tuple(sides))


def _pack_layers(
    layer_indices: range, states: Sequence[DenseLayer], codecs: Codecs, window: int, start: int
) -> tuple[list[tuple[Side | None, Side | None]], list[OutlierChannel]]:
    """Encode the keys and values of the layers in ``layer_indices``. Returns packed keys and values, and the outlier channels."""
    if len(layer_indices) > 1:
        given = states[layer_indices.start : layer_indices.stop]
        # On small layers, calls take longer than their work, so layers are encoded as sequences of one batch.
        with contextlib.suppress(InvalidParameter, ValueTooLarge, torch.OutOfMemoryError), collect_poor_fits() as poor_fits:
            k, v = (torch.cat([getattr(layer, side) for layer in given]) for side in "kv")
            pairs, outlier = _pack_pair(DenseLayer(k, v, given[0].skipped), layer_indices, codecs, window, start)
            # Errors and warnings name a layer, so such layers are encoded one by one.
            if not poor_fits and outlier is None:
                return pairs, []
    pairs, outliers = [], []
    for number in layer_indices:
        pair, outlier = _pack_pair(states[number], range(number, number + 1), codecs, window, start)
        pairs += pair
        outliers += [] if outlier is None else [outlier]
    return pairs, outliers


def _pack_pair(
    layer: DenseLayer, layer_indices: range, codecs: Codecs, window: int, start: int
) -> tuple[list[tuple[Side | None, Side | None]], OutlierChannel | None]:
    """Encode the layers in ``layer_indices``. Their keys and values are joined as the batch of ``layer``.

    Returns packed keys and values for each layer, and the outlier channel, if any.
    """
    k, v, outlier = layer.k, layer.v, None
    measure = cache(dispatch.measure_sizes)
    # Keys and values mostly have the same rule for raw tokens.
    chosen_by_rule: dict[tuple[int, float, float], torch.Tensor] = {}
    both: list[Sequence[Side | None]] = []
    for side, x, codec in zip("kv", (k, v), codecs, strict=True):
        where = f"layers[{layer_indices.start}].{side}"
        if x is None or codec is None:
            both.append([None] * len(layer_indices))
        elif isinstance(x, torch.Tensor):
            raw, chosen = codec.raw_positions, None
            if raw is not None and isinstance(k, torch.Tensor):
                rule = raw.first, raw.low_norm, raw.high_norm
                if rule not in chosen_by_rule:
                    value_norms = measure(v).norms if isinstance(v, torch.Tensor) else None
                    packed, position = k.shape[2] - k.shape[2] % (window or 1), start + layer.skipped
                    chosen_by_rule[rule] = dispatch.choose_raw_tokens(raw, measure(k).norms, value_norms, packed, position)
                chosen = chosen_by_rule[rule]
            measured = None if chosen is None else measure(x)
            both.append(pack_sides(x, len(layer_indices), codec, window, where, start + layer.skipped, chosen=chosen, measured=measured))
            if side == "k":
                outlier = _outlier_channel(x, codec, layer_indices.start)
        else:
            both.append([_store_unchanged(x, codec, window, where)])
    return list(zip(*both, strict=True)), outlier


def _store_unchanged(x: EngineEncoded, codec: Codec, window: int, where: str) -> Side:
    """Return values in an engine's format as a side that stores them bit for bit.

    Raises InvalidParameter if ``codec`` cannot store them.
    """
    # So no token has to be raw.
    codec = codec.without_raw_positions
    if codec != x.codec:
        raise InvalidParameter(
            f"{where}: the recipe selects codec {codec.params()}, but the engine's values are {x.codec.params()}: use a recipe of that "
            "format"
        )
    return x.side(window)


def _outlier_channel(x: torch.Tensor, codec: Codec, layer: int) -> OutlierChannel | None:
    """Return the largest channel of keys ``[batch, kv_head, token, dim]`` if it exceeds ``MAX_CHANNEL_RATIO``, or None otherwise.

    A channel's magnitude is its median over a sample of tokens, so that single tokens do not matter.
    """
    if not codec.summary.spreads_channels or not x.shape[2]:
        return None
    sample = x[:, :, :: -(-x.shape[2] // SAMPLED_TOKENS)].abs()
    # Medians take long on a CPU. If most values of most channels are within the ratio of the largest value, all medians are.
    small = sample.to(torch.float32) * MAX_CHANNEL_RATIO < sample.amax((2, 3), keepdim=True)
    if (2 * (2 * small.sum(2) >= sample.shape[2]).sum(2) < x.shape[3]).all():
        return None
    size = sample.to(torch.float32).median(2).values
    median = size.median(2, keepdim=True).values
    ratio = torch.where(median > 0, size / median, 0.0)
    largest = float(ratio.max())
    if largest <= MAX_CHANNEL_RATIO:
        return None
    _, head, channel = (ratio == ratio.max()).nonzero()[0].tolist()
    return OutlierChannel(layer, head, channel, largest)


def _warn_of_outlier_channels(outliers: Sequence[OutlierChannel], layers: int) -> None:
    """Issue one KvpackWarning about ``outliers``, which names the worst channel. ``layers`` is the number of layers in the cache."""
    if outliers:
        worst = max(outliers, key=lambda channel: channel.ratio)
        warnings.warn(
            f"layers[{worst.layer}].k: channel {worst.channel} of head {worst.head} is {worst.ratio:.0f} times as large as the median "
            f"channel, as in the keys of {len(outliers)} of {layers} layers. The codec's rotation spreads it over all other channels, "
            "which lose precision. To avoid this, pack with kvpack-4, kvpack-3 or kvpack-2, or add channel_scale=fp16 to the keys' codec",
            KvpackWarning,
            stacklevel=3,
        )
