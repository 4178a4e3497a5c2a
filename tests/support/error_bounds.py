"""Check bounds on the difference between encoded and decoded values, with one function per codec or family.

The arguments of each function are the codec, ``x`` ``[batch, kv_head, token, dim]``, its streams, and their decoded values. It asserts the
bound.
"""

from __future__ import annotations

import math
import struct
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, Any

import numpy
import torch

from kvpack.formats.basis import run_columns
from kvpack.formats.token_norms import LOG8, decode_norms

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvpack.formats.angle import Angle
    from kvpack.formats.base import Codec
    from kvpack.formats.group import Group
    from kvpack.formats.klt import Klt
    from kvpack.formats.minifloat import Minifloat
    from kvpack.formats.polar import Polar
    from kvpack.formats.raw import Raw
    from kvpack.formats.scalar import Scalar
    from kvpack.formats.transform import Transform
    from kvpack.formats.trellis import Trellis

ROTATION_TOLERANCE = 2.0**-18
"""Largest error of a rotation in binary32, relative to the norm (spec/packing.md, Rotation)."""


FACTORS = ("norm", "radius", "scale", "range", "token_scale")
"""Streams that norm_rule changes."""


def for_any_norm_rule(check: Callable[[Any, Any, Any, Any], None]) -> Callable[[Any, Any, Any, Any], None]:
    """Extend ``check``, which is written for norm_rule=norm, to other rules, by replacing their factors first.

    With any rule, no token's error may exceed the error with norm_rule=norm, or the token's own norm.
    """

    @wraps(check)
    def checked(codec: Any, x: torch.Tensor, streams: Mapping[str, torch.Tensor], decoded: torch.Tensor) -> None:
        if codec.norm_rule == "norm":
            return check(codec, x, streams, decoded)
        plain = replace(codec, norm_rule="norm")
        measured = plain.encode(x)
        factored = {name: measured[name] if name in FACTORS else stream for name, stream in streams.items()}
        other = plain.decode(factored)
        check(plain, x, factored, other)
        axes = (1, 3) if codec.id == "group" and not codec.scale_per_head else (3,)
        error, plain_error, length, size = (value.double().square().sum(axes).sqrt() for value in (decoded - x, other - x, x, decoded))
        # An 8-bit norm is rounded to the nearest step of 2^(1/16).
        stored = 2.0 ** (1 / 32) - 1 if getattr(codec, "norm", "") == LOG8 else 0.0
        # A polar codec with several radii chooses a factor for each.
        larger = (torch.hypot if codec.id == "polar" else torch.maximum)(plain_error, length)
        _check_errors(error, larger * (1 + 2.0**-9) + stored * size + 2.0**-23 * math.sqrt(x.shape[1] * codec.dim))
        return None

    return checked


def check_raw(codec: Raw, x: torch.Tensor, streams: Mapping[str, torch.Tensor], decoded: torch.Tensor) -> None:
    """Check that decoded values are exact up to half a unit in the last place of the stored type."""
    precision, smallest = {"bf16": (2.0**-8, 2.0**-134), "fp16": (2.0**-11, 2.0**-25), "fp32": (0.0, 0.0)}[codec.dtype]
    _check_errors(decoded - x, x.abs() * precision + smallest)


@for_any_norm_rule
def check_group(codec: Group, x: torch.Tensor, streams: Mapping[str, torch.Tensor], decoded: torch.Tensor) -> None:
    """Check that errors are at most half a step in the coded frame, plus the rounding that spec/codecs/group.md states."""
    u = codec.rotation.forward(x)
    bound = group_error_bound(codec, streams, u)
    norm = u.double().norm(dim=-1)
    rotated = 0.0 if codec.rotation.kind == "none" else ROTATION_TOLERANCE
    _check_errors(codec.decode_frame(streams) - u, bound + rotated * norm[..., None])
    _check_errors((decoded - x).double().norm(dim=-1), bound.double().square().sum(-1).sqrt() + 3 * ROTATION_TOLERANCE * norm)


@for_any_norm_rule
def check_direction(codec: Codec, x: torch.Tensor, streams: Mapping[str, torch.Tensor], decoded: torch.Tensor) -> None:
    """Check that codecs of directions and norms decode each token with an error of at most 1.5 times its norm."""
    smallest = 2.0**-24 * math.sqrt(codec.dim)
    _check_errors((decoded - x).double().norm(dim=-1), 1.5 * x.double().norm(dim=-1) + smallest)


