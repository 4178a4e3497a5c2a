"""Allocations, which assign a codec to each layer's keys and values, and short recipes that express them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

from kvpack.coding.recipes import Recipe
from kvpack.file.limits import MAX_STRING_BYTES
from kvpack.formats.errors import InvalidParameter

TensorKey = tuple[int, str]
"""A layer number, with "k" for its keys or "v" for its values."""

Allocation = dict[TensorKey, str]
"""The codec of each tensor (the keys or values of one layer), as written in a recipe."""


def uniform_allocation(tensor_keys: Sequence[TensorKey], k: str, v: str) -> Allocation:
    """Return the allocation that uses codec ``k`` for the keys and ``v`` for the values of all layers."""
    return {(layer, side): k if side == "k" else v for layer, side in tensor_keys}


def recipe_clauses(allocation: Allocation) -> list[str]:
    """Return the clauses of a short recipe: first the most common codecs, then ranges of layers with other codecs."""
    common = {}
    for side in "kv":
        counts = Counter(codec for (_, its_side), codec in sorted(allocation.items()) if its_side == side)
        common[side] = counts.most_common(1)[0][0]
    clauses = [f"kv={common['k']}"] if common["k"] == common["v"] else [f"{side}={codec}" for side, codec in common.items()]
    different: dict[str, dict[str, list[int]]] = {}
    for (layer, side), codec in sorted(allocation.items()):
        if codec != common[side]:
            different.setdefault(codec, {"k": [], "v": []})[side].append(layer)
    for codec, layers in different.items():
        if layers["k"] == layers["v"]:
            clauses.append(f"layers={format_ranges(layers['k'])}:kv={codec}")
        else:
            clauses += [f"layers={format_ranges(numbers)}:{side}={codec}" for side, numbers in layers.items() if numbers]
    return clauses


def recipe_text(allocation: Allocation) -> str:
    """Return the canonical recipe text of an allocation. Raises InvalidParameter if it is too long for a file's header."""
    text = _canonical_recipe(";".join(recipe_clauses(allocation)))
    if len(text) > MAX_STRING_BYTES:
        raise InvalidParameter(
            f"the recipe of {len(allocation) // 2} layers takes {len(text)} bytes as text, but a file can have at most "
            f"{MAX_STRING_BYTES}: pass fewer candidates"
        )
    return text


@lru_cache(maxsize=4096)
def _canonical_recipe(text: str) -> str:
    return Recipe(text).text


def format_ranges(layer_indices: Sequence[int]) -> str:
    """Format ascending layer numbers as in a recipe, such as ``0-2,5``."""
    runs: list[list[int]] = []
    for number in layer_indices:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
