"""kvpack bench: run benchmarks on this machine."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

from kvpack.output import add_json, parse_seed, print_report, progress

from .dense import DTYPES

MODEL_HELP = (
    "a transformers causal language model, by its folder or its name on the hub; without a tokenizer, its tokens are bytes "
    "(default: the demo's model)"
)
DEMO = "demo"
"""Name with which bench quality selects the demo's model."""

TEXT_HELP = "the text that the model reads (default: the demo's text)"


def add_command(commands: Any) -> None:
    parser = commands.add_parser("bench", help="measure on this machine", description="Measure kvpack on this machine.")
    kinds = parser.add_subparsers(title="measurements", metavar="WHAT", required=True)
    io = kinds.add_parser(
        "io",
        help="time saving and loading a KV cache, compared with files of dense values and a memory copy",
        description="Measure how long it takes to save, load and attend to one KV cache, and the steps in between, in one thread, compared "
        "with safetensors and a memory copy.",
    )
    source = io.add_mutually_exclusive_group()
    source.add_argument("--model", metavar="MODEL", help="measure the KV cache of this model (default with --text: the demo's)")
    source.add_argument(
        "--synthetic",
        metavar="LxBxHxTxD",
        help="measure Gaussian values: layers x batch x heads x tokens x dim (default: 4x1x8x4096x128)",
    )
    io.add_argument("--text", metavar="FILE", help="the model's input (default: the demo's text)")
    io.add_argument("--tokens", type=int, metavar="N", help="tokens of the model's input (default: 4096, or all of a shorter text)")
    io.add_argument("--recipe", action="append", metavar="RECIPE", help="a recipe to measure; may be repeated (default: one per family)")
    io.add_argument("--repeats", type=int, default=5, metavar="N", help="report the median of N timings (default: 5)")
    io.add_argument("--folder", metavar="DIR", help="write the files to this folder (default: a temporary one)")
    io.add_argument(
        "--cold",
        action="store_true",
        help="also time loads of files that are not in the page cache, compared with fio's direct reads from the same disk if fio is "
        "installed",
    )
    add_json(io)
    io.set_defaults(run=run_io)
    _add_quality(kinds)
    _add_attend(kinds)
    _add_kernels(kinds)
    _add_store(kinds)
    _add_serve(kinds)


def _add_quality(subparsers: Any) -> None:
    quality = subparsers.add_parser(
        "quality",
        help="measure what packing costs a model: perplexity, divergence, errors, recall",
        description="Run a model over packed files of its own KV caches, and compare it with itself over the uncompressed cache.",
    )
    quality.add_argument(
        "--model",
        metavar="MODEL",
        help="a transformers causal language model, by its folder or its name on the hub; without a tokenizer, its tokens are bytes. "
        "'demo' is the demo's small model (default: SmolLM2-135M-Instruct, which `python -m kvpack.bench.real_model` downloads)",
    )
    quality.add_argument(
        "--text", metavar="FILE", help="the text that the model reads, not its calibration text (default: prose, code and a long "
        "text that come with kvpack, or the demo's)",
    )  # fmt: skip
    quality.add_argument("--recipe", action="append", metavar="RECIPE", help="a recipe to measure; may be repeated (default: several)")
    quality.add_argument(
        "--basis",
        metavar="FILE",
        help="the basis of recipes such as klt-1.75, and of kvpack-2 to kvpack-4; kvpack calibrate makes one (default: for the default "
        "model, the one next to it, but not for kvpack-2 to kvpack-4)",
    )
    quality.add_argument("--tokens", type=int, metavar="N", help="tokens per window (default: 1024, or fewer if they do not fit)")
    quality.add_argument("--score", type=int, metavar="N", help="score the last N tokens of each window (default: 256)")
    quality.add_argument(
        "--step", type=int, default=32, metavar="N", help="pass the model at most N of the scored tokens at once (default: 32)"
    )
    quality.add_argument("--windows", type=int, metavar="N", help="number of windows of the text (default: 8, or as many as fit)")
    quality.add_argument(
        "--reference", default="fp8", metavar="RECIPE", help="also show every divergence as a multiple of this recipe's (default: fp8)"
    )
    quality.add_argument(
        "--max-kl", type=float, default=0.005, metavar="X", help="the verdict's limit of KL divergence, in nats (default: 0.005)"
    )
    quality.add_argument(
        "--needles",
        type=int,
        metavar="N",
        help="number of prompts of 1,024 and of 2,048 tokens, each with a passkey, or with 5 key lines for a byte-level model (default: "
        "8, or as many as fit)",
    )
    quality.add_argument(
        "--generate", type=int, default=768, metavar="N", help="measure the divergence along N generated tokens; 0 for none (default: 768)"
    )
    _add_model_options(quality)
    quality.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="device of the model: cpu (float32) or cuda (bfloat16) (default: cpu)"
    )
    quality.add_argument(
        "--seed", type=parse_seed, default=0, metavar="N", help="random seed for windows, needles, twins and generated text (default: 0)"
    )
    quality.add_argument("--out", metavar="DIR", help="write quality.json, quality.png and quality.svg to this folder")
    add_json(quality)
    quality.set_defaults(run=run_quality)