def group_error_bound(codec: Group, streams: Mapping[str, torch.Tensor], u: torch.Tensor) -> torch.Tensor:
    """Return the largest error of every value of ``u``, given the scales that the encoder chose."""
    tokens, dim = u.shape[2], u.shape[3]
    axis = 2 if codec.axis == "token" else 3
    pairs = codec.with_fp16_scales(streams)[1]["scales"].float()
    scale, center = (pairs[..., member].repeat_interleave(codec.size, axis)[:, :, :tokens, :dim] for member in (0, 1))
    factor = torch.ones(u.shape[0], 1, tokens)
    if codec.token_scale != "none":
        factor = streams["token_scale"].float()
    factor = factor[..., None]
    # A token whose factor is stored as zero is lost entirely: its values are below the type's smallest number.
    scaled = u / torch.where(factor > 0, factor, 1.0)
    middle = (2**codec.bits - 1) / 2
    rounding = middle * torch.clamp(scale * 2.0**-11, min=2.0**-25)
    bound = scale / 2 + rounding + 2.0**-21 * _group_max(codec, scaled.abs())
    if codec.scale_dtype == "u8":
        # A root is off by half a step plus the rounding of the range; if the scale becomes too small, the outermost codes are clamped.
        step, minimum = streams["scale_range"].float()[..., :2, None].unbind(-2)
        root = (_group_max(codec, (scaled - center).abs()) / middle).sqrt()
        off = step / 2 + 2.0**-10 * (minimum + 255 * step)
        # The range of scales does not allow for the rounding of centers to binary16.
        bound = bound + middle * (2 * root + off) * off + 2.0**-25
    lost = 2.0**-25 * math.sqrt(u.shape[1] * dim) if codec.token_scale.startswith("fp16") else 2.0**-60
    return torch.where(factor > 0, bound * factor * (1 + 2.0**-20), lost)


def _group_max(codec: Group, values: torch.Tensor) -> torch.Tensor:
    axis = 2 if codec.axis == "token" else 3
    parts = [part.amax(axis, keepdim=True).expand_as(part) for part in values.split(codec.size, axis)] if values.numel() else [values]
    return torch.cat(parts, axis)


def check_minifloat(codec: Minifloat, x: torch.Tensor, streams: Mapping[str, torch.Tensor], decoded: torch.Tensor) -> None:
    """Check that errors are at most half a step per element, plus saturation.

    Values saturate where the published scale is too small for the largest value.
    """
    form, size = codec.format, x.double().abs()
    unit, coarse = 0.0, 0.0
    if codec.granularity != "block":
        scale, lost = streams["scale"].double()[..., None], 1 / 16
    else:
        codes = streams["block_scales"]
        if codec.scale_dtype == "e8m0":
            scale, lost = torch.exp2(codes.double() - 127), 1 / 8 if form.bits == 8 else 1 / 4
        else:
            unit, lost = streams["global_scale"].double()[..., None], 1 / 16
            scale = codes.view(torch.float8_e4m3fn).double() * unit
            coarse = 6 * 2.0**-10 * unit
        scale = scale.repeat_interleave(codec.block_size, -1)[..., : codec.dim]
    smallest_normal = 2.0 ** (1 - form.bias)
    step = torch.maximum(size * 2.0 ** -(form.fraction_bits + 1), scale * (smallest_normal * 2.0 ** -(form.fraction_bits + 1)))
    saturated = torch.where(size > form.largest * scale, size * lost + coarse, 0.0)
    _check_errors(decoded.double() - x, step + saturated + size * 2.0**-20 + 2.0**-145)


@for_any_norm_rule
def check_angle(codec: Angle, x: torch.Tensor, streams: Mapping[str, torch.Tensor], decoded: torch.Tensor) -> None:
    """Check that errors are at most half a bin for the angle of each pair, and half a step for its norm.

    The rounding of the stored range is added to the latter.
    """
    u = codec.rotation.forward(x).double()
    norm = u.unflatten(-1, (-1, 2)).norm(dim=-1)
    allowed = norm * (math.pi / codec.bins + 2.0**-15) + 2.0**-120
    if codec.norm != "fp32":
        step, minimum = streams["range"].double()[..., None].unbind(-2)
        span = step * (2**codec.norm_bits - 1)
        rounding = (minimum.abs() + span) * 2.0**-10
        if codec.norm == "linear":
            allowed += step / 2 + rounding + 2.0**-24 * 2**codec.norm_bits
        else:
            # Norms below 1/256 of the token's largest are raised to it (spec/writers.md, Scales).
            raised = norm.maximum(norm.amax(-1, keepdim=True) / 256)
            allowed += raised - norm + raised * torch.expm1(math.log(2) * (step / 2 + rounding).clamp(max=100))
    error = (codec.decode_frame(streams) - u).unflatten(-1, (-1, 2)).norm(dim=-1)
    rotated = 0.0 if codec.rotation.kind == "none" else ROTATION_TOLERANCE
    _check_errors(error, allowed + rotated * u.norm(dim=-1, keepdim=True))
    whole = allowed.square().sum(-1).sqrt() + 3 * rotated * (u.norm(dim=-1) + decoded.double().norm(dim=-1))
    _check_errors((decoded - x).double().norm(dim=-1), whole * (1 + 2.0**-20))


