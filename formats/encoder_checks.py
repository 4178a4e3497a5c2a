"""Checks of the encoders of codecs from outside kvpack. A mistake in one would otherwise show only when a file is read, or never."""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING

from .base import Codec, RunEncoder
from .errors import InvalidParameter, InvalidPayload
from .lazy import torch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .base import PlainCodec, Run

_TORCH_NAMES = {"U8": "uint8", "U16": "uint16", "F16": "float16", "BF16": "bfloat16", "F32": "float32"}


def check_encoder(codec_class: type[PlainCodec]) -> None:
    """Make the encoder of ``codec_class`` raise InvalidParameter for digits and streams that the codec's layout rules out."""
    pack, encode, begin = codec_class.pack, codec_class.encode, codec_class.begin

    @wraps(pack)
    def checked_pack(self: Codec, stream: str, *digits: torch.Tensor) -> dict[str, torch.Tensor]:
        _check_digits(self, stream, digits)
        return pack(self, stream, *digits)

    # A subclass may extend an encoder, and its layout describes only the final result.
    @wraps(encode)
    def checked_encode(self: PlainCodec, x: torch.Tensor) -> dict[str, torch.Tensor]:
        streams = encode(self, x)
        if type(self).encode is checked_encode and type(self).begin is Codec.begin:
            _check_streams(self, streams, x.shape)
        return streams

    @wraps(begin)
    def checked_begin(self: PlainCodec, run: Run, before: Mapping[str, torch.Tensor] | None) -> RunEncoder:
        encoder = begin(self, run, before)
        if type(self).begin is not checked_begin:
            return encoder

        def encode_block(block: torch.Tensor, start: int) -> dict[str, torch.Tensor]:
            streams = encoder.encode(block, start)
            _check_streams(self, {**encoder.streams, **streams}, block.shape)
            return streams

        return RunEncoder(encoder.streams, encode_block)

    codec_class.pack, codec_class.encode = checked_pack, checked_encode  # type: ignore[assignment, method-assign]
    if begin is not Codec.begin:
        codec_class.begin = checked_begin  # type: ignore[assignment, method-assign]


def _check_digits(codec: Codec, stream: str, digits: Sequence[torch.Tensor]) -> None:
    packing = codec.packings().get(stream)
    if packing is None or len(digits) != len(packing.bases):
        expected = {name: len(one.bases) for name, one in codec.packings().items()}
        raise InvalidParameter(
            f"codec {codec.id}: encode packs {len(digits)} digits as stream {stream!r}, but packings declares {expected} (digits by stream)"
        )
    for digit, alphabet in zip(digits, packing.alphabets, strict=True):
        if digit.shape[-1] != packing.symbols:
            raise InvalidParameter(
                f"codec {codec.id}: encode packs digits of shape {list(digit.shape)} as stream {stream!r}, expected a last axis of "
                f"{packing.symbols} symbols: reshape them, or change packings"
            )
        values = digit.to(torch.float64)
        if values.numel() and not (values.amin() >= 0 and values.amax() < alphabet and not values.frac().any()):
            raise InvalidParameter(
                f"codec {codec.id}: encode packs digits from {values.amin().item():g} to {values.amax().item():g} as stream {stream!r}, "
                f"expected integers from 0 to {alphabet - 1}: shift, round or clamp them, or change the alphabet in packings"
            )


def _check_streams(codec: Codec, streams: Mapping[str, torch.Tensor], shape: Sequence[int]) -> None:
    """Check that ``streams``, encoded from values of ``shape``, are those of the codec's layout and that a reader accepts them."""
    layout = codec.layout(*shape[:3])
    for name in {**layout, **streams}:
        entry, stream = layout.get(name), streams.get(name)
        if stream is not None:
            dtype, sizes = str(stream.dtype).removeprefix("torch."), list(stream.shape)
        if entry is None:
            fault = f"is {dtype} {sizes}, but the layout has only {', '.join(layout)}: add it to scales, or do not return it"
        else:
            expected = list(entry.shape)
            if entry.per == "entry" and stream is not None and stream.dim() > 2:
                # The number of entries depends on the values.
                expected[2] = sizes[2]
            if stream is not None and (dtype, sizes) == (_TORCH_NAMES[entry.dtype], expected):
                continue
            given = "missing" if stream is None else f"{dtype} {sizes}"
            fault = f"is {given}, expected {_TORCH_NAMES[entry.dtype]} {expected}: return it so, or change scales and packings"
        raise InvalidParameter(f"codec {codec.id}: encode's stream {name!r} {fault}")
    try:
        # NumPy lacks bfloat16.
        words = {name: x.view(torch.uint16) if x.dtype == torch.bfloat16 else x for name, x in streams.items()}
        codec.check({name: x.detach().cpu().numpy() for name, x in words.items()}, "encode")
    except InvalidPayload as error:
        raise InvalidParameter(f"codec {codec.id}: readers would refuse what encode returns: {error}") from None
