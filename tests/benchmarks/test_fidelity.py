"""Tests of the fidelity benchmark: rows and verdicts, detection of a broken codec, and output."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

import pytest
import torch

from benchmarks import fidelity
from benchmarks.__main__ import main, parser
from benchmarks.fidelity import hqmq, octopus
from benchmarks.fidelity.measure import codec, rate
from benchmarks.fidelity.rows import Row, around
from kvpack.formats.errors import InvalidParameter
from kvpack.formats.qjl import Qjl
from kvpack.formats.scalar import Scalar
from kvpack.formats.streams import Layout

# The values of some papers have large tokens.
pytestmark = pytest.mark.filterwarnings("ignore:.*which share")

QUICK = fidelity.Settings(quick=True)


@pytest.fixture(scope="module")
def report() -> Any:
    steps: list[tuple[int, int]] = []
    found = fidelity.run(settings=QUICK, progress=lambda done, total: steps.append((done, total)))
    total = sum(len(sections) for _, sections in fidelity.PAPERS.values())
    assert steps == [(number, total) for number in range(1, total + 1)]
    return found


def figures(report: Any, paper: str, table: str) -> dict[str, Any]:
    return {row["name"]: row for row in report["rows"] if (row["paper"], row["table"]) == (paper, table)}


@pytest.mark.scenario
def test_every_difference_from_a_paper_has_a_reason(report: Any) -> None:
    assert [row for row in report["rows"] if row["verdict"] == "differs"] == []
    assert report["verdicts"]["within"] > 150
    assert all(row["note"] for row in report["rows"] if row["verdict"] == "explained")


@pytest.mark.scenario
def test_names_are_unique(report: Any) -> None:
    names = [(row["paper"], row["table"], row["name"]) for row in report["rows"]]
    assert len(set(names)) == len(names)


@pytest.mark.scenario
def test_every_system_of_table_1_is_measured(report: Any) -> None:
    names = figures(report, "OCTOPUS", "Table 1")
    for b in (2, 3, 4):
        for system in ("TurboQuant-MSE", "TurboQuant-QJL", "PolarQuant", "OCTOPUS", "OCTOPUS-QJL"):
            for measure in ("1 - cosine", "MSE", "inner-product error"):
                assert f"b = {b}, {system}: {measure}" in names
        assert names[f"b = {b}, TurboQuant-QJL: inner-product error, first stage only"]["verdict"] == "within"
        assert names[f"b = {b}, TurboQuant-QJL: inner-product error"]["verdict"] == "explained"
    assert len(names) == 48


@pytest.mark.scenario
@pytest.mark.parametrize(
    ("paper", "table", "count"),
    [
        ("OCTOPUS", "Needle", 7),
        ("OCTOPUS", "Table 4", 26),
        ("OCTOPUS", "Table 5", 64),
        ("OCTOPUS", "Table 6", 12),
        ("HQMQ", "Table 2", 6),
        ("HQMQ", "Table 12", 12),
        ("HQMQ", "Table 21", 18),
        ("HQMQ", "Table 14", 8),
        ("HQMQ", "Table 16", 6),
        ("TurboAngle", "Table 1", 4),
        ("TurboAngle", "Table 2", 7),
        ("TurboAngle", "Table 5", 9),
        ("TurboAngle", "Table 6", 2),
        ("TurboAngle", "Sec. 2", 5),
        ("OScaR", "Table 2", 6),
        ("OScaR", "Table 9", 4),
        ("OScaR", "Bits", 10),
        ("OScaR", "HQMQ Table 3", 6),
    ],
)
def test_every_table_has_enough_figures(report: Any, paper: str, table: str, count: int) -> None:
    assert len(figures(report, paper, table)) >= count


@pytest.mark.scenario
def test_published_figures_are_copied_correctly(report: Any) -> None:
    """A few published figures are repeated here, so that a table that was copied incorrectly is noticed."""
    assert figures(report, "OCTOPUS", "Table 1")["b = 3, OCTOPUS: MSE"]["published"] == 0.0260
    assert figures(report, "OCTOPUS", "Needle")["b = 2, fp32: mass"]["published"] == 0.960
    assert figures(report, "TurboAngle", "Table 5")["mistral-7b, d = 128: K8V4-log bits"]["published"] == 6.56
    assert figures(report, "HQMQ", "Table 21")["s24_r3: bits per value with the scale"]["published"] == 3.17


@pytest.mark.parametrize(
    ("measured", "relation", "expected", "verdict"),
    [
        (1.0199, "=", None, "within"),
        (1.03, "=", None, "differs"),
        (0.97, "=", None, "differs"),
        (1.5, "=", around(1.51), "explained"),
        (1.5, "=", around(1.6), "differs"),
        (1.001, "=", around(1.5), "within"),
        (1.5, ">", None, "holds"),
        (0.9, ">", None, "differs"),
        (0.9, ">", (0.8, 1.0), "explained"),
        (0.9, "<", None, "holds"),
        (math.nan, "=", around(1.0), "differs"),
        (math.nan, "<", None, "differs"),
    ],
)
def test_verdicts_follow_from_the_deviation(measured: float, relation: str, expected: tuple[float, float] | None, verdict: str) -> None:
    row = Row("Table", "figure", measured, 1.0, relation, expected)
    assert row.verdict == verdict
    assert row.as_json()["measured"] == (None if math.isnan(measured) else measured)


def test_a_broken_codec_is_detected(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """If a decoder's output is off by a tenth, all figures of that paper's systems differ, and no others."""
    right = Scalar.decode_frame
    monkeypatch.setattr(Scalar, "decode_frame", lambda self, streams: 1.1 * right(self, streams))
    monkeypatch.setitem(fidelity.PAPERS, "octopus", ("OCTOPUS", octopus.SECTIONS[1:2]))
    assert main(["fidelity", "--only", "octopus", "--quick"]) == 1
    rows = fidelity.run(["octopus"], QUICK)["rows"]
    differing = {row["name"] for row in rows if row["verdict"] == "differs"}
    assert {f"b = 3, {system}: MSE" for system in ("TurboQuant-MSE", "TurboQuant-QJL")} <= differing
    assert not any("PolarQuant" in name or "OCTOPUS" in name for name in differing)
    assert "differs" in capsys.readouterr().out


def test_a_useless_correction_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Qjl, "correction", lambda self, streams: torch.zeros(*streams["qjl_norm"].shape, self.dim))
    rows = octopus.SECTIONS[0](QUICK)
    differing = {row.name for row in rows if row.verdict == "differs"}
    # Without it TurboQuant-QJL has the published error, which is that of its first stage.
    assert differing == {"b = 2, OCTOPUS-QJL: inner-product error"}


def test_bits_are_computed_from_the_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = codec("scalar:b=3")
    assert rate(chosen).total == 3.125
    assert (rate(chosen).codes, rate(chosen).counted) == (3.0, 3.125)
    wider = codec("scalar:b=3,seed=1")
    monkeypatch.setattr(Scalar, "scale_layouts", lambda self, *sizes: {"norm": Layout("F32", sizes)})
    assert rate(wider).total == 3.25


def test_the_additive_codebook_is_searched_exhaustively() -> None:
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    one = hqmq.additive(x, 4, 8, 5, unit=False)
    chunks = x.view(-1, 4)
    scale = chunks.norm(dim=-1)
    exact = (one.view(-1, 4) / scale[:, None] - chunks / scale[:, None]).square().sum(-1)
    assert (exact < 1.5).all()
    finer = hqmq.additive(x, 64, 8, 5, unit=True)
    assert (finer - x).square().mean() < (one - x).square().mean()


def refuse(name: str) -> NoReturn:
    raise AssertionError(f"{name} is not JSON")


@pytest.mark.scenario
def test_json_is_strict_and_reproducible(capsys: pytest.CaptureFixture[str]) -> None:
    printed = []
    for _ in range(2):
        assert main(["fidelity", "--only", "oscar", "--quick", "--seed", "7", "--json"]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    found = json.loads(printed[0], parse_constant=refuse)
    assert (found["seed"], found["quick"], found["tolerance"]) == (7, True, 0.02)
    assert {row["paper"] for row in found["rows"]} == {"OScaR"}
    assert sum(found["verdicts"].values()) == len(found["rows"])


@pytest.mark.scenario
def test_tables_are_printed(report: Any, capsys: pytest.CaptureFixture[str]) -> None:
    fidelity.show(report)
    out = capsys.readouterr().out
    for text in ("OCTOPUS, Table 1", "TurboAngle, Table 5", "explained [1]", "\n[1] ", f"{len(report['rows'])} numbers: "):
        assert text in out


def test_the_command_knows_every_paper(capsys: pytest.CaptureFixture[str]) -> None:
    for paper in fidelity.PAPERS:
        assert parser().parse_args(["fidelity", "--only", paper]).only == [paper]
    with pytest.raises(SystemExit, match="2"):
        main(["fidelity", "--only", "kivi"])
    assert "octopus" in capsys.readouterr().err


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_seeds_out_of_range_are_refused(seed: int) -> None:
    with pytest.raises(InvalidParameter, match=f"--seed is {seed}"):
        fidelity.run(settings=fidelity.Settings(seed))


def test_different_seeds_draw_different_keys() -> None:
    first, second = (fidelity.Settings(seed).generator(0) for seed in (0, 1))
    assert not torch.equal(torch.randn(8, generator=first), torch.randn(8, generator=second))