@for_any_norm_rule
def check_polar(codec: Polar, x: torch.Tensor, streams: Mapping[str, torch.Tensor], decoded: torch.Tensor) -> None:
    """Check that every angle has the code of the nearest stored angle, and that radii are only rounded.

    The error of an angle also affects the angles on the levels below it.
    """
    radii = u = codec.rotation.forward(x).double()
    error = torch.zeros_like(u)
    for level, tables in zip(codec.levels, codec.tables, strict=True):
        paired, alone = (2 * level.angles, radii.shape[-1] - 2 * level.angles)
        (pairs, passed), (errors, passed_errors) = radii.split((paired, alone), -1), error.split((paired, alone), -1)
        first, second = pairs.unflatten(-1, (-1, 2)).unbind(-1)
        angle = torch.atan2(second, first)
        if tables:
            nearest = torch.cat([_nearest(part, table) for part, table in zip(angle.split(level.counts, -1), tables, strict=True)], -1)
        else:
            step = 2 * math.pi / 2**level.bits
            nearest = (torch.floor(angle / step) + 0.5) * step
        first_error, second_error = errors.unflatten(-1, (-1, 2)).unbind(-1)
        below = torch.hypot(nearest.cos() * first_error, nearest.sin() * second_error)
        error = torch.cat([(angle - nearest).abs() + below, passed_errors], -1)
        radii = torch.cat([torch.hypot(first, second), passed], -1)
    precision, smallest = (2.0**-11, 2.0**-25) if codec.norm == "fp16" else (0.0, 0.0)
    allowed = (radii.abs() * (error + precision + 2.0**-17) + smallest + 2.0**-118).square().sum(-1).sqrt()
    norm = u.norm(dim=-1)
    rotated = 0.0 if codec.rotation.kind == "none" else ROTATION_TOLERANCE
    _check_errors((codec.decode_frame(streams) - u).norm(dim=-1), allowed + rotated * norm)
    _check_errors((decoded - x).double().norm(dim=-1), allowed + 3 * rotated * (norm + decoded.double().norm(dim=-1)))


def _nearest(angles: torch.Tensor, table: bytes) -> torch.Tensor:
    values = torch.tensor(struct.unpack(f"<{len(table) // 4}f", table), dtype=torch.float64)
    return values[torch.bucketize(angles.contiguous(), (values[1:] + values[:-1]) / 2)]


@for_any_norm_rule
def check_scalar(codec: Scalar, x: torch.Tensor, streams: Mapping[str, torch.Tensor], decoded: torch.Tensor) -> None:
    """Check that every coordinate has the nearest level of its table, up to the rounding of the stored norm."""
    u = x.double() @ codec.rotation.matrix().double().T
    norm = u.norm(dim=-1, keepdim=True)
    nearest = torch.empty_like(u)
    for part, table in zip(codec.channel_sets, (codec.magnitude_table, codec.high_magnitude_table), strict=False):
        levels = torch.frombuffer(bytearray(table), dtype=torch.float32).double()
        values = u[..., list(part.channels)]
        nearest[..., list(part.channels)] = (values.abs()[..., None] - levels * norm[..., None]).abs().amin(-1)
    # Tokens near the smallest normal number have coarse directions.
    allowed = nearest + (decode_norms(streams["norm"]).double()[..., None] - norm).abs() + ROTATION_TOLERANCE * norm + 2.0**-120
    _check_errors(codec.decode_frame(streams) - u, allowed)
    whole = allowed.square().sum(-1).sqrt() + 3 * ROTATION_TOLERANCE * (norm[..., 0] + decoded.double().norm(dim=-1))
    _check_errors((decoded - x).double().norm(dim=-1), whole)


