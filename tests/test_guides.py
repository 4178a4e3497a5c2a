"""The guides' examples run from top to bottom and print what the guides show; tables match the code."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import kvpack
from kvpack import formats
from kvpack.bench import real_model
from kvpack.cli import parser
from kvpack.coding.presets import PUBLISHED
from kvpack.coding.recipes import Recipe
from kvpack.commands.recipes import _equal_layers, recipe_sizes
from support.markdown_examples import blocks, run_examples

ROOT = Path(__file__).resolve().parents[1]
needs_redis = pytest.mark.skipif(shutil.which("redis-server") is None, reason="redis-server is not installed")
FOLDER = ROOT / "kvpack" / "guides"
GUIDES = (
    "resume-a-chat",
    "prefix-cache-for-workers",
    "pick-a-recipe",
    "command-line",
    "inspect-and-convert",
    "write-a-codec",
    "vllm",
    "chats-in-detail",
    "save-and-continue",
    "share-prefixes",
    "workers-in-detail",
    "measure-recipes",
    "codecs-and-recipes",
    "transformers",
    "serving-engines",
    "view-a-file",
    "limits",
    "results",
    "write-a-reader",
    "codec-with-options",
)


def test_the_index_names_every_guide() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.md")) == sorted([*GUIDES, "README"])
    index = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert [guide for guide in re.findall(r"\]\(([\w-]+)\.md\)", index) if guide in GUIDES] == list(GUIDES)


RECIPES, COMMANDS = ((FOLDER / f"{guide}.md").read_text(encoding="utf-8") for guide in ("codecs-and-recipes", "command-line"))
EXAMPLES = [guide for guide in GUIDES if re.search(r"^```(python|sh)$", (FOLDER / f"{guide}.md").read_text(encoding="utf-8"), re.MULTILINE)]
MARKS = {"workers-in-detail": [pytest.mark.scenario, needs_redis]}
COMPOSE: dict[str, Any] = {
    "name": str,
    "services": {
        "redis": {
            "image": str,
            "command": [str],
            "healthcheck": {"test": [str], "interval": "[0-9]+s", "timeout": "[0-9]+s", "retries": int},
        },
        "worker": {
            "image": str,
            "build": {"dockerfile_inline": str},
            "command": [str],
            "environment": {"KVPACK_STORE": str},
            "volumes": ["[^:]+:[^:]+:ro"],
            "deploy": {"replicas": int},
            "depends_on": {"redis": {"condition": "service_healthy"}},
        },
    },
}
"""The keys of the compose file, all of which are in the Compose Specification's schema, and its rules for their values."""


def fits(value: Any, form: Any) -> bool:
    """Return True if a value has exactly the keys of ``form``, with its types and patterns."""
    if isinstance(form, dict):
        return isinstance(value, dict) and value.keys() == form.keys() and all(fits(value[key], form[key]) for key in form)
    if isinstance(form, list):
        return isinstance(value, list) and bool(value) and all(fits(one, form[0]) for one in value)
    if isinstance(form, type):
        return type(value) is form
    return isinstance(value, str) and re.fullmatch(form, value) is not None


def test_the_compose_file_starts_the_services_of_the_guide() -> None:
    yaml = pytest.importorskip("yaml")
    compose = yaml.safe_load((FOLDER / "compose.yaml").read_text(encoding="utf-8"))
    assert fits(compose, COMPOSE)
    assert not fits({**compose, "version": "3"}, COMPOSE)
    guide = (FOLDER / "workers-in-detail.md").read_text(encoding="utf-8")
    redis, worker = compose["services"]["redis"], compose["services"]["worker"]
    assert " ".join(redis["command"][3:]) in guide
    assert worker["deploy"]["replicas"] == len(re.findall(r"for number in ([\d ]+);", guide)[0].split())
    assert worker["volumes"] == ["./worker.py:/app/worker.py:ro"]
    steps = worker["build"]["dockerfile_inline"].splitlines()
    # PyTorch's CPU build comes first, so that kvpack's dependencies find it.
    assert [step.rpartition(" ")[2] for step in steps[1:]] == ["https://download.pytorch.org/whl/cpu", "'kvpack[redis,transformers]'"]
    assert worker["environment"]["KVPACK_STORE"].startswith("redis://redis:")


