"""FlashInfer gets the pages of the benchmark's keys and values. A stand-in attends to them, because FlashInfer needs a CUDA device."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvpack.bench import flashinfer_pages
from kvpack.errors import KvpackWarning


class Wrapper:
    """Attention over pages, with the arguments of ``flashinfer.BatchDecodeWithPagedKVCacheWrapper``."""

    def __init__(self, workspace: torch.Tensor, layout: str, *, use_tensor_cores: bool) -> None:
        assert layout == "NHD"

    def plan(
        self, begins: Any, indices: Any, last: Any, q_heads: int, heads: int, dim: int, page: int, *, q_data_type: Any, kv_data_type: Any
    ) -> None:
        self.begins, self.indices, self.last, self.page, self.dtype = begins, indices, last, page, kv_data_type

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        result = []
        for number, (begin, end) in enumerate(zip(self.begins[:-1], self.begins[1:], strict=True)):
            tokens = (int(end - begin) - 1) * self.page + int(self.last[number])
            assert all(pages.dtype == self.dtype for pages in kv)
            k, v = (pages[self.indices[begin:end]].to(q.dtype).flatten(0, 1)[:tokens].transpose(0, 1)[None] for pages in kv)
            result.append(torch.nn.functional.scaled_dot_product_attention(q[number][None, :, None], k, v, enable_gqa=True)[:, :, 0])
        return torch.cat(result)


@pytest.fixture
def shape(monkeypatch: pytest.MonkeyPatch) -> tuple[torch.Tensor, list[torch.Tensor]]:
    monkeypatch.setattr(flashinfer_pages, "installed_version", lambda: "0.5.3")
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(BatchDecodeWithPagedKVCacheWrapper=Wrapper))
    generator = torch.Generator().manual_seed(0)
    q, *kv = (torch.randn(2, heads, tokens, 64, generator=generator).bfloat16() for heads, tokens in ((4, 1), (2, 37), (2, 37)))
    return q, kv


def test_pages_contain_all_tokens(shape: tuple[torch.Tensor, list[torch.Tensor]]) -> None:
    q, kv = shape
    expected = torch.nn.functional.scaled_dot_product_attention(q, *kv, enable_gqa=True)[:, :, 0]
    found = {name: (size, [call() for call in calls]) for name, size, calls in flashinfer_pages.decode_calls(q, kv, lambda size: 2)}
    assert {name: size for name, (size, _) in found.items()} == {"FlashInfer bf16": 37888, "FlashInfer fp8": 18944}
    for name, limit in (("FlashInfer bf16", 0.01), ("FlashInfer fp8", 0.1)):
        outputs = found[name][1]
        assert len(outputs) == 2
        assert all((output.float() - expected.float()).norm() < limit * expected.float().norm() for output in outputs)


def test_a_dtype_that_does_not_run_is_left_out(shape: tuple[torch.Tensor, list[torch.Tensor]], monkeypatch: pytest.MonkeyPatch) -> None:
    def plan(self: Wrapper, *_: object, kv_data_type: torch.dtype, **__: object) -> None:
        raise RuntimeError(f"no kernel for {kv_data_type}")

    monkeypatch.setattr(Wrapper, "plan", plan)
    with pytest.warns(KvpackWarning, match="does not run: no kernel for"):
        assert list(flashinfer_pages.decode_calls(*shape, lambda size: 1)) == []


def test_without_flashinfer_there_are_no_calls(
    shape: tuple[torch.Tensor, list[torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flashinfer_pages, "installed_version", lambda: None)
    assert list(flashinfer_pages.decode_calls(*shape, lambda size: 1)) == []