def _add_model_options(quality: Any) -> None:
    quality.add_argument(
        "--twin",
        type=float,
        metavar="C",
        help="measure a twin of the model, in which the keys of two channel pairs per head are C times as large and the queries 1/C times",
    )
    quality.add_argument(
        "--offset",
        type=float,
        metavar="C",
        help="add a constant to every key in an eighth of the channels, C times the channel's standard deviation; attention weights stay "
        "the same",
    )
    quality.add_argument(
        "--insert",
        metavar="TOKEN",
        help="put this token, such as '<|endoftext|>', in the middle of the packed part of every window, as an attention sink",
    )
    quality.add_argument(
        "--calibrated-on",
        choices=("prose", "code"),
        default="prose",
        help="use the default model's basis calibrated on TEXT, which `python -m kvpack.bench.real_model --calibrate-on TEXT` makes; with "
        "code, code is not scored (default: prose)",
    )


def _add_attend(subparsers: Any) -> None:
    attend = subparsers.add_parser(
        "attend",
        help="time attention over packed rows on the CPU, compared with bf16 and float32",
        description="Time one query over packed rows on the CPU in one thread, compared with matrix products and SDPA over dense rows.",
    )
    attend.add_argument(
        "--tokens",
        type=int,
        action="append",
        metavar="N",
        help="a context length to measure, in tokens; may be repeated (default: 1024, 16384 and 65536)",
    )
    attend.add_argument("--recipe", action="append", metavar="RECIPE", help="a recipe to measure; may be repeated (default: nine presets)")
    attend.add_argument("--repeats", type=int, default=5, metavar="N", help="report the median of N timings (default: 5)")
    add_json(attend)
    attend.set_defaults(run=run_attend)


def _add_kernels(subparsers: Any) -> None:
    kernels = subparsers.add_parser(
        "kernels",
        help="time attention over packed rows on a CUDA device, compared with the best bf16 attention, and encoding and unpacking",
        description="Time a decode step over packed rows on a CUDA device, compared with SDPA and kvpack's own attention over bf16, "
        "and encoding and unpacking, compared with a copy.",
    )
    kernels.add_argument("--shape", action="append", metavar="SHAPE", help="A to F, or BxHqxHkvxDxT; may be repeated (default: all)")
    kernels.add_argument(
        "--recipe",
        action="append",
        metavar="RECIPE",
        help="a recipe to measure; klt=63211000:53100000 (the widths of each run of keys and values) and transform=0.6:head (bits per "
        "value, and the scope of frames) use a basis of random numbers; may be repeated (default: one per codec)",
    )
    kernels.add_argument("--only", choices=("attention", "encode", "unpack", "queries"), help="measure only this part of the benchmark")
    kernels.add_argument("--peers", action="store_true", help="time FlashInfer over bf16 and fp8 pages as well, if it is installed")
    kernels.add_argument("--sweep", action="store_true", help="also measure contexts of 1,024 to 262,144 tokens")
    kernels.add_argument("--out", metavar="DIR", help="write kernels.json to this folder")
    add_json(kernels)
    kernels.set_defaults(run=run_kernels)


