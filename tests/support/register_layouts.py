"""Check that inline PTX gets the elements that it expects to share a register, in kernels that Triton compiled up to its layouts.

Triton does not specify which elements an instance of inline PTX gets. Most of the kernels' PTX processes any two. The rest needs neighbors
on the last axis, and one snippet also exchanges registers of a matrix product between lanes.
"""

from __future__ import annotations

import re

NEIGHBORS = {
    "tiles of rows in registers": r'"mov\.b32 \$0, \$1;".*: tensor<[^>]*xi32, ',
    "lookups of two fields": r"ld\.shared\.b32 \$0, \[low .*ld\.shared\.b32 \$1, \[high ",
    "lookups of triplets": r"prmt\.b32 signs, \$7, \$9, select",
    "reads of outliers": r"mov\.u32 at, kvpack_patches; add\.u32 at, at, \$1; ld\.shared",
}
"""Patterns of operations whose instances need two neighbors on the last axis."""

EXCHANGES = "movmatrix.sync"
"""Instruction that needs the layout of a matrix product with rows of 8."""


def find_faults(ttgir: str) -> tuple[dict[str, int], list[str]]:
    """Return how often each of ``NEIGHBORS`` occurs, and the operations whose layout does not have the elements that they need."""
    layouts = dict(re.findall(r"^(#\w+) = (#ttg\..*)$", ttgir, re.MULTILINE))
    counts: dict[str, int] = {}
    wrong = []
    for line in ttgir.replace("\\0A", " ").splitlines():
        if "elementwise_inline_asm" not in line:
            continue
        types = re.findall(r"tensor<([\dx]+)x\w+, ([^>]*(?:<[^>]*>)?[^>]*)>", line.rpartition('" {')[2])
        for name, pattern in {**NEIGHBORS, "exchanges of weights": re.escape(EXCHANGES)}.items():
            if not re.search(pattern, line):
                continue
            counts[name] = counts.get(name, 0) + 1
            for shape, layout in types:
                resolved = re.sub(r"#\w+\b(?!\.)", lambda found: layouts.get(found[0], found[0]), layout)
                suits = pairs_neighbors(resolved)
                if name == "exchanges of weights":
                    suits = "#ttg.nvidia_mma<" in resolved and "versionMajor = 2" in resolved and shape.endswith("x8")
                if not suits:
                    wrong.append(f"{name}: {shape} {resolved}")
            if not types:
                wrong.append(f"{name}: no types in {line[-300:]}")
    return counts, wrong


def pairs_neighbors(layout: str) -> bool:
    """Return True if each two consecutive registers of a thread are neighbors on the last axis, beginning with an even element."""
    if "#ttg.slice<" in layout:
        return False
    if operand := re.search(r"dot_op<\{opIdx = (\d)", layout):
        # Registers of a second operand are neighbors on the inner axis, which is not the last one.
        return operand[1] == "0" and "nvidia_mma" in layout and "kWidth = 1" not in layout
    if linear := re.search(r"#ttg\.linear<\{register = \[\[([\d, ]+)\]", layout):
        basis = [int(number) for number in linear[1].split(",")]
        return basis[-1] == 1 and not any(basis[:-1])
    if blocked := re.search(r"#ttg\.blocked<\{sizePerThread = \[([\d, ]+)\].*order = \[(\d)", layout):
        sizes = [int(number) for number in blocked[1].split(",")]
        return int(blocked[2]) == len(sizes) - 1 and sizes[-1] >= 2
    return "#ttg.nvidia_mma<" in layout
