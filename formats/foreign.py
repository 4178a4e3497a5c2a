"""Checks of codecs that are not part of kvpack, whose mistakes would otherwise be found only when a file is read.

The encoders of kvpack's own codecs are tested instead, which costs users nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .errors import InvalidParameter, InvalidPayload
from .lazy import torch
from .parameter_checks import check_choice
from .runs import Run, RunEncoder
from .streams import Layout

_TORCH_NAMES = {"U8": "uint8", "U16": "uint16", "F16": "float16", "BF16": "bfloat16", "F32": "float32"}


def is_foreign(codec: Any) -> bool:
    """Return True if ``codec`` is not part of kvpack."""
    return not type(codec).__module__.startswith("kvpack.")


def begin_run(codec: Any, run: Run, previous: Mapping[str, torch.Tensor] | None) -> RunEncoder:
    """Return ``codec.begin(run, previous)`` for a codec without sidecars. If the codec is foreign, its results are checked.

    The checks raise InvalidParameter for invalid streams, and for decoded values of the wrong dtype or shape.
    """
    encoder: RunEncoder = codec.begin(run, previous)
    if not is_foreign(codec):
        return encoder

    def encode(block: torch.Tensor, start: int) -> dict[str, torch.Tensor]:
        streams = encoder.encode(block, start) or {}
        given = {**encoder.streams, **streams}
        _check_streams(codec, given, block.shape)
        if not start:
            # The last group of tokens may be padded.
            tokens = block.shape[2] if codec.group_tokens == 1 else "token"
            check_decoded(codec, codec.decode_frame(given), (*block.shape[:2], tokens))
        return streams

    return RunEncoder(encoder.streams, encode)


def check_layouts(codec: Any, layouts: Mapping[str, Layout]) -> None:
    """Raise InvalidParameter if a stream has an unknown dtype or wrong axes. ``layouts`` are for 1 sequence, 1 head and 0 tokens."""
    for name, layout in layouts.items():
        where = f"stream {name!r} in scale_layouts"
        check_choice(codec.id, f"the dtype of {where}", layout.dtype, tuple(_TORCH_NAMES))
        shape = list(layout.shape)
        if len(shape) < 3 or shape[:2] != [1, 1] or (layout.per == "token" and shape[2]):
            raise InvalidParameter(
                f"codec {codec.id}: the shape of {where} is {shape} for batch 1, heads 1 and tokens 0, but its axes must be batch (or 1), "
                "heads (or 1), tokens, and any others: write Layout(dtype, (batch, heads, tokens, ...))"
            )


def check_digits(codec: Any, stream: str, digits: Sequence[torch.Tensor]) -> None:
    """Raise InvalidParameter if ``digits`` cannot be packed into the code stream ``stream``."""
    where, packing = f"codec {codec.id}: encode packs", codec.packings().get(stream)
    if packing is None:
        raise InvalidParameter(f"{where} stream {stream!r}, which is missing from packings: add it to packings")
    shapes, expected = [list(digit.shape) for digit in digits], [packing.symbols] * len(packing.bases)
    if [shape[-1] for shape in shapes] != expected:
        raise InvalidParameter(
            f"{where} digits of shapes {shapes} into stream {stream!r}, but their last axes must have the sizes {expected}: reshape the "
            "digits, or change packings"
        )
    for digit, alphabet in zip(digits, packing.alphabets, strict=True):
        values = digit.to(torch.float64)
        if values.numel() and not (values.amin() >= 0 and values.amax() < alphabet and not values.frac().any()):
            raise InvalidParameter(
                f"{where} digits from {values.amin().item():g} to {values.amax().item():g} into stream {stream!r}, expected integers from "
                f"0 to {alphabet - 1}: round or clamp the digits, or change packings"
            )


def check_decoded(codec: Any, values: torch.Tensor, shape: Sequence[int | str] = ("batch", "kv_head", "token")) -> None:
    """Raise InvalidParameter unless decoded ``values`` are float32 ``[*shape, dim]``. An axis that is given by name may have any size."""
    for axes in dict.fromkeys((("batch", "kv_head", "token"), tuple(shape))):
        expected = [*axes, codec.dim]
        sizes = [size if isinstance(axis, int) else axis for size, axis in zip(values.shape, expected, strict=False)]
        if values.dtype != torch.float32 or values.dim() != 4 or sizes != expected:
            given = f"{str(values.dtype).removeprefix('torch.')} {list(values.shape)}"
            text = f"float32 [{', '.join(map(str, expected))}]"
            raise InvalidParameter(f"codec {codec.id}: decode_digits returns {given}, expected {text}: change decode_digits")


def _check_streams(codec: Any, streams: Mapping[str, torch.Tensor], shape: Sequence[int]) -> None:
    """Raise InvalidParameter if encoded ``streams`` do not match the codec's layout, or if readers would reject them.

    ``shape`` is the shape of the encoded values.
    """
    layout = codec.layout(*shape[:3])
    for name in {**layout, **streams}:
        entry, stream = layout.get(name), streams.get(name)
        sizes = [] if entry is None else list(entry.shape)
        if entry and entry.per == "entry" and stream is not None:
            # The number of entries depends on the values.
            sizes[2:3] = stream.shape[2:3]
        expected = f"{_TORCH_NAMES[entry.dtype]} {sizes}" if entry else f"only {', '.join(layout)}"
        given = "missing" if stream is None else f"{str(stream.dtype).removeprefix('torch.')} {list(stream.shape)}"
        if given != expected:
            raise InvalidParameter(
                f"codec {codec.id}: encode's stream {name!r} is {given}, expected {expected}: change encode, or scale_layouts and packings"
            )
    try:
        # NumPy lacks bfloat16.
        words = {name: x.view(torch.uint16) if x.dtype == torch.bfloat16 else x for name, x in streams.items()}
        codec.check({name: x.detach().cpu().numpy() for name, x in words.items()}, "encode")
    except InvalidPayload as error:
        raise InvalidParameter(f"codec {codec.id}: readers would reject the streams that encode returns: {error}") from None
