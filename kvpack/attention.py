"""Attention over packed layers (``attend``), computed tile by tile in bounded memory on any device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from kvpack.file.limits import MAX_TOKENS
from kvpack.formats.arguments import as_integer, check_flag, check_number, describe
from kvpack.formats.errors import InvalidParameter, InvalidType, OutOfBounds

from .cache.layer import Layer
from .cache.tiled_attention import attend_chunk
from .coding import dispatch
from .runtime.modes import float32_no_grad, is_traced, without_autocast

if TYPE_CHECKING:
    from types import ModuleType

    from kvpack.kernels.cpu.attend import PreparedAttention

    from .cache.packed_runs import PackedRun
    from .cache.side import Side

QUERIES_AT_A_TIME = 1024
"""Maximum number of queries per head in one pass over the layer. Longer chunks take several passes."""

MAX_RUNS = 1 << 14
"""Maximum number of runs in a layer's keys or values for which kernels are planned. A plan takes about 1 kB per run."""

MAX_KINDS = 64
"""Maximum number of entries in ``_checked_options``."""

_checked_options: dict[Any, Any] = {}
"""Options that have passed the checks of calls with many queries. Layers of the same kind share an entry."""

_prepared_calls: WeakKeyDictionary[Layer, dict[Any, Callable[..., torch.Tensor]]] = WeakKeyDictionary()
"""Prepared calls of each layer. The keys contain everything on which the checks of a call depend."""

_cpu_calls: WeakKeyDictionary[Layer, PreparedAttention | None] = WeakKeyDictionary()
"""Prepared C kernel calls by layer, or None if the C kernels do not support the layer."""


def attend(
    q: torch.Tensor,
    layer: Layer,
    *,
    scale: float | None = None,
    causal: bool = True,
    softcap: float | None = None,
    sliding_window: int | None = None,
    sink_logits: torch.Tensor | None = None,
    lengths: torch.Tensor | Sequence[int] | None = None,
    starts: torch.Tensor | Sequence[int] | None = None,
) -> torch.Tensor:
    """Compute ``softmax(scale * q k^T) v`` over a packed layer, without unpacking it.

    The queries are the last ``q_len`` tokens of the layer. The output is zero for a query that attends to no token. ``lengths`` and
    ``starts`` on a device are never copied to the host, so they may change between replays of a CUDA graph; they are clamped to the valid
    range.

    Args:
        q: Queries ``[batch, q_head, q_len, dim_k]``; q_head is a multiple of kv_head (grouped-query attention).
        layer: A packed layer.
        scale: Factor applied to the scores. Defaults to ``1 / sqrt(dim_k)``.
        causal: If True, query i attends only to tokens 0 to ``tokens - q_len + i`` (inclusive).
        softcap: If given, each score s is replaced by ``softcap * tanh(s / softcap)``.
        sliding_window: Number of tokens that each query attends to, including its own. Required if the layer has skipped tokens.
        sink_logits: Floating-point logits of attention sinks ``[q_head]``, which get softmax weight but have no value. ``softcap`` does not
            apply to them.
        lengths: Number of tokens in each sequence, if sequences are shorter than the layer. The queries belong to the last of these tokens.
        starts: First token of each sequence that queries attend to, for left-padded batches. Tokens before it are not read.

    Returns:
        Attention outputs ``[batch, q_head, q_len, dim_v]`` in the dtype of ``q``, differentiable by ``q`` and ``sink_logits``. For few
        queries, Triton kernels compute on packed bytes with float16 products, within 2e-3 of the exact result. For many 16-bit queries, and
        for codecs without kernels, blocks are decoded to the dtype of ``q``. Everything else is computed in float32.

    Raises:
        InvalidParameter: A shape or an option does not match the layer or is out of range.
        InvalidType: A tensor has the wrong dtype.

    Source: OCTOPUS, Eq. 13 (queries are rotated once, and values are summed before the rotation is reversed), with FlashAttention's online
    softmax.

    >>> layer = kvpack.load("prompt.kvpack")[0]
    >>> q = torch.randn(1, 4, 1, 64)
    >>> kvpack.attend(q, layer).shape
    torch.Size([1, 4, 1, 64])
    """
    if sliding_window is not None and type(sliding_window) is not int:
        sliding_window = as_integer(sliding_window, "sliding_window")
    # Calls that passed the checks once are launched without them, because checks take longer than the kernels.
    request: Any = None
    if lengths is starts is sink_logits is None and isinstance(q, torch.Tensor) and isinstance(layer, Layer) and not is_traced(q):
        request = (q.shape, q.dtype, q.device, q.layout, (scale, causal, softcap, sliding_window), dispatch.environment_key())
        if (prepared := _prepared_calls.get(layer, {}).get(request) or _prepared_call(q, layer, request)) is not None:
            return prepared(q)
    k, v = check_call(q, layer, scale, causal, softcap, sliding_window, sink_logits, lengths)
    sizes = k.batch, layer.skipped, k.tokens
    lengths, starts = checked_tokens("lengths", lengths, *sizes), checked_tokens("starts", starts, *sizes)
    scale = k.dim**-0.5 if scale is None else scale
    sinks_traced = is_traced(sink_logits)
    if not sinks_traced and (cpu_call := cpu_attention(q, layer)) is not None:
        if request is not None:
            prepared = partial(cpu_call, scale=scale, causal=causal, softcap=softcap, sliding_window=sliding_window)
            _prepared_calls.setdefault(layer, {})[request] = prepared
        return cpu_call(q, scale, causal, softcap, sliding_window, sink_logits, lengths, starts)
    with without_autocast(q.device):
        if not sinks_traced and (kernels := attention_kernels(q, layer) or many_queries_kernels(q, layer)) is not None:
            options = kernels.AttendOptions(
                scale, causal, softcap, sliding_window, lengths is not None, sink_logits is not None, starts is not None
            )
            prepared = kernels.prepare(q, layer, options)
            if prepared.runs_only_kernels and request is not None:
                _prepared_calls.setdefault(layer, {})[request] = prepared
                _remember_options(layer, request, options, kernels)
            return prepared(q, sink_logits, lengths, starts)  # type: ignore[no-any-return]
        chunks = []
        for first in range(0, q.shape[2], QUERIES_AT_A_TIME):
            chunk = q[:, :, first : first + QUERIES_AT_A_TIME].to(torch.float32) * scale
            position = k.tokens - q.shape[2] + first
            out = attend_chunk(chunk, k, v, position, causal, softcap, sliding_window, sink_logits, lengths, starts)
            chunks.append(out.to(q.dtype))
        return torch.cat(chunks, 2)