def _add_serve(subparsers: Any) -> None:
    serve = subparsers.add_parser(
        "serve",
        help="time a model's decode steps and its first token after a stored prefix, and measure its memory, compared with a "
        "DynamicCache",
        description="Time a model of a known shape, or of a configuration, with random weights: decode steps, eager and in a CUDA graph, "
        "and the first token after a prefix, recomputed or from files; on a CPU, a small model in one thread, by its process time.",
    )
    serve.add_argument(
        "--shape",
        metavar="SHAPE",
        help="llama-3-8b, qwen3-4b, gemma-3-12b, small, small-sliding, a name on the hub, or the path of a config.json or its folder "
        "(default: llama-3-8b, on a CPU small)",
    )
    serve.add_argument("--layers", type=int, metavar="N", help="use only N layers of the shape")
    serve.add_argument(
        "--dtype", choices=list(DTYPES), help="dtype of weights, keys and values (default: the configuration's, otherwise bf16)"
    )
    serve.add_argument("--recipe", action="append", metavar="RECIPE", help="a recipe to measure; may be repeated (default: three)")
    serve.add_argument(
        "--decode",
        action="append",
        metavar="BxT",
        help="time decode steps of a batch of B sequences after T tokens; may be repeated (default: several)",
    )
    serve.add_argument(
        "--prefix", action="append", type=int, metavar="T", help="time the first token after a stored prefix of T tokens; may be repeated"
    )
    serve.add_argument("--folder", metavar="DIR", help="write the files to this folder (default: a temporary one)")
    serve.add_argument("--out", metavar="DIR", help="write serve.json to this folder")
    add_json(serve)
    serve.set_defaults(run=run_serve)


def run_serve(arguments: argparse.Namespace) -> int:
    """Run ``bench serve``. Raises InvalidParameter if a value of ``--decode`` is not two numbers."""
    from kvpack.bench import serve, serve_tables
    from kvpack.formats.errors import InvalidParameter

    contexts = None
    if arguments.decode is not None:
        contexts = []
        for text in arguments.decode:
            batch, _, tokens = text.partition("x")
            if not (batch.isdecimal() and tokens.isdecimal()):
                raise InvalidParameter(f"--decode is {text!r}, expected a batch size and a number of tokens, such as 8x16384")
            contexts.append((int(batch), int(tokens)))
    with progress("bench serve") as callback:
        report = serve.run(
            arguments.shape, arguments.recipe, contexts, arguments.prefix, arguments.layers, arguments.folder, arguments.out, callback,
            dtype=arguments.dtype,
        )  # fmt: skip
    return print_report(report, serve_tables.show, arguments)


def _add_store(subparsers: Any) -> None:
    store = subparsers.add_parser(
        "store",
        help="time match and load on a prefix store; with --location, everything on a store of many entries",
        description="Time match and load on a prefix store, compared with reads and bf16 safetensors files, or with --location, the "
        "methods and commands of a store of many entries.",
    )
    store.add_argument("--recipe", metavar="RECIPE", help="the recipe of the stored caches (default: octopus-3; with --location, bf16)")
    store.add_argument("--layers", type=int, default=32, metavar="N", help="number of layers, each with 8 heads of dim 128 (default: 32)")
    store.add_argument("--chunks", type=int, default=16, metavar="N", help="number of chunks of 256 tokens to load (default: 16)")
    store.add_argument("--repeats", type=int, default=5, metavar="N", help="report the median of N timings (default: 5)")
    store.add_argument("--folder", metavar="DIR", help="create the stores in this folder (default: a temporary one)")
    store.add_argument("--location", metavar="STORE", help="fill a folder or a server with --entries small entries, and measure there")
    store.add_argument("--entries", type=int, metavar="N", help="with --location: the number of entries (default: 10000)")
    store.add_argument(
        "--row",
        action="append",
        metavar="ROW",
        help="with --location: measure only this, such as match; may be repeated (default: everything)",
    )
    add_json(store)
    store.set_defaults(run=run_store)


