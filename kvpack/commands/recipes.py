"""kvpack recipes: list presets, and show the bits per value of any recipe."""

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

RECOMMENDED = {
    "lossless": "no bit may change",
    "fp8": "the loss of fp8 engines",
    "kvpack-4": "a good default",
    "kvpack-4-trellis": "less loss, slow to pack",
    "kvpack-3": "a small loss is fine",
    "kvpack-3-trellis": "less loss, slow to pack",
    "kvpack-2": "measure its loss first",
    "kvpack-2-trellis": "less loss, slow to pack",
    "transform-1.5": "smallest; needs a basis",
    "transform-1": "smallest; needs a basis",
    "transform-0.6": "smallest; needs a basis",
}
"""The recipes that are listed without ``--all``, each with a note."""

_KLT, _TRANSFORM = "calibrated for the model", "calibrated for the model, entropy-coded"
CALIBRATED = dict.fromkeys(("klt-2.5", "klt-1.75", "klt-1.25"), _KLT) | dict.fromkeys(
    ("transform-1.5", "transform-1", "transform-0.6"), _TRANSFORM
)
"""Measured recipes that need a basis, each with its source. Their codecs also support other numbers of bits."""

DEFAULTS = {"layers": 32, "heads": 8, "tokens": 4096, "dim": 128}
"""Default shape of the cache. Presets for one model have that model's number of layers and head dim."""

MEASURED_MODEL = "SmolLM2-135M-Instruct"
"""The model on which the published losses were measured."""

_LIMITS = {"layers": MAX_LAYERS, "heads": MAX_HEADS, "tokens": MAX_TOKENS, "dim": MAX_DIM}


