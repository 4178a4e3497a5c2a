"""Every tensor that kvpack creates has an explicit device and dtype, independent of the caller's defaults."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import kvpack
from kvpack.formats.tables import cache_per_device

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(kvpack.__file__).parents[1]
FOLDERS = ("kvpack", "kernels", "formats")
EXCLUDED = ("kvpack/bench", "kvpack/demo", "kvpack/evaluation")
"""Programs, which run in their own process."""

OF_DEFAULT_DTYPE = {"empty", "eye", "full", "linspace", "logspace", "ones", "rand", "randn", "tensor", "zeros"}
FACTORIES = OF_DEFAULT_DTYPE | {"arange", "as_tensor", "asarray", "randint", "randperm", "scalar_tensor"}


def _is_decorated(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef) and any(
        isinstance(one, ast.Name) and one.id == cache_per_device.__name__ for one in node.decorator_list
    )


def _calls(node: ast.AST, on_cpu: bool) -> Iterator[tuple[ast.Call, str, bool]]:
    """Yield calls of tensor factories, their names, and True if they run with the CPU as default device."""
    on_cpu = on_cpu or _is_decorated(node)
    if isinstance(node, ast.Call):
        match node.func:
            case ast.Attribute(ast.Name("torch"), name) if name in FACTORIES:
                yield node, name, on_cpu
    for child in ast.iter_child_nodes(node):
        yield from _calls(child, on_cpu)


def _left_open(text: str) -> list[str]:
    found = []
    for call, name, on_cpu in _calls(ast.parse(text), False):
        given = {keyword.arg for keyword in call.keywords}
        missing = [what for what, needed in (("device", not on_cpu), ("dtype", name in OF_DEFAULT_DTYPE)) if needed and what not in given]
        if missing:
            found.append(f"line {call.lineno}: torch.{name} without {' and '.join(missing)}")
    return found


FILES = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in FOLDERS
    for path in (ROOT / folder).rglob("*.py")
    if not path.relative_to(ROOT).as_posix().startswith(EXCLUDED)
)


@pytest.mark.parametrize("path", FILES)
def test_tensors_name_their_device_and_dtype(path: str) -> None:
    assert _left_open((ROOT / path).read_text()) == []


def test_omitted_arguments_are_found() -> None:
    assert _left_open("torch.zeros(3)") == ["line 1: torch.zeros without device and dtype"]
    assert _left_open("@cache_per_device\ndef made() -> torch.Tensor:\n    return torch.eye(3)") == ["line 3: torch.eye without dtype"]
    assert _left_open("torch.arange(3, device=x.device)") == []
