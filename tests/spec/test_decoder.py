"""The library and spec/decoder, which was written from the text alone, read the same files to the same values."""

from __future__ import annotations

import dataclasses
import hashlib
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgpack
import numpy
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

import kvpack
from kvpack.cache.cache import Cache
from kvpack.cache.layer import Layer
from kvpack.cache.packed_runs import PackedRuns
from kvpack.cache.side import Side
from kvpack.coding.bases import Basis
from kvpack.file import container
from kvpack.formats import CODECS
from kvpack.formats.columns import Columns
from kvpack.formats.errors import KvpackError
from kvpack.formats.klt import Klt
from spec.decoder.codecs import CODECS as SECOND_CODECS
from spec.decoder.directions import bin_direction
from spec.decoder.packing import Columns as SecondColumns
from spec.decoder.xxh3 import xxh3_128
from support.caches import RECIPES, random_pairs
from support.decoded_values import assert_same_cache, assert_within
from support.file_parts import Parts, compress, drop, edit, frame, move_to_end, overwrite, random_digits, random_page
from support.golden_files import FOLDER, expected_path, sidecar_packings
from support.klt_bases import random_basis, transform_of
from support.second_decoder import FOLDER as DECODER
from support.second_decoder import MODULES, decoder, decompress
from support.small_files import KINDS, small_file
from support.strategies import codecs, create, packings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvpack.formats.base import Codec


def verdict(data: bytes) -> tuple[str | None, str | None]:
    """Return the rule by which the decoder refuses ``data``, and the class of the library's error.

    Each is None if that reader accepts the data.
    """
    rule = error = None
    try:
        # A decompressor that takes everything: the decoder has to refuse frames by itself.
        decoder.read(data, lambda frame, size: bytes(size))
    except decoder.Refused as refused:
        rule = refused.rule
    try:
        container.open_bytes(data).verify()
    except KvpackError as refused:
        error = type(refused).__name__
    return rule, error


def refused_alike(data: bytes) -> bool:
    """Return True if both readers refuse ``data``, and False if both accept it. If only one refuses it, the test fails."""
    rule, error = verdict(data)
    assert (rule is None) == (error is None), f"the decoder: {rule}; the library: {error}"
    return rule is not None


def load(data: bytes, folder: Path) -> Cache:
    path = folder / "file.kvpack"
    path.write_bytes(data)
    return kvpack.load(path)


def saved(cache: Cache, folder: Path, **options: bool) -> bytes:
    path = folder / "saved.kvpack"
    kvpack.save(cache, path, **options)
    return path.read_bytes()


def assert_decoded_alike(data: bytes, folder: Path) -> Any:
    """Assert that both readers decode ``data`` to the same values, within the text's tolerance. Return the decoder's file."""
    file = decoder.read(data, decompress)
    assert_same_cache(file, load(data, folder))
    return file


# Values ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.kvpack")))
def test_a_golden_file_decodes_to_the_stored_values(name: str) -> None:
    file = decoder.read((FOLDER / f"{name}.kvpack").read_bytes())
    expected = numpy.fromfile(expected_path(name), "<f4").tolist()
    sides = [side for layer in file.layers for side in layer.values() if side]
    assert_within([x for side in sides for x in side.values], expected, [x for side in sides for x in side.tolerances])


def test_the_decoder_supports_every_codec_and_imports_only_the_standard_library() -> None:
    assert set(CODECS) <= set(SECOND_CODECS)
    lines = [line for path in MODULES for line in path.read_text(encoding="utf-8").splitlines()]
    imported = {line.split()[1] for line in lines if line.startswith(("import ", "from "))}
    assert {name.split(".")[0] for name in imported if not name.startswith(".")} <= set(sys.stdlib_module_names)


def test_decoder_modules_import_only_modules_later_in_the_list() -> None:
    """Modules in the package ``codecs`` count as the package."""
    assert decoder.__doc__ is not None
    lines = [line for line in decoder.__doc__.splitlines() if line.startswith("- ")]
    listed = [name for line in lines for name in re.findall(r"``(\w+)``", line)]
    imports = re.compile(r"^from (\.+)(\w+)(?:\.\w+)? import", re.MULTILINE)
    for path in MODULES:
        name = path.relative_to(DECODER).with_suffix("").parts[0]
        for dots, imported in imports.findall(path.read_text(encoding="utf-8")) if name[0] != "_" else ():
            inside = name == "codecs" and dots == "."
            assert inside or listed.index(imported) > listed.index(name), f"{path}: {imported}"
    assert {*listed, "__init__", "__main__"} == {path.relative_to(DECODER).with_suffix("").parts[0] for path in MODULES}