def run_store(arguments: argparse.Namespace) -> int:
    from kvpack.bench import store, store_scale
    from kvpack.formats.errors import InvalidParameter

    if arguments.location is not None:
        entries = store_scale.ENTRIES if arguments.entries is None else arguments.entries
        recipe = arguments.recipe or store_scale.RECIPE
        with progress("put entries") as callback:
            scale = store_scale.run(arguments.location, entries, recipe, arguments.row, callback)
        return print_report(scale, store_scale.show, arguments)
    if arguments.row is not None or arguments.entries is not None:
        option = "--entries" if arguments.row is None else "--row"
        raise InvalidParameter(f"{option} is set without --location: add --location with the store to measure")
    with progress("bench store") as callback:
        report = store.run(
            arguments.recipe or store.RECIPE,
            layers=arguments.layers,
            chunks=arguments.chunks,
            repeats=arguments.repeats,
            folder=arguments.folder,
            progress=callback,
        )
    return print_report(report, store.show, arguments)


def run_io(arguments: argparse.Namespace) -> int:
    from kvpack.bench import io, io_cold
    from kvpack.coding.recipes import parse_recipe

    if arguments.cold:
        for recipe in arguments.recipe or ():
            parse_recipe(recipe)
        with progress("bench io --cold") as callback:
            cache = io.read_source(arguments.model, arguments.text, arguments.tokens, arguments.synthetic)
            report = io_cold.run(cache, arguments.recipe, repeats=arguments.repeats, folder=arguments.folder, progress=callback)
        return print_report(report, io_cold.show, arguments)
    recipes = arguments.recipe or list(io.RECIPES)
    for recipe in recipes:
        parse_recipe(recipe)
    with progress("bench io") as callback:
        report = io.run(
            io.read_source(arguments.model, arguments.text, arguments.tokens, arguments.synthetic),
            recipes,
            repeats=arguments.repeats,
            folder=arguments.folder,
            progress=callback,
        )
    return print_report(report, io.show, arguments)


def run_quality(arguments: argparse.Namespace) -> int:
    from kvpack.models import import_transformers

    # Raises a clear error if transformers is missing, before the next line imports it.
    import_transformers()
    from kvpack.bench import quality, real_model
    from kvpack.formats.errors import InvalidParameter

    model = None if arguments.model == DEMO else arguments.model or real_model.existing_folder()
    default_basis = None
    if arguments.basis is None and arguments.model is None and arguments.twin is None and arguments.offset is None:
        default_basis = real_model.basis_path(arguments.calibrated_on)
    elif arguments.calibrated_on != "prose":
        raise InvalidParameter("--calibrated-on works only with the unmodified default model: omit --model, --basis, --twin and --offset")
    settings = quality.QualitySettings(
        arguments.tokens, arguments.score, arguments.windows, arguments.needles, arguments.twin, arguments.seed, arguments.step,
        arguments.offset, arguments.generate, arguments.device, arguments.insert,
        tuple(name for name in quality.OTHER_TEXTS if name != arguments.calibrated_on), arguments.max_kl,
    )  # fmt: skip
    with progress("bench quality") as callback:
        bases = {"basis": arguments.basis, "default_basis": default_basis}
        recipes = arguments.recipe or [*quality.RECIPES, *(quality.CALIBRATED if any(bases.values()) else ())]
        inputs = (model, arguments.text, recipes, settings)
        show_line = None if arguments.json else partial(print, flush=True)
        report = quality.run(*inputs, **bases, reference=arguments.reference, out=arguments.out, progress=callback, show_line=show_line)
    return print_report(quality.round_numbers(report), quality.show, arguments)


def run_kernels(arguments: argparse.Namespace) -> int:
    """Run ``bench kernels`` and print one table per shape, and one for encoding."""
    from kvpack.bench import kernels

    with progress("bench kernels") as callback:
        report = kernels.run(
            arguments.shape or list(kernels.SHAPES),
            arguments.recipe,
            parts=(arguments.only,) if arguments.only else kernels.PARTS,
            sweep=arguments.sweep,
            peers=arguments.peers,
            out=arguments.out,
            progress=callback,
        )
    return print_report(report, kernels.show, arguments)


def run_attend(arguments: argparse.Namespace) -> int:
    from kvpack.bench import attend

    with progress("bench attend") as callback:
        report = attend.run(
            arguments.tokens or attend.TOKENS, arguments.recipe or attend.RECIPES, repeats=arguments.repeats, progress=callback
        )
    return print_report(report, attend.show, arguments)
