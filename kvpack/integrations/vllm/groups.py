"""The groups of vLLM's cache layers as pages: attention and MLA are packed, and everything else is kept byte for byte."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvpack.coding.recipes import Recipe
from kvpack.formats.errors import InvalidParameter
from kvpack.integrations.recipes import check_layer_names, check_layers
from kvpack.pages.buffer import PageBuffer
from kvpack.pages.geometry import DTYPES, PageGeometry

from .layouts import arrangement

FLOATS = {DTYPES[name]: name for name in ("bf16", "fp16", "fp32")}
"""kvpack's names of the dtypes that are packed. 8-bit values are not packed, because they depend on scales outside the pages."""

GROUPS, BLOCK_OFFSETS = "kvpack_groups", "kvpack_places"
"""Keys under which the connector stores the model's cache groups, and the result of ``block_offsets``, in the spec's configuration."""


@dataclass(frozen=True)
class Group:
    """A group of ``layers`` cache layers. A block of each layer takes ``page_bytes`` bytes, excluding padding.

    ``kind`` is "attention" (``heads`` heads with keys and values of ``dim`` channels), "latents" (MLA: ``dim`` latent channels and
    ``rotary_dim`` RoPE channels per token) or "bytes" (kept unchanged).
    """

    layers: int
    tokens: int
    page_bytes: int
    kind: str = "bytes"
    heads: int = 1
    dim: int = 0
    rotary_dim: int = 0
    dtype: str = "u8"

    @property
    def geometry(self) -> PageGeometry:
        """Geometry of a page, which consists of one block of every layer."""
        if self.kind == "attention":
            return PageGeometry(self.layers, self.heads, self.tokens, self.dim, self.dim, self.dtype)
        if self.kind == "latents":
            return PageGeometry(self.layers, 1, self.tokens, self.dim, self.rotary_dim, self.dtype)
        return PageGeometry.of_bytes(self.page_bytes, self.layers)

    def page_recipe(self, recipe: str) -> str:
        """Return the recipe for the group's pages, derived from ``recipe``. RoPE channels are kept unchanged."""
        return {"attention": recipe, "latents": f"{recipe};v=raw"}.get(self.kind, "raw")

    def buffer(self, layout: str, layers: Sequence[torch.Tensor]) -> PageBuffer:
        """Return a buffer whose slots are the blocks of ``layers``, each int8 ``[block, byte]``."""
        geometry = self.geometry
        views = [layer[:, : self.page_bytes].view(geometry.torch_dtype) for layer in layers]
        if self.kind == "attention":
            places = tuple(arrangement(layout, self.heads, self.tokens, self.dim))
        elif self.kind == "latents":
            row = self.dim + self.rotary_dim
            places = (0, (row, row, 1)), (self.dim, (row, row, 1))
        else:
            places = ((0, (self.page_bytes, geometry.dim_k, 1)),)
        sides = [
            [
                view.as_strided(
                    (view.shape[0], geometry.heads, geometry.tokens, dim), (view.stride(0), *strides), view.storage_offset() + first
                )
                for view in views
            ]
            for (first, strides), dim in zip(places, geometry.dims.values(), strict=True)
        ]
        return PageBuffer(geometry, *sides)


def offloaded_groups(vllm_config: Any, kv_cache_config: Any) -> list[Group]:
    """Return the groups that vLLM offloads, in vLLM's order. Raises InvalidParameter if the layers of a group have different sizes."""
    return [_describe_group(vllm_config, group) for group in _offloaded(kv_cache_config)]


def check_groups(recipe: Recipe, groups: Sequence[Group], names: Sequence[str]) -> None:
    """Raise InvalidParameter if ``groups`` do not support the recipe. ``names`` are the layers of the first group."""
    if len(groups) > 1:
        check_layers(recipe.text, "the model has several groups of cache layers, each with its own layer numbers")
    elif recipe.basis is not None and groups[0].kind != "attention":
        check_layers(recipe.text, "vLLM's cache has no keys and values per head to pack")
    check_layer_names(recipe.text, names)


def require_layout(groups: Sequence[Group], layout: str) -> None:
    """Raise InvalidParameter if a group needs a layout and ``layout`` is empty."""
    if not layout and any(group.kind == "attention" for group in groups):
        raise InvalidParameter(
            "layout is missing from kv_connector_extra_config: set it to adjacent, adjacent-tokens-first, split or cpu-vec"
        )


def block_offsets(kv_cache_config: Any) -> list[list[int]]:
    """Return the offsets in bytes of each offloaded group's blocks in vLLM's primary tier. A group has one offset per layer.

    An offset is counted from the beginning of a worker's part of a chunk. Layers of different groups that share device memory also share an
    offset, because each block belongs to only one group. Offsets are in the order in which the groups' layers first refer to their memory.
    If the blocks of all layers are one piece of memory, the tier copies them at once.
    """
    placed = {
        layer: (tensor.offset + number * tensor.layer_stride, tensor.block_stride)
        for tensor in kv_cache_config.kv_cache_tensors
        for number, layer in enumerate(tensor.layers)
    }
    groups = [
        [(placed[name], page) for name, page in _page_bytes(group).items() if name in placed] for group in _offloaded(kv_cache_config)
    ]
    if any(stride != page for layers in groups for (_, stride), page in layers):
        return [[address for (address, _), _ in layers] for layers in groups]
    places: dict[int, int] = {}
    end = 0
    for (address, _), page in (layer for layers in groups for layer in layers):
        if address not in places:
            places[address] = end
            end += page
    return [[places[address] for (address, _), _ in layers] for layers in groups]


