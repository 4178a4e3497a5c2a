"""Channels of keys that are too large for codecs with a rotation, which spreads them over all others: those then lose their precision."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, NamedTuple

import torch

from kvpack.formats.errors import KvpackWarning
from kvpack.formats.side_cars import WithSideCars

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpack.formats.base import Codec

MAX_RATIO = 64.0
"""Number of times larger than the median channel of its head a channel may be: those of SmolLM2-135M-Instruct are at most 14 times."""

SAMPLED_TOKENS = 128


class OutlierChannel(NamedTuple):
    """The largest channel of a layer's keys, and its size relative to the median of its head."""

    layer: int
    head: int
    channel: int
    ratio: float


def outlier_channel(x: torch.Tensor, codec: Codec, layer: int) -> OutlierChannel | None:
    """The largest channel of keys ``[batch, kv_head, token, dim]`` if it is out of the range of ``codec``.

    A channel's size is the median magnitude of some tokens, so that no single token makes it large. Codecs without a rotation, and
    with side-cars that map values first, have no such range.
    """
    if not spreads_channels(codec) or not x.shape[2]:
        return None
    sample = x[:, :, :: -(-x.shape[2] // SAMPLED_TOKENS)]
    size = sample.to(torch.float32).abs().median(2).values
    usual = size.median(2, keepdim=True).values
    ratio = torch.where(usual > 0, size / usual, 0.0)
    largest = float(ratio.max())
    if largest <= MAX_RATIO:
        return None
    _, head, channel = (ratio == ratio.max()).nonzero()[0].tolist()
    return OutlierChannel(layer, head, channel, largest)


def spreads_channels(codec: Codec) -> bool:
    """Whether ``codec`` rotates keys as they are, so that channels that are far larger than the others cost all of them precision."""
    return codec.rotation.kind != "none" and not (isinstance(codec, WithSideCars) and codec.value_maps)


def warn(found: Sequence[OutlierChannel], layers: int) -> None:
    """Issue one KvpackWarning for the caller of ``pack``, which names the largest of the channels ``found`` in ``layers`` layers."""
    if found:
        worst = max(found, key=lambda one: one.ratio)
        warnings.warn(
            f"layers[{worst.layer}].k: channel {worst.channel} of head {worst.head} is {worst.ratio:.0f} times as large as the median "
            f"channel, and keys of {len(found)} of {layers} layers have such channels: the codec's rotation spreads them over all others, "
            "which lose precision: pack with kvpack-4, kvpack-3 or kvpack-2, or add channel_scale=fp16 to the codec of keys",
            KvpackWarning,
            stacklevel=3,
        )
