"""minifloat: floats of 8 or 4 bits with the scales that engines store next to them (spec/codecs/minifloat.md).

Covers fp8 caches (e4m3 or e5m2, with one scale per tensor, head or token), and mxfp8, mxfp4 and nvfp4 (8-bit scales per block of channels).
Sources: OCP 8-bit Floating Point Specification 1.0; OCP Microscaling Formats 1.0, Sec. 5 and 6.3; NVIDIA's NVFP4.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache, reduce
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Self

from .base import MAX_DIM, PayloadRule
from .columns import Columns, default_fields
from .errors import InvalidParameter, InvalidPayload
from .family import CodecFamily, in_range, one_of
from .lazy import functional, numpy, torch
from .parameter_checks import Fields, check_choice, check_fields
from .runs import Run, RunEncoder
from .streams import NORMS, Layout
from .tables import MAX_CACHED_TABLES, cache_per_device
from .token_norms import stored_norm
from .value_blocks import first_index, value_blocks

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .options import Options
    from .value_blocks import Array


class ElementFormat(NamedTuple):
    """Format of an element: a sign, ``exponent_bits`` and ``fraction_bits``.

    Codes with a magnitude of ``finite`` or more are NaN or infinity.
    """

    exponent_bits: int
    fraction_bits: int
    finite: int

    @property
    def bits(self) -> int:
        return 1 + self.exponent_bits + self.fraction_bits

    @property
    def bias(self) -> int:
        return (1 << self.exponent_bits - 1) - 1

    @property
    def largest(self) -> float:
        """Largest finite value."""
        return self.value(self.finite - 1)

    def value(self, code: int) -> float:
        """Return the value of ``code``, which must be neither NaN nor infinity."""
        exponent, fraction = divmod(code & (1 << self.bits - 1) - 1, 1 << self.fraction_bits)
        significand = fraction + (1 << self.fraction_bits if exponent else 0)
        magnitude = significand * 2.0 ** (max(exponent, 1) - self.bias - self.fraction_bits)
        return -magnitude if code >> self.bits - 1 else magnitude


ELEMENTS = {"e4m3": ElementFormat(4, 3, 0x7F), "e5m2": ElementFormat(5, 2, 0x7C), "e2m1": ElementFormat(2, 1, 8)}
GRANULARITIES = ("tensor", "head", "token", "block")
BLOCK_CHANNELS = {"e8m0": 32, "e4m3": 16}
"""Number of channels per block, by the dtype of the block's scale."""

E8M0_NAN = 0xFF
E8M0_BIAS = 127

_CONVERTING_DEVICES = ("cpu", "cuda")
"""Device types on which torch converts float32 to 8-bit floats."""

_MAX_POWER_RATIO = 3.0
_MIN_SIZE_FACTOR = 0.35
"""Root mean square, relative to the smallest normal element, at which subnormal elements double the error of normal variables."""
_MIN_BLOCK_SIZE_FACTOR = 0.009
"""Like ``_MIN_SIZE_FACTOR``, but relative to the run's scale, for blocks with e4m3 scales.

For smaller values, block scales are subnormal.
"""

_MAX_HEADROOM = 16.0
_GROWTH_FACTOR = 2.0
_MAX_SCALED = 3.4e38
_SATURATION_MARGIN = 1 + 1 / 32