@pytest.mark.scenario
@pytest.mark.usefixtures("chat_model")
@pytest.mark.parametrize("guide", [pytest.param(guide, marks=MARKS.get(guide, ())) for guide in EXAMPLES])
def test_a_guides_examples_print_what_it_shows(guide: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A guide that reads the conformance vectors finds them as in a clone of the repository.
    (tmp_path / "spec").symlink_to(ROOT / "spec")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    # One of them registers codecs in modules of its own.
    known = dict(formats.CODECS)
    try:
        run_examples(FOLDER / f"{guide}.md", has_hub_model=False)
    finally:
        for name in ("acme", "ternary"):
            sys.modules.pop(name, None)
        formats.CODECS.clear()
        formats.CODECS.update(known)


@pytest.mark.parametrize("path", [*(FOLDER / f"{guide}.md" for guide in EXAMPLES), ROOT / "README.md"], ids=lambda path: path.stem)
def test_examples_use_no_argument_that_warns(path: Path) -> None:
    """transformers 5.24 warns about the older argument name for caches, and earlier versions do not have the newer one."""
    for block in blocks(path):
        if block.language == "python":
            assert not re.search(r"\bpast_key_values\b|\bcache=", block.text), block.line


@pytest.mark.scenario
@pytest.mark.skipif(not (real_model.model_folder() / "config.json").is_file(), reason=f"needs the real model: {real_model.COMMAND}")
@pytest.mark.parametrize("path", [FOLDER / "resume-a-chat.md", FOLDER / "chats-in-detail.md", ROOT / "README.md"], ids=lambda p: p.stem)
def test_chat_examples_run_with_the_model_that_they_name(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "HuggingFaceTB").mkdir()
    (tmp_path / "HuggingFaceTB" / "SmolLM2-135M-Instruct").symlink_to(real_model.model_folder())
    monkeypatch.chdir(tmp_path)
    run_examples(path)


@pytest.mark.parametrize("guide", [*GUIDES, "README"])
def test_links_of_a_guide_are_valid(guide: str) -> None:
    text = (FOLDER / f"{guide}.md").read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)]+)\)", text):
        if "://" not in link:
            assert (FOLDER / link.partition("#")[0]).exists(), link


def _rows(columns: int) -> dict[str, list[str]]:
    """Yield the rows that begin with a name in code, of tables with this many columns; measured quality is not included."""
    found = re.findall(r"^\| `([\w.-]+)` \|(.*)\|$", RECIPES.partition("## Quality")[0], re.MULTILINE)
    rows = [(name, [cell.strip() for cell in cells.split("|")]) for name, cells in found]
    return {name: cells for name, cells in rows if len(cells) == columns - 1}


def test_tables_are_present() -> None:
    assert len(_rows(4)) >= 8
    assert set(_rows(3)) == set(formats.CODECS)


@pytest.mark.parametrize("preset", _rows(4))
def test_bits_in_guides_are_correct(preset: str) -> None:
    source, nominal, stored = _rows(4)[preset]
    assert source == PUBLISHED[preset].source
    nominal_bits, stored_bits, _ = recipe_sizes(Recipe(preset), _equal_layers(layers=32, heads=8, tokens=4096, dim=128))
    assert (nominal, stored) == (f"{nominal_bits:.2f}", f"{stored_bits:.2f}")
    # The rates of a cache that is not made are those of one that is.
    x = torch.randn(1, 2, 300, 128, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    cache = kvpack.pack((x, x), preset)
    # What entropy coding takes is known for normally distributed values only nearly.
    near = 2e-3 if preset == "lossless" else None
    expected = recipe_sizes(Recipe(preset), _equal_layers(layers=1, heads=2, tokens=300, dim=128))[:2]
    assert (cache.nominal_bits, cache.bits_per_value) == pytest.approx(expected, near)


def test_every_command_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    block = re.search(r"^```text\n(kvpack inspect .*?)^```", COMMANDS, re.DOTALL | re.MULTILINE)
    assert block is not None
    commands = re.search(r"^commands:\n(.*)", parser().format_help(), re.DOTALL | re.MULTILINE)
    assert commands is not None
    assert set(re.findall(r"^kvpack (\w+)", block[1], re.MULTILINE)) == set(re.findall(r"^    (\w+)", commands[1], re.MULTILINE))
    with pytest.raises(SystemExit):
        parser().parse_args(["bench", "--help"])
    benches = re.findall(r"^    (\w+) ", capsys.readouterr().out, re.MULTILINE)
    assert set(re.findall(r"^kvpack bench (\w+)", block[1], re.MULTILINE)) == set(benches)
