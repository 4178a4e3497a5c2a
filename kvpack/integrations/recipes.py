"""Checks of recipes and bases for the adapters of serving engines."""

from __future__ import annotations

import os
from collections.abc import Sequence

from kvpack.coding.bases import Basis
from kvpack.coding.recipes import Recipe, parse_recipe
from kvpack.formats.errors import InvalidParameter, MissingBasis


def recipe_with_basis(recipe: str, basis: str | os.PathLike[str] | None, model: str | None) -> Recipe:
    """Return the recipe bound to the basis file ``basis``, with the file's SHA-256 added to its text.

    ``model`` is the engine's name for the model, or None if each object names its model and the caller compares these names with the basis.
    Raises MissingBasis if the recipe needs a basis and there is none, MissingFile, and InvalidParameter if the basis belongs to another
    model or the recipe does not use one.
    """
    parsed = parse_recipe(recipe)
    if basis is None:
        if parsed.needs_basis:
            raise MissingBasis(
                f"the recipe {recipe!r} needs a basis: set basis to the path of the file that kvpack calibrate made for the model"
            )
        return parsed
    if not parsed.uses_basis:
        raise InvalidParameter(f"basis is {os.fspath(basis)!r}, but the recipe {recipe!r} does not use one: omit basis")
    loaded = Basis.load(basis)
    if model is not None:
        loaded.check_model({"name": model})
    return Recipe(parsed, loaded)


def check_layers(recipe: str, why: str) -> None:
    """Raise InvalidParameter unless ``recipe`` uses the same codecs in every layer. A recipe with a basis never does.

    ``why`` explains the restriction in the message.
    """
    reject_layer_clauses(recipe, why)
    if parse_recipe(recipe).needs_basis:
        raise InvalidParameter(
            f"the recipe {recipe!r} uses different columns of its basis in each layer, but {why}: use a recipe without a basis"
        )


def reject_layer_clauses(recipe: str, why: str) -> None:
    """Raise InvalidParameter if clauses of the recipe select layers. ``why`` explains the restriction in the message."""
    named = [rule.written for rule in parse_recipe(recipe).rules if rule.items is not None]
    if named:
        raise InvalidParameter(f"the recipe {recipe!r} selects layers with {named[0]!r}, but {why}: use a recipe without layer clauses")


def check_layer_names(recipe: str, names: Sequence[str]) -> None:
    """Raise InvalidParameter if the recipe's codecs differ between layers, unless ``names`` number all layers consecutively from 0.

    An example of a name is "model.layers.3.self_attn".
    """
    numbers = [[int(part) for part in name.split(".") if part.isdecimal()] for name in names]
    if numbers != [[number] for number in range(len(names))]:
        check_layers(recipe, f"the layers {', '.join(names)} are not all layers of a model in order, beginning with the first")
