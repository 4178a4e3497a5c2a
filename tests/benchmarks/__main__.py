"""Measurements for developers: ``make bench-fidelity``, ``bench-overview``, ``bench-pages``, ``bench-decode`` and ``bench-presets``."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from kvpack import cli
from kvpack.output import add_json, print_report, progress


def parser() -> argparse.ArgumentParser:
    """The parser of ``python -m benchmarks``."""
    result = argparse.ArgumentParser(prog="benchmarks", description="Measure kvpack on this machine.", allow_abbrev=False)
    kinds = result.add_subparsers(title="measurements", metavar="WHAT", required=True)
    for add in (_add_fidelity, _add_overview, _add_pages, _add_decode, _add_presets):
        add(kinds)
    return result


def main(argv: list[str] | None = None) -> int:
    """Run one measurement, with the exit codes and the messages of the command ``kvpack``."""
    return cli.main(argv, parser)


def _add_fidelity(kinds: Any) -> None:
    fidelity = kinds.add_parser(
        "fidelity",
        help="the papers' own figures, measured and published",
        description="Measure the papers' errors, rates and ablations on packed streams, and compare them with the published figures.",
    )
    papers = ("octopus", "hqmq", "turboangle", "oscar")
    fidelity.add_argument("--only", action="append", choices=papers, help="one paper's figures; may be repeated (default: all)")
    fidelity.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the keys and the rotations (default: 0)")
    fidelity.add_argument("--quick", action="store_true", help="use fewer keys and seeds: takes seconds, with more scatter")
    add_json(fidelity)
    fidelity.set_defaults(run=run_fidelity)


def run_fidelity(arguments: argparse.Namespace) -> int:
    """Measure and print the tables; return 1 when a figure differs for no known reason."""
    from . import fidelity

    settings = fidelity.Settings(arguments.seed, arguments.quick)
    with progress("fidelity", arguments) as callback:
        report = fidelity.run(arguments.only or (), settings, progress=callback)
    print_report(report, fidelity.show, arguments)
    return int("differs" in report["verdicts"])


def _add_overview(kinds: Any) -> None:
    overview = kinds.add_parser(
        "overview",
        help="draw the reports of quality and kernels as one picture",
        description="Draw overview.svg from the quality.json and kernels.json that bench quality and bench kernels --sweep wrote.",
    )
    overview.add_argument("folder", metavar="DIR", help="the folder that holds the reports; the picture is written there")
    add_json(overview)
    overview.set_defaults(run=run_overview)


def run_overview(arguments: argparse.Namespace) -> int:
    """Draw the picture and print its path."""
    from . import overview

    path = overview.run(arguments.folder)
    print_report({"picture": path}, lambda report: print(report["picture"]), arguments)
    return 0


def _add_pages(kinds: Any) -> None:
    pages = kinds.add_parser(
        "pages",
        help="an engine's pages to rows and back, compared with the kernels alone on the CPU, and with a copy",
        description="Time jobs of pages to rows and back on the CPU in one thread, compared with the kernels on one page and with a copy; "
        "with --device cuda in the memory of a CUDA device, compared with a copy.",
    )
    pages.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the pages are (default: cpu)")
    pages.add_argument("--pages", type=int, metavar="N", help="pages of a job (default: 16 on the CPU, 64 on a CUDA device)")
    pages.add_argument(
        "--recipe",
        action="append",
        metavar="RECIPE",
        help="a recipe to measure; may be repeated (default: 8 on the CPU, 18 on a CUDA device)",
    )
    pages.add_argument("--repeats", type=int, default=5, metavar="N", help="report the median of N timings on the CPU (default: 5)")
    add_json(pages)
    pages.set_defaults(run=run_pages)


def run_pages(arguments: argparse.Namespace) -> int:
    """Measure pages of an engine."""
    from . import device_pages, pages

    count, recipes = arguments.pages, arguments.recipe
    with progress("pages", arguments) as callback:
        if arguments.device == "cuda":
            report = device_pages.run(
                device_pages.PAGES if count is None else count,
                recipes or device_pages.ALL_RECIPES,
                progress=callback,
            )
        else:
            count = pages.PAGES if count is None else count
            report = pages.run(count, recipes or pages.RECIPES, repeats=arguments.repeats, progress=callback)
    print_report(report, device_pages.show if arguments.device == "cuda" else pages.show, arguments)
    return 0


def _add_decode(kinds: Any) -> None:
    decode = kinds.add_parser(
        "decode",
        help="decoding files of the codec transform on one core, compared with its products alone",
        description="Time the decoding of caches of the codec transform, of random values as the basis describes them, on one core, "
        "compared with the products and the symbols that it cannot do without.",
    )
    decode.add_argument("--basis", required=True, metavar="FILE", help="a basis with frames (kvpack calibrate makes one)")
    decode.add_argument("--bits", action="append", type=float, metavar="N", help="bits per value; may be repeated (default: 0.3, 0.6, 1)")
    decode.add_argument("--tokens", type=int, default=3840, metavar="N", help="tokens of the caches (default: 3840)")
    decode.add_argument("--repeats", type=int, default=5, metavar="N", help="report the median of N timings (default: 5)")
    add_json(decode)
    decode.set_defaults(run=run_decode)


def run_decode(arguments: argparse.Namespace) -> int:
    """Measure and print the table."""
    from . import decode

    with progress("decode", arguments) as callback:
        report = decode.run(arguments.basis, arguments.bits or decode.BITS, arguments.tokens, repeats=arguments.repeats, progress=callback)
    print_report(report, decode.show, arguments)
    return 0


def _add_presets(kinds: Any) -> None:
    presets = kinds.add_parser(
        "presets",
        help="what kvpack's own presets lose on a model, as parts of what the papers' recipes lose",
        description="Measure kvpack's own presets and the papers' recipes in windows of a text, and compare their losses.",
    )
    presets.add_argument("--model", required=True, metavar="DIR", help="the model's folder, or demo")
    presets.add_argument("--text", required=True, metavar="FILE", help="a text that the basis was not made of")
    presets.add_argument("--out", required=True, metavar="DIR", help="results of each window; those that are there are not measured again")
    presets.add_argument("--basis", metavar="FILE", help="the model's basis (kvpack calibrate --balanced-only --widths 2)")
    presets.add_argument("--windows", type=int, default=8, metavar="N", help="windows, spread evenly over the text (default: 8)")
    presets.add_argument("--tokens", type=int, default=3840, metavar="N", help="tokens packed in each window (default: 3840)")
    presets.add_argument("--processes", type=int, default=1, metavar="N", help="windows measured at once (default: 1)")
    presets.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cpu, in float32, or cuda, in bfloat16 (default: cpu)")
    presets.add_argument("--twin", type=float, metavar="C", help="measure the twin of bench quality --twin C")
    presets.add_argument("--offset", type=float, metavar="C", help="move keys as bench quality --offset C does")
    add_json(presets)
    presets.set_defaults(run=run_presets)


def run_presets(arguments: argparse.Namespace) -> int:
    """Measure and print the table."""
    from . import presets

    model = None if arguments.model == "demo" else arguments.model
    settings = presets.Settings(
        model,
        arguments.text,
        arguments.out,
        arguments.basis,
        arguments.windows,
        arguments.tokens,
        arguments.device,
        arguments.twin,
        arguments.offset,
    )
    with progress("presets", arguments) as callback:
        report = presets.run(settings, arguments.processes, progress=callback)
    print_report(report, presets.show, arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
