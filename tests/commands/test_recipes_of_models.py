"""Tests of ``kvpack recipes --model``, which computes the size of a model's caches from its configuration alone."""

from __future__ import annotations

import json
import re
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import kvpack
from kvpack import cli
from kvpack.models import LayerShape, cache_shapes
from support import hub_cache
from support.klt_bases import balanced_basis

TINYLM = Path(str(files("kvpack.demo") / "tinylm"))


def rows(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    assert cli.main(["recipes", *map(str, words), "--json"]) == 0
    return {row["name"]: row for row in json.loads(capsys.readouterr().out)["recipes"]}


def packed(shapes: list[LayerShape | None], tokens: int, recipe: str) -> kvpack.Cache:
    pairs = []
    for layer in shapes:
        assert layer is not None
        held = tokens if layer.window is None else min(tokens, layer.window)
        made = [torch.randn(1, layer.heads, held, dim, dtype=torch.bfloat16) for dim in (layer.dim_k, layer.dim_v)]
        pairs.append(kvpack.pack([(made[0], made[1])], recipe))
    return kvpack.Cache(layers=tuple(cache[0] for cache in pairs), recipe=pairs[0].recipe)


@pytest.fixture
def gemma(tmp_path: Path) -> Path:
    """Return the folder of a configuration in which every second layer has a sliding window."""
    types = ["sliding_attention", "full_attention"] * 2
    transformers.Gemma2Config(
        vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
        sliding_window=128, layer_types=types, architectures=["Gemma2ForCausalLM"],
    ).save_pretrained(tmp_path / "gemma")  # fmt: skip
    return tmp_path / "gemma"


def test_bytes_equal_those_of_a_packed_cache(capsys: pytest.CaptureFixture[str]) -> None:
    shapes = cache_shapes(TINYLM)
    found = rows(capsys, "--model", TINYLM, "--tokens", 300)
    assert found.keys() >= {"octopus-4", "kivi-2", "lossless"}
    # Presets of other models.
    assert "mixedkv-phi-1.5" not in found
    for name in ("octopus-4", "kivi-2", "fp8"):
        cache = packed(shapes, 300, name)
        assert (found[name]["bytes"], found[name]["bits_per_value"]) == (cache.nbytes, cache.bits_per_value)
    assert (found["octopus-4"]["layers"], found["octopus-4"]["heads"], found["octopus-4"]["dim"]) == (4, 1, 64)


def test_a_recipe_without_its_basis_does_not_hide_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["recipes", "klt-2", "kvpack-4"]) == 2
    shown = capsys.readouterr()
    assert "kvpack-4 " in shown.out
    assert "klt-2 " not in shown.out
    assert shown.err.startswith("kvpack: recipe 'klt-2' needs a basis: ")
    assert cli.main(["recipes", "klt-2"]) == 2
    assert capsys.readouterr().out == ""


def test_the_list_is_short_and_narrow(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["recipes"]) == 0
    output = capsys.readouterr().out
    assert max(map(len, output.splitlines())) <= 80
    assert [line.split()[0] for line in output.splitlines() if line.startswith((" lossless ", " kvpack-4 ", " transform-1 "))] == [
        "lossless", "kvpack-4", "transform-1",
    ]  # fmt: skip
    assert "octopus" not in output
    assert cli.main(["recipes", "--all"]) == 0
    everything = capsys.readouterr().out
    assert {" octopus-3 ", " klt-1.75 ", " transform-1 "} <= set(re.findall(r"^ [\w.-]+ ", everything, re.MULTILINE))
    assert "boundary-1" in everything


def test_exact_recipes_lose_nothing_and_others_are_measured_or_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["recipes", "lossless", "bf16", "kvpack-3", "fp16", "kv=scalar:b=5"]) == 0
    shown = capsys.readouterr().out
    losses = {line.split()[0]: line.split()[-1] for line in shown.splitlines() if line.startswith((" lossless", " bf16", " kv", " fp16"))}
    measured = losses.pop("kvpack-3")
    assert losses == {"lossless": "0", "bf16": "0", "fp16": "-", "kv=scalar:b=5": "-"}
    assert 0.001 < float(measured) < 0.01
    assert "-: not measured there" in shown


