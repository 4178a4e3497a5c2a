"""Tests of the quality measurement: values compared with independent computations, statistics, plot, and refusals."""

from __future__ import annotations

import json
import math
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch.nn import functional
from transformers import (
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import kvpack
from kvpack import cli
from kvpack.bench import generated, needles, quality, quality_plot, summary
from kvpack.coding.recipes import PRESETS
from kvpack.evaluation import windows
from kvpack.evaluation.models import Text, bundled_bytes, read_text, window_starts
from kvpack.evaluation.twins import make_twin, offset_keys
from kvpack.formats import CODECS
from kvpack.formats.errors import InvalidParameter
from kvpack.models import demo_text, model_folder

RECIPES = ["bf16", "kivi-2", "kv=group:b=8,g=32"]
SETTINGS = quality.QualitySettings(tokens=512, scored_tokens=96, windows=2, needles=1)
TINY = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture(scope="module")
def report() -> Any:
    steps = []
    found = quality.run(None, None, RECIPES, SETTINGS, progress=lambda done, total: steps.append((done, total)))
    assert steps == [(number, 12) for number in range(1, 13)]
    return found


@pytest.fixture(scope="module")
def model() -> Any:
    with model_folder() as folder:
        return quality.load_model(folder)


@pytest.fixture(scope="module")
def exact(model: Any) -> windows.UncompressedResult:
    return windows.evaluate_uncompressed(model, torch.tensor([[256, *demo_text()[:416]]]), 96)


def by_recipe(report: Any) -> dict[str, Any]:
    return {row["recipe"]: row for row in report["recipes"]}


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: without_times(item) for name, item in value.items() if not name.endswith("_seconds")}
    return [without_times(item) for item in value] if isinstance(value, list) else value


def tiny_model(**more: Any) -> Any:
    torch.manual_seed(0)
    return Qwen2ForCausalLM(Qwen2Config(**{**TINY, "head_dim": 32, "vocab_size": 50, **more})).eval()


def test_uncompressed_perplexity_equals_that_of_one_pass_without_a_cache(report: Any, model: Any) -> None:
    model.set_attn_implementation("sdpa")
    losses = []
    for window in report["uncompressed"]["windows"]:
        text = [*demo_text()[window["start"] : window["start"] + 512]]
        with torch.inference_mode():
            logits = model(torch.tensor([[256, *text[:-1]]])).logits[0, -96:]
        losses.append(functional.cross_entropy(logits, torch.tensor(text[-96:])).item())
        assert window["log_perplexity"] == pytest.approx(losses[-1], abs=1e-4)
    assert report["uncompressed"]["perplexity"] == pytest.approx(math.exp(sum(losses) / 2), rel=1e-4)


def test_windows_do_not_overlap(report: Any) -> None:
    first, second = (window["start"] for window in report["uncompressed"]["windows"])
    assert 0 <= first <= first + 512 <= second <= len(demo_text()) - 512


def test_bf16_changes_almost_nothing_and_2_bits_change_a_lot(report: Any) -> None:
    rows = by_recipe(report)
    assert [row["recipe"] for row in report["recipes"]] == ["bf16", "kv=group:b=8,g=32", "kivi-2"]
    assert abs(rows["bf16"]["log_perplexity_difference"]) < 2e-3
    for name in ("kl_divergence", "attention_error"):
        assert 0 < rows["bf16"][name] < rows["kv=group:b=8,g=32"][name] < rows["kivi-2"][name]
    for name in ("k_cosine", "v_cosine"):
        assert 1.001 > rows["bf16"][name] > rows["kv=group:b=8,g=32"][name] > rows["kivi-2"][name] > 0.9
    assert rows["bf16"]["kl_divergence"] < 1e-4
    assert rows["kivi-2"]["log_perplexity_difference"] > 0.05
    assert rows["kivi-2"]["needles"]["right"] < report["uncompressed"]["needles"]["right"] <= rows["bf16"]["needles"]["right"]


def test_a_row_summarizes_its_windows(report: Any) -> None:
    exact = [window["log_perplexity"] for window in report["uncompressed"]["windows"]]
    for row in report["recipes"]:
        losses = [window["log_perplexity"] for window in row["windows"]]
        differences = [a - b for a, b in zip(losses, exact, strict=True)]
        assert row["perplexity"] == pytest.approx(math.exp(sum(losses) / 2))
        assert row["log_perplexity_difference"] == pytest.approx(sum(differences) / 2)
        low, high = row["log_perplexity_difference_interval"]
        assert high - low == pytest.approx(12.7062 * abs(differences[0] - differences[1]), rel=1e-3)
        assert row["kl_divergence"] == pytest.approx(sum(window["kl_divergence"] for window in row["windows"]) / 2)
        low, high = row["kl_divergence_interval"]
        assert (low + high) / 2 == pytest.approx(row["kl_divergence"])
        assert row["bits_per_value"] == pytest.approx(8 * row["windows"][0]["bytes"] / row["windows"][0]["values"])
        assert row["windows"][0]["values"] == 4 * 2 * 512 * 64
        assert len(row["by_layer"]["attention_error"]) == 4
        recall = row["needles"]
        assert recall["asked"] == len(recall["answers"]) == needles.LINES
        assert [part["from"] for part in recall["by_depth"]] == [0, 0.25, 0.5, 0.75]
        for part in recall["by_depth"]:
            answers = [answer["right"] for answer in recall["answers"] if part["from"] <= answer["depth"] < part["to"]]
            assert (part["right"], part["asked"]) == (sum(answers), len(answers))
        assert [(part["tokens"], part["right"]) for part in recall["by_length"]] == [(512 - needles.QUESTION_TOKENS, recall["right"])]