def _page_bytes(group: Any) -> dict[str, int]:
    """Return the size in bytes, with padding, of a block of each layer in vLLM's group ``group``, by layer name."""
    spec = group.kv_cache_spec
    layer_specs = getattr(spec, "kv_cache_specs", {})
    return {name: layer_specs.get(name, spec).page_size_bytes for name in group.layer_names}


def check_blocks(groups: Sequence[Group], layout: str, kv_cache_config: Any, kv_caches: Mapping[str, torch.Tensor]) -> None:
    """Raise InvalidParameter unless the blocks of the layers' tensors have the ``layout``.

    ``kv_caches`` maps layer names to vLLM's tensors. Their axes are ``[block, head, token, channel]``, with the channels of V after those
    of K, or ``[block, K or V, token, head, channel]``. If attention uses smaller blocks than the cache, tensors have the strides of these.
    """
    for group, kept in zip(groups, _offloaded(kv_cache_config), strict=True):
        if group.kind != "attention":
            continue
        heads, tokens, dim, row = group.heads, group.tokens, group.dim, 2 * group.dim
        shape: tuple[int, ...] = (heads, tokens, row)
        strides: tuple[int, ...] = (tokens * row, row, 1)
        if layout == "adjacent-tokens-first":
            strides = (row, heads * row, 1)
        elif layout == "split":
            shape, strides = (2, tokens, heads, dim), (tokens * heads * dim, heads * dim, dim, 1)
        for name in kept.layer_names:
            block_shape, steps = tuple(kv_caches[name].shape[1:]), kv_caches[name].stride()[1:]
            if block_shape != shape or any(
                size > 1 and step != expected for size, step, expected in zip(shape, steps, strides, strict=True)
            ):
                raise InvalidParameter(
                    f"{name}: its tensor has blocks {list(block_shape)} with strides {list(steps)}, but pages of {tokens} tokens in the "
                    f"layout {layout!r} have {list(shape)} with {list(strides)}: set another layout, or a block_size that vLLM's "
                    "attention does not split into smaller blocks"
                )


def _offloaded(kv_cache_config: Any) -> list[Any]:
    """Return the groups that vLLM offloads, as vLLM's own objects in vLLM's order."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import get_offloading_group_ids

    return [kv_cache_config.kv_cache_groups[number] for number in get_offloading_group_ids(kv_cache_config)]


def _describe_group(vllm_config: Any, group: Any) -> Group:
    from vllm.v1.kv_cache_interface import (
        AttentionSpec,
        ChunkedLocalAttentionSpec,
        FullAttentionSpec,
        MambaSpec,
        MLAAttentionSpec,
        SlidingWindowMLASpec,
        SlidingWindowSpec,
        UniformTypeKVCacheSpecs,
    )

    spec, layers = group.kv_cache_spec, len(group.layer_names)
    if isinstance(spec, UniformTypeKVCacheSpecs):
        # Compare shapes too: blocks of the same size may have other heads, and all layers of a group are packed as the same shape.
        shape = ("page_size_bytes", "num_kv_heads", "head_size", "head_size_v", "dtype")
        result = {
            (type(layer_spec), *(getattr(layer_spec, name, None) for name in shape)): layer_spec
            for layer_spec in spec.kv_cache_specs.values()
        }
        if len(result) != 1:
            raise InvalidParameter(
                f"the layers {', '.join(group.layer_names)} form one group with {len(result)} block shapes, but a row can have only one: "
                "use vLLM's TieringOffloadingSpec"
            )
        (spec,) = result.values()
    if isinstance(spec, MambaSpec):
        return Group(layers, spec.block_size, spec.real_page_size_bytes)
    if not isinstance(spec, AttentionSpec):
        raise InvalidParameter(
            f"the layers {', '.join(group.layer_names)} have a {type(spec).__name__}, which kvpack does not support: "
            "use vLLM's TieringOffloadingSpec"
        )
    raw = Group(layers, spec.block_size, spec.unpadded_page_size_bytes)
    dtype = FLOATS.get(spec.dtype)
    latents = isinstance(spec, MLAAttentionSpec | SlidingWindowMLASpec)
    plain = isinstance(spec, FullAttentionSpec | SlidingWindowSpec | ChunkedLocalAttentionSpec)
    if dtype is None or not plain or spec.tokens_per_state != 1:
        return raw
    size, cells = spec.dtype.itemsize, spec.block_size * spec.num_kv_heads
    if latents:
        rotary_dim = getattr(vllm_config.model_config.hf_text_config, "qk_rope_head_dim", 0)
        if not 0 < rotary_dim < spec.head_size or raw.page_bytes != cells * spec.head_size * size or spec.num_kv_heads != 1:
            return raw
        return Group(layers, spec.block_size, raw.page_bytes, "latents", 1, spec.head_size - rotary_dim, rotary_dim, dtype)
    if spec.head_size_v != spec.head_size or raw.page_bytes != 2 * cells * spec.head_size * size:
        return raw
    return Group(layers, spec.block_size, raw.page_bytes, "attention", spec.num_kv_heads, spec.head_size, 0, dtype)
