"""The tables, figures and worked example in spec/side-cars.md match the code, and both decoders read the example."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

import numpy
import pytest
import torch

import kvpack
from kvpack.file import container
from kvpack.file.header import Contents, LayerEntry
from kvpack.formats import SIDECARS, codec_from_params
from kvpack.formats.balanced import FRAMES
from kvpack.formats.basis import DIGEST_BYTES, MAX_LAYER
from kvpack.formats.channel_order import DTYPES as ORDER_DTYPES
from kvpack.formats.key_mean import BITS, PAGE_SIZES, KeyMean
from kvpack.formats.outliers import Outliers
from kvpack.formats.qjl import Qjl
from kvpack.formats.raw import DTYPES as RAW_DTYPES
from kvpack.formats.raw_positions import RawPositions
from kvpack.formats.sidecars import CodecWithSidecars
from kvpack.formats.streams import DTYPE_BYTES, NORMS
from support.decoded_values import assert_within
from support.second_decoder import decoder
from support.sidecar_bounds import QJL_WORST
from support.small_files import side
from support.spec_pages import SPEC, section, table
from support.strategies import create

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvpack.cache.packed_runs import PackedRun

PAGE = SPEC / "side-cars.md"
SIDECAR_ADVICE = section(SPEC / "writers.md", "Sidecars")
BATCH, HEADS, TOKENS, DIM = 2, 3, 7, 128


def words(dtypes: dict[str, str]) -> str:
    return ", ".join(dtypes)


def numbers(values: Iterable[int]) -> str:
    return ", ".join(map(str, values))


def stored(dtypes: dict[str, str]) -> str:
    return " or ".join(f"{dtype} ({word})" for word, dtype in dtypes.items())


def with_all() -> CodecWithSidecars:
    sidecars = {"frame": "balanced", "channel_scale": "fp16", "channel_order": "u8", "block_rotation": "16", "mean": "128"}
    sidecars |= {"outliers": "3", "qjl": "fp16", "sinks": "1"}
    codec = create("scalar", DIM, "k", b="2", raw_first="1", **sidecars)
    assert isinstance(codec, CodecWithSidecars)
    return codec


def test_the_table_of_keys_matches_the_code() -> None:
    rows = table(PAGE.read_text(encoding="utf-8").split("\n## ")[0], "key", "value", "sidecar")
    assert {row["key"]: row["value"] for row in rows} == {
        "balanced": f"map: basis (bytes: the {DIGEST_BYTES} of the digest of a basis), "
        f"layer (integer, 0 to {MAX_LAYER}: the layer of the basis), "
        f"frame (string: {words(FRAMES)})",
        "channel_scale": f"string: {words(NORMS)}",
        "channel_order": f"string: {words(ORDER_DTYPES)}; with u8, dim is at most 256",
        "block_rotation": "integer: the size of a block, from 2 on, which divides dim",
        "key_mean": f"map: tokens (integer: {numbers(PAGE_SIZES)}), bits (integer: {numbers(BITS)}; with 4, dim is even)",
        "outliers": "map: fields (integer)",
        "qjl": f"map: seed (integer, 0 to 2^64 - 1), norm (string: {words(NORMS)}), fields (integer)",
        "raw_tokens": f"string: {words(RAW_DTYPES)}",
        "raw_positions": f"string: {words(RAW_DTYPES)}",
    }
    params = with_all().params()
    assert tuple(row["key"] for row in rows) == tuple(SIDECARS) == tuple(params)[-len(SIDECARS) :]
    assert [list(params[name]) for name in ("balanced", "key_mean", "outliers", "qjl")] == [
        ["basis", "layer", "frame"],
        ["tokens", "bits"],
        ["fields"],
        ["seed", "norm", "fields"],
    ]


def test_the_layout_matches_the_code() -> None:
    rows = table(section(PAGE, "Layout"), "sidecar", "stream", "dtype", "shape")
    codec = with_all()
    inner = codec.codec.layout(BATCH, HEADS, TOKENS)
    layouts = {name.removesuffix(".0"): layout for name, layout in codec.layout(BATCH, HEADS, TOKENS).items() if name not in inner}
    assert [row["stream"].partition(".")[0] for row in rows] == list(layouts)
    sizes = {"batch": BATCH, "kv_head": HEADS, "token": TOKENS, "run": 1, "item": 0, "dim": DIM, "token group": -(-TOKENS // 128)}
    sizes["dim · bits / 8"] = DIM
    for row, layout in zip(rows, layouts.values(), strict=True):
        shape = sizes | {"words": layout.shape[-1], "1": 1, "4": 4}
        assert tuple(shape[size] for size in row["shape"].strip("[]").split(", ")) == layout.shape
        assert layout.dtype in row["dtype"]
    dtypes = {row["stream"]: row["dtype"] for row in rows}
    assert (dtypes["channel_scale"], dtypes["channel_order"], dtypes["qjl_norm"]) == (
        stored(NORMS),
        stored(ORDER_DTYPES),
        stored(NORMS),
    )
    for name in ("raw_tokens", "raw_values"):
        assert sorted(re.findall(r"[BF]+\d+", dtypes[name])) == sorted(RAW_DTYPES.values())


def test_the_size_of_a_position_matches_the_code() -> None:
    figures = re.search(
        r"With dim (\d+) and three heads, a raw token of `bf16` takes (\d+) bytes: of ([\d,]+) tokens of which four are raw, ([\d.]+) bits",
        SIDECAR_ADVICE,
    )
    assert figures is not None
    dim, nbytes, tokens = (int(figure.replace(",", "")) for figure in figures.groups()[:3])
    sidecar = RawPositions(dim, "bf16")
    size = sum(DTYPE_BYTES[layout.dtype] * math.prod(layout.shape[3:]) for layout in sidecar.layout(1, 3, tokens).values())
    assert size == nbytes
    assert float(figures[4]) == round(4 * 8 * nbytes / (tokens * 3 * dim), 3)


def test_sizes_for_head_dim_128_match_the_code() -> None:
    figures = re.search(
        r"With dim 128 and F = (\d+), `outliers` takes (\d+) bytes .* and (\d+) bytes per item; `qjl` takes (\d+) bytes", SIDECAR_ADVICE
    )
    assert figures is not None
    codec = with_all()
    outliers, qjl = codec.sidecar(Outliers), codec.sidecar(Qjl)
    assert outliers is not None
    assert qjl is not None
    entry = codec.layout(1, 1, 1)["outliers"]
    found = outliers.fields, outliers.packing.row_bytes, 4 * DTYPE_BYTES[entry.dtype], qjl.packing.row_bytes
    assert found == tuple(map(int, figures.groups()))
    assert qjl.fields == outliers.fields


def test_the_example_and_the_size_of_a_mean_match_the_code() -> None:
    text = section(PAGE, "Layout")
    example = r"the bytes `([\w ]+)` with dim 8, 4 bits and the scale ([\d.]+) are the vector ([-\d. ]+)\.\n"
    stored, scale, vector = re.findall(example, text)[0]
    streams = {
        "key_mean": torch.tensor(list(bytes.fromhex(stored)), dtype=torch.uint8).view(1, 1, 1, -1),
        "key_mean_scale": torch.tensor([[[float(scale)]]], dtype=torch.float16),
    }
    assert KeyMean(8, 128, 4).vectors(streams).flatten().tolist() == numbers_of(vector)
    figures = r"With dim (\d+) and token groups of (\d+), `key_mean` takes ([\d.]+) bits .* 8 bits and ([\d.]+)"
    dim, tokens, *sizes = re.findall(figures, SIDECAR_ADVICE)[0]
    for bits, size in zip((8, 4), sizes, strict=True):
        layout = KeyMean(int(dim), int(tokens), bits).layout(1, 1, int(tokens))
        stored_bytes = sum(DTYPE_BYTES[entry.dtype] * math.prod(entry.shape) for entry in layout.values())
        assert round(8 * stored_bytes / (int(dim) * int(tokens)), 3) == float(size.rstrip("."))


@pytest.mark.parametrize("dim", [64, 80, 128], ids=str)
def test_the_remainder_of_a_residual_matches_the_text(dim: int) -> None:
    """The test checks the identity, the bound, and the usual share in the advice for writers."""
    worst, usual = map(float, re.findall(r"at most (\d\.\d+) · ‖r‖, and comes to about (\d\.\d+) · ‖r‖", SIDECAR_ADVICE)[0])
    assert worst == math.ceil(100 * QJL_WORST) / 100
    assert usual == round(math.sqrt(math.pi / 2 - 1), 2)
    qjl = Qjl(dim, 5, "fp32", 16)
    r = torch.randn(1, 1, 500, dim, generator=torch.Generator().manual_seed(0))
    r[:, :, 250:] *= torch.rand(1, 1, 250, dim, generator=torch.Generator().manual_seed(1)) < 0.03
    remaining = (r - qjl.correction(qjl.encode(r))).double().norm(dim=-1)
    norm, gamma = r.double().norm(dim=-1), r.double().norm(dim=-1) * math.sqrt(math.pi / (2 * dim))
    turned = (r.double() @ qjl.rotation.matrix().double().T).abs().sum(-1)
    expected = (norm.square() * (1 + math.pi / 2) - 2 * gamma * turned).clamp_min(0).sqrt()
    torch.testing.assert_close(remaining, expected, rtol=1e-4, atol=1e-5)
    assert (remaining <= QJL_WORST * norm).all()
    assert (remaining / norm)[:, :, :250].mean().item() == pytest.approx(usual, abs=0.02)


# Worked example -------------------------------------------------------------------------------------------------------

EXAMPLE = section(PAGE, "Worked example")


def example_params() -> dict[str, Any]:
    """Return the parameters of the example's codec: integers, strings, and maps, which the page writes as ``name value`` lists."""

    def value(text: str) -> Any:
        if " " in text:
            return {name: value(word) for name, word in (pair.split() for pair in text.split(", "))}
        return int(text) if text.isdigit() else text

    return {row["key"]: value(row["value"]) for row in table(EXAMPLE, "key", "value")}


