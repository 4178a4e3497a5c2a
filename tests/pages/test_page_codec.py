"""Tests of PageCodec: rows of a fixed size, many pages at a time, and an engine's own memory and settings."""

from __future__ import annotations

import multiprocessing
import random
import tracemalloc
import warnings
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import kvpack
from kvpack.coding import dispatch
from kvpack.coding.bases import Basis
from kvpack.coding.recipes import Recipe
from kvpack.errors import (
    DigestMismatch,
    InvalidHeader,
    InvalidParameter,
    InvalidPayload,
    InvalidType,
    KvpackError,
    KvpackWarning,
    NotKvpack,
    OutOfBounds,
    Truncated,
)
from kvpack.file import row as rows_of
from kvpack.pages import PageBuffer, PageCodec, PageGeometry
from support.engine_pages import ENGINES, bits, empty_buffer, filled_buffer
from support.klt_bases import balanced_basis, random_basis
from support.second_decoder import decoder

SMALL = PageGeometry(layers=3, heads=2, tokens=16, dim_k=64, dim_v=64)
MEANS = "k=scalar:b=3,mean=8;v=scalar:b=3"
RECIPES = [
    "raw",
    "kivi-4",
    "octopus-3",
    "turboquant-4",
    "oscar-2",
    "kivi-2-u8",
    "kv=group:b=2,rotation=hadamard,token_scale=fp16-per-head",
    "hqmq-s24-r3",
    "turboangle-k8v4",
    "polarquant-4",
    "fp8",
    "mxfp4",
]


@pytest.mark.parametrize("recipe", [*RECIPES, "octopus-3;boundary-1", "kv=scalar:b=3,channel_scale=fp16", MEANS])
def test_a_page_decodes_to_the_same_values_as_a_cache(recipe: str) -> None:
    codec = PageCodec(recipe, SMALL)
    pages, given = filled_buffer(SMALL, 3)
    rows = torch.empty(2, codec.nbytes, dtype=torch.uint8)
    assert codec.encode_into(pages, [2, 0], rows) == [None, None]
    target, found = empty_buffer(SMALL, 4)
    assert codec.decode_into(rows, target, [1, 3]) == [None, None]
    for slot, source in ((1, 2), (3, 0)):
        # A page does not know that it begins its sequence: none of its first tokens is raw for that.
        cache = kvpack.pack([(given[0][source, n][None], given[1][source, n][None]) for n in range(3)], f"{recipe};raw=0,0.6,4")
        for n, layer in enumerate(cache):
            for mine, theirs in zip((found[0][slot, n], found[1][slot, n]), layer.unpack(), strict=True):
                assert torch.equal(mine, theirs[0])
    assert not any(x[[0, 2]].any() for x in found)


RAW = "raw_first=4,raw_low_norm=0.6"
SLOTTED = {
    "a token at a time": f"kv=scalar:b=3,{RAW}",
    "groups of tokens": f"k=group:b=2,g=8,{RAW};v=octahedral:b=3,{RAW}",
    "operations of PyTorch": f"kv=polar:b=3,{RAW},raw_dtype=fp16",
    "values alone": f"k=raw;v=scalar:b=2,{RAW}",
    "a channel scale": f"kv=scalar:b=3,channel_scale=fp16,{RAW}",
    "means of keys": f"k=octahedral:b=3,mean=64,{RAW};v=scalar:b=3,{RAW}",
}


@pytest.mark.scenario
@pytest.mark.parametrize("recipe", SLOTTED.values(), ids=SLOTTED)
def test_tokens_with_low_norms_get_slots(recipe: str) -> None:
    """The keys determine the raw tokens of both sides. The lowest norms get slots, and tokens without a slot are counted."""
    geometry = PageGeometry(layers=2, heads=2, tokens=130, dim_k=64, dim_v=64)
    with PageCodec(recipe, geometry, threads=2) as codec:
        pages, (k, v) = filled_buffer(geometry, 3)
        low = {(0, 0): [], (0, 1): [7], (1, 0): [3, 129], (1, 1): [5, 6, 60], (2, 0): [0], (2, 1): [64, 65]}
        for (page, layer), tokens in low.items():
            for rank, token in enumerate(tokens):
                k[page, layer, :, token] *= 0.1 / (1 + rank)
        rows = torch.empty(3, codec.nbytes, dtype=torch.uint8)
        assert codec.encode_into(pages, range(3), rows) == [None] * 3
        sides = "v" if recipe.startswith("k=raw") else "kv"
        assert codec.raw_tokens_left_out == len(sides)
        target, found = empty_buffer(geometry, 3)
        assert codec.decode_into(rows, target, range(3), check_values=True) == [None] * 3
        for side in sides:
            own, given = (x["kv".index(side)] for x in (found, (k, v)))
            for (page, layer), tokens in low.items():
                kept = tokens[-2:]
                assert torch.equal(own[page, layer, :, kept], given[page, layer, :, kept].to(own.dtype))
                if len(tokens) > 2:
                    assert not torch.equal(own[page, layer, :, tokens[0]], given[page, layer, :, tokens[0]])
        plain = kvpack.pack([(k[0, 0][None], v[0, 0][None])], recipe.replace("raw_first=4,", ""))[0]
        assert torch.equal(found[1][0, 0], plain.unpack()[1][0])  # type: ignore[index]
        page = decoder.read_row(bytes(rows[1].numpy())).page
        assert dict(page.layers[1]["v"].entries) == {"raw_positions": 2, "raw_values": 2}
        row = bytearray(rows[1].numpy())
        begin, _ = codec.layout.places["1.v.raw_positions"]
        row[begin : begin + 8] = bytes([200, 0, 0, 0, 0, 0, 0, 0])
        rows_of.write_checksum(memoryview(row))
        (error,) = codec.decode_into([row], target, [0], check_values=True)
        assert isinstance(error, InvalidPayload)


