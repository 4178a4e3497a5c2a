"""kvpack calibrate: create the basis of a model."""

from __future__ import annotations

import argparse
from typing import Any

from kvpack.output import add_json, parse_seed, print_report, progress

from .bench import MODEL_HELP, TEXT_HELP
from .chats import add_device, chosen_device
from .outputs import add_force, check_output


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "calibrate",
        help="make the basis of a model: klt and transform need it, and kvpack-2 to kvpack-4 lose less with it",
        description="Read a text with a model, compute the basis that describes its keys and values best, and write it to a file. "
        "An interrupted calibration resumes where it stopped.",
    )
    parser.add_argument("--model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("--text", metavar="FILE", help=TEXT_HELP)
    add_device(parser, "float32")
    parser.add_argument("--out", default="model.kvbasis", metavar="FILE", help="the basis file to write (default: model.kvbasis)")
    parser.add_argument("--tokens", type=int, metavar="N", help="tokens per window (default: 4096, or fewer if they do not fit)")
    parser.add_argument("--score", type=int, metavar="N", help="predict N tokens of each window, at several positions in it (default: 256)")
    parser.add_argument("--windows", type=int, metavar="N", help="number of windows of the text (default: 16, or as many as fit)")
    parser.add_argument("--twin", type=float, metavar="C", help="calibrate the twin of the model that bench quality --twin C measures")
    parser.add_argument("--rows", default="fp16", choices=("fp16", "fp32"), help="the dtype of the rows (default: fp16)")
    parser.add_argument(
        "--scope",
        choices=("head", "layer", "none"),
        help="what a frame of the transform codec covers: one head, or all heads of a layer, which needs fewer bits but more "
        "multiplications to decode (default: layer up to 512 channels, otherwise head); 'none' omits frames",
    )
    parser.add_argument(
        "--balanced-only",
        action="store_true",
        help="make only what kvpack-2 to kvpack-4 use: widths, and means and balanced frames of keys; reads two windows of 2048 tokens by "
        "default, and takes a fraction of the time",
    )
    parser.add_argument(
        "--widths",
        type=int,
        default=2,
        metavar="N",
        help="measure the loss of each layer's keys and values at 2 bits in N windows of 1024 tokens, from which kvpack-2 to kvpack-4 "
        "choose widths; the last 256 tokens are read twice per layer (default: 2; 0 omits widths)",
    )
    parser.add_argument(
        "--positions",
        type=int,
        metavar="N",
        help="describe keys for the first N positions of a context (default: those of the model, at most 32768, and for klt 4096)",
    )
    parser.add_argument("--seed", type=parse_seed, default=0, metavar="N", help="random seed for choosing windows (default: 0)")
    add_force(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    check_output(arguments, arguments.out, arguments.text)
    from kvpack.models import import_transformers

    # Raises a clear error if transformers is missing, before the next line imports it.
    import_transformers()
    from kvpack.tuning import calibrate

    settings = calibrate.CalibrationSettings(
        arguments.tokens,
        arguments.score,
        arguments.windows,
        arguments.twin,
        arguments.seed,
        arguments.scope,
        arguments.balanced_only,
        arguments.widths,
        arguments.positions,
        chosen_device(arguments),
    )
    with progress("calibrate") as callback:
        report = calibrate.run(arguments.model, arguments.text, arguments.out, settings, dtype=arguments.rows, progress=callback)
    return print_report(report, calibrate.show, arguments)
