"""angle: pairs of values, each stored as an angle bin and a norm (spec/codecs/angle.md).

Source: TurboAngle Sec. 3, except that a bin decodes to its center, which has a quarter of the squared error of decoding to its lower edge.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from math import log2, pi
from typing import TYPE_CHECKING, ClassVar, Self

from .base import MAX_DIM, Unpacker
from .columns import Columns, default_fields, factors_of_two, is_power_of_two, next_power_of_two, row_bytes
from .encoding_blocks import encode_in_blocks
from .errors import InvalidParameter
from .family import ENCODER_ONLY, SEED, CodecFamily, in_range, one_of
from .lazy import functional, torch
from .norm_rule import NORM_RULES, read_norm_rule, unbiased_factor
from .parameter_checks import Fields, check_choice, check_fields, check_range
from .rotation import KINDS
from .streams import Layout
from .tables import MAX_CACHED_TABLES, cache_per_device
from .token_norms import stored_norm

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .options import Options

MAX_BINS = 1 << 16
NORMS = ("fp32", "linear", "log")
ARRANGEMENTS = ("dense", "direct")
RANGES = ("fp16", "fp32")
_NORM_WORDS = ("fp32", *(f"{kind}{bits}" for kind in NORMS[1:] for bits in range(1, 9)))
_HEAD_TOKENS_PER_BLOCK = 1 << 11
# The minimum of a token of zeros is the most negative binary16: 2^-65504 is 0 in binary32.
_ZERO_TOKEN_MINIMUM = -65504.0
# Norms below 1/256 of the largest are stored as 1/256, because they would widen the logarithmic range too much.
_MAX_OCTAVES = 8.0
_MIN_NORMAL = 2.0**-126


@dataclass(frozen=True)
class Angle(CodecFamily):
    """Codec that stores each pair of neighboring channels as an angle bin and a norm. Bin k has the angle 2 pi (k + 1/2) / ``bins``.

    ``norm`` selects how the norm r of a pair is stored: fp32 stores r itself, linear stores codes of ``norm_bits`` bits with r = minimum +
    step * code, and log stores codes with r = 2^(minimum + step * code). Each token of a head has one step and one minimum, stored in the
    dtype ``range``. ``norm_rule`` affects only the encoder and is not stored.
    """

    id: ClassVar[str] = "angle"
    stores_directions: ClassVar[bool] = True

    dim: int = field(metadata=in_range(2, MAX_DIM))
    bins: int = field(metadata=in_range(2, MAX_BINS))
    norm: str = field(metadata=one_of(NORMS))
    norm_bits: int = field(metadata=in_range(0, 8))
    arrangement: str = field(metadata=one_of(ARRANGEMENTS))
    range: str = field(metadata=one_of(RANGES))
    rotation_kind: str = field(metadata=one_of(KINDS))
    seed: int = field(metadata=SEED)
    fields: Fields
    norm_rule: str = field(default=NORM_RULES[0], compare=False, metadata=one_of(NORM_RULES) | ENCODER_ONLY)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dim % 2:
            raise InvalidParameter(f"codec {self.id}: dim is {self.dim}, expected an even number: channels are coded in pairs")
        if self.norm == "fp32":
            check_choice(self.id, "arrangement", self.arrangement, ("dense",))
            check_choice(self.id, "range", self.range, ("fp16",))
        check_range(self.id, "norm_bits", self.norm_bits, *((1, 8) if self.norm != "fp32" else (0, 0)))
        check_fields(self.id, self.fields, tuple(_stream_digits(self.dim, self.bins, self.norm_bits, self.arrangement)))
        self.packings()
        _ = self.rotation

    @classmethod
    def create(cls, dim: int, side: str, options: Options) -> Self:
        bins = cls.option(options, "bins", None, "n")
        word = options.choice("norm", "linear8", _NORM_WORDS)
        norm, norm_bits = (word, 0) if word == "fp32" else (word[:-1], int(word[-1]))
        arrangement = cls.option(options, "arrangement", "dense")
        range_dtype = cls.option(options, "range", "fp16")
        rotation = cls.option(options, "rotation_kind", "signed-hadamard", "rotation")
        seed = cls.option(options, "seed", 0)
        rule = read_norm_rule(options)
        options.finish()
        cls.check_value("dim", dim)
        streams = _stream_digits(dim, bins, norm_bits, arrangement)
        fields = tuple((name, 1 if arrangement == "direct" else default_fields(dim // 2, bases)) for name, (bases, _) in streams.items())
        return cls(dim, bins, norm, norm_bits, arrangement, range_dtype, rotation, seed, fields, rule)

    @property
    def nominal_bits(self) -> float:
        norms = 16.0 if self.norm == "fp32" else self.norm_bits / 2 + 64 / self.dim
        return log2(self.bins) / 2 + norms

    @property
    def directions(self) -> torch.Tensor:
        """Cosine and sine of each bin's center, correctly rounded, float32 ``[bins, 2]``."""
        return bin_directions(self.bins, "cpu")

    def packings(self) -> dict[str, Columns]:
        return _packings(self.dim, self.bins, self.norm_bits, self.arrangement, self.fields)

    def scale_layouts(self, batch: int, heads: int, tokens: int) -> dict[str, Layout]:
        if self.norm == "fp32":
            return {"norm": Layout("F32", (batch, heads, tokens, self.dim // 2))}
        return {"range": Layout(self._range_dtype, (batch, heads, tokens, 2))}

    def encode(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return encode_in_blocks(x, _HEAD_TOKENS_PER_BLOCK, self._encode_block)

    def _encode_block(self, x: torch.Tensor, start: int) -> dict[str, torch.Tensor]:
        u = self.rotation.forward(x)
        first, second = u[..., 0::2].contiguous(), u[..., 1::2].contiguous()
        turns = torch.atan2(second, first).mul_(1 / (2 * pi))
        # The fraction of a turn is in [0, 1]: a tiny negative angle rounds up to 1, which is in the last bin.
        bins = turns.sub_(turns.floor()).mul_(self.bins).floor().clamp_max_(self.bins - 1).to(torch.int32)
        norms = torch.hypot(first, second)
        # Each pair's projection onto the decoded direction of its bin.
        projected = None
        if self.norm_rule == "unbiased":
            projected = turns.sub_(bins).sub_(0.5).mul_(2 * pi / self.bins).cos_().mul_(norms)
        if self.norm == "fp32":
            if projected is not None:
                norms = norms * _unbiased_factor(norms, projected, norms)
            return self.pack_digits(bins) | {"norm": stored_norm(norms, "F32", f"the norm of a pair of channels (token {start} or later)")}
        measured = norms
        if self.norm == "log":
            norms = norms.log2()
            # Every logarithm in a token of zeros is minus infinity.
            norms = torch.maximum(norms, norms.amax(-1, keepdim=True) - _MAX_OCTAVES).clamp_min_(_ZERO_TOKEN_MINIMUM)
        low, high = norms.aminmax(dim=-1)
        span = torch.stack([(high - low) / (2**self.norm_bits - 1), low], -1)
        stored = stored_norm(span, self._range_dtype, f"the step or minimum of a token's norms (token {start} or later)")
        step, minimum = stored.to(torch.float32)[..., None].unbind(-2)
        # Codes are rounded against the stored range; a zero step gives zero codes.
        codes = (norms - minimum).div_(torch.where(step > 0, step, torch.inf)).round_().clamp_(0, 2**self.norm_bits - 1)
        if projected is not None:
            factor = _unbiased_factor(measured, projected, self._decode_norms(step, minimum, codes))
            step, minimum = (step, minimum + factor.log2()) if self.norm == "log" else (step * factor, minimum * factor)
            unrounded_range = torch.cat([step, minimum], -1).to(stored.dtype)
            # Check the largest norm too, because the factor may make it infinite in binary32.
            step_wanted, minimum_wanted = unrounded_range.to(torch.float32)[..., None].unbind(-2)
            largest = self._decode_norms(step_wanted, minimum_wanted, codes.amax(-1, keepdim=True))
            is_finite = torch.isfinite(torch.cat([unrounded_range, largest], -1)).all(-1, keepdim=True)
            if self.norm == "linear":
                # The codes compensate for the rounding of the old step, and a subnormal step is rounded coarsely.
                is_finite &= (step >= torch.finfo(stored.dtype).smallest_normal) | (step == 0)
            stored = torch.where(is_finite, unrounded_range, stored)
        return self.pack_digits(bins, codes) | {"range": stored}

    def pack_digits(self, *digits: torch.Tensor) -> dict[str, torch.Tensor]:
        bins, *codes = digits
        names = dict(self.fields)
        if "symbol" in names:
            return self.pack("symbol", bins, *codes)
        streams = self.pack_factored("angle", bins)
        return streams | (self.pack("norm_codes", *codes) if codes else {})

    def digits(self, streams: Mapping[str, torch.Tensor], unpacker: Unpacker = Columns.unpack) -> tuple[torch.Tensor, ...]:
        names = dict(self.fields)
        if "symbol" in names:
            return tuple(self.unpack("symbol", streams, unpacker))
        codes = self.unpack("norm_codes", streams, unpacker) if "norm_codes" in names else []
        return self.unpack_factored("angle", streams, unpacker), *codes

    def decode_digits(self, digits: tuple[torch.Tensor, ...], streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
        bins, *codes = digits
        if self.norm == "fp32":
            norms = streams["norm"]
        else:
            step, minimum = streams["range"].to(torch.float32)[..., None].unbind(-2)
            norms = self._decode_norms(step, minimum, codes[0].to(torch.float32))
        return functional.embedding(bins, bin_directions(self.bins, norms.device)).mul_(norms[..., None]).flatten(3)

    def _decode_norms(self, step: torch.Tensor, minimum: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        """Return the decoded norm of each pair, float32 ``[batch, kv_head, token, pair]``."""
        norms = torch.addcmul(minimum, step, codes)
        return norms.exp2_() if self.norm == "log" else norms

    @property
    def _range_dtype(self) -> str:
        return "F16" if self.range == "fp16" else "F32"


def _unbiased_factor(norms: torch.Tensor, projected: torch.Tensor, decoded: torch.Tensor) -> torch.Tensor:
    """Return the factor ``[..., 1]`` by which norm_rule=unbiased multiplies all norms of a token. The arguments are ``[..., pair]``."""
    largest = norms.amax(-1, keepdim=True).clamp_min_(_MIN_NORMAL)
    product, squares, length = (
        (left / largest).mul_(other / largest).sum(-1, keepdim=True)
        for left, other in ((projected, decoded), (norms, norms), (decoded, decoded))
    )
    return unbiased_factor(torch.ones_like(product), product, length, "F32", squares)


StreamDigits = tuple[tuple[int, ...], tuple[int, ...]]
"""Bases and alphabets of a code stream's digits."""


@lru_cache(MAX_CACHED_TABLES)
def _stream_digits(dim: int, bins: int, norm_bits: int, arrangement: str) -> dict[str, StreamDigits]:
    """Return the digits of each code stream by name (spec/codecs/angle.md, Layout)."""
    rounded, norm = next_power_of_two(bins), 1 << norm_bits
    if arrangement == "direct":
        return {"symbol": ((rounded, norm), (bins, norm))}
    low = 1 << factors_of_two(bins)
    candidates: list[dict[str, StreamDigits]] = [{"angle": ((rounded,), (bins,))}]
    if 1 < low < bins:
        candidates.append({"angle_low": ((low,), (low,)), "angle_high": ((bins // low,), (bins // low,))})
    if not is_power_of_two(bins):
        candidates.append({"angle": ((bins,), (bins,))})

    def stored_bytes(streams: dict[str, StreamDigits]) -> int:
        return sum(row_bytes(dim // 2, bases, default_fields(dim // 2, bases)) for bases, _ in streams.values())

    return min(candidates, key=stored_bytes) | ({"norm_codes": ((norm,), (norm,))} if norm_bits else {})


@lru_cache(MAX_CACHED_TABLES)
def _packings(dim: int, bins: int, norm_bits: int, arrangement: str, fields: Fields) -> dict[str, Columns]:
    streams = _stream_digits(dim, bins, norm_bits, arrangement)
    return {name: Columns(dim // 2, streams[name][0], count, streams[name][1]) for name, count in fields}


@cache_per_device
def bin_directions(bins: int) -> torch.Tensor:
    """Return the cosine and sine of each bin's center, correctly rounded, float32 ``[bins, 2]``."""
    # Integers reduce the angle to the first eighth of a turn, where binary64 gives the correctly rounded binary32 and an exact zero.
    quadrant, part = torch.div(eighths := 4 * (2 * torch.arange(bins) + 1), 2 * bins, rounding_mode="floor"), eighths % (2 * bins)
    beyond = part > bins
    angle = torch.where(beyond, 2 * bins - part, part).to(torch.float64) * (pi / (4 * bins))
    cosine, sine = torch.where(beyond, angle.sin(), angle.cos()), torch.where(beyond, angle.cos(), angle.sin())
    directions = torch.stack([torch.stack([cosine, -sine, -cosine, sine]), torch.stack([sine, cosine, -sine, -cosine])])
    return directions.gather(1, quadrant.expand(2, 1, -1))[:, 0].T.to(torch.float32).contiguous()
