"""Every public name has an example in its docstring, and the examples run."""

from __future__ import annotations

import ast
import doctest
import inspect
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch

import kvpack
import kvpack.formats
from kvpack.coding import recipes
from support.caches import random_pairs
from support.klt_bases import random_basis

CODEC_NAMES = (
    "base.Codec", "codec_class", "codec_from_params", "columns.Columns", "columns.default_fields", "create_codec",
    "encoding_blocks.encode_by_rows", "family.CodecFamily", "options.Options", "parameter_checks.check_choice",
    "parameter_checks.check_fields", "parameter_checks.check_range", "rotation.Rotation", "runs.Run", "runs.RunEncoder",
    "streams.Layout", "token_norms.stored_norm",
)  # fmt: skip
"""Names of ``kvpack.formats`` in the API reference."""
OPTIONS = doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL | doctest.NORMALIZE_WHITESPACE
NEEDS_A_MODEL = {"evaluate", "prefill"}


def text_of(name: str) -> str:
    """Return the docstring of a public name; that of PRESETS is below its assignment."""
    if name != "PRESETS":
        return inspect.getdoc(getattr(kvpack, name)) or ""
    body = ast.parse(inspect.getsource(recipes)).body
    place = next(i for i, node in enumerate(body) if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == name)
    node: Any = body[place + 1]
    return inspect.cleandoc(node.value.value)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the files that examples use."""
    folder = tmp_path_factory.mktemp("examples")
    kvpack.save(kvpack.pack(pairs(), "octopus-3"), folder / "prompt.kvpack")
    data = (folder / "prompt.kvpack").read_bytes()
    (folder / "truncated.kvpack").write_bytes(data[:-100])
    (folder / "damaged.kvpack").write_bytes(data[:-100] + bytes(byte ^ 1 for byte in data[-100:]))
    (folder / "notes.txt").write_text("not a cache")
    (folder / "model.kvbasis").write_bytes(random_basis({(layer, side): (2, 64) for layer in range(2) for side in "kv"}, 2))
    return folder


def pairs() -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(k.bfloat16(), v.bfloat16()) for k, v in random_pairs(2, 64, heads=2, dims=(64, 64))]


@pytest.mark.parametrize("name", kvpack.__all__)
def test_examples_of_public_names_run(name: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names: dict[str, Any] = {"kvpack": kvpack, "torch": torch, "past": pairs()}
    if name in NEEDS_A_MODEL:
        pytest.importorskip("transformers")
        from kvpack.models import load_model

        names["model"] = load_model()
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.chdir(tmp_path)
    run_examples(text_of(name), names, name)


@pytest.mark.parametrize("name", CODEC_NAMES)
def test_examples_of_the_codec_reference_run(name: str) -> None:
    text = inspect.getdoc(attrgetter(name)(kvpack.formats)) or ""
    run_examples(text, {"kvpack": kvpack, "torch": torch, "past": pairs()}, f"formats.{name}")


def run_examples(text: str, names: dict[str, Any], name: str) -> None:
    example = doctest.DocTestParser().get_doctest(text, names, name, None, None)
    assert example.examples, f"the docstring of kvpack.{name} has no example"
    report: list[str] = []
    failed, _ = doctest.DocTestRunner(optionflags=OPTIONS).run(example, out=report.append)
    assert not failed, "".join(report)
