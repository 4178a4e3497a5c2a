"""The attention function "kvpack" for transformers, over packed layers and over plain tensors."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from kvpack.attention import attend
from kvpack.cache.layer import Layer
from kvpack.formats.errors import InvalidParameter

from .layers import check_attention_window, check_window
from .masks import check_columns
from .plain_attention import plain_attention, plain_attention_name
from .reads import WITHOUT_COUNTERPART
from .states import PackedStates, eager_only


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor | PackedStates | Layer,
    value: torch.Tensor | PackedStates | Layer,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute attention over a packed layer (``key``), or pass plain tensors to the model's own attention.

    The signature is that of transformers' attention functions. ``query`` is ``[batch, q_head, q_len, dim]``. Returns ``[batch, q_len,
    q_head, dim]``, and None. An int32 mask ``[batch, 1, 1, 1]`` contains the first token that each sequence attends to (``masks.mask``).
    With any other mask, the layer of a KvpackCache is decoded for the call.

    Raises InvalidParameter if the layer has no tokens, if the mask covers tokens that the layer does not have, or if ``attend`` does not
    support the call. It does not support dropout, a position bias, or a missing window for a layer that has one.
    """
    starts = None if attention_mask is None else _first_visible_tokens(attention_mask)
    if isinstance(key, PackedStates):
        key.cache.check_attention(module)
        if attention_mask is not None and starts is None:
            k, v = _mask_tokens(key, attention_mask, query.shape[2])
            return _attend_plain(module, query, k, v, attention_mask, options)
    elif not isinstance(key, Layer):
        if isinstance(value, (Layer, PackedStates)):
            raise InvalidParameter("value_states is a packed layer, but key_states is a tensor: pass both as the cache returned them")
        if starts is not None:
            raise InvalidParameter(
                f"{type(module).__name__} got tensors, but its mask is for the packed layers of a KvpackCache: use "
                "KvpackCache.of(cache, model, dense=True), which passes tensors and full masks to all layers"
            )
        return _attend_plain(module, query, key, value, attention_mask, options)
    unsupported = WITHOUT_COUNTERPART.keys() & options.keys()
    given = [WITHOUT_COUNTERPART[name] for name in options if name in unsupported and options[name] is not None] if unsupported else []
    if attention_mask is not None and not isinstance(key, PackedStates):
        given.append("a mask")
    if options.get("dropout"):
        given.append("dropout")
    if given:
        if isinstance(key, PackedStates) and not torch.compiler.is_dynamo_compiling():
            key.cache.roll_back()
        raise InvalidParameter(
            f"attention over packed layers does not support arguments that the model passes ({', '.join(given)}): use "
            "KvpackCache.of(cache, model, dense=True), which decodes each layer before attention"
        )
    causal, window = options.get("is_causal"), options.get("sliding_window")
    if causal is None:
        if torch.compiler.is_dynamo_compiling() and isinstance(key, PackedStates) and query.shape[2] > 1:
            _check_compiled(type(module).__name__, getattr(module, "is_causal", True))
        causal = getattr(module, "is_causal", True) or (isinstance(key, PackedStates) and key.cache.is_masked(key.number))
    given_options: dict[str, Any] = {
        "scale": options.get("scaling"),
        "causal": causal,
        "softcap": options.get("softcap"),
        "sliding_window": window,
        "sink_logits": options.get("s_aux"),
    }
    if isinstance(key, PackedStates):
        check_attention_window(key.cache.layers[key.number].window, window, module)
        out = key.attend(query, starts=starts, **given_options)
    else:
        check_window(key.skipped, key.tokens - query.shape[2], window)
        out = attend(query, key, **given_options)
    return out.transpose(1, 2).contiguous(), None


def _attend_plain(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, options: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    function = plain_attention(module, options)
    queries, tokens = query.shape[2], key.shape[2]
    window = options.get("sliding_window")
    if mask is None and window is not None and tokens > window and plain_attention_name(module.config) in ("sdpa", "eager"):
        raise InvalidParameter(
            f"{type(module).__name__} got {tokens} tokens and no mask for its window of {window}: the model expected a KvpackCache "
            "to apply that window, but the layer got no cache: turn gradient checkpointing off, or call model.eval()"
        )
    if mask is None and function is sdpa_attention_forward and getattr(module, "is_kv_shared_layer", False) and 1 < queries < tokens:
        # Gemma-4 omits queries that logits_to_keep does not need. SDPA would then align the last queries with the first tokens.
        mask = torch.ones(queries, tokens, dtype=torch.bool, device=query.device).tril(tokens - queries)
    return function(module, query, key, value, mask, **options)


def _check_compiled(name: str, causal: bool) -> None:
    """Raise InvalidParameter if the module is marked as not causal. Its mask is then known only in eager code."""
    if not causal:
        _refuse_compiled(name)


@eager_only("the mask of attention with is_causal=False is checked in eager code")
def _refuse_compiled(name: str) -> NoReturn:
    raise InvalidParameter(
        f"{name} has is_causal=False, and only eager code can check whether its mask is causal: run passes of several tokens without "
        "compilation, and use the compiled model only for steps of one token"
    )


def _first_visible_tokens(mask: torch.Tensor | None) -> torch.Tensor | None:
    """Return the first token that each sequence attends to, int32 ``[batch]``, if ``mask`` contains these tokens, or None otherwise."""
    # Flex attention has its own masks, which are not tensors.
    if not isinstance(mask, torch.Tensor) or mask.dtype != torch.int32 or mask.dim() != 4 or mask.shape[1:].numel() != 1:
        return None
    return mask.view(-1)


def _mask_tokens(states: PackedStates, mask: torch.Tensor, queries: int) -> tuple[Any, Any]:
    """Return dense keys and values of the tokens that ``mask`` covers.

    Raises InvalidParameter if the layer does not have all of these tokens.
    """
    k, v = states.decode()
    held = max((x.shape[2] for x in (k, v) if x is not None), default=0)
    # A two-dimensional mask, as for flash attention, is [sequence, token].
    check_columns(mask.shape[-1], held, states.number, queries)
    return k, v