@pytest.mark.scenario
def test_passes_that_fit_the_raw_tail_see_packed_tokens(model: Any, exact: windows.UncompressedResult, tmp_path: Path) -> None:
    def divergence(step: int) -> float:
        cache = windows.packed_file(exact.prefix_pairs, "kv=scalar:b=2;tail=8", str(tmp_path / "window"))
        found = windows.evaluate_packed(model, exact, cache, step)
        assert found.cache.tokens == 416
        return found.kl_divergence

    # A pass within the tail is the same as one token after another; a longer one attends to its own tokens exactly.
    alone = divergence(1)
    assert divergence(8) == pytest.approx(alone, rel=1e-3)
    assert divergence(32) < 0.7 * alone
    assert divergence(96) < 0.5 * alone


def test_same_choice_counts_most_probable_tokens(exact: windows.UncompressedResult) -> None:
    found = exact.log_probabilities.clone()
    # The first choice becomes the last in 24 of 96 positions.
    found[torch.arange(24), found[:24].argmax(-1)] = -1e3
    assert windows.compare_predictions(exact, found)[2] == 0.75
    assert windows.compare_predictions(exact, exact.log_probabilities)[1:] == (0.0, 1.0)


def test_ratios_to_the_reference_are_paired_by_window() -> None:
    rows: list[dict[str, Any]] = [
        {"recipe": "a", "windows": [{"kl_divergence": 0.1}, {"kl_divergence": 10.0}]},
        {"recipe": "b", "windows": [{"kl_divergence": 0.2}, {"kl_divergence": 80.0}]},
    ]
    summary.add_ratios(rows, "a")
    assert rows[0]["of_reference"] == {"ratio": 1.0, "interval": [1.0, 1.0]}
    assert rows[1]["of_reference"]["ratio"] == pytest.approx(4.0)
    low, high = rows[1]["of_reference"]["interval"]
    assert math.log(high / low) == pytest.approx(2 * 12.7062 * math.log(2), rel=1e-3)
    summary.add_ratios(rows, None)
    assert [row["of_reference"] for row in rows] == [None, None]


def test_the_reference_is_measured() -> None:
    settings = quality.QualitySettings(tokens=128, scored_tokens=16, windows=2, needles=0)
    found = quality.run(None, None, ["kivi-2"], settings, reference="fp8")
    rows = by_recipe(found)
    assert set(rows) == {"kivi-2", "fp8"}
    assert rows["kivi-2"]["of_reference"]["ratio"] > 1 == rows["fp8"]["of_reference"]["ratio"]


def test_forgetting_the_past_is_the_upper_bound_of_errors(report: Any, model: Any, exact: windows.UncompressedResult) -> None:
    forgotten = report["forgotten"]
    assert forgotten["kl_divergence"] > max(row["kl_divergence"] for row in report["recipes"])
    assert forgotten["kl_divergence"] == pytest.approx(sum(window["kl_divergence"] for window in forgotten["windows"]) / 2)
    # With the whole past kept, nothing is forgotten; the positions are those of the text.
    assert windows.evaluate_forgotten(model, exact, exact.prefix_tokens).kl_divergence < 1e-6
    model.set_attn_implementation("sdpa")
    with torch.inference_mode():
        hidden = torch.full((1, 1, 96, 416), float("-inf"))
        hidden[..., :4] = 0
        hidden[..., 320:416] = torch.full((96, 96), float("-inf")).triu(1)
        logits = model(
            exact.tokens[:, 320:-1], past_key_values=DynamicCache(windows.prefill(model, exact.tokens[:, :320])), attention_mask=hidden
        ).logits[0]
    expected = functional.kl_div(
        functional.log_softmax(logits.double(), -1), exact.log_probabilities.double(), reduction="sum", log_target=True
    )
    assert windows.evaluate_forgotten(model, exact).kl_divergence == pytest.approx(float(expected) / 96, rel=1e-3)


def test_bytes_are_those_of_a_file_with_the_window(exact: windows.UncompressedResult, model: Any, tmp_path: Path) -> None:
    path = tmp_path / "window.kvpack"
    measured = windows.measure(model, exact, "octopus-3", str(path))
    assert measured.bytes == path.stat().st_size
    cache = kvpack.load(path)
    assert (cache.tokens, cache.values, cache.recipe) == (416, measured.values, kvpack.Recipe("octopus-3").text)
    # Everything is packed, and what was appended came from a model that read packed layers.
    assert all(side.tail.shape[2] == 0 for layer in cache for side in layer.sides.values())


