"""Tests of ``kvpack bench serve``: every row against transformers' own caches, and a file that names its model."""

from __future__ import annotations

import json
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch

import kvpack
from kvpack import cache_names
from kvpack.bench import serve, serve_cpu, serve_tables
from kvpack.formats.errors import InvalidParameter
from kvpack.integrations.transformers import KvpackCache
from kvpack.models import import_transformers
from support.hub_cache import go_offline

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="shapes for GPUs are too large for the CPU")


@pytest.mark.scenario
def test_the_table_has_rows_for_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    saved = []
    save = kvpack.save
    monkeypatch.setattr(kvpack, "save", lambda cache, path: (saved.append(cache.model), save(cache, path)))
    monkeypatch.setattr(serve_cpu, "STEPS", 2)
    threads = torch.get_num_threads()
    done: list[tuple[int, int]] = []
    report = serve.run("small", ["octopus-3"], [(2, 40)], [40], 1, str(tmp_path), str(tmp_path), lambda *now: done.append(now))
    assert done[-1] == (len(done), len(done))
    assert torch.get_num_threads() == threads
    assert [row["cache"] for row in report["decode"]] == ["DynamicCache", "octopus-3"]
    assert [row["from"] for row in report["first_token"]] == ["recompute", "dense safetensors", "octopus-3"]
    assert all(row["step_seconds"] > 0 and row["generate_seconds"] > 0 for row in report["decode"])
    assert saved[0]["config"]
    assert saved[0]["weights"]
    written = json.loads((tmp_path / "serve.json").read_text())
    assert written["decode"] == report["decode"]
    # As on a device.
    dense, packed = report["decode"]
    dense.update(step_seconds=2.0, generate_seconds=4.0, graph_seconds=1.0)
    packed.update(step_seconds=1.0, eager_seconds=3.0, generate_seconds=1.0, graph_seconds=0.5)
    report["decode"].insert(
        1, {**dense, "cache": "DynamicCache, flash", "step_seconds": 0.5, "generate_seconds": 0.5, "graph_seconds": None}
    )
    monkeypatch.setenv("COLUMNS", "240")
    serve_tables.show(report)
    (row,) = [line.split() for line in capsys.readouterr().out.splitlines() if "octopus-3" in line and "2 x 40" in line]
    assert [cell for cell in row[5:] if cell != "/"] == [
        *("1000.00", "0.50", "2.00"), *("3000.00", "1.50", "6.00"), *("1000.00", "0.25", "2.00", "1.00"), *("500.00", "0.50", "4"),
    ]  # fmt: skip


def test_a_failing_cache_becomes_a_row_without_ending_the_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The run measures steps as on a device, but without CUDA graphs."""
    monkeypatch.setattr(serve, "GENERATED", 2)
    monkeypatch.setattr(serve, "TIMED_STEPS", 1)
    model = serve.random_model("small", 1, "cpu", "fp32")

    def broken(error: Exception) -> Any:
        raise error

    with torch.no_grad():
        rows = serve._dense_rows(model, 1, 40, "cpu")
        for tokens, error in ((50, torch.OutOfMemoryError()), (60, ValueError("no such cache"))):
            monkeypatch.setattr(serve, "_dynamic_cache", lambda *_, error=error: broken(error))
            rows += serve._dense_rows(model, 1, tokens, "cpu")[:1]
    assert [row["cache"] for row in rows[:2]] == ["DynamicCache", "DynamicCache, flash"]
    assert all(row["step_seconds"] > 0 for row in rows[:2])
    assert rows[3]["error"] == "ValueError: no such cache"
    report = {"shape": "small", "layers": 1, "device": "a device", "dtype": "fp32", "weights_bytes": 1, "first_token": []}
    report["decode"] = [{"batch": 1, "tokens": tokens, **row} for tokens, row in zip((40, 40, 50, 60), rows, strict=True)]
    monkeypatch.setenv("COLUMNS", "240")
    serve_tables.show(report)
    printed = capsys.readouterr().out
    assert "1 x 60, DynamicCache: ValueError: no such cache" in printed
    assert ["1 x 60" in line for line in printed.splitlines() if "not timed" in line] == [True]
    (row,) = [line for line in printed.splitlines() if "1 x 50" in line and "DynamicCache" in line]
    assert row.rstrip().endswith("does not fit")


def test_a_failing_first_token_becomes_a_row(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken() -> None:
        raise ValueError("the file is gone\nand more")

    found = serve.call_seconds([lambda: None, broken], "no device")
    assert found[0][0] is not None
    assert found[1] == (None, "ValueError: the file is gone")
    row = {"tokens": 40, "suffix": 8}
    report = {"shape": "small", "layers": 1, "device": "a device", "dtype": "fp32", "weights_bytes": 1, "decode": []}
    report["first_token"] = [
        {**row, "from": "recompute", "seconds": 1.0},
        {**row, "from": "dense safetensors", "seconds": 2.0},
        {**row, "from": "octopus-3", "seconds": None, "error": found[1][1], "load_seconds": None},
    ]
    serve_tables.show(report)
    assert "40 + 8, octopus-3: ValueError: the file is gone" in capsys.readouterr().out


@pytest.mark.scenario
def test_shape_is_read_from_a_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sliding-window layer holds no more than its window, and every pass has the positions that follow all tokens."""
    monkeypatch.setattr(serve_cpu, "STEPS", 2)
    _, settings = serve.SHAPES["small"]
    library = import_transformers()
    options = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"] * 2, "vocab_size": 100}
    library.Gemma3TextConfig(**{**settings, **options}).save_pretrained(tmp_path)
    positions = []
    forward = library.Gemma3ForCausalLM.forward

    # With its signature, by which generate decides what to pass.
    @wraps(forward)
    def recorded(self: Any, *given: Any, **named: Any) -> Any:
        out = forward(self, *given, **named)
        positions.append(cache_names.cache_in(named).get_seq_length())
        return out

    monkeypatch.setattr(library.Gemma3ForCausalLM, "forward", recorded)
    report = serve.run(str(tmp_path / "config.json"), ["octopus-3"], [(1, 40)], [40], 2, None, None)
    assert report["layers"] == 2
    heads, dim = settings["num_key_value_heads"], settings["head_dim"]
    assert report["decode"][0]["cache_bytes"] == 2 * 2 * heads * dim * (40 + 15)
    steps = 2 * serve_cpu.STEPS * (serve_cpu.ROUNDS + 1)
    assert set(positions) == {*range(41, 41 + steps), 40 + serve.SUFFIX["cpu"]}