@pytest.mark.parametrize("recipe", ["kivi-2", "oscar-2", "oscar-2-scaled", "hqmq-s24-r3", "kv=group:b=2,g=16"])
@pytest.mark.parametrize("tokens", [16, 64])
def test_a_harmful_token_without_a_free_slot_gives_one_warning(recipe: str, tokens: int) -> None:
    geometry = PageGeometry(layers=2, heads=2, tokens=tokens, dim_k=64, dim_v=64)
    pages, (k, _) = filled_buffer(geometry, 2)
    with PageCodec(recipe, geometry) as codec:
        rows = torch.empty(2, codec.nbytes, dtype=torch.uint8)
        k[0, 0, 0, 3] *= 0.01
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            codec.encode_into(pages, [0, 1], rows)
        k[1, 1, 1, 5:7] *= 30
        with pytest.warns(KvpackWarning, match=rf"in pages of {tokens} tokens, [12] tokens .* token_scale=fp16-per-head"):
            codec.encode_into(pages, [1], rows[:1])
        counted = codec.raw_tokens_left_out
        assert counted > 0
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            codec.encode_into(pages, [1], rows[:1])
        assert codec.raw_tokens_left_out == 2 * counted
    remedy = "k=group:b=2,g=16,token_scale=fp16-per-head;v=group:b=2,g=16"
    with warnings.catch_warnings(), PageCodec(remedy, geometry) as codec:
        warnings.simplefilter("error")
        codec.encode_into(pages, [1], torch.empty(1, codec.nbytes, dtype=torch.uint8))


FIT_BADLY = [
    ("fp8", "v", 1e6),
    ("nvfp4", "v", 1e6),
    ("int-3", "v", 40.0),
    ("k=scalar:b=2,mean=128,channel_scale=fp16;v=scalar:b=2;raw=4,0.6,4", "k", 40.0),
    ("k=scalar:b=3,mean=32;v=raw;raw=0,0.6,4", "k", 40.0),
]


@pytest.mark.parametrize(("recipe", "side", "value"), FIT_BADLY)
def test_a_token_that_fits_neither_scales_nor_means_is_raw_if_a_slot_is_free(recipe: str, side: str, value: float) -> None:
    geometry = PageGeometry(layers=2, heads=2, tokens=64, dim_k=64, dim_v=64)
    pages, (k, v) = filled_buffer(geometry, 2)
    k += 3
    x = k if side == "k" else v
    with warnings.catch_warnings(), PageCodec(recipe, geometry) as codec:
        warnings.simplefilter("error")
        rows = torch.empty(2, codec.nbytes, dtype=torch.uint8)
        assert codec.encode_into(pages, [0, 1], rows) == [None, None]
        usual = decoded_side(codec, geometry, rows, side)
        error = (usual[1, 1] - x[1, 1].float()).norm(dim=2)
        x[1, 1, 1, 5, 9] = value
        assert codec.encode_into(pages, [0, 1], rows) == [None, None]
        assert codec.raw_tokens_left_out == 0
        assert codec.check(rows, check_values=True) == [None, None]
        decoded = decoded_side(codec, geometry, rows, side)
    assert torch.equal(decoded[1, 1, :, 5], x[1, 1, :, 5].float())
    others = [token for token in range(64) if token != 5]
    assert ((decoded[1, 1] - x[1, 1].float()).norm(dim=2)[:, others] < 1.5 * error.amax(1, keepdim=True)).all()
    assert torch.equal(decoded[0], usual[0])
    assert torch.equal(decoded[1, 0], usual[1, 0])


WITHOUT_ROOM = [*(row for row in FIT_BADLY if "mean=32" not in row[0]), ("kv=minifloat:element=e4m3", "k", 1e6)]


@pytest.mark.parametrize(("recipe", "side", "value"), WITHOUT_ROOM)
def test_a_token_that_fits_neither_scales_nor_means_is_counted_without_a_slot(recipe: str, side: str, value: float) -> None:
    value *= 2 if "mean" in recipe else 1
    geometry = PageGeometry(layers=2, heads=2, tokens=32, dim_k=64, dim_v=64)
    pages, (k, v) = filled_buffer(geometry, 2)
    k += 3
    with PageCodec(recipe, geometry) as codec:
        rows = torch.empty(2, codec.nbytes, dtype=torch.uint8)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            codec.encode_into(pages, [0, 1], rows)
        (k if side == "k" else v)[1, 1, 1, 5, 9] = value
        with pytest.warns(KvpackWarning, match="in pages of 32 tokens, 1 tokens lose precision, .* they differ too much") as caught:
            codec.encode_into(pages, [0, 1], rows)
        assert len(caught) == 1
        assert codec.raw_tokens_left_out == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            codec.encode_into(pages, [1], rows[:1])
        assert codec.raw_tokens_left_out == 2


@pytest.mark.parametrize("recipe", ["kvpack-3", "kv=scalar:b=3,norm=log8", "kv=octahedral:b=4,norm=log8;raw=0"])
@pytest.mark.parametrize("slots", [[0, 1], [1]])
def test_a_head_whose_norms_round_to_zero_is_reported(recipe: str, slots: list[int]) -> None:
    pages, (k, v) = filled_buffer(SMALL, 2)
    # Zeros, such as slots that an engine has not filled, lose nothing.
    k[0, 1, 0] = v[0, 1, 0] = 0
    with PageCodec(recipe, SMALL) as codec:
        rows = torch.empty(len(slots), codec.nbytes, dtype=torch.uint8)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            codec.encode_into(pages, slots, rows)
        v[1, 2, 1] *= 1e-5
        with pytest.warns(KvpackWarning, match=r"16 tokens lose precision.*norms are too small.*norm=fp16 in place of norm=log8") as caught:
            codec.encode_into(pages, slots, rows)
        assert len(caught) == 1
        assert codec.raw_tokens_left_out == 0
        assert codec.check(rows, check_values=True) == [None] * len(slots)


def decoded_side(codec: PageCodec, geometry: PageGeometry, rows: torch.Tensor, side: str) -> torch.Tensor:
    """Decode the pages of ``rows`` and return one side, float32 ``[layer, page, kv_head, token, dim]``."""
    pages, (k, v) = filled_buffer(geometry, len(rows))
    assert codec.decode_into(rows, pages, range(len(rows))) == [None] * len(rows)
    return (k if side == "k" else v).float()


