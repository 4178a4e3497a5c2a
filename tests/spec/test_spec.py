"""Every table that is both in spec/ and in the code agrees, and every example on the pages works."""

from __future__ import annotations

import dataclasses
import math
import re
import struct
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import xxhash
from hypothesis import given

from kvpack.formats import CODECS, rans
from kvpack.formats.base import MAX_DIM, Codec
from kvpack.formats.columns import MAX_BASE, MAX_COLUMN_BYTES, MAX_COLUMN_VALUES, MAX_FIELDS, Columns, default_fields
from kvpack.formats.generator import Generator, signs, unit_quaternions
from kvpack.formats.group import AXES, GROUP_SIZES, SCALE_DTYPES, TOKEN_SCALES
from kvpack.formats.raw import DTYPES
from kvpack.formats.rotation import KINDS, hadamard
from kvpack.formats.streams import DTYPE_BYTES
from support.error_bounds import ROTATION_TOLERANCE
from support.spec_pages import SPEC, Table, section, table, tables
from support.spec_words import MAX_INFORMATIVE, MAX_NORMATIVE, counts
from support.strategies import create, packings

PAGES = {path.stem: path for path in (SPEC / "codecs").glob("*.md")}
HEADINGS = [
    "Id and status",
    "Parameters and ranges",
    "Layout",
    "Decode",
    "Special values",
    "Writer duties",
    "Worked example",
]


def column(rows: Table, name: str) -> list[str]:
    return [row[name] for row in rows]


def test_every_codec_has_a_page_and_a_row() -> None:
    rows = table(section(SPEC / "changes.md", "Status"), "codec", "a symbol decodes to", "document", "status")
    assert sorted(column(rows, "codec")) == sorted(CODECS) == sorted(PAGES)
    assert column(rows, "document") == [f"[codecs/{codec}.md](codecs/{codec}.md)" for codec in column(rows, "codec")]
    for row in rows:
        assert f"Codec id `{row['codec']}`, status {row['status']}." in PAGES[row["codec"]].read_text(encoding="utf-8")


def test_parts_marked_as_stable_stay_stable() -> None:
    """A stable part must read existing files forever, so it cannot lose the label "stable"."""
    text = section(SPEC / "changes.md", "Status")
    status = {row["part"]: row["status"] for row in table(text, "part", "what it defines", "status")}
    status |= {row["codec"]: row["status"] for row in table(text, "codec", "a symbol decodes to", "document", "status")}
    stable = {f"[{page}]({page})" for page in ("README.md", "container.md", "packing.md", "side-cars.md", "rans.md", "basis.md")}
    stable |= {"raw", "lossless", "group", "minifloat", "scalar", "octahedral", "quaternion", "angle", "polar", "klt", "transform"}
    assert stable <= {part for part, word in status.items() if word == "stable"}
    assert set(status.values()) - {"stable", "draft"} == {"that of the rule", "informative"}
    for page in ("container.md", "packing.md", "side-cars.md", "rans.md", "basis.md", "store.md"):
        assert f"\n\nStatus {status[f'[{page}]({page})']}.\n" in (SPEC / page).read_text(encoding="utf-8")


@pytest.mark.parametrize("codec_id", sorted(CODECS))
def test_codec_pages_have_ordered_headings_and_the_parameters_of_the_code(codec_id: str) -> None:
    text = PAGES[codec_id].read_text(encoding="utf-8")
    headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert headings == HEADINGS
    assert re.match(rf"# {codec_id}: ", text)
    assert f"Codec id `{codec_id}`, status " in section(PAGES[codec_id], "Id and status")
    layout = section(PAGES[codec_id], "Layout")
    assert re.search(r"^    .*\|", layout, re.MULTILINE), "Layout has a diagram"
    assert "bytes" in layout, "the page does not give the bytes per token in Layout"
    rows = table(section(PAGES[codec_id], "Parameters and ranges"), "parameter", "type", "range")
    stored = [field.name for field in dataclasses.fields(CODECS[codec_id]) if field.metadata.get("stored", True)]  # type: ignore[arg-type]
    assert [next(iter(row.values())) for row in rows] == stored


def test_the_text_is_within_its_length_limits() -> None:
    normative, informative = (sum(words.values()) for words in counts().values())
    assert 0 < normative <= MAX_NORMATIVE
    assert 0 < informative <= MAX_INFORMATIVE


