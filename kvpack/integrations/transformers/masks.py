"""The mask function of transformers' attention "kvpack". It returns None if packed attention needs no mask, otherwise the model's own."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers import AttentionMaskInterface
from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function

from kvpack.formats.errors import InvalidParameter

from .plain_attention import plain_attention_name
from .states import CompiledLength, PackedLength, eager_only

QUERIES_AT_A_TIME = 128
"""Number of rows of a mask that are compared in one step with the mask that attention applies by itself."""


def mask(*, kv_length: int | CompiledLength, config: Any, **options: Any) -> Any:
    """Return the mask for ``kv_length`` keys. The arguments are as for transformers' mask functions.

    There are three cases:

    - Packed keys without padding: None, because packed attention applies causal and sliding-window masks itself.
    - Packed keys with left padding: the first token that each sequence attends to, int32 ``[batch, 1, 1, 1]``. Models that select rows of
      masks (Gemma-4) leave this shape unchanged. In compiled code, a custom operator finds these tokens.
    - Any other keys, padding or mask pattern: the model's own mask. Packed keys are then decoded for the model's own attention.
    """
    if isinstance(kv_length, CompiledLength) and _is_known_causal(config, **options):
        columns = options.get("attention_mask")
        return None if columns is None else _expand_starts(kv_length.starts(columns))
    return _create_mask(kv_length=kv_length, config=config, **options)


# This reads the values of the mask, so it cannot be compiled.
@eager_only("the tokens that an attention mask of this pattern hides are found in eager code")
def _create_mask(*, kv_length: int | CompiledLength, config: Any, **options: Any) -> Any:
    if isinstance(kv_length, CompiledLength):
        kv_length, options["kv_offset"] = kv_length.sizes()
    if isinstance(kv_length, PackedLength):
        packed, kv_length = kv_length, int(kv_length)
        if packed.captured is not None:
            if not _is_causal_or_sliding(config, **options):
                raise InvalidParameter("the model's attention mask is neither causal nor limited to its sliding window")
            return _expand_starts(packed.captured.starts)
        packed.check_mask(options.get("attention_mask"))
        padding = read_padding(packed, options.get("kv_offset", 0), options.get("attention_mask"))
        if padding.on_the_left and _applied_by_attention(kv_length, config, **options):
            packed.leave_to_attention(_has_mask(plain_attention_name(config), kv_length, padding.starts is not None, **options))
            return _expand_starts(padding.starts)
        # Always create a mask: without one, packed attention would be called.
        options["allow_is_causal_skip"] = False
    return AttentionMaskInterface()[plain_attention_name(config)](kv_length=kv_length, config=config, **options)


def _has_mask(
    name: str, kv_length: int, padded: bool, *, q_length: int, local_size: int | None = None, allow_is_causal_skip: bool = True, **_: Any
) -> bool:
    """Return True if attention ``name`` would receive a causal mask for these keys, instead of relying on ``is_causal`` of its module."""
    if name != "sdpa":
        return not name.startswith("flash")
    within = local_size is None or kv_length < local_size
    return not (allow_is_causal_skip and within and not padded and kv_length == q_length)


def _expand_starts(starts: torch.Tensor | None) -> torch.Tensor | None:
    return None if starts is None else starts[:, None, None, None]


class Padding(NamedTuple):
    """The tokens that a mask hides. ``on_the_left`` is True if they are all at the beginning of their sequences.

    ``starts``, int32 ``[batch]``, is the first token of each sequence that is not hidden. It is None if the mask hides no tokens.
    """

    on_the_left: bool
    starts: torch.Tensor | None = None


def read_padding(kv_length: PackedLength, kv_offset: int, attention_mask: torch.Tensor | None) -> Padding:
    """Return the tokens, among ``kv_length`` tokens from token ``kv_offset`` on, that a two-dimensional mask hides."""
    if attention_mask is None:
        return Padding(True)
    end = kv_offset + kv_length
    if attention_mask.shape[-1] < end:
        # Tokens without a column in the mask are hidden.
        return Padding(False)
    first = kv_length.first_visible()
    seen = attention_mask[:, first:end] != 0
    ends_hidden = seen[:, :-1] & ~seen[:, 1:]
    # Read both together, so that the host waits for the device only once.
    every, on_the_left = torch.stack([seen.all(), ~ends_hidden.any()]).tolist()
    return Padding(on_the_left, None if every else first + (~seen).sum(1, dtype=torch.int32))


def _is_known_causal(
    config: Any,
    *,
    mask_function: Callable[..., Any] = causal_mask_function,
    use_vmap: bool = False,
    allow_is_causal_skip: bool = False,
    local_size: int | None = None,
    allow_is_bidirectional_skip: bool | None = None,
    **_: Any,
) -> bool:
    """Return True if transformers' arguments alone show that the mask is causal, apart from padding and the model's window."""
    if _is_causal(mask_function, use_vmap):
        return True
    # These settings rule out chunked and bidirectional masks. Masks that combine a window with anything else do not allow a skip.
    window = getattr(config, "sliding_window", None)
    chunks = getattr(config, "attention_chunk_size", None)
    return (
        not use_vmap
        and allow_is_causal_skip
        and allow_is_bidirectional_skip is None
        and chunks is None
        and window is not None
        and local_size == window
    )


def _is_causal(mask_function: Callable[..., Any] = causal_mask_function, use_vmap: bool = False, **_: Any) -> bool:
    return mask_function is causal_mask_function and not use_vmap


def _is_causal_or_sliding(config: Any, mask_function: Callable[..., Any] = causal_mask_function, use_vmap: bool = False, **_: Any) -> bool:
    """Return True if a mask is transformers' own for causal attention or for the model's sliding window."""
    window = getattr(config, "sliding_window", None)
    if use_vmap or _is_causal(mask_function):
        return not use_vmap
    return window is not None and _same_function(mask_function, sliding_window_causal_mask_function(window))


def _same_function(first: Any, second: Any) -> bool:
    """Return True if two functions, or the functions that they wrap, are the same."""
    if isinstance(first, tuple) and isinstance(second, tuple):
        return len(first) == len(second) and all(map(_same_function, first, second))
    if not (inspect.isfunction(first) and inspect.isfunction(second)):
        return type(first) is type(second) and isinstance(first, int) and bool(first == second)
    closures = [tuple(cell.cell_contents for cell in function.__closure__ or ()) for function in (first, second)]
    return first.__code__ is second.__code__ and _same_function(*closures)


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
    """Return True if the mask hides only padding, later tokens, and tokens outside the model's sliding window."""
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


