"""pack: encode a model's KV cache."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import torch

from kvpack.coding import dispatch
from kvpack.coding.encoding import RAW_NAMES, collected_misfits, warn_of_misfits
from kvpack.coding.recipes import Recipe, parse_recipe
from kvpack.file.inputs import Inputs
from kvpack.file.limits import MAX_TOKENS
from kvpack.formats.arguments import as_integer, as_list, check_callback, check_mapping
from kvpack.formats.errors import InvalidParameter, InvalidType, KvpackWarning, MissingBasis, OutOfBounds
from kvpack.formats.raw_positions import RawPositions
from kvpack.formats.side_cars import WithSideCars
from kvpack.identity.arguments import model_fields
from kvpack.runtime.memory import shared_arena
from kvpack.runtime.modes import float32_no_grad

from .cache import Cache
from .checksums import checksums, has_checksums
from .dense_states import DenseLayer, layers_of_cache
from .layer import Layer
from .minifloats import ELEMENT_DTYPES, Minifloats
from .side import Side, check_tensor, packed_side

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence

    from kvpack.coding.encoding import Progress
    from kvpack.formats.base import Codec
    from kvpack.identity.arguments import ModelArgument

    from .states import StatesAt


@runtime_checkable
class Encoded(Protocol):
    """Keys or values that an engine has encoded, such as Minifloats; ``codec`` stores them bit for bit."""

    @property
    def shape(self) -> tuple[int, int, int, int]: ...

    @property
    def codec(self) -> Codec: ...

    def side(self, window: int = 0) -> Side: ...


MAX_CHANNEL_RATIO = 64.0
"""Number of times larger than the median channel of its head a channel may be: those of SmolLM2-135M-Instruct are at most 14 times."""

SAMPLED_TOKENS = 128


class OutlierChannel(NamedTuple):
    """The largest channel of a layer's keys, and its size relative to the median of its head."""

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
            in bfloat16, float16 or float32; either may be None. A layer may also be (k, v, skipped), with the number of tokens that a
            sliding window dropped before them. Values that an engine stores in fp8, mxfp8, mxfp4 or nvfp4 are ``kvpack.pages.Minifloats``;
            a recipe of that format stores them bit for bit. States of recurrent and convolution layers are stored bit for bit.
        recipe: A preset, a recipe, a Recipe, or the path of a recipe file (as a Path or ``"@path"``). Recipes such as ``"klt-2"`` need a
            basis: ``Recipe("klt-2", basis)``.
        model: The model that computed the values: a transformers model, an Identity, a name, or a map of fields.
        start: Position of the first token.
        inputs: The inputs that the tokens were computed from, if known. Recorded ones must fit the values; those that you make yourself
            are believed, because keys and values do not contain ids.
        progress: Called as ``progress(done, total)`` after every layer.
        states_at: States of all layers at earlier positions, as ``recording`` collects them for a store.

    Returns:
        The packed cache, on the device of the values.

    Raises:
        InvalidParameter: A shape, a value or the recipe does not fit.
        InvalidType: An argument has the wrong type, or a tensor another dtype.
        MissingBasis: The recipe needs a basis.
        MissingFile: The recipe file does not exist.

    Issues one KvpackWarning if heads share a token scale that does not fit some of them (``token_scale=fp16-per-head`` avoids it).

    >>> cache = kvpack.pack(past, "octopus-3", model="llama")
    >>> cache
    Cache('k=octahedral:b=3,mean=32,mean_bits=4,norm=log8;v=group:b=3;raw=4,0.6,4', 2 layers, tokens 0 to 64, model {'name': 'llama'})
    """
    check_callback(progress)
    recipe = parse_recipe(recipe)
    if inputs is not None and not isinstance(inputs, Inputs):
        raise InvalidType(f"inputs is a {type(inputs).__name__}, expected a kvpack.Inputs")
    start, named = as_integer(start, "start"), {} if model is None else model_fields(model)
    if not 0 <= start <= MAX_TOKENS:
        raise InvalidParameter(f"start is {start}, expected an integer from 0 to {MAX_TOKENS}")
    recipe.check_length()
    if recipe.basis is not None:
        recipe.basis.check_model(named)
    states = dense_states(past_key_values)
    recipe.check_layers(len(states))
    layers, outliers = [], []
    # Modes that are set here need not be set for every side.
    values = 0
    for k, v, *_ in states:
        for x in (k, v):
            values += x.numel() if isinstance(x, torch.Tensor) else 0
    with float32_no_grad(torch.device("cpu")), shared_arena(values), collected_misfits() as misfits:
        for number, (k, v, skipped, kept) in enumerate(states):
            _check_pair((k, v), f"layers[{number}]")
            norms = _norms_of_keys(k)
            place = (number, len(states)), start + skipped, norms
            packed = _pack_side(k, recipe, "k", *place)
            layers.append(Layer(packed, _pack_side(v, recipe, "v", *place), skipped=skipped, states=MappingProxyType(dict(kept))))
            if isinstance(k, torch.Tensor) and packed is not None and (channel := _outlier_channel(k, packed.codec, number)):
                outliers.append(channel)
            if progress:
                progress(number + 1, len(states))
    if outliers:
        _warn_of_outlier_channels(outliers, len(layers))
    if misfits:
        warn_of_misfits(misfits)
    if inputs is not None:
        inputs = _fitting(inputs, layers, start)
        _check_values(inputs, states, start)
        inputs = replace(inputs, sums=None)
    cache = Cache(tuple(layers), recipe.canonical, MappingProxyType(named), start, inputs)
    return cache if states_at is None else replace(cache, states_at=_checked_states(states_at, cache))


def dense_states(past: Any) -> list[DenseLayer]:
    """Return the layers of a cache in any of the accepted forms.

    Raises InvalidType for anything but a cache, InvalidParameter for a cache that contains more than keys and values, and InvalidParameter
    for a cache that is empty or whose layers do not hold tokens of the same range.
    """
    if isinstance(past, Cache) or isinstance(getattr(past, "packed", None), Cache):
        raise InvalidType(f"a {type(past).__name__} is packed already: change its recipe with Cache.convert")
    if isinstance(past, (list, tuple)):
        if len(past) == 2 and all(x is None or isinstance(x, torch.Tensor | Minifloats) for x in past):
            past = [past]
        for pair in past:
            if not isinstance(pair, DenseLayer) and not (isinstance(pair, (list, tuple)) and len(pair) in (2, 3)):
                break
        else:
            return [_layer_of_tuple(pair, f"layers[{number}]") for number, pair in enumerate(past)]
    return layers_of_cache(past)


def _layer_of_tuple(pair: Sequence[Any], where: str) -> DenseLayer:
    if isinstance(pair, DenseLayer):
        return pair
    skipped = pair[2] if len(pair) == 3 else 0
    if type(skipped) is not int or not 0 <= skipped <= MAX_TOKENS:
        shown = skipped if isinstance(skipped, int) else type(skipped).__name__
        raise InvalidParameter(
            f"{where}: the number of tokens that the layer dropped before k and v is {shown}, expected an integer of at least 0"
        )
    if pair[0] is None and pair[1] is None:
        raise InvalidParameter(f"{where}: both sides are absent; a layer needs keys, values or both")
    return DenseLayer(pair[0], pair[1], skipped)


def _checked_states(states_at: StatesAt, cache: Cache) -> StatesAt:
    """Return the ``states_at`` before the end of ``cache``.

    Raises InvalidParameter unless each has the same layers, names and shapes as the cache's own states.
    """
    check_mapping(states_at, "states_at", "recording(model).states_at(past_key_values)")
    expected = [{name: state.shape for name, state in layer.states.items()} for layer in cache]
    for position, states in states_at.items():
        as_integer(position, "a position of states_at")
        given = as_list(states, f"states_at[{position}]", "maps of names to tensors, one for each layer")
        if (
            not all(isinstance(mapping, Mapping) and all(isinstance(x, torch.Tensor) for x in mapping.values()) for mapping in given)
            or [{name: state.shape for name, state in mapping.items()} for mapping in given] != expected
        ):
            raise InvalidParameter(
                f"states_at[{position}] differs in layers, names or shapes from the states after the last token: pass this cache's states, "
                "as recording(model).states_at(past_key_values) returns them"
            )
    return MappingProxyType({position: tuple(mapping) for position, mapping in states_at.items() if cache.start < position < cache.stop})


def _fitting(inputs: Inputs, layers: Sequence[Layer], start: int) -> Inputs:
    """Return the inputs of ``layers`` from position ``start`` on. Raises InvalidParameter for inputs recorded for other tokens."""
    first = start if inputs.first is None else inputs.first
    tokens = max((layer.seen for layer in layers), default=0)
    count = tokens if inputs.count is None else inputs.count
    if (first, count) != (start, tokens):
        raise InvalidParameter(
            f"inputs were recorded for tokens {first} to {first + count} of a sequence, but tokens {start} to {start + tokens} are "
            "packed: record them after the last change to the cache, or leave inputs= out"
        )
    batch = min((side.batch for layer in layers for side in layer.sides.values()), default=1)
    rows = max([len(inputs.rows), *(stretch.row + 1 for stretch in inputs.hidden)])
    if rows > batch or (inputs.rows and rows != batch):
        raise InvalidParameter(f"inputs are for {rows} rows, but the cache has {batch} sequences: pass the inputs of these sequences")
    return replace(inputs, first=start, count=None)


def _norms_of_keys(k: torch.Tensor | Encoded | None) -> Callable[[], torch.Tensor | None]:
    """Return a function that computes the norms of a layer's keys, once for both sides."""
    return cache(partial(dispatch.norms, k)) if isinstance(k, torch.Tensor) else lambda: None