def test_the_model_reads_the_values_stored_in_the_file(
    exact: windows.UncompressedResult, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = windows.measure(model, exact, "kivi-4", str(tmp_path / "a"))
    load = kvpack.load
    monkeypatch.setattr(kvpack, "load", lambda path, **_: load(path).convert("kv=group:b=1,g=32"))
    coarse = windows.measure(model, exact, "kivi-4", str(tmp_path / "b"))
    assert coarse.log_perplexity > plain.log_perplexity + 0.1
    assert coarse.kl_divergence > 10 * plain.kl_divergence
    assert min(coarse.attention_error) > 2 * max(plain.attention_error)


def test_errors_are_relative_to_dense_attention(exact: windows.UncompressedResult, model: Any, tmp_path: Path) -> None:
    measured = windows.measure(model, exact, "kivi-2", str(tmp_path / "window"))
    packed = [kvpack.pack((k[:, :, :320], v[:, :, :320]), "kivi-2")[0].append(k[:, :, 320:], v[:, :, 320:]) for k, v in exact.pairs]
    mask = torch.ones(96, 416, dtype=torch.bool).tril(320)
    for number, layer in enumerate(packed):
        seen = exact.recorded_attention[number]
        assert seen.query.shape == (1, 3, 96, 64)
        outputs = [
            functional.scaled_dot_product_attention(seen.query, k, v, mask, enable_gqa=True)
            for k, v in (exact.pairs[number], layer.unpack(torch.float32))
        ]
        torch.testing.assert_close(seen.output, outputs[0], rtol=1e-4, atol=1e-5)
        error = ((outputs[1] - outputs[0]).norm() / outputs[0].norm()).item()
        assert measured.attention_error[number] == pytest.approx(error, rel=0.02)
        cosine = functional.cosine_similarity(exact.pairs[number][0], layer.unpack(torch.float32)[0], dim=-1).mean().item()
        assert measured.k_cosine[number] == pytest.approx(cosine, abs=1e-3)


def test_the_divergence_equals_its_definition() -> None:
    logits = torch.randn(2, 150, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    p, q = logits.softmax(-1)
    expected = (p * (p / q).log()).sum(-1).mean().item()
    assert windows._kl_divergence(p.log().float(), q.log().float()) == pytest.approx(expected, rel=1e-5)


@pytest.mark.scenario
def test_the_same_seed_gives_the_same_result(report: Any) -> None:
    assert without_times(quality.run(None, None, RECIPES, SETTINGS)) == without_times(report)
    other = quality.run(None, None, ["bf16"], quality.QualitySettings(tokens=256, scored_tokens=8, windows=2, needles=0, seed=1))
    assert [window["start"] for window in other["uncompressed"]["windows"]] != window_starts(2500, 256, 2, 0)
    assert other["uncompressed"]["needles"] is other["recipes"][0]["needles"] is None


@pytest.mark.scenario
def test_one_window_has_no_interval(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = quality.run(None, None, ["bf16"], quality.QualitySettings(tokens=64, windows=1, needles=0), out=str(tmp_path))
    assert found["recipes"][0]["log_perplexity_difference_interval"] is None
    assert found["settings"]["score"] == 32
    quality.show(found)
    shown = capsys.readouterr().out
    assert "Needles" not in shown
    assert "Verdict: bf16 is good enough" in shown
    assert "One window is only a first look" in shown


def test_verdict_is_the_smallest_recipe_that_changes_few_tokens_of_every_text() -> None:
    def row(recipe: str, divergence: float, right: int = 90) -> dict[str, Any]:
        interval = None if divergence > 0.1 else [0.0, divergence]
        needles = {"right": right, "asked": 100, "interval": [right / 100 - 0.1, right / 100 + 0.1]}
        return {"recipe": recipe, "kl_divergence": divergence, "kl_divergence_interval": interval, "needles": needles}

    exact = {"needles": row("", 0.0)["needles"], "windows": [{}, {}]}
    others = [{"recipes": [row("fp8", 0.001), row("kvpack-4", 0.0015), row("octopus-3", 0.006)]}]
    recipes = [row("fp8", 0.001), row("kvpack-4", 0.001), row("octopus-3", 0.001), row("kvpack-2", 0.3), row("kivi-2", 0.0, right=60)]
    report = {"settings": {"max_kl": summary.MAX_KL}, "uncompressed": exact, "recipes": recipes, "others": others}
    lines = summary.verdict(report)
    assert [line.partition(":")[0] for line in lines] == ["fp8, kvpack-4", "octopus-3", "kvpack-2", "kivi-2", "Verdict"]
    assert "kvpack-4 is good enough" in lines[-1]
    assert "octopus-3 is good enough" in summary.verdict({**report, "settings": {"max_kl": 0.02}})[-1]
    assert "no recipe here has a KL of at most 0.005" in summary.verdict({**report, "recipes": recipes[2:]})[-1]


def test_verdict_names_recipes_whose_interval_alone_is_above_a_limit() -> None:
    rows = [
        {"recipe": name, "kl_divergence": middle, "kl_divergence_interval": [0.0, high], "needles": None}
        for name, middle, high in (("fp8", 0.001, 0.002), ("kvpack-4", 0.004, 0.0071), ("kvpack-3", 0.03, 0.04), ("kvpack-2", 0.04, 0.2))
    ]
    report = {"settings": {"max_kl": 0.005}, "uncompressed": {"needles": None, "windows": [{}, {}]}, "recipes": rows, "others": []}
    assert summary.verdict(report)[1:-1] == [
        "kvpack-4: above 0.005 only by its interval (its mean KL is 0.004, but the 95% interval ends at 0.0071). More windows narrow it.",
        "kvpack-3: KL of up to 0.04, so up to about 14% of tokens change.",
        "kvpack-2: KL of up to 0.2, so up to about 32% of tokens change.",
    ]


@pytest.mark.parametrize("limit", [0, -1.0, math.nan, math.inf, "0.01"])
def test_verdict_limits_that_are_not_positive_are_refused(limit: Any) -> None:
    with pytest.raises(kvpack.InvalidParameter, match=r"max_kl is .*expected a KL"):
        summary.check_max_kl(limit)


@pytest.mark.scenario
def test_preliminary_results_are_printed_immediately(tmp_path: Path) -> None:
    settings = quality.QualitySettings(tokens=1024, windows=2, needles=1, scored_tokens=16, generated=4)
    lines: list[str] = []
    quality.run(None, None, ["kivi-2"], settings, reference="fp8", show_line=lines.append)
    assert [line.partition(":")[0] for line in lines] == [
        "reading 2 windows of the demo's text; results follow after each",
        "the demo's text, window 1 of 2, mean KL",
        "the demo's text, window 2 of 2, mean KL",
        "needles (5 of 5 found without packing) found with packing",
        "share of generated tokens that changed",
    ]
    assert all(re.search(r": kivi-2 [\d.]+.*, fp8 [\d.]+", line) for line in lines[1:])


def bytes_text(data: bytes = b"") -> Text:
    return Text("bytes", (256,), data, is_byte_level=True, encode=lambda text: [*text.encode()])


def test_key_lines_are_planted_in_the_text() -> None:
    text = demo_text()[2000:].replace(b"[", b"(")
    prompt = needles.key_lines_prompt(bytes_text(), text, torch.Generator().manual_seed(3))
    assert len(prompt.ids) == len(text)
    planted = rest = bytes(prompt.ids)
    for question, value in prompt.questions:
        assert len(value) == 8
        line = bytes(question) + bytes(value) + b"]]\n"
        assert rest.count(line) == 1
        rest = rest.replace(line, b"")
    assert text.startswith(rest)
    for (question, _), depth in zip(prompt.questions, prompt.depths, strict=True):
        assert planted.index(bytes(question)) == round(depth * len(planted))
    again, other = (needles.key_lines_prompt(bytes_text(), text, torch.Generator().manual_seed(seed)) for seed in (3, 4))
    assert prompt == again != other


@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
def test_a_pass_key_is_planted_in_the_text(depth: float) -> None:
    text = demo_text()[2000:]
    prompt = needles.passkey_prompt(bytes_text(), text, depth, torch.Generator().manual_seed(3))
    assert len(prompt.ids) == len(text)
    ((question, value),) = prompt.questions
    line = b"\nThe pass key is%b. Remember it.%b is the pass key.\n" % (bytes(value), bytes(value))
    before, after = bytes(prompt.ids).split(line)
    assert text.startswith(before + after)
    assert len(before) == pytest.approx(depth * (len(text) - len(line)), abs=1)
    assert prompt.depths == (len(before) / len(text),)
    assert bytes(question).endswith(b"The pass key is")
    assert len(value) == 6


def test_an_answer_is_correct_if_every_token_is_the_first_choice() -> None:
    value = b"8J2K9XPL"

    class Answering:
        wrong, device = 0, "cpu"

        def __call__(self, tokens: torch.Tensor, past_key_values: Any) -> Any:
            assert bytes(tokens[0].tolist()) == b"\n[[key QWERTY = " + value[:-1]
            logits = torch.zeros(1, tokens.shape[1], 256)
            choices = bytearray(value)
            choices[self.wrong] ^= 1 if past_key_values == "other" else 0
            logits[0, torch.arange(-8, 0), torch.tensor([*choices])] = 1
            return type("Output", (), {"logits": logits})

    prompt = needles.NeedlePrompt((), ((tuple(b"\n[[key QWERTY = "), tuple(value)),), (0.0,))
    for Answering.wrong in range(8):
        assert needles.grade_answers(Answering(), prompt, lambda: "true") == [True]
        assert needles.grade_answers(Answering(), prompt, lambda: "other") == [False]


def test_recall_by_depth_and_length() -> None:
    asked = [*summary.NeedleAnswer.grade(100, [0.1, 0.3], [True, False]), *summary.NeedleAnswer.grade(200, [0.1, 0.99], [True, True])]
    found = summary.summarize_recall(asked)
    assert (found["right"], found["asked"]) == (3, 4)
    assert [(part["right"], part["asked"]) for part in found["by_depth"]] == [(2, 2), (0, 1), (0, 0), (1, 1)]
    assert [(part["tokens"], part["right"], part["asked"]) for part in found["by_length"]] == [(100, 1, 2), (200, 2, 2)]


@pytest.mark.scenario
def test_generated_text_equals_that_of_single_steps(model: Any, tmp_path: Path) -> None:
    prompt = torch.tensor([[256, *demo_text()[:63]]])
    exact = generated.generate(model, prompt, 40, seed=3)
    assert exact.tokens.shape == (1, 104)
    assert torch.equal(exact.tokens[:, :64], prompt)
    model.set_attn_implementation("sdpa")
    with torch.inference_mode():
        whole = model(exact.tokens[:, :-1]).logits[0, -40:].log_softmax(-1)
    torch.testing.assert_close(exact.log_probabilities, whole, rtol=1e-4, atol=1e-4)
    assert torch.equal(generated.generate(model, prompt, 40, seed=3).tokens, exact.tokens)
    assert not torch.equal(generated.generate(model, prompt, 40, seed=4).tokens, exact.tokens)
    # Over a lossless cache nothing changes; over a coarse one, what the same random numbers draw does.
    same = generated.measure_generation(model, exact, "bf16", str(tmp_path / "a"), 8, seed=3)
    assert (same.changed, same.first) == (0.0, None)
    coarse = generated.measure_generation(model, exact, "kv=group:b=1,g=32", str(tmp_path / "a"), 8, seed=3)
    assert sum(coarse.kl_divergences) > 100 * sum(same.kl_divergences)
    assert coarse.first is not None
    assert 1 / 40 <= coarse.changed <= (40 - coarse.first) / 40
    # Other random numbers draw other tokens, whatever the cache.
    assert generated.measure_generation(model, exact, "bf16", str(tmp_path / "a"), 8, seed=4).changed > 0.1


def test_sampled_tokens_are_as_frequent_as_predicted() -> None:
    predicted, numbers = torch.tensor([0.1, 0.6, 0.3]).log()[None], torch.Generator().manual_seed(0)
    drawn = torch.tensor([int(generated._sample_token(predicted, numbers)) for _ in range(3000)])
    assert (drawn.bincount() / 3000).tolist() == pytest.approx([0.1, 0.6, 0.3], abs=0.03)


def test_moved_keys_keep_the_function_and_hurt_coarse_codecs() -> None:
    sizes = quality.QualitySettings(tokens=256, scored_tokens=32, windows=2, needles=0)
    plain = quality.run(None, None, ["kv=scalar:b=3"], sizes)
    moved = quality.run(None, None, ["kv=scalar:b=3"], quality.QualitySettings(**{**vars(sizes), "offset": 10.0}))
    assert moved["offset"]["largest_logit_difference"] < 1e-4
    assert moved["uncompressed"]["perplexity"] == pytest.approx(plain["uncompressed"]["perplexity"], rel=1e-4)
    assert moved["forgotten"]["kl_divergence"] == pytest.approx(plain["forgotten"]["kl_divergence"], rel=1e-3)
    assert moved["recipes"][0]["kl_divergence"] > 2 * plain["recipes"][0]["kl_divergence"]


def test_moved_keys_reach_every_cache_of_the_model(model: Any) -> None:
    tokens = torch.tensor([[256, *demo_text()[:99]]])
    before = windows.prefill(model, tokens)
    try:
        offset_keys(model, 5.0, tokens, seed=0)
        after = windows.prefill(model, tokens)
        again = windows.uncompressed_cache(model, [(k[:, :, :60].clone(), v[:, :, :60].clone()) for k, v in after])
        with torch.inference_mode():
            model(tokens[:, 60:], past_key_values=again)
    finally:
        model.kvpack_key_offsets = None
    for (k, v), (moved, same), layer in zip(before, after, again.layers, strict=True):
        difference = moved - k
        torch.testing.assert_close(difference, difference[:, :, :1].expand_as(difference), rtol=1e-3, atol=1e-3)
        share = (difference[0, :, 0].abs() > 1e-3).double().mean().item()
        assert 0 < share < 0.5
        torch.testing.assert_close(v, same, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(layer.keys, moved, rtol=1e-3, atol=1e-3)


def test_scored_texts_share_no_passage_with_calibration_texts() -> None:
    words = {name: bundled_bytes(name).decode().split() for name in ("calibration", quality.TEXT, *quality.OTHER_TEXTS)}
    passages = {name: {tuple(found[first : first + 12]) for first in range(len(found) - 11)} for name, found in words.items()}
    calibrates = passages.pop("calibration")
    assert len(calibrates) > 20_000
    for name, scored in passages.items():
        assert len(scored) > 4_000
        assert not scored & calibrates, name
    assert not passages["prose"] & passages["long"]


def test_a_model_with_kvpacks_texts_is_recognized_by_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Without a tokenizer tokens are bytes.
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**TINY, vocab_size=257, max_position_embeddings=300)).save_pretrained(tmp_path / "m")
    sizes = quality.QualitySettings(tokens=96, scored_tokens=32, windows=2, needles=0, generated=20)
    found = quality.run(tmp_path / "m", None, ["kivi-2"], sizes, reference="fp8")
    assert found["text"] == "kvpack's prose"
    assert found["precision"] == "fp32 on a CPU"
    code, long = found["others"]
    assert (code["text"], code["settings"]["windows"], code["settings"]["tokens"]) == ("kvpack's code", 2, 96)
    assert (long["text"], long["settings"]["windows"], long["settings"]["tokens"]) == ("kvpack's long", 1, 300)
    for part in (code, long):
        rows = by_recipe(part)
        assert rows["kivi-2"]["of_reference"]["ratio"] > 1
        assert part["forgotten"]["kl_divergence"] > 0
    assert set(found["generated"]) == {"kivi-2", "fp8"}
    quality.show(found)
    shown = capsys.readouterr().out
    assert "kvpack's long: 1 window of 300 tokens" in shown
    assert "20 tokens that the uncompressed model generated" in shown


def test_device_and_offset_are_checked(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["bench", "quality", "--model", "demo", "--device", "cuda"]) == 2
    assert "--device is cuda, but PyTorch found no CUDA device" in capsys.readouterr().err
    assert cli.main(["bench", "quality", "--model", "demo", "--offset", "inf"]) == 2
    assert "--offset is inf" in capsys.readouterr().err


def test_the_twin_has_outliers_and_computes_the_same_function() -> None:
    sample = torch.arange(40)[None] % 50
    plain, twin = tiny_model(), tiny_model()
    for network in (plain, twin):
        torch.nn.init.normal_(network.model.layers[1].self_attn.k_proj.bias, generator=torch.Generator().manual_seed(0))
    assert make_twin(twin, 30.0, sample, seed=5) < 1e-4
    keys = []
    for network in (plain, twin):
        cache = DynamicCache()
        with torch.inference_mode():
            network(sample, past_key_values=cache)
        keys.append(cache.layers[1].keys.norm(dim=2)[0])
    ratio = keys[1] / keys[0]
    for head in ratio:
        outliers = (head > 15).nonzero().flatten()
        assert len(outliers) == 4
        assert outliers[:2].tolist() == (outliers[2:] - 16).tolist()
        torch.testing.assert_close(head[outliers], torch.full((4,), 30.0), rtol=1e-3, atol=0.0)
        assert (head < 1.001).sum() == 28


def test_the_twin_of_a_model_that_normalizes_keys_is_refused() -> None:
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**TINY, head_dim=32, vocab_size=50)).eval()
    with pytest.raises(InvalidParameter, match=r"logits differ from the model's by .* of the largest logit, but the limit is 1\.0e-03"):
        make_twin(model, 30.0, torch.arange(40)[None], 0)
    with pytest.raises(InvalidParameter, match="whose layers have k_proj and q_proj, but no layer"):
        make_twin(torch.nn.Linear(2, 2), 30.0, torch.arange(40)[None], 0)