@pytest.mark.parametrize("recipe", RECIPES)
def test_both_readers_agree_on_files_of_every_recipe(recipe: str, tmp_path: Path) -> None:
    pairs = random_pairs(2, 33, batch=2, heads=1, dims=(64, 80), seed=1)
    cache = kvpack.pack(pairs, recipe, model={"name": "test"}, start=11)
    assert_decoded_alike(saved(cache, tmp_path), tmp_path)


def test_both_readers_agree_on_a_compressed_file(tmp_path: Path) -> None:
    pairs = [(k.round(), v.round()) for k, v in random_pairs(1, 40)]
    data = saved(kvpack.pack(pairs, "k=raw:dtype=fp32;v=group:b=2,g=32"), tmp_path, compress=True)
    assert "zstd" in {tensor.filter for tensor in assert_decoded_alike(data, tmp_path).tensors}


def test_logarithmic_norms_whose_terms_cancel_stay_within_the_tolerance() -> None:
    codec = create("angle", 2, "k", n="4", norm="log8", range="fp32", rotation="none")
    source = random.Random(3)
    for _ in range(50):
        step = float(numpy.float32(source.uniform(3, 3.9)))
        minimum = float(numpy.float32(-255 * step + source.uniform(-3, 3)))
        streams = codec.pack("angle", torch.zeros(1, 1, 1, 1, dtype=torch.int32))
        streams |= codec.pack("norm_codes", torch.full((1, 1, 1, 1), 255, dtype=torch.int32))
        streams["range"] = torch.tensor([[[[step, minimum]]]])
        # The product and the sum are exact in binary64.
        exact = [2.0 ** (minimum + step * 255) * part for part in bin_direction(0, 4)]
        other = SECOND_CODECS["angle"](codec.params())
        row = {"angle": [[0]], "norm_codes": [[255]]}, {"range": [step, minimum]}
        for values in (codec.decode_frame(streams).flatten().tolist(), other.decode(*row)):
            assert_within(values, exact, other.tolerance(*row))


@given(data=st.data(), seed=st.integers(0, 2**32))
@settings(max_examples=25)
def test_both_readers_agree_on_arbitrary_digits(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, seed: int) -> None:
    # What a codec needs of a basis is not in its files.
    codec = data.draw(codecs(bounded=False).filter(lambda codec: not codec.bases_needed))
    source = random.Random(seed)
    batch, heads = source.randint(1, 2), source.randint(1, 2)
    several = codec.group_tokens > 1 or any(layout.per == "run" for layout in codec.layout(1, 1, 0).values())
    most = 2 if several else 1
    runs = [source.randint(1, 3 + codec.group_tokens) for _ in range(source.randint(0, most))]
    made = [random_page(codec, batch, heads, run, source) for run in runs]
    tail = torch.randn(batch, heads, source.randint(0, 2), codec.dim).to(torch.bfloat16)
    cache = Cache((Layer(Side(codec, PackedRuns.from_runs(page for page, _ in made), tail, 0), None),), "test", {}, start=0)
    folder = tmp_path_factory.mktemp("digits")
    side = assert_decoded_alike(saved(cache, folder), folder).layers[0]["k"]
    all_packings = codec.packings() | sidecar_packings(codec)
    assert set(side.digits) == set(all_packings)
    for name, rows in side.digits.items():
        for number in range(len(all_packings[name].alphabets)):
            expected = torch.cat([digits[name][number] for _, digits in made], 2).flatten(0, 2).tolist() if made else []
            assert [row[number] for row in rows] == expected


@given(
    st.integers(1, 3),
    st.integers(1, 9),
    st.sampled_from(("head", "layer")),
    st.sampled_from("kv"),
    st.integers(0, 255),
    st.integers(0, 999),
)
@settings(max_examples=15)
def test_both_readers_agree_on_arbitrary_levels_of_transform(
    tmp_path_factory: pytest.TempPathFactory, heads: int, dim: int, scope: str, side: str, step: int, seed: int
) -> None:
    source = random.Random(seed)
    file = random_basis({(0, side): (heads, dim)}, 1, source.choice(("fp16", "fp32")), str(seed), {(0, side): scope})
    codec = transform_of(Basis.from_bytes(file), 0, side, step, source.choice((16, 64)), with_frames=True)
    batch, runs = source.randint(1, 2), [source.randint(1, 40) for _ in range(source.randint(0, 2))]
    pages = tuple(random_page(codec, batch, heads, run, source)[0] for run in runs)
    tail = torch.randn(batch, heads, source.randint(0, 2), dim).to(torch.bfloat16)
    sides = {side: Side(codec, PackedRuns.from_runs(pages), tail, 0)}
    folder = tmp_path_factory.mktemp("levels")
    data = saved(Cache((Layer(sides.get("k"), sides.get("v")),), "test", {}, start=0), folder)
    loaded = kvpack.load(folder / "saved.kvpack", basis=Basis.from_bytes(file))
    assert_same_cache(decoder.read(data, decompress, [file]), loaded)