def _prepared_call(q: torch.Tensor, layer: Layer, request: Any) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Return a prepared call for ``layer``, or None if no call with a layer of the same kind has passed the checks yet."""
    if not _checked_options or layer.k is None or layer.v is None:
        return None
    from kvpack.kernels.attend import layer_sharing, many_queries

    kind = layer_sharing.kind_key(layer)
    options = None if kind is None else _checked_options.get((request, layer.skipped, kind))
    if options is None:
        return None
    prepared: Callable[[torch.Tensor], torch.Tensor] = many_queries.create_call(q, layer, options, kind)
    _prepared_calls.setdefault(layer, {})[request] = prepared
    return prepared


def warm_up(layers: Iterable[tuple[Sequence[PackedRun], Sequence[PackedRun]]], device: torch.device) -> None:
    """Prepare attention calls with many queries on ``device``, for all layers of a model at once.

    ``layers`` contains each layer's runs of keys and of values.
    """
    if dispatch.uses_triton(device):
        from kvpack.kernels.attend import layer_sharing

        layer_sharing.warm_up(layers)


def _remember_options(layer: Layer, request: Any, options: Any, kernels: ModuleType) -> None:
    """Store the checked options, so that calls with many queries skip the checks for other layers of the same kind."""
    from kvpack.kernels.attend import layer_sharing, many_queries

    if kernels is many_queries and (kind := layer_sharing.kind_key(layer)) is not None:
        if len(_checked_options) >= MAX_KINDS:
            _checked_options.clear()
        _checked_options[request, layer.skipped, kind] = options


def check_call(
    q: torch.Tensor,
    layer: Layer,
    scale: float | None,
    causal: bool,
    softcap: float | None,
    sliding_window: int | None,
    sink_logits: torch.Tensor | None,
    lengths: object = None,
) -> tuple[Side, Side]:
    """Check all arguments of ``attend`` and return the layer's keys and values. Raises the same errors as ``attend``."""
    k, v = _sides(layer)
    _check(q, k, v, causal, sliding_window, softcap, scale)
    _check_window(q.shape[2], layer, sliding_window, lengths)
    _check_sink_logits(sink_logits, q)
    return k, v


