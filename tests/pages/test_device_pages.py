"""Pages in device memory are encoded, checked and decoded as on the host, in the interpreter anywhere and on CUDA devices.

interpreter.py describes which process runs which of these tests.
"""

from __future__ import annotations

import random
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch

from kvpack import Basis, Recipe
from kvpack.errors import DigestMismatch, InvalidHeader, InvalidParameter, KvpackError, KvpackWarning, NotKvpack, Truncated
from kvpack.file import row as rows_of
from kvpack.pages import PageBuffer, PageCodec, PageGeometry, batched
from kvpack.pages.device import DevicePages
from support.engine_pages import ENGINES, bits, filled_buffer, values
from support.interpreter import DEVICE, INTERPRETED
from support.klt_bases import random_basis

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.kernels

SMALL = PageGeometry(layers=2, heads=2, tokens=32, dim_k=64, dim_v=32)
WIDE = PageGeometry(layers=2, heads=2, tokens=32, dim_k=64, dim_v=32, dtype="fp32")
EXACT = ["raw", "kivi-4", "kivi-2-u8", "kv=group:b=4,g=32,axis=channel", "fp8", "mxfp4", "nvfp4"]
"""Recipes whose codes and values the kernels produce bit for bit. Narrower dtypes may be rounded differently."""
CLOSE = [
    "octopus-3",
    "octopus-4",
    "turboquant-4",
    "oscar-2",
    "oscar-2-u8",
    "turboangle-k8v4",
    "kv=quaternion:s=24,r=3;raw=4,0.6,4",
    "octopus-3;boundary-1",
    "polarquant-4",
]
TOGETHER = [
    "kv=scalar:b=3,channel_scale=fp16",
    "turboquant-2.5",
    "octopus-3-scaled",
    "k=polar:b=4.2.2.2.2.2;v=group:b=3,scales=u8,channel_scale=fp16",
    "kv=scalar:b=3,raw_low_norm=0.95",
    "k=group:b=2,g=8,raw_low_norm=0.95;v=octahedral:b=3,raw_low_norm=0.95",
    "k=scalar:b=3,mean=16,norm=log8,raw_low_norm=0.95;v=octahedral:b=3,norm=log8",
]
"""Recipes whose pages are encoded together."""
BY_HOST = ["k=group:b=4,g=32,channel_order=u8,block_rotation=32;v=octahedral:b=3", "kv=angle:n=48,channel_scale=fp16"]
"""Recipes whose pages pass through host memory."""
ODD = PageGeometry(layers=3, heads=1, tokens=3, dim_k=20, dim_v=20)
"""Pages whose size is not a multiple of the size of a load."""
LATENTS = PageGeometry(layers=2, heads=1, tokens=33, dim_k=512, dim_v=64)
"""MLA latents and their rotary values."""
OF_LATENTS = [
    "k=group:b=4,g=32;v=raw",
    "k=group:b=2,g=32,scales=u8;v=raw",
    "oscar-2-u8",
    "octopus-3",
    "k=scalar:b=4;v=raw",
    "nvfp4",
    "k=polar:b=4;v=raw",
]


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """Use the interpreter on the CPU if it is enabled, and the host path otherwise."""
    if INTERPRETED:
        monkeypatch.setenv("KVPACK_KERNELS", "triton")
    return lambda: monkeypatch.setenv("KVPACK_KERNELS", "")


def on_device(geometry: PageGeometry, slots: int, seed: int = 0) -> tuple[PageBuffer, list[torch.Tensor]]:
    made = [x.to(DEVICE) for x in values(geometry, slots, seed)]
    return PageBuffer(geometry, *made), made


def by_host(codec: PageCodec, pages: list[torch.Tensor], slots: list[int], keys: list[bytes] | None = None) -> torch.Tensor:
    """Encode pages by the host path and return the rows."""
    rows = torch.zeros(len(slots), codec.nbytes, dtype=torch.uint8)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("KVPACK_KERNELS", "")
        outcomes = codec.encode_into(PageBuffer(codec.geometry, *[x.cpu() for x in pages]), slots, rows, keys=keys)
    assert outcomes == [None] * len(slots)
    return rows