def test_a_page_with_a_basis_has_slots() -> None:
    shapes = {(layer, side): (SMALL.heads, 64) for layer in range(SMALL.layers) for side in "kv"}
    codec = PageCodec(kvpack.Recipe("klt-4", Basis.from_bytes(random_basis(shapes, SMALL.layers))), SMALL)
    pages, (k, v) = filled_buffer(SMALL, 2)
    k[1, :, :, 9] *= 0.1
    made = torch.empty(2, codec.nbytes, dtype=torch.uint8)
    assert codec.encode_into(pages, [0, 1], made) == [None, None]
    target, found = empty_buffer(SMALL, 2)
    assert codec.decode_into(made, target, [0, 1]) == [None, None]
    assert torch.equal(found[0][1, :, :, 9], k[1, :, :, 9])
    assert torch.equal(found[1][1, :, :, 9], v[1, :, :, 9])
    assert codec.raw_tokens_left_out == 0


@pytest.mark.parametrize("recipe", ["kv=klt:bits=4,rows=basis", "kv=klt:bits=4,rows=fp16", "k=scalar:b=4,frame=balanced;v=scalar:b=4"])
def test_a_page_with_a_basis_decodes_to_the_same_values_as_a_cache(recipe: str) -> None:
    dims = {"k": SMALL.dim_k, "v": SMALL.dim_v}
    shapes = {(layer, side): (SMALL.heads, dim) for layer in range(SMALL.layers) for side, dim in dims.items()}
    keys = {layer: shape for (layer, side), shape in shapes.items() if side == "k"}
    by_basis = Recipe(recipe, Basis.from_bytes(balanced_basis(keys, SMALL.layers, rows=shapes)))
    codec = PageCodec(by_basis, SMALL)
    pages, given = filled_buffer(SMALL, 2)
    made = torch.empty(2, codec.nbytes, dtype=torch.uint8)
    assert codec.encode_into(pages, [0, 1], made) == [None, None]
    target, found = empty_buffer(SMALL, 2)
    assert codec.decode_into(made, target, [1, 0], check_values=True) == [None, None]
    for slot, source in ((1, 0), (0, 1)):
        cache = kvpack.pack([(given[0][source, n][None], given[1][source, n][None]) for n in range(SMALL.layers)], by_basis)
        for n, layer in enumerate(cache):
            for mine, theirs in zip((found[0][slot, n], found[1][slot, n]), layer.unpack(), strict=True):
                assert torch.equal(mine, theirs[0])


PRESETS = ["raw", "kivi-4", "octopus-4", "turboquant-4", "oscar-2-u8", "polarquant-4", "turboangle-k8v4", "nvfp4", "quarot-4"]


