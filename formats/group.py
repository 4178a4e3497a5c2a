"""group: affine codes with one scale and one center per group (spec/codecs/group.md).

Covers KIVI and OScaR (keys in groups of tokens, values in groups of channels), QuaRot, plain integer quantization, and TurboAngle's
TurboQuant baselines. Sources: KIVI per OScaR Eq. 3-4; OScaR Algorithm 1; TurboAngle Sec. 4.2.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar, Self

from . import scale_range
from .base import MAX_DIM, PayloadRule
from .columns import Columns, default_fields
from .family import ENCODER_ONLY, OPTIONAL, SEED, CodecFamily, in_range, one_of
from .lazy import torch
from .norm_rule import NORM_RULES, read_norm_rule, unbiased_factor
from .parameter_checks import Fields, check_fields
from .rotation import KINDS
from .runs import Run, RunEncoder
from .streams import Layout
from .tables import MAX_CACHED_TABLES
from .token_norms import HEADS, TOKENS, stored_norm

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from .options import Options

AXES = ("token", "channel")
GROUP_SIZES = (4, 8, 16, 32, 64, 128)
PER_HEAD = "-per-head"
"""Suffix of token-scale options for which each head has its own scales."""

TOKEN_SCALE_DTYPES = {"fp16": "F16", "fp32": "F32", f"fp16{PER_HEAD}": "F16", f"fp32{PER_HEAD}": "F32"}
TOKEN_SCALES = ("none", *TOKEN_SCALE_DTYPES)
TOKEN_SCALE_FEATURE = "token-scale-per-head"
"""Feature that readers of codecs with token scales per head must support."""

SCALE_DTYPES = ("fp16", "u8")
CENTERS = ("middle", "zero")
MIN_HALF = 2.0**-24
"""The smallest positive float16."""


_MAX_SCALE_RATIO, _WIDE_GROUP = 1.75, 64
"""Scales of groups of ordinary channels are less than ``_MAX_SCALE_RATIO`` times the typical scales.

