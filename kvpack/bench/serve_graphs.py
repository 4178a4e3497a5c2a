"""Times decode steps in CUDA graphs, for caches whose steps consist only of kernels, compared with preallocated bf16 states."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from kvpack import cache_names
from kvpack.models import import_transformers

NAME = "kvpack bench static"
ROOM = 256


def use_flash_attention() -> AbstractContextManager[None]:
    """Return a context manager that makes SDPA use FlashAttention.

    Otherwise, PyTorch chooses. On an H100, it chooses cuDNN's kernel, which creates a new plan for each length.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    result: AbstractContextManager[None] = sdpa_kernel([SDPBackend.FLASH_ATTENTION])
    return result


@contextmanager
def without_graphs(past: Any) -> Iterator[None]:
    """Return a context manager that disables CUDA graphs over the KvpackCache ``past``."""
    before, past.graphs = past.graphs, None
    try:
        yield
    finally:
        past.graphs = before


class StaticStates:
    """Preallocated bf16 keys and values. Steps write at a position stored on the device, and attend with cuDNN or FlashAttention.

    As a context manager, it replaces the model's attention; pass ``cache`` to the model. ``states`` contains the keys and values of
    ``tokens`` tokens or, for a layer with a sliding window, of the tokens in the window.
    """

    def __init__(self, model: Any, states: Sequence[tuple[torch.Tensor, torch.Tensor]], tokens: int) -> None:
        library = import_transformers()
        self._model = model
        self._states = [tuple(torch.nn.functional.pad(x, (0, 0, 0, ROOM)) for x in pair) for pair in states]
        lengths = [keys.shape[2] for keys, _ in states]
        self._positions = [torch.tensor([length], device=keys.device) for length, (keys, _) in zip(lengths, states, strict=True)]
        # A window has one more token than before the step, and a constant length.
        self._stops = [length + (ROOM // 2 if length == tokens else 1) for length in lengths]
        self.cache = length_only_cache(tokens, len(states))
        library.AttentionInterface.register(NAME, self._attend)
        library.AttentionMaskInterface.register(NAME, lambda *_, **__: None)

    def __enter__(self) -> StaticStates:
        self._before = self._model.config._attn_implementation
        self._model.set_attn_implementation(NAME)
        return self

    def __exit__(self, *_: object) -> None:
        # Release the states, which are large, because the registry outlives this block.
        self._states.clear()
        self._model.set_attn_implementation(self._before)

    def _attend(
        self, module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, scaling: float | None = None, **_: Any
    ) -> tuple[torch.Tensor, None]:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        keys, values = self._states[module.layer_idx]
        position, stop = self._positions[module.layer_idx], self._stops[module.layer_idx]
        keys.index_copy_(2, position, k)
        values.index_copy_(2, position, v)
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
            out = torch.nn.functional.scaled_dot_product_attention(
                q, keys[:, :, :stop], values[:, :, :stop], scale=scaling, enable_gqa=True
            )
        return out.transpose(1, 2).contiguous(), None


def length_only_cache(tokens: int, layers: int) -> Any:
    """Return a transformers cache that reports ``tokens`` tokens but stores none. Each layer returns the keys and values that it receives.
    """
    library: Any = import_transformers()

    class Layer(library.cache_utils.CacheLayerMixin):  # type: ignore[misc]
        is_sliding = False

        def __init__(self) -> None:
            super().__init__()
            self.is_initialized = True

        def lazy_initialization(self, *_: Any) -> None:
            ...

        def update(self, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
            return k, v

        def get_seq_length(self) -> int:
            return tokens

        def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
            return tokens + query_length, 0

        def get_max_length(self) -> int:
            return -1

    return library.Cache(layers=[Layer() for _ in range(layers)])


def graph_step(model: Any, past: Any, batch: int, tokens: int, steps: int) -> float:
    """Return the time in seconds to replay a CUDA graph of a decode step after ``tokens`` tokens, averaged over ``steps`` replays."""
    device = model.device
    token = torch.full((batch, 1), 5, device=device)
    position = torch.full((batch, 1), tokens, device=device)

    keywords = cache_names.cache_argument(model, past)

    def step() -> None:
        model(token, position_ids=position, **keywords, use_cache=True, logits_to_keep=1)

    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    graph.replay()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(steps):
        graph.replay()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / steps