def add_command(commands: Any) -> None:
    description = (
        "List the recommended recipes, or compute the size of the given ones. Bits in the file count all bytes of a cache of the given "
        "shape, and "
        "nominal bits are counted as in the papers. KL is the loss that was measured on a real model of head dim 64, for presets of "
        "kvpack's published measurement. 'Breaks on' lists the kinds of keys that a recipe does not suit."
    )
    parser = commands.add_parser("recipes", help="list bits per value of presets and other recipes", description=description)
    parser.add_argument("recipes", metavar="RECIPE", nargs="*", help="a preset, a recipe string, or @FILE (default: the recommended ones)")
    parser.add_argument("--recipe", action="append", dest="more", default=[], metavar="RECIPE", help="another recipe; may be repeated")
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="compute bits per value for caches of this model (a folder or a Hugging Face Hub name); only its configuration is read",
    )
    for name, description in (("layers", "layers"), ("heads", "KV heads"), ("tokens", "tokens"), ("dim", "head dim")):
        note = "as in the preset's model, otherwise " if name in ("layers", "dim") else ""
        parser.add_argument(f"--{name}", type=int, metavar="N", help=f"{description} of the cache (default: {note}{DEFAULTS[name]})")
    parser.add_argument(
        "--basis", metavar="FILE", help="the basis of recipes such as klt-1.75; layers, KV heads and head dim come from its model"
    )
    parser.add_argument("--all", action="store_true", help="list all presets, with all columns; --json always does")
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print one row per recipe. A list of all presets is followed by the additions to recipes."""
    from kvpack.coding.presets import ADDITIONS, PUBLISHED

    lists_all = arguments.all or arguments.json

    arguments.recipes = [*arguments.recipes, *arguments.more]
    requested = {name: getattr(arguments, name) for name in DEFAULTS if getattr(arguments, name) is not None}
    for name, value in requested.items():
        if not 1 <= value <= _LIMITS[name]:
            raise InvalidParameter(f"--{name} is {value}, expected 1 to {_LIMITS[name]}")
    basis = None
    if arguments.basis is not None:
        from kvpack.coding.basis_sources import load_basis

        basis = load_basis(arguments.basis)
        requested = shape_with_basis(basis, requested)
    model = None if arguments.model is None else _model_shape(arguments.model, requested, basis)
    rows: list[dict[str, Any]] = []
    missing: list[MissingBasis] = []
    measured = _published_measurements()
    listed = [*PUBLISHED, *CALIBRATED] if lists_all else list(RECOMMENDED)
    names = arguments.recipes or listed
    calibrated = [name for name in names if name in CALIBRATED and basis is None]
    for name in [name for name in names if name not in calibrated]:
        try:
            rows.append(_row(name, requested, basis, model, measured.get(name), listed=not arguments.recipes))
        except MissingBasis as error:
            missing.append(error)
    if missing and not rows and not calibrated:
        raise missing[0]
    if model is not None and not arguments.recipes:
        # Drop presets for other models.
        rows = [row for row in rows if row["bytes"] is not None]
    additions = [
        {"name": name, "source": entry.source, "recipe": entry.recipe}
        for name, entry in ADDITIONS.items()
        if lists_all and not arguments.recipes
    ]
    for refusal in missing:
        print(f"kvpack: {refusal}", file=sys.stderr)
    code = worst_exit_code(refusal.exit_code for refusal in missing)
    without_basis = [
        {"name": name, "source": CALIBRATED[name], "measured_bits": measured[name].bits, "kl_divergence": measured[name].divergence}
        for name in calibrated
    ]
    if arguments.json:
        print_json({"recipes": rows, "additions": additions, "calibrated": without_basis})
        return code
    _show(arguments, rows, without_basis, DEFAULTS | requested, model)
    if additions:
        print_table(
            "additions: write them after a recipe, as in octopus-3;boundary-1",
            ["name", "from"],
            ([entry["name"], entry["source"]] for entry in additions),
            text_columns=2,
        )
    return code


def _show(
    arguments: argparse.Namespace,
    rows: Sequence[dict[str, Any]],
    without_basis: Sequence[dict[str, Any]],
    shape: dict[str, int],
    model: _ModelShape | None,
) -> None:
    """Print the table of ``rows`` and explain its columns. The rows are for caches of ``model`` or, if it is None, of ``shape``."""
    shapes = {(row["layers"], row["dim"]) for row in rows} or {(shape["layers"], shape["dim"])}
    same_shape = len(shapes) == 1
    if model is not None:
        suffix = f" of {arguments.model}: {model.words}"
    elif same_shape:
        ((layers, dim),) = shapes
        suffix = f": {layers} layers of {shape['heads']} heads of dim {dim}"
    else:
        suffix = f" of {shape['heads']} heads"
    title = f"files of {shape['tokens']:,} tokens{suffix}"
    if arguments.all or not same_shape:
        _print_all_columns(title, rows, without_basis)
    else:
        _print_table(title, rows, without_basis, notes=not arguments.recipes)
    if without_basis:
        print(f"* measured in files of 1,024 tokens of {MEASURED_MODEL}, with its basis.")
        print("  For other shapes, pass --basis FILE with your model's (kvpack calibrate).")
    measured = {row["kl_divergence"] is not None for row in [*rows, *without_basis]}
    if True in measured:
        print(f"KL: {MEASURED_MODEL}, head dim 64, 768 tokens packed, 256 scored")
    if measured == {True, False}:
        print("    -: not measured there; kvpack bench quality --recipe RECIPE measures it")
    if any("lossless" in row["recipe"] and "dtype" not in row["recipe"] for row in rows):
        print("lossless: estimated for bf16 values; fp16 values take about 14 bits")
    if not arguments.recipes and not arguments.all:
        print("kvpack recipes --all lists all presets and columns")


def _print_table(title: str, rows: Sequence[dict[str, Any]], without_basis: Sequence[dict[str, Any]], *, notes: bool) -> None:
    """Print the columns that fit in 80 characters. With ``notes``, one column has notes on the recipes; otherwise, it lists unsuitable
    keys.
    """
    print_table(
        title,
        ["recipe", "note" if notes else "breaks on", "bits in\nthe file", "bytes", "KL"],
        [
            *(
                [
                    row["name"],
                    RECOMMENDED.get(row["name"], "") if notes else ", ".join(row["breaks_on"]) or "-",
                    _format_bits(row["bits_per_value"]),
                    _format_size(row["bytes"]),
                    _format_divergence(row["kl_divergence"]),
                ]
                for row in rows
            ),
            *(
                [
                    row["name"], RECOMMENDED[row["name"]] if notes else "needs a basis", f"{row['measured_bits']:.2f} *", "-",
                    _format_divergence(row["kl_divergence"]),
                ]
                for row in without_basis
            ),
        ],
        text_columns=2,
    )  # fmt: skip


def _print_all_columns(title: str, rows: Sequence[dict[str, Any]], without_basis: Sequence[dict[str, Any]]) -> None:
    print_table(
        title,
        ["recipe", "from", "layers", "head dim", "nominal bits", "bits in the file", "bytes", "KL", "breaks on", "lossless for"],
        [
            *(
                [
                    row["name"],
                    row["source"],
                    str(row["layers"]),
                    str(row["dim"]),
                    _format_bits(row["nominal_bits"]),
                    _format_bits(row["bits_per_value"]),
                    _format_size(row["bytes"]),
                    _format_divergence(row["kl_divergence"]),
                    ", ".join(row["breaks_on"]) or "-",
                    ", ".join(row["lossless"]) or "-",
                ]
                for row in rows
            ),
            *(
                [
                    row["name"], f"{row['source']}; needs a basis", "-", "-", "-", f"{row['measured_bits']:.2f} *", "-",
                    _format_divergence(row["kl_divergence"]), "-", "-",
                ]
                for row in without_basis
            ),
        ],
        text_columns=2,
    )  # fmt: skip


class _ModelShape(NamedTuple):
    """The shape of a model's caches: all layers, the most common layer shape, and a description for the table's title."""

    layers: list[LayerShape | None]
    shape: dict[str, int]
    words: str


def _model_shape(path: str, requested: dict[str, int], basis: Basis | None) -> _ModelShape:
    """Return the shape of the caches of the model at ``path``. Raises InvalidParameter if ``requested`` contradicts it."""
    from kvpack.models import cache_shapes

    layers = cache_shapes(path)
    present = [layer for layer in layers if layer is not None]
    if not present:
        raise InvalidParameter(f"{path} has no layers with keys and values: pass another model")
    usual = Counter(present).most_common(1)[0][0]
    shape = {"layers": len(layers), "heads": usual.heads, "dim": usual.dim_k}
    for name in shape.keys() & requested.keys():
        # The basis may have set them.
        if requested[name] != shape[name]:
            source = f"{basis.where} is for caches with {requested[name]} {name}" if basis is not None else f"--{name} is {requested[name]}"
            raise InvalidParameter(f"{source}, but the caches of {path} have {shape[name]} {name}: omit one of the two options")
    counts = Counter(present).most_common()
    words = ", ".join(
        f"{count} layers of {layer.heads} heads of dim {layer.dim_k}{'' if layer.dim_v == layer.dim_k else f' and {layer.dim_v}'}"
        f"{'' if layer.window is None else f' with a window of {layer.window:,} tokens'}"
        for layer, count in counts
    )
    return _ModelShape(layers, shape, words)


def _format_bits(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _format_size(value: int | None) -> str:
    return "-" if value is None else bytes_text(value)


def _format_divergence(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}" if value else "0"


def shape_with_basis(basis: Basis, requested: dict[str, int]) -> dict[str, int]:
    """Return ``requested`` plus the layer count, head count and head dim of the model that ``basis`` is for.

    Raises InvalidParameter if ``requested`` contradicts them, or if the layers differ in shape.
    """
    shapes = basis.shapes
    if len(shapes) != 1:
        raise InvalidParameter(f"{basis.where}: its layers have different shapes, {sorted(shapes)}: pass --model instead")
    (shape,) = shapes
    result = dict(zip(("layers", "heads", "dim"), (basis.described_layer_count, *shape), strict=True))
    for name in result.keys() & requested.keys():
        if requested[name] != result[name]:
            raise InvalidParameter(
                f"--{name} is {requested[name]}, but {basis.where} is for caches with {result[name]} {name}: omit --{name}"
            )
    return requested | result


def _row(
    name: str,
    requested: dict[str, int],
    basis: Basis | None,
    model: _ModelShape | None,
    published: _PublishedMeasurement | None,
    *,
    listed: bool,
) -> dict[str, Any]:
    """Return the row of the recipe ``name``. If the recipe does not support the shape, raises the error or, if ``listed``, leaves its bits
    None.
    """
    from kvpack.coding.presets import KVPACK_PRESETS, PUBLISHED, Preset
    from kvpack.coding.recipes import Recipe, parse_recipe

    recipe = parse_recipe(name)
    if recipe.uses_basis and basis is not None:
        recipe = Recipe(recipe, basis)
        # The loss of kvpack's own presets was measured without a basis.
        published = None if name in KVPACK_PRESETS else published
    preset = PUBLISHED.get(name, Preset(recipe.text, "", raw=""))
    model_shape = {name: value for name, value in (("layers", preset.layers), ("dim", preset.dim)) if value is not None}
    shape = DEFAULTS | model_shape | requested | ({} if model is None else model.shape)
    nominal: float | None = None
    stored: float | None = None
    size: int | None = None
    try:
        priced = _equal_layers(**shape) if model is None else [_layer_after(layer, shape["tokens"]) for layer in model.layers]
        nominal, stored, size = recipe_sizes(recipe, priced)
    except (InvalidParameter, OutOfBounds):
        if not listed:
            raise
    lossless = [] if stored is None else list(recipe.lossless(shape["layers"], shape["dim"]))
    return {
        "name": name,
        "source": preset.source,
        "recipe": preset.recipe,
        **shape,
        "nominal_bits": nominal,
        "bits_per_value": stored,
        "bytes": size,
        "kl_divergence": 0.0 if "bf16" in lossless else None if published is None else published.divergence,
        "breaks_on": _unsuitable_keys(recipe, shape),
        "lossless": lossless,
    }


class _PublishedMeasurement(NamedTuple):
    """The published measurement of a recipe: its bits per value in files of 1,024 tokens, and its KL divergence."""

    bits: float
    divergence: float


def _published_measurements() -> dict[str, _PublishedMeasurement]:
    report = json.loads((files("kvpack.bench") / "measured" / "quality.json").read_text(encoding="utf-8"))
    return {row["recipe"]: _PublishedMeasurement(row["bits_per_value"], row["kl_divergence"]) for row in report["recipes"]}


def _unsuitable_keys(recipe: Recipe, shape: dict[str, int]) -> list[str]:
    try:
        codecs = {recipe.codec(layer, shape["layers"], "k", shape["dim"]) for layer in range(shape["layers"])}
    except (InvalidParameter, MissingBasis):
        return []
    return ["outlier channels"] if any(codec.spreads_channels for codec in codecs) else []


class _SizedLayer(NamedTuple):
    """The shape of a cache layer, used to compute its size."""

    heads: int
    dim_k: int
    dim_v: int
    tokens: int


def _equal_layers(layers: int, heads: int, tokens: int, dim: int) -> list[_SizedLayer | None]:
    return [_SizedLayer(heads, dim, dim, tokens)] * layers


def _layer_after(layer: LayerShape | None, tokens: int) -> _SizedLayer | None:
    """Return the shape of a model's layer after ``tokens`` tokens. A layer with a sliding window keeps fewer tokens."""
    return None if layer is None else _SizedLayer(*layer[:3], tokens if layer.window is None else min(tokens, layer.window))