@given(packing=packings(), seed=st.integers(0, 2**32))
def test_both_readers_agree_on_arbitrary_packings(packing: Columns, seed: int) -> None:
    digits = random_digits(packing, packing.symbols, (2,), random.Random(seed))
    planes = [plane.to(torch.int32).tolist() for plane in packing.pack([digit.to(torch.int32) for digit in digits])]
    columns = SecondColumns(packing.symbols, packing.bases, packing.fields, packing.alphabets)
    assert columns.plane_words == list(packing.planes)
    for row in range(2):
        assert columns.unpack([plane[row] for plane in planes], "") == [digit[row].tolist() for digit in digits]


def test_digests_are_correct_around_every_branch_of_xxh3() -> None:
    data = random.Random(0).randbytes(3000)
    edges = [*range(0, 3000, 64), *range(1024, 3000, 1024)]
    for length in {*range(260), *(edge + step for edge in edges for step in (-1, 0, 1) if edge + step >= 0), 3000}:
        assert xxh3_128(data[:length]) == xxhash.xxh3_128_digest(data[:length]), length


def test_the_command_line_lists_sides_and_reports_damage(tmp_path: Path) -> None:
    data = bytearray((FOLDER / "group-2-bits.kvpack").read_bytes())
    path = tmp_path / "file.kvpack"
    path.write_bytes(data)
    command = [sys.executable, str(DECODER), str(path)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert shown[1].split()[:3] == ["0.k", "group", "1x2x45x64"]
    assert shown[2].split()[:3] == ["0.v", "group", "1x2x45x128"]
    data[-1] ^= 1
    path.write_bytes(data)
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert "container.md, Digests: the bytes of 0.v.tail" in refused.stderr


# Damage ---------------------------------------------------------------------------------------------------------------


@pytest.mark.scenario
@pytest.mark.parametrize("kind", KINDS)
def test_flipped_missing_and_extra_bytes_are_refused(kind: str) -> None:
    data = small_file(kind)
    source = random.Random(kind)
    for at in sorted({*range(0, len(data), 29), *range(len(data) - 40, len(data)), *range(60)}):
        damaged = bytearray(data)
        damaged[at] ^= 1 << source.randrange(8)
        assert refused_alike(bytes(damaged)), at
    for length in {0, 7, 8, 60, 4095, 4096, 4100, len(data) - 64, len(data) - 1}:
        assert refused_alike(data[:length]), length
    assert refused_alike(data + b"\0")
    assert not refused_alike(data)


def one_side(codec: Codec, runs: tuple[int, ...] = (2,), tail: int = 1) -> bytes:
    source = random.Random(codec.id)
    pages = tuple(random_page(codec, 1, 2, run, source)[0] for run in runs)
    ones = torch.ones(1, 2, tail, codec.dim).to(torch.bfloat16)
    cache = Cache((Layer(Side(codec, PackedRuns.from_runs(pages), ones, 0), None),), "test", {"name": "x"}, start=3)
    with tempfile.TemporaryDirectory() as folder:
        return saved(cache, Path(folder))


GROUP = create("group", 5, "k", b="3", g="16")
QUATERNION = create("quaternion", 9, "k", s="5", r="4", arrangement="direct")
OCTAHEDRAL = create("octahedral", 5, "k", b="2", arrangement="direct", rotation="none")
ANGLE = create("angle", 6, "k", n="100", norm="linear8", rotation="none")
SCALAR = create("scalar", 10, "k", b="2", high="3", rotation="none")
RAW = create("raw", 3, dtype="fp16")
SIDECARS = create("scalar", 16, "k", b="2", rotation="none", channel_scale="fp16", outliers="3", qjl="fp16", sinks="1", raw_tokens="fp16")
BLOCKS = create("group", 12, "k", b="2", axis="channel", block_rotation="4", channel_order="u8")
WIDE_BLOCKS = create("group", 260, "k", b="2", axis="channel", block_rotation="20", channel_order="u16")


def add_a_side_without_tokens(parts: Parts) -> None:
    parts.header["layers"][0]["v"] = {**parts.header["layers"][0]["k"], "runs": [], "tail": 0}
    parts.header["tensors"].append(["0.v.values", "F16", [1, 2, 0, 3], "none", 0, b""])
    parts.tensors.append(b"")


def add_an_outlier(parts: Parts) -> None:
    number = parts.tensor("0.k.outliers")
    parts.header["layers"][0]["k"]["entries"]["outliers"] += 1
    parts.header["tensors"][number][2][2] += 1
    parts.tensors[number] += bytes(8)


def claim_the_most_outliers(parts: Parts) -> None:
    edit("layers.0.k.entries.outliers", 2**40 - 1)(parts)
    edit(f"tensors.{parts.tensor('0.k.outliers')}.2.2", 2**40 - 1)(parts)


def swap_runs_and_tail(parts: Parts) -> None:
    side = parts.header["layers"][0]["k"]
    keys = list(side)
    keys[3:5] = keys[4:2:-1]
    parts.header["layers"][0]["k"] = {key: side[key] for key in keys}


FIELDS, PROFILE, LIMITS = "container.md, Fields", "container.md, msgpack profile", "container.md, Limits"
SIDECAR_RULES, SIDECAR_LAYOUT, SIDECAR_VALUES = "side-cars.md", "side-cars.md, Layout", "side-cars.md, Special values"
PACKING, FINITE = "packing.md, Bit packing", "README.md, Conformance"

# name: (codec, change, the decoder's rule or None, the library's error or None)
CHANGES: dict[str, tuple[Codec, Callable[[Parts], Any], str | None, str | None]] = {
    "nothing": (GROUP, lambda parts: None, None, None),
    "a later format": (GROUP, edit("format", 2), FIELDS, "UnsupportedVersion"),
    "an earlier format": (GROUP, edit("format", 0), FIELDS, "InvalidHeader"),
    "an unknown required feature": (GROUP, edit("required", ["x"]), "container.md, Header tensor", "UnsupportedVersion"),
    "required of another type": (GROUP, edit("required", {}), FIELDS, "InvalidHeader"),
    "an unknown ignorable feature": (GROUP, edit("ignorable", {"x": b"1", "y": b""}), None, None),
    "ignorable features in another order": (GROUP, edit("ignorable", {"y": b"1", "x": b""}), PROFILE, "InvalidHeader"),
    "an ignorable feature that is no bytes": (GROUP, edit("ignorable", {"x": "1"}), FIELDS, "InvalidHeader"),
    "a model key beyond ASCII": (GROUP, edit("model", {"\uffff": "a", "\U00010000": "b"}), None, None),
    "model keys by UTF-16": (GROUP, edit("model", {"\U00010000": "a", "\uffff": "b"}), PROFILE, "InvalidHeader"),
    "an unknown codec": (GROUP, edit("codecs.0.id", "other"), FIELDS, "UnknownCodec"),
    "an unused codec": (GROUP, lambda parts: parts.header["codecs"].append(RAW.params()), None, None),
    "an unknown codec that no side uses": (GROUP, lambda parts: parts.header["codecs"].append({"id": "x"}), FIELDS, "UnknownCodec"),
    "the same codec twice": (GROUP, lambda parts: parts.header["codecs"].append(GROUP.params()), None, None),
    "a layer without sides": (GROUP, lambda parts: parts.header["layers"].append({"k": None, "v": None}), None, None),
    "no layers": (GROUP, lambda parts: (edit("layers", [])(parts), edit("tensors", [])(parts), parts.tensors.clear()), None, None),
    "a key too many": (GROUP, edit("more", 1), FIELDS, "InvalidHeader"),
    "a key too few": (GROUP, drop("recipe"), FIELDS, "InvalidHeader"),
    "keys in another order": (GROUP, swap_runs_and_tail, FIELDS, "InvalidHeader"),
    "a string too long": (GROUP, edit("recipe", "x" * 4097), LIMITS, "LimitExceeded"),
    "a long string": (GROUP, edit("recipe", "x" * 4096), None, None),
    "the last start": (GROUP, edit("start", 2**40 - 1), None, None),
    "a start too high": (GROUP, edit("start", 2**40), LIMITS, "LimitExceeded"),
    "a negative start": (GROUP, edit("start", -1), PROFILE, "InvalidHeader"),
    "true for one": (GROUP, edit("format", True), PROFILE, "InvalidHeader"),
    "a float": (GROUP, edit("start", 3.0), PROFILE, "InvalidHeader"),
    "no batch": (GROUP, edit("layers.0.k.batch", 0), FIELDS, "InvalidHeader"),
    "too many heads": (GROUP, edit("layers.0.k.heads", 65537), LIMITS, "LimitExceeded"),
    "an empty run": (GROUP, edit("layers.0.k.runs", [2, 0]), FIELDS, "InvalidHeader"),
    "runs of fewer tokens": (GROUP, edit("layers.0.k.runs", [1]), FIELDS, "InvalidHeader"),
    "a tail dtype": (GROUP, edit("layers.0.k.tail_dtype", "F16"), FIELDS, "InvalidHeader"),
    "a window": (GROUP, edit("layers.0.k.window", 32), None, None),
    "a window that no token group fills": (GROUP, edit("layers.0.k.window", 24), FIELDS, "InvalidHeader"),
    "a codec index": (GROUP, edit("layers.0.k.codec", 1), FIELDS, "InvalidHeader"),
    "another shape of equal size": (GROUP, edit("tensors.0.2", [2, 1, 2, 1]), FIELDS, "InvalidHeader"),
    "another dtype": (GROUP, edit("tensors.0.1", "F16"), FIELDS, "InvalidHeader"),
    "an unknown filter": (GROUP, edit("tensors.0.3", "lz4"), FIELDS, "InvalidHeader"),
    "a tensor too few": (GROUP, lambda parts: (parts.header["tensors"].pop(), parts.tensors.pop()), FIELDS, "InvalidHeader"),
    "sides of different tokens": (RAW, add_a_side_without_tokens, FIELDS, "InvalidHeader"),
    "two runs of a codec that encodes tokens one by one": (
        RAW,
        edit("layers.0.k.runs", [1, 1]),
        "container.md, Runs and tail",
        "InvalidHeader",
    ),
    "head dim 0": (GROUP, edit("codecs.0.dim", 0), "codecs/group.md, Parameters and ranges", "InvalidHeader"),
    "a rotation that the head dim lacks": (GROUP, edit("codecs.0.rotation_kind", "hadamard"), "packing.md, Rotation", "InvalidHeader"),
    "no fields": (GROUP, edit("codecs.0.fields", {"codes": 0}), PACKING, "InvalidHeader"),
    "129 fields": (GROUP, edit("codecs.0.fields", {"codes": 129}), PACKING, "InvalidHeader"),
    "a column of 129 bits": (GROUP, edit("codecs.0.fields", {"codes": 43}), PACKING, "InvalidHeader"),
    "fields of another stream": (GROUP, edit("codecs.0.fields", {"code": 5}), "codecs/group.md, Parameters and ranges", "InvalidHeader"),
    "a spare bit": (GROUP, overwrite("0.k.codes.0", 1, "80"), PACKING, "InvalidPayload"),
    "a high byte that no column has": (
        dataclasses.replace(GROUP, fields=(("codes", 2),)),
        overwrite("0.k.codes.0", 3, "01"),
        PACKING,
        "InvalidPayload",
    ),
    "a digit beyond its alphabet": (QUATERNION, overwrite("0.k.symbol.0", 0, "7f00"), PACKING, "InvalidPayload"),
    "a bit above both digits": (QUATERNION, overwrite("0.k.symbol.0", 1, "08"), PACKING, "InvalidPayload"),
    "a bin beyond the bins": (ANGLE, overwrite("0.k.angle.0", 0, "7f"), PACKING, "InvalidPayload"),
    "a padding triplet": (OCTAHEDRAL, overwrite("0.k.symbol.0", 4, "01"), "codecs/octahedral.md, Layout", "InvalidPayload"),
    "a table that does not ascend": (
        OCTAHEDRAL,
        edit("codecs.0.norm_table", bytes(8)),
        "codecs/octahedral.md, Parameters and ranges",
        "InvalidHeader",
    ),
    "a table with a number above 1": (
        OCTAHEDRAL,
        edit("codecs.0.norm_table", bytes.fromhex("0000803f 0100803f")),
        "codecs/octahedral.md, Parameters and ranges",
        "InvalidHeader",
    ),
    "a high channel beyond the channels": (
        SCALAR,
        edit("codecs.0.high_channels", b"\x1f\x04"),
        "codecs/scalar.md, Parameters and ranges",
        "InvalidHeader",
    ),
    "high channels alone": (
        SCALAR,
        edit("codecs.0.high_channels", b"\xff\x03"),
        "codecs/scalar.md, Parameters and ranges",
        "InvalidHeader",
    ),
    "an infinite scale": (GROUP, overwrite("0.k.scales", 0, "007c"), FINITE, "InvalidPayload"),
    "a norm that is NaN": (OCTAHEDRAL, overwrite("0.k.norm", 0, "01fe"), FINITE, "InvalidPayload"),
    "a negative norm": (OCTAHEDRAL, overwrite("0.k.norm", 0, "00bc"), None, None),
    "a raw value that is NaN": (RAW, overwrite("0.k.values", 0, "007c01fe"), None, None),
    "a tail value that is NaN": (GROUP, overwrite("0.k.tail", 0, "80ffc17f"), None, None),
    "sidecars": (SIDECARS, lambda parts: None, None, None),
    "an unknown sidecar": (SIDECARS, edit("codecs.0.other", "fp16"), "codecs/scalar.md, Parameters and ranges", "InvalidHeader"),
    "sidecars in another order": (SIDECARS, move_to_end("codecs.0", "outliers"), SIDECAR_RULES, "InvalidHeader"),
    "a sidecar before a parameter": (SIDECARS, move_to_end("codecs.0", "fields"), SIDECAR_RULES, "InvalidHeader"),
    "a sidecar of raw": (RAW, edit("codecs.0.channel_scale", "fp16"), SIDECAR_RULES, "InvalidHeader"),
    "a dtype of channel scales": (SIDECARS, edit("codecs.0.channel_scale", "bf16"), SIDECAR_RULES, "InvalidHeader"),
    "a channel scale of another type": (SIDECARS, edit("codecs.0.channel_scale", {}), SIDECAR_RULES, "InvalidHeader"),
    "raw tokens of another type": (SIDECARS, edit("codecs.0.raw_tokens", 16), SIDECAR_RULES, "InvalidHeader"),
    "outliers of another type": (SIDECARS, edit("codecs.0.outliers", 16), SIDECAR_RULES, "InvalidHeader"),
    "outliers without fields": (SIDECARS, edit("codecs.0.outliers", {}), SIDECAR_RULES, "InvalidHeader"),
    "outliers of too many fields": (SIDECARS, edit("codecs.0.outliers.fields", 129), PACKING, "InvalidHeader"),
    "outliers of a head dim that is no multiple of 4": (GROUP, edit("codecs.0.outliers", {"fields": 1}), SIDECAR_RULES, "InvalidHeader"),
    "qjl of no fields": (SIDECARS, edit("codecs.0.qjl.fields", 0), PACKING, "InvalidHeader"),
    "qjl of a large seed": (SIDECARS, edit("codecs.0.qjl.seed", 2**64 - 1), None, None),
    "qjl of another norm": (SIDECARS, edit("codecs.0.qjl.norm", "fp64"), SIDECAR_RULES, "InvalidHeader"),
    "qjl in another order": (SIDECARS, move_to_end("codecs.0.qjl", "seed"), SIDECAR_RULES, "InvalidHeader"),
    "qjl of a head dim without a Hadamard matrix": (
        GROUP,
        edit("codecs.0.qjl", {"seed": 1, "norm": "fp16", "fields": 1}),
        "packing.md, Rotation",
        "InvalidHeader",
    ),
    "no entries": (SIDECARS, drop("layers.0.k.entries"), FIELDS, "InvalidHeader"),
    "entries of a codec that has none": (GROUP, edit("layers.0.k.entries", {"outliers": 0}), FIELDS, "InvalidHeader"),
    "empty entries": (GROUP, edit("layers.0.k.entries", {}), FIELDS, "InvalidHeader"),
    "entries of another type": (SIDECARS, edit("layers.0.k.entries", [1, 1]), FIELDS, "InvalidHeader"),
    "entries in another order": (SIDECARS, move_to_end("layers.0.k.entries", "outliers"), FIELDS, "InvalidHeader"),
    "entries of fewer streams": (SIDECARS, drop("layers.0.k.entries.outliers"), FIELDS, "InvalidHeader"),
    "entries of more streams": (SIDECARS, edit("layers.0.k.entries.qjl", 1), FIELDS, "InvalidHeader"),
    "entries before window": (SIDECARS, move_to_end("layers.0.k", "window"), FIELDS, "InvalidHeader"),
    "entries that the tensor lacks": (SIDECARS, edit("layers.0.k.entries.outliers", 1000), FIELDS, "InvalidHeader"),
    "the most entries, which the tensor lacks": (SIDECARS, edit("layers.0.k.entries.outliers", 2**40 - 1), FIELDS, "InvalidHeader"),
    "the most entries, listed too": (SIDECARS, claim_the_most_outliers, FIELDS, "InvalidHeader"),
    "the most entries, listed as a frame": (
        SIDECARS,
        lambda parts: (claim_the_most_outliers(parts), parts.store("0.k.outliers", bytes(64), "zstd")),
        LIMITS,
        "LimitExceeded",
    ),
    "too many entries": (SIDECARS, edit("layers.0.k.entries.outliers", 2**40), LIMITS, "LimitExceeded"),
    "negative entries": (SIDECARS, edit("layers.0.k.entries.outliers", -1), PROFILE, "InvalidHeader"),
    "one entry more than flags": (SIDECARS, add_an_outlier, SIDECAR_LAYOUT, "InvalidPayload"),
    "a flag less than entries": (SIDECARS, overwrite("0.k.outlier_flags.0", 0, "00"), SIDECAR_LAYOUT, "InvalidPayload"),
    "a flag of no chunk": (SIDECARS, overwrite("0.k.outlier_flags.0", 1, "04"), PACKING, "InvalidPayload"),
    "a flag of a raw token that is 2": (SIDECARS, overwrite("0.k.raw_token_flags", 0, "02"), SIDECAR_VALUES, "InvalidPayload"),
    "flags of no raw token": (SIDECARS, overwrite("0.k.raw_token_flags", 0, "0000"), SIDECAR_LAYOUT, "InvalidPayload"),
    "an infinite outlier": (SIDECARS, overwrite("0.k.outliers", 2, "00fc"), FINITE, "InvalidPayload"),
    "a norm of a residual that is NaN": (SIDECARS, overwrite("0.k.qjl_norm", 0, "017c"), FINITE, "InvalidPayload"),
    "a negative norm of a residual": (SIDECARS, overwrite("0.k.qjl_norm", 0, "00c0"), None, None),
    "a channel scale of zero": (SIDECARS, overwrite("0.k.channel_scale", 0, "0000"), SIDECAR_VALUES, "InvalidPayload"),
    "a negative channel scale": (SIDECARS, overwrite("0.k.channel_scale", 0, "01bc"), SIDECAR_VALUES, "InvalidPayload"),
    "an infinite channel scale": (SIDECARS, overwrite("0.k.channel_scale", 0, "007c"), FINITE, "InvalidPayload"),
    "a subnormal channel scale": (SIDECARS, overwrite("0.k.channel_scale", 0, "0100"), None, None),
    "channel_order after block_rotation": (BLOCKS, move_to_end("codecs.0", "channel_order"), SIDECAR_RULES, "InvalidHeader"),
    "a dtype of channel orders": (BLOCKS, edit("codecs.0.channel_order", "u32"), SIDECAR_RULES, "InvalidHeader"),
    "an order in 8 bits of 260 channels": (WIDE_BLOCKS, edit("codecs.0.channel_order", "u8"), SIDECAR_RULES, "InvalidHeader"),
    "blocks of a size that does not divide the head dim": (BLOCKS, edit("codecs.0.block_rotation", 8), SIDECAR_RULES, "InvalidHeader"),
    "blocks of one channel": (BLOCKS, edit("codecs.0.block_rotation", 1), SIDECAR_RULES, "InvalidHeader"),
    "blocks of another type": (BLOCKS, edit("codecs.0.block_rotation", "4"), SIDECAR_RULES, "InvalidHeader"),
    "blocks without a Hadamard matrix": (BLOCKS, edit("codecs.0.block_rotation", 6), "packing.md, Rotation", "InvalidHeader"),
    "blocks of another size": (BLOCKS, edit("codecs.0.block_rotation", 12), None, None),
    "an order that names a channel twice": (BLOCKS, overwrite("0.k.channel_order", 0, "0000"), SIDECAR_VALUES, "InvalidPayload"),
    "an order that names a channel beyond the head": (BLOCKS, overwrite("0.k.channel_order", 13, "0c"), SIDECAR_VALUES, "InvalidPayload"),
    "a raw token that is NaN": (SIDECARS, overwrite("0.k.raw_tokens", 0, "007c01fe"), None, None),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_with_correct_digests_are_treated_alike(name: str) -> None:
    codec, change, rule, error = CHANGES[name]
    original = one_side(codec)
    parts = Parts.of(original)
    assert parts.joined() == original
    change(parts)
    data = parts.joined()
    assert verdict(data) == (rule, error)
    if rule is None:
        assert decoder.read(data, decompress).ignorable == parts.header["ignorable"]


def other_forms(packed: bytes, start: int) -> Iterator[bytes]:
    """Yield header tensors with the same values in noncanonical encodings. The integer at ``start`` is a fixint."""
    yield packed[:start] + b"\xcc" + packed[start:]
    yield packed[:start] + b"\xcd\0" + packed[start:]
    yield packed[:start] + b"\xd0" + packed[start:]
    yield b"\xde\0\x09" + packed[1:]
    yield packed[:1] + b"\xd9\x06" + packed[2:]
    yield packed + b"\0"
    yield packed[:-1]


def test_a_noncanonical_header_is_refused() -> None:
    parts = Parts.of(one_side(GROUP))
    packed = msgpack.packb(parts.header)
    start = packed.index(b"\xa5start") + 6
    for form in other_forms(packed, start):
        assert refused_alike(parts.joined(form)), form
    name = b"\xa4name\xa1x"
    assert packed.count(b"\x81" + name) == 1
    assert refused_alike(parts.joined(packed.replace(b"\x81" + name, b"\x82" + name + name)))
    assert packed.count(b"\xa4test") == 1
    # Not UTF-8, a surrogate, bytes, and a string in a longer form.
    for text in (b"\xa4te\xff\xff", b"\xa4t\xed\xa0\x80", b"\xc4\x04test", b"\xd9\x04test"):
        assert refused_alike(parts.joined(packed.replace(b"\xa4test", text))), text


def test_both_readers_treat_changed_header_bytes_alike() -> None:
    source = random.Random(5)
    accepted = 0
    for codec in (GROUP, QUATERNION, OCTAHEDRAL, ANGLE, RAW, SIDECARS, BLOCKS):
        parts = Parts.of(one_side(codec, runs=(3,)))
        packed = msgpack.packb(parts.header)
        for _ in range(100):
            at = source.randrange(len(packed))
            flipped = packed[:at] + bytes([packed[at] ^ 1 << source.randrange(8)]) + packed[at + 1 :]
            accepted += not refused_alike(parts.joined(flipped))
    assert accepted > 5


def test_both_readers_treat_changed_payload_bits_alike() -> None:
    source = random.Random(6)
    refused = accepted = 0
    for codec in (GROUP, QUATERNION, OCTAHEDRAL, ANGLE, RAW, SIDECARS, BLOCKS):
        original = Parts.of(one_side(codec, runs=(3,)))
        for _ in range(60):
            parts = Parts(original.header, list(original.tensors))
            number = source.randrange(len(parts.tensors))
            stored = bytearray(parts.tensors[number])
            stored[source.randrange(len(stored))] ^= 1 << source.randrange(8)
            parts.tensors[number] = bytes(stored)
            if refused_alike(parts.joined()):
                refused += 1
            else:
                accepted += 1
    assert refused > 20
    assert accepted > 20


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ('"kvpack":"1 ', '"kvpack":"2 ', "UnsupportedVersion"),
        ('"kvpack":"1 ', '"kvpack":"10 ', "UnsupportedVersion"),
        ('"kvpack":"1 ', '"kvpack":"0 ', "InvalidHeader"),
        ('"kvpack":"1 ', '"kvpack":"01', "InvalidHeader"),
        ('"kvpack":"1 ', '"kvpack": 1', "NotKvpack"),
        ('"format":"kvpack"', '"format":"kvpacK"', "NotKvpack"),
    ],
    ids=["2", "two digits", "0", "leading zero", "number", "format"],
)
def test_another_version_is_refused_whatever_else_the_file_contains(old: str, new: str, error: str) -> None:
    data = small_file("raw").replace(old.encode(), new.encode())
    rule, found = verdict(data)
    assert rule == "container.md, JSON header"
    assert found == error


