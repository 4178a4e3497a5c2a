"""Tests of ``kvpack bench attend``."""

from __future__ import annotations

import json
import os

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from kvpack import cli
from kvpack.bench import attend
from kvpack.formats.errors import InvalidParameter
from kvpack.kernels.cpu.library import THREADS


def test_the_report_compares_recipes_with_dense_attention(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(THREADS, "3")
    threads = torch.get_num_threads()
    words = ["--tokens", "100", "--tokens", "33", "--recipe", "kivi-2", "--recipe", "kivi-4;tail=32", "--repeats", "1"]
    assert cli.main(["bench", "attend", *words, "--json"]) == 0
    assert torch.get_num_threads() == threads
    report = json.loads(capsys.readouterr().out)
    assert [table["tokens"] for table in report["tables"]] == [100, 33]
    dense, *_, narrow, wide = report["tables"][0]["rows"]
    assert (dense["name"], dense["bytes"], dense["of_bf16"]) == ("bf16 by matrix products", 2 * 8 * 100 * 128 * 2, 1.0)
    assert (narrow["name"], wide["name"]) == ("kivi-2", "kivi-4;tail=32")
    assert narrow["bytes"] < wide["bytes"] < dense["bytes"]
    assert narrow["error"] > wide["error"] > 0
    assert os.environ[THREADS] == "3"
    attend.show(report)
    shown = capsys.readouterr().out
    assert "100 tokens, one query, 32/8 heads x 128, one thread" in shown
    assert f"Attention with {report['backend']}." in shown


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(InvalidParameter, match="--tokens is 0, expected an integer from 1"):
        attend.run([0])
    with pytest.raises(InvalidParameter, match="--repeats is 0"):
        attend.run([1], repeats=0)
    with pytest.raises(InvalidParameter):
        attend.run([1], ["nonsense"])


def test_matrix_products_compute_attention() -> None:
    q, k, v = torch.randn(2, 8, 1, 16), *(torch.randn(2, 2, 33, 16) for _ in range(2))
    expected = scaled_dot_product_attention(q, k, v, enable_gqa=True)
    torch.testing.assert_close(attend.matmul_attention(q, k, v), expected.view(2, 2, 4, 16))
