"""Check the error bounds of a codec with sidecars stage by stage, including the bound of the codec itself."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from kvpack.formats.balanced import FrameMap
from kvpack.formats.block_rotation import BlockRotation
from kvpack.formats.channel_order import ChannelOrder
from kvpack.formats.channel_scale import ChannelScale, factors
from kvpack.formats.key_mean import KeyMean
from kvpack.formats.outliers import Outliers
from kvpack.formats.qjl import Qjl
from kvpack.formats.raw_positions import mark_poor_fits, replace_tokens
from kvpack.formats.raw_tokens import RawTokens
from kvpack.formats.runs import Run
from kvpack.formats.token_norms import measure_fit_errors, norms_per_head
from support.error_bounds import ROTATION_TOLERANCE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvpack.formats.base import Codec
    from kvpack.formats.sidecars import CodecWithSidecars

    Streams = Mapping[str, torch.Tensor]

QJL_WORST = math.sqrt(1 + math.pi / 2)
"""Largest factor by which the qjl correction can increase the error (spec/writers.md, Sidecars)."""

BALANCED_TOLERANCE = 2.0**-16
"""Largest error of a balanced frame followed by its inverse, relative to a token, for well-conditioned matrices."""

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def check_sidecars(
    codec: CodecWithSidecars,
    x: torch.Tensor,
    streams: Streams,
    decoded: torch.Tensor,
    check: Callable[[Codec, torch.Tensor, Streams, torch.Tensor], None],
) -> None:
    """Check that exact values are exact, that the inner codec stays within its bound, and that nothing else is lost.

    ``check`` is the check of the inner codec.
    """
    raw, rest = torch.zeros(x.shape[0], 1, x.shape[2], dtype=torch.bool), x
    if by_position := codec.raw_positions:
        raw[by_position.token_positions(streams)[1], 0, by_position.token_positions(streams)[0]] = True
        stored, of_raw = x.to(_DTYPES[by_position.dtype]).to(torch.float32), raw[..., None].expand_as(x)
        assert torch.equal(decoded[of_raw].view(torch.int32), stored[of_raw].view(torch.int32))
        chosen = by_position.choose(norms_per_head(x))
        if codec.summary.shared_scales and by_position.high_norm:
            token, sequence = chosen.T.nonzero().unbind(1)
            rest = replace_tokens(x, token, sequence, chosen, codec.group_tokens)
            norms = codec.coded_norms(Run((*x.shape,), x.device, lambda: iter([rest if codec.changes_norms else x])), None)
            chosen = mark_poor_fits(chosen, measure_fit_errors(norms, codec.summary.shared_scales))
        assert torch.equal(raw[:, 0], chosen)
        rest = by_position.encode(x, raw[:, 0], codec.group_tokens)[0]
    if not codec.codec.supports_all_sidecars:
        own = {name: streams[name] for name in codec.codec.layout(1, 1, 0)}
        mine = codec.codec.decode(own)
        assert torch.equal(mine[~raw.expand(x.shape[:3])], decoded[~raw.expand(x.shape[:3])])
        check(codec.codec, rest, own, mine)
        return
    if raw_tokens := codec.sidecar(RawTokens):
        raw = streams["raw_token_flags"] != 0
        rest = _check_raw_tokens(codec, raw_tokens, x, raw, decoded)
    if balanced := codec.sidecar(FrameMap):
        # Check the remaining error in the frame in which it occurred.
        rest, given = balanced.forward(rest, streams), rest
        off = (balanced.inverse(rest, streams).double() - given).norm(dim=-1)
        assert (off <= BALANCED_TOLERANCE * given.double().norm(dim=-1) + codec.dim * 2.0**-149).all()
        decoded = balanced.forward(decoded, streams)
    factor = factors(streams) if codec.sidecar(ChannelScale) else torch.ones(1, 1, 1, codec.dim)
    scaled = rest / factor
    order, block_rotation = codec.sidecar(ChannelOrder), codec.sidecar(BlockRotation)
    turned = order.forward(scaled, streams) if order else scaled
    turned = block_rotation.forward(turned, streams) if block_rotation else turned
    size = turned.double().norm(dim=-1, keepdim=True)
    shift = torch.zeros_like(turned)
    if key_mean := codec.sidecar(KeyMean):
        shift = _check_key_mean(key_mean, codec.rotation.forward(turned), streams)
        # Subtract the means in the same way as the encoder.
        turned = turned - codec.rotation.inverse(key_mean.vectors(streams)).repeat_interleave(key_mean.tokens, 2)[:, :, : x.shape[2]]
        size = size + shift.double().norm(dim=-1, keepdim=True)
    u = codec.rotation.forward(turned)
    coded, error = turned, torch.zeros(u.shape[:3], dtype=torch.float64)
    flagged = torch.zeros_like(u, dtype=torch.bool)
    if outliers := codec.sidecar(Outliers):
        flagged, error = _check_outliers(codec, outliers, u, shift, size, raw, streams)
        coded = codec.rotation.inverse(u.masked_fill(flagged, 0.0))
    inner = codec.codec
    own = {name: streams[name] for name in inner.layout(1, 1, 0)}
    mine, checked = inner.decode(own), coded
    if block_rotation:
        # The encoder's products may be rounded differently; if values cancel, only this rounding remains.
        framed, slack = codec.rotation.forward(coded).double(), ROTATION_TOLERANCE * size
        off = inner.decode_frame(own).double() - framed
        checked = codec.rotation.inverse((framed + torch.minimum(torch.maximum(off, -slack), slack)).to(torch.float32))
        checked = torch.where((coded.double() - mine).abs() <= slack, mine, checked)
    check(inner, checked, own, mine)
    left = (codec.rotation.forward(coded).double() - inner.decode_frame(own)).masked_fill(flagged, 0.0)
    residual = left.norm(dim=-1)
    # Subnormal products and sums have an absolute rounding error in each channel.
    rounding = ROTATION_TOLERANCE * size[..., 0] + codec.dim * 2.0**-149
    if qjl := codec.sidecar(Qjl):
        # The residual of a token that shares a scale with far larger ones may be far larger than the token, and so may its rounding error.
        _check_signs(qjl, left, rounding + ROTATION_TOLERANCE * residual, streams)
        norm = streams["qjl_norm"].double()
        precision, smallest = (2.0**-11, 2.0**-25) if qjl.norm == "fp16" else (2.0**-23, 2.0**-149)
        lost = residual * precision + smallest + rounding
        assert ((norm - residual).abs() <= lost).all()
        residual = residual * QJL_WORST * (1 + 2.0**-8) + math.sqrt(math.pi / 2) * lost
    error = error + residual
    found = ((decoded.double() - rest) / factor).norm(dim=-1)
    allowed = error + 5 * (rounding + ROTATION_TOLERANCE * (decoded.double() / factor).norm(dim=-1)) + 2.0**-120
    excess = torch.where(raw, 0.0, found - allowed)
    assert (excess <= 0).all(), f"an error is {excess.max():.3g} above its bound"


def _check_key_mean(key_mean: KeyMean, u: torch.Tensor, streams: Streams) -> torch.Tensor:
    """Check that the key means equal the page means of ``u`` to within half a step of their codes. Return each token's mean."""
    vectors = key_mean.vectors(streams)
    for page, vector in enumerate(vectors.unbind(2)):
        mean = u[:, :, page * key_mean.tokens : (page + 1) * key_mean.tokens].double().mean(2)
        step = streams["key_mean_scale"][:, :, page, None].double()
        # Allow for the rounding of the scale in a page's largest channel; the smallest scales are subnormal.
        rounded = mean.abs().amax(-1, keepdim=True) * 2.0**-10 + 2.0**-17
        rotated = ROTATION_TOLERANCE * u[:, :, page * key_mean.tokens : (page + 1) * key_mean.tokens].double().norm(dim=-1).amax(2)
        assert ((vector - mean).abs() <= step / 2 + rounded + rotated[..., None]).all()
    return vectors.repeat_interleave(key_mean.tokens, 2)[:, :, : u.shape[2]]