def test_nonzero_padding_is_refused() -> None:
    parts = Parts.of(one_side(GROUP))
    parts.header["recipe"] = "a recipe of another length"
    data = bytearray(parts.joined())
    header = len(msgpack.packb(parts.header))
    assert header % 64
    data[8 + int.from_bytes(data[:8], "little") + header] = 1
    assert verdict(bytes(data)) == ("container.md, Tensors and alignment", "InvalidPayload")


def test_an_empty_frame_is_a_tensor_without_bytes() -> None:
    parts = Parts.of(one_side(RAW, runs=()))
    frame(compress)(parts)
    assert parts.header["tensors"][0][2:4] == [[1, 2, 0, 3], "zstd"]
    assert not refused_alike(parts.joined())


def test_a_cache_is_not_a_basis() -> None:
    def by(basis: bytes) -> Any:
        codec = Klt.from_widths(16, hashlib.sha256(basis).digest(), 0, "k", b"\2")
        return decoder.read(one_side(codec), None, [basis])

    parts = Parts.of(random_basis({(0, "k"): (2, 16)}, 1))
    assert by(parts.joined()).layers
    parts.header["required"] = []
    with pytest.raises(decoder.Refused, match="is a cache, but a basis is needed"):
        by(parts.joined())


def test_a_frame_is_refused_by_name_without_a_decompressor() -> None:
    parts = Parts.of(one_side(RAW))
    frame(compress)(parts)
    with pytest.raises(decoder.Refused, match=r"0\.k\.values: a decompressor is needed"):
        decoder.read(parts.joined())


@pytest.mark.parametrize("fields", [5, 42], ids=["whole", "more fields than symbols"])
def test_any_number_of_fields_within_the_limits_is_read(fields: int, tmp_path: Path) -> None:
    codec = dataclasses.replace(GROUP, fields=(("codes", fields),))
    assert_decoded_alike(one_side(codec), tmp_path)
