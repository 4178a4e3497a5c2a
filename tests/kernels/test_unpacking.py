"""Tests of the Triton kernels for unpacking, compared with formats/.

The tests run in Triton's interpreter anywhere, and compiled on CUDA devices. interpreter.py describes which process runs which of them.
"""

from __future__ import annotations

import dataclasses
import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvpack
from kvpack.coding import dispatch, triton_version
from kvpack.formats.angle import Angle
from kvpack.formats.base import Codec
from kvpack.formats.columns import Columns
from kvpack.formats.errors import InvalidParameter, KvpackWarning
from kvpack.formats.group import AXES, GROUP_SIZES, TOKEN_SCALES, Group
from support.caches import random_pairs
from support.file_parts import random_page
from support.interpreter import DEVICE
from support.strategies import create, packings, with_poisoned_padding
from support.vector_checks import DECODED, check_values, unpack_all

if TYPE_CHECKING:
    from collections.abc import Callable


def on_device(streams: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the streams as views of larger buffers of ones that are neither contiguous nor aligned."""
    with torch.device(DEVICE):
        return {name: with_poisoned_padding(stream) for name, stream in streams.items()}


def random_streams(codec: Codec, batch: int, heads: int, tokens: int, seed: int) -> dict[str, torch.Tensor]:
    """Return streams of arbitrary words, even invalid ones, and finite scales, including subnormal, negative and the largest ones."""
    generator = torch.Generator().manual_seed(seed)
    streams = {}
    for name, layout in codec.layout(batch, heads, tokens).items():
        bits = torch.randint(-(2**15), 2**15, layout.shape, dtype=torch.int16, generator=generator)
        if layout.dtype == "F16":
            # The highest exponent is infinity or NaN.
            bits = torch.where(bits & 0x7C00 == 0x7C00, bits & ~0x400, bits).to(torch.int16)
            streams[name] = bits.view(torch.float16)
        elif layout.dtype == "F32":
            streams[name] = bits.to(torch.float32) * torch.exp2(torch.randint(-150, 80, layout.shape, generator=generator).float())
        elif layout.dtype == "U8":
            streams[name] = (bits & 0xFF).to(torch.uint8)
        else:
            streams[name] = bits.view(torch.uint16)
        if name == "scale_range":
            # Steps and minima of roots: what they give stays finite.
            streams[name] = streams[name].float().frexp().mantissa.half() / 4
    return streams


def check_group(codec: Group, batch: int, heads: int, tokens: int) -> None:
    from kvpack.kernels.decode import decode

    streams = random_streams(codec, batch, heads, tokens, seed=codec.bits)
    decoded = decode.decode_frame(codec, on_device(streams))
    assert decoded.device.type == DEVICE
    assert decoded.dtype == torch.float32
    assert torch.equal(decoded.cpu(), codec.decode_frame(streams)), codec


@pytest.mark.kernels
@pytest.mark.usefixtures("uninitialized_is_poisoned")
@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("bits", range(1, 9), ids=lambda bits: f"{bits} bits")
def test_group_kernel_equals_formats(bits: int, axis: str) -> None:
    # Columns of one field, of a byte left over, of fields across words, and the widest; widths off every power of two.
    for number, (dim, fields) in enumerate(((40, 1), (80, 3), (63, 5), (40, 128 // bits))):
        size, token_scale = GROUP_SIZES[(number + bits) % len(GROUP_SIZES)], TOKEN_SCALES[(number + bits) % len(TOKEN_SCALES)]
        check_group(Group(dim, bits, axis, size, "none", 0, token_scale, (("codes", fields),)), 1, 2, 18)


@pytest.mark.kernels
@pytest.mark.usefixtures("uninitialized_is_poisoned")
@pytest.mark.parametrize("side", ["k", "v"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8], ids=lambda bits: f"{bits} bits")
def test_group_kernel_equals_formats_for_the_default_layout(bits: int, side: str) -> None:
    for dim, batch, heads, tokens, scales in ((128, 2, 1, 33, "fp16"), (1, 1, 2, 66, "u8"), (300, 1, 1, 3, "fp16"), (80, 2, 2, 45, "u8")):
        codec = create("group", dim, side, b=str(bits), token_scale="fp16", scales=scales)
        assert isinstance(codec, Group)
        check_group(codec, batch, heads, tokens)


@pytest.mark.kernels
def test_group_kernel_accepts_zero_tokens() -> None:
    codec = create("group", 64, "k", b="2")
    assert isinstance(codec, Group)
    check_group(codec, 2, 1, 0)


@pytest.mark.kernels
def test_group_kernel_copies_only_misaligned_scales() -> None:
    from kvpack.kernels.decode import group

    scales = torch.arange(24, dtype=torch.float16).reshape(1, 1, 3, 4, 2)
    aligned = group._view_pairs(scales[:, :, 1:])
    assert aligned.data_ptr() == scales[:, :, 1:].data_ptr()
    for view in (with_poisoned_padding(scales), scales.transpose(3, 4).contiguous().transpose(3, 4)):
        assert torch.equal(group._view_pairs(view).view(torch.float16), scales)


@pytest.mark.kernels
@pytest.mark.parametrize("stream", ["codes.1", "scales", "token_scale"])
def test_group_kernel_refuses_streams_that_are_too_short(stream: str) -> None:
    from kvpack.kernels.decode import decode

    codec = create("group", 80, "v", b="3", token_scale="fp32")
    assert isinstance(codec, Group)
    streams = random_streams(codec, 1, 2, 9, seed=0)
    shape = list(streams[stream].shape)
    streams[stream] = streams[stream][:, :, :8]
    with pytest.raises(InvalidParameter, match=rf"{stream} has shape \[.*\], but the codec needs shape \[{', '.join(map(str, shape))}\]"):
        decode.decode_frame(codec, streams)


@pytest.mark.kernels
@pytest.mark.usefixtures("uninitialized_is_poisoned")
@pytest.mark.parametrize(
    "words",
    [
        "element=e4m3",
        "element=e5m2,per=head,scales=fp16",
        "element=e4m3,per=token,scales=fp16",
        "element=e2m1,per=token",
        "element=e4m3,scales=e8m0",
        "element=e5m2,scales=e8m0",
        "element=e2m1,scales=e8m0",
        "element=e2m1,scales=e4m3",
    ],
)
def test_minifloat_kernel_equals_formats(words: str) -> None:
    """Elements and scales are arbitrary finite values, and words have any number of fields."""
    from kvpack.kernels.decode import decode

    for number, (dim, fields) in enumerate(((128, 0), (40, 1), (63, 3), (70, 16), (1, 0))):
        codec = create("minifloat", dim, **dict(word.split("=") for word in words.split(",")))
        if fields:
            codec = dataclasses.replace(codec, fields=(("codes", fields),))  # type: ignore[type-var]
        page = random_page(codec, 2, 2, 19, random.Random(number))[0]
        decoded = decode.decode_frame(codec, on_device(dict(page.streams)))
        assert torch.equal(decoded.cpu().view(torch.int32), codec.decode_frame(page.streams).view(torch.int32))


TABLE_CODECS = [
    ("scalar", 80, "b=1"),
    ("scalar", 128, "b=3"),
    ("scalar", 64, "b=8,norm=fp32"),
    ("scalar", 512, "b=4"),
    ("octahedral", 128, "b=2"),
    ("octahedral", 80, "b=3"),
    ("octahedral", 64, "b=4"),
    ("octahedral", 96, "b=4,arrangement=direct,norm=fp32"),
    ("octahedral", 40, "b=2,arrangement=direct"),
    ("octahedral", 64, "b=7"),
    ("octahedral", 64, "b_dir=1,b_norm=0"),
    ("octahedral", 64, "b_dir=1,b_norm=3,arrangement=direct"),
    ("angle", 128, "n=128"),
    ("angle", 80, "n=48,norm=linear4,arrangement=direct"),
    ("angle", 96, "n=48,norm=linear1,range=fp32"),
    ("angle", 64, "n=1000,norm=fp32"),
    ("angle", 64, "n=48,norm=log4"),
    ("quaternion", 128, "s=24,r=3"),
    ("quaternion", 63, "s=7,r=8,arrangement=direct"),
    ("quaternion", 80, "s=96,r=4,norm=fp32"),
]
table_codecs = pytest.mark.parametrize(
    ("codec_id", "dim", "words"), [pytest.param(*row, id=f"{row[0]} {row[2]} {row[1]}") for row in TABLE_CODECS]
)


def check_tables(codec: Codec, streams: dict[str, torch.Tensor], expected: torch.Tensor) -> None:
    from kvpack.kernels.decode import decode

    decoded = decode.decode_frame(codec, on_device(streams))
    assert decoded.dtype == torch.float32
    if isinstance(codec, Angle) and codec.norm == "log":
        # A power of two is rounded otherwise.
        torch.testing.assert_close(decoded.cpu(), expected, rtol=1e-6, atol=1e-7 * float(expected.abs().max()))
    else:
        assert torch.equal(decoded.cpu(), expected)


@pytest.mark.kernels
@pytest.mark.usefixtures("uninitialized_is_poisoned")
@table_codecs
def test_table_kernel_equals_formats(codec_id: str, dim: int, words: str) -> None:
    codec = create(codec_id, dim, **dict(word.split("=") for word in words.split(",")))
    x = torch.randn(2, 2, 19, dim, generator=torch.Generator().manual_seed(dim))
    x[0, 1, 3] = 0
    streams = codec.encode(x)
    check_tables(codec, streams, codec.decode_frame(streams))


@pytest.mark.kernels
@pytest.mark.parametrize("words", ["n=48,norm=linear4,arrangement=direct", "s=7,r=3,arrangement=direct", "n=48,norm=fp32"])
def test_table_kernel_never_reads_beyond_its_table(words: str) -> None:
    codec = create("angle" if words.startswith("n") else "quaternion", 64, **dict(word.split("=") for word in words.split(",")))
    streams = random_streams(codec, 1, 2, 40, seed=1) | {
        name: torch.ones(layout.shape, dtype=torch.float32 if layout.dtype == "F32" else torch.float16)
        for name, layout in codec.scale_layouts(1, 2, 40).items()
    }
    entries = 48 if words.startswith("n") else 7 * 24
    first, *more = codec.digits(streams)
    assert first.max() >= entries, "no word selects an entry beyond the table"
    inside = codec.pack_digits(first.clamp(max=entries - 1), *more) | {name: streams[name] for name in codec.scale_layouts(1, 2, 40)}
    check_tables(codec, streams, codec.decode_frame(inside))


@pytest.mark.kernels
def test_table_kernel_refuses_streams_that_are_too_short() -> None:
    from kvpack.kernels.decode import decode

    codec = create("scalar", 80, b="3")
    streams = codec.encode(torch.randn(1, 2, 9, 80))
    with pytest.raises(InvalidParameter, match=r"norm has shape \[1, 2, 8\], but the codec needs shape \[1, 2, 9\]"):
        decode.decode_frame(codec, streams | {"norm": streams["norm"][:, :, :8]})


def check_unpack(packing: Columns, seed: int = 0) -> None:
    from kvpack.kernels.bitpack import columns

    generator = torch.Generator().manual_seed(seed)
    words = {
        str(plane): torch.randint(-(2**15), 2**15, (2, 1, 5, count), dtype=torch.int16, generator=generator).view(torch.uint16)
        for plane, count in enumerate(packing.planes)
    }
    expected = packing.unpack(list(words.values()))
    digits = columns.unpack(packing, list(on_device(words).values()))
    assert len(digits) == len(expected)
    for digit, reference in zip(digits, expected, strict=True):
        assert digit.dtype == torch.int32
        assert torch.equal(digit.cpu(), reference), packing


@pytest.mark.kernels
@pytest.mark.usefixtures("uninitialized_is_poisoned")
@pytest.mark.parametrize(
    ("symbols", "bases", "fields"),
    [
        pytest.param(43, (3,), 10, id="one word of ternary digits"),
        pytest.param(32, (24,), 5, id="3 bytes"),
        pytest.param(32, (48,), 5, id="4 bytes, above the largest int32"),
        pytest.param(32, (576, 16), 3, id="two digits"),
        pytest.param(28, (5, 32), 5, id="5 bytes of two digits"),
        pytest.param(66, (3,), 33, id="2^53 values"),
        pytest.param(43, (256, 4), 1, id="two binary digits"),
        pytest.param(130, (2,), 128, id="16 bytes"),
        pytest.param(7, (65536,), 8, id="fields of a whole word"),
    ],
)
def test_unpack_kernel_equals_formats(symbols: int, bases: tuple[int, ...], fields: int) -> None:
    check_unpack(Columns(symbols, bases, fields))


@pytest.mark.kernels
@settings(max_examples=15)
@given(packings(), st.integers(0, 2**32 - 1))
def test_unpack_kernel_equals_formats_for_any_packing(packing: Columns, seed: int) -> None:
    check_unpack(packing, seed)


@pytest.mark.kernels
def test_unpack_kernel_refuses_planes_that_are_too_short() -> None:
    from kvpack.kernels.bitpack import columns

    packing = Columns(32, (8,), 8)
    planes = packing.pack([torch.zeros(1, 1, 3, 32, dtype=torch.int32)])
    with pytest.raises(InvalidParameter, match=r"plane has shape \[1, 1, 3, 1\], but the codec needs shape \[1, 1, 3, 2\]"):
        columns.unpack(packing, [planes[0], planes[1][..., :1]])


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("recipe", "kernels"),
    [
        pytest.param("oscar-2", {"group"}, id="group"),
        pytest.param("k=octahedral:b=3;v=group:b=4;tail=32", {"table", "group"}, id="octahedral, group"),
        pytest.param("k=minifloat:element=e4m3;v=minifloat:element=e2m1,scales=e4m3", {"minifloat"}, id="minifloat"),
        pytest.param("hqmq-s24-r3", {"table"}, id="quaternion"),
        pytest.param("kv=angle:n=48", {"table"}, id="angle"),
        pytest.param("kv=scalar:b=3", {"table"}, id="scalar"),
        pytest.param("turboquant-2.5", {"columns.unpack"}, id="scalar of two widths"),
        pytest.param("kv=polar:b=4.2.2.2", {"table"}, id="polar"),
        pytest.param("kv=polar:b=3.2.2.2.1", {"table", "columns.unpack"}, id="polar with an unequal pair"),
        pytest.param("bf16", set(), id="raw"),
        pytest.param(
            "k=octahedral:b=3,raw_first=2,raw_low_norm=0.9;v=group:b=4,raw_first=2,raw_dtype=fp32", {"table", "group"}, id="raw positions"
        ),
        pytest.param(
            "k=group:b=2,g=32,rotation=hadamard,channel_scale=fp16,channel_order=u8,block_rotation=16,outliers=3,qjl=fp16,sinks=2;"
            "v=octahedral:b=3,outliers=3,qjl=fp16,sinks=1",
            {"table", "group"},
            id="sidecars",
        ),
    ],
)
def test_kernels_decode_the_pages_of_a_cache(recipe: str, kernels: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from kvpack.kernels import codecs
    from kvpack.kernels.bitpack import columns
    from kvpack.kernels.decode import group, minifloat

    called = set()

    def recorded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            result = function(*arguments)
            if result is not None:
                called.add(name)
            return result

        return call

    for family, row in codecs.CODECS.items():
        name = {group.prepare: "group", minifloat.prepare: "minifloat"}.get(row.prepare, "table")
        monkeypatch.setitem(codecs.CODECS, family, row._replace(prepare=recorded(name, row.prepare)))
    monkeypatch.setattr(columns, "unpack", recorded("columns.unpack", columns.unpack))
    cache = kvpack.pack(random_pairs(1, 40, dims=(80, 64)), recipe).to(DEVICE)
    found = {}
    for backend, expected in (("torch", set()), ("triton", kernels)):
        monkeypatch.setenv(dispatch.VARIABLE, backend)
        called.clear()
        found[backend] = list(cache[0].unpack(torch.float32))
        assert called == expected
    for by_torch, by_triton in zip(found["torch"], found["triton"], strict=True):
        assert torch.equal(by_torch, by_triton)


@pytest.mark.kernels
@pytest.mark.parametrize("file", DECODED)
def test_kernels_decode_vectors_to_their_values(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(dispatch.VARIABLE, "triton")
    check_values(file, unpack_all(file, DEVICE))


@pytest.mark.cuda
def test_kernel_offsets_of_tokens_are_64_bit() -> None:
    from kvpack.kernels.decode import decode

    codec = create("group", 128, "k", b="2")
    assert isinstance(codec, Group)
    tokens = 2**24 + 64
    require_memory(12)
    generator = torch.Generator(DEVICE).manual_seed(0)
    streams = {
        name: torch.randint(0, 2**14, layout.shape, dtype=torch.int16, device=DEVICE, generator=generator).view(
            torch.float16 if layout.dtype == "F16" else torch.uint16
        )
        for name, layout in codec.layout(1, 1, tokens).items()
    }
    last = {name: stream[:, :, -64 // (32 if name == "scales" else 1) :].cpu() for name, stream in streams.items()}
    assert torch.equal(decode.decode_frame(codec, streams)[:, :, -64:].cpu(), codec.decode_frame(last))


@pytest.mark.cuda
def test_kernel_offsets_of_words_are_64_bit() -> None:
    from kvpack.kernels.decode import decode

    codec = create("group", 1024, "k", b="8")
    assert isinstance(codec, Group)
    require_memory(9)
    streams = random_streams(codec, 1, 1, 4, seed=0)
    far_apart = {name: stream.to(DEVICE) for name, stream in streams.items()}
    words = torch.empty(2**32 + 2**24, dtype=torch.uint16, device=DEVICE).as_strided(streams["codes.0"].shape, (1, 1, 1, 2**23))
    far_apart["codes.0"] = words.copy_(far_apart["codes.0"])
    assert torch.equal(decode.decode_frame(codec, far_apart).cpu(), codec.decode_frame(streams))


def require_memory(gibibytes: int) -> None:
    if torch.cuda.mem_get_info()[0] < gibibytes << 30:
        pytest.skip(f"needs {gibibytes} GiB of free memory on the device")


@pytest.mark.parametrize(
    ("variable", "device", "version", "expected"),
    [
        pytest.param(None, "cuda", "3.6.0", True, id="cuda"),
        pytest.param(None, "cuda", "3.10.0+git1a2b", True, id="cuda, newer than any that was run"),
        pytest.param(None, "cpu", "3.6.0", False, id="cpu"),
        pytest.param(None, "cpu", "3.5.1", False, id="cpu, too old"),
        pytest.param(None, "cpu", None, False, id="cpu, not installed"),
        pytest.param("", "cuda", "3.6.0", True, id="empty is unset"),
        pytest.param("torch", "cuda", "3.6.0", False, id="torch on cuda"),
        pytest.param("torch", "cuda", "3.5.1", False, id="torch on cuda, too old"),
        pytest.param("triton", "cuda", "4.0.0rc1", True, id="triton on cuda"),
    ],
)
def test_the_backend_is_chosen_by_device_and_environment(
    variable: str | None, device: str, version: str | None, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_environment(monkeypatch, variable, version)
    assert dispatch.uses_triton(torch.device(device)) == expected


@pytest.mark.parametrize(
    ("version", "message"),
    [
        pytest.param("3.5.1", r"need Triton 3\.6 or newer, but Triton 3\.5\.1 is installed\. .*KVPACK_KERNELS=torch", id="too old"),
        pytest.param("unknown", "but Triton unknown is installed", id="no number"),
        pytest.param(None, "but none is installed", id="not installed"),
    ],
)
def test_unused_kernels_of_a_device_are_reported_once(version: str | None, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(monkeypatch, None, version)
    triton_version.warn_unsupported.cache_clear()
    with pytest.warns(KvpackWarning, match=message):
        assert not dispatch.uses_triton(torch.device("cuda"))
    assert not dispatch.uses_triton(torch.device("cuda"))


@pytest.mark.parametrize(
    ("variable", "device", "version", "message"),
    [
        pytest.param("cuda", "cpu", "3.6.0", r"KVPACK_KERNELS is 'cuda', expected one of torch, triton", id="unknown"),
        pytest.param("triton", "cuda", None, r"which requires Triton 3\.6 or newer, but none is installed: unset it", id="not installed"),
        pytest.param("triton", "cpu", "3.5.1", r"requires Triton 3\.6 or newer, but Triton 3\.5\.1 is installed", id="too old"),
        pytest.param("triton", "cpu", "3.6.0", "but got one on cpu: unset it, or set TRITON_INTERPRET=1$", id="cpu"),
        pytest.param("triton", "meta", "3.6.0", "but got one on meta: unset it$", id="another device"),
    ],
)
def test_an_unavailable_choice_is_refused(
    variable: str, device: str, version: str | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_environment(monkeypatch, variable, version)
    with pytest.raises(InvalidParameter, match=message):
        dispatch.uses_triton(torch.device(device))


def test_a_page_is_decoded_as_the_environment_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = kvpack.pack(random_pairs(1, 32), "kivi-2")
    monkeypatch.setenv(dispatch.VARIABLE, "gpu")
    with pytest.raises(InvalidParameter, match="KVPACK_KERNELS is 'gpu'"):
        cache.unpack()


def set_environment(monkeypatch: pytest.MonkeyPatch, variable: str | None, version: str | None) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.delenv(dispatch.VARIABLE, raising=False)
    if variable is not None:
        monkeypatch.setenv(dispatch.VARIABLE, variable)
    monkeypatch.setattr(triton_version, "installed_version", lambda: version)
