"""transformers architectures run losslessly over packed caches, or are refused with a one-sentence reason.

One in six architectures is run here. ``make zoo`` runs all of them and writes the page that lists the results.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from support import shared_folders, warm_python
from support.model_zoo import FOLLOWING, PAGE, PROMPT, STEPS, ZOO, Architecture, Row, Subject, examine_all, parse_table, table
from support.tiny_configs import tiny_config

NOT_RUN = {
    "cpmant": "it puts a prompt of its own before the tokens",
    "gemma3n": "its images need timm",
    "gemma4_assistant": "it needs the keys and values of another model",
    "gemma4_unified_assistant": "it needs the keys and values of another model",
    "musicgen": "its configuration is not the one that its class for text takes",
    "musicgen_melody": "its configuration is not the one that its class for text takes",
    "nemo_speechlm (sequence to sequence)": "it needs audio",
    "prophetnet": "after the first pass it takes one token at a time",
    "prophetnet (sequence to sequence)": "after the first pass it takes one token at a time",
    "vibevoice_asr (sequence to sequence)": "it needs audio",
    "voxtral_realtime (sequence to sequence)": "it needs audio",
}
"""Architectures that transformers itself cannot run at tiny sizes, with the reason.

An architecture that is neither here nor in ``tiny_configs`` is new.
"""


EVERY = 6

pytestmark = pytest.mark.scenario


@pytest.fixture(scope="module")
def rows(tmp_path_factory: Any) -> list[Row]:
    """Return the output of ``python -m support.model_zoo`` for these models.

    It takes a quarter of a minute, so one worker runs it for all tests.
    """

    def examine(folder: Path) -> None:
        rows = examine_all(ZOO[::EVERY], folder, warm_python.python(*warm_python.MODELS), share=4)
        (folder / "rows.json").write_text(json.dumps([asdict(row) for row in rows]), encoding="utf-8")

    found = shared_folders.shared_folder(tmp_path_factory, "zoo", examine) / "rows.json"
    return [Row(**row) for row in json.loads(found.read_text(encoding="utf-8"))]


def test_no_step_gives_a_wrong_result(rows: list[Row]) -> None:
    assert {row.name: row.wrong for row in rows if row.wrong} == {}


def test_every_step_works_or_is_refused_with_one_sentence(rows: list[Row]) -> None:
    for row in rows:
        assert sorted([*row.works, *row.refused]) == sorted([] if row.not_run else STEPS)
        for why in row.refused.values():
            assert why
            assert "\n" not in why
            assert "Traceback" not in why


def test_all_architectures_run_except_listed_ones(rows: list[Row]) -> None:
    assert {row.name for row in rows if row.not_run} <= NOT_RUN.keys()
    assert len([row for row in rows if not row.not_run]) >= 200 // EVERY


def test_most_architectures_work_in_every_step(rows: list[Row]) -> None:
    assert len([row for row in rows if row.works == list(STEPS)]) >= 160 // EVERY
    most = {"pack", "save", "load", "continue", "beam", "generate"}
    assert len([row for row in rows if most <= set(row.works)]) >= 180 // EVERY


def test_the_page_lists_all_architectures(rows: list[Row]) -> None:
    text = PAGE.read_text(encoding="utf-8")
    if f"transformers {transformers.__version__}," not in text:
        pytest.skip("the page was written for another version of transformers")
    stated = parse_table(text)
    assert stated.keys() == {architecture.name for architecture in ZOO}
    assert {row.name for row in rows if stated[row.name] != parse_table(table([row]))[row.name]} == set()


@pytest.mark.parametrize("name", ["llama", "gemma2", "deepseek_v3", "t5"])
def test_logits_would_reveal_another_cache(name: str, tmp_path: Path) -> None:
    """The tolerance is far smaller than the effect of changing one token of the prompt."""
    kind = "AutoModelForSeq2SeqLM" if name == "t5" else "AutoModelForCausalLM"
    with torch.no_grad():
        subject = Subject(Architecture(name, kind), tmp_path)
        other = PROMPT.clone()
        other[0, -3] += 1
        past = subject.forward(other, subject.empty()).past_key_values
        difference = float((subject.forward(FOLLOWING, past).logits - subject.expected).abs().max())
    assert difference > 20 * subject.tolerance


@pytest.mark.parametrize("model_type", ["t5", "bart", "pegasus", "whisper", "blenderbot"])
def test_tiny_encoders_have_more_layers_than_decoders(model_type: str) -> None:
    config = tiny_config(model_type)
    encoder, decoder = (getattr(config, name, None) for name in ("encoder_layers", "decoder_layers"))
    assert (encoder or config.num_layers, decoder or config.num_decoder_layers) == (3, 2)


@pytest.mark.parametrize("model_type", ["gemma3_text", "gpt_oss", "qwen3_next", "gemma4_text"])
def test_tiny_models_have_a_layer_of_each_type(model_type: str) -> None:
    types = transformers.CONFIG_MAPPING[model_type]().layer_types
    assert set(tiny_config(model_type).layer_types) == set(types)
    assert tiny_config(model_type).num_hidden_layers <= 4
