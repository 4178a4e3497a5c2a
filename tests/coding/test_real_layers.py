"""Tests of recipes on two layers of a real language model, with its own attention sink and with planted ones.

The first token of the layers is an attention sink: it receives at least half of each query's attention, although its key is small and its
value is close to zero. An error in its value therefore affects every output. The layers are those of tests/support/real_layers.py.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import pytest
import torch
from torch.nn import functional

import kvpack
from kvpack.bench.quality import CALIBRATED, RECIPES
from support.real_layers import TOKENS, basis, layers

BOUNDS = {
    "fp8": 0.1,
    "mxfp8": 0.1,
    "turboangle-k8v4": 0.1,
    "kivi-4": 0.15,
    "octopus-4": 0.25,
    "turboquant-4": 0.25,
    "polarquant-4": 0.35,
    "quarot-4": 0.25,
    "nvfp4": 0.3,
    "mxfp4": 0.45,
    "hqmq-s96-r6-med3": 0.3,
    "hqmq-s192-r6": 0.3,
    "hqmq-s96-r4": 0.35,
    "kvpack-4": 0.2,
    "kvpack-3": 0.35,
    "kvpack-2": 0.65,
    "octopus-3": 0.45,
    "octopus-3-scaled": 0.6,
    "turboquant-3": 0.5,
    "polarquant-3": 0.6,
    "hqmq-s24-r3": 0.6,
    "oscar-2": 0.7,
    "oscar-2-u8": 0.7,
    "oscar-2-g128": 0.9,
    "kivi-2": 0.95,
    "octopus-2": 0.85,
    "turboquant-2": 0.95,
    "klt-2.5": 0.6,
    "klt-1.75": 0.8,
    "klt-1.25": 0.95,
    "transform-1.5": 0.4,
    "transform-1": 0.6,
    "transform-0.6": 0.75,
}
"""Maximum relative error of a layer's attention output, by recipe."""

PLANTED = TOKENS // 2
"""Position of the token that becomes a sink."""

WITHOUT_SINK = 1.5
"""Largest permitted error of the attention output, as a multiple of the error with an exact sink."""


class Sunk(NamedTuple):
    """The tensors of a layer, ``[1, head, token, dim]``, and its queries. Outputs are compared from token ``first`` on."""

    k: torch.Tensor
    v: torch.Tensor
    q: torch.Tensor
    first: int


@cache
def cases() -> dict[str, list[Sunk]]:
    """Return the layers unchanged, with a sink as the first token, and with a planted sink in the middle."""
    real = [Sunk(k, v, q, 0) for k, v, q in layers()]
    return {"real": real, "planted": [planted(*layer[:3], PLANTED) for layer in real]}


def planted(k: torch.Tensor, v: torch.Tensor, q: torch.Tensor, place: int) -> Sunk:
    """Turn token ``place`` into a sink that receives half of the attention of each query in the last quarter.

    Its key has a quarter of the norm of the other keys and points away from their mean. Its value is close to zero.
    """
    k, v, q = k.clone(), v.clone(), q.clone()
    against = -functional.normalize(k.mean(2), dim=-1)
    k[:, :, place] = 0.25 * k.norm(dim=-1).median(2).values[..., None] * against
    scatter = torch.randn(v.shape[1], v.shape[3], generator=torch.Generator().manual_seed(place))
    v[:, :, place] = 1e-3 * v.norm(dim=-1).median(2).values[..., None] * functional.normalize(scatter, dim=-1)
    first = 3 * TOKENS // 4
    group = q.shape[1] // k.shape[1]
    direction = against.repeat_interleave(group, 1)[:, :, None]
    # How far a query moves against the mean, by bisection: its attention to the sink grows with it.
    low, high = torch.full((1, q.shape[1], TOKENS - first, 1), -1e3), torch.full((1, q.shape[1], TOKENS - first, 1), 1e3)
    for _ in range(60):
        middle = (low + high) / 2
        light = weights(q[:, :, first:] + middle * direction, k, first)[..., place, None] < 0.5
        low, high = torch.where(light, middle, low), torch.where(light, high, middle)
    q[:, :, first:] += high * direction
    return Sunk(k, v, q, first)


def sink_of(name: str) -> int:
    """Return the position of the sink in a case."""
    return PLANTED if name == "planted" else 0


def weights(q: torch.Tensor, k: torch.Tensor, first: int) -> torch.Tensor:
    """Return the attention weights of queries from token ``first`` on, ``[1, q_head, query, token]``."""
    scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(2, 3) / q.shape[3] ** 0.5
    seen = torch.ones(scores.shape[2:], dtype=torch.bool).tril(first)
    return scores.masked_fill(~seen, float("-inf")).softmax(-1)


