"""Protocols of a layer for attention. Kernels depend on codecs and tensors, but not on the classes that contain them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from kvpack.formats.base import Codec


class PackedRun(Protocol):
    """A page of ``tokens`` packed tokens: a codec, and its streams ``[batch, kv_head, token, ...]``."""

    @property
    def codec(self) -> Codec: ...
    @property
    def tokens(self) -> int: ...
    @property
    def streams(self) -> Mapping[str, torch.Tensor]: ...

    def rows(self, start: int, stop: int, entries: bool = True) -> Mapping[str, torch.Tensor]:
        """Return the streams of tokens ``[start, stop)``. ``start`` must be a multiple of the codec's token group.

        Without ``entries``, streams of entries that store token indices are left out.
        """

    def slice(self, start: int, stop: int) -> PackedRun:
        """Return tokens ``[start, stop)``. ``start`` must be a multiple of the codec's token group."""

    def decode_frame(self, start: int, stop: int) -> torch.Tensor:
        """Decode tokens ``[start, stop)`` to float32 ``[batch, kv_head, token, dim]`` in the coded frame."""

    def decode(self, start: int, stop: int) -> torch.Tensor:
        """Decode tokens ``[start, stop)`` to float32 ``[batch, kv_head, token, dim]`` in the original frame."""

    def original(self, sums: torch.Tensor) -> torch.Tensor:
        """Map sums of values ``[batch, kv_head, row, dim]`` from the coded frame to the original frame."""


class Side(Protocol):
    """The keys or the values of a layer: packed pages followed by a raw tail ``[batch, kv_head, token, dim]``."""

    @property
    def runs(self) -> Sequence[PackedRun]: ...
    @property
    def tail(self) -> torch.Tensor: ...
    @property
    def batch(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def dim(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def device(self) -> torch.device: ...


class Layer(Protocol):
    """The keys and values of a layer, which have the same numbers of sequences, KV heads and tokens."""

    @property
    def k(self) -> Side | None: ...
    @property
    def v(self) -> Side | None: ...


def keys_and_values(layer: Layer) -> tuple[Side, Side]:
    """Return the keys and the values of ``layer``, which must have both."""
    assert layer.k is not None
    assert layer.v is not None
    return layer.k, layer.v