def _check_values(inputs: Inputs, states: Sequence[DenseLayer], start: int) -> None:
    """Raise InvalidParameter if keys and values differ from those for which ``inputs`` were recorded, provided that all layers are given.
    """
    given = {(number, name): (x, start + held.skipped) for number, held in enumerate(states) for name, x in (("k", held.k), ("v", held.v))}
    sums = inputs.sums or {}
    if sums.keys() != {place for place, (x, _) in given.items() if has_checksums(x)}:
        return
    for place, (first, recorded) in sums.items():
        x, position = given[place]
        assert isinstance(x, torch.Tensor)
        begin = max(first, position)
        actual, expected = checksums(x)[:, begin - position :].cpu().numpy(), recorded[:, begin - first :]
        if actual.shape != expected.shape or (actual != expected).any():
            raise InvalidParameter(
                f"layers[{place[0]}].{place[1]}: inputs were recorded for other values (rows or tokens were moved, or values rounded): "
                "record them after the last change to the cache, or leave inputs= out"
            )


def _pack_side(
    x: torch.Tensor | Encoded | None,
    recipe: Recipe,
    side: str,
    numbers: tuple[int, int],
    first: int,
    norms: Callable[[], torch.Tensor | None],
) -> Side | None:
    if x is None:
        return None
    where = f"layers[{numbers[0]}].{side}"
    try:
        codec = recipe.codec(*numbers, side, x.shape[3], RAW_NAMES[x.dtype] if isinstance(x, torch.Tensor) else "bf16")
    except (InvalidParameter, MissingBasis, OutOfBounds) as error:
        raise type(error)(f"{where}: {error}") from None
    if not isinstance(x, torch.Tensor):
        # The engine's values are kept bit for bit, so that no token need be raw.
        codec = codec.without_raw_positions
        if codec != x.codec:
            raise InvalidParameter(
                f"{where}: the recipe stores {codec.params()}, but the engine's values are {x.codec.params()}: use a recipe of that format"
            )
        return x.side(recipe.window)
    return packed_side(x, codec, recipe.window, where, first, norms() if codec.side_car(RawPositions) else None)


