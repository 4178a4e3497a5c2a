"""The language models and texts of the measurements: a transformers folder, token ids, and the outlier-heavy twin."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kvpack.file.user_files import read_bytes
from kvpack.formats.errors import InvalidParameter
from kvpack.models import BOS, demo_text, transformers_library

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_TEXT_BYTES = 2**30
"""The most bytes of a text."""

OUTLIER_PAIRS = 2
"""RoPE channel pairs of every KV head that the twin scales."""

TWIN_TOLERANCE = 1e-3
"""The largest difference allowed between a logit of the twin and the model's own, relative to the largest logit."""


@dataclass(frozen=True)
class Text:
    """A text as token ids: ``start`` opens every sequence, ``ids`` is the text itself.

    ``of_bytes``: the model has no tokenizer, an id is a byte value, and sequences start with id 256.
    """

    name: str
    start: tuple[int, ...]
    ids: Sequence[int]
    of_bytes: bool


def vocabulary(model: Any) -> int:
    """The number of token ids that the model takes: all ids are below it."""
    return int(model.get_input_embeddings().weight.shape[0])


def read_text(path: str | None, folder: Path, ids_below: int) -> Text:
    """The file ``path``, or the demo's text, as ids of the model in ``folder``, which takes ``ids_below`` ids.

    Raises MissingFile, LimitExceeded, or InvalidParameter when the folder has no tokenizer and the model cannot take bytes.
    """
    name = path or "the demo's text"
    data = demo_text() if path is None else read_bytes(path, MAX_TEXT_BYTES, "a text")
    if any((folder / file).exists() for file in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        tokenizer = transformers_library().AutoTokenizer.from_pretrained(folder)
        ids = tokenizer(data.decode(errors="replace"))["input_ids"]
        opened = bool(ids) and ids[0] == tokenizer.bos_token_id
        return Text(name, tuple(ids[:opened]), ids[opened:], of_bytes=False)
    if ids_below <= BOS:
        raise InvalidParameter(
            f"{folder}: has no tokenizer, so its tokens would be bytes after a first token {BOS}; the model has only {ids_below} tokens"
        )
    return Text(name, (BOS,), data, of_bytes=True)


def make_twin(model: Any, factor: float, sample: torch.Tensor, seed: int) -> float:
    """Multiply the keys' weights in two RoPE pairs of every KV head by ``factor``, and divide the queries' by it.

    The function stays the same, while keys get the outlier channels that some larger models have. ``sample`` is token
    ids ``[batch, token]``; returns the largest difference of a logit on it, relative to the largest logit. Raises
    InvalidParameter for a factor that is not above 0, a model without q_proj and k_proj, and one whose logits change
    by more than TWIN_TOLERANCE (because it normalizes keys, for example).
    """
    layers = [module for module in model.modules() if hasattr(module, "q_proj") and hasattr(module, "k_proj")]
    if not (layers and 0 < factor < float("inf")):
        raise InvalidParameter(f"the twin multiplies k_proj by {factor} in {len(layers)} layers; it takes a number above 0, and a k_proj")
    generator = torch.Generator().manual_seed(seed)
    with torch.inference_mode():
        before = model(sample).logits
        for layer in layers:
            _scale(layer, factor, generator)
        difference = float((model(sample).logits - before).abs().max() / before.abs().max())
    if not difference <= TWIN_TOLERANCE:
        raise InvalidParameter(
            f"the twin's logits differ from the model's by {difference:.1e} of the largest, the limit is {TWIN_TOLERANCE:.1e}: "
            "its keys and queries are not what k_proj and q_proj give, rotated by pairs"
        )
    return difference


def _scale(layer: Any, factor: float, generator: torch.Generator) -> None:
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