@for_any_norm_rule
def check_trellis(codec: Trellis, x: torch.Tensor, streams: Mapping[str, torch.Tensor], decoded: torch.Tensor) -> None:
    """Check that errors are at most those of the worst path, plus the rounding of the norm.

    The worst path has the nearest value of each channel, except that its last windows are determined by the first.
    """
    u = x.double() @ codec.rotation.matrix().double().T
    norm = u.norm(dim=-1, keepdim=True)
    table = torch.frombuffer(bytearray(codec.table), dtype=torch.float16).double().view(1 << codec.bits, -1)
    unit = u / norm.clamp(min=2.0**-126)
    held = -(-(codec.state_bits - codec.bits) // codec.bits)
    squares = torch.stack(
        [(channel[..., None, None] - table).square().amin(-2).amax(-1) for channel in unit[..., :-held].unbind(-1)], -1
    ).sum(-1)
    squares = squares + torch.maximum(unit[..., -held:] - table.min(), table.max() - unit[..., -held:]).square().sum(-1)
    # At every channel, the search sacrifices the lowest bits of a cost.
    path = (squares * (1 + codec.dim * 2.0**-18)).sqrt()
    longest = math.sqrt(codec.dim) * float(table.abs().max())
    rounding = (decode_norms(streams["norm"]).double() - norm[..., 0]).abs() * longest
    allowed = path * norm[..., 0] + rounding + ROTATION_TOLERANCE * norm[..., 0] + 2.0**-116
    _check_errors((codec.decode_frame(streams) - u).norm(dim=-1), allowed)
    whole = allowed + 3 * ROTATION_TOLERANCE * (norm[..., 0] + decoded.double().norm(dim=-1))
    _check_errors((decoded - x).double().norm(dim=-1), whole)


def check_transform(codec: Transform, x: torch.Tensor, streams: Mapping[str, torch.Tensor], decoded: torch.Tensor) -> None:
    """Check that no column is further from its level than an encoder rounds, plus the distance from the level to its value."""
    batch, heads, tokens, dim = x.shape
    if not tokens:
        return
    source = codec.source_for(heads)
    values = source.tables.values
    shift = (values - torch.arange(values.shape[1]) + source.tables.max_level).abs().max().item()
    difference = (x.double() - decoded.double())[:, :, :tokens]
    if source.rope is not None:
        difference = source.rope.rotate(difference.float(), 0, inverse=True).double()
    wide = difference if codec.scope == "head" else difference.transpose(1, 2).reshape(batch, 1, tokens, heads * dim)
    matrix = source.rows[:, 1:].double().numpy()
    columns = (wide @ torch.from_numpy(numpy.linalg.inv(matrix))).abs() * 2.0 ** (codec.step / 16)
    # Levels and their inverses are computed in binary32.
    large = 1 + columns.amax() + 2.0 ** (codec.step / 16) * x.double().abs().amax()
    assert (columns <= 0.5 + shift + 2.0**-14 * large).all()


def check_klt(codec: Klt, x: torch.Tensor, streams: Mapping[str, torch.Tensor], decoded: torch.Tensor) -> None:
    """Check that no value in a table is nearer to a column than the one whose code is stored."""
    rows = codec.basis_rows(streams)
    columns = x.double() @ torch.from_numpy(numpy.linalg.inv(rows.matrix.double().numpy())) - rows.mean.double()
    # Allow for the rounding of the encoder's inverse, which is binary32.
    slack = 2.0**-16 * (x.double().norm(dim=-1) + 1)
    plain = replace(codec, gain="none").decode_frame({name: stream for name, stream in streams.items() if name != "gain"})
    chosen = plain.double() - rows.mean.double()
    heads = x.shape[1]
    if codec.fixed_heads is None:
        parts = [(slice(None), run_columns(run, codec.dim), run, width) for run, width in enumerate(codec.widths)]
    else:
        count = len(codec.widths) // heads
        short = [(slice(number // count, number // count + 1), number % count, width) for number, width in enumerate(codec.widths)]
        parts = [(head, slice(8 * run, min(8 * run + 8, codec.dim)), run // 2, width) for head, run, width in short]
    for head, part, run, width in parts:
        if width and x.numel():
            own = columns[:, head, :, part]
            table = rows.table(run, width).double().expand(-1, heads, -1)[:, head, None, None]
            distance = (own[..., None] - table).abs().amin(-1)
            _check_errors((own - chosen[:, head, :, part]).abs() - distance, slack[:, head, :, None] + 2.0**-20 * distance)
        elif x.numel():
            assert (chosen[:, head, :, part] == 0).all()
    assert torch.isfinite(decoded).all()


def _check_errors(error: torch.Tensor, allowed: torch.Tensor) -> None:
    excess = (error.abs() - allowed).amax().item() if error.numel() else 0.0
    assert excess <= 0, f"an error is {excess:.3g} above its bound"
