"""Every guard of the file readers matters, and none of them allocates memory before it checks.

These tests remove a part of the guards, and ``python -m support.guard_removal`` all of them.
"""

from __future__ import annotations

import dataclasses
import tracemalloc
import zlib
from typing import TYPE_CHECKING

import msgpack
import pytest

from kvpack.cache import files
from kvpack.coding.bases import Basis
from kvpack.file import container
from kvpack.file.front import parse_header
from kvpack.file.header import Contents
from kvpack.file.position_offsets import FEATURE
from kvpack.file.row import build_front, read_frame
from kvpack.formats import codec_from_params
from kvpack.formats.errors import InvalidHeader, InvalidParameter, KvpackError, LimitExceeded, UnsupportedVersion
from kvpack.pages import PageCodec, PageGeometry
from spec.decoder.row import ROW_MAGIC
from spec.generate.balanced_vectors import alone, state
from spec.generate.invalid_vectors import ANGLE, GROUP, KLT, LOSSLESS, MINIFLOAT, OCTAHEDRAL, POLAR, QUATERNION, TRANSFORM
from spec.generate.parameter_vectors import CODED, SIDECARS
from spec.generate.vector_files import FOLDER
from support.file_parts import Parts, change_file, keys_file
from support.guard_removal import all_guards, catching_file, listed, readings
from support.guards import LIBRARY, ROOT, guards_of
from support.second_decoder import MODULES, decoder
from support.vector_checks import LINES, load_basis, verify

if TYPE_CHECKING:
    from pathlib import Path

    from kvpack.formats.base import Codec

BASES = [Basis.load(FOLDER / "valid" / name) for name in ("basis-frames.kvpack", "basis-two-layers.kvpack")]
SHARE = 8
"""One in this many guards is removed."""


@pytest.mark.scenario
def test_guards_are_found_in_every_module_that_checks() -> None:
    counts = {path.stem: len(guards_of(path)) for path in LIBRARY}
    assert all(counts[name] >= 5 for name in ("columns", "klt", "octahedral", "polar", "checks", "header", "front", "zstd"))
    assert sum(len(guards_of(path)) for path in MODULES) >= 250
    names = [guard.name for guard in all_guards()]
    assert set(listed()) <= set(names), "the list contains a guard that no longer exists"