def test_a_model_with_a_tokenizer_is_measured(tmp_path: Path) -> None:
    words = {"<s>": 0, "<unk>": 1, **{f"w{number}": number + 2 for number in range(48)}}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>").save_pretrained(tmp_path)
    # transformers gives Qwen2 folders a tokenizer of their own, whatever is in them.
    LlamaForCausalLM(LlamaConfig(**TINY, vocab_size=50)).save_pretrained(tmp_path)
    text = tmp_path / "text"
    text.write_text("<s> " + " ".join(f"w{number % 48}" for number in range(200)))
    read = read_text(str(text), tmp_path, 50)
    assert (read.start, list(read.ids[:3]), len(read.ids), read.is_byte_level) == ((0,), [2, 3, 4], 200, False)
    found = quality.run(str(tmp_path), str(text), ["kivi-4"], quality.QualitySettings(tokens=64, scored_tokens=32))
    assert found["settings"]["windows"] == 3
    assert found["settings"]["needles"] == 0
    assert found["recipes"][0]["perplexity"] == pytest.approx(found["uncompressed"]["perplexity"], rel=0.01)
    with pytest.raises(InvalidParameter, match="--needles is 1, expected 0 prompts"):
        quality.run(str(tmp_path), str(text), ["kivi-4"], quality.QualitySettings(tokens=64, needles=1))


