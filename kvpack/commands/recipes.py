"""kvpack recipes: list the presets by name, and the bits per value of any recipe."""

from __future__ import annotations

import json
import sys
from collections import Counter
from importlib.resources import files
from typing import TYPE_CHECKING, Any, NamedTuple

from kvpack.errors import worst_exit_code
from kvpack.file.limits import MAX_HEADS, MAX_LAYERS, MAX_TOKENS
from kvpack.formats.base import MAX_DIM
from kvpack.formats.errors import InvalidParameter, MissingBasis, OutOfBounds
from kvpack.output import add_json, bytes_text, print_json, print_table

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from kvpack.coding.bases import Basis
    from kvpack.coding.recipes import Recipe
    from kvpack.models import LayerShape

DEFAULTS = {"layers": 32, "heads": 8, "tokens": 4096, "dim": 128}
"""The shape of a cache, unless the preset is for one model and names its own."""

_LIMITS = {"layers": MAX_LAYERS, "heads": MAX_HEADS, "tokens": MAX_TOKENS, "dim": MAX_DIM}


def add(commands: Any) -> None:
    """Add ``recipes`` to the command line."""
    description = (
        "List the presets, or the given recipes, with two counts of bits per value: nominal bits as the papers count them, "
        "and bits in the file, which count all bytes of a cache of the given shape. KL is the loss that was measured on a real model of "
        "head dim 64, for presets of kvpack's published measurement, and the next column says what keys a recipe is not for."
    )
    parser = commands.add_parser("recipes", help="list presets and their bits per value, or price any recipe", description=description)
    parser.add_argument("recipes", metavar="RECIPE", nargs="*", help="a preset, a recipe string, or @FILE (default: all presets)")
    parser.add_argument("--recipe", action="append", dest="more", default=[], metavar="RECIPE", help="another recipe; may be repeated")
    parser.add_argument(
        "--model", metavar="MODEL", help="price caches of this model, a folder or a name on the hub; only its configuration is read"
    )
    for name, description in (("layers", "layers"), ("heads", "KV heads"), ("tokens", "tokens"), ("dim", "head dim")):
        of_model = "as in the preset's model, otherwise " if name in ("layers", "dim") else ""
        parser.add_argument(f"--{name}", type=int, metavar="N", help=f"{description} of the cache (default: {of_model}{DEFAULTS[name]})")
    parser.add_argument(
        "--basis", metavar="FILE", help="the basis of recipes such as klt-1.75; layers, KV heads and head dim come from its model"
    )
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print one row per recipe, and the additions after the presets."""
    from kvpack.coding.presets import ADDITIONS, PUBLISHED

    arguments.recipes = [*arguments.recipes, *arguments.more]
    requested = {name: getattr(arguments, name) for name in DEFAULTS if getattr(arguments, name) is not None}
    for name, value in requested.items():
        if not 1 <= value <= _LIMITS[name]:
            raise InvalidParameter(f"--{name} is {value}, expected 1 to {_LIMITS[name]}")
    basis = None
    if arguments.basis is not None:
        from kvpack.coding.basis_sources import load_basis

        basis = load_basis(arguments.basis)
        requested = _shape_of(basis, requested)
    model = None if arguments.model is None else _model(arguments.model, requested, basis)
    rows, missing = [], {}
    for name in arguments.recipes or PUBLISHED:
        try:
            rows.append(_row(name, requested, basis, model, listed=not arguments.recipes))
        except MissingBasis as error:
            missing[name] = error
    if missing and not rows:
        raise next(iter(missing.values()))
    if model is not None and not arguments.recipes:
        # Presets of other models.
        rows = [row for row in rows if row["bytes"] is not None]
    additions = (
        [] if arguments.recipes else [{"name": name, "source": entry.source, "recipe": entry.recipe} for name, entry in ADDITIONS.items()]
    )
    for refusal in missing.values():
        print(f"kvpack: {refusal}", file=sys.stderr)
    code = worst_exit_code(refusal.exit_code for refusal in missing.values())
    if arguments.json:
        print_json({"recipes": rows, "additions": additions})
        return code
    shape = DEFAULTS | requested
    of_model = f" of {arguments.model}: {model.words}" if model is not None else f" of {shape['heads']} heads"
    print_table(
        f"files of {shape['tokens']:,} tokens{of_model}",
        ["recipe", "from", "layers", "head dim", "nominal bits", "bits in the file", "bytes", "KL", "breaks on", "lossless for"],
        (
            [
                row["name"],
                row["source"],
                str(row["layers"]),
                str(row["dim"]),
                _bits(row["nominal_bits"]),
                _bits(row["bits_per_value"]),
                "-" if row["bytes"] is None else bytes_text(row["bytes"]),
                "-" if row["kl_divergence"] is None else f"{row['kl_divergence']:.4f}",
                ", ".join(row["breaks_on"]) or "-",
                ", ".join(row["lossless"]) or "-",
            ]
            for row in rows
        ),
        left=2,
    )
    if any(row["kl_divergence"] is not None for row in rows):
        print("KL: SmolLM2-135M-Instruct, head dim 64, 768 tokens packed and 256 scored (kvpack bench quality)")
    if additions:
        print_table(
            "additions: write them after a recipe, as in octopus-3;boundary-1",
            ["name", "from"],
            ([entry["name"], entry["source"]] for entry in additions),
            left=2,
        )
    return code


class _Model(NamedTuple):
    """A model to be priced: its layers, the most common layer shape, and a text for each."""

    layers: list[LayerShape | None]
    shape: dict[str, int]
    words: str


def _model(path: str, requested: dict[str, int], basis: Basis | None) -> _Model:
    """Return the layers of the model ``path``. Raises InvalidParameter for a shape that contradicts it, or that the basis lacks."""
    from kvpack.models import cache_shapes

    layers = cache_shapes(path)
    held = [layer for layer in layers if layer is not None]
    if not held:
        raise InvalidParameter(f"{path}: has no layer with keys and values, so there is nothing to price")
    usual = Counter(held).most_common(1)[0][0]
    shape = {"layers": len(layers), "heads": usual.heads, "dim": usual.dim_k}
    for name in shape.keys() & requested.keys():
        # A basis sets them, too.
        if requested[name] != shape[name]:
            whose = f"{basis.where} is of caches with {requested[name]}" if basis is not None else f"--{name} is {requested[name]}"
            raise InvalidParameter(f"{whose}, but the caches of {path} have {shape[name]} {name}: leave one of them out")
    counts = Counter(held).most_common()
    words = ", ".join(
        f"{count} layers of {layer.heads} heads of dim {layer.dim_k}{'' if layer.dim_v == layer.dim_k else f' and {layer.dim_v}'}"
        f"{'' if layer.window is None else f' with a window of {layer.window:,} tokens'}"
        for layer, count in counts
    )
    return _Model(layers, shape, words)


def _bits(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _shape_of(basis: Basis, requested: dict[str, int]) -> dict[str, int]:
    """Complete ``requested`` with the shape of the caches that ``basis`` is for. Raises InvalidParameter for a different shape or unequal
    layers."""
    shapes = basis.shapes
    if len(shapes) != 1:
        raise InvalidParameter(f"{basis.where}: its layers have different shapes, {sorted(shapes)}, but a price needs a single one")
    (shape,) = shapes
    result = dict(zip(("layers", "heads", "dim"), (basis.layers_described, *shape), strict=True))
    for name in result.keys() & requested.keys():
        if requested[name] != result[name]:
            raise InvalidParameter(
                f"--{name} is {requested[name]}, and {basis.where} is the basis of caches with {result[name]}: leave it out"
            )
    return requested | result


def _row(name: str, requested: dict[str, int], basis: Basis | None, model: _Model | None, *, listed: bool) -> dict[str, Any]:
    """Return one recipe with its shape and bits; a ``listed`` one that does not support the shape has no bits."""
    from kvpack.coding.presets import PUBLISHED, Preset
    from kvpack.coding.recipes import Recipe, parse_recipe

    recipe = parse_recipe(name)
    if recipe.uses_basis and basis is not None:
        recipe = Recipe(recipe, basis)
    preset = PUBLISHED.get(name, Preset(recipe.text, ""))
    of_model = {name: value for name, value in (("layers", preset.layers), ("dim", preset.dim)) if value is not None}
    shape = DEFAULTS | of_model | requested | ({} if model is None else model.shape)
    nominal: float | None = None
    stored: float | None = None
    size: int | None = None
    try:
        priced = _uniform(**shape) if model is None else [_tokens_of(layer, shape["tokens"]) for layer in model.layers]
        nominal, stored, size = prices(recipe, priced)
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
        "bytes": size,
        "kl_divergence": _measured().get(name),
        "breaks_on": _unsuitable_keys(recipe, shape),
        "lossless": [] if stored is None else list(recipe.lossless(shape["layers"], shape["dim"])),
    }


def _measured() -> dict[str, float]:
    """Return the KL divergence of the recipes of the published measurement."""
    report = json.loads((files("kvpack.bench") / "measured" / "quality.json").read_text(encoding="utf-8"))
    return {row["recipe"]: row["kl_divergence"] for row in report["recipes"]}


def _unsuitable_keys(recipe: Recipe, shape: dict[str, int]) -> list[str]:
    """Return descriptions of the keys for which the recipe is unsuitable."""
    from kvpack.cache.packing import spreads_channels

    try:
        codecs = {recipe.codec(layer, shape["layers"], "k", shape["dim"]) for layer in range(shape["layers"])}
    except (InvalidParameter, MissingBasis):
        return []
    return ["outlier channels"] if any(map(spreads_channels, codecs)) else []


class _Priced(NamedTuple):
    """A layer of a cache whose size is computed."""

    heads: int
    dim_k: int
    dim_v: int
    tokens: int


def _uniform(layers: int, heads: int, tokens: int, dim: int) -> list[_Priced | None]:
    return [_Priced(heads, dim, dim, tokens)] * layers


def _tokens_of(layer: LayerShape | None, tokens: int) -> _Priced | None:
    """Return a layer of a model after ``tokens`` tokens; a sliding window limits its tokens."""
    return None if layer is None else _Priced(*layer[:3], tokens if layer.window is None else min(tokens, layer.window))


def rates(recipe: Recipe, layers: int, heads: int, tokens: int, dim: int) -> tuple[float, float]:
    """Return the first two results of ``prices`` for identical layers."""
    return prices(recipe, _uniform(layers, heads, tokens, dim))[:2]


def prices(recipe: Recipe, layers: Sequence[_Priced | None]) -> tuple[float, float, int]:
    """Return the nominal bits per value, and from the layout the bits per value and bytes of a file of one sequence.

    The number of outliers of a cache depends on its values; here it is 0, and so is that of raw tokens of low norm. What `lossless` takes
    depends on them too; here they are normally distributed.
    Raises OutOfBounds if the recipe names other layers, InvalidParameter when a codec does not support ``dim``,
    InvalidHeader or LimitExceeded for sizes that no file can hold.
    """
    from kvpack.file.container import file_size
    from kvpack.file.header import Contents, LayerEntry, SideEntry, features_of

    recipe.check_layers(len(layers))
    codecs: dict[Any, int] = {}
    entries, nominal, values = [], 0.0, 0
    for number, layer in enumerate(layers):
        sides: list[SideEntry | None] = [None, None]
        if layer is not None:
            tail = layer.tokens % recipe.window if recipe.window else 0
            for place, (side, dim) in enumerate((("k", layer.dim_k), ("v", layer.dim_v))):
                codec = recipe.codec(number, len(layers), side, dim)
                runs = (layer.tokens - tail,) if layer.tokens > tail else ()
                rows = tuple(codec.usual_entry_counts(1, layer.heads, sum(runs)).items())
                index = codecs.setdefault(codec, len(codecs))
                sides[place] = SideEntry(index, 1, layer.heads, runs, tail, "bf16", recipe.window, rows)
                held = layer.heads * layer.tokens * dim
                nominal, values = nominal + codec.nominal_bits * held, values + held
        entries.append(LayerEntry(*sides))
    contents = Contents(codecs=tuple(codecs), layers=tuple(entries), recipe=recipe.text, required=features_of(codecs))
    size = file_size(contents)
    return nominal / values, 8 * size / values, size
