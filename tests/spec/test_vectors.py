"""The conformance vectors are unchanged, all listed, and at least one per rule.

Both readers return the expected results.
"""

from __future__ import annotations

import contextlib

import numpy
import pytest
import torch

import kvpack
from kvpack.cache.cache import Cache
from kvpack.cache.stored_layers import build_cache
from kvpack.file import container
from kvpack.file.inputs import UNREADABLE_INPUTS
from kvpack.formats import errors
from kvpack.formats.errors import InvalidPayload, KvpackError
from spec.generate.expected import ID_FEATURES, digest, ids_path, rounded_down, sides_of, tolerance_path, typed, values_of, values_path
from spec.generate.vector_files import FOLDER, MANIFEST, bases, defined, described, of_core, profile_of, refused_by_decompressors
from support.numbered_rules import rules
from support.second_decoder import decoder, decompress
from support.vector_checks import DECODED, LINES, Expected, check_values, load_basis, read, unpack_all, verify

REFUSED = [file for file, line in LINES.items() if "error" in line and "either" not in line]
EITHER = [file for file, line in LINES.items() if "either" in line]
NEEDS_NO_BASIS = ("transform-8", "transform-9", "transform-10", "rans-2")
FINISHED = 466
"""Number of vectors of finished parts of the format, which no code writes anymore."""
MAX_BYTES = 10 << 20
"""Maximum size of all vectors together in bytes.

They are part of the source, and a reader in another language runs all of them.

JSON headers of 4 KiB take half of the size, and vectors at a limit of the format take up to 200 kB each.
"""


def test_vectors_were_not_changed_added_or_lost() -> None:
    listed = {MANIFEST.relative_to(FOLDER).as_posix(): None}
    for file, line in LINES.items():
        listed[file] = line["sha256"]
        if "error" not in line:
            assert line["values"] == values_path(file)
            listed[line["values"]] = line["values_sha256"]
            assert line["tolerance"] in ("exact", tolerance_path(file))
            listed |= {line["tolerance"]: line["tolerance_sha256"]} if line["tolerance"] != "exact" else {}
            assert line.get("token_ids", ids_path(file)) == ids_path(file)
            listed |= {line["token_ids"]: line["token_ids_sha256"]} if "token_ids" in line else {}
    found = {path.relative_to(FOLDER).as_posix(): path for path in FOLDER.rglob("*") if path.is_file()}
    assert set(found) == set(listed)
    for name, expected in listed.items():
        assert expected is None or digest(found[name].read_bytes()) == expected, name
    assert sum(path.stat().st_size for path in found.values()) <= MAX_BYTES


def test_every_vector_is_listed_as_defined() -> None:
    assert len(set(LINES) - set(defined())) == FINISHED, "a vector or the code that writes it is missing"
    assert set(defined()) <= set(LINES)
    for file, vector in defined().items():
        assert LINES[file].items() >= described(vector).items(), file


@pytest.mark.parametrize(
    "number", [number for number, rule in rules().items() if rule.enforced_by in ("refusal", "values") and not number.startswith("row-")]
)
def test_every_testable_rule_of_files_has_a_vector(number: str) -> None:
    shown = [file for file, line in LINES.items() if number in line["rules"]]
    wanted = REFUSED if rules()[number].enforced_by == "refusal" else DECODED
    assert set(shown) & set(wanted), f"no vector for {number}"


@pytest.mark.parametrize("file", REFUSED)
def test_both_readers_refuse_a_vector_by_its_rule(file: str) -> None:
    data = (FOLDER / file).read_bytes()
    (number,) = LINES[file]["rules"]
    rule, error = rules()[number], LINES[file]["error"]
    assert error in rule.errors
    # The decoder refuses frames by itself, except those that only a decompressor can tell are wrong.
    alone = number == "container-24" or file in refused_by_decompressors()
    with pytest.raises(decoder.Refused) as refused:
        decoder.read(data, decompress if alone else lambda frame, size: bytes(size), bases(LINES[file]))
    assert refused.value.rule == rule.section
    with pytest.raises(KvpackError) as raised:
        verify(data, load_basis(file))
    assert type(raised.value).__name__ == error


@pytest.mark.parametrize("file", [file for file in REFUSED if LINES[file]["rules"][0] in NEEDS_NO_BASIS and "basis" in LINES[file]])
def test_rules_that_need_no_basis_are_enforced_without_it(file: str) -> None:
    data = (FOLDER / file).read_bytes()
    with pytest.raises(decoder.Refused) as refused:
        decoder.read(data)
    assert refused.value.rule == rules()[LINES[file]["rules"][0]].section
    with pytest.raises(InvalidPayload):
        container.open_bytes(data).verify()


def test_every_manifest_line_describes_core_readers() -> None:
    for file, line in LINES.items():
        keys = ("profile", "core") if "error" in line else ("core",)
        assert {key: line[key] for key in keys if key in line} == of_core(file, line), file


@pytest.mark.parametrize("file", EITHER)
def test_optional_vectors_are_refused_with_their_class_or_accepted(file: str) -> None:
    data = (FOLDER / file).read_bytes()
    assert decoder.read(data, lambda frame, size: bytes(size)).layers
    with contextlib.suppress(decoder.Refused):
        decoder.read(data, decompress)
    # The class of every other refusal is wrong.
    with contextlib.suppress(getattr(errors, LINES[file]["error"])):
        container.open_bytes(data).verify()


