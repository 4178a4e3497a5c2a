"""transformers' mask function for attention "kvpack": none over packed layers, the model's own over plain tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch
from transformers import AttentionMaskInterface
from transformers.masking_utils import causal_mask_function

from kvpack.formats.errors import InvalidParameter

from .plain import plain_name
from .states import PackedLength

if TYPE_CHECKING:
    from collections.abc import Callable

QUERIES_AT_A_TIME = 128
"""The rows of a mask that are compared at once with the mask that attention applies by itself."""


def mask(*, kv_length: int, config: Any, **options: Any) -> Any:
    """The mask for ``kv_length`` keys, as transformers' mask functions take their arguments.

    Raises InvalidParameter where packed keys would need one: for padding, and for any pattern but causal and sliding-window.
    """
    if not isinstance(kv_length, PackedLength):
        return AttentionMaskInterface()[plain_name(config)](kv_length=kv_length, config=config, **options)
    _check(int(kv_length), config, **options)
    return None


def _check(
    kv_length: int,
    config: Any,
    *,
    batch_size: int,
    q_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **_: Any,
) -> None:
    if attention_mask is not None and not attention_mask[:, -kv_length:].all():
        row = int((~attention_mask[:, -kv_length:].bool()).any(1).nonzero()[0])
        raise InvalidParameter(
            f"attention_mask has padding in row {row} of the batch; kvpack attention needs unpadded rows of equal length"
        )
    if use_vmap:
        _refuse_mask()
    if mask_function is causal_mask_function:
        return
    window = getattr(config, "sliding_window", None)
    rows, token = torch.arange(batch_size, device=device)[:, None, None], torch.arange(kv_offset, kv_offset + kv_length, device=device)
    for first in range(int(q_offset), int(q_offset) + q_length, QUERIES_AT_A_TIME):
        position = torch.arange(first, min(first + QUERIES_AT_A_TIME, int(q_offset) + q_length), device=device)
        expected = token <= position[:, None]
        if window is not None:
            expected &= token > position[:, None] - window
        if not (mask_function(rows, 0, position[:, None], token) == expected).all():
            _refuse_mask()


def _refuse_mask() -> NoReturn:
    raise InvalidParameter(
        "the model asks for a mask that is neither causal nor a sliding window; kvpack attention supports no other: "
        "write KvpackCache(cache, model, dense=True)"
    )