@pytest.mark.parametrize("page", sorted(SPEC.rglob("*.md")), ids=lambda page: str(page.relative_to(SPEC)))
def test_links_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)[^):]*\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_table_of_dtypes_matches_the_code() -> None:
    rows = table(section(SPEC / "README.md", "Conventions"), "dtype", "bytes", "meaning")
    assert {row["dtype"]: int(row["bytes"]) for row in rows} == DTYPE_BYTES


def test_packing_limits_match_the_code() -> None:
    rows = table(section(SPEC / "packing.md", "Bit packing"), "limit of packing", "value")
    found = {row["limit of packing"]: eval_power(row["value"]) for row in rows}
    assert found == {
        "largest base": MAX_BASE,
        "fields of a column": MAX_FIELDS,
        "bytes of a column, every base a power of two": MAX_COLUMN_BYTES,
        "values of a column, otherwise": MAX_COLUMN_VALUES,
        "head dim": MAX_DIM,
    }


def eval_power(text: str) -> int:
    """Return the value of an integer that is written in decimal or as a power, such as 2^53."""
    base, _, exponent = text.partition("^")
    return int(base) ** int(exponent or 1)


def parsed_packing(text: str) -> Columns:
    """Parse a packing that is written as columns(n, A, F) or columns(n, [B, …], F)."""
    n, bases, fields = re.fullmatch(r"columns\((\d+), (\d+|\[[\d, ]+\]), (\d+)\)", text).groups()  # type: ignore[union-attr]
    return Columns(int(n), tuple(map(int, re.findall(r"\d+", bases))), int(fields))


@pytest.mark.parametrize("row", tables(section(SPEC / "test-values.md", "Examples in hexadecimal"))[0], ids=lambda row: row["packing"])
def test_packing_examples_match_the_code(row: dict[str, str]) -> None:
    packing = parsed_packing(row["packing"])
    digits = [list(map(int, digit.split())) for digit in row["digits of the symbols"].split(";")]
    planes = packing.pack([torch.tensor([digit]) for digit in digits])
    stored = [numpy.frombuffer(bytes.fromhex(row[f"plane {p}"]), "<u2").tolist() for p in range(2) if row[f"plane {p}"]]
    assert [plane[0].tolist() for plane in planes] == stored
    assert [digit[0].tolist() for digit in packing.unpack([torch.tensor([words], dtype=torch.uint16) for words in stored])] == digits


def test_the_lettered_example_matches_the_code() -> None:
    text = section(SPEC / "test-values.md", "Example: 3-bit symbols")
    packing = parsed_packing(re.findall(r"columns\([^)]*\)", text)[0])
    letters = re.findall(r"`((?:[A-Za-z]{3} ?)+)`", text)
    symbols = [symbol for pair in zip(*(part.split() for part in letters), strict=True) for symbol in pair]
    assert len(symbols) == packing.symbols
    placed = [["?"] * 8 for _ in range(packing.row_bytes)]
    for i, symbol in enumerate(symbols):
        for bit, letter in enumerate(reversed(symbol)):
            values = [1 << bit if k == i else 0 for k in range(packing.symbols)]
            stored = b"".join(plane.numpy().tobytes() for plane in packing.pack([torch.tensor([values])]))
            at = next(byte for byte, value in enumerate(stored) if value)
            placed[at][7 - (stored[at].bit_length() - 1)] = letter
    names = ["".join(byte) for byte in placed]
    rows = table(text, "byte", "column 0", "column 1", "stored in")
    by_column = [[row[f"column {c}"] for row in rows] for c in range(2)]
    assert names == [*by_column[0][:2], *by_column[1][:2], by_column[0][2], by_column[1][2]]
    assert f"plane 0 is `{' '.join(names[:4])}` and plane 1 is `{' '.join(names[4:])}`" in text
    assert f"`{' '.join(reversed(by_column[0]))}` in binary" in text