@pytest.fixture(scope="module")
def example() -> bytes:
    """Return a file that contains the streams on the page."""
    runs = re.findall(r"`runs` (\d+), (\d+) and `entries` outliers (\d+), raw_tokens (\d+)", EXAMPLE)[0]
    first, second, outliers, raw_tokens = map(int, runs)
    entry = side(0, runs=(first, second), entries=(("outliers", outliers), ("raw_tokens", raw_tokens)))
    made = Contents(codecs=(codec_from_params(example_params()),), layers=(LayerEntry(entry, None),))
    rows = table(EXAMPLE, "stream", "dtype", "shape", "bytes")
    assert [(f"0.k.{row['stream']}", row["dtype"], row["shape"]) for row in rows] == [
        (name, layout.dtype, " ".join(map(str, layout.shape))) for name, layout in made.layouts.items()
    ]
    arrays = {f"0.k.{row['stream']}": numpy.frombuffer(bytes.fromhex(row["bytes"]), numpy.uint8) for row in rows}
    return container.to_bytes(made, arrays)


def numbers_of(text: str) -> list[float]:
    return list(map(float, text.split()))


def first_page(data: bytes, path: Any) -> PackedRun:
    path.write_bytes(data)
    cache = kvpack.load(path)
    assert cache[0].k is not None
    return cache[0].k.runs[0]