@dataclass(frozen=True)
class Minifloat(CodecFamily):
    """Codec that stores values as ``element`` floats. Each unit of ``granularity`` shares a scale, which is stored as ``scale_dtype``.

    ``scale_dtype`` is fp32 or fp16 if there is one scale per sequence and run (``tensor``), per head and run (``head``), or per token of a
    head (``token``). For ``block``, it is e8m0, a power of two per 32 channels, or e4m3 per 16 channels with one additional float32 per
    run.
    """

    id: ClassVar[str] = "minifloat"

    dim: int = field(metadata=in_range(1, MAX_DIM))
    element: str = field(metadata=one_of(ELEMENTS))
    granularity: str = field(metadata=one_of(GRANULARITIES))
    scale_dtype: str = field(metadata=one_of((*NORMS, *BLOCK_CHANNELS)))
    fields: Fields

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self.id, "scale_dtype", self.scale_dtype, tuple(BLOCK_CHANNELS if self.granularity == "block" else NORMS))
        if self.granularity == "block" and self.scale_dtype == "e4m3" and self.element != "e2m1":
            raise InvalidParameter(f"codec {self.id}: scale_dtype e4m3 (nvfp4) needs element e2m1, but element is {self.element}")
        check_fields(self.id, self.fields, ("codes",))
        self.packings()

    @classmethod
    def create(cls, dim: int, side: str, options: Options) -> Self:
        element = cls.option(options, "element", "e4m3")
        scale_dtype = cls.option(options, "scale_dtype", "fp32", "scales")
        in_blocks = scale_dtype in BLOCK_CHANNELS
        granularity = cls.option(options, "granularity", "block" if in_blocks else "tensor", "per")
        options.finish()
        if in_blocks != (granularity == "block"):
            expected = "scales=e8m0 and scales=e4m3 need per=block; scales=fp32 and scales=fp16 need per=tensor, per=head or per=token"
            raise InvalidParameter(f"codec {cls.id}: scales={scale_dtype} and per={granularity} cannot be combined: {expected}")
        cls.check_value("dim", dim)
        return cls(dim, element, granularity, scale_dtype, (("codes", default_fields(dim, (1 << ELEMENTS[element].bits,))),))

    @property
    def nominal_bits(self) -> float:
        return self.format.bits + (8 / self.block_size if self.granularity == "block" else 0)

    @property
    def format(self) -> ElementFormat:
        return ELEMENTS[self.element]

    @property
    def block_size(self) -> int:
        """Number of channels that share an 8-bit scale."""
        return BLOCK_CHANNELS[self.scale_dtype]

    @property
    def blocks_per_token(self) -> int:
        """Number of blocks per token. The last block may be partial."""
        return -(-self.dim // self.block_size)

    @property
    def run_scale(self) -> str | None:
        """Name of the stream with one scale per run, or None if there is no such stream."""
        if self.granularity == "block":
            return "global_scale" if self.scale_dtype == "e4m3" else None
        return None if self.granularity == "token" else "scale"

    def packings(self) -> dict[str, Columns]:
        return _packings(self.dim, self.format.bits, self.fields)

    def scale_layouts(self, batch: int, heads: int, tokens: int) -> dict[str, Layout]:
        if self.granularity == "block":
            result = {"block_scales": Layout("U8", (batch, heads, tokens, self.blocks_per_token))}
            return result | ({"global_scale": Layout("F32", (batch, 1, 1), per="run")} if self.run_scale else {})
        dtype = NORMS[self.scale_dtype]
        if self.granularity == "token":
            return {"scale": Layout(dtype, (batch, heads, tokens))}
        return {"scale": Layout(dtype, (batch, heads if self.granularity == "head" else 1, 1), per="run")}

    def begin(self, run: Run, previous: Mapping[str, torch.Tensor] | None) -> RunEncoder:
        if self.run_scale is None:
            return RunEncoder({}, lambda block, _: self._encode(block, None))
        batch, heads = run.shape[:2]
        largest = torch.zeros(batch, heads, 1, dtype=torch.float32, device=run.device)
        for block in run.blocks():
            if block.numel():
                largest = largest.maximum(block.abs().amax((2, 3))[..., None])
        if self.granularity != "head":
            largest = largest.amax(1, keepdim=True)
        scale = run_scales(self, largest, None if previous is None else previous[self.run_scale])
        if not torch.isfinite(scale).all():
            _ = stored_norm(_divide(largest, self.format.largest), "F16", "scale")
        return RunEncoder({self.run_scale: scale}, lambda block, _: self._encode(block, scale))

    def encode(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        batch, heads, tokens, dim = x.shape
        run = self.begin(Run((batch, heads, tokens, dim), x.device, lambda: iter((x,))), None)
        return {**run.encode(x, 0), **run.streams}

    def _encode(self, x: torch.Tensor, run_scale: torch.Tensor | None) -> dict[str, torch.Tensor]:
        streams = {}
        if self.granularity == "block":
            grouped = self._split_into_blocks(x)
            largest = grouped.abs().amax(-1)
            if run_scale is None:
                scales = block_exponents(largest, self.element)
                # 2^(127 - code): the reciprocal of a power of two is also a power of two.
                inverse = (2 * E8M0_BIAS - scales << 23).view(torch.float32)
                scaled = self._join_blocks(grouped * inverse[..., None])
            else:
                factor = run_scale.unsqueeze(-1)
                scales = encode_elements(_divide_by_scale(_divide(largest, ELEMENTS["e2m1"].largest), factor), "e4m3").to(torch.int32)
                scale = element_values("e4m3", x.device).index_select(0, scales.reshape(-1)).view(scales.shape) * factor
                scaled = self._join_blocks(_divide_by_scale(grouped, scale[..., None]))
            streams["block_scales"] = scales.to(torch.uint8)
        else:
            if run_scale is None:
                largest = x.abs().amax(-1) if x.numel() else x.new_zeros(x.shape[:-1])
                dtype = NORMS[self.scale_dtype]
                _ = stored_norm(_divide(largest, self.format.largest), dtype, "scale")
                run_scale = streams["scale"] = _scale_for(largest, self.format.largest, dtype == "F16")
            scaled = _divide_by_scale(x, run_scale.to(torch.float32).unsqueeze(-1))
        return self.pack("codes", encode_elements(scaled, self.element)) | streams

    def _split_into_blocks(self, values: torch.Tensor) -> torch.Tensor:
        """Reshape ``[..., dim]`` to ``[..., block, channel of the block]``. A partial last block is padded with zeros."""
        spare = self.blocks_per_token * self.block_size - self.dim
        whole = functional.pad(values, (0, spare)) if spare else values
        return whole.reshape(*values.shape[:-1], self.blocks_per_token, self.block_size)

    def _join_blocks(self, grouped: torch.Tensor) -> torch.Tensor:
        """Invert ``_split_into_blocks``."""
        return grouped.flatten(-2)[..., : self.dim]

    def decode_digits(self, digits: tuple[torch.Tensor, ...], streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
        (codes,) = digits
        values = element_values(self.element, codes.device).index_select(0, codes.reshape(-1)).view(codes.shape)
        if self.granularity != "block":
            return values.mul_(streams["scale"].to(torch.float32).unsqueeze(-1))
        grouped, scales = self._split_into_blocks(values), streams["block_scales"].to(torch.int32)
        if self.run_scale is not None:
            # The product of element and scale is exact: it has at most six significant bits.
            scale = element_values("e4m3", codes.device).index_select(0, scales.reshape(-1)).view(scales.shape)
            return self._join_blocks(grouped.mul_(scale[..., None])).mul_(streams["global_scale"].unsqueeze(-1))
        # 2^(code - 127) as a product of two normal numbers, because a device may flush the smallest, a subnormal number, to zero.
        half = scales >> 1
        first, second = (half + 64 << 23).view(torch.float32), (scales - half + 63 << 23).view(torch.float32)
        return self._join_blocks(grouped.mul_(first[..., None]).mul_(second[..., None]))

    @property
    def error_spread(self) -> float:
        # Scales are powers of two.
        return _MAX_POWER_RATIO if self.scale_dtype == "e8m0" else 0.0

    def error_sizes(self, streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the largest scale of each token's blocks, float32 ``[batch, kv_head, token]``."""
        return (streams["block_scales"].amax(3).to(torch.int32) << 23).view(torch.float32)

    def min_token_rms(self, streams: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        if self.run_scale is None:
            return None
        scale = streams[self.run_scale].to(torch.float32)
        if self.granularity == "block":
            return scale * _MIN_BLOCK_SIZE_FACTOR
        # In the subnormal range, the error of an element is a fraction of the smallest normal number.
        return scale * (_MIN_SIZE_FACTOR * 2.0 ** (2 - self.format.bias))

    def with_wide_run_scale(self, streams: Mapping[str, torch.Tensor]) -> tuple[Minifloat, Mapping[str, torch.Tensor]]:
        """Convert float16 run scales to float32. Returns the codec with float32 scales and its streams, which decode to the same bits."""
        if self.run_scale != "scale" or self.scale_dtype == "fp32":
            return self, streams
        return replace(self, scale_dtype="fp32"), {**streams, "scale": streams["scale"].to(torch.float32)}

    def payload_rules(self) -> tuple[PayloadRule, ...]:
        return (self._check_numbers,)

    def _check_numbers(self, arrays: Mapping[str, Array], where: str) -> None:
        """Raise InvalidPayload for elements and block scales that are NaN or infinite, and for negative block scales."""
        if self.element != "e2m1":
            # Elements of 8 bits are the bytes of words; bytes without an element are zero.
            for plane in range(len(self.packings()["codes"].planes)):
                self._check_elements(arrays[f"codes.{plane}"], f"{where}.codes.{plane}")
        if self.granularity == "block":
            self._check_block_scales(arrays["block_scales"], f"{where}.block_scales")

    def _check_elements(self, plane: Array, where: str) -> None:
        limit = self.format.finite
        if isinstance(plane, numpy.ndarray) and plane.size:
            # Codes without a sign are the largest signed integers, and those with one the largest unsigned.
            codes = numpy.ascontiguousarray(plane).view(numpy.uint8)
            if codes.view(numpy.int8).max() < limit and codes.max() < limit + 0x80:
                return
        for first, block in value_blocks(plane):
            for shift in (0, 8):
                invalid = (block >> numpy.uint16(shift) & numpy.uint16(0x7F)) >= self.format.finite
                if invalid.any():
                    value = int(block[invalid.argmax()]) >> shift & 0xFF
                    fault = "infinity" if self.element == "e5m2" and value & 0x7F == self.format.finite else "NaN"
                    at = first_index(invalid, first, plane.shape)
                    raise InvalidPayload(
                        f"{where}: the {self.element} in bits {shift} to {shift + 7} of the word at {at} is {value:#04x}, which is "
                        f"{fault}; elements must be finite"
                    )

    def _check_block_scales(self, scales: Array, where: str) -> None:
        nan = E8M0_NAN if self.scale_dtype == "e8m0" else ELEMENTS["e4m3"].finite
        if isinstance(scales, numpy.ndarray) and scales.size and scales.max() < nan:
            return
        for first, block in value_blocks(scales):
            invalid = block >= nan
            if invalid.any():
                value = int(block[invalid.argmax()])
                fault = "NaN" if value & nan == nan else "a scale below zero"
                at = first_index(invalid, first, scales.shape)
                raise InvalidPayload(
                    f"{where}: the {self.scale_dtype} at {at} is {value:#04x}, which is {fault}; block scales must be below {nan:#04x}"
                )


def encode_elements(x: torch.Tensor, element: str) -> torch.Tensor:
    """Encode float32 ``x`` to the codes of the nearest elements, in any integer dtype.

    Ties go to even codes, and larger values are clamped to the largest element.
    """
    form = ELEMENTS[element]
    if element == "e2m1":
        size = x.abs().clamp_max_(form.largest)
        # The steps are 1/2, 1 and 2 from 0, 2 and 4 on; in each range, the right result is the smallest of the three.
        steps = ((size * scale).round_().add_(first) for scale, first in ((2.0, 0), (1.0, 2), (0.5, 4)))
        return torch.add(reduce(torch.minimum, steps), torch.signbit(x), alpha=8)
    if x.device.type not in _CONVERTING_DEVICES:
        return encode_portably(x, element)
    dtype = torch.float8_e4m3fn if element == "e4m3" else torch.float8_e5m2
    return x.clamp(-form.largest, form.largest).to(dtype).view(torch.uint8)


def encode_portably(x: torch.Tensor, element: str) -> torch.Tensor:
    """Return the codes of ``encode_elements``, int32, computed with operations that every device supports."""
    form = ELEMENTS[element]
    spare = 23 - form.fraction_bits
    smallest_normal = 2.0 ** (1 - form.bias)
    bits = x.contiguous().view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    # A carry out of the fraction correctly increments the exponent.
    normal = (magnitude + ((magnitude >> spare) & 1) + ((1 << spare - 1) - 1) >> spare) - (E8M0_BIAS - form.bias << form.fraction_bits)
    subnormal = (x.abs().clamp_max(smallest_normal) * (2.0**form.fraction_bits / smallest_normal)).round_().to(torch.int32)
    codes = torch.where(x.abs() < smallest_normal, subnormal, normal).clamp_max_(form.finite - 1)
    return codes | (bits < 0).to(torch.int32) << form.bits - 1


def block_exponents(largest: torch.Tensor, element: str) -> torch.Tensor:
    """Return the e8m0 codes of blocks with the largest magnitudes ``largest``, float32: int32 in the shape of ``largest``.

    Each code stands for the smallest scale at which the largest magnitude does not round above the largest element. OCP MX (Sec. 6.3) uses
    floor(log2(largest)) - emax, which clips large magnitudes by up to an eighth (e2m1: a quarter). Doubling the scale for these blocks
    loses no precision, because elements have exponents: the error of normally distributed values falls by 9% for e4m3 and by 3% for e2m1.
    """
    form = ELEMENTS[element]
    bits = largest.contiguous().view(torch.int32) + exponent_carry(form)
    return ((bits >> 23) - floor_log2(form.largest)).clamp_min_(0)


def exponent_carry(form: ElementFormat) -> int:
    """Return the number that, added to float32 bits, raises the exponent if the value would round above the largest element.

    Only values with the exponent of the largest element can round that way.
    """
    last = form.finite - 1 & (1 << form.fraction_bits) - 1
    return (1 << 23) - (2 * last + 1 << 22 - form.fraction_bits) - 1


def floor_log2(value: float) -> int:
    """Return the exponent of the largest power of two that does not exceed ``value``. The value must be at least 1."""
    return int(value).bit_length() - 1


def max_quotient(codec: Minifloat) -> float:
    """Return the largest supported ratio of a value to its run's scale."""
    return codec.format.largest * (ELEMENTS["e4m3"].largest if codec.granularity == "block" else 1)


def run_scales(codec: Minifloat, largest: torch.Tensor, previous: torch.Tensor | None) -> torch.Tensor:
    """Choose the scales of a run with the largest values ``largest``, ``[batch, kv_head or 1, 1]``. Scales that do not fit are infinite.

    The scales of the ``previous`` run are kept unless they are too small or far too large, because runs with equal scales can be joined. A
    new scale leaves room to grow, so that later runs seldom need another one. A scale of 0 means that all values so far are 0.
    """
    quotient_limit = max_quotient(codec)
    half = codec.scale_dtype == "fp16"
    scale = _scale_for(largest, quotient_limit, half)
    if previous is None:
        return scale
    fits = (scale <= previous) & ((previous.to(torch.float32) <= _MAX_HEADROOM * scale.to(torch.float32)) | (scale == 0))
    grown = _scale_for(largest * _GROWTH_FACTOR, quotient_limit, half)
    return torch.where(fits, previous, torch.where((scale > previous) & (previous > 0) & torch.isfinite(grown), grown, scale))


def _scale_for(largest: torch.Tensor, quotient_limit: float, half: bool) -> torch.Tensor:
    """Return ``largest`` / ``quotient_limit`` as float16 (with ``half``) or float32.

    A subnormal scale that would saturate values is rounded up by one unit.
    """
    largest = largest.clamp_max(_MAX_SCALED)
    scale = _divide(largest, quotient_limit).to(torch.float16 if half else torch.float32)
    bits = scale.view(torch.int16 if half else torch.int32)
    # Values up to half a step above the largest element round to it.
    short = scale.to(torch.float32) * (quotient_limit * _SATURATION_MARGIN) < largest
    return (bits + short).view(scale.dtype)


def _divide(x: torch.Tensor, divisor: float) -> torch.Tensor:
    """Divide ``x`` by ``divisor``, correctly rounded on every device.

    On CUDA, PyTorch would multiply by the reciprocal of a Python number.
    """
    return x / x.new_full((), divisor)


def _divide_by_scale(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return x / torch.where(scale > 0, scale, torch.inf)


@cache_per_device
def element_values(element: str) -> torch.Tensor:
    """Return the value of each code, float32 ``[2^bits]``. NaN and infinity codes, which readers reject, map to 0."""
    form = ELEMENTS[element]
    half = 1 << form.bits - 1
    return torch.tensor([form.value(code) if code & half - 1 < form.finite else 0.0 for code in range(2 * half)], dtype=torch.float32)


@lru_cache(MAX_CACHED_TABLES)
def _packings(dim: int, bits: int, fields: Fields) -> dict[str, Columns]:
    return {"codes": Columns(dim, (1 << bits,), dict(fields)["codes"])}
