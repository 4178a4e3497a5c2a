"""Blocks of ggml's q8_0, q5_0 and q4_0, bit for bit. A block contains 32 channels of a cell, as codes and one binary16 number d.

A value is d * (code - 2^(bits - 1)). The codec ``group`` represents it exactly, with a scale of 2 d, a center of -d and a token scale of
1/2: (code - m) * 2 d - d = 2 d * (code - 2^(bits - 1)), where m is (2^bits - 1) / 2. Therefore, the file can also be decoded to values.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from kvpack.cache.packed_runs import PackedRun, PackedRuns
from kvpack.cache.side import Side
from kvpack.formats.columns import default_fields
from kvpack.formats.errors import InvalidParameter, ValueTooLarge
from kvpack.formats.group import Group

from .state_file import BLOCK, QUANTIZED, QuantizedType

_HALF = 0.5
"""The token scale, 1/2."""
_LARGEST = 32752.0
"""Largest d for which 2 d is a finite float16 number."""


def exact_clause(kind: str, sides: str) -> str:
    """Return a recipe clause that stores ``kind`` bit for bit."""
    return f"{sides}=group:b={QUANTIZED[kind].bits},g={BLOCK},axis=channel,token_scale=fp16"


@dataclass(frozen=True, eq=False)
class Quantized:
    """The quantized keys or values of one layer as ``blocks``, uint8 ``[kv_head, token, block, byte]``.

    Raises InvalidParameter if a scale is not finite, and ValueTooLarge if it is too large.
    """

    kind: str
    blocks: torch.Tensor
    where: str

    def __post_init__(self) -> None:
        scale = self._scale.abs()
        if not torch.isfinite(scale).all():
            raise InvalidParameter(f"{self.where}: a scale of {self.kind} is NaN or infinite")
        if (scale > _LARGEST).any():
            raise ValueTooLarge(f"{self.where}: a scale of {self.kind} is {float(scale.max()):g}, but kvpack supports at most {_LARGEST:g}")

    @property
    def shape(self) -> tuple[int, int, int, int]:
        heads, tokens, blocks, _ = self.blocks.shape
        return 1, heads, tokens, blocks * BLOCK

    @cached_property
    def codec(self) -> Group:
        dim, bits = self.shape[3], QUANTIZED[self.kind].bits
        return Group(dim, bits, "channel", BLOCK, "none", 0, "fp16", (("codes", default_fields(dim, (1 << bits,))),))

    @property
    def _scale(self) -> torch.Tensor:
        """The number d of each block, float16 ``[kv_head, token, block]``."""
        return self.blocks[..., :2].contiguous().view(torch.float16)[..., 0]

    def side(self, window: int = 0) -> Side:
        """Return the packed keys or values, bit for bit."""
        heads, tokens, dim = self.shape[1:]
        codes = _unpack_codes(self.blocks[..., 2:], QUANTIZED[self.kind]).flatten(-2)[None]
        scale = self._scale[None]
        streams = {
            **self.codec.pack("codes", codes.to(torch.int32)),
            "scales": torch.stack([2 * scale, -scale], -1),
            "token_scale": torch.full((1, 1, tokens), _HALF, dtype=torch.float16, device="cpu"),
        }
        tail = torch.empty(1, heads, 0, dim, dtype=torch.float32, device="cpu")
        return Side(self.codec, PackedRuns.from_runs([PackedRun(self.codec, tokens, streams)]), tail, window)


def extract_blocks(side: Side, kind: str, where: str) -> torch.Tensor:
    """Return the blocks of a side that ``Quantized.side`` created, uint8 ``[kv_head, token, block, byte]``.

    Raises InvalidParameter if the side was converted to another codec.
    """
    block = QUANTIZED[kind]
    codec, pages = side.codec, side.merged().runs
    if isinstance(codec, Group) and len(pages) == 1 and not side.tail.shape[2]:
        streams = {name: stream.cpu() for name, stream in pages[0].streams.items()}
        same = (codec.bits, codec.axis, codec.size, codec.rotation_kind, codec.token_scale, codec.scale_dtype)
        if same == (block.bits, "channel", BLOCK, "none", "fp16", "fp16") and codec.dim % BLOCK == 0:
            scale, center = streams["scales"][0].unbind(-1)
            if torch.equal(_bit_patterns(scale), _bit_patterns(-2 * center)) and bool((streams["token_scale"] == _HALF).all()):
                (codes,) = codec.digits(streams)
                codes = codes[0].to(torch.uint8).view(*scale.shape, BLOCK)
                return torch.cat([(-center)[..., None].contiguous().view(torch.uint8), _pack_blocks(codes, block)], -1)
    raise InvalidParameter(
        f"{where} was {kind} in llama.cpp and has been converted to the codec {codec.id} since: kvpack writes back only the "
        "blocks that it read, because llama.cpp may have rotated them"
    )


def _bit_patterns(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.int16)


def _unpack_codes(data: torch.Tensor, kind: QuantizedType) -> torch.Tensor:
    """Return the codes ``[..., channel]`` in ``data``, the bytes of blocks after d."""
    if kind.bits == 8:
        return data ^ 0x80
    quarters = data[..., -BLOCK // 2 :]
    codes = torch.cat([quarters & 0xF, quarters >> 4], -1)
    if kind.bits == 4:
        return codes
    place = torch.arange(BLOCK, device="cpu")
    return codes | (data[..., place // 8] >> (place % 8) & 1) << 4


def _pack_blocks(codes: torch.Tensor, kind: QuantizedType) -> torch.Tensor:
    """Pack codes ``[..., channel]`` into the bytes of blocks after d."""
    if kind.bits == 8:
        return codes ^ 0x80
    half = BLOCK // 2
    nibbles = (codes[..., :half] & 0xF) | (codes[..., half:] & 0xF) << 4
    if kind.bits == 4:
        return nibbles
    fifth = (codes >> 4).view(*codes.shape[:-1], BLOCK // 8, 8) << torch.arange(8, dtype=torch.uint8, device="cpu")
    return torch.cat([fifth.sum(-1).to(torch.uint8), nibbles], -1)