def test_both_decoders_read_the_worked_example(example: bytes, tmp_path: Any) -> None:
    (tmp_path / "example").write_bytes(example)
    expected = [x for row in table(EXAMPLE, "token", "values") for x in numbers_of(row["values"])]
    decoded = decoder.read(example).layers[0]["k"]
    assert_within(decoded.values, expected, decoded.tolerances)
    values = kvpack.load(tmp_path / "example").unpack(torch.float32)[0][0]
    assert values is not None
    assert_within(values.flatten().tolist(), expected, decoded.tolerances)


def test_steps_of_the_worked_example_match_the_code(example: bytes, tmp_path: Any) -> None:
    page = first_page(example, tmp_path / "example")
    codec, streams = page.codec, page.rows(0, 1)
    assert isinstance(codec, CodecWithSidecars)
    steps = {1: codec.codec.decode_frame(streams)}
    for number, sidecar in zip((2, 4), (*codec.frame_parts, *codec.sketches), strict=True):
        steps[number] = sidecar.put(steps[max(steps)], streams)
    for number, value_map in zip((6, 7, 8), reversed(codec.value_maps), strict=True):
        steps[number] = value_map.inverse(steps[max(steps)], streams)
    rows = {int(row["after step"]): row["values of token 0"] for row in table(EXAMPLE, "after step", "values of token 0")}
    assert list(rows) == list(steps)
    for number, values in steps.items():
        torch.testing.assert_close(values.flatten(), torch.tensor(numbers_of(rows[number])), rtol=1e-6, atol=1e-6)


def test_sentences_of_the_worked_example_match_the_code(example: bytes, tmp_path: Any) -> None:
    page = first_page(example, tmp_path / "example")
    codec, bytes_of = page.codec, {row["stream"]: row["bytes"] for row in table(EXAMPLE, "stream", "dtype", "shape", "bytes")}
    assert isinstance(codec, CodecWithSidecars)
    outliers, qjl = codec.sidecar(Outliers), codec.sidecar(Qjl)
    assert outliers is not None
    assert qjl is not None
    flags, chunk, entry = re.findall(r"flags are `(\w+)`: that of quadruple (\d) .* item 0, `([\w ]+)`", EXAMPLE)[0]
    assert bytes_of["outlier_flags.0"].startswith(flags)
    assert bytes_of["outliers"].startswith(entry)
    assert outliers.flags(page.streams)[0, 0, 0].nonzero().flatten().tolist() == [int(chunk)]
    *digits, signs, gamma, gain = re.findall(
        r"Digits (\d), (\d), (\d) and (\d) of its signs, `(\w+)`.* = ([\d.]+), .* = ([\d.]+)\.", EXAMPLE
    )[0]
    assert bytes_of["qjl_signs.0"].startswith(signs)
    (negative,) = qjl.packing.unpack([page.streams["qjl_signs.0"]])
    assert negative[0, 0, 0].nonzero().flatten().tolist() == list(map(int, digits))
    assert float(gamma) == pytest.approx(0.5 * math.sqrt(math.pi / 16), rel=1e-8)
    assert qjl.correction(page.streams)[0, 0, 0, 1].item() == pytest.approx(float(gain), rel=1e-6)
