"""The command line of the developers' measurements. ``make bench-NAME`` runs the measurement NAME, such as ``fidelity``."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from kvpack import cli
from kvpack.commands.bench import MODEL_HELP
from kvpack.commands.dense import DTYPES
from kvpack.output import add_json, print_report, progress


def parser() -> argparse.ArgumentParser:
    """Return the parser of ``python -m benchmarks``."""
    result = argparse.ArgumentParser(prog="benchmarks", description="Measure kvpack on this machine.", allow_abbrev=False)
    kinds = result.add_subparsers(title="measurements", metavar="WHAT", required=True)
    for add in (
        _add_fidelity, _add_overview, _add_kernel_results, _add_pages, _add_decode,
        _add_presets, _add_resume, _add_weights, _add_viewer, _add_device_files,
    ):
        add(kinds)
    return result


def main(argv: list[str] | None = None) -> int:
    """Run one measurement, with the exit codes and error messages of the ``kvpack`` command."""
    return cli.main(argv, parser)


def _add_fidelity(kinds: Any) -> None:
    fidelity = kinds.add_parser(
        "fidelity",
        help="measured and published numbers of the papers",
        description="Measure the papers' errors, rates and ablations with packed streams, and compare them with the published numbers.",
    )
    papers = ("octopus", "hqmq", "turboangle", "oscar")
    fidelity.add_argument("--only", action="append", choices=papers, help="a paper; may be repeated (default: all)")
    fidelity.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the keys and the rotations (default: 0)")
    fidelity.add_argument("--quick", action="store_true", help="use fewer keys and seeds: takes seconds, with more scatter")
    add_json(fidelity)
    fidelity.set_defaults(run=run_fidelity)


def run_fidelity(arguments: argparse.Namespace) -> int:
    """Measure and print the tables. Return 1 if a figure differs from the paper's for no known reason."""
    from . import fidelity

    settings = fidelity.Settings(arguments.seed, arguments.quick)
    with progress("fidelity") as callback:
        report = fidelity.run(arguments.only or (), settings, progress=callback)
    print_report(report, fidelity.show, arguments)
    return int("differs" in report["verdicts"])


def _add_overview(kinds: Any) -> None:
    overview = kinds.add_parser(
        "overview",
        help="plot the reports of quality and kernels",
        description="Draw overview.svg from the quality.json and kernels.json that bench quality and bench kernels --sweep wrote.",
    )
    overview.add_argument("folder", metavar="DIR", help="folder of the reports, to which the plot is written")
    add_json(overview)
    overview.set_defaults(run=run_overview)


def run_overview(arguments: argparse.Namespace) -> int:
    """Draw the plot and print its path."""
    from . import overview

    path = overview.run(arguments.folder)
    return print_report({"picture": path}, lambda report: print(report["picture"]), arguments)


def _add_kernel_results(kinds: Any) -> None:
    results = kinds.add_parser(
        "kernel-results",
        help="write the page of kernel results",
        description="Write a Markdown page of the kernels.json that kvpack bench kernels --only attention --peers --out DIR wrote.",
    )
    results.add_argument("report", metavar="FILE", help="the kernels.json")
    results.add_argument("--out", required=True, metavar="FILE", help="the page")
    results.set_defaults(run=run_kernel_results)


def run_kernel_results(arguments: argparse.Namespace) -> int:
    """Write the page."""
    from . import kernel_results

    kernel_results.write(arguments.report, arguments.out)
    return 0


def _add_pages(kinds: Any) -> None:
    pages = kinds.add_parser(
        "pages",
        help="packing and unpacking of an engine's pages, compared with the kernels alone on the CPU and with a copy",
        description="Time jobs that pack and unpack pages on the CPU in one thread, compared with the kernels on one page and with a copy; "
        "with --device cuda in the memory of a CUDA device, compared with a copy.",
    )
    pages.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="device of the pages (default: cpu)")
    pages.add_argument("--pages", type=int, metavar="N", help="pages per job (default: 16 on the CPU, 64 on a CUDA device)")
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
    """Measure an engine's page jobs, and print the table."""
    from . import device_pages, pages

    count, recipes = arguments.pages, arguments.recipe
    with progress("pages") as callback:
        if arguments.device == "cuda":
            report = device_pages.run(
                device_pages.PAGES if count is None else count,
                recipes or device_pages.ALL_RECIPES,
                progress=callback,
            )
        else:
            count = pages.PAGES if count is None else count
            report = pages.run(count, recipes or pages.RECIPES, repeats=arguments.repeats, progress=callback)
    return print_report(report, device_pages.show if arguments.device == "cuda" else pages.show, arguments)


