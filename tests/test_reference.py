"""The API reference includes every public name."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import kvpack

FOLDER = Path(__file__).parents[1] / ".ci/docs/reference"
TEXT = "".join(path.read_text() for path in FOLDER.glob("*.rst"))
LISTED = set(re.findall(r"\.\. (?:autofunction|autoclass|py:data):: (?:[\w.]+\.)?(\w+)", TEXT))
BY_MODULE = {*kvpack.errors.__all__, "Identity", "Store", "Tier", "prefill"}
"""Modules that the reference includes as a whole."""


def test_there_are_few_public_names() -> None:
    assert len(kvpack.__all__) <= 40


@pytest.mark.parametrize("name", [*kvpack.__all__, *kvpack.pages.__all__])
def test_a_public_name_is_in_the_reference(name: str) -> None:
    assert name in LISTED | BY_MODULE
    value = getattr(kvpack if name in kvpack.__all__ else kvpack.pages, name)
    assert name == "PRESETS" or (value.__doc__ or "").strip()


@pytest.mark.parametrize("name", sorted({*kvpack.__all__} - {"PRESETS"}))
def test_a_public_name_is_described_with_an_example(name: str) -> None:
    value = getattr(kvpack, name)
    assert ">>> " in value.__doc__
    if inspect.isfunction(value) and inspect.signature(value).parameters:
        assert "Args:" in value.__doc__