@given(packings())
def test_the_size_formula_matches_the_code(packing: Columns) -> None:
    assert "2·(W·(Q div 2) + ⌈W / 2⌉·(Q mod 2))" in section(SPEC / "packing.md", "Bit packing")
    w, q = math.ceil(packing.symbols / packing.fields), packing.column_bytes
    assert packing.row_bytes == 2 * (w * (q // 2) + math.ceil(w / 2) * (q % 2))


@pytest.mark.parametrize("base", [2, 3, 4, 8, 9, 16, 32, 48, 64, 100, 128, 256, 1024, 65536], ids=str)
@pytest.mark.parametrize("symbols", [1, 5, 21, 43, 64, 128], ids=str)
def test_the_rule_for_default_fields_matches_the_code(symbols: int, base: int) -> None:
    def rank(fields: int) -> tuple[int, bool, int, int]:
        packing = Columns(symbols, (base,), fields)
        return packing.row_bytes, packing.column_bytes < 2, packing.column_bytes, fields

    limit = 2**128 if base & (base - 1) == 0 else 2**53
    assert default_fields(symbols, (base,)) == min((f for f in range(1, symbols + 1) if base**f <= limit), key=rank)


def test_example_digests_match_the_code() -> None:
    for row in table(section(SPEC / "test-values.md", "Digests"), "n", "digest"):
        assert xxhash.xxh3_128_hexdigest(bytes(number % 256 for number in range(int(row["n"])))) == row["digest"]


def test_generator_examples_match_the_code() -> None:
    text = section(SPEC / "test-values.md", "Generator")
    for row in table(text, "seed", *(f"word {i}" for i in range(5))):
        generator = Generator(int(row["seed"]))
        assert [int(row[f"word {i}"], 16) for i in range(5)] == [generator.next_word() for _ in range(5)]
    for row in table(text, "seed", "signs 0 to 15", "signs 64 to 79"):
        drawn = "".join("+" if sign > 0 else "-" for sign in signs(int(row["seed"]), 80))
        assert (row["signs 0 to 15"], row["signs 64 to 79"]) == (drawn[:16], drawn[64:])
    for row in table(text, "seed", "quaternion", *"wxyz"):
        drawn_quaternion = unit_quaternions(int(row["seed"]), int(row["quaternion"]) + 1)[-1].tolist()
        assert tuple(int(row[name], 16) for name in "wxyz") == struct.unpack(">4Q", struct.pack(">4d", *drawn_quaternion))


def test_rotations_match_the_code() -> None:
    text = section(SPEC / "packing.md", "Rotation")
    assert tuple(column(table(text, "rotation_kind", "H", "s"), "rotation_kind")) == KINDS
    blocks = re.findall(r"^(?:\*\*)?Order (\d+).*:\n\n((?:    [+-]+\n)+)", text, re.MULTILINE)
    assert [int(order) for order, _ in blocks] == [12, 20, 28]
    for order, block in blocks:
        rows = block.split()
        assert rows == ["".join("+" if value > 0 else "-" for value in row) for row in hadamard(int(order))[: len(rows)]]
    assert f"within 2^{round(math.log2(ROTATION_TOLERANCE))} · ‖u‖" in text


def test_factors_of_head_dims_match_the_code() -> None:
    pairs = re.findall(r"\| (\d+) \| (\d+) · (\d+) ", section(SPEC / "packing.md", "Rotation"))
    assert len(pairs) == 8
    for dim, sylvester, paley in (map(int, pair) for pair in pairs):
        assert dim == sylvester * paley
        assert [row[:paley] for row in hadamard(dim)[:paley]] == list(hadamard(paley))


def test_ranges_of_raw_and_group_match_the_code() -> None:
    texts = {codec: section(PAGES[codec], "Parameters and ranges") for codec in ("raw", "group")}
    raw, group = ({row["parameter"]: row["range"] for row in table(text, "parameter", "type", "range")} for text in texts.values())
    assert raw == {"dim": f"1 to {MAX_DIM}", "dtype": ", ".join(DTYPES)}
    assert {row["dtype"]: row["stored as"] for row in table(texts["raw"], "dtype", "stored as")} == DTYPES
    assert group == {
        "dim": f"1 to {MAX_DIM}",
        "bits": "1 to 8",
        "axis": ", ".join(AXES),
        "size": ", ".join(map(str, GROUP_SIZES)),
        "rotation_kind": ", ".join(KINDS),
        "seed": "0 to 2^64 - 1",
        "token_scale": ", ".join(TOKEN_SCALES),
        "fields": "codes: F of the stream codes",
        "scale_dtype": ", ".join(SCALE_DTYPES[1:]) + "; left out: " + SCALE_DTYPES[0],
    }


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("tokens", [1, 32, 45], ids=str)
def test_size_formulas_of_group_match_the_code(tokens: int, axis: str) -> None:
    codec = create("group", 80, b="3", g="32", axis=axis, token_scale="fp32")
    layout = codec.layout(1, 1, tokens)
    row, size = codec.packings()["codes"].row_bytes, 32
    formula = tokens * row + 4 * 80 * math.ceil(tokens / size) if axis == "token" else tokens * (row + 4 * math.ceil(80 / size))
    assert sum(DTYPE_BYTES[entry.dtype] * math.prod(entry.shape) for entry in layout.values()) == formula + 4 * tokens


def example_codec(page: Path) -> Codec:
    """Return the codec of the worked example on a page."""
    types = {field.name: field.type for field in dataclasses.fields(CODECS[page.stem])}  # type: ignore[arg-type]
    params: dict[str, Any] = {}
    for row in table(section(page, "Worked example"), "parameter", "value"):
        name, value = row["parameter"], row["value"]
        if types[name] == "Fields":
            params[name] = {stream: int(fields) for stream, fields in (entry.split() for entry in value.split(", "))}
        else:
            params[name] = int(value) if types[name] == "int" else value
    return CODECS[page.stem].from_params(params)


@pytest.mark.parametrize("page", [PAGES["raw"], PAGES["lossless"], PAGES["group"], PAGES["minifloat"]], ids=lambda page: page.stem)
def test_worked_examples_match_the_code(page: Path) -> None:
    codec, text = example_codec(page), section(page, "Worked example")
    rows = table(text, "stream", "dtype", "shape", "bytes")
    layout = codec.layout(1, 1, 2)
    assert [(row["stream"], row["dtype"], row["shape"]) for row in rows] == [
        (name, entry.dtype, " ".join(map(str, entry.shape))) for name, entry in layout.items()
    ]
    dtypes = {"U8": torch.uint8, "U16": torch.uint16, "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
    streams = {
        row["stream"]: torch.frombuffer(bytearray.fromhex(row["bytes"]), dtype=dtypes[row["dtype"]]).reshape(layout[row["stream"]].shape)
        if row["bytes"]
        else torch.empty(layout[row["stream"]].shape, dtype=dtypes[row["dtype"]])
        for row in rows
    }
    values = [[number(value) for value in row["values"].split()] for row in table(text, "token", "values")]
    expected = torch.tensor(values)[None, None]
    decoded = codec.decode(streams)
    assert torch.equal(decoded.view(torch.int32), expected.view(torch.int32))
    if codec.id != "raw":
        arrays = {name: stream.numpy() for name, stream in streams.items()}
        codec.check(arrays, page.stem)
        codec.check_runs(arrays, (2,), page.stem)
        codec.check_chunks(arrays, page.stem)
        codes = [list(map(int, row["codes"].split())) for row in table(text, "token", "codes")]
        (stream,) = codec.packings()
        assert codec.unpack(stream, streams)[0][0, 0].tolist() == codes


def test_the_worked_example_of_the_entropy_coder_matches_the_code() -> None:
    text = section(SPEC / "rans.md", "Worked example")
    frequencies = numpy.array([[int(row["f(s)"]) for row in table(text, "symbol s", "f(s)", "b(s)")]])
    starts = [int(row["b(s)"]) for row in table(text, "symbol s", "f(s)", "b(s)")]
    assert starts == [int(frequencies[0, :symbol].sum()) for symbol in range(4)]
    symbols = numpy.array([list(map(int, re.findall(r"`([0-3 ]{60,})`", text)[0].split()))], numpy.uint8)
    length, one = numpy.array([symbols.shape[1]]), numpy.zeros(1, numpy.int64)
    chunks = rans.encode(symbols, length, frequencies, one)
    first, second, others = (int(row["first states"], 16) for row in table(text, "lanes", "first states"))
    assert chunks.states[0].tolist() == [first, second, *[others] * 30]
    words = numpy.frombuffer(bytes.fromhex(table(text, "words")[0]["words"]), "<u2")
    assert chunks.words.tolist() == words.tolist()
    decoded = rans.decode(chunks, length, frequencies, one)
    assert decoded.symbols.tolist() == symbols.tolist()
    assert not decoded.faulty_chunks(chunks.counts).any()


def number(text: str) -> float:
    """Parse a decimal or hexadecimal float."""
    return float.fromhex(text) if "0x" in text else float(text)
