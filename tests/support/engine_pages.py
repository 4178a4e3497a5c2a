"""Pages of random values in the layouts that engines use."""

from __future__ import annotations

import torch

from kvpack.pages import PageBuffer, PageGeometry

ENGINES = {
    "vLLM, K and V adjacent per head and token": lambda s, n, h, t, d: torch.zeros(s, n, h, t, 2, d).bfloat16().unbind(4),
    "tokens before heads": lambda s, n, h, t, d: [x.transpose(2, 3) for x in torch.zeros(s, n, t, h, 2, d).bfloat16().unbind(4)],
    "layers first": lambda s, n, h, t, d: [x.transpose(0, 1) for x in torch.zeros(2, n, s, h, t, d).bfloat16()],
    "a tensor for each layer": lambda s, n, h, t, d: [[torch.zeros(s, h, t, d).bfloat16() for _ in range(n)] for _ in range(2)],
    "channels first": lambda s, n, h, t, d: [x.transpose(3, 4) for x in torch.zeros(2, s, n, h, d, t).bfloat16()],
}


def values(geometry: PageGeometry, slots: int, seed: int = 0) -> list[torch.Tensor]:
    """Return random values ``[slot, layer, head, token, channel]`` for each side."""
    source = torch.Generator().manual_seed(seed)
    shape = (slots, geometry.layers, geometry.heads, geometry.tokens)
    if geometry.dtype == "u8":
        return [torch.randint(256, (*shape, dim), dtype=torch.uint8, generator=source) for dim in geometry.dims.values()]
    return [torch.randn(*shape, dim, generator=source).to(geometry.torch_dtype) for dim in geometry.dims.values()]


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


def filled_buffer(geometry: PageGeometry, slots: int, seed: int = 0) -> tuple[PageBuffer, list[torch.Tensor]]:
    made = values(geometry, slots, seed)
    return PageBuffer(geometry, *made), made


def empty_buffer(geometry: PageGeometry, slots: int) -> tuple[PageBuffer, list[torch.Tensor]]:
    made = [torch.zeros_like(x) for x in values(geometry, slots)]
    return PageBuffer(geometry, *made), made
