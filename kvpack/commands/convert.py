"""kvpack convert: re-encode a file with a different recipe."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from kvpack.formats.errors import InvalidParameter
from kvpack.output import add_json, print_report, printable, progress

from .outputs import add_force, check_output

if TYPE_CHECKING:
    from kvpack import Cache
    from kvpack.coding.recipes import Recipe


RECIPE_HELP = "a preset such as kvpack-3, a recipe string, or @FILE to read a recipe file"


def add_command(commands: Any) -> None:
    parser = commands.add_parser("convert", help="write a file in another recipe", description="Decode a kvpack file and encode it again.")
    parser.add_argument("input", metavar="IN", help="a kvpack file")
    parser.add_argument("output", metavar="OUT", help="the kvpack file to write")
    recipe = parser.add_mutually_exclusive_group(required=True)
    recipe.add_argument("recipe", metavar="RECIPE", nargs="?", help=RECIPE_HELP)
    recipe.add_argument("--recipe", dest="named", metavar="RECIPE", help="another way to pass RECIPE, as in other commands")
    add_basis_option(parser)
    add_write_options(parser, compresses="if the input file is compressed")
    add_json(parser)
    parser.set_defaults(run=run)


def add_write_options(parser: argparse.ArgumentParser, *, compresses: str = "no") -> None:
    """Add the options of all commands that write kvpack files. ``compresses`` is the default of ``--compress``, for its help."""
    parser.add_argument(
        "--compress",
        action=argparse.BooleanOptionalAction,
        help=f"compress tensors with zstd if that saves 3%% or more (default: {compresses})",
    )
    parser.add_argument("--durable", action="store_true", help="return only after the file has been flushed to the disk")
    add_force(parser)


def add_basis_option(parser: argparse.ArgumentParser) -> None:
    """Add the option ``--basis``, for files and recipes with the codecs klt and transform."""
    parser.add_argument(
        "--basis",
        metavar="FILE",
        help="the basis of files and recipes that use the klt or transform codec; for files, a folder that contains it works too",
    )


def parse_recipe_option(arguments: argparse.Namespace, *, reads_cache: bool = True) -> Recipe:
    """Return the recipe to write, with the basis if the recipe uses one.

    Raises InvalidParameter if a basis is set but neither the recipe nor, with ``reads_cache``, the input file can use it.
    """
    from kvpack.coding.recipes import Recipe, parse_recipe

    recipe = parse_recipe(arguments.recipe)
    if arguments.basis is not None and not reads_cache and not recipe.uses_basis:
        raise InvalidParameter(f"recipe {recipe.text!r} uses no basis: omit --basis, or pass a recipe that does, such as klt-1.75")
    return Recipe(recipe, arguments.basis) if recipe.uses_basis else recipe


def run(arguments: argparse.Namespace) -> int:
    import kvpack
    from kvpack.coding.recipes import preset_name

    if arguments.recipe is None:
        arguments.recipe = arguments.named
    check_output(arguments, arguments.output, arguments.input, arguments.basis, arguments.recipe)
    # Read a copy, because truncating a mapped file would kill this process.
    recipe = parse_recipe_option(arguments)
    with progress("read") as callback:
        cache = kvpack.load(arguments.input, copy=True, basis=arguments.basis, progress=callback)
    with progress("encode") as callback:
        converted = cache.convert(recipe, progress=callback)
    if arguments.compress is None:
        arguments.compress = _is_compressed(arguments.input)
    save(converted, arguments)
    if _adds_bits(cache, converted):
        note = f"{arguments.output} has more bits per value than {arguments.input}, but no better quality"
        name = preset_name(cache.recipe) or cache.recipe
        reason = f"values that {name} has rounded stay rounded. If possible, convert the original values instead"
        print(f"kvpack: note: {printable(note)}: {printable(reason)}", file=sys.stderr)
    return 0


def _is_compressed(path: str) -> bool:
    from kvpack.file.container import open_file

    with open_file(path) as file:
        return any(tensor.filter == "zstd" for tensor in file.header.tensors)


def _adds_bits(cache: Cache, converted: Cache) -> bool:
    """Return True if values that had already been rounded were re-encoded with more bits."""
    return any(
        old.runs and old.codec.exact_dtype is None and new.codec.nominal_bits > old.codec.nominal_bits
        for before, after in zip(cache, converted, strict=True)
        for old, new in zip(before.sides.values(), after.sides.values(), strict=True)
    )


def save(cache: Cache, arguments: argparse.Namespace) -> None:
    """Write ``cache`` to ``arguments.output`` and report its size."""
    import kvpack

    with progress("write") as callback:
        size = kvpack.save(cache, arguments.output, compress=bool(arguments.compress), durable=arguments.durable, progress=callback)
    report_saved(cache, size, arguments)


def report_saved(cache: Cache, size: int, arguments: argparse.Namespace) -> None:
    """Report the size of the file written to ``arguments.output``."""
    bits = 8 * size / cache.values if cache.values else 0.0
    report = {"file": arguments.output, "bytes": size, "values": cache.values, "bits_per_value": bits, "recipe": cache.recipe}
    print_report(report, f"{arguments.output}: {size:,} bytes, {bits:.2f} bits per value", arguments)
