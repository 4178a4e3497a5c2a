"""Sides of random codes, and a comparison of the kernels with exact attention over them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from kvpack.cache.layer import Layer
from kvpack.cache.packed_runs import PackedRun, PackedRuns
from kvpack.cache.side import Side
from kvpack.coding.encoding import TORCH_DTYPES
from kvpack.coding.recipes import parse_recipe
from kvpack.formats.key_mean import KeyMean
from kvpack.formats.klt import Klt
from kvpack.formats.outliers import Outliers
from kvpack.formats.qjl import Qjl
from kvpack.formats.sidecars import CodecWithSidecars
from kvpack.formats.token_norms import LOG8, encode_norms
from support.interpreter import DEVICE
from support.kernel_calls import attend_by
from support.minifloat_digits import block_scales, largest_product, make_finite

if TYPE_CHECKING:
    from kvpack.formats.base import Codec


TOLERANCE = 2e-3
"""Relative tolerance in the 2-norm, for products of binary16 values and binary32 sums."""


def codecs(k: str, v: str, dims: tuple[int, int]) -> tuple[Codec, Codec]:
    recipe = parse_recipe(f"k={k};v={v}")
    return recipe.codec(0, 1, "k", dims[0]), recipe.codec(0, 1, "v", dims[1])


def random_page(codec: Codec, batch: int, heads: int, tokens: int, seed: int) -> PackedRun:
    """Return a page of random digits with ordinary norms and scales, some of which are zero or negative."""
    generator = torch.Generator().manual_seed(seed)
    if isinstance(codec, CodecWithSidecars):
        page = random_page(codec.codec, batch, heads, tokens, seed)
        return replace(page, codec=codec, streams={**page.streams, **random_sidecars(codec, batch, heads, tokens, generator)})
    digits = []
    for packing in codec.packings().values():
        for alphabet in packing.alphabets:
            digits.append(make_finite(codec, torch.randint(0, alphabet, (batch, heads, tokens, packing.symbols), generator=generator)))
    if codec.id == "octahedral":
        triplets = -(-codec.dim // 3)
        for digit in digits:
            digit[..., triplets:] = 0
    streams = {}
    given = iter(digits)
    for name, packing in codec.packings().items():
        streams |= codec.pack(name, *(next(given) for _ in packing.bases))
    for name, layout in codec.scale_layouts(batch, heads, tokens).items():
        values = torch.rand(layout.shape, generator=generator) + 0.25
        if name == "block_scales":
            values = block_scales(codec, 255 * values.clamp_max(1), 8, 127 - int(math.log2(largest_product(codec))))
        elif name in ("norm", "scale", "token_scale") and layout.per == "token":
            which = torch.rand(layout.shape, generator=generator)
            values = torch.where(which < 0.1, 0.0, torch.where(which < 0.2, -values, values))
            values *= 1 if name == "token_scale" else codec.dim**0.5
        elif name == "scales":
            values[..., 0] *= 4 / 2 ** getattr(codec, "bits", 1)
            values[..., 1] -= 0.75
        elif name == "range":
            values[..., 0] *= 2.0 ** -getattr(codec, "norm_bits", 1)
            values[..., 1] -= 0.75
        elif name == "values":
            values = torch.randn(layout.shape, generator=generator)
        elif isinstance(codec, Klt) and name == "codes":
            values = torch.randint(0, 256, layout.shape, generator=generator) & torch.tensor(codec.code_bit_masks)
        if name in ("scale", "global_scale"):
            values = values * (1 / largest_product(codec) if codec.id == "minifloat" else 1)
        if name == "norm" and layout.dtype == "U8":
            # Bytes are unsigned.
            streams[name] = encode_norms(values.abs(), LOG8, name)
            continue
        streams[name] = values.to(TORCH_DTYPES[layout.dtype])
    return PackedRun(codec, tokens, streams)


def random_sidecars(codec: CodecWithSidecars, batch: int, heads: int, tokens: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Return random key means, outlier chunks and qjl signs. Some of their norms are zero or negative."""
    streams = {}
    if key_mean := codec.sidecar(KeyMean):
        streams = key_mean.encode_means(2 * torch.randn(batch, heads, -(-tokens // key_mean.tokens), codec.dim, generator=generator))
    if outliers := codec.sidecar(Outliers):
        flags = torch.rand(batch, heads, tokens, codec.dim // 4, generator=generator) < 0.05
        # Include tokens without outliers, with some, and with only outliers.
        flags &= torch.rand(batch, heads, tokens, 1, generator=generator) < 0.7
        flags |= torch.rand(batch, heads, tokens, 1, generator=generator) < 0.02
        streams |= {f"outlier_flags.{plane}": words for plane, words in enumerate(outliers.packing.pack([flags.to(torch.int32)]))}
        streams["outliers"] = (4 * torch.randn(1, 1, int(flags.sum()), 4, generator=generator)).to(torch.float16)
    if qjl := codec.sidecar(Qjl):
        signs = torch.randint(0, 2, (batch, heads, tokens, codec.dim), generator=generator)
        streams |= {f"qjl_signs.{plane}": words for plane, words in enumerate(qjl.packing.pack([signs]))}
        norms = codec.dim**0.5 * torch.randn(batch, heads, tokens, generator=generator)
        streams["qjl_norm"] = norms.masked_fill(torch.rand(norms.shape, generator=generator) < 0.1, 0.0).to(
            TORCH_DTYPES[qjl.layout(1, 1, 0)["qjl_norm"].dtype]
        )
    return streams


def random_side(codec: Codec, heads: int, runs: tuple[int, ...], tail: int, seed: int, batch: int = 1) -> Side:
    pages = tuple(random_page(codec, batch, heads, tokens, seed + number) for number, tokens in enumerate(runs))
    rows = torch.randn(batch, heads, tail, codec.dim, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)
    return Side(codec, PackedRuns.from_runs(pages), rows)


def exact_attention(q: torch.Tensor, layer: Layer, *, scale: float | None = None, causal: bool = True, **mode: Any) -> torch.Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1).to(torch.float64) for x in layer.unpack(torch.float32) if x is not None)
    scores = q.to(torch.float64) @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap := mode.get("softcap"):
        scores = torch.tanh(scores / softcap) * softcap
    tokens, position = torch.arange(k.shape[2]), k.shape[2] - q.shape[2] + torch.arange(q.shape[2])[:, None]
    hidden = (tokens > position) & causal
    if (lengths := mode.get("lengths")) is not None:
        position = position - k.shape[2] + torch.tensor(lengths)[:, None, None, None]
        hidden = (tokens >= torch.tensor(lengths)[:, None, None, None]) | ((tokens > position) & causal)
    if (starts := mode.get("starts")) is not None:
        hidden = hidden | (tokens < torch.tensor(starts)[:, None, None, None])
    if window := mode.get("sliding_window"):
        hidden = hidden | (tokens <= position - window)
    scores = scores.masked_fill(hidden, -torch.inf)
    if (logits := mode.get("sink_logits")) is not None:
        scores = torch.cat([scores, torch.tensor(logits, dtype=torch.float64)[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    return torch.softmax(scores, -1).nan_to_num(0)[..., : k.shape[2]] @ v


def check_attention(layer: Layer, q_heads: int, q_len: int = 1, dtype: torch.dtype = torch.float32, **mode: Any) -> None:
    """Check that the kernels, not torch operations, compute attention over the layer on the device, within the tolerance."""
    from kvpack.kernels.attend import attention

    assert layer.k is not None
    q = torch.randn(layer.k.batch, q_heads, q_len, layer.k.dim, generator=torch.Generator().manual_seed(7)).to(dtype)
    expected = exact_attention(q, layer, **mode)
    there = Layer(*(side.to(DEVICE) for side in layer.sides.values()))
    assert attention.supports(q.to(DEVICE), there)
    scale = mode.get("scale", layer.k.dim**-0.5)
    logits, lengths, starts = mode.get("sink_logits"), mode.get("lengths"), mode.get("starts")
    found = attend_by(
        attention,
        q.to(DEVICE),
        there,
        scale,
        mode.get("causal", True),
        mode.get("softcap"),
        mode.get("sliding_window"),
        None if logits is None else torch.tensor(logits),
        None if lengths is None else torch.tensor(lengths),
        None if starts is None else torch.tensor(starts),
    )
    assert found.dtype == dtype
    error = (found.cpu().to(torch.float64) - expected).norm() / expected.norm()
    assert error < (TOLERANCE if dtype == torch.float32 else 6e-3), (layer, error)