@pytest.mark.scenario
@pytest.mark.parametrize("path", [*LIBRARY, *MODULES], ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_share_of_the_guards_is_covered_by_a_file_or_by_the_listed_test(path: Path) -> None:
    for guard in guards_of(path):
        if zlib.crc32(guard.name.encode()) % SHARE == 0 and guard.name not in listed():
            assert catching_file(guard), f"no file shows what {guard.name} is for"


@pytest.mark.scenario
def test_a_removed_guard_is_restored_afterwards() -> None:
    guard = next(guard for guard in all_guards() if guard.text == "actual != expected" and guard.where == "check_hash")
    assert catching_file(guard) == "invalid/digest-of-a-tensor.kvpack"
    assert all(reading.outcome() == reading.refusal for reading in readings(False) if "digest-of" in reading.name)


def test_a_memory_limit_holds_for_bytes_in_memory() -> None:
    data = (FOLDER / "valid" / "group-dim-3.kvpack").read_bytes()
    container.open_bytes(data, memory_limit=len(data)).verify()
    with pytest.raises(LimitExceeded, match=f"has {len(data)} bytes, but memory_limit is {len(data) - 1}"):
        container.open_bytes(data, memory_limit=len(data) - 1)


def test_loading_makes_the_same_checks_as_verifying() -> None:
    """Verifying reads a file in pieces, and loading checks it on use. Both must make the same checks."""
    for file, line in LINES.items():
        if "error" in line and "either" not in line:
            with pytest.raises(KvpackError) as raised:
                load((FOLDER / file).read_bytes(), file)
            assert type(raised.value).__name__ == line["error"], file


def load(data: bytes, file: str) -> object:
    """Load a file as a cache or as a basis."""
    opened = container.open_bytes(bytearray(data))
    # What is refused without the basis is refused with it, but for its being missing.
    given = [*load_basis(file), *([] if LINES[file]["error"] == "MissingBasis" else BASES)]
    return Basis.from_bytes(data) if opened.header.is_basis else files.read(opened, basis=given)


def test_no_writer_can_name_a_required_feature() -> None:
    with pytest.raises(UnsupportedVersion, match="needs the feature 'new-feature'"):
        Contents(codecs=(), layers=(), required=("new-feature",))


def test_the_second_decoder_needs_a_decompressor() -> None:
    (file, *_) = (file for file, line in LINES.items() if "error" not in line and "zstd" in file)
    with pytest.raises(decoder.Refused, match="a decompressor is needed"):
        decoder.read((FOLDER / file).read_bytes())


@pytest.mark.scenario
def test_refused_files_use_at_most_four_times_their_size_of_memory() -> None:
    """The limit applies above 8 MiB, because declared contents are checked before memory is allocated for them."""
    lines = {file: line for file, line in LINES.items() if "error" in line and "either" not in line}
    refused = {file: ((FOLDER / file).read_bytes(), load_basis(file)) for file in lines}
    tracemalloc.start()
    try:
        for name, (data, given) in refused.items():
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            with pytest.raises(KvpackError):
                verify(data, given)
            assert tracemalloc.get_traced_memory()[1] - before <= 4 * len(data) + 2**23, name
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("codec", "change", "message"),
    [
        (ANGLE, {"dim": 0}, "dim is 0, expected 2 to 1024"),
        (ANGLE, {"norm": "fp32", "norm_bits": 0, "arrangement": "direct"}, "arrangement is 'direct', expected one of dense"),
        (ANGLE, {"bins": 1}, "bins is 1, expected 2 to 65536"),
        (ANGLE, {"bins": 65537}, "bins is 65537, expected 2 to 65536"),
        (GROUP, {"dim": 0}, "dim is 0, expected 1 to 1024"),
        (GROUP, {"bits": 0}, "bits is 0, expected 1 to 8"),
        (GROUP, {"rotation_kind": "other"}, "rotation_kind is 'other', expected one of none, hadamard, signed-hadamard"),
        (GROUP, {"scale_dtype": "fp16"}, "scale_dtype is 'fp16', which is the default and must be omitted"),
        (GROUP, {"fields": {b"codes": 1}}, "fields is {.*}, expected a map from stream name to integer"),
        (KLT, {"dim": 0}, "dim is 0, expected 1 to 1024"),
        (KLT, {"layer": -1}, "layer is -1, expected 0 to 4095"),
        (LOSSLESS, {"dim": 0}, "dim is 0, expected 1 to 1024"),
        (MINIFLOAT, {"dim": 0}, "dim is 0, expected 1 to 1024"),
        (OCTAHEDRAL, {"b_norm": -1}, "b_norm is -1, expected 0 to 8"),
        (POLAR, {"dim": 0}, "dim is 0, expected 2 to 1024"),
        (POLAR, {"dim": 7}, "dim is 7, expected an even number"),
        (QUATERNION, {"dim": 0}, "dim is 0, expected 1 to 1024"),
        (QUATERNION, {"secondary": 0}, "secondary is 0, expected 1 to 4096"),
        (QUATERNION, {"secondary": 2731}, "secondary is 2731, expected 1 to 2730 for the direct arrangement"),
        (QUATERNION, {"radius_bits": 0}, "radius_bits is 0, expected 1 to 8"),
        (TRANSFORM, {"layer": -1}, "layer is -1, expected 0 to 4095"),
        (TRANSFORM, {"step": -1}, "step is -1, expected 0 to 255"),
    ],
    ids=str,
)
def test_the_guard_that_knows_the_parameter_names_it(
    codec: Codec, change: dict[str, object], message: str
) -> None:
    with pytest.raises(InvalidParameter, match=message):
        codec_from_params(codec.params() | change)