def test_the_loss_without_a_basis_is_not_shown_with_one(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "x.kvbasis"
    path.write_bytes(balanced_basis(dict.fromkeys(range(4), (2, 64)), 4))
    for options, expected in (([], True), (["--basis", str(path)], False)):
        found = rows(capsys, "kvpack-3", "octopus-3", *options)
        assert [found[name]["kl_divergence"] is not None for name in ("kvpack-3", "octopus-3")] == [expected, True]


def test_recipes_that_need_a_basis_show_their_measured_bits(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["recipes"]) == 0
    (row,) = (line.split() for line in capsys.readouterr().out.splitlines() if line.startswith(" transform-1 "))
    assert row[-4:] == ["1.11", "*", "-", "0.0141"]
    assert cli.main(["recipes", "--json"]) == 0
    found = {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)["calibrated"]}
    assert found["transform-1"]["measured_bits"] == pytest.approx(1.11, abs=0.005)
    for names in (["transform-1"], ["transform-1", "kvpack-3"], ["transform-1", "--all"]):
        assert cli.main(["recipes", *names]) == 0
        shown = capsys.readouterr()
        assert ("1.11 *" in shown.out, " kvpack-3 " in shown.out, shown.err) == (True, "kvpack-3" in names, "")
    assert cli.main(["recipes", "transform-1", "klt-2", "kvpack-3"]) == 2
    shown = capsys.readouterr()
    assert "1.11 *" in shown.out
    assert " kvpack-3 " in shown.out
    assert shown.err.startswith("kvpack: recipe 'klt-2' needs a basis: ")


def test_the_assumed_dtype_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    for recipe, is_named in (("lossless", True), ("kv=lossless:dtype=fp16", False), ("kvpack-4", False)):
        assert cli.main(["recipes", recipe]) == 0
        assert ("estimated for bf16 values" in capsys.readouterr().out) == is_named, recipe


def test_text_is_wrapped_on_a_narrow_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["recipes", "octopus-3-scaled", "--all"]
    monkeypatch.setenv("COLUMNS", "40")
    assert cli.main(words) == 0
    piped = capsys.readouterr().out
    assert "OCTOPUS keys, group-quantized values, for keys with outlier channels" in piped
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert cli.main(words) == 0
    wrapped = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert "OCTOPUS keys, values" not in wrapped
    assert max(map(len, wrapped.splitlines())) < max(map(len, piped.splitlines()))
    assert sorted(wrapped.replace("─", "").split()) == sorted(piped.replace("─", "").split())


def test_layers_with_a_window_store_only_its_tokens(gemma: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shapes = cache_shapes(gemma)
    assert shapes == [LayerShape(2, 64, 64, 128), LayerShape(2, 64, 64, None)] * 2
    words = ["--model", gemma, "--tokens", 1000]
    found = rows(capsys, "octopus-4", *words, "--recipe", "kivi-2")
    assert list(found) == ["octopus-4", "kivi-2"]
    values = 2 * 2 * 2 * 64 * (1000 + 128)
    assert found["octopus-4"]["bytes"] == pytest.approx(values * found["octopus-4"]["bits_per_value"] / 8)
    assert 4.5 < found["octopus-4"]["bits_per_value"] < 5.5
    assert cli.main(["recipes", *map(str, words)]) == 0
    output = capsys.readouterr().out
    assert "2 layers of 2 heads of dim 64 with a window of 128 tokens, 2 layers of 2 heads of dim 64" in output


def test_a_hub_name_does_not_need_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    hub_cache.go_offline(tmp_path, monkeypatch)
    (hub_cache.add_model(tmp_path, "someone/tiny") / "model.safetensors").unlink()
    assert rows(capsys, "octopus-4", "--model", "someone/tiny")["octopus-4"]["layers"] == 4
    assert cli.main(["recipes", "--model", "someone/other"]) == 3
    assert "download it with 'hf download someone/other config.json' on" in capsys.readouterr().err


def test_a_shape_along_with_a_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert rows(capsys, "octopus-4", "--model", TINYLM, "--layers", 4)["octopus-4"]["layers"] == 4
    assert cli.main(["recipes", "--model", str(TINYLM), "--dim", "128"]) == 2
    assert "--dim is 128, but the caches of" in capsys.readouterr().err
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    assert cli.main(["recipes", "--model", str(tmp_path)]) == 2
    assert "pass --layers, --heads and --dim" in capsys.readouterr().err
