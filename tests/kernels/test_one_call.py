"""A call of ``attend`` runs exactly the functions that the diagram in kernels/README.md shows."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import kvpack
import kvpack.kernels
from support.caches import random_pairs
from support.interpreter import DEVICE, INTERPRETED

if TYPE_CHECKING:
    from types import CodeType, FrameType

PACKAGE = Path(kvpack.__file__).parent
KERNELS = Path(next(iter(kvpack.kernels.__path__)))
MAX_FUNCTIONS = 60
"""Maximum number of functions that a whole call may run."""


def path_of(file: str) -> str | None:
    """Return the name that the README uses for a file of the package, or None for other files."""
    path = Path(file)
    if path.is_relative_to(KERNELS):
        return str(path.relative_to(KERNELS))
    return f"kvpack/{path.relative_to(PACKAGE)}" if path.is_relative_to(PACKAGE) else None


def drawn() -> set[str]:
    """Return the files that the first diagram in the section "One call" contains."""
    text = (KERNELS / "README.md").read_text(encoding="utf-8")
    picture = re.search(r"## One call\n.*?```text\n(.*?)```", text, re.DOTALL)
    assert picture is not None
    return set(re.findall(r"\S+\.py$", picture[1], re.MULTILINE))


@pytest.mark.kernels
@pytest.mark.skipif(not INTERPRETED, reason="compiled code does not call Python functions")
def test_the_plot_names_every_file_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPACK_KERNELS", "triton")
    layer = kvpack.pack(random_pairs(1, 256, dims=(128, 128)), "kv=group:b=4,g=32").to(DEVICE)[0]
    q = torch.randn(1, 4, 1, 128)
    kvpack.attend(q, layer)
    codes: set[CodeType] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            codes.add(frame.f_code)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        kvpack.attend(q, layer)
    finally:
        sys.setprofile(before)
    called = {(name, code.co_qualname) for code in codes if (name := path_of(code.co_filename)) is not None}
    assert {file for file, _ in called} == drawn()
    assert len(called) <= MAX_FUNCTIONS
