"""Running a codec's encoder over a whole tensor, block by block, into the arrays of its layout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from kvpack.formats.errors import NonFinite, OutOfRange
from kvpack.formats.raw import Raw

from .blocks import for_each_block
from .modes import own_modes

if TYPE_CHECKING:
    from kvpack.formats.base import Codec

TORCH_DTYPES = {"U8": torch.uint8, "U16": torch.uint16, "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
"""torch dtypes by the stored dtypes' names."""

RAW_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""torch dtypes of raw tails by their names in the header."""

BLOCK_VALUES = 1 << 19
"""Values encoded at a time: few enough for the processor's cache, enough to hide the cost of a call."""

_GROUP_MULTIPLE = 128


class Progress(Protocol):
    """Called with the work done and the work in all, both in the same unit."""

    def __call__(self, done: int, total: int) -> None: ...


def encode(codec: Codec, x: torch.Tensor, where: str) -> dict[str, torch.Tensor]:
    """Encode ``x`` ``[batch, kv_head, token, dim]`` of any float dtype to the streams of ``codec.layout``.

    Raises NonFinite for NaN or infinity (raw keeps them), OutOfRange for a norm that its width cannot hold; both name ``where``.
    """
    batch, heads, tokens, _ = x.shape
    layout = codec.layout(batch, heads, tokens)
    row = max(1, batch * heads * codec.dim)
    size = max(_GROUP_MULTIPLE, BLOCK_VALUES // row // _GROUP_MULTIPLE * _GROUP_MULTIPLE)
    if codec.id == "raw":
        # One copy without temporaries.
        size = max(1, tokens)

    def encode_block(start: int, stop: int) -> None:
        part = x[:, :, start:stop]
        if codec.id != "raw":
            part = part.to(torch.float32)
            check_finite(part, start, where)
        try:
            encoded = codec.encode(part)
        except OutOfRange as error:
            raise OutOfRange(f"{where}, tokens {start} to {stop}: {error}") from None
        for name, entry in layout.items():
            step = entry.tokens_per_row
            streams[name][:, :, start // step : -(-stop // step)] = encoded[name]

    with own_modes(x.device):
        streams = {name: torch.empty(entry.shape, dtype=TORCH_DTYPES[entry.dtype], device=x.device) for name, entry in layout.items()}
        codec.expect(x)
        for_each_block(encode_block, [(start, min(start + size, tokens)) for start in range(0, tokens, size)], x.device)
    return streams


def raw_values(x: torch.Tensor, dtype: torch.dtype, where: str) -> torch.Tensor:
    """``x`` in the ``dtype`` of a raw tail. Raises OutOfRange, naming ``where``, for a finite value that would become infinity."""
    if x.dtype == dtype:
        return x
    name = next(name for name, known in RAW_DTYPES.items() if known == dtype)
    try:
        return Raw(x.shape[-1], name).encode(x)["values"]
    except OutOfRange as error:
        raise OutOfRange(f"{where}: {error}") from None


def check_finite(x: torch.Tensor, first: int, where: str) -> None:
    """Raise NonFinite, naming ``where``, the place and the value, unless ``x``, whose tokens count from ``first``, is finite."""
    # The sum is one cheap pass; only when it is not finite (it may merely overflow) is every value looked at.
    if torch.isfinite(x.sum()) or torch.isfinite(x).all():
        return
    batch, head, token, channel = torch.nonzero(~torch.isfinite(x))[0].tolist()
    value = x[batch, head, token, channel].item()
    raise NonFinite(
        f"{where}: the value at batch {batch}, head {head}, token {first + token}, channel {channel} is {value}; "
        "lossy codecs take finite values only (the raw codec keeps any)"
    )