def _check_raw_tokens(
    codec: CodecWithSidecars, raw_tokens: RawTokens, x: torch.Tensor, raw: torch.Tensor, decoded: torch.Tensor
) -> torch.Tensor:
    """Check that raw tokens are exact and that there are as many as requested.

    Returns the values in which they are replaced as for the encoder.
    """
    tokens = x.shape[2]
    assert raw[:, :, : raw_tokens.first].all()
    least = max(min(raw_tokens.first, tokens), min(raw_tokens.low_norm, tokens))
    assert ((raw.sum(2) >= least) & (raw.sum(2) <= raw_tokens.first + raw_tokens.low_norm)).all()
    stored = x.to(_DTYPES[raw_tokens.dtype]).to(torch.float32)
    of_raw = raw[..., None].expand_as(x)
    assert torch.equal(decoded[of_raw].view(torch.int32), stored[of_raw].view(torch.int32))
    return raw_tokens.encode(x, raw[:, 0], codec.group_tokens)[0]


def _check_signs(qjl: Qjl, residual: torch.Tensor, rounding: torch.Tensor, streams: Streams) -> None:
    """Check that the signs are those of the codec's residual ``residual``, and that the correction follows the specification."""
    (negative,) = qjl.packing.unpack([streams[f"qjl_signs.{plane}"] for plane in range(len(qjl.packing.planes))])
    matrix, signs = qjl.rotation.matrix().double(), 1 - 2 * negative.double()
    assert (signs * (residual @ matrix.T) >= -2 * rounding[..., None] - 2.0**-120).all()
    norm = streams["qjl_norm"].double()[..., None]
    expected = norm * math.sqrt(math.pi / (2 * qjl.dim)) * (signs @ matrix)
    assert ((qjl.correction(streams) - expected).norm(dim=-1) <= ROTATION_TOLERANCE * norm[..., 0] + 2.0**-120).all()


def _check_outliers(
    codec: CodecWithSidecars,
    outliers: Outliers,
    u: torch.Tensor,
    shift: torch.Tensor,
    size: torch.Tensor,
    raw: torch.Tensor,
    streams: Streams,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Check that outliers equal those of ``u``, rounded once, and are exact in the coded frame before pages' ``shift`` is added.

    ``size`` is the norm of the rotated values. Returns a mask of the outliers and the norm of their rounding error.
    """
    flagged = outliers.flags(streams)
    stored = streams["outliers"][0, 0].to(torch.float32)
    placed = torch.zeros_like(u).unflatten(-1, (-1, 4))
    placed.permute(2, 0, 1, 3, 4)[flagged.permute(2, 0, 1, 3)] = stored
    wide = flagged.repeat_interleave(4, -1)
    lost = (placed.flatten(-2).double() - u).masked_fill(~wide, 0.0)
    unrotated = codec.rotation.kind == "none" and codec.sidecar(BlockRotation) is None
    rotated = 0.0 if unrotated else 2 * ROTATION_TOLERANCE * size
    assert (lost.abs() <= u.abs() * 2.0**-11 + 2.0**-25 + rotated).all()
    if codec.sidecar(Qjl) is None:
        exact = wide & ~raw[..., None]
        assert torch.equal(codec.decode_frame(streams)[exact], (placed.flatten(-2) + shift)[exact])
    return wide, lost.norm(dim=-1)
