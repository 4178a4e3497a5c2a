"""The README's examples run, its tables are what the code gives, and its links lead to files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import kvpack
from kvpack import formats
from kvpack.cli import parser
from kvpack.coding.presets import PUBLISHED
from kvpack.coding.recipes import Recipe
from kvpack.commands.recipes import rates

from markdown_examples import run_examples  # isort: skip

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOB, RAW = "https://github.com/kvpack/kvpack/(?:blob|tree)/main/", "https://raw.githubusercontent.com/kvpack/kvpack/main/"


def test_the_examples_print_what_the_readme_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_examples(ROOT / "README.md")


def _rows(columns: int) -> dict[str, list[str]]:
    """The rows that begin with a name in code, of tables with so many columns."""
    found = re.findall(r"^\| `([\w.-]+)` \|(.*)\|$", README, re.MULTILINE)
    rows = [(name, [cell.strip() for cell in cells.split("|")]) for name, cells in found]
    return {name: cells for name, cells in rows if len(cells) == columns - 1}


def test_the_tables_are_there() -> None:
    assert len(_rows(4)) >= 8
    assert set(_rows(3)) == set(formats.CODECS)


@pytest.mark.parametrize("preset", _rows(4))
def test_the_bits_are_honest(preset: str) -> None:
    source, nominal, stored = _rows(4)[preset]
    assert source == PUBLISHED[preset].source
    nominal_bits, stored_bits = rates(Recipe(preset), layers=32, heads=8, tokens=4096, dim=128)
    assert (nominal, stored) == (f"{nominal_bits:.2f}", f"{stored_bits:.2f}")
    # The rates of a cache that is not made are those of one that is.
    x = torch.randn(1, 2, 300, 128, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    cache = kvpack.pack((x, x), preset)
    # What entropy coding takes is known for normally distributed values only nearly.
    near = 2e-3 if preset == "lossless" else None
    assert (cache.nominal_bits, cache.bits_per_value) == pytest.approx(rates(Recipe(preset), layers=1, heads=2, tokens=300, dim=128), near)


def test_links_lead_to_files() -> None:
    links = dict(re.findall(r"^\[([\w-]+)\]: (\S+)$", README, re.MULTILINE))
    assert len(links) > 5
    assert set(re.findall(r"\]\[([\w-]+)\]", README)) == set(links)
    for link in links.values():
        path = re.fullmatch(f"(?:{BLOB}|{RAW})([^#]+)(?:#.*)?", link)
        assert path is not None, link
        assert (ROOT / path[1]).exists(), link


def test_every_command_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    block = re.search(r"^```text\n(kvpack inspect .*?)^```", README, re.DOTALL | re.MULTILINE)
    assert block is not None
    commands = re.search(r"^commands:\n(.*)", parser().format_help(), re.DOTALL | re.MULTILINE)
    assert commands is not None
    assert set(re.findall(r"^kvpack (\w+)", block[1], re.MULTILINE)) == set(re.findall(r"^    (\w+)", commands[1], re.MULTILINE))
    with pytest.raises(SystemExit):
        parser().parse_args(["bench", "--help"])
    benches = re.findall(r"^    (\w+) ", capsys.readouterr().out, re.MULTILINE)
    assert set(re.findall(r"^kvpack bench (\w+)", block[1], re.MULTILINE)) == set(benches)


@pytest.mark.parametrize("name", ["CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"])
def test_links_of_the_other_pages_lead_to_files(name: str) -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", (ROOT / name).read_text(encoding="utf-8"))
    assert links
    for link in links:
        assert "://" in link or (ROOT / link).exists(), link