@pytest.mark.parametrize("recipe", PRESETS)
def test_the_hosts_settings_have_no_effect_and_are_kept(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM creates models with a 16-bit default dtype and on a default device, and does not permit calls of set_num_threads."""

    def forbidden(*_: object) -> None:
        raise AssertionError("the host's number of threads was changed")

    def made() -> tuple[list[bytes], list[torch.Tensor]]:
        with PageCodec(recipe, SMALL, threads=2) as codec:
            rows = [bytearray(codec.nbytes) for _ in range(3)]
            assert codec.encode_into(pages, range(3), rows) == [None] * 3
            for x in found:
                x.zero_()
            assert codec.decode_into(rows, target, range(3), check_values=True) == [None] * 3
        return [bytes(row) for row in rows], [x.clone() for x in found]

    pages, _ = filled_buffer(SMALL, 3)
    target, found = empty_buffer(SMALL, 3)
    expected, values = made()
    monkeypatch.setattr(torch, "set_num_threads", forbidden)
    torch.manual_seed(3)
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            with torch.device("meta"), torch.inference_mode(), torch.autocast("cpu"):
                rows, got = made()
                assert (torch.get_default_dtype(), torch.get_default_device().type) == (dtype, "meta")
                assert torch.is_inference_mode_enabled()
                assert torch.is_autocast_enabled("cpu")
        finally:
            torch.set_default_dtype(torch.float32)
        assert rows == expected
        assert all(torch.equal(x, y) for x, y in zip(got, values, strict=True))
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("recipe", ["octopus-3", "raw", "oscar-2"])
def test_pages_with_any_strides_are_encoded_alike(name: str, recipe: str) -> None:
    sizes = (3, SMALL.layers, SMALL.heads, SMALL.tokens, SMALL.dim_k)
    plain, given = filled_buffer(SMALL, 3)
    made, other = (PageBuffer(SMALL, *ENGINES[name](*sizes)) for _ in range(2))
    for side, x in zip("kv", given, strict=True):
        for layer, target in enumerate(made.sides[side]):
            target.copy_(x[:, layer])
    codec = PageCodec(recipe, SMALL)
    rows, expected = ([bytearray(codec.nbytes) for _ in range(2)] for _ in range(2))
    assert codec.encode_into(made, [1, 2], rows) == codec.encode_into(plain, [1, 2], expected) == [None, None]
    assert rows == expected
    assert codec.decode_into([bytes(row) for row in rows], other, [2, 0]) == [None, None]
    target, dense = empty_buffer(SMALL, 3)
    codec.decode_into(rows, target, [2, 0])
    for side, x in zip("kv", dense, strict=True):
        for layer, found in enumerate(other.sides[side]):
            assert torch.equal(found, x[:, layer])


def test_any_number_of_threads_gives_the_same_rows() -> None:
    pages, _ = filled_buffer(SMALL, 6)
    with PageCodec("octopus-4", SMALL) as one, PageCodec("octopus-4", SMALL, threads=2) as two:
        rows = [torch.zeros(6, one.nbytes, dtype=torch.uint8) for _ in range(3)]
        one.encode_into(pages, range(6), rows[0])
        two.encode_into(pages, range(6), rows[1])
        for number in range(6):
            two.encode_into(pages, [number], rows[2][number : number + 1])
        assert torch.equal(rows[0], rows[1])
        assert torch.equal(rows[0], rows[2])


def test_an_invalid_page_does_not_affect_others() -> None:
    pages, given = filled_buffer(SMALL, 4)
    given[1][2, 1, 1, 3, 7] = float("nan")
    codec = PageCodec("octopus-3", SMALL)
    rows = [bytearray(b"\xaa" * (codec.nbytes + 9)) for _ in range(4)]
    outcomes = codec.encode_into(pages, range(4), rows)
    assert [type(found) for found in outcomes] == [type(None), type(None), InvalidParameter, type(None)]
    assert "slot 2: layers[1].v: the value at batch 0, head 1, token 3, channel 7 is nan" in str(outcomes[2])
    assert all(row.endswith(b"\xaa" * 9) for row in rows)
    target, found = empty_buffer(SMALL, 4)
    outcomes = codec.decode_into(rows, target, range(4))
    assert [type(one) for one in outcomes] == [type(None), type(None), NotKvpack, type(None)]
    assert [bool(found[0][slot].any()) for slot in range(4)] == [True, True, False, True]


@pytest.mark.scenario
def test_every_flipped_bit_is_found_before_a_value_is_written() -> None:
    geometry = PageGeometry(layers=1, heads=1, tokens=2, dim_k=16, dim_v=8)
    codec = PageCodec("kv=group:b=4,g=8", geometry)
    pages, _ = filled_buffer(geometry, 1)
    row = bytearray(codec.nbytes)
    codec.encode_into(pages, [0], [row])
    target, found = empty_buffer(geometry, 1)
    for bit in range(8 * len(row)):
        row[bit // 8] ^= 1 << bit % 8
        (refused,) = codec.decode_into([row], target, [0])
        assert isinstance(refused, KvpackError), bit
        row[bit // 8] ^= 1 << bit % 8
    assert not any(x.any() for x in found)
    source = random.Random(0)
    for _ in range(2000):
        first, second = source.sample(range(8 * len(row)), 2)
        damaged = bytearray(row)
        for bit in (first, second):
            damaged[bit // 8] ^= 1 << bit % 8
        (refused,) = codec.decode_into([damaged], target, [0])
        assert isinstance(refused, KvpackError), (first, second)
    assert codec.decode_into([row], target, [0]) == [None]


def test_the_checksum_is_the_same_with_and_without_c(monkeypatch: pytest.MonkeyPatch) -> None:
    source = random.Random(0)
    for size in (128, 4096, 65536 + 64, 200_000 // 64 * 64):
        row = bytearray(source.randbytes(size))
        found = rows_of.checksum(memoryview(row))
        with monkeypatch.context() as patched:
            patched.setattr(rows_of, "compiled", lambda data, sum_: None)
            assert rows_of.checksum(memoryview(row)) == found
        row[24:32] = bytes(8)
        assert rows_of.checksum(memoryview(row)) == found


@pytest.mark.parametrize("recipe", ["kivi-4", "octopus-3"])
def test_rows_are_read_alike_without_c(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    codec = PageCodec(recipe, SMALL)
    pages, _ = filled_buffer(SMALL, 1)
    row = bytearray(codec.nbytes)
    codec.encode_into(pages, [0], [row])
    (one, mine), (other, theirs) = empty_buffer(SMALL, 1), empty_buffer(SMALL, 1)
    codec.decode_into([row], one, [0])
    monkeypatch.setenv("KVPACK_KERNELS", "torch")
    again = PageCodec(recipe, SMALL)
    assert again.nbytes == codec.nbytes
    assert again.decode_into([row], other, [0]) == [None]
    for x, y in zip(mine, theirs, strict=True):
        torch.testing.assert_close(x, y, rtol=2**-7, atol=2**-7)
    assert again.encode_into(pages, [0], [row]) == [None]
    assert codec.decode_into([row], one, [0]) == [None]


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_fp8_pages_are_encoded_and_decoded(dtype: str) -> None:
    geometry = PageGeometry(2, 2, 32, 64, 64, dtype)
    pages, given = filled_buffer(geometry, 2)
    exact = PageCodec("raw", geometry)
    # A page of bytes, and what frames it.
    assert geometry.raw_bytes < exact.nbytes < geometry.raw_bytes + 1024
    target, found = empty_buffer(geometry, 2)
    row = bytearray(exact.nbytes)
    assert exact.encode_into(pages, [0], [row]) == exact.decode_into([row], target, [1]) == [None]
    assert all(torch.equal(bits(x[1]), bits(y[0])) for x, y in zip(found, given, strict=True))
    lossy = PageCodec("octopus-4", geometry)
    assert lossy.nbytes < exact.nbytes
    row = bytearray(lossy.nbytes)
    assert lossy.encode_into(pages, [0], [row]) == lossy.decode_into([row], target, [1]) == [None]
    for x, y in zip(found, given, strict=True):
        error = (x[1].float() - y[0].float()).norm() / y[0].float().norm()
        assert 0 < error < (0.12 if dtype == "fp8_e4m3" else 0.15)


def test_values_beyond_fp8_are_clipped() -> None:
    geometry = PageGeometry(1, 1, 2, 16, None, "fp8_e4m3")
    pages, (given,) = filled_buffer(geometry, 1)
    given[0, 0, 0, 0] = torch.tensor([448.0, *[-300.0] * 15]).to(given.dtype)
    codec = PageCodec("kv=group:b=1,g=16,axis=channel", geometry)
    row, (target, (found,)) = bytearray(codec.nbytes), empty_buffer(geometry, 1)
    assert codec.encode_into(pages, [0], [row]) == codec.decode_into([row], target, [0]) == [None]
    assert torch.isfinite(found.float()).all()


def test_byte_slots_are_stored_unchanged() -> None:
    geometry = PageGeometry(layers=2, heads=1, tokens=64, dim_k=656, dim_v=None, dtype="u8")
    pages, given = filled_buffer(geometry, 2)
    codec = PageCodec("raw", geometry)
    row, (target, found) = bytearray(codec.nbytes), empty_buffer(geometry, 2)
    assert codec.encode_into(pages, [1], [row]) == codec.decode_into([row], target, [0]) == [None]
    assert torch.equal(found[0][0], given[0][1])
    with pytest.raises(
        InvalidParameter, match=r"layers\[0\].k: the recipe selects codec group, but pages of dtype u8 hold bytes that kvpack cannot"
    ):
        PageCodec("kivi-4", geometry)


def test_latents_are_two_sides() -> None:
    """MLA has 512 latents, which the codec rotates, and 64 rotary values, which it leaves unchanged."""
    geometry = PageGeometry(layers=2, heads=1, tokens=32, dim_k=512, dim_v=64)
    cells = torch.randn(3, 2, 32, 576, generator=torch.Generator().manual_seed(0)).bfloat16()[:, :, None]
    out = torch.zeros_like(cells)
    pages, target = (PageBuffer(geometry, x[..., :512], x[..., 512:]) for x in (cells, out))
    for recipe in ("octopus-4;v=raw", "k=scalar:b=4;v=raw"):
        codec = PageCodec(recipe, geometry)
        row = bytearray(codec.nbytes)
        assert codec.encode_into(pages, [2], [row]) == codec.decode_into([row], target, [0]) == [None]
        assert torch.equal(out[0, ..., 512:], cells[2, ..., 512:])
        error = (out[0, ..., :512].float() - cells[2, ..., :512].float()).norm() / cells[2, ..., :512].float().norm()
        assert 0.01 < error < 0.12


def test_the_hosts_settings_are_kept() -> None:
    """Calls during a host's forward pass leave its threads, random state, default dtype and modes unchanged."""
    torch.manual_seed(5)
    before_dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    with torch.inference_mode():
        pages, _ = filled_buffer(SMALL, 4)
        target, found = empty_buffer(SMALL, 4)
    try:
        for recipe in ("octopus-3", "oscar-2", "raw"):
            with PageCodec(recipe, SMALL, threads=2) as codec:
                rows = torch.zeros(4, codec.nbytes, dtype=torch.uint8)
                threads, state = torch.get_num_threads(), torch.get_rng_state()
                for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad):
                    with mode():
                        settings = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
                        assert codec.encode_into(pages, range(4), rows) == [None] * 4
                        assert codec.decode_into(rows, target, range(4)) == [None] * 4
                        assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == settings
                assert torch.get_num_threads() == threads
                assert torch.equal(torch.get_rng_state(), state)
                assert torch.get_default_dtype() == torch.float64
                assert found[0].any()
    finally:
        torch.set_default_dtype(before_dtype)