def attention_kernels(q: torch.Tensor, layer: Layer) -> ModuleType | None:
    """Return ``kvpack.kernels.attend.attention`` if it supports ``q`` and ``layer``, or None otherwise.

    Raises the same errors as ``uses_triton``.
    """
    if not dispatch.uses_triton(q.device) or is_traced(q):
        return None
    if any(len(side.runs) > MAX_RUNS for side in layer.sides.values()):
        return None
    from kvpack.kernels.attend import attention

    return attention if attention.supports(q, layer) else None


def many_queries_kernels(q: torch.Tensor, layer: Layer) -> ModuleType | None:
    """Return ``kvpack.kernels.attend.many_queries`` if it supports ``q`` and ``layer``, or None otherwise.

    These kernels are for calls that ``attention_kernels`` does not support. Raises the same errors as ``uses_triton``.
    """
    if not dispatch.uses_triton(q.device) or is_traced(q):
        return None
    from kvpack.kernels.attend import many_queries

    return many_queries if many_queries.supports(q, layer) else None


def cpu_attention(q: torch.Tensor, layer: Layer) -> PreparedAttention | None:
    """Prepare attention over ``layer`` with C kernels. Returns None if they do not support the call.

    Raises the same errors as ``uses_c``.
    """
    if not dispatch.uses_c(q.device) or is_traced(q) or layer.k is None or layer.v is None:
        return None
    if layer not in _cpu_calls:
        from kvpack.kernels.cpu.attend import PreparedAttention

        # Autocast would round the maps of raw tokens and scales, whose bytes C reads as float32.
        with float32_no_grad(q.device):
            _cpu_calls[layer] = PreparedAttention.create(layer.k, layer.v)
    return _cpu_calls[layer]


def _sides(layer: Any) -> tuple[Side, Side]:
    if not isinstance(layer, Layer):
        hint = "" if hasattr(layer, "recipe") else ": pack keys and values with kvpack.pack, and pass a layer of the result"
        raise InvalidType(f"attention requires one layer, such as cache[0], but got a {type(layer).__name__}{hint}")
    if layer.k is None or layer.v is None:
        contents = f"only {', '.join(layer.sides)}" if layer.sides else "neither"
        raise InvalidParameter(f"attention requires keys and values, but the layer has {contents}: pass a layer with both")
    return layer.k, layer.v


def _check(q: torch.Tensor, k: Side, v: Side, causal: bool, sliding_window: int | None, softcap: float | None, scale: float | None) -> None:
    untyped: Any = q
    if not isinstance(untyped, torch.Tensor):
        raise InvalidType(f"q is a {type(untyped).__name__}, expected a tensor [batch, q_head, q_len, dim]")
    if q.dim() != 4:
        raise InvalidParameter(f"q has shape {list(q.shape)}, expected [batch, q_head, q_len, dim]")
    if not q.dtype.is_floating_point or q.dtype.itemsize == 1:
        raise InvalidType(f"q has dtype {q.dtype}, expected a floating-point dtype of at least 16 bits")
    if q.layout != torch.strided:
        raise InvalidType(f"q has layout {q.layout}, expected a dense tensor: pass q.to_dense()")
    if not q.shape[2]:
        raise InvalidParameter(f"q has shape {list(q.shape)}, expected at least one query")
    check_flag(causal, "causal")
    if q.shape[0] != k.batch or q.shape[1] % k.heads or not q.shape[1] or q.shape[3] != k.dim:
        raise InvalidParameter(
            f"q has shape {list(q.shape)}, which does not match keys of shape [{k.batch}, {k.heads}, {k.tokens}, {k.dim}]: "
            "batch and dim must be the same, and the number of query heads must be a multiple of the number of key heads"
        )
    if not q.device == k.device == v.device:
        places = f"{k.device} (keys) and {v.device} (values)"
        raise InvalidParameter(
            f"q is on {q.device}, but the layer is on {places}: move them to the same device with q.to(...) or cache.to(...)"
        )
    if v.heads != k.heads:
        raise InvalidParameter(f"keys have {k.heads} heads, but values have {v.heads}: pass a layer with the same number of heads in both")
    if k.tokens == 0 or (causal and q.shape[2] > k.tokens):
        raise InvalidParameter(
            f"q has {q.shape[2]} queries, but the layer has {k.tokens} tokens: attention needs at least one token and, if causal, "
            "at least as many tokens as queries"
        )
    for name, number in (("scale", scale), ("softcap", softcap)):
        check_number(number, name)
    if sliding_window is not None and not 1 <= as_integer(sliding_window, "sliding_window") <= MAX_TOKENS:
        raise InvalidParameter(f"sliding_window is {describe(sliding_window)}, expected an integer from 1 to {MAX_TOKENS}")
    if softcap is not None and not softcap > 0:
        raise InvalidParameter(f"softcap is {softcap}, expected a number above 0")


