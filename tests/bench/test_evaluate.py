"""Tests of ``kvpack.evaluate``, which measures a model in memory, and of how its table is shown in notebooks."""

from __future__ import annotations

import copy
from html.parser import HTMLParser
from typing import Any

import pytest
import torch

import kvpack
from kvpack.bench import quality
from kvpack.errors import InvalidParameter, InvalidType, MissingBasis
from kvpack.models import demo_text, load_model
from support.chat_tokenizers import tokenizer

TEXT = demo_text().decode()
SIZES = {"tokens": 96, "scored_tokens": 32, "windows": 2}


@pytest.fixture(scope="module")
def model() -> Any:
    return load_model()


@pytest.fixture(scope="module")
def found(model: Any) -> kvpack.bench.evaluate.Evaluation:
    return kvpack.evaluate(model, None, TEXT, ["octopus-3", "kivi-2"], **SIZES)


@pytest.mark.scenario
def test_results_equal_those_of_bench_quality(found: kvpack.bench.evaluate.Evaluation) -> None:
    settings = quality.QualitySettings(**SIZES, needles=0)
    expected = quality.run(None, None, ["octopus-3", "kivi-2"], settings, reference="fp8")
    for mine, theirs in zip(found.rows, expected["recipes"], strict=True):
        assert {name: theirs[name] for name in mine} == mine
    assert [row["recipe"] for row in found.rows] == ["fp8", "octopus-3", "kivi-2"]
    assert found.report["uncompressed"] == expected["uncompressed"]


class _Cells(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[str]] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_data(self, data: str) -> None:
        if self.rows and self.rows[-1]:
            self.rows[-1][-1] += data


def test_results_are_shown_as_html_and_text_tables(found: kvpack.bench.evaluate.Evaluation) -> None:
    cells = _Cells()
    cells.feed(found._repr_html_())
    head, *rows = cells.rows
    assert head[:2] == ["recipe", "bits pervalue"]
    assert [row[0] for row in rows] == ["uncompressed", "fp8", "octopus-3", "kivi-2", "past forgotten"]
    assert {len(row) for row in rows} == {len(head)}
    assert str(found) == repr(found)
    title, *lines = repr(found).splitlines()
    assert title == "tinylm, float32 on cpu, 1 text: 2 windows of 96 tokens, the last 32 scored"
    assert f"{found.rows[1]['kl_divergence']:.5f}" in lines[3].split()
    assert lines[3].startswith("octopus-3 ")
    bits = found.rows[1]["bits_per_value"]
    assert f"{bits:.2f} {16 / bits:.2f} x " in " ".join(lines[3].split())
    odd = kvpack.bench.evaluate.Evaluation({**found.report, "model": "<script>"})
    assert "<script>" not in odd._repr_html_()


def test_uncompressed_bits_use_the_models_dtype(model: Any, found: kvpack.bench.evaluate.Evaluation) -> None:
    half = copy.deepcopy(model).to(torch.bfloat16)
    sizes = SIZES | {"tokens": 64, "scored_tokens": 16, "windows": 1}
    reports = (found, kvpack.evaluate(half, None, TEXT, "kivi-2", reference=None, **sizes))
    rows = [next(line.split() for line in str(report).splitlines() if line.startswith("uncompressed")) for report in reports]
    assert [row[1] for row in rows] == ["32.00", "16.00"]


def test_the_model_is_left_unchanged(model: Any) -> None:
    steps: list[tuple[int, int]] = []
    kvpack.evaluate(model, None, [TEXT, "short", TEXT[600:]], "kivi-2", reference=None, **SIZES, progress=lambda *step: steps.append(step))
    assert steps[-1] == (4, 4) == (len(steps), 4)
    assert model.config._attn_implementation == "sdpa"
    with pytest.raises(InvalidParameter):
        kvpack.evaluate(model, None, TEXT, "kivi-2", tokens=10**6)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.scenario
def test_windows_come_from_all_texts(model: Any) -> None:
    texts = [TEXT[:300], "short", TEXT[300:]]
    sizes = {"tokens": 96, "scored_tokens": 32, "windows": 4, "reference": None}
    one = kvpack.evaluate(model, tokenizer(None), texts, "kivi-2", **sizes)
    assert (one.report["settings"]["windows"], one.report["text"]) == (4, "3 texts")
    again = kvpack.evaluate(model, tokenizer(None), texts, ["kivi-2"], **sizes)
    assert again.rows == one.rows
    other = kvpack.evaluate(model, tokenizer(None), texts, "kivi-2", **sizes, seed=1)
    assert other.rows != one.rows


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"model": "gpt2"}, InvalidType, "expected a transformers model, such as AutoModelForCausalLM.from_pretrained"),
        ({"texts": []}, InvalidType, r"texts is .*, expected a string or a list of strings"),
        ({"texts": [b"x"]}, InvalidType, "expected a string or a list of strings"),
        ({"recipes": "octopus-33"}, InvalidParameter, "did you mean octopus-3"),
        ({"recipes": "klt-1.75"}, MissingBasis, "needs a basis"),
        ({"tokens": 1}, InvalidParameter, "^tokens is 1, expected an integer from 2 to 2500 .the limit of the model"),
        ({"scored_tokens": 96}, InvalidParameter, "scored_tokens is 96, expected an integer from 1 to 95"),
        ({"windows": 100}, InvalidParameter, "windows is 100, expected an integer from 1 to 26"),
        ({"step": 0}, InvalidParameter, "step is 0"),
    ],
)
def test_wrong_arguments_are_refused(model: Any, change: dict[str, Any], error: type[Exception], message: str) -> None:
    given: dict[str, Any] = {"model": model, "texts": TEXT, "recipes": "kivi-2", **SIZES, **change}
    with pytest.raises(error, match=message):
        kvpack.evaluate(given.pop("model"), None, given.pop("texts"), given.pop("recipes"), **given)


def test_a_model_in_training_mode_is_refused(model: Any) -> None:
    model.train()
    try:
        with pytest.raises(InvalidParameter, match=r"in training mode, .*call model\.eval\(\)"):
            kvpack.evaluate(model, None, TEXT, "kivi-2", **SIZES)
    finally:
        model.eval()
