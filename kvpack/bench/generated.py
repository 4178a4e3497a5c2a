"""A text that the uncompressed model generates, compared with its predictions over packed caches.

The model samples every token with seeded random numbers (the largest sum of a log-probability and a Gumbel number). Over a packed cache it
reads the same tokens; if its prediction and the same random numbers give another token, the token counts as changed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from kvpack import cache_names
from kvpack.evaluation.windows import Exact, divergences, packed_file, prefill, read_packed, uncompressed

if TYPE_CHECKING:
    from kvpack.coding.recipes import Recipe

PROMPT = 256
"""Tokens of the prompt."""

TOKENS = 768

PART = 128
"""Tokens per part for which the divergence is reported."""


@dataclass(frozen=True)
class Along:
    """The effect of one recipe on a generated text: the divergence by parts, the share of changed tokens, and the first changed token.

    ``first`` counts the tokens before it; None if none changed.
    """

    kl_divergences: list[float]
    changed: float
    first: int | None


def generate(model: Any, prompt: torch.Tensor, tokens: int, seed: int) -> Exact:
    """Return the ``tokens`` that the model draws after ``prompt`` ``[1, token]``, one after another, and its predictions of them."""
    pairs = prefill(model, prompt[:, :-1])
    # Copies: the cache that grows may write behind the tokens that it holds.
    cache = uncompressed(model, [(k.clone(), v.clone()) for k, v in pairs])
    model.set_attn_implementation("kvpack")
    ids, predicted = [prompt[:, -1:]], []
    numbers = torch.Generator().manual_seed(seed)
    with torch.inference_mode():
        for _ in range(tokens):
            logits = model(ids[-1], **cache_names.over(model, cache)).logits[0]
            predicted.append(functional.log_softmax(logits.float(), -1))
            ids.append(_drawn(predicted[-1], numbers)[None])
    text, log_probabilities = torch.cat([prompt[:, :-1], *ids], 1), torch.cat(predicted)
    loss = functional.nll_loss(log_probabilities, text[0, prompt.shape[1] :]).item()
    return Exact(text, prompt.shape[1] - 1, pairs, log_probabilities, loss, {})


def along(model: Any, exact: Exact, recipe: str | Recipe, path: str, step: int, seed: int) -> Along:
    """Pack the prompt of a generated text, save it to ``path``, load it, and read the rest over it, at most ``step`` tokens at once."""
    found = read_packed(model, exact, packed_file(exact.first, recipe, path), step).log_probabilities
    losses = divergences(exact.log_probabilities, found)
    numbers = torch.Generator().manual_seed(seed)
    drawn = torch.cat([_drawn(row[None], numbers) for row in found])
    changed = drawn != exact.tokens[0, exact.prefix + 1 :]
    first = int(changed.int().argmax()) if bool(changed.any()) else None
    return Along([part.mean().item() for part in torch.split(losses, PART)], changed.double().mean().item(), first)


def _drawn(log_probabilities: torch.Tensor, numbers: torch.Generator) -> torch.Tensor:
    """Return the token ``[1]`` sampled with the next random numbers from log-probabilities ``[1, vocabulary]``."""
    uniform = torch.rand(log_probabilities.shape, generator=numbers, dtype=torch.float64).clamp_min(1e-300)
    return (log_probabilities.double() - (-uniform.log()).log().to(log_probabilities.device)).argmax(-1)