@pytest.mark.parametrize("recipe", [*PRESETS, "kv=scalar:b=3,channel_scale=fp16", *SLOTTED.values()])
def test_arbitrary_bytes_with_a_correct_checksum_are_refused_or_decoded(recipe: str) -> None:
    """An attacker may write such rows. With ``values``, the codecs' rules are checked, and no call accesses other memory."""
    codec = PageCodec(recipe, SMALL)
    pages, _ = filled_buffer(SMALL, 1)
    source, row = random.Random(recipe), bytearray(codec.nbytes)
    codec.encode_into(pages, [0], [row])
    target, found = empty_buffer(SMALL, 1)
    pads = {at for begin, end in codec.layout.pads for at in range(begin, end)}
    for share in (1.0, 0.01, 0.0):
        planted = bytearray(row)
        for at in range(codec.layout.payload, codec.nbytes):
            if at not in pads and source.random() < share:
                planted[at] = source.randrange(256)
        rows_of.write_checksum(memoryview(planted))
        (checked,) = codec.decode_into([planted], target, [0], check_values=True)
        assert checked is None or isinstance(checked, InvalidPayload)
        assert codec.decode_into([planted], target, [0]) == [None]
        assert share or (checked is None and found[0].any())


def test_no_call_changes_the_hosts_thread_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page is so large that an encoder would use several threads, but vLLM does not permit the call that sets their number."""

    def forbidden(*_: object) -> None:
        raise AssertionError("the host's number of threads was changed")

    monkeypatch.setattr(torch, "set_num_threads", forbidden)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    geometry = PageGeometry(1, 8, 1024, 128, 128)
    pages, _ = filled_buffer(geometry, 1)
    target, _ = empty_buffer(geometry, 1)
    codec = PageCodec("kv=group:b=2,g=32,rotation=hadamard,scales=u8", geometry)
    row = bytearray(codec.nbytes)
    assert codec.encode_into(pages, [0], [row]) == codec.decode_into([row], target, [0]) == [None]


def test_rows_name_their_page() -> None:
    codec = PageCodec("raw", SMALL, namespace=bytes(range(32)))
    pages, _ = filled_buffer(SMALL, 1)
    target, found = empty_buffer(SMALL, 1)
    row = bytearray(codec.nbytes)
    codec.encode_into(pages, [0], [row], keys=[b"a key"])
    assert codec.decode_into([row], target, [0], keys=[b"a key"], check_values=True) == codec.decode_into([row], target, [0]) == [None]
    found[0].zero_()
    for refused in (
        codec.decode_into([row], target, [0], keys=[b"another"])[0],
        PageCodec("raw", SMALL).decode_into([row], target, [0])[0],
        PageCodec("fp16", SMALL, namespace=bytes(range(32))).decode_into([row], target, [0])[0],
        PageCodec("kivi-4", SMALL, namespace=bytes(range(32))).decode_into([row], target, [0])[0],
    ):
        assert isinstance(refused, InvalidHeader)
    assert isinstance(codec.decode_into([row[:-1]], target, [0])[0], Truncated)
    row[-1] ^= 1
    assert isinstance(codec.decode_into([row], target, [0])[0], DigestMismatch)
    assert not found[0].any()


BY_C = [
    "bf16", "kivi-4", "k=octahedral:b=3;v=group:b=3,g=32;raw=4,0.6,4", "k=scalar:b=4;v=group:b=4,g=32;raw=4,0.6,4",
    "kv=scalar:b=2,high=3;raw=4,0.6,4", "kv=quaternion:s=24,r=3;raw=4,0.6,4", "turboangle-k8v4", "mxfp8",
    "k=polar:b=4;v=group:b=4,g=32;raw=4,0.6,4",
]  # fmt: skip
BY_TORCH = {"encode": ["oscar-2", "kivi-2-u8", "fp8"], "decode": ["kivi-2-u8"]}


class Taken(TorchDispatchMode):
    """Counts the bytes of new tensors that torch operations allocate."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        new = (x.untyped_storage() for x in tree_leaves(made) if isinstance(x, torch.Tensor))
        self.count += sum(x.nbytes() for x in new if x.data_ptr() not in given)
        return made


@pytest.mark.parametrize("recipe", [*BY_C, *BY_TORCH["encode"]])
def test_pages_coded_in_c_need_no_memory(recipe: str) -> None:
    """The engine provides the memory for both directions. ``PageCodec`` lists the codecs that use PyTorch operations."""
    if not dispatch.uses_c(torch.device("cpu")):
        pytest.skip("the C kernels are off, or not installed")
    large = PageGeometry(4, 4, 256, 64, 64)
    pages, _ = filled_buffer(large, 2)
    codec = PageCodec(recipe, large)
    rows = torch.zeros(2, codec.nbytes, dtype=torch.uint8)
    calls = {"encode": lambda: codec.encode_into(pages, [0, 1], rows), "decode": lambda: codec.decode_into(rows, pages, [0, 1])}
    for name, call in calls.items():
        # The first call makes tables, which are kept.
        assert call() == [None, None]
        with Taken() as taken:
            assert call() == [None, None]
        tracemalloc.start()
        call()
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        if recipe in BY_TORCH[name]:
            assert taken.count > large.raw_bytes
        else:
            # Of a token's 128 bytes, its norm and its error take 8.
            assert max(taken.count, most) < large.raw_bytes // 12


