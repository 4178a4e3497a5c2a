"""attend: attention over packed pages, tile by tile, in bounded memory, on any device."""

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
from .runtime.modes import without_autocast

if TYPE_CHECKING:
    from types import ModuleType

    from kvpack.kernels.cpu.attend import PreparedAttention

    from .cache.packed_runs import PackedRun
    from .cache.side import Side

QUERIES_AT_A_TIME = 1024
"""Maximum number of queries of one head that share a pass over the pages; longer chunks take several passes."""

MAX_PAGES = 1 << 14
"""Maximum number of pages of a side that the kernels plan for: a plan takes about a kilobyte per page, too much for one run per token."""

MAX_KINDS = 64
"""Kinds of layers and calls that are known at most."""

_kinds: dict[Any, Any] = {}
"""The options of calls over layers that are alike, by all that their checks depend on."""

_launched: WeakKeyDictionary[Layer, dict[Any, Callable[..., torch.Tensor]]] = WeakKeyDictionary()
"""The prepared calls of a layer that were made once, by all that their checks depend on."""

_on_cpu: WeakKeyDictionary[Layer, PreparedAttention | None] = WeakKeyDictionary()
"""Prepared C kernel calls by layer; None if the C kernels do not support the layer."""


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

    The queries are the last ``q_len`` tokens of the layer. A query that sees no token returns zeros. Lengths and starts in a tensor on the
    device are not read by the host, so they may change between replays of a CUDA graph; values outside 0 to tokens are clamped.

    Args:
        q: Queries ``[batch, q_head, q_len, dim_k]``; q_head is a multiple of kv_head (grouped-query attention).
        layer: A packed layer.
        scale: Factor of the scores; default: ``1 / sqrt(dim_k)``.
        causal: Query i sees tokens 0 to ``tokens - q_len + i`` only.
        softcap: Limits a score s to ``softcap * tanh(s / softcap)``.
        sliding_window: Each query sees only this many of the newest tokens. Required if the layer has skipped tokens.
        sink_logits: Logits of attention sinks ``[q_head]``, floating point: they get softmax weight but have no value, and no soft cap.
        lengths: One integer per sequence, which limits the sequence to its first tokens; the queries are the last of these.
        starts: One integer per sequence: the first token that its queries see, for left-padded batches. Tokens before it are not read.

    Returns:
        Attention outputs ``[batch, q_head, q_len, dim_v]`` in the dtype of ``q``. Triton kernels attend short queries on the packed bytes
        with float16 products, within 2e-3 of the exact result. Longer 16-bit queries, and codecs without kernels, are attended over blocks
        decoded to the dtype of ``q``. Everything else is computed in float32.

    Raises:
        InvalidParameter: A shape or an option does not fit.
        InvalidType: A tensor has the wrong dtype.

    Source: the query is rotated once and values are summed in their coded frame (OCTOPUS, Eq. 13), with the online softmax of
    FlashAttention.

    >>> layer = kvpack.load("prompt.kvpack")[0]
    >>> q = torch.randn(1, 4, 1, 64)
    >>> kvpack.attend(q, layer).shape
    torch.Size([1, 4, 1, 64])
    """
    if sliding_window is not None and type(sliding_window) is not int:
        sliding_window = as_integer(sliding_window, "sliding_window")
    # What the checks have let through once is launched without them: they take longer than the kernels.
    request: Any = None
    if lengths is starts is sink_logits is None and isinstance(q, torch.Tensor) and isinstance(layer, Layer) and not q.requires_grad:
        request = (q.shape, q.dtype, q.device, (scale, causal, softcap, sliding_window), dispatch.environment_key())
        if (prepared := _launched.get(layer, {}).get(request) or _prepared_call(q, layer, request)) is not None:
            return prepared(q)
    k, v = check_call(q, layer, scale, causal, softcap, sliding_window, sink_logits, lengths)
    held = k.batch, layer.skipped, k.tokens
    lengths, starts = checked_tokens("lengths", lengths, *held), checked_tokens("starts", starts, *held)
    scale = k.dim**-0.5 if scale is None else scale
    if (on_cpu := cpu_attention(q, layer)) is not None:
        if request is not None:
            prepared = partial(on_cpu, scale=scale, causal=causal, softcap=softcap, sliding_window=sliding_window)
            _launched.setdefault(layer, {})[request] = prepared
        return on_cpu(q, scale, causal, softcap, sliding_window, sink_logits, lengths, starts)
    with without_autocast(q.device):
        if (kernels := attention_kernels(q, layer) or many_queries_kernels(q, layer)) is not None:
            options = kernels.Options(
                scale, causal, softcap, sliding_window, lengths is not None, sink_logits is not None, starts is not None
            )
            prepared = kernels.prepare(q, layer, options)
            if prepared.plain and request is not None:
                _launched.setdefault(layer, {})[request] = prepared
                _note_kind(layer, request, options, kernels)
            return prepared(q, sink_logits, lengths, starts)  # type: ignore[no-any-return]
        out = torch.empty(*q.shape[:3], v.dim, dtype=q.dtype, device=q.device)
        for first in range(0, q.shape[2], QUERIES_AT_A_TIME):
            chunk = q[:, :, first : first + QUERIES_AT_A_TIME].to(torch.float32) * scale
            position = k.tokens - q.shape[2] + first
            out[:, :, first : first + QUERIES_AT_A_TIME] = attend_chunk(
                chunk, k, v, position, causal, softcap, sliding_window, sink_logits, lengths, starts
            )
    return out


def _prepared_call(q: torch.Tensor, layer: Layer, request: Any) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Return the prepared call over a layer, or None if no layer of the same kind has been checked and prepared yet."""
    if not _kinds or layer.k is None or layer.v is None:
        return None
    from kvpack.kernels.attend import layer_sharing, many_queries

    kind = layer_sharing.kind_key(layer)
    options = None if kind is None else _kinds.get((request, layer.skipped, kind))
    if options is None:
        return None
    prepared: Callable[[torch.Tensor], torch.Tensor] = many_queries.create_call(q, layer, options, kind)
    _launched.setdefault(layer, {})[request] = prepared
    return prepared


