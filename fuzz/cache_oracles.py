"""Checks of attention over accepted files and of appending to them, including their memory use."""

from __future__ import annotations

import hashlib
import random
import warnings
from typing import TYPE_CHECKING, Any

import torch

import kvpack
from fuzz.memory import check_growth
from fuzz.oracles import MAX_DECODED_BYTES
from fuzz.value_oracles import MAX_VALUES, assert_equal, load_checked
from kvpack.cache import files
from kvpack.coding.encoding import RAW_DTYPES, RAW_NAMES
from kvpack.errors import RoundedWarning
from kvpack.file import container
from kvpack.formats.errors import KvpackError
from kvpack.formats.raw import EXACT_DTYPES

if TYPE_CHECKING:
    from kvpack.cache.cache import Cache
    from kvpack.cache.layer import Layer
    from kvpack.cache.side import Side

_MODERATE = 2.0**20
_TOLERANCE = 2e-3


def check_attend(data: bytes) -> bool:
    """Check that attention with random queries over an accepted file succeeds, or raises a KvpackError, in bounded memory."""

    def attend() -> bool:
        cache = load_checked(data)
        if cache is None or cache.values > MAX_VALUES:
            return cache is not None
        for layer, q, options in _queries(cache, data):
            try:
                out = kvpack.attend(q, layer, **options)
            except KvpackError:
                continue
            assert layer.v is not None
            assert tuple(out.shape) == (*q.shape[:3], layer.v.dim)
        return True

    return check_growth(attend, MAX_DECODED_BYTES)


def compare_attend(data: bytes) -> None:
    """Check that attention over packed tokens equals attention over their decoded values."""
    cache = load_checked(data)
    if cache is None or cache.values > MAX_VALUES:
        return
    for layer, q, options in _queries(cache, data):
        if layer.k is None or layer.v is None:
            continue
        k, v = (side.unpack(torch.float32).to(torch.float64) for side in (layer.k, layer.v))
        if not all((values.abs() < _MODERATE).all() for values in (k, v)):
            continue
        try:
            out = kvpack.attend(q, layer, **options)
        except KvpackError:
            continue
        expected = _attention(q.to(torch.float64), k, v, **options)
        largest = v.abs().amax() if v.numel() else 1.0
        # Large keys concentrate the softmax on its largest score, so that rounding one score changes the whole result.
        if k.abs().amax() < 2.0**6:
            assert ((out - expected).abs() <= _TOLERANCE * largest).all(), (
                "attention over the packed layer differs from attention over its decoded values"
            )


def check_append(data: bytes) -> bool:
    """Check that tokens can be appended to an accepted file, or are refused, in bounded memory.

    Earlier tokens must not change, even after saving and loading.
    """

    def append() -> bool:
        cache = load_checked(data)
        if cache is None or cache.values > MAX_VALUES:
            return cache is not None
        source = _random_source(data)
        count = source.randrange(1, 40)
        if any(side.batch * side.heads * side.dim * count > MAX_VALUES for layer in cache for side in layer.sides.values()):
            return True
        pairs = [tuple(_values(source, side, count) for side in (layer.k, layer.v)) for layer in cache]
        try:
            with warnings.catch_warnings(record=True) as shown:
                warnings.simplefilter("always")
                longer = cache.append(pairs)  # type: ignore[arg-type]
            again = files.read(container.open_bytes(bytearray(container.to_bytes(*files.header_and_arrays(longer)))))
        except KvpackError:
            return True
        for layer, before in zip(longer, cache, strict=True):
            assert layer.tokens == before.tokens + (count if layer.sides else 0)
        _check_added(cache, longer, pairs, shown)
        if all(layer.tokens == cache.tokens for layer in cache):
            assert_equal(again, longer, longer.tokens)
            # Tokens that were raw may have been encoded.
            packed = min((side.packed_tokens for layer in cache for side in layer.sides.values()), default=0)
            assert_equal(longer[:, :packed], cache, packed)
        return True

    return check_growth(append, MAX_DECODED_BYTES)


