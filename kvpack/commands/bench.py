"""kvpack bench: measurements on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvpack.output import add_json, print_report, progress

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
    io.add_argument("--recipe", action="append", metavar="RECIPE", help="a recipe to measure; may be repeated (default: one per family)")
    io.add_argument("--repeats", type=int, default=5, metavar="N", help="timings whose median is reported (default: 5)")
    io.add_argument("--folder", metavar="DIR", help="write the files here (default: a temporary folder)")
    add_json(io)
    io.set_defaults(run=run_io)
    _add_quality(kinds)
    _add_fidelity(kinds)
    _add_kernels(kinds)
    _add_overview(kinds)
    _add_store(kinds)


def _add_quality(kinds: Any) -> None:
    quality = kinds.add_parser(
        "quality",
        help="what packing costs a model: perplexity, divergence, errors, recall",
        description="Run a model over packed files of its own KV caches, and compare it with itself over the uncompressed cache.",
    )
    quality.add_argument("--model", metavar="DIR", help="a transformers causal language model; bytes are tokens without a tokenizer")
    quality.add_argument("--text", metavar="FILE", help="the text that it reads (default: the demo's text; its model without --model)")
    quality.add_argument("--recipe", action="append", metavar="RECIPE", help="a recipe to measure; may be repeated (default: the papers')")
    quality.add_argument("--tokens", type=int, metavar="N", help="of a window (default: 4096, or what the model and the text have)")
    quality.add_argument("--score", type=int, metavar="N", help="the window's last tokens, scored over what is packed (default: 512)")
    quality.add_argument("--windows", type=int, metavar="N", help="of the text (default: 12, or what the text has)")
    quality.add_argument("--needles", type=int, metavar="N", help="prompts with 5 needles, for models of bytes (default: 8 or what fits)")
    quality.add_argument("--twin", type=float, metavar="C", help="multiply two pairs of key channels a head by C, the function unchanged")
    quality.add_argument("--seed", type=int, default=0, metavar="N", help="of the windows, the needles and the twin (default: 0)")
    quality.add_argument("--out", metavar="DIR", help="write the picture and the report here: quality.png, quality.svg, quality.json")
    add_json(quality)
    quality.set_defaults(run=run_quality)


def _add_fidelity(kinds: Any) -> None:
    fidelity = kinds.add_parser(
        "fidelity",
        help="the papers' own figures, measured and published",
        description="Measure the papers' errors, rates and ablations with the codecs on packed streams, beside the published figures.",
    )
    papers = ("octopus", "hqmq", "turboangle", "oscar")
    fidelity.add_argument("--only", action="append", choices=papers, help="one paper's figures; may be repeated (default: all)")
    fidelity.add_argument("--seed", type=int, default=0, metavar="N", help="of the keys and the rotations (default: 0)")
    fidelity.add_argument("--quick", action="store_true", help="fewer keys and seeds: seconds, and more scatter")
    add_json(fidelity)
    fidelity.set_defaults(run=run_fidelity)


def _add_kernels(kinds: Any) -> None:
    kernels = kinds.add_parser(
        "kernels",
        help="attention over packed rows on a CUDA device, beside the best bf16 attention; encoding and unpacking",
        description="Time a decode step over packed rows on a CUDA device, beside SDPA and kvpack's own attention over bf16, "
        "and encoding and unpacking, beside a copy.",
    )
    kernels.add_argument("--shape", action="append", metavar="SHAPE", help="A, B, C, D or BxHqxHkvxDxT; may be repeated (default: all)")
    kernels.add_argument(
        "--recipe", action="append", metavar="RECIPE", help="a recipe to measure; may be repeated (default: one per codec)"
    )
    kernels.add_argument("--only", choices=("attention", "encode"), help="measure this part alone")
    kernels.add_argument("--sweep", action="store_true", help="measure contexts of 1,024 to 262,144 tokens as well")
    kernels.add_argument("--out", metavar="DIR", help="write the report, and the picture of the sweep, here: kernels.json, .png, .svg")
    add_json(kernels)
    kernels.set_defaults(run=run_kernels)


def _add_overview(kinds: Any) -> None:
    overview = kinds.add_parser(
        "overview",
        help="draw the reports of quality and kernels as one picture",
        description="Draw overview.svg from the quality.json and kernels.json that bench quality and bench kernels --sweep wrote.",
    )
    overview.add_argument("folder", metavar="DIR", help="the folder of the reports, which gets the picture")
    add_json(overview)
    overview.set_defaults(run=run_overview)


def _add_store(kinds: Any) -> None:
    store = kinds.add_parser(
        "store",
        help="match, load, put and get on a prefix store",
        description="Time match, load, put and get on a prefix store, beside plain reads and a store of bf16 safetensors.",
    )
    store.add_argument("--recipe", default="octopus-3", metavar="RECIPE", help="of what is stored (default: octopus-3)")
    store.add_argument("--layers", type=int, default=32, metavar="N", help="of what is loaded, 8 heads of dim 128 (default: 32)")
    store.add_argument("--chunks", type=int, default=16, metavar="N", help="of 256 tokens that are loaded (default: 16)")
    store.add_argument("--entries", type=int, action="append", metavar="N", help="a size to measure at (default: 1000, 10000, 100000)")
    store.add_argument("--repeats", type=int, default=5, metavar="N", help="timings whose median is reported (default: 5)")
    store.add_argument("--folder", metavar="DIR", help="put the stores here (default: a temporary folder)")
    add_json(store)
    store.set_defaults(run=run_store)


def run_store(arguments: argparse.Namespace) -> int:
    """Measure and print the tables."""
    from kvpack.bench import store, store_tables

    with progress("bench store", arguments) as callback:
        report = store.run(
            arguments.recipe,
            layers=arguments.layers,
            chunks=arguments.chunks,
            entries=arguments.entries or store.ENTRIES,
            repeats=arguments.repeats,
            folder=arguments.folder,
            progress=callback,
        )
    print_report(report, store_tables.show, arguments)
    return 0


def run_io(arguments: argparse.Namespace) -> int:
    """Measure and print one table."""
    from kvpack.bench import io
    from kvpack.coding.recipes import parse_recipe

    recipes = arguments.recipe or list(io.RECIPES)
    for recipe in recipes:
        parse_recipe(recipe)
    with progress("bench io", arguments) as callback:
        report = io.run(
            io.source(arguments.model, arguments.text, arguments.tokens, arguments.synthetic),
            recipes,
            repeats=arguments.repeats,
            folder=arguments.folder,
            progress=callback,
        )
    print_report(report, io.show, arguments)
    return 0


def run_quality(arguments: argparse.Namespace) -> int:
    """Measure, print one table and write the picture."""
    from kvpack.models import transformers_library

    # Refuses with a message where transformers is missing; what follows imports it.
    transformers_library()
    from kvpack.bench import quality

    settings = quality.Settings(arguments.tokens, arguments.score, arguments.windows, arguments.needles, arguments.twin, arguments.seed)
    with progress("bench quality", arguments) as callback:
        report = quality.run(
            arguments.model,
            arguments.text,
            arguments.recipe or list(quality.RECIPES),
            settings,
            out=arguments.out,
            progress=callback,
        )
    print_report(report, quality.show, arguments)
    return 0


def run_fidelity(arguments: argparse.Namespace) -> int:
    """Measure and print the tables; 1 when a figure differs for no known reason."""
    from kvpack.bench import fidelity

    settings = fidelity.Settings(arguments.seed, arguments.quick)
    with progress("bench fidelity", arguments) as callback:
        report = fidelity.run(arguments.only or (), settings, progress=callback)
    print_report(report, fidelity.show, arguments)
    return int("differs" in report["verdicts"])


def run_kernels(arguments: argparse.Namespace) -> int:
    """Measure and print one table a shape, and one of encoding."""
    from kvpack.bench import kernels

    with progress("bench kernels", arguments) as callback:
        report = kernels.run(
            arguments.shape or list(kernels.SHAPES),
            arguments.recipe,
            parts=(arguments.only,) if arguments.only else kernels.PARTS,
            sweep=arguments.sweep,
            out=arguments.out,
            progress=callback,
        )
    print_report(report, kernels.show, arguments)
    return 0


def run_overview(arguments: argparse.Namespace) -> int:
    """Draw the picture and print its path."""
    from kvpack.bench import overview

    path = overview.run(arguments.folder)
    print_report({"picture": path}, lambda report: print(report["picture"]), arguments)
    return 0
