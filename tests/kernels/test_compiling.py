"""Tests that the kernels of all operations compile for CUDA devices, even on a machine without one.

The interpreter does not compile kernels.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvpack.coding import triton_version
from support import warm_python

TESTS = Path(__file__).resolve().parents[1]

PROGRAM = """
import sys
from support import compile_kernels
sys.exit(compile_kernels.main(sys.argv[1:]))
"""

KERNELS = {
    "oscar-2;raw=0": {"attend_split", "merge_originals", "_decode", "_encode"},
    "nvfp4;raw=0": {"attend_split", "decode_tiles", "_encode"},
    "k=octahedral:b=2,qjl=fp16;v=group:b=4,g=128,axis=channel,outliers=3": {"attend_split"},
    "klt=63211000:53100000": {"attend_split", "decode_tiles", "_encode"},
    "transform=0.6:layer": {"_decode", "_multiply_factors"},
    "kv=trellis:b=3": {"attend_split", "decode_tiles", "_find_paths"},
    "kv=quaternion:s=24,r=3": {"attend_split", "decode_tiles", "_encode"},
}
"""Recipes with different loaders, sidecars, tables and launches, and some of the kernels that each one runs."""

OTHER_CHIPS = {
    "bf16": 80,
    "fp8": 86,
    "kivi-2": 80,
    "oscar-2-u8": 86,
    "quarot-4": 120,
    "int-4": 100,
    "turboquant-2": 80,
    "kv=scalar:b=3": 120,
}
"""Recipes that compile quickly, and the compute capabilities for which they are compiled. The other tests compile for 90 and 89."""

LAYOUTS = {
    "k=octahedral:b=2,qjl=fp16;v=group:b=4,g=128,axis=channel,outliers=3": "reads of outliers",
    "k=octahedral:b=3;v=group:b=3": "lookups of triplets",
    "kv=trellis:b=3": "tiles of rows in registers",
    "kv=quaternion:s=24,r=3": "tiles of rows in registers",
    "kv=scalar:b=3": "exchanges of weights",
}
"""Inline PTX of these recipes that needs the layout of a matrix product, or neighbors in a register. Other layouts are failures."""

EVERY_CALL = ("nvfp4;raw=0",)
"""Recipes for which all launches of calls with every option are compiled. Options change how tiles are processed, not how they are loaded.

Of the others, each value of a kernel's constants is compiled once, and ``make gpu-compile`` compiles all combinations.
"""


def compiled(folder: Path, *arguments: str) -> Any:
    """Compile in a process without the interpreter, and return the output."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(folder), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(TESTS)}
    command = [warm_python.python(*warm_python.LAUNCHING), "-c", PROGRAM, "--json", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["failed"] == {}
    return found


@pytest.mark.scenario
@pytest.mark.skipif(not triton_version.is_supported(), reason="the kernels were not tested with this Triton version")
@pytest.mark.parametrize("recipe", KERNELS)
def test_kernels_compile_without_the_device(recipe: str, tmp_path: Path) -> None:
    found = compiled(tmp_path, "--quick", *(["--every"] if recipe in EVERY_CALL else []), recipe)
    assert KERNELS[recipe] <= set(found["kernels"])
    assert recipe not in LAYOUTS or found["layouts"][LAYOUTS[recipe]]


@pytest.mark.scenario
@pytest.mark.skipif(not triton_version.is_supported(), reason="the kernels were not tested with this Triton version")
@pytest.mark.parametrize("recipe", OTHER_CHIPS)
def test_kernels_fit_on_other_chips(recipe: str, tmp_path: Path) -> None:
    """Kernels that exceed a chip's registers, shared memory or maximum number of instructions count as failures."""
    found = compiled(tmp_path, "--first", "--capability", str(OTHER_CHIPS[recipe]), recipe)
    assert found["used"]
    assert recipe not in LAYOUTS or found["layouts"][LAYOUTS[recipe]]


@pytest.mark.scenario
@pytest.mark.skipif(not triton_version.is_supported(), reason="the kernels were not tested with this Triton version")
@pytest.mark.parametrize("recipe", ["kv=scalar:b=3", "k=raw:dtype=bf16;v=scalar:b=3"])
def test_inline_ptx_gets_its_elements_at_head_dim_80(recipe: str, tmp_path: Path) -> None:
    """Tiles with columns that contain no channel may have other layouts."""
    assert "attend_split" in compiled(tmp_path, "--layouts", "--dim", "80", recipe)["kernels"]


@pytest.mark.scenario
@pytest.mark.skipif(not triton_version.is_supported(), reason="the kernels were not tested with this Triton version")
def test_the_default_recipe_compiles(tmp_path: Path) -> None:
    """The recipe is compiled with the oldest and the newest Triton (.ci/versions.py), because one may reject what the other accepts."""
    assert {"attend_split", "_encode"} <= set(compiled(tmp_path, "--quick", "kvpack-2;raw=0")["kernels"])


@pytest.mark.scenario
@pytest.mark.skipif(not triton_version.is_supported(), reason="the kernels were not tested with this Triton version")
def test_kernels_fit_on_chips_with_less_shared_memory(tmp_path: Path) -> None:
    """The chips tested here have the least shared memory. ``make gpu-compile`` also compiles for others."""
    recipe = "k=octahedral:b=3;v=group:b=3"
    found = compiled(tmp_path, "--first", "--capability", "89", recipe)
    assert found["layouts"][LAYOUTS[recipe]]
    assert {"attend_split", "decode_tiles", "_decode", "_encode"} <= set(found["kernels"])
    assert found["used"]["_attend"]["instructions"] > 0
    assert found["used"]["_attend"]["shared"] <= found["shared_memory"]
