"""Every architecture works over packed caches without loss, or is refused in one sentence; the README tells which."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import warm_python
from model_zoo import FOLLOWING, PROMPT, STEPS, Row, Subject, examined, table
from zoo_models import ZOO

README = Path(__file__).parents[2] / "README.md"


pytestmark = pytest.mark.scenario


@pytest.fixture(scope="module")
def rows(tmp_path_factory: Any) -> list[Row]:
    """What ``python tests/support/model_zoo.py`` prints."""
    return examined(ZOO, tmp_path_factory.mktemp("zoo"), warm_python.python(*warm_python.MODELS))


def test_nothing_is_wrong(rows: list[Row]) -> None:
    assert {row.name: row.wrong for row in rows if row.wrong} == {}


def test_every_step_works_or_is_refused_in_one_sentence(rows: list[Row]) -> None:
    assert len(rows) >= 20
    for row in rows:
        assert sorted([*row.works, *row.refused]) == sorted(STEPS)
        for why in row.refused.values():
            assert why
            assert "\n" not in why
            assert "Traceback" not in why


def test_most_architectures_work_in_every_step(rows: list[Row]) -> None:
    assert len([row for row in rows if not row.refused]) >= 20
    assert all({"pack", "save", "load", "continue", "beam", "generate"} <= set(row.works) for row in rows)


def test_readme_has_the_table(rows: list[Row]) -> None:
    assert table(rows) in README.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["Llama", "Gemma-2", "DeepSeek-V3", "T5"])
def test_the_logits_would_tell_another_cache(name: str, tmp_path: Path) -> None:
    """The tolerance is far below what one other token of the prompt changes."""
    with torch.no_grad():
        subject = Subject(next(architecture for architecture in ZOO if architecture.name == name), tmp_path)
        other = PROMPT.clone()
        other[0, -3] += 1
        past = subject.forward(other, subject.empty()).past_key_values
        difference = float((subject.forward(FOLLOWING, past).logits - subject.expected).abs().max())
    assert difference > 20 * subject.tolerance