def host_decoded(codec: PageCodec, rows: torch.Tensor) -> list[torch.Tensor]:
    target, found = filled_buffer(codec.geometry, rows.shape[0], seed=9)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("KVPACK_KERNELS", "")
        assert codec.decode_into(rows.cpu(), target, range(rows.shape[0])) == [None] * rows.shape[0]
    return found


def test_harmful_tokens_without_free_slots_give_one_warning() -> None:
    """The count is returned with the results of a job, for which the host waits anyway."""
    geometry = PageGeometry(layers=2, heads=2, tokens=64, dim_k=64, dim_v=64)
    pages, (k, _) = on_device(geometry, 2)
    k[1, 1, 1, 5:8] *= 30
    codec = PageCodec("oscar-2", geometry)
    rows = torch.zeros(2, codec.nbytes, dtype=torch.uint8, device=DEVICE)
    with pytest.warns(KvpackWarning, match="in pages of 64 tokens, 2 tokens .* token_scale=fp16-per-head") as caught:
        assert codec.encode_into(pages, [0, 1], rows) == [None, None]
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert codec.encode_into(pages, [1], rows[:1]) == [None]
    assert codec.raw_tokens_left_out == 4


LOSSES = [
    (32, "int-3", "v", 40.0),
    (32, "fp8", "v", 3e5),
    (32, "oscar-2", "k", 100.0),
    (32, "k=octahedral:b=3,mean=32;v=raw", "k", 200.0),
    (64, "int-3", "v", 20.0),
    (64, "kvpack-3", "k", 60.0),
]
"""Page sizes in tokens, recipes, sides, and values that reduce the precision of their own token or of the page's other tokens."""