def test_optional_vectors_are_named_by_a_correction() -> None:
    corrections = (FOLDER.parent / "changes.md").read_text(encoding="utf-8").partition("## Corrections")[2]
    assert EITHER == [
        "invalid/zstd-block-offset-0.kvpack",
        "invalid/zstd-block-reserved-modes.kvpack",
        "invalid/zstd-block-bit-missing.kvpack",
        "invalid/zstd-literals-bit-left.kvpack",
        "invalid/zstd-literals-bit-missing.kvpack",
        "invalid/zstd-literals-no-end-mark.kvpack",
        "invalid/zstd-tree-of-depth-12.kvpack",
        "invalid/zstd-four-streams-of-four-literals.kvpack",
    ]
    assert all(f"`{file}`" in corrections for file in EITHER)


@pytest.mark.parametrize("file", DECODED)
def test_both_readers_decode_a_vector_to_its_values(file: str) -> None:
    container.open_file(FOLDER / file).verify()
    assert LINES[file]["profile"] == profile_of(read(file))
    check_values(file, values_of(read(file)))
    check_values(file, unpack_all(file))
    opened = container.open_file(FOLDER / file)
    header = opened.header
    metadata = LINES[file].get("metadata", {})
    assert list(build_cache(header, []).metadata.items()) == list(read(file).metadata.items()) == list(metadata.items())
    assert typed(read(file).metadata) == LINES[file].get("metadata_entries", [])
    cache = () if header.is_basis else kvpack.load(FOLDER / file, basis=load_basis(file))
    states = {f"{n}.state.{name}": _digest(state) for n, layer in enumerate(cache) for name, state in layer.states.items()}
    if header.is_basis:
        states = {state.where: digest(bytes(opened.read_state(state))) for state in header.states}
    assert states == {name: digest(content) for name, content in read(file).states.items()} == LINES[file].get("states", {})
    check_ids(file, cache if isinstance(cache, Cache) else None)
    starts = LINES[file].get("starts", [read(file).start] * len(read(file).layers))
    assert list(header.starts) == read(file).starts == starts
    hidden = [tuple(stretch) for stretch in LINES[file].get("hidden", [])]
    assert [tuple(stretch) for stretch in header.hidden] == read(file).hidden == hidden
    assert header.is_basis or not hidden or cache.inputs.hidden == header.hidden
    offsets = LINES[file].get("offsets")
    assert (None if header.offsets is None else list(header.offsets)) == read(file).offsets == offsets
    assert header.is_basis or cache.position_offsets == header.offsets


def test_pytorch_decodes_the_vectors_to_their_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """The C kernels are the default on the CPU, and tests/kernels/test_unpacking.py covers the Triton kernels."""
    monkeypatch.setenv("KVPACK_KERNELS", "torch")
    assert len(DECODED) > 100
    for file in DECODED:
        check_values(file, unpack_all(file))


def check_ids(file: str, cache: Cache | None) -> None:
    """Check that both readers return the manifest's ids, and the inputs that ids do not determine.

    ``cache`` is None for a basis.
    """
    line, second = LINES[file], read(file)
    assert ("token_ids" in line) == any(name.startswith(ID_FEATURES) for name in second.ignorable)
    assert ("undetermined" in line) == ("inputs" in second.ignorable)
    if "token_ids" not in line or cache is None:
        return
    stored, sequences = numpy.fromfile(FOLDER / line["token_ids"], "<u4"), len(second.token_ids)
    ids = stored.reshape(sequences, len(stored) // max(1, sequences))
    assert second.token_ids == cache.token_ids.tolist() == ids.tolist()
    if "undetermined" in line:
        given = None if line["undetermined"] is None else [(int(position), text) for position, text in line["undetermined"]]
        assert second.undetermined == given
        known = zip(cache.inputs.starts, cache.inputs.undetermined, strict=True)
        # Clauses that the library adds end the list.
        assert list(known)[: len(given or [])] == given if given is not None else cache.inputs.undetermined == (UNREADABLE_INPUTS,)


def test_tolerances_are_those_of_the_specification_rounded_down() -> None:
    """The second decoder evaluates the formulas on the pages in binary64."""
    for file in DECODED:
        bounds = numpy.array([tolerance for side in sides_of(read(file)) for tolerance in side.tolerances])
        given = Expected.of(FOLDER, LINES[file]).tolerances.astype(numpy.float64)
        assert ((given <= bounds) & (given >= bounds * (1 - 2**-23))).all(), file


def test_an_error_of_twice_the_tolerance_is_a_difference() -> None:
    """The test changes one value at a time in both directions. An exact value is changed to the next binary32."""
    for file in DECODED:
        expected = Expected.of(FOLDER, LINES[file])
        finite = numpy.isfinite(expected.values)
        for direction in (-1, 1):
            shifted = (expected.values + direction * 2.0 * expected.tolerances.astype(numpy.float64)).astype(numpy.float32)
            near = shifted == expected.values
            shifted[near] = numpy.nextafter(expected.values, numpy.float32(direction * numpy.inf))[near]
            differing = expected.differs_from(shifted)
            if expected.subnormal_zero:
                differing |= (shifted == 0) & (expected.values != 0)
            assert differing[finite].all(), file


def test_tolerances_are_rounded_down() -> None:
    assert [rounded_down(x) for x in (0.0, 1.0, 1 + 2**-24, 1 + 2**-23, 2**-126 * (1 + 2**-30))] == [0.0, 1.0, 1.0, 1 + 2**-23, 2**-126]
    assert rounded_down(0.1) < 0.1 < rounded_down(0.1) * (1 + 2**-23)


def _digest(state: torch.Tensor) -> str:
    return digest(state.contiguous().flatten().view(torch.uint8).numpy().tobytes())


def test_unknown_ignorable_features_are_kept() -> None:
    file = "unsupported/ignorable-features.kvpack"
    assert list(container.open_file(FOLDER / file).header.ignorable) == list(read(file).ignorable) == ["a-feature", "new-feature"]
