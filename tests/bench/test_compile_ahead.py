"""Kernels compiled ahead are those that calls launch, for other shapes and in other processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from kvpack import cli
from kvpack.coding import triton_version
from support import warm_python

if TYPE_CHECKING:
    from pathlib import Path

needs_triton = pytest.mark.skipif(not triton_version.is_supported(), reason="the kernels were not tested with this Triton version")

WARM = """
import sys
from kvpack import cli
sys.exit(cli.main(["warm", "--json", *sys.argv[1:]]))
"""

CALLS = """
import contextlib, json
import torch, triton
import kvpack
from kvpack.bench import compile_ahead

def calls(device, tokens):
    k, v = torch.randn(2, 1, 8, tokens, 128).bfloat16().to(device)
    cache = kvpack.pack([(k, v)], RECIPE)
    q = torch.randn(1, 32, 1, 128).bfloat16().to(device)
    kvpack.attend(q, cache[0])
    cache[0].unpack(torch.bfloat16)
    live = kvpack.LiveCache.of(cache)
    for _ in range(2):
        live.update(0, k[:, :, :1], v[:, :, :1])
        live.attend(0, q)

found = []
triton.knobs.compilation.listener = lambda **fields: found.append((fields["src"].name, fields["cache_hit"]))
if torch.cuda.is_available():
    for tokens in (3000, 300):
        calls("cuda", tokens)
else:
    with compile_ahead.collect_kernels(compile_ahead.representative_gpu(90)) as kernels:
        for tokens in (3000, 300):
            calls("cpu", tokens)
    for kernel in kernels.values():
        kernel.compile()
print(json.dumps(found))
"""


def output(program: str, folder: Path, *arguments: str) -> Any:
    """Return the JSON that ``program`` prints in a process without the interpreter, with Triton's cache in ``folder``."""
    import torch

    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(folder), "OMP_NUM_THREADS": "1"}
    # A GPU's machine may have another version of transformers than warm processes need.
    python = sys.executable if torch.cuda.is_available() else warm_python.python(*warm_python.LAUNCHING)
    command = [python, "-c", program, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@needs_triton
@pytest.mark.scenario
@pytest.mark.parametrize("recipe", ["bf16", pytest.param("kvpack-3", marks=pytest.mark.cuda)])
def test_calls_find_the_compiled_kernels(recipe: str, tmp_path: Path) -> None:
    import torch

    where = [] if torch.cuda.is_available() else ["--capability", "90"]
    report = output(WARM, tmp_path, recipe, *where)
    ((named, kernels),) = ((entry["recipe"], entry["kernels"]) for entry in report["recipes"])
    assert named == recipe
    assert not any(kernel["cached"] or kernel["error"] for kernel in kernels)
    launched = output(f"RECIPE = {recipe!r}{CALLS}", tmp_path)
    assert {"attend_split", "append_tokens"} <= {name for name, _ in launched} <= {kernel["kernel"] for kernel in kernels}
    assert [name for name, cached in launched if not cached] == []
    again = output(WARM, tmp_path, recipe, *where)
    assert all(kernel["cached"] for kernel in again["recipes"][0]["kernels"])


LENGTHS = """
import json
import torch
import kvpack
from kvpack.bench import compile_ahead

shape = compile_ahead.ModelShape()
q = torch.zeros(1, shape.q_heads, 1, shape.dim, dtype=torch.bfloat16)
found = []
for tokens in (1000, 1001, 1002, 1004):
    layer = kvpack.pack(compile_ahead.random_pairs(shape, tokens), RECIPE)[0]
    with compile_ahead.collect_kernels(compile_ahead.representative_gpu(90)) as kernels:
        kvpack.attend(q, layer)
    found.append(sorted(key for key, kernel in kernels.items() if kernel.kernel == "attend_split"))
print(json.dumps(found))
"""


@needs_triton
@pytest.mark.scenario
@pytest.mark.parametrize("recipe", ["octopus-3", "kvpack-3"])
def test_all_lengths_share_kernels(recipe: str, tmp_path: Path) -> None:
    """Streams with short rows begin at other alignments, which change no load."""
    first, *others = output(f"RECIPE = {recipe!r}{LENGTHS}", tmp_path)
    assert first
    assert all(other == first for other in others)


STEPS = """
import json
import torch
import kvpack
from kvpack.bench import compile_ahead

(k, v), = compile_ahead.random_pairs(compile_ahead.ModelShape(), 300)
cache = kvpack.pack([(k, v)], RECIPE)
calls = compile_ahead.calls_to_compile(kvpack.Recipe(RECIPE))
with compile_ahead.collect_kernels(compile_ahead.representative_gpu(90)) as ahead:
    for call in calls.values():
        call()
with compile_ahead.collect_kernels(compile_ahead.representative_gpu(90)) as kernels:
    live = kvpack.LiveCache.of(cache)
    for _ in range(2):
        live.update(0, k[:, :, :1], v[:, :, :1])
        live.attend(0, torch.zeros(1, 32, 1, 128, dtype=torch.bfloat16))
        live.roll()
print(json.dumps([[kernel.kernel, key in ahead] for key, kernel in kernels.items()]))
"""


@needs_triton
@pytest.mark.scenario
def test_steps_after_an_incomplete_page_find_kernels(tmp_path: Path) -> None:
    """Such steps decode the page's tokens to compare their norms with those of new tokens."""
    launched = output(f"RECIPE = 'octopus-3'{STEPS}", tmp_path)
    assert {"attend_split", "append_tokens"} <= {name for name, _ in launched}
    assert [name for name, is_ahead in launched if not is_ahead] == []


@needs_triton
@pytest.mark.parametrize(
    ("arguments", "interpret", "message"),
    [
        ([], "0", "PyTorch found no CUDA device: specify the compute capability with --capability 80 or"),
        (["--capability", "90"], "1", "TRITON_INTERPRET is 1: unset it"),
        (["--capability", "91"], "0", "--capability is 91, expected one of 80, 86, 89, 90, 100, 120"),
        (["--dim", "0"], "0", "--dim is 0, expected at least 1"),
    ],
)
def test_what_cannot_be_compiled(
    arguments: list[str], interpret: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("TRITON_INTERPRET", interpret)
    assert cli.main(["warm", "fp8", *arguments]) == 2
    assert message in capsys.readouterr().err
