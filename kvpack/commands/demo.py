"""kvpack demo: one process packs a small model's KV cache to files, and other processes continue from them."""

from __future__ import annotations

import argparse
from typing import Any

from kvpack.output import add_json, print_report, progress


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "demo",
        help="run a small model over packed files",
        description="Pack a small model's KV cache in several recipes, and continue from each file in another process.",
    )
    parser.add_argument("--out", metavar="DIR", help="write the files to this folder (default: a temporary one)")
    parser.add_argument("--recipe", action="append", metavar="RECIPE", help="a recipe to show; may be repeated (default: eight)")
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from kvpack.demo import files as demo

    recipes = arguments.recipe or list(demo.RECIPES)
    with progress("demo") as callback:
        report = demo.run(recipes, arguments.out, progress=callback)
    return print_report(report, demo.show, arguments)
