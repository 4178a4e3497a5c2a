"""Balanced frames of a layer's keys, as a basis stores them (spec/basis.md)."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

from .errors import InvalidParameter, ValueTooLarge
from .inverses import invert_for_encoding
from .lazy import torch
from .rotation import Rotation

MAX_GROWTH = 2.0**10
"""Maximum factor by which a matrix or its inverse may enlarge values (rule basis-24)."""


class BalancedFrames:
    """Balanced frames of one layer's keys, float32 ``[kv_head, column, channel]``. Each column is a vector in the original frame."""

    def __init__(self, matrices: torch.Tensor) -> None:
        self.matrices = matrices
        self._device_copies: dict[str, BalancedFrames] = {}
        self._query_matrices: dict[Rotation, torch.Tensor] = {}

    @property
    def heads(self) -> int:
        return self.matrices.shape[0]

    @property
    def dim(self) -> int:
        return self.matrices.shape[2]

    def check_heads(self, heads: int) -> BalancedFrames:
        """Raise InvalidParameter unless there are frames for exactly ``heads`` heads. Returns self."""
        if self.heads != heads:
            raise InvalidParameter(f"the frames are for {self.heads} heads, but the values have {heads}: use a basis for this model")
        return self

    @cached_property
    def inverse(self) -> torch.Tensor:
        """Inverses of ``matrices``, float32 ``[kv_head, channel, column]``, for encoders.

        Raises ValueTooLarge if a matrix is too ill-conditioned (rules basis-19 and basis-24).
        """
        result = invert_for_encoding(self.matrices, "a balanced frame of the basis")
        growth = torch.maximum(self.matrices.cpu().abs().sum(-2).amax(-1), result.abs().sum(-2).amax(-1))
        if not bool((growth <= MAX_GROWTH).all()):
            raise ValueTooLarge(
                f"the balanced frame of head {int(growth.argmax())} is ill-conditioned: it or its inverse can enlarge values "
                f"by a factor of {float(growth.max()):.4g}, but the limit is {MAX_GROWTH:.0f}: calibrate on more text, or omit frame="
            )
        return result.to(self.matrices.device)

    def query_matrices(self, rotation: Rotation) -> torch.Tensor:
        """Return the matrices that map queries to the frame that ``rotation`` rotates keys into, float32 ``[kv_head, channel, column]``.

        Each matrix combines the balanced frame and the rotation, and is rounded only once. The matrices are cached.
        """
        if rotation not in self._query_matrices:
            with torch.inference_mode(False):
                back = self.matrices.to(torch.float64).transpose(1, 2)
                rotated = back @ rotation.matrix(back.device).to(torch.float64).T
                self._query_matrices[rotation] = rotated.to(torch.float32).contiguous()
        return self._query_matrices[rotation]

    def on_device(self, device: torch.device) -> BalancedFrames:
        """Return a cached copy of the frames on ``device``."""
        if self.matrices.device == device:
            return self
        key = str(device)
        if key not in self._device_copies:
            result = BalancedFrames(self.matrices.to(device))
            if "inverse" in self.__dict__:
                result.__dict__["inverse"] = self.inverse.to(device)
            self._device_copies[key] = result
        return self._device_copies[key]


class CalibratedFrames(NamedTuple):
    """Calibration data for one layer's keys, from the basis with SHA-256 ``digest``.

    It contains either balanced ``frames``, or ``queries``, the mean square of each query channel.
    """

    digest: bytes
    layer: int
    frames: BalancedFrames | None = None
    queries: torch.Tensor | None = None
