"""Fixtures of the kernel tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def uninitialized_is_poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make torch.empty return NaN or the largest integer, so that elements that no program writes are noticed."""
    # What cuBLAS needs to be deterministic.
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    assert torch.empty(1).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
