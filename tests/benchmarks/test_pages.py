"""Tests of the page benchmark."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import device_pages, pages
from benchmarks.__main__ import main
from kvpack.errors import InvalidParameter


def test_the_report_compares_jobs_with_the_kernels(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "HEADS", 1)
    threads = torch.get_num_threads()
    assert main(["pages", "--pages", "2", "--recipe", "kivi-4", "--recipe", "raw", "--repeats", "1", "--json"]) == 0
    assert torch.get_num_threads() == threads
    report = json.loads(capsys.readouterr().out)
    assert [row["recipe"] for row in report["rows"]] == ["kivi-4", "raw"]
    assert report["rows"][0]["row_bytes"] < report["rows"][1]["row_bytes"]
    assert all(row[name] > 0 for row in report["rows"] for name in ("encode", "decode", "encode_of_kernels", "decode_of_kernels"))
    pages.show(report)
    assert "2 pages of 4 layers x 1 heads x 128 tokens x 128, one thread" in capsys.readouterr().out
    with pytest.raises(InvalidParameter, match="pages is 0"):
        pages.run(0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is present")
def test_a_missing_device_is_named() -> None:
    with pytest.raises(InvalidParameter, match="--device is 'cuda', but PyTorch found no CUDA device: use --device cpu"):
        device_pages.run(1)


@pytest.mark.cuda
def test_device_report_compares_jobs_with_a_copy(capsys: pytest.CaptureFixture[str]) -> None:
    report = device_pages.run(2, ["kivi-4", "latents: k=octahedral:b=4;v=raw"])
    names = ("encode", "decode", "encode_in_a_row", "decode_in_a_row")
    for row in report["rows"]:
        assert row["error"] < 0.1
        assert row["path"] == "device"
        assert all(row[name] > 0 for name in names)
    device_pages.show(report)
    assert "2 pages of 4 layers" in capsys.readouterr().out
