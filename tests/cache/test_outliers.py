"""Tokens whose outlier costs other values precision are named in a warning."""

from __future__ import annotations

import warnings

import pytest
import torch

import kvpack
from kvpack.errors import KvpackWarning

PLAIN = "k=group:b=2,g=32,rotation=hadamard,token_scale=fp16;v=group:b=2,g=32"
RAW = f"{PLAIN};raw=4,0.6,4"


def pair(value: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys with ``value`` in one channel of one head of token 9 of the second sequence, and values."""
    k, v = torch.randn(2, 2, 2, 300, 64, generator=torch.Generator().manual_seed(0))
    k[1, 1, 9, 3] = value
    return k, v


@pytest.mark.parametrize("value", [100.0, 7e4])
def test_a_shared_token_scale_names_the_token_and_what_to_do(value: float) -> None:
    with pytest.warns(KvpackWarning, match=r"k: token 9 of sequence 1 has a norm of .* in head 1 .*add raw=4,0.6,4 to the recipe"):
        kvpack.pack([pair(value)], PLAIN)


def relative(found: torch.Tensor, given: torch.Tensor) -> float:
    return float((found - given).norm() / given.norm())


@pytest.mark.parametrize("value", [100.0, 1e3, 7e4])
@pytest.mark.parametrize("recipe", [RAW, "octopus-3", "octopus-3-scaled", "turboquant-3-scaled", "oscar-2", "oscar-2-scaled", "kivi-2"])
def test_an_outlier_costs_neither_other_tokens_nor_other_heads(recipe: str, value: float) -> None:
    k, v = pair(value)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        decoded, _ = kvpack.pack([(k, v)], recipe)[0].unpack(torch.float32)
    assert decoded is not None
    assert torch.equal(decoded[1, :, 9], k[1, :, 9].to(torch.bfloat16).float())
    usual = relative(decoded[0], k[0])
    others = [token for token in range(300) if token != 9]
    assert relative(decoded[1, 1, others], k[1, 1, others]) < 1.1 * usual


def test_a_token_that_is_large_in_all_heads_is_what_the_scale_is_for() -> None:
    k, v = pair(1.0)
    k[1, :, 9] *= 500
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kvpack.pack([(k, v)], PLAIN)


@pytest.mark.parametrize("tokens", [0, 1, 40])
def test_ordinary_keys_and_keys_of_zeros_warn_of_nothing(tokens: int) -> None:
    x = torch.randn(1, 2, tokens, 64, generator=torch.Generator().manual_seed(0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kvpack.pack([(x, x)], PLAIN)
        kvpack.pack([(x * 0, x)], PLAIN)