def recipe_sizes(recipe: Recipe, layers: Sequence[_SizedLayer | None]) -> tuple[float, float, int]:
    """Return nominal bits per value, bits per value of a file with one sequence, and the file's size in bytes.

    Sizes that depend on the values are estimated. The estimate assumes no outliers, no raw tokens of low norm and, for the codec lossless,
    normally distributed values. Raises OutOfBounds if the recipe selects a missing layer, and InvalidParameter, InvalidHeader or
    LimitExceeded for an unsupported shape.
    """
    from kvpack.file.container import file_size
    from kvpack.file.header import Contents, LayerEntry, SideEntry, list_features

    recipe.check_layers(len(layers))
    codecs: dict[Any, int] = {}
    entries, nominal, values = [], 0.0, 0
    for number, layer in enumerate(layers):
        sides: list[SideEntry | None] = [None, None]
        if layer is not None:
            tail = layer.tokens % recipe.window if recipe.window else 0
            for position, (side, dim) in enumerate((("k", layer.dim_k), ("v", layer.dim_v))):
                codec = recipe.codec(number, len(layers), side, dim)
                runs = (layer.tokens - tail,) if layer.tokens > tail else ()
                rows = tuple(codec.default_entry_counts(1, layer.heads, sum(runs)).items())
                index = codecs.setdefault(codec, len(codecs))
                sides[position] = SideEntry(index, 1, layer.heads, runs, tail, "bf16", recipe.window, rows)
                count = layer.heads * layer.tokens * dim
                nominal, values = nominal + codec.nominal_bits * count, values + count
        entries.append(LayerEntry(*sides))
    contents = Contents(codecs=tuple(codecs), layers=tuple(entries), recipe=recipe.text, required=list_features(codecs))
    size = file_size(contents)
    return nominal / values, 8 * size / values, size