@pytest.mark.scenario
@pytest.mark.parametrize("given", [None, "fp16"])
def test_dtype_is_read_from_the_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str | None) -> None:
    monkeypatch.setattr(serve_cpu, "STEPS", 2)
    _, settings = serve.SHAPES["small"]
    import_transformers().LlamaConfig(**settings, dtype="float32").save_pretrained(tmp_path)
    report = serve.run(str(tmp_path), ["octopus-3"], [(1, 40)], [], 1, None, None, dtype=given)
    assert report["dtype"] == (given or "fp32")
    heads, dim = settings["num_key_value_heads"], settings["head_dim"]
    assert report["decode"][0]["cache_bytes"] == 2 * heads * dim * 40 * (2 if given else 4)


def test_the_dynamic_cache_uses_a_model_without_kvpack() -> None:
    """The dynamic cache's model shares the weights of kvpack's model, but not its hooks or its attention function."""
    model = serve.random_model("small", 1, "cpu", None)
    plain = serve_cpu.with_plain_attention(model)
    with KvpackCache(model, "octopus-3"):
        assert model.config._attn_implementation == "kvpack"
        assert plain.config._attn_implementation == "sdpa"
        assert model._forward_pre_hooks
        assert not plain._forward_pre_hooks
    for mine, own in zip(plain.parameters(), model.parameters(), strict=True):
        assert mine is own


def test_unknown_dtype_is_refused() -> None:
    with pytest.raises(InvalidParameter, match="dtype is 'float32', expected one of bf16, fp16, fp32"):
        serve.run("small", None, None, None, None, None, None, dtype="float32")


def test_layers_without_attention_are_refused(tmp_path: Path) -> None:
    import_transformers().Qwen3NextConfig(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"]).save_pretrained(
        tmp_path
    )
    with pytest.raises(InvalidParameter, match="linear_attention, but this benchmark draws random keys and values only"):
        serve.run(str(tmp_path), None, None, None, None, None, None)


def test_every_shape_except_hybrids_has_layers_that_can_be_drawn() -> None:
    hybrids = {"qwen3.5-9b", "small-hybrid"}
    for shape in hybrids:
        with pytest.raises(InvalidParameter, match=r"linear_attention, but .*: run make bench-resume in a clone of kvpack"):
            serve.random_model(shape, None, "cpu", None)
    for shape in serve.SHAPES.keys() - hybrids:
        config = serve._load_config(shape, None)
        assert len(serve._tokens_in_layers(config, 4096)) == config.num_hidden_layers
    kept = serve._tokens_in_layers(serve._load_config("gemma-3-12b", None), 4096)
    assert kept[:7] == [1023] * 5 + [4096, 1023]


def test_unknown_shape_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_offline(tmp_path, monkeypatch)
    with pytest.raises(InvalidParameter, match=r"shape is 'large', expected one of llama-3-8b, .*, or the path of a config\.json"):
        serve.run("large", None, None, None, None, None, None)