def warm_up(layers: Iterable[tuple[Sequence[PackedRun], Sequence[PackedRun]]], device: torch.device) -> None:
    """Prepare the pages of all ``layers`` of a model together, before long queries on ``device`` attend to them."""
    if dispatch.uses_triton(device):
        from kvpack.kernels.attend import layer_sharing

        layer_sharing.warm_up(layers)


def _note_kind(layer: Layer, request: Any, options: Any, kernels: ModuleType) -> None:
    """Let layers of the same kind as ``layer`` skip its checks in calls with many queries; with few, each layer has its own launches."""
    from kvpack.kernels.attend import layer_sharing, many_queries

    if kernels is many_queries and (kind := layer_sharing.kind_key(layer)) is not None:
        if len(_kinds) >= MAX_KINDS:
            _kinds.clear()
        _kinds[request, layer.skipped, kind] = options


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
    """Check all arguments of ``attend``, and return the sides of ``layer``. Raises the errors of ``attend``."""
    k, v = _sides(layer)
    _check(q, k, v, causal, sliding_window, softcap, scale)
    _check_held(q.shape[2], layer, sliding_window, lengths)
    _check_sink_logits(sink_logits, q)
    return k, v


def attention_kernels(q: torch.Tensor, layer: Layer) -> ModuleType | None:
    """Return ``kvpack.kernels.attend.attention`` if it can attend ``layer`` with ``q``; None if torch must decode and attend.

    Raises the errors of ``uses_triton``.
    """
    if not dispatch.uses_triton(q.device) or q.requires_grad:
        return None
    if any(len(side.runs) > MAX_PAGES for side in layer.sides.values()):
        return None
    from kvpack.kernels.attend import attention

    return attention if attention.supports(q, layer) else None


def many_queries_kernels(q: torch.Tensor, layer: Layer) -> ModuleType | None:
    """Return ``kvpack.kernels.attend.many_queries`` if it can attend ``layer`` with ``q``, for calls that ``attention_kernels`` rejects.

    Raises the errors of ``uses_triton``.
    """
    if not dispatch.uses_triton(q.device) or q.requires_grad:
        return None
    from kvpack.kernels.attend import many_queries

    return many_queries if many_queries.supports(q, layer) else None


def cpu_attention(q: torch.Tensor, layer: Layer) -> PreparedAttention | None:
    """Return attention by C kernels over ``layer``, prepared once; None if torch must decode and attend.

    Raises the errors of ``uses_c``.
    """
    if not dispatch.uses_c(q.device) or q.requires_grad or layer.k is None or layer.v is None:
        return None
    if layer not in _on_cpu:
        from kvpack.kernels.cpu.attend import PreparedAttention

        _on_cpu[layer] = PreparedAttention.create(layer.k, layer.v)
    return _on_cpu[layer]


def _sides(layer: Any) -> tuple[Side, Side]:
    if not isinstance(layer, Layer):
        hint = "" if hasattr(layer, "recipe") else ": kvpack.pack makes a cache of keys and values, and cache[0] is its first layer"
        raise InvalidType(f"attention takes one layer, such as cache[0]; got a {type(layer).__name__}{hint}")
    if layer.k is None or layer.v is None:
        raise InvalidParameter(f"attention needs keys and values; the layer holds only {', '.join(layer.sides) or 'nothing'}")
    return layer.k, layer.v