@pytest.mark.scenario
@pytest.mark.parametrize(("tokens", "recipe", "side", "value"), LOSSES)
def test_imprecise_tokens_are_raw_or_counted_as_on_the_host(tokens: int, recipe: str, side: str, value: float) -> None:
    """If the page has room, the token is raw. Otherwise it is counted, and a warning is given."""
    geometry = PageGeometry(layers=1, heads=2, tokens=tokens, dim_k=128, dim_v=128, dtype="fp32")
    pages, made = on_device(geometry, 3)
    made[0] += 3
    codec = PageCodec(recipe, geometry)
    rows = torch.zeros(3, codec.nbytes, dtype=torch.uint8, device=DEVICE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert codec.encode_into(pages, [0, 1, 2], rows) == [None] * 3
    assert codec.raw_tokens_left_out == 0
    x = made["kv".index(side)]
    given = x[1, 0, 1, 9].clone()
    x[1, 0, 1, 9, 5] = value
    on_host = PageCodec(recipe, geometry)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        by_host(on_host, made, [2, 1])
    if tokens == 64:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert codec.encode_into(pages, [2, 1], rows[:2]) == [None, None]
        assert codec.raw_tokens_left_out == on_host.raw_tokens_left_out == 0
        target, found = on_device(geometry, 2, seed=3)
        assert codec.decode_into(rows[:2], target, [0, 1]) == [None, None]
        found = found["kv".index(side)]
        assert torch.equal(found[1, 0, :, 9], x[1, 0, :, 9].to(torch.bfloat16).float())
        return
    with pytest.warns(KvpackWarning, match=f"in pages of {tokens} tokens, 1 tokens lose precision") as caught:
        assert codec.encode_into(pages, [2, 1], rows[:2]) == [None, None]
    assert len(caught) == 1
    assert codec.raw_tokens_left_out == on_host.raw_tokens_left_out == 1
    x[1, 0, 1, 9] = given
    codec.encode_into(pages, [0, 1], rows[:2])
    assert codec.raw_tokens_left_out == 1


@pytest.mark.parametrize("recipe", ["k=octahedral:b=3;v=raw", "k=scalar:b=4,rounding=scaled;v=raw", "k=polar:b=4;v=raw"])
def test_a_token_with_a_large_direction_error_is_counted(recipe: str) -> None:
    """The kernels that encode pages also measure the errors."""
    geometry = PageGeometry(layers=2, heads=2, tokens=32, dim_k=64, dim_v=64, dtype="fp32")
    pages, (k, _) = on_device(geometry, 3)
    codec = PageCodec(recipe, geometry)
    rows = torch.zeros(3, codec.nbytes, dtype=torch.uint8, device=DEVICE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert codec.encode_into(pages, [0, 1, 2], rows) == [None] * 3
    assert codec.raw_tokens_left_out == 0
    coordinate = torch.zeros(1, 1, 1, 64)
    coordinate[..., 5] = 8
    k[1, 1, 1, 9] = codec.recipe.codec(0, 2, "k", 64).rotation.inverse(coordinate)[0, 0, 0].to(DEVICE)
    with pytest.warns(KvpackWarning, match="in pages of 32 tokens, 1 tokens lose precision"):
        assert codec.encode_into(pages, [2, 1], rows[:2]) == [None, None]
    assert codec.raw_tokens_left_out == 1


@pytest.mark.parametrize("recipe", ["kv=scalar:b=3,norm=log8", "kv=scalar:b=3,norm=log8,channel_scale=fp16"])
def test_a_head_whose_norms_round_to_zero_is_reported(recipe: str) -> None:
    pages, (_, v) = on_device(SMALL, 3)
    v[0] = 0
    codec = PageCodec(recipe, SMALL)
    rows = torch.zeros(3, codec.nbytes, dtype=torch.uint8, device=DEVICE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert codec.encode_into(pages, [0, 1, 2], rows) == [None] * 3
    v[1, 0, 1] *= 1e-5
    with pytest.warns(KvpackWarning, match="32 tokens lose precision.*norm=fp16 in place of norm=log8"):
        assert codec.encode_into(pages, [0, 1, 2], rows) == [None] * 3
    assert codec.raw_tokens_left_out == 0


def test_a_token_with_two_problems_is_counted_once() -> None:
    geometry = PageGeometry(layers=2, heads=2, tokens=32, dim_k=64, dim_v=64, dtype="fp32")
    pages, (k, _) = on_device(geometry, 2)
    codec = PageCodec("k=scalar:b=4,mean=32;v=raw", geometry)
    coordinate = torch.zeros(1, 1, 1, 64)
    coordinate[..., 5] = 100
    k[1, 1, 1, 9] = codec.recipe.codec(0, 2, "k", 64).rotation.inverse(coordinate)[0, 0, 0].to(DEVICE)
    with pytest.warns(KvpackWarning, match="in pages of 32 tokens, 1 tokens lose precision"):
        codec.encode_into(pages, [0, 1], torch.zeros(2, codec.nbytes, dtype=torch.uint8, device=DEVICE))
    assert codec.raw_tokens_left_out == 1


CASES = (
    [(WIDE, recipe) for recipe in EXACT]
    + [(SMALL, recipe) for recipe in CLOSE + TOGETHER + BY_HOST]
    + [(LATENTS, recipe) for recipe in OF_LATENTS]
    + [(ODD, "kv=scalar:b=3,channel_scale=fp16")]
)


@pytest.mark.scenario
@pytest.mark.parametrize(("geometry", "recipe"), [pytest.param(*case, id=f"{case[0].dim_k} {case[1]}") for case in CASES])
def test_rows_and_pages_equal_those_of_the_host(geometry: PageGeometry, recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    codec = PageCodec(recipe, geometry)
    pages, given = on_device(geometry, 4)
    expected = by_host(codec, given, [3, 1])
    if recipe not in BY_HOST:
        refuse_the_host(monkeypatch)
    rows = torch.full((2, codec.nbytes + 32), 7, dtype=torch.uint8, device=DEVICE)
    assert codec.encode_into(pages, [3, 1], rows) == [None, None]
    assert (rows[:, codec.nbytes :] == 7).all()
    found = rows[:, : codec.nbytes].cpu()
    exact = recipe in EXACT and geometry is WIDE
    share = (found != expected).float().mean()
    assert share == 0 if exact else share < 0.02
    theirs = host_decoded(codec, found)
    target, mine = on_device(geometry, 3, seed=5)
    before = [x.clone() for x in mine]
    assert codec.decode_into(rows, target, [2, 0]) == [None, None]
    for x, y, old in zip(mine, theirs, before, strict=True):
        assert torch.equal(bits(x[1]), bits(old[1]))
        for slot, number in ((2, 0), (0, 1)):
            if exact:
                assert torch.equal(bits(x[slot].cpu()), bits(y[number]))
            else:
                torch.testing.assert_close(x[slot].cpu(), y[number], rtol=2**-6, atol=2**-6)


@pytest.mark.scenario
@pytest.mark.parametrize("recipe", ["kv=klt:bits=4", "kv=klt:bits=4,widths=heads", "klt-4"])
def test_pages_with_a_basis_are_coded_together(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    basis = Basis.from_bytes(random_basis({(0, "k"): (2, 64), (0, "v"): (2, 32), (1, "k"): (2, 64), (1, "v"): (2, 32)}, 2))
    codec = PageCodec(Recipe(recipe, basis), SMALL)
    pages, given = on_device(SMALL, 3)
    expected = by_host(codec, given, [2, 0])
    rows = torch.zeros(2, codec.nbytes, dtype=torch.uint8, device=DEVICE)
    with monkeypatch.context() as patched:
        refuse_the_host(patched)
        assert codec.encode_into(pages, [2, 0], rows) == [None, None]
        assert (rows.cpu() != expected).float().mean() < 0.02
        target, found = on_device(SMALL, 3, seed=5)
        before = [x.clone() for x in found]
        rows[1, -70] ^= 1
        outcomes = codec.decode_into(rows, target, [1, 2])
    assert [type(outcome) for outcome in outcomes] == [type(None), DigestMismatch]
    for x, y, old in zip(found, host_decoded(codec, rows[:1]), before, strict=True):
        torch.testing.assert_close(x[1].cpu(), y[0], rtol=2**-6, atol=2**-4)
        assert torch.equal(x[[0, 2]], old[[0, 2]])
    # The host names a page that none of them takes.
    given[1][2, 1, 1, 3, 7] = float("nan")
    outcomes = codec.encode_into(pages, [2, 0], rows)
    assert [type(outcome) for outcome in outcomes] == [InvalidParameter, type(None)]
    assert "slot 2: layers[1].v" in str(outcomes[0])


@pytest.mark.parametrize("recipe", ["octopus-3-scaled", "turboquant-2.5"])
def test_layers_with_different_layouts_are_coded_together(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    codec = PageCodec(recipe, SMALL)
    given = values(SMALL, 3)
    expected = by_host(codec, given, [2, 0])

    def scattered(sides: list[torch.Tensor]) -> list[list[torch.Tensor]]:
        """Return pages whose second layer stores tokens before heads."""
        return [[x[:, 0].contiguous().to(DEVICE), x[:, 1].transpose(1, 2).contiguous().to(DEVICE).transpose(1, 2)] for x in sides]

    refuse_the_host(monkeypatch)
    rows = torch.zeros(2, codec.nbytes, dtype=torch.uint8, device=DEVICE)
    assert codec.encode_into(PageBuffer(SMALL, *scattered(given)), [2, 0], rows) == [None, None]
    assert (rows.cpu() != expected).float().mean() < 0.02
    target = scattered(values(SMALL, 3, seed=5))
    assert codec.decode_into(rows, PageBuffer(SMALL, *target), [1, 2]) == [None, None]
    for layers, theirs, before in zip(target, host_decoded(codec, rows), values(SMALL, 3, seed=5), strict=True):
        for number, x in enumerate(layers):
            torch.testing.assert_close(x[1:].cpu(), theirs[:, number], rtol=2**-6, atol=2**-6)
            assert torch.equal(x[0].cpu(), before[0, number])


def test_pages_are_left_to_the_host_if_device_memory_is_exhausted(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    codec = PageCodec("octopus-3-scaled", SMALL)
    pages, given = on_device(SMALL, 2)
    monkeypatch.setattr(batched, "encode_lane", full)
    monkeypatch.setattr(batched, "decode_lane", full)
    rows = torch.zeros(2, codec.nbytes, dtype=torch.uint8, device=DEVICE)
    assert codec.encode_into(pages, [1, 0], rows) == [None, None]
    assert (rows.cpu() != by_host(codec, given, [1, 0])).float().mean() < 0.02
    target, found = on_device(SMALL, 2, seed=5)
    assert codec.decode_into(rows, target, [1, 0]) == [None, None]
    for x, y in zip(found, host_decoded(codec, rows), strict=True):
        torch.testing.assert_close(x.cpu().flip(0), y, rtol=2**-6, atol=2**-6)


def refuse_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the test fail if any page passes through host memory."""

    def encode(self: DevicePages, pages: Any, slots: Any, rows: Any, digests: Any, numbers: Any) -> list[Any]:
        assert not len(numbers), "encoded by the host"
        return []

    def decode(*_: Any) -> list[Any]:
        pytest.fail("decoded by the host")

    monkeypatch.setattr(DevicePages, "_encode_on_host", encode)
    monkeypatch.setattr(DevicePages, "_decode_on_host", decode)


@pytest.mark.scenario
@pytest.mark.filterwarnings("ignore:.*lose precision:kvpack.KvpackWarning")
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
@pytest.mark.parametrize(
    "recipe",
    [
        "fp8",
        "nvfp4",
        "kivi-2-u8",
        "kv=group:b=3,g=16,axis=channel,scales=u8,centre=zero",
        *(f"kv=minifloat:element={of},per=head,scales={dtype}" for of in ("e4m3", "e2m1") for dtype in ("fp16", "fp32")),
    ],
)
def test_scales_of_any_values_equal_those_of_the_host(recipe: str) -> None:
    sizes = [0.0, 1e-45, 3e-42, 1e-38, 2.0**-24, 1e-6, 448.0, 6.1e4, 2.9e7, 3.3e38, torch.inf, torch.nan]
    pages, given = on_device(WIDE, len(sizes))
    for x in given:
        # Heads of one page differ, and so do layers.
        x.mul_(torch.tensor([[1.0, 0.3], [0.01, 1.0]], device=DEVICE)[None, :, :, None, None] / x.abs().amax((3, 4), keepdim=True))
        x.mul_(torch.tensor(sizes, dtype=x.dtype, device=DEVICE).nan_to_num(1.0, 1.0)[:, None, None, None, None])
        for number in (-2, -1):
            x[number, 1, 0, 3, 2] = sizes[number]
    codec = PageCodec(recipe, WIDE)
    rows, expected = torch.zeros(len(sizes), codec.nbytes, dtype=torch.uint8, device=DEVICE), torch.zeros(len(sizes), codec.nbytes).byte()
    outcomes = codec.encode_into(pages, range(len(sizes)), rows)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("KVPACK_KERNELS", "")
        theirs = codec.encode_into(PageBuffer(WIDE, *[x.cpu() for x in given]), range(len(sizes)), expected)
    assert [type(outcome) for outcome in outcomes] == [type(outcome) for outcome in theirs]
    assert any(outcomes)
    for number, outcome in enumerate(outcomes):
        assert outcome is not None or torch.equal(rows[number].cpu(), expected[number])


@pytest.mark.scenario
@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("recipe", ["kivi-4", "raw"])
def test_pages_with_any_strides_are_encoded_alike(name: str, recipe: str) -> None:
    geometry = PageGeometry(2, 2, 32, 64, 64, "fp32")
    _, given = on_device(geometry, 3)
    sizes = (3, geometry.layers, geometry.heads, geometry.tokens, geometry.dim_k)
    made, other = (PageBuffer(geometry, *to_device(ENGINES[name](*sizes))) for _ in range(2))
    for side, x in zip("kv", given, strict=True):
        for layer, target in enumerate(made.sides[side]):
            target.copy_(x[:, layer])
    codec = PageCodec(recipe, geometry)
    rows = torch.zeros(2, codec.nbytes, dtype=torch.uint8, device=DEVICE)
    assert codec.encode_into(made, [1, 2], rows) == [None, None]
    assert torch.equal(rows.cpu(), by_host(codec, given, [1, 2]))
    assert codec.decode_into(rows, other, [2, 0]) == [None, None]
    dense = host_decoded(codec, rows)
    for side, x in zip("kv", dense, strict=True):
        for layer, found in enumerate(other.sides[side]):
            assert torch.equal(found[[2, 0]].cpu(), x[:, layer])
            assert not found[1].any()


def to_device(sides: Any) -> list[Any]:
    """Copy tensors to the device without changing their strides."""

    def moved(x: torch.Tensor) -> torch.Tensor:
        size = max(1, 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)))
        return torch.zeros(size, dtype=torch.float32, device=DEVICE).as_strided(x.shape, x.stride())

    return [[moved(layer) for layer in side] if isinstance(side, list) else moved(side) for side in sides]


def test_a_job_fails_page_by_page_and_writes_nothing_of_an_invalid_page() -> None:
    codec = PageCodec("kivi-4", SMALL, namespace=bytes(range(32)))
    pages, given = on_device(SMALL, 6)
    keys = [b"%d" % number for number in range(6)]
    rows = torch.zeros(6, codec.nbytes, dtype=torch.uint8, device=DEVICE)
    assert codec.encode_into(pages, range(6), rows, keys=keys) == [None] * 6
    assert torch.equal(rows.cpu(), by_host(codec, given, [*range(6)], keys))
    rows[1, codec.nbytes - 70] ^= 16
    rows[2, 0] ^= 1
    rows[3] = 0
    other = PageCodec("kivi-4", SMALL)
    assert other.encode_into(pages, [4], rows[4:5], keys=[b"4"]) == [None]
    target, found = on_device(SMALL, 6, seed=5)
    before = [x.clone() for x in found]
    outcomes = codec.decode_into(rows, target, range(6), keys=[*keys[:5], b"another"])
    assert [type(outcome) for outcome in outcomes] == [type(None), DigestMismatch, NotKvpack, NotKvpack, InvalidHeader, InvalidHeader]
    assert str(outcomes[1]).startswith("row 1: its ")
    assert "has the namespace 0000" in str(outcomes[4])
    assert "has the key" in str(outcomes[5])
    for x, old in zip(found, before, strict=True):
        assert [bool((x[slot] != old[slot]).any()) for slot in range(6)] == [True, False, False, False, False, False]
    assert codec.decode_into(rows[5:], target, [5]) == [None]


@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")
def test_a_page_that_no_codec_supports_is_named() -> None:
    codec = PageCodec("octopus-3", SMALL)
    pages, given = on_device(SMALL, 3)
    given[1][1, 1, 1, 3, 7] = float("nan")
    given[0][2, 0, 0, 5, 1] = float("inf")
    rows = torch.full((3, codec.nbytes), 7, dtype=torch.uint8, device=DEVICE)
    outcomes = codec.encode_into(pages, range(3), rows)
    assert [type(outcome) for outcome in outcomes] == [type(None), InvalidParameter, InvalidParameter]
    assert "slot 1: layers[1].v: the value at batch 0, head 1, token 3, channel 7 is nan" in str(outcomes[1])
    assert not rows[1:, :8].any()


def test_every_flipped_bit_is_found() -> None:
    geometry = PageGeometry(layers=1, heads=1, tokens=3, dim_k=16, dim_v=8)
    codec = PageCodec("kv=group:b=4,g=8", geometry)
    pages, _ = on_device(geometry, 1)
    row = torch.zeros(1, codec.nbytes, dtype=torch.uint8, device=DEVICE)
    assert codec.encode_into(pages, [0], row) == [None]
    source = random.Random(0)
    chosen = range(8 * codec.nbytes) if not INTERPRETED else source.sample(range(8 * codec.nbytes), 60)
    damaged = row.repeat(len(chosen), 1)
    for number, bit in enumerate(chosen):
        damaged[number, bit // 8] ^= 1 << bit % 8
    target, found = on_device(geometry, len(chosen), seed=3)
    before = [x.clone() for x in found]
    outcomes = codec.decode_into(damaged, target, range(len(chosen)))
    assert all(isinstance(outcome, KvpackError) for outcome in outcomes)
    assert all(torch.equal(x, y) for x, y in zip(found, before, strict=True))


def test_padding_is_zero_and_checked() -> None:
    geometry = PageGeometry(layers=1, heads=1, tokens=3, dim_k=16, dim_v=8)
    codec = PageCodec("kv=group:b=4,g=8", geometry)
    pages, given = on_device(geometry, 1)
    row = torch.full((1, codec.nbytes), 255, dtype=torch.uint8, device=DEVICE)
    assert codec.encode_into(pages, [0], row) == [None]
    assert torch.equal(row.cpu(), by_host(codec, given, [0]))
    planted = bytearray(row[0].cpu().numpy().tobytes())
    planted[codec.layout.pads[-1][0]] = 1
    rows_of.write_checksum(memoryview(planted))
    target, _ = on_device(geometry, 1)
    (outcome,) = codec.decode_into(torch.frombuffer(planted, dtype=torch.uint8)[None].to(DEVICE), target, [0])
    assert isinstance(outcome, InvalidHeader)
    assert "its padding is not zero" in str(outcome)


@pytest.mark.parametrize("size", [128, 4096, 1 << 16, (1 << 16) + 64, 3 * (1 << 16) - 64])
def test_checksums_are_correct_for_rows_of_any_size(size: int) -> None:
    from kvpack.kernels.pages import checksum

    source = random.Random(size)
    given = [source.randbytes(size) for _ in range(3)]
    rows = torch.stack([torch.frombuffer(bytearray(data), dtype=torch.uint8) for data in given]).to(DEVICE)
    checksum.write(rows, size, rows_of.MULTIPLIER, torch.tensor([0, 0, 1], dtype=torch.int32, device=DEVICE))
    for number, data in enumerate(given):
        expected = bytearray(data)
        rows_of.write_checksum(memoryview(expected))
        if number == 2:
            expected[:8] = bytes(8)
        assert rows[number].cpu().numpy().tobytes() == bytes(expected)


@pytest.mark.parametrize("dtype", ["fp16", "fp32", "fp8_e4m3", "u8"])
def test_pages_of_every_dtype_are_coded(dtype: str) -> None:
    geometry = PageGeometry(2, 1, 32, 64, None, dtype)
    for recipe in ["raw"] if dtype == "u8" else ["raw", "kv=group:b=4,g=32", "octopus-4"]:
        codec = PageCodec(recipe, geometry)
        pages, given = on_device(geometry, 2)
        rows = torch.zeros(2, codec.nbytes, dtype=torch.uint8, device=DEVICE)
        assert codec.encode_into(pages, [1, 0], rows) == [None, None]
        target, found = on_device(geometry, 2, seed=5)
        assert codec.decode_into(rows, target, [1, 0]) == [None, None]
        theirs = host_decoded(codec, rows)
        for x, y, source in zip(found, theirs, given, strict=True):
            if recipe == "raw":
                assert torch.equal(bits(x), bits(source))
            torch.testing.assert_close(x.cpu().float().flip(0), y.float(), rtol=2**-2, atol=2**-6)


def test_rows_in_host_memory_equal_those_of_the_host() -> None:
    codec = PageCodec("kivi-4", WIDE)
    pages, given = on_device(WIDE, 2)
    buffers = [bytearray(b"\xaa" * (codec.nbytes + 9)) for _ in range(2)]
    assert codec.encode_into(pages, [0, 1], buffers) == [None, None]
    tensor = torch.zeros(2, codec.nbytes, dtype=torch.uint8)
    assert codec.encode_into(pages, [0, 1], tensor) == [None, None]
    expected = by_host(codec, given, [0, 1])
    assert torch.equal(tensor, expected)
    assert [bytes(row) for row in buffers] == [row.numpy().tobytes() + b"\xaa" * 9 for row in expected]
    buffers[1][codec.nbytes // 2] ^= 1
    for rows in (buffers, [bytes(row) for row in buffers]):
        target, found = on_device(WIDE, 2, seed=5)
        before = [x.clone() for x in found]
        outcomes = codec.decode_into(rows, target, [0, 1], check_values=True)
        assert [type(outcome) for outcome in outcomes] == [type(None), DigestMismatch]
        for x, y, old in zip(found, host_decoded(codec, expected), before, strict=True):
            assert torch.equal(x[0].cpu(), y[0])
            assert torch.equal(x[1], old[1])


def test_tensors_created_in_inference_mode_are_accepted() -> None:
    with torch.inference_mode():
        pages, _ = on_device(SMALL, 2)
        target, found = on_device(SMALL, 2, seed=5)
        rows = torch.zeros(2, PageCodec("nvfp4", SMALL).nbytes, dtype=torch.uint8, device=DEVICE)
    for recipe in ("nvfp4", "kivi-2-u8"):
        codec = PageCodec(recipe, SMALL)
        room = rows if recipe == "nvfp4" else torch.zeros(2, codec.nbytes, dtype=torch.uint8, device=DEVICE)
        before = [x.clone() for x in found]
        assert codec.encode_into(pages, [0, 1], room) == codec.decode_into(room, target, [0, 1]) == [None, None]
        assert all((x != y).any() for x, y in zip(found, before, strict=True))


@pytest.mark.parametrize("spare", [9, 48])
def test_rows_of_any_width_are_coded(spare: int) -> None:
    codec = PageCodec("kivi-4", WIDE)
    pages, given = on_device(WIDE, 2)
    wide = torch.full((3, codec.nbytes + spare), 7, dtype=torch.uint8, device=DEVICE)
    for rows, slots in ((wide[1:], [1, 0]), (wide[:1], [0])):
        assert codec.encode_into(pages, slots, rows) == [None] * len(slots)
        assert torch.equal(rows[:, : codec.nbytes].cpu(), by_host(codec, given, slots))
        target, found = on_device(WIDE, 2, seed=5)
        assert codec.decode_into(rows, target, slots) == [None] * len(slots)
        expected = host_decoded(codec, rows[:, : codec.nbytes].contiguous())
        assert all(torch.equal(x[slots].cpu(), y) for x, y in zip(found, expected, strict=True))
    assert (wide[:, codec.nbytes :] == 7).all()


def test_invalid_arguments_are_refused() -> None:
    codec = PageCodec("raw", SMALL)
    pages, _ = on_device(SMALL, 2)
    assert codec.encode_into(pages, [], torch.zeros(0, codec.nbytes, dtype=torch.uint8, device=DEVICE)) == []
    with pytest.raises(InvalidParameter, match="expected uint8"):
        codec.encode_into(pages, [0], torch.zeros(1, codec.nbytes, device=DEVICE))
    with pytest.raises(Truncated, match=f"a page needs {codec.nbytes}"):
        codec.encode_into(pages, [0], torch.zeros(1, 64, dtype=torch.uint8, device=DEVICE))
    with pytest.raises(InvalidParameter, match="two rows begin 0 bytes apart"):
        codec.encode_into(pages, [0, 1], torch.zeros(1, codec.nbytes, dtype=torch.uint8, device=DEVICE).expand(2, -1))
    (outcome,) = codec.decode_into(torch.zeros(1, 64, dtype=torch.uint8, device=DEVICE), pages, [0])
    assert isinstance(outcome, Truncated)


@pytest.mark.cuda
def test_a_job_runs_on_the_current_stream() -> None:
    codec = PageCodec("k=octahedral:b=3;v=group:b=3", SMALL)
    pages, given = on_device(SMALL, 2)
    side = torch.cuda.Stream()
    rows = torch.zeros(2, codec.nbytes, dtype=torch.uint8, device=DEVICE)
    # The kernels are compiled before the device is kept busy.
    assert codec.encode_into(pages, [0, 1], rows) == [None, None]
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        job = codec.start_encode(pages, [0, 1], rows)
        assert torch.cuda.current_stream() == side
        assert not job.done
    assert job.outcomes() == [None, None]
    assert job.done
    assert codec.encode_into(pages, [0, 1], again := torch.zeros_like(rows)) == [None, None]
    assert torch.equal(rows, again)
    assert given[0].isfinite().all()
