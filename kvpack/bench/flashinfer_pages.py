"""FlashInfer's attention over pages of bf16 and fp8 values, for comparison. It is optional, and compiles its kernels at the first call."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import metadata
from typing import Any

import torch

from kvpack.formats.errors import KvpackWarning

PAGE_TOKENS = 16
"""Tokens per page, the default of serving engines."""

_WORKSPACE_BYTES = 256 << 20


def installed_version() -> str | None:
    try:
        return metadata.version("flashinfer-python")
    except metadata.PackageNotFoundError:
        return None


def decode_calls(
    q: torch.Tensor, kv: Sequence[torch.Tensor], copies: Callable[[int], int]
) -> Iterator[tuple[str, int, list[Callable[[], object]]]]:
    """Yield (name, bytes read, calls) for bf16 and for fp8 pages. The calls decode with ``q``, ``[batch, q_head, 1, dim]``.

    ``kv`` contains keys and values ``[batch, kv_head, token, dim]``. ``copies(size)`` is the number of caches over which calls cycle. If
    FlashInfer does not support a dtype, a warning is issued.
    """
    if installed_version() is None:
        return
    for name, dtype in (("FlashInfer bf16", torch.bfloat16), ("FlashInfer fp8", torch.float8_e4m3fn)):
        pages = [_to_pages(x).to(dtype) for x in kv]
        size = sum(x.numel() * x.element_size() for x in kv) * dtype.itemsize // kv[0].element_size()
        caches = [tuple(pages), *(tuple(x.clone() for x in pages) for _ in range(copies(size) - 1))]
        try:
            decode = _plan_decode(q, kv[0], dtype)
            calls: list[Callable[[], object]] = [partial(decode, q[:, :, 0].contiguous(), cache) for cache in caches]
            calls[0]()
        except (ImportError, RuntimeError, TypeError, ValueError) as error:
            warnings.warn(f"{name} does not run: {str(error)[:300]}", KvpackWarning, stacklevel=2)
            continue
        yield name, size, calls


def _to_pages(x: torch.Tensor) -> torch.Tensor:
    """Return keys or values as pages ``[page, token, kv_head, dim]``, sequence by sequence."""
    heads, tokens, dim = x.shape[1:]
    padded = torch.nn.functional.pad(x.transpose(1, 2), (0, 0, 0, 0, 0, -tokens % PAGE_TOKENS))
    return padded.reshape(-1, PAGE_TOKENS, heads, dim).contiguous()


def _plan_decode(q: torch.Tensor, k: torch.Tensor, dtype: torch.dtype) -> Callable[..., object]:
    """Return FlashInfer's decode call over pages of ``dtype``. It uses tensor cores if several query heads share a KV head."""
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper  # type: ignore[import-not-found]

    (batch, q_heads, _, dim), (_, heads, tokens, _) = q.shape, k.shape
    pages = -(-tokens // PAGE_TOKENS)
    workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=q.device)
    wrapper: Any = BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=q_heads > heads)
    wrapper.plan(
        torch.arange(batch + 1, dtype=torch.int32, device=q.device) * pages,
        torch.arange(batch * pages, dtype=torch.int32, device=q.device),
        torch.full((batch,), tokens - (pages - 1) * PAGE_TOKENS, dtype=torch.int32, device=q.device),
        q_heads, heads, dim, PAGE_TOKENS, q_data_type=q.dtype, kv_data_type=dtype,
    )  # fmt: skip
    run: Callable[..., object] = wrapper.run
    return run