def _check_added(cache: Cache, longer: Cache, pairs: list[tuple[torch.Tensor | None, ...]], shown: list[warnings.WarningMessage]) -> None:
    """Check that appended values are exact while they are raw. Only a codec with a narrower dtype may round them, and must issue a warning.
    """
    # Random values may have outliers that do not fit a scale.
    shown = [warning for warning in shown if "lose precision" not in str(warning.message)]
    assert all(issubclass(warning.category, RoundedWarning) for warning in shown), [str(warning.message) for warning in shown]
    may_round = False
    for layer, before, pair in zip(longer, cache, pairs, strict=True):
        for name, x in zip(("k", "v"), pair, strict=True):
            if x is None:
                continue
            side = layer.sides[name]
            kept = side.codec.exact_dtype
            dtypes = (x.dtype, before.sides[name].tail.dtype)
            may_round |= kept is not None and any(RAW_NAMES[dtype] not in EXACT_DTYPES[kept] for dtype in dtypes)
            exact = x.shape[2] if kept is not None and not shown else min(x.shape[2], side.tail.shape[2])
            added = side.unpack(torch.float32)[:, :, side.tokens - exact :]
            assert torch.equal(added, x[:, :, x.shape[2] - exact :].to(torch.float32)), f"{name}: values differ from those appended"
    assert may_round or not shown, "a RoundedWarning was issued, but no codec rounds"


def _random_source(data: bytes) -> random.Random:
    return random.Random(hashlib.blake2b(data).digest())


def _values(source: random.Random, side: Side | None, count: int) -> torch.Tensor | None:
    """Return values to append to a layer's keys or values, in the side's own dtype or in the widest dtype.

    A raw codec may refuse or round values in the widest dtype.
    """
    if side is None:
        return None
    kept = side.codec.exact_dtype
    dtype = source.choice((torch.float32, side.tail.dtype if kept is None else RAW_DTYPES[kept]))
    generator = torch.Generator().manual_seed(source.randrange(2**32))
    x = torch.randn(side.batch, side.heads, count, side.dim, generator=generator) * source.choice((0.0, 1.0, 100.0))
    return x.to(dtype)


def _queries(cache: Cache, data: bytes) -> list[tuple[Layer, torch.Tensor, dict[str, Any]]]:
    """Return queries and options for each layer with keys, derived from the bytes of the file."""
    source, queries = _random_source(data), []
    for layer in cache:
        if layer.k is None or layer.k.batch * layer.k.heads * layer.k.dim > MAX_VALUES:
            continue
        length, groups = source.randrange(1, 4), source.randrange(1, 3)
        generator = torch.Generator().manual_seed(source.randrange(2**32))
        q = torch.randn(layer.k.batch, groups * layer.k.heads, length, layer.k.dim, generator=generator)
        options: dict[str, Any] = {"causal": source.random() < 0.7}
        if source.random() < 0.3:
            options["softcap"] = source.choice((0.5, 30.0))
        if source.random() < 0.3:
            options["sliding_window"] = source.randrange(1, 20)
        queries.append((layer, q, options))
    return queries


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, softcap: float | None = None, sliding_window: int | None = None
) -> torch.Tensor:
    """Compute softmax(q k^T / sqrt(dim)) v, with each query head reading the key head of its group."""
    groups, length, tokens = q.shape[1] // k.shape[1], q.shape[2], k.shape[2]
    scores = q @ k.repeat_interleave(groups, 1).transpose(-1, -2) * q.shape[3] ** -0.5
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    position, token = (tokens - length + torch.arange(length))[:, None], torch.arange(tokens)
    hidden = (token > position) & causal
    if sliding_window is not None:
        hidden = hidden | (token <= position - sliding_window)
    weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), -1).nan_to_num(0.0)
    return weights @ v.repeat_interleave(groups, 1)
