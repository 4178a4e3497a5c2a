"""The guides run from top to bottom as they stand, and print what they show."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvpack import formats

from markdown_examples import run_examples  # isort: skip

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "kvpack" / "guides"
GUIDES = ("save-and-continue", "share-prefixes", "pick-a-recipe", "write-a-reader", "write-a-codec")


def test_the_index_names_every_guide() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.md")) == sorted([*GUIDES, "README"])
    index = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert [guide for guide in re.findall(r"\]\(([\w-]+)\.md\)", index) if guide in GUIDES] == list(GUIDES)


@pytest.mark.parametrize("guide", GUIDES)
def test_a_guide_prints_what_it_shows(guide: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A guide that reads the conformance vectors finds them as in a clone of the repository.
    (tmp_path / "spec").symlink_to(ROOT / "spec")
    monkeypatch.chdir(tmp_path)
    # One of them registers a codec.
    known = dict(formats.CODECS)
    try:
        run_examples(FOLDER / f"{guide}.md")
    finally:
        formats.CODECS.clear()
        formats.CODECS.update(known)


@pytest.mark.parametrize("guide", [*GUIDES, "README"])
def test_links_of_a_guide_lead_somewhere(guide: str) -> None:
    text = (FOLDER / f"{guide}.md").read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)]+)\)", text):
        if "://" not in link:
            assert (FOLDER / link.partition("#")[0]).exists(), link
