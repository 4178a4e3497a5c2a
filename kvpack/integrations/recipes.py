"""What adapters of serving engines ask of a recipe."""

from __future__ import annotations

from kvpack.coding.recipes import parse_recipe
from kvpack.formats.errors import InvalidParameter


def check_layers(recipe: str, why: str) -> None:
    """Raise InvalidParameter for a recipe that gives some layers other codecs than the rest."""
    named = [rule.written for rule in parse_recipe(recipe).rules if rule.items is not None]
    if named:
        raise InvalidParameter(f"the recipe {recipe!r} names layers by {named[0]!r}, and {why}: use one without layers")
