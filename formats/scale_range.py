"""8-bit scales and centers, with codes that are linear in the square root (spec/codecs/group.md, Scales of 8 bits).

Each head and run has its own range of codes. Equal steps of the root are finer for small values, so outlier channels of a head cost the
groups of ordinary channels little precision.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .errors import InvalidPayload, ValueTooLarge
from .lazy import numpy, torch
from .value_blocks import first_index, row_blocks

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from .value_blocks import Array

SCALE, CENTER = 0, 1
"""Indices of the scale and the center in a pair. A range has the same order: for each, the step and the minimum of the square root."""

MAX_ENCODED = 255.0**2
"""Largest scale or center that is encoded. Even if the range is rounded up, decoded values stay below the largest float16."""

_STEPS = 255
_HALF_LIMIT = 65520.0
_HEADROOM = 1 / 8
_GROWTH = 1 / 2
_MIN_SIZE_FACTOR = 0.13
"""Size of normally distributed values, relative to a range's resolution, at which the measured error is twice the typical error."""


def decode_pairs(codes: torch.Tensor, scale_range: torch.Tensor) -> torch.Tensor:
    """Decode ``codes``, uint8 ``[batch, kv_head, row, group, 2]``, to float16 pairs of scale and center.

    ``scale_range`` is the range of the run, float16 ``[batch, kv_head, 1, 4]``.
    """
    return torch.stack([_decode_values(codes[..., member], scale_range, member) for member in (SCALE, CENTER)], -1).to(torch.float16)


def encode_nearest(values: torch.Tensor, scale_range: torch.Tensor, member: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode scales or centers ``[batch, kv_head, row, group]``. Returns the nearest uint8 codes, and their decoded values in float32.

    ``member`` is ``SCALE`` or ``CENTER``.
    """
    step, minimum = _step_and_minimum(scale_range, member)
    codes = ((_signed_root(values) - minimum) / torch.where(step > 0, step, torch.inf)).round_().clamp_(0, _STEPS).to(torch.uint8)
    return codes, _decode_values(codes, scale_range, member).to(torch.float16).to(torch.float32)


def _decode_values(codes: torch.Tensor, scale_range: torch.Tensor, member: int) -> torch.Tensor:
    step, minimum = _step_and_minimum(scale_range, member)
    # The product has at most 19 bits, so the sum is rounded once with or without FMA.
    root = torch.addcmul(minimum, step, codes.to(torch.float32))
    return root * root.abs()


def _step_and_minimum(scale_range: torch.Tensor, member: int) -> tuple[torch.Tensor, torch.Tensor]:
    step, minimum = scale_range[..., 2 * member : 2 * member + 2, None].to(torch.float32).unbind(-2)
    return step, minimum


def _signed_root(values: torch.Tensor) -> torch.Tensor:
    return values.sign() * values.abs().sqrt()


def choose_range(
    blocks: Iterable[tuple[torch.Tensor, torch.Tensor]], previous: torch.Tensor | None, empty: torch.Tensor, middle: float
) -> torch.Tensor:
    """Choose the range for a run from the scales and centers of its ``blocks``, each ``[batch, kv_head, row, group]``.

    ``previous`` is the range of the preceding run. It is kept if all values fit, so that the runs can be joined. Otherwise, the new range
    has room to grow, so that repeated appends seldom need another one. ``empty`` is returned if there are no values. ``middle`` is half the
    width of a group, in multiples of its scale. Raises ValueTooLarge for a value above ``MAX_ENCODED``, with its position.
    """
    ends: list[torch.Tensor] = []
    for scale, center in blocks:
        for values, what in ((scale, "scale"), (center, "center")):
            _check_size(values, what)
        ends.append(torch.stack([torch.stack(_signed_root(values).flatten(2).aminmax(dim=2), -1) for values in (scale, center)], -2))
    if not ends:
        return empty
    # [batch, kv_head, 1, member]
    low = torch.stack([end[..., 0] for end in ends]).amin(0)[:, :, None]
    high = torch.stack([end[..., 1] for end in ends]).amax(0)[:, :, None]
    # Start the range at zero: this halves the precision, which is ample, but any smaller group appended later fits.
    low[..., SCALE] = 0
    wider = _HEADROOM
    if previous is not None:
        step, first = (previous[..., number::2].to(torch.float32) for number in (0, 1))
        last = first + _STEPS * step
        if ((low >= first - step / 2) & (high <= last + step / 2)).all():
            return previous
        low, high, wider = low.minimum(first), high.maximum(last), _GROWTH
    limit = MAX_ENCODED**0.5
    span = high - low
    lowest = torch.tensor([0.0, -limit], dtype=torch.float32, device=low.device)
    low, high = (low - wider * span).maximum(lowest), (high + wider * span).clamp_max(limit)
    # The stored center is off by up to half a step plus the rounding of the range, so the group extends further from it.
    root = torch.maximum(low.abs(), high.abs())[..., CENTER]
    off = (high - low)[..., CENTER] / (2 * _STEPS) + root * 2.0**-10
    high[..., SCALE] = (high[..., SCALE].square() + (2 * root + off) * off / middle).sqrt().clamp_max(limit)
    return torch.stack([(high - low) / _STEPS, low], -1).flatten(-2).to(torch.float16)


def min_token_rms(scale_range: torch.Tensor, steps: int) -> torch.Tensor:
    """Return the smallest root mean square of a token's values that a range still encodes accurately: float32 ``[batch, kv_head, 1]``.

    ``steps`` is the number of steps of a group's scale from its lowest to its highest code. For smaller values, the error of the center
    exceeds the error of the scale.
    """
    step = scale_range[..., 0::2].to(torch.float32).amax(-1)
    return (step * steps).square() * _MIN_SIZE_FACTOR


def _check_size(values: torch.Tensor, name: str) -> None:
    if not values.abs().amax().item() <= MAX_ENCODED:
        at = [int(i) for i in torch.nonzero(~(values.abs() <= MAX_ENCODED))[0]]
        raise ValueTooLarge(
            f"{name} of a group at {at} is {values[tuple(at)].item():.6g}, but the largest that fits in 8 bits is {MAX_ENCODED:.0f}: "
            "scale the input, or choose fp16 scales or a raw codec"
        )


def check(arrays: Mapping[str, Array], where: str) -> None:
    """Raise InvalidPayload if a code of a range ``[batch, kv_head, run, 4]`` decodes to infinity in float16."""
    where, scale_range = f"{where}.scale_range", arrays["scale_range"]
    for first, (rows,) in row_blocks(scale_range):
        step, minimum = rows[:, 0::2].astype(numpy.float32), rows[:, 1::2].astype(numpy.float32)
        for code in (0, _STEPS):
            root = minimum + step * numpy.float32(code)
            infinite = ~(root * root < numpy.float32(_HALF_LIMIT))
            if infinite.any():
                at = first_index(infinite, 2 * first, (*scale_range.shape[:-1], 2))
                value = root.flat[infinite.argmax()]
                raise InvalidPayload(
                    f"{where}: code {code} of the range at {at} has the root {value}, whose square exceeds the largest float16 value, 65504"
                )