@pytest.mark.parametrize(
    ("recipe", "geometry", "message"),
    [
        ("fp16", SMALL, "recipe is 'kv=raw', expected 'kv=raw:dtype=fp16'"),
        ("raw", replace(SMALL, dtype="fp16"), "ignorable.page-dtype is b'bf16', expected b'fp16'"),
        ("raw", replace(SMALL, layers=2), "layers has length 3, expected 2"),
        ("raw", replace(SMALL, heads=1), "layers[0].k.heads is 2, expected 1"),
        ("raw", replace(SMALL, tokens=SMALL.tokens + 1), f"layers[0].k.runs[0] is {SMALL.tokens}, expected {SMALL.tokens + 1}"),
        ("raw", replace(SMALL, dim_v=None), "layers[0].v is {"),
    ],
    ids=["recipe", "dtype", "layers", "heads", "tokens", "sides"],
)
def test_errors_say_how_a_row_of_another_page_differs(recipe: str, geometry: PageGeometry, message: str) -> None:
    codec, other = PageCodec("raw", SMALL), PageCodec(recipe, geometry)
    row = bytearray(codec.nbytes)
    assert codec.encode_into(filled_buffer(SMALL, 1)[0], [0], [row]) == [None]
    (refused,) = other.check([row])
    assert isinstance(refused, InvalidHeader)
    assert f"row 0 is the row of a different page: {message}" in str(refused)


def test_errors_report_another_length_or_description_of_a_row() -> None:
    codec = PageCodec("raw", SMALL)
    row = bytearray(codec.nbytes)
    assert codec.encode_into(filled_buffer(SMALL, 1)[0], [0], [row]) == [None]
    longer = row + bytes(64)
    longer[16:24] = len(longer).to_bytes(8, "little")
    unreadable = row[: rows_of.FRAME_BYTES] + b"\xc1" + row[rows_of.FRAME_BYTES + 1 :]
    shorter = bytearray(row)
    shorter[96:100] = (int.from_bytes(row[96:100], "little") - 1).to_bytes(4, "little")
    for changed, message in (
        (longer, f"row 0: its length is {len(longer)}, expected {len(row)}"),
        (unreadable, "is the row of a different page: kvpack.header is not msgpack"),
        (shorter, "is the row of a different page: kvpack.header is not msgpack"),
    ):
        rows_of.write_checksum(memoryview(changed))
        (refused,) = codec.check([changed])
        assert isinstance(refused, InvalidHeader)
        assert message in str(refused)


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("lossless", "the sizes of lossless's streams .* depend on the values"),
        ("hqmq-s96-r6-med3", "streams outliers depend on the values"),
        ("octopus-3;tail=32", "the recipe keeps the newest 32 tokens raw"),
    ],
)
def test_recipes_with_unknown_sizes_are_refused(recipe: str, message: str) -> None:
    with pytest.raises(InvalidParameter, match=message):
        PageCodec(recipe, SMALL)


def test_unsuitable_arguments_are_refused() -> None:
    pages, given = filled_buffer(SMALL, 2)
    codec = PageCodec("raw", SMALL)
    room: Any = [bytearray(codec.nbytes)]
    cases: list[tuple[Any, type[Exception], str]] = [
        (lambda: PageGeometry(0, 1, 1, 1, 1), InvalidParameter, "layers is 0, expected an integer from 1"),
        (lambda: PageGeometry(1, 1, 1, 1, 1, "int4"), InvalidParameter, "dtype is 'int4', expected one of bf16"),
        (lambda: PageCodec("raw", SMALL, threads=0), InvalidParameter, "threads is 0"),
        (lambda: PageCodec("raw", SMALL, namespace=b"x"), InvalidParameter, "expected 32 bytes, such as Identity.digest"),
        (lambda: PageCodec("raw", (1, 2)), InvalidParameter, "geometry is a tuple"),  # type: ignore[arg-type]
        (lambda: PageBuffer(SMALL, given[0]), InvalidParameter, "the geometry has k and v, but tensors for k were passed"),
        (lambda: PageBuffer(SMALL, given[0][:, :2], given[1]), InvalidParameter, "expected one tensor .* of 3 layers, or a list"),
        (lambda: PageBuffer(SMALL, given[0].float(), given[1]), InvalidType, r"layers\[0\].k has dtype torch.float32, expected bf16"),
        (lambda: PageBuffer(SMALL, given[0][..., :8], given[1]), InvalidParameter, r"expected \[slot, 2, 16, 64\]"),
        (lambda: PageBuffer(SMALL, given[0][:1], given[1]), InvalidParameter, "has 1 slots on cpu, but another has 2"),
        (lambda: codec.encode_into(pages, [2], room), OutOfBounds, "slot 2 was passed, but the buffer has 2"),
        (lambda: codec.encode_into(pages, [0, 1], room), InvalidParameter, "1 rows were passed for 2 slots"),
        (lambda: codec.encode_into(pages, [0.0], room), InvalidParameter, "a slot is 0.0, expected an integer"),  # type: ignore[list-item]
        (lambda: codec.decode_into(room * 2, pages, [1, 1]), InvalidParameter, "slot 1 was passed 2 times, but a slot holds one page"),
        (lambda: codec.encode_into(pages, [0], [bytes(codec.nbytes)]), InvalidParameter, "row 0 is a read-only buffer"),
        (lambda: codec.encode_into(pages, [0], [bytearray(9)]), Truncated, f"has room for 9 bytes, but a page needs {codec.nbytes}"),
        (lambda: codec.encode_into(pages, [0], room, keys=[]), InvalidParameter, "0 keys were passed for 1 slots"),
        (lambda: codec.encode_into(pages, [0], room, keys=["text"]), InvalidParameter, "a key is a str, expected bytes"),
        (lambda: codec.encode_into(given, [0], room), InvalidParameter, "pages is a list"),
        (lambda: codec.encode_into(pages, [0], torch.zeros(1, 9)), InvalidParameter, r"expected uint8 \[page, byte\]"),
        (lambda: PageCodec("raw", PageGeometry(1, 1, 1, 8, 8)).encode_into(pages, [0], room), InvalidParameter, "the codec is for"),
        (
            lambda: codec.encode_into(pages, [0], [torch.zeros(codec.nbytes)]), InvalidParameter,
            "rows contains something other than contiguous buffers",
        ),
    ]
    for call, error, message in cases:
        with pytest.raises(error, match=message):
            call()


