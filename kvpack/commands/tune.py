"""kvpack tune: a recipe found for one model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvpack.output import add_json, print_report, progress

if TYPE_CHECKING:
    import argparse


def add(commands: Any) -> None:
    """Add ``tune`` to the command line."""
    parser = commands.add_parser(
        "tune",
        help="find the recipe of a model for a budget of bits",
        description="Choose a codec for every layer and side of a model under a budget of bytes, by what the model predicts over "
        "packed files of its own KV caches, and write a recipe file.",
    )
    parser.add_argument("--model", metavar="DIR", help="a transformers causal language model; bytes are tokens without a tokenizer")
    parser.add_argument("--text", metavar="FILE", help="the text that it reads (default: the demo's text; its model without --model)")
    parser.add_argument(
        "--bits", type=float, required=True, metavar="N", help="the budget: bits per value, counting all bytes of a window's file"
    )
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--fast", action="store_true", help="3 to 5 recipes: finer keys or values in the first layers")
    mode.add_argument("--thorough", action="store_true", help="measure every codec in every layer and side, then choose (default)")
    parser.add_argument(
        "--candidate", action="append", metavar="CODEC", help="a codec to choose from, such as k=scalar:b=3; may be repeated"
    )
    parser.add_argument("--out", default="recipe.txt", metavar="FILE", help="the recipe file to write (default: recipe.txt)")
    parser.add_argument("--measurements", metavar="FILE", help="keep what was measured here, and go on from what it holds")
    parser.add_argument("--tokens", type=int, metavar="N", help="of a window (default: 1024, or what the model and the text have)")
    parser.add_argument("--score", type=int, metavar="N", help="the window's last tokens, scored over what is packed (default: 256)")
    parser.add_argument("--windows", type=int, metavar="N", help="of the text, for the search (default: 4, or what fits)")
    parser.add_argument("--held-out", type=int, metavar="N", help="windows for the comparison alone (default: 16, or what fits)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the windows (default: 0)")
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Search, write the recipe file and print what it is worth."""
    from kvpack.models import transformers_library

    # Refuses with a message where transformers is missing; what follows imports it.
    transformers_library()
    from kvpack.tuning import report, tune

    with progress("tune", arguments) as callback:
        found = tune.run(
            arguments.model,
            arguments.text,
            arguments.bits,
            tune.Settings(arguments.tokens, arguments.score, arguments.windows, arguments.held_out, arguments.seed),
            quick=arguments.fast,
            candidates=arguments.candidate,
            out=arguments.out,
            measurements=arguments.measurements,
            progress=callback,
        )
    print_report(found, report.show, arguments)
    return 0
