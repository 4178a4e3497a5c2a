"""The command line of the matrix. It prints a table, or one JSON value with --json, and exits with 1 if a guarantee was broken."""

from __future__ import annotations

import argparse
import json
import logging
import sys

import pytest
import torch

from kvpack.output import print_table
from support import byte_sized_disk
from support.store_matrix.matrix import FAULTS, KINDS, run_cell, table


def main() -> int:
    parser = argparse.ArgumentParser(prog="store_matrix", description="Test every kind of store under every fault.")
    parser.add_argument("--kind", action="append", choices=KINDS, help="run only this one; may be repeated")
    parser.add_argument("--fault", action="append", choices=FAULTS, help="run only this one; may be repeated")
    parser.add_argument("--kills", type=int, help="total number of kills over all kinds of stores (default 7,000)")
    parser.add_argument("--lookups", type=int, help="total number of lookups over all kinds of stores (default 1,001,000)")
    parser.add_argument("--cases", type=int, help="number of cases in every other cell (default: as defined for the fault)")
    parser.add_argument("--seed", type=int, default=0, help="random seed (default 0)")
    parser.add_argument("--json", action="store_true", help="print one JSON value instead of a table")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    # Budgets of the matrix are multiples of the entry size.
    byte_sized_disk.install(pytest.MonkeyPatch())
    # Faults are counted, so the warning that each store logs once is not needed.
    logging.getLogger("kvpack.store").setLevel(logging.CRITICAL)
    kinds, faults = arguments.kind or list(KINDS), arguments.fault or list(FAULTS)
    together = {"kill": arguments.kills, "isolation": arguments.lookups}
    counts = {fault: FAULTS[fault].many if arguments.cases is None else arguments.cases for fault in faults}
    counts |= {fault: -(-most // len(kinds)) for fault, most in together.items() if most is not None}
    cells = []
    for fault in faults:
        for kind in kinds:
            cells.append(
                run_cell(kind, fault, counts[fault], arguments.seed, lambda text, at=f"{fault}, {kind}": _print_line(f"{at}: {text}"))
            )
            _print_line("")
            if not sys.stderr.isatty():
                print(f"{fault}, {kind}: {cells[-1].counts['cases']:,} cases, {cells[-1].seconds:,.0f} s", file=sys.stderr, flush=True)
            # Print problems immediately, because a run may take hours.
            for problem in cells[-1].problems:
                print(f"{fault}, {kind}: {problem}", file=sys.stderr)
    if arguments.json:
        print(json.dumps([cell.as_json() for cell in cells], indent=2))
    else:
        columns, rows = table(cells)
        print_table("stores under faults", columns, rows, text_columns=2)
    return 1 if any(cell.counts["problems"] for cell in cells) else 0


def _print_line(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