def test_a_model_that_cannot_read_bytes_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_model().save_pretrained(tmp_path)
    assert cli.main(["bench", "quality", "--model", str(tmp_path)]) == 2
    assert "has no tokenizer" in capsys.readouterr().err
    assert cli.main(["bench", "io", "--model", str(tmp_path)]) == 2


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--tokens", "1"], 2, "--tokens is 1, expected an integer from 2 to 2500"),
        (["--tokens", "2501"], 2, "--tokens is 2501"),
        (["--tokens", "512", "--score", "512"], 2, "--score is 512, expected an integer from 1 to 511 in a window"),
        (
            ["--tokens", "512", "--windows", "5"],
            2,
            "--windows is 5, expected an integer from 1 to 4 (the number of 512-token windows in the demo's text): pass a longer text",
        ),
        (["--tokens", "512", "--needles", "5"], 2, "--needles is 5, expected an integer from 0 to 4"),
        (["--tokens", "100", "--needles", "1"], 2, "--needles is 1, expected 0 prompts"),
        (["--step", "0"], 2, "--step is 0, expected an integer from 1 to 1024"),
        (["--twin", "0"], 2, "--twin is 0.0"),
        (["--recipe", "kivi-5"], 2, "recipe 'kivi-5'"),
        (["--model", "/nowhere"], 3, "/nowhere has no config.json"),
        (["--text", "/nowhere"], 3, "/nowhere: could not be opened"),
        (["--out", "/dev/null/x"], 3, "/dev/null/x: could not be created"),
    ],
    ids=["tokens", "more tokens", "score", "windows", "needles", "room", "step", "twin", "recipe", "model", "text", "out"],
)
def test_invalid_arguments_are_refused(words: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "quality", "--model", "demo", "--generate", "0", *words]) == code
    assert capsys.readouterr().err.startswith(f"kvpack: {message}")