def _check_pair(pair: tuple[torch.Tensor | Encoded | None, torch.Tensor | Encoded | None], where: str) -> None:
    for name, x in zip("kv", pair, strict=True):
        # To ask for a protocol takes longer than for a class.
        if x is None or (not isinstance(x, torch.Tensor) and isinstance(x, Encoded)):
            continue
        if isinstance(x, torch.Tensor) and x.dtype in ELEMENT_DTYPES:
            raise InvalidType(
                f"{where}.{name}: dtype {x.dtype}, whose values depend on scales: pass kvpack.pages.Minifloats(elements, scales), "
                "with scales of 1 if the engine has none"
            )
        check_tensor(x, f"{where}.{name}")
        if not x.shape[0] or not x.shape[1]:
            raise InvalidParameter(f"{where}.{name}: shape {list(x.shape)}; expected at least one sequence and one head")
    k, v = pair
    if k is not None and v is not None and k.shape[:3] != v.shape[:3]:
        raise InvalidParameter(f"{where}: k is {list(k.shape)} and v is {list(v.shape)}; batch, kv_head and token must agree")


def _outlier_channel(x: torch.Tensor, codec: Codec, layer: int) -> OutlierChannel | None:
    """Return the largest channel of keys ``[batch, kv_head, token, dim]`` if it is out of the range of ``codec``.

    A channel's size is the median magnitude of some tokens, so that no single token makes it large. Codecs without a rotation, and with
    side-cars that map values first, have no such range.
    """
    if not spreads_channels(codec) or not x.shape[2]:
        return None
    sample = x[:, :, :: -(-x.shape[2] // SAMPLED_TOKENS)]
    size = sample.to(torch.float32).abs().median(2).values
    usual = size.median(2, keepdim=True).values
    ratio = torch.where(usual > 0, size / usual, 0.0)
    largest = float(ratio.max())
    if largest <= MAX_CHANNEL_RATIO:
        return None
    _, head, channel = (ratio == ratio.max()).nonzero()[0].tolist()
    return OutlierChannel(layer, head, channel, largest)


def spreads_channels(codec: Codec) -> bool:
    """Return True if ``codec`` rotates keys directly, so that a channel far larger than the others costs all channels precision."""
    return codec.rotation.kind != "none" and not (isinstance(codec, WithSideCars) and codec.value_maps)


def _warn_of_outlier_channels(found: Sequence[OutlierChannel], layers: int) -> None:
    """Issue one KvpackWarning to the caller of ``pack``, naming the largest of the channels ``found`` in ``layers`` layers."""
    if found:
        worst = max(found, key=lambda one: one.ratio)
        warnings.warn(
            f"layers[{worst.layer}].k: channel {worst.channel} of head {worst.head} is {worst.ratio:.0f} times as large as the median "
            f"channel, and keys of {len(found)} of {layers} layers have such channels: the codec's rotation spreads them over all others, "
            "which lose precision: pack with kvpack-4, kvpack-3 or kvpack-2, or add channel_scale=fp16 to the codec of keys",
            KvpackWarning,
            stacklevel=3,
        )
