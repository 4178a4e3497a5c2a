"""transformers' mask function for attention "kvpack": none where packed attention needs none, else the model's own."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers import AttentionMaskInterface
from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function

from kvpack.formats.errors import InvalidParameter

from .plain import plain_name
from .states import CompiledLength, PackedLength

if TYPE_CHECKING:
    from collections.abc import Callable

QUERIES_AT_A_TIME = 128
"""The rows of a mask that are compared at once with the mask that attention applies by itself."""


def mask(*, kv_length: int | CompiledLength, config: Any, **options: Any) -> Any:
    """The mask for ``kv_length`` keys, as transformers' mask functions take their arguments.

    Of packed keys, None where attention applies the mask by itself, and with padding on the left the first token that each sequence
    sees, int32 ``[batch, 1, 1, 1]``: models that keep some rows of masks (Gemma-4) leave that as it is. Else the mask of
    the model's own attention, for which the keys are decoded: for any other padding, and for any pattern but causal and sliding-window.
    """
    if isinstance(kv_length, CompiledLength) and options.get("attention_mask") is None and _is_causal(**options):
        return None
    return _mask(kv_length=kv_length, config=config, **options)


# Whether it hides anything but padding is read.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _mask(*, kv_length: int | CompiledLength, config: Any, **options: Any) -> Any:
    if isinstance(kv_length, CompiledLength):
        kv_length = kv_length.length()
    if isinstance(kv_length, PackedLength):
        packed, kv_length = kv_length, int(kv_length)
        if packed.captured is not None:
            if not _is_causal_or_sliding(config, **options):
                raise InvalidParameter("the model's attention mask is neither causal nor that of its sliding window")
            return _four_dimensions(packed.captured.starts)
        padding = padding_of(packed, options.get("kv_offset", 0), options.get("attention_mask"))
        if padding.on_the_left and _applied_by_attention(kv_length, config, **options):
            return _four_dimensions(padding.starts)
        # Without a mask, packed attention would be called.
        options["allow_is_causal_skip"] = False
    return AttentionMaskInterface()[plain_name(config)](kv_length=kv_length, config=config, **options)


def _four_dimensions(starts: torch.Tensor | None) -> torch.Tensor | None:
    return None if starts is None else starts[:, None, None, None]


class Padding(NamedTuple):
    """Whether a mask hides only the first tokens of sequences; ``starts`` int32 ``[batch]`` are those after, None if it hides none."""

    on_the_left: bool
    starts: torch.Tensor | None = None


def padding_of(kv_length: PackedLength, kv_offset: int, attention_mask: torch.Tensor | None) -> Padding:
    """What a mask of two dimensions hides of ``kv_length`` keys from token ``kv_offset`` on. It is read."""
    if attention_mask is None:
        return Padding(True)
    end = kv_offset + kv_length
    if attention_mask.shape[-1] < end:
        # Tokens that it has no column for are hidden.
        return Padding(False)
    first = kv_length.first_visible()
    seen = attention_mask[:, first:end] != 0
    ends_hidden = seen[:, :-1] & ~seen[:, 1:]
    # Read together: the device is waited for once.
    every, on_the_left = torch.stack([seen.all(), ~ends_hidden.any()]).tolist()
    return Padding(on_the_left, None if every else first + (~seen).sum(1, dtype=torch.int32))


def _is_causal(mask_function: Callable[..., Any] = causal_mask_function, use_vmap: bool = False, **_: Any) -> bool:
    return mask_function is causal_mask_function and not use_vmap


def _is_causal_or_sliding(config: Any, mask_function: Callable[..., Any] = causal_mask_function, use_vmap: bool = False, **_: Any) -> bool:
    """Whether a mask is transformers' own for causal attention, or for the model's sliding window."""
    window = getattr(config, "sliding_window", None)
    if use_vmap or _is_causal(mask_function):
        return not use_vmap
    return window is not None and _same_function(mask_function, sliding_window_causal_mask_function(window))


def _same_function(one: Any, other: Any) -> bool:
    """Whether two functions, or what they were made with, are the same."""
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_same_function, one, other))
    if not (inspect.isfunction(one) and inspect.isfunction(other)):
        return type(one) is type(other) and isinstance(one, int) and bool(one == other)
    made = [tuple(cell.cell_contents for cell in function.__closure__ or ()) for function in (one, other)]
    return one.__code__ is other.__code__ and _same_function(*made)


def _applied_by_attention(
    kv_length: int,
    config: Any,
    *,
    batch_size: int,
    q_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **_: Any,
) -> bool:
    """Whether the mask, but for padding, is causal, within the model's sliding window if it has one, and hides nothing else."""
    if _is_causal_or_sliding(config, mask_function, use_vmap):
        return True
    if use_vmap:
        return False
    window = getattr(config, "sliding_window", None)
    rows, token = torch.arange(batch_size, device=device)[:, None, None], torch.arange(kv_offset, kv_offset + kv_length, device=device)
    for first in range(int(q_offset), int(q_offset) + q_length, QUERIES_AT_A_TIME):
        position = torch.arange(first, min(first + QUERIES_AT_A_TIME, int(q_offset) + q_length), device=device)
        expected = token <= position[:, None]
        if window is not None:
            expected &= token > position[:, None] - window
        if not bool((mask_function(rows, 0, position[:, None], token) == expected).all()):
            return False
    return True