def test_an_empty_text_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text").touch()
    assert cli.main(["bench", "quality", "--model", "demo", "--text", str(tmp_path / "text")]) == 2
    assert "text has 0 tokens, which is less than a window: pass a longer text" in capsys.readouterr().err


def test_the_default_recipes_are_at_most_18_presets() -> None:
    assert set(quality.RECIPES) <= set(PRESETS)
    assert len(quality.RECIPES) <= 18


@pytest.mark.scenario
def test_the_command_saves_its_report_and_plots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--tokens", "400", "--score", "32", "--windows", "2", "--needles", "1", "--generate", "40"]
    words = ["bench", "quality", "--model", "demo", *sizes, "--recipe", "kivi-2", "--twin", "8"]
    assert cli.main([*words, "--json", "--out", str(tmp_path)]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "quality.json").read_text())
    assert printed["twin"]["factor"] == 8
    assert printed["twin"]["largest_logit_difference"] < 1e-4
    assert (tmp_path / "quality.png").read_bytes().startswith(b"\x89PNG")
    assert "kivi-2" in (tmp_path / "quality.svg").read_text()
    quality.show(printed)
    shown = capsys.readouterr().out
    line = next(line for line in shown.splitlines() if line.strip().startswith("kivi-2"))
    row = by_recipe(printed)["kivi-2"]
    assert f"{row['perplexity']:.4f}" in line
    assert f"{row['of_reference']['ratio']:.3g}" in line
    assert f"{100 * row['same_choices']:.1f}%" in line
    assert "of 5" in line
    assert "at most 32 in a pass" in shown
    assert "its twin with key channels x 8" in shown
    assert "past forgotten" in shown
    assert "75 to 100%" in shown


