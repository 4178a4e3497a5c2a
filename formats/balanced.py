"""balanced: keys in a calibrated frame in which keys and queries have the same second moments (spec/side-cars.md).

The cost of an error in a key depends on the queries. Let E[k k^T] = L L^T over keys, C = E[q q^T] over the queries that attend to them, and
L^T C L = U diag(lambda) U^T. In the frame diag(lambda)^(1/4) U^T L^-1, keys and queries have the same second moments. Errors that are
equally large in every direction, such as those of codecs with a rotation, cost the least in this frame.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self

from .basis import DIGEST_BYTES, MAX_LAYER, missing_basis_error
from .errors import InvalidParameter
from .products import plain_product, product
from .sidecar import ValueMap, parse_map

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from .balanced_frames import BalancedFrames
    from .options import Options
    from .rotation import Rotation

OPTION = "frame"
"""Recipe option that requests a frame, as in ``frame=balanced``."""

FRAMES = ("balanced", "centered")
"""Kinds of frames in a basis: for whole keys, and for keys minus their mean, if the mean is stored separately."""


@dataclass(frozen=True)
class FrameMap(ValueMap):
    """Sidecar that maps keys into a calibrated frame of kind ``frame`` (one of ``FRAMES``).

    ``layer`` and ``basis``, the SHA-256 of a basis file, identify the frames. ``source`` contains the frames themselves. It is not stored,
    and is None until the codec receives its basis.
    """

    name: ClassVar[str] = "balanced"
    words: ClassVar[tuple[str, ...]] = (OPTION,)
    feature: ClassVar[str] = "balanced"

    dim: int
    basis: bytes
    layer: int
    frame: str = FRAMES[0]
    source: BalancedFrames | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if len(self.basis) != DIGEST_BYTES:
            raise InvalidParameter(f"sidecar {self.name}: basis has {len(self.basis)} bytes, expected a {DIGEST_BYTES}-byte SHA-256 digest")
        if not 0 <= self.layer <= MAX_LAYER:
            raise InvalidParameter(f"sidecar {self.name}: layer is {self.layer}, expected 0 to {MAX_LAYER}")
        if self.frame not in FRAMES:
            raise InvalidParameter(f"sidecar {self.name}: frame is {self.frame!r}, expected one of {', '.join(FRAMES)}")

    @classmethod
    def from_options(cls, dim: int, side: str, options: Options) -> Self | None:
        frame = options.choice(OPTION, "", FRAMES)
        if not frame:
            return None
        options.text("basis")
        if side != "k":
            raise InvalidParameter(
                f"codec {options.codec}: frame={frame} applies to keys only: set it in k=<codec>, and omit it from v=<codec>"
            )
        if frame == "centered" and not options.is_given("mean"):
            raise InvalidParameter(
                f"codec {options.codec}: frame=centered needs keys with their mean subtracted: add mean=<tokens>, such as mean=128, or "
                "set frame=balanced"
            )
        balanced = options.balanced
        if balanced is None or balanced.frames is None:
            return cls(dim, bytes(DIGEST_BYTES), 0, frame)
        if balanced.frames.dim != dim:
            raise InvalidParameter(
                f"codec {options.codec}: the head dim is {dim}, but the basis is for head dim {balanced.frames.dim}: use a basis of this "
                "model"
            )
        return cls(dim, balanced.digest, balanced.layer, frame, balanced.frames)

    @classmethod
    def from_params(cls, dim: int, value: Any) -> Self:
        return cls(dim, **parse_map(cls.name, value, {"basis": bytes, "layer": int, "frame": str}))

    def params(self) -> dict[str, Any]:
        return {"basis": self.basis, "layer": self.layer, "frame": self.frame}

    @property
    def bases_needed(self) -> frozenset[bytes]:
        return frozenset({self.basis})

    @property
    def basis_location(self) -> str:
        """Name, for messages, of the part of the basis that the codec needs."""
        return f"{self.frame} frames of the keys of layer {self.layer} of the basis {self.basis.hex()}"

    def source_for(self, heads: int) -> BalancedFrames:
        """Return the frames for ``heads`` heads. Raises MissingBasis if there is none, or InvalidParameter for a wrong number of heads."""
        if self.source is None:
            raise missing_basis_error(self.basis_location)
        try:
            return self.source.check_heads(heads)
        except InvalidParameter as error:
            raise InvalidParameter(f"{self.basis_location}: {error}") from None

    def forward(self, x: torch.Tensor, streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return product(x, self.source_for(x.shape[1]).on_device(x.device).inverse)

    def inverse(self, x: torch.Tensor, streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return product(x, self.source_for(x.shape[1]).on_device(x.device).matrices)

    def query(self, q: torch.Tensor, streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return plain_product(q, self.source_for(q.shape[1]).on_device(q.device).matrices.transpose(1, 2))

    def rotated_query(self, q: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """Map queries with ``query`` and then rotate them by ``rotation``, in a single matrix product."""
        matrices = self.source_for(q.shape[1]).on_device(q.device).query_matrices(rotation)
        # A three-dimensional product has less overhead than a broadcast one.
        return plain_product(q[0], matrices)[None] if len(q) == 1 else plain_product(q, matrices)
