"""The README's examples run, and its links lead to files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.markdown_examples import run_examples

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOB, RAW = "https://github.com/kvpack/kvpack/(?:blob|tree)/main/", "https://raw.githubusercontent.com/kvpack/kvpack/main/"


@pytest.mark.scenario
@pytest.mark.usefixtures("chat_model")
def test_the_examples_print_what_the_readme_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_examples(ROOT / "README.md", has_hub_model=False)


def test_links_lead_to_files() -> None:
    links = dict(re.findall(r"^\[([\w-]+)\]: (\S+)$", README, re.MULTILINE))
    assert len(links) > 5
    assert set(re.findall(r"\]\[([\w-]+)\]", README)) == set(links)
    inline = re.findall(r"\]\((https://github\.com/kvpack/kvpack/blob/[^)]+)\)", README)
    assert len(inline) > 3
    for link in (*links.values(), *inline):
        path = re.fullmatch(f"(?:{BLOB}|{RAW})([^#]+)(?:#.*)?", link)
        assert path is not None, link
        assert (ROOT / path[1]).exists(), link


@pytest.mark.parametrize("name", ["CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"])
def test_links_of_the_other_pages_lead_to_files(name: str) -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", (ROOT / name).read_text(encoding="utf-8"))
    assert links
    for link in links:
        assert "://" in link or (ROOT / link).exists(), link
