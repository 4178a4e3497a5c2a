"""kvpack recipes: the published configurations by name, and the bits per value of any recipe."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvpack.file.limits import MAX_HEADS, MAX_LAYERS, MAX_TOKENS
from kvpack.formats.base import MAX_DIM
from kvpack.formats.errors import InvalidParameter, OutOfBounds
from kvpack.output import add_json, print_json, print_table

if TYPE_CHECKING:
    import argparse

    from kvpack.coding.bases import Basis
    from kvpack.coding.recipes import Recipe

DEFAULTS = {"layers": 32, "heads": 8, "tokens": 4096, "dim": 128}
"""The shape of a cache, unless the preset is for one model and names its own."""

_LIMITS = {"layers": MAX_LAYERS, "heads": MAX_HEADS, "tokens": MAX_TOKENS, "dim": MAX_DIM}


def add(commands: Any) -> None:
    """Add ``recipes`` to the command line."""
    what = (
        "List the presets, or the given recipes, with two counts of bits per value: nominal bits as the papers count them, "
        "and bits in the file, which are all bytes of a cache of the given shape."
    )
    parser = commands.add_parser("recipes", help="list presets and their bits per value, or price any recipe", description=what)
    parser.add_argument("recipes", metavar="RECIPE", nargs="*")
    for name, what in (("layers", "layers"), ("heads", "KV heads"), ("tokens", "tokens"), ("dim", "head dim")):
        of_model = "as in the preset's model, otherwise " if name in ("layers", "dim") else ""
        parser.add_argument(f"--{name}", type=int, metavar="N", help=f"{what} of the cache (default: {of_model}{DEFAULTS[name]})")
    parser.add_argument(
        "--basis", metavar="FILE", help="the basis of recipes such as klt-1.75; layers, KV heads and head dim are those of its model"
    )
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print one row per recipe, and the additions after the presets."""
    from kvpack.coding.presets import ADDITIONS, PUBLISHED

    asked = {name: getattr(arguments, name) for name in DEFAULTS if getattr(arguments, name) is not None}
    for name, value in asked.items():
        if not 1 <= value <= _LIMITS[name]:
            raise InvalidParameter(f"--{name} is {value}, expected 1 to {_LIMITS[name]}")
    basis = None
    if arguments.basis is not None:
        from kvpack.coding.basis_sources import basis_of

        basis = basis_of(arguments.basis)
        asked = _shape_of(basis, asked)
    rows = [_row(name, asked, basis, listed=not arguments.recipes) for name in arguments.recipes or PUBLISHED]
    additions = [] if arguments.recipes else [{"name": name, "source": it.source, "recipe": it.recipe} for name, it in ADDITIONS.items()]
    if arguments.json:
        print_json({"recipes": rows, "additions": additions})
        return 0
    shape = DEFAULTS | asked
    print_table(
        f"bits per value in files of {shape['tokens']:,} tokens of {shape['heads']} heads",
        ["recipe", "from", "layers", "head dim", "nominal bits", "bits in the file", "lossless for"],
        (
            [
                row["name"],
                row["source"],
                str(row["layers"]),
                str(row["dim"]),
                _bits(row["nominal_bits"]),
                _bits(row["bits_per_value"]),
                ", ".join(row["lossless"]) or "-",
            ]
            for row in rows
        ),
        left=2,
    )
    if additions:
        print_table(
            "additions: write them after a recipe, as in octopus-3;boundary-1",
            ["name", "from"],
            ([it["name"], it["source"]] for it in additions),
            left=2,
        )
    return 0


def _bits(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _shape_of(basis: Basis, asked: dict[str, int]) -> dict[str, int]:
    """``asked`` with the shape of the caches that ``basis`` is for. Raises InvalidParameter for another, and for layers that differ."""
    shapes = {(basis.rows(*place).heads, basis.rows(*place).dim) for place in basis.sides()}
    if len(shapes) != 1:
        raise InvalidParameter(f"{basis.where}: its layers differ in heads or head dims, {sorted(shapes)}, and one shape is priced")
    found = dict(zip(("layers", "heads", "dim"), (basis.layers_with_rows, *shapes.pop()), strict=True))
    for name in found.keys() & asked.keys():
        if asked[name] != found[name]:
            raise InvalidParameter(f"--{name} is {asked[name]}, and {basis.where} is the basis of caches with {found[name]}: leave it out")
    return asked | found


def _row(name: str, asked: dict[str, int], basis: Basis | None, *, listed: bool) -> dict[str, Any]:
    """One recipe with its shape and bits; a ``listed`` one that does not support the shape has no bits."""
    from kvpack.coding.presets import PUBLISHED, Preset
    from kvpack.coding.recipes import parse_recipe

    recipe = parse_recipe(name)
    if recipe.needs_basis and basis is not None:
        recipe = parse_recipe(recipe, basis)
    preset = PUBLISHED.get(name, Preset(recipe.text, ""))
    of_model = {name: value for name, value in (("layers", preset.layers), ("dim", preset.dim)) if value is not None}
    shape = DEFAULTS | of_model | asked
    nominal: float | None = None
    stored: float | None = None
    try:
        nominal, stored = rates(recipe, **shape)
    except (InvalidParameter, OutOfBounds):
        if not listed:
            raise
    return {
        "name": name,
        "source": preset.source,
        "recipe": preset.recipe,
        **shape,
        "nominal_bits": nominal,
        "bits_per_value": stored,
        "lossless": [] if stored is None else list(recipe.lossless(shape["layers"], shape["dim"])),
    }


def rates(recipe: Recipe, layers: int, heads: int, tokens: int, dim: int) -> tuple[float, float]:
    """Nominal bits per value, and bits per value in a file of one sequence, computed from the layout without encoding.

    The number of outliers of a cache depends on its values; here it is 0, and so is that of raw tokens of low norm. What `lossless` takes
    depends on them too; here they are normally distributed.
    Raises OutOfBounds when the recipe names other layers, InvalidParameter when a codec does not support ``dim``,
    InvalidHeader or LimitExceeded for sizes that no file can hold.
    """
    from kvpack.file.container import file_size
    from kvpack.file.header import Contents, LayerEntry, SideEntry, features_of

    recipe.check_layers(layers)
    codecs: dict[Any, int] = {}
    entries, nominal = [], 0.0
    tail = tokens % recipe.window if recipe.window else 0
    for layer in range(layers):
        sides = []
        for side in "kv":
            codec = recipe.codec(layer, layers, side, dim)
            runs = (tokens - tail,) if tokens > tail else ()
            rows = tuple(codec.usual_entries(1, heads, sum(runs)).items())
            sides.append(SideEntry(codecs.setdefault(codec, len(codecs)), 1, heads, runs, tail, "bf16", recipe.window, rows))
            nominal += codec.nominal_bits / (2 * layers)
        entries.append(LayerEntry(*sides))
    contents = Contents(codecs=tuple(codecs), layers=tuple(entries), recipe=recipe.text, required=features_of(codecs))
    return nominal, 8 * file_size(contents) / (2 * layers * heads * tokens * dim)
