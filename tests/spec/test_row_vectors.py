"""The conformance vectors of rows are unchanged and all listed, and both readers return the expected results."""

from __future__ import annotations

import hashlib
import struct

import numpy
import pytest
import torch

from kvpack.coding.bases import Basis
from kvpack.coding.recipes import Recipe
from kvpack.pages import PageBuffer, PageCodec, PageGeometry
from kvpack.store.keys import page_key
from spec.decoder.row import MULTIPLIER
from spec.generate.expected import sides_of, values_of
from spec.generate.page_vectors import (
    FOLDER,
    KEY,
    MANIFEST,
    NAMESPACE,
    SMALL,
    bases,
    manifest,
    profile_of,
    refusal,
    rules_of,
    sealed,
    vectors,
)
from support.numbered_rules import rules
from support.second_decoder import decoder
from support.vector_checks import Expected

LINES = manifest()
DECODED = [file for file, line in LINES.items() if "rule" not in line]
REFUSED = [file for file, line in LINES.items() if "rule" in line]


def test_vectors_were_not_changed_added_or_lost() -> None:
    assert {f"{name}.row" for name in vectors()} == set(LINES)
    listed = {MANIFEST.name: None}
    for file, line in LINES.items():
        listed[file] = line["sha256"]
        listed |= {line["values"]: line["values_sha256"]} if "values" in line else {}
        listed |= {line["tolerance"]: line["tolerance_sha256"]} if "tolerance_sha256" in line else {}
    found = {path.name: path for path in FOLDER.iterdir()}
    assert set(found) == set(listed)
    for name, expected in listed.items():
        assert expected is None or hashlib.sha256(found[name].read_bytes()).hexdigest() == expected, name
    for name, vector in vectors().items():
        line = LINES[f"{name}.row"]
        assert (line["shows"], line.get("rule"), line.get("basis", "")) == (vector.shows, vector.rule, vector.basis)
    assert sum(path.stat().st_size for path in found.values()) <= 2**18


def test_every_testable_rule_of_rows_has_a_vector() -> None:
    kept = {kind: {n for n, rule in rules().items() if n.startswith("row-") and rule.enforced_by == kind} for kind in ("refusal", "values")}
    for kind, files in (("refusal", REFUSED), ("values", DECODED)):
        assert {rule for file in files for rule in LINES[file]["rules"]} == kept[kind]


@pytest.mark.parametrize("file", REFUSED)
def test_both_readers_refuse_a_row_by_its_rule(file: str) -> None:
    data, rule = (FOLDER / file).read_bytes(), rules()[LINES[file]["rule"]]
    with pytest.raises(decoder.Refused) as refused:
        decoder.read_row(data)
    assert refused.value.rule == rule.section
    codec, values = PageCodec("raw", SMALL, namespace=NAMESPACE), [torch.zeros(1, 2, 1, 3, dim).bfloat16() for dim in (8, 4)]
    (error,) = codec.decode_into([data], PageBuffer(SMALL, *values), [0])
    assert type(error).__name__ == LINES[file]["error"] == refusal(data)
    assert LINES[file]["error"] in rule.errors
    assert (LINES[file]["rule"], LINES[file]["profile"]) == (LINES[file]["rules"][0], "core")
    assert not any(x.any() for x in values)


@pytest.mark.parametrize("file", DECODED)
def test_both_readers_decode_a_row_to_its_values(file: str) -> None:
    data = (FOLDER / file).read_bytes()
    read = decoder.read_row(data, bases(LINES[file]))
    assert (read.namespace, read.key) == (NAMESPACE, hashlib.sha256(KEY).digest())
    line, sides = LINES[file], sides_of(read.page)
    assert line.items() >= ({"rules": rules_of(read.page)} | profile_of(read.page)).items()
    expected, bounds = Expected.of(FOLDER, line), numpy.array([tolerance for side in sides for tolerance in side.tolerances])
    assert ((expected.tolerances <= bounds) & (expected.tolerances >= bounds * (1 - 2**-23))).all()
    assert numpy.array(values_of(read.page), numpy.float32).tobytes() == expected.values.tobytes()
    first, last = read.page.layers[0]["k"], read.page.layers[0]["v"]
    dtype = read.page.ignorable["page-dtype"].decode()
    dims = first.codec.dim, None if last is None else last.codec.dim
    geometry = PageGeometry(len(read.page.layers), first.heads, first.packed, *dims, dtype)
    given = [Basis.from_bytes(basis) for basis in bases(LINES[file])]
    codec = PageCodec(Recipe.from_recorded(read.page.recipe, *given), geometry, namespace=NAMESPACE)
    shape = (1, geometry.layers, geometry.heads, geometry.tokens)
    made = [torch.zeros(*shape, dim).to(geometry.torch_dtype) for dim in geometry.dims.values()]
    assert codec.decode_into([data], PageBuffer(geometry, *made), [0], keys=[KEY], check_values=True) == [None]
    opaque = sides[0].codec.id == "opaque"
    found = [x[0, layer] for layer in range(geometry.layers) for x in made]
    flat = torch.cat([(x.view(torch.uint8) if opaque else x).flatten().float() for x in found]).numpy()
    if dtype in ("bf16", "fp16", "fp32") and not opaque:
        spread = {"bf16": 2**-8, "fp16": 2**-11, "fp32": 2**-23}[dtype]
    else:
        spread = 0.0 if opaque else 2**-3
    rounded = expected.tolerances + spread * numpy.abs(expected.values) + 2**-16
    assert (numpy.abs(flat - expected.values) <= rounded).all()
    again = data[: int.from_bytes(data[16:24], "little")]
    assert sealed(again) == again


def test_the_example_of_an_entry_matches_the_code() -> None:
    row = (FOLDER / "raw.row").read_bytes()
    read = decoder.read_row(row)
    (size,) = struct.unpack_from("<I", row, 96)
    fields = b"kvpack-page 2", read.namespace, read.key, row[128 : 128 + size]
    name = hashlib.sha256(b"".join(struct.pack("<Q", len(field)) + field for field in fields)).digest()
    assert page_key(*fields[1:]) == name
    assert f"[raw.row](row-vectors/raw.row) is the entry `{name.hex()}`" in (FOLDER.parent / "row.md").read_text(encoding="utf-8")


def test_the_example_of_the_checksum_matches_the_code() -> None:
    text = (FOLDER.parent / "row.md").read_text(encoding="utf-8")
    sum_ = 0
    for word in (1, 2, 3):
        sum_ = (sum_ * MULTIPLIER + word) % 2**64
    assert f"`{sum_:#018x}`" in text