def _add_decode(kinds: Any) -> None:
    decode = kinds.add_parser(
        "decode",
        help="decoding files of the codec transform on one core, compared with its products alone",
        description="Time the decoding of caches of the codec transform, of random values as the basis describes them, on one core, "
        "compared with the products and the symbols that it cannot do without.",
    )
    decode.add_argument("--basis", required=True, metavar="FILE", help="a basis with frames (created by kvpack calibrate)")
    decode.add_argument("--bits", action="append", type=float, metavar="N", help="bits per value; may be repeated (default: 0.3, 0.6, 1)")
    decode.add_argument("--tokens", type=int, default=3840, metavar="N", help="tokens per cache (default: 3840)")
    decode.add_argument("--repeats", type=int, default=5, metavar="N", help="report the median of N timings (default: 5)")
    add_json(decode)
    decode.set_defaults(run=run_decode)


def run_decode(arguments: argparse.Namespace) -> int:
    """Measure and print the table."""
    from . import decode

    with progress("decode") as callback:
        report = decode.run(arguments.basis, arguments.bits or decode.BITS, arguments.tokens, repeats=arguments.repeats, progress=callback)
    return print_report(report, decode.show, arguments)


def _add_presets(kinds: Any) -> None:
    presets = kinds.add_parser(
        "presets",
        help="losses of kvpack's own presets on a model, relative to those of the papers' recipes",
        description="Measure kvpack's own presets and the papers' recipes in windows of a text, and compare their losses.",
    )
    presets.add_argument("--model", required=True, metavar="DIR", help="the model's folder, or demo")
    presets.add_argument("--text", required=True, metavar="FILE", help="a text that was not used to calibrate the basis")
    presets.add_argument("--out", required=True, metavar="DIR", help="results of each window; rows with results are not measured again")
    presets.add_argument("--basis", metavar="FILE", help="the model's basis (kvpack calibrate --balanced-only)")
    presets.add_argument("--windows", type=int, default=8, metavar="N", help="number of windows of the text (default: 8)")
    presets.add_argument("--tokens", type=int, default=3840, metavar="N", help="tokens packed in each window (default: 3840)")
    presets.add_argument("--processes", type=int, default=1, metavar="N", help="windows measured at once (default: 1)")
    presets.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cpu (float32) or cuda (bfloat16) (default: cpu)")
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
    with progress("presets") as callback:
        report = presets.run(settings, arguments.processes, progress=callback)
    return print_report(report, presets.show, arguments)


def _add_resume(kinds: Any) -> None:
    resume = kinds.add_parser(
        "resume",
        help="the first token after a stored prompt, for recurrent layers and sliding windows, compared with computing the prompt",
        description="Time the first token after a stored prompt, compared with computing the prompt, and count the store's "
        "bytes per token, for models with recurrent layers or sliding windows, of a known shape or a configuration, with random weights.",
    )
    resume.add_argument(
        "--shape",
        action="append",
        metavar="SHAPE",
        help="a shape of bench serve, qwen3.5-9b, small-hybrid, a name on the hub, or the path of a config.json or its "
        "folder; may be repeated (default: qwen3.5-9b and gemma-3-12b, on a CPU the small ones)",
    )
    resume.add_argument("--layers", type=int, metavar="N", help="use only N layers of the shape")
    resume.add_argument("--dtype", choices=list(DTYPES), help="dtype of weights, keys and values (default: as for bench serve)")
    resume.add_argument("--recipe", action="append", metavar="RECIPE", help="a recipe of the store; may be repeated (default: two)")
    resume.add_argument(
        "--prefix", action="append", type=int, metavar="T", help="a prompt of T tokens; may be repeated (default: 8192 and 32768)"
    )
    resume.add_argument("--every", type=int, default=4096, metavar="N", help="store states after every N tokens (default: 4096)")
    resume.add_argument("--folder", metavar="DIR", help="create the stores in this folder (default: a temporary one)")
    add_json(resume)
    resume.set_defaults(run=run_resume)


