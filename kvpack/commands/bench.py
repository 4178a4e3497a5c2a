"""kvpack bench: measurements on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .output import add_json, print_json, progress

if TYPE_CHECKING:
    import argparse


def add(commands: Any) -> None:
    """Add ``bench`` to the command line."""
    parser = commands.add_parser("bench", help="measure on this machine", description="Measure kvpack on this machine.")
    kinds = parser.add_subparsers(title="measurements", metavar="WHAT", required=True)
    io = kinds.add_parser(
        "io",
        help="encode, save, load and unpack, beside safetensors and a memory copy",
        description="Time encode, save, load and unpack on one KV cache, beside safetensors and a memory copy.",
    )
    source = io.add_mutually_exclusive_group()
    source.add_argument("--model", metavar="DIR", help="take the KV cache of this transformers model")
    source.add_argument(
        "--synthetic",
        metavar="LxBxHxTxD",
        help="take Gaussian values: layers x batch x heads x tokens x dim (default: 8x1x8x4096x128)",
    )
    io.add_argument("--text", metavar="FILE", help="the model's input (default: the demo's text; its model without --model)")
    io.add_argument("--tokens", type=int, metavar="N", help="of the model's input (default: 4096, or what the text has)")
    io.add_argument("--recipe", action="append", metavar="RECIPE", help="a recipe to measure; may be repeated (default: one a family)")
    io.add_argument("--repeats", type=int, default=5, metavar="N", help="timings whose median is reported (default: 5)")
    io.add_argument("--folder", metavar="DIR", help="write the files here (default: a temporary folder)")
    add_json(io)
    io.set_defaults(run=run_io)


def run_io(arguments: argparse.Namespace) -> int:
    """Measure and print one table."""
    from kvpack import bench_io
    from kvpack.recipes import parse_recipe

    recipes = arguments.recipe or list(bench_io.RECIPES)
    for recipe in recipes:
        parse_recipe(recipe)
    with progress("bench io", arguments) as callback:
        report = bench_io.run(
            bench_io.source(arguments.model, arguments.text, arguments.tokens, arguments.synthetic),
            recipes,
            repeats=arguments.repeats,
            folder=arguments.folder,
            progress=callback,
        )
    if arguments.json:
        print_json(report)
    else:
        bench_io.show(report)
    return 0
