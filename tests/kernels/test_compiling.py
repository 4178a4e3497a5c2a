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
    80: ("bf16", "kivi-2", "turboquant-2"),
    86: ("fp8", "oscar-2-u8"),
    100: ("int-4",),
    120: ("quarot-4", "kv=scalar:b=3"),
}
"""Compute capabilities, and recipes that compile quickly and are compiled for them. The other tests compile for 90 and 89."""

LAYOUTS = {
    "k=octahedral:b=2,qjl=fp16;v=group:b=4,g=128,axis=channel,outliers=3": "reads of outliers",
    "k=octahedral:b=3;v=group:b=3": "lookups of triplets",
    "kv=trellis:b=3": "tiles of rows in registers",
    "kv=quaternion:s=24,r=3": "tiles of rows in registers",
    "kv=scalar:b=3": "exchanges of weights",
}
"""Inline PTX of these recipes that needs the layout of a matrix product, or neighbors in a register. Other layouts are failures."""

EVERY_CALL = "nvfp4;raw=0"
"""The recipe for which all launches of calls with every option are compiled.

Options change how tiles are processed, not how they are loaded. Of the others, each value of a kernel's constants is compiled once, and
``make gpu-compile`` compiles all combinations.
"""

TOGETHER = ((EVERY_CALL,), tuple(KERNELS)[::2], tuple(recipe for recipe in tuple(KERNELS)[1::2] if recipe != EVERY_CALL))
"""Recipes that one process compiles, because all recipes launch some kernels with the same code."""


def compiled(folder: Path, *arguments: str) -> Any:
    """Compile in a process without the interpreter, and return the output. Checks the layouts of the recipes in ``LAYOUTS``."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(folder), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(TESTS)}
    command = [warm_python.python(*warm_python.LAUNCHING), "-c", PROGRAM, "--json", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["failed"] == {}
    for recipe in LAYOUTS.keys() & found["kernels"].keys():
        assert "--layouts" in arguments or found["layouts"][recipe][LAYOUTS[recipe]]
    return found


@pytest.mark.scenario
@pytest.mark.skipif(not triton_version.is_supported(), reason="the kernels were not tested with this Triton version")
@pytest.mark.parametrize("recipes", TOGETHER, ids=" ".join)
def test_kernels_compile_without_the_device(recipes: tuple[str, ...], tmp_path: Path) -> None:
    found = compiled(tmp_path, "--quick", *(["--every"] if EVERY_CALL in recipes else []), *recipes)
    for recipe in recipes:
        assert KERNELS[recipe] <= set(found["kernels"][recipe])


@pytest.mark.scenario
@pytest.mark.skipif(not triton_version.is_supported(), reason="the kernels were not tested with this Triton version")
@pytest.mark.parametrize("capability", OTHER_CHIPS)
def test_kernels_fit_on_other_chips(capability: int, tmp_path: Path) -> None:
    """Kernels that exceed a chip's registers, shared memory or maximum number of instructions count as failures."""
    found = compiled(tmp_path, "--first", "--capability", str(capability), *OTHER_CHIPS[capability])
    assert found["used"]
    assert found["kernels"].keys() == set(OTHER_CHIPS[capability])


@pytest.mark.scenario
@pytest.mark.skipif(not triton_version.is_supported(), reason="the kernels were not tested with this Triton version")
def test_inline_ptx_gets_its_elements_at_head_dim_80(tmp_path: Path) -> None:
    """Tiles with columns that contain no channel may have other layouts."""
    recipes = "kv=scalar:b=3", "k=raw:dtype=bf16;v=scalar:b=3"
    kernels = compiled(tmp_path, "--layouts", "--dim", "80", *recipes)["kernels"]
    assert all("attend_split" in kernels[recipe] for recipe in recipes)


@pytest.mark.scenario
@pytest.mark.skipif(not triton_version.is_supported(), reason="the kernels were not tested with this Triton version")
def test_the_default_recipe_compiles(tmp_path: Path) -> None:
    """The recipe is compiled with the oldest and the newest Triton (.ci/versions.py), because one may reject what the other accepts."""
    recipe = "kvpack-2;raw=0"
    assert {"attend_split", "_encode"} <= set(compiled(tmp_path, "--quick", recipe)["kernels"][recipe])


@pytest.mark.scenario
@pytest.mark.skipif(not triton_version.is_supported(), reason="the kernels were not tested with this Triton version")
def test_kernels_fit_on_chips_with_less_shared_memory(tmp_path: Path) -> None:
    """The chips tested here have the least shared memory. ``make gpu-compile`` also compiles for others."""
    recipe = "k=octahedral:b=3;v=group:b=3"
    found = compiled(tmp_path, "--first", "--capability", "89", recipe)
    assert {"attend_split", "decode_tiles", "_decode", "_encode"} <= set(found["kernels"][recipe])
    assert found["used"]["_attend"]["instructions"] > 0
    assert found["used"]["_attend"]["shared"] <= found["shared_memory"]
