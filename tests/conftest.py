"""Settings for all tests: property tests have no time limit per example, and each process runs the kernel tests that it can."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from kvpack.coding import triton_version
from kvpack.store import disk_usage, eviction
from support.interpreter import INTERPRETED

DEMO_MODEL = Path(__file__).resolve().parents[1] / "kvpack" / "demo" / "tinylm"

# The same examples in every run, so that no change fails by what another has broken; --hypothesis-profile=explore draws others, and more.
settings.register_profile("kvpack", deadline=None, derandomize=True, max_examples=40)
settings.register_profile("explore", deadline=None, max_examples=400)
settings.load_profile("kvpack")

if INTERPRETED and triton_version.is_supported():
    from support import quick_interpreter

    quick_interpreter.wrap_once_per_launch()
    quick_interpreter.unwrap_only_constants()
    quick_interpreter.call_builtins_directly()
    quick_interpreter.convert_dtypes_once()
    quick_interpreter.describe_blocks_once()
    quick_interpreter.shape_tensors_once()
    quick_interpreter.compare_types_once()
    quick_interpreter.broadcast_shapes_once()
    quick_interpreter.check_overflow_only_in_debug()


@pytest.fixture
def chat_model(tmp_path: Path) -> Path:
    """Return a folder in which examples find the model that they load from the hub.

    It contains the demo's model with a byte tokenizer.
    """
    from support.chat_tokenizers import tokenizer  # not at the top: it imports transformers

    folder = tmp_path / "HuggingFaceTB" / "SmolLM2-135M-Instruct"
    shutil.copytree(DEMO_MODEL, folder)
    tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def patient_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a put wait for a folder's file count or lock for up to a minute, because other processes may stall on a busy machine."""
    monkeypatch.setattr(disk_usage, "WAIT_SECONDS", 60.0)
    monkeypatch.setattr(eviction, "WAIT_SECONDS", 60.0)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests that another process runs, as interpreter.py describes."""
    import torch  # not at the top: the process that gives tests to workers collects none

    device, supported = torch.cuda.is_available(), triton_version.is_supported()

    def runs_here(item: pytest.Item) -> bool:
        kernels, cuda = (item.get_closest_marker(name) is not None for name in ("kernels", "cuda"))
        if INTERPRETED:
            return kernels and not cuda and supported
        return (device or not (kernels or cuda)) and (supported or not kernels)

    elsewhere = [item for item in items if not runs_here(item)]
    # What takes minutes comes first: at the end one worker would wait for the other.
    items[:] = sorted(filter(runs_here, items), key=lambda item: item.path.name != "test_model_zoo.py")
    config.hook.pytest_deselected(items=elsewhere)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect tests with garbage collection disabled, because it would double the time: modules and test items stay alive anyway.

    Later garbage collections skip these objects too. Each would otherwise take 0.3 s, and copy the memory that forked processes share.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
