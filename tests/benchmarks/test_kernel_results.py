"""The page of kernel results shows each row of the report, fastest first, with the machine and date."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from kvpack.bench import kernels


def report(**changes: object) -> dict[str, object]:
    def row(name: str, microseconds: float, error: float | None) -> dict[str, object]:
        seconds = microseconds / 1e6
        return {"recipe": name, "bytes": 2_500_000, "whole_seconds": seconds, "of_bf16": 0.5, "of_floor": 1.25, "error": error}

    rows = [row("SDPA cuDNN", 123.4, None), row("FlashInfer fp8", 61.0, None), row("octopus-3", 67.5, 1e-3)]
    table = {"name": "B", **kernels.SHAPES["B"]._asdict(), "rows": rows}
    return {
        "date": "2026-11-29", "device": "NVIDIA H200", "torch": "2.11.0", "triton": "3.6.0", "flashinfer": "0.5.3", "bytes_per_s": 4.3e12,
        "shapes": [table], **changes,
    }  # fmt: skip


def test_the_page_has_all_rows_and_the_machine(tmp_path: Path) -> None:
    path, out = tmp_path / "kernels.json", tmp_path / "page.md"
    path.write_text(json.dumps(report()))
    assert main(["kernel-results", str(path), "--out", str(out)]) == 0
    text = out.read_text()
    assert "NVIDIA H200, 2026-11-29, PyTorch 2.11.0, Triton 3.6.0, FlashInfer 0.5.3" in text
    assert "--peers --shape B --recipe octopus-3 --out DIR" in text
    assert "Not measured: A (1 x 28/4 x 128, 65,536 tokens); C (" in text
    assert [line for line in text.splitlines() if line.endswith(" | 0.50 | 1.25 |")] == [
        "| FlashInfer fp8 | 2.5 | 61.0 | 0.50 | 1.25 |",
        "| `octopus-3` | 2.5 | 67.5 | 0.50 | 1.25 |",
        "| SDPA cuDNN | 2.5 | 123.4 | 0.50 | 1.25 |",
    ]


def test_a_report_without_shapes_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "kernels.json"
    path.write_text(json.dumps(report(shapes=[])))
    assert main(["kernel-results", str(path), "--out", str(tmp_path / "page.md")]) == 2
    assert "the report has no date or no shapes" in capsys.readouterr().err
