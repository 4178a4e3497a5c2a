"""Tests of the fuzz targets: each one runs, repairs mutated inputs, and reports a fault that is planted in the code."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
import numpy
import pytest
import torch
import xxhash

import kvpack
from fuzz import (
    cache_oracles,
    entry_oracles,
    line_coverage,
    oracles,
    reader_oracles,
    row_oracles,
    seeds,
    session,
    summary,
    value_oracles,
    worker,
)
from fuzz.file_mutator import Vocabulary, mutate_file, split_file
from fuzz.run import parse_arguments, select_targets
from fuzz.session import Report, Session
from fuzz.targets import TARGETS, Target
from kvpack.cache import files, side
from kvpack.cache.dense_states import DenseLayer
from kvpack.coding import bases, recipes, rules
from kvpack.file import container, front, payload, row
from kvpack.formats import CODECS, columns
from kvpack.formats.errors import DigestMismatch, KvpackError
from kvpack.formats.scalar import Scalar
from kvpack.integrations.mlx_lm import prompt_caches
from kvpack.pages import host
from kvpack.store import entries
from support.reader_programs import Answer

REFUSAL = Answer("InvalidHeader", "group-1", None, {})
ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests")))}
INPUTS = {"basis": 40, "command": 12, "dense-file": 40, "entry": 20}
"""Number of inputs for targets whose inputs take long to process."""


def run(target: Target, count: int, folder: Path, seed: int = 0, every: int = 16) -> Report:
    """Run ``count`` mutations of the seed inputs, in an order given by ``seed``, and return the report."""
    source, report = random.Random(seed), Report("target", "random", seed)
    found = Session(report, Target(**{**vars(target), "every": every}), 1e9, None, folder)
    while report.executions < count and not report.crashes:
        found.run(target.mutate(source.choice(target.seeds), source))
    return found.finish()


@pytest.fixture(scope="module")
def targets() -> Callable[[str], Target]:
    made: dict[str, Target] = {}

    def get(name: str) -> Target:
        if name not in made:
            made[name] = TARGETS[name]()
        return made[name]

    return get


@pytest.mark.scenario
@pytest.mark.parametrize("name", TARGETS)
def test_a_target_and_its_corpus_run_without_failures(name: str, targets: Callable[[str], Target], tmp_path: Path) -> None:
    target, found = targets(name), seeds.committed_inputs(name)
    assert found, "there is a corpus"
    assert not set(found) & set(target.seeds), "seeds were copied"
    for data in found[:: max(1, len(found) // 20)]:
        assert len(data) <= target.max_bytes
        target.check(data)
    assert any(target.check(data) for data in target.seeds), "a seed is accepted"
    count = INPUTS.get(name, 60)
    report = run(target, count, tmp_path)
    assert not report.crashes, report.crashes[0]
    assert report.executions == count
    assert report.accepted < count
    assert (report.compared > 0) == (target.compare is not None)


def test_an_input_on_which_readers_differ_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    data = (ROOT / "spec" / "vectors" / "valid" / "group-dim-3.kvpack").read_bytes()
    values = numpy.fromfile(ROOT / "spec" / "vectors" / "valid" / "group-dim-3.f32", "<f4")
    row = (ROOT / "spec" / "row-vectors" / "raw.row").read_bytes()
    for answer, checked in ((Answer("ok", "", values, {}), True), (Answer("ok", "", values + 1, {}), False), (REFUSAL, False)):
        reader = SimpleNamespace(name="x", read=lambda path, bases, answer=answer: answer)
        monkeypatch.setattr(reader_oracles, "start_all_readers", lambda reader=reader: (reader,))
        for compare in (oracles.compare_container, value_oracles.compare_values):
            with nullcontext() if checked else pytest.raises(AssertionError, match=r"\bx\b"):
                compare(data)
    with pytest.raises(AssertionError, match="x: group-1"):
        row_oracles.RowOracle().compare(row)


def test_every_codec_is_a_target() -> None:
    assert {f"codec-{name}" for name in CODECS} <= set(TARGETS)


def test_targets_of_consecutive_days_cover_all_targets() -> None:
    shares = [select_targets(parse_arguments(["--share", "4", "--seed", str(20261129 + day)])) for day in range(4)]
    assert sorted(name for share in shares for name in share) == sorted(TARGETS)
    assert select_targets(parse_arguments(["--target", "row", "--target", "basis"])) == ["row", "basis"]


def test_the_corpus_is_small() -> None:
    assert {path.name for path in seeds.CORPUS.iterdir()} == {seeds.corpus_path(name).name for name in TARGETS}
    assert sum(path.stat().st_size for path in seeds.CORPUS.iterdir()) < 1 << 20


def test_mutations_are_repaired_and_repeatable() -> None:
    files = seeds.kvpack_files()
    vocabulary, refusals, accepted, right, whole = Vocabulary.of(files), [], 0, 0, 0
    for number in range(300):
        data = files[number * len(files) // 300]
        mutated = mutate_file(data, vocabulary, random.Random(number), 1 << 14)
        assert mutated == mutate_file(data, vocabulary, random.Random(number), 1 << 14)
        try:
            container.open_bytes(mutated).verify()
            accepted += mutated != data
        except KvpackError as error:
            refusals.append(type(error))
        parts = split_file(mutated)
        if mutated != data and parts is not None:
            whole += 1
            header = mutated[8 + int.from_bytes(mutated[:8], "little") :][: len(msgpack.packb(parts.header))]
            rows = zip(parts.header["tensors"], parts.tensors, strict=True)
            right += xxhash.xxh3_128_hexdigest(header).encode() in mutated[:128] and all(
                row[5] == xxhash.xxh3_128_digest(stored) for row, stored in rows
            )
    assert whole > 100
    assert right > 0.9 * whole
    assert accepted > 30
    assert refusals.count(DigestMismatch) < 30, "too many inputs failed the digest checks"
    assert len(set(refusals)) >= 5


def leave_out(module: Any, name: str, value: Any = None) -> Callable[[pytest.MonkeyPatch], None]:
    """Return a function that plants a fault: it replaces the function ``name`` by one that does nothing."""
    return lambda patch: patch.setattr(module, name, lambda *_, **__: value)


def crash(module: Any, name: str) -> Callable[[pytest.MonkeyPatch], None]:
    def fail(*_: Any, **__: Any) -> None:
        raise IndexError("planted")

    return lambda patch: patch.setattr(module, name, fail)


def wrong_bytes(patch: pytest.MonkeyPatch) -> None:
    real = front.pack_header
    patch.setattr(oracles, "pack_header", lambda header: real(header) + b"\0")


def wrong_value(patch: pytest.MonkeyPatch) -> None:
    # C kernels, where they were built, do not call it.
    patch.setenv("KVPACK_KERNELS", "torch")
    real = Scalar.decode_frame
    patch.setattr(Scalar, "decode_frame", lambda codec, streams: real(codec, streams) * 1.25)


def another_shape(patch: pytest.MonkeyPatch) -> None:
    real = oracles.safetensors.deserialize
    patch.setattr(oracles.safetensors, "deserialize", lambda data: [(name, {**at, "shape": [1]}) for name, at in real(data)])


FAULTS: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], None]]] = {
    "a reader crashes": ("container", crash(container, "check_digest")),
    "a pad is not checked": ("container", lambda patch: patch.setattr(payload, "any", lambda _: False, raising=False)),
    "keys are not checked": ("header", leave_out(front, "check_keys")),
    "another form of the header": ("header", wrong_bytes),
    "digits are not checked": ("codec-group", leave_out(columns.Columns, "check")),
    "values are wrong": ("codec-scalar", wrong_value),
    "another reading": ("safetensors", another_shape),
    "added values are rounded": ("append", leave_out(side, "is_rounded", False)),
    "checksums are not checked": ("row", lambda patch: patch.setattr(row, "checksum", lambda data: int.from_bytes(data[24:32], "little"))),
    "padding is not checked": ("row", leave_out(host, "check_row_matches")),
    "payloads are not checked": ("entry", leave_out(entries, "check_payload_digest")),
    "rows of a basis crash": ("basis", crash(bases, "read_rows")),
    "counts are not checked": ("prompt-cache", lambda patch: patch.setattr(prompt_caches, "_parse_integer", lambda _, text: int(text))),
    "a word crashes": ("recipe", crash(rules, "create_codec")),
    "a clause crashes": ("recipe-file", crash(recipes, "read_clauses")),
    "a command crashes": ("command", crash(container, "open_file")),
}


@pytest.mark.scenario
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, targets: Callable[[str], Target], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, plant = FAULTS[fault]
    target = targets(name)
    plant(monkeypatch)
    report = run(target, 2000, tmp_path, every=4)
    assert report.crashes, "the fault was not found"
    kept = Path(report.crashes[0].partition("\n")[0])
    assert kept.parent == tmp_path
    assert kept.stat().st_size >= 0


def test_a_hang_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "HANG_SECONDS", 0.01)

    def slow(data: bytes) -> bool:
        end = time.thread_time() + 0.02 * len(data)
        while time.thread_time() < end:
            pass
        return True

    report = run(Target((b"",), lambda data, source: data or b"x", slow), 1, tmp_path)
    assert len(report.hangs) == 1
    assert report.slowest_seconds > 0.01
    assert Path(report.hangs[0]).read_bytes() == b"x"


def test_every_kind_of_failure_is_counted() -> None:
    memory = {"memory_peak": 300.0, "memory_of_libraries": 240.0, "memory_of_files": 70.0}
    good = {"target": "x", "executions": 1, **memory, "crashes": [], "hangs": []}
    assert summary.problems([good]) == []
    for change, message in (
        ({"crashes": ["file\ntrace"]}, "PYTHONPATH=tests python -m fuzz.worker x --repeat file"),
        ({"hangs": ["file"]}, "x: hangs: file"),
        ({"memory_of_files": 43.0}, "took 257 MiB"),
        ({"memory_peak": 325.0}, "85 MiB more than the libraries"),
        ({"executions": 0}, "no input was run"),
    ):
        (problem,) = summary.problems([good | change])
        assert message in problem


def test_minimizing_keeps_inputs_that_reach_new_code() -> None:
    files = list(seeds.kvpack_files()[:60])
    kept = line_coverage.minimize(oracles.check_container, files + files[:5], files[:10])
    assert 2 <= len(kept) < 50
    assert not set(kept) & set(files[:10])
    assert line_coverage.minimize(oracles.check_container, kept, kept) == []
    covered = line_coverage.covered_lines(oracles.check_container, files, 1e9)
    runnable = line_coverage.runnable_lines()
    assert set(covered["kvpack/file/container.py"]) & runnable["kvpack/file/container.py"]


@pytest.mark.scenario
@pytest.mark.parametrize(("driver", "names"), [("random", ("recipe", "encrypted-entry")), ("atheris", ("recipe",))])
def test_the_command_line_reports_json(driver: str, names: tuple[str, ...], tmp_path: Path) -> None:
    if driver == "atheris":
        pytest.importorskip("atheris")
    words = [*(f"--target={name}" for name in names), "--executions", "300", "--seconds", "120", "--lines", "1", "--json"]
    command = [sys.executable, "-m", "fuzz.run", *words, "--driver", driver, "--failures", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    found = [(report["target"], report["executions"], report["driver"]) for report in result["targets"]]
    assert found == [(name, 300, driver) for name in names]
    assert result["problems"] == []
    assert result["coverage"]["formats/columns.py"][0] > 10
    assert all((report["features"] > 0) == (driver == "atheris") for report in result["targets"])


def test_a_failing_input_is_saved_and_repeats_the_failure(tmp_path: Path) -> None:
    (tmp_path / "input").write_bytes(seeds.kvpack_files()[-1])
    command = [sys.executable, "-m", "fuzz.worker", "container", "--repeat", str(tmp_path / "input")]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "input: accepted" in done.stdout or "input: refused" in done.stdout


def test_a_crashed_process_leaves_its_input(tmp_path: Path) -> None:
    script = (
        "import os, pathlib, sys\n"
        "from fuzz.session import Report, Session\n"
        "from fuzz.targets import Target\n"
        "from fuzz.worker import run_random\n"
        "target = Target((b'x',), lambda data, source: b'fatal', lambda data: os.abort() if data == b'fatal' else True)\n"
        f"session = Session(Report('target', 'random', 0), target, 60.0, 9, pathlib.Path({str(tmp_path)!r}))\n"
        "run_random(session, [b'x'], 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=ENVIRONMENT, timeout=120)
    assert done.returncode < 0, done.stderr
    (left,) = tmp_path.iterdir()
    assert left.name.startswith("native-target-")
    assert left.read_bytes() == b"fatal"


def test_the_random_driver_builds_on_accepted_inputs(tmp_path: Path) -> None:
    seen: list[bytes] = []

    def check(data: bytes) -> bool:
        seen.append(data)
        return True

    target = Target((b"x",), lambda data, source: data + b"y", check)
    worker.run_random(Session(Report("target", "random", 0), target, 1e9, 200, tmp_path), [b"x"], 0)
    assert seen[0] == b"x"
    assert len(seen) == 200
    assert max(map(len, seen)) > 3
    assert list(tmp_path.iterdir()) == []


def test_a_large_power_of_two_explains_an_infinity() -> None:
    x = torch.randn(1, 2, 4, 64, generator=torch.Generator().manual_seed(0))
    cache = kvpack.pack([(x, x)], "mxfp8;raw=0")
    for layer in cache:
        for found in layer.sides.values():
            for page in found.runs:
                page.streams["block_scales"].fill_(254)
    data = container.to_bytes(*files.header_and_arrays(cache))
    loaded = value_oracles.load_checked(data)
    assert loaded is not None
    assert any(not values.isfinite().all() for pair in loaded.unpack(torch.float32) for values in pair if values is not None)
    value_oracles.compare_values(data)


def test_a_payload_may_be_checked_instead_of_its_tensors() -> None:
    """If only the tensors' digests of an entry are wrong, a template reader accepts it, but a parsing reader does not."""
    oracle = entry_oracles.EntryOracle()
    first, _ = oracle.chains[entry_oracles.RECIPES[0]]
    parts = split_file(first)
    assert parts is not None
    parts.header["tensors"][0][5] = bytes(16)
    damaged = parts.joined(msgpack.packb(parts.header))
    assert len(damaged) == len(first)
    assert damaged != first
    assert oracle.check(first)
    assert not oracle.check(damaged)
    assert not oracle.check(damaged[:-1] + bytes([damaged[-1] ^ 1]))


def test_the_oracle_knows_that_states_belong_to_one_token() -> None:
    x = torch.randn(1, 1, 3, 16).bfloat16()
    cache = kvpack.pack([DenseLayer(x, x, 0, {"conv.0": torch.zeros(1, 2)})], "raw")
    data = container.to_bytes(*files.header_and_arrays(cache))
    value_oracles.compare_values(data)
    assert cache_oracles.check_append(data)