def check_columns(columns: int, tokens: int, layer: int, queries: int) -> None:
    """Raise InvalidParameter unless the mask has one column for each of the ``tokens`` tokens that ``queries`` queries may attend to."""
    if columns != tokens:
        raise InvalidParameter(
            f"the attention mask has {columns} columns, but layers[{layer}] has {tokens} tokens for a pass of {queries}: "
            "pass a mask with one column per token"
        )


def masked_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: torch.Tensor,
    scale: float | None,
    softcap: float | None,
    sink_logits: torch.Tensor | None,
) -> torch.Tensor:
    """Compute softmax(scale q k^T) v over the tokens for which ``visible``, bool ``[batch, 1, query, token]``, is True.

    The result is 0 for a query that attends to no tokens. ``q`` is ``[batch, q_head, query, dim]``, ``k`` and ``v`` are ``[batch, kv_head,
    token, dim]``, and ``sink_logits`` is ``[q_head]``.
    """
    if softcap is None and sink_logits is None:
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    else:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1).float() for x in (k, v))
        scores = q.float() @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        scores = scores.masked_fill(~visible, -torch.inf)
        if sink_logits is not None:
            sinks = sink_logits.float()[None, :, None, None].expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, sinks], -1)
        out = (torch.softmax(scores, -1)[..., : k.shape[2]] @ v).to(q.dtype)
    return out.masked_fill(~visible.any(-1, keepdim=True), 0)
