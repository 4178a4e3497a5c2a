"""kvpack bench pages."""

from __future__ import annotations

import json

import pytest
import torch

from kvpack import cli
from kvpack.bench import pages
from kvpack.errors import InvalidParameter


def test_the_report_compares_jobs_with_the_kernels(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "HEADS", 1)
    threads = torch.get_num_threads()
    assert cli.main(["bench", "pages", "--pages", "2", "--recipe", "kivi-4", "--recipe", "raw", "--repeats", "1", "--json"]) == 0
    assert torch.get_num_threads() == threads
    report = json.loads(capsys.readouterr().out)
    assert [row["recipe"] for row in report["rows"]] == ["kivi-4", "raw"]
    assert report["rows"][0]["row_bytes"] < report["rows"][1]["row_bytes"]
    assert all(row[name] > 0 for row in report["rows"] for name in ("encode", "decode", "encode_of_kernels", "decode_of_kernels"))
    pages.show(report)
    assert "2 pages of 4 layers x 1 heads x 128 tokens x 128, one thread" in capsys.readouterr().out
    with pytest.raises(InvalidParameter, match="--pages is 0"):
        pages.run(0)
