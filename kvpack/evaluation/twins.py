"""Changes to a model that preserve its function but change the statistics of its keys ("twins")."""

from __future__ import annotations

from typing import Any

import torch

from kvpack import cache_names
from kvpack.formats.errors import InvalidParameter

from .windows import prefill, uncompressed_cache

OUTLIER_PAIRS = 2
"""Number of RoPE channel pairs per KV head whose keys a twin scales."""

OFFSET_SHARE = 1 / 8
"""Fraction of key channels that get an offset."""

TWIN_TOLERANCE = 1e-3
"""Maximum difference between the logits of twin and model, relative to the largest logit."""


def make_twin(model: Any, factor: float, sample: torch.Tensor, seed: int) -> float:
    """Multiply the key weights of two RoPE pairs per KV head by ``factor``, and divide their query weights by it.

    The model computes the same function, but its keys get outlier channels, as in some larger models. ``sample`` contains token ids
    ``[batch, token]``. Returns the largest change of a logit on the sample, relative to the largest logit. Raises InvalidParameter if
    ``factor`` is not above 0, if the model has no q_proj and k_proj, or if a logit changes by more than TWIN_TOLERANCE.
    """
    layers = [module for module in model.modules() if hasattr(module, "q_proj") and hasattr(module, "k_proj")]
    if not layers:
        raise InvalidParameter("--twin requires a model whose layers have k_proj and q_proj, but no layer of this one does: omit --twin")
    if not 0 < factor < float("inf"):
        raise InvalidParameter(f"--twin is {factor}, expected a finite number above 0")
    generator = torch.Generator().manual_seed(seed)
    with torch.inference_mode():
        before = model(sample).logits
        for layer in layers:
            _scale_layer(layer, factor, generator)
        difference = float((model(sample).logits - before).abs().max() / before.abs().max())
    if not difference <= TWIN_TOLERANCE:
        raise InvalidParameter(
            f"the twin's logits differ from the model's by {difference:.1e} of the largest logit, but the limit is {TWIN_TOLERANCE:.1e}: "
            "--twin requires keys and queries that are outputs of k_proj and q_proj, rotated in pairs"
        )
    return difference


def _scale_layer(layer: Any, factor: float, generator: torch.Generator) -> None:
    dim = layer.head_dim
    keys, queries = layer.k_proj, layer.q_proj
    heads = keys.out_features // dim
    group = queries.out_features // keys.out_features
    # A pair is the channels j and j + dim / 2, which RoPE rotates into each other.
    pairs = torch.stack([torch.randperm(dim // 2, generator=generator)[:OUTLIER_PAIRS] for _ in range(heads)])
    channels = torch.cat([pairs, pairs + dim // 2], 1)
    key_rows = (torch.arange(heads)[:, None] * dim + channels).flatten()
    query_rows = (torch.arange(heads * group)[:, None] * dim + channels.repeat_interleave(group, 0)).flatten()
    for projection, rows, scale in ((keys, key_rows, factor), (queries, query_rows, 1 / factor)):
        for parameter in projection.parameters():
            parameter[rows] *= scale


def offset_keys(model: Any, factor: float, sample: torch.Tensor, seed: int) -> float:
    """Add a constant to all keys in an eighth of each KV head's channels.

    The constant is ``factor`` times the channel's standard deviation. All scores of a query change by the same amount, so the model
    computes the same function. In some models, biases cause such offsets. ``sample`` contains token ids ``[batch, token]``. Returns the
    largest change of a logit on the sample, relative to the largest logit. Raises InvalidParameter if ``factor`` is not finite, or if a
    logit changes by more than TWIN_TOLERANCE.
    """
    if not abs(factor) < float("inf"):
        raise InvalidParameter(f"--offset is {factor}, expected a finite number")
    generator = torch.Generator().manual_seed(seed)
    before = _logits(model, sample)
    offsets = {}
    for number, (k, _) in enumerate(prefill(model, sample)):
        deviation = k[0].float().std(1, keepdim=True)
        offset_channels = torch.rand(deviation.shape, generator=generator) < OFFSET_SHARE
        offsets[number] = factor * deviation * offset_channels.to(deviation.device)
    model.kvpack_key_offsets = offsets
    after = _logits(model, sample)
    difference = float((after - before).abs().max() / before.abs().max())
    if not difference <= TWIN_TOLERANCE:
        raise InvalidParameter(
            f"the logits with key offsets differ from the model's by {difference:.1e} of the largest logit, but the limit is "
            f"{TWIN_TOLERANCE:.1e}: --offset requires attention that is a plain softmax over scores"
        )
    return difference


def _logits(model: Any, sample: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(sample, **cache_names.cache_argument(model, uncompressed_cache(model))).logits
    return logits.float()