def test_memory_shared_between_pages_is_refused() -> None:
    """Of several pages reported as written, only one would remain, or parts of each."""
    pages, (k, v) = filled_buffer(SMALL, 2)
    codec = PageCodec("kivi-2", SMALL, threads=2)
    room = bytearray(codec.nbytes + 64)
    rows = [bytearray(codec.nbytes) for _ in range(2)]
    assert codec.encode_into(pages, [0, 1], rows) == [None] * 2
    joined = torch.zeros(2 * codec.nbytes, dtype=torch.uint8)
    for shared, apart in (
        ([room] * 2, 0),
        ([memoryview(room)[64:], memoryview(room)], 64),
        (torch.zeros(1, codec.nbytes, dtype=torch.uint8).expand(2, -1), 0),
        (joined.as_strided((2, codec.nbytes), (codec.nbytes - 64, 1)), codec.nbytes - 64),
    ):
        with pytest.raises(InvalidParameter, match=f"two rows begin {apart} bytes apart, but a page needs {codec.nbytes}"):
            codec.encode_into(pages, [0, 1], shared)
    assert not any(room)
    assert not joined.any()
    assert codec.encode_into(pages, [0, 1], joined.view(2, -1)) == [None] * 2
    expanded = PageBuffer(SMALL, k.clone(), v[:1].clone().expand(2, -1, -1, -1, -1))
    assert codec.encode_into(expanded, [0, 1], joined.view(2, -1)) == [None] * 2
    for recipe in ("kivi-2", "raw"):
        other = PageCodec(recipe, SMALL)
        made = [bytearray(other.nbytes) for _ in range(2)]
        other.encode_into(pages, [0, 1], made)
        with pytest.raises(InvalidParameter, match=r"layers\[0\].v: values share memory \(shape .*, strides \[0, "):
            other.decode_into(made, expanded, [0, 1])


