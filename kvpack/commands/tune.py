"""kvpack tune: find a recipe for one model."""

from __future__ import annotations

import argparse
from typing import Any

from kvpack.output import add_json, parse_seed, print_report, progress

from .bench import MODEL_HELP, TEXT_HELP
from .chats import add_device, chosen_device
from .outputs import add_force, check_output


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "tune",
        help="find the best recipe for a model within a budget of bits",
        description="Choose a codec for the keys and for the values of every layer within a budget of bits, by the model's own "
        "predictions over packed files of its KV caches, and write a recipe file.",
    )
    parser.add_argument("--model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("--text", metavar="FILE", help=TEXT_HELP)
    add_device(parser, "float32")
    parser.add_argument(
        "--bits", type=float, required=True, metavar="N", help="the budget in bits per value, counting every byte of a file"
    )
    parser.add_argument(
        "--file-tokens",
        type=int,
        default=4096,
        metavar="N",
        help="count the bits in a file of N tokens; the shorter a file, the more header and raw tokens it has per value (default: 4096, as "
        "in kvpack recipes)",
    )
    parser.add_argument(
        "--widths",
        action="store_true",
        help="measure 2 bits in one layer and side at a time, and choose widths from the losses: two recipes per layer (default: measure "
        "every codec in every layer and side)",
    )
    parser.add_argument(
        "--candidate", action="append", metavar="CODEC", help="a candidate codec, such as k=scalar:b=3; may be repeated"
    )
    parser.add_argument(
        "--basis",
        metavar="FILE",
        help="the model's basis (kvpack calibrate makes one): adds the codecs klt and transform to the candidates, or with --widths the "
        "balanced frames of keys",
    )
    parser.add_argument(
        "--attendable",
        action="store_true",
        help="omit codecs that attention must decode tile by tile (transform, which is meant for stored files)",
    )
    parser.add_argument("--out", default="recipe.txt", metavar="FILE", help="the recipe file to write (default: recipe.txt)")
    parser.add_argument("--measurements", metavar="FILE", help="store the measurements in this file, and reuse those already in it")
    parser.add_argument("--tokens", type=int, metavar="N", help="tokens per window (default: 1024, or fewer if they do not fit)")
    parser.add_argument("--score", type=int, metavar="N", help="score the last N tokens of each window (default: 256)")
    parser.add_argument(
        "--windows", type=int, metavar="N", help="number of windows of the text for the search (default: 4, or as many as fit)"
    )
    parser.add_argument(
        "--held-out", type=int, metavar="N", help="number of windows that only the final comparison uses (default: 16, or as many as fit)"
    )
    parser.add_argument("--seed", type=parse_seed, default=0, metavar="N", help="random seed for choosing windows (default: 0)")
    add_force(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    check_output(arguments, arguments.out, arguments.text, arguments.basis, arguments.measurements)
    from kvpack.models import import_transformers

    # Raises a clear error if transformers is missing, before the next line imports it.
    import_transformers()
    from kvpack.tuning import report, tune

    settings = tune.TuningSettings(
        arguments.tokens, arguments.score, arguments.windows, arguments.held_out, arguments.seed, chosen_device(arguments),
        arguments.file_tokens,
    )  # fmt: skip
    with progress("tune") as callback:
        result = tune.run(
            arguments.model,
            arguments.text,
            arguments.bits,
            settings,
            widths=arguments.widths,
            candidates=arguments.candidate,
            out=arguments.out,
            measurements=arguments.measurements,
            basis=arguments.basis,
            only_attendable=arguments.attendable,
            progress=callback,
        )
    return print_report(result, report.show, arguments)
