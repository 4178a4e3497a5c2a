"""kvpack import and kvpack export: convert prompt caches of mlx-lm and slot files of llama.cpp to and from kvpack files."""

from __future__ import annotations

import argparse
import re
from typing import Any

from kvpack.formats.errors import InvalidParameter
from kvpack.output import add_json, print_report, progress

from .convert import RECIPE_HELP, add_basis_option, add_write_options, parse_recipe_option, save
from .dense import DTYPES
from .outputs import add_force, check_output

_WINDOW = re.compile(r"(?P<layers>[0-9]{1,4}(,[0-9]{1,4})*)=(?P<tokens>[0-9]{1,9})", re.ASCII)
_HEADS = re.compile(r"[0-9]{1,5}(,[0-9]{1,5})*", re.ASCII)


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "import",
        help="read a prompt cache of mlx-lm or a slot of llama.cpp",
        description="Read a prompt cache of mlx-lm, or a slot that llama-server saved, into a kvpack file.",
    )
    parser.add_argument("input", metavar="IN", help="the prompt cache or slot")
    parser.add_argument("output", metavar="OUT", help="the kvpack file to write")
    parser.add_argument("--recipe", default="raw", help=f"{RECIPE_HELP} (default: raw, which keeps every bit)")
    add_basis_option(parser)
    parser.add_argument("--kv-heads", metavar="N[,N...]", help="slots only: the number of KV heads, one for all layers or one per layer")
    _add_window_option(parser, "of slots: ")
    parser.add_argument("--latents", action="store_true", help="slots only: the model has multi-head latent attention (MLA)")
    add_write_options(parser)
    add_json(parser)
    parser.set_defaults(run=import_)
    parser = commands.add_parser(
        "export",
        help="write a prompt cache for mlx-lm or a slot for llama.cpp",
        description="Write the cache of a kvpack file as a prompt cache of mlx-lm, or one that came from llama.cpp as a slot.",
    )
    parser.add_argument("input", metavar="FILE", help="a kvpack file")
    parser.add_argument("output", metavar="OUT", help="the prompt cache or slot to write")
    parser.add_argument(
        "--to", choices=["mlx-lm", "llama.cpp"], default="mlx-lm", help="the program that will read the file (default: mlx-lm)"
    )
    add_basis_option(parser)
    parser.add_argument("--dtype", choices=list(DTYPES), help="round values to this dtype (default: their stored dtype)")
    _add_window_option(parser, "")
    parser.add_argument(
        "--transposed",
        action=argparse.BooleanOptionalAction,
        help="slots only: values are transposed, as without flash attention (default: as in the imported slot)",
    )
    parser.add_argument("--streams", type=int, metavar="N", help="slots only: streams of the context (default: as in the imported slot)")
    add_force(parser)
    add_json(parser)
    parser.hints["--format"] = "--to names the program that will read it"
    parser.set_defaults(run=export)


def import_(arguments: argparse.Namespace) -> int:
    from kvpack.integrations.llama_cpp import import_slot, is_state_file
    from kvpack.integrations.mlx_lm import import_prompt_cache

    windows = _parse_window_options(arguments)
    check_output(arguments, arguments.output, arguments.input, arguments.basis, arguments.recipe)
    recipe = parse_recipe_option(arguments, reads_cache=False)
    slot = is_state_file(arguments.input)
    if slot and not _HEADS.fullmatch(arguments.kv_heads or ""):
        problem = "missing" if arguments.kv_heads is None else f"{arguments.kv_heads!r:.80}"
        raise InvalidParameter(
            f"--kv-heads is {problem}: llama.cpp slots do not record the number of KV heads, so pass it, for example --kv-heads 8"
        )
    if not slot and (arguments.kv_heads or windows or arguments.latents):
        raise InvalidParameter(f"{arguments.input} is not a sequence state of llama.cpp: omit --kv-heads, --window and --latents")
    with progress("encode") as callback:
        if slot:
            heads = [int(count) for count in arguments.kv_heads.split(",")]
            options = {"kv_heads": heads[0] if len(heads) == 1 else heads, "windows": windows, "latents": arguments.latents}
            cache = import_slot(arguments.input, recipe, progress=callback, **options)
        else:
            cache = import_prompt_cache(arguments.input, recipe, progress=callback)
    save(cache, arguments)
    return 0


def export(arguments: argparse.Namespace) -> int:
    import kvpack
    from kvpack.integrations.llama_cpp import export_slot
    from kvpack.integrations.mlx_lm import export_prompt_cache

    windows, slot = _parse_window_options(arguments), arguments.to == "llama.cpp"
    check_output(arguments, arguments.output, arguments.input, arguments.basis)
    if not slot and (arguments.transposed is not None or arguments.streams is not None):
        raise InvalidParameter("--transposed and --streams require --to llama.cpp: add it, or omit them")
    # Read a copy, because truncating a mapped file would kill this process.
    cache = kvpack.load(arguments.input, copy=True, basis=arguments.basis)
    with progress("decode") as callback:
        if slot:
            layout = {"transposed": arguments.transposed, "streams": arguments.streams}
            size = export_slot(cache, arguments.output, dtype=arguments.dtype, windows=windows, progress=callback, **layout)
        else:
            size = export_prompt_cache(cache, arguments.output, dtype=arguments.dtype, windows=windows, progress=callback)
    text = f"{arguments.output}: {size:,} bytes"
    return print_report({"file": arguments.output, "bytes": size, "layers": len(cache), "tokens": cache.tokens}, text, arguments)


def _add_window_option(parser: argparse.ArgumentParser, prefix: str) -> None:
    parser.add_argument(
        "--window",
        metavar="LAYERS=TOKENS",
        action="append",
        default=[],
        help=f"{prefix}the sliding window of some layers, such as 0,2,4=512",
    )


def _parse_window_options(arguments: argparse.Namespace) -> dict[int, int]:
    windows: dict[int, int] = {}
    for text in arguments.window:
        if (match := _WINDOW.fullmatch(text)) is None:
            raise InvalidParameter(f"--window is {text!r:.80}, expected layers and a number of tokens, such as 0,2,4=512")
        windows |= dict.fromkeys(map(int, match["layers"].split(",")), int(match["tokens"]))
    return windows