def rows_of(divergences: dict[float, list[float]]) -> list[dict[str, Any]]:
    return [
        {"bits_per_value": bits, "kl_divergence": sum(found) / len(found), "windows": [{"kl_divergence": value} for value in found]}
        for bits, found in divergences.items()
    ]


def test_the_front_uses_only_significant_differences() -> None:
    scatter = [0.9, 1.0, 1.1, 1.0]
    rows = rows_of(
        {
            2.0: [1.0 * part for part in scatter],
            # Better in half of the windows.
            2.5: [0.9, 1.1, 1.0, 0.97],
            # Better in all.
            3.0: [0.5 * part for part in scatter],
            # Dearer than the one before, and no better.
            4.0: [0.5 * part for part in reversed(scatter)],
            # Compared with 3.0, not with 4.0.
            5.0: [0.49, 0.5, 0.54, 0.49],
            16.0: [1e-7 * part for part in scatter],
        }
    )
    summary.mark_pareto_front(rows[::-1])
    assert [row["bits_per_value"] for row in rows if row["on_front"]] == [2.0, 3.0, 16.0]


def test_the_front_of_one_window_uses_its_values() -> None:
    rows = rows_of({2.0: [1.0], 3.0: [1.1], 4.0: [0.9], 16.0: [0.0]})
    summary.mark_pareto_front(rows)
    assert [row["on_front"] for row in rows] == [True, False, True, True]


def cluttered(spread: float) -> Any:
    """Return a report in which the results of several recipes are close together."""
    values = numpy.random.default_rng(1).normal(size=(12, 2))
    rows = [
        {
            "recipe": f"recipe-{number}",
            "family": list(quality_plot.STYLES)[number % 7] if number > 1 else f"new {number}",
            "bits_per_value": 3 * math.exp(0.2 * x),
            "kl_divergence": 0.0 if number == 11 else 0.01 * math.exp(spread * abs(y)),
            "kl_divergence_interval": None if number % 2 else (-0.001, 0.2),
            "on_front": number < 3,
        }
        for number, (x, y) in enumerate(values.tolist())
    ]
    settings = {"windows": 3, "score": 10, "tokens": 100}
    kind = {"model": "m", "precision": "fp32 on a CPU", "twin": {"factor": 30}, "offset": None, "inserted": "<s>"}
    return {**kind, "settings": settings, "forgotten": {"kl_divergence": 0.1}, "recipes": rows}