def run_resume(arguments: argparse.Namespace) -> int:
    """Measure, and print one table per shape."""
    from . import resume

    with progress("resume") as callback:
        report = resume.run(
            arguments.shape, arguments.recipe, arguments.prefix, every=arguments.every, layers=arguments.layers, dtype=arguments.dtype,
            folder=arguments.folder, progress=callback,
        )  # fmt: skip
    return print_report(report, resume.show, arguments)


def _add_weights(kinds: Any) -> None:
    weights = kinds.add_parser(
        "weights",
        help="digest of all weights of a model, compared with a decode step, and of a checkpoint when it is first used",
        description="Time the digest of all weights of a model, which names it in files and stores, compared with a decode step, and the "
        "digest of its checkpoint, which an engine's first start computes.",
    )
    weights.add_argument("--model", metavar="MODEL", help=MODEL_HELP)
    weights.add_argument("--shape", metavar="SHAPE", help="a shape of bench serve, such as llama-3-8b, with random bf16 weights")
    weights.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="device of the weights (default: cpu)")
    weights.add_argument("--repeats", type=int, default=5, metavar="N", help="report the median of N timings (default: 5)")
    add_json(weights)
    weights.set_defaults(run=run_weights)


def run_weights(arguments: argparse.Namespace) -> int:
    """Measure and print the tables."""
    from . import weights

    with progress("weights") as callback:
        report = weights.run(arguments.model, arguments.shape, arguments.device, repeats=arguments.repeats, progress=callback)
    return print_report(report, weights.show, arguments)


def _add_viewer(kinds: Any) -> None:
    viewer = kinds.add_parser(
        "viewer",
        help="decoding a layer with the JavaScript reader",
        description="Time the JavaScript reader in Node on one core, for a layer of every preset.",
    )
    viewer.add_argument("--recipe", action="append", metavar="RECIPE", help="a recipe to measure; may be repeated (default: all presets)")
    viewer.add_argument("--tokens", type=int, default=32_768, metavar="N", help="tokens in the layer (default: 32768)")
    add_json(viewer)
    viewer.set_defaults(run=run_viewer)


def run_viewer(arguments: argparse.Namespace) -> int:
    """Measure and print the table. Return 1 if decoding keys or values takes too long."""
    from . import viewer

    with progress("viewer") as callback:
        report = viewer.run(arguments.recipe or viewer.RECIPES, arguments.tokens, progress=callback)
    print_report(report, viewer.show, arguments)
    return int(bool(viewer.slow(report)))


def _add_device_files(kinds: Any) -> None:
    files = kinds.add_parser(
        "device-files",
        help="loads to a CUDA device and saves from it, compared with a pinned copy and a write of the same bytes",
        description="Time loads of files to a CUDA device and saves from it, compared with a pinned copy and a write of the same bytes.",
    )
    files.add_argument("--synthetic", metavar="LxBxHxTxD", help="Gaussian values: layers x batch x heads x tokens x dim")
    files.add_argument("--recipe", action="append", metavar="RECIPE", help="a recipe; may be repeated (default: those of bench io)")
    files.add_argument("--repeats", type=int, default=5, metavar="N", help="report the median of N timings (default: 5)")
    files.add_argument("--folder", metavar="DIR", help="write the files to this folder (default: a temporary one)")
    files.add_argument("--device", default="cuda", metavar="DEVICE", help="the CUDA device (default: cuda)")
    add_json(files)
    files.set_defaults(run=run_device_files)


def run_device_files(arguments: argparse.Namespace) -> int:
    """Measure and print the table."""
    from kvpack.bench import io

    from . import device_files

    cache = io.read_source(None, None, None, arguments.synthetic)
    with progress("device-files") as callback:
        report = device_files.run(
            cache, arguments.recipe or io.RECIPES, device=arguments.device, repeats=arguments.repeats, folder=arguments.folder,
            progress=callback,
        )  # fmt: skip
    return print_report(report, device_files.show, arguments)


if __name__ == "__main__":
    sys.exit(main())
