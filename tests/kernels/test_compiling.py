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

LAYOUTS = """
import json, re, torch, kvpack
from kvpack.bench import compile_ahead
shape = compile_ahead.Shape()
layer = kvpack.pack(compile_ahead.random_pairs(shape, 2048), "kv=scalar:b=3")[0]
q = torch.zeros(1, shape.q_heads, 1, shape.dim, dtype=torch.bfloat16)
with compile_ahead.collect_kernels(compile_ahead.representative_gpu(90)) as found:
    kvpack.attend(q, layer)
(split,) = [found[key] for key in found if found[key].kernel == "attend_split"]
lines = split.compile().asm["ttgir"].splitlines()
print(json.dumps([re.findall("tensor<[^>]*#([a-z_.]*)", line) for line in lines if "movmatrix" in line]))
"""
"""Program that prints the layouts of the operands and results of ``softmax.pair_weights``."""

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

LAUNCHING = tuple(f"kvpack.kernels.{name}" for name in ("attend.many_queries", "attend.growing", "decode.sides", "encode.encode"))
"""Modules that every process of these tests imports."""

EVERY_CALL = ("nvfp4;raw=0",)
"""Recipes for which calls with every option are compiled. Options change how tiles are processed, not how they are loaded."""


def compiled(folder: Path, *arguments: str) -> Any:
    """Compile in a process without the interpreter, and return the output."""
    found = run(folder, PROGRAM, "--json", *arguments)
    assert found["failed"] == {}
    return found


def run(folder: Path, program: str, *arguments: str) -> Any:
    """Run a program in a process without the interpreter, and return the JSON value that it prints."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(folder), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(TESTS)}
    command = [warm_python.python(*LAUNCHING), "-c", program, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.scenario
@pytest.mark.skipif(not triton_version.is_supported(), reason="the kernels were not tested with this Triton version")
@pytest.mark.parametrize("recipe", KERNELS)
def test_kernels_compile_without_the_device(recipe: str, tmp_path: Path) -> None:
    found = compiled(tmp_path, "--quick", *(["--every"] if recipe in EVERY_CALL else []), recipe)
    assert KERNELS[recipe] <= set(found["kernels"])


@pytest.mark.scenario
@pytest.mark.skipif(not triton_version.is_supported(), reason="the kernels were not tested with this Triton version")
@pytest.mark.parametrize("recipe", OTHER_CHIPS)
def test_kernels_fit_on_other_chips(recipe: str, tmp_path: Path) -> None:
    """Kernels that exceed a chip's registers, shared memory or maximum number of instructions count as failures."""
    assert compiled(tmp_path, "--quick", "--capability", str(OTHER_CHIPS[recipe]), recipe)["used"]


@pytest.mark.scenario
@pytest.mark.skipif(not triton_version.is_supported(), reason="the kernels were not tested with this Triton version")
def test_the_default_recipe_compiles(tmp_path: Path) -> None:
    """The recipe is compiled with the oldest and the newest Triton (.ci/versions.py), because one may reject what the other accepts."""
    assert {"attend_split", "_encode"} <= set(compiled(tmp_path, "--quick", "kvpack-2;raw=0")["kernels"])


@pytest.mark.scenario
@pytest.mark.skipif(not triton_version.is_supported(), reason="the kernels were not tested with this Triton version")
def test_kernels_fit_on_chips_with_less_shared_memory(tmp_path: Path) -> None:
    """The chips tested here have the least shared memory. ``make gpu-compile`` also compiles for others."""
    found = compiled(tmp_path, "--quick", "--capability", "89", "k=octahedral:b=3;v=group:b=3")
    assert {"attend_split", "decode_tiles", "_decode", "_encode"} <= set(found["kernels"])
    assert found["used"]["_attend"]["instructions"] > 0
    assert found["used"]["_attend"]["shared"] <= found["shared_memory"]


@pytest.mark.scenario
@pytest.mark.skipif(not triton_version.is_supported(), reason="the kernels were not tested with this Triton version")
def test_weights_of_pairs_are_in_the_layout_of_products(tmp_path: Path) -> None:
    """Both loops exchange the registers of weights, which is only correct in the layout of scores."""
    layouts = run(tmp_path, LAYOUTS)
    assert len(layouts) == 2
    assert all(set(names) == {"mma"} for names in layouts)
