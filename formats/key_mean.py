"""key_mean: the mean of each page of keys, stored separately from the encoded differences (spec/side-cars.md).

The keys of a head share a large component, which in many models has most of their energy. A codec that encodes it in every token spends its
precision on what the tokens have in common. Stored once per page, the component costs a few hundredths of a bit per value, and attention
adds one product with the query to the scores of a page.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

from .errors import InvalidParameter
from .lazy import torch
from .sidecar import PageVector, RunStep, parse_map
from .streams import Layout
from .token_norms import stored_norm

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .options import Options
    from .rotation import Rotation
    from .runs import Run

CODES, SCALE = "key_mean", "key_mean_scale"

PAGE_SIZES = (8, 16, 32, 64, 128, 256, 512, 1024)
"""Allowed numbers of tokens per page."""

BITS = (4, 8)
"""Allowed numbers of bits per channel of a mean."""

_CLIPPED = 0.4
"""Number of steps by which a mean's largest channel may exceed the largest code. Clipping this little makes all steps smaller."""


@dataclass(frozen=True)
class KeyMean(PageVector):
    """Sidecar that stores the mean of every ``tokens`` keys of a head, in the coded frame, with ``bits`` per channel and a float16 scale.

    Encoders multiply the means by ``share``, which is not stored.
    """

    name: ClassVar[str] = "key_mean"
    words: ClassVar[tuple[str, ...]] = ("mean", "mean_bits")
    keys_only: ClassVar[bool] = True
    feature: ClassVar[str] = "key-mean"

    dim: int
    tokens: int
    bits: int
    share: float = field(default=1.0, compare=False)

    def __post_init__(self) -> None:
        for name, value, known in (("tokens", self.tokens, PAGE_SIZES), ("bits", self.bits, BITS)):
            if value not in known:
                raise InvalidParameter(f"sidecar {self.name}: {name} is {value}, expected one of {', '.join(map(str, known))}")
        if self.bits == 4 and self.dim % 2:
            raise InvalidParameter(f"sidecar {self.name}: bits is 4, which needs an even head dim, but dim is {self.dim}: use mean_bits=8")

    @classmethod
    def from_options(cls, dim: int, side: str, options: Options) -> Self | None:
        text = options.choice("mean", "", tuple(map(str, PAGE_SIZES)))
        bits = options.choice("mean_bits", "", tuple(map(str, BITS)), omitted="8")
        if not text:
            if bits:
                raise InvalidParameter(
                    f"codec {options.codec}: mean_bits={bits} has no effect without mean=<tokens>: add mean=<tokens>, such as mean=128"
                )
            return None
        if side == "v":
            raise InvalidParameter(
                f"codec {options.codec}: mean={text} applies to keys only: give each side its own codec, k={options.codec}:...,mean={text} "
                f"and v={options.codec}:... without mean"
            )
        return cls(dim, int(text), int(bits or 8))

    @classmethod
    def from_params(cls, dim: int, value: Any) -> Self:
        return cls(dim, **parse_map(cls.name, value, {"tokens": int, "bits": int}))

    def params(self) -> dict[str, Any]:
        return {"tokens": self.tokens, "bits": self.bits}

    @property
    def with_half_means(self) -> Self:
        """This sidecar with half of each mean subtracted, for pages with a token far from the mean, such as an attention sink of low norm.

        Subtracting the whole mean would turn such a token into a large vector, with an error larger than the token itself. With half of the
        mean, the other tokens lose little precision, and this token loses no more than they do.
        """
        return replace(self, share=0.5)

    @property
    def nominal_bits(self) -> float:
        return self.bits / self.tokens

    @property
    def page_tokens(self) -> int:
        return self.tokens

    def layout(self, batch: int, heads: int, tokens: int) -> dict[str, Layout]:
        pages = -(-tokens // self.tokens)
        return {
            CODES: Layout("U8", (batch, heads, pages, self.dim * self.bits // 8), self.tokens),
            SCALE: Layout("F16", (batch, heads, pages), self.tokens),
        }

    def begin(self, run: Run, rotation: Rotation) -> RunStep:
        """Return the step that subtracts the page means from the blocks of ``run``.

        The stored means are rounded, so the mean of the result may be slightly different from zero.
        """

        def encode(block: torch.Tensor, start: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            streams = self.encode_means(rotation.forward(self.page_means(block)))
            # Rotations are linear, so it is enough to rotate the means.
            return block - self._expand_to_tokens(rotation.inverse(self.vectors(streams)), block.shape[2]), streams

        return RunStep({}, encode)

    def page_means(self, x: torch.Tensor) -> torch.Tensor:
        """Return the means of the pages of ``x``, multiplied by ``share``: float32 ``[batch, kv_head, page, dim]``.

        ``x`` is ``[batch, kv_head, token, dim]``.
        """
        batch, heads, tokens, dim = x.shape
        whole = tokens // self.tokens * self.tokens
        parts = [x[:, :, :whole].reshape(batch, heads, tokens // self.tokens, self.tokens, dim).mean(3, dtype=torch.float64)]
        if whole < tokens:
            parts.append(x[:, :, whole:].mean(2, keepdim=True, dtype=torch.float64))
        return torch.cat(parts, 2).mul_(self.share).to(torch.float32)

    def without_vectors(self, x: torch.Tensor) -> torch.Tensor:
        return x - self._expand_to_tokens(self.page_means(x), x.shape[2])

    def encode_means(self, mean: torch.Tensor) -> dict[str, torch.Tensor]:
        """Encode means ``[batch, kv_head, page, dim]`` in the coded frame. Raises ValueTooLarge if a scale does not fit in float16.

        There is one more negative code than there are positive codes. The sign of the scale is therefore chosen so that the channel with
        the largest magnitude gets a negative code.
        """
        half = 1 << self.bits - 1
        extreme = mean.gather(3, mean.abs().argmax(3, keepdim=True))
        size = stored_norm(extreme.abs() / (half + _CLIPPED), "F16", "scale of a key mean")
        scale = torch.where(extreme > 0, -size, size)
        step = scale.to(torch.float32)
        codes = (mean / torch.where(step == 0, torch.inf, step)).round().clamp(-half, half - 1).add_(half).to(torch.uint8)
        if self.bits == 4:
            low, high = codes.chunk(2, 3)
            codes = low | high << 4
        return {CODES: codes, SCALE: scale.squeeze(3)}

    def vectors(self, streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
        codes = streams[CODES]
        if self.bits == 4:
            codes = torch.cat([codes & 15, codes >> 4], 3)
        centered = codes.to(torch.float32) - float(1 << self.bits - 1)
        return centered * streams[SCALE].to(torch.float32)[..., None]