def _check_window(queries: int, layer: Layer, sliding_window: int | None, lengths: object) -> None:
    """Raise InvalidParameter if a query needs tokens that the layer has skipped."""
    if not layer.skipped:
        return
    contents = f"the layer has only tokens [{layer.skipped}:{layer.seen_tokens}] of its cache"
    if lengths is not None:
        raise InvalidParameter(f"{contents}, but lengths= counts from the cache's first token: omit lengths=")
    first = layer.seen_tokens - queries
    if sliding_window is None or first - sliding_window + 1 < layer.skipped:
        seen = (
            "all earlier tokens: pass the layer's window as sliding_window="
            if sliding_window is None
            else f"{sliding_window} tokens: pass a smaller sliding_window="
        )
        raise InvalidParameter(f"{contents}, but the query at token {first} attends to {seen}")


def _check_sink_logits(sink_logits: torch.Tensor | None, q: torch.Tensor) -> None:
    if sink_logits is None:
        return
    if not isinstance(sink_logits, torch.Tensor) or not sink_logits.dtype.is_floating_point:
        raise InvalidType(f"sink_logits is {getattr(sink_logits, 'dtype', type(sink_logits).__name__)}, expected a floating-point tensor")
    if list(sink_logits.shape) != [q.shape[1]]:
        raise InvalidParameter(f"sink_logits has shape {list(sink_logits.shape)}, expected one logit per query head, [{q.shape[1]}]")


def checked_tokens(
    name: str, tokens_by_sequence: torch.Tensor | Sequence[int] | None, batch: int, skipped: int, tokens: int
) -> torch.Tensor | None:
    """Check ``lengths`` or ``starts``, and return it as a tensor. None is returned unchanged.

    The arguments count the ``skipped`` tokens, and the returned numbers do not. They must be from 0 to ``tokens``; numbers on a device are
    clamped to this range instead.
    """
    if tokens_by_sequence is None:
        return None
    values: Any = tokens_by_sequence
    if not isinstance(values, torch.Tensor):
        if isinstance(values, str | bytes) or not isinstance(values, Sequence):
            raise InvalidType(f"{name} is {describe(values)}, expected a list of integers, one for each sequence")
        for number, token in enumerate(values):
            if not isinstance(token, int) or isinstance(token, bool):
                raise InvalidType(f"{name}[{number}] is {describe(token)}, expected an integer")
            _check_token(name, number, token, skipped + tokens)
        values = torch.tensor(list(values), dtype=torch.int64, device="cpu")
    if values.dtype.is_floating_point or values.dtype.is_complex or values.dtype == torch.bool or values.is_quantized:
        raise InvalidType(f"{name} has dtype {values.dtype}, expected integers")
    if values.layout != torch.strided or values.is_meta:
        raise InvalidType(f"{name} is a {values.layout} tensor on {values.device}, expected a dense tensor with data, or a list")
    if list(values.shape) != [batch]:
        raise InvalidParameter(f"{name} has shape {list(values.shape)}, expected one number for each sequence, [{batch}]")
    if values.device.type == "cpu":
        for number, token in enumerate(values.tolist()):
            _check_token(name, number, token, skipped + tokens)
    # Without skipped tokens, int32 and int64 need no conversion.
    fits = not skipped and values.dtype in (torch.int32, torch.int64)
    result: torch.Tensor = values if fits else values.to(torch.int64) - skipped
    return result.clamp(0, tokens)


def _check_token(name: str, index: int, token: int, tokens: int) -> None:
    if not 0 <= token <= tokens:
        raise OutOfBounds(f"{name}[{index}] is {token}, expected 0 to {tokens} (the number of tokens in the layer)")
