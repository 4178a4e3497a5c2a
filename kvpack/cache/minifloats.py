"""Keys or values in a serving engine's fp8, mxfp8, mxfp4 or nvfp4 format, packed and restored bit for bit (``Minifloats``)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import torch

from kvpack.formats.columns import default_fields
from kvpack.formats.errors import InvalidParameter, InvalidType
from kvpack.formats.minifloat import BLOCK_CHANNELS, E8M0_NAN, ELEMENTS, GRANULARITIES, Minifloat
from kvpack.runtime.modes import float32_no_grad

from .packed_runs import PackedRun, PackedRuns
from .side import Side

ELEMENT_DTYPES = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
"""Element formats by torch dtype, for dtypes with one element per value."""

# These dtypes exist since PyTorch 2.7 and 2.8.
_E8M0: torch.dtype | None = getattr(torch, "float8_e8m0fnu", None)
_E2M1: torch.dtype | None = getattr(torch, "float4_e2m1fn_x2", None)
_SCALES = {torch.float32: "fp32", torch.float16: "fp16"}
_LARGEST = 3.4e38


@dataclass(frozen=True, eq=False, repr=False)
class Minifloats:
    """The keys or the values of one layer in a serving engine's low-precision float format.

    ``elements`` is ``[batch, kv_head, token, dim]`` of torch.float8_e4m3fn or float8_e5m2, or ``[batch, kv_head, token, dim / 2]`` of
    torch.float4_e2m1fn_x2, with the even channel in the lower 4 bits. Elements may also be uint8 if ``element`` names their format: e4m3,
    e5m2 or e2m1.

    The dtype and shape of ``scales`` determine how values share scales:

    - float32 or float16: per tensor if one number or ``[batch, 1, 1]``, per head if ``[kv_head]`` or ``[batch, kv_head, 1]``, and per
      token if ``[batch, kv_head, token]``. If the shape is ambiguous, ``granularity`` ("tensor", "head" or "token") resolves it.
    - float8_e8m0fnu (or uint8) ``[batch, kv_head, token, dim / 32]``: mxfp8 and mxfp4.
    - float8_e4m3fn (or uint8) ``[batch, kv_head, token, dim / 16]`` with ``global_scale``, one float32 number or
      ``[batch, 1, 1]``: nvfp4. Rows are ordered by token and block, not swizzled for matrix units.

    Raises InvalidType or InvalidParameter if the arguments do not match, or if an element, a scale or their product is not finite. Source:
    spec/codecs/minifloat.md.
    """

    elements: torch.Tensor
    scales: torch.Tensor
    global_scale: torch.Tensor | None = None
    element: str | None = None
    granularity: str | None = None

    def __post_init__(self) -> None:
        self._check_types()
        _ = self.codec
        with float32_no_grad(self.elements.device):
            self._check_values()

    def _check_types(self) -> None:
        arguments: dict[str, Any] = {"elements": self.elements, "scales": self.scales, "global_scale": self.global_scale}
        for name, value in arguments.items():
            if not isinstance(value, torch.Tensor) and (name != "global_scale" or value is not None):
                hint = "" if name == "elements" else ": pass a number as torch.tensor(1.0)"
                raise InvalidType(f"{name}: expected a tensor, but got a {type(value).__name__}{hint}")
        if self.granularity not in (None, *GRANULARITIES):
            raise InvalidParameter(f"granularity is {self.granularity!r}, expected one of {', '.join(GRANULARITIES)}")

    def __repr__(self) -> str:
        return f"Minifloats({self.codec.element} {list(self.shape)}, {self.codec.scale_dtype} scales per {self.codec.granularity})"

    @cached_property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape of the values, ``(batch, kv_head, token, dim)``."""
        batch, heads, tokens, last = self.elements.shape
        return batch, heads, tokens, 2 * last if self._element == "e2m1" else last

    @cached_property
    def _element(self) -> str:
        dtype = self.elements.dtype
        named = ELEMENT_DTYPES.get(dtype) or ("e2m1" if dtype == _E2M1 and _E2M1 is not None else None)
        if named is None and dtype != torch.uint8:
            raise InvalidType(f"elements has dtype {dtype}, expected float8_e4m3fn, float8_e5m2, float4_e2m1fn_x2 or uint8")
        if self.element is not None and self.element not in ELEMENTS:
            raise InvalidParameter(f"element is {self.element!r}, expected one of {', '.join(ELEMENTS)}")
        if named is None and self.element is None:
            raise InvalidParameter(f"elements has dtype uint8: pass their format as element=, one of {', '.join(ELEMENTS)}")
        if named is not None and self.element not in (None, named):
            raise InvalidParameter(f"elements has dtype {dtype}, which is {named}, but element is {self.element!r}: omit element=")
        name = named or self.element
        assert name is not None
        return name

    @cached_property
    def codec(self) -> Minifloat:
        """The codec that stores these elements and scales unchanged."""
        if self.elements.dim() != 4:
            raise InvalidParameter(
                f"elements has shape {list(self.elements.shape)}, expected [batch, kv_head, token, dim]"
            )
        if not self.elements.shape[0] or not self.elements.shape[1] or not self.elements.shape[2]:
            raise InvalidParameter(
                f"elements has shape {list(self.elements.shape)}, expected at least one sequence, one head and one token"
            )
        if self.scales.device != self.elements.device:
            raise InvalidParameter(
                f"scales is on {self.scales.device}, but elements is on {self.elements.device}: move them to the same device"
            )
        granularity, scale_dtype = self._block_scales() or self._coarse_scales()
        if self.granularity not in (None, granularity):
            raise InvalidParameter(
                f"granularity is {self.granularity!r}, but the scales {list(self.scales.shape)} are per {granularity}: pass that "
                "granularity, or omit it"
            )
        dim = self.shape[3]
        return Minifloat(
            dim, self._element, granularity, scale_dtype, (("codes", default_fields(dim, (1 << ELEMENTS[self._element].bits,))),)
        )

    def _block_scales(self) -> tuple[str, str] | None:
        """Return the granularity and dtype of block scales, or None if scales are per tensor, head or token."""
        dtype = self.scales.dtype
        if dtype in _SCALES:
            if self.global_scale is not None:
                raise InvalidParameter(f"scales has dtype {dtype}, which takes no global_scale: omit it, or pass float8_e4m3fn scales")
            return None
        if dtype == torch.float8_e4m3fn or (dtype == torch.uint8 and self.global_scale is not None):
            if self.global_scale is None:
                raise InvalidParameter("scales has dtype float8_e4m3fn (nvfp4): pass global_scale too (1 if the engine has none)")
            scale_dtype = "e4m3"
        elif dtype == torch.uint8 or (dtype == _E8M0 and _E8M0 is not None):
            if self.global_scale is not None:
                raise InvalidParameter(f"scales has dtype {dtype}, which takes no global_scale: omit it, or pass float8_e4m3fn scales")
            scale_dtype = "e8m0"
        else:
            raise InvalidType(f"scales has dtype {dtype}, expected float32, float16, float8_e8m0fnu, float8_e4m3fn or uint8")
        batch, heads, tokens, dim = self.shape
        expected = (batch, heads, tokens, -(-dim // BLOCK_CHANNELS[scale_dtype]))
        if tuple(self.scales.shape) != expected:
            raise InvalidParameter(f"scales has shape {list(self.scales.shape)}, expected {list(expected)} for {scale_dtype} scales")
        return "block", scale_dtype

    def _coarse_scales(self) -> tuple[str, str]:
        batch, heads, tokens, _ = self.shape
        shapes = {
            "tensor": ((), (1,), (batch, 1, 1), (1, 1, 1)),
            "head": ((heads,), (batch, heads, 1)),
            "token": ((batch, heads, tokens),),
        }
        shape = next((name for name in (*shapes, None) if name is None or self._matches_granularity(name, shapes[name])), None)
        if shape is None:
            requested = f"per {self.granularity}" if self.granularity in shapes else "per tensor, head or token"
            raise InvalidParameter(
                f"scales has shape {list(self.scales.shape)}, expected scales {requested}: one number or {[batch, 1, 1]} per tensor, "
                f"{[heads]} or {[batch, heads, 1]} per head, {[batch, heads, tokens]} per token"
            )
        return shape, _SCALES[self.scales.dtype]

    def _matches_granularity(self, granularity: str, shapes: tuple[tuple[int, ...], ...]) -> bool:
        return self.granularity in (None, granularity) and tuple(self.scales.shape) in shapes

    @cached_property
    def _bytes(self) -> torch.Tensor:
        return self.elements.contiguous().view(torch.uint8)

    def _scale_rows(self, scales: torch.Tensor, heads: int) -> torch.Tensor:
        """Expand the scales to one row per run, ``[batch, heads, 1]``."""
        return scales.reshape(-1 if scales.dim() == 3 else 1, heads, 1).expand(self.shape[0], heads, 1).contiguous()

    @cached_property
    def streams(self) -> dict[str, torch.Tensor]:
        """The codec's streams: packed codes, and the scales unchanged."""
        codes = self._bytes
        if self._element == "e2m1":
            codes = torch.stack([codes & 0xF, codes >> 4], -1).flatten(-2)
        packed = self.codec.pack("codes", codes.to(torch.int32))
        if self.codec.granularity == "block":
            packed["block_scales"] = self.scales.contiguous().view(torch.uint8)
            if self.global_scale is not None:
                packed["global_scale"] = self._scale_rows(self._checked_global_scale(self.global_scale), 1)
        elif self.codec.granularity == "token":
            packed["scale"] = self.scales.contiguous()
        else:
            packed["scale"] = self._scale_rows(self.scales, self.shape[1] if self.codec.granularity == "head" else 1)
        return packed

    def _checked_global_scale(self, scale: torch.Tensor) -> torch.Tensor:
        if scale.dtype != torch.float32:
            raise InvalidType(f"global_scale is {scale.dtype}, expected float32")
        if tuple(scale.shape) not in ((), (1,), (1, 1, 1), (self.shape[0], 1, 1)):
            raise InvalidParameter(f"global_scale has shape {list(scale.shape)}, expected one number or {[self.shape[0], 1, 1]}")
        if scale.device != self.elements.device:
            raise InvalidParameter(
                f"global_scale is on {scale.device}, but elements is on {self.elements.device}: move them to the same device"
            )
        return scale

    def _check_values(self) -> None:
        """Raise InvalidParameter if an element, a scale or their product is not finite. The message shows the first such value."""
        form, streams = ELEMENTS[self._element], self.streams
        if form.finite < 1 << form.bits - 1:
            _raise_if_any((self._bytes & 0x7F) >= form.finite, f"the {self._element} element", self._bytes)
        largest = form.largest
        if self.codec.granularity == "block":
            first_invalid_code = E8M0_NAN if self.codec.scale_dtype == "e8m0" else ELEMENTS["e4m3"].finite
            codes = streams["block_scales"]
            _raise_if_any(codes >= first_invalid_code, f"the {self.codec.scale_dtype} scale", codes, "NaN or below zero")
            largest *= 2.0 ** (int(codes.max()) - 127) if self.codec.scale_dtype == "e8m0" else ELEMENTS["e4m3"].largest
        for name in ("scale", "global_scale"):
            if name in streams:
                _raise_if_any(~torch.isfinite(streams[name]), f"{name}", streams[name])
                largest *= float(streams[name].abs().max())
        if largest > _LARGEST:
            values = self.codec.decode(streams)
            _raise_if_any(~torch.isfinite(values), "the value (element times scale)", values)

    def side(self, window: int = 0) -> Side:
        """Return the packed keys or values. All bits of the elements and scales are preserved.

        Appended tokens stay raw until there are ``window`` of them, which are then encoded together.
        """
        batch, heads, tokens, dim = self.shape
        tail = torch.empty(batch, heads, 0, dim, dtype=torch.bfloat16, device=self.elements.device)
        return Side(self.codec, PackedRuns.from_runs([PackedRun(self.codec, tokens, self.streams)]), tail, window)

    @classmethod
    def from_side(cls, side: Side) -> Self:
        """Return the elements and scales of packed keys or values, bit for bit.

        e2m1 elements are returned as uint8, two per byte. Scales have all of their axes, without broadcasting. Raises InvalidParameter if
        ``side`` has another codec, a raw tail, runs with different scales, or e2m1 elements with an odd head dim. Raises InvalidType if
        ``side`` is not a Side.
        """
        untyped: Any = side
        if not isinstance(untyped, Side):
            raise InvalidType(f"expected packed keys or values, such as cache[0].k, but got a {type(untyped).__name__}")
        codec = side.codec
        if not isinstance(codec, Minifloat):
            actual = codec.id if codec.without_sidecars is codec else f"{codec.id} with sidecars"
            raise InvalidParameter(
                f"the codec is {actual}, expected minifloat without sidecars (such as raw tokens): convert the cache first, for example "
                "to 'fp8;raw=0'"
            )
        if side.tail.shape[2] or not side.runs:
            raise InvalidParameter(
                f"expected only packed tokens, but got {side.packed_tokens} and a raw tail of {side.tail.shape[2]}: slice off the tail"
            )
        with float32_no_grad(side.device):
            runs = side.merged().runs
            if len(runs) > 1:
                raise InvalidParameter(
                    f"the tokens were packed in {len(runs)} runs with different scales: slice the layer into runs first. The first "
                    f"run has {runs[0].tokens} tokens"
                )
            streams = runs[0].streams
            codes = codec.digits(streams)[0].to(torch.uint8)
            if codec.element == "e2m1":
                if codec.dim % 2:
                    raise InvalidParameter(
                        f"the head dim is {codec.dim}, but e2m1 needs an even head dim, because it stores two elements per byte"
                    )
                elements = codes[..., 0::2] | codes[..., 1::2] << 4
            else:
                elements = codes.view(next(dtype for dtype, name in ELEMENT_DTYPES.items() if name == codec.element))
            if codec.granularity != "block":
                return cls(elements, streams["scale"], None, codec.element, codec.granularity)
            dtype = torch.float8_e4m3fn if codec.scale_dtype == "e4m3" else _E8M0 or torch.uint8
            scales = streams["block_scales"].contiguous().view(dtype)
            return cls(elements, scales, streams.get("global_scale"), codec.element, codec.granularity)


def _raise_if_any(wrong: torch.Tensor, description: str, values: torch.Tensor, fault: str = "NaN or infinite") -> None:
    if wrong.any():
        index = [int(i) for i in torch.nonzero(wrong)[0]]
        value = values[tuple(index)].item()
        shown = f"{value:#04x}" if isinstance(value, int) else str(value)
        raise InvalidParameter(f"{description} at {index} is {shown}, which is {fault}: pass only finite values")
