"""Tests of PageLayout.detect, which finds the position of each value that an engine's writer stores.

Writers that are not permutations are refused.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kvpack.errors import InvalidParameter, InvalidType, OutOfBounds
from kvpack.pages import PageCodec, PageGeometry, PageLayout

GEOMETRY = PageGeometry(layers=2, heads=2, tokens=8, dim_k=16, dim_v=16)
Place = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

PLAIN: dict[str, Place] = {
    "heads, tokens, K and V": lambda k, v: torch.stack([k, v], 3),
    "K and V first, tokens, heads": lambda k, v: torch.stack([k, v], 1).transpose(2, 3),
    "layers last": lambda k, v: torch.stack([k, v]).movedim(1, -1),
}
BLOCKED: dict[str, Place] = {
    "keys in blocks of four tokens": lambda k, v: torch.stack([k.view(2, 2, 2, 4, 16).transpose(3, 4).reshape(2, 2, 8, 16), v], 2),
    "pairs of channels": lambda k, v: torch.stack([k.view(2, 2, 8, 8, 2).transpose(2, 3).reshape(2, 2, 8, 16), v], 2),
}


def writer(place: Place, page: torch.Tensor) -> Callable[[torch.Tensor, torch.Tensor | None], None]:
    def write(k: torch.Tensor, v: torch.Tensor | None) -> None:
        assert v is not None
        flat = place(k, v).flatten()
        page.view(-1)[: flat.numel()] = flat

    return write


def pool_of(place: Place, slots: int) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
    source = torch.Generator().manual_seed(1)
    pairs = [tuple(torch.randn(2, 2, 8, 16, generator=source).bfloat16() for _ in range(2)) for _ in range(slots)]
    padded = [torch.nn.functional.pad(place(k, v).flatten(), (0, 5)) for k, v in pairs]
    return torch.stack(padded), pairs  # type: ignore[return-value]


@pytest.mark.parametrize("name", [*PLAIN, *BLOCKED])
def test_a_layout_is_detected_and_its_pages_are_packed(name: str) -> None:
    place = (PLAIN | BLOCKED)[name]
    pool, pairs = pool_of(place, 3)
    scratch = torch.zeros(pool.shape[1], dtype=torch.bfloat16)
    layout = PageLayout.detect(GEOMETRY, writer(place, scratch), scratch)
    codec = PageCodec("raw", GEOMETRY)
    rows = [bytearray(codec.nbytes) for _ in range(2)]
    other = torch.zeros_like(pool)
    if name in PLAIN:
        assert codec.encode_into(layout.buffer(pool), [2, 0], rows) == [None, None]
        assert codec.decode_into(rows, layout.buffer(other), [0, 1]) == [None, None]
    else:
        with pytest.raises(InvalidParameter, match=r"strides cannot describe the layout.*use gather and scatter"):
            layout.buffer(pool)
        staging = layout.staging(2)
        layout.gather(pool, [2, 0], staging)
        for number, slot in enumerate((2, 0)):
            for side, x in zip("kv", pairs[slot], strict=True):
                assert torch.equal(torch.stack([layer[number] for layer in staging.sides[side]]), x)
        assert codec.encode_into(staging, [0, 1], rows) == [None, None]
        back = layout.staging(2)
        assert codec.decode_into(rows, back, [0, 1]) == [None, None]
        layout.scatter(back, other, [0, 1])
    assert torch.equal(other[:2, :-5], pool[[2, 0], :-5])
    assert not other[2].any()


def test_layouts_with_equal_shapes_have_different_digests() -> None:
    digests = set()
    for place in (PLAIN | BLOCKED).values():
        page = torch.zeros(2 * 2 * 2 * 8 * 16, dtype=torch.bfloat16)
        digests.add(PageLayout.detect(GEOMETRY, writer(place, page), page).digest)
    assert len(digests) == len(PLAIN) + len(BLOCKED)


def test_layouts_of_one_sided_byte_pages_are_detected() -> None:
    geometry = PageGeometry(layers=1, heads=1, tokens=4, dim_k=6, dim_v=None, dtype="u8")
    page = torch.zeros(4, 8, dtype=torch.uint8)

    def write(k: torch.Tensor, v: torch.Tensor | None) -> None:
        assert v is None
        page[:, :6] = k[0, 0]

    layout = PageLayout.detect(geometry, write, page)
    assert layout.offsets_and_strides == {"k": (0, (0, 0, 8, 1))}


def test_writers_that_do_not_permute_values_are_refused() -> None:
    page = torch.zeros(2 * 2 * 2 * 8 * 16, dtype=torch.bfloat16)
    half = page.numel() // 2

    def lossy(k: torch.Tensor, v: torch.Tensor | None) -> None:
        page[: half - 1] = k.flatten()[:-1]

    def repeating(k: torch.Tensor, v: torch.Tensor | None) -> None:
        page[:half] = page[half:] = k.flatten()

    def overlapping(k: torch.Tensor, v: torch.Tensor | None) -> None:
        page[:half] = torch.maximum(k.flatten(), v.flatten() if v is not None else k.flatten())

    def scaling(k: torch.Tensor, v: torch.Tensor | None) -> None:
        page[:half], page[half:] = k.flatten() * 0.5, v.flatten() if v is not None else 0

    def adding(k: torch.Tensor, v: torch.Tensor | None) -> None:
        page[:half] += k.flatten()
        page[half:] += v.flatten() if v is not None else 0

    def skipping(k: torch.Tensor, v: torch.Tensor | None) -> None:
        for part, x in ((page[:half], k.flatten()), (page[half:], v.flatten() if v is not None else k.flatten())):
            part[x != 0] = x[x != 0]

    for write, message in (
        (adding, "k: the writer does not copy all values bit for bit"),
        (skipping, "k: the writer does not copy all values bit for bit"),
        (lossy, r"k: the writer put 512 values at 511 positions, which hold 511 distinct values: pages can be packed only if"),
        (repeating, r"k: the writer put 512 values at 1024 positions"),
        (overlapping, "v: the writer put keys and values at the same positions"),
        (scaling, "k: the writer does not copy all values bit for bit"),
    ):
        with pytest.raises(InvalidParameter, match=message):
            PageLayout.detect(GEOMETRY, write, page)
    with pytest.raises(InvalidType, match=r"page has dtype torch.float32, expected bf16"):
        PageLayout.detect(GEOMETRY, lossy, page.float())
    with pytest.raises(InvalidParameter, match="expected contiguous memory"):
        PageLayout.detect(GEOMETRY, lossy, page.view(2, -1).T)


CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "clamped as for fp8": lambda x: x.float().clamp(-448, 448).to(x.dtype),
    "clamped near the usual values": lambda x: x.float().clamp(-6, 6).to(x.dtype),
    "by another dtype": lambda x: x.to(torch.float16 if x.dtype == torch.bfloat16 else torch.bfloat16).to(x.dtype),
    "small ones lost": lambda x: torch.where(x.float().abs() < 1e-3, torch.zeros_like(x), x),
    "without the signs of zeros": lambda x: (x.float() + 0).to(x.dtype),
    "in another order for large ones": lambda x: x.flip(0) if x.float().abs().max() > 100 else x,
}


@pytest.mark.parametrize(
    ("dtype", "change"),
    [*((dtype, change) for dtype in ("bf16", "fp16", "fp32") for change in CHANGES), ("fp8_e4m3", "clamped near the usual values")],
)
def test_writers_that_change_some_values_are_refused(dtype: str, change: str) -> None:
    """Some writers change only values of certain sizes, as casts and limits do. Pages of common values would not reveal that."""
    geometry = PageGeometry(2, 2, 16, 16, 16, dtype)
    page = torch.zeros(2, geometry.raw_bytes // 2 // geometry.torch_dtype.itemsize, dtype=geometry.torch_dtype)

    def write(k: torch.Tensor, v: torch.Tensor | None) -> None:
        assert v is not None
        page[0], page[1] = k.flatten(), CHANGES[change](v.flatten())

    with pytest.raises(InvalidParameter, match="v: the writer does not copy all values bit for bit"):
        PageLayout.detect(geometry, write, page)


def test_channels_in_reverse_order_are_gathered() -> None:
    page = torch.zeros(2 * 2 * 2 * 8 * 16, dtype=torch.bfloat16)
    layout = PageLayout.detect(GEOMETRY, writer(lambda k, v: torch.stack([k, v]).flip(-1), page), page)
    with pytest.raises(InvalidParameter, match="strides cannot describe the layout"):
        layout.buffer(page[None])
    staging = layout.staging(1)
    layout.gather(torch.arange(page.numel()).bfloat16()[None], [0], staging)
    assert staging.sides["k"][0][0, 0, 0].tolist() == list(range(15, -1, -1))


def test_unsuitable_slots_and_staging_buffers_are_refused() -> None:
    """A negative slot would count from the end, and a repeated slot would lose one of two pages."""
    page = torch.zeros(2 * 2 * 2 * 8 * 16, dtype=torch.bfloat16)
    layout = PageLayout.detect(GEOMETRY, writer(lambda k, v: torch.stack([k, v], 3), page), page)
    pool, staging = torch.zeros(3, page.numel(), dtype=torch.bfloat16), layout.staging(2)
    for copy in (lambda slots: layout.gather(pool, slots, staging), lambda slots: layout.scatter(staging, pool, slots)):
        for slot in (-1, 3):
            with pytest.raises(OutOfBounds, match=f"slot {slot} was passed, but the buffer has 3"):
                copy([slot])
        with pytest.raises(InvalidParameter, match=r"staging has 2 slots of PageGeometry.*expected at least 3"):
            copy([0, 1, 2])
    layout.gather(pool, [1, 1], staging)
    with pytest.raises(InvalidParameter, match="slot 1 was passed 2 times"):
        layout.scatter(staging, pool, [1, 1])
    other = PageLayout.detect(PageGeometry(2, 2, 8, 16, 16), writer(lambda k, v: torch.stack([k, v]), page), page).staging(2)
    layout.gather(pool, [0], other)
    other.geometry = PageGeometry(2, 2, 4, 16, 16)
    with pytest.raises(InvalidParameter, match="staging has 2 slots of PageGeometry"):
        layout.gather(pool, [0], other)