@pytest.mark.parametrize(("codec", "name"), [(GROUP, "centre"), (OCTAHEDRAL, "rounding")], ids=["centre", "rounding"])
def test_encoder_only_options_are_checked_too(codec: Codec, name: str) -> None:
    with pytest.raises(InvalidParameter, match=f"{name} is 'other', expected one of"):
        dataclasses.replace(codec, **{name: "other"})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"outliers": -1, "raw_tokens": 0}, "entries.outliers is -1, expected at least 0"),
        ({b"x": 1}, "a key of entries is of type bytes"),
    ],
    ids=["negative", "key"],
)
def test_entries_are_named(entries: dict[object, int], message: str) -> None:
    parts = Parts.of(keys_file(SIDECARS))
    parts.header["layers"][0]["k"]["entries"] = entries
    with pytest.raises(InvalidHeader, match=message):
        parse_header(msgpack.packb(parts.header))


def test_parts_of_a_frame_have_their_sizes() -> None:
    codec = PageCodec("raw", PageGeometry(1, 1, 1, 8, None))
    for namespace, key in ((b"x", bytes(32)), (bytes(32), b"x")):
        with pytest.raises(InvalidParameter, match=f"namespace has {len(namespace)} bytes and key has {len(key)}, expected 32 and 32"):
            build_front(codec.layout, namespace, key)
    row = bytearray(build_front(codec.layout, bytes(32), bytes(32)) + bytes(codec.nbytes - codec.layout.payload))
    row[16] += 1
    with pytest.raises(InvalidHeader, match=f"its length is {codec.nbytes + 1}, expected a multiple of 64"):
        read_frame(memoryview(row), "a row")


def test_frames_of_keys_have_at_most_1024_channels() -> None:
    """In a layer without rows, nothing else bounds the head dim, and a vector of that size would take megabytes."""
    data = change_file(alone(), state("k.balanced", shape=(1, 1, 1025, 1025)), state("k.centered", shape=(1, 1, 1025, 1025)))
    with pytest.raises(InvalidHeader, match="1025"):
        Basis.from_bytes(data)
    with pytest.raises(decoder.Refused, match=r"has the shape .*1025"):
        decoder.read(data)


def test_offsets_of_no_sequence_are_refused_in_a_file_without_sides() -> None:
    parts = Parts.of(keys_file(GROUP))
    parts.header["layers"], parts.header["tensors"], parts.tensors, parts.header["codecs"] = [], [], [], []
    parts.header["required"], parts.header["ignorable"] = [FEATURE], {FEATURE: b""}
    with pytest.raises(InvalidHeader):
        container.open_bytes(bytearray(parts.joined()))
    with pytest.raises(decoder.Refused, match="0 bytes"):
        decoder.read(parts.joined())


def test_no_row_is_longer_than_its_checksum_supports() -> None:
    with pytest.raises(LimitExceeded, match="at most 4294967232 are allowed: use pages of fewer tokens"):
        PageCodec("raw", PageGeometry(64, 64, 4096, 128, 128))

    class Long(bytes):
        """The beginning of a row that claims to have 2^32 bytes."""

        def __len__(self) -> int:
            return 2**32

    with pytest.raises(decoder.Refused, match="the row's length is 4294967296, expected 128 to 4294967232 bytes"):
        decoder.read_row(Long(ROW_MAGIC + (2**32).to_bytes(8, "little") + bytes(104)))


@pytest.mark.parametrize("codec", [*CODED, SIDECARS], ids=lambda codec: f"{codec.id}-{len(codec.params())}")
def test_a_seed_has_at_most_64_bits(codec: Codec) -> None:
    """No file can contain a larger seed, because msgpack has no larger integers. Codec constructors refuse it."""
    params = codec.params()
    places = [name for name in ("seed", "rotation_seed") if name in params]
    for change in [*({name: 2**64} for name in places), *([{"qjl": params["qjl"] | {"seed": 2**64}}] if "qjl" in params else [])]:
        with pytest.raises(InvalidParameter, match="seed is 18446744073709551616, expected 0 to 18446744073709551615"):
            codec_from_params(params | change)
