"""Checks that vLLM's own writer produces pages with a named layout on this CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from vllm import _custom_ops as ops
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from kvpack.pages.geometry import DTYPES, PageGeometry
from kvpack.pages.layout import PageLayout

from .layouts import check_layout_name

if TYPE_CHECKING:
    from .groups import Group


def check_layout(layout: str, group: Group) -> None:
    """Raise InvalidParameter unless vLLM's attention on this CPU writes blocks of ``group`` in the layout named ``layout``.

    On processors with AMX, it interleaves pairs of channels, which is not a layout with a name.
    """
    current_platform.import_kernels()
    heads, tokens, dim, dtype = group.heads, group.tokens, group.dim, DTYPES[group.dtype]
    isa = _get_attn_isa(dtype, tokens, dim)
    memory = torch.zeros(2, heads, tokens, 2 * dim, dtype=dtype, device="cpu")

    def write(k: torch.Tensor, v: torch.Tensor | None) -> None:
        assert v is not None
        keys, values = memory.view(2, heads, 2 * tokens, dim).chunk(2, dim=2)
        given = [x[0].transpose(0, 1).contiguous() for x in (k, v)]
        # Use block 1, so that writes to another block are noticed.
        slots = torch.arange(tokens, device="cpu") + tokens
        ops.cpu_attn_reshape_and_cache(*given, keys, values, slots, isa, k_scale=1.0, v_scale=1.0, kv_cache_dtype="auto")

    check_layout_name(layout, PageLayout.detect(PageGeometry(1, heads, tokens, dim, dim, group.dtype), write, memory[1]))