@pytest.mark.parametrize("recipe", ["kivi-2", "raw"])
def test_overlapping_slots_are_refused(recipe: str) -> None:
    """They are refused for any strides and for any layers and sides that share memory, before anything is written."""
    geometry = kvpack.pages.PageGeometry(2, 1, 32, 32, 32)
    codec = PageCodec(recipe, geometry)
    size = 2 * 32 * 32
    memory = torch.zeros(8 * size).bfloat16()
    rows = [bytearray(codec.nbytes) for _ in range(3)]
    codec.encode_into(PageBuffer(geometry, *torch.randn(2, 3, 2, 1, 32, 32).bfloat16()), [0, 1, 2], rows)

    def slots(slot: int = size, layer: int = size // 2, token: int = 32, channel: int = 1, first: int = 0) -> torch.Tensor:
        return memory.as_strided((3, 2, 1, 32, 32), (slot, layer, size, token, channel), first)

    k, v = slots(), slots(first=4 * size)
    assert codec.decode_into(rows, PageBuffer(geometry, k, v), [0, 1, 2]) == [None] * 3
    # Sides may take turns, and tokens may be the innermost.
    between = slots(slot=2 * size), slots(slot=2 * size, first=size)
    turned = slots(token=1, channel=32), slots(token=1, channel=32, first=4 * size)
    for pair in (between, turned):
        assert codec.decode_into(rows, PageBuffer(geometry, *pair), [0, 1, 2]) == [None] * 3
    memory.zero_()
    for bad_k, bad_v, message in (
        (slots(slot=32), v, r"layers\[0\]\.k: values share memory \(shape .*, strides \[32, "),
        (slots(slot=size // 2 - 1), v, r"layers\[0\]\.k: values share memory"),
        (slots(token=31), v, r"layers\[0\]\.k: values share memory"),
        (slots(token=1, channel=1), v, r"layers\[0\]\.k: values share memory"),
        (slots(layer=size // 2 - 1), v, r"layers\[0\]\.k and layers\[1\]\.k share memory"),
        (slots(layer=0), v, r"layers\[0\]\.k and layers\[1\]\.k"),
        ([k[:, 0], k[:, 0]], v, r"layers\[0\]\.k and layers\[1\]\.k"),
        (k, k, r"layers\[0\]\.k and layers\[0\]\.v"),
        (k, slots(first=3 * size - 1), r"layers\[1\]\.k and layers\[0\]\.v"),
        (slots(slot=2 * size), slots(slot=2 * size, first=size - 1), r"layers\[1\]\.k and layers\[0\]\.v"),
        (k, [v[:, 0], k[:, 1]], r"layers\[1\]\.k and layers\[1\]\.v"),
    ):
        with pytest.raises(InvalidParameter, match=message):
            codec.decode_into(rows, PageBuffer(geometry, bad_k, bad_v), [0, 1, 2])
        with pytest.raises(InvalidParameter, match="so pages cannot be written"):
            codec.decode_into(rows[:1], PageBuffer(geometry, bad_k, bad_v), [0])
    assert not memory.any()


@pytest.mark.parametrize("slots", [numpy.array([1, 0], numpy.int32), numpy.array([1, 0], numpy.uint8), torch.tensor([1, 0]).int()])
@pytest.mark.parametrize("recipe", ["kivi-2", "raw"])
def test_slots_may_have_any_integer_type_of_an_engine(recipe: str, slots: Any) -> None:
    pages, given = filled_buffer(SMALL, 2)
    codec = PageCodec(recipe, SMALL)
    rows, expected = ([bytearray(codec.nbytes) for _ in range(2)] for _ in range(2))
    assert codec.encode_into(pages, slots, rows) == codec.encode_into(pages, [1, 0], expected) == [None] * 2
    assert rows == expected
    assert codec.decode_into(rows, pages, slots) == [None] * 2
    if recipe == "raw":
        assert all(torch.equal(torch.stack(pages.sides[side], 1), x) for side, x in zip("kv", given, strict=True))


def _encoded_in_a_child(codec: PageCodec, pages: PageBuffer, rows: list[bytearray], results: Any) -> None:
    results.put((codec.encode_into(pages, [0, 1], rows), rows))


def test_a_codec_works_in_a_forked_process() -> None:
    pages, _ = filled_buffer(SMALL, 2)
    with PageCodec("kivi-2", SMALL, threads=2) as codec:
        rows, others = ([bytearray(codec.nbytes) for _ in range(2)] for _ in range(2))
        assert codec.encode_into(pages, [0, 1], rows) == [None] * 2
        fork = multiprocessing.get_context("fork")
        results = fork.Queue()
        child = fork.Process(target=_encoded_in_a_child, args=(codec, pages, others, results), daemon=True)
        child.start()
        assert results.get(timeout=60) == ([None] * 2, rows)
        child.join()


@pytest.mark.parametrize(
    "recipe", ["k=octahedral:b=3;v=raw", "k=scalar:b=4,mean=32;v=raw", "k=group:b=4,g=64,axis=channel,rotation=hadamard;v=raw"]
)
def test_a_token_with_a_large_direction_error_is_named(recipe: str) -> None:
    """Pages without room for raw tokens count the token. Pages of ordinary tokens cause no warning."""
    geometry = PageGeometry(2, 2, 32, 64, 64, "fp32")
    pages, (k, _) = filled_buffer(geometry, 2)
    codec = PageCodec(recipe, geometry)
    rows = torch.zeros(2, codec.nbytes, dtype=torch.uint8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert codec.encode_into(pages, [0, 1], rows) == [None, None]
    coordinate = torch.zeros(1, 1, 1, 64)
    # A group encodes a single coordinate and zeros exactly.
    coordinate[..., 5], coordinate[..., 9] = 8, -8 if "group" in recipe else 0
    k[1, 1, 1, 9] = codec.recipe.codec(0, 2, "k", 64).rotation.inverse(coordinate)[0, 0, 0]
    with pytest.warns(KvpackWarning, match="in pages of 32 tokens, 1 tokens lose precision"):
        assert codec.encode_into(pages, [0, 1], rows) == [None, None]
    assert codec.raw_tokens_left_out == 1


@pytest.mark.parametrize("kernels", ["", "torch"])
def test_a_token_with_two_problems_is_counted_once(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPACK_KERNELS", kernels)
    geometry = PageGeometry(2, 2, 32, 64, 64, "fp32")
    pages, (k, _) = filled_buffer(geometry, 2)
    codec = PageCodec("k=scalar:b=4,mean=32;v=raw", geometry)
    coordinate = torch.zeros(1, 1, 1, 64)
    coordinate[..., 5] = 100
    k[1, 1, 1, 9] = codec.recipe.codec(0, 2, "k", 64).rotation.inverse(coordinate)[0, 0, 0]
    k[1, 0, :, 3] *= 20
    with pytest.warns(KvpackWarning, match="in pages of 32 tokens, 2 tokens lose precision"):
        assert codec.encode_into(pages, [0, 1], torch.zeros(2, codec.nbytes, dtype=torch.uint8)) == [None, None]
    assert codec.raw_tokens_left_out == 2


@pytest.mark.parametrize("kernels", ["", "torch"])
def test_a_token_with_a_low_norm_without_a_slot_is_harmless(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots go to tokens of high norm first. A token of low norm without a slot only loses its own precision."""
    monkeypatch.setenv("KVPACK_KERNELS", kernels)
    geometry = PageGeometry(layers=1, heads=2, tokens=64, dim_k=64, dim_v=64)
    pages, (k, _) = filled_buffer(geometry, 1)
    k[0, 0, :, 7] *= 30
    k[0, 0, :, 9] *= 0.1
    codec = PageCodec("k=group:b=2,g=8;v=raw;raw=0,0.6,4", geometry)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert codec.encode_into(pages, [0], torch.zeros(1, codec.nbytes, dtype=torch.uint8)) == [None]
    assert codec.raw_tokens_left_out == 1


def test_a_large_token_far_from_the_mean_of_its_page_keeps_its_precision() -> None:
    """Without channel scales, subtracting half of the mean suffices until the token's norm is four times the usual one."""
    geometry = PageGeometry(2, 2, 32, 64, 64)
    pages, (k, _) = filled_buffer(geometry, 2)
    k += 3
    k[1, 1, 1, 5, 9] = 80
    codec = PageCodec("k=scalar:b=3,mean=32;v=raw", geometry)
    rows = torch.zeros(2, codec.nbytes, dtype=torch.uint8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert codec.encode_into(pages, [0, 1], rows) == [None, None]
    assert codec.raw_tokens_left_out == 0
    error = (decoded_side(codec, geometry, rows, "k")[1, 1, 1] - k[1, 1, 1].float()).norm(dim=1)
    assert float(error[5] / k[1, 1, 1, 5].float().norm()) < 0.3


@pytest.mark.parametrize("recipe", ["octopus-3", "kvpack-3", "turboquant-3"])
@pytest.mark.parametrize("tokens", [16, 32, 64])
def test_an_attention_sink_far_from_the_mean_of_its_page_keeps_its_precision(tokens: int, recipe: str) -> None:
    """As in SmolLM2, keys share a large mean, and the first token of a page has a low norm and is far from it.

    Subtracting half of the mean suits all tokens.
    """
    geometry = PageGeometry(2, 3, tokens, 64, 64, "fp32")
    pages, (k, _) = filled_buffer(geometry, 2)
    common = torch.randn(64, generator=torch.Generator().manual_seed(0))
    k *= 0.6
    k += common
    k[:, :, :, 0] = 0.25 * k[:, :, :, 0] - 0.15 * common
    given = k.clone()
    codec = PageCodec(recipe, geometry)
    rows = torch.zeros(2, codec.nbytes, dtype=torch.uint8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert codec.encode_into(pages, [0, 1], rows) == [None, None]
    assert codec.raw_tokens_left_out == 0
    assert codec.decode_into(rows, pages, [0, 1]) == [None, None]
    error = (k - given).norm(dim=4)
    usual = error[..., 1:].median(3).values
    assert float((error[..., 0] / usual).max()) < 1.75