def output(case: Sunk, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return the attention output of the case's queries."""
    return weights(case.q[:, :, case.first :], k, case.first) @ v.repeat_interleave(case.q.shape[1] // v.shape[1], 1)


@cache
def decoded(recipe: str, name: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the decoded keys and values of a case's layers."""
    pairs = [(case.k.to(torch.bfloat16), case.v.to(torch.bfloat16)) for case in cases()[name]]
    given = kvpack.Recipe(recipe, basis()) if recipe.startswith(("klt", "transform")) else recipe
    found = [layer.unpack(torch.float32) for layer in kvpack.pack(pairs, given)]
    return [(k, v) for k, v in found if k is not None and v is not None]


def test_layers_have_a_real_or_planted_sink() -> None:
    for name, found in cases().items():
        place = sink_of(name)
        for case in found:
            heads = weights(case.q[:, :, -TOKENS // 4 :], case.k, 3 * TOKENS // 4)[..., place].mean((0, 2))
            norms = case.k[0].norm(dim=-1).square().sum(0).sqrt()
            assert norms[place] < 0.3 * norms.median()
            if name == "real":
                assert heads.max() > 0.4
            else:
                torch.testing.assert_close(heads, torch.full((9,), 0.5), atol=1e-3, rtol=0)


def test_every_measured_recipe_has_a_bound() -> None:
    assert set(RECIPES) - {"bf16"} <= BOUNDS.keys()
    assert set(CALIBRATED) <= BOUNDS.keys()


def error(case: Sunk, k: torch.Tensor, v: torch.Tensor) -> float:
    """Return the relative error of the attention output if the keys and values are replaced by ``k`` and ``v``."""
    exact = output(case, case.k, case.v)
    return float((output(case, k, v) - exact).norm() / exact.norm())


@pytest.mark.scenario
@pytest.mark.parametrize("recipe", BOUNDS)
def test_the_attention_output_is_within_its_bound(recipe: str) -> None:
    errors = [error(case, k, v) for case, (k, v) in zip(cases()["real"], decoded(recipe, "real"), strict=True)]
    assert max(errors) < BOUNDS[recipe], errors


@pytest.mark.scenario
@pytest.mark.parametrize("name", cases())
@pytest.mark.parametrize("recipe", BOUNDS)
def test_a_sink_does_not_dominate_the_error(recipe: str, name: str) -> None:
    place = sink_of(name)
    ratios = []
    for case, (k, v) in zip(cases()[name], decoded(recipe, name), strict=True):
        mended = k.clone(), v.clone()
        for x, exact in zip(mended, (case.k, case.v), strict=True):
            x[:, :, place] = exact[:, :, place]
        ratios.append(error(case, k, v) / error(case, *mended))
    assert max(ratios) < WITHOUT_SINK, ratios


@pytest.mark.parametrize("recipe", BOUNDS)
def test_the_error_of_a_token_is_below_its_energy(recipe: str) -> None:
    for case, pair in zip(cases()["real"], decoded(recipe, "real"), strict=True):
        for exact, found in zip((case.k, case.v), pair, strict=True):
            ratios = (found - exact).square().sum((1, 3)) / exact.square().sum((1, 3))
            assert ratios.max() < 2
            assert (ratios < 1).double().mean() >= 0.999


def test_factors_from_means_reduce_the_error_of_scores() -> None:
    """Without a basis, the factors are derived from the keys alone."""
    keys = "k=scalar:b=3,norm=log8,mean=128{};v=raw;raw=4,0.6,4"
    for k, v, q in layers():
        errors = []
        for scaled in ("", ",channel_scale=fp16"):
            decoded, _ = kvpack.pack([(k, v)], keys.format(scaled))[0].unpack(torch.float32)
            assert decoded is not None
            scores = q @ (decoded - k).repeat_interleave(q.shape[1] // k.shape[1], 1).mT
            # A softmax does not see what all scores of a query have in common.
            errors.append(scores.sub(scores.mean(3, keepdim=True)).square().mean().item())
        assert errors[1] < 0.85 * errors[0]


def test_means_of_fewer_keys_reduce_the_error_of_scores() -> None:
    """A mean of fewer keys fits those keys better, so large channels stand out more in what remains, and stay unscaled."""
    for k, v, q in layers():
        errors = []
        for tokens in (128, 32):
            recipe = f"k=scalar:b=3,norm=log8,mean={tokens},channel_scale=fp16;v=raw;raw=4,0.6,4"
            decoded, _ = kvpack.pack([(k, v)], recipe)[0].unpack(torch.float32)
            assert decoded is not None
            scores = q @ (decoded - k).repeat_interleave(q.shape[1] // k.shape[1], 1).mT
            errors.append(scores.sub(scores.mean(3, keepdim=True)).square().mean().item())
        assert errors[1] < 0.9 * errors[0]


def test_scores_tolerate_large_channels_with_small_queries() -> None:
    """Any two RoPE pairs, even small ones, can be multiplied in the keys and divided in the queries."""
    recipe = "k=scalar:b=3,norm=fp16,mean=128,channel_scale=fp16;v=raw;raw=4,0.6,4"

    def error(k: torch.Tensor, v: torch.Tensor, q: torch.Tensor) -> float:
        decoded, _ = kvpack.pack([(k, v)], recipe)[0].unpack(torch.float32)
        assert decoded is not None
        scores = q @ (decoded - k).repeat_interleave(q.shape[1] // k.shape[1], 1).mT
        return scores.sub(scores.mean(3, keepdim=True)).square().mean().item()

    for k, v, q in layers():
        usual = error(k, v, q)
        for first in range(0, 32, 4):
            size = torch.ones(64)
            size[[first, first + 1, first + 32, first + 33]] = 30.0
            assert error(k * size, v, q / size) < 1.8 * usual
