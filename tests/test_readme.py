"""The README's examples run, and its table is what the code gives."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, Qwen2Config, Qwen2ForCausalLM

import kvpack
from kvpack.coding.presets import PUBLISHED
from kvpack.coding.recipes import Recipe
from kvpack.commands.recipes import rates

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    first, second, third, fourth = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(first, "README.md", "exec"), names)
    assert f"{names['cache'].nbytes:,} bytes" in capsys.readouterr().out
    assert (tmp_path / "prompt.kvpack").stat().st_size == names["cache"].nbytes
    names["model"], names["token_ids"] = _model(), torch.arange(1, 45)[None]
    kvpack.save(kvpack.pack(_prefilled(names["model"], names["token_ids"][:, :40]), "octopus-3"), "model.kvpack")
    exec(compile(second, "README.md", "exec"), names)
    assert names["model"].config._attn_implementation == "kvpack"
    names["token_ids"] = torch.arange(300)[None] % 50
    kvpack.save(kvpack.pack(_prefilled(names["model"], names["token_ids"]), "octopus-3"), "model.kvpack")
    exec(compile(third, "README.md", "exec"), names)
    assert names["n"] == names["cache"].tokens == 256
    pytest.importorskip("obstore")
    exec(compile(fourth, "README.md", "exec"), names)
    assert names["store"].match(names["token_ids"]) == 256


def _model() -> Any:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen2Config(**sizes, head_dim=32, vocab_size=50, bos_token_id=0, eos_token_id=None, pad_token_id=0)
    return Qwen2ForCausalLM(config).eval()


def _prefilled(model: Any, token_ids: torch.Tensor) -> DynamicCache:
    cache = DynamicCache()
    with torch.inference_mode():
        model(token_ids, past_key_values=cache)
    return cache


def _rows() -> dict[str, list[str]]:
    rows = re.findall(r"^\| `([\w.-]+)` \|(.*)\|$", README, re.MULTILINE)
    return {name: [cell.strip() for cell in cells.split("|")] for name, cells in rows}


def test_the_table_is_there() -> None:
    assert len(_rows()) >= 8


@pytest.mark.parametrize("preset", _rows())
def test_the_bits_are_honest(preset: str) -> None:
    source, nominal, stored = _rows()[preset]
    assert source == PUBLISHED[preset].source
    nominal_bits, stored_bits = rates(Recipe(preset), layers=32, heads=8, tokens=4096, dim=128)
    assert (nominal, stored) == (f"{nominal_bits:.2f}", f"{stored_bits:.2f}")
    # The rates of a cache that is not made are those of one that is.
    x = torch.randn(1, 2, 300, 128, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    cache = kvpack.pack((x, x), preset)
    assert (cache.nominal_bits, cache.bits_per_value) == pytest.approx(rates(Recipe(preset), layers=1, heads=2, tokens=300, dim=128))


def test_links_lead_somewhere() -> None:
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link]
    assert len(links) > 5
    for link in links:
        assert (Path(__file__).parent.parent / link).exists(), link
