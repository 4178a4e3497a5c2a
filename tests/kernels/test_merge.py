"""Merged partial results equal float64 sums, with or without a rotation, in one or two frames, for few or many parts."""

from __future__ import annotations

import pytest
import torch

from support.interpreter import DEVICE, needs_loaded_bounds

HEADS, ROWS, PADDED = 2, 3, 8


@pytest.mark.scenario
@needs_loaded_bounds
@pytest.mark.kernels
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize(("parts", "second"), [(1, 1), (16, 16), (17, 16), (37, 5)])
@pytest.mark.parametrize(("widths", "dim", "rotated"), [((96, 96), 96, False), ((40, 64), 64, True), ((150, 96), 96, True)])
def test_parts_are_weighted_and_rotated(
    widths: tuple[int, int], dim: int, rotated: bool, parts: int, second: int, sinks: bool, uninitialized_is_poisoned: None
) -> None:
    from kvpack.formats.columns import next_power_of_two
    from kvpack.kernels.attend import merge
    from kvpack.kernels.attend.softmax import NO_SCORE

    channels = 32
    generator = torch.Generator().manual_seed(parts)
    widths = widths if second < parts else widths[:1]
    columns = max(widths)
    block_columns = next_power_of_two(columns) if rotated else channels
    sums = torch.randn(HEADS, PADDED, parts, columns, generator=generator)
    largest = 10 * torch.randn(HEADS, PADDED, parts, generator=generator)
    total = torch.rand(HEADS, PADDED, parts, generator=generator)
    # A part that saw no token, and a row of such parts alone.
    unseen = torch.zeros(HEADS, PADDED, parts, dtype=torch.bool)
    unseen[0, :, -1] = unseen[1, 1] = True
    largest[unseen], total[unseen], sums[unseen] = NO_SCORE.value, 0, 0
    places = [-(-width // block_columns) * block_columns for width in widths]
    matrix = torch.randn(HEADS, sum(places), dim, generator=generator) if rotated else torch.zeros(1, 1, dim)
    sink_logits = torch.randn(HEADS * ROWS, generator=generator)
    stored = sums.clone()
    if len(widths) == 2:
        stored[:, :, :second, widths[0] :] = torch.nan
        stored[:, :, second:, widths[1] :] = torch.nan
    out = torch.empty(HEADS, ROWS, dim, device=DEVICE)
    merge.merge_originals[(HEADS * ROWS, -(-dim // channels))](
        out, *(x.to(DEVICE) for x in (stored, largest, total, matrix, sink_logits)), parts, second, ROWS, PADDED, HEADS, 1,
        len(matrix), SINK_LOGITS=sinks, COLUMNS=columns, WIDTHS=widths, DIM=dim, BLOCK_PARTS=16, BLOCK_COLUMNS=block_columns,
        BLOCK_DIM=channels, ROTATED=rotated, DEPENDENT=False,
    )  # fmt: skip

    weights = torch.exp2(largest.double() - largest.double().amax(-1, keepdim=True))
    weights[unseen] = 0
    top = largest.double().amax(-1)
    expected = torch.zeros(HEADS, PADDED, dim, dtype=torch.float64)
    before = 0
    for number, (width, place) in enumerate(zip(widths, places, strict=True)):
        own = slice(0, second) if number == 0 and len(widths) == 2 else slice(second if number else 0, parts)
        found = (weights[..., own, None] * sums[..., own, :width].double()).sum(2)
        expected += found @ matrix[:, before : before + width].double() if rotated else found
        before += place
    weight_sum = (weights * total.double()).sum(-1)
    if sinks:
        weight_sum[:, :ROWS] += torch.exp2(sink_logits.double().reshape(HEADS, ROWS) - top[:, :ROWS])
    expected = torch.where(weight_sum[..., None] > 0, expected / weight_sum.clamp(min=1e-300)[..., None], 0)[:, :ROWS]
    assert torch.allclose(out.cpu().double(), expected, rtol=1e-4, atol=1e-4)