In groups of ``_WIDE_GROUP`` or more channels, an outlier doubles the typical error.
"""


@dataclass(frozen=True)
class Group(CodecFamily):
    """Codec that stores ``bits`` bits per value in groups of ``size`` along ``axis``: x = (code - (2^bits - 1) / 2) * scale + center.

    ``token_scale`` is none or the dtype of OScaR's factor, one per token over all heads. With the suffix ``-per-head``, every head has its
    own factor, so that a head with a large key costs the other heads no precision. ``scale_dtype`` u8 stores scales and centers in 8 bits,
    with one range per head and run. ``centre`` selects the center of a group: the middle of its range or zero (symmetric). ``centre`` and
    ``norm_rule`` affect only the encoder and are not stored.
    """

    id: ClassVar[str] = "group"

    dim: int = field(metadata=in_range(1, MAX_DIM))
    bits: int = field(metadata=in_range(1, 8))
    axis: str = field(metadata=one_of(AXES))
    size: int = field(metadata=one_of(GROUP_SIZES))
    rotation_kind: str = field(metadata=one_of(KINDS))
    seed: int = field(metadata=SEED)
    token_scale: str = field(metadata=one_of(TOKEN_SCALES))
    fields: Fields
    scale_dtype: str = field(default="fp16", metadata=one_of(SCALE_DTYPES) | OPTIONAL)
    centre: str = field(default="middle", compare=False, metadata=one_of(CENTERS) | ENCODER_ONLY)
    norm_rule: str = field(default=NORM_RULES[0], compare=False, metadata=one_of(NORM_RULES) | ENCODER_ONLY)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self.id, self.fields, ("codes",))
        self.packings()
        _ = self.rotation

    @classmethod
    def create(cls, dim: int, side: str, options: Options) -> Self:
        bits = cls.option(options, "bits", None, "b")
        size = cls.option(options, "size", 32, "g")
        axis = cls.option(options, "axis", "token" if side == "k" else "channel")
        rotation = cls.option(options, "rotation_kind", "none", "rotation")
        seed = cls.option(options, "seed", 0)
        token_scale = cls.option(options, "token_scale", "none")
        scale_dtype = cls.option(options, "scale_dtype", "fp16", "scales")
        center = cls.option(options, "centre", "middle")
        rule = read_norm_rule(options)
        options.finish()
        fields = (("codes", default_fields(dim, (2**bits,))),)
        return cls(dim, bits, axis, size, rotation, seed, token_scale, fields, scale_dtype, center, rule)

    @property
    def nominal_bits(self) -> float:
        return float(self.bits)

    @property
    def features(self) -> frozenset[str]:
        return frozenset({TOKEN_SCALE_FEATURE} if self.scale_per_head else ())

    @property
    def shared_scales(self) -> frozenset[str]:
        if self.scale_per_head:
            return frozenset()
        return frozenset(({HEADS} if self.token_scale != "none" else set()) | ({TOKENS} if self.axis == "token" else set()))

    @property
    def scale_per_head(self) -> bool:
        """True if each head has its own token scales."""
        return self.token_scale.endswith(PER_HEAD)

    @property
    def group_tokens(self) -> int:
        return self.size if self.axis == "token" else 1

    def packings(self) -> dict[str, Columns]:
        return _packings(self.dim, self.bits, self.fields)

    def scale_layouts(self, batch: int, heads: int, tokens: int) -> dict[str, Layout]:
        dtype = "F16" if self.scale_dtype == "fp16" else "U8"
        if self.axis == "token":
            rows = -(-tokens // self.size)
            result = {"scales": Layout(dtype, (batch, heads, rows, self.dim, 2), self.size)}
        else:
            result = {"scales": Layout(dtype, (batch, heads, tokens, -(-self.dim // self.size), 2))}
        if self.scale_dtype == "u8":
            result["scale_range"] = Layout("F16", (batch, heads, 1, 4), per="run")
        if self.token_scale != "none":
            result["token_scale"] = Layout(TOKEN_SCALE_DTYPES[self.token_scale], (batch, heads if self.scale_per_head else 1, tokens))
        return result

    def begin(self, run: Run, previous: Mapping[str, torch.Tensor] | None) -> RunEncoder:
        if self.scale_dtype == "fp16":
            return RunEncoder({}, lambda block, _: self._encode(block, None))
        empty = torch.zeros(*run.shape[:2], 1, 4, dtype=torch.float16, device=run.device)
        last = previous["scale_range"] if previous else None
        chosen = scale_range.choose_range(self._scales_and_centers(run), last, empty, self._middle_code)
        return RunEncoder({"scale_range": chosen}, lambda block, _: self._encode(block, chosen))

    def _scales_and_centers(self, run: Run) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for block in run.blocks():
            if block.numel():
                grouped = self._group_values(self._divide_by_token_scale(block)[0])
                low, high = grouped.amin(self._member_axis), grouped.amax(self._member_axis)
                center = self._group_center(low, high)
                yield self._group_scale(low, high, center), center

    def encode(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        batch, heads, tokens, dim = x.shape
        run = self.begin(Run((batch, heads, tokens, dim), x.device, lambda: iter((x,))), None)
        return {**run.encode(x, 0), **run.streams}

    def _encode(self, x: torch.Tensor, chosen_range: torch.Tensor | None) -> dict[str, torch.Tensor]:
        u, streams = self._divide_by_token_scale(x)
        grouped, dim = self._group_values(u), self._member_axis
        low, high = grouped.amin(dim), grouped.amax(dim)
        # The scale is measured from the stored center, so that rounding the center costs range and not accuracy.
        if chosen_range is None:
            stored_center = stored_norm(self._group_center(low, high), "F16", "center of a group")
            center = stored_center.to(torch.float32)
            stored_scale = stored_norm(self._group_scale(low, high, center), "F16", "scale of a group")
            scale = stored_scale.to(torch.float32)
        else:
            stored_center, center = scale_range.encode_nearest(self._group_center(low, high), chosen_range, scale_range.CENTER)
            stored_scale, scale = scale_range.encode_nearest(self._group_scale(low, high, center), chosen_range, scale_range.SCALE)
        per_step = scale.clamp_min(MIN_HALF).reciprocal()
        offset = self._middle_code - center * per_step
        codes = (grouped * per_step.unsqueeze(dim)).add_(offset.unsqueeze(dim)).round_().clamp_(0, 2**self.bits - 1)
        codes = codes.flatten(2, 3)[:, :, : u.shape[2]] if self.axis == "token" else codes.flatten(3, 4)[..., : self.dim]
        if streams and self.norm_rule == "unbiased":
            streams = {"token_scale": self._unbiased_scales(streams["token_scale"], u, self._values(codes, scale, center))}
        return self.pack("codes", codes) | {"scales": torch.stack([stored_scale, stored_center], -1)} | streams

    def _unbiased_scales(self, factor: torch.Tensor, u: torch.Tensor, decoded: torch.Tensor) -> torch.Tensor:
        """Return the token scales for norm_rule=unbiased.

        ``u`` is the values divided by the root mean squares ``factor``, and ``decoded`` is what its codes decode to.
        """
        pairs = ((u, u), (u, decoded), (decoded, decoded))
        squares, product, length = ((a * b).sum(self._token_scale_axes, keepdim=True)[..., 0] for a, b in pairs)
        return unbiased_factor(factor.to(torch.float32), product, length, TOKEN_SCALE_DTYPES[self.token_scale], squares).to(factor.dtype)

    def _divide_by_token_scale(self, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Map ``x`` to the coded frame, and divide it by its token scales, if any.

        Returns the quotients, and the stream of token scales.
        """
        u = self.rotation.forward(x)
        if self.token_scale == "none":
            return u, {}
        # Divide by the root mean square, not by the norm: scaled values are then near 1, if binary16 scales are precise.
        root = u.square().mean(self._token_scale_axes, keepdim=True).sqrt()
        stored = stored_norm(root[..., 0], TOKEN_SCALE_DTYPES[self.token_scale], "token scale")
        factor = stored.to(torch.float32)[..., None]
        return u / torch.where(factor > 0, factor, 1.0), {"token_scale": stored}

    @property
    def _token_scale_axes(self) -> tuple[int, ...]:
        """Axes of the values that share a token scale."""
        return (3,) if self.scale_per_head else (1, 3)

    def _group_center(self, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
        return (low + high) / 2 if self.centre == "middle" else torch.zeros_like(low)

    def _group_scale(self, low: torch.Tensor, high: torch.Tensor, center: torch.Tensor) -> torch.Tensor:
        return torch.maximum(high - center, center - low) * (1.0 / self._middle_code)

    @property
    def _member_axis(self) -> int:
        """Axis of a group's members in the result of ``_group_values``."""
        return 3 if self.axis == "token" else 4

    def with_fp16_scales(self, streams: Mapping[str, torch.Tensor]) -> tuple[Group, dict[str, torch.Tensor]]:
        """Convert 8-bit scales to float16.

        Returns the codec with float16 scales and its streams, which decode to the same bits as ``streams``.
        """
        if self.scale_dtype == "fp16":
            return self, dict(streams)
        pairs = scale_range.decode_pairs(streams["scales"], streams["scale_range"])
        return replace(self, scale_dtype="fp16"), {name: streams[name] for name in streams if name != "scale_range"} | {"scales": pairs}

    @property
    def error_spread(self) -> float:
        # A group of few channels hardly increases the error of its token.
        has_wide_groups = self.axis == "channel" and min(self.size, self.dim) >= _WIDE_GROUP
        return _MAX_SCALE_RATIO if has_wide_groups and self.token_scale == "none" else 0.0

    def error_sizes(self, streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the L2 norm of the scales of each token's groups, float32 ``[batch, kv_head, token]``."""
        scales = self.with_fp16_scales(streams)[1]["scales"][..., 0]
        return scales[..., 0].to(torch.float32) if scales.shape[3] == 1 else torch.linalg.vector_norm(scales, dim=3, dtype=torch.float32)

    def min_token_rms(self, streams: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        # Division by token scales makes the tokens similar in size.
        if self.scale_dtype == "fp16" or self.token_scale != "none":
            return None
        return scale_range.min_token_rms(streams["scale_range"], (1 << self.bits) - 1)

    def payload_rules(self) -> tuple[PayloadRule, ...]:
        return (scale_range.check,) if self.scale_dtype == "u8" else ()

    @property
    def _middle_code(self) -> float:
        return ((1 << self.bits) - 1) / 2

    def _group_values(self, u: torch.Tensor) -> torch.Tensor:
        """Arrange values in groups of tokens ``[batch, head, group, size, dim]`` or of channels ``[batch, head, token, group, size]``.

        A partial last group repeats its last member, which changes neither its minimum nor its maximum.
        """
        axis = 2 if self.axis == "token" else 3
        short = -u.shape[axis] % self.size
        if short and u.shape[axis]:
            last = u.narrow(axis, u.shape[axis] - 1, 1)
            u = torch.cat([u, last.expand(*(short if a == axis else n for a, n in enumerate(u.shape)))], axis)
        return u.reshape(*u.shape[:axis], u.shape[axis] // self.size, self.size, *u.shape[axis + 1 :])

    def decode_digits(self, digits: tuple[torch.Tensor, ...], streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
        (codes,) = digits
        u = self._values(codes, *self.with_fp16_scales(streams)[1]["scales"].to(torch.float32).unbind(-1))
        return u if self.token_scale == "none" else u * streams["token_scale"].to(torch.float32)[..., None]

    def _values(self, codes: torch.Tensor, scale: torch.Tensor, center: torch.Tensor) -> torch.Tensor:
        """Decode ``codes`` with their scales and centers, without applying the token scale."""
        dim = self._member_axis
        grouped = self._group_values(codes.to(torch.float32, copy=True).sub_(self._middle_code))
        grouped = grouped.mul_(scale.unsqueeze(dim)).add_(center.unsqueeze(dim))
        return grouped.flatten(dim - 1, dim).narrow(dim - 1, 0, codes.shape[dim - 1])


@lru_cache(MAX_CACHED_TABLES)
def _packings(dim: int, bits: int, fields: Fields) -> dict[str, Columns]:
    return {"codes": Columns(dim, (2**bits,), dict(fields)["codes"])}
