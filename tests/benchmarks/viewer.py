"""Measure how fast the JavaScript reader, which ``kvpack view`` runs in a web worker, decodes one layer.

All recipes encode the same random keys and values. ``klt`` and ``transform`` use a random basis. Times are CPU times of Node, because other
programs hardly affect these. ``make bench-viewer`` runs this measurement.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import kvpack
from kvpack.coding.recorded_presets import RECORDED
from kvpack.commands.view import FOLDERS
from kvpack.formats.errors import InvalidParameter
from kvpack.output import print_table
from support.klt_bases import normal_tables, random_basis

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpack.coding.encoding import Progress

TOKENS, HEADS, DIM = 32_768, 8, 128
CALIBRATED = ("klt-2.5", "klt-4", "transform-2.5")
RECIPES = (*(name for name in RECORDED if not name.startswith(("boundary", "mixedkv"))), *CALIBRATED)
MOST_SECONDS = 10.0

_PROGRAM = """
const [folder, path, ...basisPaths] = process.argv.slice(1);
const { fromBlob, fromBytes, open, openBasis } = await import(`${folder}/kvpack.js`);
const { openAsBlob, promises } = await import("node:fs");
const bases = new Map();
for (const basisPath of basisPaths) {
  const basis = await openBasis(fromBytes(new Uint8Array(await promises.readFile(basisPath))));
  bases.set(basis.digest, basis);
}
const seconds = async (call) => {
  const before = process.cpuUsage();
  const result = await call();
  const { user, system } = process.cpuUsage(before);
  return [(user + system) / 1e6, result];
};
const [opening, file] = await seconds(async () => open(fromBlob(await openAsBlob(path))));
const [k] = await seconds(() => file.decode(0, "k", { bases }));
const [v] = await seconds(() => file.decode(0, "v", { bases }));
console.log(JSON.stringify({ open: opening, k, v }));
"""


def run(recipes: Sequence[str], tokens: int = TOKENS, *, progress: Progress | None = None) -> dict[str, Any]:
    """Return the seconds that each recipe takes to open a file of one layer of ``tokens`` tokens, and to decode keys and values."""
    if not shutil.which("node"):
        raise InvalidParameter("node is not installed; install Node 20 or later")
    generator = torch.Generator().manual_seed(1)
    pair = tuple(torch.randn(1, HEADS, tokens, DIM, generator=generator).bfloat16() for _ in "kv")
    sides = {(0, side): (HEADS, DIM) for side in "kv"}
    times = {}
    with tempfile.TemporaryDirectory() as folder:
        path, basis = Path(folder, "x.kvpack"), Path(folder, "x.kvbasis")
        basis.write_bytes(random_basis(sides, 1, tables=normal_tables(), scopes=dict.fromkeys(sides, "head")))
        for done, recipe in enumerate(recipes):
            calibrated = recipe in CALIBRATED
            kvpack.save(kvpack.pack([pair], kvpack.Recipe(recipe, str(basis)) if calibrated else recipe), path)
            command = ["node", "--input-type=module", "--eval", _PROGRAM, str(FOLDERS["readers/javascript"]), str(path)]
            found = subprocess.run([*command, *([str(basis)] if calibrated else [])], check=True, capture_output=True, text=True)
            times[recipe] = json.loads(found.stdout)
            if progress:
                progress(done + 1, len(recipes))
    return {"tokens": tokens, "heads": HEADS, "dim": DIM, "seconds": times}


def slow(report: dict[str, Any]) -> list[str]:
    """Return the recipes whose keys or values take longer to decode than ``MOST_SECONDS``."""
    return [recipe for recipe, times in report["seconds"].items() if max(times["k"], times["v"]) > MOST_SECONDS]


def show(report: dict[str, Any]) -> None:
    """Print the table of a report."""
    rows = [[recipe, *(f"{times[part]:.2f}" for part in ("open", "k", "v"))] for recipe, times in report["seconds"].items()]
    title = f"seconds of one core for a layer of {report['tokens']:,} tokens of {report['heads']} heads of {report['dim']} channels"
    print_table(title, ["recipe", "open", "keys", "values"], rows)