def _check(q: torch.Tensor, k: Side, v: Side, causal: bool, sliding_window: int | None, softcap: float | None, scale: float | None) -> None:
    given: Any = q
    if not isinstance(given, torch.Tensor):
        raise InvalidType(f"q is a {type(given).__name__}, expected a tensor [batch, q_head, q_len, dim]")
    if q.dim() != 4:
        raise InvalidParameter(f"q: rank {q.dim()}, shape {list(q.shape)}; expected [batch, q_head, q_len, dim]")
    if not q.dtype.is_floating_point or q.dtype.itemsize == 1:
        raise InvalidType(f"q: dtype {q.dtype}; expected a floating-point dtype of at least 16 bits")
    if q.layout != torch.strided:
        raise InvalidType(f"q: layout {q.layout}; expected a dense tensor: pass q.to_dense()")
    if not q.shape[2]:
        raise InvalidParameter(f"q: shape {list(q.shape)}; expected at least one query")
    check_flag(causal, "causal")
    if q.shape[0] != k.batch or q.shape[1] % k.heads or not q.shape[1] or q.shape[3] != k.dim:
        raise InvalidParameter(
            f"q: shape {list(q.shape)} does not fit keys [{k.batch}, {k.heads}, {k.tokens}, {k.dim}]: "
            "batch and dim must match, and q_head must be a multiple of kv_head"
        )
    if not q.device == k.device == v.device:
        places = f"{k.device} (keys) and {v.device} (values)"
        raise InvalidParameter(f"q is on {q.device}, but the layer is on {places}: move them to one device with q.to(...) or cache.to(...)")
    if v.heads != k.heads:
        raise InvalidParameter(f"keys have {k.heads} heads and values {v.heads}; attention needs the same number of both")
    if k.tokens == 0 or (causal and q.shape[2] > k.tokens):
        raise InvalidParameter(
            f"q: {q.shape[2]} queries over {k.tokens} tokens; expected at least one causal query, and no more queries than tokens"
        )
    for name, number in (("scale", scale), ("softcap", softcap)):
        check_number(number, name)
    if sliding_window is not None and not 1 <= as_integer(sliding_window, "sliding_window") <= MAX_TOKENS:
        raise InvalidParameter(f"sliding_window is {describe(sliding_window)}, expected an integer from 1 to {MAX_TOKENS}")
    if softcap is not None and not softcap > 0:
        raise InvalidParameter(f"softcap is {softcap}, expected a number above 0")


def _check_held(queries: int, layer: Layer, sliding_window: int | None, lengths: object) -> None:
    """Raise InvalidParameter if a query sees tokens that the layer no longer contains."""
    if not layer.skipped:
        return
    held = f"the layer holds only tokens {layer.skipped} to {layer.seen} of its cache"
    if lengths is not None:
        raise InvalidParameter(f"{held}; lengths= counts from the cache's first token: leave lengths= out")
    first = layer.seen - queries
    if sliding_window is None or first - sliding_window + 1 < layer.skipped:
        seen = "all tokens before it: pass sliding_window=" if sliding_window is None else f"a window of {sliding_window} tokens"
        raise InvalidParameter(f"{held}; the query of token {first} sees {seen}")


def _check_sink_logits(sink_logits: torch.Tensor | None, q: torch.Tensor) -> None:
    if sink_logits is None:
        return
    if not isinstance(sink_logits, torch.Tensor) or not sink_logits.dtype.is_floating_point:
        raise InvalidType(f"sink_logits: {getattr(sink_logits, 'dtype', type(sink_logits).__name__)}; expected floating-point logits")
    if list(sink_logits.shape) != [q.shape[1]]:
        raise InvalidParameter(f"sink_logits: shape {list(sink_logits.shape)}; expected one logit per query head, [{q.shape[1]}]")


def checked_tokens(name: str, numbers: torch.Tensor | Sequence[int] | None, batch: int, skipped: int, tokens: int) -> torch.Tensor | None:
    """Convert ``lengths`` or ``starts`` to a tensor of numbers from 0 to ``tokens``; a tensor on a device is clamped there.

    Both count the ``skipped`` tokens of the layer.
    """
    if numbers is None:
        return None
    given: Any = numbers
    if not isinstance(given, torch.Tensor):
        if isinstance(given, str | bytes) or not isinstance(given, Sequence):
            raise InvalidType(f"{name} is {describe(given)}; expected a list of integers, one for each sequence of the batch")
        for number, token in enumerate(given):
            if not isinstance(token, int) or isinstance(token, bool):
                raise InvalidType(f"{name}[{number}] is {describe(token)}; expected integers")
            _check_token(name, number, token, skipped + tokens)
        given = torch.tensor(list(given), dtype=torch.int64, device="cpu")
    if given.dtype.is_floating_point or given.dtype.is_complex or given.dtype == torch.bool or given.is_quantized:
        raise InvalidType(f"{name}: dtype {given.dtype}; expected integers")
    if given.layout != torch.strided or given.is_meta:
        raise InvalidType(f"{name}: layout {given.layout} on {given.device}; expected a dense tensor or a list")
    if list(given.shape) != [batch]:
        raise InvalidParameter(f"{name}: shape {list(given.shape)}; expected one for each sequence of the batch, [{batch}]")
    if given.device.type == "cpu":
        for number, token in enumerate(given.tolist()):
            _check_token(name, number, token, skipped + tokens)
    # Where nothing was skipped, integers that hold any number of tokens need not be widened.
    fits = not skipped and given.dtype in (torch.int32, torch.int64)
    held: torch.Tensor = given if fits else given.to(torch.int64) - skipped
    return held.clamp(0, tokens)


def _check_token(name: str, number: int, token: int, tokens: int) -> None:
    if not 0 <= token <= tokens:
        raise OutOfBounds(f"{name}[{number}] is {token}, expected 0 to {tokens}, the number of tokens in the layer")
