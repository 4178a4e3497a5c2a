"""Synthetic outliers in every kind of packing: no token's error exceeds twice the usual one without a warning or a count."""

from __future__ import annotations

import itertools
import warnings
from typing import TYPE_CHECKING

import pytest
import torch

import kvpack
from kvpack.errors import KvpackError, KvpackWarning
from kvpack.pages import PageBuffer, PageCodec, PageGeometry

if TYPE_CHECKING:
    from collections.abc import Callable

    Pair = list[torch.Tensor]

TOKENS = 128
RECIPES = [
    "fp8",
    "mxfp8",
    "nvfp4",
    "int-3",
    "kivi-2",
    "kivi-2-u8",
    "oscar-2",
    "octopus-3",
    "turboquant-3-scaled",
    "kvpack-3",
    "hqmq-s24-r3",
    "quarot-4",
]
KINDS = ("value", "head of a token", "token", "head")
MAGNITUDES = (20.0, 200.0, 1e4)
LIMIT = 2.0
ORDINARY = 1.1
"""Largest permitted error of an ordinary token, as a multiple of the usual error.

With power-of-two scales, ordinary tokens reach up to 2.8 times the usual error. Outliers may exceed that slightly.
"""


def ordinary(dim: int, dtype: torch.dtype) -> Pair:
    """Return keys with large channels and a mean, and values, of two sequences. The second sequence begins with padding."""
    generator = torch.Generator().manual_seed(dim)
    k, v = torch.randn(2, 2, 2, TOKENS, dim, generator=generator)
    k[..., [3, 3 + dim // 2]] *= 6
    k += 0.7 * torch.randn(1, 2, 1, dim, generator=generator)
    for x in (k, v):
        x[1, :, :40] = 0
    return [x.to(dtype) for x in (k, v)]


def with_outlier(x: torch.Tensor, kind: str, magnitude: float, token: int) -> torch.Tensor:
    x = x.float()
    if kind == "value":
        x[0, 1, token, 9] = magnitude
    elif kind == "head of a token":
        x[0, 1, token] *= magnitude
    elif kind == "token":
        x[0, :, token] *= magnitude
    else:
        x[0, 1] *= magnitude
    return x


def packed(recipe: str, pair: Pair) -> Pair:
    return list(kvpack.pack([tuple(pair)], recipe)[0].unpack(torch.float32))  # type: ignore[arg-type]


def live(recipe: str, pair: Pair) -> Pair:
    cache = kvpack.LiveCache(recipe, layers=1)
    for start, stop in ((0, 50), (50, 51), (51, TOKENS)):
        cache.update(0, *(x[:, :, start:stop] for x in pair))
    return list(cache.freeze(packed=True)[0].unpack(torch.float32))  # type: ignore[arg-type]


def paged(tokens: int) -> Callable[[str, Pair], Pair]:
    def through_pages(recipe: str, pair: Pair) -> Pair:
        batch, heads, _, dim = pair[0].shape
        names = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
        geometry = PageGeometry(1, heads, tokens, dim, dim, names[pair[0].dtype])
        count = batch * TOKENS // tokens
        pages = [x.unflatten(2, (-1, tokens)).transpose(1, 2).flatten(0, 1).contiguous() for x in pair]
        found = [torch.zeros_like(x) for x in pages]
        with PageCodec(recipe, geometry) as codec:
            rows = torch.zeros(count, codec.nbytes, dtype=torch.uint8)
            for outcome in codec.encode_into(PageBuffer(geometry, *([x] for x in pages)), range(count), rows):
                if outcome is not None:
                    raise outcome
            codec.decode_into(rows, PageBuffer(geometry, *([x] for x in found)), range(count))
        return [x.unflatten(0, (batch, -1)).transpose(1, 2).flatten(2, 3).float() for x in found]

    return through_pages


WAYS = {"pack": packed, "live": live, "pages of 16": paged(16), "pages of 64": paged(64)}


def factors(found: torch.Tensor, x: torch.Tensor, usual: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Return each token's error as a multiple of the usual error.

    Errors are absolute or relative to the token's norm, whichever gives the smaller multiple.
    """
    error = (found - x).norm(dim=3)
    return torch.minimum(error / usual[0], error / x.norm(dim=3).clamp_min(1e-9) / usual[1])


def usual_error(found: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    error = (found - x).norm(dim=3)[:, :, 40:]
    share = error / x.norm(dim=3)[:, :, 40:]
    return error.median(2, keepdim=True).values.amax(0), share.median(2, keepdim=True).values.amax(0)


CASES = [(recipe, way) for number, recipe in enumerate(RECIPES) for way in ("pack", [*WAYS][1 + number % 3])]


@pytest.mark.scenario
@pytest.mark.parametrize(("recipe", "way"), CASES)
def test_tokens_with_twice_the_usual_error_are_noticed(recipe: str, way: str) -> None:
    number = RECIPES.index(recipe)
    dim, dtype = (64, 128, 256)[number % 3], (torch.bfloat16, torch.float32, torch.float16)[number % 3]
    pair = ordinary(dim, dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        clean = [x.float() for x in WAYS[way](recipe, pair)]
    usual = [usual_error(found, x.float()) for found, x in zip(clean, pair, strict=True)]
    largest = [float(factors(found, x.float(), u)[:, :, 4:].max()) for found, x, u in zip(clean, pair, usual, strict=True)]
    limits = [max(LIMIT, ORDINARY * factor) for factor in largest]
    noticed = 0
    cases = itertools.product((0, 1), KINDS, MAGNITUDES)
    for case, (side, kind, magnitude) in enumerate(cases):
        given = list(pair)
        given[side] = with_outlier(pair[side].clone(), kind, magnitude, (9, 77, 127)[case % 3]).to(dtype)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", KvpackWarning)
            try:
                result = WAYS[way](recipe, given)
            except KvpackError:
                noticed += 1
                continue
        noticed += bool(caught)
        if caught:
            continue
        for number, (found, x) in enumerate(zip(result, given, strict=True)):
            # A head that is large as a whole has errors as large.
            whole = kind == "head" and number == side
            worst = factors(found, x.float(), usual_error(found, x.float()) if whole else usual[number])[:, :, 4:].max()
            assert worst < limits[number], f"{'kv'[side]}, {kind} {magnitude}: {'kv'[number]} {worst:.2f} of {limits[number]:.2f}"
    # Errors are not avoided by refusing most outliers or warning of most.
    assert noticed < 20