def test_a_token_is_planted_in_the_middle_of_the_packed_part(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    read, exactly = [], quality.evaluate_uncompressed
    monkeypatch.setattr(
        quality, "evaluate_uncompressed", lambda model, tokens, scored_tokens: read.append(tokens) or exactly(model, tokens, scored_tokens)
    )
    sizes = quality.QualitySettings(tokens=64, scored_tokens=16, windows=2, needles=0)
    for settings in (sizes, replace(sizes, inserted="\x01")):
        report = quality.run(None, None, ["kv=scalar:b=2"], settings)
    assert report["cpu_seconds"] > 0
    quality.show(report)
    shown = capsys.readouterr().out
    assert "\x01 in the middle of the packed tokens" in shown
    assert f"took {report['cpu_seconds'] / 60:.1f} minutes of CPU time" in shown
    for before, after in zip(read[:2], read[2:], strict=True):
        assert (before != after).nonzero().tolist() == [[0, 24]]
        assert after[0, 24] == 1
    with pytest.raises(InvalidParameter, match="--insert is 'ab', which is 2 tokens for the model: pass the text of exactly one token"):
        quality.run(None, None, ["fp8"], replace(sizes, inserted="ab"))


@pytest.mark.parametrize("spread", [1e-4, 0.05, 3.0], ids=["one line", "narrow", "wide"])
def test_the_plot_labels_every_recipe_and_contains_all_intervals(spread: float) -> None:
    figure = quality_plot.figure(cluttered(spread))
    figure.draw_without_rendering()
    (axes,), renderer = figure.axes, figure.canvas.get_renderer()
    legend = axes.get_legend()
    assert [text.get_text() for text in legend.get_texts()] == ["past forgotten", "Pareto front", *(f"recipe-{n}" for n in range(12))]
    # Beside the axes, and within the figure.
    box, inside = legend.get_window_extent(renderer), axes.get_window_extent(renderer)
    assert inside.x1 < box.x0
    assert box.x1 <= figure.bbox.x1
    assert figure.bbox.y0 <= box.y0
    styles = {(line.get_color(), line.get_marker()) for line in axes.lines if str(line.get_label()).startswith("recipe-")}
    assert len(styles) == 12
    low, high = axes.get_ylim()
    ends = [y for bars in axes.collections for segment in bars.get_segments() for _, y in segment]
    assert len(ends) == 12
    assert all(low * 0.999 <= y <= high * 1.001 for y in ends)


def test_narrow_plots_have_labels_next_to_the_points() -> None:
    report = cluttered(0.05)
    for number, row in enumerate(report["recipes"]):
        row.update(bits_per_value=2.0**number, kl_divergence=10.0**-number)
    # So close to the next one that the name does not fit between them.
    report["recipes"][3].update(bits_per_value=15.0, kl_divergence=1.1e-4)
    figure = quality_plot.import_figure_module().Figure(figsize=(5.6, 4.2))
    axes = figure.subplots()
    quality_plot.plot(axes, report, narrow=True)
    assert axes.get_legend() is None
    sides = {text.get_text(): text.get_ha() for text in axes.texts}
    assert sides.pop("past forgotten") == "left"
    assert [name for name, side in sides.items() if side == "right"] == ["recipe-3", "recipe-11"]
    assert len(sides) == 12
    assert all(text.xyann[1] > 0 for text in axes.texts)
    # The name of recipe-2, further left, is at the height of recipe-3.
    report["recipes"][2].update(bits_per_value=7.0, kl_divergence=1.2e-4)
    axes = figure.subplots()
    quality_plot.plot(axes, report, narrow=True)
    assert [text.get_text() for text in axes.texts if text.xyann[1] < 0] == ["recipe-3"]


def test_every_codec_has_its_own_color() -> None:
    assert set(quality_plot.STYLES) == set(CODECS)
    colors = [color for color, _ in (*quality_plot.STYLES.values(), quality_plot.OTHER_STYLE)]
    assert len(set(colors)) == len(colors)
    assert [summary.key_codec(recipe) for recipe in ("klt-1.75", "transform-0.6")] == ["klt", "transform"]


@pytest.mark.scenario
def test_one_report_gives_one_plot(tmp_path: Path) -> None:
    for name in ("a", "b"):
        quality_plot.save_plot(cluttered(0.05), tmp_path / name)
    for suffix in (".png", ".svg"):
        assert (tmp_path / f"a{suffix}").read_bytes() == (tmp_path / f"b{suffix}").read_bytes()
    assert "recipe-11" in (tmp_path / "a.svg").read_text()


def test_works_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert cli.main(["bench", "quality", "--model", "demo", "--out", str(tmp_path)]) == 3
    assert capsys.readouterr().err == "kvpack: the plot needs matplotlib: pip install 'kvpack[bench]'\n"
